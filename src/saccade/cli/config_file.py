"""Reads and writes the YAML file that ``saccade calibrate`` makes and ``--config`` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from saccade.core.errors import MethodError, OptionError
from saccade.methods import AXES, resolve

if TYPE_CHECKING:
    from saccade.bench.calibration import Calibration

MAX_FILE_BYTES = 100_000
KEYS = ("method", "target", "draft", "draft_quantize", "threads", *AXES, "measured")
# What a value may be: its types, and how an error describes them.
NAME = ((str,), "a name")
AXIS_VALUE = ((str, int, float), "a name or a number")
SHARE = ((int, float), "a number between 0 and 1")
# What the values of some keys may be. Any other axis is an AXIS_VALUE, and any other key is a NAME.
VALUE_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "threads": ((int,), "a whole number from 1"),
    "keep": SHARE,
    "lambda": SHARE,
    "shape": ((str, list), "a name, or a tree as paths like [[0], [1], [0, 0]]"),
    "measured": ((dict,), "keys and values"),
}
METHOD_OF_AXES = "specvlm"  # The method that axes in a file belong to if the file names no method.


def write_config(path: Path, calibration: Calibration) -> None:
    """Writes a small file that :func:`read_config` reads and a person can edit."""
    head = (
        "# Made by `saccade calibrate`; read by --config. Holds for this pair and this machine.\n"
        f"# {calibration.advice}.\n"
    )
    # YAML cannot write torch's version, which is a subclass of str. JSON makes it a plain string.
    fields = json.loads(json.dumps(calibration.json()))
    content = {key: value for key, value in fields.items() if value is not None}
    text = yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=200
    )
    path.write_text(head + text, encoding="utf-8")


def read_config(path: Path) -> dict[str, Any]:
    """Returns what a file sets, by key: the method, the models, the rounding of the draft's weights
    (``draft_quantize``), the threads and the measurements. A key with the value null
    counts as left out.

    An axis, such as ``keep`` or ``shape``, may be a key too. It becomes one more ``key=value`` part
    of the method's name, or of ``METHOD_OF_AXES`` if the file names no method. Raises OptionError
    for an unknown key or a wrong value, and OSError for a file that cannot be opened.
    """
    content = {key: value for key, value in _read_mapping(path).items() if value is not None}
    for key, value in content.items():
        types, description = VALUE_TYPES.get(key, AXIS_VALUE if key in AXES else NAME)
        # ``isinstance`` would take true and false for whole numbers.
        is_valid = type(value) in types and value != ""
        if key == "threads":
            is_valid = is_valid and value >= 1
        if isinstance(value, list):  # This is a tree, as the paths to its nodes.
            is_valid = is_valid and all(map(_is_path, value))
        if not is_valid:
            raise OptionError(f"{path}: {key} must be {description}, not {str(value)[:40]!r}")
    overrides = [f"{key}={_axis_value(value)}" for key, value in content.items() if key in AXES]
    config = {key: value for key, value in content.items() if key not in AXES}
    if "method" in content or overrides:
        method = content.get("method", METHOD_OF_AXES).strip()
        config["method"] = "/".join([method, *overrides])
        try:
            resolve(config["method"])
        except MethodError as error:
            raise OptionError(f"{path}: {error}") from error
    return config


def _read_mapping(path: Path) -> dict[str, Any]:
    """Reads the keys and values of a YAML file.

    Raises OptionError for a file of anything else, and for a key that is unknown or given twice.
    Raises OSError for a file that cannot be opened.
    """
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise OptionError(f"{path} is too large for a config: {MAX_FILE_BYTES} bytes at most")
    try:
        # Where a key is given twice, ``content`` has only the last one, but ``node`` has both.
        node = yaml.compose(raw, yaml.SafeLoader)
        content = yaml.safe_load(raw)
    except Exception as error:  # Not only YAMLError: a date such as 2024-13-45 is a ValueError.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise OptionError(f"{path} cannot be read as YAML{where}") from error
    allowed = f"known keys: {', '.join(KEYS)}"
    if not isinstance(content, dict | None):
        raise OptionError(f"{path} holds no keys and values; {allowed}")
    keys = [] if content is None else [key.value for key, _ in node.value]
    for key in content or ():
        if key not in KEYS:
            raise OptionError(f"{path}: unknown key {key!r}; {allowed}")
        if keys.count(key) > 1:
            raise OptionError(f"{path}: key {key!r} is given twice")
    return content or {}


def _is_path(value: Any) -> bool:
    """Returns whether a value is a path in a tree: at each level the rank of a child."""
    return isinstance(value, list) and all(type(rank) is int for rank in value)


def _axis_value(value: Any) -> str:
    """Returns the value of an axis as it is written in a method's name."""
    if isinstance(value, list):
        return "paths-" + ",".join(".".join(map(str, path)) for path in value)
    return str(value)
