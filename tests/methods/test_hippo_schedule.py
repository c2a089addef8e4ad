"""HIPPO's schedule: the early draft and the rounds of real runs, against Sec. 5.2."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from beside import Inside, hired
from by_hand import prefilled, ranked, share_of, visual_rows
from helpers import (
    IMAGE,
    VIDEO,
    backbone,
    dealt,
    noisy,
    qwen25,
    video_input,
)
from hippo_by_hand import GAMMA, KEEP, Reading, holistic_by_hand, prefill_target
from torch import Tensor

from lab.reference import Oracle, decode_greedily
from saccade.core.prompt import Prefill, Prompt
from saccade.core.result import Round
from saccade.core.sampling import Sampling
from saccade.drafting import schedule
from saccade.drafting.parallel.child import HEAD_START_TOKENS
from saccade.drafting.recipe import Recipe
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import Pruned
from saccade.engine.generate import stream
from saccade.methods import resolve
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("unlimited_drafts")

# -- starting early ----------------------------------------------------------------------------

TARGET, NOISE = qwen25, 0.05

CLIP: dict[str, Any] = dict(seed=6, grid=(4, 8, 14))


def pair(amount: float = NOISE) -> tuple[Any, Any]:
    return TARGET(), noisy(TARGET, 0, amount)


@dataclass
class Trace:
    """One answer in parallel, and the desk that drafted it."""

    method: str
    prefill: Prefill  # the target's
    whole: Prompt  # the draft's
    rounds: list[Round]
    inside: Inside
    draft: Any

    def texts(self) -> Iterator[tuple[Round, list[int]]]:
        """Every round with the ids emitted before it."""
        text: list[int] = []
        for round in self.rounds:
            yield round, list(text)
            text += round.emitted


def traced(
    method: str | Recipe,
    *,
    turns: Callable[[], int] = lambda: 1,
    amount: float = NOISE,
    length: int = 40,
    peek: Callable[[Inside, str], None] = lambda inside, phase: None,
) -> Trace:
    """An answer whose draft works in this process, at a speed that ``turns`` says."""
    target, draft = pair(amount)
    inputs = video_input(**CLIP)
    inside = Inside(turns)
    recipe = resolve(method) if isinstance(method, str) else method
    with hired(inside):
        rounds = stream(
            backbone(target),
            inputs,
            draft=backbone(draft),
            method=recipe,
            max_new_tokens=length,
            on_phase=lambda phase: peek(inside, phase),
        )
        all_rounds = list(rounds)
    (result,) = rounds.results
    assert result.fallback_reason is None
    assert result.ids == truth_of(length)
    prefill = prefilled(target, inputs)
    whole = backbone(draft).adopt(prefill.prompt)
    return Trace(recipe.name, prefill, whole, all_rounds, inside, draft)


@cache
def truth_of(length: int) -> tuple[int, ...]:
    model, inputs = TARGET(), video_input(**CLIP)
    return tuple(decode_greedily(model, prefilled(model, inputs).prompt, length))


def whole_scores(trace: Trace, reading: Reading) -> list[float]:
    return holistic_by_hand(
        trace.whole, saliency.attention_over_visual_keys(trace.prefill).tolist(), reading
    )


@pytest.mark.representatives(1)
@pytest.mark.parametrize("early", ["superset", "all"])
@pytest.mark.parametrize("ahead", [0, 3, 20])
def test_an_early_draft_ends_with_the_holistic_top_of_what_it_read(early, ahead):
    """Claim: before the attention is known the draft reads the top 2k by temp + spa, or everything;
    then its cache is cut to exactly the keys of the holistic top k among those, as they were
    computed, whatever it has drafted meanwhile. Of everything, that is the holistic choice itself.

    Keys carry their positions, so one row too many, too few, or of another token shows.
    """
    caught: dict[str, Any] = {}

    def peek(inside: Inside, phase: str) -> None:
        if phase == "guide":  # what it read and drafted beside the target's prefill
            for _ in range(1 + ahead):
                inside.turn()
            assert inside.desk is not None
            request = inside.desk._session.requests[0]
            caught["chain"] = len(inside.desk._drafts[0].chain)
            caught["length"] = request.cache.length
        if phase == "decode":
            inside.turn()  # the news of the target's attention, and one step
            assert inside.desk is not None
            cache = inside.desk._session.requests[0].cache
            caught["keys"] = [layer[:, : cache.length].clone() for layer in cache.keys]
            caught["values"] = [layer[:, : cache.length].clone() for layer in cache.values]

    trace = traced(f"hippo/early={early}", turns=lambda: 0, peek=peek, length=2)
    budget = share_of(trace.whole.visual_tokens, KEEP)
    first = whole_scores(trace, Reading(attn=False))
    candidates = (
        sorted(ranked(first, 2 * budget))
        if early == "superset"
        else range(trace.whole.visual_tokens)
    )
    text = len(trace.whole) - trace.whole.visual_tokens
    assert caught["chain"] > ahead and caught["length"] == text + len(candidates)

    every = whole_scores(trace, Reading())
    best = [i for i in ranked(every) if i in candidates][:budget]
    if early == "all":
        assert sorted(best) == sorted(ranked(every, budget))
    else:
        assert sorted(best) != sorted(ranked(every, budget)), (
            "the superset must have cost something"
        )

    video = visual_rows(trace.whole)
    kept = {video[i] for i in best}
    read = trace.whole.select(torch.tensor(list(candidates)))
    session = Session(backbone(trace.draft), [Sampling()])
    cache = session.prefill([read])[0].cache
    assert cache is not None
    rows = [
        i
        for i, row in enumerate(read.places.tolist())
        if row in kept or not bool(trace.whole.visual[row])
    ]
    for mine, theirs in ((cache.keys, caught["keys"]), (cache.values, caught["values"])):
        for layer, their_layer in zip(mine, theirs, strict=True):
            assert torch.equal(layer[:, rows], their_layer)


def test_narrowing_keeps_what_was_drafted_since():
    """Claim: after the cut, laws are those of a forward whose prompt rows are the kept ones, and
    what was drafted before it is not drafted again.

    Fails if rows of the chain are lost, moved or counted as prompt.
    """
    model = backbone(TARGET())
    prompt = model.prompts(video_input(**CLIP))[0]
    one, two = (Session(model, [Sampling()]) for _ in range(2))
    one.prefill([prompt])
    chain = schedule.Tree((3, 5, 7), (-1, 0, 1), (None,) * 3)
    one.score({0: chain})
    rows = torch.tensor([row for row in range(len(prompt)) if row % 3 or row > 100])
    before = [layer.clone() for layer in one.requests[0].cache.keys]
    after = len(prompt)
    one.keep_prompt_rows(0, rows)
    cache = one.requests[0].cache
    assert cache.length == len(rows)
    for layer, old in zip(cache.keys, before, strict=True):
        assert torch.equal(layer[:, : len(rows)], old[:, rows])
        assert torch.equal(layer[:, len(rows) : len(rows) + 3], old[:, after : after + 3])
    longer = schedule.Tree((3, 5, 7, 9), (-1, 0, 1, 2), (None,) * 4)
    logits = one.score({0: longer})[0].rows[-1]

    two.prefill([prompt])  # the same by hand: another session whose cache is made of these keys
    two.score({0: chain})
    request = two.requests[0]
    seen = torch.cat([rows, torch.arange(after, after + 3)])
    request.cache = request.cache.select(seen, 8)
    request.cache.truncate(len(rows))
    assert torch.equal(two.score({0: longer})[0].rows[-1], logits)
    assert not torch.allclose(logits, _whole(model, prompt, [3, 5, 7, 9]), atol=1e-3)


def _whole(model: Any, prompt: Prompt, tokens: list[int]) -> Tensor:
    return Oracle(model.model, [prompt], [Sampling()]).logits(0, tokens)[-1]


# -- the schedule (Sec. 5.2) -------------------------------------------------------------------


def _seldom(seed: int) -> Callable[[], int]:
    heard = count()
    return lambda: int(next(heard) % 3 == 2)


def _by_chance(seed: int) -> Callable[[], int]:
    chance = random.Random(seed)
    return lambda: chance.choice([0, 0, 1, 4])


SPEEDS: dict[str, Callable[[int], Callable[[], int]]] = {
    "slow draft": _seldom,
    "in step": lambda seed: lambda: 1,
    "fast draft": lambda seed: lambda: 100,
    "now and then": _by_chance,
}


def follows(rounds: Sequence[Round], gamma: int) -> str:
    """What of a run is not the paper's schedule; empty where all is.

    A round judges what was in flight and one token more. After a refusal that is nothing, and x1 is
    judged alone while the rest is drafted; after full acceptance it is the rest of the next gamma.
    """
    pending: int | None = None
    for number, round in enumerate(rounds):
        size, accepted = len(round.tree), len(round.verdict.accepted)
        if pending is None and size == 0:  # the draft is still reading
            if round.verdict.kind != "bonus":
                return f"round {number} judged nothing and is no plain one"
            continue
        if pending is not None and size != pending + 1:
            return f"round {number} judged {size} tokens where {pending} were in flight"
        if round.finish is not None:
            return "" if number == len(rounds) - 1 else f"round {number} was not the last"
        if accepted == size and round.verdict.own is not None:
            return f"round {number} took a token of the target's beyond what it judged"
        if accepted < size and round.verdict.kind != "recovered":
            return f"round {number} refused and recovered nothing"
        pending = gamma - 1 if accepted == size else 0
    return ""


def wrongly_drafted(trace: Trace) -> list[int]:
    """Rounds with a token that is not the arg-max of an uncached forward of the draft over its
    view's prompt, the text, and what it drafted before."""
    view: Any = resolve(trace.method).view
    pruned = view(trace.prefill, trace.whole)
    oracle = Oracle(trace.draft, [pruned], [Sampling()])
    wrong = []
    for number, (round, text) in enumerate(trace.texts()):
        if not len(round.tree):
            continue
        tokens = list(round.tree.tokens)
        laws = oracle.logits(0, [*text, *tokens[:-1]])[-len(tokens) :]
        laws[:, [IMAGE, VIDEO]] = float("-inf")
        if laws.argmax(-1).tolist() != tokens:
            wrong.append(number)
    return wrong


PARALLEL = ["hippo", "pearl", "pearl-syn", "pearl-specvlm"]


@pytest.mark.representatives(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("method", "speed"), dealt(PARALLEL, SPEEDS))
def test_every_round_judges_by_the_papers_rule(method, speed):
    """Claim: whoever is faster, each round judges those in flight and one more; x1 alone after a
    refusal, gamma tokens after full acceptance. Every token is what the draft says there.

    Fails on a token too many or too few in any round, on a batch that survives a refusal, and on a
    draft whose cache holds anything but its view and the text.
    """
    for gamma in (GAMMA, 1 + list(SPEEDS).index(speed) % 2):
        trace = traced(f"{method}/shape=chain-{gamma}", turns=SPEEDS[speed](gamma))
        assert follows(trace.rounds, gamma) == ""
        if speed == "slow draft":  # it is asked before it has read, and not waited for
            assert any(len(round.tree) == 0 for round in trace.rounds)
        assert any(len(round.tree) for round in trace.rounds)
        if trace.method.startswith("pearl-syn"):
            continue  # the head start is drafted over the whole video as well: the same prompt
        assert wrongly_drafted(trace) == []


@pytest.mark.usefixtures("unchecked")
def test_the_head_start_is_as_long_as_the_targets_prefill():
    """Claim: an early draft goes on until the target is ready, past gamma, and all of it is judged
    at once; it stops at the package's own limit. Fails if gamma bounds it, or if it never stops.
    """
    for ahead in (0, 3, 12, 2 * HEAD_START_TOKENS):

        def peek(inside: Inside, phase: str, steps: int = ahead) -> None:
            for _ in range(steps + 1 if phase == "guide" else 0):
                inside.turn()

        # the draft is the target: all of it is right
        trace = traced("pearl-syn", amount=0.0, peek=peek, turns=lambda: 0)
        first = trace.rounds[1]  # its first token was the opening
        expected = min(ahead, HEAD_START_TOKENS - 1)
        assert len(first.tree) in (expected, expected + 1)
        assert len(first.verdict.accepted) == min(len(first.tree), 39)
        assert wrongly_drafted(trace) == []

        # where it has said meanwhile that it is ready, nobody waits for the rest of a head start
        few = iter([1, 1])
        heard = traced("pearl-syn", amount=0.0, peek=peek, turns=lambda few=few: next(few, 0))
        assert expected <= len(heard.rounds[1].tree) <= min(expected + 6, HEAD_START_TOKENS)


def _always_optimistic(
    target: Any, draft: Any, requests: Sequence[int], cut: Any, *_: Any
) -> Iterator[Round]:
    """Optimistic for good: after a refusal too, a batch is in flight before a round judges."""
    return _bent(target, draft, requests, cut, lambda live, states: draft.extend(_empty(live)))


def _always_conservative(
    target: Any, draft: Any, requests: Sequence[int], cut: Any, *_: Any
) -> Iterator[Round]:
    """Conservative for good: every round judges x1 alone."""
    return _bent(target, draft, requests, cut, lambda live, states: _empty(live))


def _empty(live: Sequence[int]) -> dict[int, Any]:
    return {request: schedule.Tree() for request in live}


def _bent(
    target: Any,
    draft: Any,
    requests: Sequence[int],
    cut: Any,
    following: Callable[[Sequence[int], Mapping[int, Any]], dict[int, Any]],
) -> Iterator[Round]:
    group = schedule.Group.start(draft, requests, cut)
    in_flight = draft.propose(group.states)
    while in_flight:
        laws = target.score(in_flight)
        trees = draft.extend(in_flight)
        verdicts, endings = schedule.judge(trees, laws, cut)
        live = [request for request in in_flight if endings[request] is None]
        target.commit({request: verdicts[request].tokens for request in verdicts})
        draft.commit({request: verdicts[request].tokens for request in verdicts})
        in_flight = following(live, group.states)
        spent = 0.0, 0.0
        yield from schedule._rounds(group, trees, laws, (verdicts, endings), spent, False)


def _too_late(
    target: Any, draft: Any, requests: Sequence[int], cut: Any, *_: Any
) -> Iterator[Round]:
    """Judges those in flight alone, and takes the target's own token where the draft has one."""
    one = draft.extend
    draft.extend = lambda in_flight: dict(in_flight)
    try:
        yield from schedule.parallel(target, draft, requests, cut)
    finally:
        draft.extend = one


WRONG = {
    "always optimistic": _always_optimistic,
    "always conservative": _always_conservative,
    "judges late": _too_late,
}


@pytest.mark.representatives(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", list(WRONG))
def test_control_another_schedule_is_noticed(name):
    """Control: schedules that are as lossless and not the paper's fail the very same check."""
    recipe = replace(resolve("pearl"), schedule=replace(schedule.parallel, run=WRONG[name]))
    assert follows(traced("pearl").rounds, GAMMA) == ""
    assert follows(traced(recipe).rounds, GAMMA) != ""


@pytest.mark.usefixtures("unchecked")
def test_control_a_draft_of_another_view_is_noticed():
    """Control: judged by another view's prompt, tokens are wrong, so the comparison has power."""
    trace = traced("hippo")
    assert wrongly_drafted(trace) == []
    assert wrongly_drafted(replace(trace, method="pearl"))
    assert wrongly_drafted(replace(trace, method="hippo/view=holistic-no-attn"))


@pytest.mark.usefixtures("unchecked")
def test_a_run_has_rounds_of_every_kind():
    """Claim: the traces above are no trivial ones: refusals of x1, refusals later, full batches,
    two full batches in a row. Fails if a change of the models leaves the checks nothing to check.
    """
    rounds = [round for name in ("pearl", "hippo") for round in traced(name).rounds]
    kinds = {(len(r.tree), len(r.verdict.accepted), r.verdict.kind) for r in rounds}
    assert (1, 0, "recovered") in kinds and (1, 1, None) in kinds and (5, 5, None) in kinds
    assert any(size == 5 and 0 < accepted < 5 for size, accepted, _ in kinds)
    full = [len(r.verdict.accepted) == 5 for r in rounds]
    assert any(a and b for a, b in pairwise(full))


def test_the_recipes_are_the_papers():
    """Claim: 10 %, crops of 5, gamma 5; pearl sees all and waits, pearl-syn starts early, and
    pearl-specvlm prunes as SpecVLM. Fails if a default drifts from what is cited.
    """
    view = {name: resolve(name).view for name in PARALLEL}
    for name in PARALLEL:
        recipe = resolve(name)
        assert recipe.schedule is schedule.parallel and recipe.shape == resolve("sd").shape
        assert isinstance(view[name], Pruned)
    assert view["hippo"].keep == KEEP and view["hippo"].attention
    assert [view[name].early for name in PARALLEL] == ["wait", "wait", "all", "wait"]
    assert view["pearl-specvlm"] == resolve("specvlm").view
    _, prefill = prefill_target("qwen2_5_vl")
    assert view["pearl"](prefill, prefill.prompt).visual_tokens == prefill.prompt.visual_tokens
