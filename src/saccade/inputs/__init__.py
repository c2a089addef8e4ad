"""From files and names to what a model reads: clips, loaded models, and a question's inputs.

The names below are imported when first used: whoever only decodes a video does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.inputs.checkpoints import EMBEDDED
    from saccade.inputs.loading import (
        Loaded,
        bits,
        check_pair,
        check_tokenizers,
        load,
        load_pair,
        pick_device,
        precision,
        read_config,
        read_processor,
    )
    from saccade.inputs.questions import Pair, ask, ask_draft, put, shown

_HOMES = {
    "EMBEDDED": "checkpoints",
    **dict.fromkeys(("Pair", "ask", "ask_draft", "put", "shown"), "questions"),
}

__all__ = [
    "EMBEDDED",
    "Loaded",
    "Pair",
    "ask",
    "ask_draft",
    "bits",
    "check_pair",
    "check_tokenizers",
    "load",
    "load_pair",
    "pick_device",
    "precision",
    "put",
    "read_config",
    "read_processor",
    "shown",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'saccade.inputs' has no attribute {name!r}")
    home = _HOMES.get(name, "loading")
    return getattr(import_module(f"saccade.inputs.{home}"), name)
