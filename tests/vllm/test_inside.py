"""Claims about the draft inside vLLM itself. Run by ``make vllm``, in an environment of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lab.hardware.vllm_engines import Engine, Question, Setup, WaveResults, clip_questions
from saccade.inputs.checkpoints import NAMES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TARGET, DRAFT = str(NAMES["shapes"]), str(NAMES["shapes-draft"])
SCENES = range(20000100, 20000150)  # that no training has drawn
# Alone, eight at once, thirty-two at once; then the first eight again, by now in the prefix cache.
WAVES = (
    *[clip_questions([seed]) for seed in SCENES[:10]],
    clip_questions(SCENES[10:18]),
    clip_questions(SCENES[18:]),
    clip_questions(SCENES[:8]),
)
# prompts of about 270 tokens in chunks of 128, over blocks that are shared
CHUNKED = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "block_size": 32}
# blocks for two prompts and little of their answers
TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 512, "block_size": 32}
MIXED = (
    Question("What is here?", videos=((1, 8, 56),)),
    Question("And here?", images=((2, 56),)),
    Question("Both?", videos=((3, 8, 56), (4, 8, 56))),
    Question("A B C D"),
    Question("Images", images=((5, 56), (6, 112))),
)


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """vLLM alone."""
    with Engine(Setup(TARGET)) as engine:
        yield engine


@pytest.fixture(scope="module")
def truth(plain: Engine) -> WaveResults:
    """What vLLM alone answers to the waves."""
    return plain.ask(WAVES)


def worked(engine: Engine) -> None:
    assert "drafting failed" not in engine.output, engine.output[-3000:]


def test_fifty_clips_alone_and_together(truth):
    """Claim: with drafts of full length every answer is vLLM's own, token for token, for one, 8 and
    32 requests at once, and more than half of what is drafted is accepted."""
    with Engine(Setup(TARGET, {"draft": DRAFT, "length": 8})) as engine:
        results = engine.ask(WAVES)
        worked(engine)
    assert results.answers == truth.answers
    assert results.drafted > 500 and results.rate > 0.5


def test_chunks_and_the_prefix_cache(truth):
    """Claim: the same holds where prompts are read in chunks and their blocks are shared, with the
    attention of the target watched, and drafts as long as pays."""
    with Engine(Setup(TARGET, {"draft": DRAFT, "view": "specvlm"}, engine=CHUNKED)) as engine:
        results = engine.ask(WAVES)
        worked(engine)
    assert results.answers == truth.answers
    assert results.drafted > 500


def test_preemption(plain):
    """Claim: with blocks for two prompts and little of their answers, requests are put off and come
    back, and every answer stays the same."""
    wave, rules = [clip_questions(SCENES[18:26])], {"ignore_eos": True, "max_tokens": 96}
    alone = plain.ask(wave, **rules)
    with Engine(Setup(TARGET, {"draft": DRAFT, "length": 8}, engine=TIGHT)) as engine:
        results = engine.ask(wave, **rules)
        worked(engine)
    assert results.answers == alone.answers
    assert results.preempted > 0 and results.drafted > 200


def test_lookup(truth):
    """Claim: without a model, what followed the same words is proposed, and answers stay."""
    with Engine(Setup(TARGET, {"draft": "lookup", "length": 4})) as engine:
        results = engine.ask(WAVES[10:12])
        worked(engine)
    assert results.answers == truth.answers[10:12]
    assert results.drafted > 100 and results.accepted > 10


def test_a_draft_that_breaks_costs_speed_alone(truth):
    """Claim: an error inside drafting leaves every answer as it was, and is told once."""
    with Engine(Setup(TARGET, {"draft": DRAFT, "length": 8}, breaks=True)) as engine:
        results = engine.ask(WAVES[10:11])
        output = engine.output
    assert results.answers == truth.answers[10:11]
    assert output.count("vLLM goes on without a draft") == 1


def test_an_option_that_means_nothing_stops_the_start():
    """Claim: an engine with an unknown option of the draft does not start, and names the option."""
    with pytest.raises(RuntimeError, match="unknown option 'veiw' for the draft; known: draft"):
        Engine(Setup(TARGET, {"draft": DRAFT, "veiw": "full"}))


def test_without_its_plug_in_the_engine_does_not_start():
    """Claim: where VLLM_PLUGINS leaves the plug-in out, an engine with the draft does not start,
    and says how it would."""
    with pytest.raises(RuntimeError, match="VLLM_PLUGINS=other leaves out .* add saccade to it"):
        Engine(Setup(TARGET, {"draft": DRAFT}, environment={"VLLM_PLUGINS": "other"}))


def together_and_one_by_one(questions: Sequence[Question]) -> tuple[Sequence[Question], ...]:
    """All questions in a wave, and then each in one of its own."""
    return (questions, *((each,) for each in questions))


def ask_alone_and_with_its_copy(
    target: str, waves: Sequence[Sequence[Question]]
) -> tuple[WaveResults, WaveResults]:
    """What vLLM answers alone, and with the target's copy as a draft over the whole prompt."""
    with Engine(Setup(target)) as engine:
        alone = engine.ask(waves)
    with Engine(Setup(target, {"draft": target, "view": "full", "length": 6})) as engine:
        drafted = engine.ask(waves)
        worked(engine)
    return alone, drafted


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2-vl", "qwen3-vl", "llava-onevision"])
def test_a_family_drafting_for_itself_accepts_everything(family, tmp_path):
    """Claim: over the whole prompt the target's own copy is never refused: pixels, positions and
    layout reach the draft as they reach the target. Videos, images, several and none at once; then
    from the prefix cache, where pixels may be gone; pruned by what the target attends to."""
    target = checkpoint(family, tmp_path / "target")
    waves = together_and_one_by_one(MIXED)
    alone, copied = ask_alone_and_with_its_copy(target, waves)
    assert copied.answers == alone.answers
    assert copied.drafted > 300 and copied.rate == 1
    with Engine(Setup(target, {"draft": target, "view": "specvlm", "keep": 0.3})) as engine:
        pruned = engine.ask(waves)
        worked(engine)
    assert pruned.answers == alone.answers and pruned.drafted > 30


def test_glm_is_drafted_for(tmp_path):
    """Claim: a family whose videos are written with the token of pictures is drafted for, and its
    answers are vLLM's own. How much is accepted says nothing: with random weights of this family
    vLLM 0.32 and transformers answer differently, about text alone too."""
    target = checkpoint("glm4v", tmp_path / "target")
    questions = tuple(each for each in MIXED if len(each.videos) < 2)  # vLLM takes one a prompt.
    alone, drafted = ask_alone_and_with_its_copy(target, together_and_one_by_one(questions))
    assert drafted.answers == alone.answers
    assert drafted.drafted > 300 and drafted.accepted


def test_the_law_of_two_tokens(tmp_path):
    """Claim: at temperature 0.5, and within the five likeliest, the pair of second and third token
    after a prompt has the same law with drafts and without: chi-square over 1,500 answers of each,
    the rare pairs as one.

    Power: a sampler that took the draft's choice unasked would move at least a tenth of the mass;
    one that drew at a temperature of its own was refused at 22 times the bound.
    """
    target = checkpoint("qwen2.5-vl", tmp_path / "target", "--vocab", "300")
    draft = checkpoint("qwen2.5-vl", tmp_path / "draft", "--vocab", "300", "--noise", "0.1")
    question = [(Question("A", images=((1, 56),)),)]
    rules = {"temperature": 0.5, "max_tokens": 3, "n": 1500}
    drawn: list[tuple[Counter, Counter]] = []
    for seed, options in ((0, None), (1, {"draft": draft, "length": 2})):
        many = {"seed": seed, "max_num_seqs": 64}
        with Engine(Setup(target, options, 2, many)) as engine:
            whole = engine.ask(question, **rules)
            limited = engine.ask(question, **rules, top_k=5)
            worked(engine)
        drawn.append((_pairs(whole), _pairs(limited)))
    for one, other in zip(*drawn, strict=True):
        statistic, bound = _apart(one, other)
        assert statistic < bound


def _pairs(ran: WaveResults) -> Counter:
    return Counter(tuple(answer[1:]) for answer in ran.answers[0])


def _apart(one: Counter, other: Counter) -> tuple[float, float]:
    """Chi-square of two samples of equal size, and what it exceeds with probability 1e-5."""
    common = [pair for pair in one | other if one[pair] + other[pair] >= 20]
    rows = [(one[pair], other[pair]) for pair in common]
    rows.append((one.total() - sum(a for a, _ in rows), other.total() - sum(b for _, b in rows)))
    freedom = len(rows) - 1
    assert freedom > 4 and one.total() == other.total()
    # Wilson and Hilferty
    bound = freedom * (1 - 2 / (9 * freedom) + 4.27 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((a - b) ** 2 / (a + b) for a, b in rows if a + b), bound


def checkpoint(family: str, folder: Path, *more: str) -> str:
    """A tiny random checkpoint of a family."""
    command = [sys.executable, "-m", "lab", "make-checkpoint", family, str(folder), *more]
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
