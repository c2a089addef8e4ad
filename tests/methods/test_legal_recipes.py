"""Claims about which parts make a recipe: what each needs, what the others offer, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from saccade.core.capabilities import (
    NO_CAPABILITIES,
    OFFERED_BY_ENGINE,
    Capability,
    find_unmet_needs,
)
from saccade.core.errors import MethodError
from saccade.core.protocols import CostedView, EarlyView, Refresh, Schedule, Shape, View
from saccade.drafting.drafters import Copies, EarlyExit, HeadDrafter, Lookup, SelfDrafter
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.shapes.auto import Auto
from saccade.drafting.shapes.fit import Fit
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views.baseline_pruning import Merged, Pooled
from saccade.drafting.views.basic import FULL, Pruned, Several, TextView
from saccade.methods import DRAFTERS, SCHEDULES, SHAPE_FAMILIES, SHAPES, VIEWS, resolve
from saccade.methods.hippo import FamilyChain
from saccade.methods.pages import ByPage
from saccade.methods.std import PerHead


def views() -> Iterator[View]:
    """Every registered view, and those that settings make of them."""
    for view in VIEWS.values():
        yield view
        if isinstance(view, Pruned):
            yield replace(view, early="all")
        if isinstance(view, Pruned) and view.settings >= {"positions"}:
            yield replace(view, positions="repacked")
        if isinstance(view, PerHead) or (isinstance(view, Pruned) and view.attention):
            yield replace(view, refresh=Refresh())
    yield Several((FULL, VIEWS["text"]))
    yield Several((FULL, VIEWS["specvlm"], VIEWS["pooled"]))


def shapes() -> Iterator[Shape]:
    yield from SHAPES.values()
    for family in SHAPE_FAMILIES.values():
        yield family.parse(family.examples[0])


def fits(drafter: Any, view: View, shape: Shape, schedule: Schedule) -> bool:
    """Which parts go together, written out by their classes."""
    picks_keys = isinstance(view, PerHead | ByPage) or vars(view).get("refresh") is not None
    is_chain = type(shape) in (Chain, FamilyChain)
    reads_target = drafter in (SelfDrafter, EarlyExit, HeadDrafter)
    if reads_target and isinstance(view, TextView | Merged | Pooled):
        return False  # These rows have neither keys nor hidden states in the target's cache.
    if reads_target and vars(view).get("positions") == "repacked":
        return False  # Cached keys are rotated to their positions already; so are a head's rows.
    if picks_keys and drafter is not SelfDrafter:
        return False
    if drafter is Lookup and not (is_chain and view.name == "full"):
        return False
    if drafter is Copies and not (isinstance(shape, Auto) and shape.copies and view.name == "full"):
        return False
    if vars(view).get("early", "wait") != "wait" and schedule is not parallel:
        return False
    if isinstance(drafter, Ensemble) != isinstance(view, Several):
        return False
    if (schedule is parallel) != (drafter is WorkerDrafter):
        return False
    return schedule is not parallel or is_chain or isinstance(shape, Fit)


def test_a_recipe_is_legal_exactly_where_needs_are_offered() -> None:
    """Claim: of all parts there are, those make a recipe that fit together by the rules written out
    above, and all others are refused in a sentence. Fails where a part states too much or too
    little. Control: both kinds are met by each drafter and schedule."""
    met = set()
    every = product([*DRAFTERS.values(), WorkerDrafter], views(), shapes(), SCHEDULES.values())
    for drafter, view, shape, schedule in every:
        is_legal = fits(drafter, view, shape, schedule)
        try:
            Recipe("any", "", drafter, shape, schedule, view)
        except MethodError as error:
            assert not is_legal, error
            assert re.fullmatch(r"any: .+ needs .+; use .+=.+", str(error))
        else:
            assert is_legal, (drafter.name, view, shape, schedule.name)
        met |= {(drafter.name, is_legal), (schedule.name, is_legal)}
    names = {drafter.name for drafter in DRAFTERS.values()} | {*SCHEDULES}
    assert met == set(product(names, (True, False)))


BASES = ("sd", "ar", "hippo", "specvlm-self/view=uniform", "sd/view=full+text")


@pytest.mark.parametrize("capability", [each for each in Capability if each.choice])
def test_what_a_refusal_says_to_use_offers_what_is_needed(capability: Capability) -> None:
    """Claim: the choice that a refusal names brings what was missing. Fails where a part was
    renamed or no longer offers it."""
    choice = re.split(r",? or |, ", capability.choice)[0].replace("-N", "-3")
    offered: frozenset[Capability] = NO_CAPABILITIES
    for base in BASES:
        try:
            recipe = resolve(f"{base}/{choice}")
        except MethodError:
            continue
        parts = (recipe.drafter, recipe.view, recipe.shape, recipe.schedule)
        offered = offered.union(*(part.offers for part in parts))
    assert capability in offered


def test_nobody_offers_what_the_engine_offers() -> None:
    """Claim: a capability is the engine's or a part's, not both; a refusal has one cause."""
    parts = [*DRAFTERS.values(), WorkerDrafter, *views(), *shapes(), *SCHEDULES.values()]
    offered = NO_CAPABILITIES.union(*(part.offers for part in parts))
    assert not offered & OFFERED_BY_ENGINE
    assert offered | OFFERED_BY_ENGINE == frozenset(Capability)


def test_a_part_of_ones_own_is_refused_until_its_need_is_offered() -> None:
    """Claim: a drafter that nobody here knows is legal once another part offers what it needs, and
    the refusal names it. Fails where legality goes by what is known by name."""

    class Picky(Lookup):
        name = "picky"
        needs = frozenset({Capability.BESIDE_TARGET, Capability.COSTS})

    with pytest.raises(MethodError, match="drafter picky needs a draft that works beside"):
        Recipe("mine", "", Picky, Chain(3))
    waiting = replace(SCHEDULES["serial"], offers=frozenset({Capability.BESIDE_TARGET}))
    assert Recipe("mine", "", Picky, Chain(3), waiting).drafts
    missing = list(find_unmet_needs([("it", Picky)], NO_CAPABILITIES))
    assert len(missing) == 2 and all(each.startswith("it needs") for each in missing)


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_view_needs_is_what_it_can_be_asked_for(name: str) -> None:
    """Claim: a view that needs costs takes a share from them, and one that needs to be read beside
    the target has an early choice. Fails if a registered view derives from another base."""
    view = VIEWS[name]
    assert (Capability.COSTS in view.needs) == isinstance(view, CostedView)
    assert Capability.BESIDE_TARGET not in view.needs or isinstance(view, EarlyView)
