"""Turns files and names into what a model reads: clips, loaded models, and a question's inputs.

The names below are imported when they are first used, so that decoding a video does not import
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.inputs.loading import Loaded, load, load_pair
    from saccade.inputs.questions import Pair, ask, ask_draft, clip_arguments

NAMES_BY_MODULE = {
    "loading": ("Loaded", "load", "load_pair"),
    "questions": ("Pair", "ask", "ask_draft", "clip_arguments"),
}

__all__ = ["Loaded", "Pair", "ask", "ask_draft", "clip_arguments", "load", "load_pair"]


def __getattr__(name: str) -> Any:
    for home, names in NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f"saccade.inputs.{home}"), name)
    raise AttributeError(f"module 'saccade.inputs' has no attribute {name!r}")
