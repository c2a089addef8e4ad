"""Parses JSON that comes from outside: files of users, answers of models, requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Returns what a JSON text holds.

    ``options`` are those of ``json.loads``. Raises ValueError where the text is no JSON, and also
    where its lists and objects are nested too deeply for Python's parser, which would raise
    RecursionError.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Returns what a JSON file holds; of a .jsonl file, a list of what its lines hold.

    Blank lines are left out. Raises OSError and ValueError.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return parse_json(text)
    # ``splitlines`` would also split at other characters, such as U+2028, which may occur inside a
    # string of JSON.
    return [parse_json(line) for line in text.split("\n") if line.strip()]
