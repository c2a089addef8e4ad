"""Requests' bodies, read up to a size and in their time.

What is large in them are data: addresses. A parser would copy those several times, so they are cut
out first: they stay where they arrived, and the parser sees a short name in the place of each.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect

from saccade.serve.errors import HUNG_UP, ApiError
from saccade.serve.queue import busy

LINGER = 2.0  # seconds in which the rest of a body that is too long is read and forgotten
LONG = 1 << 16  # bytes of a data: address that is cut out
TEXT = 32 << 20  # bytes of a body that may be left beside those
ADDRESS = re.compile(rb'"url"\s*:\s*"((?i:data):)')
SOLID = re.compile(rb"[^ ]")
# how encoders may spell what base64 is written with (PHP's, .NET's), and the ends of its lines
SPELT = {b"": (b"\\n", b"\\r", b"\\t"),
         b"/": (b"\\/", b"\\u002f", b"\\u002F"), b"+": (b"\\u002b", b"\\u002B"),
         b"=": (b"\\u003d", b"\\u003D")}  # fmt: skip
TOGETHER = 4  # bodies of full size that may be here at once, arriving or waiting for a decoder


@dataclass
class Bodies:
    """What bodies may take, and take: memory is everybody's."""

    most: int  # bytes of one; ``TOGETHER`` times that of all
    held: int = 0


class Body(AbstractContextManager["Body"]):
    """One request's body. Its bytes count until it is left: until what it held has been read.

    ``apart`` are its long data: addresses, by the names they have in its text.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0
        self.apart: dict[str, memoryview] = {}

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        self._bodies.held -= self._size
        self._size = 0
        self.apart.clear()

    async def read(self, request: Request, end: float) -> bytes:
        """The body's text, whole by ``end``, on the clock of time.monotonic. Raises ApiError."""
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
            text, self.apart = cut(body)
            return text
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


def cut(body: bytearray) -> tuple[bytes, dict[str, memoryview]]:
    """A JSON body without its long data: addresses, and these by the names that replace them.

    Only the strings themselves are looked at: whether they stand where media are read is for who
    knows the form to say. Raises ApiError where too much is left.
    """
    pieces: list[memoryview | bytes] = []
    apart: dict[str, memoryview] = {}
    view, done, start = memoryview(body), 0, 0
    while match := ADDRESS.search(body, start):
        start = match.start(1)
        end = body.find(b'"', start)
        if end - start < LONG or not _plain(body, start, end):
            start += 1
            continue
        end = body.find(b'"', start)  # it may have become shorter
        name = f"data:{len(apart)}"
        apart[name] = view[start:end]
        pieces += [view[done:start], name.encode(), b'"']
        after = SOLID.search(body, end + 1)
        done = start = len(body) if after is None else after.start()
    if len(body) - done + sum(map(len, pieces)) > TEXT:
        said = f"more than {TEXT} bytes of text: media go into data: addresses of plain base64"
        raise ApiError(413, f"the request holds {said}")
    return b"".join([*pieces, view[done:]]), apart


def _plain(body: bytearray, start: int, end: int) -> bool:
    """Whether a string is written without escapes. Those that stand for base64's characters are
    spelt out where they are, and spaces after the string fill what becomes free."""
    if body.find(b"\\", start, end) < 0:
        return True
    if body[end - 1 : end] == b"\\":
        return False  # the string goes on after this quote
    read = written = start
    plain = True
    while read < end and plain:
        stop = min(read + LONG, end)
        late = body.rfind(b"\\", stop - 5, stop)
        if late > read and stop < end:
            stop = late  # no escape is cut in two
        piece = bytes(body[read:stop])
        for real, several in SPELT.items():
            for spelling in several:
                piece = piece.replace(spelling, real)
        plain = b"\\" not in piece
        if plain:
            body[written : written + len(piece)] = piece
            read, written = stop, written + len(piece)
    left = bytes(body[read:end])  # from the first other escape on
    body[written : end + 1] = left + b'"' + b" " * (end - written - len(left))
    return plain
