"""Claims about named methods: what a name means, and SpecVLM's equations by a plain loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import backbone, qwen25, video_input
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.core.errors import MethodError
from saccade.core.prompt import Prompt
from saccade.core.sampling import Sampling
from saccade.drafting.drafters import ModelDrafter, NoDraft, SelfDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Chain, Static
from saccade.drafting.views.basic import Pruned
from saccade.methods import METHODS, VIEWS, resolve, specvlm
from saccade.methods.specvlm import TREE, TwoStage
from saccade.model.session import Session


def test_every_system_resolves_to_itself():
    """Claim: a name without overrides is the recipe in the table, and each says what it is."""
    for name, recipe in METHODS.items():
        assert resolve(name) == recipe and recipe.name == name and recipe.about


def test_overrides_replace_one_axis_each():
    """Claim: an override changes its axis and no other; order does not matter; names are kept."""
    base = METHODS["specvlm"]
    recipe = resolve("specvlm/keep=0.25/shape=chain-7/view=uniform/drafter=self")
    other = resolve("specvlm/drafter=self/view=uniform/shape=chain-7/keep=0.25")
    assert recipe == replace(other, name=recipe.name)
    assert recipe.name == "specvlm/keep=0.25/shape=chain-7/view=uniform/drafter=self"
    assert recipe.drafter is SelfDrafter and recipe.shape == Chain(7)
    assert (recipe.view.name, recipe.view.keep) == ("uniform", 0.25)
    assert recipe.schedule is base.schedule and METHODS["specvlm"].view.keep == 0.1
    assert resolve("specvlm/positions=repacked").view.positions == "repacked"
    assert resolve("sd/view=random").view.keep == VIEWS["random"].keep
    assert resolve("ar/drafter=model/shape=chain-2").drafter is ModelDrafter


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("spec", "known methods: ar, sd, sd-tree"),
        ("", "unknown method"),
        ("sd/keep", "cannot read 'keep'"),
        ("sd/colour=red", "cannot read 'colour=red'.*drafter, weights, view, keep"),
        ("sd/shape=chain-2/shape=tree", "axis 'shape' is given twice"),
        ("sd/shape=chain-0", "chain-N with N from 1 to 63"),
        ("sd/shape=chain-64", "chain-N with N from 1 to 63"),
        ("sd/shape=star", "unknown shape 'star'; known: .*chain-N"),
        ("sd/view=half", "unknown view 'half'; known: full, none"),
        ("sd/keep=0.1", "keep needs another view than full: one of random"),
        ("sd/view=none/keep=0.1", "keep needs another view than none: one of random"),
        ("specvlm/keep=0", "keep=0 is not a share"),
        ("specvlm/keep=1.5", "keep=1.5 is not a share"),
        ("specvlm/keep=nan", "keep=nan is not a share"),
        ("specvlm/keep=ten", "keep=ten is not a share"),
        ("specvlm/positions=new", "unknown positions 'new'"),
        ("specvlm-self/positions=repacked", "own keys cannot be re-packed"),
        ("specvlm/schedule=both", "unknown schedule"),
        ("ar/shape=tree", "drafts nothing, so 'ar/shape=tree' overrides nothing"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_what_would_work(name, says):
    """Claim: a typo never silently runs another method."""
    with pytest.raises(MethodError, match=says):
        resolve(name)


def test_an_impossible_recipe_is_refused_when_it_is_built():
    """Claim: re-packed positions over the target's own keys raise before any model is loaded."""
    packed = Pruned("uniform", VIEWS["uniform"].select, positions="repacked")
    with pytest.raises(MethodError, match="cannot be re-packed"):
        Recipe("mine", "", SelfDrafter, Chain(3), serial, packed)
    assert Recipe("mine", "", ModelDrafter, Chain(3), serial, packed).drafts
    assert not Recipe("mine", "", NoDraft, Chain(0), serial).drafts


def test_the_tree_is_the_papers():
    """Claim: Fig. 9: 25 nodes, 4 / 8 / 8 / 3 / 2 by depth, each rank path once, parents there."""
    assert Counter(len(path) for path in TREE) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert len(set(TREE)) == 25
    for path in TREE:
        assert len(path) == 1 or path[:-1] in TREE
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in TREE, "a runner-up before the best"
    assert METHODS["specvlm"].shape == METHODS["sd-tree"].shape == Static(TREE)


def _prompt(seen: int) -> Prompt:
    visual = torch.tensor([False] + [True] * seen + [False])
    grid = torch.zeros(seen, 4, dtype=torch.long)
    grid[:, 1] = torch.arange(seen)
    return Prompt(
        full_ids=torch.zeros(seen + 2, dtype=torch.long),
        embeds=torch.zeros(seen + 2, 2),
        positions=torch.zeros(1, seen + 2, dtype=torch.long),
        visual=visual,
        fixed=torch.zeros_like(visual),
        grid=grid,
        places=torch.arange(seen + 2),
        next_position=seen + 2,
    )


def _by_hand(attention: list[float], share: float, budget: int, literal: bool) -> list[int]:
    """Eq. 4-7 as a loop over tokens: no tensor, no sort of ours."""
    total, mass, attended = sum(attention), 0.0, []
    left = list(range(len(attention)))
    while left and (literal or len(attended) < budget):
        if mass >= share * total:
            break
        best = left[0]
        for token in left:
            if attention[token] > attention[best]:
                best = token
        attended.append(best)
        left.remove(best)
        mass += attention[best]
    wanted = min(budget if literal else budget - len(attended), len(left))
    even = []
    for i in range(wanted):  # the middle of each of `wanted` equal stretches
        even.append(left[(2 * i + 1) * len(left) // (2 * wanted)])
    return sorted(attended + even)


ATTENTION = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 2.0]), min_size=1, max_size=20)


@settings(max_examples=120)
@given(
    attention=ATTENTION,
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    budget=st.integers(1, 20),
    literal=st.booleans(),
)
def test_two_stages_are_the_papers_equations(attention, share, budget, literal):
    """Claim: stage I and II keep what a plain loop over Eq. 4-7 keeps, ties and both readings of
    Eq. 7 included. Scores are few, so ties are everywhere.
    """
    budget = min(budget, len(attention))
    kept = TwoStage(share, literal)(_prompt(len(attention)), torch.tensor(attention), budget)
    assert kept.tolist() == _by_hand(attention, share, budget, literal)
    assert len(kept) == budget or literal


def test_control_one_stage_alone_keeps_other_tokens():
    """Control: without stage I, without stage II, or read literally, the kept set differs.

    So the test above has power: a system with a stage off cannot pass it.
    """
    generator = torch.Generator().manual_seed(0)
    target_attention = torch.rand(100, generator=generator) ** 4
    prompt = _prompt(100)
    both = TwoStage()(prompt, target_attention, 20).tolist()
    for other in (
        VIEWS["attention"].select(prompt, target_attention, 20),
        VIEWS["uniform"].select(prompt, target_attention, 20),
        TwoStage(follows_printed_equations=True)(prompt, target_attention, 20),
        TwoStage(share=0.4)(prompt, target_attention, 20),
    ):
        assert other.tolist() != both
    assert len(TwoStage(follows_printed_equations=True)(prompt, target_attention, 20)) > 20


def test_the_view_reads_the_targets_attention_of_this_prompt():
    """Claim: on a real prefill the view is Eq. 4-7 over the recorded mass, text rows all kept."""
    target = backbone(qwen25())
    prompts = target.prompts(video_input(grid=(4, 6, 8)))
    (prefill,) = Session(target, [Sampling()]).prefill(prompts, record=True)
    pruned = specvlm.VIEW(prefill, prompts[0])
    mean = [float(a) for a in prefill.mass.double().mean((0, 1))]
    first = int(prompts[0].visual.nonzero()[0])
    expected = [first + token for token in _by_hand(mean, 0.5, 5, False)]
    assert pruned.places[pruned.visual].tolist() == expected
