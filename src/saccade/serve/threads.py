"""Threads for work that takes a while, and that nobody may wait for in the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
        future: asyncio.Future[T] = loop.create_future()

        def settle(tell: Callable[[Any], None], what: Any) -> None:
            self._free.release()
            if not future.done():
                tell(what)

        def work() -> None:
            try:
                told: tuple[Callable[[Any], None], Any] = future.set_result, act()
            except BaseException as error:
                told = future.set_exception, error
            try:
                loop.call_soon_threadsafe(settle, *told)
            except RuntimeError:  # the loop has been closed: nobody waits
                return

        threading.Thread(target=work, name="reader", daemon=True).start()
        return await future
