"""Requests' bodies, read up to a size and in their time."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from fastapi import Request
from starlette.requests import ClientDisconnect

from saccade.serve.errors import HUNG_UP, ApiError
from saccade.serve.queue import busy

LINGER = 2.0  # seconds in which the rest of a body that is too long is read and forgotten
TOGETHER = 4  # bodies of full size that may be arriving at once


class Bodies:
    """Reads bodies up to a size, and up to ``TOGETHER`` of those at once: memory is everybody's."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    async def read(self, request: Request, end: float) -> bytes:
        """A body that is whole by ``end``, on the clock of time.monotonic. Raises ApiError."""
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self.most):
            raise await self._too_large(request)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                async for piece in request.stream():
                    size, self.held = size + len(piece), self.held + len(piece)
                    if size > self.most:
                        pieces.clear()
                        raise await self._too_large(request)
                    if self.held > TOGETHER * self.most:
                        raise busy(1)
                    pieces.append(piece)
            return b"".join(pieces)
        except TimeoutError:
            said = "the request took too long to arrive: send a shorter video"
            raise ApiError(408, said) from None
        except ClientDisconnect:
            raise ApiError(HUNG_UP, "the client has gone") from None
        finally:
            self.held -= size

    async def _too_large(self, request: Request) -> ApiError:
        """Why not; what is still coming is read a while and forgotten: who sends hears nothing."""
        if "expect" not in request.headers:  # else it asked first, and has sent nothing
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await self._drain(request)
        return ApiError(413, f"the request is larger than {self.most} bytes: send a shorter video")

    async def _drain(self, request: Request) -> None:
        left, more = self.most, True
        while more and left > 0:
            message = await request.receive()
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)
