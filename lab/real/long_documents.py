"""Chooses the long texts that real weights are measured on: files of prose and code.

No draft was trained on them. Of each text a first part of one of ``LENGTHS`` is read. The module
also measures how much an answer repeats itself, because a draft predicts repetitions easily.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from saccade.core.errors import OptionError

SUFFIXES = (".md", ".py", ".txt")
LENGTHS = (1800, 2500, 3500, 5000, 7500)  # In tokens, approximately.
# A text is long enough for a length if it has this many letters for each of the length's tokens.
MIN_LETTERS_PER_TOKEN = 3
NGRAM_LENGTH = 4
TASKS = (
    "Summarise the text above.",
    "What is the most important thing that the text above says? Answer in a paragraph.",
    "Continue the text above.",
)
# The documents of docs/results/real.md in its order. They are kept as they were when they were
# measured, so that the questions stay the same.
TEXTS = Path(__file__).parents[2] / "notebook" / "texts"
MEASURED_DOCUMENTS = (
    *("README.md", "CHANGELOG.md", "LOG.md", "bench.md", "families.md", "lossless.md"),
    *("numbers.md", "reliability.md", "scaling.md", "serve.md", "structure.md", "vllm.md"),
    *("a-sixth-method.md", "fresh.md", "hippo.md", "sage.md", "sparse-to-dense.md"),
    *("specvlm.md", "tabed.md", "scenes.py", "drafters.py", "session.py", "guard.py"),
)


@dataclass(frozen=True)
class Document:
    """A text with a task about it. A task that needs no text has an empty one, of 0 tokens."""

    name: str  # A file's name, or one with its kind, such as "code: 3" or "document: LOG.md".
    text: str
    task: str  # What the model is asked to do.
    tokens: int  # About how many tokens of the text are read, from its start.

    @property
    def digest(self) -> str:
        """A digest of the text, its task and ``tokens``, which changes when one of them does."""
        content = f"{self.tokens}\n{self.task}\n{self.text}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def repeated_share(ids: Sequence[int]) -> float:
    """Returns the share of a text's four-grams that occurred in it before."""
    runs = [
        tuple(ids[start : start + NGRAM_LENGTH]) for start in range(len(ids) - NGRAM_LENGTH + 1)
    ]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def find_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yields one document for each file, of the greatest of ``LENGTHS`` that its text allows.

    Of a folder, all files with one of ``SUFFIXES`` are read, those in its folders included. Files
    that are too short for the least length are left out. Without paths, the files are
    ``MEASURED_DOCUMENTS``. The documents take the ``TASKS`` in turn. Raises OptionError where a
    path is neither a file nor a folder.
    """
    tasks = cycle(TASKS)
    for root in paths or [TEXTS / name for name in MEASURED_DOCUMENTS]:
        if not root.exists():
            raise OptionError(f"{root} is neither a file nor a folder")
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for file in files:
            # A file that is named itself is read whatever its suffix is.
            if not file.is_file() or (root.is_dir() and file.suffix not in SUFFIXES):
                continue
            text = file.read_text("utf-8", errors="replace").strip()
            possible_lengths = [
                length for length in LENGTHS if len(text) >= MIN_LETTERS_PER_TOKEN * length
            ]
            if possible_lengths:
                name = file.name if root.is_file() else str(file.relative_to(root))
                yield Document(name, text, next(tasks), possible_lengths[-1])


def shortest_documents(texts: Sequence[Document], count: int | None) -> list[Document]:
    """Returns the ``count`` shortest documents, in the order of ``texts``; None means all."""
    by_length = sorted(range(len(texts)), key=lambda number: texts[number].tokens)
    return [texts[number] for number in sorted(by_length[:count])]
