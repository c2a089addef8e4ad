"""Claims about sampled answers of real (tiny) models, end to end through ``generate``.

Top-k 3 and top-p leave thirteen answers of four tokens, whose exact law the oracle enumerates,
with temperature and a penalty of repetitions as Hugging Face applies them. 320 answers at 12
degrees of freedom and alpha 1e-4 find a law 0.3 away in total variation with probability 0.99, the
slow tests' 3,200 one 0.1 away. ``auto`` and ``fit`` are given costs at which they draft.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import (
    WORDS,
    backbone,
    chi_square,
    few,
    left_padded,
    model_of,
    noisy,
    qwen25,
    text_input,
    timed_frames_input,
    video_input,
)
from torch import Tensor
from transformers.generation import logits_process as hf

import saccade
from lab.reference import Oracle
from saccade.core import verify as verify_module
from saccade.core.costs import Costs
from saccade.core.protocols import Repetition, State
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.drafting import drafters, repetitions
from saccade.drafting.ensemble import MixtureSession
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.auto import Auto
from saccade.drafting.views.basic import FULL
from saccade.methods import resolve
from saccade.model.cache import Cache, Pages

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = video_input(0, (1, 4, 4), before=2, after=3)
INPUTS_BY_FAMILY = {
    "qwen2_5_vl": INPUTS,
    "qwen3_5": timed_frames_input(22, (1, 4, 4), before=2, after=3),
    "gemma3": text_input(5, 12),  # Longer than the windows of its layers.
}
TOKENS, BATCH, CALLS, MANY, ALPHA = 4, 40, 8, 80, 1e-4
RULES = (
    hf.RepetitionPenaltyLogitsProcessor(0.6),
    hf.TemperatureLogitsWarper(1.6),
    hf.TopKLogitsWarper(3),
    hf.TopPLogitsWarper(0.75),
)
SETTINGS: dict[str, Any] = dict(
    do_sample=True,
    repetition_penalty=0.6,
    temperature=1.6,
    top_k=3,
    top_p=0.75,
    max_new_tokens=TOKENS,
    **WORDS,
)
# In bfloat16 a rounding decides what is left where probabilities add up to nearly top-p, or where
# the third and fourth token are nearly as likely. So its law has no top-p, and this is the model of
# forty whose third and fourth are furthest apart.
HALF_TOKENS, HALF_RULES, HALF_SEED = 3, RULES[:3], 38
HALF_SETTINGS = {**SETTINGS, "top_p": 1.0, "max_new_tokens": HALF_TOKENS}
COSTS = Costs((1, 64), (1.0, 1.1), 0.02)  # at which drafting pays
METHODS = (  # `make cases` has a tree and a process beside, the slow run the others.
    "sage",
    "hippo",
    "auto",
    "tabed",
    "sd/shape=fit",
    "sd/shape=sage-live",
    "sd/shape=best-8",
    "sd/shape=chain-2",
    "layerskip/shape=chain-2",
    "sd/shape=paths-0,1,1.0,1.1",
)
REST = (
    "ar",
    "sd",
    "sd-tree",
    "specvlm",
    "specvlm-self",
    "fresh",
    "pages",
    "std",
    "lookup",
    "tabed-mtcp",
    "streaming",
)
HYBRID_METHODS = (
    "sd/shape=chain-2",
    "sd-tree",
    "sage",
    "specvlm",
    "specvlm-self",
    "layerskip/shape=chain-2",
    "sd/shape=best-8",
    "hippo",
    "pearl",
)


def method(name: str | Recipe) -> Recipe:
    if isinstance(name, Recipe):
        return name
    recipe = resolve(name)
    if name in ("auto", "sd/shape=fit"):
        return replace(recipe, shape=replace(recipe.shape, costs=COSTS))  # type: ignore[type-var]
    return recipe


@cache
def law(
    rules: Sequence[Any] = RULES,
    family: str = "qwen2_5_vl",
    dtype: torch.dtype = torch.float32,
    tokens: int = TOKENS,
    seed: int = 0,
) -> dict[tuple[int, ...], float]:
    """Every answer of so many tokens and its probability, by recomputing everything."""
    model = backbone(in_type(model_of(family)(seed), dtype))
    (prompt,) = model.prompts(INPUTS_BY_FAMILY[family])
    sampling = Sampling(True, tuple(rules))
    oracle = Oracle(model.model, [prompt], [sampling])
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for text, chance in chances.items():
            after = sampling.law(oracle.logits(0, text)[-1], [*prompt.full_ids.tolist(), *text])
            assert isinstance(after, Tensor)
            for token in after.nonzero().flatten().tolist():
                longer[*text, token] = chance * float(after[token])
        chances = longer
    return chances


def in_type(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model with weights of this type."""
    return copy.deepcopy(model).to(dtype)


def count_answers(
    answers: Iterable[tuple[int, ...]],
    target: Any,
    inputs: Any,
    recipe: Recipe,
    calls: int,
    arguments: Mapping[str, Any],
) -> Tensor:
    """How often each of these answers was sampled, and last how often any other."""
    cells = {answer: number for number, answer in enumerate(answers)}
    counts = torch.zeros(len(cells) + 1)
    batch = left_padded([inputs] * BATCH)
    tokens = arguments["max_new_tokens"]
    for seed in range(calls):
        out = saccade.generate(target, batch, method=recipe, seed=seed, **arguments)
        for answer in out[:, -tokens:].tolist():
            counts[cells.get(tuple(answer), len(cells))] += 1
    return counts


def p_value(
    name: str | Recipe,
    calls: int = CALLS,
    moved: float = 0.0,
    family: str = "qwen2_5_vl",
    **draft_arguments: Any,
) -> float:
    """Of the answers under the exact law, or one ``moved`` away from it in total variation."""
    exact = dict(law(family=family))
    make = model_of(family)
    target, draft = backbone(make()), backbone(noisy(make, 0, 0.1))
    arguments = {**SETTINGS, "draft": draft, **draft_arguments}
    counts = count_answers(exact, target, INPUTS_BY_FAMILY[family], method(name), calls, arguments)
    largest, second = sorted(exact, key=lambda answer: exact[answer])[:-3:-1]
    exact[largest] -= moved
    exact[second] += moved
    return chi_square(counts, torch.tensor([*exact.values(), 0.0], dtype=torch.double))


def test_the_exact_law_has_answers_enough():
    """Claim: there is something to tell apart, and each rule changes the law."""
    assert len(law()) >= 8 and max(law().values()) < 0.6
    for left_out in (0, 1, 3):  # without top-k there would be thousands
        assert law(RULES[:left_out] + RULES[left_out + 1 :]) != law(), left_out


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.extra) for name in METHODS[:2]),
        *few(METHODS[2:], 0),
    ],
)
def test_four_sampled_tokens_follow_the_exact_law(name):
    """Claim: drafted in whatever shape, by whomever and when, an answer is drawn from the target's
    own law. An answer outside these fails at once; a bent law with the power stated above.
    """
    assert p_value(name) > ALPHA


@dataclass(frozen=True)
class Copier(Auto):
    """Copies two tokens wherever the last one has occurred before, and else drafts."""

    def copy(self, state: State, repetition: Repetition) -> Tree:
        return replace(chain(repetition.tokens[:2]), match_length=repetition.match_length)


@pytest.mark.extra
def test_answers_with_copies_of_the_text_follow_the_exact_law(monkeypatch):
    """Claim: where some rounds copy and others draw, as the text decides, an answer is drawn from
    the target's own law. Control: a law three tenths away is found."""
    monkeypatch.setattr(repetitions, "SHORTEST_MATCH", 1)
    recipe = replace(resolve("auto"), shape=Copier(COSTS))
    assert p_value(recipe) > ALPHA
    assert p_value(recipe, moved=0.3) < ALPHA
    alone = replace(recipe, drafter=drafters.Copies, view=FULL)
    assert p_value(alone, draft=None) > ALPHA


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", few(("sd/shape=chain-2", "auto", "sage", "sd-tree"), 1))
@pytest.mark.parametrize("rounding", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("own", [True, False])
def test_a_draft_with_rounded_weights_bends_no_law(own, rounding, name):
    """Claim: what a draft with rounded weights drafts, another model or the target itself, is
    judged by the target's own law. Fails if the rounded copy verifies, or if a draft is judged by a
    law that it did not draw from. Half as many answers: what the target draws is tested above."""
    arguments = {"draft": None} if own else {}
    assert p_value(name, CALLS // 2, **arguments, draft_quantize=rounding) > ALPHA


@pytest.mark.extra
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["ar", "sd/shape=chain-2", "hippo"])
def test_in_bfloat16_answers_follow_the_law_of_the_models_own_logits(name, exact):
    """Claim: in bfloat16, drafted in whatever way, an answer is drawn from the law of the model's
    own logits in bfloat16, with `exact` and without: rounding moves a law by some hundredths and no
    more. Control: a law three tenths away is found."""
    half = torch.bfloat16
    law_in_half = law(HALF_RULES, dtype=half, tokens=HALF_TOKENS, seed=HALF_SEED)
    assert len(law_in_half) == 3**HALF_TOKENS
    models = qwen25(HALF_SEED), noisy(qwen25, HALF_SEED, 0.1)
    target, draft = (backbone(in_type(each, half)) for each in models)
    arguments = {**HALF_SETTINGS, "draft": draft, "exact": exact}
    counts = count_answers(law_in_half, target, INPUTS, method(name), CALLS, arguments)
    chances = torch.tensor([*law_in_half.values(), 0.0], dtype=torch.double)
    assert chi_square(counts, chances) > ALPHA
    likely = chances >= chances.topk(3).values[-1]
    share = float(chances[likely].sum())
    moved = torch.where(likely, chances * (1 - 0.3 / share), chances * (1 + 0.3 / (1 - share)))
    assert chi_square(counts, moved) < ALPHA


@pytest.mark.extra
@pytest.mark.parametrize("name", few(HYBRID_METHODS, 1))
def test_a_hybrids_sampled_tokens_follow_the_exact_law(name):
    """Claim: a target with recurrent layers is drawn from exactly too, over trees and chains and by
    both schedules. A state that a refused token left behind bends the law and fails, also with half
    of the answers, which take this family the longest."""
    assert p_value(name, CALLS // 2, family="qwen3_5") > ALPHA


@pytest.mark.extra
@pytest.mark.parametrize("name", ["sd/shape=chain-2", "sd-tree", "sage", "std", "hippo"])
def test_the_sampled_tokens_of_a_target_with_windows_follow_the_exact_law(name):
    """Claim: a target with sliding windows, over a prompt that is longer than they are, is drawn
    from exactly too. A window that counts a tree's nodes as text bends the law and fails."""
    assert p_value(name, CALLS // 2, family="gemma3") > ALPHA


@pytest.mark.extra
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_the_exact_law_of_every_family_has_answers_enough(family):
    """Claim: there is something to tell apart, and a law 0.3 away is found."""
    assert len(law(family=family)) >= 8 and max(law(family=family).values()) < 0.6
    assert p_value("ar", moved=0.3, family=family) < ALPHA


@pytest.mark.extra
def test_a_window_that_slides_bends_no_law(monkeypatch):
    """Claim: what is sampled while a self-draft's window slides, here at every token, is drawn from
    the target's own law. A draft that reads other keys is judged by the law it drew from."""
    slides = []
    forget = Cache.remove_rows
    monkeypatch.setattr(drafters, "SLIDE_TOKENS", 1)
    monkeypatch.setattr(Cache, "remove_rows", lambda *all: (slides.append(all), forget(*all))[1])
    assert p_value("streaming/keep=0.5/shape=chain-2") > ALPHA
    assert len(slides) > BATCH * CALLS


@pytest.mark.extra
def test_a_view_that_follows_the_answer_bends_no_law(monkeypatch):
    """Claim: what is sampled while a self-draft's keys are chosen anew every round, by what judged
    rows attended to, is drawn from the target's own law; its keys do change, in most answers."""
    moved = []
    exchange = Cache.exchange

    def watched(cache: Cache, other: Cache, old_rows: Tensor, rows: Tensor) -> Tensor:
        new_rows = exchange(cache, other, old_rows, rows)
        moved.append(not torch.equal(new_rows, old_rows))
        return new_rows

    monkeypatch.setattr(Cache, "exchange", watched)
    assert p_value("fresh/keep=0.5/shape=chain-2") > ALPHA
    assert sum(moved) > BATCH * CALLS / 2


@pytest.mark.extra
def test_keys_asked_for_at_every_step_bend_no_law(monkeypatch):
    """Claim: what is sampled from drafts whose every step reads other keys, by its own queries, is
    drawn from the target's own law; steps of a draft do read other pages than the one before."""
    steps: dict[tuple[int, int], list[Tensor]] = {}
    chosen = Pages.best_pages

    def watched(pages: Pages, layer: int, q: Tensor) -> Tensor:
        best_pages = chosen(pages, layer, q)
        steps.setdefault((id(pages), layer), []).append(best_pages)
        return best_pages

    monkeypatch.setattr(Pages, "best_pages", watched)
    assert p_value("pages/keep=0.4/page=2/shape=chain-2") > ALPHA
    each = [pair for choices in steps.values() for pair in pairwise(choices)]
    assert sum(not torch.equal(*pair) for pair in each) > len(each) / 4 > BATCH * CALLS / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, *REST])
def test_four_sampled_tokens_follow_the_exact_law_closely(name):
    """The claim above with 3,200 answers: finds 0.1 in total variation."""
    assert p_value(name, MANY) > ALPHA


@pytest.mark.extra
def test_the_methods_above_do_draft():
    """Claim: with the costs they are given, every method drafts and has tokens accepted."""
    draft = backbone(noisy(qwen25, 0, 0.1))
    for name in METHODS:
        result = saccade.run(
            backbone(qwen25()),
            INPUTS,
            draft=draft,
            method=method(name),
            seed=1,
            **{**SETTINGS, "max_new_tokens": 24},
        )
        assert result.fallback_reason is None
        assert any(round.tokens for round in result.rounds), name


@pytest.mark.extra
def test_control_a_law_0_3_away_is_found():
    """Control: the default's answers find 0.3."""
    assert p_value("ar", moved=0.3) < ALPHA


@pytest.mark.extra
def test_control_a_forgotten_residual_is_seen(monkeypatch):
    """Control: without the residual the same test must fail, end to end."""
    monkeypatch.setattr(verify_module, "residual", lambda p, q: p)
    assert p_value("sd/shape=chain-2") < ALPHA


@pytest.mark.extra
def test_control_a_misjudged_ensemble_is_seen_end_to_end(monkeypatch):
    """Control: judged by the law of the view that sees, a mixture with a blind one must fail."""
    mix = MixtureSession._mix

    def wrong(self: MixtureSession, request: int, parts: Any) -> Any:
        mixed = mix(self, request, parts)
        real = type(mixed).draw

        class OneViewsLaw(type(mixed)):  # type: ignore[misc]
            def draw(self, node: int, law: Any = None) -> Any:
                return real(self, node, law)[0], self.parts[0].law(node)

        return OneViewsLaw(**{f.name: getattr(mixed, f.name) for f in fields(mixed) if f.init})

    monkeypatch.setattr(MixtureSession, "_mix", wrong)
    assert p_value("tabed-mt/shape=chain-2", CALLS // 2) < ALPHA
