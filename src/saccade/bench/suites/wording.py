"""Reads the texts, options and right answers of a benchmark's row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from saccade.bench.suites.rows import Row
from saccade.bench.suites.types import LayoutError

LETTERS = "ABCDEFGHIJ"
LETTERED_OPTION = re.compile(r"\(?([A-J])[).:]\s*(.*)", re.DOTALL)
IMAGE_MARKS = re.compile(r"<image>|\{image#\d+\}")
NUMBERED_CAPTION = re.compile(r"Caption\s*#\s*\d+\s*:(.*?)(?=Caption\s*#\s*\d+\s*:|\Z)", re.DOTALL)


def first_value(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def column_texts(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts of these columns, one for each item of a list.

    Surrounding spaces and the letters of options, such as "A.", are removed.
    """
    values: list[Any] = []
    for name in names:
        value = row.get(name)
        values += value if isinstance(value, list) else [value]
    cleaned = [text for text in (str(v).strip() for v in values if v is not None) if text]
    cleaned = [text for text in cleaned if text != "N/A"]
    matches = [LETTERED_OPTION.fullmatch(text) for text in cleaned]
    if cleaned and all(m and m[1] == letter for m, letter in zip(matches, LETTERS, strict=False)):
        cleaned = [match[2] for match in matches if match]
    return tuple(cleaned)


def split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """Splits a text into a question and its options, where each option is a line."""
    question: list[str] = []
    options: list[str] = []
    for line in text.splitlines():
        match = LETTERED_OPTION.fullmatch(line.strip())
        if match and len(options) < len(LETTERS) and match[1] == LETTERS[len(options)]:
            options.append(match[2].strip())
        elif options:
            options[-1] = f"{options[-1]} {line.strip()}".strip()
        else:
            question.append(line)
    return "\n".join(question).strip(), tuple(options)


def right_letter(answer: Any, options: Sequence[str]) -> tuple[str, ...]:
    """Returns the letter of the right option, given as a letter, a number or the option's text."""
    letters = LETTERS[: len(options)]
    if answer is None or answer == "" or answer == -1:
        return ()
    if isinstance(answer, int) and 0 <= answer < len(letters):
        return (letters[answer],)
    text = str(answer).strip()
    stripped = text.strip("(). ").upper()
    equal_options = [
        c for c, option in zip(letters, options, strict=False) if option.lower() == text.lower()
    ]
    match = LETTERED_OPTION.fullmatch(text)
    for candidate in (
        equal_options[0] if equal_options else "",
        stripped,
        match[1] if match else "",
    ):
        if len(candidate) == 1 and candidate in letters:
            return (candidate,)
    raise LayoutError(f"its answer {text[:40]!r} is none of its options")


def right_answers(answer: Any, verbatim: bool = False) -> tuple[str, ...]:
    """Returns every right answer, each once."""
    listed = answer if isinstance(answer, list) else [answer]
    values = [value for value in listed if value is not None]
    if verbatim:
        return tuple(str(value) for value in values)
    cleaned = (text.strip() for value in values for text in str(value).split("<OR>"))
    return tuple(dict.fromkeys(text for text in cleaned if text))
