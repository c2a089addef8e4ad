"""What the study of a model that sees counts, on a tiny stand-in; its page and the stored one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lab.real import answers
from lab.studies import seeing, seeing_page
from lab.training import build
from saccade.inputs import load
from saccade.inputs.checkpoints import EMBEDDED, NAMES


def test_content_words_are_counted_as_often_as_they_stand():
    """Claim: F1 is 1 for the same words in another order, a half where half are right, and words
    that every description has count for nothing."""
    true = "A small red circle moves left. A large blue star stays still."
    assert (
        seeing.content_word_f1(
            "A large blue star stays still. A small red circle moves left.", true
        )
        == 1
    )
    assert seeing.content_word_f1("The video shows it.", true) == 0
    assert seeing.content_word_f1("A small red circle moves left.", true) == pytest.approx(
        2 * 4 / (4 + 8)
    )
    assert seeing.content_word_f1("red red red red", true) < seeing.content_word_f1("red", true)


def test_clips_have_something_to_say(monkeypatch):
    """Claim: only clips whose true description is long enough are asked about, in their order."""
    tok = build.load_processor(EMBEDDED / "target").tokenizer
    monkeypatch.setattr(seeing, "MIN_TRUE_TOKENS", 150)
    own = seeing.described_clips(tok)
    clips = [next(own) for _ in range(5)]
    assert all(len(tok(each.truth)["input_ids"]) >= seeing.MIN_TRUE_TOKENS for each in clips)
    assert [each.number for each in clips] == sorted({each.number for each in clips})
    assert clips[-1].number > 4  # some were passed over


def test_the_interval_includes_the_draw():
    """Claim: where clips agree and draws differ the interval is as wide as the draws make it, and
    nothing where all are alike."""
    alike = seeing_page.crossed_interval(np.full((8, 5), 0.25))
    assert alike == (0.25, 0.25, 0.25)
    middle, low, high = seeing_page.crossed_interval(np.tile(np.arange(5.0), (8, 1)))
    assert middle == 2 and 0.5 < low < 1.5 and 2.5 < high < 3.5


@pytest.mark.slow
def test_a_run_is_reported_in_tables(tmp_path, monkeypatch):
    """Claim: every method and every set is measured once on the clips asked for, each answer is
    transformers' own, and asked again nothing runs; the page has a row of each."""
    monkeypatch.setattr(seeing, "SELF_METHODS", ("std/keep=0.1", "fresh/keep=0.1"))
    monkeypatch.setattr(seeing, "DRAFT_METHODS", ("sd", "specvlm/keep=0.1"))
    monkeypatch.setattr(seeing, "TIMED_METHODS", ("ar", "sd"))
    monkeypatch.setattr(seeing, "CANVASES", {64: (8, 112)})
    monkeypatch.setattr(seeing, "FORCED_CLIPS", 2)
    monkeypatch.setattr(seeing, "TOKENS", 12)
    monkeypatch.setattr(seeing, "SIZE", 64)
    monkeypatch.setattr(seeing, "KEEPS", (0.25,))
    for name in ("SELF_METHODS", "DRAFT_METHODS", "KEEPS"):
        monkeypatch.setattr(seeing_page, name, getattr(seeing, name))
    model, draft = load("shapes"), load("shapes-draft")
    facts = seeing.run_facts("M", "abc", 2, tmp_path, "C")
    path = tmp_path / "seeing.json"
    results = answers.Results(path, facts, seeing.KINDS)
    seeing.measure_answers(model, draft, NAMES["shapes"], 2, results, together=2)
    seeing.time_methods(model, draft, 1, results)
    report = json.loads(path.read_text())
    assert len(report["measured"]) == 2 * 5 and len(report["raced"]) == 2
    assert all(row["same"] for kind in ("measured", "raced") for row in report[kind])
    assert len(report["told"]) == 2 and len(report["forced"]) == 2 * 3
    sets = {row["chosen"] for row in report["looked"]}
    assert {"none", "SpecVLM's choice", "random, draw 4"} <= sets and "random" not in sets
    monkeypatch.setattr(answers, "answer_documents", None)
    again = answers.Results(path, facts, seeing.KINDS)
    seeing.measure_answers(model, draft, NAMES["shapes"], 2, again, together=2)
    assert again.facts == report
    page = seeing_page.page(report)
    for name in ("std/keep=0.1", "fresh/keep=0.1", "sd", "specvlm/keep=0.1"):
        assert f"| `{name}` | " in page
    assert "Of 10 answers 10 are" in page and "of 2 timed ones 2 are" in page
    assert "| HIPPO's holistic choice |" in page and "random, draw" not in page
