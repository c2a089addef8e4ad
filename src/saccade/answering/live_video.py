"""Watches a live video: frames are read as they come, and questions are answered at any time.

**What is kept.** Frames are gathered into *segments* of a few frames, and each segment is a clip of
its own in the prompt. A question stands after the segments that came before it, as in a
conversation. When the window overflows, the oldest segments are dropped until half of the window is
left. A question is dropped with the last of its segments.

**What an answer is.** It is what ``generate`` answers to :meth:`Live.inputs`, which is what the
model's processor makes of the kept conversation as it stands. After a drop the kept segments move
to the positions that this prompt gives them, so the target reads them once more.

A frame is read by the target at most twice: when it comes, and after the first drop that it
survives. No frame survives two drops:

* A drop leaves at most half of the window. When the window overflows again, the segments that came
  since the drop fill more than half of it by themselves. The next drop ends only when at most half
  is left, so it takes every segment that survived the one before.
* The latest segment stays in every drop, even if it alone fills more than half of the window. In
  that case no other segment is left. So it is the oldest one at the next drop, and goes first.

The output of the vision tower is kept for every kept segment, so no frame is encoded twice.
"""

from __future__ import annotations

import gc
import math
import re
import threading
import time as clock
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from saccade.core.errors import OptionError
from saccade.core.generation_settings import GenerateArguments
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.engine.conversation import Conversation
from saccade.engine.generate import Stream
from saccade.inputs import media
from saccade.inputs.clip_cache import ClipCache
from saccade.inputs.media import Clip, FrameSampling, Image, Source
from saccade.inputs.questions import Dialogue, Pair

# How many frames a segment has by default. The vision tower may join several frames into one, and
# the number is rounded up to a multiple of these.
SEGMENT_FRAMES = 4
FILE_BLOCK_SECONDS = 10.0  # So many seconds of a file are decoded at once.
LONGEST_SLEEP_SECONDS = 0.2  # A thread that waits looks at the clock at least this often.
TIME_ROUNDING_SECONDS = 1e-6  # A frame may be so much older than the last one, by rounding.
JOIN_SECONDS = 10.0  # Closing waits so long for the source's thread.
USAGE = 'window= is seconds (60), "60 s", "120 frames" or "8000 tokens"'

Timed = tuple[Image, float]
"""A frame and the time when it was seen, in seconds."""


@dataclass(frozen=True)
class Window:
    """How much of a live video is kept at most.

    ``unit`` is "seconds", "frames" or "tokens". Tokens are those of the whole prompt with its text.
    """

    size: float
    unit: str = "seconds"

    @classmethod
    def of(cls, value: float | str | Window) -> Window:
        """Returns a window from seconds, or from a text such as "120 frames". Raises
        OptionError."""
        if isinstance(value, Window):
            return value
        number = r"\d+\.?\d*|\.\d+"  # such as 60, 2.5 or .5
        match = re.fullmatch(rf"\s*({number})\s*(s|seconds|frames|tokens)?\s*", str(value))
        if match is None or isinstance(value, bool):
            raise OptionError(f"{USAGE}, not {value!r}")
        unit = "seconds" if match[2] in (None, "s") else str(match[2])
        if not float(match[1]) > 0:
            raise OptionError(f"{USAGE}, and more than 0")
        return cls(float(match[1]), unit)

    def measure(self, segment: LiveSegment) -> float:
        """Returns how much of the window a segment takes."""
        sizes = {
            "seconds": segment.seconds,
            "frames": float(len(segment.clip.frames)),
            "tokens": float(segment.tokens),
        }
        return sizes[self.unit]


@dataclass(frozen=True, eq=False)
class LiveSegment:
    """A few frames that are one clip of the prompt.

    ``tokens`` is how many tokens of the prompt count as the segment's own: its visual tokens and a
    part of the text. It is 0 until the segment has been in an encoded prompt, because the number is
    unknown before that.
    """

    clip: Clip
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return len(self.clip.frames) / self.clip.sampled_fps


@dataclass(frozen=True)
class LiveTurn:
    """A question, its answer, and the segments that came before it since the last question."""

    segments: tuple[LiveSegment, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class _OpenQuestion:
    """A question whose answer is under way."""

    question: str
    stream: Stream


class Live(AbstractContextManager["Live"]):
    """A live video and the conversation about it; :meth:`saccade.Model.watch` makes one.

    Frames may be appended from one thread while another asks. Frames that come during an answer
    wait until it is whole. Use it in a ``with``, or close it, to free the caches.
    """

    def __init__(
        self,
        pair: Pair,
        conversation: Conversation,
        *,
        window: Window,
        fps: float,
        segment: int | None = None,
        source: Iterable[Timed] | None = None,
    ) -> None:
        if not 0 < fps < math.inf:
            raise OptionError("fps= is the number of frames a second, above 0")
        processor = getattr(pair.target.processor, "video_processor", None)
        joined_frames = int(getattr(processor, "temporal_patch_size", None) or 1)
        frames = SEGMENT_FRAMES if segment is None else segment
        if not isinstance(frames, int) or frames < 1:
            raise OptionError("segment= is a whole number of frames, 1 or more")
        # The vision tower joins `joined_frames` consecutive frames into one. A segment is rounded
        # up to a multiple of that: with 2 joined frames, a segment of 3 becomes one of 4.
        self.segment_frames = -(-frames // joined_frames) * joined_frames
        if window.unit == "frames" and window.size < 2 * self.segment_frames:
            raise OptionError(
                f"the window must have room for two segments of {self.segment_frames} frames"
            )
        self.window = window
        self.seen_frames = 0
        self._pair, self._conversation, self._fps = pair, conversation, fps
        self._clips = ClipCache()
        self._turns: list[LiveTurn] = []
        self._unasked_segments: list[LiveSegment] = []  # since the last question
        self._waiting: deque[Timed] = deque()  # frames that are in no segment yet
        self._last_time: float | None = None  # When the last frame was seen, in seconds.
        self._question_under_way: _OpenQuestion | None = None
        # Guards the conversation, its segments and its turns. It is not held while a caller
        # exhausts a stream: then `_question_under_way` keeps new frames waiting.
        self._conversation_lock = threading.RLock()
        self._waiting_lock = threading.Lock()  # Guards the frames that wait.
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if source is not None:
            self._thread = threading.Thread(target=self._watch, args=(source,), daemon=True)
            self._thread.start()

    # -- frames --------------------------------------------------------------------------------

    def append(self, frame: Any, time: float | None = None) -> None:
        """Appends a frame. Unless an answer is under way, whole segments are read ahead.

        Args:
            frame: a PIL image, or a uint8 array of shape [height, width, 3]; all of one size.
            time: when it was seen, in seconds; by default one frame (at ``fps``) after the last.

        Raises:
            OptionError: for what is no picture, a picture of another size than those before it,
                and a time that is not finite or that is before the last frame's.
        """
        picture = _picture(frame)
        with self._waiting_lock:
            last = self._last_time
            next_time = 0.0 if last is None else last + 1 / self._fps
            seconds = next_time if time is None else float(time)
            if not math.isfinite(seconds):
                raise OptionError(f"time={time} is no number of seconds")
            # The last frame's time may be a sum, which is rounded.
            if last is not None and seconds < last - TIME_ROUNDING_SECONDS:
                raise OptionError(f"the frame at {seconds:g} s comes before the last one")
            self._check_size(picture)
            self._last_time = seconds
            self.seen_frames += 1
            self._waiting.append((picture, seconds))
            self._bound_waiting()
        # A question may hold the lock for as long as its answer takes. This call does not wait for
        # the lock then: the frame waits instead, for a later frame or question.
        if self._conversation_lock.acquire(blocking=False):
            try:
                self._finish_turn()
                if self._question_under_way is None and len(self._waiting) >= self.segment_frames:
                    self._read_waiting()
            finally:
                self._conversation_lock.release()

    def _check_size(self, picture: Image) -> None:
        """Raises OptionError for a frame that is not as large as the one before it."""
        shape = self._waiting[-1][0].shape if self._waiting else None
        if shape is None and self.segments:
            shape = self.segments[-1].clip.frames.shape[1:]
        if shape is not None and shape != picture.shape:
            raise OptionError(
                f"this frame is {picture.shape[1]}x{picture.shape[0]}, and the frames before it "
                f"are {shape[1]}x{shape[0]}: a live video keeps one size"
            )

    def _bound_waiting(self) -> None:
        """Drops the oldest waiting frames, where more wait than a window holds.

        Frames wait while an answer is under way, however long that takes. A window in tokens is
        converted to frames by the tokens of the segments that were encoded. Before any was
        encoded, each frame counts as one token.
        """
        max_frames = self.window.size
        if self.window.unit == "seconds":
            max_frames *= self._fps
        elif self.window.unit == "tokens":
            counts = [each.tokens for each in self.segments if each.tokens]
            # Some segments' counts include text, so the smallest count is taken.
            tokens_per_segment = min(counts, default=self.segment_frames)
            max_frames *= self.segment_frames / tokens_per_segment
        while len(self._waiting) > max(max_frames, self.segment_frames):
            self._waiting.popleft()

    def _read_waiting(self) -> None:
        """Makes whole segments of the frames that wait, and lets the target read them ahead."""
        while len(self._waiting) >= self.segment_frames:
            self._make_segment()
        self._drop_oldest()
        inputs, draft_inputs = self._encode_window("")
        self._conversation.read_ahead(inputs, draft_inputs=draft_inputs)

    def _make_segment(self) -> None:
        """Makes a segment of the oldest frames that wait. If they are too few, the last one is
        repeated."""
        with self._waiting_lock:
            count = min(self.segment_frames, len(self._waiting))
            timed = [self._waiting.popleft() for _ in range(count)]
        frames, times = zip(*timed, strict=True)
        missing = self.segment_frames - count
        frames = (*frames, *frames[-1:] * missing)
        times = (*times, *times[-1:] * missing)
        clip = Clip(
            frames=np.stack(frames),
            timestamps=np.array(times, dtype=np.float64),
            duration=times[-1] + 1 / self._fps,
            fps=self._fps,
            source_frames=len(frames),
            sampled_fps=self._fps,
        )
        self._unasked_segments.append(LiveSegment(clip))

    # -- the window ----------------------------------------------------------------------------

    @property
    def segments(self) -> list[LiveSegment]:
        """All segments that are kept, oldest first."""
        return [*(each for turn in self._turns for each in turn.segments), *self._unasked_segments]

    @property
    def kept_seconds(self) -> tuple[float, float]:
        """The times of the oldest and the latest frame in a segment, in seconds; (0, 0) if there is
        no segment. Frames that wait do not count."""
        segments = self.segments
        if not segments:
            return 0.0, 0.0
        return float(segments[0].clip.timestamps[0]), float(segments[-1].clip.timestamps[-1])

    def latest_frames(self, count: int) -> list[Timed]:
        """Returns the latest frames that are kept or wait, at most ``count``, oldest first."""
        with self._waiting_lock:
            waiting = [*self._waiting]
        if count <= 0:
            return []
        # A segment has at least one frame, so the last `count` segments are enough.
        kept = [
            timed
            for segment in self.segments[-count:]
            for timed in zip(segment.clip.frames, segment.clip.timestamps.tolist(), strict=True)
        ]
        frames: list[Timed] = []
        for frame, time in [*kept, *waiting]:
            # The last frame is repeated to fill a segment. The copies have its time too.
            is_copy = bool(frames) and frames[-1][1] == time and (frames[-1][0] == frame).all()
            if not is_copy:
                frames.append((frame, time))
        return frames[-count:]

    @property
    def history(self) -> list[tuple[str, str]]:
        """The questions that are kept, with their answers."""
        with self._conversation_lock:
            self._finish_turn()
            return [(turn.question, turn.answer) for turn in self._turns]

    def _drop_oldest(self) -> bool:
        """Drops the oldest segments until half of the window is left, if they overflow the window.

        The latest segment always stays. Returns whether the segments had overflowed the window.
        """
        sizes = [self.window.measure(each) for each in self.segments]
        total = sum(sizes)
        if total <= self.window.size:
            return False
        left_to_drop = 0
        while total > self.window.size / 2 and left_to_drop < len(sizes) - 1:
            total -= sizes[left_to_drop]
            left_to_drop += 1
        kept_turns: list[LiveTurn] = []
        for turn in self._turns:
            count = min(left_to_drop, len(turn.segments))
            left_to_drop -= count
            kept_segments = turn.segments[count:]
            # A question that never had segments of its own is kept if the one before it is kept.
            follows_kept_turn = not turn.segments and bool(kept_turns)
            if kept_segments or follows_kept_turn:
                kept_turns.append(replace(turn, segments=kept_segments))
        self._turns = kept_turns
        self._unasked_segments = self._unasked_segments[left_to_drop:]
        # Each prompt leaves reference cycles behind. In a process as large as this one Python
        # collects them so rarely that memory would grow for hours.
        gc.collect()
        return True

    def _count_tokens(self, inputs: Inputs) -> None:
        """Stores how many tokens each newly encoded segment takes.

        ``inputs`` is the prompt with all kept segments. The stored tokens of earlier segments are
        subtracted from its length, and the rest is divided equally among the new segments. The rest
        includes the text that was added since the last count, such as a question and its answer.
        """
        new = [each for each in self.segments if not each.tokens]
        counted = sum(each.tokens for each in self.segments)
        uncounted = int(inputs["input_ids"].shape[1]) - counted
        share = max(1, uncounted // max(1, len(new)))
        self._unasked_segments = [
            each if each.tokens else replace(each, tokens=share) for each in self._unasked_segments
        ]

    # -- questions -----------------------------------------------------------------------------

    def ask(self, question: str, **settings: Unpack[GenerateArguments]) -> Result:
        """Returns the answer to a question about what is kept now.

        ``settings`` apply to this question alone. Raises OptionError if no frame has come yet or
        another answer is under way, OptionError or ModelError if the question cannot be answered,
        and what the source raised.
        """
        with self._conversation_lock:
            result = self.stream(question, **settings).finish()[0]
            self._finish_turn()
        return result

    def stream(self, question: str, **settings: Unpack[GenerateArguments]) -> Stream:
        """Returns the stream of an answer, which yields its rounds as they come.

        Exhaust or close it before the next question.
        """
        with self._conversation_lock:
            self._raise_error()
            self._take_all_frames()
            inputs, draft_inputs = self._encode_window(question)
            stream = self._conversation.stream(inputs, draft_inputs=draft_inputs, **settings)
            self._question_under_way = _OpenQuestion(question, stream)
            return stream

    def inputs(self, question: str) -> Inputs:
        """Returns what ``generate`` would be given for this question: the processor's output for
        the conversation that is kept.

        The frames that have come so far become segments, as by :meth:`ask`.
        """
        with self._conversation_lock:
            self._take_all_frames()
            return self._encode_window(question)[0]

    def _take_all_frames(self) -> None:
        """Makes segments of all frames that wait, and drops the oldest segments where they overflow
        the window. Raises OptionError while an answer is under way, and where no frame has come."""
        self._finish_turn()
        if self._question_under_way is not None:
            raise OptionError("the last answer is under way: exhaust its stream or close it")
        while self._waiting:
            self._make_segment()
        self._drop_oldest()
        if not self.segments:
            raise OptionError("no frame has come yet: append one, or wait for the source")

    def _dialogue(self, question: str) -> Dialogue:
        """Returns the conversation that is kept, with one more question."""
        dialogue = Dialogue()
        for turn in self._turns:
            clips = [each.clip for each in turn.segments]
            dialogue = dialogue.ask(turn.question, clips=clips).answer(turn.answer)
        return dialogue.ask(question, clips=[each.clip for each in self._unasked_segments])

    def _encode_window(self, question: str) -> tuple[Inputs, Inputs | None]:
        """Returns what the processors give for the conversation that is kept, with one more
        question. Segments that do not fit into a window in tokens are dropped."""
        inputs, draft_inputs = self._encode(self._dialogue(question))
        self._count_tokens(inputs)
        # How many tokens the new segments have is known only now.
        if self._drop_oldest():
            inputs, draft_inputs = self._encode(self._dialogue(question))
        return inputs, draft_inputs

    def _encode(self, dialogue: Dialogue) -> tuple[Inputs, Inputs | None]:
        with self._clips.processing(self._pair.target.processor):
            return self._pair.converse(dialogue)

    def _finish_turn(self) -> None:
        """Ends the question under way, if its stream has ended.

        If the answer is whole, the question and the answer become a turn. If the stream was closed
        or failed before that, the question is forgotten.
        """
        open_question = self._question_under_way
        if open_question is None:
            return
        stream = open_question.stream
        if not (stream.results or stream.closed):
            return
        self._question_under_way = None
        if stream.results:
            answer = stream.results[0].text or ""
            turn = LiveTurn(tuple(self._unasked_segments), open_question.question, answer)
            self._turns.append(turn)
            self._unasked_segments = []

    # -- a source ------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the source has no more frames, has failed, or is watched no longer.

        It stays False where there is no source, because frames are given to :meth:`append`.
        """
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the source has ended, or so many seconds. Returns whether it has ended.

        None waits as long as it takes, and without a source that is forever. Raises what the source
        raised.
        """
        ended = self._ended.wait(seconds)
        self._raise_error()
        return ended

    def _watch(self, source: Iterable[Timed]) -> None:
        """Appends a source's frames, in a thread of its own."""
        try:
            for frame, time in source:
                if self._stop.is_set():
                    break
                self.append(frame, time)
        except BaseException as error:  # It is raised in the thread that asks or waits.
            self._error = error
        finally:
            self._ended.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Stops watching and frees the caches."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)  # A camera may never give its next frame.
        with self._conversation_lock:
            self._conversation.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def frames_of(source: Source | Iterable[Any], fps: float, realtime: bool) -> Iterator[Timed]:
    """Yields the frames of a file with their times, or those of an iterable as they come.

    ``fps`` frames a second are taken of a file. The frames of an iterable get times that are 1 /
    ``fps`` seconds apart.

    A file is decoded in blocks of a few seconds. With ``realtime`` its frames come at the speed at
    which it plays. Where decoding takes longer than that they come later, and none is left out.
    """
    if not isinstance(source, str | bytes) and isinstance(source, Iterable):
        for number, frame in enumerate(source):
            yield frame, number / fps
        return
    start = clock.monotonic()
    for frame, time in _frames_of_file(source, fps):
        if realtime:
            _sleep_until(start + time)
        yield frame, time


def _sleep_until(moment: float) -> None:
    while (seconds_left := moment - clock.monotonic()) > 0:
        clock.sleep(min(seconds_left, LONGEST_SLEEP_SECONDS))


def _frames_of_file(source: Any, fps: float) -> Iterator[Timed]:
    """Yields the frames of a file, about ``FILE_BLOCK_SECONDS`` at a time.

    A block is a whole number of frames long, so that the frames keep their distance from one block
    to the next.
    """
    frames_per_block = max(1, int(FILE_BLOCK_SECONDS * fps))
    frame_count = 0
    last: Timed | None = None  # The frame that was yielded last, with its time.
    duration = FILE_BLOCK_SECONDS  # Until the first block is read, the file's is not known.
    while frame_count / fps < duration:
        start = frame_count / fps
        stop = (frame_count + frames_per_block) / fps
        clip = media.read(source, FrameSampling(fps=fps, start=start, end=stop))
        duration = clip.duration
        for frame, time in zip(clip.frames, clip.timestamps.tolist(), strict=True):
            if last is None or not _is_shared(frame, time, last, start, clip.fps < fps):
                last = frame, time
                yield last
        frame_count += frames_per_block


def _is_shared(
    frame: Image, time: float, last: Timed, block_start: float, has_fewer_frames: bool
) -> bool:
    """Returns whether a frame of a block is the ``last`` one of the block before.

    ``has_fewer_frames`` says that the file has fewer frames a second than are taken. Then the frame
    that is seen when a block starts may have appeared before, and it has the block's start as its
    time.
    """
    last_frame, last_time = last
    if time <= last_time:
        return True
    return has_fewer_frames and time == block_start and bool((frame == last_frame).all())


def _picture(frame: Any) -> Image:
    """Returns a frame as an array. Raises OptionError for what is no picture."""
    picture = np.asarray(frame.convert("RGB") if _is_pil(frame) else frame)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise OptionError("a frame must be a PIL image or a uint8 array [height, width, 3]")
    return np.ascontiguousarray(picture)


def _is_pil(frame: Any) -> bool:
    from PIL.Image import Image as Picture

    return isinstance(frame, Picture)
