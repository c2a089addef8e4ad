"""Claims about questions that a model cannot be asked: one sentence says why."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import zoo

import saccade
from saccade.core.errors import OptionError
from saccade.inputs import Pair


def test_a_chat_template_that_refuses_is_one_sentence():
    """Claim: what a chat template raises itself reaches the caller as an OptionError with its
    words."""
    member = zoo.member("qwen2.5-vl")
    processor = copy.copy(member.processor)
    processor.chat_template = "{{ raise_exception('System role not supported') }}"
    model = saccade.Model(Pair(replace(member, processor=processor), None), "ar")
    with pytest.raises(OptionError, match="refuses this conversation: System role not supported"):
        model.describe(zoo.clip(2, 56, 56, 1), "What is there?", system="Be brief.")


def test_an_answer_cannot_choose_the_models():
    """Claim: a draft or a method is refused in a sentence by every call that answers, not by one
    alone, and an open file cannot be watched."""
    model = saccade.Model(Pair(zoo.member("qwen2.5-vl"), None), "ar")
    settings: dict[str, Any] = {"method": "sd"}
    clip = zoo.clip(2, 56, 56, 1)
    with model.chat(clip, max_new_tokens=1, do_sample=False) as chat:
        for call in (
            lambda: model.chat(clip, **settings),
            lambda: model.watch(**settings),
            lambda: chat.ask("What is there?", **settings),
            lambda: model.describe(clip, "What is there?", **settings),
        ):
            with pytest.raises(OptionError, match="belongs where the models are loaded"):
                call()
    with pytest.raises(OptionError, match="open file"):
        model.watch(io.BytesIO(b"..."))
