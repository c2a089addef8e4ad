"""Claims about the draft inside vLLM itself. Run by ``make vllm``, in an environment of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from engines import Job, Question, Ran, clips, run

from saccade.inputs.checkpoints import NAMES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TARGET, DRAFT = str(NAMES["shapes"]), str(NAMES["shapes-draft"])
FIRST = 20000100  # scenes no training has drawn
# Alone, eight at once, thirty-two at once; then the first eight again, by now in the prefix cache.
SCENES = range(FIRST, FIRST + 50)
WAVES = (
    *[clips([seed]) for seed in SCENES[:10]],
    clips(SCENES[10:18]),
    clips(SCENES[18:]),
    clips(SCENES[:8]),
)
# prompts of about 270 tokens in chunks of 128, over blocks that are shared
CHUNKED = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "block_size": 32}
MIXED = (
    Question("What is here?", videos=((1, 8, 56),)),
    Question("And here?", images=((2, 56),)),
    Question("Both?", videos=((3, 8, 56), (4, 8, 56))),
    Question("A B C D"),
    Question("Images", images=((5, 56), (6, 112))),
)


@cache
def plain(engine: str) -> Ran:
    """vLLM alone over the waves."""
    return run(Job(TARGET, WAVES, engine=CHUNKED if engine == "chunked" else {}))


def ours(most: int = 8, engine: dict | None = None, **options: object) -> Ran:
    return run(Job(TARGET, WAVES, {"draft": DRAFT, **options}, most, engine=engine or {}))


def same(mine: Ran, theirs: Ran) -> None:
    """Every answer token for token, and a draft that worked throughout."""
    assert mine.answers == theirs.answers
    assert "drafting failed" not in mine.said, mine.said[-3000:]
    assert mine.drafted > 500


def test_fifty_clips_alone_and_together():
    """Claim: with drafts of full length every answer is vLLM's own, token for token, for one, 8 and
    32 requests at once, and more than half of what is drafted is accepted."""
    found = ours(length=8)
    same(found, plain("whole"))
    assert found.rate > 0.5


def test_chunks_and_the_prefix_cache():
    """Claim: the same holds where prompts are read in chunks and their blocks are shared, with the
    attention of the target watched, and drafts as long as pays."""
    found = ours(view="specvlm", engine=CHUNKED)
    same(found, plain("chunked"))
    assert plain("chunked").answers == plain("whole").answers


def test_preemption():
    """Claim: with blocks for four prompts and none of their answers, requests are put off and come
    back, and every answer stays the same."""
    tight = {"num_gpu_blocks_override": 24, "max_model_len": 512, "block_size": 32}
    wave = (clips(SCENES[18:30]),)
    rules = {"ignore_eos": True, "max_tokens": 128}
    alone = run(Job(TARGET, wave, sampling=rules))
    found = run(Job(TARGET, wave, {"draft": DRAFT, "length": 8}, engine=tight, sampling=rules))
    same(found, alone)
    assert found.preempted > 0


def test_lookup():
    """Claim: without a model, what followed the same words is proposed, and answers stay."""
    found = run(Job(TARGET, WAVES[10:12], {"draft": "lookup", "length": 4}))
    assert found.answers == plain("whole").answers[10:12]
    assert found.drafted > 100 and found.accepted > 10


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2-vl", "qwen3-vl", "llava-onevision"])
def test_a_family_drafting_for_itself_accepts_everything(family, tmp_path):
    """Claim: over the whole prompt the target's own copy is never refused: pixels, positions and
    layout reach the draft as they reach the target. Videos, images, several and none at once."""
    target = checkpoint(family, tmp_path / "target")
    waves = (MIXED, *((each,) for each in MIXED))
    alone = run(Job(target, waves))
    copied = run(Job(target, waves, {"draft": target, "view": "full", "length": 6}))
    assert copied.answers == alone.answers
    assert copied.drafted > 300 and copied.rate == 1
    pruned = run(Job(target, waves, {"draft": target, "view": "specvlm", "keep": 0.3}))
    assert pruned.answers == alone.answers and pruned.drafted > 30
    assert "drafting failed" not in copied.said + pruned.said


def test_the_law_of_two_tokens(tmp_path):
    """Claim: at temperature 1 the pair of first and second token after a prompt has the same law
    with drafts and without: chi-square over 1,500 answers of each, the rare pairs as one.

    Power: a sampler that took the draft's choice unasked would move at least a tenth of the mass.
    """
    target = checkpoint("qwen2.5-vl", tmp_path / "target", "--vocab", "300")
    draft = checkpoint("qwen2.5-vl", tmp_path / "draft", "--vocab", "300", "--noise", "0.1")
    rules = {"temperature": 0.5, "max_tokens": 3, "n": 1500}
    question = ((Question("A", images=((1, 56),)),),)
    pairs = []
    for seed, options in ((0, None), (1, {"draft": draft, "length": 2})):
        found = run(Job(target, question, options, 2, {"seed": seed, "max_num_seqs": 64}, rules))
        pairs.append(Counter(tuple(answer[1:]) for answer in found.answers[0]))
    one, other = pairs
    common = [pair for pair in one | other if one[pair] + other[pair] >= 20]
    rows = [(one[pair], other[pair]) for pair in common]
    rows.append((sum(one.values()) - sum(a for a, _ in rows), 1500 - sum(b for _, b in rows)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in rows if a + b)
    freedom = len(rows) - 1
    assert freedom > 4
    # beyond it with probability 1e-5 (Wilson and Hilferty)
    bound = freedom * (1 - 2 / (9 * freedom) + 4.27 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, (statistic, bound, rows)


def test_a_draft_that_breaks_costs_speed_alone():
    """Claim: an error inside drafting leaves every answer as it was, and is told once."""
    found = run(Job(TARGET, WAVES[10:11], {"draft": DRAFT, "length": 8}, breaks=True))
    assert found.answers == plain("whole").answers[10:11]
    assert found.said.count("vLLM goes on without a draft") == 1


def checkpoint(family: str, folder: Path, *more: str) -> str:
    """A tiny random checkpoint of a family."""
    command = [sys.executable, "-m", "evidence", "make-checkpoint", family, str(folder), *more]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    if family.startswith("llava"):
        _as_published(folder / "model.safetensors")
    return str(folder)


def _as_published(file: Path) -> None:
    """Names of a tower's weights as published checkpoints have them, and vLLM 0.32 reads them;
    newer transformers save them shorter, and read both."""
    from safetensors.torch import load_file, save_file

    longer = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): weight
        for name, weight in load_file(file).items()
    }
    save_file(longer, file, metadata={"format": "pt"})
