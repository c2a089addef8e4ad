"""What each choice of ``fresh`` is worth: the views it is compared with, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import checkpoints
from lab.hardware import following
from lab.real.answers import Results
from lab.real.long_documents import Document
from lab.studies import ablations
from lab.studies.ablations import FRESH_METHOD, Anchored
from lab.studies.experiment import Experiment
from saccade.core.prompt import Prefill, Prompt
from saccade.inputs import load
from saccade.methods.pages import ByPage
from saccade.methods.std import PerHead

ROOT = Path(__file__).parents[2]


def guide(seen: int = 80, before: int = 3) -> Prefill:
    """Three tokens of text, a medium, and three more; each head's mass is another."""
    length = before + seen + 3
    visual = torch.zeros(length, dtype=torch.bool)
    visual[before : before + seen] = True
    prompt = Prompt(
        full_ids=torch.zeros(length, dtype=torch.long),
        embeds=torch.zeros(length, 1),
        positions=torch.arange(length)[None],
        next_position=length,
        visual=visual,
        fixed=torch.zeros(length, dtype=torch.bool),
        grid=torch.zeros(seen, 4, dtype=torch.long),
        places=torch.arange(length),
    )
    mass = torch.rand(2, 3, seen, generator=torch.Generator().manual_seed(0))
    return Prefill(prompt, None, torch.zeros(5), mass, mass)


def test_anchors_are_always_in_and_the_mass_decides_the_rest():
    """Claim: the medium's first tokens, and of its last ones the share asked for, are in every
    head's set, which is as large as without; what is left is the head's top of the others. Control:
    without anchors some head leaves one of them out."""
    prefill = guide()
    own = PerHead(keep=0.25)(prefill, prefill.prompt).reading.heads
    for window, last in ((0.0, []), (0.25, list(range(78, 83)))):
        head_sets = Anchored(keep=0.25, window=window)(prefill, prefill.prompt).reading.heads
        assert own is not None and head_sets is not None and head_sets.shape == own.shape
        always = {0, 1, 2, 3, 4, 5, 6, 83, 84, 85, *last}  # text, and four of the medium
        for head, mass in zip(head_sets.flatten(0, 1), prefill.mass.flatten(0, 1), strict=True):
            kept = set(head.tolist())
            assert always <= kept
            free = sorted(set(range(7, 83 - len(last))), key=lambda row: -float(mass[row - 3]))
            assert kept - always == set(free[: len(kept - always)])
    assert not all({3, 4, 5, 6} <= set(head.tolist()) for head in own.flatten(0, 1))


def test_every_choice_differs_from_ours_in_what_it_is_called():
    """Claim: each group has our own choice once, and all its recipes follow the answer or say that
    they do not."""
    for group in ablations.GROUPS.values():
        names = [recipe.name for recipe in group.values()]
        assert names.count(FRESH_METHOD) == 1 and len(set(names)) == len(names)
        views = [recipe.view for recipe in group.values()]
        follows = [bool(view.key_updates.refresh) or isinstance(view, ByPage) for view in views]
        assert all(follow or "never" in label for label, follow in zip(group, follows, strict=True))


def rows(taus: dict[str, float], name: str) -> list[dict[str, Any]]:
    return [
        {
            "document": f"{name} {number}",
            "method": method,
            "tau": tau * (1 + number),
            "tokens": 64 if number < 3 else 2,
        }
        for method, tau in taus.items()
        for number in range(4)
    ]


def test_the_table_is_paired_by_document():
    """Claim: ratios are of the same document, so that long ones and short ones have one; documents
    and clips stand apart; answers of two words are left out. Fails if medians are divided."""
    table = ablations.results_table(
        rows({FRESH_METHOD: 2.0, f"std/keep={ablations.KEEP}": 1.0}, "page")
        + rows(
            {FRESH_METHOD: 3.0, f"{FRESH_METHOD}/refresh=2": 6.0, "streaming/keep=0.1": 2.0}, "clip"
        )
    )
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert "0.50 [0.50, 0.50] |  |  |" in lines["never again (`std`)"]
    assert lines["2"].endswith("| 12.00 [6.00, 18.00] | 2.00 [2.00, 2.00] |")
    assert lines["`fresh/keep=0.1`"].endswith("`streaming/keep=0.1` | 1.50 [1.50, 1.50] |")
    assert "3 documents: tau" in table and "3 clips: tau" in table


def test_a_page_takes_the_table_between_its_marks():
    page = f"before\n{ablations.MARKS[0]}\nold\n{ablations.MARKS[1]}\nafter\n"
    once = ablations.page_with_table(page, "| new |")
    assert "old" not in once and "| new |" in once and once.startswith("before\n")
    assert ablations.page_with_table(once, "| new |") == once and once.endswith("\nafter\n")


@pytest.mark.slow
def test_clips_are_asked_once(tmp_path, pair):
    """Claim: on a clip every choice gives the target's answer, and a second run asks nothing."""
    facts = {"model": "M", "settings": {"max_new_tokens": 12}, "together": 1}
    experiment, messages = Experiment(clips=1, size=64, tokens=12), []
    results = Results(tmp_path / "fresh.json", facts)
    ablations.measure_clips(experiment, results, messages.append)
    assert len(messages) == len(ablations.OVER_CLIPS) == len(results.facts["measured"])
    assert all(row["same"] for row in results.facts["measured"])
    ablations.measure_clips(experiment, Results(tmp_path / "fresh.json", facts), messages.append)
    assert len(messages) == len(ablations.OVER_CLIPS)


def test_costs_of_renewing_a_view_are_reported_part_by_part(tmp_path):
    """Claim: a run measures every part that the stored one has, and its text names the prompt."""
    stored = json.loads((ROOT / "docs" / "results" / "following.json").read_text())
    model = load(str(checkpoints.make("llama", tmp_path / "target")), device="cpu")
    text = Document("a", "some words of a text, " * 30, "Go on.", 100)
    costs = following.measure_following(model, text, keep=0.5, rounds=2)
    assert list(costs.seconds) == list(stored["seconds"]) and costs.renewal_seconds > 0
    again = following.page_section({**stored, **asdict(costs)})
    assert f"{costs.prompt_tokens:,} tokens of prompt, 50% of the document" in again
