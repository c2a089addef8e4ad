"""The logic of the page of ``saccade ui --watch``; ``watch_page`` has its layout.

This page takes one video. The page of ``saccade ui --chat`` takes pictures too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from saccade.answering.chat_model import Model
from saccade.answering.live_video import Live, Window
from saccade.core.errors import OptionError
from saccade.ui import pictures
from saccade.ui.page_run import PageSettings, growing_answer, read_clip

SHOWN_FRAMES = 8  # The page's strip shows this many of the latest frames.
FPS = 2.0  # How many frames of each second of the video are read.


@dataclass
class Watching:
    """A live video of one browser tab, and what was said about it."""

    live: Live
    exchanges: list[tuple[float, str, str]] = field(default_factory=list)
    """(second of the latest frame when it was asked, question, answer) of each question so far."""


class PageWatcher:
    """What the page watches: one video at a time, for the browser tab that started it.

    Two tabs cannot watch at the same time, because a model is safe, and fastest, when a single
    thread uses it.
    """

    def __init__(self, model: Model, settings: PageSettings) -> None:
        self.model, self._settings = model, settings
        self._watching: tuple[str, Watching] | None = None
        self._lock = threading.Lock()

    def start(self, tab: str, upload: str | None, window: str, realtime: bool = True) -> Live:
        """Begins to watch a file from its start. Raises SaccadeError.

        ``window`` is how much of the video is kept at most, such as "60 s", "120 frames" or "8000
        tokens". With ``realtime`` the frames come at the speed at which the video plays.
        """
        if upload is None:
            raise OptionError("drop a video first")
        self._check_free(tab)
        # This raises for files that the page does not take.
        read_clip(example=None, upload=upload, settings=self._settings)
        Window.of(window)  # It raises for an invalid window, while the old video still goes on.
        self.stop(tab)
        with self._lock:
            self._check_free(tab)  # Another tab may have begun in the meantime.
            live = self.model.watch(
                upload,
                window=window,
                fps=FPS,
                realtime=realtime,
                max_new_tokens=self._settings.max_new_tokens,
                do_sample=False,
            )
            self._watching = tab, Watching(live)
        return live

    def _check_free(self, tab: str) -> None:
        if self._watching is not None and self._watching[0] != tab:
            raise OptionError("another tab watches a video here: stop it first")

    def get(self, tab: str) -> Watching | None:
        """Returns what a tab watches; None where it watches nothing."""
        watching = self._watching
        return None if watching is None or watching[0] != tab else watching[1]

    def ask(self, tab: str, question: str) -> Iterator[str]:
        """Yields the answer as it grows. Raises SaccadeError."""
        watching = self.get(tab)
        if watching is None:
            raise OptionError("nothing is watched yet: press Watch")
        if not question.strip():
            raise OptionError("there is no question: write one")
        stream = watching.live.stream(question)
        _, end = watching.live.kept_seconds
        result = yield from growing_answer(stream, self.model.pair.target.decode)
        text = result.text or ""
        watching.exchanges.append((end, question, text))
        yield text

    def stop(self, tab: str) -> None:
        """Ends what a tab watches, if anything."""
        with self._lock:
            watching = self.get(tab)
            if watching is not None:
                self._watching = None
                watching.live.close()


def frames_html(watching: Watching | None) -> str:
    """Returns HTML with the latest frames, and a line that says which seconds are kept."""
    if watching is None:
        return ""
    live = watching.live
    timed_frames = live.latest_frames(SHOWN_FRAMES)
    if not timed_frames:
        return pictures.message("waiting for the first frame …")
    begin, end = live.kept_seconds
    state = "the video has ended; " if live.has_ended else ""
    about = f"{state}{live.seen_frames} frames seen; {begin:.1f} s to {end:.1f} s are kept"
    frames, times = zip(*timed_frames, strict=True)
    return pictures.strip(np.stack(frames), [*times]) + pictures.message(about)


def conversation_html(watching: Watching | None, question: str = "", answer: str = "") -> str:
    """Returns the questions with their answers, the latest first; ``question`` is one whose
    ``answer`` is still growing."""
    if watching is None:
        return ""
    done = [
        pictures.exchange(f"{time:.1f} s · {old}", reply) for time, old, reply in watching.exchanges
    ]
    return pictures.conversation(done, question, answer)
