"""Finds two arguments of transformers' ``generate`` that it does not pass to ``custom_generate``.

Where ``custom_generate=`` is a function, transformers passes it what it has prepared: ids,
features, processors and criteria. It does not pass its own arguments ``streamer`` and
``assistant_model``, nor the tokenizer. The reader of a streamer waits for ever if nobody tells the
streamer that the answer has ended. So the streamer and the assistant model are read from the stack:
they are local variables of the frame in which ``generate`` is running. The tokenizer is none of
these variables, so a caller has to bind it by ``saccade.generate.with_(tokenizer=)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, GenerationMixin

GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__
# Transformers puts this into a generation config that it has prepared for a call.
PREPARED_MARK = "_eos_token_tensor"


@dataclass(frozen=True)
class TransformersCall:
    """The two arguments of a call of ``generate`` that are read from its frame."""

    streamer: Any = None
    assistant_model: Any = None


def is_from_transformers(arguments: Mapping[str, Any]) -> bool:
    """Returns whether ``generate`` of transformers has called ``custom_generate`` with these
    arguments."""
    config = arguments.get("generation_config")
    return isinstance(config, GenerationConfig) and PREPARED_MARK in vars(config)


def current_transformers_call() -> TransformersCall:
    """Returns the arguments of the innermost call of ``generate`` under way. Both are None where
    there is no such call, or where it was called without them."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GENERATE_CODE:
            arguments = frame.f_locals
            return TransformersCall(arguments.get("streamer"), arguments.get("assistant_model"))
        frame = frame.f_back
    return TransformersCall()
