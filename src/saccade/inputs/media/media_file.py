"""Opens a path, bytes or a stream as a file of a known type, or refuses it.

It checks which paths may be read, detects types by the first bytes, and names files in messages
without revealing their folders. It knows no decoder; `translate_errors` turns the errors of
decoders into ours.
"""

import contextlib
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from saccade.core.errors import VideoInputCode, VideoInputError, how_to_install
from saccade.inputs.media.limits import Limits, Refusal, bad_option, refusal

HEAD_BYTES = 64  # So many bytes show what type a file has.
READABLE_TYPES = "MP4, MOV, MKV, WebM, AVI, GIF, WebP, AVIF, TIFF, PNG or JPEG"
IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
# The brands of images in ISO containers ("ftyp"); phones write HEIC.
AVIF_BRANDS = (b"avif", b"avis")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")
ANY_IMAGE_BRANDS = (b"mif1", b"msf1")  # The compatible brands say whether it is AVIF or HEIC.
STREAM_PIECE_BYTES = 1 << 20  # So much of a stream is read at once.
MAX_STREAM_MEMORY_BYTES = 64 << 20  # A longer stream is kept in a temporary file.


OPEN_AS_TEXT = "is open as text: open it with 'rb'"


@runtime_checkable
class Readable(Protocol):
    """A file object, which is read from its current position to its end."""

    def read(self, size: int = -1, /) -> bytes: ...


Source = str | Path | bytes | Readable
"""A path, the bytes of a file, or a file that is open in binary mode. "-" is standard input."""


class Handle:
    """A file that can be read and sought until its time is up.

    It has no name, because FFmpeg could take a name for an address.
    """

    def __init__(self, file: Any, check_time: Callable[[], None]) -> None:
        self._read, self._check_time = file.read, check_time
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        self._check_time()
        return self._read(size)


@dataclass
class File:
    """An open input, its name for messages, and the type that its first bytes show."""

    handle: Handle
    label: str
    kind: str | None  # "image", the name of a video container, or None where it is unknown.
    size: int  # In bytes.
    check_time: Callable[[], None]  # Raises VideoInputError once its time is up.

    def refusal(self, what: str, code: VideoInputCode) -> VideoInputError:
        return refusal(self.label, what, code)


def check_path(path: str | Path, limits: Limits) -> Path:
    """Returns the resolved path of a file or a folder.

    Raises VideoInputError if there is neither, if looking it up is not permitted, or if it lies
    outside ``limits.root``. Whether a file may be read shows only when it is opened.
    """
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise refusal("an address", "is not opened: download it and give the file", "not_allowed")
    if path == "":  # To pathlib this is the current folder.
        raise refusal("a file without a name", "does not exist: check the path", "missing")
    label = printable_name(Path(path).name)
    try:
        resolved = Path(path).resolve()
        if limits.root and not resolved.is_relative_to(limits.root.resolve()):
            hint = "must be inside the allowed folder, which a server's --media-root names"
            raise refusal(label, hint, "not_allowed")
        mode = resolved.stat().st_mode
    except PermissionError:
        raise refusal(label, "may not be read: change its permissions", "unreadable") from None
    except (OSError, ValueError, RuntimeError):
        # A zero byte in the path raises ValueError, and a loop of links RuntimeError. A name
        # without a suffix may be a question that was given in the place of a file.
        hint = "" if Path(label).suffix else "; media come first, then the question"
        raise refusal(label, f"does not exist: check the path{hint}", "missing") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # A pipe blocks; a device never ends.
        raise refusal(label, "is not a file; give a video file or '-'", "not_a_video")
    return resolved


@contextlib.contextmanager
def open_media(source: Source, limits: Limits) -> Iterator[File]:
    """Yields the source as a file whose size is allowed and whose first bytes may be media.

    Raises VideoInputError for any other source.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, str | Path) and source != "-":
            path = check_path(source, limits)
            label = printable_name(Path(source).name)
            size = path.stat().st_size
            try:
                handle: Any = stack.enter_context(path.open("rb"))
            except OSError:
                what = "cannot be opened: it must be a file you may read"
                raise refusal(label, what, "unreadable") from None
        else:
            label = "standard input" if isinstance(source, str | Path) else "the input"
            if isinstance(source, bytes):
                handle = BytesIO(source)
                size = len(source)
            else:
                pipe: Any = sys.stdin.buffer if isinstance(source, str | Path) else source
                if not isinstance(pipe, Readable):
                    what = "a video is a path, bytes or an open file"
                    raise bad_option(f"{what}, not {type(source).__name__}")
                handle = stack.enter_context(tempfile.SpooledTemporaryFile(MAX_STREAM_MEMORY_BYTES))
                size = _copy_stream(pipe, handle, label, limits)
        limits.check(label, nbytes=size)
        if not size:
            raise refusal(label, "is empty: give a video or an image", "empty")
        handle.seek(0)
        head = handle.read(HEAD_BYTES)
        check_time = limits.start_timer(label)
        if problem := _find_refusal(head):
            raise refusal(label, *problem)
        yield File(Handle(handle, check_time), label, _detect_kind(head), size, check_time)


def _copy_stream(pipe: Readable, file: Any, label: str, limits: Limits) -> int:
    """Copies a stream into a file piece by piece, and returns its size in bytes.

    A stream that is too large is not read to its end, and neither is one whose first piece shows
    that it is no video.
    """
    try:
        while piece := _read_piece(pipe, label):
            if not isinstance(piece, bytes):
                raise refusal(label, OPEN_AS_TEXT, "bad_option")
            # A shorter first piece may not show the type. ``open_media`` checks again afterwards.
            if not file.tell() and len(piece) >= HEAD_BYTES:
                if problem := _find_refusal(piece[:HEAD_BYTES]):
                    raise refusal(label, *problem)
            file.write(piece)
            limits.check(label, nbytes=file.tell())
    except UnicodeDecodeError:
        raise refusal(label, OPEN_AS_TEXT, "bad_option") from None
    except ValueError:
        raise refusal(label, "is closed: open it again", "unreadable") from None
    except OSError:  # This is the temporary file's: ``_read_piece`` refuses a stream that fails.
        what = "cannot be kept while it is read: make room for temporary files"
        raise refusal(label, what, "too_large") from None
    return int(file.tell())


def _read_piece(pipe: Readable, label: str) -> Any:
    """Reads a piece of a stream. Raises VideoInputError where the stream itself fails."""
    try:
        return pipe.read(STREAM_PIECE_BYTES)
    except OSError:
        raise refusal(label, "broke off while it was read: send it again", "truncated") from None


@contextlib.contextmanager
def translate_errors(file: File) -> Iterator[None]:
    """Turns any error of a library into ours, since theirs can contain memory addresses."""
    try:
        yield
    except VideoInputError:
        raise
    except MemoryError:
        raise file.refusal("needs more memory than there is: scale it down", "too_large") from None
    except Exception:  # Decoders raise almost anything on hostile bytes.
        raise file.refusal("is damaged or cut short: copy it again", "truncated") from None


def is_not_hidden(path: Path) -> bool:
    """Whether a file in a folder is not hidden. Hidden files are not read as media: macOS may put
    a "._frame.jpg", which is no image, beside each "frame.jpg"."""
    return not path.name.startswith(".")


def printable_name(name: str) -> str:
    """Returns at most 80 characters of a file's name, safe to print.

    The root of the file system has no name, and is called "the folder".
    """
    return "".join(c if c.isprintable() else "?" for c in name)[:80] or "the folder"


def _detect_kind(head: bytes) -> str | None:
    """Returns the type of file that begins with these bytes, as in ``File.kind``."""
    if head.startswith(IMAGE_STARTS) or head[8:12] == b"WEBP":
        return "image"
    if head[4:8] == b"ftyp" and head[8:12] in (*AVIF_BRANDS, *HEIC_BRANDS, *ANY_IMAGE_BRANDS):
        return "image"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "MP4 or MOV"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "MKV or WebM"
    return "AVI" if head.startswith(b"RIFF") and head[8:12] == b"AVI " else None


def _find_refusal(head: bytes) -> Refusal | None:
    """Returns why a file with these first bytes is refused, as (text after its name, error code);
    None where nothing is wrong."""
    text = head.removeprefix(b"\xef\xbb\xbf").strip()
    # The message names the kind of text, and must not quote it.
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text):
        what = "a web page" if text.startswith(b"<") else "text"
        return f"is not a video but {what}: give {READABLE_TYPES}", "not_a_video"
    if not any(head):
        return f"is not a video but zeros: give {READABLE_TYPES}", "not_a_video"
    if _is_heic(head) and find_spec("pillow_heif") is None:
        what = f"is a HEIC image, which needs {how_to_install('heic')}; or convert it to JPEG"
        return what, "unsupported"
    if head.startswith((b"ID3", b"fLaC")) or head[:4] + head[8:12] == b"RIFFWAVE":
        return f"has no video stream (sound only): give {READABLE_TYPES}", "no_video_stream"
    # Ogg, Flash video, Windows Media, MPEG program streams, PDF and ZIP begin like this.
    if head.startswith((b"OggS", b"FLV", b"0&\xb2u", b"\0\0\1\xba", b"%PDF", b"PK\3\4")):
        return f"is of a kind that is not read; convert it to {READABLE_TYPES}", "unsupported"
    return None


def _is_heic(head: bytes) -> bool:
    """Whether a file with these first bytes is a HEIC image, which Pillow alone does not read."""
    brand = head[8:12]
    if head[4:8] != b"ftyp" or brand not in (*HEIC_BRANDS, *ANY_IMAGE_BRANDS):
        return False
    # The first box has fields of four bytes: its length, "ftyp", the brand, a version, and then the
    # compatible brands.
    box = head[: int.from_bytes(head[:4])]
    compatible_brands = [box[at : at + 4] for at in range(16, len(box), 4)]
    return brand in HEIC_BRANDS or not any(each in AVIF_BRANDS for each in compatible_brands)
