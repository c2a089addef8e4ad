"""Attention and products of fp32 on a CPU in C (``kernels.c``), compiled for this processor once.

Torch's own go through libraries that are made for large matrices, and on some processors with half
of the instructions there are. Where no C compiler is found (``CC``, else ``cc``), or what it makes
does not compute the same, torch's serve.
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
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.core.home import home, instructions

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = (
    *("-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"),
    "--param=avoid-fma-max-bits=0",  # GCC would round twice in some loops, and not in their twins
)
CALL = struct.Struct("8P18nd")  # `call` of the source, and its `product`
PRODUCT = struct.Struct("4P6n")
WIDEST, DIMS = 256, 8  # of a head's size: the most, and what it is a multiple of
CLOSE = 1e-4  # to what torch computes
PATIENCE = 60.0  # seconds for a compiler


class Noted(NamedTuple):
    """Where a call adds what its last rows weigh some columns by, as ``attended`` tells it, and how
    many keys each row ``sees``, where that is not up to itself. By address: somebody holds the
    tensors meanwhile."""

    columns: int = 0
    mass: int = 0
    chosen: int = 0
    rows: int = 0
    sees: int = 0

    @classmethod
    def of(
        cls,
        rows: int,
        columns: Int[Tensor, " chosen"],
        mass: Float[Tensor, "kv_head 2 chosen"],
        sees: Int[Tensor, " new"] | None = None,
    ) -> Noted:
        seen = 0 if sees is None else sees.data_ptr()
        return cls(columns.data_ptr(), mass.data_ptr(), len(columns), rows, seen)


NOTHING = Noted()


def attend(
    q: Float[Tensor, "head new head_dim"],
    k: Float[Tensor, "kv_head seen head_dim"],
    v: Float[Tensor, "kv_head seen head_dim"] | None,
    bias: Float[Tensor, "rows last"] | None,
    scale: float,
    noted: Noted = NOTHING,
) -> Float[Tensor, "head new head_dim"]:
    """softmax(scale q k^T + bias) v; where all rows are ``noted`` they may do without values, and
    what is given then means nothing.

    ``bias`` is added over the last keys, for each head the same: further rows are not looked at.
    Without one each row sees up to itself, or as many keys as ``noted`` says, and what is noted is
    written down. Only where :func:`serves` says so.
    """
    (heads, rows, width), (kv_heads, seen, _) = q.shape, k.shape
    assert v is not None or noted.rows == rows
    out = q.new_empty(rows, heads, width)
    added = (0, 0, 0) if bias is None else (bias.data_ptr(), bias.stride(0), bias.shape[1])
    columns, mass, chosen, last, sees = noted
    q, k = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k))
    if v is not None and v.stride(2) != 1:
        v = v.contiguous()
    values, apart = (0, (0, 0)) if v is None else (v.data_ptr(), v.stride()[:2])
    failed = _library().attend(
        CALL.pack(
            *(q.data_ptr(), k.data_ptr(), values, added[0], sees, columns, out.data_ptr(), mass),
            *(*q.stride()[:2], *k.stride()[:2], *apart, added[1], width, heads * width),
            *(kv_heads, heads // kv_heads, rows, seen, width, added[2], chosen, last),
            *(torch.get_num_threads(), scale),
        )
    )
    if failed:
        raise MemoryError(f"no memory for what {last} rows attend to among {seen} keys")
    return out.transpose(0, 1)


class Panels(NamedTuple):
    """A weight as :func:`multiply` reads it: a few outputs after another, each input's together."""

    numbers: Float[Tensor, "panels into few"]
    out: int
    gated: bool = False

    @classmethod
    def of(cls, weight: Float[Tensor, "out into"]) -> Panels:
        few = _library().outputs_of_a_panel()
        return cls(_in_panels(weight, few).transpose(1, 2).contiguous(), len(weight))

    @classmethod
    def of_gated(cls, weight: Float[Tensor, "twice into"]) -> Panels:
        """The first half of its outputs gates the second: each panel has of both."""
        few = _library().outputs_of_a_panel() // 2
        both = torch.cat([_in_panels(half, few) for half in weight.chunk(2)], 1)
        return cls(both.transpose(1, 2).contiguous(), len(weight) // 2, gated=True)


def _in_panels(weight: Float[Tensor, "out into"], few: int) -> Float[Tensor, "panels few into"]:
    out, into = weight.shape
    whole = weight.new_zeros(-(-out // few) * few, into)
    whole[:out] = weight
    return whole.view(-1, few, into)


def multiply(
    x: Float[Tensor, "rows into"], laid: Panels, base: Float[Tensor, "*rows out"] | None = None
) -> Float[Tensor, "rows out"]:
    """base + x W^T; of a gated weight, without a base, silu(gate) times what is gated. Only where
    :func:`available` says so."""
    x, (rows, into), out = x.contiguous(), x.shape, laid.out
    if base is None:
        place = 0, 0
    else:
        base = base.contiguous()
        place = base.data_ptr(), out if base.dim() > 1 else 0
    found = x.new_empty(rows, out)
    _library().multiply(
        PRODUCT.pack(
            *(x.data_ptr(), laid.numbers.data_ptr(), place[0], found.data_ptr()),
            *(place[1], rows, into, out, laid.gated, torch.get_num_threads()),
        )
    )
    return found


def serves(width: int) -> bool:
    """Whether attention is there for heads of this size."""
    return width <= WIDEST and not width % DIMS and available()


@cache
def available() -> bool:
    """Whether these kernels are there, and compute what torch does."""
    try:
        _library()
    except (OSError, subprocess.SubprocessError) as error:
        log.info("kernels stay torch's own, for none could be compiled: %s", error)
        return False
    q, k, v = torch.linspace(-9.0, 9.0, 3 * 4 * 9 * 16).sin().view(3, 4, 9, 16)
    exact = scaled_dot_product_attention(q, k[:2], v[:2], is_causal=True, enable_gqa=True)
    x, weight = k.flatten(0, 1), v.flatten(0, 1)
    same = torch.allclose(attend(q, k[:2], v[:2], None, 0.25), exact, atol=CLOSE)
    same &= torch.allclose(multiply(x, Panels.of(weight)), x @ weight.t(), atol=CLOSE)
    if not same:
        log.warning("compiled kernels are wrong on this processor, and left alone")
    return same


@cache
def _library() -> ctypes.CDLL:
    """What was compiled for this processor before, or is now. Raises OSError or SubprocessError."""
    place = _place()
    try:
        library = ctypes.CDLL(str(place))
    except OSError:  # not there, or cut short
        library = _compile(place)
    library.attend.argtypes = library.multiply.argtypes = (ctypes.c_char_p,)
    library.multiply.restype = None
    return library


def _compile(place: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "kernels.so"
        subprocess.run(
            [*_compiler(), *FLAGS, "-o", library, SOURCE],
            check=True, capture_output=True, timeout=PATIENCE,
        )  # fmt: skip
        with suppress(OSError):  # a read-only home only means compiling again
            place.parent.mkdir(parents=True, exist_ok=True)
            mine = place.with_suffix(f".{os.getpid()}")
            shutil.copy(library, mine)
            mine.replace(place)
        return ctypes.CDLL(str(library))


@cache
def version() -> str:
    """Names what these kernels are compiled from, by what and for which processor: seconds that are
    remembered are of one version."""
    made = repr((SOURCE.read_bytes(), _compiler(), FLAGS, instructions()))
    return hashlib.sha256(made.encode()).hexdigest()[:24]


def _place() -> Path:
    return home() / f"kernels-{version()}.so"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))
