"""Reads JSON that a model or a client writes, also while it is still being written.

Unlike Python's ``json``, it distinguishes text that is not JSON from text that has not ended yet,
and refuses ``NaN`` and ``Infinity``. :func:`read_object` returns values as they are written, so
that no number loses digits or range. The grammar is that of RFC 8259.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from saccade.core.json_text import parse_json

# Levels of objects and arrays within one value. Recursive parsers in Python allow about 1000.
MAX_DEPTH = 200
MAX_INTEGER_DIGITS = 4000  # Python writes no integer of more than 4300.
CLOSING = {"{": "}", "[": "]"}  # The closing bracket of each opening one.
BLANKS = re.compile(r"[ \t\n\r]*")
# What may stand between the quotes of a string. Each character can match in one way only, so the
# pattern need not go back (``*+``) where a string does not match.
IN_STRING = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
STRING = re.compile(f'"{IN_STRING}"')
# Any beginning of a string. It may end within an escape, as ``"a\u00`` does.
STRING_START = re.compile(rf'"{IN_STRING}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?')
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# Any beginning of a number, such as ``-``, ``1.`` or ``1e+``.
NUMBER_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?)?")
WORDS = ("true", "false", "null")


class NotJson(ValueError):
    """The text is not JSON, whatever may follow it, or it passes a limit of this module."""


class Unfinished(ValueError):
    """The text ends before the value does."""


def read_object(text: str, at: int = 0) -> tuple[dict[str, str], int]:
    """Returns the members of the object that begins at ``at``, and where the object ends.

    Each value is the text as written. Of equal keys the last counts. Raises NotJson or Unfinished.
    """
    members: dict[str, str] = {}
    at = _expect(text, at, "{")
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        start = at
        at = _string_end(text, at)
        key = json.loads(text[start:at])
        at = _expect(text, at, ":")
        start = at
        at = value_end(text, at)
        members[key] = text[start:at]
        at = _skip_blanks(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        at = _expect(text, at, ",")


def parse_object(text: str) -> dict[str, Any]:
    """Parses a text that is one JSON object as a whole. Raises ValueError where it is not.

    A number beyond a float's range, such as 1e400, becomes an integer. As a float it would be
    infinite, and would be written as Infinity, which is no JSON. A number of more digits than
    Python writes raises ValueError too (``MAX_INTEGER_DIGITS``).
    """
    _, end = read_object(text)
    if text[end:].strip(" \t\n\r"):
        raise NotJson
    return dict(parse_json(text, parse_float=_parse_number))


def value_end(text: str, at: int = 0) -> int:
    """Returns where the value that begins at ``at`` ends. Raises NotJson or Unfinished.

    A number that reaches the end of the text is unfinished, because more digits may follow.
    """
    missing_brackets: list[str] = []  # Those that close what is open here, the innermost last.
    while True:  # Each time, ``at`` is where a value begins.
        at = _skip_blanks(text, at)
        opening = text[at : at + 1]
        if opening in CLOSING:
            closing = CLOSING[opening]
            at = _skip_blanks(text, at + 1)
            if text[at : at + 1] != closing:
                missing_brackets.append(closing)
                if len(missing_brackets) > MAX_DEPTH:
                    raise NotJson
                if closing == "}":
                    at = _skip_key(text, at)
                continue
            at += 1
        else:
            at = _scalar_end(text, at)
        # A value has ended, and perhaps the objects and arrays around it. After a comma comes
        # another value.
        while missing_brackets:
            at = _skip_blanks(text, at)
            if text[at : at + 1] == missing_brackets[-1]:
                missing_brackets.pop()
                at += 1
                continue
            at = _expect(text, at, ",")
            if missing_brackets[-1] == "}":
                at = _skip_key(text, at)
            break
        else:  # No object or array is open any more.
            return at


def _parse_number(digits: str) -> float | int:
    """Parses a number with a fraction or an exponent, as :func:`parse_object` says."""
    value = float(digits)
    if math.isfinite(value):
        return value
    try:
        exact = Decimal(digits)
    except ArithmeticError:  # The exponent is too large even for a Decimal.
        raise NotJson from None
    if exact.adjusted() > MAX_INTEGER_DIGITS:
        raise NotJson
    return int(exact)


def _skip_blanks(text: str, at: int) -> int:
    """Returns the index of the next character that is no blank. Raises Unfinished at the end."""
    blanks = BLANKS.match(text, at)
    assert blanks is not None
    if blanks.end() == len(text):
        raise Unfinished
    return blanks.end()


def _expect(text: str, at: int, mark: str) -> int:
    """Returns the index of what follows this mark; blanks before and after the mark are skipped."""
    at = _skip_blanks(text, at)
    if text[at] != mark:
        raise NotJson
    return _skip_blanks(text, at + 1)


def _skip_key(text: str, at: int) -> int:
    """Skips the key of a member, which begins at ``at``, and returns where its value begins."""
    return _expect(text, _string_end(text, at), ":")


def _string_end(text: str, at: int) -> int:
    """Returns where the string that begins at ``at`` ends, after its closing quote."""
    return _match_end(STRING, STRING_START, text, at)


def _scalar_end(text: str, at: int) -> int:
    """Returns where a string, a number or one of the words ends."""
    if text[at] == '"':
        return _string_end(text, at)
    for word in WORDS:
        if text.startswith(word, at):
            return at + len(word)
        if word.startswith(text[at : at + len(word)]):
            raise Unfinished
    return _match_end(NUMBER, NUMBER_START, text, at)


def _match_end(pattern: re.Pattern[str], start_pattern: re.Pattern[str], text: str, at: int) -> int:
    """Returns where the match of ``pattern`` at ``at`` ends.

    ``start_pattern`` matches beginnings of such matches. Where one reaches the end of the text,
    more may follow, so Unfinished is raised. NotJson is raised where there is no match.
    """
    beginning = start_pattern.match(text, at)
    if beginning is not None and beginning.end() == len(text):
        raise Unfinished
    match = pattern.match(text, at)
    if match is None:
        raise NotJson
    return match.end()
