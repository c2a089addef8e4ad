"""Prefill of every family equals Hugging Face's forward on the processor's own inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo

SAME = 1e-5  # of the largest logit, in fp32


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("family", "kind"), zoo.PAIRS)
def test_the_prefill_is_the_models_own_forward(family: str, kind: str) -> None:
    """Claim: the logits after the prompt are those of ``model(**inputs)``, with either decoder.
    Fails if embeddings, positions, deepstack rows or attention differ in anything."""
    fused, plain = zoo.member(family), zoo.member(family, fused=False)
    inputs = zoo.make_inputs(fused, kind)
    theirs = zoo.hf_logits(plain, inputs)
    for loaded in (fused, plain):
        _, prefill = zoo.session(loaded, zoo.prompt_of(loaded, inputs))
        assert zoo.apart(prefill.logits, theirs) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), zoo.PAIRS)
def test_ten_more_prompts(family: str, kind: str) -> None:
    """Claim: the same for ten prompts of other sizes. Fails if it holds for a lucky layout only."""
    loaded = zoo.member(family)
    for seed in range(1, 11):
        inputs = zoo.make_inputs(loaded, kind, seed)
        _, prefill = zoo.session(loaded, zoo.prompt_of(loaded, inputs))
        assert zoo.apart(prefill.logits, zoo.hf_logits(loaded, inputs)) <= SAME, seed


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", zoo.SEEING)
def test_control_one_row_counts(family: str) -> None:
    """Claim: the comparison above sees one visual row gone, or a row's place moved by one.
    Fails if the tolerance hides such a thing, so that the tests above prove nothing."""
    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, "image")
    theirs = zoo.hf_logits(loaded, inputs)
    prompt = zoo.prompt_of(loaded, inputs)
    row = int(prompt.visual.nonzero()[-1])
    blind = prompt.embeds.clone()
    blind[row] = 0
    moved = prompt.positions.clone()
    moved[:, row:] += 1
    for wrong in (replace(prompt, embeds=blind), replace(prompt, positions=moved)):
        _, prefill = zoo.session(loaded, wrong)
        assert zoo.apart(prefill.logits, theirs) > 10 * SAME


def test_control_sound_is_heard() -> None:
    """Claim: in Qwen2.5-Omni other sound means other logits, alone and as a video's track.
    Fails if audio tokens are read as text or not at all."""
    loaded = zoo.member("qwen2.5-omni")
    for kind in ("audio", "heard"):
        media = zoo.draw(kind, 0)
        other = replace(media, sound=tuple(-2 * sound[::-1] for sound in media.sound))
        one, two = (
            zoo.session(loaded, zoo.prompt_of(loaded, zoo.read(loaded, each)))[1].logits
            for each in (media, other)
        )
        assert zoo.apart(one, two) > 10 * SAME
