"""Claims about seeds: one seed, one answer, alone, in a batch and beside another stream."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    noisy,
    qwen25,
    video_input,
)
from one_video import INPUTS, run_on_video

import saccade

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")

SAMPLED = dict(do_sample=True, temperature=0.9, max_new_tokens=16)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "specvlm"])
def test_a_seed_names_the_answer(method):
    """Claim: one seed, one answer; eight seeds, eight answers; torch's own seed plays no part.

    At this temperature two of 28 pairs would coincide with a chance below 1e-9.
    """
    model, draft = qwen25(), noisy(qwen25, 0, 0.05)
    answers = []
    for seed in (*range(8), 3):
        torch.manual_seed(len(answers))
        answers.append(run_on_video(model, draft, method, seed=seed, **SAMPLED).ids)
    assert answers[8] == answers[3]
    assert len(set(answers)) == 8


def test_requests_of_a_batch_draw_their_own_noise():
    """Claim: the same prompt twice in one batch gives two answers, and the same two again."""
    one = video_input(0)
    batch = {name: torch.cat([value, value]) for name, value in one.items()}
    settings = dict(draft=noisy(qwen25, 0, 0.05), method="sd", seed=5, **SAMPLED)
    first = saccade.generate(qwen25(), batch, **settings).tolist()
    assert first[0] != first[1]
    assert saccade.generate(qwen25(), batch, **settings).tolist() == first


def test_interleaved_streams_keep_their_seeds():
    """Claim: two seeded answers drawn turn by turn are those drawn alone: no shared generator."""
    model, draft = qwen25(), noisy(qwen25, 0, 0.05)
    alone = [run_on_video(model, draft, "sd", seed=seed, **SAMPLED).ids for seed in (1, 2)]
    streams = [
        saccade.stream(model, INPUTS, draft=draft, method="sd", seed=seed, **SAMPLED)
        for seed in (1, 2)
    ]
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    assert [stream.results[0].ids for stream in streams] == alone


def test_without_a_seed_answers_differ_and_torchs_seed_fixes_custom_generate():
    """Claim: unseeded calls draw fresh noise; through generate, torch.manual_seed names it."""
    model, draft = qwen25(), noisy(qwen25, 0, 0.05)
    assert len({run_on_video(model, draft, "sd", **SAMPLED).ids for _ in range(4)}) == 4
    settings = dict(custom_generate=saccade.generate, draft=draft, method="sd", **SAMPLED)
    drawn = []
    for seed in (7, 8, 7):
        torch.manual_seed(seed)
        drawn.append(model.generate(**INPUTS, **settings).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
