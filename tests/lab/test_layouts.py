"""Claims about the papers' tables: rows and figures are theirs, cells are what the run measured."""

from __future__ import annotations

from statistics import mean

import pytest
from written_out import answer, tables

from lab import layouts
from lab.layouts import LAYOUTS
from saccade.bench import measures
from saccade.bench.records import Answer
from saccade.methods import resolve


def run_of(*methods: str, suite: str = "s", turns: int = 1) -> list[Answer]:
    """Two items by each method; how much is accepted differs by method, item and turn."""
    answers = []
    for place, method in enumerate(methods):
        for number, item in enumerate("ab"):
            for turn in range(turns):
                taken = tuple((place + number + turn + i) % 5 for i in range(12))
                drafted = (0,) * 12 if method == "ar" else (5,) * 12
                answers.append(
                    answer(
                        item,
                        method,
                        (0,) * 12 if method == "ar" else taken,
                        drafted,
                        suite=suite,
                        turn=turn,
                        decode=2.0 if method == "ar" else 1.0 / (1 + place + number),
                        total=4.0,
                        counted=10,
                        nodes=drafted,
                        draft=0.125,
                        verify=0.25,
                        draft_prefill=0.5,
                        guide=0.0625,
                        prefill=1.0,
                    )
                )
    return answers


def read(answers: list[Answer]) -> dict[str, dict[str, dict[str, str]]]:
    """Tables by their headings."""
    layout_tables: dict[str, dict[str, dict[str, str]]] = {}
    lines: list[str] = []
    place = ""
    for line in [*layouts.all_tables(answers), "### end"]:
        if line.startswith("### "):
            if lines:
                (layout_tables[place],) = tables("\n".join(lines))
            place, lines = line.removeprefix("### "), []
        elif line.startswith("|"):
            lines.append(line)
    return layout_tables


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.place)
def test_every_row_is_a_method(layout):
    """Claim: each row of a paper's table names a method of ours that resolves, and so does its
    setting for this pair. SD-Rand and the published code's choices have none."""
    for method in layout.rows.values():
        assert resolve(method).name == method
        if "view=" not in method:
            resolve(layouts.calibrated_method(method))


def test_a_row_is_the_settled_method_where_it_was_run():
    """Claim: lambda calibrated and HIPPO's draft that waits fill the papers' rows wherever a run
    has them, in every table, and the row says so; else the bare name fills it. Fails where names
    are matched exactly, by which a run had no row of HIPPO, SAGE and SpecVLM."""
    bare = ("specvlm", "specvlm/shape=chain-5", "sage", "hippo", "hippo/schedule=serial")
    chosen = [layouts.calibrated_method(name) for name in bare]
    assert chosen == [
        "specvlm/lambda=0.02",
        "specvlm/lambda=0.02/shape=chain-5",
        "sage/lambda=0.02",
        "hippo/early=wait",
        "hippo/early=wait/schedule=serial",
    ]
    alone, both = read(run_of("ar", *chosen)), read(run_of("ar", *chosen, *bare))
    assert list(alone) == list(both)
    for place, rows in alone.items():
        assert both[place] == rows, place
    assert alone["SpecVLM, Tables 1-2"].keys() >= {"Std.-SD: SpecVLM (`specvlm/lambda=0.02`)"}
    table = alone["HIPPO, Table 3"]
    assert list(table) == ["HIPPO (`hippo/early=wait`)", f"HIPPO w/o vpsd (`{chosen[-1]}`)"]
    (broken,) = (rows for place, rows in alone.items() if "HIPPO, Table 2" in place)
    assert list(broken["draft decoding, overlapped"])[1:] == ["ar", *chosen[:1], *chosen[2:4]]
    assert list(read(run_of("ar", *bare))["HIPPO, Table 3"]) == ["HIPPO", "HIPPO w/o vpsd"]


def test_hippos_speedups_are_of_whole_answers():
    """Claim: HIPPO's Tables 1 and 3 print the speedup of whole answers, prefill and all, every
    other table that of decoding. Fails where one speedup serves all."""
    layout_tables = read(run_of("ar", "sd", "specvlm", "hippo", "pearl"))
    whole = {place for place, rows in layout_tables.items() if place.startswith("HIPPO, Table")}
    assert whole == {"HIPPO, Table 1", "HIPPO, Table 3"}
    for place, rows in layout_tables.items():
        cells = {row["s: speedup"] for name, row in rows.items() if "s: speedup" in row}
        # every answer takes as long in all, and decoding takes less
        assert cells == {"1.00x [1.00, 1.00]"} if place in whole else "1.00x" not in str(cells)


def test_cells_are_the_measures():
    """Claim: SpecVLM's and SAGE's tables print the run's accepted tokens, TABED's its emitted ones,
    HIPPO's the accepted ones by the round and from refusal to refusal, both for every row. Fails
    if a column has two units or counts the target's own tokens where the paper does not."""
    answers = run_of("ar", "sd", "sd-tree", "specvlm", "sage", "hippo", "tabed")
    layout_tables = read(answers)
    by = {name: [a for a in answers if a.method == name] for name in {a.method for a in answers}}
    sage = layout_tables["SAGE, Tables 1-3"]["SAGE"]
    taken = [n for a in by["sage"] for n in a.accepted]
    assert sage["s: tau"] == f"{mean(taken):.2f}"
    block = layout_tables["TABED, Tables 1-2"]["MT*"]["s: tau"]
    assert block == f"{1 + mean(n for a in by['tabed'] for n in a.accepted):.2f}"
    special = layout_tables["SpecVLM, Tables 1-2"]["Std.-SD: SpecVLM"]
    assert special["s: tau"] == f"{mean(n for a in by['specvlm'] for n in a.accepted):.2f}"
    assert float(special["s: tokens/s"]) == pytest.approx(
        measures.tokens_per_second(by["specvlm"]), abs=0.5
    )
    ratios = sorted(measures.speedups(by["specvlm"], by["ar"]))
    assert special["s: speedup"].startswith(f"{mean(ratios):.2f}x")  # the median of two
    for label, method in (("HIPPO", "hippo"), ("SpecVLM", "specvlm")):
        row = layout_tables["HIPPO, Table 1"][label]
        assert row["s: MAT"] == f"{measures.accepted_between_rejections(by[method]):.2f}"
        assert row["s: accepted"] == f"{measures.accepted_per_forward(by[method]):.2f}"
    assert layout_tables["SAGE, Tables 1-3"]["Vanilla AR"]["s: tau"] == "-"


def test_a_table_shows_what_was_run():
    """Claim: rows without answers are left out, and a table with fewer than two is not there."""
    layout_tables = read(run_of("ar", "specvlm", "sage"))
    assert list(layout_tables["SAGE, Tables 1-3"]) == ["Vanilla AR", "SpecVLM", "SAGE"]
    assert "HIPPO, Table 3" not in layout_tables and "TABED, Tables 1-2" not in layout_tables


def test_a_table_by_rounds_has_empty_cells_for_a_suite_without_rounds():
    """Claim: a suite whose answers had no round at all has a row of empty cells in Table 3."""
    with_rounds = run_of("ar", "specvlm")
    without = [answer("c", name, suite="t", total=4.0) for name in ("ar", "specvlm")]
    rows = read([*with_rounds, *without])["SpecVLM, Table 3"]
    cells = [rows["t"][column] for column in ("0", "first ten", "all")]
    assert cells == ["-"] * 3 != [rows["s"][column] for column in ("0", "first ten", "all")]


def test_second_turns_stand_apart():
    """Claim: TABED's table splits a conversation into its first turn and the later ones, other
    tables do not; the last column is over everything. Fails if a turn counts twice or not."""
    answers = run_of("ar", "sd", "tabed", turns=3)
    layout_tables = read(answers)
    row = layout_tables["TABED, Tables 1-2"]["MT*"]
    own = [a for a in answers if a.method == "tabed"]
    for name, turns in (("s, first turn: tau", (0,)), ("s, later: tau", (1, 2))):
        assert row[name] == f"{measures.tau([a for a in own if a.turn in turns]):.2f}"
    assert row["all"] == f"{measures.tau(own):.2f}"
    assert row["s, first turn: tau"] != row["s, later: tau"]
    assert list(read(answers)["SAGE, Tables 1-3"]["SD-Chain"])[1] == "s: tau"


def test_tokens_by_round():
    """Claim: SpecVLM's Table 3 is, for each of the first ten rounds, the mean over answers of what
    was accepted; the averages are over rounds."""
    answers = run_of("ar", "specvlm")
    row = read(answers)["SpecVLM, Table 3"]["s"]
    own = [a for a in answers if a.method == "specvlm"]
    for step in range(10):
        assert row[str(step)] == f"{mean(a.accepted[step] for a in own):.2f}"
    assert row["first ten"] == f"{mean(n for a in own for n in a.accepted[:10]):.2f}"
    assert row["all"] == f"{mean(n for a in own for n in a.accepted):.2f}"
    assert row["0"] != row["1"]


def test_seconds_by_operation():
    """Claim: the breakdown prints each operation's mean seconds and its share of the answer."""
    (name,) = (n for n in read(run_of("ar", "specvlm")) if "Table 5" in n)
    table = read(run_of("ar", "specvlm"))[name]
    assert table["target prefill"]["specvlm"] == "1.000 (25.0%)"
    assert table["draft prefill"]["specvlm"] == "0.500 (12.5%)"
    assert table["token pruning"]["specvlm"] == "0.062 (1.6%)"
    assert table["in all"]["ar"] == "4.000 (100.0%)"
    rest = mean(1 / (2 + n) - 0.375 for n in (0, 1) if 1 / (2 + n) > 0.375) / 2
    assert table["others (committing, tree update, ...)"]["specvlm"].startswith(f"{rest:.3f}")
