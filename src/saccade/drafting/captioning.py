"""Captions for views that read one, made beside the target's prefill (TABED)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from saccade.core.prompt import Inputs, Texts
from saccade.drafting.setup import Captions, Setup


class Captioning:
    """The words of the views for one call's inputs. Make one as the target's prefill begins.

    Captions are made in a thread where they take nothing from the target: where it has a device of
    its own, or fewer threads than there are cores. Else they are made once they are asked for.
    """

    def __init__(self, setup: Setup, inputs: Inputs) -> None:
        self._words, self._view, self._inputs = setup.words, setup.view, inputs
        self._captioner = setup.words.captioner_for(setup.view)
        self._seconds = self._waited = 0.0
        self._made: Future[Captions] | None = None
        device, threads = setup.target.device, torch.get_num_threads()
        free = threads if device.type != "cpu" else min(threads, usable_cores() - threads)
        if self._captioner is not None and free > 0:
            pool = ThreadPoolExecutor(1, "captions")
            self._made = pool.submit(self._beside, device, free)
            pool.shutdown(wait=False)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of captioning, and those of them that nobody waited for."""
        return self._seconds, max(0.0, self._seconds - self._waited)

    def texts(self) -> list[dict[str, Texts]]:
        """``Prefill.words`` of each request, once they are there. Raises what the captioner did."""
        captions, began = None, time.perf_counter()
        if self._captioner is not None:
            try:
                captions = self._caption() if self._made is None else self._made.result()
            finally:
                self._waited = time.perf_counter() - began
        return self._words.replacement_texts(self._view, self._inputs, captions)

    def _beside(self, device: torch.device, threads: int) -> Captions:
        with _aside(device, threads), torch.no_grad():
            return self._caption()

    def _caption(self) -> Captions:
        assert self._captioner is not None
        began = time.perf_counter()
        try:
            return self._captioner(self._inputs)
        finally:
            self._seconds = time.perf_counter() - began


@contextmanager
def _aside(device: torch.device, threads: int) -> Iterator[None]:
    """This thread with so many threads of the CPU, or a stream of its own on the GPU."""
    before = torch.get_num_threads()
    own: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":  # in the target's stream it would queue behind all of the prefill
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        own = torch.cuda.stream(stream)
    torch.set_num_threads(threads)
    try:
        with own:
            yield
    finally:
        torch.set_num_threads(before)  # with which threads begin that are made later


def usable_cores() -> int:
    """Of the CPU, as many as this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
