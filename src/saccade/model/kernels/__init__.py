"""Chooses the quickest of several kernels for a model's matrix products and attention on a CPU.

Kernels for the same product come from PyTorch, from oneDNN and from our own C code, and some read a
copy of the weights in another layout. Which is the quickest depends on the processor, on the shape
of the matrix and on the number of rows that are multiplied. So when a model is made ready, each
kernel is timed on this machine for some numbers of rows, and the times are stored. A copy of the
weights is dropped if it saves little time for every number of rows.

A :class:`Matrix` is a weight that multiplies by the chosen kernels. :class:`TunedMatrices` chooses
them for all matrices of a decoder or a vision tower. For a draft with rounded weights there are
kernels that read these. On a GPU only such a draft has another kernel than the plain one, and
nothing is timed (:func:`choose_rounded`).
"""

from __future__ import annotations

import ctypes
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, silu

from saccade.core.home import MeasurementFile
from saccade.model import memory
from saccade.model.kernels import compiled, few_bits
from saccade.model.kernels.few_bits import FewBitProduct, Rounding

TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 256)  # Numbers of rows for which to time.
ROWS_TIMED_FIRST = (1, 256, 8, 4, 16, 2, 64)  # Always timed, before the others of TIMED_ROWS.
# Further numbers of TIMED_ROWS are timed only until this many seconds have passed.
PRODUCT_TIMING_SECONDS = 0.15
CALLS_PER_MEASUREMENT = 4  # How many times a call is timed; the shortest time counts.
MAX_MEASUREMENTS = 3  # How many times each kernel is measured before its times are final.
# How many times a call is timed where the processor's caches are emptied before each call, which
# takes long.
COLD_CALLS_PER_MEASUREMENT = 2
# A timed call multiplies with about so many bytes of weights, which is more than the processor's
# nearest cache holds.
TIMED_CALL_BYTES = 2**22
# Of a large matrix only some outputs are timed. Their number is a multiple of this, so that every
# product that can multiply the whole matrix can multiply this part.
TIMED_OUTPUTS_UNIT = 64
USUAL_CACHE_BYTES = 2**25  # The size of the largest cache, where the system does not say it.
# Caches are emptied for up to so many rows. With more rows, arithmetic takes longer than reading
# weights from memory.
MAX_COLD_ROWS = 16
# From this many rows on, a timed call multiplies with at most FEW_MATRICES weights, and not with as
# many as TIMED_CALL_BYTES allow.
FEW_MATRICES_FROM_ROWS = 64
FEW_MATRICES = 2
MAX_SLOWDOWN_WITHOUT_COPY = 0.15  # A copy is dropped if doing without costs at most this share.
MAX_COPY_SHARE = 0.25  # Share of the free memory that copies of weights may take.
# The numbers of rows and of keys for which the attention of a few decoded rows is timed.
ATTENTION_ROWS = (1, 4, 16)
ATTENTION_KEYS = (512, 1024, 2048, 4096)
# The same for the attention of a prompt's rows.
PROMPT_ROWS = (768,)
PROMPT_KEYS = (1024, 2048)
_MEASUREMENTS = MeasurementFile("kernels.json")

ProblemSize = tuple[int, ...]
"""The numbers on which the time of a kernel depends, such as a matrix's shape and its epilogue, or
numbers of rows and of keys."""


class Epilogue(IntEnum):
    """What a kernel does with a product x W^T before it returns. The numbers are part of the keys
    by which times are stored."""

    NONE = 0
    BIAS = 1
    ADD = 2  # The product is added to given rows.
    SILU_GATE = 3  # silu of the first half of the outputs multiplies the second half.


@dataclass(frozen=True)
class Product:
    """One kernel that computes base + x W^T, and how it wants the weights.

    A gated product computes silu(first half) * (second half) of x W^T instead.
    """

    prepare: Callable[[Tensor], Any]
    """weight -> the weight in the layout that ``multiply`` reads."""
    multiply: Callable[[Tensor, Any, Tensor | None], Tensor]
    """(x, prepared weights, base) -> rows; the base is a bias, rows, or None."""
    needs_copy: bool = True
    """Whether the prepared weights take memory of their own."""
    supports: Callable[[Tensor], bool] = lambda weight: True
    """Whether a weight can be multiplied in this way."""


def release_threads() -> None:
    """Ends the worker threads that OpenMP started for the calling thread's matrix products.

    The calling thread's next product starts new ones. Each thread that multiplies has workers of
    its own. Those of GNU's OpenMP stay awake while they wait for the next product. But if the
    process has more of them than there are processors, all of them sleep between two products, and
    then products take about twice as long. A second thread that multiplies would have such slow
    products as long as the first thread's workers live.
    """
    with suppress(AttributeError, OSError, TypeError):  # Another OpenMP is loaded.
        ctypes.CDLL(None).omp_pause_resource_all(1)  # 1 pauses softly.


def _multiply_plain(x: Tensor, weight: Tensor, base: Tensor | None) -> Tensor:
    if base is None or base.dim() == 1:
        return linear(x, weight, base)
    return torch.addmm(base, x, weight.t())


def _multiply_transposed(x: Tensor, transposed: Tensor, base: Tensor | None) -> Tensor:
    return x @ transposed if base is None else torch.addmm(base, x, transposed)


def _multiply_packed(x: Tensor, packed: Tensor, base: Tensor | None) -> Tensor:
    if base is None or base.dim() == 1:
        return torch.ops.mkldnn._linear_pointwise(x, packed, base, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, base, packed, None, "add")


def _keep_weight(weight: Tensor) -> Tensor:
    """Prepares a weight for a kernel that reads it as it is."""
    return weight


PLAIN = Product(_keep_weight, _multiply_plain, needs_copy=False)
# The kernel of oneDNN, which reads a copy of the weights in its own layout of blocks.
PACKED = Product(lambda w: torch.ops.mkldnn._reorder_linear_weight(w), _multiply_packed)

PRODUCTS: dict[str, Product] = {
    "plain": PLAIN,
    "transposed": Product(lambda weight: weight.t().contiguous(), _multiply_transposed),
    "packed": PACKED,
    "compiled": Product(compiled.Panels.of, compiled.multiply),
}


def _with_silu_gate(product: Product) -> Product:
    """Returns the gated product by a kernel that does not apply the gate itself."""

    def multiply(x: Tensor, prepared: Any, base: Tensor | None) -> Tensor:
        gate, gated = product.multiply(x, prepared, base).chunk(2, -1)
        return silu(gate).mul_(gated)

    return replace(product, multiply=multiply)


GATED_PRODUCTS = {
    **{name: _with_silu_gate(product) for name, product in PRODUCTS.items()},
    "compiled": Product(compiled.Panels.of_gated, compiled.multiply),
}


def _bf16_without_copy(unit: compiled.Bf16Unit, gated: bool = False) -> Product:
    """Returns a product by our compiled bf16 kernels, which read the weight without a copy."""
    return Product(
        _keep_weight,
        partial(compiled.multiply_bf16, unit, gated=gated),
        needs_copy=False,
        supports=partial(compiled.supports_bf16, unit, gated=gated),
    )


BF16_PRODUCTS: dict[str, Product] = {
    "plain": PLAIN,
    "packed": PACKED,
    **{unit.value: _bf16_without_copy(unit) for unit in compiled.Bf16Unit},
}
GATED_BF16_PRODUCTS = {
    **{name: _with_silu_gate(product) for name, product in BF16_PRODUCTS.items()},
    **{unit.value: _bf16_without_copy(unit, gated=True) for unit in compiled.Bf16Unit},
}


def _as_product(product: FewBitProduct, gated: bool) -> Product:
    """Returns a product with rounded weights in the form in which it can be chosen like others.

    ``gated`` says whether the first half of the outputs gates the second.
    """
    plain = Product(
        few_bits.weight_preparer(product, gated), product.multiply, supports=product.supports
    )
    return _with_silu_gate(plain) if gated and not product.gates else plain


@cache
def rounded_products(rounding: Rounding, gated: bool) -> dict[str, Product]:
    """Returns the products to choose from for a draft whose weights are rounded, by name.

    The first is the plain one, which a prompt's many rows need.
    """
    plain = _with_silu_gate(PLAIN) if gated else PLAIN
    few_bit = few_bits.few_bit_products(rounding)
    return {"plain": plain, **{name: _as_product(each, gated) for name, each in few_bit.items()}}


def product_names(dtype: torch.dtype = torch.float32) -> list[str]:
    """Returns the names of the products to choose from on this machine, for weights of this type.

    "transposed" is only among them where our own kernels cannot be compiled. A single name means
    that there is nothing to choose.
    """
    if dtype == torch.bfloat16:
        units = [unit.value for unit in compiled.bf16_units()]
        return ["plain", "packed", *units] if units else ["plain"]
    if dtype != torch.float32:
        return ["plain"]
    left_out = "transposed" if compiled.is_available() else "compiled"
    return [name for name in PRODUCTS if name != left_out]


@dataclass(frozen=True)
class Choice:
    """The quickest kernel by number of rows.

    ``names[i]`` is for up to ``rows[i]`` rows, and the last name also for more.
    """

    rows: tuple[int, ...]
    names: tuple[str, ...]

    def kernel_for(self, rows: int) -> str:
        return self.names[min(bisect_left(self.rows, rows), len(self.rows) - 1)]


ALWAYS_PLAIN = Choice((1,), ("plain",))


class Matrix:
    """A weight W that computes x W^T with one :class:`Epilogue`, by the kernels of a choice.

    For each number of rows a :class:`Choice` names a kernel, here also called a product. Until
    another choice is made (:meth:`choose`), the plain kernel multiplies with ``weight`` itself.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out into"],
        bias: Tensor | None = None,
        epilogue: Epilogue = Epilogue.NONE,
        rounding: Rounding | None = None,
    ) -> None:
        """With a bias the epilogue is ``BIAS``, whatever ``epilogue`` says. ``rounding`` is for a
        draft, whose few rows may be multiplied with rounded weights."""
        self.rounding = rounding
        self.weight, self.bias = weight, bias
        self.epilogue = epilogue if bias is None else Epilogue.BIAS
        self.may_be_copied = True
        self.drop_copies()
        self.choose(ALWAYS_PLAIN)

    def __getstate__(self) -> tuple[Tensor, Tensor | None, Epilogue, Rounding | None]:
        """Leaves out prepared weights: they cannot be copied or sent, so they are made anew."""
        return self.weight, self.bias, self.epilogue, self.rounding

    def __setstate__(self, state: tuple[Tensor, Tensor | None, Epilogue, Rounding | None]) -> None:
        self.weight, self.bias, self.epilogue, self.rounding = state
        self.may_be_copied = True
        self.drop_copies()
        self.choose(ALWAYS_PLAIN)

    @property
    def products(self) -> Mapping[str, Product]:
        """The products for a weight of this type with this epilogue, by name."""
        is_gated = self.epilogue is Epilogue.SILU_GATE
        if self.rounding is not None:
            return rounded_products(self.rounding, is_gated)
        if self.weight.dtype == torch.bfloat16:
            return GATED_BF16_PRODUCTS if is_gated else BF16_PRODUCTS
        return GATED_PRODUCTS if is_gated else PRODUCTS

    @property
    def candidates(self) -> list[str]:
        """The names of the products to choose from here; the first is "plain"."""
        names = self.product_names
        return [n for n in names if self.may_use(n) and self.products[n].supports(self.weight)]

    @property
    def product_names(self) -> list[str]:
        """The names of the products on this machine for weights of this type and rounding."""
        if self.rounding is not None:
            return list(self.products)
        return product_names(self.weight.dtype)

    def rounded(self, rounding: Rounding) -> Matrix:
        """Returns a matrix over the same weight that may multiply few rows with rounded weights."""
        return Matrix(self.weight, self.bias, self.epilogue, rounding)

    def may_use(self, name: str) -> bool:
        """Returns whether a product needs no copy of the weight, or may have one
        (``may_be_copied``)."""
        return self.may_be_copied or not self.products[name].needs_copy

    @property
    def problem_size(self) -> ProblemSize:
        """What the time of a product depends on, apart from the number of rows."""
        return (*self.weight.shape, self.epilogue)

    def drop_copies(self) -> None:
        """Drops all copies of the weights. They are prepared anew when they are chosen."""
        self._prepared: dict[str, Any] = {}
        # For each choice, the kernel and its weights by number of rows.
        self._tables: dict[Choice, list[tuple[Callable[..., Tensor], Any]]] = {}

    def choose(self, choice: Choice) -> None:
        """Multiplies by this choice from now on.

        Prepares the weights, as they are now, for kernels that no earlier choice had. Copies for
        earlier choices stay, so that going back to one costs nothing.
        """
        if choice not in self._tables:
            for name in set(choice.names) - self._prepared.keys():
                self._prepared[name] = self.products[name].prepare(self.weight)
            # Entry n is for n rows. The last one is for more rows than the choice names.
            names = [choice.kernel_for(rows) for rows in range(choice.rows[-1] + 2)]
            self._tables[choice] = [(self.products[n].multiply, self._prepared[n]) for n in names]
        self._kernel_by_rows = self._tables[choice]
        self._max_rows = len(self._kernel_by_rows) - 1

    @property
    def prepared_kernels(self) -> frozenset[str]:
        """The kernels that the weights are prepared for."""
        return frozenset(self._prepared)

    @property
    def has_copies(self) -> bool:
        """Whether there are copies of the weights, which have to follow a change."""
        return any(self.products[name].needs_copy for name in self._prepared)

    def __call__(self, x: Float[Tensor, "all into"]) -> Float[Tensor, "all out"]:
        multiply, prepared = self._kernel_by_rows[min(x.shape[0], self._max_rows)]
        return multiply(x, prepared, self.bias)

    def add_to(
        self, hidden: Float[Tensor, "all out"], x: Float[Tensor, "all into"]
    ) -> Float[Tensor, "all out"]:
        """Returns hidden + x W^T, for a matrix without a bias."""
        multiply, prepared = self._kernel_by_rows[min(x.shape[0], self._max_rows)]
        return multiply(x, prepared, hidden)


def are_fp32_on_cpu(tensors: Iterable[Tensor]) -> bool:
    return all(each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)


def has_kernels(matrices: Sequence[Matrix]) -> bool:
    """Returns whether there may be kernels to choose from: on a CPU with oneDNN, if all weights
    have the same type."""
    weights = [matrix.weight for matrix in matrices]
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    alike = len({weight.dtype for weight in weights}) == 1
    return on_cpu and alike and torch.backends.mkldnn.is_available()


def may_copy(matrices: Sequence[Matrix]) -> bool:
    """Returns whether there is memory for copies of the weights, in every layout that is timed."""
    (dtype,) = {matrix.weight.dtype for matrix in matrices}
    products = matrices[0].products
    layouts = sum(products[name].needs_copy for name in product_names(dtype))
    copies = layouts * sum(matrix.weight.nbytes for matrix in matrices)
    return copies <= MAX_COPY_SHARE * memory.available_bytes(torch.device("cpu"))


class TunedMatrices:
    """Chooses for matrices the kernels that are quickest on this machine.

    Where there is nothing to choose from, the matrices multiply by the plain kernel, and this
    object is falsy.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices: Sequence[Matrix] = ()
        if matrices and has_kernels(matrices):
            # Rounded weights are copies that the caller asked for, whatever memory they take.
            with_copies = matrices[0].rounding is not None or may_copy(matrices)
            for matrix in matrices:
                matrix.may_be_copied = with_copies
            if any(len(matrix.candidates) > 1 for matrix in matrices):
                self._matrices = matrices
        # The entries of each weight that are compared to notice a change, and their values when the
        # copies were made.
        self._entries = [fingerprint_entries(matrix.weight) for matrix in self._matrices]
        self._fingerprints: list[bytes] = []
        self._choices: dict[int, list[Choice]] = {}  # By number of threads.
        self._threads = 0  # torch's number of threads when kernels were chosen last

    def __bool__(self) -> bool:
        return bool(self._matrices)

    def weights_changed(self) -> bool:
        """Returns whether weights were changed in place since their copies were made.

        A change of a whole row or column is noticed (:func:`fingerprint_entries`). The numbers
        themselves are compared, because torch's version counter of a tensor stays as it is when
        ``weight.data`` is written.
        """
        return bool(self._fingerprints) and self._fingerprints != self._read_fingerprints()

    def _read_fingerprints(self) -> list[bytes]:
        # A weight without copies has nothing that would have to follow a change.
        pairs = zip(self._matrices, self._entries, strict=True)
        return [bytes_of(entries) if matrix.has_copies else b"" for matrix, entries in pairs]

    def refresh(self) -> None:
        """Copies the weights anew if they were changed, and chooses kernels for the current number
        of torch's threads.

        Kernels are chosen once for each number of threads. The copies that they need stay, so going
        back to an earlier number of threads costs nothing. There are never more copies than
        :func:`may_copy` allows, except of rounded weights, which it does not limit.
        """
        if not self._matrices:
            return
        fingerprints = self._read_fingerprints()
        threads = torch.get_num_threads()
        if self._fingerprints == fingerprints and self._threads == threads:
            return
        if self._fingerprints != fingerprints:
            for matrix in self._matrices:
                matrix.drop_copies()
        if threads not in self._choices:
            self._choices[threads] = choose_products(self._matrices)
        self._threads = threads
        for matrix, choice in zip(self._matrices, self._choices[threads], strict=True):
            matrix.choose(choice)
        self._fingerprints = self._read_fingerprints()  # There may be copies of more weights now.


def choose_rounded(matrices: Sequence[Matrix]) -> None:
    """Lets matrices on a GPU multiply few rows with rounded weights.

    Nothing is measured, since on a GPU there is only one product for each rounding, and it reads
    fewer bytes.
    """
    for matrix in matrices:
        rounded = [name for name in matrix.candidates if name != "plain"]
        if rounded:
            max_rows = few_bits.MAX_FP8_ROWS
            matrix.choose(Choice((max_rows, max_rows + 1), (rounded[0], "plain")))


def fingerprint_entries(weight: Float[Tensor, "out into"]) -> Float[Tensor, "*sampled"]:
    """Returns a view of some entries of a weight, by which the change of a whole row or a whole
    column is noticed.

    It has at least one entry of every row and one of every column. Usually it has about as many
    entries as the longer side, and a few times as many where few steps (see below) share no divisor
    with the length of a row. A weight whose entries are not contiguous in memory, transposed or
    not, is returned whole.

    The entries are ``step`` apart in memory. ``step`` is at most the length of a row, so every row
    has an entry. Every column has one for two reasons. ``step`` is at most the number of rows, so
    there are at least as many entries as columns. And ``step`` shares no divisor with the length of
    a row, so as many consecutive entries as there are columns lie in different columns.
    """
    if not weight.is_contiguous():
        return fingerprint_entries(weight.t()) if weight.t().is_contiguous() else weight
    rows, into = weight.shape
    step = max(1, min(rows, into - 1))
    while math.gcd(step, into) > 1:
        step -= 1
    return weight.view(-1)[::step]


def bytes_of(entries: Float[Tensor, "*sampled"]) -> bytes:
    """Returns the bytes of some numbers, whose type may be one that numpy lacks, like bfloat16."""
    return entries.contiguous().view(torch.uint8).numpy().tobytes()


def choose_products(matrices: Sequence[Matrix]) -> list[Choice]:
    """Returns the choice of products for each matrix. Matrices of one size are timed together, and
    get the same choice."""
    by_size = defaultdict(list)
    for matrix in matrices:
        by_size[matrix.problem_size].append(matrix)
    first = matrices[0]
    names = [name for name in first.product_names if first.may_use(name)]
    weight_bytes = sum(matrix.weight.nbytes for matrix in matrices)
    is_cold = exceeds_caches(weight_bytes)
    # Stored times are used again only where all of these are the same.
    facts = "products", str(first.weight.dtype), names, sorted(by_size), is_cold
    measured = shortest_times(facts, lambda: time_products(by_size, weight_bytes))
    # The seconds of each product, by problem size and then by number of rows.
    times: dict[ProblemSize, dict[int, dict[str, float]]] = defaultdict(dict)
    for (*size, rows), seconds in measured.items():
        times[tuple(size)][rows] = seconds
    without_copy = [name for name in names if not first.products[name].needs_copy]
    choice_by_size = {size: best_choice(each, without_copy) for size, each in times.items()}
    return [choice_by_size[matrix.problem_size] for matrix in matrices]


@torch.no_grad()
def time_products(
    by_size: Mapping[ProblemSize, Sequence[Matrix]],
    weight_bytes: int,
    seconds: float = PRODUCT_TIMING_SECONDS,
) -> dict[ProblemSize, dict[str, float]]:
    """Returns the seconds of every product, by (*problem size, number of rows) and kernel.

    The numbers of rows that matter most are always timed, and as many others as fit into
    ``seconds``.

    ``by_size`` has the matrices of each size. ``weight_bytes`` are those of all weights of the
    model. If they do not fit into the processor's caches, a forward finds no weight there, and the
    kernel that is quickest with a weight in the cache may be slow without. So the caches are
    emptied then before a product of few rows is timed.
    """
    began = time.perf_counter()
    empty_caches = cache_emptier(weight_bytes)
    # For each size, a matrix to time and, by product, several weights in that product's layout. A
    # timed call multiplies with one after another, so the nearest cache does not hold them all.
    prepared: dict[ProblemSize, tuple[Matrix, dict[str, list[Any]]]] = {}
    for size, (first, *others) in by_size.items():
        # Of a large matrix, such as a vocabulary's, a part of the outputs is timed. Every product
        # that takes the whole matrix takes this part too.
        units = TIMED_CALL_BYTES // first.weight[0].nbytes // TIMED_OUTPUTS_UNIT
        outputs = max(1, units) * TIMED_OUTPUTS_UNIT
        part = Matrix(first.weight[:outputs], first.bias, first.epilogue, first.rounding)
        part.may_be_copied = first.may_be_copied
        # A part of a weight takes more than half of TIMED_CALL_BYTES, so this is 1 for a part. The
        # whole weights of ``others`` are never timed together with one.
        max_weights = max(1, TIMED_CALL_BYTES // part.weight.nbytes)
        weights = [part.weight, *(matrix.weight for matrix in others)][:max_weights]
        copies = {
            name: [part.products[name].prepare(each) for each in weights]
            for name in first.candidates
        }
        prepared[size] = part, copies
    times = {}
    for rows in dict.fromkeys((*ROWS_TIMED_FIRST, *TIMED_ROWS)):
        if rows not in ROWS_TIMED_FIRST and time.perf_counter() - began > seconds:
            break
        for size, (part, copies) in prepared.items():
            count = FEW_MATRICES if rows >= FEW_MATRICES_FROM_ROWS else None
            calls = {
                name: _call_for_all(part, name, rows, each[:count]) for name, each in copies.items()
            }
            is_cold = empty_caches is not None and rows <= MAX_COLD_ROWS
            times[*size, rows] = time_calls(calls, empty_caches) if is_cold else time_calls(calls)
    return times


def cache_emptier(weight_bytes: int) -> Callable[[], object] | None:
    """Returns a call that empties the caches of weights; None where the weights of a model of this
    size stay there from one forward to the next."""
    if not exceeds_caches(weight_bytes):
        return None
    # Adding up one and a half times as many bytes as the cache holds puts the weights out of it.
    number_count = 3 * largest_cache_bytes() // 2 // torch.float32.itemsize
    return torch.zeros(number_count, dtype=torch.float32).sum


def exceeds_caches(weight_bytes: int) -> bool:
    """Returns whether a forward of a model of this size finds none of its weights in a cache."""
    return weight_bytes > 2 * largest_cache_bytes()


def largest_cache_bytes() -> int:
    """Returns the size of the processor's largest cache."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = file.read_text().strip()
        if number.endswith("K") and number[:-1].isdigit():
            sizes.append(1024 * int(number[:-1]))
    return max(sizes, default=USUAL_CACHE_BYTES)


def _call_for_all(
    part: Matrix, name: str, rows: int, prepared: Sequence[Any]
) -> Callable[[], object]:
    """Returns a call that multiplies ``rows`` random rows by the product ``name``, with one
    ``prepared`` weight after another. ``part`` has the shape and the epilogue of all of them."""
    multiply = part.products[name].multiply
    (out, into) = part.weight.shape
    x = torch.randn(rows, into).to(part.weight.dtype)
    base = None if part.bias is None else part.bias[:out]
    if part.epilogue is Epilogue.ADD:
        base = torch.randn(rows, out).to(part.weight.dtype)
    return lambda: [multiply(x, each, base) for each in prepared]


def time_calls(
    calls: dict[str, Callable[[], object]], prepare: Callable[[], object] | None = None
) -> dict[str, float]:
    """Returns the seconds of each call: the shortest of several, each after ``prepare`` if it is
    given. The seconds of ``prepare`` do not count.

    The calls take turns, so that a busy moment does not fall on one of them alone.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CALLS_PER_MEASUREMENT if prepare is None else COLD_CALLS_PER_MEASUREMENT):
        for name, call in calls.items():
            if prepare is not None:
                prepare()
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: min(each) for name, each in times.items()}


def shortest_times(
    facts: Sequence[object], measure: Callable[[], Mapping[ProblemSize, Mapping[str, float]]]
) -> dict[ProblemSize, dict[str, float]]:
    """Returns the seconds of each kernel by problem size, as measured on this machine so far.

    ``measure`` measures them once. ``facts`` are all on which the times depend, apart from the
    machine, its number of threads and the version of our own kernels. Times are stored by all of
    these. Only the first ``MAX_MEASUREMENTS`` calls of this function with the same facts measure,
    and the shortest time of each kernel counts: a single short measurement may fall into a busy
    moment.
    """
    # The word "least" only keeps these keys apart from others. With another word, times that are
    # stored already would not be found.
    key = _MEASUREMENTS.key("least", compiled.version(), *facts)
    measurements, stored = _MEASUREMENTS.load(key) or (0, [])
    times = {tuple(size): seconds for size, seconds in stored}
    if measurements < MAX_MEASUREMENTS:
        for size, new in measure().items():
            old = times.get(size, new)
            times[size] = {name: min(seconds, old[name]) for name, seconds in new.items()}
        _MEASUREMENTS.save(key, [measurements + 1, list(times.items())])
    return times


def best_choice(times: dict[int, dict[str, float]], without_copy: Sequence[str] = ()) -> Choice:
    """Returns the best choice by these seconds, which are by number of rows and kernel.

    It is the quickest kernel for each number of rows, except that copies of the weights are saved:
    a kernel that needs one is left out where doing without it makes no number of rows slower by
    more than ``MAX_SLOWDOWN_WITHOUT_COPY``. The first kernel and those in ``without_copy`` need no
    copy.

    Between two numbers of rows that were timed, the kernel of the larger number is used. If 4 and 6
    rows were timed, 5 rows get the kernel for 6, because a kernel that is the best for 4 rows may
    be far behind from 5 rows on.
    """
    rows = sorted(times)
    names = list(times[rows[0]])

    def slowdown(subset: Sequence[str]) -> float:
        """Returns how much slower a subset of the kernels is at worst: the largest ratio, over the
        numbers of rows, of the subset's best time to the best time of all kernels."""
        return max(min(times[n][name] for name in subset) / min(times[n].values()) for n in rows)

    # Leave out one kernel after another: always the one that is missed least.
    while copying := [name for name in names[1:] if name not in without_copy]:
        without = {name: slowdown([each for each in names if each != name]) for name in copying}
        needless = min(without, key=without.__getitem__)
        if without[needless] > 1 + MAX_SLOWDOWN_WITHOUT_COPY:
            break
        names.remove(needless)
    return Choice(tuple(rows), tuple(min(names, key=times[n].__getitem__) for n in rows))


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionChoice:
    """The quickest attention kernels by number of rows and of keys.

    ``names[i]`` are two kernels for up to ``rows[i]`` rows, and the last two also for more. The
    first is for fewer than ``thresholds[i]`` keys, the second for that many and more.
    """

    rows: tuple[int, ...]
    names: tuple[tuple[str, str], ...]
    thresholds: tuple[int, ...]

    def kernel_for(self, rows: int, keys: int) -> str:
        index = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        for_few_keys, for_many_keys = self.names[index]
        return for_few_keys if keys < self.thresholds[index] else for_many_keys


@torch.no_grad()
def choose_attention(
    facts: Sequence[object],
    calls: Callable[[int, int], dict[str, Callable[[], object]]],
    rows: Sequence[int] = ATTENTION_ROWS,
    keys: Sequence[int] = ATTENTION_KEYS,
) -> AttentionChoice:
    """Returns the quickest attention kernels for these numbers of rows and of keys.

    ``calls`` gives a call of each kernel for (rows, keys). ``facts`` is what their times depend on.
    """
    sizes = [(row_count, key_count) for row_count in rows for key_count in keys]
    # The word "ways" keeps the stored times of attention apart from those of products.
    times = shortest_times(
        ("ways", rows, keys, *facts), lambda: {size: time_calls(calls(*size)) for size in sizes}
    )
    plans = [
        best_threshold([times[row_count, key_count] for key_count in keys], keys)
        for row_count in rows
    ]
    names, thresholds = zip(*plans, strict=True)
    return AttentionChoice(tuple(rows), names, thresholds)


def best_threshold(
    times: Sequence[Mapping[str, float]], keys: Sequence[int] = ATTENTION_KEYS
) -> tuple[tuple[str, str], int]:
    """Returns (two kernels, a number of keys): the second kernel is for that many keys and more.

    ``times`` has the seconds of each kernel for each number of ``keys``. The result is the one that
    loses least over all these numbers, so that a single slow moment decides nothing. Both kernels
    are the same if one kernel for all numbers of keys loses least.
    """

    def slowdown(plan: tuple[tuple[str, str], int]) -> float:
        """Returns how much slower a plan is than the best kernels: the seconds of the plan's kernel
        over those of the best kernel, summed over the numbers of keys."""
        (for_few_keys, for_many_keys), threshold = plan
        chosen = [for_few_keys if each < threshold else for_many_keys for each in keys]
        return sum(
            each[name] / min(each.values()) for name, each in zip(chosen, times, strict=True)
        )

    names = tuple(times[0])
    single_kernels = [((name, name), keys[0]) for name in names]
    two_kernels = [(pair, threshold) for pair in permutations(names, 2) for threshold in keys[1:]]
    return min((*single_kernels, *two_kernels), key=slowdown)
