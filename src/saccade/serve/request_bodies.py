"""Reads the bodies of requests, up to a size and a deadline.

Nearly all of a large body is media, in data: URLs. A JSON parser would copy those several times, so
they are cut out first. They stay in the buffer where they arrived, and the parser sees a short name
in the place of each.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect

from saccade.serve.api_errors import CLIENT_CLOSED_REQUEST, ApiError
from saccade.serve.queue import busy_error

DISCARD_SECONDS = 2.0  # Seconds for which the rest of an oversized body is read and discarded.
MIN_CUT_BYTES = 1 << 16  # A shorter data: URL is left in the text.
UNESCAPE_BYTES = 1 << 16  # So much of a URL is unescaped at once.
MAX_TEXT_BYTES = 32 << 20  # The most text that a body may have besides the URLs that are cut out.
DATA_URL = re.compile(rb'"(?:image_|video_)?url"\s*:\s*"((?i:data):)')
NON_SPACE = re.compile(rb"[^ ]")
# The escapes that JSON encoders such as PHP's and .NET's may write, and the characters of base64
# that they stand for. Line ends and tabs in base64 mean nothing, so their escapes are dropped.
CHARACTER_OF_ESCAPE = {
    b"\\n": b"", b"\\r": b"", b"\\t": b"",
    b"\\/": b"/", b"\\u002f": b"/", b"\\u002b": b"+", b"\\u003d": b"=",
}  # fmt: skip
ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
MAX_FULL_BODIES = 4  # The memory for all bodies together, as a multiple of one body's limit.


@dataclass
class BodyMemory:
    """How much memory the bodies of all requests may use, and how much they use now."""

    max_bytes: int  # One body's limit; ``MAX_FULL_BODIES`` times as much is the limit of all.
    used_bytes: int = 0


class RequestBody(AbstractContextManager["RequestBody"]):
    """One request's body. Its bytes count as used until it is released, which happens as soon as
    its media have been read.

    ``data_urls`` are its long data: URLs, by the names that stand for them in its text.
    """

    def __init__(self, memory: BodyMemory) -> None:
        self._memory, self._size = memory, 0
        self.data_urls: dict[str, memoryview] = {}

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Frees the body's memory for other requests."""
        self._memory.used_bytes -= self._size
        self._size = 0
        self.data_urls.clear()

    async def read(self, request: Request, deadline: float) -> bytes:
        """Returns the body without its long data: URLs, which are put into ``data_urls``. Raises
        ApiError if it is too large or takes too long to arrive.

        ``deadline`` is on the clock of time.monotonic.
        """
        memory = self._memory
        announced = request.headers.get("content-length", "0")
        # A number of more than 18 digits is too large in any case, and may be too long for int().
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > memory.max_bytes):
            raise await self._discard_rest(request)
        body = bytearray()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                async for piece in request.stream():
                    body += piece
                    memory.used_bytes += len(piece)
                    self._size = len(body)
                    if len(body) > memory.max_bytes:
                        body.clear()
                        raise await self._discard_rest(request)
                    if memory.used_bytes > MAX_FULL_BODIES * memory.max_bytes:
                        raise busy_error(seconds=1)
            text, self.data_urls = cut_data_urls(body)
            return text
        except TimeoutError:
            message = "the request took too long to arrive: send a shorter video"
            raise ApiError(408, message) from None
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client has gone") from None

    async def _discard_rest(self, request: Request) -> ApiError:
        """Reads and drops what is still coming of a body that is too large, and returns the error.

        A client reads no response while it sends. So the rest is read first, for
        ``DISCARD_SECONDS`` and up to one body's limit.
        """
        max_bytes = self._memory.max_bytes
        # A client that sends ``Expect: 100-continue`` waits for an answer before it sends the body.
        if "expect" not in request.headers:
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_SECONDS):
                    bytes_left = max_bytes
                    has_more = True
                    while has_more and bytes_left > 0:
                        message = await request.receive()
                        bytes_left -= len(message.get("body", b""))
                        has_more = message.get("more_body", False)
        return ApiError(413, f"the request is larger than {max_bytes} bytes: send a shorter video")


def cut_data_urls(body: bytearray) -> tuple[bytes, dict[str, memoryview]]:
    """Replaces every long data: URL in a JSON body by a short placeholder.

    Returns the new text, and the URLs by placeholder.

    This function does not know the schema of requests, so the caller must check that every
    placeholder stands in a media field. Raises ApiError where too much text is left.
    """
    pieces: list[memoryview | bytes] = []
    data_urls: dict[str, memoryview] = {}
    view = memoryview(body)
    copied = start = 0  # The text before ``copied`` is in ``pieces``.
    while match := DATA_URL.search(body, start):
        start = match.start(1)
        end = body.find(b'"', start)
        if end - start < MIN_CUT_BYTES or not _unescape(body, start, end):
            start += 1  # This URL stays in the text, because it is short or no plain base64.
            continue
        end = body.find(b'"', start)  # Unescaping may have made the URL shorter.
        name = f"data:{len(data_urls)}"
        data_urls[name] = view[start:end]
        pieces += [view[copied:start], name.encode(), b'"']
        after = NON_SPACE.search(body, end + 1)  # Unescaping may have left spaces here.
        copied = start = len(body) if after is None else after.start()
    if len(body) - copied + sum(map(len, pieces)) > MAX_TEXT_BYTES:
        limit = f"more than {MAX_TEXT_BYTES} bytes of text"
        raise ApiError(
            413, f"the request holds {limit}: media go into data: addresses of plain base64"
        )
    return b"".join([*pieces, view[copied:]]), data_urls


def _unescape(body: bytearray, start: int, end: int) -> bool:
    r"""Replaces the escapes in the string ``body[start:end]`` by their characters, in place.

    Returns False where the string has escapes of other kinds, so that it is no plain base64. What
    comes before such an escape may have been replaced even then. A shorter string is followed by
    its closing quote and by spaces, up to where the quote was. So ``a\/b"`` becomes ``a/b" ``.
    """
    if body.find(b"\\", start, end) < 0:
        return True
    if body[end - 1 : end] == b"\\":
        return False  # This quote is escaped, so the string goes on after it.
    read = written = start
    is_plain = True
    while read < end and is_plain:
        stop = min(read + UNESCAPE_BYTES, end)
        # The longest escape has 6 bytes. One that begins in the last 5 bytes of the piece might be
        # cut in two, so the piece ends before it.
        last_escape = body.rfind(b"\\", stop - 5, stop)
        if last_escape > read and stop < end:
            stop = last_escape
        piece = bytes(body[read:stop])
        piece = ESCAPE.sub(_unescaped, piece)
        is_plain = b"\\" not in piece
        if is_plain:
            body[written : written + len(piece)] = piece
            read = stop
            written = written + len(piece)
    # If an escape of another kind was found, the piece that has it and all after it are kept as
    # they are. Otherwise nothing is unread.
    unread = bytes(body[read:end])
    body[written : end + 1] = unread + b'"' + b" " * (end - written - len(unread))
    return is_plain


def _unescaped(escape: re.Match[bytes]) -> bytes:
    """Returns the character of base64 that an escape stands for; any other escape as it is."""
    return CHARACTER_OF_ESCAPE.get(escape[0].lower(), escape[0])
