"""Vision-language models that answer faster, with exactly the same answers.

The names below are the public API; each is imported when first used, so that ``saccade --version``
does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.conversation import Conversation
    from saccade.engine import Stream, generate, run, stream
    from saccade.errors import MethodError, ModelError, OptionError, SaccadeError, VideoInputError
    from saccade.recipe import Recipe
    from saccade.types import Result, Round

__version__ = "0.1.0"

_HOMES = {
    "Conversation": "conversation",
    "MethodError": "errors",
    "ModelError": "errors",
    "OptionError": "errors",
    "Recipe": "recipe",
    "Result": "types",
    "Round": "types",
    "SaccadeError": "errors",
    "Stream": "engine",
    "VideoInputError": "errors",
    "generate": "engine",
    "run": "engine",
    "stream": "engine",
}

__all__ = [
    "Conversation",
    "MethodError",
    "ModelError",
    "OptionError",
    "Recipe",
    "Result",
    "Round",
    "SaccadeError",
    "Stream",
    "VideoInputError",
    "generate",
    "run",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    return getattr(import_module(f"saccade.{_HOMES[name]}"), name)
