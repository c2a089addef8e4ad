"""From a name to a loaded model, and from a question to its inputs."""

from saccade.models.asking import ask, ask_draft, joined, put, shown
from saccade.models.loading import (
    DTYPES,
    EMBEDDED,
    NAMES,
    QUANTIZERS,
    Loaded,
    bits,
    check_folder,
    check_pair,
    check_tokenizers,
    load,
    load_pair,
    pick_device,
    precision,
    read_config,
    read_processor,
)

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "NAMES",
    "QUANTIZERS",
    "Loaded",
    "ask",
    "ask_draft",
    "bits",
    "check_folder",
    "check_pair",
    "check_tokenizers",
    "joined",
    "load",
    "load_pair",
    "pick_device",
    "precision",
    "put",
    "read_config",
    "read_processor",
    "shown",
]
