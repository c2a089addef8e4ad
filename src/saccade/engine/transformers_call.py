"""Reads what transformers' ``generate`` was called with and does not pass on to a callable.

With ``custom_generate=`` a function, transformers gives it what it has prepared: ids, features,
processors and criteria. It keeps the streamer and the assistant model to itself, although both are
parameters of its own, and it forgets the tokenizer. A streamer that never hears of the end of an
answer lets its reader wait for ever, so the first two are looked up where they are: in the frame of
the call that is under way.
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
    """The arguments of a call of ``generate`` that it does not pass on."""

    streamer: Any = None
    assistant_model: Any = None


def is_from_transformers(arguments: Mapping[str, Any]) -> bool:
    """Returns whether these are the arguments with which ``generate`` calls a callable."""
    config = arguments.get("generation_config")
    return isinstance(config, GenerationConfig) and PREPARED_MARK in vars(config)


def current_transformers_call() -> TransformersCall:
    """Returns the innermost call of ``generate`` under way, which is empty where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GENERATE_CODE:
            arguments = frame.f_locals
            return TransformersCall(arguments.get("streamer"), arguments.get("assistant_model"))
        frame = frame.f_back
    return TransformersCall()
