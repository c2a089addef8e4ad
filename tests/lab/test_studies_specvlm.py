"""SpecVLM's figures: tau again by real runs of chains, attention again from Hugging Face's modules,
the rest by plain loops over what was recorded."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from remembering import Remembering

from lab import draw
from lab.studies import Experiment, cases, specvlm
from lab.studies.experiment import CHAIN_LENGTH, RANDOM_DRAWS
from lab.training import agreement

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def experiment(pair) -> Experiment:
    return Remembering()


def ran(experiment: Experiment, view: str, draft: Any) -> list[float]:
    """Tau of real chains of five, clip by clip; at random the mean of the draws."""
    ways = [view]
    if view.startswith("random/"):
        ways = [f"{view}/draw={number}" for number in range(RANDOM_DRAWS)]
    names = [f"sd/shape=chain-5/view={way}" for way in ways]
    return [
        mean(experiment.run(name, number, draft=draft).tau or 0.0 for name in names)
        for number in range(experiment.clips)
    ]


# -- tau ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tau_by_view_is_that_of_real_runs(experiment):
    """Claim: what one forward along the target's answer says of a chain of five is what runs of it
    give, for both drafts and views that keep all, a tenth or nothing. Control: the views do not
    all give the same. Fails if the count of rounds or the last, cut one differs."""
    views = ("full", "specvlm/keep=0.1", "random/keep=0.02", "none")
    for draft in experiment.drafts.values():
        taus_by_view = experiment.taus_by_view(views, draft)
        assert taus_by_view == {view: pytest.approx(ran(experiment, view, draft)) for view in views}
        assert len({tuple(taus) for taus in taus_by_view.values()}) > 1


@pytest.mark.slow
def test_sensitivity_is_by_the_share_pruned(experiment, monkeypatch):
    """Claim: each draft's tau, and that of the target drafting for itself, where nothing, most and
    all of the video is pruned at random. Control: unpruned self-drafting accepts everything, so
    its tau is that of full rounds. Fails if pruned and kept shares are exchanged."""
    monkeypatch.setattr(specvlm, "PRUNED", (0.0, 0.9, 1.0))
    data = specvlm.measure_random_pruning(experiment)
    assert data["at"] == [0.0, 0.9, 1.0]
    (panel,) = data["panels"].values()
    views = ("full", "random/keep=0.1", "none")
    for name, draft in experiment.drafts.items():
        slow = [mean(ran(experiment, view, draft)) for view in views]
        assert [value[0] for value in panel[f"a smaller draft that {name}"]] == pytest.approx(slow)
    own = [
        mean(
            experiment.run(f"sd/drafter=self/view={view}", number).tau or 0.0
            for number in range(experiment.clips)
        )
        for view in views
    ]
    assert [value[0] for value in panel["the target itself"]] == pytest.approx(own)
    lengths = [len(experiment.answered_clip(i).ids) - 1 for i in range(experiment.clips)]
    assert own[0] == mean(length / math.ceil(length / 6) for length in lengths)


@pytest.mark.slow
def test_criteria_name_their_views_and_shares(experiment, monkeypatch):
    """Claim: a line a criterion, in each draft's panel, through the mean tau of real runs that keep
    what is not pruned, with every clip's own tau beside. Fails if a line is another criterion's."""
    monkeypatch.setattr(specvlm, "PRUNED", (0.0, 0.5, 0.9, 1.0))
    monkeypatch.setattr(specvlm, "CRITERIA", ("specvlm", "frames"))
    data = specvlm.measure_criteria(experiment)
    assert data["at"] == [0.5, 0.9]
    for (name, draft), panel in zip(
        experiment.drafts.items(), data["panels"].values(), strict=True
    ):
        for view, line in panel.items():
            for at, keep in enumerate(("0.50", "0.10")):
                taus = ran(experiment, f"{view}/keep={keep}", draft)
                assert line[at][0] == pytest.approx(mean(taus))
                assert min(taus) - 1e-9 <= line[at][1] <= line[at][2] <= max(taus) + 1e-9
                assert data["clips_tau"][name][f"{view}/keep={keep}"] == [
                    round(tau, 4) for tau in taus
                ]


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", ("measure_windows", "measure_redundancy"))
def test_choices_are_of_a_tenth(experiment, name):
    """Claim: every row's bars are the mean tau of its view at a tenth, by each draft. Fails if a
    row or a draft is another's, or the share is."""
    data = getattr(specvlm, name)(experiment)
    for view, row in data["rows"].items():
        for what, draft in experiment.drafts.items():
            kept = experiment.taus_by_view([f"{view}/keep=0.1"], draft)[f"{view}/keep=0.1"]
            assert row[f"a draft that {what}"][0] == pytest.approx(mean(kept))
    drawn = draw.bars(data).axes[0].patches
    assert sorted(bar.get_width() for bar in drawn) == sorted(
        value[0] for row in data["rows"].values() for value in row.values()
    )


@pytest.mark.slow
def test_stages_are_differences_on_the_same_clips(experiment):
    """Claim: a bar is the mean over clips of tau without a stage less tau with both. Fails if it is
    a ratio, the other way round or of sorted clips."""
    data = specvlm.measure_stages(experiment)
    views = ("attention/keep=0.1", "uniform/keep=0.1", "specvlm/keep=0.1/lambda=0.5")
    for (_, row), view in zip(data["rows"].items(), views, strict=True):
        for what, draft in experiment.drafts.items():
            whole = ran(experiment, f"{specvlm.CALIBRATED}/keep=0.1", draft)
            part = ran(experiment, view, draft)
            lost = sum(b - a for a, b in zip(whole, part, strict=True)) / experiment.clips
            assert row[f"a draft that {what}"][0] == pytest.approx(lost)


@pytest.mark.extra
def test_lambda_is_calibrated_on_clips_of_their_own(experiment, monkeypatch):
    """Claim: the lambda of the best mean tau over both drafts, never 0, on clips that no figure
    asks for; and what the other figures judge by is what the stored calibration found. Fails where
    it is found on the clips it is judged by, or a lambda was written by hand."""
    monkeypatch.setattr(specvlm, "LAMBDAS", (0.0, 0.05, 0.5))
    clip_numbers = []
    monkeypatch.setattr(
        experiment,
        "answered_clip",
        lambda i: clip_numbers.append(i) or type(experiment).answered_clip(experiment, i),
    )
    data = specvlm.measure_lambda(experiment)
    assert (
        min(clip_numbers)
        >= specvlm.FIRST_CALIBRATION_CLIP
        > max(own.clips for own in specvlm.STUDIES.values())
    )
    (panel, part) = data["panels"].values()
    means = np.mean([[value[0] for value in line] for line in panel.values()], axis=0)
    assert data["best"] == (0.05, 0.5)[int(np.argmax(means[1:]))]
    assert [value[0] for value in part["stage I"]] == sorted(v[0] for v in part["stage I"])
    stored = Path(__file__).parents[2] / "docs/results/figures/specvlm-lambda.json"
    assert json.loads(stored.read_text())["best"] == specvlm.LAMBDA


# -- attention ---------------------------------------------------------------------------------


@torch.no_grad()
def attended(experiment: Experiment) -> torch.Tensor:
    """[layer, visual]: from Hugging Face's own eager attention, the mean over heads and the text
    after the video, of the first clip."""
    shot = experiment.answered_clip(0)
    model, prompt = experiment.target.backbone.model, shot.guide.prompt
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = "eager"
    try:
        out = decoder(
            inputs_embeds=prompt.embeds[None],
            position_ids=prompt.positions[:, None],
            output_attentions=True,
            use_cache=False,
        )
    finally:
        decoder.config._attn_implementation = before
    text = int(prompt.visual.nonzero()[-1]) + 1
    rows = [layer[0, :, text:][..., prompt.visual] for layer in out.attentions]
    return torch.stack([row.mean((0, 1)) for row in rows])


def test_maps_are_hugging_faces_attention(experiment):
    """Claim: a frame's cell holds the attention its token gets, over that of the most attended, in
    the first layer, the last and on average; frames are those of the labels. Control: the layers
    differ. Fails if rows and columns, or frames, or layers are exchanged."""
    data = specvlm.measure_attention_maps(experiment)
    by_layer = attended(experiment)
    grid = experiment.answered_clip(0).guide.prompt.grid.tolist()
    slow = {
        "first layer": by_layer[0],
        "last layer": by_layer[-1],
        "all layers": by_layer.mean(0),
    }
    assert data["labels"] == [f"frames {2 * t} and {2 * t + 1}" for t in range(4)]
    for name, mass in slow.items():
        for (_, t, h, w), value in zip(grid, (mass / mass.max()).tolist(), strict=True):
            assert data["maps"][name][t][h][w] == pytest.approx(value, abs=2e-4)
    assert data["maps"]["first layer"] != data["maps"]["last layer"]
    axes = [axis for axis in draw.maps(data).axes if axis.images and axis.get_subplotspec()]
    first = np.asarray(axes[0].images[0].get_array())
    cells = np.array(data["maps"]["first layer"][0])
    assert np.allclose(first, np.log10(np.maximum(cells, data["floor"])))


@pytest.mark.extra
def test_the_boundary_is_between_rows_of_the_video_and_text(experiment):
    """Claim: the shares of the most attended tenth are those of rows of text, worked out anew from
    Hugging Face's attention, and of the later visual rows; cells are over the largest. Fails if
    queries and keys are exchanged, or rows of text counted as the video's."""
    data = specvlm.measure_attention_by_row(experiment)
    (cells,) = data["maps"]["all rows"]
    assert np.max(cells) == 1 and len(cells) == len(cells[0]) == specvlm.MAP_CELLS
    # cells that touch share a row
    assert np.triu(cells, 2).max() == 0, "nothing attends to what comes after it"
    tenths = []
    for number in range(experiment.clips):
        prompt = experiment.answered_clip(number).guide.prompt
        mass = specvlm.attention_by_row(experiment.target.backbone, prompt)
        text = mass[int(prompt.visual.nonzero()[-1]) + 1 :][:, prompt.visual]
        if not number:
            assert text.mean(0).tolist() == pytest.approx(
                attended(experiment).mean(0).tolist(), abs=1e-6
            )
        tenths += [mean(sum(sorted(row)[-6:]) / sum(row) for row in text.tolist())]
    assert data["tenth"]["text queries"][0] == pytest.approx(mean(tenths), abs=1e-5)


def test_at_random_is_the_mean_of_draws(experiment):
    """Claim: the tau of a random view is a clip's mean over as many draws, which differ."""
    draft = next(iter(experiment.drafts.values()))
    (taus,) = experiment.taus_by_view(["random/keep=0.02"], draft).values()
    for number, tau in enumerate(taus):
        ways = [f"random/keep=0.02/draw={draw}" for draw in range(RANDOM_DRAWS)]
        each = [
            agreement.tau(
                experiment.draft_agreement(experiment.answered_clip(number), way, draft),
                CHAIN_LENGTH,
            )
            for way in ways
        ]
        assert tau == pytest.approx(mean(each)) and len(set(each)) > 1


def test_the_tail_is_sorted_shares(experiment):
    """Claim: of each clip's attention sorted, the mean share at a rank and of all up to it; all
    together they get all of it, and were all alike a rank would hold rank/n. Fails if clips are
    averaged before they are sorted, or ranks are off by one."""
    data = specvlm.measure_attention_tail(experiment)
    shares = []
    for number in range(experiment.clips):
        mass = experiment.answered_clip(number).guide.mass.double().mean((0, 1))
        shares.append(sorted((mass / mass.sum()).tolist(), reverse=True))
    one, together = data["panels"].values()
    assert data["at"][0] == 1 and data["at"][-1] == 64
    for i, rank in enumerate(data["at"]):
        assert one["attention"][i] == pytest.approx(mean(own[rank - 1] for own in shares))
        assert together["attention"][i] == pytest.approx(mean(sum(own[:rank]) for own in shares))
        assert together["if all were alike"][i] == pytest.approx(rank / 64)
    assert together["attention"][-1] == pytest.approx(1)


# -- latency -----------------------------------------------------------------------------------


def test_latency_is_of_one_token_over_both_caches(experiment, monkeypatch):
    """Claim: milliseconds of the target's step of one row and of the draft's, both over as many
    keys as the axis says. Fails if the draft's cache stays short, or rows or units are others."""
    calls = []

    def milliseconds(model: Any, context: int, ways: Any) -> list[tuple[float, float, float]]:
        calls.append((model, context, ways))
        middle = context if model is experiment.target.backbone else 0.1 * context
        return [(middle, middle, middle)]

    monkeypatch.setattr(specvlm, "step_milliseconds", milliseconds)
    data = specvlm.measure_step_latency(experiment)
    assert calls == [
        (model.backbone, context, [(1, 1)])
        for context in data["at"]
        for model in (experiment.target, experiment.draft)
    ]
    (panel,) = data["panels"].values()
    assert [value[0] for value in panel["target"]] == pytest.approx(list(data["at"]))
    assert [value[0] for value in panel["draft"]] == pytest.approx([0.1 * c for c in data["at"]])


def test_parts_of_a_step_are_the_modules_own(experiment, monkeypatch):
    """Claim: by a clock that ticks when it is read, attention and FFN take a tick in each layer,
    a layer five on average (its own and four readings within), and no hook stays behind. Fails if
    a part is counted twice, in one layer alone, or the mean is a sum."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(specvlm, "time", clock)
    monkeypatch.setattr(specvlm, "CONTEXTS", (64,))
    (panel,) = specvlm.measure_layer_latency(experiment)["panels"].values()
    layers = experiment.draft.backbone.key_layer_count
    assert {name: line[0][0] for name, line in panel.items() if name != "the step"} == (
        pytest.approx({"attention": 1e3 * layers, "FFN": 1e3 * layers, "one layer": 5e3})
    )
    assert not experiment.draft.backbone.text.layers[0].mlp._forward_hooks


# -- Fig. 10, 11 -------------------------------------------------------------------------------


@pytest.mark.extra
def test_cases_are_the_answers_token_by_token(experiment):
    """Claim: a case holds the tokens that a tenth's view keeps, the answer's own words with the
    draft's told from the target's as the rounds have them, and is drawn so: what the draft wrote on
    a ground. Fails if a round's last token, the target's own, passes for the draft's."""
    data = cases.measure_cases(experiment)
    assert len(data["cases"]) == experiment.clips
    for number, case in enumerate(data["cases"]):
        answer = experiment.run(specvlm.CALIBRATED, number)
        (kept,) = case["kept"].values()
        assert len(kept) == 6 == round(experiment.size / 10)
        assert "".join(text for text, _ in case["words"]) == answer.text
        drafted = [False]  # the prefill's
        for one in answer.forwards:
            drafted += [True] * len(one.accepted) + [False] * (one.own is not None)
        assert [own for _, own in case["words"]] == drafted
        taken = sum(drafted) / len(answer.forwards)
        assert case["accepted"]["a tenth of the video"] == pytest.approx(taken)
    figure = cases.draw_cases(json.loads(json.dumps(data | {"size": experiment.size})))
    texts = [text for axis in figure.axes for text in axis.texts]
    words = [word for case in data["cases"] for word in case["words"]]
    assert [text.get_text() for text in texts] == [text for text, _ in words]
    grounds = [text.get_bbox_patch().get_facecolor()[3] > 0 for text in texts]
    assert grounds == [drafted for _, drafted in words]
    assert sum(bool(axis.images) for axis in figure.axes) == experiment.clips * 6
