"""Attention mass: how much attention some rows (queries) give to some columns (keys).

Some views choose which visual tokens the draft sees by the mass that these get from the text.
Where it can, the compiled attention kernel adds the mass up while it attends. Elsewhere the rows'
queries are stored, which are a few numbers for each row, and the mass is computed from them
afterwards.
"""

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
LOGITS_AT_ONCE_ON_CPU = 2**20  # As many as a processor's caches hold.
LOGITS_AT_ONCE_ON_GPU = 2**26  # Every further piece costs some kernel launches.


@torch.no_grad()
def attention_mass(
    keys: Sequence[Float[Tensor, "kv_head cached head_dim"]],
    queries: list[Float[Tensor, "head new head_dim"]],
    visible_keys: Int[Tensor, " new"],
    columns: Int[Tensor, " chosen"],
) -> Float[Tensor, "layer kv_head 2 chosen"]:
    """Returns how much attention rows give to some columns (chosen keys), summed over the rows and
    over a group's heads.

    A row's attention is a softmax. At index 0 of the third dimension it is over all keys that the
    row sees, at index 1 over the columns alone.

    Args:
        keys: the keys of each layer.
        queries: the queries of the rows in each layer, multiplied by the attention's scale.
        visible_keys: how many keys each row sees, from the first one on.
        columns: the indices of the keys whose mass is wanted.
    """
    end = int(visible_keys.max())
    if kernels.are_fp32_on_cpu(keys) and compiled.supports_head_dim(keys[0].shape[2]):
        visible_keys = visible_keys.contiguous()
        columns = columns.contiguous()
        mass = keys[0].new_zeros(len(keys), len(keys[0]), 2, len(columns))
        for q, k, layer_mass in zip(queries, keys, mass, strict=True):
            output = compiled.MassOutput.of(len(visible_keys), columns, layer_mass, visible_keys)
            # Without values the kernel only adds to ``layer_mass``, and what it returns is unused.
            compiled.attend(q, k[:, :end], v=None, bias=None, scale=1.0, mass_output=output)
        return mass
    on_cpu = keys[0].device.type == "cpu"
    logits_at_once = LOGITS_AT_ONCE_ON_CPU if on_cpu else LOGITS_AT_ONCE_ON_GPU
    chosen = as_slice(columns.cpu())
    rows_at_once = max(1, logits_at_once // (len(queries[0]) * end))
    mass_by_layer = []
    for q, k in zip(queries, keys, strict=True):
        chunks = zip(q.split(rows_at_once, 1), visible_keys.split(rows_at_once), strict=True)
        chunk_masses = [
            _mass_of_few_rows(chunk_queries, k[:, :end], chunk_visible_keys, chosen)
            for chunk_queries, chunk_visible_keys in chunks
        ]
        mass_by_layer.append(sum(chunk_masses[1:], chunk_masses[0]).to(columns.device))
    return torch.stack(mass_by_layer)


def _mass_of_few_rows(
    q: Float[Tensor, "head new head_dim"],
    keys: Float[Tensor, "kv_head seen head_dim"],
    visible_keys: Int[Tensor, " new"],
    columns: slice | Int[Tensor, " chosen"],
) -> Float[Tensor, "kv_head 2 chosen"]:
    """Returns the :func:`attention_mass` of a few rows of one layer."""
    kv_heads, key_count, width = keys.shape
    seen_by_all = int(visible_keys.min())  # Only later keys need a mask.
    is_masked = (torch.arange(seen_by_all, key_count) >= visible_keys[:, None]).to(keys.device)
    logits = q.reshape(kv_heads, -1, width).float() @ keys.float().transpose(1, 2)
    logits_by_row = logits.view(kv_heads, -1, len(visible_keys), key_count)
    logits_by_row[..., seen_by_all:].masked_fill_(is_masked, float("-inf"))
    weights = torch.softmax(logits, -1, out=logits)[..., columns]
    # A softmax over the columns alone is the softmax over all keys, divided by its sum over the
    # columns. The lower bound keeps a row without any mass on them from dividing by zero.
    column_sum = weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny)
    # This product sums over the rows: once with factors of 1, and once divided by the column sums.
    return torch.stack([torch.ones_like(column_sum), 1 / column_sum], 1) @ weights


class RowQueries:
    """The scaled queries of one request's rows in a forward, or of its last rows alone, by layer.

    As long as the keys are in the cache, the rows' attention can be computed from these queries. A
    batch-invariant session splits the forward into several, and each of these adds a part.
    """

    def __init__(self, last: int | None = None) -> None:
        """``last`` is the number of rows; None means all of them."""
        self.last_row_count = 0 if last is None else last  # ``[-0:]`` is everything.
        self._layers: dict[int, list[Queries]] = {}

    def add(self, layer: int, q: Queries, scale: float) -> None:
        self._layers.setdefault(layer, []).append(q[:, -self.last_row_count :] * scale)

    def of_rows(self, rows: Int[Tensor, " rows"]) -> dict[int, Float[Tensor, "head rows head_dim"]]:
        """Returns each layer's queries of these rows, which are counted from the first row that is
        kept. The queries of a layer must have been added in one part."""
        chosen = as_slice(rows)
        queries = {}
        for layer, parts in self._layers.items():
            (only_part,) = parts
            queries[layer] = only_part[:, chosen]
        return queries

    def of_row(self, layer: int, row: int) -> Float[Tensor, "head head_dim"]:
        """Returns one row's queries. Rows are counted through all parts, in the order in which they
        were added."""
        for part in self._layers[layer]:
            if row < part.shape[1]:
                return part[:, row]
            row -= part.shape[1]
        raise IndexError(row)


class MassRecorder:
    """Adds the :func:`attention_mass` of some rows of a prompt's chunk to ``mass``.

    The kernel that computes the rows' attention also adds their mass up, where it can. Elsewhere
    their queries are stored, and :meth:`finish` computes the mass from them.
    """

    def __init__(
        self,
        rows: Int[Tensor, " recorded"],
        stop: int,
        columns: Int[Tensor, " chosen"],
        mass: Float[Tensor, "layer kv_head 2 chosen"],
    ) -> None:
        """``rows`` are the rows' numbers in the prompt, in order. ``stop`` is the number of the
        first row of the prompt after their chunk."""
        self._rows = rows
        self._columns = columns.contiguous()
        self._mass = mass
        self.rows_to_chunk_end = stop - int(rows[0])
        """The number of rows from the first recorded one to the chunk's end."""
        self._queries = RowQueries(self.rows_to_chunk_end)
        self._recording_kernels: list[Callable[..., Queries]] = []  # By layer, or empty.
        # The kernel can record only rows that follow one another up to the chunk's end.
        if self.rows_to_chunk_end == len(rows):
            outputs = (
                compiled.MassOutput.of(self.rows_to_chunk_end, self._columns, each) for each in mass
            )
            self._recording_kernels = [
                partial(compiled.attend, mass_output=each) for each in outputs
            ]

    def recording_kernel(
        self, kernel: Callable[..., Queries], layer: int, q: Queries, scale: float
    ) -> Callable[..., Queries] | None:
        """Returns a kernel that attends as ``kernel`` does and also adds up the mass, to be used in
        its place.

        If there is no such kernel, this method stores the queries for :meth:`finish` and returns
        None. ``kernel`` must be causal. The rows of ``q`` end with the chunk's last one and include
        all recorded ones.
        """
        if kernel is compiled.attend and self._recording_kernels:
            return self._recording_kernels[layer]
        self._queries.add(layer, q, scale)
        return None

    def store_queries(
        self, layer: int, q: Queries, k: Float[Tensor, "kv_head new head_dim"], scale: float
    ) -> None:
        """Stores a layer's queries of the recorded rows for :meth:`finish`.

        It is called for layers whose rows attend by an explicit mask, which no recording kernel
        takes. In some models the number of key heads differs from layer to layer, but ``mass`` has
        the same number for all of them. Layers with another number of key heads are left out.
        """
        if k.shape[0] == self._mass.shape[1]:
            self._queries.add(layer, q, scale)

    def finish(self, cache: Cache, visible_keys: Int[Tensor, " recorded"] | None = None) -> None:
        """Adds the mass of the rows whose queries were stored.

        ``visible_keys`` says how many of the prompt's keys each row sees, in layers without a
        window. By default these are its own key and those before it.
        """
        queries = self._queries.of_rows(self._rows - self._rows[0])
        if not queries:
            return
        keys = [cache.keys[layer] for layer in queries]
        if visible_keys is None:
            visible_keys = self._rows + 1
        mass = attention_mass(keys, list(queries.values()), visible_keys, self._columns)
        for layer, layer_mass in zip(queries, mass, strict=True):
            self._mass[layer] += layer_mass


@dataclass(frozen=True)
class CommittedRow:
    """One row of a forward, and how many keys of its request's cache it sees.

    ``row`` is its number in ``queries`` (see ``RowQueries.of_row``).
    """

    queries: RowQueries
    row: int
    visible_keys: int


class RecentRows(deque[CommittedRow]):
    """The rows of a request that were committed last, with their queries.

    The forward that verified a row does not keep its attention. When a view chooses the draft's
    keys again, the attention is computed again from the queries, a few numbers for each row.
    """

    def attention_mass(
        self, cache: Cache, columns: Int[Tensor, " chosen"], layers: Sequence[int], kv_heads: int
    ) -> Float[Tensor, "layer kv_head 2 chosen"]:
        """Returns the :func:`attention_mass` of these rows, divided by the number of rows and of
        query heads in a group.

        The result replaces what the prefill recorded. In its third dimension, index 0 replaces
        ``Prefill.mass`` (a softmax over all keys), and index 1 replaces ``Prefill.relevance`` (a
        softmax over the columns alone).

        Args:
            cache: the request's, with all of its keys.
            columns: the indices of the keys whose mass is wanted.
            layers: the layers that a prefill records, by their place among those with keys. The
                mass is 0 in all others.
            kv_heads: how many key heads each of these layers has.
        """
        mass = torch.zeros(len(cache.keys), kv_heads, 2, len(columns), device=columns.device)
        if not layers:
            return mass
        visible_keys = torch.tensor([each.visible_keys for each in self])
        keys = [cache.keys[layer] for layer in layers]
        queries = [
            torch.stack([each.queries.of_row(layer, each.row) for each in self], 1)
            for layer in layers
        ]
        heads_per_group = len(queries[0]) // kv_heads
        recorded = attention_mass(keys, queries, visible_keys, columns)
        mass[list(layers)] = recorded / (len(visible_keys) * heads_per_group)
        return mass
