"""Attention on a GPU for forwards of few rows, which decode or verify several requests.

A row is one token of a forward: the last token of a request's text, or a drafted one. Three Triton
kernels do the work (``few_rows_triton``). The first norms and rotates queries and keys, and writes
keys and values into the caches. The second attends. Few rows do not fill a GPU, so it cuts the keys
into splits that are read by different programs. The third adds up the results of the splits.

Everything that changes from step to step is read from the device's memory: how long texts are,
where caches are, and which row sees which key. A captured forward (a CUDA graph, ``cuda_graphs``)
may therefore be replayed while texts grow and requests come and go.

Where Triton is missing, or where its kernels do not compute on a device what torch computes,
:func:`kernels_for` returns None, and torch's own attention is used. Kernels that fail later, at a
size that was not tried, are not used again for models with the same heads, dtype and device
(:func:`abandon`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm

log = logging.getLogger(__name__)

MAX_ROWS = 64  # The most rows of a request that the kernels are tried with.
DEVICE_TYPES = ("cuda",)
TRITON = "saccade.model.kernels.few_rows_triton"

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""The largest allowed error against torch in fp32, by dtype: |ours - torch's| / (1 + |torch's|)."""

Buffers = Sequence[Float[Tensor, "pool_row head_dim"]]
"""Keys or values of all requests, by layer, as ``CachePool`` stores them."""
Rotation = tuple[Float[Tensor, "row head_dim"], Float[Tensor, "row head_dim"]]
"""cos and sin of each row; sin includes the sign of rotate-half."""
Norms = tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]]
"""The weights of the norms of queries and of keys."""


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
        """The module of kernels. It is a property rather than a field, so that models can be copied
        and pickled."""
        return import_module(TRITON)

    def splits(self, requests: int, rows: int) -> int:
        """Returns into how many splits each request's keys are cut, in a forward of ``requests``
        with ``rows`` each."""
        # The heads of a group share a key head, so each row has several queries for it.
        queries = rows * self.heads // self.kv_heads
        blocks = -(-queries // self.triton.row_block(queries))  # This rounds up.
        # Without splits there would be one program for each request, key head and block of queries.
        programs = requests * self.kv_heads * blocks
        splits: int = self.triton.splits_for(programs, processor_count(self.device))
        return splits

    @property
    def stages(self) -> int:
        """How many blocks of keys a program reads ahead."""
        stages: int = self.triton.stages_for(shared_memory(self.device))
        return stages


_abandoned: set[Kernels] = set()
"""Kernels that failed after they had passed their trial."""


def abandon(kernels: Kernels, reason: str) -> None:
    """Gives up kernels that passed their trial and failed later. A warning says so once."""
    if kernels not in _abandoned:
        _abandoned.add(kernels)
        log.warning(
            "torch's attention is used on %s from now on, because Triton's few-row kernels for "
            "%d heads of %d failed: %s",
            kernels.device,
            kernels.heads,
            kernels.head_dim,
            reason,
        )


@dataclass(frozen=True)
class FewRowAttention:
    """The attention of one forward, or of all captured forwards of a size.

    Each request has the same number of rows. The tensors are read when the kernels run, so they may
    be filled anew before each replay.
    """

    kernels: Kernels
    keys: Buffers
    values: Buffers
    caches: Int[Tensor, "3 request"]
    """For each request: its first row in the buffers, the buffer rows that each key head has, and
    the length of the prefix that all its rows see."""
    cache_rows: Int[Tensor, "request rows"]
    """The position of each row's key in the request's cache."""
    visible: Bool[Tensor, "request rows tail"]
    """Whether each row sees each of the ``tail`` keys that follow the prefix. The rows' own keys
    are among these."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "head row head_dim"],
        k: Float[Tensor, "kv_head row head_dim"],
        v: Float[Tensor, "kv_head row head_dim"],
        scale: float,
    ) -> Float[Tensor, "row out"]:
        """Writes a layer's keys and values into the caches, and returns the attention of all rows.

        Queries and keys are already rotated.
        """
        queries, keys, values = (each.transpose(0, 1) for each in (q, k, v))
        return self._attend(layer, queries, keys, values, scale, rotation=None, norms=None, eps=0.0)

    def rotate_and_attend(
        self,
        layer: int,
        qkv: Float[Tensor, "row heads head_dim"],
        scale: float,
        rotation: Rotation,
        norms: Norms | None,
        eps: float,
    ) -> Float[Tensor, "row out"]:
        """Norms and rotates a layer's queries and keys, writes keys and values into the caches, and
        returns the attention of all rows.

        ``qkv`` is the layer's projection: the heads of queries, then of keys, then of values.
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
        kernels = self.kernels
        requests, rows = self.cache_rows.shape
        keys = self.keys[layer]
        values = self.values[layer]
        caches = self.caches
        queries = kernels.triton.rotate_and_write(
            q, k, v, keys, values, caches, self.cache_rows.flatten(), rotation, norms, eps
        )
        mask = self.visible.view(torch.uint8).flatten(0, 1)
        splits = kernels.splits(requests, rows)
        out: Tensor = kernels.triton.attend(
            queries,
            keys,
            values,
            caches,
            mask,
            kernels.kv_heads,
            splits,
            scale,
            stages=kernels.stages,
        )
        return out


@cache
def processor_count(device: torch.device) -> int:
    """Returns how many processors (SMs) a GPU has.

    A CPU, where Triton's interpreter runs, counts as a few, so that keys are split there too.
    """
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Returns how many bytes of shared memory a program on a device may have."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def kernels_for(
    heads: int,
    kv_heads: int,
    head_dim: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> Kernels | None:
    """Returns the kernels for a model of these heads, whose layers are on these ``devices``.

    Returns None on CPUs, over several devices, without Triton, for dtypes and head sizes that the
    kernels do not have, where a trial shows that they are wrong, and after they were abandoned.
    """
    device, *others = set(devices)
    is_one_gpu = not others and device.type in DEVICE_TYPES
    if not is_one_gpu or dtype not in TOLERANCE or head_dim % 2:
        return None
    kernels = _kernels_if_correct(heads, kv_heads, head_dim, device, dtype)
    return None if kernels in _abandoned else kernels


@cache
def _kernels_if_correct(
    heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Kernels | None:
    try:
        triton: Any = import_module(TRITON)
    except ImportError as error:
        log.warning("torch's attention is used on %s, because Triton is missing: %s", device, error)
        return None
    if triton.INTERPRETED and device.type == "cuda":
        log.warning("torch's attention is used on %s, because TRITON_INTERPRET is set", device)
        return None
    kernels = Kernels(heads, kv_heads, head_dim, dtype, device)
    # Triton launches on the current device, wherever the tensors are.
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with on_device:
            difference = difference_from_torch(kernels)
    except Exception as error:  # Triton raises whatever its compiler and the driver raise.
        log.warning("torch's attention is used on %s, because Triton's failed: %s", device, error)
        return None
    if not difference <= TOLERANCE[dtype]:  # This form also refuses NaN.
        log.warning(
            "torch's attention is used on %s in %s, because Triton's differs from it by %.2g",
            device,
            dtype,
            difference,
        )
        return None
    return kernels


# -- comparing the kernels with torch --------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Random requests for the kernels, and what torch computes for them.

    Each request has the same number of new rows after the tokens that are in its cache. Among the
    new rows, each sees itself and a random half of those before it. Unused rows of caches are NaN.
    """

    attention: FewRowAttention
    qkv: Float[Tensor, "row heads head_dim"]

    @classmethod
    def of(
        cls, kernels: Kernels, lengths: Sequence[int], rows: int, tail: int = 64, seed: int = 0
    ) -> Trial:
        """Returns a trial of one layer, with one request for each of ``lengths``.

        ``lengths`` are the requests' numbers of cached tokens, and ``rows`` is the number of new
        rows of each. ``tail`` is how many keys have a mask (``FewRowAttention.visible``).
        """
        random = torch.Generator().manual_seed(seed)
        device, dtype, kv_heads = kernels.device, kernels.dtype, kernels.kv_heads
        tail = max(tail, rows)
        # The caches of all requests but the first have rows that are never used.
        capacities = [length + rows + 3 * number for number, length in enumerate(lengths)]
        first_rows = [kv_heads * sum(capacities[:number]) for number in range(len(lengths))]
        total = kv_heads * sum(capacities)
        buffers = torch.full((2, total, kernels.head_dim), float("nan"))
        for first, capacity, length in zip(first_rows, capacities, lengths, strict=True):
            request_buffers = buffers[:, first : first + kv_heads * capacity].view(
                2, kv_heads, capacity, -1
            )
            request_buffers[:, :, :length] = torch.randn(
                request_buffers[:, :, :length].shape, generator=random
            )
        visible = torch.zeros(len(lengths), rows, tail, dtype=torch.bool)
        earlier = torch.rand(len(lengths), rows, rows, generator=random).tril() > 0.5
        visible[..., :rows] = earlier | torch.eye(rows, dtype=torch.bool)
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
        """Returns the same requests over buffers of their own."""
        attention = self.attention
        keys = [attention.keys[0].clone()]
        values = [attention.values[0].clone()]
        copied = FewRowAttention(
            attention.kernels,
            keys,
            values,
            attention.caches,
            attention.cache_rows,
            attention.visible.clone(),
        )
        return Trial(copied, self.qkv)

    def expected_output(
        self,
        scale: float,
        rotation: Rotation | None = None,
        norms: Norms | None = None,
        eps: float = 0.0,
        soft_cap: float = 0.0,
    ) -> Float[Tensor, "row out"]:
        """Returns what the kernels should return, computed by torch in fp32.

        ``soft_cap`` bounds the logits by a tanh; with 0 they are not bounded.
        Writes the new keys and values into the buffers, as the kernels do.
        """
        attention, kernels = self.attention, self.attention.kernels
        kv_heads, head_dim = kernels.kv_heads, kernels.head_dim
        q, k, v = self.qkv.split((kernels.heads, kv_heads, kv_heads), 1)
        if norms is not None:
            q, k = (rms_norm(x, (head_dim,), w, eps) for x, w in zip((q, k), norms, strict=True))
        if rotation is not None:
            q, k = (_rotate(each, rotation) for each in (q, k))
        rows = attention.visible.shape[1]
        outputs = []
        for number, (first, capacity, length) in enumerate(attention.caches.t().tolist()):
            new = slice(number * rows, (number + 1) * rows)
            end = length + rows
            seen = []
            # The new keys and values are written, and those of the whole request are read.
            for buffer, source in ((attention.keys[0], k), (attention.values[0], v)):
                of_request = buffer[first : first + kv_heads * capacity]
                of_request = of_request.view(kv_heads, capacity, -1)
                of_request[:, length:end] = source[new].transpose(0, 1)
                seen.append(of_request[:, :end].float())
            seen_keys, seen_values = seen
            # The heads are grouped by the key head that they share: [kv_head, group, row, dim].
            grouped = q[new].transpose(0, 1).float().reshape(kv_heads, -1, rows, head_dim)
            logits = torch.einsum("hgrd,hkd->hgrk", grouped, seen_keys) * scale
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            is_masked = ~attention.visible[number, :, :rows]
            logits[..., length:].masked_fill_(is_masked, float("-inf"))
            output = torch.einsum("hgrk,hkd->rhgd", logits.softmax(-1), seen_values)
            outputs.append(output.reshape(rows, -1))
        return torch.cat(outputs).to(self.qkv.dtype)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    cos, sin = (each[:, None].float() for each in rotation)
    return (x.float() * cos + swapped.float() * sin).to(x.dtype)


def example_rotation_and_norms(trial: Trial) -> tuple[Rotation, Norms]:
    """Returns a rotation for the rows of a trial, and weights for the norms of queries and keys."""
    count = len(trial.qkv)
    width = trial.attention.kernels.head_dim
    angle = torch.arange(count)[:, None] * torch.linspace(0.1, 1, width)
    norms = torch.linspace(0.5, 1.5, width), torch.linspace(1.4, 0.6, width)
    cos, sin, query_norm, key_norm = (
        each.to(trial.qkv) for each in (angle.cos(), angle.sin(), *norms)
    )
    return (cos, sin), (query_norm, key_norm)


@torch.no_grad()
def difference_from_torch(kernels: Kernels) -> float:
    """Returns the largest difference between the kernels' numbers and torch's, both in what they
    return and in what they write.

    A difference is measured as ``TOLERANCE`` says. The result is NaN if a returned number is NaN.
    In the written buffers NaN counts as 0, because unused rows are NaN. The kernels are tried with
    one row and with the most rows, over few keys and over many, with norms and rotations.
    """
    differences = []
    # The cached tokens of each request, and the new rows of each.
    trials = [((700,), 1), ((0, 333, 64), 2), ((150,), MAX_ROWS)]
    if kernels.device.type == "cuda":
        # Every split has several blocks of keys here. Triton's interpreter would take too long for
        # it, so it runs on a GPU only.
        trials.append(((9000,), 4))
    for lengths, rows in trials:
        trial = Trial.of(kernels, lengths, rows)
        reference_trial = trial.copy()
        rotation, norms = example_rotation_and_norms(trial)
        scale = kernels.head_dim**-0.5
        output = trial.attention.rotate_and_attend(0, trial.qkv, scale, rotation, norms, eps=1e-6)
        expected_output = reference_trial.expected_output(scale, rotation, norms, eps=1e-6)
        written, expected_written = (
            [buffer.nan_to_num() for buffer in (*each.attention.keys, *each.attention.values)]
            for each in (trial, reference_trial)
        )
        pairs = zip([output, *written], [expected_output, *expected_written], strict=True)
        for actual, expected in pairs:
            difference = (actual.float() - expected.float()).abs() / (1 + expected.float().abs())
            differences.append(difference.amax())
    return float(torch.stack(differences).amax())
