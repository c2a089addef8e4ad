"""Claims about models that break while an answer is under way, at rounds 0, 1 and 5.

Draft functions that fail are tested in ``test_failing_drafts.py``, and draft processes that die,
fall silent or raise in ``test_parallel.py``. A draft that hangs inside this very process cannot be
interrupted and is not tested: only the parallel schedule has a deadline, because only there can the
draft be killed.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from beside import Inside, hired
from helpers import backbone, dealt, input_for, left_padded, noisy, qwen25, truth, video_input
from torch import Tensor

import saccade
from saccade.core.result import Result
from saccade.drafting.parallel.channel import HEADER, Channel
from saccade.drafting.parallel.process import Worker
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
COUNT = 24
STARTS = (0, 1, 5)
ROUNDS = pytest.mark.parametrize("round", STARTS)


@cache
def fresh(draft: bool = False) -> Backbone:
    """A model of this file's own: its logits are tampered with."""
    return Backbone(copy.deepcopy(noisy(qwen25, 0, 0.05) if draft else qwen25()))


def tampered(
    broken: Backbone, fault: Callable[[Tensor], Tensor], round: int, patch: Any, **settings: Any
) -> list[Result]:
    """Answers in which every logits of this model from this round on go through ``fault``."""
    honest, on = broken.logits, False
    patch.setattr(broken, "logits", lambda hidden: fault(honest(hidden)) if on else honest(hidden))

    def phase(name: str) -> None:
        nonlocal on
        on = name == "decode" and round == 0

    settings = {"max_new_tokens": COUNT, "method": "sd", "inputs": INPUTS, **settings}
    inputs = settings.pop("inputs")
    stream = saccade.stream(fresh(), inputs, draft=fresh(True), on_phase=phase, **settings)
    seen: dict[int, int] = {}
    for step in stream:
        seen[step.request] = seen.get(step.request, 0) + 1
        on = on or min(seen.values()) >= round > 0
    return stream.results


def _raise(error: BaseException) -> Callable[[Tensor], Tensor]:
    def fault(logits: Tensor) -> Tensor:
        raise error

    return fault


# -- the draft ---------------------------------------------------------------------------------

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda logits: torch.full_like(logits, float("nan")),
    "one NaN": lambda logits: logits.index_fill(1, torch.tensor([7]), float("nan")),
    "infinity": lambda logits: torch.full_like(logits, float("inf")),
    "minus infinity": lambda logits: torch.full_like(logits, float("-inf")),
    "too few ids": lambda logits: logits[:, :9],
    "one dimension less": lambda logits: logits[0],
    "no rows": lambda logits: logits[:0],
    "no room on the GPU": _raise(OUT_OF_MEMORY),
    "no memory": _raise(MemoryError("no room")),
    "an error of its own": _raise(RuntimeError("a kernel failed")),
}
NAMED = {  # what an arg-max can be taken of is only refused, token by token
    *("one dimension less", "no rows", "no room on the GPU", "no memory", "an error of its own"),
    *("NaN", "one NaN"),
}


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("name", "round"), dealt(FAULTS, STARTS))
def test_a_draft_model_that_breaks_leaves_the_answer(name, round, monkeypatch):
    """Claim: whatever a draft model gives from some round on, the greedy answer is the target's,
    what raised is named as the reason, and the next answer drafts as before.
    """
    (result,) = tampered(fresh(True), FAULTS[name], round, monkeypatch)
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.finish_reason == "length"
    if name in NAMED:
        assert result.fallback_reason is not None and "drafting failed" in result.fallback_reason
    monkeypatch.undo()
    again = saccade.run(fresh(), INPUTS, draft=fresh(True), method="sd", max_new_tokens=COUNT)
    assert again.ids == result.ids and again.fallback_reason is None
    assert any(step.accepted for step in again.rounds)


@pytest.mark.representatives(4)
@pytest.mark.parametrize(("name", "round"), dealt(FAULTS, STARTS))
def test_a_draft_model_that_breaks_leaves_a_tree_too(name, round, monkeypatch):
    """Claim: the same for trees of top-k ids, which are chosen from rows without any law."""
    (result,) = tampered(fresh(True), FAULTS[name], round, monkeypatch, method="sd-tree")
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.finish_reason == "length"


@pytest.mark.representatives(4)
@pytest.mark.parametrize(("name", "round"), dealt(FAULTS, STARTS))
def test_a_draft_model_that_breaks_leaves_a_sampled_answer(name, round, monkeypatch):
    """Claim: the same under sampling, at a temperature near zero where the answer is known."""
    settings = dict(do_sample=True, temperature=1e-3, seed=2)
    (result,) = tampered(fresh(True), FAULTS[name], round, monkeypatch, **settings)
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.finish_reason == "length"


# -- the draft's process -----------------------------------------------------------------------

GARBLED: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "an unknown word": lambda message: ("hello", *message[1:]),
    "half a message": lambda message: message[:2],
    "another request": lambda message: (message[0], 99, *message[2:]),
    "an id beyond the vocabulary": lambda message: (*message[:3], 10**9, *message[4:]),
    "a word for an id": lambda message: (*message[:3], "seven", *message[4:]),
}


class Garbling(Inside):
    """A worker that speaks nonsense from some token on."""

    def __init__(self, garble: Callable[..., Any], after: int) -> None:
        super().__init__(lambda: 3)
        self.garble, self.after = garble, after

    def _tell(self, *message: Any) -> None:
        if message[0] == "token":
            self.after -= 1
            if self.after < 0:
                message = self.garble(message)
        super()._tell(*message)


@pytest.mark.representatives(3)
@ROUNDS
@pytest.mark.parametrize("name", GARBLED)
def test_a_worker_that_speaks_nonsense_leaves_the_answer(name, round):
    """Claim: malformed messages of a draft process cost speed only, and the result says why."""
    with hired(Garbling(GARBLED[name], 3 * round)):
        result = saccade.run(
            backbone(qwen25()),
            INPUTS,
            draft=backbone(noisy(qwen25, 0, 0.05)),
            method="pearl-syn",
            max_new_tokens=COUNT,
        )
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.fallback_reason is not None


def test_bytes_that_are_no_message_are_an_error_that_a_guard_takes():
    """Claim: garbage on the real line raises an ordinary exception, which ends drafting alone."""
    one = Worker.__new__(Worker)
    here, other = socket.socketpair()
    one.channel, one._job_number = Channel(here), 1
    try:
        other.send(HEADER.pack(9, 0, 0) + b"\x80\x05garbage")
        with pytest.raises(Exception, match="."):
            one.receive(1.0)
    finally:
        one.channel.close()
        other.close()


# -- the target --------------------------------------------------------------------------------


@pytest.mark.representatives(4)
@ROUNDS
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree"])
def test_a_target_of_nan_ends_its_answer_with_an_error(method, round, monkeypatch):
    """Claim: NaN from some round on ends the answer there: what was emitted before is right, the
    reason is "error", and the next answer of the same models is whole.
    """
    nan = FAULTS["NaN"]
    (result,) = tampered(fresh(), nan, round, monkeypatch, method=method)
    assert result.finish_reason == "error" and len(result.ids) < COUNT
    assert result.ids == truth("qwen2_5_vl")[: len(result.ids)]
    assert len(result.ids) >= round
    monkeypatch.undo()
    again = saccade.run(fresh(), INPUTS, draft=fresh(True), method=method, max_new_tokens=COUNT)
    assert again.ids == truth("qwen2_5_vl")[:COUNT] and again.finish_reason == "length"


@pytest.mark.parametrize("row", range(6))
def test_a_nan_in_any_row_of_a_verification_is_no_token(row, monkeypatch):
    """Claim: NaN in row 0 to 5 of every verification: no token of it is ever emitted. What comes
    is the answer as far as no broken row decided, then "error"; a row that was not asked for its
    law (a node behind a refusal) harms nothing.
    """

    def fault(logits: Tensor) -> Tensor:
        broken = logits.clone()
        broken[row : row + 1] = float("nan")
        return broken

    (result,) = tampered(fresh(), fault, 1, monkeypatch)
    assert result.ids == truth("qwen2_5_vl")[: len(result.ids)]
    assert result.finish_reason == ("length" if len(result.ids) == COUNT else "error")


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["ar", "sd/shape=chain-2"])
@pytest.mark.parametrize("round", [1, 5])
def test_nan_in_one_row_of_a_batch_harms_no_other(method, round, monkeypatch):
    """Claim: of three requests the second one's rows are NaN from some round on: it ends with
    "error" and a right beginning, the others answer as alone.
    """
    many = [video_input(0), video_input(1, (2, 4, 4)), video_input(2)]
    alone = [saccade.run(fresh(), one, method="ar", max_new_tokens=COUNT).ids for one in many]
    done = False

    def fault(logits: Tensor) -> Tensor:
        nonlocal done
        if done or len(logits) % 3:  # it has ended, and has no rows any more
            return logits
        each = len(logits) // 3
        broken = logits.clone()
        broken[each : 2 * each] = float("nan")
        done = True
        return broken

    results = tampered(
        fresh(), fault, round, monkeypatch, inputs=left_padded(many), method=method,
        max_new_tokens=COUNT,
    )  # fmt: skip
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert (results[0].ids, results[2].ids) == (alone[0], alone[2])
    assert results[1].ids == alone[1][: len(results[1].ids)] and len(results[1].ids) < COUNT


def short_of_memory(error: BaseException, round: int, method: str, patch: Any) -> Result:
    """An answer whose target has no room for a forward of more than one row, from a round on."""
    target, on = fresh(), False
    honest = target.forward

    def forward(embeds: Tensor, *rest: Any, **named: Any) -> Tensor:
        if on and len(embeds) > 2:  # a pending token may come with one more
            raise error
        return honest(embeds, *rest, **named)

    patch.setattr(target, "forward", forward)

    def phase(name: str) -> None:
        nonlocal on
        on = name == "decode" and round == 0

    stream = saccade.stream(
        target, INPUTS, draft=fresh(True), method=method, max_new_tokens=COUNT, on_phase=phase
    )
    for number, _ in enumerate(stream, 1):
        on = on or number >= round > 0
    return stream.results[0]


@pytest.mark.representatives(3)
@ROUNDS
@pytest.mark.parametrize("method", ["sd", "sd-tree"])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, MemoryError()], ids=["cuda", "host"])
def test_a_target_without_room_for_a_tree_goes_on_with_one_row(error, method, round, monkeypatch):
    """Claim: where the target has no memory to judge what was drafted, that round is judged with
    the plain row alone, the answer goes on by plain decoding, and the result says why.
    """
    result = short_of_memory(error, round, method, monkeypatch)
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.finish_reason == "length"
    assert result.fallback_reason is not None and "memory" in result.fallback_reason


def test_a_target_without_room_for_one_row_is_a_sentence(monkeypatch):
    """Claim: plain decoding that runs out of memory is one sentence, as before: there is nothing
    smaller to try."""
    target = fresh()
    monkeypatch.setattr(target, "logits", _raise(OUT_OF_MEMORY))
    with pytest.raises(saccade.ModelError, match="for keys and values") as caught:
        saccade.run(target, INPUTS, method="ar", max_new_tokens=4)
    assert "\n" not in str(caught.value)
