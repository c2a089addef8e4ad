"""Claims about watching a live video: answers are ``generate``'s on what is kept."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import zoo
from heads import head_of
from torch import Tensor

import saccade
from saccade.answering.live_video import Live, Window, _frames_of_file
from saccade.core.errors import OptionError, SaccadeError
from saccade.inputs import Pair
from saccade.model.backbone import Backbone
from saccade.world import drawing, scenes

pytestmark = pytest.mark.usefixtures("unchecked")

COUNT = 10
SIDE = 56


def watched(family: str = "qwen2.5-vl", method: str = "sd", **settings: Any) -> Live:
    """A live video of a tiny model of a family, whose frames come by hand."""
    pair = Pair(zoo.member(family), zoo.draft_of(family))
    always: dict[str, Any] = {"window": "16 frames", "segment": 2, "max_new_tokens": COUNT}
    return saccade.Model(pair, method).watch(**{**always, "do_sample": False, **settings})


def frame(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def truth(live: Live, question: str, family: str = "qwen2.5-vl") -> list[int]:
    """What transformers' generate answers to what is kept."""
    return zoo.hf_greedy(zoo.member(family), live.inputs(question), COUNT)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("qwen2.5-vl", method) for method in ("ar", "sd", "specvlm", "std", "auto")),
        ("qwen3-vl", "specvlm"),
        ("llava-onevision", "sd"),
        ("qwen3.5", "sd"),
    ],
)
@pytest.mark.representatives(1)
def test_answers_at_any_time_are_generates_on_what_is_kept(family, method):
    """Claim: questions while frames come, with a segment that is not full, twice in a row, and
    after the oldest were dropped, get ``generate``'s answer to what is kept, and the draft works.

    The control is that later prompts really differ: something was dropped."""
    with watched(family, method) as live:
        answers = 0
        for number in range(45):
            live.append(frame(number))
            if number in (0, 7, 8, 21, 30, 44):
                for question in ("What is there?", "And now?")[: 1 + (number == 21)]:
                    expected = truth(live, question, family)
                    result = live.ask(question)
                    assert list(result.ids) == expected, number
                    assert result.fallback_reason is None
                    answers += 1
        assert live.kept_seconds[0] > 0 and len(live.history) < answers
        assert sum(len(each.clip.frames) for each in live.segments) <= 16


def test_a_question_reads_only_itself(monkeypatch):
    """Claim: frames are read as they come, so that the target reads no more than the question and
    a few tokens of the template when it is asked; and all of the waiting is before it.

    Fails if read-ahead rows are dropped or read again."""
    with watched(method="ar", window="64 frames") as live:
        for number in range(20):
            live.append(frame(number))
        prompt = live.inputs("What is there?")["input_ids"].shape[1]
        result = live.ask("What is there?")
        assert result.reused_tokens > prompt - 40
        assert result.prompt_tokens == prompt


def test_no_frame_is_encoded_twice_and_rows_are_read_twice_at_most(monkeypatch):
    """Claim: over 120 frames and a window of 16 the tower runs on each frame once, and the target
    reads at most two rows for each row of the video, beside the words around it."""
    read: list[int] = []
    forward = Backbone.forward

    def counted(self: Backbone, embeds: Any, *args: Any, **named: Any) -> Any:
        read.append(len(embeds))
        return forward(self, embeds, *args, **named)

    monkeypatch.setattr(Backbone, "forward", counted)
    model = zoo.member("qwen2.5-vl").backbone.model
    encoded: list[int] = []
    tower = model.base_model.visual.patch_embed
    hook = tower.register_forward_pre_hook(lambda module, args: encoded.append(len(args[0])))
    try:
        with watched(method="ar") as live:
            live.append(frame(0))
            live.append(frame(1))
            patches, tokens = encoded[0], live.segments[0].tokens
            for number in range(2, 120):
                live.append(frame(number))
    finally:
        hook.remove()
    assert encoded == [patches] * 60
    head_tokens = 40  # of the template before the first segment, more than there are
    drops = 120 // 8
    assert sum(read) <= 2 * 60 * (tokens + 1) + drops * head_tokens


def memory_of(live: Live) -> int:
    """Bytes of the target's cache, of vision outputs, and of frames."""
    call = live._conversation._last_batch
    assert call is not None
    frames = sum(each.clip.frames.nbytes for each in live.segments)
    return call.session.requests[0].cache.bytes + call.vision.bytes + frames


@pytest.mark.slow
def test_six_hundred_frames_take_no_more_memory_than_sixty():
    """Claim: 600 frames are appended and five questions asked; each answer is ``generate``'s, and
    what is held after any frame is no more than what was held within the first 60."""
    with watched(method="specvlm", window="32 frames", segment=4) as live:
        largest, question_count = {True: 0, False: 0}, 0
        for number in range(600):
            live.append(frame(number))
            if number in (50, 170, 299, 431, 599):
                expected = truth(live, "What is there?")
                assert list(live.ask("What is there?").ids) == expected
                question_count += 1
            if number >= 4:
                early = number < 60
                largest[early] = max(largest[early], memory_of(live))
        assert question_count == 5 and live.seen_frames == 600
        assert largest[False] <= largest[True]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("window", "seconds"), [("300 tokens", None), (6.0, 6.0), ("6 s", 6.0), ("12 frames", 6.0)]
)
def test_every_kind_of_window_bounds_what_is_kept(window, seconds):
    """Claim: seconds, frames and tokens bound the prompt, and an answer is still exact."""
    with watched(method="sd", window=window) as live:
        for number in range(60):
            live.append(frame(number))
            if seconds is not None:
                begin, end = live.kept_seconds
                assert end - begin < seconds
        expected = truth(live, "What is there?")
        assert list(live.ask("What is there?").ids) == expected
        if seconds is None:
            assert live.inputs("x")["input_ids"].shape[1] <= 300 + 30 + live.segments[0].tokens


def test_a_window_in_tokens_holds_what_came_during_an_answer():
    """Claim: frames that come while an answer is under way count when the next question is asked:
    what does not fit into the window is dropped, however many there were, and the latest stay."""
    with watched(method="sd", window="100 tokens") as live:
        for number in range(8):
            live.append(frame(number))
        stream = live.stream("What is there?")
        next(stream)
        for number in range(8, 108):
            live.append(frame(number))
        stream.close()
        inputs = live.inputs("What is there?")
        assert inputs["input_ids"].shape[1] <= 100 + 30
        expected = zoo.hf_greedy(zoo.member("qwen2.5-vl"), inputs, COUNT)
        assert list(live.ask("What is there?").ids) == expected
        assert (live.latest_frames(1)[0][0] == frame(107)).all()
        assert live.latest_frames(0) == []


def test_frames_of_one_time_are_all_kept():
    """Claim: several frames may have one time, at any frame rate, but none an earlier one than the
    last. Fails if the frames are looked up by their times."""
    with watched(fps=0.01) as live:
        for number in range(5):  # A whole segment and one frame that waits.
            live.append(frame(number), 100.0)
        with pytest.raises(OptionError, match="before the last one"):
            live.append(frame(5), 99.95)
        assert [time for _, time in live.latest_frames(9)] == [100.0] * 5
        assert all((live.latest_frames(9)[n][0] == frame(n)).all() for n in range(5))


def test_a_question_that_raises_does_not_stop_the_watching():
    """Claim: after an error in the middle of an answer frames are read on, and the next question
    is answered as ever."""

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError

    with watched(method="sd") as live:
        for number in range(4):
            live.append(frame(number))
        with pytest.raises(ZeroDivisionError):
            live.ask("What is there?", logits_processor=[fail])
        for number in range(4, 12):
            live.append(frame(number))
        assert live.history == []
        expected = truth(live, "What is there?")
        assert list(live.ask("What is there?").ids) == expected


@pytest.mark.extra
def test_a_static_camera_is_no_special_case():
    """Claim: frames that are all the same, of which the oldest are dropped, answer exactly."""
    with watched(method="specvlm") as live:
        for number in range(40):
            live.append(frame(0))
            if number % 13 == 12:
                expected = truth(live, "What is there?")
                assert list(live.ask("What is there?").ids) == expected


def test_a_drop_frees_what_reference_cycles_hold():
    """Claim: when the oldest frames are dropped, unreachable cycles are freed, also where Python's
    collector does not come by. Fails if memory waits for the collector."""

    class Node:
        """An object that refers to itself."""

        def __init__(self) -> None:
            self.own = self

    with watched(method="ar", window="4 frames") as live:
        live.append(frame(0))
        gc.disable()
        try:
            node = weakref.ref(Node())
            assert node() is not None
            for number in range(1, 8):
                live.append(frame(number))
            assert live.kept_seconds[0] > 0 and node() is None
        finally:
            gc.enable()


def test_an_iterator_is_watched_in_its_own_thread():
    """Claim: an iterator's frames come while questions are asked, and its end is noticed."""

    def camera() -> Iterator[np.ndarray]:
        for number in range(12):
            time.sleep(0.001)
            yield frame(number)

    with watched(method="sd", source=camera(), window="64 frames") as live:
        assert live.wait(60) and live.seen_frames == 12
        expected = truth(live, "What is there?")
        assert list(live.ask("What is there?").ids) == expected


def test_a_file_is_watched(tmp_path: Path):
    """Claim: a file's frames come with their own times, two a second, each once."""
    path = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), path, 8, 112)
    with watched(method="sd", source=path, realtime=False, window="64 frames") as live:
        assert live.wait(60)
        whole = saccade.inputs.media.read(path, saccade.inputs.media.FrameSampling(fps=2))
        frames = [each for segment in live.segments for each in segment.clip.frames]
        frames += [picture for picture, _ in live._waiting]
        assert len(frames) == live.seen_frames == len(whole.frames)
        assert all(np.array_equal(one, two) for one, two in zip(frames, whole.frames, strict=True))


@pytest.mark.parametrize("fps", [0.05, 0.25, 0.7, 3.0])
def test_frames_of_a_file_keep_their_distance(tmp_path: Path, fps: float):
    """Claim: a watched file gives the frames of one even sample, though it is read in blocks. Fails
    where a block begins its own sample."""
    path = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), path, 25, 56)
    whole = saccade.inputs.media.read(path, saccade.inputs.media.FrameSampling(fps=fps))
    times = [time for _, time in _frames_of_file(path, fps)]
    assert times == pytest.approx(whole.timestamps.tolist())


@pytest.mark.parametrize(("rate", "count", "fps"), [(24000 / 1001, 300, 30.0), (0.35, 12, 1.0)])
def test_a_frame_that_two_blocks_share_comes_once(
    rate: float, count: int, fps: float, tmp_path: Path
) -> None:
    """Claim: of a file with fewer frames a second than are taken, each frame comes once, also where
    a new block of the file is read while it is seen."""
    path = tmp_path / "slow.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=Fraction(rate).limit_denominator(2000))
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(count):
            picture = np.full((64, 64, 3), 20 + 40 * (number % 5), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    assert len(list(_frames_of_file(path, fps))) == count


def test_what_a_source_raises_is_raised_to_who_asks():
    """Claim: a broken source does not end in silence."""

    def broken() -> Iterator[np.ndarray]:
        yield frame(0)
        raise OSError("the camera was unplugged")

    with watched(source=broken()) as live, pytest.raises(OSError, match="unplugged"):
        live.wait(60)


def test_misuse_is_told_in_a_sentence():
    """Claim: no frame, other sizes, times that go back, a window that is none, and a question
    during an answer are refused, and the live video goes on."""
    for bad in ("soon", "0 s", "3 cats", -1, True, "4 frames/2"):
        with pytest.raises(OptionError, match="window="):
            Window.of(bad)
    with pytest.raises(SaccadeError, match="two segments"):
        watched(window="3 frames")
    for wrong in ({"segment": 2.5}, {"segment": 0}, {"fps": float("nan")}, {"fps": float("inf")}):
        with pytest.raises(OptionError, match="(segment|fps)="):
            watched(**wrong)
    with watched() as live:
        with pytest.raises(OptionError, match="no frame has come"):
            live.ask("What is there?")
        live.append(frame(0), 5.0)
        with pytest.raises(OptionError, match="before the last one"):
            live.append(frame(1), 1.0)
        with pytest.raises(OptionError, match="no number of seconds"):
            live.append(frame(1), float("nan"))
        with pytest.raises(OptionError, match="keeps one size"):
            live.append(np.zeros((20, 30, 3), np.uint8))
        with pytest.raises(OptionError, match="a frame must be"):
            live.append(torch.zeros(3, 3))
        stream = live.stream("What is there?")
        next(stream)
        for number in range(6):
            live.append(frame(number))
        with pytest.raises(OptionError, match="under way"):
            live.ask("And now?")
        stream.finish()
        expected = truth(live, "And now?")
        assert list(live.ask("And now?").ids) == expected


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("kind", ["mtp", "specforge"])
def test_a_head_drafts_for_a_live_video(kind):
    """Claim: a head drafts for answers about a live video, whose frames are read ahead and whose
    oldest are dropped. Fails if a row that is read ahead or read again has no hidden states."""
    target = zoo.member("qwen2.5-vl")
    head = head_of(target.backbone.model, kind)
    pair = Pair(replace(target, backbone=head.target), replace(target, backbone=head))
    settings: dict[str, Any] = {"window": "16 frames", "segment": 2, "max_new_tokens": COUNT}
    with saccade.Model(pair, "head").watch(**settings, do_sample=False) as live:
        for number in range(31):
            live.append(frame(number))
            if number in (0, 7, 8, 30):
                expected = truth(live, "What is there?")
                result = live.ask("What is there?")
                assert list(result.ids) == expected, number
                assert result.fallback_reason is None and not result.warnings
                assert any(round.tokens for round in result.rounds)
        assert live.kept_seconds[0] > 0
