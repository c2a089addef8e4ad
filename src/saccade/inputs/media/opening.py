"""A path, bytes or a stream to an open file of known kind, or a refusal.

Decides which paths may be read, tells kinds apart by the first bytes, and names a file in messages
without giving away where it lies. Knows no decoder; `blame` is how the decoders' failures are told.
"""

import contextlib
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Protocol, runtime_checkable

from saccade.core.errors import VideoInputCode, VideoInputError
from saccade.inputs.media.limits import Limits, refusal

READABLE = "MP4, MOV, MKV, WebM, AVI, GIF, WebP, PNG or JPEG"


@runtime_checkable
class Readable(Protocol):
    """A file object; it is read from where it stands, to its end."""

    def read(self, size: int = -1, /) -> bytes: ...


Source = str | Path | bytes | Readable


@dataclass
class File:
    """An open input, the name to use in messages, and what its first bytes look like."""

    handle: BufferedReader | BytesIO
    label: str
    kind: str | None  # "image", the name of a video container, or unknown

    def refusal(self, what: str, code: VideoInputCode) -> VideoInputError:
        return refusal(self.label, what, code)


def allowed(path: str | Path, limits: Limits) -> Path:
    """The resolved path, if there is something there that may be read."""
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise refusal("an address", "is not opened: download it and give the file", "not_allowed")
    label = printable(Path(path).name)
    try:
        resolved = Path(path).resolve()
        if limits.root and not resolved.is_relative_to(limits.root.resolve()):
            raise refusal(label, "must be inside the allowed folder", "not_allowed")
        mode = resolved.stat().st_mode
    except PermissionError:
        raise refusal(label, "may not be read: change its permissions", "unreadable") from None
    except (OSError, ValueError, RuntimeError):  # ValueError: a zero byte; RuntimeError: a loop
        raise refusal(label, "does not exist: check the path", "missing") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would block, a device never end
        raise refusal(label, "is not a file; give a video file or '-'", "not_a_video")
    return resolved


@contextlib.contextmanager
def opened(source: Source, limits: Limits) -> Iterator[File]:
    """The source as a file whose size is allowed and whose first bytes promise frames."""
    with contextlib.ExitStack() as stack:
        if isinstance(source, str | Path) and source != "-":
            path = allowed(source, limits)
            label, size = printable(Path(source).name), path.stat().st_size
            try:
                handle: BufferedReader | BytesIO = stack.enter_context(path.open("rb"))
            except OSError:
                what = "cannot be opened: it must be a file you may read"
                raise refusal(label, what, "unreadable") from None
        else:
            label = "standard input" if isinstance(source, str | Path) else "the input"
            if not isinstance(source, bytes):
                pipe: Readable = sys.stdin.buffer if isinstance(source, str | Path) else source
                source = pipe.read(limits.max_bytes + 1 if limits.max_bytes else -1)
            handle, size = BytesIO(source), len(source)
        limits.check(label, nbytes=size)
        if not size:
            raise refusal(label, "is empty: give a video or an image", "empty")
        head = handle.read(64)
        file = File(handle, label, _kind(head))
        if problem := _mistake(head):
            raise file.refusal(*problem)
        yield file


@contextlib.contextmanager
def blame(file: File) -> Iterator[None]:
    """Turn any failure of a library into ours: their messages can hold memory addresses."""
    try:
        yield
    except VideoInputError:
        raise
    except MemoryError:
        raise file.refusal("needs more memory than there is: scale it down", "too_large") from None
    except Exception:  # decoders raise almost anything on hostile bytes
        raise file.refusal("is damaged or cut short: copy it again", "truncated") from None


def printable(name: str) -> str:
    """A file's own name, safe to print."""
    return "".join(c if c.isprintable() else "?" for c in name)[:80] or "the folder"


def _kind(head: bytes) -> str | None:
    if head.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM")) or head[8:12] == b"WEBP":
        return "image"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "MP4 or MOV"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "MKV or WebM"
    return "AVI" if head.startswith(b"RIFF") and head[8:12] == b"AVI " else None


def _mistake(head: bytes) -> tuple[str, VideoInputCode] | None:
    """What is wrong with these first bytes, for what is given by mistake or with intent."""
    text = head.removeprefix(b"\xef\xbb\xbf").strip()
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text):  # web pages, playlists
        line = text.decode("ascii").split("\n")[0].strip()[:30]
        start = re.split(r"[/\\]", line[: line.find(">") + 1] or line)[0]  # no path is echoed
        said = f" (starts with {start})" if start else ""
        return f"is not a video{said}: give {READABLE}", "not_a_video"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"avif", b"avis"):
        return "is a HEIC or AVIF image; convert it to JPEG or PNG", "unsupported"
    if head.startswith((b"ID3", b"fLaC")) or head[:4] + head[8:12] == b"RIFFWAVE":
        return f"has no video stream (sound only): give {READABLE}", "no_video_stream"
    if head.startswith((b"OggS", b"FLV", b"0&\xb2u", b"\0\0\1\xba", b"%PDF", b"PK\3\4")):
        return f"is of a kind that is not read; convert it to {READABLE}", "unsupported"
    return None
