"""Claims about what is kept for later requests: answers, drafts and laws are those without it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conversations import (
    COUNT,
    FAMILY,
    SOME_METHODS,
    cut,
    further,
    ids_of,
    pixels_read,
    question,
    script,
)
from helpers import AMOUNT, FAMILIES, WORDS, backbone, dealt, input_for, noisy, prompt_of

import saccade
from saccade.core.sampling import Sampling
from saccade.model import prefix_cache as prefix_cache_module
from saccade.model.backbone import Backbone
from saccade.model.prefix_cache import ModelPrefixes, PrefixCache, common_rows, digest
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def _few_rows_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_module, "MIN_NEW_ROWS", 1)


def pair(family: str, prefix_cache: PrefixCache | None) -> tuple[Backbone, Backbone]:
    models = FAMILIES[family](0), noisy(FAMILIES[family], 0, AMOUNT)
    target, draft = (backbone(model).with_prefix_cache(prefix_cache) for model in models)
    return target, draft


def answered(models: tuple[Backbone, Backbone], method: str, inputs: Any, **settings: Any) -> Any:
    settings = {"max_new_tokens": COUNT, "do_sample": False, **WORDS, **settings}
    return saccade.run(models[0], inputs, draft=models[1], method=method, **settings)


def drafted(result: Any) -> list[Any]:
    return [(round.tokens, round.accepted, round.emitted) for round in result.rounds]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("method", "family"), dealt(SOME_METHODS, FAMILY))
def test_conversations_through_it_are_those_without(method, family):
    """Claim: the three turns of a conversation, each a request of its own, get transformers'
    answers, and the last with a seed the same drawn one; drafts are the same token for token, so
    they too see what they would have seen."""
    prefix_cache = PrefixCache(1 << 30)
    models, alone = pair(family, prefix_cache), pair(family, None)
    reused = []
    for inputs, answer in script(family):
        result = answered(models, method, inputs)
        assert result.ids == answer
        plain = answered(alone, method, inputs)
        assert method == "auto" or drafted(result) == drafted(plain)
        reused.append(result.reused_tokens)
    if method != "auto":  # whose shapes go by the clock
        drawn = dict(do_sample=True, temperature=1.5, seed=3)
        assert answered(models, method, inputs, **drawn).ids == (
            answered(alone, method, inputs, **drawn).ids
        )
    # what views read of a question's attention is written down anew: up to the video, then
    assert reused[0] == 0 and reused[1] > 0 and reused[2] >= reused[1]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FAMILY)
def test_any_order_of_requests_gets_the_oracles_answers(family):
    """Claim: other videos, other questions, prompts cut short and asked again, in any order and
    with room for two or three of them: each answer is the one without."""
    alone = pair(family, None)
    script_ = [input_for(family, seed) for seed in (0, 1)]
    script_ += [further(each, question(seed)) for each in script_ for seed in (0, 1)]
    if family == "llama":
        script_ += [cut(each, 9) for each in script_[:2]]
    expected = [answered(alone, "sd", each).ids for each in script_]
    one = PrefixCache(1 << 30)
    answered(pair(family, one), "sd", script_[0])
    prefix_cache = PrefixCache(3 * one.bytes)
    models = pair(family, prefix_cache)
    rng = random.Random(7)
    reused = 0
    for _ in range(24):
        place = rng.randrange(len(script_))
        result = answered(models, "sd", script_[place])
        assert result.ids == expected[place]
        assert prefix_cache.bytes <= prefix_cache.max_bytes
        reused += result.reused_tokens
    assert reused > 0


@pytest.mark.parametrize("family", FAMILY)
def test_laws_and_what_is_written_down_are_a_whole_readings(family):
    """Claim: after another question about the same video, logits, keys and recorded attention are
    those of a whole prefill, within rounding."""
    model = FAMILIES[family](0)
    first, second = (further(input_for(family), question(seed)) for seed in (0, 1))
    prefix_cache = PrefixCache(1 << 30)
    with_, without = (
        Session(backbone(model).with_prefix_cache(each), [Sampling()])
        for each in (prefix_cache, None)
    )
    with_.prefill([prompt_of(model, first)], record=True)
    prompt = prompt_of(model, second)
    (guide,), (whole,) = (each.prefill([prompt], record=True) for each in (with_, without))
    assert with_.requests[0].reused_rows > 0
    torch.testing.assert_close(guide.logits, whole.logits, atol=2e-4, rtol=1e-4)
    assert guide.mass is not None and whole.mass is not None
    torch.testing.assert_close(guide.mass, whole.mass, atol=1e-5, rtol=1e-3)
    for layer in range(len(guide.cache.keys)):
        for one, other in zip(
            guide.cache.read(layer, len(prompt)), whole.cache.read(layer, len(prompt)), strict=True
        ):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_no_vision_tower_looks_twice_at_the_same(family):
    """Claim: a second question about a video runs no vision tower and gets the same rows, another
    video is looked at."""
    target = backbone(FAMILIES[family](0)).with_prefix_cache(PrefixCache(1 << 30))
    with pixels_read(target.model) as looks:
        (first,) = target.prompts(input_for(family))
        assert looks
        looks.clear()
        (second,) = target.prompts(further(input_for(family), [3, 4]))
        assert not looks and common_rows(first, second) == len(first)
        target.prompts(input_for(family, 1))
        assert looks
    assert "get_video_features" not in vars(target.model.base_model)


def test_a_prompt_is_known_by_its_rows():
    """Claim: another pixel, another position or another id ends what two prompts share."""
    prompt = prompt_of(FAMILIES["qwen2_5_vl"](0), input_for("qwen2_5_vl"))
    assert common_rows(prompt, prompt) == len(prompt)
    row = len(prompt) // 2
    embeds, positions = prompt.embeds.clone(), prompt.positions.clone()
    embeds[row, 0] += 1e-3
    positions[0, row + 1] += 1
    assert common_rows(prompt, replace(prompt, embeds=embeds)) == row
    assert common_rows(prompt, replace(prompt, positions=positions)) == row + 1
    assert common_rows(replace(prompt, embeds=embeds), replace(prompt, positions=positions)) == row


def test_a_prompt_of_words_and_one_with_a_picture_share_their_first_words():
    """Claim: rows that are added to early layers, which only a prompt with media has, end what two
    prompts share where the media begin, and a row that differs ends it there."""
    family = "qwen2_5_vl"
    inputs = input_for(family)
    prompt = prompt_of(FAMILIES[family](0), inputs)
    rows = torch.ones(prompt.visual_tokens, 4)
    seeing = replace(prompt, media=replace(prompt.media, deepstack=(rows, rows)))
    first = int(prompt.visual.nonzero()[0])
    ids = torch.tensor([[*ids_of(inputs)[:first], *question(0)]])
    words = prompt_of(FAMILIES[family](0), {"input_ids": ids})
    assert common_rows(words, seeing) == common_rows(seeing, words) == first
    other = rows.clone()
    other[2, 0] = 2
    changed = replace(prompt, media=replace(prompt.media, deepstack=(rows, other)))
    assert common_rows(seeing, changed) == int(prompt.visual.nonzero()[2])


def test_a_prompt_that_goes_on_takes_the_place_of_its_beginning():
    """Claim: a conversation keeps its longest prompt alone, two questions about a video what is
    worth it of both, and another model's keys are nobody else's."""
    family = "qwen2_5_vl"
    model, prefix_cache = FAMILIES[family](0), PrefixCache(1 << 30)
    inputs = input_for(family)
    longer = further(inputs, question(0))
    target = backbone(model).with_prefix_cache(prefix_cache)
    for each in (inputs, longer):
        Session(target, [Sampling()]).prefill([prompt_of(model, each)])
    cached_prompts = [
        value
        for _, value in prefix_cache.items()
        if isinstance(value, prefix_cache_module.CachedPrompt)
    ]
    assert [len(each.prompt) for each in cached_prompts] == [len(ids_of(longer))]
    other = backbone(noisy(FAMILIES[family], 0, AMOUNT)).with_prefix_cache(prefix_cache)
    prompt = prompt_of(model, inputs)
    assert ModelPrefixes(prefix_cache, other).copy_longest(prompt, other.new_cache(99), 99) == (
        0,
        None,
    )
    rows, _ = ModelPrefixes(prefix_cache, target).copy_longest(
        prompt, target.new_cache(99), len(prompt) - 1
    )
    assert rows == len(prompt) - 1


def test_what_was_used_least_recently_goes_first():
    """Claim: bytes are bounded, a value used stays, one too large is not kept."""
    prefix_cache = PrefixCache(10)
    for name in "abc":
        prefix_cache.put(name, name, 4)
    assert [key for key, _ in prefix_cache.items()] == ["b", "c"] and prefix_cache.bytes == 8
    assert prefix_cache.get("b") == "b" and prefix_cache.get("a") is None
    prefix_cache.put("d", "d", 4)
    assert [key for key, _ in prefix_cache.items()] == ["b", "d"]
    prefix_cache.put("e", "e", 11)
    assert prefix_cache.get("e") is None and prefix_cache.bytes == 8
    prefix_cache.put("b", "B", 1)
    assert prefix_cache.bytes == 5 and prefix_cache.get_or_compute("b", lambda: "new", len) == "B"
    prefix_cache.clear()
    assert prefix_cache.bytes == 0 and len(prefix_cache) == 0


def test_digests_tell_contents_apart():
    """Claim: of a random choice of contents no two have the same digest; equal ones do."""
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3).half(), torch.ones(2, 3)]
    others: list[Any] = [b"ab", (b"a", b"b"), "ab", ("a", "b"), [["a"], "b"], {"a": 1}, 1, None]
    others += [[1, 23], [12, 3], [True, 2], [1.5, 2]]  # Numbers that stand side by side.
    digests = {digest(each) for each in (*tensors, *others)}
    assert len(digests) == len(tensors) + len(others)
    assert digest(torch.ones(2)) == digest(torch.ones(4)[:2])


def test_a_tensor_that_changed_is_read_again():
    """Claim: a digest that is remembered is the tensor's as it is, also after it was written to;
    arrays count by all their bytes."""
    prefix_cache, tensor = PrefixCache(0), torch.zeros(3)
    assert prefix_cache.digest(tensor) == digest(tensor) == prefix_cache.digest(tensor)
    tensor[1] = 1
    assert prefix_cache.digest(tensor) == digest(tensor) == digest(torch.tensor([0.0, 1, 0]))
    with torch.inference_mode():
        quiet = torch.zeros(3)
        first = prefix_cache.digest(quiet)
        quiet[1] = 1
        assert prefix_cache.digest(quiet) == digest(tensor) != first
    one = np.zeros((300, 300), np.uint8)
    other = one.copy()
    other[150, 150] = 1
    assert len({digest(one), digest(other), digest(one.reshape(-1))}) == 3
