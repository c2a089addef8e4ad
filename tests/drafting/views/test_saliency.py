"""Claims about scores of visual tokens and selectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.drafting.views import saliency


@pytest.mark.parametrize(
    ("seen", "keep", "kept"),
    [
        (1000, 0.1, 100),  # not 99: the share is rounded, not cut off
        (10, 0.1, 1),
        (4, 0.1, 1),  # something is always kept
        (15, 0.1, 2),  # half up
        (14, 0.1, 1),
        (1000, 1.0, 1000),
        (7, 0.0, 0),
        (0, 0.1, 0),  # an empty visual set
        (1, 1.0, 1),
    ],
)
def test_budget_rounds_and_leaves_at_least_one(seen, keep, kept):
    """Claim: max(1, round(keep N)), none only when asked for none. Fails on int() truncation."""
    assert saliency.budget(seen, keep) == kept


@pytest.mark.parametrize("keep", [-0.1, 1.01, float("nan")])
def test_budget_refuses_what_is_no_share(keep):
    """Claim: a share outside [0, 1] is an error. Fails if it is clipped in silence."""
    with pytest.raises(ValueError, match="keep"):
        saliency.budget(10, keep)


SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12)


@settings(max_examples=80)
@given(SCORES, st.integers(0, 12))
def test_top_is_a_stable_sort_cut_short(values, count):
    """Claim: the highest scores, ties to the lower index, increasing. Ties are everywhere here."""
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert saliency.top(torch.tensor(values), count).tolist() == sorted(ranked[:count])


@settings(max_examples=80)
@given(SCORES, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(1, 12))
def test_top_mass_is_the_smallest_top_set_that_reaches_the_share(values, share, most):
    """Claim: Eq. 6 by adding one token at a time. Fails one token early or late, or past most."""
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= share * sum(values):
            break
        kept.append(i)
        mass += values[i]
    indices = saliency.top_mass(torch.tensor(values), share, most)
    assert indices.tolist() == sorted(kept[:most])


@pytest.mark.parametrize("size", [0, 1, 7, 24])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 30])
def test_spread_is_even(size, count):
    """Claim: distinct items in order, gaps that differ by at most one, ends treated alike."""
    indices = saliency.sample_evenly(torch.arange(size) * 10, count)
    picked = [x // 10 for x in indices.tolist()]
    assert len(picked) == min(size, count) and picked == sorted(set(picked))
    gaps = {b - a for a, b in zip(picked, picked[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    if picked:
        assert abs(picked[0] - (size - 1 - picked[-1])) <= 1


def test_rest_is_the_complement():
    """Claim: rest and kept partition the indices. Fails if one is in both or in neither."""
    assert saliency.unchosen(6, torch.tensor([4, 1])).tolist() == [0, 2, 3, 5]
    assert saliency.unchosen(2, torch.tensor([0, 1])).tolist() == []
    assert saliency.unchosen(3, torch.zeros(0, dtype=torch.long)).tolist() == [0, 1, 2]


def test_attention_averages_layers_and_heads():
    """Claim: a_j is a plain mean (Eq. 5). Fails if it is a maximum or a sum."""
    mass = torch.arange(12, dtype=torch.float32).view(2, 3, 2)
    assert saliency.attention(mass).tolist() == [5.0, 6.0]


def _grid(*sizes: tuple[int, int, int]) -> torch.Tensor:
    rows = []
    for medium, (t, h, w) in enumerate(sizes):
        rows += [[medium, a, b, c] for a in range(t) for b in range(h) for c in range(w)]
    return torch.tensor(rows)


def test_transfer_looks_up_the_cell_at_the_same_relative_place():
    """Claim: a finer grid repeats cells, a coarser one samples their middle, per medium."""
    coarse, fine = _grid((1, 1, 2), (1, 2, 1)), _grid((1, 2, 4), (2, 4, 2))
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    moved = saliency.transfer(scores, coarse, fine)
    assert moved[:8].tolist() == [1, 1, 2, 2, 1, 1, 2, 2]
    assert moved[8:].tolist() == [3, 3, 3, 3, 4, 4, 4, 4] * 2
    back = saliency.transfer(moved, fine, coarse)
    assert torch.equal(back, scores)


def test_transfer_between_equal_grids_changes_nothing():
    """Claim: on one grid scores stay where they are. Fails if a lookup is off by a cell."""
    grid = _grid((3, 4, 5), (1, 2, 2))
    scores = torch.arange(len(grid), dtype=torch.float32)
    assert torch.equal(saliency.transfer(scores, grid, grid.clone()), scores)


def test_transfer_between_grids_of_one_size_but_another_layout():
    """Claim: 1x2x8 and 1x4x4 both hold 16 cells and are not the same grid.

    Fails if an equal count is taken for an equal layout: then scores land on other places.
    """
    wide, square = _grid((1, 2, 8)), _grid((1, 4, 4))
    scores = (wide[:, 2] * 10 + wide[:, 3]).float()  # row and column of each cell
    moved = saliency.transfer(scores, wide, square)
    expected = [(h // 2) * 10 + (2 * w + 1) for _, _, h, w in square.tolist()]
    assert moved.tolist() == expected


PIECES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3
)


@settings(max_examples=80)
@given(PIECES, PIECES)
def test_transfer_between_other_media_goes_by_the_place_in_the_prompt(pieces, others):
    """Claim: where the media differ, a cell takes the score of the one as far along: as many scores
    as cells, each one of those given, in their order, and the very same where both are as many.

    By hand: the middle of cell i of m is (2 i + 1) / 2m of the way. Fails if it raises, leaves a
    score out of thin air, or turns the order round.
    """
    grid, other = _grid(*pieces), _grid(*others, (1, 1, 1), (1, 1, 1), (1, 1, 1))
    scores = torch.arange(len(grid), dtype=torch.float32)
    moved = saliency.transfer(scores, grid, other).tolist()
    assert len(moved) == len(other)
    assert set(moved) <= set(scores.tolist())
    assert moved == sorted(moved)
    middles = [(2 * i + 1) / (2 * len(other)) for i in range(len(other))]
    for score, middle in zip(moved, middles, strict=True):
        assert score <= middle * len(grid) + 1e-9 and middle * len(grid) < score + 1 + 1e-9


def test_transfer_between_other_media_of_one_size_changes_nothing():
    """Claim: as many cells on both sides keep their scores. Fails if the lookup is off by one."""
    one, other = _grid((1, 2, 2), (1, 1, 3)), _grid((1, 1, 7))
    scores = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
    assert torch.equal(saliency.transfer(scores, one, other), scores)
    assert torch.equal(saliency.transfer(scores, other, one), scores)


def test_transfer_from_a_medium_with_holes_goes_by_the_place_too():
    """Claim: a medium that is no full lattice is never looked up by (t, h, w).

    Fails if cells that are not there shift those that are. The control: filled up, it is.
    """
    fine, coarse = _grid((1, 2, 4)), _grid((1, 2, 2))
    scores = torch.arange(8, dtype=torch.float32)
    holes = torch.tensor([0, 1, 2, 4, 5, 7])
    moved = saliency.transfer(scores[holes], fine[holes], coarse)
    assert moved.tolist() == scores[holes][[0, 2, 3, 5]].tolist()
    assert saliency.transfer(scores, fine, coarse).tolist() == [1, 3, 5, 7]
