"""Configs of well-known checkpoints by their published shapes, for planning without a hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import transformers
import yaml

_FILE = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


CONFIGS: Mapping[str, Callable[[], Any]] = {
    name: lambda fields=fields: transformers.AutoConfig.for_model(**deepcopy(fields))
    for name, fields in _FILE["checkpoints"].items()
}
"""A fresh config of each."""
