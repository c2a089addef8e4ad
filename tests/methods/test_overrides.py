"""Claims about overrides: each does what it says or is refused in a sentence, and none is lost."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from helpers import WORDS, answered, dealt, truth

from saccade.core.errors import MethodError
from saccade.drafting.drafters import EarlyExit, ModelDrafter, SelfDrafter
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel, serial
from saccade.drafting.shapes.policies import Best, Chain, Static
from saccade.drafting.views.basic import Pruned, Several
from saccade.methods import (
    METHODS,
    SCHEDULES,
    SHAPES,
    VIEWS,
    WEIGHTINGS,
    choices,
    resolve,
    sage,
    specvlm,
)
from saccade.methods.specvlm import TwoStage
from saccade.methods.tabed import Equal, Grid, Inverse


def is_a_sentence(message: str) -> bool:
    return len(message) > 20 and "\n" not in message and not re.search(r"\.\s+[A-Z]", message)


def refused(name: str) -> str:
    """Why a name does not resolve."""
    with pytest.raises(MethodError) as caught:
        resolve(name)
    assert is_a_sentence(str(caught.value)), str(caught.value)
    return str(caught.value)


# -- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("chain-1", Chain(1)),
        ("chain-63", Chain(63)),
        ("best-1", Best(1)),
        ("best-64", Best(64)),
        ("paths-0", Static(((0,),))),
        ("paths-0,1,0.0", Static(((0,), (1,), (0, 0)))),
        ("paths-0.0,1,0", Static(((0,), (1,), (0, 0)))),
        ("paths-0,0,0.3,0.3", Static(((0,), (0, 3)))),
        ("paths-" + ",".join(str(i) for i in range(64)), Static(tuple((i,) for i in range(64)))),
        *SHAPES.items(),
    ],
)
def test_a_shape_is_what_it_says(value, shape):
    """Claim: sizes at both ends of what is allowed, paths in any order and twice, and every named
    shape resolve to exactly that shape, and to nothing else of the method.
    """
    recipe = resolve(f"sd/shape={value}")
    assert recipe == replace(METHODS["sd"], name=recipe.name, shape=shape)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("best-0", "best-N with N from 1 to 64"),
        ("best-65", "best-N with N from 1 to 64"),
        ("best", "best-N with N from 1 to 64"),
        ("best-", "best-N with N from 1 to 64"),
        ("best--1", "best-N with N from 1 to 64"),
        ("best-1.5", "best-N with N from 1 to 64"),
        ("chain-1e1", "chain-N with N from 1 to 63"),
        ("paths-", "cannot read the tree paths-"),
        ("paths", "cannot read the tree paths-"),
        ("paths-a", "cannot read the tree paths-a"),
        ("paths-+1_0,0", "cannot read the tree"),
        ("paths-٣,0", "cannot read the tree"),
        ("paths-0,,1", "cannot read the tree"),
        ("paths-0.0", r"no parent \[0\]"),
        ("paths-0,1.0", r"no parent \[1\]"),
        ("paths-0,-1", "ranks from 0"),
        ("paths-0,0.", "cannot read the tree"),
        ("paths-" + ",".join(str(i) for i in range(65)), "65 nodes is too large: 64 at most"),
        ("tree-25", "unknown shape 'tree-25' .*known: .*best-N"),
        ("", "unknown shape ''"),
    ],
)
def test_a_shape_that_means_nothing_is_refused(value, says):
    """Claim: a shape that cannot be read names what would work, in a sentence."""
    assert re.search(says, refused(f"sd/shape={value}"))


@pytest.mark.parametrize(
    "name",
    ["sd/shape=chain-²", "sd/shape=best-²", "tabed/weights=kl-²", f"sd/shape=chain-{'9' * 5000}"],
)
def test_odd_digits_are_refused_like_any_typo(name):
    """Claim: a superscript, or more digits than a number may have, is a MethodError, no crash."""
    assert refused(name)


# -- every other axis --------------------------------------------------------------------------


def test_lambda_is_specvlms_share():
    """Claim: ``lambda`` is stage I's share, at both ends, wherever SpecVLM's view is, and changes
    nothing else."""
    for name, share in (
        ("specvlm/lambda=0.4", 0.4),
        ("specvlm/lambda=0", 0.0),
        ("specvlm-self/lambda=1", 1.0),
        ("sage/lambda=0.25", 0.25),
        ("pearl-specvlm/lambda=0.25", 0.25),
        ("sd/view=specvlm/lambda=0.3", 0.3),
        ("sd/lambda=0.3/view=specvlm", 0.3),
    ):
        images = sage.IMAGE_KEEP if name.startswith("sage") else None
        expected = replace(specvlm.VIEW, select=TwoStage(share), images=images)
        assert resolve(name).view == expected
    both = resolve("specvlm/lambda=0.4/keep=0.2").view
    assert both == replace(specvlm.VIEW, select=TwoStage(0.4), keep=0.2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sd/lambda=0.4", "lambda is SpecVLM's: it needs view=specvlm"),
        ("hippo/lambda=0.4", "needs view=specvlm"),
        ("std/lambda=0.4", "needs view=specvlm"),
        ("tabed/lambda=0.4", "needs view=specvlm"),
        ("specvlm/view=uniform/lambda=0.4", "needs view=specvlm"),
        ("specvlm/lambda=1.5", "not a share between 0 and 1"),
        ("specvlm/lambda=-0.1", "not a share between 0 and 1"),
        ("specvlm/lambda=nan", "not a share between 0 and 1"),
        ("specvlm/lambda=", "not a share between 0 and 1"),
        ("hippo/early=now", "unknown early 'now'; known: wait, superset, all"),
        ("tabed/early=all", "early needs another view than"),
        ("streaming/early=all", "early needs another view than"),
        ("pearl-specvlm/early=superset", "use early=all or early=wait"),
        ("pearl/early=superset", "use early=all or early=wait"),
        ("hippo/view=uniform/early=superset", "use early=all or early=wait"),
        ("hippo/early=all/positions=repacked", "early start keeps original positions"),
        ("sd/weights=kl", "needs an ensemble"),
        ("tabed/weights=kl-0", "1 position or more"),
        ("tabed/weights=hope", "unknown weights 'hope'"),
        ("tabed/view=full+half", "unknown view 'half'"),
        ("tabed/view=full+", "unknown view ''"),
        ("sd/view=full+per-head", "reads the target's keys"),
        ("sd/schedule=both", "unknown schedule 'both'; known: serial, parallel"),
        ("sd-tree/schedule=parallel", "after each token whether to draft another .* shape=chain-N"),
        ("specvlm/schedule=parallel", "after each token whether to draft another .* shape=chain-N"),
        ("hippo/shape=tree", "after each token whether to draft another .* shape=chain-N"),
        ("hippo/shape=auto", "after each token whether to draft another"),
        ("specvlm-self/schedule=parallel", "needs a draft model in a process of its own"),
        ("std/schedule=parallel", "needs a draft model in a process of its own"),
        ("layerskip/schedule=parallel", "needs a draft model in a process of its own"),
        ("lookup/schedule=parallel", "needs a draft model in a process of its own"),
        ("hippo/drafter=self", "needs a draft model in a process of its own"),
        ("tabed/schedule=parallel", "needs a draft model in a process of its own"),
        ("lookup/shape=tree", "lookup needs a shape that drafts a chain"),
        ("ar/schedule=parallel", "drafts nothing"),
    ],
)
def test_an_override_that_cannot_be_is_refused_in_a_sentence(name, says):
    """Claim: what does not go together raises MethodError when it is named, saying what would."""
    assert re.search(says, refused(name))


def test_early_is_the_views():
    """Claim: ``early`` is set on the view of a parallel method, and on nothing else."""
    for name, early in (
        ("hippo/early=wait", "wait"),
        ("hippo/early=superset", "superset"),
        ("hippo/early=all", "all"),
        ("pearl/early=all", "all"),
        ("pearl-specvlm/early=all", "all"),
        ("sd/schedule=parallel/view=uniform/early=all", "all"),
    ):
        recipe = resolve(name)
        base = resolve(re.sub("/early=.*", "", name))
        assert isinstance(recipe.view, Pruned) and recipe.view.early == early
        assert recipe == replace(base, name=name, view=replace(base.view, early=early))
    assert resolve("pearl/early=all").view == METHODS["pearl-syn"].view


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("equal", Equal()),
        ("kl", Grid("kl")),
        ("tvd", Grid("tvd")),
        ("matches", Grid("matches")),
        ("kl-7", Grid("kl", 7)),
        ("matches-1", Grid("matches", 1)),
        ("inverse", Inverse("kl")),
        ("inverse-tvd", Inverse("tvd")),
        ("inverse-tvd-12", Inverse("tvd", 12)),
        ("inverse-3", Inverse("kl", 3)),
        ("softmax", Inverse("kl", as_printed=True)),
        ("softmax-tvd-3", Inverse("tvd", 3, as_printed=True)),
        ("inverse-3/tau=0.5", Inverse("kl", 3, 0.5)),
        ("softmax/tau=2", Inverse("kl", None, 2.0, as_printed=True)),
    ],
)
def test_weights_are_what_they_say(value, rule):
    """Claim: kind and window are read apart, also where the kind has a dash of its own, and with
    the temperature they are told back as they were given."""
    assert resolve(f"tabed/weights={value}").drafter == Ensemble(rule)
    axes = choices(resolve(f"tabed/weights={value}"))
    given, _, tau = value.partition("/tau=")
    assert (axes["weights"], axes.get("tau", "")) == (given, tau)
    grids = {"equal", "kl", "tvd", "matches"}
    assert {*WEIGHTINGS} == grids | {"inverse", "inverse-tvd", "softmax", "softmax-tvd"}


@pytest.mark.parametrize("name", ["tabed/tau=2", "sd/tau=2", "tabed-mtcp/tau=0", "tabed/tau=x"])
def test_a_temperature_is_mtcps_and_above_zero(name):
    """Claim: tau elsewhere, or of 0 or no number, is refused in a sentence that names it."""
    with pytest.raises(MethodError, match="tau"):
        resolve(name)


def test_several_views_make_an_ensemble():
    """Claim: ``a+b`` is the views in that order; a draft model over several is an ensemble, equal
    until told otherwise, on any shape."""
    recipe = resolve("sd/view=full+text+uniform")
    assert recipe.view == Several((VIEWS["full"], VIEWS["text"], VIEWS["uniform"]))
    assert recipe.drafter == Ensemble(Equal()) and recipe.shape == Chain(5)
    tree = resolve("specvlm/view=specvlm+none/drafter=ensemble/weights=kl-5")
    assert tree.drafter == Ensemble(Grid("kl", 5)) and tree.shape == METHODS["specvlm"].shape
    assert resolve("tabed/view=text+full").view != resolve("tabed").view


def test_a_schedule_brings_the_process_it_needs():
    """Claim: a draft model works in a process of its own exactly where the schedule is parallel."""
    for name in (
        "sd",
        "sd/view=specvlm",
        "specvlm/shape=chain-5",
        "ar/drafter=model/shape=chain-3",
    ):
        recipe = resolve(f"{name}/schedule=parallel")
        assert recipe.schedule is parallel and recipe.drafter is WorkerDrafter
        assert resolve(name).drafter is ModelDrafter
    for name in ("hippo", "pearl", "pearl-specvlm"):
        recipe = resolve(f"{name}/schedule=serial")
        assert recipe.schedule is serial and recipe.drafter is ModelDrafter
        assert resolve(f"{name}/schedule=serial/shape=tree").shape == SHAPES["tree"]


@pytest.mark.parametrize(
    "name",
    [
        "specvlm/early=all",  # a serial draft waits for the target in any case
        "sd/view=holistic/early=superset",
        "pearl-syn/schedule=serial",
        "lookup/view=uniform",  # prompt lookup reads no view
        "sd/drafter=worker",  # a worker is what the parallel schedule makes of a model
    ],
)
def test_no_override_is_taken_and_then_ignored(name):
    """Claim: an override that cannot do anything is refused, not dropped."""
    assert refused(name)


@pytest.mark.parametrize("axis", ["drafter", "view", "keep", "shape", "schedule", "early"])
def test_an_axis_is_given_once(axis):
    """Claim: the same axis twice is refused by name, whatever the values."""
    value = dict(drafter="model", view="uniform", keep="0.2", shape="tree", schedule="serial")
    override = f"{axis}={value.get(axis, 'wait')}"
    assert "given twice" in refused(f"specvlm/{override}/{override}")


# -- from a recipe to words and back -----------------------------------------------------------


def name_from_choices(recipe: Recipe) -> str:
    """The name that a recipe's own words make, over a base with everything else."""
    words = choices(recipe)
    if words == {"drafter": "none"}:
        return "ar"
    return "/".join(["sd", *(f"{axis}={value}" for axis, value in words.items())])


def anonymous(recipe: Recipe) -> Recipe:
    return replace(recipe, name="", about="", study="")


@pytest.mark.parametrize("name", METHODS)
def test_a_system_in_the_words_of_its_axes_is_that_system(name):
    """Claim: ``choices`` written as overrides of another method resolves to the same recipe."""
    recipe = METHODS[name]
    assert anonymous(resolve(name_from_choices(recipe))) == anonymous(recipe)


@pytest.mark.parametrize(
    "name",
    [
        "specvlm/keep=0.25/shape=chain-7/view=uniform",
        "specvlm/shape=fit",
        "hippo/early=all/keep=0.3",
        "sd/view=holistic-no-spa/schedule=parallel",
        "tabed/weights=tvd",
        "tabed-mtcp/view=full+pooled+text/weights=inverse-tvd",
        "std/keep=0.2",
        "specvlm/lambda=0.4",
        "specvlm/positions=repacked",
        "sd/shape=best-8",
        "sd/shape=paths-0,1,0.0",
        "tabed/weights=kl-4",
    ],
)
def test_an_override_can_be_written_again_from_its_recipe(name):
    """Claim: a name made of the recipe's own choices resolves to the same recipe."""
    recipe = resolve(name)
    assert anonymous(resolve(name_from_choices(recipe))) == anonymous(recipe)


def test_control_other_methods_have_other_words():
    """Control: no two systems but those that are one on every axis share their words."""
    words = [tuple(choices(recipe).items()) for recipe in METHODS.values()]
    assert len(set(words)) == len(words)


# -- every view under every drafter ------------------------------------------------------------

DRAFTERS: dict[str, Any] = {"model": ModelDrafter, "self": SelfDrafter, "early-exit": EarlyExit}
REFUSED = {
    ("per-head", "model"): "picks among the target's own keys; use drafter=self",
    ("per-head", "early-exit"): "picks among the target's own keys; use drafter=self",
    ("pages", "model"): "picks among the target's own keys; use drafter=self",
    ("pages", "early-exit"): "picks among the target's own keys; use drafter=self",
    **{
        (view, drafter): "needs a view that is a choice among the rows of the prompt"
        for view in ("dycoke", "pooled", "pooled-after", "text", "caption")
        for drafter in ("self", "early-exit")
    },
}


@pytest.mark.representatives(4)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("of", "family"),
    dealt(product(VIEWS, ("model", "self")), ("qwen2_5_vl", "llava_onevision", "llama")),
)
def test_a_view_under_a_drafter_is_lossless_or_refused(of, family):
    """Claim: every view either drafts to the end for that drafter, losslessly, or is refused by
    name before any work. None falls back to plain decoding on the way.
    """
    view, drafter = of
    name = f"sd/view={view}/drafter={drafter}"
    if of in REFUSED:
        assert REFUSED[of] in refused(name)
        return
    result = answered(family, name, count=10)
    assert result.ids == truth(family)[:10]
    assert result.fallback_reason is None and result.method == name
    assert sum(len(round.tokens) for round in result.rounds) > 0
    assert result.draft_visual_tokens is not None
    assert result.draft_visual_tokens <= result.visual_tokens


@pytest.mark.parametrize(("view", "drafter"), [*product(VIEWS, DRAFTERS)])
def test_a_view_and_a_drafter_resolve_to_themselves_or_are_refused(view, drafter):
    """Claim: the table above is the whole truth, early exit included."""
    name = f"sd/view={view}/drafter={drafter}"
    if (view, drafter) in REFUSED:
        assert REFUSED[view, drafter] in refused(name)
        return
    recipe = resolve(name)
    assert recipe.drafter is DRAFTERS[drafter] and recipe.view == VIEWS[view]


@pytest.mark.representatives(3)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "method",
    [
        "specvlm/lambda=0.2/keep=0.5",
        "sd/view=full+uniform+text/drafter=ensemble/weights=inverse-4",
        "tabed/shape=best-6",
        "tabed/shape=paths-0,1,0.0",
        "tabed/shape=sage-live",
        "hippo/schedule=serial",
        "std/view=uniform/keep=0.5/shape=tree",
    ],
)
def test_overrides_of_several_axes_run_losslessly(method):
    """Claim: what resolves runs: the oracle's answer, no fallback, something drafted."""
    result = answered("qwen2_5_vl", method, count=24, **WORDS)
    assert result.ids == truth("qwen2_5_vl")[:24] and result.fallback_reason is None
    assert result.acceptance_rate


def test_every_choice_of_an_axis_is_one_of_its_table():
    """Claim: the tables hold what the names above say, so that no axis goes untested."""
    assert set(SCHEDULES.values()) == {serial, parallel}
    assert {view for view, _ in REFUSED} <= set(VIEWS)
