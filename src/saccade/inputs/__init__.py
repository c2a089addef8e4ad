"""From files and names to what a model reads: clips, loaded models, and a question's inputs.

The names below are imported when first used: whoever only decodes a video does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.inputs.loading import Loaded, load, load_pair
    from saccade.inputs.questions import Pair, ask, ask_draft, shown

_HOMES = {
    "loading": ("Loaded", "load", "load_pair"),
    "questions": ("Pair", "ask", "ask_draft", "shown"),
}

__all__ = ["Loaded", "Pair", "ask", "ask_draft", "load", "load_pair", "shown"]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"saccade.inputs.{home}"), name)
    raise AttributeError(f"module 'saccade.inputs' has no attribute {name!r}")
