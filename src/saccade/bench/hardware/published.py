"""Configs of well-known checkpoints by their published shapes, for planning without a hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import yaml

_FILE = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


def _made(fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig  # only where one is asked for: names are looked up before

    return AutoConfig.for_model(**deepcopy(fields))


CONFIGS: Mapping[str, Callable[[], Any]] = {
    name: partial(_made, fields) for name, fields in _FILE["checkpoints"].items()
}
"""A fresh config of each."""
