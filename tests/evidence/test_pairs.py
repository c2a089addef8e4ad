"""Claims about ``python -m evidence pairs``: what the papers' pairs need and may gain."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call
from helpers import few

from evidence.hardware.pairs import PAIRS
from saccade.bench.hardware.doctor import examine
from saccade.bench.hardware.published import CONFIGS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("pair", few(sorted(PAIRS, key=lambda pair: pair not in PAIRS[::3]), 5))
def test_the_papers_pairs(pair: tuple[str, str]) -> None:
    """Claim: each pair of the papers works and is worth it on a GPU with room.
    Fails if a published config is read wrongly enough to turn the verdict."""
    target, draft = pair
    found = examine(
        (target, CONFIGS[target]()),
        (draft, CONFIGS[draft]()),
        tokens=8192,
        device="cuda",
        there=2**60,
    )
    assert 0 < found.ratio < 1 and found.verdict.startswith("worth it") and not found.problems


def table(call: Call) -> list[str]:
    code, printed, _ = call("pairs")
    assert code == 0
    return printed.strip().splitlines()


@pytest.mark.slow
def test_the_table_of_pairs(call: Call) -> None:
    """Claim: it prints a Markdown table, a row a pair of the papers, every cell filled, and
    the smaller a draft beside the same target, the greater the gain.
    Fails if a pair is left out or the columns part."""
    head, rule, *rows = table(call)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, *rows)]
    assert set(rule) <= set("|-:") and {len(row) for row in cells} == {6}
    assert [tuple(row[:2]) for row in cells[1:]] == list(PAIRS)
    assert all(cell for row in cells for cell in row)
    gains = {tuple(row[:2]): float(row[5].split(" / ")[0]) for row in cells[1:]}
    assert gains["Qwen2.5-VL-32B", "Qwen2.5-VL-3B"] > gains["Qwen2.5-VL-32B", "Qwen2.5-VL-7B"]


def test_the_page_on_families_has_this_table(call: Call) -> None:
    """Claim: docs/families.md shows the table that `evidence pairs` prints, line by line.
    Fails if one of them was changed without the other."""
    page = (ROOT / "docs" / "families.md").read_text()
    assert "\n".join(table(call)) in page
