"""Long texts that nobody trained a draft for: files of prose and of code, cut to a few lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import saccade
from saccade.core.errors import OptionError

KINDS = (".md", ".py", ".txt")
LENGTHS = (2000, 3000, 4000, 6000)  # tokens, about
LETTERS = 3  # a token, at least: a shorter text is passed over
TASKS = (
    "Summarise the text above.",
    "What is the most important thing that the text above says? Answer in a paragraph.",
    "Continue the text above.",
)


@dataclass(frozen=True)
class Document:
    """A text, where it comes from, what is asked about it, and how many of its tokens are read."""

    name: str
    text: str
    task: str
    tokens: int


def documents(paths: Sequence[Path]) -> Iterator[Document]:
    """One a file, as long as it fills; of the package's own code without paths.

    Raises OptionError where a path is neither a file nor a folder.
    """
    tasks = cycle(TASKS)
    for root in paths or [Path(saccade.__file__).parent]:
        if not root.exists():
            raise OptionError(f"{root} is neither a file nor a folder")
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for file in files:
            if file.suffix not in KINDS or not file.is_file():
                continue
            text = file.read_text("utf-8", errors="replace").strip()
            if fits := [length for length in LENGTHS if len(text) >= LETTERS * length]:
                name = file.name if root.is_file() else str(file.relative_to(root))
                yield Document(name, text, next(tasks), fits[-1])
