"""The small YAML file that ``saccade calibrate`` writes and ``--config`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from saccade.core.errors import MethodError, OptionError
from saccade.methods import AXES, resolve

if TYPE_CHECKING:
    from saccade.bench.calibrate import Calibration

LARGEST_FILE = 100_000  # bytes
KEYS = ("method", "target", "draft", "threads", *AXES, "measured")
NUMBER = ((int, float), "a number between 0 and 1")
WANTED: Mapping[str, tuple[tuple[type, ...], str]] = {
    "threads": ((int,), "a whole number from 1"),
    "keep": NUMBER,
    "lambda": NUMBER,
    "shape": ((str, list), "a name, or a tree as paths like [[0], [1], [0, 0]]"),
    "measured": ((dict,), "keys and values"),
}
NAME = ((str,), "a name")


def write(path: Path, calibration: Calibration) -> None:
    """A small file that ``read`` reads and a person can edit."""
    head = (
        "# Made by `saccade calibrate`; read by --config. Holds for this pair and this machine.\n"
        f"# {calibration.advice}.\n"
    )
    plain = json.loads(json.dumps(calibration.json()))  # torch's version is not quite a str
    said = {key: value for key, value in plain.items() if value is not None}
    text = yaml.safe_dump(
        said, sort_keys=False, allow_unicode=True, default_flow_style=None, width=200
    )
    path.write_text(head + text, encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What a file says of method, target, draft, threads and measured, every key and value checked.
    An axis may be a key: one more override of the method."""
    said = {key: value for key, value in _mapping(path).items() if value is not None}
    for key, value in said.items():
        types, wanted = WANTED.get(key, NAME)
        good = type(value) in types and value != "" and (key != "threads" or value >= 1)
        if not good or (isinstance(value, list) and not all(map(_is_path, value))):
            raise OptionError(f"{path}: {key} must be {wanted}, not {str(value)[:40]!r}")
    overrides = [f"{key}={_text(value)}" for key, value in said.items() if key in AXES]
    found = {key: value for key, value in said.items() if key not in AXES}
    if "method" in said or overrides:
        found["method"] = "/".join([said.get("method", "specvlm").strip(), *overrides])
        try:
            resolve(found["method"])
        except MethodError as error:
            raise OptionError(f"{path}: {error}") from error
    return found


def _mapping(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise OptionError(f"{path} is too large for a config: {LARGEST_FILE} bytes at most")
    try:
        node, said = yaml.compose(raw, yaml.SafeLoader), yaml.safe_load(raw)
    except Exception as error:  # besides YAMLError whatever its converters trip over
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise OptionError(f"{path} cannot be read as YAML{where}") from error
    known = f"known keys: {', '.join(KEYS)}"
    if not isinstance(said, dict | None):
        raise OptionError(f"{path} holds no keys and values; {known}")
    keys = [] if said is None else [key.value for key, _ in node.value]
    for key in said or ():
        if key not in KEYS:
            raise OptionError(f"{path}: unknown key {key!r}; {known}")
        if keys.count(key) > 1:
            raise OptionError(f"{path}: key {key!r} is given twice")
    return said or {}


def _is_path(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int for rank in value)


def _text(value: Any) -> str:
    """An override's value as a method's name spells it."""
    if isinstance(value, list):
        return "paths-" + ",".join(".".join(map(str, path)) for path in value)
    return str(value)
