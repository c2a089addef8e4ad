"""The one attention function: causal and tree attention over the caches of several requests.

A forward is a flat list of tokens cut into *segments*, one per request. No request is padded to
another, and none reads another's keys. This module knows no model: layers call it with q, k and v.
For each segment it chooses a kernel, a function that attends, by the number of rows and keys. The
mask of a tree comes from ``core.tree.tree_mask``, and its positions from ``Session``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.model import kernels
from saccade.model.cache import send_to_device
from saccade.model.kernels import AttentionChoice, compiled
from saccade.model.kernels.attention_mass import Queries
from saccade.model.segments import Segment
from saccade.model.window_rule import KeyWindow
from saccade.model.windowed_attention import LogitExtras, attend_visible, visible_keys

Attend = Callable[..., Tensor]
"""What layers call: (layer, q, k, v, scale) -> an :data:`AttentionOutput`.

A :class:`Step` is one. The last layer of a prompt calls it with ``last=True`` as well.
"""
NewKeys = Float[Tensor, "kv_head written head_dim"]
Keys = Float[Tensor, "kv_head seen head_dim"]
Mask = Bool[Tensor, "new seen"]
AttentionOutput = Float[Tensor, "new out"]
"""For each row the outputs of all heads, one after the other: heads x head_dim numbers."""
Kernel = tuple[Callable[..., Queries], Tensor | None]
"""A function that attends, called as (q, k, v, mask, scale), and the mask for that call."""
PartialAttention = tuple[Queries, Float[Tensor, "head new"]]
"""Attention over some of the keys, and the log of the sum that its softmax divided by."""

# The query heads that share a key head can be passed to torch's kernels as further rows of that
# head ("folded"). This is done for segments of up to so many rows. With more rows it is faster to
# pass all query heads, and to let the kernel share the key heads among them (GQA). Our compiled
# kernel always gets all query heads.
FOLD_LIMIT = 64
# A timed call for a prompt has as many of the model's heads as make up to this many
# multiplications, and at least one head.
TIMED_MULTIPLICATIONS = 2**28
# A timed call for one row goes through several layers' keys and values in turn, up to this many
# bytes, so that they come from memory, as in a real forward, and not from the processor's cache.
TIMED_BYTES = 2**24
# Torch's fused kernel for every number of rows and keys. An entry of an ``AttentionChoice`` is for
# up to ``rows`` rows, and the last entry is for more rows too, so the only entry here is for all.
# The names are the kernel for fewer keys than the threshold, and the kernel for that many and more.
ALWAYS_FUSED = AttentionChoice(rows=(1,), names=(("fused", "fused"),), thresholds=(0,))
# Where no kernel returns log-sum-exps, at most so many queries and logits are computed at once.
MAX_QUERIES_AT_ONCE = 256
MAX_LOGITS_AT_ONCE = 2**25


# What a layer does to its logits besides scaling them: it bounds them (softcap), or adds one more
# for each head (attention sinks). Without either of the two, as here, ``LogitExtras`` is false.
NO_EXTRAS = LogitExtras()


@runtime_checkable
class ForwardAttention(Protocol):
    """The attention of one forward, as the modules of a language model call it layer by layer."""

    @property
    def segments(self) -> Sequence[Segment]:
        """One segment for each request whose cache the forward writes.

        There is none while a forward is captured as a CUDA graph. Which caches such a forward
        writes is set only at each replay.
        """

    def key_layer(self, layer: int) -> int:
        """Returns the number of a layer among those that have keys, from its place among all."""

    def __call__(
        self,
        layer: int,
        q: Queries,
        k: NewKeys,
        v: NewKeys,
        scale: float,
        *,
        extras: LogitExtras = NO_EXTRAS,
    ) -> AttentionOutput:
        """Returns the attention of one layer's rows. ``layer`` is what :meth:`key_layer` returns
        for it."""


class Step:
    """Attention for one forward: writes the new keys, then attends segment by segment.

    It is made anew for every forward, and passed to the layers explicitly.
    """

    # These defaults are for a derived class that does not call ``__init__``: every layer has keys,
    # and each row sees every key before it.
    _key_layers: Mapping[int, int] | None = None
    _windows: Sequence[KeyWindow | None] = ()
    _masks_always = False

    def __init__(
        self,
        segments: list[Segment],
        groups: int,
        dtype: torch.dtype,
        choice: AttentionChoice = ALWAYS_FUSED,
        key_layers: Mapping[int, int] | None = None,
        windows: Sequence[KeyWindow | None] = (),
        masks_always: bool = False,
    ) -> None:
        """``groups`` is the number of query heads for each key head.

        ``key_layers`` maps a layer's place among all layers to its number among those that have
        keys; None where all layers have. ``windows`` has the window of each layer that has keys,
        or is empty where none has a window. With ``masks_always`` every layer attends with an
        explicit mask. That is needed where values have another width than keys.
        """
        self.segments = segments
        self._key_layers = key_layers
        self._windows = windows
        self._masks_always = masks_always
        # What :meth:`_visible_keys` has computed, by its arguments.
        self._visible: dict[tuple[int, KeyWindow | None, torch.device], tuple[Tensor, int]] = {}
        self.calls = 0
        """How often layers have called this step. After a forward it is the number of layers if all
        of them compute their attention here."""
        self._choose: Callable[[Segment, int], Kernel] = partial(
            _choose_kernel, groups, dtype, choice
        )
        # If the model's layers have no keys, no layer calls this step, and no kernel is needed.
        self._kernels = [
            self._choose(each, each.stop - each.start) for each in segments if each.cache.keys
        ]
        for segment in segments:
            segment.cache.reserve(segment.end_key)

    def key_layer(self, layer: int) -> int:
        """Returns the number of a layer among those that have keys, from its place among all."""
        return layer if self._key_layers is None else self._key_layers[layer]

    def __call__(
        self,
        layer: int,
        q: Queries,
        k: NewKeys,
        v: NewKeys,
        scale: float,
        *,
        last: bool = False,
        extras: LogitExtras = NO_EXTRAS,
    ) -> Float[Tensor, "rows out"]:
        """Returns the attention of one layer's rows.

        ``layer`` is the layer's number among those that have keys (:meth:`key_layer`).
        With ``last``, in a forward of a single segment, it returns that of the last row alone.
        """
        self.calls += 1
        window = self._windows[layer] if self._windows else None
        parts = []
        for number, segment in enumerate(self.segments):
            kernel, mask = self._kernels[number]
            own_q, own_k, own_v = q, k, v
            if len(self.segments) > 1:
                rows = slice(segment.start, segment.stop)
                own_q = q[:, rows]
                own_k = k[:, rows]
                own_v = v[:, rows]
            cache, end = segment.cache, segment.end_key
            cache.write(layer, segment.first_key, own_k, own_v)
            # The queries of some segments are stored, so that the attention of their rows can be
            # computed after the forward.
            if segment.row_queries is not None:
                segment.row_queries.add(layer, own_q, scale)
            # First case: the rows attend by an explicit mask over all keys. Only this case can
            # apply a layer's extras.
            if segment.needs_full_mask(window) or extras or self._masks_always:
                # A recorder adds up the attention that certain keys of the prompt get. A layer with
                # a window is not recorded, because its rows see few of these keys.
                if segment.recorder is not None and window is None:
                    segment.recorder.store_queries(layer, own_q, own_k, scale)
                visible, first = self._visible_keys(number, window, cache.keys[layer].device)
                keys, values = cache.read(layer, end, first)
                out = attend_visible(own_q, keys, values, visible, scale, extras)
                if last:
                    out = out[:, -1:]
                parts.append(out.transpose(0, 1).reshape(out.shape[1], -1))
                continue
            # Second case: the rows attend by the segment's kernel. If they are recorded, it may be
            # replaced by one that also adds up the attention.
            keys, values = cache.read(layer, end)
            if last:
                # Only the last row is returned. But a recorder needs the queries of all rows from
                # the first one that it records to the last one of the segment.
                count = 1 if segment.recorder is None else segment.recorder.rows_to_chunk_end
                own_q = own_q[:, -count:]
            recording_kernel = None
            if segment.recorder is not None:
                recording_kernel = segment.recorder.recording_kernel(kernel, layer, own_q, scale)
            if recording_kernel is not None:
                kernel, mask = recording_kernel, None
            elif last:  # The segment's kernel was chosen for all its rows.
                own_q = own_q[:, -1:]
                kernel, mask = self._choose(segment, 1)
            if mask is not None and mask.device != keys.device:  # The model is on several devices.
                mask = mask.to(keys.device)
            # With pages, the rows attend one by one. Each row's queries choose the pages of keys
            # that the kernel reads for it.
            if segment.pages is not None:
                kernel = partial(segment.pages.attend, segment.cache, layer, kernel)
            out = kernel(own_q, keys, values, mask, scale)
            if last:
                out = out[:, -1:]
            parts.append(out.transpose(0, 1).reshape(out.shape[1], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _visible_keys(
        self, number: int, window: KeyWindow | None, device: torch.device
    ) -> tuple[Tensor, int]:
        """Returns which keys each row of a segment sees, and the first key that any row sees
        (:func:`visible_keys`). It is computed once for all layers with the same window on one
        device."""
        kind = number, window, device
        if kind not in self._visible:
            visible, first = visible_keys(self.segments[number], window)
            self._visible[kind] = visible.to(device), first
        return self._visible[kind]


def attend_partially(
    q: Queries, k: Keys, v: Keys, scale: float, *, causal: bool = False, visible: Mask | None = None
) -> PartialAttention:
    """Returns attention over some of the keys, and the log of the sum its softmax divided by.

    Each query sees all keys, or those that ``visible`` marks. With ``causal`` it sees the keys up
    to its own, and there must be as many keys as queries. Where torch has a flash kernel that
    returns the sums, it is used. Elsewhere a few queries are computed at a time. So memory is
    O(new + seen), apart from ``visible`` and the mask that a CPU's kernel needs in its place.
    """
    if q.device.type == "cpu":
        bias = None
        if visible is not None:
            bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], is_causal=causal, attn_mask=bias, scale=scale
        )
        return outputs[0][0], outputs[1][0].to(torch.float32)
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    # A GPU's flash kernel takes no mask, only these types, and only widths of a multiple of 8.
    flash_takes_it = is_half and visible is None and q.shape[-1] % 8 == 0
    if q.device.type == "cuda" and flash_takes_it:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], is_causal=causal, scale=scale
        )
        return outputs[0][0], outputs[1][0]
    return attend_partially_by_products(q, k, v, scale, causal=causal, visible=visible)


def attend_partially_by_products(
    q: Queries, k: Keys, v: Keys, scale: float, *, causal: bool = False, visible: Mask | None = None
) -> PartialAttention:
    """Returns what :func:`attend_partially` does, for devices and types without such a kernel.

    Keys that are not visible may be NaN, but their values may not: a value is multiplied by its
    weight even where the weight is 0.
    """
    heads, new, width = q.shape
    grouped = q.reshape(k.shape[0], -1, new, width)
    column = torch.arange(k.shape[1], device=q.device)
    outs, sums = [], []
    queries_within_limit = MAX_LOGITS_AT_ONCE // (heads * max(1, len(column)))
    queries_at_once = max(1, min(MAX_QUERIES_AT_ONCE, queries_within_limit))
    for start in range(0, new, queries_at_once):
        stop = min(start + queries_at_once, new)
        queries = grouped[:, :, start:stop].float()
        # Axes: h is a key head, g a query head of its group, r a row, s a key that may be seen.
        logits = torch.einsum("hgrd,hsd->hgrs", queries, k.float()) * scale
        if visible is not None:
            logits.masked_fill_(~visible[start:stop], float("-inf"))
        if causal:
            row = torch.arange(start, stop, device=q.device)[:, None]
            logits.masked_fill_(column > row, float("-inf"))
        sums.append(logits.logsumexp(-1).reshape(heads, stop - start))
        weights = logits.softmax(-1).to(v.dtype)
        outs.append(torch.einsum("hgrs,hsd->hgrd", weights, v).reshape(heads, -1, width))
    return torch.cat(outs, 1), torch.cat(sums, 1)


def merge(first: PartialAttention, second: PartialAttention) -> Queries:
    """Returns attention over the keys of both parts.

    With the log-sum-exps a and b of the two parts, the whole softmax divides by e^a + e^b. So the
    second part has the share e^b / (e^a + e^b) = sigmoid(b - a) of the result.
    """
    share = torch.sigmoid(second[1] - first[1])[..., None]
    return torch.lerp(first[0], second[0], share.to(first[0].dtype))


def _choose_kernel(
    groups: int, dtype: torch.dtype, choice: AttentionChoice, segment: Segment, new: int
) -> Kernel:
    """Returns the kernel and mask for ``new`` rows: all rows of a segment, or its last one.

    ``groups`` is the number of query heads for each key head.
    """
    name = choice.kernel_for(new, segment.end_key)
    device = segment.cache.keys[0].device
    # Without a ``recent_mask`` a row sees all keys up to its own, so a single row needs no mask.
    needs_mask = segment.recent_mask is not None or new > 1
    has_pages = segment.pages is not None
    has_few_rows = new <= FOLD_LIMIT
    on_gpu_without_pages = device.type != "cpu" and not has_pages
    # With a mask over all keys, a GPU's kernel could not split the keys. So the rows attend in two
    # parts, of which only the one over the last keys takes a mask.
    if has_few_rows and needs_mask and on_gpu_without_pages:
        return _attend_folded, send_to_device(segment.mask, device).repeat(groups, 1)
    # With pages the kernel is called for one row at a time, however many rows there are.
    if has_few_rows or has_pages:
        return FEW_ROW_KERNELS[name], _bias(segment, new, groups, dtype, name)
    if segment.recent_mask is None:
        return MANY_ROW_KERNELS[name], None
    return _attend_in_two_parts, segment.recent_mask


def _bias(segment: Segment, new: int, groups: int, dtype: torch.dtype, name: str) -> Tensor | None:
    """Returns the mask of few rows for the kernel ``name``, to be added to the logits; None where
    no mask is needed.

    Torch's fused kernel takes a mask over all keys. The other kernels take one over the last keys,
    those of ``segment.mask``, because every row sees all keys before them.
    """
    if segment.recent_mask is None and new == 1:
        return None
    device = segment.cache.keys[0].device
    mask = segment.mask
    last = mask.shape[1]  # How many of the last keys the segment's mask is about.
    columns = segment.first_key + new if name == "fused" else last
    bias = torch.zeros(new, columns, dtype=dtype, device=device)
    bias[:, columns - last :].masked_fill_(~mask.to(device), float("-inf"))
    # The compiled kernel uses one mask for every query head of a group. The others take the heads
    # of a group as further rows, so their mask has these rows too.
    return bias if name == "compiled" else bias.repeat(groups, 1)


def _attend_fused(
    q: Queries, k: Keys, v: Keys, bias: Float[Tensor, "rows seen"] | None, scale: float
) -> Queries:
    """Returns the attention of a few rows by torch's fused kernel, in one call.

    The query heads of a group share one key head. They are passed as further rows of that head, so
    that the keys need not be copied for each of them.
    """
    grouped = q.reshape(k.shape[0], -1, q.shape[2])
    out = scaled_dot_product_attention(grouped[None], k[None], v[None], bias, scale=scale)
    return out.reshape(q.shape)  # A GPU's flash kernel lays rows before heads, so this may copy.


def _attend_unfused(
    q: Queries, k: Keys, v: Keys, bias: Float[Tensor, "rows last"] | None, scale: float
) -> Queries:
    """Returns what :func:`_attend_fused` returns, computed by plain products.

    The mask is added to the logits of the last keys only, while the fused kernel adds one to all
    logits. Which of the two is quicker depends on the machine (:func:`quickest_attention`).
    """
    grouped = (q * scale).reshape(k.shape[0], -1, q.shape[2])
    logits = torch.bmm(grouped, k.transpose(1, 2))
    if bias is not None:
        logits[..., -bias.shape[1] :] += bias
    return torch.bmm(torch.softmax(logits, -1, out=logits), v).view(q.shape)


def _attend_in_two_parts(
    q: Queries, k: Keys, v: Keys, recent_mask: Bool[Tensor, "new last"] | None, scale: float
) -> Queries:
    """Returns the attention of many rows, from two parts that are merged.

    One part is over the earlier keys, which every row sees, and the other over the last keys, of
    which each row sees some. So a mask is needed for the last keys only. Without ``recent_mask``
    the last keys are the rows' own, and each row sees those up to itself.
    """
    last = q.shape[1] if recent_mask is None else recent_mask.shape[1]
    if recent_mask is None and last == k.shape[1]:
        return scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    tail = slice(k.shape[1] - last, None)
    tail_attention = attend_partially(
        q, k[:, tail], v[:, tail], scale, causal=recent_mask is None, visible=recent_mask
    )
    if last == k.shape[1]:
        return tail_attention[0]
    return merge(attend_partially(q, k[:, :-last], v[:, :-last], scale), tail_attention)


def _attend_folded(
    q: Queries, k: Keys, v: Keys, recent_mask: Bool[Tensor, "rows last"], scale: float
) -> Queries:
    """Returns the attention of a few rows on a GPU: as :func:`_attend_fused`, but in two parts.

    With a mask over all keys, each layer would read the whole mask, and the GPU's kernel could not
    split the keys. ``recent_mask`` has a row for each row of each head of a group.
    """
    grouped = q.reshape(k.shape[0], -1, q.shape[2])
    # A GPU's flash kernel lays rows before heads, so this may copy.
    return _attend_in_two_parts(grouped, k, v, recent_mask, scale).reshape(q.shape)


# The kernels by the names in an ``AttentionChoice``. The name "fused" stands for two functions: one
# for up to FOLD_LIMIT rows and for pages, and one for more rows.
FEW_ROW_KERNELS: dict[str, Callable[..., Queries]] = {
    "fused": _attend_fused,
    "unfused": _attend_unfused,
    "compiled": compiled.attend,
}
MANY_ROW_KERNELS: dict[str, Callable[..., Queries]] = {
    "fused": _attend_in_two_parts,
    "compiled": compiled.attend,
}


def quickest_attention(
    heads: int,
    kv_heads: int,
    width: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> AttentionChoice:
    """Returns the quickest attention kernels on this machine for a model with these heads.

    ``devices`` has the device of each layer, and ``width`` is that of a head. Kernels are timed
    where all layers are in fp32 on a CPU and torch has oneDNN. Elsewhere the fused one is taken.
    """
    on_cpu = all(device.type == "cpu" for device in devices)
    if dtype != torch.float32 or not torch.backends.mkldnn.is_available() or not on_cpu:
        return ALWAYS_FUSED
    groups = heads // kv_heads
    names = ["fused", "unfused"]
    if compiled.supports_head_dim(width):
        names.append("compiled")

    def few_row_calls(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        """Returns for each kernel a call to time it by: some layers' attention of a few rows."""
        timed_heads = min(kv_heads, torch.get_num_threads())
        q = torch.randn(timed_heads * groups, rows, width)
        layer_bytes = 2 * timed_heads * keys * width * dtype.itemsize
        # A call of one row goes through TIMED_BYTES of keys and values, one of n rows through an
        # n-th of that.
        timed_layers = max(1, min(TIMED_BYTES // rows // layer_bytes, len(devices)))
        caches = torch.ones(timed_layers, 2, timed_heads, keys, width)
        full_mask = None if rows == 1 else torch.zeros(rows * groups, keys)
        recent_mask = None if full_mask is None else full_mask[:, : min(rows, keys)]
        masks = {name: full_mask if name == "fused" else recent_mask for name in names}

        def attend_in_all_layers(name: str) -> list[Queries]:
            return [FEW_ROW_KERNELS[name](q, k, v, masks[name], 1.0) for k, v in caches]

        return {name: partial(attend_in_all_layers, name) for name in names}

    def prompt_calls(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        """Returns for each kernel a call to time it by: some heads' attention of a prompt."""
        multiplications_per_head = 2 * rows * keys * width
        max_heads = max(1, min(heads, TIMED_MULTIPLICATIONS // multiplications_per_head))
        timed_group = min(groups, max_heads)
        timed_kv_heads = max_heads // timed_group
        q = torch.randn(timed_kv_heads * timed_group, rows, width)
        k, v = torch.randn(2, timed_kv_heads, keys, width)
        return {
            name: partial(kernel, q, k, v, None, 1.0)
            for name, kernel in MANY_ROW_KERNELS.items()
            if name in names
        }

    # Measured times are stored by these values, on which they depend. The word "many" keeps the
    # times of prompts apart from those of few rows.
    model_facts = heads, kv_heads, width, names
    few_row_facts = TIMED_BYTES, len(devices), *model_facts
    prompt_facts = "many", *model_facts
    few_row_choice = kernels.choose_attention(few_row_facts, few_row_calls)
    prompt_choice = kernels.choose_attention(
        prompt_facts, prompt_calls, kernels.PROMPT_ROWS, kernels.PROMPT_KEYS
    )
    # The two choices are joined: up to FOLD_LIMIT rows the one for few rows is used, and above that
    # the one for prompts. Each number in ``rows`` is the most rows that an entry is for. The last
    # entry for few rows was timed with fewer than FOLD_LIMIT rows, so its number is raised here.
    return AttentionChoice(
        (*few_row_choice.rows[:-1], FOLD_LIMIT, *prompt_choice.rows),
        (*few_row_choice.names, *prompt_choice.names),
        (*few_row_choice.thresholds, *prompt_choice.thresholds),
    )
