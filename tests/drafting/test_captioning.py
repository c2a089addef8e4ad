"""Claims about captions made beside the target's prefill: when, the same answer, told apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from helpers import Letters, backbone, noisy, qwen25, video_input

import saccade
from saccade.core.result import Result
from saccade.drafting import captioning
from saccade.engine.generate import stream
from saccade.model.session import Session

PATIENCE = 20.0  # seconds until what has to meet is taken to have missed each other
BESIDE, AFTER = "a free core", "none"
METHODS = ("tabed-mtcp", "sd/view=caption", "pearl/view=caption")
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 5}


@pytest.fixture(params=[BESIDE, AFTER])
def where(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a core is free beside those that the target uses."""
    free = int(request.param == BESIDE)
    monkeypatch.setattr(captioning, "own_cpus", lambda: range(torch.get_num_threads() + free))
    return str(request.param)


def phrase(inputs: Mapping[str, Any]) -> list[str]:
    return ["a red box on a blue circle"]


@cache
def clip() -> dict[str, Any]:
    """Made once, in torch's usual type, because other types draw other pixels."""
    return video_input(0, grid=(2, 4, 6))


def begun(captioner: Callable[..., Any] = phrase, method: str = METHODS[0], **settings: Any) -> Any:
    return stream(
        backbone(qwen25(0)),
        clip(),
        draft=backbone(noisy(qwen25, 0, 0.1)),
        method=method,
        tokenizer=Letters(),
        captioner=captioner,
        **{"max_new_tokens": 12, "do_sample": False, **settings},
    )


def answer(captioner: Callable[..., Any] = phrase, method: str = METHODS[0], **more: Any) -> Result:
    return begun(captioner, method, **more).finish()[0]


@cache
def plain(**settings: Any) -> tuple[int, ...]:
    return answer(method="ar", **settings).ids


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", METHODS)
def test_captions_are_made_while_the_target_reads(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: with a core to spare the captioner is at work in a thread of its own while the target
    reads its prompt: each waits until the other has begun. Fails where one comes after the other,
    which ends in the captioner's error."""
    monkeypatch.setattr(captioning, "own_cpus", lambda: range(torch.get_num_threads() + 1))
    plain()  # a target's first answer also compares its logits with the model's own
    captioning_began, reading_began = threading.Event(), threading.Event()
    read = Session.prefill_in_chunks
    met, threads = [], []

    def reading(self: Session, *given: Any, **more: Any) -> Iterator[Any]:
        reading_began.set()
        met.append(captioning_began.wait(PATIENCE))
        return read(self, *given, **more)

    def captioner(inputs: Mapping[str, Any]) -> list[str]:
        captioning_began.set()
        threads.append((threading.current_thread(), torch.get_num_threads()))
        met.append(reading_began.wait(PATIENCE))
        assert not torch.is_grad_enabled()
        return phrase(inputs)

    monkeypatch.setattr(Session, "prefill_in_chunks", reading)
    before = torch.get_num_threads()
    result = answer(captioner, method)
    assert len(met) > 1 and all(met) and result.fallback_reason is None
    ((thread, number),) = threads
    assert thread is not threading.current_thread() and number == 1
    assert result.ids == plain() and torch.get_num_threads() == before


def test_without_a_free_core_the_first_token_does_not_wait_for_captions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: where the target uses every core, captions are made after it has read and its first
    token is told; not at all for an answer that ends with that."""
    monkeypatch.setattr(captioning, "own_cpus", lambda: range(torch.get_num_threads()))
    threads: list[threading.Thread] = []

    def captioner(inputs: Mapping[str, Any]) -> list[str]:
        threads.append(threading.current_thread())
        return phrase(inputs)

    rounds = begun(captioner)
    assert next(rounds).opening and not threads
    (result,) = rounds.finish()
    assert threads == [threading.current_thread()] and result.ids == plain()
    assert answer(captioner, max_new_tokens=1).fallback_reason is None
    assert len(threads) == 1


@pytest.mark.representatives(1)
@pytest.mark.parametrize("rules", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS[:2])
def test_when_captions_are_made_changes_no_token(
    method: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: made before or beside, by a fast captioner or a slow one, the same tokens are drafted
    and emitted, under sampling too: the draft reads the caption once it is there. Control: another
    caption drafts others."""

    def slow(inputs: Mapping[str, Any]) -> list[str]:
        time.sleep(0.1)
        return phrase(inputs)

    drafted = []
    for free, captioner in ((0, phrase), (1, phrase), (1, slow), (1, lambda inputs: ["two"])):
        cores = range(torch.get_num_threads() + free)
        monkeypatch.setattr(captioning, "own_cpus", lambda cores=cores: cores)
        result = answer(captioner, method, **rules)
        assert result.fallback_reason is None
        assert rules or result.ids == plain()
        drafted.append((result.ids, [round.tokens for round in result.rounds]))
    assert drafted[0] == drafted[1] == drafted[2]
    assert drafted[0][1] != drafted[3][1]


def test_captions_are_booked_apart(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a result tells the seconds that captions took, no fewer than they are known to, and
    how many of them nobody waited for: none where no core was free, else what passed while the
    target read. Nothing is booked twice: what somebody waited for is in no other stage. Without a
    captioner both are 0."""
    done = threading.Event()
    read = Session.prefill_in_chunks

    def captioner(inputs: Mapping[str, Any]) -> list[str]:
        time.sleep(0.2)
        done.set()
        return phrase(inputs)

    def reading(self: Session, *given: Any, **more: Any) -> Iterator[Any]:
        assert where == AFTER or done.wait(PATIENCE)
        return read(self, *given, **more)

    monkeypatch.setattr(Session, "prefill_in_chunks", reading)
    timings = answer(captioner).timings
    assert timings.caption >= 0.2 and (timings.caption_hidden > 0) == (where == BESIDE)
    assert timings.caption_hidden <= timings.caption
    before = timings.vision + timings.prefill + timings.guide + timings.draft_prefill
    assert before + timings.caption - timings.caption_hidden + timings.decode <= timings.total
    bare = answer(captioner, "sd").timings
    assert (bare.caption, bare.caption_hidden) == (0, 0)


def test_a_further_turn_makes_no_caption(where: str) -> None:
    """Claim: a second question over the same caches asks for no caption and books none."""
    calls: list[object] = []

    def captioner(inputs: Mapping[str, Any]) -> list[str]:
        calls.append(inputs)
        return phrase(inputs)

    inputs = video_input(0, grid=(2, 4, 6))
    with saccade.Conversation(
        backbone(qwen25(0)),
        draft=backbone(noisy(qwen25, 0, 0.1)),
        method="tabed-mtcp",
        tokenizer=Letters(),
        captioner=captioner,
        max_new_tokens=6,
    ) as talk:
        first = talk.run(inputs)
        more = torch.tensor([[*inputs["input_ids"][0].tolist(), *first.ids, 40, 41]])
        types = torch.zeros_like(more)
        types[:, : inputs["input_ids"].shape[1]] = inputs["mm_token_type_ids"]
        again = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        second = talk.run({**inputs, **again, "mm_token_type_ids": types})
    assert len(calls) == 1 and second.reused_tokens > 0
    assert first.timings.caption > 0
    assert (second.timings.caption, second.timings.caption_hidden) == (0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_captioners_error_is_reported_wherever_it_ran(where: str, method: str) -> None:
    """Claim: a captioner that raises ends drafting with its words and not the answer, in a thread
    as in the caller's. Fails if a thread's error is lost, or waited for without end."""

    def broken(inputs: Mapping[str, Any]) -> list[str]:
        raise RuntimeError("no caption today")

    result = answer(broken, method)
    assert result.ids == plain()
    assert result.fallback_reason == "drafting failed with RuntimeError: no caption today"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["specvlm", "tabed-mtcp"])
def test_a_captioner_that_is_loaded_meanwhile_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: loading a model in bf16 makes that torch's default type for all threads meanwhile; the
    target's prompt, what it attends to, and an ensemble's weights stay in their own. Fails where a
    tensor of theirs is made without a type, as an answer's first did beside its captioner."""
    usual, seen = Session.prefill_in_chunks, []

    def reading(self: Session, *args: Any, **how: Any) -> Iterator[Any]:
        for guide in usual(self, *args, **how):
            yield guide
            seen.extend([] if guide is None or guide.mass is None else [guide.mass.dtype])

    expected = answer(method=method)
    monkeypatch.setattr(Session, "prefill_in_chunks", reading)
    try:
        torch.set_default_dtype(torch.bfloat16)
        result = answer(method=method)
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.fallback_reason is None and result.ids == expected.ids
    assert [round.accepted for round in result.rounds] == [r.accepted for r in expected.rounds]
    assert set(seen) <= {torch.float32} and bool(seen) is (method == "specvlm")
