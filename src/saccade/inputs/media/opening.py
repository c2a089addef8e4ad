"""A path, bytes or a stream to an open file of known kind, or a refusal.

Decides which paths may be read, tells kinds apart by the first bytes, and names a file in messages
without giving away where it lies. Knows no decoder; `blame` is how the decoders' failures are told.
"""

import contextlib
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from saccade.core.errors import VideoInputCode, VideoInputError
from saccade.inputs.media.limits import Limits, Why, bad_option, refusal

HEAD = 64  # bytes that tell what a file is
READABLE = "MP4, MOV, MKV, WebM, AVI, GIF, WebP, PNG or JPEG"
PIECE, HELD = 1 << 20, 64 << 20  # bytes of a stream read at once, and held in memory


@runtime_checkable
class Readable(Protocol):
    """A file object; it is read from where it stands, to its end."""

    def read(self, size: int = -1, /) -> bytes: ...


Source = str | Path | bytes | Readable


class Handle:
    """A file to read and seek while there is time, but not to name: FFmpeg may take a name for an
    address."""

    def __init__(self, file: Any, check: Callable[[], None]) -> None:
        self._read, self._check = file.read, check
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        self._check()
        return self._read(size)


@dataclass
class File:
    """An open input, the name to use in messages, and what its first bytes look like."""

    handle: Handle
    label: str
    kind: str | None  # "image", the name of a video container, or unknown
    size: int  # bytes
    check: Callable[[], None]  # raises once its time is up

    def refusal(self, what: str, code: VideoInputCode) -> VideoInputError:
        return refusal(self.label, what, code)


def allowed(path: str | Path, limits: Limits) -> Path:
    """The resolved path, if there is something there that may be read."""
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise refusal("an address", "is not opened: download it and give the file", "not_allowed")
    if path == "":  # to pathlib it is the current folder
        raise refusal("a file without a name", "does not exist: check the path", "missing")
    label = printable(Path(path).name)
    try:
        resolved = Path(path).resolve()
        if limits.root and not resolved.is_relative_to(limits.root.resolve()):
            raise refusal(label, "must be inside the allowed folder", "not_allowed")
        mode = resolved.stat().st_mode
    except PermissionError:
        raise refusal(label, "may not be read: change its permissions", "unreadable") from None
    except (OSError, ValueError, RuntimeError):  # ValueError: a zero byte; RuntimeError: a loop
        first = "" if Path(label).suffix else "; media come first, then the question"
        raise refusal(label, f"does not exist: check the path{first}", "missing") from None
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
                handle: Any = stack.enter_context(path.open("rb"))
            except OSError:
                what = "cannot be opened: it must be a file you may read"
                raise refusal(label, what, "unreadable") from None
        else:
            label = "standard input" if isinstance(source, str | Path) else "the input"
            if isinstance(source, bytes):
                handle, size = BytesIO(source), len(source)
            else:
                pipe: Any = sys.stdin.buffer if isinstance(source, str | Path) else source
                if not isinstance(pipe, Readable):
                    what = "a video is a path, bytes or an open file"
                    raise bad_option(f"{what}, not {type(source).__name__}")
                handle = stack.enter_context(tempfile.SpooledTemporaryFile(HELD))
                size = _keep(pipe, handle, label, limits)
        limits.check(label, nbytes=size)
        if not size:
            raise refusal(label, "is empty: give a video or an image", "empty")
        handle.seek(0)
        head, check = handle.read(HEAD), limits.watch(label)
        if problem := _mistake(head):
            raise refusal(label, *problem)
        yield File(Handle(handle, check), label, _kind(head), size, check)


def _keep(pipe: Readable, file: Any, label: str, limits: Limits) -> int:
    """Keeps what a stream gives, piece by piece; how many bytes it is. What is no video, or too
    much, is not read to its end."""
    try:
        while piece := pipe.read(PIECE):
            if not isinstance(piece, bytes):
                raise refusal(label, "is open as text: open it with 'rb'", "bad_option")
            if not file.tell() and len(piece) >= HEAD and (problem := _mistake(piece[:HEAD])):
                raise refusal(label, *problem)
            file.write(piece)
            limits.check(label, nbytes=file.tell())
    except ValueError:
        raise refusal(label, "is closed: open it again", "unreadable") from None
    except OSError:
        what = "cannot be kept while it is read: make room for temporary files"
        raise refusal(label, what, "too_large") from None
    return int(file.tell())


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


def is_visible(path: Path) -> bool:
    """Whether a file of a folder is meant: macOS puts "._frame.jpg" beside each "frame.jpg"."""
    return not path.name.startswith(".")


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


def _mistake(head: bytes) -> Why | None:
    """What is wrong with these first bytes, for what is given by mistake or with intent."""
    text = head.removeprefix(b"\xef\xbb\xbf").strip()
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text):  # whose words nobody is shown
        what = "a web page" if text.startswith(b"<") else "text"
        return f"is not a video but {what}: give {READABLE}", "not_a_video"
    if not any(head):
        return f"is not a video but zeros: give {READABLE}", "not_a_video"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"avif", b"avis"):
        return "is a HEIC or AVIF image; convert it to JPEG or PNG", "unsupported"
    if head.startswith((b"ID3", b"fLaC")) or head[:4] + head[8:12] == b"RIFFWAVE":
        return f"has no video stream (sound only): give {READABLE}", "no_video_stream"
    if head.startswith((b"OggS", b"FLV", b"0&\xb2u", b"\0\0\1\xba", b"%PDF", b"PK\3\4")):
        return f"is of a kind that is not read; convert it to {READABLE}", "unsupported"
    return None
