"""Claims about questions that a model cannot be asked: one sentence says why."""

from __future__ import annotations

import copy
from dataclasses import replace

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
