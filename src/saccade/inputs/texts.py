"""Files of long text, and what a question is about: such, a clip, or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import OptionError

if TYPE_CHECKING:
    import numpy as np

    from saccade.inputs.media import Clip

LONGEST = 2**26  # bytes, more than any model reads: a larger file is not even opened


@dataclass(frozen=True)
class About:
    """What is asked about: a clip, long texts that views may prune, or both."""

    clip: Clip | None = None
    documents: tuple[str, ...] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """As :meth:`saccade.inputs.Pair.ask` takes it."""
        from saccade.inputs.questions import shown

        return {**({} if self.clip is None else shown(self.clip)), "documents": self.documents}

    @property
    def frames(self) -> list[list[np.ndarray]]:
        """Of each video and image, for whoever puts them into words."""
        return [] if self.clip is None else [list(self.clip.frames)]

    @property
    def told(self) -> dict[str, Any]:
        """What is said of it beside an answer: how many frames, and the clip's warnings."""
        frames, warned = (
            (0, ()) if self.clip is None else (len(self.clip.frames), self.clip.warnings)
        )
        return {"frames": frames, "warnings": [*warned]}


def document(file: Path) -> str:
    """A text that views may prune. Raises OptionError, in a sentence, for a file that is none."""
    try:
        if file.is_file() and file.stat().st_size > LONGEST:
            raise OptionError(
                f"the document {file} has over {LONGEST >> 20} MB, more than a model reads: "
                "give a part of it"
            )
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(_no_text(file)) from error
    except FileNotFoundError as error:
        raise OptionError(f"the document {file} does not exist: name a file of text") from error
    except OSError as error:
        told = (error.strerror or "no reason is known").lower()
        raise OptionError(f"the document {file} cannot be read ({told}): name another") from error
    if "\0" in text:
        raise OptionError(_no_text(file))
    if not text.strip():
        raise OptionError(f"the document {file} is empty: name a file with words in it")
    return text


def _no_text(file: Path) -> str:
    return f"the document {file} is no text: name a file in UTF-8, a video without --document"
