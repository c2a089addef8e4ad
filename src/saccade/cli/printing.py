"""Standard output that cannot hold every character, or cannot be written at all."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
LOOK_ALIKES = {
    **dict.fromkeys(range(0x2500, 0x2580), "+"),  # box drawing
    **dict.fromkeys(range(0x2580, 0x25A1), "#"),  # block elements
    **dict.fromkeys(map(ord, "─━┄┅┈┉╌╍═╴╶╸╺–—‑−"), "-"),
    **dict.fromkeys(map(ord, "│┃┆┇┊┋╎╏║╵╷╹╻"), "|"),
    **dict.fromkeys(map(ord, "‘’"), "'"),
    **dict.fromkeys(map(ord, "●•·▪"), "*"),
    **str.maketrans({"×": "x", "→": "->", "←": "<-", "…": "...", "≤": "<=", "≥": ">=", "≈": "~"}),
}


def replace_missing(error: UnicodeError) -> tuple[str, int]:
    """Writes what an encoding lacks: lines and arrows as their look-alikes, the rest as JSON does,
    so that nothing is lost and a JSON object stays one."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end].translate(LOOK_ALIKES)
    units = missing.encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(_escaped(high, low) for high, low in pairs), error.end


def _escaped(high: int, low: int) -> str:
    """One unit of UTF-16 in ASCII."""
    return chr(low) if not high and low < 128 else f"\\u{high:02x}{low:02x}"


codecs.register_error("saccade", replace_missing)


def prepare_streams() -> None:
    """Lets both streams write every text, whatever their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="saccade")


def flush_output() -> None:
    """Writes what waits for standard output. Raises OSError where that is not possible."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def forget_output() -> None:
    """Sends what waits for standard output, and all that follows, nowhere.

    The interpreter flushes it at its end, and would say once more that this is not possible.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
