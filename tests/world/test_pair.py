"""Claims about the trained pair of the package, on clips of the shapes world it never saw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import few, hf_greedy
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

import saccade
from lab import reference
from saccade.methods import METHODS
from saccade.model.backbone import Backbone
from saccade.world import dialogues, drawing, scenes

pytestmark = pytest.mark.usefixtures("unchecked")

UNSEEN = 20_000_000  # training draws its seeds below 10,000,000
TOKENS = 96
SOME_METHODS = [
    # The pair's draft is a model and no head.
    *(name for name, recipe in METHODS.items() if name != "ar" and recipe.drafter.name != "head"),
    "specvlm/shape=chain-7",
    "sd-tree/drafter=self",
    "sd/view=uniform/keep=0.05",
]


@dataclass(frozen=True)
class Pair:
    target: Backbone
    draft: Backbone
    naive: Backbone
    processor: Any


@cache
def _load(folder: Path) -> Pair:
    def load(name: str) -> Backbone:
        model = AutoModelForImageTextToText.from_pretrained(
            folder / name, dtype=torch.float32, local_files_only=True
        )
        return Backbone(model.eval())

    processor = AutoProcessor.from_pretrained(folder / "target", local_files_only=True)
    return Pair(load("target"), load("draft"), load("draft-naive"), processor)


def _clip(processor: Any, number: int) -> Any:
    """A question about a clip: lengths from 8 to 32 frames, from 2 to 40 seconds."""
    seed = UNSEEN + number
    frames, seconds = 8 * (1 + number % 4), (2.0, 7.5, 40.0)[number % 3]
    task = ("describe", "describe", "events", "chat")[number % 4]
    scene = scenes.scene(seed)
    pixels = drawing.render(scene, frames, 112)
    question = dialogues.conversation(scene, task, seed)[0].question
    content = [{"type": "video"}, {"type": "text", "text": question}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    known = VideoMetadata(
        total_num_frames=frames,
        fps=frames / seconds,
        frames_indices=list(range(frames)),
        duration=seconds,
    )
    return processor(
        text=[prompt],
        videos=[pixels],
        video_metadata=[known],
        do_sample_frames=False,
        return_tensors="pt",
    )


@cache
def _expected(folder: Path, number: int) -> list[int]:
    """What transformers answers, and the reference finds to be its own arg-max throughout."""
    pair = _load(folder)
    inputs = _clip(pair.processor, number)
    expected = hf_greedy(pair.target.model, inputs, TOKENS)
    (prompt,) = pair.target.prompts(inputs)
    assert reference.teacher_forced_argmax(pair.target.model, prompt, expected) == expected
    return expected


def _assert_lossless(folder: Path, number: int, methods: list[str], draft: Backbone) -> list[Any]:
    pair, expected = _load(folder), _expected(folder, number)
    inputs = _clip(pair.processor, number)
    results = []
    for method in methods:
        result = saccade.run(
            pair.target,
            inputs,
            draft=draft,
            method=method,
            max_new_tokens=TOKENS,
            tokenizer=pair.processor,
            captioner=lambda inputs: ["A red circle on a plain background."],
        )
        assert list(result.ids) == expected, f"{method} on clip {number}"
        assert result.fallback_reason is None
        assert result.finish_reason == ("stop" if len(expected) < TOKENS else "length")
        results.append(result)
    return results


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("number", few(range(10), 1))
def test_the_pairs_answers_are_hugging_faces(pair, number):
    """Claim: real weights, real processor: 96 tokens of ten clips equal generate, over all methods
    in turn, two a clip; clips last up to 40 seconds, so time positions run ahead of the text's.
    """
    methods = [SOME_METHODS[(2 * number + i) % len(SOME_METHODS)] for i in range(2)]
    _assert_lossless(pair, number, methods, _load(pair).draft)


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_the_pairs_answers_are_hugging_faces_on_a_hundred_clips(pair, tenth):
    """The claim above over 100 more clips, four methods each, with both drafts."""
    for number in range(10 + 10 * tenth, 20 + 10 * tenth):
        methods = [SOME_METHODS[(4 * number + i) % len(SOME_METHODS)] for i in range(4)]
        draft = _load(pair).naive if number % 2 else _load(pair).draft
        _assert_lossless(pair, number, methods, draft)


@pytest.mark.extra
def test_the_pairs_draft_is_worth_having(pair):
    """Claim: the trained draft is accepted far more often than chance, and the video is why.

    On one description tau with the video exceeds 2.5, and that of the same draft gone blind.
    """
    draft = _load(pair).draft
    seeing, blind = _assert_lossless(pair, 1, ["sd", "sd/view=none"], draft)
    assert seeing.tau > 2.5 and blind.tau < seeing.tau


@pytest.mark.extra
def test_the_pairs_target_drafting_for_itself_accepts_everything(pair):
    """Claim: the target as its own separate draft, and over its own keys, is never refused."""
    loaded = _load(pair)
    inputs = _clip(loaded.processor, 1)
    for method in ("sd", "specvlm-self/keep=1/shape=chain-5"):
        result = saccade.run(
            loaded.target, inputs, draft=loaded.target, method=method, max_new_tokens=42
        )
        assert len(result.ids) == 42 and result.acceptance_rate == 1.0


@pytest.mark.extra
def test_stop_strings_with_a_real_tokenizer_equal_transformers(pair):
    """Claim: with byte-level tokens that share letters over borders, answers end where
    transformers' own stop strings end them.
    """
    loaded = _load(pair)
    inputs, tokenizer = _clip(loaded.processor, 0), loaded.processor.tokenizer
    target = loaded.target
    whole = tokenizer.decode(hf_greedy(target.model, inputs, 48), skip_special_tokens=True)
    for at, size in ((11, 2), (37, 5)):
        stop = whole[at : at + size]
        expected = hf_greedy(target.model, inputs, 48, stop_strings=[stop], tokenizer=tokenizer)
        result = saccade.run(
            target, inputs, draft=loaded.draft, method="specvlm", max_new_tokens=48,
            stop_strings=[stop], tokenizer=tokenizer,
        )  # fmt: skip
        assert list(result.ids) == expected and result.finish_reason == "stop"
        assert result.text == whole[: whole.find(stop)]
