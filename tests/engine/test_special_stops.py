"""Stop strings that are special tokens, or hold one, end an answer as they do in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList

import saccade
from saccade.inputs import Loaded

PROMPT = {"input_ids": torch.tensor([[72, 105, 33]]), "attention_mask": torch.ones(1, 3).long()}
LENGTH = PROMPT["input_ids"].shape[1]


class Script(LogitsProcessor):
    """Makes a model say these tokens, one after another, and then the first of them for ever."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = ids.shape[1] - LENGTH
        token = self.tokens[place] if place < len(self.tokens) else self.tokens[0]
        forced = torch.full_like(scores, -1e9)
        forced[:, token] = 0.0
        return forced


def scripted(loaded: Loaded) -> tuple[LogitsProcessorList, list[int]]:
    """A script of words with a special token among them that does not end the model's answers."""
    words = loaded.tokenizer.encode("so it", add_special_tokens=False)
    more = loaded.tokenizer.encode("goes", add_special_tokens=False)
    special = loaded.tokenizer.convert_tokens_to_ids("<|im_start|>")
    return LogitsProcessorList([Script([*words, special, *more])]), [*words, special, *more]


CASES = [
    ("<|im_start|>", "so it"),
    ("im_st", "so it"),
    ("t<|im_start|>", "so i"),
    ("<|im_start|>go", "so it"),
    ("it<|im_start|>goes", "so "),
    ("oe", "so itg"),
]


@pytest.mark.representatives(3)
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree"])
@pytest.mark.parametrize(("stop", "text"), CASES)
def test_stop_strings_with_special_tokens_end_where_generate_ends(
    method: str, stop: str, text: str
) -> None:
    """Claim: the ids are generate's, and the text is what comes before the stop string, without
    special tokens. Fails if the string is only looked for in text that has them removed."""
    loaded, draft = zoo.member("llama"), zoo.draft_of("llama")
    processors, script = scripted(loaded)
    given: dict[str, Any] = dict(
        max_new_tokens=20, stop_strings=[stop, "never"], logits_processor=processors
    )
    theirs = loaded.backbone.model.generate(
        **PROMPT, do_sample=False, tokenizer=loaded.tokenizer, **given
    )
    result = saccade.run(
        loaded.backbone,
        PROMPT,
        draft=None if method == "ar" else draft.backbone,
        method=method,
        tokenizer=loaded.tokenizer,
        **given,
    )
    assert list(result.ids) == theirs[0, LENGTH:].tolist()
    assert len(result.ids) <= len(script)
    assert (result.text, result.finish_reason) == (text, "stop")


def test_special_tokens_alone_end_nothing() -> None:
    """Control: with another stop string the same answer goes on to its limit."""
    loaded = zoo.member("llama")
    processors, script = scripted(loaded)
    result = saccade.run(
        loaded.backbone,
        PROMPT,
        method="ar",
        tokenizer=loaded.tokenizer,
        max_new_tokens=len(script),
        stop_strings=["<|im_start|>x"],
        logits_processor=processors,
    )
    assert (list(result.ids), result.finish_reason) == (script, "length")
    assert result.text == "so itgoes"
