"""Reads the question, the options and the right answers from a row of a benchmark's data set.

Data sets write them in many ways: options in columns or in the question's text, the right answer as
a letter, a number or a text. ``datasets`` names the columns and calls these functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from saccade.bench.suites.rows import Row
from saccade.bench.suites.types import LayoutError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # The options of a choice have these letters, in order.
# "A. text", "A: text" or "(A) text".
LETTERED_OPTION = re.compile(r"\(?([A-Z])[).:]\s*(.*)", re.DOTALL)
# What a question's text has in the place of a picture: "<image>" or "{image#1}".
IMAGE_MARKS = re.compile(r"<image>|\{image#\d+\}")
# "Caption #1: text", up to the next such caption or the end.
NUMBERED_CAPTION = re.compile(r"Caption\s*#\s*\d+\s*:(.*?)(?=Caption\s*#\s*\d+\s*:|\Z)", re.DOTALL)


def first_value(row: Row, names: Sequence[str]) -> Any:
    """Returns the value of the first of these columns that has one; None where none has."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def column_texts(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts of these columns; a column that holds a list has one for each item.

    Empty texts and "N/A" are left out, and surrounding spaces are removed. If the texts are
    lettered "A.", "B." and so on in order, the letters are removed as well.
    """
    values: list[Any] = []
    for name in names:
        value = row.get(name)
        values += value if isinstance(value, list) else [value]
    stripped = [str(value).strip() for value in values if value is not None]
    texts = [text for text in stripped if text not in ("", "N/A")]
    matches = [LETTERED_OPTION.fullmatch(text) for text in texts]
    letters = [match[1] if match else None for match in matches]
    if texts and letters == list(LETTERS[: len(texts)]):
        texts = [match[2] for match in matches if match]
    return tuple(texts)


def split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """Splits a text into a question and its options.

    An option begins with a line such as "A. text", in the order of the letters. A line that begins
    no option belongs to the option before it, or to the question before all options.
    """
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
    """Returns the letter of the right option, alone in a tuple.

    The tuple is empty where the row has no answer (None, "" or -1). The answer may be a letter, an
    option's number from 0 on, or an option's text. Raises LayoutError for any other.
    """
    letters = LETTERS[: len(options)]
    if isinstance(answer, bool):  # It is an option's text, "True" or "False", and not its number.
        answer = str(answer)
    if answer is None or answer == "" or answer == -1:
        return ()
    if isinstance(answer, int) and 0 <= answer < len(letters):
        return (letters[answer],)
    text = str(answer).strip()
    # An option's text comes first. If the options A and B have the texts "B" and "C", the answer
    # "C" is the text of option B, so the right letter is B.
    letters_of_equal_options = [
        letter
        for letter, option in zip(letters, options, strict=False)
        if option.lower() == text.lower()
    ]
    by_text = letters_of_equal_options[0] if letters_of_equal_options else ""
    bare_letter = text.strip("(). ").upper()  # As in "b", "B." or "(b)".
    match = LETTERED_OPTION.fullmatch(text)
    letter_before_text = match[1] if match else ""  # As in "B. text".
    for candidate in (by_text, bare_letter, letter_before_text):
        if len(candidate) == 1 and candidate in letters:
            return (candidate,)
    raise LayoutError(f"its answer {text[:40]!r} is none of its options")


def right_answers(answer: Any, verbatim: bool = False) -> tuple[str, ...]:
    """Returns every right answer, each once. ``answer`` is one or a list of them.

    A text may hold several, separated by "<OR>". None and empty texts are left out. With
    ``verbatim`` all texts are returned as they are, empty and repeated ones too.
    """
    listed = answer if isinstance(answer, list) else [answer]
    values = [value for value in listed if value is not None]
    if verbatim:
        return tuple(str(value) for value in values)
    cleaned = (text.strip() for value in values for text in str(value).split("<OR>"))
    return tuple(dict.fromkeys(text for text in cleaned if text))
