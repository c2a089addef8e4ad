"""Which of several equal kernels is quickest here, measured when a model is made ready.

Every make of processor has another library behind a product of few rows, and the quickest differs
by its shape and number of rows. So each is timed once for each machine and remembered; what wins
nowhere is not kept.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from saccade.core.home import Measured
from saccade.model import memory

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 256)
FIRST = (1, 256, 8, 4, 16, 2, 64)  # what is timed first, should there be no time for all
FEW = (1, 4, 16)  # rows of attention
KEYS = (512, 1024, 2048, 4096)
SECONDS = 0.15  # of timing the products of a model; attention takes a third of it
PATIENCE = 5
REPEATS = 4
LAID = 2**22  # bytes of matrices timed one after another: more than the nearest cache holds
GAIN = 0.15  # of a product's time: a copy that never saves more is not worth its memory
PROMPT = 64  # rows from which two matrices tell enough
SHARE = 0.25  # of free memory that copies of weights may take
_MEASURED = Measured("kernels.json")


@dataclass(frozen=True)
class Product:
    """A way of computing x W^T, over W laid out as it likes."""

    lay: Callable[[Tensor], Tensor]
    times: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, laid, bias) -> x W^T + bias
    onto: Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, x, laid) -> hidden + x W^T


def _times_transposed(x: Tensor, laid: Tensor, bias: Tensor | None) -> Tensor:
    return x @ laid if bias is None else torch.addmm(bias, x, laid)


PRODUCTS: dict[str, Product] = {
    "plain": Product(  # over the module's own weight
        lambda weight: weight,
        linear,
        lambda hidden, x, laid: torch.addmm(hidden, x, laid.t()),
    ),
    "transposed": Product(
        lambda weight: weight.t().contiguous(),
        _times_transposed,
        torch.addmm,
    ),
    "packed": Product(  # oneDNN's, over weights in blocks of its own
        lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight),
        lambda x, laid, bias: torch.ops.mkldnn._linear_pointwise(x, laid, bias, "none", [], ""),
        lambda hidden, x, laid: torch.ops.mkldnn._linear_pointwise.binary(
            x, hidden, laid, None, "add"
        ),
    ),
}


@dataclass(frozen=True)
class Choice:
    """The quickest of some kernels by number of rows: ``names[i]`` up to ``rows[i]``, the last one
    beyond them too."""

    rows: tuple[int, ...]
    names: tuple[str, ...]

    def at(self, rows: int) -> str:
        return self.names[min(bisect_left(self.rows, rows), len(self.rows) - 1)]


ALL_PLAIN = Choice((1,), ("plain",))


class Matrix:
    """x W^T + b, over the module's own weight and what copies of it a :class:`Choice` asks for."""

    def __init__(self, weight: Float[Tensor, "out into"], bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.choose(ALL_PLAIN)

    def __getstate__(self) -> tuple[Tensor, Tensor | None]:
        """Packed weights can be neither copied nor sent elsewhere: they are laid out there."""
        return self.weight, self.bias

    def __setstate__(self, state: tuple[Tensor, Tensor | None]) -> None:
        self.weight, self.bias = state
        self.choose(ALL_PLAIN)

    def choose(self, choice: Choice) -> None:
        """Lays the weights out anew, as they are now."""
        laid = {name: PRODUCTS[name].lay(self.weight) for name in set(choice.names)}
        by_rows = [choice.at(rows) for rows in range(choice.rows[-1] + 2)]
        self._by_rows = [(PRODUCTS[name], laid[name]) for name in by_rows]
        self._most = len(by_rows) - 1
        self.kernels = frozenset(laid)

    def __call__(self, x: Float[Tensor, "all into"]) -> Float[Tensor, "all out"]:
        product, laid = self._by_rows[min(x.shape[0], self._most)]
        return product.times(x, laid, self.bias)

    def onto(
        self, hidden: Float[Tensor, "all out"], x: Float[Tensor, "all into"]
    ) -> Float[Tensor, "all out"]:
        """hidden + x W^T, of a matrix without bias."""
        product, laid = self._by_rows[min(x.shape[0], self._most)]
        return product.onto(hidden, x, laid)


def may_copy(matrices: Sequence[Matrix]) -> bool:
    """Whether there is anything to choose from: fp32 on a CPU with oneDNN, and memory for it."""
    weights = [matrix.weight for matrix in matrices]
    plain = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in weights)
    if not plain or not torch.backends.mkldnn.is_available():
        return False
    copies = (len(PRODUCTS) - 1) * sum(weight.nbytes for weight in weights)
    return copies <= SHARE * memory.available(torch.device("cpu"))


def choices(matrices: Sequence[Matrix]) -> list[Choice]:
    """The quickest products of each matrix; those of one shape are measured together."""
    shapes = [(tuple(matrix.weight.shape), matrix.bias is not None) for matrix in matrices]
    key = _MEASURED.key("products", sorted(set(shapes)))
    known = _MEASURED.load(key)
    if known is None:
        alike = defaultdict(list)
        for shape, matrix in zip(shapes, matrices, strict=True):
            alike[str(shape)].append(matrix)
        found = measured(alike)
        known = {shape: [choice.rows, choice.names] for shape, choice in found.items()}
        if all(len(choice.rows) >= len(FIRST) for choice in found.values()):
            _MEASURED.save(key, known)
    told = {shape: Choice(tuple(rows), tuple(names)) for shape, (rows, names) in known.items()}
    return [told[str(shape)] for shape in shapes]


@torch.no_grad()
def measured(alike: Mapping[str, Sequence[Matrix]], seconds: float = SECONDS) -> dict[str, Choice]:
    """The quickest products of each shape, given its matrices. Numbers of rows are timed until
    ``seconds`` are spent, those that matter most first: on a machine too busy for these even in
    ``PATIENCE`` times as long, the choice holds for this time only."""
    began = time.perf_counter()
    laid: dict[str, dict[str, list[Tensor]]] = {}
    for shape, (first, *others) in alike.items():
        part = first.weight[: max(1, LAID // first.weight[0].nbytes)]  # of a vocabulary's, say
        some = [part, *(other.weight for other in others)][: max(1, LAID // part.nbytes)]
        laid[shape] = {name: [each.lay(w) for w in some] for name, each in PRODUCTS.items()}
    times: dict[str, dict[int, dict[str, float]]] = {shape: {} for shape in laid}
    for rows in dict.fromkeys((*FIRST, *ROWS)):
        allowed = seconds * (PATIENCE if rows in FIRST else 1)
        if rows != FIRST[0] and time.perf_counter() - began > allowed:
            break
        for shape, copies in laid.items():
            x = torch.randn(rows, alike[shape][0].weight.shape[1])
            times[shape][rows] = quickest(
                {
                    name: _all(PRODUCTS[name], x, each[:2] if rows >= PROMPT else each)
                    for name, each in copies.items()
                }
            )
    return {shape: best(times[shape]) for shape in times}


def _all(product: Product, x: Tensor, laid: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: [product.times(x, each, None) for each in laid]


def quickest(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each call: the least of several, taken in turns, so that a busy moment neither
    counts nor falls on one of them alone."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - began)
    return {name: min(each) for name, each in took.items()}


def best(times: dict[int, dict[str, float]]) -> Choice:
    """The choice that these seconds, by rows and kernel, speak for. A copy of the weights that
    saves less than ``GAIN`` of the time is left out; the first kernel needs none.

    Between two numbers of rows that were timed the kernel of the larger holds: beyond the step
    where a kernel falls behind, it does so at once.
    """
    rows = sorted(times)
    names = list(times[rows[0]])

    def lost(kept: Sequence[str]) -> float:
        """Against the quickest of all, at the number of rows where that is the most."""
        return max(min(times[n][name] for name in kept) / min(times[n].values()) for n in rows)

    while len(names) > 1:
        fewer = {name: lost([other for other in names if other != name]) for name in names[1:]}
        least = min(fewer, key=fewer.__getitem__)
        if fewer[least] > 1 + GAIN:
            break
        names.remove(least)
    return Choice(tuple(rows), tuple(min(names, key=times[n].__getitem__) for n in rows))


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """From how many keys on one way is quicker than another, by number of rows (None: never)."""

    rows: tuple[int, ...] = (1,)
    keys: tuple[int | None, ...] = (None,)

    def passed(self, rows: int, keys: int) -> bool:
        least = self.keys[min(bisect_left(self.rows, rows), len(self.rows) - 1)]
        return least is not None and keys >= least


NEVER = Threshold()


@torch.no_grad()
def threshold(
    facts: Sequence[object], calls: Callable[[int, int], dict[str, Callable[[], object]]]
) -> Threshold:
    """From how many keys on the second of two ways is the quicker one.

    ``calls`` gives both for (rows, keys); ``facts`` is what they depend on.
    """
    key = _MEASURED.key("attention", *facts)
    known = _MEASURED.load(key)
    if known is None:
        ways = [[quickest(calls(rows, keys)) for keys in KEYS] for rows in FEW]
        known = [FEW, [passing([tuple(both.values()) for both in each]) for each in ways]]
        _MEASURED.save(key, known)
    rows, keys = known
    return Threshold(tuple(rows), tuple(keys))


def passing(timed: Sequence[Sequence[float]]) -> int | None:
    """Of ``KEYS`` the one from which on the second way is taken that loses least, given the seconds
    of both ways over each; a single slow moment decides nothing."""

    def lost(least: int | None) -> float:
        passed = [least is not None and keys >= least for keys in KEYS]
        return sum(pair[way] / min(pair) for way, pair in zip(passed, timed, strict=True))

    return min((None, *KEYS), key=lost)
