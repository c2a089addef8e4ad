"""Vision-language models that answer faster, with exactly the same answers.

The names below are the public API. Each is imported when it is first used, so that
``saccade --version`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.answering.chat_model import Chat, Model, load
    from saccade.answering.live_video import Live
    from saccade.core.errors import (
        MethodError,
        ModelError,
        OptionError,
        SaccadeError,
        VideoInputError,
    )
    from saccade.core.result import Result, Round
    from saccade.core.sampling import Stateless
    from saccade.drafting.recipe import Recipe
    from saccade.engine.conversation import Conversation
    from saccade.engine.generate import Stream, generate, run, stream

__version__ = "0.1.0"

NAMES_BY_MODULE = {
    "core.errors": ("MethodError", "ModelError", "OptionError", "SaccadeError", "VideoInputError"),
    "core.result": ("Result", "Round"),
    "core.sampling": ("Stateless",),
    "answering.chat_model": ("Chat", "Model", "load"),
    "answering.live_video": ("Live",),
    "drafting.recipe": ("Recipe",),
    "engine.conversation": ("Conversation",),
    "engine.generate": ("Stream", "generate", "run", "stream"),
}

__all__ = [
    "Chat",
    "Conversation",
    "Live",
    "MethodError",
    "Model",
    "ModelError",
    "OptionError",
    "Recipe",
    "Result",
    "Round",
    "SaccadeError",
    "Stateless",
    "Stream",
    "VideoInputError",
    "generate",
    "load",
    "run",
    "stream",
]


def __getattr__(name: str) -> Any:
    for home, names in NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f"saccade.{home}"), name)
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
