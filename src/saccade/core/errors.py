"""Errors for people: each message is one sentence saying what was wrong and what would work.

The command line prints the message and exits with code 2. It does the same with an OSError that
names a file. The server answers with the error's own HTTP status, which is 400 unless the error
says otherwise. Any other exception is a bug in Saccade.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

# Why a video, an image or the way to sample it was refused, for programs that catch the error.
VideoInputCode = Literal[
    "missing", "not_allowed", "unreadable", "empty", "not_a_video", "no_video_stream",
    "truncated", "damaged", "unsupported", "too_large", "too_many_pixels", "too_long", "too_slow",
    "unreachable", "bad_option", "busy",
]  # fmt: skip

# The HTTP status of each code. The codes that are not here have 400.
_STATUS: dict[VideoInputCode, int] = {
    "too_large": 413, "too_many_pixels": 413, "too_long": 413, "too_slow": 413,
    "unsupported": 415, "bad_option": 422, "busy": 503,
}  # fmt: skip

# For an answer whose finish reason is "error": its next token could not be drawn.
INVALID_LOGITS_MESSAGE = (
    "the model's numbers broke down (NaN), or the rules of sampling or the required format left no "
    "token to choose, so there is no answer"
)


class SaccadeError(Exception):
    """Base of every error meant for a person."""


class VideoInputError(SaccadeError):
    """A video, an image or the way to sample it cannot be used.

    `limit` is the bound that was exceeded, in the unit of the option that sets it, or None.
    """

    def __init__(
        self, message: str, code: VideoInputCode, limit: int | float | None = None
    ) -> None:
        super().__init__(message, code, limit)  # Pickling needs all three.
        self.code = code
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def status(self) -> int:
        """The HTTP status a server should answer with: 400, 413, 415, 422 or 503."""
        return _STATUS.get(self.code, 400)


class ModelError(SaccadeError):
    """A checkpoint cannot be loaded, or a pair of models does not fit together."""


class MethodError(SaccadeError):
    """A method name or recipe is unknown or impossible."""


class OptionError(SaccadeError):
    """An option has a value that cannot be used."""


class DraftFailed(Exception):
    """A draft cannot go on; the cause is the exception that it was raised from.

    ``trees`` (``core.tree.Tree`` by request) are all nodes that were drawn before the failure.
    They have to be judged like any others: the failure may depend on what was drawn, and dropping
    a drawn token because of its value would change the distribution of answers (see ``Tree``).
    """

    def __init__(self, trees: Mapping[int, Any]) -> None:
        super().__init__("the draft cannot go on")
        self.trees = trees


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, to be quoted in a message of Saccade's own: at
    most 300 characters of it, and without its full stop. It is empty if the error has no message.
    """
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")[:300]


def kind_and_line(error: BaseException) -> str:
    """Returns the class's name and the first line of an error that is not meant for people."""
    return f"{type(error).__name__}: {first_line(error)}"


def suggest(name: str, names: Iterable[str]) -> str:
    """Returns what to add to an error about an unknown name: the nearest of ``names``, if any."""
    others = [candidate for candidate in names if candidate != name]
    nearest = difflib.get_close_matches(name, others, n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def how_to_install(*extras: str) -> str:
    """Returns how to install Saccade with extras. It names a clone, because no package index offers
    Saccade."""
    options = " ".join(f"--extra {name}" for name in extras)
    path = f"PATH/TO/CLONE[{','.join(extras)}]"
    return f"`uv run {options} ...` in a clone, elsewhere `pip install '{path}'`"
