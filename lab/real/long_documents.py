"""Long texts on which no draft was trained: files of prose and code, cut to a few lengths.

Also measures how much an answer repeats itself.
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
MIN_LETTERS_PER_TOKEN = 3  # A text with fewer letters is too short for a length.
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
    """A text, its source, the task about it, and how many of its tokens are read."""

    name: str
    text: str
    task: str
    tokens: int

    @property
    def digest(self) -> str:
        """A digest of the text and its task, which changes when the text changes."""
        content = f"{self.tokens}\n{self.task}\n{self.text}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def repeated_share(ids: Sequence[int]) -> float:
    """Returns the share of a text's four-grams that occurred in it before."""
    runs = [
        tuple(ids[start : start + NGRAM_LENGTH]) for start in range(len(ids) - NGRAM_LENGTH + 1)
    ]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def find_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yields one document per file, as long as the file allows.

    Without paths these are ``MEASURED_DOCUMENTS``. Raises OptionError where a path is neither a
    file nor a folder.
    """
    tasks = cycle(TASKS)
    for root in paths or [TEXTS / name for name in MEASURED_DOCUMENTS]:
        if not root.exists():
            raise OptionError(f"{root} is neither a file nor a folder")
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for file in files:
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            text = file.read_text("utf-8", errors="replace").strip()
            if fits := [
                length for length in LENGTHS if len(text) >= MIN_LETTERS_PER_TOKEN * length
            ]:
                name = file.name if root.is_file() else str(file.relative_to(root))
                yield Document(name, text, next(tasks), fits[-1])


def shortest_documents(texts: Sequence[Document], count: int | None) -> list[Document]:
    """Returns the ``count`` shortest documents in their order; all where ``count`` is None."""
    order = sorted(range(len(texts)), key=lambda number: texts[number].tokens)
    return [texts[number] for number in sorted(order[:count])]
