"""Attention and matrix products on a CPU in C (``kernels.c``), compiled once for this processor.

Attention is in fp32. Products of rows with a weight are in fp32, in bf16, and with weights of few
bits. A weight may be gated, such as an MLP's gate and up projections stored as one weight: the
first half of its outputs are gates of the second half. Its product is then silu(first half) times
the second half. :func:`attend` can also add up attention mass, which tells a view how much
attention a prompt's tokens get.

Torch's own kernels come from libraries that are made for large matrices, and on some processors
they use half of the available instructions. Torch's kernels are still used where no C compiler is
found (``CC``, else ``cc``), and where the compiled kernels do not compute what torch computes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.core.home import home, instructions

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    "-O2",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    # Without this, GCC fuses multiplying and adding (one rounding) in some loops, and does not (two
    # roundings) in others that must give the same numbers.
    "--param=avoid-fma-max-bits=0",
)
ATTENTION_ARGUMENTS = struct.Struct("8P18nd")  # The layout of `attention_call` in kernels.c.
PRODUCT_ARGUMENTS = struct.Struct("4P6n")  # The layout of `product` in kernels.c.
CODED_ARGUMENTS = struct.Struct("4P8n")  # The layout of `coded_product` in kernels.c.
# A weight of few bits (a "coded" or "rounded" one) is stored in panels, each of so many outputs
# (``few_bits.CodedPanels``). In kernels.c this number is OUTPUTS_PER_UNIT. OUTPUTS_PER_PANEL there
# is another number, for the panels of fp32 weights (:class:`Panels`).
OUTPUTS_PER_CODED_PANEL = 32
CODE_BLOCK = 32  # So many inputs of each output of a coded weight share a scale.
TILE_OUTPUTS = 16  # Outputs of a tile of weights.
TILE_INPUTS = 32  # Inputs of a tile of weights in bf16.
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
TOLERANCE = 1e-4  # How far results may be from torch's, or the compiled kernels are not used.
BF16_TOLERANCE = 2**-7  # The same where results are rounded to bf16.
VNNI_BIT = 4  # The bit of `low_precision_instructions` in kernels.c that stands for AVX512-VNNI.
COMPILE_TIMEOUT_SECONDS = 60.0


class MassOutput(NamedTuple):
    """Where :func:`attend` adds up attention mass: how much attention the last ``rows`` rows of its
    queries give to the chosen keys.

    ``columns``, ``mass`` and ``visible_keys`` are addresses of tensors, which the caller keeps
    alive during the call. ``columns`` has the places of the ``chosen`` keys. For each of them
    ``mass`` has two numbers, added up over the rows and the heads of a group: the key's share of
    the attention to all keys, and its share of the attention to the chosen keys. ``visible_keys``
    has a number n for each row of the queries, which then sees the first n keys. If that address is
    0, a row sees every key up to itself, or all keys where there is a bias.
    """

    columns: int = 0
    mass: int = 0
    chosen: int = 0
    rows: int = 0
    visible_keys: int = 0

    @classmethod
    def of(
        cls,
        rows: int,
        columns: Int[Tensor, " chosen"],
        mass: Float[Tensor, "kv_head 2 chosen"],
        visible_keys: Int[Tensor, " new"] | None = None,
    ) -> MassOutput:
        visible_address = 0 if visible_keys is None else visible_keys.data_ptr()
        return cls(columns.data_ptr(), mass.data_ptr(), len(columns), rows, visible_address)


NO_MASS = MassOutput()


def attend(
    q: Float[Tensor, "head new head_dim"],
    k: Float[Tensor, "kv_head seen head_dim"],
    v: Float[Tensor, "kv_head seen head_dim"] | None,
    bias: Float[Tensor, "rows last"] | None,
    scale: float,
    mass_output: MassOutput = NO_MASS,
) -> Float[Tensor, "head new head_dim"]:
    """Returns softmax(scale q k^T + bias) v. Only for sizes that :func:`supports_head_dim` allows.

    ``bias`` is added to the logits of the last keys, the same for each head. It has a row for each
    row of ``q``; further rows are not read. With a bias a row sees all keys, and without one every
    key up to itself. ``mass_output.visible_keys``, if given, instead says how many of the first
    keys each row sees.

    The attention mass of the last ``mass_output.rows`` rows is added to the tensor of
    ``mass_output``. If those are all rows, ``v`` may be None; then the returned numbers mean
    nothing. Raises MemoryError where there is no memory for the mass.
    """
    heads, rows, width = q.shape
    kv_heads, key_count, _ = k.shape
    assert v is not None or mass_output.rows == rows
    out = q.new_empty(rows, heads, width)
    columns, mass, chosen, mass_rows, visible_keys = mass_output
    if bias is None:
        bias_address, bias_stride, last = 0, 0, 0
    else:
        bias_address = bias.data_ptr()
        bias_stride = bias.stride(0)
        last = bias.shape[1]
    q, k = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k))
    if v is not None and v.stride(2) != 1:
        v = v.contiguous()
    v_address, v_strides = (0, (0, 0)) if v is None else (v.data_ptr(), v.stride()[:2])
    pointers = q.data_ptr(), k.data_ptr(), v_address, bias_address
    outputs = visible_keys, columns, out.data_ptr(), mass
    # The strides of heads and of rows in ``out``, which is [row, head, head_dim].
    out_strides = width, heads * width
    strides = *q.stride()[:2], *k.stride()[:2], *v_strides, bias_stride, *out_strides
    sizes = kv_heads, heads // kv_heads, rows, key_count, width, last, chosen, mass_rows
    arguments = ATTENTION_ARGUMENTS.pack(
        *pointers, *outputs, *strides, *sizes, torch.get_num_threads(), scale
    )
    if _library().attend(arguments):
        raise MemoryError(
            f"there is no memory for the attention mass of {mass_rows} rows on {key_count} keys"
        )
    return out.transpose(0, 1)


class Panels(NamedTuple):
    """A weight in the layout that :func:`multiply` reads.

    A panel holds the weights of a few outputs. For each input, those weights are side by side. In a
    panel of a gated weight, the first half of the outputs are gates of the second half.
    """

    numbers: Float[Tensor, "panels into few"]
    out: int  # How many results a row has; for a gated weight, half of its outputs.
    gated: bool = False

    @classmethod
    def of(cls, weight: Float[Tensor, "out into"]) -> Panels:
        """Returns the panels of a weight that is not gated."""
        panel_outputs = _library().outputs_of_a_panel()
        return cls(_in_panels(weight, panel_outputs).transpose(1, 2).contiguous(), len(weight))

    @classmethod
    def of_gated(cls, weight: Float[Tensor, "twice into"]) -> Panels:
        """Returns the panels of a gated weight. Each has a few of the gates, then the outputs that
        they gate."""
        panel_outputs = _library().outputs_of_a_panel() // 2
        both = torch.cat([_in_panels(half, panel_outputs) for half in weight.chunk(2)], 1)
        return cls(both.transpose(1, 2).contiguous(), len(weight) // 2, gated=True)


def _in_panels(
    weight: Float[Tensor, "out into"], panel_outputs: int
) -> Float[Tensor, "panels panel_outputs into"]:
    """Returns a weight cut into panels of so many outputs, the last one padded with zeros."""
    out, into = weight.shape
    panels = -(-out // panel_outputs)  # Rounded up.
    padded = weight.new_zeros(panels * panel_outputs, into)
    padded[:out] = weight
    return padded.view(-1, panel_outputs, into)


def multiply(
    x: Float[Tensor, "rows into"], panels: Panels, base: Float[Tensor, "*rows out"] | None = None
) -> Float[Tensor, "rows out"]:
    """Returns x W^T + base in fp32; for a gated weight, silu(first half) times the second half.

    ``base`` is added to the product: a bias [out], which is added to every row, or a row for each
    row of ``x``. There is no base for a gated weight. This works only where :func:`is_available`.
    """
    x = x.contiguous()
    rows, into = x.shape
    out = panels.out
    base_address = base_stride = 0
    if base is not None:
        base = base.contiguous()
        base_address = base.data_ptr()
        base_stride = out if base.dim() > 1 else 0
    product = x.new_empty(rows, out)
    _library().multiply(
        PRODUCT_ARGUMENTS.pack(
            *(x.data_ptr(), panels.numbers.data_ptr(), base_address, product.data_ptr()),
            *(base_stride, rows, into, out, panels.gated, torch.get_num_threads()),
        )
    )
    return product


class Bf16Unit(Enum):
    """The instructions that multiply numbers of bf16.

    A value is part of the name of the function in kernels.c, ``multiply_bf16_by_VALUE``, and of the
    keys under which timings are stored, so it stays as it is.
    """

    VECTORS = "vectors"  # AVX512-BF16.
    TILES = "tiles"  # AMX.

    @property
    def instruction_bit(self) -> int:
        """The bit of `low_precision_instructions` in kernels.c."""
        return {Bf16Unit.VECTORS: 1, Bf16Unit.TILES: 2}[self]


def supports_bf16(unit: Bf16Unit, weight: Float[Tensor, "all into"], gated: bool = False) -> bool:
    """Returns whether :func:`multiply_bf16` can read a weight of this shape and layout."""
    out = weight.shape[0] // (2 if gated else 1)
    into = weight.shape[1]
    fills_tiles = into % TILE_INPUTS == 0 or unit is Bf16Unit.VECTORS
    return weight.is_contiguous() and out >= TILE_OUTPUTS and fills_tiles


def multiply_bf16(
    unit: Bf16Unit,
    x: Float[Tensor, "rows into"],
    weight: Float[Tensor, "all into"],
    base: Float[Tensor, "*rows out"] | None = None,
    gated: bool = False,
) -> Float[Tensor, "rows out"]:
    """Returns what :func:`multiply` returns, in bf16 and by these instructions.

    The weight is read in place, without a copy in another layout. Sums are in fp32, in an order
    that does not depend on the number of rows. This works only for weights that
    :func:`supports_bf16` allows and for units of :func:`bf16_units`. Raises MemoryError.
    """
    x = x.contiguous()
    rows, into = x.shape
    out = weight.shape[0] // 2 if gated else weight.shape[0]
    base_address = base_stride = 0
    if base is not None:
        base = base.contiguous()
        base_address = base.data_ptr()
        base_stride = out if base.dim() > 1 else 0
    product = x.new_empty(rows, out)
    arguments = PRODUCT_ARGUMENTS.pack(
        *(x.data_ptr(), weight.data_ptr(), base_address, product.data_ptr()),
        *(base_stride, rows, into, out, gated, torch.get_num_threads()),
    )
    library = _library()
    multiply_by_unit = getattr(library, f"multiply_bf16_by_{unit.value}")
    if multiply_by_unit(arguments):
        raise MemoryError(f"there is no memory for {rows} rows of {into} numbers")
    return product


def multiply_coded(
    x: Float[Tensor, "rows into"],
    panels: UInt8[Tensor, "panel block byte"],
    base: Float[Tensor, "*rows out"] | None = None,
    *,
    out: int,
    bits: int,
    gated: bool = False,
) -> Float[Tensor, "rows out"]:
    """Returns what :func:`multiply` returns, approximately, for a weight of few bits.

    The rows of ``x`` are rounded to bytes. ``panels`` has the weight's codes of ``bits`` bits and
    their scales, laid out by ``few_bits.CodedPanels``. ``out`` is how many results a row has. Rows
    and results are in fp32 or bf16. This works only where :func:`supports_int8_products`. Raises
    MemoryError.
    """
    x = x.contiguous()
    rows, into = x.shape
    base_address = base_stride = 0
    if base is not None:
        base = base.contiguous()
        base_address = base.data_ptr()
        base_stride = out if base.dim() > 1 else 0
    product = x.new_empty(rows, out)
    is_fp32 = x.dtype == torch.float32  # Otherwise rows and results are in bf16.
    arguments = CODED_ARGUMENTS.pack(
        *(x.data_ptr(), panels.data_ptr(), base_address, product.data_ptr()),
        *(base_stride, rows, into, out, gated, torch.get_num_threads(), bits, is_fp32),
    )
    if _library().multiply_coded(arguments):
        raise MemoryError(f"there is no memory for {rows} rows of {into} numbers")
    return product


def supports_int8_products() -> bool:
    """Returns whether this processor multiplies with weights of few bits (AVX512-VNNI)."""
    return is_available() and bool(_library().low_precision_instructions() & VNNI_BIT)


@cache
def bf16_units() -> tuple[Bf16Unit, ...]:
    """Returns this processor's units for bf16 whose products agree with torch's."""
    if not is_available():
        return ()
    bits = _library().low_precision_instructions()
    units = [unit for unit in Bf16Unit if bits & unit.instruction_bit]
    correct = tuple(unit for unit in units if _is_bf16_correct(unit))
    if len(correct) < len(units):
        log.warning("the compiled products of bf16 are wrong on this processor, so some are unused")
    return correct


def _is_bf16_correct(unit: Bf16Unit) -> bool:
    """Returns whether products of 1 and of 37 rows with 40 outputs agree with torch's in fp32.

    None of these numbers is a multiple of ``TILE_OUTPUTS``, so tiles that are not full are tried as
    well.
    """
    into, out, most_rows = 64, 40, 37
    numbers = torch.linspace(-9.0, 9.0, (out + most_rows) * into).sin().bfloat16().view(-1, into)
    weight = numbers[:out]
    x = numbers[out:]
    exact = x.float() @ weight.float().t()
    products = [multiply_bf16(unit, x[:rows], weight).float() for rows in (1, most_rows)]
    return all(
        torch.allclose(each, exact[: len(each)], rtol=BF16_TOLERANCE, atol=BF16_TOLERANCE)
        for each in products
    )


def supports_head_dim(width: int) -> bool:
    """Returns whether attention is available for heads of this size."""
    return width <= MAX_HEAD_DIM and not width % HEAD_DIM_MULTIPLE and is_available()


@cache
def is_available() -> bool:
    """Returns whether these kernels could be compiled and compute what torch computes."""
    try:
        _library()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("torch's own kernels are used, because ours could not be compiled: %s", error)
        return False
    # Nine rows of four heads attend to keys of two heads. For the product, the keys of four heads
    # are the rows, and the values are the weight.
    heads, rows, head_dim = 4, 9, 16
    numbers = torch.linspace(-9.0, 9.0, 3 * heads * rows * head_dim).sin()
    q, k, v = numbers.view(3, heads, rows, head_dim)
    exact = scaled_dot_product_attention(q, k[:2], v[:2], is_causal=True, enable_gqa=True)
    x = k.flatten(0, 1)
    weight = v.flatten(0, 1)
    attended = attend(q, k[:2], v[:2], bias=None, scale=head_dim**-0.5)
    correct = torch.allclose(attended, exact, atol=TOLERANCE)
    correct &= torch.allclose(multiply(x, Panels.of(weight)), x @ weight.t(), atol=TOLERANCE)
    if not correct:
        log.warning("the compiled kernels are wrong on this processor, so they are not used")
    return correct


@cache
def _library() -> ctypes.CDLL:
    """Returns the library, and compiles it if there is none of this :func:`version` yet.

    Raises OSError or SubprocessError.
    """
    path = _library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # The file is missing or cut short.
        library = _compile(path)
    library.attend.argtypes = library.multiply.argtypes = (ctypes.c_char_p,)
    library.multiply.restype = None
    return library


def _compile(path: Path) -> ctypes.CDLL:
    """Compiles the library, stores it at ``path`` for later processes, and returns it."""
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "kernels.so"
        subprocess.run(
            [*_compiler(), *FLAGS, "-o", library, SOURCE],
            check=True, capture_output=True, timeout=COMPILE_TIMEOUT_SECONDS,
        )  # fmt: skip
        with suppress(OSError):  # In a read-only home, the next process compiles again.
            path.parent.mkdir(parents=True, exist_ok=True)
            own_copy = path.with_suffix(f".{os.getpid()}")
            shutil.copy(library, own_copy)
            own_copy.replace(path)
        return ctypes.CDLL(str(library))


@cache
def version() -> str:
    """Returns a digest of what these kernels are compiled from, by which compiler, and for which
    processor.

    It is part of the library's file name and of the keys of stored timings, so that neither is used
    after a change. A process that finds no compiler uses the library that was compiled last for
    these sources, and has that library's version.
    """
    sources = _digest(SOURCE.read_bytes(), _compiler(), FLAGS, instructions())
    compiler_files = _compiler_files()
    if not compiler_files:
        compiled_before = home().glob(f"kernels-{sources}-*.so")
        if (newest := max(compiled_before, key=_modified_at, default=None)) is not None:
            return newest.stem.removeprefix("kernels-")
    return f"{sources}-{_digest(compiler_files)}"


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _modified_at(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _library_path() -> Path:
    return home() / f"kernels-{version()}.so"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def _compiler_files() -> list[tuple[str, int, int]]:
    """Returns the path, size and time of each program that the compiler's command names. They
    change when a compiler is upgraded in place."""
    found = (shutil.which(word) for word in _compiler())
    files = [Path(program).resolve() for program in found if program is not None]
    states = [(file, file.stat()) for file in files]
    return [(str(file), state.st_size, state.st_mtime_ns) for file, state in states]
