"""Claims about what surrounds a call: inference mode, threads, missing masks, padding."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    hf_greedy,
    input_for,
    left_padded,
    llama,
    noisy,
    qwen2,
    text_input,
)

import saccade
from saccade.core.errors import OptionError
from saccade.model.backbone import Backbone

TOKENS = 24

METHODS_ARGS: dict[str, str] = {"early-exit": "sd/drafter=early-exit"}


def _answer(model: Any, inputs: Any, method: str, draft: Any = None) -> list[int]:
    method = METHODS_ARGS.get(method, method)
    return list(saccade.run(model, inputs, draft=draft, method=method, max_new_tokens=TOKENS).ids)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "by modules"])
def test_an_answer_in_inference_mode_does_not_end_training(fused):
    """Claim: a model that first answered inside torch.inference_mode can be trained afterwards, and
    the trained model answers. Fails if its weights became part of a tensor made in that mode."""
    model, inputs = copy.deepcopy(llama()).requires_grad_(True), text_input(2)
    target = model if fused is None else Backbone(model, fused=fused)
    with torch.inference_mode():
        _answer(target, inputs, "ar")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            assert _answer(target, inputs, "ar") == hf_greedy(model, inputs, TOKENS)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "by modules"])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_four_threads_answer_over_one_model(make, fused):
    """Claim: threads that share one model each get the answer they get alone, by modules too.
    Fails where one thread's hook stops another one's forward."""
    family = {llama: "llama", qwen2: "qwen2_vl"}[make]
    model = copy.deepcopy(make())
    target, draft = Backbone(model, fused=fused), Backbone(copy.deepcopy(noisy(make)), fused=fused)
    inputs = [input_for(family, seed) for seed in range(4)]
    truth = [hf_greedy(model, each, 12) for each in inputs]
    answers: dict[tuple[int, int], Any] = {}

    def work(place: int) -> None:
        for turn in range(3):
            try:
                result = saccade.run(
                    target, inputs[place], draft=draft, method="sd", max_new_tokens=12
                )
                answers[place, turn] = [*result.ids]
            except BaseException as error:
                answers[place, turn] = error

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {(place, turn): truth[place] for place in range(4) for turn in range(3)}


@pytest.mark.parametrize("pad", [0, None])
def test_a_missing_mask_is_inferred_as_generate_infers_it(pad):
    """Claim: without a mask pad tokens are hidden where the config names one, in a batch and inside
    one prompt, and read where it names none or where it ends answers too."""
    model = copy.deepcopy(llama())
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=pad)
    batch = left_padded([text_input(1, 7), text_input(2, 12)])
    batch["input_ids"][1, 6] = 0
    bare = {"input_ids": batch["input_ids"]}

    def equal() -> bool:
        theirs = model.generate(**bare, max_new_tokens=TOKENS)
        ours = saccade.generate(model, bare, method="ar", max_new_tokens=TOKENS)
        return torch.equal(theirs, ours)

    assert equal()
    model.generation_config.eos_token_id = 0
    model.generation_config.pad_token_id = 0
    assert equal()


def test_a_prompt_of_padding_alone_is_refused():
    """Claim: where inference leaves nothing of a request, a sentence says so."""
    model = copy.deepcopy(llama())
    with pytest.raises(OptionError, match="nothing but pad tokens"):
        saccade.run(model, {"input_ids": torch.zeros(1, 5, dtype=torch.long)}, method="ar")
