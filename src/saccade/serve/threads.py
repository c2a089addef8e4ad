"""Threads for work that takes a while, and that nobody may wait for in the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """A thread for each piece of work, up to a number at once; the rest waits its turn.

    Who is cancelled while waiting does not wait for the thread. They are daemons: none keeps the
    process from ending.
    """

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def run(self, act: Callable[[], T]) -> T:
        """What ``act`` gives or raises, from a thread."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[T] = Future()
        found.set_running_or_notify_cancel()  # who waits may go, the work goes on

        def work() -> None:
            try:
                found.set_result(act())
            except BaseException as error:
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(self._free.release)

        threading.Thread(target=work, name="reader", daemon=True).start()
        return await asyncio.wrap_future(found)
