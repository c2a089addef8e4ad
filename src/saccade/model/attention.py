"""The one attention function: causal, tree and recorded, over the caches of several requests.

A forward is a flat list of tokens cut into *segments*, one per request; no request is padded to
another, and none reads another's keys. Knows no model: layers call it with their q, k and v.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial as bound

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.model import kernels
from saccade.model.cache import Cache, Pages, together
from saccade.model.kernels import Ways, compiled

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""What layers call: (layer, q, k, v, scale) -> heads side by side. A ``Step`` is one."""
Queries = Float[Tensor, "head new head_dim"]
NewKeys = Float[Tensor, "kv_head written head_dim"]
Keys = Float[Tensor, "kv_head seen head_dim"]
Mask = Bool[Tensor, "new seen"]
Mixed = Float[Tensor, "new out"]
"""Heads side by side."""
Part = tuple[Queries, Float[Tensor, "head new"]]
"""Attention over some of the keys, and the log of the sum its softmax divided by."""

# Above this many queries a grouped call beats folding the group into the query axis.
FOLD_LIMIT = 64
CACHED = 2**20  # logits worked on at once: what a processor's caches hold
TIMED = 2**28  # products of a prompt's call that is timed, about: of as many heads as that allows
FAR = 2**24  # bytes a row is timed over, at most: keys and values of a model's layers lie no nearer
FUSED = Ways((1,), (("fused", "fused"),), (0,))
# Where no kernel gives the log-sum-exps: queries at once, and logits of theirs, at most.
PLAIN_ROWS, PLAIN_NUMBERS = 256, 2**25


@dataclass(frozen=True)
class Segment:
    """The tokens of one request in a forward: rows ``start:stop``, keys from ``at`` in its cache.

    Over the last keys a row sees what ``block`` says, and all keys before those; when ``block`` is
    None it sees everything up to itself.
    """

    cache: Cache
    start: int
    stop: int
    at: int
    block: Bool[Tensor, "new last"] | None = None
    noted: RowQueries | None = None
    asked: RowQueries | None = None
    pages: Pages | None = None  # read into the cache's first rows, for each row by its queries

    @property
    def mask(self) -> Bool[Tensor, "new last"]:
        """``block``, or what it stands for where it is None."""
        new = self.stop - self.start
        if self.block is None:
            return torch.ones(new, new, dtype=torch.bool).tril_()
        return self.block

    @property
    def wanted(self) -> int:
        """Of how many of a prompt's last rows anything but the keys is: the law after the last
        one, and what somebody writes down."""
        new = self.stop - self.start
        return min(new, max([1, *(each.last for each in (self.noted, self.asked) if each)]))


class RowQueries:
    """Takes the queries of a segment's last rows, layer by layer, with their scale in them: what
    those rows attend to can be told from them as long as the keys are there."""

    def __init__(self, last: int | None = None) -> None:
        """``last``: of how many rows; of all when None."""
        self.last = 0 if last is None else last
        self._layers: list[list[Queries]] = []

    def take(self, layer: int, q: Queries, scale: float) -> None:
        if layer == len(self._layers):
            self._layers.append([])
        self._layers[layer].append(q[:, -self.last :] * scale)

    def of(self, rows: Int[Tensor, " asked"]) -> list[Float[Tensor, "head asked head_dim"]]:
        """Each layer's queries of these rows, of those that were taken of one forward."""
        chosen = together(rows)
        return [part[:, chosen] for (part,) in self._layers]

    def row(self, layer: int, number: int) -> Float[Tensor, "head head_dim"]:
        """A row's queries; rows are counted from the first one taken."""
        for part in self._layers[layer]:
            if number < part.shape[1]:
                return part[:, number]
            number -= part.shape[1]
        raise IndexError(number)


class Step:
    """Attention for one forward: writes the new keys, then attends segment by segment.

    Made anew for every forward, and passed to the layers explicitly.
    """

    def __init__(
        self,
        segments: list[Segment],
        groups: int,
        dtype: torch.dtype,
        ways: Ways = FUSED,
    ) -> None:
        self.segments = segments
        self.groups = groups
        self.calls = 0  # one a layer, where the model's layers ask for their attention here
        self._choose = bound(_way, groups=groups, dtype=dtype, ways=ways)
        self._ways = [self._choose(segment) for segment in segments]
        for segment in segments:
            segment.cache.reserve(segment.at + segment.stop - segment.start)

    def __call__(self, layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float) -> Mixed:
        """Attention of one layer; heads are laid side by side in the result. Of a single segment
        ``q`` may be of its last rows alone."""
        self.calls += 1
        skipped = k.shape[1] - q.shape[1]
        parts = []
        for segment, (way, mask) in zip(self.segments, self._ways, strict=True):
            own = q, k, v
            if len(self.segments) > 1:
                rows = slice(segment.start, segment.stop)
                own = q[:, rows], k[:, rows], v[:, rows]
            segment.cache.write(layer, segment.at, own[1], own[2])
            keys, values = segment.cache.read(layer, segment.at + segment.stop - segment.start)
            if mask is not None and mask.device != keys.device:  # a model over several devices
                mask = mask.to(keys.device)
            if skipped:
                at, start = segment.at + skipped, segment.start + skipped
                way, mask = self._choose(replace(segment, at=at, start=start))
            if segment.pages is not None:
                way = bound(segment.pages.attend, segment.cache, layer, way)
            out = way(own[0], keys, values, mask, scale)
            parts.append(out.transpose(0, 1).reshape(out.shape[1], -1))
            for each in (segment.noted, segment.asked):
                if each is not None:
                    each.take(layer, own[0], scale)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def partial(
    q: Queries, k: Keys, v: Keys, scale: float, *, causal: bool = False, visible: Mask | None = None
) -> Part:
    """Attention over some of the keys, and the log of the sum its softmax divided by.

    ``causal`` is for as many keys as queries. Memory is O(new + seen): flash kernels where torch
    has one that gives the sums, else a few queries at a time.
    """
    if q.device.type == "cpu":
        bias = None
        if visible is not None:
            bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], is_causal=causal, attn_mask=bias, scale=scale
        )
        return found[0][0], found[1][0].to(torch.float32)
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and visible is None and q.shape[-1] % 8 == 0:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], is_causal=causal, scale=scale
        )
        return found[0][0], found[1][0]
    return plain_partial(q, k, v, scale, causal=causal, visible=visible)


def plain_partial(
    q: Queries, k: Keys, v: Keys, scale: float, *, causal: bool = False, visible: Mask | None = None
) -> Part:
    """:func:`partial` in torch's own words, for devices and types without such a kernel.

    Keys that are not visible may be NaN.
    """
    heads, new, width = q.shape
    grouped = q.reshape(k.shape[0], -1, new, width)
    seen = torch.arange(k.shape[1], device=q.device)
    outs, sums = [], []
    count = max(1, min(PLAIN_ROWS, PLAIN_NUMBERS // (heads * max(1, len(seen)))))
    for start in range(0, new, count):
        stop = min(start + count, new)
        chosen = grouped[:, :, start:stop].float()
        logits = torch.einsum("hgrd,hsd->hgrs", chosen, k.float()) * scale
        if visible is not None:
            logits.masked_fill_(~visible[start:stop], float("-inf"))
        if causal:
            row = torch.arange(start, stop, device=q.device)[:, None]
            logits.masked_fill_(seen > row, float("-inf"))
        sums.append(logits.logsumexp(-1).reshape(heads, stop - start))
        weights = logits.softmax(-1).to(v.dtype)
        outs.append(torch.einsum("hgrs,hsd->hgrd", weights, v).reshape(heads, -1, width))
    return torch.cat(outs, 1), torch.cat(sums, 1)


def merge(first: Part, second: Part) -> Queries:
    """Attention over the keys of both: exp(lse) is each one's share of the softmax's sum."""
    share = torch.sigmoid(second[1] - first[1])[..., None]
    return torch.lerp(first[0], second[0], share.to(first[0].dtype))


def _way(
    segment: Segment, groups: int, dtype: torch.dtype, ways: Ways
) -> tuple[Callable[..., Queries], Tensor | None]:
    """How a segment attends, and the mask it does so with."""
    new = segment.stop - segment.start
    name = ways.at(new, segment.at + new)
    if new <= FOLD_LIMIT or segment.pages is not None:
        return FEW_ROWS[name], _bias(segment, groups, dtype, name != "fused")
    if segment.block is None:
        return MANY_ROWS[name], None
    return _attend_long, segment.block


def _bias(segment: Segment, groups: int, dtype: torch.dtype, short: bool) -> Tensor | None:
    """The additive mask of a segment of few rows, ``short`` over its last keys alone; None where
    none is needed."""
    new = segment.stop - segment.start
    if segment.block is None and new == 1:
        return None
    device, mask = segment.cache.keys[0].device, segment.mask
    last = mask.shape[1]
    seen = last if short else segment.at + new
    bias = torch.zeros(new, seen, dtype=dtype, device=device)
    bias[:, seen - last :].masked_fill_(~mask.to(device), float("-inf"))
    return bias.repeat(groups, 1)


def _attend(
    q: Queries, k: Keys, v: Keys, bias: Float[Tensor, "rows seen"] | None, scale: float
) -> Queries:
    """A few rows in one call: a group's heads share their keys, so as further queries they need
    no copy of them."""
    grouped = q.reshape(k.shape[0], -1, q.shape[2])
    out = scaled_dot_product_attention(grouped[None], k[None], v[None], bias, scale=scale)
    return out.view(q.shape)


def _spell_out(
    q: Queries, k: Keys, v: Keys, bias: Float[Tensor, "rows last"] | None, scale: float
) -> Queries:
    """:func:`_attend` as plain products, with a mask of the last keys only: the fused kernel adds
    one to every logit. Which is quicker depends on the machine (:func:`ways_of`)."""
    grouped = (q * scale).reshape(k.shape[0], -1, q.shape[2])
    logits = torch.bmm(grouped, k.transpose(1, 2))
    if bias is not None:
        logits[..., -bias.shape[1] :] += bias
    return torch.bmm(torch.softmax(logits, -1, out=logits), v).view(q.shape)


def _attend_long(
    q: Queries, k: Keys, v: Keys, block: Bool[Tensor, "new last"] | None, scale: float
) -> Queries:
    """Many rows: the keys all of them see, then the last ones, with no mask over both together."""
    last = q.shape[1] if block is None else block.shape[1]
    if block is None and last == k.shape[1]:
        return scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    mine = slice(k.shape[1] - last, None)
    own = partial(q, k[:, mine], v[:, mine], scale, causal=block is None, visible=block)
    if last == k.shape[1]:
        return own[0]
    return merge(partial(q, k[:, :-last], v[:, :-last], scale), own)


FEW_ROWS: dict[str, Callable[..., Queries]] = {
    "fused": _attend,
    "spelt": _spell_out,
    "compiled": compiled.attend,
}
MANY_ROWS: dict[str, Callable[..., Queries]] = {
    "fused": _attend_long,
    "compiled": compiled.attend,
}


def ways_of(
    heads: int,
    kv_heads: int,
    width: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> Ways:
    """How a model of these heads attends the quickest: fused unless all its layers are in fp32 on a
    CPU."""
    plain = dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if not plain or any(device.type != "cpu" for device in devices):
        return FUSED
    groups, names = heads // kv_heads, ["fused", "spelt"]
    if compiled.serves(width):
        names.append("compiled")

    def few(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        some = min(kv_heads, torch.get_num_threads())
        q = torch.randn(some * groups, rows, width)
        most = FAR // rows // (2 * some * keys * width * dtype.itemsize)
        read = torch.ones(max(1, min(most, len(devices))), 2, some, keys, width)
        whole = None if rows == 1 else torch.zeros(rows * groups, keys)
        last = None if whole is None else whole[:, : min(rows, keys)]
        masks = {name: whole if name == "fused" else last for name in names}

        def all_layers(name: str) -> list[Queries]:
            return [FEW_ROWS[name](q, k, v, masks[name], 1.0) for k, v in read]

        return {name: bound(all_layers, name) for name in names}

    def many(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        some = max(1, min(heads, TIMED // (2 * rows * keys * width)))
        group = min(groups, some)
        q = torch.randn(some // group * group, rows, width)
        k, v = torch.randn(2, some // group, keys, width)
        return {
            name: bound(way, q, k, v, None, 1.0) for name, way in MANY_ROWS.items() if name in names
        }

    facts = heads, kv_heads, width, names
    first = kernels.ways((FAR, len(devices), *facts), few)
    last = kernels.ways(("many", *facts), many, kernels.MANY, kernels.LONG)
    return Ways(
        (*first.rows[:-1], FOLD_LIMIT, *last.rows),
        (*first.names, *last.names),
        (*first.turns, *last.turns),
    )


@torch.no_grad()
def attended(
    cache: Cache,
    asked: list[Float[Tensor, "head new head_dim"]],
    sees: Int[Tensor, " new"],
    columns: Int[Tensor, " chosen"],
) -> Float[Tensor, "layer kv_head 2 chosen"]:
    """The softmax mass of rows on some columns, over all keys and over the columns alone, summed
    over rows and a group's heads. ``asked``: each layer's queries, scaled; each row ``sees`` so
    many keys. Small layers go together, and of a large one a few rows at a time."""
    layers, end = len(asked), int(sees.max())
    if kernels.fp32_on_cpu(cache.keys) and compiled.serves(cache.keys[0].shape[2]):
        pairs = zip(asked, cache.keys[:layers], strict=True)
        return torch.stack([compiled.attended(q, k[:, :end], sees, columns) for q, k in pairs])
    chosen = together(columns.cpu())
    rows = max(1, CACHED // (len(asked[0]) * end))
    alike = len({keys.device for keys in cache.keys}) == 1
    few = max(1, rows // len(sees)) if alike else 1
    found = []
    for start in range(0, layers, few):
        some = slice(start, start + few)
        keys = torch.stack([each[:, :end] for each in cache.keys[some]])
        parts = zip(torch.stack(asked[some]).split(rows, 2), sees.split(rows), strict=True)
        both = [_attended(q, keys, part, chosen) for q, part in parts]
        found.append(sum(both[1:], both[0]).to(columns.device))
    return torch.cat(found)


def _attended(
    q: Float[Tensor, "layer head new head_dim"],
    keys: Float[Tensor, "layer kv_head seen head_dim"],
    sees: Int[Tensor, " new"],
    columns: slice | Int[Tensor, " chosen"],
) -> Float[Tensor, "layer kv_head 2 chosen"]:
    """:func:`attended` of a few rows and layers, summed."""
    (layers, kv_heads, seen, width), all_see = keys.shape, int(sees.min())
    hidden = (torch.arange(all_see, seen) >= sees[:, None]).to(keys.device)
    logits = q.reshape(layers, kv_heads, -1, width).float() @ keys.float().transpose(2, 3)
    by_row = logits.view(layers, kv_heads, -1, len(sees), seen)
    by_row[..., all_see:].masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(logits, -1, out=logits)[..., columns]
    # a row whose mass is all elsewhere has none to share out
    among = weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny)
    return torch.stack([torch.ones_like(among), 1 / among], 2) @ weights


# -- what was attended to lately -------------------------------------------------------------------


@dataclass(frozen=True)
class JudgedRow:
    """A row of a forward, and how many keys of its request's cache it sees."""

    asked: RowQueries
    number: int
    seen: int


class Recent:
    """The last ``rows`` rows of a request that were committed, for when somebody asks what they
    attended to.

    A verification computes attention anyway, and forgets it. Kept are the queries, a few numbers a
    row; their products with the keys are taken again only for a draft that is to choose anew.
    """

    def __init__(self, rows: int) -> None:
        self._rows: deque[JudgedRow] = deque(maxlen=rows)

    def add(self, row: JudgedRow) -> None:
        self._rows.append(row)

    def clear(self) -> None:
        """The text goes on elsewhere: what was seen of it is no longer there."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def attended(
        self, cache: Cache, columns: Int[Tensor, " seen"]
    ) -> Float[Tensor, "layer kv_head 2 seen"]:
        """:func:`attended` of these rows: ``Prefill.mass`` and ``Prefill.relevance``."""
        sees = torch.tensor([row.seen for row in self._rows])
        asked = [
            torch.stack([row.asked.row(layer, row.number) for row in self._rows], 1)
            for layer in range(len(cache.keys))
        ]
        groups = len(asked[0]) // len(cache.keys[0])
        return attended(cache, asked, sees, columns) / (len(sees) * groups)
