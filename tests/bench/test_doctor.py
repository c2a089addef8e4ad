"""The verdict on a pair, checked by hand on small numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from saccade.bench.hardware import pair_fit
from saccade.bench.hardware.pair_fit import (
    ACCEPTANCE_RATES,
    COST_PER_ROW,
    TYPICAL_RATE,
    Diagnosis,
    Outlook,
    Part,
    examine,
)
from saccade.inputs.footprint import Footprint
from saccade.model.kernels.few_bits import ROUNDINGS
from saccade.model.memory import GIB, SPARE_SHARE

BIG = Footprint(parameters=1000, weights_per_token=800, kv_numbers_per_token=2, layers=4, vocab=320)
SMALL = Footprint(parameters=100, weights_per_token=80, kv_numbers_per_token=1, layers=1, vocab=320)


class Config:
    """Stands for a config: how many numbers there are is said by ``counted``."""

    dtype = torch.bfloat16

    def __init__(self, counted: Footprint) -> None:
        self.counted = counted

    def to_dict(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count = pair_fit.footprint
    monkeypatch.setattr(
        pair_fit, "footprint", lambda config: getattr(config, "counted", None) or count(config)
    )


def pair(draft: Footprint = SMALL, **more: Any) -> Diagnosis:
    given: dict[str, Any] = dict(tokens=100, keep=0.1, dtype=torch.float32, free_bytes=GIB) | more
    return examine(("big", Config(BIG)), ("small", Config(draft)), **given)


def test_the_bytes_of_a_pair() -> None:
    """Claim: weights, caches and what a step reads are the numbers times their size, the draft's
    cache at the share it keeps; the ratio is that of the steps.
    Fails if a cache, a type or the share is left out."""
    report = pair()
    assert report.parts == (
        Part("big", 1000 * 4, 2 * 100 * 4, 800 * 4 + 2 * 100 * 4),
        Part("small", 100 * 4, 1 * 10 * 4, 80 * 4 + 1 * 10 * 4),
    )
    assert report.ratio == pytest.approx(360 / 4000)
    assert report.needed == 4000 + 800 + 400 + 40
    half = pair(dtype="auto")
    assert half.needed * 2 == report.needed and half.ratio == pytest.approx(report.ratio)
    assert pair(keep=1.0).parts[1].cache == 1 * 100 * 4


def test_a_draft_elsewhere_is_counted_there() -> None:
    """Claim: with the draft on another device the target's alone must fit beside the target, and
    the draft's where it is; each that does not is named. Fails if both are counted together."""
    together = int((4000 + 800 + 400 + 40) / (1 - SPARE_SHARE))
    alone, own = int(4800 / (1 - SPARE_SHARE)) + 1, int(440 / (1 - SPARE_SHARE)) + 1
    assert (
        pair(free_bytes=together - 1).problems
        and not pair(free_bytes=alone, draft_free_bytes=own).problems
    )
    assert pair(draft_free_bytes=own).needed == pair().needed - 440
    (target,) = pair(free_bytes=alone - 2, draft_free_bytes=own).problems
    (draft,) = pair(free_bytes=alone, draft_free_bytes=own - 2).problems
    assert target.startswith("big needs") and draft.startswith("small needs")


def test_a_draft_on_a_device_of_another_kind_is_not_judged_by_the_targets() -> None:
    """Claim: a draft on a CPU beside a target on a GPU gets no expected speedup, because bytes are
    read at other speeds there; it needs no process on the GPU, and its layers have no fixed time.
    Fails if it is judged as if it were on the GPU too."""
    elsewhere = pair(device="cuda", draft_device="cpu", draft_free_bytes=GIB)
    assert not elsewhere.outlook and not elsewhere.problems and not elsewhere.suggestion
    assert "calibrate" in elsewhere.conclusion and "another kind" in elsewhere.notes[-1]
    assert elsewhere.draft_process_bytes == 0 and elsewhere.parts[1].fixed == 0
    beside = pair(device="cuda", draft_device="cuda", draft_free_bytes=GIB)
    assert beside.outlook and beside.draft_process_bytes and beside.parts[1].fixed > 0


def test_the_process_of_a_draft_is_reported_on_a_gpu() -> None:
    """Claim: on a GPU the plan says what a draft in a process of its own takes beside its weights;
    on a CPU, and without a draft, it does not."""
    assert any("a process of its own" in note for note in pair(device="cuda").notes)
    assert not pair(device="cpu").notes and pair(device="cpu").draft_process_bytes == 0
    alone = examine(("big", Config(BIG)), None, tokens=100, device="cuda", free_bytes=GIB)
    assert not alone.notes and alone.draft_process_bytes == 0


def test_fewer_bits_are_the_targets_weights_alone() -> None:
    """Claim: quantising shrinks the target's weights and what a step reads of them, and neither
    caches nor the draft. Fails if the draft is thought to be quantised too."""
    report, plain = pair(bits=8), pair()
    assert report.parts[0] == Part("big", 1000, 800, 800 + 800)
    assert report.parts[1] == plain.parts[1]
    assert report.ratio > plain.ratio


def test_a_rounded_draft_is_counted() -> None:
    """Claim: rounding adds a copy of the weights that a draft's token passes through, and its steps
    read the copy; without a draft the copy is the target's own. Where that is noticeable it is
    suggested, on a CPU and where it is not done already and the copy fits. Fails if the copy takes
    no memory, if its model's own weights are counted twice, or if the target's steps are thought
    to read it, and if the second cache of a target that drafts for itself is forgotten."""
    int4 = ROUNDINGS["int4"]
    plain, rounded = pair(), pair(draft_rounding=int4)
    assert rounded.parts[0] == plain.parts[0]
    small = Part("small", 100 * 4 + 45, 1 * 10 * 4, 80 * 0.5625 + 1 * 10 * 4, rounded_copy=45)
    assert rounded.parts[1] == small
    assert rounded.ratio < plain.ratio
    given: dict[str, Any] = dict(tokens=100, keep=0.1, dtype=torch.float32, free_bytes=GIB)
    own = examine(("big", Config(BIG)), None, draft_rounding=int4, **given)
    copy = own.parts[1]
    assert copy.weights == 450 and copy.step == 800 * 0.5625 + 2 * 10 * 4
    assert len(own.outlook) == len(plain.outlook)
    alone = examine(("big", Config(BIG)), None, **given)
    assert "--draft-quantize int4 rounds the target" in alone.suggestion
    unroundable = Config(replace(BIG, can_be_rounded=False))
    assert not examine(("big", unroundable), None, **given).suggestion
    given["free_bytes"] = int((4800 + copy.weights + copy.cache) / (1 - SPARE_SHARE)) + 1
    assert examine(("big", Config(BIG)), None, **given).suggestion
    given["free_bytes"] -= 2
    assert not examine(("big", Config(BIG)), None, **given).suggestion
    refused = examine(("big", Config(BIG)), None, draft_rounding=int4, **given)
    assert refused.problems  # What is not suggested would indeed not fit.
    assert not own.suggestion and not rounded.suggestion
    assert not examine(("big", Config(BIG)), None, device="cuda", **given).suggestion


def test_a_layer_costs_a_fixed_time_on_a_gpu() -> None:
    """Claim: on a GPU a step costs its bytes and a fixed time for each layer, counted by hand; on a
    CPU its bytes alone. Fails if a small draft's step is thought to cost its bytes: by those a 0.5B
    would take a fifteenth of a 7B, and it takes more than a quarter."""
    layer = 64e-6 * 0.85 * 3.35e12
    report = pair(device="cuda")
    assert [part.fixed for part in report.parts] == pytest.approx([4 * layer, layer])
    assert report.ratio == pytest.approx((360 + layer) / (4000 + 4 * layer))
    assert [part.fixed for part in pair(device="cpu").parts] == [0, 0]
    seven = Footprint(8_290_000_000, 7_070_000_000, 28_672, 28, 152_064)
    half = Footprint(500_000_000, 494_000_000, 12_288, 24, 151_936)
    on_paper = examine(
        ("7B", Config(seven)),
        ("0.5B", Config(half)),
        tokens=12_288,
        device="cuda",
        free_bytes=2**50,
    )
    target, draft = on_paper.parts
    assert target.h100_seconds == pytest.approx(7.0e-3, rel=0.02)
    assert draft.h100_seconds == pytest.approx(1.9e-3, rel=0.02)
    assert draft.step / target.step < 0.075 < 0.25 < on_paper.ratio


def test_a_draft_in_a_process_of_its_own_is_counted() -> None:
    """Claim: a note names what a parallel method takes besides, and where that alone does not fit,
    says that other methods do. Fails if it is forgotten."""
    enough = int((pair().needed + 100) / (1 - SPARE_SHARE))
    roomy, tight = (pair(free_bytes=there, device="cuda") for there in (2 * GIB, enough))
    assert "does not fit" in pair(device="cuda", draft_free_bytes=enough).notes[-1]
    assert roomy.draft_process_bytes == tight.draft_process_bytes == GIB // 2
    assert "process" in roomy.notes[-1] and "does not fit" not in roomy.notes[-1]
    assert not tight.problems and "does not fit" in tight.notes[-1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("decoder", [1, 20, 80, 200, 500, 790])
def test_the_best_chain_is_the_best(device: str, decoder: int) -> None:
    """Claim: at every rate, the chain named is the one with the most tokens a time, over all
    lengths up to well beyond the bound. Fails if a better length is passed over."""
    report = pair(Footprint(1000, decoder, 0, 1, 320), device=device)
    layer = pair_fit.FIXED_BYTES_PER_LAYER[device]
    ratio = (decoder * 4 + layer) / (4000 + 4 * layer)
    assert report.ratio == pytest.approx(ratio)
    assert [each.rate for each in report.outlook] == list(ACCEPTANCE_RATES)
    for each in report.outlook:
        speeds = {}
        for length in range(1, pair_fit.MAX_CHAIN + 1):
            tokens, chance = 1.0, 1.0
            for _ in range(length):
                chance *= each.rate
                tokens += chance
            speeds[length] = tokens / (1 + length * (ratio + COST_PER_ROW[device]))
        assert each.speedup == pytest.approx(max(speeds.values()))
        assert speeds[each.length] == pytest.approx(max(speeds.values()))


def test_better_drafts_are_longer_and_faster() -> None:
    """Claim: the more is accepted, the longer the best chain and the greater the gain; the dearer
    a draft, the shorter and smaller. Fails if a sign is turned round."""
    cheap, dear = pair(), pair(Footprint(1000, 400, 0, 1, 320))
    for report in (cheap, dear):
        assert [e.length for e in report.outlook] == sorted(e.length for e in report.outlook)
        assert [e.speedup for e in report.outlook] == sorted(e.speedup for e in report.outlook)
    for one, other in zip(cheap.outlook, dear.outlook, strict=True):
        assert one.length >= other.length and one.speedup > other.speedup


def verdict(speedup: float) -> str:
    outlook = (Outlook(0.6, 1, 9.0), Outlook(TYPICAL_RATE, 3, speedup), Outlook(0.9, 1, 9.0))
    return Diagnosis((), 0, 0, 1, 0.1, outlook, (), ()).conclusion


@pytest.mark.parametrize(
    ("speedup", "beginning"),
    [
        (1.3, "worth it: about 1.3 times"),
        (1.2999, "little to gain: about 1.3 times"),
        (1.05, "little to gain: about 1.1 times"),
        (1.0499, "not worth it: about 1.0 times"),
        (0.5, "not worth it: about 0.5 times"),
    ],
)
def test_where_the_verdict_turns(speedup: float, beginning: str) -> None:
    """Claim: 1.3 pays, 1.05 hardly, less does not, judged at the typical rate; where it does not
    pay, plain decoding is advised. Fails if another rate decides or a border moves."""
    assert verdict(speedup).startswith(beginning)
    assert ("--method ar" in verdict(speedup)) is (speedup < 1.05)


def test_problems_come_before_gains() -> None:
    """Claim: a pair that cannot work has no outlook, and its verdict is why.
    Fails if a speedup is promised for it."""
    report = pair(problems=["one", "two"])
    assert report.conclusion == "no: one; two" and not report.outlook
    assert pair().conclusion.startswith("worth it")


def test_the_border_of_what_fits() -> None:
    """Claim: a pair fits where it needs no more than what is free less what is kept spare, and
    nothing is said of memory then. Fails if caches or the draft are left out of it."""
    needed = pair().needed
    assert not pair(free_bytes=int(needed / (1 - SPARE_SHARE)) + 1).problems
    (problem,) = pair(free_bytes=int(needed / (1 - SPARE_SHARE)) - 1).problems
    assert problem.startswith("together they need")


@pytest.mark.parametrize(
    ("there", "way"),
    [
        (3000, "--dtype bfloat16"),
        (2500, "--quantize bnb-8bit"),
        (2050, "--quantize bnb-4bit"),
    ],
)
def test_the_advice_would_fit(there: int, way: str) -> None:
    """Claim: what is advised fits when it is done. Fails if the advice does not help."""
    (problem,) = pair(free_bytes=there).problems
    assert f"; {way} would fit" in problem, problem
    done: dict[str, Any] = {
        "--dtype bfloat16": {"dtype": torch.bfloat16},
        "--quantize bnb-8bit": {"bits": 8},
        "--quantize bnb-4bit": {"bits": 4},
    }
    assert not pair(free_bytes=there, **done[way]).problems


def test_a_shorter_prompt_is_advised_where_weights_fit() -> None:
    """Claim: where the cache alone is too large, how much of the prompt would fit is said, and it
    does. Fails if a smaller model is asked for needlessly."""
    (problem,) = pair(dtype=torch.bfloat16, tokens=10_000, free_bytes=10_000).problems
    assert " % of that length would fit" in problem
    share = int(problem.split("a prompt of ")[1].split(" ")[0])
    assert 0 < share < 100
    assert not pair(dtype=torch.bfloat16, tokens=100 * share, free_bytes=10_000).problems


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_done_already_is_not_advised(bits: int) -> None:
    """Claim: a target that is quantised already and does not fit is not advised to be quantised to
    as many bits or more, which cannot help. Fails if it is."""
    for there in range(800, 2200, 50):
        report = pair(free_bytes=there, bits=bits, dtype=torch.bfloat16)
        for problem in report.problems:
            assert "bnb-8bit" not in problem
            assert bits != 4 or "bnb-4bit" not in problem


def test_the_target_alone() -> None:
    """Claim: without a draft only memory is judged. Fails if a gain is made up."""
    report = examine(("big", Config(BIG)), None, tokens=100, free_bytes=GIB)
    assert len(report.parts) == 1 and not report.outlook and not report.problems
    assert report.ratio == 1.0
    assert "draft" in report.conclusion and "worth" not in report.conclusion


def test_json_has_what_is_shown() -> None:
    """Claim: the JSON has the verdict, the need, and every number of the table.
    Fails if a field is renamed for those who read it."""
    report = pair(notes=["a note"])
    fields = report.json()
    assert fields["verdict"] == report.conclusion and fields["needed"] == report.needed
    assert fields["notes"][0] == "a note" and fields["problems"] == ()
    assert [each["rate"] for each in fields["outlook"]] == list(ACCEPTANCE_RATES)
    assert [each["name"] for each in fields["parts"]] == ["big", "small"]
