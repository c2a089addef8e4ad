"""TABED's weights: our rules against what its published code computes.

``modules/sps/candidate_generator_vlmsd.py``: a view's weight is the inverse of its summed distance
(1e11 where that is 0), the weights are brought to a sum of 1, and a softmax of their logarithms
over ``temperature_drafting_weight`` (1 in ``config.py``) is what mixes the laws. The runs of
``run_scripts/first_ALL.sh`` search their grid by ``num-accepted-kld``: most matches of the arg-max,
the least KL among those that tie.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch

from saccade.methods import resolve, tabed
from saccade.methods.tabed import Grid, History, Inverse

ERRORS = (0.5, 1.0, 2.0, 4.0)
# (errors, temperature) -> weights, by the published steps
PUBLISHED = (
    (ERRORS, 1.0, (8 / 15, 4 / 15, 2 / 15, 1 / 15)),
    (ERRORS, 0.5, (64 / 85, 16 / 85, 4 / 85, 1 / 85)),
    ((0.0, 1.0), 1.0, (1.0, 1e-11)),
)


def weights(rule: Inverse, errors: tuple[float, ...]) -> tuple[float, ...]:
    total = torch.tensor(errors, dtype=torch.double)[:, None]
    return rule.weights(History(total, (), 1))


@pytest.mark.parametrize(("errors", "tau", "expected"), PUBLISHED)
def test_mtcps_weights_are_the_published_codes(errors, tau, expected):
    """Claim: MTCP* weighs as the published code does, at any temperature, an error of 0 included.
    Fails for softmax(1/e), our old reading."""
    assert weights(Inverse(tau=tau), errors) == pytest.approx(expected, abs=1e-9)
    if len(errors) == len(ERRORS):
        assert weights(Inverse(tau=tau, as_printed=True), errors) != pytest.approx(
            expected, abs=0.05
        )


@pytest.mark.parametrize("longer", [10, 1000])
def test_only_how_errors_compare_counts(longer):
    """Claim: ten or a thousand times as many positions of the same kind leave the weights as they
    are. Control: the equation as printed is all but equal weights by then."""
    more = tuple(error * longer for error in ERRORS)
    assert weights(Inverse(), more) == pytest.approx(weights(Inverse(), ERRORS))
    spread = weights(Inverse(as_printed=True), more)
    assert max(spread) - min(spread) < 0.05


def test_the_default_is_the_published_rule_and_the_equation_has_a_name():
    """Claim: ``tabed-mtcp`` is the published rule at the paper's tau of 1; ``weights=softmax`` is
    App. B.2 as printed."""
    assert resolve("tabed-mtcp").drafter == resolve("tabed-mtcp/weights=inverse/tau=1").drafter
    assert resolve("tabed-mtcp").drafter.weighting == Inverse("kl", None, 1.0, as_printed=False)
    printed = resolve("tabed-mtcp/weights=softmax").drafter.weighting
    inverse = [1 / e for e in ERRORS]
    expected = [math.exp(x) / sum(math.exp(y) for y in inverse) for x in inverse]
    assert weights(printed, ERRORS) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_matches_are_counted_first_and_ties_go_by_kl(seed):
    """Claim: ``weights=matches`` is the published search, worked out here candidate by candidate.
    Fails where KL decides alone, as in our default, or ties go to the first."""
    noise = torch.Generator().manual_seed(seed)
    p = torch.randn(6, 5, generator=noise, dtype=torch.double).log_softmax(-1)
    q = torch.randn(2, 6, 5, generator=noise, dtype=torch.double).log_softmax(-1)
    rule = Grid("matches")
    chosen = rule.weights(rule.fold(rule.start(2), p, q))
    scored = []
    for j in range(11):
        mixed = (1 - j / 10) * q[0].exp() + j / 10 * q[1].exp()
        hits = int((mixed.argmax(-1) == p.argmax(-1)).sum())
        scored.append((-hits, float((p.exp() * (p - mixed.log())).sum()), j))
    best = min(scored)[2]
    assert chosen == pytest.approx((1 - best / 10, best / 10))
    by_kl = Grid("kl").weights(Grid("kl").fold(Grid("kl").start(2), p, q))
    assert by_kl == pytest.approx(
        (lambda j: (1 - j / 10, j / 10))(min((kl, j) for _, kl, j in scored)[1])
    )


@pytest.mark.parametrize(("views", "several"), [(2, 11), (3, 66), (4, 286)])
@pytest.mark.parametrize("rule", ["kl", "tvd", "matches"])
def test_the_grid_is_of_any_number_of_views(views, several, rule):
    """Claim: as in the published grid (every product of tenths from 0 to 1 whose sum is 1) three
    views have 66 candidates and four 286, and the one that is nearest to the target over all
    positions is chosen. Fails for a grid of two views, or one that leaves out a mixture."""
    noise = torch.Generator().manual_seed(views)
    law = partial(torch.randn, generator=noise, dtype=torch.double)
    q = law(views, 6, 12).log_softmax(-1)
    # the truth is a mixture off the grid, so that the nearest on it has a share of every view
    truth = torch.full((views,), 0.95 / views, dtype=torch.double)
    truth[0] += 0.05
    p = (torch.tensordot(truth, q.exp(), 1).log() + 0.02 * law(6, 12)).log_softmax(-1)
    tenths = [c for c in product(range(11), repeat=views) if sum(c) == 10]
    assert len(tenths) == several
    scored = []
    for candidate in tenths:
        mixed = sum(n / 10 * view.exp() for n, view in zip(candidate, q, strict=True))
        hits = int((mixed.argmax(-1) == p.argmax(-1)).sum())
        away = float((p.exp() * (p - mixed.log())).sum())
        apart = float((p.exp() - mixed).abs().sum())
        score = {"kl": (away,), "tvd": (apart,), "matches": (-hits, away)}[rule]
        scored.append((*score, candidate))
    best = [n / 10 for n in min(scored)[-1]]
    weighting = resolve(f"tabed/weights={rule}").drafter.weighting
    state = weighting.start(views)
    assert weighting.weights(state) == pytest.approx([1 / views] * views)
    for half in (slice(0, 2), slice(2, 6)):
        state = weighting.fold(state, p[half], q[:, half])
    assert weighting.weights(state) == pytest.approx(best)
    assert min(best) > 0 and len(state.total) == several


def test_a_grid_over_many_views_is_searched_in_parts(monkeypatch):
    """Claim: how many candidates are mixed at once changes nothing but memory."""
    noise = torch.Generator().manual_seed(0)
    p = torch.randn(3, 9, generator=noise).log_softmax(-1)
    q = torch.randn(4, 3, 9, generator=noise).log_softmax(-1)
    rule = Grid()
    whole = rule.fold(rule.start(4), p, q).total
    monkeypatch.setattr(tabed, "CANDIDATES_AT_ONCE", 7)
    assert torch.equal(rule.fold(rule.start(4), p, q).total, whole)
