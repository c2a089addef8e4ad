"""Claims about drafts that misbehave: they cost speed and nothing else, and the result says why."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    TEXT,
    VIDEO,
    VOCAB,
    MadeBy,
    StubDraft,
    backbone,
    hf_greedy,
    input_for,
    left_padded,
    noisy,
    qwen25,
    random_tree,
    stubbed,
    truth,
    video_input,
)

import saccade
from saccade.core.protocols import Learner, ParallelWork
from saccade.core.tree import ROOT, Tree, add, chain
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Chain

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
COUNT = 24
END = 0  # an id that the answer never says


def _answer() -> list[int]:
    assert END not in truth("qwen2_5_vl")
    return list(truth("qwen2_5_vl"))


def _run(propose: Callable[[int, list[int], int], Any], **settings: Any) -> Any:
    settings = {"max_new_tokens": COUNT, "eos_token_id": END, **settings}
    return saccade.run(qwen25(), INPUTS, method=stubbed(propose), **settings)


def _right(count: int) -> Callable[..., Tree]:
    return lambda request, text, round: chain(_answer()[len(text) : len(text) + count])


def _wrong(request: int, text: list[int], round: int) -> Tree:
    return chain([(token + 1) % TEXT for token in _answer()[len(text) : len(text) + 4]])


def _late(request: int, text: list[int], round: int) -> Tree:
    """Wrong siblings first, the right token last, at every level."""
    tree, here = Tree(), ROOT
    for token in _answer()[len(text) : len(text) + 4]:
        for wrong in range(3):
            tree = add(tree, here, (token + 1 + wrong) % TEXT)
        tree = add(tree, here, token)
        here = len(tree) - 1
    return tree


def _twins(request: int, text: list[int], round: int) -> Tree:
    """Every token drafted twice, the right one under the second twin only."""
    a, b = _answer()[len(text)], _answer()[len(text) + 1]
    return Tree((a, a, b, b), (ROOT, ROOT, 1, 1), (None,) * 4)


def _mixed(request: int, text: list[int], round: int) -> Tree:
    rng = random.Random(round)
    known = iter(_answer()[len(text) :])
    return random_tree(rng, rng.randint(0, 9), lambda: next(known))


ADVERSARIES: dict[str, Callable[..., Any]] = {
    "right": _right(5),
    "right, too many": _right(16),
    "wrong": _wrong,
    "wrong by one": lambda request, text, round: (
        _wrong(request, text, round)
        if round % 2
        else chain(_answer()[len(text) : len(text) + 2] + [0])
    ),
    "the end every time": lambda *_: chain([END] * 4),
    "right, then the end": lambda request, text, round: chain([_answer()[len(text)], END, END]),
    "placeholders": lambda *_: chain([VIDEO] * 3),
    "nothing": lambda *_: Tree(),
    "nothing now and then": lambda request, text, round: (
        _right(3)(request, text, round) if round % 2 else Tree()
    ),
    "right behind wrong siblings": _late,
    "twins": _twins,
    "random trees": _mixed,
    "more rows than a fold": lambda request, text, round: chain(
        _answer()[len(text) : len(text) + 3] + [1] * 80
    ),
    "a wide tree": lambda request, text, round: Tree(
        tuple(range(100)), (ROOT,) * 100, (None,) * 100
    ),
}


@pytest.mark.representatives(7)
@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_adversary_changes_a_token(name):
    """Claim: whatever is drafted, the greedy answer is the target's (0 mismatches), and drafting
    that did not fail is not given up.
    """
    result = _run(ADVERSARIES[name])
    assert list(result.ids) == _answer()[:COUNT]
    assert result.fallback_reason is None and result.finish_reason == "length"


@pytest.mark.representatives(4)
@pytest.mark.parametrize("seed", range(25))
def test_no_random_draft_changes_a_token(seed):
    """Claim: random trees, right here and there, of any size, with limits of any size: equal."""
    rng = random.Random(seed)

    def propose(request: int, text: list[int], round: int) -> Tree:
        def token() -> int:
            at = len(text) + rng.randint(0, 3)
            return _answer()[at] if rng.random() < 0.7 else rng.randrange(VOCAB)

        return random_tree(rng, rng.randint(0, 20), token)

    limit = rng.randint(1, 30)
    result = _run(propose, max_new_tokens=limit)
    assert list(result.ids) == _answer()[:limit] and result.fallback_reason is None


@pytest.mark.slow
def test_no_random_draft_of_a_thousand_changes_a_token():
    """The claim above over 1,000 drafts."""
    for seed in range(1000, 2000):
        test_no_random_draft_changes_a_token(seed)


def _raising(request: int, text: list[int], round: int) -> Tree:
    raise RuntimeError("out of luck")


def _malformed(**fields: Any) -> Callable[..., Tree]:
    tree = dict(tokens=(1, 2), parents=(ROOT, 0), q=(None, None)) | fields
    return lambda *_: Tree(**tree)


FAILURES: dict[str, Callable[..., Any]] = {
    "raises": _raising,
    "runs out of memory": lambda *_: (_ for _ in ()).throw(MemoryError("no room")),
    "a field too short": _malformed(parents=(ROOT,)),
    "no q": _malformed(q=()),
    "a parent after its child": _malformed(parents=(1, ROOT)),
    "its own parent": _malformed(parents=(0, 1)),
    "a parent below the root": _malformed(parents=(-2, 0)),
    "an id beyond the vocabulary": _malformed(tokens=(1, VOCAB)),
    "a huge id": _malformed(tokens=(10**12, 1)),
    "a negative id": _malformed(tokens=(-1, 1)),
    "no tree at all": lambda *_: None,
}


@pytest.mark.representatives(6)
@pytest.mark.parametrize("round", [0, 1, 5])
@pytest.mark.parametrize("name", FAILURES)
def test_a_draft_that_fails_costs_speed_only(name, round):
    """Claim: drafting well until some round and failing there leaves the answer and names the
    reason. What of the failed draft is sound is judged; from then on each round is a plain token.
    """

    def propose(request: int, text: list[int], now: int) -> Any:
        return FAILURES[name](request, text, now) if now >= round else _right(1)(request, text, now)

    result = _run(propose)
    assert list(result.ids) == _answer()[:COUNT]
    assert result.fallback_reason is not None and "drafting failed" in result.fallback_reason
    left = COUNT - 1 - 2 * round
    failed = [name in ("a field too short", "an id beyond the vocabulary")]
    assert [len(r.tokens) for r in result.forwards] == [1] * round + failed + [0] * (left - 1)


@pytest.mark.parametrize(
    "step", ["encode", "prefill", "read_prompts", "commit", "start", "fold", "report"]
)
def test_a_draft_that_fails_elsewhere_costs_speed_only(step):
    """Claim: an error in any of a draft's methods is a fallback, not a crash."""

    def broken(*args: Any) -> Any:
        raise ValueError(f"{step} is broken")

    class Learning(StubDraft):
        learner = Learner()
        parallel_work = ParallelWork()

    def drafter(team: Any) -> StubDraft:
        draft = Learning(_right(2))
        parts = {"start": draft.learner, "fold": draft.learner}
        parts |= {"encode": draft.parallel_work, "prefill": draft.parallel_work}
        setattr(parts.get(step, draft), step, broken)
        return draft

    recipe = Recipe("stub", "", MadeBy(drafter), Chain(1), serial)
    result = saccade.run(qwen25(), INPUTS, method=recipe, max_new_tokens=COUNT)
    assert list(result.ids) == _answer()[:COUNT]
    assert result.fallback_reason == f"drafting failed with ValueError: {step} is broken"


@pytest.mark.parametrize("method", ["sd", "specvlm-self", "layerskip"])
def test_a_draft_that_was_given_up_frees_its_caches(method):
    """Claim: once drafting is given up in the middle of an answer, the draft holds no keys, and the
    answer goes on. Control: before that it holds some."""
    settings = dict(max_new_tokens=24, do_sample=False, eos_token_id=-1)
    target, inputs = backbone(qwen25()), video_input(3)
    stream = saccade.stream(target, inputs, draft=noisy(qwen25, 0, 0.05), method=method, **settings)
    rounds = [next(stream), next(stream)]
    assert stream.batch is not None
    fallback = stream.batch.drafter
    drafter: Any = fallback._drafter
    assert drafter.session.requests
    fallback.give_up("enough", RuntimeError("enough"))
    assert not drafter.session.requests
    rounds += stream
    answer = [token for round in rounds for token in round.emitted]
    assert answer == hf_greedy(qwen25(), inputs, 24)
    assert stream.results[0].fallback_reason == "enough"


def test_one_failure_in_a_batch_leaves_every_answer():
    """Claim: a draft that fails for one request of three leaves all three answers as alone."""
    many = [video_input(0), video_input(1, (2, 4, 4)), video_input(2)]
    settings = dict(max_new_tokens=10)
    alone = [saccade.run(qwen25(), one, method="ar", **settings).ids for one in many]

    def propose(request: int, text: list[int], round: int) -> Tree:
        if request == 1 and round == 2:
            raise RuntimeError("only here")
        return chain(list(alone[request][len(text) : len(text) + 1]))

    out = saccade.generate(qwen25(), left_padded(many), method=stubbed(propose), **settings)
    assert [tuple(row[-10:].tolist()) for row in out] == alone


def _laws(kind: str) -> torch.Tensor:
    law = torch.full((VOCAB,), 1 / VOCAB)
    if kind == "nan":
        law[:] = float("nan")
    elif kind == "infinite":
        law[:] = float("inf")
    elif kind == "short":
        law = law[:100]
    return law


@pytest.mark.representatives(2)
@pytest.mark.parametrize("kind", ["uniform", "nan", "infinite", "short"])
def test_no_law_of_a_draft_lets_a_wrong_token_through(kind):
    """Claim: at a temperature near zero a sampled answer is the arg-max, whatever law a wrong
    token brings with it: one of NaN, of infinity, or over fewer ids than the target has.
    """

    def propose(request: int, text: list[int], round: int) -> Tree:
        tokens = [(token + 1) % TEXT for token in _answer()[len(text) : len(text) + 2]]
        return Tree(tuple(tokens), (ROOT, 0)[: len(tokens)], (_laws(kind),) * len(tokens))

    for do_sample in (False, True):
        settings = dict(temperature=1e-3, seed=1) if do_sample else {}
        result = _run(propose, do_sample=do_sample, **settings)
        assert list(result.ids) == _answer()[:COUNT]


def test_a_target_of_nan_ends_with_an_error():
    """Claim: NaN in the target's logits ends the request with finish_reason "error".

    Fails if token ids made of nothing are handed out as an answer.
    """
    broken = copy.deepcopy(qwen25())
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    result = saccade.run(broken, INPUTS, method="ar", max_new_tokens=4)
    assert result.finish_reason == "error" and result.ids == ()
