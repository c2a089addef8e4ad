"""Claims that what a method leaves behind costs the next one nothing: no weights laid out anew, no
threads taken away, no draft still at work. By counting, since a clock proves nothing here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from helpers import input_for, noisy, qwen25, truth

import saccade
from saccade.core.free_cores import free_cores
from saccade.drafting.parallel import process
from saccade.drafting.setup import NEEDS_TOKENIZER
from saccade.methods import METHODS
from saccade.model import kernels
from saccade.model.backbone import Backbone
from saccade.model.kernels import Choice, Matrix, TunedMatrices

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
COUNT = 8
EARLY = ("pearl-syn", "hippo/early=all", "hippo/early=superset")
FEW = ("ar", "sd", "pearl-syn")
TOUR = (0, 1, 0, 2, 1, 2, 0)  # Each of three follows each other one.
BY_THREADS = {
    1: Choice((1, 8), ("plain", "packed")),
    2: Choice((1, 8), ("packed", "transposed")),
}


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How weights are laid out in this process, one after another; other kernels are the quickest
    with one thread than with two, and there are two."""
    layouts: list[str] = []

    def counting(name: str, lay: Callable[..., Any]) -> Callable[..., Any]:
        def counted(weight: torch.Tensor) -> Any:
            layouts.append(name)
            return lay(weight)

        return counted

    for table in (kernels.PRODUCTS, kernels.GATED_PRODUCTS):
        for name, product in table.items():
            monkeypatch.setitem(
                table, name, replace(product, prepare=counting(name, product.prepare))
            )
    monkeypatch.setattr(
        kernels,
        "choose_products",
        lambda matrices: [BY_THREADS[torch.get_num_threads()]] * len(matrices),
    )
    monkeypatch.setattr(free_cores, "threads_are_fixed", True)  # Tests run beside each other.
    torch.set_num_threads(2)
    yield layouts
    torch.set_num_threads(1)


@pytest.fixture
def pair(laid: list[str]) -> tuple[Backbone, Backbone]:
    """A target and a draft that are new here."""
    return Backbone(copy.deepcopy(qwen25())), Backbone(copy.deepcopy(noisy(qwen25, 0, 0.05)))


def answer(pair: tuple[Backbone, Backbone], method: str, begun: Callable[[], None]) -> None:
    """An answer by this method; ``begun`` is called as its clock starts."""

    def phase(name: str) -> None:
        if name == "vision":
            begun()

    target, draft = pair
    result = saccade.run(
        target, INPUTS, draft=draft, method=method, max_new_tokens=COUNT, on_phase=phase
    )
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.fallback_reason is None


def follow(pair: tuple[Backbone, Backbone], methods: Any, laid: list[str]) -> list[tuple[str, int]]:
    """Each method in turn, and how often weights were laid out on its clock."""
    counts = []
    for method in methods:
        answer(pair, method, laid.clear)
        counts.append((method, len(laid)))
        assert torch.get_num_threads() == 2
        assert all(one.process.poll() is None for one in process._idle)
        assert len(process._idle) == len(process._running) <= 1
    return counts


@pytest.mark.extra
def test_no_weights_are_laid_out_on_the_clock_of_any_method(pair, laid):
    """Claim: after any method, every other one reads its prompt by weights that are laid out; so
    its prefill takes no longer after one than after another. Fails if a number of threads that was
    changed in between lays them out anew."""
    assert set(pairwise(TOUR)) == set(permutations(range(len(FEW)), 2))
    _, *others = follow(pair, [FEW[place] for place in TOUR], laid)
    # The first is left out: the vision tower's weights are laid out when it reads.
    assert others == [(method, 0) for method, _ in others]


@pytest.mark.slow
@pytest.mark.parametrize("before", [*EARLY, "ar"])
def test_every_method_follows_every_early_one_for_nothing(before, pair, laid):
    """The same for all that is registered."""
    drafted = [
        name for name, recipe in METHODS.items() if recipe.view.needs.isdisjoint(NEEDS_TOKENIZER)
    ]
    order = [method for name in drafted for method in (before, name)]
    _, *others = follow(pair, order, laid)
    assert others == [(method, 0) for method, _ in others]


@pytest.mark.extra
def test_control_layouts_that_are_forgotten_are_noticed(pair, laid, monkeypatch):
    """Control: were copies dropped whenever others are the quickest, the count would show it."""
    choose = Matrix.choose

    def forgetful(self: Matrix, choice: Choice) -> None:
        self.drop_copies()
        choose(self, choice)

    monkeypatch.setattr(Matrix, "choose", forgetful)
    counts = follow(pair, ["ar", "pearl-syn", "ar", "sd"], laid)
    assert any(count for _, count in counts[1:])


def test_copies_for_other_threads_stay_and_are_bounded():
    """Claim: for a number of threads that was used before nothing is laid out; there are never more
    copies than kernels to choose from, and all of them follow a weight that was changed."""
    weight = torch.randn(64, 64)
    matrix = Matrix(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernels,
            "choose_products",
            lambda all_: [BY_THREADS[torch.get_num_threads()]] * len(all_),
        )
        quickest = TunedMatrices([matrix])
        x = torch.randn(4, 64)
        try:
            for threads in (1, 2, 1, 2):
                torch.set_num_threads(threads)
                quickest.refresh()
                assert torch.allclose(matrix(x), x @ weight.t(), atol=1e-4)
            assert matrix.prepared_kernels == {"plain", "packed", "transposed"}
            weight.neg_()
            quickest.refresh()
            assert matrix.prepared_kernels == {"packed", "transposed"}, (
                "what was laid before is dropped"
            )
            for threads in (1, 2):
                torch.set_num_threads(threads)
                quickest.refresh()
                for rows in (x, x[:1], torch.randn(20, 64)):
                    assert torch.allclose(matrix(rows), rows @ weight.t(), atol=1e-4)
        finally:
            torch.set_num_threads(1)
