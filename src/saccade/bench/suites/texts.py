"""Long texts that nobody trained a draft for: files of prose and of code, cut to a few lengths, and
whether what is answered about them goes round in circles."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import saccade
from saccade.core.errors import OptionError

KINDS = (".md", ".py", ".txt")
LENGTHS = (1800, 2500, 3500, 5000, 7500)  # tokens, about
LETTERS = 3  # a token, at least: a shorter text is passed over
GRAM = 4
TASKS = (
    "Summarise the text above.",
    "What is the most important thing that the text above says? Answer in a paragraph.",
    "Continue the text above.",
)
# The texts that docs/results/real.md was made of, in its order. They lie in a clone, kept as they
# were when they were asked about, so that the same questions can be asked again.
MEASURED_TEXTS = (
    *("README.md", "CHANGELOG.md", "LOG.md", "bench.md", "families.md", "lossless.md"),
    *("numbers.md", "reliability.md", "scaling.md", "serve.md", "structure.md", "vllm.md"),
    *("a-sixth-method.md", "fresh.md", "hippo.md", "sage.md", "sparse-to-dense.md"),
    *("specvlm.md", "tabed.md", "scenes.py", "drafters.py", "session.py", "guard.py"),
)


@dataclass(frozen=True)
class Document:
    """A text, where it comes from, what is asked about it, and how many of its tokens are read."""

    name: str
    text: str
    task: str
    tokens: int

    @property
    def digest(self) -> str:
        """Names what is asked: a text that has changed since is another one."""
        told = f"{self.tokens}\n{self.task}\n{self.text}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def repeated(ids: Sequence[int]) -> float:
    """The share of a text's runs of four tokens that stood in it before."""
    runs = [tuple(ids[start : start + GRAM]) for start in range(len(ids) - GRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def documents(paths: Sequence[Path]) -> Iterator[Document]:
    """One a file, as long as it fills; without paths those of ``MEASURED_TEXTS`` where all of them
    are there, in a clone, and else the package's own code.

    Raises OptionError where a path is neither a file nor a folder.
    """
    tasks = cycle(TASKS)
    for root in paths or _own(Path(saccade.__file__).parent):
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


def shortest(texts: Sequence[Document], count: int | None) -> list[Document]:
    """So many of them, in their order; all when None."""
    order = sorted(range(len(texts)), key=lambda number: texts[number].tokens)
    return [texts[number] for number in sorted(order[:count])]


def _own(package: Path) -> list[Path]:
    folder = package.parents[1] / "notebook" / "texts"
    texts = [folder / name for name in MEASURED_TEXTS]
    return texts if all(file.is_file() for file in texts) else [package]
