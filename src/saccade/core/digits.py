"""Reads whole numbers from names of methods and other texts of a user."""

from __future__ import annotations

MAX_DIGITS = 18  # Python refuses to convert several thousand.


def read_digits(text: str) -> int | None:
    """Returns the number that these ASCII digits write; None for any other text, and for more than
    ``MAX_DIGITS`` of them."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None
