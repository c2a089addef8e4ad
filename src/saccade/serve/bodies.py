"""Requests' bodies, read up to a size and in their time."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect

from saccade.serve.errors import HUNG_UP, ApiError
from saccade.serve.queue import busy

LINGER = 2.0  # seconds in which the rest of a body that is too long is read and forgotten
TOGETHER = 4  # bodies of full size that may be here at once, arriving or waiting for a decoder


@dataclass
class Bodies:
    """What bodies may take, and take: memory is everybody's."""

    most: int  # bytes of one; ``TOGETHER`` times that of all
    held: int = 0


class Body:
    """One request's body. Its bytes count until it is left: until what it held has been read."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        self._bodies.held -= self._size
        self._size = 0

    async def read(self, request: Request, end: float) -> bytearray:
        """The body, whole by ``end``, on the clock of time.monotonic. Raises ApiError."""
        bodies = self._bodies
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > bodies.most):
            raise await self._too_large(request)
        body = bytearray()
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                async for piece in request.stream():
                    body += piece
                    bodies.held, self._size = bodies.held + len(piece), len(body)
                    if len(body) > bodies.most:
                        body.clear()
                        raise await self._too_large(request)
                    if bodies.held > TOGETHER * bodies.most:
                        raise busy(1)
            return body
        except TimeoutError:
            said = "the request took too long to arrive: send a shorter video"
            raise ApiError(408, said) from None
        except ClientDisconnect:
            raise ApiError(HUNG_UP, "the client has gone") from None

    async def _too_large(self, request: Request) -> ApiError:
        """Why not; what is still coming is read a while and forgotten: who sends hears nothing."""
        most = self._bodies.most
        if "expect" not in request.headers:  # else it asked first, and has sent nothing
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    left, more = most, True
                    while more and left > 0:
                        message = await request.receive()
                        left -= len(message.get("body", b""))
                        more = message.get("more_body", False)
        return ApiError(413, f"the request is larger than {most} bytes: send a shorter video")
