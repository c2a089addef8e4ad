"""Every stored setting against the papers' numbers, written down here a second time."""

from __future__ import annotations

import pytest

from saccade.bench.suites.benchmarks import BENCHMARKS
from saccade.bench.suites.rows import InMemoryRows

DESCRIBE = (
    "Please provide a detailed description of the video, focusing on the main subjects, "
    "their actions, and the background scenes."
)
ASK = "{question}"
CHOOSE = "{question}\n{options}"
LETTER = "\nAnswer with the option's letter from the given choices directly."
THINK = "{question}\n{options}\nLet's think step by step."
REASON = (
    "For the following question, provide a detailed explanation of your reasoning leading to "
    "the answer. {question}"
)
EDIT = (
    "Please provide instructions for editing the source image to match the target image. "
    "Source Image: <image> Target Image: <image> Instruction:"
)
TAIL = (
    " <image> Caption #1: {caption1} <image> Caption #2: {caption2}. <image> Caption #3: "
    "{caption3} <image> Caption #4: {caption4} <image> Caption #5:"
)

# benchmark, paper: samples, token limit, frames, split, prompt
STATED = {
    # SpecVLM, App. A: 50 instances of each benchmark, 256 tokens, 64 and 128 frames, a description
    # instead of the answer; MLVU and the others in Sec. 4. VideoDetailCaption asks for one itself.
    ("videodetailcaption", "specvlm"): (50, 256, 64, "test", ASK),
    ("videodetailcaption", "specvlm-128"): (50, 256, 128, "test", ASK),
    ("mvbench", "specvlm"): (50, 256, 64, "train", DESCRIBE),
    ("mvbench", "specvlm-128"): (50, 256, 128, "train", DESCRIBE),
    ("mlvu", "specvlm"): (50, 256, 64, "test", DESCRIBE),
    ("mlvu", "specvlm-128"): (50, 256, 128, "test", DESCRIBE),
    ("longvideobench", "specvlm"): (50, 256, 64, "test", DESCRIBE),
    ("longvideobench", "specvlm-128"): (50, 256, 128, "test", DESCRIBE),
    # SAGE, Sec. 5.1: four image and four video benchmarks "that require generating long texts";
    # no number of samples, frames or tokens. Sec. 5.4: GSM8K and HumanEval.
    ("videodetailcaption", "sage"): (None, 256, 64, "test", ASK),
    ("mvbench", "sage"): (None, 256, 64, "train", DESCRIBE),
    ("mlvu", "sage"): (None, 256, 64, "test", DESCRIBE),
    ("longvideobench", "sage"): (None, 256, 64, "validation", DESCRIBE),
    ("textvqa", "sage"): (None, 256, None, "validation", ASK),
    ("gqa", "sage"): (None, 256, None, "testdev", ASK),
    ("chartqa", "sage"): (None, 256, None, "test", ASK),
    ("seed-bench", "sage"): (None, 256, None, "test", CHOOSE),
    ("gsm8k", "sage"): (None, 256, None, "test", ASK),
    ("humaneval", "sage"): (None, 256, None, "test", ASK),
    # HIPPO, Sec. 6.1: six benchmarks; App. B: 256 tokens, 64 and 128 frames; no samples.
    ("videodetailcaption", "hippo"): (None, 256, 64, "test", ASK),
    ("videodetailcaption", "hippo-128"): (None, 256, 128, "test", ASK),
    ("mvbench", "hippo"): (None, 256, 64, "train", CHOOSE),
    ("mvbench", "hippo-128"): (None, 256, 128, "train", CHOOSE),
    ("mlvu", "hippo"): (None, 256, 64, "test", CHOOSE),
    ("mlvu", "hippo-128"): (None, 256, 128, "test", CHOOSE),
    ("longvideobench", "hippo"): (None, 256, 64, "validation", CHOOSE),
    ("longvideobench", "hippo-128"): (None, 256, 128, "validation", CHOOSE),
    ("video-mme", "hippo"): (None, 256, 64, "test", CHOOSE),
    ("video-mme", "hippo-128"): (None, 256, 128, "test", CHOOSE),
    ("lvbench", "hippo"): (None, 256, 64, "train", CHOOSE),
    ("lvbench", "hippo-128"): (None, 256, 128, "train", CHOOSE),
    # HIPPO, Sec. 4.1 and Fig. 3: accuracy on three of them, so a letter is asked for.
    ("video-mme", "hippo-accuracy"): (None, 16, 64, "test", CHOOSE + LETTER),
    ("mlvu", "hippo-accuracy"): (
        None, 16, 64, "test", CHOOSE + "\nOnly give the best option.\n\nBest option: (",
    ),
    ("lvbench", "hippo-accuracy"): (
        None, 16, 64, "train", CHOOSE + "\nAnswer the question with the option letter.",
    ),
    # Sparse-to-Dense, Sec. 4: MLVU and VideoMME short, medium, long; chain of thought; no more.
    ("mlvu", "std"): (None, 256, None, "test", THINK),
    ("video-mme", "std"): (None, 256, None, "test", THINK),
    # TABED, Sec. 4.1: at most 128 new tokens; App. I.1: prompts; App. J.1-J.2: 60 prompts of
    # LLaVA-Bench, 100 of POPE, Spot, IEdit, MagicBrush, PororoSV and VIST; DocVQA is
    # linked to LMMs-Eval-Lite.
    ("llava-bench-wild", "tabed"): (60, 128, None, "train", REASON),
    ("docvqa", "tabed"): (100, 128, None, "lite", REASON),
    ("pope", "tabed"): (100, 128, None, "test", REASON),
    ("mm-vet", "tabed"): (100, 128, None, "test", REASON),
    ("spot-the-diff", "tabed"): (
        100, 128, None, "test",
        "Explain the disparities between the first and second image. "
        "<image> <image> Difference:",
    ),
    ("iedit", "tabed"): (100, 128, None, "test", EDIT),
    ("magicbrush", "tabed"): (100, 128, None, "test", EDIT),
    ("pororosv", "tabed"): (
        100, 128, None, "test",
        "Given the progression of the story with the first few images, can you write a fitting "
        "end considering the last image?" + TAIL,
    ),
    ("vist", "tabed"): (
        100, 128, None, "test",
        "With the narratives paired with the initial images, how would you conclude the story "
        "using the last picture?" + TAIL,
    ),
    # TABED, App. J.3: ChartQA for timing; App. H.2: OCRBench and TextCaps; Sec. 4.1: second turns
    # of ConvBench, NQ and GSM8K.
    ("chartqa", "tabed"): (None, 128, None, "test", ASK),
    ("ocrbench", "tabed"): (None, 128, None, "test", ASK),
    ("textcaps", "tabed"): (
        None, 128, None, "val", "Provide a one-sentence caption for the provided image.",
    ),
    ("convbench", "tabed"): (None, 128, None, "test", ASK),
    ("gsm8k", "tabed"): (None, 128, None, "test", ASK),
    ("nq", "tabed"): (None, 128, None, "validation", ASK),
}  # fmt: skip

# TABED, Sec. 4.1: second turns over its image sets; what they ask is its published code's.
SECOND = {
    "qa": (None, True),  # the sample after it, with its images
    "captioning": ("Provide a detailed caption for the provided image.", False),
    "summary": ("Summarize the previous answer.", False),
    "story": (
        "Can you use the previous responses to write a long story for children?", False,
    ),
}  # fmt: skip
OVER = (
    "llava-bench-wild", "docvqa", "pope", "mm-vet", "iedit", "magicbrush", "spot-the-diff",
    "pororosv", "vist",
)  # fmt: skip
STATED |= {(name, f"tabed-{kind}"): STATED[name, "tabed"] for name in OVER for kind in SECOND}

NAMES = {
    "specvlm": "SpecVLM, Sec. 4.1 and App. A",
    "sage": "SAGE, Sec. 5.",
    "hippo": "HIPPO, Sec. ",
    "std": "Sparse-to-Dense, Sec. 4",
    "tabed": "TABED, ",
}


def test_every_setting_is_written_down_here():
    """Claim: no setting without its numbers in this file, and none here that is not stored."""
    assert {(name, paper) for name, known in BENCHMARKS.items() for paper in known.papers} == set(
        STATED
    )


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_splits_of_a_benchmark_are_those_a_paper_ran(name: str):
    """Claim: no setting asks for a split there is not, and no split is there for nothing."""
    splits = {split for source in BENCHMARKS[name].sources for split in source.files}
    assert splits == {setting.split for setting in BENCHMARKS[name].papers.values()}


@pytest.mark.parametrize(("name", "paper"), STATED, ids=str)
def test_a_setting_is_the_papers(name: str, paper: str):
    """Claim: samples, token limit, frames, split and prompt are those of the paper.

    Fails if a number of the table drifts from the section named above it.
    """
    setting = BENCHMARKS[name].papers[paper]
    stored = (
        setting.samples, setting.max_new_tokens, setting.frames, setting.split, setting.prompt,
    )  # fmt: skip
    assert stored == STATED[name, paper]
    assert setting.paper.startswith(NAMES[paper.split("-")[0]])
    turn = SECOND.get(paper.removeprefix("tabed-"), (None, False))
    assert (setting.then, setting.asks_next_item) == turn


def test_what_a_paper_leaves_open_is_reported():
    """Claim: a setting without a number of samples, or whose prompt is ours, says "not stated"."""
    for known in BENCHMARKS.values():
        for setting in known.papers.values():
            if setting.samples is None:
                assert "not stated" in setting.paper


def test_a_column_counts_if_any_row_has_it():
    """Claim: rows of JSON whose first record lacks a field have that field's column all the same,
    and the column has None where a record lacks it."""
    rows = InMemoryRows(({"a": 1}, {"a": 2, "b": 3}))
    assert rows.names == ("a", "b") and rows.column("b") == [None, 3]
