"""What a round of each method does on a GPU, counted on a pretended one: ``make gpu-budgets``.

The command writes docs/results/gpu-budgets.json, to which the tests hold every method, and the same
numbers as a table, docs/results/gpu-budgets.md. It uses tiny random models and prices of forwards
that are fixed, so the numbers do not depend on the machine.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from beside import Inside, hired
from helpers import AMOUNT, WORDS, Backbone, input_for, noisy, qwen25
from pretended import Record, pretend_gpus

import saccade
from lab.checkpoints import heads
from saccade.core.costs import Costs
from saccade.drafting.drafters import HeadDrafter
from saccade.drafting.shapes import cost_measurement
from saccade.methods import METHODS, resolve
from saccade.model.heads.head import make_eagle3_head

ROOT = Path(__file__).parents[2]
SOME_METHODS = [*METHODS]
TOKENS = 24
FAMILY = "qwen2_5_vl"
KINDS = ("sync", "transfer", "launch", "replay")
STORED = ROOT / "docs" / "results" / "gpu-budgets.json"
HEAD_ROOM = 1.1  # A method may exceed its stored numbers by this factor,
SPARE = 0.5  # and by so much of one.
PRICES = Costs((1, 8, 26), (7.0e-3, 7.2e-3, 7.6e-3), 1.9e-3)
"""Seconds of forwards of a 7B and a 0.5B on an H100, on paper."""


@dataclass(frozen=True)
class Counted:
    """An answer over the pretended device: what was given and what decoding did."""

    ids: tuple[int, ...]
    rounds: int
    counts: Counter[str]  # of all rounds together, transfers among them
    captures: int  # of the whole answer, reading included
    fallback: str | None

    def a_round(self, kind: str) -> float:
        return self.counts[kind] / max(1, self.rounds)


@contextmanager
def fixed_prices() -> Iterator[None]:
    """Forwards cost what ``PRICES`` says, so that no decision depends on this machine's clock."""
    with (
        patch.object(cost_measurement, "measure_costs", lambda *models, **lengths: PRICES),
        patch.object(cost_measurement, "affordable_share", lambda *models, **settings: 0.25),
    ):
        yield


def pair(target: str = "cuda", draft: str = "cuda") -> tuple[Backbone, Backbone]:
    """A random target and a noisy copy of it as the draft, on pretended devices."""
    big, small = qwen25(), noisy(qwen25, 0, AMOUNT)
    return (
        Backbone(copy.deepcopy(big).to(target)),
        Backbone(copy.deepcopy(small).to(draft)),
    )


def random_head(target: Backbone) -> Backbone:
    """Returns an EAGLE-3 head of random weights for a target, on the target's device."""
    settings = heads.eagle3_settings(target, "specforge", 100)
    tensors = heads.random_eagle3(target, "specforge", 100)
    return make_eagle3_head(target, settings, tensors, "a head")


def answer(
    record: Record, target: Backbone, draft: Backbone, method: str, **settings: object
) -> Counted:
    """One answer; a draft of the parallel schedule works inside this process.

    A method that drafts with a head has a random one instead of the draft.
    """
    if resolve(method).drafter is HeadDrafter:
        draft = random_head(target)
    record.clear()
    before = Counter[str]()

    def hear(phase: str) -> None:
        if phase == "decode":
            before.update(record.counts)

    options = {"max_new_tokens": TOKENS, "do_sample": False, **WORDS, **settings}
    with hired(Inside()), fixed_prices():
        rounds = saccade.stream(
            target, input_for(FAMILY), draft=draft, method=method, on_phase=hear, **options
        )
        (result,) = rounds.finish()
    counts = Counter(record.counts)
    counts.subtract(before)
    counts["transfer"] = counts["upload"] + counts["download"]
    captures = record.counts["capture"]
    decoding = max(1, len(result.rounds) - 1)  # the first is the prefill's own token
    return Counted(result.ids, decoding, counts, captures, result.fallback_reason)


def count_every_method() -> dict[str, Counted]:
    """The second answer of each method: what is made once is there by then."""
    counts = {}
    with pretend_gpus() as record:
        for method in SOME_METHODS:
            target, draft = pair()
            answer(record, target, draft, method)
            counts[method] = answer(record, target, draft, method)
    return counts


def stored(counted: Counted) -> dict[str, float]:
    """What is written down of a method."""
    numbers = {kind: math.ceil(10 * counted.a_round(kind)) / 10 for kind in KINDS}
    return {**numbers, "captures": counted.captures, "rounds": counted.rounds}


def excess(method: str, counted: Counted, budget: dict[str, float]) -> list[str]:
    """What exceeds a method's budget, in words."""
    return [
        f"{method}: {counted.a_round(kind):.1f} of kind {kind} a round, budget {budget[kind]}"
        for kind in KINDS
        if counted.a_round(kind) > budget[kind] * HEAD_ROOM + SPARE
    ] + [
        f"{method}: {counted.captures} captures in a second answer, budget {budget['captures']}"
        for _ in range(counted.captures > budget["captures"])
    ]


PAGE = """# What a round does on a GPU

For whoever changes the decoding path. A GPU waits for its host wherever the host reads a number
back, and the host is slow to start kernels one by one; this page counts both for every method.
Nothing here was timed. The numbers come from a pretended GPU (`tests/gpu/pretended.py`): a CPU
whose tensors follow the rules of CUDA. The models are tiny ({layers} layers), so launches outside
captured steps would grow with a real model's layers; the other columns would not.

A *sync* is a point where the host waits for the device. A *transfer* is a copy between them, either
way. A *launch* is a kernel that the host starts by itself. A *replay* is a whole forward started as
one captured graph. All are a round's, of a second answer; *captures* are that whole answer's.

`make gpu-budgets` writes this page. A test fails where a method exceeds its row by a tenth.

| method | rounds | syncs | transfers | launches | replays | captures |
|-|-:|-:|-:|-:|-:|-:|
{rows}
"""


def page_of(budgets: dict[str, dict[str, float]]) -> str:
    """The page with the stored numbers as a table."""
    rows = [
        f"| {method} | {own['rounds']} | "
        + " | ".join(f"{own[kind]:.1f}" for kind in KINDS)
        + f" | {own['captures']} |"
        for method, own in budgets.items()
    ]
    layers = qwen25().config.text_config.num_hidden_layers
    return PAGE.format(layers=layers, rows="\n".join(rows))


def main() -> None:
    torch.set_num_threads(1)
    budgets = {method: stored(counted) for method, counted in count_every_method().items()}
    STORED.write_text(json.dumps(budgets, indent=1) + "\n")
    STORED.with_suffix(".md").write_text(page_of(budgets))


if __name__ == "__main__":
    with torch.no_grad():
        main()
