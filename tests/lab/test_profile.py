"""Claims about what ``lab profile`` measures: ideals, and where a round's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from written_out import Embedded

from lab.hardware import profile
from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
from lab.hardware.profile import (
    BareSeconds,
    Profile,
    bare_seconds,
    forward_sizes,
    ideal_speedup,
    profile_methods,
)
from saccade.bench.comparison import resolve_methods
from saccade.bench.runner import media_arguments
from saccade.core.errors import OptionError
from saccade.core.result import RoundRecord
from saccade.core.tree import ROOT
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes import cost_measurement
from saccade.inputs import ask
from saccade.methods import resolve
from saccade.world import suites

pytestmark = pytest.mark.usefixtures("unchecked")


def round(drafted: int, accepted: int, parents: tuple[int, ...] | None = None) -> RoundRecord:
    """A chain, unless parents are given; one token of the target's own follows."""
    shape = tuple(range(ROOT, drafted - 1)) if parents is None else parents
    return RoundRecord((1,) * drafted, shape, (1,) * accepted, 2, "recovered", 0.0, 0.0)


OPENING = replace(round(0, 0), opening=True)


def test_the_ideal_is_of_every_round_as_it_was() -> None:
    """Claim: two chains of 3 with T(4), a tree of 4 nodes on 2 levels with T(5), a round that
    drafts nothing with T(1): levels c + T(rows) each. The opening is paid for by the prefill.
    Control: the cost of the mean round is another number."""
    tree = round(4, 2, (ROOT, ROOT, 0, 0))
    rounds = [OPENING, round(3, 3), round(3, 1), tree, round(0, 0)]
    bare = BareSeconds({1: 10.0, 4: 14.0, 5: 30.0}, 0.5)
    assert list(forward_sizes(rounds)) == [(3, 4), (3, 4), (2, 5), (0, 1)]
    spent = (3 * 0.5 + 14) + (3 * 0.5 + 14) + (2 * 0.5 + 30) + 10
    assert bare_seconds(rounds, bare) == pytest.approx(spent)
    emitted = 4 + 2 + 3 + 1
    assert ideal_speedup(rounds, bare) == pytest.approx(emitted * 10 / spent)
    mean_round = 8 / 4 * 0.5 + 14 - 0.5  # 3.5 rows a round
    assert spent / 4 != pytest.approx(mean_round, rel=0.1)


def test_plain_decoding_is_its_own_ideal() -> None:
    """Claim: of rounds that draft nothing the ideal is 1: as many forwards as tokens that came of
    decoding. Fails if the token that the prefill gave is paid for."""
    assert ideal_speedup(
        [OPENING, *[round(0, 0)] * 9], BareSeconds({1: 10.0}, 0.5)
    ) == pytest.approx(1.0)


def profiled(embedded: Embedded, recipes: Mapping[str, Recipe], count: int = 16) -> list[Profile]:
    item = next(iter(suites.suites()["shapes-caption"].items()))
    inputs = ask(embedded.target, item.question, **media_arguments(item))
    settings = {"max_new_tokens": count, "do_sample": False}
    return profile_methods(*embedded, [inputs], recipes, settings=settings, repeat=1)


def recipes(*methods: str) -> dict[str, Recipe]:
    return {name: recipe for name, recipe in resolve_methods(methods).items() if recipe is not None}


METHODS = ("sd/shape=chain-3", "specvlm", "specvlm-self", "lookup")


@pytest.mark.extra
def test_a_round_is_drafting_verifying_and_the_rest(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the three add up to a round; the share is measured over ideal; bare forwards run at
    the prompt's length and half the answer, the draft's at what it saw of that. Fails if lengths
    are rounded to buckets, or a pruned draft is timed over the whole video."""
    monkeypatch.setattr(profile, "BARE_CYCLES", 2)
    filled: list[tuple[Any, int]] = []
    real = cost_measurement.filled_session

    def noting(model: Any, context: int, requests: int, room: int) -> Any:
        filled.append((model, context))
        return real(model, context, requests, room)

    monkeypatch.setattr(cost_measurement, "filled_session", noting)
    profiles = {each.method: each for each in profiled(embedded, recipes(*METHODS))}
    assert list(profiles) == ["ar", *METHODS]
    for each in profiles.values():
        assert each.drafting + each.verifying + each.rest == pytest.approx(each.round)
        assert each.share[0] == pytest.approx(each.measured[0] / each.ideal[0])
        assert each.rows >= 1 and each.bare_plain > 0
    plain = profiles["ar"]
    assert plain.ideal[0] == pytest.approx(1) and plain.measured[0] == 1
    assert plain.level is None and plain.tau == 1 and plain.bare_level == 0
    assert profiles["lookup"].bare_level == 0  # a look into the text is no forward
    assert profiles["sd/shape=chain-3"].bare_level < profiles["specvlm-self"].bare_level

    target, draft = (loaded.backbone for loaded in embedded)
    item = next(iter(suites.suites()["shapes-caption"].items()))
    prompt = int(ask(embedded.target, item.question, **media_arguments(item))["input_ids"].shape[1])
    kept = round_half(256 * (resolve("specvlm").view.keep or 1))
    assert filled == [
        (target, prompt + 8),
        (draft, prompt + 8),
        (draft, prompt + 8 - 256 + kept),
        (target, prompt + 8 - 256 + kept),
    ]


def round_half(value: float) -> int:
    return int(value + 0.5)


@pytest.mark.extra
def test_bare_forwards_are_timed_for_all_rows_there_were(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: T is measured for every number of rows that occurred, each in turn. Fails if a tree's
    or a cut round's rows are read off a line between others."""
    calls: list[Sequence[tuple[str, int]]] = []

    def timed(sessions: Any, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float]:
        calls.append(keys)
        return dict.fromkeys(keys, 1.0)

    monkeypatch.setattr(profile, "time_bare_forwards", timed)
    name = "sd/shape=chain-4"
    recipe = impose_acceptance(resolve(name), ImposedAcceptance(length=4))
    profiles = profiled(embedded, {"ar": resolve("ar"), name: recipe}, 14)
    assert calls == [[("", 1), ("", 5), (name, 1)]]
    assert profiles[1].accepted == pytest.approx(
        11 / 3
    )  # the last of three rounds is cut at 14 tokens
    assert profiles[1].gamma == 4 and profiles[1].rows == 5


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["hippo", "layerskip", "tabed"])
def test_drafts_without_a_bare_level_are_refused(embedded: Embedded, method: str) -> None:
    """Claim: a parallel draft, half a model and an ensemble are refused by name, before a run."""
    with pytest.raises(OptionError, match=method):
        profile_methods(*embedded, [], recipes(method), settings={})
