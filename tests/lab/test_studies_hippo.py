"""HIPPO's figures: each number is what a slow, obvious way gives on the same clips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
from helpers import hf_greedy
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from lab import draw, studies
from lab.studies import hippo, methods, specvlm
from lab.studies.experiment import Experiment
from saccade.bench.records import Answer
from saccade.bench.suites.types import Item
from saccade.drafting.views.basic import RANDOM
from saccade.inputs import ask
from saccade.world import suites

pytestmark = pytest.mark.usefixtures("pair", "unchecked")

KEPT = 6  # a tenth of 64 visual tokens
SIDE = 4  # rows and columns of their frames


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(clips=2, size=64, tokens=24)


def by_attention(experiment: Experiment, number: int) -> list[list[int]]:
    """The most attended tokens of a clip, sorted by hand."""
    guide = experiment.answered_clip(number).guide
    assert guide.mass is not None
    table = guide.mass.tolist()
    heads = [head for layer in table for head in layer]
    scores = [mean(head[j] for head in heads) for j in range(experiment.size)]
    best = sorted(range(experiment.size), key=lambda j: (-scores[j], j))[:KEPT]
    return [guide.prompt.grid[j, 1:].tolist() for j in sorted(best)]


# -- Fig. 2 and 8 ------------------------------------------------------------------------------


@pytest.mark.parametrize("high", (4, 6, 8, 10, 15, 20, 28))
def test_a_full_frame_has_a_tenth_at_each_edge(high: int) -> None:
    """Claim: where everything is kept, a tenth is at the top and a tenth at the bottom, however
    high the grid. Fails if rows count whole or not at all."""
    cells = [(0, h, w) for h in range(high) for w in range(3)]
    assert hippo.edge_shares(cells, high) == pytest.approx((0.1, 0.1))


def test_edges_by_hand() -> None:
    """Claim: a row counts by its overlap with the tenth, and frames count alike however many of
    their tokens are kept. Fails if tokens are pooled over frames, or top and bottom change places.
    """
    assert hippo.edge_shares([(0, 0, 0)], 8) == pytest.approx((0.8, 0))
    assert hippo.edge_shares([(0, 7, 0), (0, 3, 0)], 8) == pytest.approx((0, 0.4))
    assert hippo.edge_shares([(0, 1, 0), (0, 2, 0), (0, 19, 0), (0, 9, 0)], 20) == (0.25, 0.25)
    assert hippo.edge_shares([(0, 0, 0), (1, 4, 0), (1, 4, 1), (1, 5, 0)], 8) == pytest.approx(
        (0.4, 0)
    )


def slow_edges(cells: list[list[int]]) -> tuple[float, float]:
    """Of a grid of four rows: 0.4 of the first and of the last are in the outermost tenths."""
    frames = {t for t, _, _ in cells}
    shares = []
    for frame in frames:
        rows = [h for t, h, _ in cells if t == frame]
        shares.append((0.4 * rows.count(0) / len(rows), 0.4 * rows.count(3) / len(rows)))
    return mean(top for top, _ in shares), mean(bottom for _, bottom in shares)


@pytest.mark.slow
def test_edges_are_of_what_the_views_keep(experiment: Experiment) -> None:
    """Claim: the bars are means over the clips of the shares of what attention, and a random draw,
    keep; the dashed line is evenness. Control: the two differ, so one cannot stand for the other.
    """
    data = hippo.measure_edges(experiment)

    def drawn(number: int) -> list[list[int]]:
        guide = experiment.answered_clip(number).guide
        kept = RANDOM.choose(guide, guide.prompt)
        assert len(set(kept.tolist())) == KEPT
        return guide.prompt.grid[kept, 1:].tolist()

    for view, of in (
        ("attention", lambda number: by_attention(experiment, number)),
        ("random", drawn),
    ):
        shares = [slow_edges(of(number)) for number in range(experiment.clips)]
        for place, own in zip(
            ("top tenth", "bottom tenth"), zip(*shares, strict=True), strict=True
        ):
            middle, low, high = data["rows"][view][place]
            assert middle == pytest.approx(mean(own), abs=1e-9)
            assert low <= middle <= high
    assert data["rows"]["attention"] != data["rows"]["random"]
    assert list(data["rows"]) == list(hippo.EDGE_VIEWS) and data["marks"] == {
        "if spread evenly": 0.1
    }


@pytest.mark.extra
def test_kept_tokens_are_those_of_the_views(experiment: Experiment) -> None:
    """Claim: each row shows a tenth of the first clip's cells, no cell twice, attention's the most
    attended. Fails if another clip is shown, or a view's budget slips."""
    data = hippo.measure_kept(experiment)
    assert data["grid"] == [4, SIDE, SIDE]
    assert list(data["kept"]) == list(hippo.KEPT_VIEWS)
    for cells in data["kept"].values():
        assert len(cells) == KEPT == len(set(map(tuple, cells)))
        assert all(
            0 <= at < size for cell in cells for at, size in zip(cell, (4, 4, 4), strict=True)
        )
    assert data["kept"]["attention"] == by_attention(experiment, 0) != by_attention(experiment, 1)


@pytest.mark.slow
def test_strips_are_the_frames_alone() -> None:
    """Claim: a row of pictures a view, as in HIPPO's picture of docs/methods, and nothing else."""
    kept = {"one": [[0, 0, 0]], "two": [[1, 2, 3], [3, 3, 3]], "three": [[0, 1, 1]]}
    drawn = methods.draw_strips({"size": 64, "grid": [4, 4, 4], "kept": kept})
    assert (
        len(drawn.axes) == 3 * methods.FRAMES_DRAWN == sum(bool(axis.images) for axis in drawn.axes)
    )
    assert drawn.axes[methods.FRAMES_DRAWN].get_ylabel() == "two\n2 in all"


# -- Fig. 3 ------------------------------------------------------------------------------------


def plain_words(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


@pytest.mark.slow
def test_the_draft_alone_is_judged_by_its_own_words(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: with the whole video the shares are those of what transformers' generate says with
    each draft, and with the target. Control: where no answer is right, every bar is 0."""
    monkeypatch.setattr(hippo, "VIEW_BY_ROW", {"the whole video": "full", "no video": "none"})
    (panel,) = hippo.measure_accuracy(experiment)["panels"].items()
    assert panel[0] == "256 visual tokens"
    models = {"the target": experiment.target}
    models |= {f"a draft that {what}": draft for what, draft in experiment.drafts.items()}
    items = list(suites.suites()["shapes-qa"].items())[: experiment.clips]
    for series, model in models.items():
        right = []
        for item in items:
            (medium,) = item.media
            inputs = ask(experiment.target, item.question, clips=[medium.read()])  # type: ignore[list-item]
            ids = hf_greedy(model.backbone.model, inputs, experiment.tokens)
            words = plain_words(experiment.target.tokenizer.decode(ids, skip_special_tokens=True))
            right.append(words in map(plain_words, item.answers))
        row = "the target" if series == "the target" else "the whole video"
        assert panel[1][row][series][0] == mean(right)
    assert set(panel[1]["no video"]) == set(models) - {"the target"}

    class Unanswerable:
        def items(self) -> Iterator[Item]:
            return (replace(item, answers=("nobody knows",)) for item in items)

    monkeypatch.setattr(hippo, "suites", lambda: {"shapes-qa": Unanswerable()})
    (wrong,) = hippo.measure_accuracy(replace(experiment, clips=1, _last_clip=None))[
        "panels"
    ].values()
    assert {value[0] for row in wrong.values() for value in row.values()} == {0.0}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("size, names", [(64, 1), (256, 1), (2048, 2), (8192, 3)])
def test_suites_up_to_the_labs_size_are_asked(
    size: int, names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a panel for each suite not longer than asked for, the shortest always."""
    monkeypatch.setattr(hippo, "_share_right", lambda experiment, length: {length: {}})
    panels = hippo.measure_accuracy(Experiment(clips=1, size=size))["panels"]
    expected = {"256": "256", "2048": "2k", "8192": "8k"}
    assert panels == {
        f"{tokens} visual tokens": {name: {}} for tokens, name in list(expected.items())[:names]
    }


# -- Fig. 4 ------------------------------------------------------------------------------------


def spent(draft: float, verify: float, decode: float) -> Answer:
    return Answer("shapes", "0", 0, "sd", draft=draft, verify=verify, decode=decode)


def test_shares_are_of_the_recorded_seconds(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: per cent of all seconds of decoding, over all clips; sizes above the lab's are left
    out. Fails if clips are averaged whatever they took, or the rest of a round is lost."""
    sizes: list[int] = []

    def race(self: Experiment, *names: str, size: int) -> dict[str, list[Answer]]:
        sizes.append(size)
        whole, tenth = names
        return {
            whole: [spent(1, 2, 4), spent(2, 3, 6)],
            tenth: [spent(0.5, 1.5, 2), spent(0, 2, 2)],
        }

    monkeypatch.setattr(Experiment, "run_interleaved", race)
    data = hippo.measure_round_times(replace(experiment, size=2048, _last_clip=None))
    assert sizes == [256, 2048]
    for row, parts in data["rows"].items():
        expected = (12.5, 87.5, 0) if row.endswith("a tenth") else (30, 50, 20)
        assert list(parts.values()) == pytest.approx(expected)
    assert len(data["rows"]) == 4 and data["stacked"]


@pytest.mark.extra
def test_a_real_race_fills_the_shares(experiment: Experiment) -> None:
    """Claim: on a real clip each row sums to 100 %, and draft and target both take some of it."""
    (whole, tenth) = hippo.measure_round_times(
        replace(experiment, clips=1, tokens=12, _last_clip=None)
    )["rows"].values()
    for parts in (whole, tenth):
        assert sum(parts.values()) == pytest.approx(100)
        assert min(parts.values()) >= 0 and parts["the draft"] > 0 < parts["the target"]


# -- Fig. 6 and 7 ------------------------------------------------------------------------------


def run_tau(experiment: Experiment, view: str, number: int, draft: Any) -> float:
    """By running the method itself."""
    tau = experiment.run(f"sd/view={view}/shape=chain-5", number, draft=draft).tau
    assert tau is not None
    return tau


@pytest.mark.slow
def test_an_ablation_is_the_difference_of_real_runs(experiment: Experiment) -> None:
    """Claim: each bar is the mean over clips of (tau without a part) - (tau of the whole score),
    both as runs of the method give them. Fails if the views or drafts are mixed up."""
    data = hippo.measure_ablation(experiment)
    assert list(data["rows"]) == ["without s_attn", "without s_temp", "without s_spa"]
    differ = []
    for what, draft in experiment.drafts.items():
        whole = [
            run_tau(experiment, "holistic/keep=0.1", number, draft)
            for number in range(experiment.clips)
        ]
        for part in hippo.SCORES:
            view = f"holistic-no-{part}/keep=0.1"
            less = [run_tau(experiment, view, n, draft) - whole[n] for n in range(experiment.clips)]
            difference = data["rows"][f"without s_{part}"][f"a draft that {what}"][0]
            assert difference == pytest.approx(mean(less), abs=1e-9)
            differ.append(mean(less))
    assert len(set(differ)) > 1, "a control: parts that all lost alike would prove nothing"


@pytest.mark.slow
def test_pruning_is_tau_of_real_runs(experiment: Experiment) -> None:
    """Claim: a panel a draft, a line a way to choose, at each share pruned the tau a run gives.
    Fails if a line is another view's or the shares run the other way."""
    experiment = replace(experiment, clips=1, tokens=16, _last_clip=None)
    data = hippo.measure_pruning(experiment)
    assert data["at"] == list(specvlm.PRUNED[1:-1])
    for (what, draft), panel in zip(
        experiment.drafts.items(), data["panels"].values(), strict=True
    ):
        assert list(panel) == list(hippo.CRITERIA)
        for view, at in (("holistic", 3), ("frames", 0), ("dycoke", 4)):
            keep = 1 - data["at"][at]
            expected = run_tau(experiment, f"{view}/keep={keep:.2f}", 0, draft)
            assert panel[view][at][0] == pytest.approx(expected), (what, view)
    every = [tau[0] for panel in data["panels"].values() for line in panel.values() for tau in line]
    assert len(set(every)) > 2, "a control: views that never differ would prove nothing"


def test_specvlms_figure_is_the_same_picture_of_other_views(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: what is shared did not change SpecVLM's own figures."""
    seen: list[Any] = []
    monkeypatch.setattr(
        specvlm, "measure_over_shares", lambda experiment, views: seen.append(views) or {}
    )
    monkeypatch.setattr(
        specvlm,
        "measure_tau_differences",
        lambda experiment, whole, views, x: seen.append(whole) or {},
    )
    specvlm.measure_criteria(experiment)
    specvlm.measure_stages(experiment)
    assert seen == [specvlm.CRITERIA, f"{specvlm.CALIBRATED}/keep=0.1"]


# -- how bars are drawn ------------------------------------------------------------------------

ROWS: dict[str, dict[str, Any]] = {
    "first": {"one": [0.5, 0.4, 0.7]},
    "second": {"two": 0.25, "three": [0.5, 0.5, 0.75]},
}


def drawn(figure: Figure, axis: int = 0) -> list[tuple[str, float, float, float]]:
    """(series, row, where it begins, how long it is) of each bar."""
    return [
        (str(group.get_label()), bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width())
        for group in figure.axes[axis].containers
        if isinstance(group, BarContainer)
        for bar in group
    ]


def test_bars_are_the_numbers() -> None:
    """Claim: a bar a value, about its row, from 0; a row's bars do not overlap; the legend names
    each series once, also those the first row lacks. Fails if a series takes another's value."""
    figure = draw.bars({"x": "share", "rows": ROWS, "marks": {"even": 0.1}})
    bars = drawn(figure)
    assert [(name, left, size) for name, _, left, size in bars] == [
        ("one", 0, 0.5),
        ("two", 0, 0.25),
        ("three", 0, 0.5),
    ]
    heights = [at for _, at, _, _ in bars]
    assert heights[0] == 0 and mean(heights[1:]) == pytest.approx(1) and heights[1] < heights[2]
    (legend,) = figure.legends
    assert Counter(text.get_text() for text in legend.get_texts()) == Counter(
        ["one", "two", "three", "even"]
    )
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[0.1, 0.1]]


def test_stacked_bars_lie_end_to_end() -> None:
    """Claim: each part begins where the one before ended, in one row. Fails if parts overlap."""
    rows = {"a": {"x": 10.0, "y": 70.0, "z": 20.0}, "b": {"x": 50.0, "y": 25.0, "z": 25.0}}
    bars = drawn(draw.bars({"x": "per cent", "rows": rows, "stacked": True}))
    assert [(row, left) for _, row, left, _ in bars] == [
        (pytest.approx(row), left)
        for row, lefts in enumerate(((0, 10, 80), (0, 50, 75)))
        for left in lefts
    ]


def test_panels_of_bars_have_their_titles() -> None:
    """Claim: an axis a panel, titled, with its own rows, all to one scale."""
    other = {"third": {"one": 0.9}}
    figure = draw.bars({"x": "share", "panels": {"short": ROWS, "long": other}})
    assert [axis.get_title() for axis in figure.axes] == ["short", "long"]
    assert [len(drawn(figure, i)) for i in (0, 1)] == [3, 1]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


@pytest.mark.representatives(2)
@pytest.mark.parametrize("letters", (4, 20, 34, 36, 60))
def test_a_legend_fits_its_figure(letters: int) -> None:
    """Claim: however long the names, the legend is not wider than the picture. Fails with a fixed
    number of columns."""
    words = "a smaller draft that never saw pruning, though its video was cut"
    panel = {words[i : i + letters]: [1.0, 2.0] for i in range(5)}
    figure = draw.lines({"x": "round", "panels": {"tau": panel}})
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert len(figure.legends[0].get_texts()) == 5


def test_every_study_of_hippo_is_registered_and_drawn_as_bars_or_lines() -> None:
    """Claim: the seven are in the command's list, two of them timed."""
    assert [name for name in studies.STUDIES if name.startswith("hippo-")] == list(hippo.STUDIES)
    assert len(hippo.STUDIES) == 7
    assert [name for name, own in hippo.STUDIES.items() if own.timed] == [
        "hippo-times",
        "hippo-early",
    ]
    assert np.all([own.place.startswith("HIPPO, ") for own in hippo.STUDIES.values()])
