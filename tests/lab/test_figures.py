"""`python -m lab figure`: what is drawn is what was measured, which was a real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from lab import draw, studies
from lab.commands.figure import figure as command
from lab.studies import experiment, methods
from lab.studies.specvlm import CRITERIA
from lab.training import agreement
from saccade.bench import figures
from saccade.core.errors import OptionError
from saccade.core.result import RoundRecord

Call = Callable[..., Result]
METHODS = ("sparse-to-dense", "tabed", "sage", "hippo")  # The figures of docs/methods.
OVER_ROUNDS = {
    "x": "round",
    "panels": {
        "weight\n(two)": {"full": [0.5, 0.9, 1.0], "text": [0.5, 0.1, 0.0]},
        "weight\n(one)": {"caption": [0.25, 0.5]},
    },
}
OVER_SHARES = {
    "x": "tokens (log scale)",
    "at": [10, 100],
    "panels": {"tau": {"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [4.0, 3.0]}},
}
HIPPO: dict[str, Any] = {
    "size": 64,
    "grid": [4, 4, 4],
    "kept": {"specvlm": [[0, 0, 0], [0, 0, 1], [3, 3, 3]], "holistic": [[0, 2, 1]]},
    "judged": [0, 1, 5, 5, 1],
    "accepted": [0, 1, 5, 2, 0],
}
DATA = {name: OVER_ROUNDS for name in METHODS} | {
    "sparse-to-dense": OVER_SHARES,
    "hippo": HIPPO,
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """The command alone, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(command)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def stored(path: Path, name: str, **change: Any) -> Path:
    path.write_text(json.dumps({"figure": name, **DATA[name], **change}))
    return path


# -- drawing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", (OVER_ROUNDS, OVER_SHARES), ids=("rounds", "shares"))
def test_lines_are_the_numbers(data):
    """Claim: a panel for each entry, in it a line for each name, through exactly the numbers given,
    at 1, 2, ... or at ``at``. Fails if a line is lost, moved or drawn in another panel."""
    drawn = draw.lines(data)
    assert len(drawn.axes) == len(data["panels"])
    for axis, (label, own) in zip(drawn.axes, data["panels"].items(), strict=True):
        assert axis.get_ylabel() == label
        assert [line.get_label() for line in axis.lines] == list(own)
        for line, y in zip(axis.lines, own.values(), strict=True):
            assert list(line.get_ydata()) == y
            assert list(line.get_xdata()) == data.get("at", list(range(1, len(y) + 1)))
    assert drawn.axes[-1].get_xlabel() == data["x"]
    assert drawn.axes[-1].get_xscale() == ("log" if "at" in data else "linear")


def test_the_legend_names_every_line_of_the_fullest_panel():
    """Claim: one legend, with each name once, from whichever panel has most lines. Fails if it is
    taken from the first or the last."""
    for panels in ({"one": {"a": [1.0]}, "two": {"a": [1.0], "b": [2.0]}}, OVER_ROUNDS["panels"]):
        drawn = draw.lines({"x": "round", "panels": panels})
        (legend,) = drawn.legends
        most = max(panels.values(), key=len)
        assert [text.get_text() for text in legend.get_texts()] == list(most)


def test_lines_differ_without_colour():
    """Claim: no two lines of a panel share both mark and dashes, nor a colour, up to as many lines
    as any figure has. Fails if a list of styles is too short or repeats."""
    many = {str(i): [1.0, 2.0] for i in range(len(CRITERIA))}
    drawn = draw.lines({"x": "round", "panels": {"tau": many}}).axes[0].lines
    assert len({(str(line.get_marker()), str(line.get_linestyle())) for line in drawn}) == len(many)
    assert len({line.get_color() for line in drawn}) == len(many)


def test_frames_show_what_is_kept_and_veil_the_rest():
    """Claim: a row a view, six frames a row; a kept cell has the clip's own pixels and no other
    cell has, and the counts below are of that frame. Fails if rows and columns, or frames, of
    the grid are swapped."""
    clip = agreement.unseen_clip(0, 64)[1]
    drawn = methods.draw_frames(HIPPO)
    pictures = [axis for axis in drawn.axes if axis.images]
    assert len(pictures) == 2 * methods.FRAMES_DRAWN
    times = [0, 1, 1, 2, 3, 3]  # the middles of six equal parts of four
    for number, axis in enumerate(pictures):
        view = list(HIPPO["kept"])[number // methods.FRAMES_DRAWN]
        t = times[number % methods.FRAMES_DRAWN]
        kept = {(h, w) for at, h, w in HIPPO["kept"][view] if at == t}
        assert axis.get_xlabel() == f"{len(kept)} of 16"
        picture = np.asarray(axis.images[0].get_array())
        frame = np.asarray(clip.frames[2 * t]) / 255
        side = len(frame) // 4
        for h in range(4):
            for w in range(4):
                cell = np.s_[h * side : (h + 1) * side, w * side : (w + 1) * side]
                assert np.allclose(picture[cell], frame[cell], atol=0.01) == ((h, w) in kept)


def test_rounds_are_bars_by_kind():
    """Claim: full bars are what was accepted, of rounds judging more than one token apart from
    those judging one; hollow ones what was judged; rounds before the draft was ready are crosses.
    Fails if a kind takes another's rounds."""
    axis = methods.draw_frames(HIPPO).axes[-1]
    bars = {
        group.get_label(): {
            round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in group
        }
        for group in axis.containers
    }
    assert bars["accepted, optimistic"] == {3: 5, 4: 2}
    assert bars["accepted, conservative"] == {2: 1, 5: 0}
    assert bars["judged"] == {1: 0, 2: 1, 3: 5, 4: 5, 5: 1}
    assert [list(line.get_xdata()) for line in axis.lines] == [[1]]
    assert axis.get_xlabel() == "round" and axis.get_ylabel() == "drafted tokens"


@pytest.mark.parametrize(
    "parents, expected",
    [((), (0, 0, 1)), ((-1, 0, 1), (3, 3, 1)), ((-1, -1, 0, 2, 1), (5, 3, 1))],
    ids=("empty", "chain", "tree"),
)
def test_a_trees_depth_is_its_longest_path(parents, expected):
    """Claim: (nodes, depth, accepted) of a round. Fails if depth counts nodes or the last path."""
    record = RoundRecord((7,) * len(parents), parents, (7,), None, None, 0.0, 0.0)
    assert methods._tree_sizes(record) == expected


# -- files and the command ---------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", METHODS)
def test_a_picture_is_redrawn_from_its_numbers(call, tmp_path, name, monkeypatch):
    """Claim: with --data nothing is run, the numbers stay as they are, the same numbers give the
    same pixels and others give others. Fails if a drawing needs anything but its JSON."""
    monkeypatch.setattr(studies, "Experiment", None)
    data = stored(tmp_path / "numbers.json", name)
    before = data.read_bytes()
    for file in ("a.png", "b.png"):
        ran = call(name, "--out", file, "--data", data)
        assert ran.exit_code == 0, ran.exception
        assert file in ran.stdout
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert data.read_bytes() == before
    stored(data, name, **({"judged": [9] * 5} if name == "hippo" else {"x": "other"}))
    assert call(name, "--out", "b.png", "--data", data).exit_code == 0
    assert Path("a.png").read_bytes() != Path("b.png").read_bytes()


def test_an_svg_holds_no_date(tmp_path):
    """Claim: nothing in the file says when it was drawn. Fails if matplotlib's default metadata
    comes back, and every redrawing would be a change in the repository."""
    figures.save_figure(draw.lines(OVER_ROUNDS), tmp_path / "a.svg")
    assert "date" not in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    "words, says",
    [
        (("sagee",), "unknown figure 'sagee'; known: sparse-to-dense, tabed, sage"),
        (("sage", "--out", "x.bmp"), "cannot write x.bmp; give --out an .svg or .png"),
        (("sage", "--out", "no/x.svg"), "cannot write no/x.svg"),
        (("sage", "--size", "100"), "no clips of 100 visual tokens; sizes: [64, 256"),
        (("sage", "--data", "none.json"), "cannot read none.json; give --data the JSON"),
        (("sage", "--data", "list.json"), "cannot read list.json"),
        (("sage", "--data", "broken.json"), "cannot read broken.json"),
        (
            ("sage", "--data", "tabed.json"),
            "tabed.json holds the numbers of 'tabed', not of 'sage'",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(call, tmp_path, words, says, monkeypatch):
    """Claim: an OptionError that says what would work, before any model is loaded, and no file is
    left. Fails on a traceback, a late refusal or a half-written picture."""
    monkeypatch.setattr(studies, "Experiment", None)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text('{"figure": ')
    stored(tmp_path / "tabed.json", "tabed")
    before = sorted(tmp_path.iterdir())
    ran = call(*words)
    assert isinstance(ran.exception, OptionError)
    assert says in str(ran.exception) and "\n" not in str(ran.exception)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_real_run_becomes_numbers_and_a_picture(call, pair, monkeypatch, unchecked):
    """Claim: on a real clip SAGE's figure holds, round by round, the trees a run of the method
    itself drafts, starting with the first tree of the prose, and SpecVLM's never change; the JSON
    beside the picture says what was run. Fails if a panel holds another method's rounds or
    another number."""
    taus = studies.Experiment.mean_taus
    monkeypatch.setattr(
        studies.Experiment, "mean_taus", lambda bench, *methods: taus(bench, *methods[:1])
    )
    ran = call("sage", "--clips", 1, "--size", 64, "--max-new-tokens", 16, "--out", "made.png")
    assert ran.exit_code == 0, ran.exception
    assert Path("made.png").read_bytes().startswith(b"\x89PNG")
    data = studies.load_numbers(Path("made.json"), "sage")
    assert (data["clips"], data["size"], data["tokens"]) == (1, 64, 16)
    nodes, depth, accepted = data["panels"].values()
    assert nodes["sage"][0] == 35 and set(nodes["specvlm"]) == {25}
    assert depth["sage"][0] == 6 and set(depth["specvlm"]) == {5}
    bench = studies.Experiment(clips=1, size=64, tokens=16)
    for method in ("sage", "specvlm"):
        own = bench.rounds(method)
        assert nodes[method] == [len(round.tokens) for round in own]
        assert accepted[method] == [len(round.accepted) for round in own]
        assert sum(len(round.emitted) for round in own) <= 16
    emitted = [len(round.emitted) for round in bench.rounds("specvlm")]
    assert data["tau"] == {"specvlm": sum(emitted) / len(emitted)}


@pytest.mark.extra
def test_a_draft_that_gave_up_is_no_picture(pair, monkeypatch):
    """Claim: a run that fell back to plain decoding raises, naming method and reason. Control for
    every figure: without it a broken draft would be drawn as one that accepts nothing."""
    real = experiment.run

    def failing(*args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        return replace(real(*args, **kwargs), fallback_reason="it broke")

    monkeypatch.setattr(experiment, "run", failing)
    with pytest.raises(RuntimeError, match="ar: it broke"):
        studies.Experiment(clips=1, size=64, tokens=2).rounds("ar")
