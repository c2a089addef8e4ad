"""Attention of few rows on a GPU: decoding and verifying, for several requests, in three kernels.

One kernel norms and rotates queries and keys and writes the caches, one attends over splits of the
keys, one adds those up (``few_rows_triton``). All that changes from step to step is in the device's
memory (lengths, places, masks, even where the caches are), so a captured CUDA graph may be replayed
while texts grow and requests come and go.

Where Triton is missing, or what its kernels give on this device is not what torch gives, there are
none (:func:`kernels_for` says so), and torch's own attention serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remembered
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import rms_norm

from saccade.model.cache import Cache

log = logging.getLogger(__name__)

MAX_ROWS = 64  # of a request; more rows attend as a prompt's do
DEVICES = ("cuda",)  # where these kernels are used
TRITON = "saccade.model.kernels.few_rows_triton"
POINTER_ALIGNMENT = 16  # bytes; the kernels read as much at once

CLOSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far the kernels may be from torch in fp32, as a share of 1 + the number."""


class Rows(Protocol):
    """The rows of one request in a forward; ``attention.Segment`` is one."""

    @property
    def cache(self) -> Cache: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def at(self) -> int: ...
    @property
    def mask(self) -> Bool[Tensor, "new last"]: ...


@dataclass(frozen=True)
class Kernels:
    """The kernels for a model of these heads on one device, where they were tried and are right."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    triton: Any  # the module of kernels

    def fits(self, cache: Cache, layers: int) -> bool:
        """Whether the kernels can read this cache: heads in rows that lie one after another."""
        return all(
            tensor.stride()[1:] == (self.head_dim, 1)
            and tensor.data_ptr() % POINTER_ALIGNMENT == 0
            and tensor.dtype == self.dtype
            for tensor in (*cache.keys[:layers], *cache.values[:layers])
        )

    def over(self, requests: Sequence[Rows], layers: int) -> FewRowAttention | None:
        """The attention of one forward; None where these kernels are not made for it."""
        most = max(rows.stop - rows.start for rows in requests)
        if most > MAX_ROWS or not all(self.fits(rows.cache, layers) for rows in requests):
            return None
        tail = max(rows.mask.shape[1] for rows in requests)
        total = requests[-1].stop
        found = FewRowAttention(self, layers, len(requests), total, most, tail)
        found.stage(requests)
        return found


class FewRowAttention:
    """The attention of steps of one size: so many requests, rows and masked keys.

    Its numbers lie in the device's memory. :meth:`stage` writes those of the next step there.
    """

    def __init__(
        self, kernels: Kernels, layers: int, requests: int, rows: int, most_rows: int, tail: int
    ) -> None:
        """``most_rows`` is the largest number of rows of any request, ``tail`` of masked keys."""
        self._kernels, self._triton = kernels, kernels.triton
        device, kv_heads = kernels.device, kernels.kv_heads
        queries = most_rows * kernels.heads // kv_heads
        programs = requests * kv_heads * -(-queries // self._triton.row_block(queries))
        self._launch = self._triton.Launch(
            kernels.heads,
            kv_heads,
            kernels.head_dim,
            requests,
            rows,
            most_rows,
            self._triton.splits_for(programs, processors(device)),
        )
        # One tensor, so that one copy to the device is enough.
        sizes = requests * self._triton.NUMBERS.value, rows * 2, layers * requests * 2
        self._staged = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        numbers, places, offsets = self._staged.split(sizes)
        self.numbers: Int[Tensor, "request 6"] = numbers.view(requests, -1)
        self.places: Int[Tensor, "row 2"] = places.view(rows, 2)
        self.offsets: Int[Tensor, "layer request 2"] = offsets.view(layers, requests, 2)
        self._by_layer = list(self.offsets)
        # Where caches are is written as their distance from this tensor.
        self._anchor = torch.empty(1, dtype=kernels.dtype, device=device)
        self.mask: UInt8[Tensor, "row tail"] = torch.zeros(
            rows, tail, dtype=torch.uint8, device=device
        )

    def stage(self, requests: Sequence[Rows]) -> None:
        """Writes the numbers of a step. A request with fewer rows than there is room for repeats
        its last one, whose key goes after the others and is seen by no row.

        Every request has as much room as the first one where there is more room than rows.
        """
        layers = len(self.offsets)
        room = self.mask.shape[0]
        spare = room > sum(rows.stop - rows.start for rows in requests)
        each = room // len(requests) if spare else 0
        numbers: list[int] = []
        places: list[int] = []
        mask = torch.zeros(self.mask.shape, dtype=torch.uint8)
        first = 0
        for number, rows in enumerate(requests):
            new, block = rows.stop - rows.start, rows.mask
            count = max(each, new)
            keys, tail = rows.at + new, block.shape[1]
            cache = rows.cache
            strides = cache.keys[0].stride(0), cache.values[0].stride(0)
            numbers += [first, count, keys - tail, keys, *strides]
            for row in range(count):
                places += [number, rows.at + row]
            mask[first : first + new, :tail] = block
            mask[first + new : first + count] = mask[first + new - 1]
            first += count
        anchor, size = self._anchor.data_ptr(), self._anchor.element_size()
        offsets = [
            (tensors[layer].data_ptr() - anchor) // size
            for layer in range(layers)
            for rows in requests
            for tensors in (rows.cache.keys, rows.cache.values)
        ]
        self._staged.copy_(torch.tensor([*numbers, *places, *offsets]))
        self.mask.copy_(mask)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "head row head_dim"],
        k: Float[Tensor, "kv_head row head_dim"],
        v: Float[Tensor, "kv_head row head_dim"],
        scale: float,
    ) -> Float[Tensor, "row out"]:
        """Writes a layer's keys and values, which are rotated already, and attends."""
        by_row = (each.transpose(0, 1) for each in (q, k, v))
        return self._attend(layer, *by_row, scale, None, None, 0.0)

    def rotate_and_attend(
        self,
        layer: int,
        qkv: Float[Tensor, "row heads head_dim"],
        scale: float,
        rotation: tuple[Float[Tensor, "row head_dim"], Float[Tensor, "row head_dim"]],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Float[Tensor, "row out"]:
        """Norms and rotates a layer's queries and keys, writes its cache and attends.

        ``qkv`` is what the layer projected: the heads of queries, then of keys, then of values.
        ``rotation`` is (cos, sin), sin with the sign of rotate-half in it.
        """
        sizes = self._launch.heads, self._launch.kv_heads, self._launch.kv_heads
        return self._attend(layer, *qkv.split(sizes, 1), scale, rotation, norms, eps)

    def _attend(
        self,
        layer: int,
        q: Float[Tensor, "row head head_dim"],
        k: Float[Tensor, "row kv_head head_dim"],
        v: Float[Tensor, "row kv_head head_dim"],
        scale: float,
        rotation: tuple[Tensor, Tensor] | None,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Float[Tensor, "row out"]:
        caches = self.numbers, self._anchor, self._by_layer[layer]
        turned = self._triton.rotate_and_write(q, k, v, self.places, *caches, rotation, norms, eps)
        mixed: Tensor = self._triton.attend(turned, self.mask, *caches, self._launch, scale)
        return mixed


@remembered
def processors(device: torch.device) -> int:
    """How many processors (SMs) a device has."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def kernels_for(
    heads: int,
    kv_heads: int,
    head_dim: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> Kernels | None:
    """The kernels for a model of these heads, whose layers are on these ``devices``; None on CPUs,
    over several devices, without Triton, and where a trial shows that they are wrong there."""
    device, *others = set(devices)
    if others or device.type not in DEVICES or dtype not in CLOSE or head_dim % 2:
        return None
    return _tried(heads, kv_heads, head_dim, device, dtype)


@remembered
def _tried(
    heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Kernels | None:
    try:
        triton: ModuleType = import_module(TRITON)
    except ImportError as error:
        log.warning("torch's attention serves on %s, for there is no Triton: %s", device, error)
        return None
    kernels = Kernels(heads, kv_heads, head_dim, dtype, device, triton)
    try:
        apart = check(kernels)
    except Exception as error:  # Triton raises whatever its compiler and the driver raise
        log.warning("torch's attention serves on %s, for Triton's failed: %s", device, error)
        return None
    if not apart <= CLOSE[dtype]:  # NaN is not close either
        log.warning(
            "torch's attention serves on %s in %s, for Triton's is %.2g apart from it",
            device,
            dtype,
            apart,
        )
        return None
    return kernels


# -- what the kernels are held against -------------------------------------------------------------


@dataclass(frozen=True)
class TrialRows:
    """The rows of a request that exists for a trial only."""

    cache: Cache
    start: int
    stop: int
    at: int
    mask: Bool[Tensor, "new last"]


def trial(
    kernels: Kernels, sizes: Sequence[tuple[int, int]], seed: int = 0
) -> tuple[list[TrialRows], Float[Tensor, "row heads head_dim"]]:
    """Requests of random keys, (keys that are there, new rows) each, with random trees over their
    new rows, and random projections of these rows. Cache rows that hold nothing are NaN."""
    random = torch.Generator().manual_seed(seed)
    device, dtype = kernels.device, kernels.dtype
    requests, start = [], 0
    for at, new in sizes:
        cache = Cache(
            1,
            kernels.kv_heads,
            kernels.head_dim,
            at + new + MAX_ROWS,
            dtype=dtype,
            devices=[device],
        )
        for tensor in (*cache.keys, *cache.values):
            shape = kernels.kv_heads, at, kernels.head_dim
            tensor.fill_(float("nan"))
            tensor[:, :at] = torch.randn(shape, generator=random).to(tensor)
        mask = torch.rand(new, new, generator=random).tril() > 0.5
        mask |= torch.eye(new, dtype=torch.bool)
        requests.append(TrialRows(cache, start, start + new, at, mask))
        start += new
    shape = start, kernels.heads + 2 * kernels.kv_heads, kernels.head_dim
    return requests, torch.randn(shape, generator=random).to(device, dtype)


def plain(
    requests: Sequence[Rows],
    layer: int,
    qkv: Float[Tensor, "row heads head_dim"],
    scale: float,
    rotation: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    soft_cap: float = 0.0,
) -> Float[Tensor, "row out"]:
    """What the kernels compute, in fp32 and torch's own words; it writes the caches too."""
    kv_heads, head_dim = requests[0].cache.keys[layer].shape[::2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if norms is not None:
        q, k = (rms_norm(x, (head_dim,), w, eps) for x, w in zip((q, k), norms, strict=True))
    if rotation is not None:
        q, k = (_rotated(each, *rotation) for each in (q, k))
    found = []
    for rows in requests:
        own, new = slice(rows.start, rows.stop), rows.stop - rows.start
        rows.cache.write(layer, rows.at, k[own].transpose(0, 1), v[own].transpose(0, 1))
        keys, values = (each.float() for each in rows.cache.read(layer, rows.at + new))
        grouped = q[own].transpose(0, 1).float().reshape(kv_heads, -1, new, head_dim)
        logits = torch.einsum("hgrd,hkd->hgrk", grouped, keys) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        hidden = ~rows.mask.to(logits.device)
        logits[..., -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
        mixed = torch.einsum("hgrk,hkd->rhgd", logits.softmax(-1), values)
        found.append(mixed.reshape(new, -1))
    return torch.cat(found).to(qkv.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), -1)
    exact = x.float() * cos[:, None].float() + turned.float() * sin[:, None].float()
    return exact.to(x.dtype)


@torch.no_grad()
def check(kernels: Kernels) -> float:
    """How far the kernels are from torch, in what they give and in what they write (see ``CLOSE``;
    NaN if anything is NaN): of one row and of the most rows, over few keys and over many, with
    norms and rotations."""
    worst = []
    width, device, dtype = kernels.head_dim, kernels.device, kernels.dtype
    scale = width**-0.5
    for sizes in [(700, 1)], [(0, 5), (333, MAX_ROWS), (64, 2)]:
        requests, qkv = trial(kernels, sizes)
        others, _ = trial(kernels, sizes)
        angle = torch.arange(len(qkv))[:, None] * torch.linspace(0.1, 1, width)
        rotation = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        norm = torch.linspace(0.5, 1.5, width).to(device, dtype)
        few_rows = kernels.over(requests, 1)
        assert few_rows is not None
        given = scale, rotation, (norm, norm), 1e-6
        found = [few_rows.rotate_and_attend(0, qkv, *given)]
        expected = [plain(others, 0, qkv, *given)]
        for rows, other in zip(requests, others, strict=True):
            end = rows.at + rows.stop - rows.start
            found += rows.cache.read(0, end)
            expected += other.cache.read(0, end)
        for ours, theirs in zip(found, expected, strict=True):
            difference = (ours.float() - theirs.float()).abs() / (1 + theirs.float().abs())
            worst.append(difference.amax())
    return float(torch.stack(worst).amax())
