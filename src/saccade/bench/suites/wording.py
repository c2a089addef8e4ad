"""What a row of a benchmark says: its texts, options and right answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from saccade.bench.suites.rows import Row
from saccade.bench.suites.types import LayoutError

LETTERS = "ABCDEFGHIJ"
LETTERED = re.compile(r"\(?([A-J])[).:]\s*(.*)")
MARKS = re.compile(r"<image>|\{image#\d+\}")
CAPTION = re.compile(r"Caption\s*#\s*\d+\s*:(.*?)(?=Caption\s*#\s*\d+\s*:|\Z)", re.DOTALL)


def first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def texts(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """The texts of these columns, lists included, without padding and without their letters."""
    values: list[Any] = []
    for name in names:
        value = row.get(name)
        values += value if isinstance(value, list) else [value]
    texts = [text for text in (str(v).strip() for v in values if v is not None) if text]
    texts = [text for text in texts if text != "N/A"]
    matches = [LETTERED.fullmatch(text) for text in texts]
    if texts and all(m and m[1] == letter for m, letter in zip(matches, LETTERS, strict=False)):
        texts = [match[2] for match in matches if match]
    return tuple(texts)


def split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """A question and its options where both are in one text, an option a line."""
    question: list[str] = []
    options: list[str] = []
    for line in text.splitlines():
        match = LETTERED.fullmatch(line.strip())
        if match and len(options) < len(LETTERS) and match[1] == LETTERS[len(options)]:
            options.append(match[2].strip())
        elif options:
            options[-1] = f"{options[-1]} {line.strip()}".strip()
        else:
            question.append(line)
    return "\n".join(question).strip(), tuple(options)


def letter(answer: Any, options: Sequence[str]) -> tuple[str, ...]:
    """The letter of the right option, given as a letter, a number or the option's text."""
    letters = LETTERS[: len(options)]
    if answer is None or answer == "" or answer == -1:
        return ()
    if isinstance(answer, int) and 0 <= answer < len(letters):
        return (letters[answer],)
    text = str(answer).strip()
    bare = text.strip("(). ").upper()
    same = [
        c for c, option in zip(letters, options, strict=False) if option.lower() == text.lower()
    ]
    match = LETTERED.fullmatch(text)
    for found in (same[0] if same else "", bare, match[1] if match else ""):
        if len(found) == 1 and found in letters:
            return (found,)
    raise LayoutError(f"its answer {text[:40]!r} is none of its options")


def answers(answer: Any, verbatim: bool = False) -> tuple[str, ...]:
    """Every answer that is right, each once."""
    values = answer if isinstance(answer, list) else [] if answer is None else [answer]
    if verbatim:
        return tuple(str(value) for value in values)
    texts = (text.strip() for value in values for text in str(value).split("<OR>"))
    return tuple(dict.fromkeys(text for text in texts if text))
