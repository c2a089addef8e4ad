"""What a benchmark is made of: a suite gives items, an item its media and question.

Media are read when they are asked for, so a suite of thousands costs nothing to list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from saccade.inputs.media import Clip

Task = Literal["caption", "choice", "short", "open", "text"]
"""How an answer is judged: by its words (caption, open), by an option's letter (choice), exactly
(short), or not at all by us (text: reasoning and code)."""


MARK = "<image>"  # where a question has an image; without it the media come before the text


class LayoutError(Exception):
    """Files are not as they should be; the message is a clause without a subject's folder."""


@dataclass(frozen=True)
class Medium:
    """A video or an image, read by calling it."""

    kind: Literal["video", "image"]
    name: str  # for messages: a file name, never a path
    read: Callable[[], Clip | np.ndarray]  # a Clip of a video, [height width 3] of an image


@dataclass(frozen=True)
class Item:
    """One sample of a suite, ready to be put to a model."""

    id: str
    task: Task
    question: str  # as the paper words it, options included
    media: tuple[Medium, ...] = ()
    answers: tuple[str, ...] = ()  # any of them is right; empty where there is none to compare with
    options: tuple[str, ...] = ()  # of a choice, in order: A, B, ...
    then: tuple[str, ...] = ()  # further questions of a conversation
    next: Item | None = None  # asked after all of them, and shows something of its own
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> tuple[str, ...]:
        """The question of every turn."""
        last = () if self.next is None else (self.next.question,)
        return (self.question, *self.then, *last)


def in_a_row(items: Iterable[Item]) -> Iterator[Item]:
    """Each with the one after it as what is asked next; the last with the first."""
    first = before = None
    for item in items:
        first = first or item
        if before is not None:
            yield replace(before, next=item)
        before = item
    if before is not None:
        yield replace(before, next=first)


@dataclass(frozen=True)
class Setting:
    """How a paper ran a benchmark, as data: a test compares it with the paper."""

    paper: str  # where it is stated: "SpecVLM, Sec. 4.1"
    samples: int | None = None
    max_new_tokens: int = 256
    frames: int | None = None
    split: str = "test"
    prompt: str = "{question}"  # {question} and, of a choice, {options}
    then: str | None = None  # the second turn's question
    next: bool = False  # whether the second turn is the next sample, with its images


@runtime_checkable
class Suite(Protocol):
    """A named list of items in a fixed order."""

    @property
    def name(self) -> str: ...

    @property
    def setting(self) -> Setting: ...

    def items(self) -> Iterator[Item]:
        """Every item, the same ones in the same order each time."""
        ...
