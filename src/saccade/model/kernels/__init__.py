"""Which of several equal kernels is quickest here, measured when a model is made ready.

Every make of processor has another library behind a product of few rows, and the quickest differs
by its shape and number of rows. So each is timed on each machine, a few times, and remembered; what
wins nowhere is not kept.
"""

from __future__ import annotations

import ctypes
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, silu

from saccade.core.home import MeasurementFile
from saccade.model import memory
from saccade.model.kernels import compiled

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 256)
FIRST = (1, 256, 8, 4, 16, 2, 64)  # what is timed first, should there be no time for all
FEW = (1, 4, 16)  # rows of attention
KEYS = (512, 1024, 2048, 4096)
MANY, LONG = (768,), (1024, 2048)  # rows and keys of a prompt
SECONDS = 0.15  # of timing the products of a model; attention takes a third of it
REPEATS = 4
OFTEN = 3  # times that each is timed
LAID = 2**22  # bytes of matrices timed one after another: more than the nearest cache holds
GAIN = 0.15  # of a product's time: a copy that never saves more is not worth its memory
PROMPT = 64  # rows from which two matrices tell enough
SHARE = 0.25  # of free memory that copies of weights may take
_MEASURED = MeasurementFile("kernels.json")

Place = tuple[int, ...]  # what was timed: a shape, a number of rows, of keys


class Use(IntEnum):
    """What becomes of a product x W^T, which its kernel does on the way."""

    ALONE = 0
    BIASED = 1
    ONTO = 2  # it is added to rows that are given
    GATED = 3  # silu of its first half of outputs, times the second half


@dataclass(frozen=True)
class Product:
    """A way of computing base + x W^T, over W laid out as it likes."""

    lay: Callable[[Tensor], Any]
    times: Callable[[Tensor, Any, Tensor | None], Tensor]  # (x, laid, base): a bias, rows or None


def release_threads() -> None:
    """Ends the threads that shared this one's products; the next product is given new ones.

    Those of GNU's OpenMP spin while they wait, unless a process has more of them than there are
    processors: who multiplies in a second thread is half as fast while those of the first live.
    """
    with suppress(AttributeError, OSError, TypeError):  # another OpenMP
        ctypes.CDLL(None).omp_pause_resource_all(1)  # softly


def _times(x: Tensor, weight: Tensor, base: Tensor | None) -> Tensor:
    if base is None or base.dim() == 1:
        return linear(x, weight, base)
    return torch.addmm(base, x, weight.t())


def _times_transposed(x: Tensor, laid: Tensor, base: Tensor | None) -> Tensor:
    return x @ laid if base is None else torch.addmm(base, x, laid)


def _times_packed(x: Tensor, laid: Tensor, base: Tensor | None) -> Tensor:
    if base is None or base.dim() == 1:
        return torch.ops.mkldnn._linear_pointwise(x, laid, base, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, base, laid, None, "add")


PRODUCTS: dict[str, Product] = {
    "plain": Product(lambda weight: weight, _times),  # over the module's own weight
    "transposed": Product(lambda weight: weight.t().contiguous(), _times_transposed),
    # oneDNN's, over weights in blocks of its own
    "packed": Product(lambda w: torch.ops.mkldnn._reorder_linear_weight(w), _times_packed),
    "compiled": Product(compiled.Panels.of, compiled.multiply),
}


def _gated(product: Product) -> Product:
    def times(x: Tensor, laid: Any, base: Tensor | None) -> Tensor:
        gate, gated = product.times(x, laid, base).chunk(2, -1)
        return silu(gate).mul_(gated)

    return Product(product.lay, times)


GATED = {
    **{name: _gated(product) for name, product in PRODUCTS.items()},
    "compiled": Product(compiled.Panels.of_gated, compiled.multiply),
}


def products() -> list[str]:
    """The names of those to choose from: a transposed copy is for where none is compiled."""
    left_out = "transposed" if compiled.available() else "compiled"
    return [name for name in PRODUCTS if name != left_out]


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
    """x W^T for one :class:`Use`, over the module's own weight and what copies of it a
    :class:`Choice` asks for."""

    def __init__(
        self, weight: Float[Tensor, "out into"], bias: Tensor | None = None, use: Use = Use.ALONE
    ) -> None:
        self.weight, self.bias = weight, bias
        self.use = use if bias is None else Use.BIASED
        self.forget()
        self.choose(ALL_PLAIN)

    def __getstate__(self) -> tuple[Tensor, Tensor | None, Use]:
        """Packed weights can be neither copied nor sent elsewhere: they are laid out there."""
        return self.weight, self.bias, self.use

    def __setstate__(self, state: tuple[Tensor, Tensor | None, Use]) -> None:
        self.weight, self.bias, self.use = state
        self.forget()
        self.choose(ALL_PLAIN)

    @property
    def products(self) -> Mapping[str, Product]:
        return GATED if self.use is Use.GATED else PRODUCTS

    @property
    def place(self) -> Place:
        """What its seconds depend on but the rows."""
        return (*self.weight.shape, self.use)

    def forget(self) -> None:
        """Drops all copies of the weights: they are laid out anew when they are chosen."""
        self._laid: dict[str, Any] = {}
        self._chosen: dict[Choice, list[tuple[Callable[..., Tensor], Any]]] = {}

    def choose(self, choice: Choice) -> None:
        """Multiplies by this choice from now on. Lays the weights out, as they are now, in the ways
        that no earlier choice has asked for; those stay, so that going back costs nothing."""
        if choice not in self._chosen:
            for name in set(choice.names) - self._laid.keys():
                self._laid[name] = self.products[name].lay(self.weight)
            names = [choice.at(rows) for rows in range(choice.rows[-1] + 2)]
            self._chosen[choice] = [(self.products[n].times, self._laid[n]) for n in names]
        self._by_rows = self._chosen[choice]
        self._most = len(self._by_rows) - 1

    @property
    def kernels(self) -> frozenset[str]:
        """The ways in which the weights are laid out."""
        return frozenset(self._laid)

    def __call__(self, x: Float[Tensor, "all into"]) -> Float[Tensor, "all out"]:
        times, laid = self._by_rows[min(x.shape[0], self._most)]
        return times(x, laid, self.bias)

    def onto(
        self, hidden: Float[Tensor, "all out"], x: Float[Tensor, "all into"]
    ) -> Float[Tensor, "all out"]:
        """hidden + x W^T, of a matrix without bias."""
        times, laid = self._by_rows[min(x.shape[0], self._most)]
        return times(x, laid, hidden)


def fp32_on_cpu(tensors: Iterable[Tensor]) -> bool:
    return all(each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)


def may_copy(matrices: Sequence[Matrix]) -> bool:
    """Whether there is anything to choose from: fp32 on a CPU with oneDNN, and memory for it."""
    weights = [matrix.weight for matrix in matrices]
    if not fp32_on_cpu(weights) or not torch.backends.mkldnn.is_available():
        return False
    copies = (len(products()) - 1) * sum(weight.nbytes for weight in weights)
    return copies <= SHARE * memory.available_bytes(torch.device("cpu"))


class Quickest:
    """Matrices that multiply by what is quickest here; by their own weights where there is nothing
    to choose from, and then it is false."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices if matrices and may_copy(matrices) else ()
        self._samples = [sample(matrix.weight) for matrix in self._matrices]
        self._seen: list[bytes] = []
        self._choices: dict[int, list[Choice]] = {}  # by how many threads there are
        self._threads = 0

    def __bool__(self) -> bool:
        return bool(self._matrices)

    def weights_changed(self) -> bool:
        """Whether weights were changed in place since they were laid out: a row of one, a column,
        or more. ``weight.data`` may be written to without leaving a trace in its version."""
        return bool(self._seen) and self._seen != self._sampled()

    def _sampled(self) -> list[bytes]:
        return [each.numpy().tobytes() for each in self._samples]

    def refresh(self) -> None:
        """Lays the weights out anew if they were changed in place, and multiplies by what is
        quickest with the threads there are now.

        For each number of threads it is chosen once, and the copies that it takes stay, so nobody
        pays for a number of threads that somebody else used before. There are never more copies
        than :func:`may_copy` has found room for.
        """
        if not self._matrices:
            return
        seen = self._sampled()
        threads = torch.get_num_threads()
        if self._seen == seen and self._threads == threads:
            return
        if self._seen != seen:
            for matrix in self._matrices:
                matrix.forget()
        if threads not in self._choices:
            self._choices[threads] = choices(self._matrices)
        self._seen, self._threads = seen, threads
        for matrix, choice in zip(self._matrices, self._choices[threads], strict=True):
            matrix.choose(choice)


def sample(weight: Float[Tensor, "out into"]) -> Float[Tensor, "*sampled"]:
    """Entries of a weight, in its own memory, that tell whether it was changed: at least one of
    every row and one of every column, about as many as its longer side.

    The entries stand ``step`` apart. A step of at most a row's length leaves out no row. One that
    shares no divisor with that length meets another column each time until all were met, which
    takes as many entries as there are columns; a step of at most the number of rows gives them.
    """
    if not weight.is_contiguous():
        return sample(weight.t()) if weight.t().is_contiguous() else weight
    rows, into = weight.shape
    step = max(1, min(rows, into - 1))
    while math.gcd(step, into) > 1:
        step -= 1
    return weight.view(-1)[::step]


def choices(matrices: Sequence[Matrix]) -> list[Choice]:
    """The quickest products of each matrix; those of one shape are measured together."""
    alike = defaultdict(list)
    for matrix in matrices:
        alike[matrix.place].append(matrix)
    times: dict[Place, dict[int, dict[str, float]]] = defaultdict(dict)
    known = least(("products", products(), sorted(alike)), lambda: measured(alike))
    for (*shape, rows), seconds in known.items():
        times[tuple(shape)][rows] = seconds
    found = {shape: best(each) for shape, each in times.items()}
    return [found[matrix.place] for matrix in matrices]


@torch.no_grad()
def measured(
    alike: Mapping[Place, Sequence[Matrix]], seconds: float = SECONDS
) -> dict[Place, dict[str, float]]:
    """Seconds of the products of each place, given its matrices, by it and number of rows: of
    those rows that matter most, and of as many others as ``seconds`` are enough for."""
    began = time.perf_counter()
    laid: dict[Place, tuple[Matrix, dict[str, list[Any]]]] = {}
    for place, (first, *others) in alike.items():
        few = max(1, LAID // first.weight[0].nbytes // 2) * 2  # of a vocabulary's, say
        part = Matrix(first.weight[:few], first.bias, first.use)
        some = [part.weight, *(other.weight for other in others)]
        some = some[: max(1, LAID // part.weight.nbytes)]
        laid[place] = part, {n: [part.products[n].lay(each) for each in some] for n in products()}
    times = {}
    for rows in dict.fromkeys((*FIRST, *ROWS)):
        if rows not in FIRST and time.perf_counter() - began > seconds:
            break
        for place, (part, copies) in laid.items():
            calls = {
                name: _all(part, name, rows, each[:2] if rows >= PROMPT else each)
                for name, each in copies.items()
            }
            times[*place, rows] = quickest(calls)
    return times


def _all(part: Matrix, name: str, rows: int, laid: Sequence[Any]) -> Callable[[], object]:
    """A product over one weight after another, with what its use asks for."""
    times, (out, into) = part.products[name].times, part.weight.shape
    x, base = torch.randn(rows, into), None if part.bias is None else part.bias[:out]
    if part.use is Use.ONTO:
        base = torch.randn(rows, out)
    return lambda: [times(x, each, base) for each in laid]


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


def least(
    facts: Sequence[object], timed: Callable[[], Mapping[Place, Mapping[str, float]]]
) -> dict[Place, dict[str, float]]:
    """Seconds of each kernel in each place, which ``timed`` measures, remembered by ``facts`` and
    the version of our own kernels.

    They are timed the first few times they are asked for, and the least of each counts: a busy
    moment, into which so short a measurement may fall, must not decide for good.
    """
    key = _MEASURED.key("least", compiled.version(), *facts)
    often, saved = _MEASURED.load(key) or (0, [])
    known = {tuple(place): seconds for place, seconds in saved}
    if often < OFTEN:
        for place, seconds in timed().items():
            old = known.get(place, seconds)
            known[place] = {name: min(took, old[name]) for name, took in seconds.items()}
        _MEASURED.save(key, [often + 1, list(known.items())])
    return known


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
        needless = min(fewer, key=fewer.__getitem__)
        if fewer[needless] > 1 + GAIN:
            break
        names.remove(needless)
    return Choice(tuple(rows), tuple(min(names, key=times[n].__getitem__) for n in rows))


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ways:
    """By number of rows (the last one beyond it too) two ways to attend: over fewer keys than
    ``turns`` says the first, from there on the second."""

    rows: tuple[int, ...]
    names: tuple[tuple[str, str], ...]
    turns: tuple[int, ...]

    def at(self, rows: int, keys: int) -> str:
        index = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        return self.names[index][keys >= self.turns[index]]


@torch.no_grad()
def ways(
    facts: Sequence[object],
    calls: Callable[[int, int], dict[str, Callable[[], object]]],
    rows: Sequence[int] = FEW,
    keys: Sequence[int] = KEYS,
) -> Ways:
    """The quickest ways to attend by these numbers of rows and of keys.

    ``calls`` gives each way for (rows, keys); ``facts`` is what they depend on.
    """
    places = [(few, each) for few in rows for each in keys]
    known = least(("ways", rows, keys, *facts), lambda: {at: quickest(calls(*at)) for at in places})
    found = [turning([known[few, each] for each in keys], keys) for few in rows]
    names, turns = zip(*found, strict=True)
    return Ways(tuple(rows), names, turns)


def turning(
    timed: Sequence[Mapping[str, float]], keys: Sequence[int] = KEYS
) -> tuple[tuple[str, str], int]:
    """The two ways, and the one of ``keys`` where the second takes over, that lose least by the
    seconds of each way over each; a single slow moment decides nothing. Twice the same way where
    no second is better."""

    def lost(plan: tuple[tuple[str, str], int]) -> float:
        names, turn = plan
        taken = [names[each >= turn] for each in keys]
        return sum(each[name] / min(each.values()) for name, each in zip(taken, timed, strict=True))

    names = tuple(timed[0])
    alone = [((name, name), keys[0]) for name in names]
    pairs = [((one, two), key) for one in names for two in names if one != two for key in keys[1:]]
    return min((*alone, *pairs), key=lost)
