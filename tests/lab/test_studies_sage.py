"""SAGE's figures hold what real runs do; entropy and its correlation again by plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from remembering import Remembering

from lab import draw
from lab.studies import Experiment, sage
from saccade.core.errors import OptionError
from saccade.core.result import Result, RoundRecord, Timings

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def experiment(pair) -> Experiment:
    return Remembering()


# -- entropy ------------------------------------------------------------------------------------


def slow_entropies(logits: torch.Tensor) -> list[float]:
    """Eq. 7-8 by loops."""
    entropies = []
    for row in logits.double().tolist():
        best = sorted(row)[-10:]
        parts = [math.exp(each - best[-1]) for each in best]
        law = [part / sum(parts) for part in parts]
        entropies.append(-sum(each * math.log(each) for each in law if each))
    return entropies


def slow_correlation(trace: Sequence[float], lag: int) -> float:
    pairs = list(zip(trace[:-lag], trace[lag:], strict=True))
    x, y = (mean(side) for side in zip(*pairs, strict=True))
    across = sum((a - x) * (b - y) for a, b in pairs)
    spread = math.sqrt(sum((a - x) ** 2 for a, _ in pairs) * sum((b - y) ** 2 for _, b in pairs))
    return across / spread


@pytest.mark.extra
def test_correlations_are_pearsons_of_the_drafts_entropy(experiment, monkeypatch):
    """Claim: at each lag, the mean over the clips with long enough answers of Pearson's correlation
    of SAGE's H along the target's answer, for both drafts and both kinds of question. Control: the
    lines of drafts, kinds and lags differ. Fails if a lag is off by one or a law another's."""
    monkeypatch.setattr(sage, "LAGS", 4)
    monkeypatch.setattr(sage, "MIN_TOKENS", 12)
    data = sage.measure_entropy(experiment)
    assert data["at"] == [1, 2, 3, 4]
    seen = []
    for (label, panel), task in zip(data["panels"].items(), ("describe", "events"), strict=True):
        shots = [
            shot
            for shot in (
                sage._answered_clip(experiment, task, number) for number in range(experiment.clips)
            )
            if len(shot.ids) >= 12
        ]
        assert label.endswith(f"({len(shots)})")
        for name, draft in experiment.drafts.items():
            traces = [
                slow_entropies(experiment.draft_logits(shot, "specvlm/keep=0.1", draft))
                for shot in shots
            ]
            slow = [mean(slow_correlation(trace, lag) for trace in traces) for lag in data["at"]]
            line = [value[0] for value in panel[f"a draft that {name}"]]
            assert line == pytest.approx(slow, abs=1e-6)
            seen += line
        band = [
            1.96 * math.sqrt(sum(1 / (len(shot.ids) - lag) for shot in shots)) / len(shots)
            for lag in data["at"]
        ]
        assert panel["white noise, 97.5 %"] == pytest.approx(band)
        assert panel["white noise, 2.5 %"] == pytest.approx([-most for most in band])
    assert len({round(value, 6) for value in seen}) == len(seen)


@pytest.mark.extra
def test_the_events_question_is_about_events(experiment):
    """Claim: the second panel's question is another than the first's, of the same clip. Fails if
    both panels show captions."""
    one, other = (sage._answered_clip(experiment, task, 1) for task in ("describe", "events"))
    assert (one.clip.frames == other.clip.frames).all() and one.ids != other.ids
    scene = sage.agreement.unseen_clip(1, 64)[0]
    prompt = experiment.target.tokenizer.decode(other.inputs["input_ids"][0])
    assert sage.dialogues.conversation(scene, "events", 1)[0].question in prompt


def test_the_band_holds_white_noise_and_nothing_that_hangs_together():
    """Claim: of white noise about 95 % of the means over clips lie within the band, and a series in
    which half of each value is the last one's lies above it. Fails with the band of a single clip
    (all lie within) or of all clips' tokens counted twice (83 %)."""
    lengths = (80, 120, 200, 60)
    generator = np.random.default_rng(0)
    limit = sage.white_noise_band(lengths)[0]

    def means(hold: float) -> np.ndarray:
        averages = np.empty(600)
        for i in range(len(averages)):
            traces = []
            for n in lengths:
                noise = generator.normal(size=n)
                for t in range(1, n):
                    noise[t] += hold * noise[t - 1]
                traces.append(np.corrcoef(noise[:-1], noise[1:])[0, 1])
            averages[i] = np.mean(traces)
        return averages

    inside = (np.abs(means(0.0)) < limit).mean()
    assert 0.92 < inside < 0.98
    assert (means(0.5) > limit).mean() > 0.99


@pytest.mark.extra
def test_answers_too_short_for_the_lags_are_an_error(experiment):
    """Claim: without an answer of 40 tokens there is no figure but a sentence. Fails on an empty
    picture."""
    with pytest.raises(OptionError, match="no answer has 40 tokens"):
        sage.measure_entropy(experiment)


def test_entropy_is_drawn_between_thin_lines():
    """Claim: both drafts' lines have marks and intervals, the band's have neither, and all go
    through the numbers. Fails if the band is drawn as a third draft."""
    line = [[0.5, 0.4, 0.6], [0.3, 0.2, 0.4]]
    names = ["white noise, 97.5 %", "white noise, 2.5 %"]
    panel = {"a": line, "b": line, names[0]: [0.1, 0.1], names[1]: [-0.1, -0.1]}
    axis = draw.lines(
        {"x": "lag", "at": [1, 2], "linear": True, "guides": names, "panels": {"r": panel}}
    ).axes[0]
    band_lines = {each.get_label(): each for each in axis.lines if each.get_label() in names}
    assert {each.get_marker() for each in band_lines.values()} == {""}
    assert [list(band_lines[name].get_ydata()) for name in names] == [[0.1, 0.1], [-0.1, -0.1]]
    marked = [each for each in axis.lines if each.get_marker() in ("o", "s")]
    assert [list(each.get_ydata()) for each in marked] == [[0.5, 0.3]] * 2


# -- races --------------------------------------------------------------------------------------


SLOW = {"ar": 8.0, "sd": 4.0, "specvlm": 2.0, "sage": 1.0, f"{sage.CALIBRATED_SAGE}/keep=0.05": 0.2}


@pytest.fixture
def ran(monkeypatch) -> list[tuple[Any, ...]]:
    """From now on an experiment only notes what it is asked for, and says how long that took."""
    calls: list[tuple[Any, ...]] = []

    def answer(
        experiment: Experiment, method: str, clip: Any, inputs: Any, *, draft=None, **settings: Any
    ):
        calls.append((method, draft, settings))
        length = settings.get("max_new_tokens", experiment.tokens)
        hard = float(clip.frames.mean())  # another of every clip
        decode = hard * length * SLOW.get(method, SLOW[method.split("/")[0]])
        emitted = 2 + list(SLOW).index(method.split("/")[0])
        rounds = [RoundRecord((7,), (-1,), (7,) * (emitted - 1), 7, "bonus", 0.0, 0.0)] * 3
        timings = Timings(decode=decode, total=9 * decode)
        return Result((7,) * length, "", method, "length", tuple(rounds), timings, 1, 1, 1)

    monkeypatch.setattr(Remembering, "answer", answer)
    return calls


def test_length_races_at_every_length(experiment, ran, monkeypatch):
    """Claim: at 1/16, 1/8, 1/4, 1/2 and all of the tokens, in answers that do not end, tau and
    speed over ar are those of the race at that length, by method. Fails if lengths or methods are
    exchanged, or a speed is of the whole answer."""
    monkeypatch.setattr(experiment, "tokens", 32)
    data = sage.measure_length(experiment)
    assert data["at"] == [2, 4, 8, 16, 32]
    assert {settings["eos_token_id"] for *_, settings in ran} == {1024}
    counted = [settings["max_new_tokens"] for *_, settings in ran]
    assert [counted.count(length) for length in (2, 4, 8, 16, 32)] == [4 * experiment.clips] * 5
    tau, speed = data["panels"].values()
    assert {name: [value[0] for value in line] for name, line in tau.items()} == {
        "sd": [3.0] * 5, "specvlm": [4.0] * 5, "sage": [5.0] * 5
    }  # fmt: skip
    assert speed.pop("ar") == [1.0] * 5
    assert {name: [round(value[0], 9) for value in line] for name, line in speed.items()} == {
        "sd": [2.0] * 5, "specvlm": [4.0] * 5, "sage": [8.0] * 5
    }  # fmt: skip
    drawn = draw.lines(data)
    for axis, panel in zip(drawn.axes, (tau, speed), strict=True):
        middles = [line for line in axis.lines if line.get_marker() in ("o", "s", "D")]
        assert [list(line.get_ydata()) for line in middles] == [
            [value[0] for value in line] for line in panel.values()
        ]


@pytest.mark.slow
def test_answers_really_go_on_past_their_end(experiment):
    """Claim: with the end of text ignored an answer has as many tokens as asked for, begins as the
    one that ends by itself, and its own end is told. Control: without it, it is shorter."""
    limit = {"max_new_tokens": 160}
    own, endless = experiment.run("ar", **limit), experiment.run("ar", **limit, eos_token_id=1024)
    drafted = experiment.run("sage", **limit, eos_token_id=1024)
    assert len(own.ids) < 160 == len(endless.ids)
    assert endless.ids[: len(own.ids)] == own.ids and drafted.ids == endless.ids
    assert sage.tokens_until_end(endless.ids, own.ids[-1:]) == len(own.ids)
    assert sage.tokens_until_end(endless.ids, []) is None


def test_pruning_races_each_draft_by_itself(experiment, ran):
    """Claim: a line a draft, at the shares of Table 5, speed over ar in the race of the same draft.
    Fails if shares are exchanged or a race is the other draft's."""
    data = sage.measure_pruning(experiment)
    assert data["at"] == [1.0, 0.7, 0.4, 0.3, 0.2, 0.1, 0.05]
    shares = ("1", "0.7", "0.4", "0.3", "0.2", "0.1", "0.05")
    names = ["ar", *(f"sage/lambda=0.02/keep={share}" for share in shares)]
    assert [name for name, *_ in ran[:8]] == names
    assert [draft for _, draft, _ in ran] == [
        draft for draft in experiment.drafts.values() for _ in range(8 * (1 + experiment.clips))
    ]
    for name in experiment.drafts:
        line = data["panels"][sage.SPEED][f"a draft that {name}"]
        assert [round(value[0], 9) for value in line] == [8.0] * 6 + [40.0]


@pytest.mark.slow
def test_real_shares_are_real_runs(experiment, monkeypatch):
    """Claim: tau of a share is that of runs of SAGE with it, by the draft named. Fails if ``keep``
    is not passed on."""
    monkeypatch.setattr(sage, "KEEPS", (1.0, 0.05))
    data = sage.measure_pruning(experiment)
    for name, draft in experiment.drafts.items():
        for at, keep in enumerate(("1", "0.05")):
            runs = [
                experiment.run(f"sage/keep={keep}", i, draft=draft) for i in range(experiment.clips)
            ]
            slow = mean(own.tau or 0.0 for own in runs)
            assert data["panels"][sage.TAU][f"a draft that {name}"][at][0] == pytest.approx(slow)
            assert {own.draft_visual_tokens for own in runs} == {64 if at == 0 else 3}


# -- planned or live ----------------------------------------------------------------------------


def deepest(parents: Sequence[int]) -> int:
    depth = 0
    for node in range(len(parents)):
        steps = 1
        while parents[node] != -1:
            node, steps = parents[node], steps + 1
        depth = max(depth, steps)
    return depth


@pytest.mark.slow
def test_plan_is_of_real_runs(experiment):
    """Claim: tau clip by clip, levels and nodes a round are those of runs of the methods named, by
    the draft in the title; chains have their lengths. Control: live and planned trees are not the
    same. Fails if a row is another method's."""
    data = sage.measure_plans(experiment)
    assert list(data["panels"]) == [f"a draft that {name}" for name in experiment.drafts]
    for (what, draft), panel in zip(
        experiment.drafts.items(), data["panels"].values(), strict=True
    ):
        rows = list(panel)
        assert "chain of 5\n(5.0 levels, 5.0 nodes)" in rows
        assert "static tree (SpecVLM's)\n(5.0 levels, 25.0 nodes)" in rows
        for (row, value), (name, method) in zip(panel.items(), sage.PLANS.items(), strict=True):
            runs = [
                experiment.run(method, number, draft=draft) for number in range(experiment.clips)
            ]
            taus = [own.tau or 0.0 for own in runs]
            assert data["clips_tau"][what][method] == [round(tau, 4) for tau in taus]
            assert value["tau"][0] == pytest.approx(mean(taus))
            trees = [each.parents for own in runs for each in own.forwards]
            deep, nodes = mean(map(deepest, trees)), mean(map(len, trees))
            assert row == f"{name}\n({deep:.1f} levels, {nodes:.1f} nodes)"
        assert rows[0].split("\n")[1] != rows[1].split("\n")[1]
    axes = draw.bars(data).axes
    assert [axis.get_title() for axis in axes] == list(data["panels"])
    for axis, panel in zip(axes, data["panels"].values(), strict=True):
        assert [bar.get_width() for bar in axis.patches] == [
            value["tau"][0] for value in panel.values()
        ]
