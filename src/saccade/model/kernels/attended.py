"""What rows attended to, for views that choose by it: told by the kernel that attends for them, or
from their queries, which are a few numbers a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.model import kernels
from saccade.model.cache import Cache, as_slice
from saccade.model.kernels import compiled

Queries = Float[Tensor, "head new head_dim"]
CACHED = 2**20  # logits worked on at once: what a processor's caches hold
ON_A_GPU = 2**26  # there, where every piece is some launches more


@torch.no_grad()
def attended(
    keys: Sequence[Float[Tensor, "kv_head held head_dim"]],
    asked: list[Float[Tensor, "head new head_dim"]],
    sees: Int[Tensor, " new"],
    columns: Int[Tensor, " chosen"],
) -> Float[Tensor, "layer kv_head 2 chosen"]:
    """The softmax mass of rows on some columns, over all keys and over the columns alone, summed
    over rows and a group's heads. ``asked``: each layer's queries, scaled; each row ``sees`` so
    many keys."""
    end = int(sees.max())
    if kernels.fp32_on_cpu(keys) and compiled.serves(keys[0].shape[2]):
        sees, columns = sees.contiguous(), columns.contiguous()
        mass = keys[0].new_zeros(len(keys), len(keys[0]), 2, len(columns))
        for q, k, each in zip(asked, keys, mass, strict=True):
            noted = compiled.Noted.of(len(sees), columns, each, sees)
            compiled.attend(q, k[:, :end], None, None, 1.0, noted)
        return mass
    at_once = CACHED if keys[0].device.type == "cpu" else ON_A_GPU
    chosen, few = as_slice(columns.cpu()), max(1, at_once // (len(asked[0]) * end))
    found = []
    for q, k in zip(asked, keys, strict=True):
        parts = zip(q.split(few, 1), sees.split(few), strict=True)
        both = [_attended(own, k[:, :end], part, chosen) for own, part in parts]
        found.append(sum(both[1:], both[0]).to(columns.device))
    return torch.stack(found)


def _attended(
    q: Float[Tensor, "head new head_dim"],
    keys: Float[Tensor, "kv_head seen head_dim"],
    sees: Int[Tensor, " new"],
    columns: slice | Int[Tensor, " chosen"],
) -> Float[Tensor, "kv_head 2 chosen"]:
    """:func:`attended` of a layer's few rows, summed."""
    (kv_heads, seen, width), all_see = keys.shape, int(sees.min())
    hidden = (torch.arange(all_see, seen) >= sees[:, None]).to(keys.device)
    logits = q.reshape(kv_heads, -1, width).float() @ keys.float().transpose(1, 2)
    by_row = logits.view(kv_heads, -1, len(sees), seen)
    by_row[..., all_see:].masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(logits, -1, out=logits)[..., columns]
    # a row whose mass is all elsewhere has none to share out
    among = weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny)
    return torch.stack([torch.ones_like(among), 1 / among], 1) @ weights


class RowQueries:
    """Takes the queries of a segment's last rows, layer by layer, with their scale in them: what
    those rows attend to can be told from them as long as the keys are there."""

    def __init__(self, last: int | None = None) -> None:
        """``last``: of how many rows; of all when None."""
        self.last = 0 if last is None else last
        self._layers: dict[int, list[Queries]] = {}

    def take(self, layer: int, q: Queries, scale: float) -> None:
        self._layers.setdefault(layer, []).append(q[:, -self.last :] * scale)

    def of(self, rows: Int[Tensor, " asked"]) -> dict[int, Float[Tensor, "head asked head_dim"]]:
        """Each layer's queries of these rows, of those that were taken of one forward."""
        chosen = as_slice(rows)
        return {layer: part[:, chosen] for layer, (part,) in self._layers.items()}

    def row(self, layer: int, number: int) -> Float[Tensor, "head head_dim"]:
        """A row's queries; rows are counted from the first one taken."""
        for part in self._layers[layer]:
            if number < part.shape[1]:
                return part[:, number]
            number -= part.shape[1]
        raise IndexError(number)


class Note:
    """Adds to ``both`` what rows of a prompt's chunk attend to, as :func:`attended` tells it: the
    kernel that attends for them tells it on the way where it can; else their queries are taken."""

    def __init__(
        self,
        rows: Int[Tensor, " noted"],
        stop: int,
        columns: Int[Tensor, " chosen"],
        both: Float[Tensor, "layer kv_head 2 chosen"],
    ) -> None:
        """``rows`` of a chunk that ends at ``stop``."""
        self._rows, self._columns, self._both = rows, columns.contiguous(), both
        self.last = stop - int(rows[0])  # so many rows at the chunk's end hold them
        self._queries = RowQueries(self.last)
        self._telling: list[Callable[..., Queries]] = []  # by layer, where it can be told
        if self.last == len(rows):
            noted = (compiled.Noted.of(self.last, self._columns, each) for each in both)
            self._telling = [partial(compiled.attend, noted=each) for each in noted]

    def telling(
        self, way: Callable[..., Queries], layer: int, q: Queries, scale: float
    ) -> Callable[..., Queries] | None:
        """``way``, by which these or more rows attend, each up to itself, such that it tells what
        they attend to; None where it cannot, and then their queries are taken."""
        if way is compiled.attend and self._telling:
            return self._telling[layer]
        self._queries.take(layer, q, scale)
        return None

    def end(self, cache: Cache) -> None:
        """What was not told on the way."""
        if not (asked := self._queries.of(self._rows - self._rows[0])):
            return
        keys = [cache.keys[layer] for layer in asked]
        found = attended(keys, list(asked.values()), self._rows + 1, self._columns)
        for layer, own in zip(asked, found, strict=True):
            self._both[layer] += own


@dataclass(frozen=True)
class JudgedRow:
    """A row of a forward, and how many keys of its request's cache it sees."""

    asked: RowQueries
    number: int
    seen: int


class Recent(deque[JudgedRow]):
    """The last rows of a request that were committed, for when somebody asks what they attended to.

    A verification computes attention anyway, and forgets it. Kept are the queries, a few numbers a
    row; their products with the keys are taken again only for a draft that is to choose anew.
    """

    def attended(
        self, cache: Cache, columns: Int[Tensor, " seen"]
    ) -> Float[Tensor, "layer kv_head 2 seen"]:
        """:func:`attended` of these rows: ``Prefill.mass`` and ``Prefill.relevance``."""
        sees = torch.tensor([row.seen for row in self])
        asked = [
            torch.stack([row.asked.row(layer, row.number) for row in self], 1)
            for layer in range(len(cache.keys))
        ]
        groups = len(asked[0]) // len(cache.keys[0])
        return attended(cache.keys, asked, sees, columns) / (len(sees) * groups)
