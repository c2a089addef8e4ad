"""Attention of few rows on a GPU: decoding and verifying, for several requests, in three kernels.

One kernel norms and rotates queries and keys and writes the caches, one attends over splits of the
keys, one adds those up (``few_rows_triton``). All that changes from step to step is in the device's
memory (how long texts are, where caches are, who sees whom), so a captured forward may be replayed
while texts grow and requests come and go.

Where Triton is missing, or where what its kernels give on a device is not what torch gives,
:func:`kernels_for` gives none, and torch's own attention serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache as remembered
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm

log = logging.getLogger(__name__)

MAX_ROWS = 64  # of a request that the kernels are tried with
DEVICES = ("cuda",)  # where these kernels are used
TRITON = "saccade.model.kernels.few_rows_triton"

CLOSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far the kernels may be from torch in fp32, as a share of 1 + the number."""

Buffers = Sequence[Float[Tensor, "pool_row head_dim"]]
"""Keys or values of all requests, by layer, as ``CachePool`` holds them."""
Rotation = tuple[Float[Tensor, "row head_dim"], Float[Tensor, "row head_dim"]]
"""cos and sin of each row, sin with the sign of rotate-half in it."""
Norms = tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]]
"""The weights by which queries and keys are normed."""


@dataclass(frozen=True)
class Kernels:
    """The kernels for a model of these heads on one device."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def triton(self) -> Any:
        """The module of kernels. No field: a model is copied and sent to processes with these."""
        return import_module(TRITON)

    def splits(self, requests: int, rows: int) -> int:
        """Over how many programs the keys of each request are split."""
        queries = rows * self.heads // self.kv_heads
        blocks = -(-queries // self.triton.row_block(queries))
        found: int = self.triton.splits_for(
            requests * self.kv_heads * blocks, processors(self.device)
        )
        return found


@dataclass(frozen=True)
class FewRowAttention:
    """The attention of one forward, or of all captured ones of a size: as many rows a request.

    The tensors are read when the kernels run, so they may be filled anew before each replay.
    """

    kernels: Kernels
    keys: Buffers
    values: Buffers
    caches: Int[Tensor, "3 request"]
    """Of each request: its first row in the buffers, the rows a head has there, and how many keys
    every row sees."""
    places: Int[Tensor, "request rows"]
    """Where in its request's cache a row's key goes."""
    visible: Bool[Tensor, "request rows tail"]
    """Who sees which of the keys after those that every row sees."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "head row head_dim"],
        k: Float[Tensor, "kv_head row head_dim"],
        v: Float[Tensor, "kv_head row head_dim"],
        scale: float,
    ) -> Float[Tensor, "row out"]:
        """Writes a layer's keys and values, which are rotated already, and attends."""
        asked, keys, values = (each.transpose(0, 1) for each in (q, k, v))
        return self._attend(layer, asked, keys, values, scale, None, None, 0.0)

    def rotate_and_attend(
        self,
        layer: int,
        qkv: Float[Tensor, "row heads head_dim"],
        scale: float,
        rotation: Rotation,
        norms: Norms | None,
        eps: float,
    ) -> Float[Tensor, "row out"]:
        """Norms and rotates a layer's queries and keys, writes its cache and attends.

        ``qkv`` is what the layer projected: the heads of queries, then of keys, then of values.
        """
        heads, kv_heads = self.kernels.heads, self.kernels.kv_heads
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        return self._attend(layer, q, k, v, scale, rotation, norms, eps)

    def _attend(
        self,
        layer: int,
        q: Float[Tensor, "row head head_dim"],
        k: Float[Tensor, "row kv_head head_dim"],
        v: Float[Tensor, "row kv_head head_dim"],
        scale: float,
        rotation: Rotation | None,
        norms: Norms | None,
        eps: float,
    ) -> Float[Tensor, "row out"]:
        kernels, (requests, rows) = self.kernels, self.places.shape
        caches = self.keys[layer], self.values[layer], self.caches
        asked = kernels.triton.rotate_and_write(
            q, k, v, *caches, self.places.flatten(), rotation, norms, eps
        )
        mask = self.visible.view(torch.uint8).flatten(0, 1)
        splits = kernels.splits(requests, rows)
        mixed: Tensor = kernels.triton.attend(asked, *caches, mask, kernels.kv_heads, splits, scale)
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
        triton: Any = import_module(TRITON)
    except ImportError as error:
        log.warning("torch's attention serves on %s, for there is no Triton: %s", device, error)
        return None
    if triton.INTERPRETED and device.type == "cuda":
        log.warning("torch's attention serves on %s, for TRITON_INTERPRET is set", device)
        return None
    kernels = Kernels(heads, kv_heads, head_dim, dtype, device)
    # Triton launches on the current device, wherever the tensors are.
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with here:
            apart = difference_from_torch(kernels)
    except Exception as error:  # Triton raises whatever its compiler and the driver raise.
        log.warning("torch's attention serves on %s, for Triton's failed: %s", device, error)
        return None
    if not apart <= CLOSE[dtype]:  # NaN is not close either
        log.warning(
            "torch's attention serves on %s in %s: Triton's gives numbers %.2g apart from it",
            device,
            dtype,
            apart,
        )
        return None
    return kernels


# -- what the kernels are held against -------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Random requests for the kernels, and what torch computes of them.

    Each has ``rows`` new rows, over the tokens that are there already; ``visible`` are random trees
    over the new rows. Cache rows that hold nothing are NaN.
    """

    attention: FewRowAttention
    qkv: Float[Tensor, "row heads head_dim"]

    @classmethod
    def of(
        cls, kernels: Kernels, lengths: Sequence[int], rows: int, tail: int = 64, seed: int = 0
    ) -> Trial:
        """A trial of one layer, of as many requests as ``lengths``."""
        random = torch.Generator().manual_seed(seed)
        device, dtype, kv_heads = kernels.device, kernels.dtype, kernels.kv_heads
        tail = max(tail, rows)
        capacities = [length + rows + 3 * number for number, length in enumerate(lengths)]
        first_rows = [kv_heads * sum(capacities[:number]) for number in range(len(lengths))]
        total = kv_heads * sum(capacities)
        buffers = torch.full((2, total, kernels.head_dim), float("nan"))
        for first, capacity, length in zip(first_rows, capacities, lengths, strict=True):
            own = buffers[:, first : first + kv_heads * capacity].view(2, kv_heads, capacity, -1)
            own[:, :, :length] = torch.randn(own[:, :, :length].shape, generator=random)
        visible = torch.zeros(len(lengths), rows, tail, dtype=torch.bool)
        tree = torch.rand(len(lengths), rows, rows, generator=random).tril() > 0.5
        visible[..., :rows] = tree | torch.eye(rows, dtype=torch.bool)
        attention = FewRowAttention(
            kernels,
            [buffers[0].to(device, dtype)],
            [buffers[1].to(device, dtype)],
            torch.tensor([first_rows, capacities, lengths], device=device),
            (torch.tensor(lengths)[:, None] + torch.arange(rows)).to(device),
            visible.to(device),
        )
        shape = rows * len(lengths), kernels.heads + 2 * kv_heads, kernels.head_dim
        return cls(attention, torch.randn(shape, generator=random).to(device, dtype))

    def copy(self) -> Trial:
        """The same requests over buffers of their own."""
        own = self.attention
        keys, values = [own.keys[0].clone()], [own.values[0].clone()]
        copied = FewRowAttention(
            own.kernels, keys, values, own.caches, own.places, own.visible.clone()
        )
        return Trial(copied, self.qkv)

    def plain(
        self,
        scale: float,
        rotation: Rotation | None = None,
        norms: Norms | None = None,
        eps: float = 0.0,
        soft_cap: float = 0.0,
    ) -> Float[Tensor, "row out"]:
        """What the kernels compute, in fp32 and in torch's own words; it writes the buffers too."""
        own, kernels = self.attention, self.attention.kernels
        kv_heads, head_dim = kernels.kv_heads, kernels.head_dim
        q, k, v = self.qkv.split((kernels.heads, kv_heads, kv_heads), 1)
        if norms is not None:
            q, k = (rms_norm(x, (head_dim,), w, eps) for x, w in zip((q, k), norms, strict=True))
        if rotation is not None:
            q, k = (_rotated(each, rotation) for each in (q, k))
        rows, found = own.visible.shape[1], []
        for number, (first, capacity, length) in enumerate(own.caches.t().tolist()):
            new, end = slice(number * rows, (number + 1) * rows), length + rows
            parts = []
            for buffer, given in ((own.keys[0], k), (own.values[0], v)):
                cache = buffer[first : first + kv_heads * capacity].view(kv_heads, capacity, -1)
                cache[:, length:end] = given[new].transpose(0, 1)
                parts.append(cache[:, :end].float())
            grouped = q[new].transpose(0, 1).float().reshape(kv_heads, -1, rows, head_dim)
            logits = torch.einsum("hgrd,hkd->hgrk", grouped, parts[0]) * scale
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            hidden = ~own.visible[number, :, :rows]
            logits[..., length:].masked_fill_(hidden, float("-inf"))
            mixed = torch.einsum("hgrk,hkd->rhgd", logits.softmax(-1), parts[1])
            found.append(mixed.reshape(rows, -1))
        return torch.cat(found).to(self.qkv.dtype)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), -1)
    cos, sin = (each[:, None].float() for each in rotation)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def example_rotation(trial: Trial) -> tuple[Rotation, Norms]:
    """A rotation for a trial's rows and weights of norms, none of whose numbers are alike."""
    count, width = len(trial.qkv), trial.attention.kernels.head_dim
    angle = torch.arange(count)[:, None] * torch.linspace(0.1, 1, width)
    norms = torch.linspace(0.5, 1.5, width), torch.linspace(1.4, 0.6, width)
    cos, sin, query_norm, key_norm = (
        each.to(trial.qkv) for each in (angle.cos(), angle.sin(), *norms)
    )
    return (cos, sin), (query_norm, key_norm)


@torch.no_grad()
def difference_from_torch(kernels: Kernels) -> float:
    """How far the kernels are from torch, in what they give and in what they write (see ``CLOSE``;
    NaN if anything is NaN): of one row and of the most rows, over few keys and over many, with
    norms and rotations."""
    worst = []
    for lengths, rows in (((700,), 1), ((0, 333, 64), 2), ((150,), MAX_ROWS)):
        trial = Trial.of(kernels, lengths, rows)
        other = trial.copy()
        rotation, norms = example_rotation(trial)
        scale = kernels.head_dim**-0.5
        ours = trial.attention.rotate_and_attend(0, trial.qkv, scale, rotation, norms, 1e-6)
        theirs = other.plain(scale, rotation, norms, 1e-6)
        written, expected_written = (
            [buffer.nan_to_num() for buffer in (*each.attention.keys, *each.attention.values)]
            for each in (trial, other)
        )
        pairs = zip([ours, *written], [theirs, *expected_written], strict=True)
        for found, expected in pairs:
            apart = (found.float() - expected.float()).abs() / (1 + expected.float().abs())
            worst.append(apart.amax())
    return float(torch.stack(worst).amax())
