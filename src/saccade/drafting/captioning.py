"""Makes captions for views that read them, beside the target's prefill (TABED)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from saccade.core.free_cores import own_cpus
from saccade.core.prompt import Inputs, Texts
from saccade.drafting.setup import Captions, Setup


class Captioning:
    """Makes the texts that a draft's view puts in the place of videos and images, for one call's
    inputs.

    They are newlines or captions. This object is made when the target's prefill begins. A thread
    then makes the captions beside the prefill, if that does not slow the target: if the target is
    on a GPU, or works with fewer threads than there are cores. Otherwise the captions are made when
    ``texts`` is called.
    """

    def __init__(self, setup: Setup, inputs: Inputs) -> None:
        self._text_maker, self._view, self._inputs = setup.text_maker, setup.view, inputs
        self._captioner = setup.text_maker.captioner_for(setup.view)
        self._seconds = self._waited = 0.0
        self._pending: Future[Captions] | None = None
        device = setup.target.device
        threads = torch.get_num_threads()
        # The CPU threads that captions may use beside the target. If there are none, the captions
        # are made later.
        free_threads = threads
        if device.type == "cpu":
            free_threads = min(threads, len(own_cpus()) - threads)
        if self._captioner is not None and free_threads > 0:
            pool = ThreadPoolExecutor(1, "captions")
            self._pending = pool.submit(self._caption_in_thread, device, free_threads)
            pool.shutdown(wait=False)  # The thread ends after this one task.

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds that captioning took, and how many of them were hidden behind other work."""
        return self._seconds, max(0.0, self._seconds - self._waited)

    def texts(self) -> list[dict[str, Texts]]:
        """Waits for the captions, and returns the texts of each request.

        A request has texts by their kind, "newline" or "caption" (``Prefill.replacement_texts``).
        It has only those kinds that the view reads. Raises what the captioner raised.
        """
        captions = None
        start = time.perf_counter()
        if self._captioner is not None:
            try:
                captions = self._caption() if self._pending is None else self._pending.result()
            finally:
                self._waited = time.perf_counter() - start
        return self._text_maker.replacement_texts(self._view, self._inputs, captions)

    def _caption_in_thread(self, device: torch.device, threads: int) -> Captions:
        with _beside_target(device, threads), torch.no_grad():
            return self._caption()

    def _caption(self) -> Captions:
        """Calls the captioner and notes how long it takes."""
        assert self._captioner is not None
        start = time.perf_counter()
        try:
            return self._captioner(self._inputs)
        finally:
            self._seconds = time.perf_counter() - start


@contextmanager
def _beside_target(device: torch.device, threads: int) -> Iterator[None]:
    """Lets this thread compute with ``threads`` CPU threads, and on a GPU in a stream of its own,
    for the length of a block."""
    before = torch.get_num_threads()
    stream_context: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        # In the target's stream, captioning would wait for the whole prefill.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        stream_context = torch.cuda.stream(stream)
    torch.set_num_threads(threads)
    try:
        with stream_context:
            yield
    finally:
        # torch gives a new thread the number that was set last, in whichever thread. So it is
        # restored, although this thread ends here.
        torch.set_num_threads(before)
