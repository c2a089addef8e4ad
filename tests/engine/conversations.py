"""Conversations of three turns, and what a fresh start answers to each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from helpers import (
    AMOUNT,
    FAMILIES,
    TEXT,
    WORDS,
    backbone,
    hf_greedy,
    input_for,
    noisy,
    prompt_of,
)
from torch import Tensor

import saccade
from lab import reference
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.drafting.drafters import HeadDrafter
from saccade.drafting.schedule import serial
from saccade.methods import METHODS

FAMILY = ("qwen2_5_vl", "llava_onevision", "llama")

SOME_METHODS = [  # all serial ones but TABED's variants, which share its code
    name
    for name, recipe in METHODS.items()
    if recipe.schedule is serial
    and name not in ("tabed-mt", "tabed-mtcp")
    and recipe.drafter is not HeadDrafter  # The draft here is a model; see model/test_heads.py.
]

COUNT = 13  # no multiple of any chain's length + 1: the limit cuts rounds

PER_TOKEN = {"input_ids": None, "attention_mask": 1, "mm_token_type_ids": 0}


def further(inputs: Inputs, ids: Sequence[int]) -> dict[str, Any]:
    """The inputs with more text behind them, as a processor gives a longer conversation."""
    new_inputs = dict(inputs)
    for name, filling in PER_TOKEN.items():
        if name in new_inputs:
            old: Tensor = new_inputs[name]
            more = list(ids) if filling is None else [filling] * len(ids)
            new_inputs[name] = torch.cat([old, torch.tensor([more], dtype=old.dtype)], 1)
    return new_inputs


def ids_of(inputs: Inputs) -> list[int]:
    return inputs["input_ids"][0].tolist()


def question(seed: int, count: int = 5) -> list[int]:
    rng = random.Random(f"question {seed}")
    return [rng.randrange(TEXT) for _ in range(count)]


def oracle(family: str, inputs: Inputs, count: int = COUNT, seed: int = 0) -> tuple[int, ...]:
    """The answer of a start afresh, without a cache."""
    model = FAMILIES[family](seed)
    return tuple(reference.decode_greedily(model, prompt_of(model, inputs), count))


@cache
def script(family: str) -> tuple[tuple[dict[str, Any], tuple[int, ...]], ...]:
    """Three turns: inputs and answers, on which the oracle and transformers agree."""
    inputs = input_for(family)
    turns = []
    for turn in range(3):
        answer = oracle(family, inputs)
        assert list(answer) == hf_greedy(FAMILIES[family](0), inputs, COUNT)
        turns.append((inputs, answer))
        inputs = further(inputs, [*answer, *question(turn)])
    return tuple(turns)


def talking(family: str, method: Any = "sd", amount: float = AMOUNT, **always: Any) -> Any:
    """A conversation with a family's target and a noisy copy of it as the draft."""
    draft = backbone(noisy(FAMILIES[family], 0, amount))
    settings = {"method": method, "max_new_tokens": COUNT, "do_sample": False, **WORDS, **always}
    return saccade.Conversation(backbone(FAMILIES[family](0)), draft=draft, **settings)


def talk_of(conversation: Any) -> Any:
    return conversation._last_stream.batch


def fresh(family: str, method: Any, inputs: Inputs, **settings: Any) -> Result:
    settings = {"max_new_tokens": COUNT, "do_sample": False, **WORDS, **settings}
    draft = backbone(noisy(FAMILIES[family], 0, AMOUNT))
    return saccade.run(
        backbone(FAMILIES[family](0)), inputs, draft=draft, method=method, **settings
    )


def cut(inputs: Inputs, length: int) -> dict[str, Any]:
    """The inputs with their first ``length`` tokens only."""
    return {n: v[:, :length] if n in PER_TOKEN else v for n, v in inputs.items()}


@contextmanager
def pixels_read(*models: Any) -> Iterator[list[Any]]:
    """Calls of any convolution of the models: in these families only vision towers have one."""
    calls: list[Any] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
        for model in models
        for module in model.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d)
    ]
    assert hooks
    yield calls
    for hook in hooks:
        hook.remove()
