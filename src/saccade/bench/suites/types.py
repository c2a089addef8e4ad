"""The parts of a benchmark: a suite yields items, and an item has media and a question.

Media are read when their reader is called, so listing a suite of thousands costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from saccade.inputs.media import Clip

Task = Literal["caption", "choice", "short", "open", "text"]
"""How an answer is scored: by its words (caption, open), by an option's letter (choice), exactly
(short), or not at all (text: reasoning and code)."""


# This text in a question marks the place of an image. Without marks, media come before the text.
IMAGE_MARK = "<image>"


class LayoutError(Exception):
    """A benchmark's files are malformed.

    The message says what is wrong, and the code that catches the error adds the folder.
    """


class MissingMediumError(LayoutError):
    """A benchmark's files have no medium of a name that one of its samples gives."""


@dataclass(frozen=True)
class Medium:
    """A video or an image, which is read when ``read`` is called."""

    kind: Literal["video", "image"]
    name: str  # For messages: a file name, never a path.
    read: Callable[[], Clip | np.ndarray]  # Returns a Clip, or an image [height width 3].


@dataclass(frozen=True)
class Item:
    """One sample of a suite, ready for a model.

    An answer that equals any of ``answers`` is right. The tuple is empty where there is nothing to
    compare with. ``later_questions`` continue the conversation about the same media. The question
    of ``next_item`` is asked after all of them, with its own media.
    """

    id: str
    task: Task  # How the answer is scored.
    question: str  # As the paper words it, with the options.
    media: tuple[Medium, ...] = ()
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # Of a choice, in order: A, B, ...
    later_questions: tuple[str, ...] = ()
    next_item: Item | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)  # Further facts, such as the seed.

    @property
    def questions(self) -> tuple[str, ...]:
        """The question of every turn."""
        last = () if self.next_item is None else (self.next_item.question,)
        return (self.question, *self.later_questions, *last)


def with_next_items(items: Iterable[Item]) -> Iterator[Item]:
    """Yields each item with the following one as ``next_item``; the last with the first."""
    first = previous = None
    for item in items:
        first = first or item
        if previous is not None:
            yield replace(previous, next_item=item)
        previous = item
    if previous is not None:
        yield replace(previous, next_item=first)


@dataclass(frozen=True)
class Setting:
    """How a paper ran a benchmark, as data that a test compares with the paper."""

    paper: str  # Where this is stated: "SpecVLM, Sec. 4.1".
    samples: int | None = None  # How many samples are drawn; None is every sample.
    max_new_tokens: int = 256
    frames: int | None = None  # How many of each video are read; None is the default sampling.
    split: str = "test"
    # The template of the prompt. The sample's texts replace its fields: {question}, {options}, and
    # {caption1}, {caption2} and so on.
    prompt: str = "{question}"
    then: str | None = None  # The question of the last turn, about the same media.
    # Whether the last turn asks the next sample's question, with its images.
    asks_next_item: bool = False


@runtime_checkable
class Suite(Protocol):
    """A named list of items in a fixed order."""

    @property
    def name(self) -> str: ...

    @property
    def setting(self) -> Setting: ...

    def items(self) -> Iterator[Item]:
        """Yields every item, the same ones in the same order each time."""
        ...
