"""Claims about a draft in a process of its own: the answer is the target's, whoever is faster."""

from __future__ import annotations

import copy
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import psutil
import pytest
from beside import Inside, Pace, hired, paced
from helpers import (
    FAMILIES,
    backbone,
    dealt,
    hf_greedy,
    input_for,
    left_padded,
    noisy,
    qwen25,
    truth,
    video_input,
)
from workers import COUNT, answer, check_next_answer, drafted, unhurried

import saccade
from saccade.core import own_processes
from saccade.drafting.parallel import process
from saccade.drafting.parallel.process import Worker
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")

PARALLEL = ["hippo", "pearl", "pearl-syn", "pearl-specvlm"]


@pytest.fixture(scope="module")
def genuine() -> Iterator[Worker]:
    """A worker started the way users start one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", subprocess)
        one = Worker()
    yield one
    one.end()


@pytest.fixture
def only_genuine(genuine: Worker) -> Iterator[Worker]:
    """It is the one that is hired."""
    idle = list(process._idle)
    process._idle.clear()
    process._idle.append(genuine)
    yield genuine
    assert list(process._idle) == [genuine], "another worker was hired"
    process._idle.clear()
    process._idle.extend(idle)


@pytest.mark.extra
def test_a_worker_starts_as_it_does_for_users(only_genuine):
    """Claim: the command that starts a worker works: a new interpreter that imports the package by
    the caller's path, reads the model and drafts.
    """
    assert isinstance(only_genuine.process, subprocess.Popen)
    result = answer(method="pearl-syn", max_new_tokens=40)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    again = answer(method="hippo/early=superset", target=unhurried(), max_new_tokens=40)
    assert again.ids == truth("qwen2_5_vl") and again.fallback_reason is None
    assert drafted(again) > 0


def test_the_workers_time_is_not_that_of_other_programs(genuine):
    """Claim: what a draft's process computes counts as Saccade's own, so that no answer after it
    has fewer threads for it."""
    worker, used = psutil.Process(genuine.process.pid), 0.0
    deadline = time.monotonic() + 30
    while used < 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)  # It imports what it needs, which takes seconds.
        used = sum(worker.cpu_times()[:2])
    assert own_processes.running_seconds() >= used >= 0.2


# -- the same tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "gamma"), dealt(PARALLEL, [1, 2, 5, 9]))
def test_an_answer_in_parallel_is_the_targets(method, gamma):
    """Claim: lossless: 40 tokens equal transformers' generate and the cache-free reference, by a
    real worker, at whatever speed it had.
    """
    result = answer(method=f"{method}/shape=chain-{gamma}", max_new_tokens=40)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    assert result.finish_reason == "length"


def in_family(family: str, draft: Any, method: str) -> None:
    result = saccade.run(
        backbone(FAMILIES[family]()),
        input_for(family),
        draft=backbone(draft),
        method=method,
        max_new_tokens=COUNT,
    )
    assert result.ids == truth(family)[:COUNT] and result.fallback_reason is None


OTHERS = [name for name in FAMILIES if name != "qwen2_5_vl"]


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("method", "family"), dealt(PARALLEL, OTHERS))
def test_an_answer_in_parallel_is_the_targets_in_every_family(family, method):
    """Claim: the same for other families, text without any video included."""
    in_family(family, noisy(FAMILIES[family], 0, 0.05), method)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_draft_with_a_tower_of_its_own_sees_for_itself(only_genuine, family):
    """Claim: where the two models' towers differ, the worker reads the pixels by itself, though no
    such model was ever built in its process. Fails if something a model needs stays behind.
    """
    in_family(family, FAMILIES[family](7), "pearl")


DRAFTS: dict[str, Callable[[], Any]] = {
    "the target itself": lambda: qwen25(),
    "often right": lambda: noisy(qwen25, 0, 0.05),
    "seldom right": lambda: noisy(qwen25, 0, 0.2),
    "unrelated": lambda: qwen25(9, layers=1),
}


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("draft", "method"), dealt(DRAFTS, PARALLEL))
def test_no_draft_and_no_timing_changes_a_token(method, draft):
    """Claim: the same for drafts from always right to never, over interleavings of the two sides
    that a seed names. Fails if a token of a refused chain is ever taken for one of the next.
    """
    _interleaved(method, draft, range(1), (2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("method", PARALLEL)
def test_no_draft_and_none_of_many_timings_changes_a_token(method, draft):
    """The claim above over many more interleavings and every gamma."""
    _interleaved(method, draft, range(1, 21), (1, 2, 5, 9))


def _interleaved(method: str, draft: str, seeds: range, gammas: tuple[int, ...]) -> None:
    for gamma in gammas:
        for seed in seeds:
            chance = random.Random(100 * gamma + seed)
            with hired(Inside(lambda chance=chance: chance.choice([0, 0, 1, 1, 2, 7]))):
                result = answer(
                    backbone(DRAFTS[draft]()),
                    f"{method}/shape=chain-{gamma}",
                    max_new_tokens=COUNT,
                )
            assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.fallback_reason is None


@cache
def emitted() -> list[int]:
    return list(truth("qwen2_5_vl")[:14])


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_an_answer_ends_wherever_it_should(method):
    """Claim: an end of text amid the tokens in flight, at any of them, ends the answer there, as
    does any length; what was in flight behind it is not emitted. Each token of the answer is
    declared the end in turn.
    """
    draft = backbone(noisy(qwen25, 0, 0.05))
    for token in dict.fromkeys(emitted()):
        chance = random.Random(token)
        with hired(Inside(lambda chance=chance: chance.choice([0, 1, 3]))):
            result = answer(draft, method, eos_token_id=token)
        expected = emitted()[: emitted().index(token) + 1]
        assert list(result.ids) == expected and result.finish_reason == "stop"
        assert result.fallback_reason is None
    for length in range(1, 7):
        with hired(Inside(lambda: 2)):
            result = answer(draft, method, max_new_tokens=length)
        assert list(result.ids) == emitted()[:length] and result.finish_reason == "length"
        assert result.fallback_reason is None


def test_an_end_is_an_end_for_a_real_worker_too():
    """Claim: the same by processes: the worker is free afterwards, and the next answer is whole."""
    for token in dict.fromkeys(emitted()[2:8]):
        result = answer(method="pearl-syn", eos_token_id=token)
        assert list(result.ids) == emitted()[: emitted().index(token) + 1]
    check_next_answer()


MANY = [video_input(0), video_input(1, (2, 4, 4)), video_input(2)]


def batch(method: str, draft: Any, **settings: Any) -> list[list[int]]:
    rounds = saccade.stream(
        backbone(qwen25()), left_padded(MANY), draft=draft, method=method, **settings
    )
    texts: list[list[int]] = [[] for _ in MANY]
    for round in rounds:
        texts[round.request] += round.emitted
    assert all(result.fallback_reason is None for result in rounds.results)
    assert [list(result.ids) for result in rounds.results] == texts
    return texts


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_a_batch_answers_each_request_as_alone(method):
    """Claim: three requests in one worker get the answers they get alone, whichever ends first."""
    alone = [hf_greedy(qwen25(), one, COUNT) for one in MANY]
    draft = backbone(noisy(qwen25, 0, 0.05))
    assert batch(method, draft, max_new_tokens=COUNT, do_sample=False) == alone
    end = alone[1][6]
    cut = [text[: text.index(end) + 1] if end in text else text for text in alone]
    assert len({len(text) for text in cut}) > 1
    for seed in range(2):
        chance = random.Random(seed)
        with hired(Inside(lambda chance=chance: chance.choice([0, 1, 4]))):
            texts = batch(method, draft, max_new_tokens=COUNT, do_sample=False, eos_token_id=end)
        assert texts == cut


# -- sampling ----------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=20, seed=11)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_a_seed_means_the_same_whoever_is_faster(method):
    """Claim: a sampled answer is fixed by its seed: twice the same, and the same again with a draft
    or a target made slow, and in interleavings that no clock would bring about.

    Fails if noise, a law's slot or a batch in flight depends on timing. Other seeds give other
    answers.
    """
    plain = copy.deepcopy(noisy(qwen25, 0, 0.05))
    slow = paced(copy.deepcopy(plain), Pace(step=0.01))
    quick = Backbone(plain, fused=False)
    answers = {answer(draft, method, **SAMPLED).ids for draft in (quick, quick, slow)}
    for seed in range(2):
        chance = random.Random(seed)
        with hired(Inside(lambda chance=chance: chance.choice([0, 0, 1, 5]))):
            answers.add(answer(quick, method, **SAMPLED).ids)
    assert len(answers) == 1
    others = {answer(quick, method, **SAMPLED | {"seed": seed}).ids for seed in (1, 2)}
    assert len(answers | others) == 3


def test_a_sampled_draft_that_is_the_target_is_never_refused():
    """Claim: with p = q every token is accepted, so each is judged by the law it was drawn from.

    Fails if the law of another position, or of another round, is read from the shared memory.
    """
    draft = backbone(qwen25())
    for gamma in (1, 2, 5, 9):
        result = answer(draft, f"pearl/shape=chain-{gamma}", **SAMPLED, max_new_tokens=40)
        assert result.fallback_reason is None and drafted(result) >= 37
        assert all(round.kind != "recovered" for round in result.forwards)
        # The draft leaves the answer's last token to the target, in the last round alone.
        assert all(round.own is None for round in result.forwards[:-1])


def test_a_sampled_batch_by_the_target_itself_is_never_refused():
    """Claim: the same for three requests at once. Fails if one request's law overwrites another's
    before it is judged: then the answers do not follow the target's law.
    """
    rounds = saccade.stream(
        backbone(qwen25()),
        left_padded(MANY),
        draft=backbone(qwen25()),
        method="pearl",
        max_new_tokens=16,
        do_sample=True,  # over the whole vocabulary: a law of no mass on a token refuses nothing
        seed=3,
    )
    kinds = [round.verdict.kind for round in rounds if len(round.tree)]
    assert len(kinds) > 5 and "recovered" not in kinds
    # Each request's last token may be the target's own.
    assert len([kind for kind in kinds if kind is not None]) <= 3
