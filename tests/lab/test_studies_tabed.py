"""TABED's figures hold what real runs do, and what Algorithm 1 gives by plain loops over laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from remembering import Remembering
from torch import Tensor

from lab import draw
from lab.studies import Experiment, step_timing, tabed
from lab.studies.experiment import AnsweredClip
from saccade.core.result import RoundRecord
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, chain
from saccade.drafting.shapes import cost_measurement
from saccade.inputs.captions import SHAPES, captioner
from saccade.model.session import Session

GAMMA = 5
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def experiment(pair) -> Experiment:
    return Remembering()


def naive(experiment: Experiment) -> Any:
    return experiment.drafts["never saw pruning"]


# -- the weights that would have been right -----------------------------------------------------


@pytest.fixture(scope="module")
def shots(experiment: Experiment) -> list[AnsweredClip]:
    return [shot for _, shot in tabed._first_and_second_answers(experiment)]


@pytest.fixture(scope="module")
def shaded(experiment: Experiment) -> dict[str, Any]:
    return tabed.measure_weights(experiment)


def fits(
    accepted: Sequence[Sequence[bool]],
    rounds: Sequence[RoundRecord],
    column: Callable[[RoundRecord], int],
) -> bool:
    """Whether what a run accepted is shaded at its weights, and what it refused is not."""
    place = 1  # the prefill's own token is judged by no weights
    for each in rounds:
        taken, at = len(each.accepted), column(each)
        if not all(accepted[place + i][at] for i in range(taken)):
            return False
        if each.kind == "recovered" and accepted[place + taken][at]:
            return False
        place += len(each.emitted)
    return place == len(accepted)


@pytest.mark.extra
def test_what_is_shaded_is_what_real_blocks_accept(experiment, shaded, shots):
    """Claim: in both panels M's, T's and MT's weights and MT*'s path are shaded exactly where runs
    of these methods accept a token, and not where they refuse one. Control: with M and T exchanged
    they are not. Fails if views, weights or tokens are mixed up or shifted."""
    fixed = {"M": ("sd", 20), "T": ("sd/view=text", 0), "MT": ("tabed-mt", 10)}
    exchanged = []
    for panel, shot in zip(shaded["panels"].values(), shots, strict=True):
        accepted, weights = panel["accepted"], panel["weights"]
        assert len(accepted) == len(shot.ids) and {len(row) for row in accepted} == {21}
        for name, (method, column) in fixed.items():
            ran = experiment.answer(method, shot.clip, shot.inputs, draft=naive(experiment))
            assert ran.ids == shot.ids
            assert fits(accepted, ran.forwards, lambda each, column=column: column)
            back = [row[::-1] for row in accepted]
            exchanged.append(fits(back, ran.forwards, lambda each, column=column: column))
            assert weights[name] == [column / 20] * len(shot.ids)
        ran = experiment.answer("tabed", shot.clip, shot.inputs, draft=naive(experiment))
        assert fits(accepted, ran.forwards, lambda each: round(20 * each.note[0]))
        own = [each.note[0] for each in ran.forwards for _ in each.emitted]
        assert weights["MT*"] == [own[0], *own]
    assert not all(exchanged)


@pytest.mark.extra
def test_the_titles_count_what_is_shaded(shaded):
    """Claim: the shares in a panel's title are of its own tokens, along each line and at any
    weight. Fails if a share is another line's."""
    for title, panel in shaded["panels"].items():
        count = len(panel["accepted"])
        for name, line in panel["weights"].items():
            hits = [row[round(20 * at)] for row, at in zip(panel["accepted"], line, strict=True)]
            assert f"{name} {hits.count(True) / count:.2f}" in title
        some = sum(True in row for row in panel["accepted"])
        assert f"some weight {some / count:.2f}" in title


@pytest.mark.extra
def test_the_second_panel_is_a_second_turn(experiment, shots):
    """Claim: its prompt holds the target's own first answer and the next question, of the clip
    whose next answer is the longest. Fails if the history is left out or another clip's."""
    prompt = experiment.target.tokenizer.decode(shots[1].inputs["input_ids"][0])
    clip, first = experiment.inputs(shots[1].number)
    assert (shots[1].clip.frames == clip.frames).all()
    talks = [
        tabed.dialogues.conversation(tabed.agreement.unseen_clip(i, 64)[0], "chat", i)
        for i in range(experiment.clips)
    ]
    turns = max(talks, key=lambda talk: len(talk[1].answer))
    question = tabed.ask(experiment.target, turns[0].question, clips=[clip])
    reply = experiment.target.tokenizer.decode(experiment.answer("ar", clip, question).ids)
    assert prompt.index(turns[0].question) < prompt.index(reply) < prompt.index(turns[1].question)


# -- Algorithm 1 again, over laws computed once -------------------------------------------------


@pytest.fixture(scope="module")
def laws(experiment: Experiment) -> list[tuple[tuple[int, ...], Tensor, dict[str, Tensor]]]:
    """Of each clip: the target's answer, its log-laws there, and those of the draft's views."""
    clip_laws = []
    for number in range(experiment.clips):
        shot = experiment.answered_clip(number)
        backbone = experiment.target.backbone
        session = Session(backbone, [Sampling()])
        session.prefill(backbone.prompts(shot.inputs))
        scores = session.score({0: chain(shot.ids[:-1])})[0]
        p = torch.stack([scores.logits(node) for node in range(ROOT, len(shot.ids) - 1)])
        ((caption,),) = captioner(SHAPES, [list(shot.clip.frames)])(shot.inputs)
        words = {
            "newline": (tuple(experiment.target.tokenizer.encode("\n")),),
            "caption": (tuple(experiment.target.tokenizer.encode(f"image: {caption}")),),
        }
        variant = replace(shot, guide=replace(shot.guide, replacement_texts=words))
        q = {
            view: experiment.draft_logits(variant, view, naive(experiment)).double().log_softmax(-1)
            for view in ("full", "text", "caption", "pooled")
        }
        p[:, q["full"][0].isneginf()] = float("-inf")  # placeholders
        clip_laws.append((shot.ids, p.double().log_softmax(-1), q))
    return clip_laws


def kl(p: Tensor, q: Tensor) -> float:
    some = p > -math.inf
    return float((p.exp() * (p - q))[some].sum())


def tvd(p: Tensor, q: Tensor) -> float:
    return float((p.exp() - q.exp()).abs().sum()) / 2


def misses(p: Tensor, q: Tensor) -> float:
    return float(int(p.argmax()) != int(q.argmax()))


def mixed(weights: Sequence[float], q: Sequence[Tensor]) -> Tensor:
    return torch.stack([w * law.exp() for w, law in zip(weights, q, strict=True)]).sum(0).log()


Told = list[tuple[Tensor, list[Tensor]]]  # p and the views' q of every judged position


def best(past: Told, *distances: Any) -> list[float]:
    """MT*."""
    if not past:
        return [0.5, 0.5]
    tried = [[1 - j / 10, j / 10] for j in range(11)]
    return min(tried, key=lambda w: [sum(d(p, mixed(w, q)) for p, q in past) for d in distances])


def inverse(past: Told, distance: Any, printed: bool = False) -> list[float]:
    """MTCP*: in proportion to 1/e, or its softmax as printed."""
    if not past:
        return [0.25] * 4
    parts = [1 / sum(distance(p, q[i]) for p, q in past) for i in range(4)]
    if printed:
        parts = [math.exp(part - max(parts)) for part in parts]
    return [part / sum(parts) for part in parts]


RULES: dict[str, tuple[tuple[str, ...], Callable[[Told], list[float]]]] = {
    "MT*, KL": (("full", "text"), lambda past: best(past, kl)),
    "MT*, TVD": (("full", "text"), lambda past: best(past, tvd)),
    "MT*, matches": (("full", "text"), lambda past: best(past, misses, kl)),
    "MTCP*, KL": (("full", "text", "caption", "pooled"), lambda past: inverse(past, kl)),
    "MTCP*, TVD": (("full", "text", "caption", "pooled"), lambda past: inverse(past, tvd)),
    "MTCP*, printed": (("full", "text", "caption", "pooled"), lambda past: inverse(past, kl, True)),
    "MT": (("full", "text"), lambda past: [0.5, 0.5]),
    "MTCP": (("full", "text", "caption", "pooled"), lambda past: [0.25] * 4),
    "M": (("full",), lambda past: [1.0]),
    "T": (("text",), lambda past: [1.0]),
}
HISTORY = {"h = 1": 1, "h = 4": 4, "h = 16": 16, "h = all": 10**9, "no weights learnt": 1}


def rounds(
    own: tuple[tuple[int, ...], Tensor, dict[str, Tensor]], rule: str, window: int
) -> Iterator[tuple[list[float], int]]:
    """(weights, tokens emitted) of every block of five."""
    ids, p, q = own
    views, weigh = RULES[rule]
    past: Told = []
    at = 1  # the prefill tells the first token
    while at < len(ids):
        weights = weigh(past[-window:])
        taken = 0
        while taken < GAMMA and at + taken < len(ids):
            if (
                int(mixed(weights, [q[view][at + taken] for view in views]).argmax())
                != ids[at + taken]
            ):
                break
            taken += 1
        # the draft never looked behind its last token
        for place in range(at, min(at + taken + 1, at + GAMMA, len(ids))):
            past.append((p[place], [q[view][place] for view in views]))
        yield weights, min(taken + 1, len(ids) - at)
        at += taken + 1


@pytest.mark.slow
def test_the_windows_table_is_algorithm_1(experiment, laws):
    """Claim: tau of every rule and window is that of Algorithm 1 by plain loops over the laws along
    the target's answers, with its mean over clips in the table. Control: the windows do not all
    give the same. Fails if a name stands for another rule, window or draft."""
    data = tabed.measure_windows(experiment)
    assert set(data["rows"]) == set(RULES)
    assert list(data["rows"]["MT*, KL"]) == ["h = 1", "h = 4", "h = 16", "h = all"]
    assert "never saw pruning" in data["x"]
    each = iter(data["clips_tau"].values())
    for rule, row in data["rows"].items():
        for name, (value, low, high) in row.items():
            blocks = [list(rounds(own, rule, HISTORY[name])) for own in laws]
            taus = [(len(law[0]) - 1) / len(own) for law, own in zip(laws, blocks, strict=True)]
            assert next(each) == [round(tau, 4) for tau in taus], (rule, name)
            assert math.isclose(value, mean(taus))
            assert min(taus) - 1e-9 <= low <= value <= high <= max(taus) + 1e-9
    assert len({tuple(own) for own in data["clips_tau"].values()}) > 2
    drawn = draw.bars(data).axes[0]
    middles = [value[0] for row in data["rows"].values() for value in row.values()]
    assert [bar.get_width() for bar in drawn.patches] == middles


@pytest.mark.slow
def test_drift_is_the_weights_of_algorithm_1(experiment, laws):
    """Claim: by window, the heaviest view's weight is the mean over clips of that in Algorithm 1,
    as far as all clips go; the other panels are the first clip's own weights; the line to compare
    with is at 1 of 4 views. Control: another window's are not. Fails if means are of other rounds
    or a window is another's."""
    data = tabed.measure_drift(experiment)
    heaviest, *own = data["panels"].values()
    runs = {
        name: [[w for w, _ in rounds(clip, "MTCP*, printed", HISTORY[name])] for clip in laws]
        for name in tabed.WINDOWS
    }
    for name, clips in runs.items():
        slow = [mean(map(max, weights)) for weights in zip(*clips, strict=False)]
        assert heaviest[name] == pytest.approx(slow, abs=2e-5)
    assert heaviest["h = 1"] != pytest.approx(heaviest["h = all"], abs=2e-5)
    for panel, name in zip(own, ("h = 1", "h = all"), strict=True):
        for i, view in enumerate(("full", "text", "caption", "pooled")):
            assert panel[view] == pytest.approx([w[i] for w in runs[name][0]], abs=2e-5)
    for panel in data["panels"].values():
        assert set(panel["equal"]) == {0.25}
    drawn = draw.lines(data)
    assert [len(axis.get_legend().get_texts()) for axis in drawn.axes] == [5, 5, 5]
    for axis, panel in zip(drawn.axes, data["panels"].values(), strict=True):
        assert [list(line.get_ydata()) for line in axis.lines] == list(panel.values())
        marks = {line.get_label(): line.get_marker() for line in axis.lines}
        assert [name for name, mark in marks.items() if not mark] == ["equal"]


# -- what steps and stages cost -----------------------------------------------------------------


def test_latency_is_of_the_steps_it_names(experiment, monkeypatch):
    """Claim: T_q is the median of steps of one token for B requests by the draft, T_p of gamma
    tokens for one by the target, over caches filled with S keys, taking turns; their ratio is to
    T_p of one token. Fails if a step has other rows, requests or keys, or a warm-up is counted."""
    steps = []

    class Told:
        def __init__(self, device: Any) -> None: ...

        def elapsed(self) -> float:
            return steps[-1][-1]

    def score(session: Session, trees: Any) -> Any:
        (rows,) = {len(tree) + 1 for tree in trees.values()}
        (keys,) = {session.requests[i].cache.length for i in trees}
        assert all(session.requests[i].pending == [0] for i in trees)
        for request in session.requests.values():
            assert not request.cache.keys[-1][:, :keys].isnan().any()
        who = session.backbone is experiment.target.backbone
        before = sum(step[:4] == (who, len(trees), rows, keys) for step in steps)
        slow = 100 if before < step_timing.WARM_UP else before % 3  # a warm-up must not be counted
        steps.append((who, len(trees), rows, keys, keys + 10 * rows + 3 * len(trees) + who + slow))

    monkeypatch.setattr(cost_measurement, "Clock", Told)
    monkeypatch.setattr(tabed, "CONTEXTS", (32, 64))
    monkeypatch.setattr(Session, "score", score)
    data = tabed.measure_latency(experiment)
    turn = [(False, b, 1) for b in (1, 2, 3, 4)]
    assert [step[:3] for step in steps[:8]] == turn * 2
    t_q, t_p, ratio = data["panels"].values()

    def slow(*way: Any) -> float:
        own = [step[4] for step in steps if step[:4] == way][step_timing.WARM_UP :]
        assert len(own) == step_timing.REPEATS
        return 1e3 * median(own)

    for at, keys in enumerate((32, 64)):
        assert [line[at][0] for line in t_q.values()] == [
            slow(False, b, 1, keys) for b in (1, 2, 3, 4)
        ]
        assert [line[at][0] for line in t_p.values()] == [
            slow(True, 1, g, keys) for g in (1, 3, 5, 7)
        ]
        assert [line[at] for line in ratio.values()] == [
            slow(False, b, 1, keys) / slow(True, 1, 1, keys) for b in (1, 2, 3, 4)
        ]
    drawn = draw.lines(data)
    for axis, panel in zip(drawn.axes, data["panels"].values(), strict=True):
        names = [text.get_text() for text in axis.get_legend().get_texts()]
        assert names == list(panel)


def test_a_step_really_runs(experiment, monkeypatch):
    """Claim: without the stand-ins of the test above, forwards take time. Fails if sessions filled
    by hand cannot be scored."""
    monkeypatch.setattr(tabed, "CONTEXTS", (32,))
    monkeypatch.setattr(step_timing, "REPEATS", 1)
    for panel in tabed.measure_latency(experiment)["panels"].values():
        for ((first, *_),) in ([np.atleast_1d(value) for value in line] for line in panel.values()):
            assert first > 0


@pytest.mark.slow
def test_stages_are_those_of_runs_with_more_and_more_pictures(experiment, monkeypatch):
    """Claim: a row a number of pictures, with the prompts' true visual tokens and the mean seconds
    of each stage over the clips, the warm-up left out; every answer has all its tokens. Fails if a
    stage is another's, an answer ends early or pictures do not grow."""
    calls = []
    real = tabed.run

    def run(*args: Any, **settings: Any) -> Any:
        result = real(*args, **settings)
        times = SimpleNamespace(
            vision=1.0 + len(calls), prefill=2.0 * len(calls), decode=100.0 - len(calls)
        )
        calls.append((len(result.ids), result.visual_tokens, times))
        return replace(result, timings=times)

    monkeypatch.setattr(tabed, "run", run)
    data = tabed.measure_stages(experiment)
    assert [length for length, _, _ in calls] == [24] * 15
    assert [seen for _, seen, _ in calls] == [16, 32, 48, 64, 80] * 3
    for i, (row, parts) in enumerate(data["rows"].items()):
        assert row.startswith(f"{i + 1} picture") and f"({16 * (i + 1)} tokens)" in row
        own = [calls[5 + i][2], calls[10 + i][2]]
        assert parts["vision"][0] == mean(each.vision for each in own)
        assert parts["prefill"][0] == mean(each.prefill for each in own)
        assert parts["decoding"][0] == mean(each.decode for each in own)
    ends = {row: sum(value[0] for value in parts.values()) for row, parts in data["rows"].items()}
    bars = draw.bars(data).axes[0].patches
    assert sorted({bar.get_x() + bar.get_width() for bar in bars})[-5:] == sorted(ends.values())


@pytest.mark.parametrize("tokens, shape", [(16, (112, 112)), (512, (448, 896))])
def test_a_picture_has_as_many_tokens_as_asked_for(tokens, shape):
    """Claim: 28 by 28 pixels a token. Fails for sizes that are no square."""
    assert tabed.unseen_picture(0, tokens).shape == (*shape, 3)
    assert not (tabed.unseen_picture(0, tokens) == tabed.unseen_picture(1, tokens)).all()


# -- drawing ------------------------------------------------------------------------------------


@pytest.mark.extra
def test_shaded_draws_the_numbers(shaded):
    """Claim: a panel each, its picture dark exactly at accepted weights with candidates going up,
    its lines through the weights. Fails if tokens and candidates are exchanged or upside down."""
    drawn = draw.shaded_weights(shaded)
    for axis, (title, panel) in zip(drawn.axes, shaded["panels"].items(), strict=True):
        assert axis.get_title() == title
        (image,) = axis.images
        dark = np.asarray(image.get_array()) < 1
        assert image.origin == "lower"
        assert (dark.T == np.array(panel["accepted"])).all()
        lines = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
        assert lines == panel["weights"]
