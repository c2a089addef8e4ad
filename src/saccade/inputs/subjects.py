"""What a question of the command line is about: a clip, long texts from files, or both."""

from __future__ import annotations

import codecs
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import OptionError

if TYPE_CHECKING:
    import numpy as np

    from saccade.inputs.media import Clip

MAX_DOCUMENT_BYTES = 2**26  # More than any model reads, so a larger file is not even opened.
# Python's own table of file types is used and not the system's, because some systems list .ts, the
# ending of a video format, as text.
FILE_TYPES = mimetypes.MimeTypes()
FIRST_BYTES = 2**16  # How many bytes of a file are read to see whether it is a text.


@dataclass(frozen=True)
class Subject:
    """What a question is about: a clip, long texts that views may prune, or both."""

    clip: Clip | None = None
    documents: tuple[str, ...] = ()

    @property
    def ask_arguments(self) -> dict[str, Any]:
        """The keyword arguments for :meth:`saccade.inputs.Pair.ask`."""
        from saccade.inputs.questions import clip_arguments

        media = {} if self.clip is None else clip_arguments(self.clip)
        return {**media, "documents": self.documents}

    @property
    def frames(self) -> list[list[np.ndarray]]:
        """The frames of each video and image, for a captioner."""
        return [] if self.clip is None else [list(self.clip.frames)]

    @property
    def frame_count(self) -> int:
        return 0 if self.clip is None else len(self.clip.frames)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was noticed while the clip was read."""
        return () if self.clip is None else tuple(self.clip.warnings)


def is_media_name(name: str) -> bool:
    """Returns whether a name has the ending of a media file. Such a file need not exist."""
    return _kind_of(name).startswith(("image/", "video/", "audio/"))


def _kind_of(name: str) -> str:
    """Returns the type of a file by its name's ending, such as "video/mp4". It is empty for an
    unknown ending and for a compressed file, such as clip.mp4.gz."""
    kind, compression = FILE_TYPES.guess_type(name)
    return kind if kind is not None and compression is None else ""


def is_text_file(file: Path) -> bool:
    """Returns whether a file is a text by its name, or by its first bytes if the name says nothing.

    The first bytes are taken for text if they are UTF-8 without a zero byte. Pictures and videos
    have other bytes among their first ``FIRST_BYTES``, except in formats that are written as text,
    such as SVG and plain PPM. An empty file is no text by its first bytes.
    """
    kind = _kind_of(file.name)
    if kind.startswith("text/") or kind == "application/json":
        return True
    if is_media_name(file.name):
        return False
    try:
        with file.open("rb") as opened:
            first = opened.read(FIRST_BYTES)
        # An incremental decoder accepts a character of which only the first bytes were read.
        codecs.getincrementaldecoder("utf-8")().decode(first)
    except (OSError, UnicodeDecodeError):
        # Callers read what is not a text as a video, and that reader says what is wrong with it.
        return False
    return bool(first) and b"\0" not in first


def read_document(file: Path) -> str:
    """Returns the text of a file. Raises OptionError where the file is missing, empty, too large,
    unreadable or not a text."""
    try:
        if file.is_file() and file.stat().st_size > MAX_DOCUMENT_BYTES:
            raise OptionError(
                f"the document {file} has over {MAX_DOCUMENT_BYTES >> 20} MB, more than a model "
                "reads: give a part of it"
            )
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(_not_text_message(file)) from error
    except FileNotFoundError as error:
        raise OptionError(f"the document {file} does not exist: name a file of text") from error
    except OSError as error:
        reason = (error.strerror or "no reason is known").lower()
        raise OptionError(f"the document {file} cannot be read ({reason}): name another") from error
    if "\0" in text:
        raise OptionError(_not_text_message(file))
    if not text.strip():
        raise OptionError(f"the document {file} is empty: name a file with words in it")
    return text


def _not_text_message(file: Path) -> str:
    return (
        f"the document {file} is no text: name a text file in UTF-8, or give a picture or a video "
        "without --document"
    )
