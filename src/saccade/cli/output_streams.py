"""Lets the command line write where the encoding lacks characters, or where the disk is full.

Characters that an encoding lacks are replaced by the error handler "saccade" of ``codecs``.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from contextlib import suppress

# The errors of output that cannot be written: no space, no quota, too large a file, a broken disk.
UNWRITABLE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# What is written in the place of characters that an encoding lacks.
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
    """Replaces characters that an encoding lacks.

    Those in ``LOOK_ALIKES``, such as lines and arrows, become look-alikes. Any other character is
    escaped as in JSON, so that a printed JSON object stays valid. Returns the replacement, and the
    place in the text where encoding goes on.
    """
    assert isinstance(error, UnicodeEncodeError)
    replaced = error.object[error.start : error.end].translate(LOOK_ALIKES)
    utf16 = replaced.encode("utf-16-be", "surrogatepass")
    units = zip(utf16[::2], utf16[1::2], strict=True)  # The two bytes of each unit.
    return "".join(_escape(high, low) for high, low in units), error.end


def _escape(high: int, low: int) -> str:
    """Returns one unit of UTF-16 in ASCII, such as "a" or "\\u2192", from its two bytes."""
    return chr(low) if not high and low < 128 else f"\\u{high:02x}{low:02x}"


codecs.register_error("saccade", replace_missing)


def prepare_streams() -> None:
    """Makes standard output and error writable in encodings that lack some characters, and standard
    input readable where it is malformed.

    Bytes of standard input that are not in its encoding become surrogates and raise no error here.
    A later check of the text refuses them in one sentence.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        with suppress(io.UnsupportedOperation):  # Raised where some input was read already.
            sys.stdin.reconfigure(errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # UTF-8 lacks lone surrogates, which stand for bytes of a file's name.
            stream.reconfigure(errors="saccade")


def flush_output() -> None:
    """Flushes standard output. Raises OSError where it cannot be written."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def discard_output() -> None:
    """Discards all further standard output, also what is still buffered.

    It is called where standard output cannot be written, which the command itself reports. The
    interpreter flushes standard output when it exits, and would report the error a second time.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
