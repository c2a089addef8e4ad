"""Claims about what the page draws: it says what happened, and text stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from saccade.answering.coloured_text import KIND_MEANINGS
from saccade.core.result import Result, RoundRecord, Timings
from saccade.ui import method_controls, pictures
from saccade.ui.duel import Column, Duel, Piece
from saccade.ui.kept_visual_tokens import KeptTokens

CSS = Path(pictures.__file__).with_name("page.css")
EVIL = "<script>alert(1)</script>\"'&"
# root -> 5, 6; under 5: 7, 8; under 7: 9. Accepted: 5, 7, then 4 of the target's own.
BRANCHED = RoundRecord((5, 6, 7, 8, 9), (-1, -1, 0, 0, 2), (5, 7), 4, "recovered", 0.1, 0.1)
CHAIN = RoundRecord((1, 2), (-1, 0), (1, 2), 3, "bonus", 0.1, 0.1, (0.9, 0.25))
PLAIN = RoundRecord((), (), (), 3, "bonus", 0.0, 0.1)


def parsed(svg: str) -> ElementTree.Element:
    """The picture as XML: fails unless it is well formed."""
    match = re.search(r"<svg.*</svg>", svg, re.S)
    assert match
    return ElementTree.fromstring(match.group(0))


def complete(ids: tuple[int, ...], **others: object) -> Column:
    result = Result(ids, "x", "x", "stop", (), Timings(), 1, 0, None, **others)  # type: ignore[arg-type]
    return Column("x", "done", (), (PLAIN,) * len(ids), 4.0, 1.0, result)


def test_each_kind_has_a_look_beyond_its_hue() -> None:
    """Claim: no two kinds share weight and line under them, so that hue is not needed.

    Fails if two kinds differ by colour alone."""
    css = CSS.read_text()
    looks = set()
    for kind in KIND_MEANINGS:
        (rule,) = re.findall(rf"\n\.sac-{kind} {{(.*?)}}", css, re.S)
        line = re.search(r"text-decoration: underline (\w+)", rule)
        assert line
        looks.add(line.group(1))
    assert len(looks) == len(KIND_MEANINGS) == 3


@pytest.mark.parametrize("theme", [":root", ".dark"])
def test_colours_can_be_read(theme: str) -> None:
    """Claim: text in the three colours has a contrast of 4.5 to 1 or more on either background."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    (block,) = re.findall(rf"\n{re.escape(theme)} {{(.*?)}}", CSS.read_text(), re.S)
    ground = light("#ffffff" if theme == ":root" else "#0b0f19")
    for name in (*KIND_MEANINGS, "faint", "wrong"):
        (colour,) = re.findall(rf"--sac-{name}: (#\w{{6}});", block)
        low, high = sorted((light(colour), ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_text_is_in_spans_of_its_kind_and_escaped() -> None:
    """Claim: runs of a kind share a span, nothing of the text is lost, and none of it is markup."""
    pieces = [Piece("a ", "accepted"), Piece(EVIL, "accepted"), Piece("b", "bonus")]
    drawn = pictures.column(Column("x", "stopped", tuple(pieces)), True)
    (text,) = re.findall(r'<div class="sac-text">(.*)</div>', drawn)
    assert text.count("<span") == 2 and "<script" not in text
    assert text.startswith('<span class="sac-accepted">a &lt;script')
    assert text.endswith('<span class="sac-bonus">b</span>')


def test_no_picture_passes_markup_on() -> None:
    """Claim: a token, a view or a method that looks like markup is shown as it is written."""
    share = torch.ones(1, 2, 2)
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    side = Column(EVIL, EVIL, (Piece(EVIL, "bonus"),))
    drawn = [
        pictures.tree(BRANCHED, lambda token: EVIL, EVIL),
        pictures.rounds_chart([RoundRecord((1,), (-1,), (1,), 2, "bonus", 0, 0, (1.0,))], [EVIL]),
        pictures.kept_frames(frames, [0.0], KeptTokens(EVIL, share, 4, 4)),
        pictures.column(side, True),
        pictures.column(side, False),
        pictures.message(EVIL),
        pictures.outcome(Duel(complete((1, 2)), complete((1, 2), fallback_reason=EVIL)), False),
    ]
    assert not any("<script" in one for one in drawn)
    assert all("&lt;script" in one for one in drawn)


def test_a_tree_has_its_nodes_and_its_way() -> None:
    """Claim: one node a drafted token beside the start and the target's own; accepted ones are
    those on the way, each joined to its parent, and no two nodes lie over each other."""
    svg = parsed(pictures.tree(BRANCHED, lambda token: f"<{token}>", "before"))
    nodes = svg.findall("g")
    kinds = [node.attrib["class"].rpartition("-")[2] for node in nodes]
    words = ["".join(text.itertext()) for node in nodes for text in node.findall("text")]
    assert words == ["before", "<5>", "<6>", "<7>", "<8>", "<9>", "<4>"]
    assert kinds == ["start", "accepted", "refused", "accepted", *["refused"] * 2, "recovered"]
    assert len(svg.findall("path")) == 6
    boxes = [{k: float(v) for k, v in box.attrib.items()} for box in svg.iter("rect")]
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart = abs(one["y"] - other["y"]) >= one["height"]
            beside = one["x"] >= other["x"] + other["width"]
            beside |= other["x"] >= one["x"] + one["width"]
            assert apart or beside
        assert one["x"] + one["width"] <= float(svg.attrib["width"])
        assert one["y"] + one["height"] <= float(svg.attrib["height"])


def test_a_chain_lies_in_one_line_and_says_its_probabilities() -> None:
    """Claim: a chain is a row; the draft's probability of each token can be read, and the weights
    of an ensemble of as many views are not taken for probabilities."""
    svg = parsed(pictures.tree(CHAIN, str))
    heights = {box.attrib["y"] for box in svg.iter("rect")}
    titles = ["".join(title.itertext()) for title in svg.iter("title")]
    assert len(heights) == 1
    assert titles[1:3] == ["1: accepted, probability 90%", "2: accepted, probability 25%"]
    weights = pictures.tree(CHAIN, str, notes_are_weights=True)
    assert "%" not in "".join(parsed(weights).itertext())


def test_an_empty_round_is_drawn_too() -> None:
    """Claim: a round of plain decoding is the start and the target's token; the first token is
    said to be the prompt's own. Fails if the opening reads like a round that drafted nothing."""
    assert len(parsed(pictures.tree(PLAIN, str)).findall("g")) == 2
    assert "0 drafted" in pictures.tree(PLAIN, str)
    assert "0 drafted" not in (first := pictures.tree(replace(PLAIN, opening=True), str))
    assert "prompt&#39;s own token" in first


def test_rounds_show_bars_trees_and_weights_where_there_are_any() -> None:
    """Claim: two bars a round; depth and width for trees that branch; a line a view's weight."""

    def curves(rounds: list[RoundRecord], views: list[str]) -> tuple[int, int]:
        svg = parsed(pictures.rounds_chart(rounds, views, 0))
        titles = [t.text for t in svg.iter("text") if t.attrib.get("class") == "sac-title"]
        bars = [b for b in svg.iter("rect") if b.find("title") is not None]
        assert len(bars) == 2 * len(rounds)
        return len(titles), len([p for p in svg.iter("path") if "curve" in p.attrib["class"]])

    weighed = [RoundRecord((1,), (-1,), (1,), 2, "bonus", 0, 0, (0.25, 0.75))] * 3
    assert curves([CHAIN, PLAIN, CHAIN], []) == (1, 0)
    assert curves([BRANCHED, CHAIN], []) == (2, 4)  # a line and its key, twice
    assert curves(weighed, ["full", "text"]) == (2, 4)


def test_bars_are_as_tall_as_what_they_count() -> None:
    """Claim: accepted over drafted is the ratio of the bars' heights."""
    svg = parsed(pictures.rounds_chart([BRANCHED]))
    drafted, accepted = [
        float(bar.attrib["height"]) for bar in svg.iter("rect") if bar.find("title") is not None
    ]
    assert accepted / drafted == pytest.approx(2 / 5, abs=0.01)


def test_plain_rounds_say_so() -> None:
    """Claim: where nothing was drafted there is a sentence and no empty picture."""
    assert "Nothing was drafted" in pictures.rounds_chart([PLAIN, PLAIN])


def test_dropped_cells_are_dim_and_kept_ones_are_not() -> None:
    """Claim: the inside of a kept cell keeps its colours, a dropped one is dark and grey, and one
    that half the heads kept is between."""
    frame = np.full((64, 64, 3), (250, 60, 60), np.uint8)
    share = np.array([[1.0, 0.0], [0.5, np.nan]])
    drawn = np.asarray(pictures.overlay_kept_tokens(frame, share)).astype(int)
    quarter = drawn.shape[0] // 4
    kept, dropped = drawn[quarter, quarter], drawn[quarter, 3 * quarter]
    half = drawn[3 * quarter, quarter]
    assert kept.tolist() == [250, 60, 60]
    assert len(set(dropped.tolist())) == 1 and dropped[0] < 80
    assert dropped[0] < half[0] < kept[0]


def test_a_long_clip_is_shown_by_some_of_its_frames() -> None:
    """Claim: at most eight frames, the first and the last among them, with their times."""
    frames = np.zeros((100, 8, 8, 3), np.uint8)
    drawn = pictures.strip(frames, [i / 10 for i in range(100)])
    assert drawn.count("<img") == 8
    assert ">0.0 s<" in drawn and ">9.9 s<" in drawn
    assert "http" not in drawn


def test_the_outcome_says_whether_tokens_are_the_same() -> None:
    """Claim: yes for the same, NO for a difference, and of samples that they were drawn apart."""
    one, other = complete((1, 2, 3)), complete((1, 2, 4))
    assert '<b class="sac-same">yes</b>' in pictures.outcome(Duel(one, one), False)
    assert '<b class="sac-same">NO</b>' in pictures.outcome(Duel(one, other), False)
    assert "drawn apart" in pictures.outcome(Duel(one, other), True)
    assert pictures.outcome(Duel(one, Column("x")), False) == ""
    assert "Stopped" in pictures.outcome(Duel(one, Column("x"), stopped=True), False)


@pytest.mark.parametrize(
    ("method", "axis", "value", "becomes"),
    [
        ("specvlm", "view", "uniform", "specvlm/view=uniform"),
        ("specvlm/view=uniform/lambda=0.2", "view", "", "specvlm/lambda=0.2"),
        ("sd/view=full/keep=0.1", "view", "random", "sd/view=random/keep=0.1"),
        ("auto", "keep", " ", "auto"),
        ("auto/nonsense", "shape", "fit", "auto/shape=fit"),
    ],
)
def test_a_control_changes_its_own_axis_alone(
    method: str, axis: str, value: str, becomes: str
) -> None:
    """Claim: what a control does to the writing, and that the rest of it stays."""
    assert method_controls.set_axis(method, axis, value) == becomes


def test_every_choice_on_the_menu_is_one_of_the_engine() -> None:
    """Claim: each entry is understood by ``resolve``: refused, if at all, for what it meets.

    Fails if the menu offers what no axis knows."""
    for axis, values in method_controls.MENU.items():
        for value in values:
            possible, words = method_controls.explain_method(f"sd/{axis}={value}")
            assert possible or not words.startswith(("unknown", "cannot read", f"{axis}=")), words


def test_a_method_is_explained_or_refused_in_a_sentence() -> None:
    """Claim: a method that can be is told by its choices, another by why it cannot be."""
    possible, words = method_controls.explain_method("specvlm/shape=fit")
    assert possible and "view specvlm" in words and "shape fit" in words
    possible, words = method_controls.explain_method("pearl/shape=tree")
    assert not possible and "after each token" in words and "shape=chain-N" in words
