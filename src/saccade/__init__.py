"""Vision-language models that answer faster, with exactly the same answers."""

from saccade.errors import MethodError, ModelError, OptionError, SaccadeError, VideoInputError
from saccade.generate import generate, run, stream
from saccade.recipe import Recipe
from saccade.types import Result, Round

__version__ = "0.1.0"

__all__ = [
    "MethodError",
    "ModelError",
    "OptionError",
    "Recipe",
    "Result",
    "Round",
    "SaccadeError",
    "VideoInputError",
    "generate",
    "run",
    "stream",
]
