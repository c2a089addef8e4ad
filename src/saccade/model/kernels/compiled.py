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
from collections.abc import Sequence
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
    """Where a call adds what its last rows weigh some columns by, as :func:`attended` tells it. By
    address: somebody holds the tensors meanwhile."""

    columns: int = 0
    mass: int = 0
    chosen: int = 0
    rows: int = 0

    @classmethod
    def of(
        cls, rows: int, columns: Int[Tensor, " chosen"], mass: Float[Tensor, "kv_head 2 chosen"]
    ) -> Noted:
        return cls(columns.data_ptr(), mass.data_ptr(), len(columns), rows)


NOTHING = Noted()


def attend(
    q: Float[Tensor, "head new head_dim"],
    k: Float[Tensor, "kv_head seen head_dim"],
    v: Float[Tensor, "kv_head seen head_dim"],
    bias: Float[Tensor, "rows last"] | None,
    scale: float,
    noted: Noted = NOTHING,
) -> Float[Tensor, "head new head_dim"]:
    """softmax(scale q k^T + bias) v.

    ``bias`` is added over the last keys, for a group's heads as further rows; without one each row
    sees up to itself, and what is ``noted`` is written down. Only where :func:`serves` says so.
    """
    (heads, rows, width), (kv_heads, seen, _) = q.shape, k.shape
    out = q.new_empty(rows, heads, width)
    added = (0, 0, 0) if bias is None else (bias.data_ptr(), bias.stride(0), bias.shape[1])
    columns, mass, chosen, last = noted
    q, k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k, v))
    failed = _library().attend(
        CALL.pack(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), added[0], 0, columns, out.data_ptr(), mass),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], added[1], width, heads * width),
            *(kv_heads, heads // kv_heads, rows, seen, width, added[2], chosen, last),
            *(torch.get_num_threads(), scale),
        )
    )
    if failed:
        raise MemoryError(f"no memory for what {last} rows attend to among {seen} keys")
    return out.transpose(0, 1)


def attended(
    q: Float[Tensor, "layer head new head_dim"],
    keys: Sequence[Float[Tensor, "kv_head held head_dim"]],
    seen: int,
    sees: Int[Tensor, " new"],
    columns: Int[Tensor, " chosen"],
) -> Float[Tensor, "layer kv_head 2 chosen"]:
    """The weights softmax(q k^T) of rows on some columns, over all keys that each ``sees``, at most
    ``seen``, and over the columns alone, summed over rows and a group's heads. Only where
    :func:`serves` says so."""
    (layers, heads, rows, width), kv_heads = q.shape, len(keys[0])
    mass = q.new_zeros(layers, kv_heads, 2, len(columns))
    if len({k.stride() for k in keys}) > 1 or keys[0].stride(2) != 1:
        keys = [k.contiguous() for k in keys]
    q, sees, columns = q.contiguous(), sees.contiguous(), columns.contiguous()
    places = struct.pack(f"{layers}P", *(k.data_ptr() for k in keys))
    call = CALL.pack(
        *(q.data_ptr(), 0, 0, 0, sees.data_ptr(), columns.data_ptr(), 0, mass.data_ptr()),
        *(*q.stride()[1:3], *keys[0].stride()[:2], 0, 0, 0, 0, 0),
        *(kv_heads, heads // kv_heads, rows, seen, width, 0, len(columns), rows),
        *(torch.get_num_threads(), 1.0),
    )
    if _library().attended(call, layers, places, q.stride(0)):
        raise MemoryError(f"no memory for what {rows} rows attend to among {seen} keys")
    return mass


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
    library.multiply.restype, number = None, ctypes.c_ssize_t
    library.attended.argtypes = ctypes.c_char_p, number, ctypes.c_char_p, number
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
