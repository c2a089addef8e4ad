"""The KV cache of one request. A batch is several of them, each with its own length.

Tensors are preallocated per layer. So appending n tokens writes n tokens, a rollback changes an
integer, and committing a path moves only the accepted nodes. Rows at ``length`` and beyond may hold
anything. The *text* of a cache is all of its tokens, the prompt included. Layers that have a state
instead of keys keep it in ``states``.

A layer with a sliding window may evict keys that no later row sees. Its tensors then begin with row
``starts[layer]`` of the text, and when they are full, the remaining rows are moved to their front.
The text can be truncated to any length whose window is still held, and to the few lengths whose
window was copied before (``save_windows``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.prompt import Paged
from saccade.model.cache_pool import CachePool, Lease
from saccade.model.hidden_states import HiddenStates
from saccade.model.recurrent import LayerStates
from saccade.model.window_rule import KeyWindow

# Eviction keeps the keys that the windows need after a rollback of up to this many tokens. Once
# some tokens are rolled back, or a saved window was restored, the next rollback may reach less far.
ROWS_TO_CUT_BACK = 64
# The windows at the start of a turn stay saved for this many of the latest turns.
TURNS_WITH_SAVED_WINDOWS = 2
# A request keeps at most so many copies of a window: one for each of the last turns, and three in
# its prompt, at the end of the pictures, somewhat before the prompt's end, and at its end.
MAX_SAVED_WINDOWS = TURNS_WITH_SAVED_WINDOWS + 3


@dataclass(frozen=True)
class LayerRows:
    """Consecutive rows of a layer's keys and values; the first is row ``start`` of the text."""

    start: int
    keys: Float[Tensor, "kv_head rows head_dim"]
    values: Float[Tensor, "kv_head rows head_dim"]


def rows_of_window(window: KeyWindow, forward_rows: int) -> int:
    """Returns how many rows a layer has room for if it evicts the keys behind its window. A forward
    writes at most ``forward_rows`` rows."""
    return window.size + ROWS_TO_CUT_BACK + forward_rows


def max_window_rows(window: KeyWindow, tokens: int, forward_rows: int) -> int:
    """Returns how many rows ``tokens`` tokens take in memory at most in a layer that evicts keys,
    the copies of its window included."""
    window_rows = min(tokens, rows_of_window(window, forward_rows))
    return window_rows + MAX_SAVED_WINDOWS * min(tokens, window.size)


@dataclass(frozen=True)
class HeadShape:
    """The shape of a layer's keys and values."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Cache:
    """The keys and values of every layer, ``[kv_head, capacity, head_dim]`` each."""

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        devices: Sequence[torch.device | str] = (),
        pool: CachePool | None = None,
        states: LayerStates | None = None,
        windows: Sequence[KeyWindow | None] = (),
        forward_rows: int = 0,
    ) -> None:
        """Allocates an empty cache for ``capacity`` tokens, for layers whose keys and values have
        these shapes.

        ``devices`` says where the tensors of each layer are; on the CPU by default. ``pool`` (of a
        model on one device) provides the tensors, as long as it has memory. ``states`` are those of
        layers that have no keys. ``windows`` has the window of each layer that evicts keys, and
        None for the others. A forward has at most ``forward_rows`` rows, for which such a layer has
        room besides its window.
        """
        self.length = 0
        self.starts = [0] * len(shapes)
        """The first row that each layer still holds."""
        self._windows = [*windows]
        self._forward_rows = forward_rows
        self._saved_windows: dict[int, list[LayerRows]] = {}
        """Copies of windows, by the length of the text to which it can be truncated with them."""
        self._turn_lengths: list[int] = []
        """The lengths in ``_saved_windows`` at which a turn began."""
        self.states = states
        self.hidden: HiddenStates | None = None  # Stored only for a draft head that reads them.
        self.pool = pool
        self.lease: Lease | None = None
        self._initial_capacity = max(capacity, 1)
        self.shapes = [*shapes]
        self._dtype = dtype
        if pool is not None:
            self.lease = pool.lease(self._initial_capacity, len(shapes))
        if self.lease is not None:
            self.keys, self.values = self.lease.keys, self.lease.values
            return
        places = devices or ["cpu"] * len(shapes)
        self.keys, self.values = [], []
        for layer, (shape, place) in enumerate(zip(self.shapes, places, strict=True)):
            rows = self._rows_of(layer, self._initial_capacity)
            for tensors, width in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                size = shape.kv_heads, rows, width
                tensors.append(torch.empty(size, dtype=dtype, device=place))

    @property
    def evicts_keys(self) -> bool:
        """Whether any layer evicts the keys behind its window."""
        return any(self._windows)

    @property
    def capacity(self) -> int:
        """How many tokens there is room for, where all keys are kept."""
        # A cache of a model's first layers alone has no keys if all of those are recurrent.
        return self.keys[0].shape[1] if self.keys else self._initial_capacity

    @property
    def bytes(self) -> int:
        states = 0 if self.states is None else self.states.bytes
        hidden = 0 if self.hidden is None else self.hidden.bytes
        saved = [rows for layers in self._saved_windows.values() for rows in layers]
        tensors = [*self.keys, *self.values]
        tensors += [each for rows in saved for each in (rows.keys, rows.values)]
        return states + hidden + sum(each.numel() * each.element_size() for each in tensors)

    def _window_of(self, layer: int) -> KeyWindow | None:
        return self._windows[layer] if self._windows else None

    def _rows_of(self, layer: int, tokens: int) -> int:
        """Returns how many rows a layer has room for if its cache has room for so many tokens."""
        window = self._window_of(layer)
        if window is None:
            return tokens
        return min(tokens, rows_of_window(window, self._forward_rows))

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` tokens. Tensors that are too small grow by half at least, or as
        far as their layer's window needs."""
        if self.evicts_keys:
            for layer in range(len(self.keys)):
                self._reserve_in_layer(layer, length)
            return
        if length <= self.capacity:
            return
        capacity = max(length, self.capacity * 3 // 2)
        lease = None if self.pool is None else self.pool.lease(capacity, len(self.keys))
        if lease is not None:
            for old, new in zip(
                (*self.keys, *self.values), (*lease.keys, *lease.values), strict=True
            ):
                new[:, : old.shape[1]] = old
            self.lease, self.keys, self.values = lease, lease.keys, lease.values
            return
        if self.lease is not None:
            # The lists are the lease's, and the pool replaces their tensors when it moves. This
            # cache leaves the pool, so it needs lists of its own.
            self.keys = [*self.keys]
            self.values = [*self.values]
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = torch.empty(
                    (old.shape[0], capacity, old.shape[2]), dtype=old.dtype, device=old.device
                )
                new[:, : old.shape[1]] = old
                tensors[layer] = new
        self.lease = None

    def _reserve_in_layer(self, layer: int, length: int) -> None:
        """Makes room in one layer, first by evicting keys that no later row sees, and then by a
        larger tensor if that is not enough."""
        window = self._window_of(layer)
        rows = self.keys[layer].shape[1]
        if length - self.starts[layer] <= rows:
            return
        dropped = 0
        if window is not None:
            first_key = window.first_key(max(0, self.length - ROWS_TO_CUT_BACK))
            dropped = max(0, first_key - self.starts[layer])
            self.starts[layer] += dropped
        needed = length - self.starts[layer]
        size = rows if needed <= rows else max(needed, self._rows_of(layer, rows * 3 // 2))
        for tensors in (self.keys, self.values):
            old = tensors[layer]
            remaining = old[:, dropped:]
            if size == rows:
                new = old
                remaining = remaining.clone()  # It overlaps the place that it is copied to.
            else:
                new = old.new_empty(old.shape[0], size, old.shape[2])
            new[:, : rows - dropped] = remaining
            tensors[layer] = new

    def write(
        self,
        layer: int,
        at: int,
        keys: Float[Tensor, "kv_head new head_dim"],
        values: Float[Tensor, "kv_head new head_dim"],
    ) -> None:
        """Writes new tokens from row ``at`` of the text on. The length stays as it is, until
        :meth:`advance` or :meth:`commit_path` commits them."""
        at -= self.starts[layer]
        end = at + keys.shape[1]
        self.keys[layer][:, at:end] = keys
        self.values[layer][:, at:end] = values

    def read(
        self, layer: int, end: int, first: int = 0
    ) -> tuple[Float[Tensor, "kv_head read head_dim"], Float[Tensor, "kv_head read head_dim"]]:
        """Returns the keys and values of tokens ``first:end``, without a copy. The first token must
        still be held."""
        start = self.starts[layer]
        assert start <= first, f"layer {layer} has evicted the keys before {start}, not {first}"
        rows = slice(first - start, end - start)
        return self.keys[layer][:, rows], self.values[layer][:, rows]

    def advance(self, count: int) -> None:
        """Commits the next ``count`` tokens, which were written already."""
        self.length += count
        if self.states is not None:
            self.states.advance(count)

    def commit_path(self, path: Sequence[int]) -> None:
        """Commits some of the tokens that were written behind ``length``, and drops the others.

        ``path`` has their places, counted from ``length`` on, in increasing order.
        """
        if self.states is not None:
            self.states.commit_path(path)
        # The first tokens of the path are often in their places already. Of the path (0, 1, 4) the
        # first two are, and only the third has to move, from place 4 to place 2.
        in_place = sum(place == node for place, node in enumerate(path))
        old_length = self.length
        start = old_length + in_place
        self.length = old_length + len(path)
        if start < self.length:
            rows = torch.tensor(path[in_place:]) + old_length
            # A layer numbers its rows from the first that it holds. The rows are sent once for each
            # device and each such first row, and not once for each layer.
            places = {
                (keys.device, first) for keys, first in zip(self.keys, self.starts, strict=True)
            }
            rows_on = {
                (device, first): send_to_device(rows - first, device) for device, first in places
            }
            for tensors in (self.keys, self.values):
                for tensor, first in zip(tensors, self.starts, strict=True):
                    moved = tensor.index_select(1, rows_on[tensor.device, first])
                    tensor[:, start - first : self.length - first] = moved
            if self.hidden is not None:
                self.hidden.move(rows, start)

    def truncate(self, length: int) -> None:
        """Drops all tokens from ``length`` on. Raises ValueError where there are fewer tokens than
        that, or where keys that would be needed again were evicted."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        if length < self._first_length:
            if length and length not in self._saved_windows:
                raise ValueError(f"the keys before token {length} were evicted")
            # Some rows that are needed are gone, so the saved window takes the place of all rows.
            for layer, rows in self._window_rows_at(length).items():
                self._replace_rows(layer, rows)
        self._saved_windows = {n: each for n, each in self._saved_windows.items() if n <= length}
        self._turn_lengths = [each for each in self._turn_lengths if each <= length]
        if self.states is not None:
            self.states.truncate(self.states.length - (self.length - length))
        self.length = length

    def nearest_length(self, length: int) -> int:
        """Returns the largest length, up to ``length``, to which the cache can be truncated.

        Keys can be cut anywhere, as long as none was evicted. The states of layers that have no
        keys are known at a few lengths only.
        """
        while True:  # This ends when neither the keys nor the states need a smaller length.
            nearest = self._nearest_with_states(self._nearest_with_keys(length))
            if nearest == length:
                return length
            length = nearest

    def _nearest_with_states(self, length: int) -> int:
        if self.states is None:
            return length
        # Where a view left rows out, the cache has no keys of them, but the states have read them.
        # So the states are at a larger length than the keys, by the number of these rows.
        left_out = self.states.length - self.length
        return max(0, self.states.nearest(length + left_out) - left_out)

    def _nearest_with_keys(self, length: int) -> int:
        if length >= self._first_length:
            return length
        return max((each for each in self._saved_windows if each <= length), default=0)

    @property
    def _first_length(self) -> int:
        """The smallest length to which the text can be truncated without a saved window."""
        pairs = zip(self._windows, self.starts, strict=False)
        # In a layer that holds the keys from ``start`` on, ``first_row(start)`` is the first row
        # that sees no earlier key.
        return max((each.first_row(start) for each, start in pairs if each is not None), default=0)

    def save_windows(self, lengths: Sequence[int]) -> None:
        """Copies the keys and values that the next row would see at each of these lengths.

        The text can then be truncated to such a length even after they were evicted. All of them
        must still be held. Recurrent states have snapshots of their own.
        """
        if not self.evicts_keys:
            return
        for length in lengths:
            self._saved_windows[length] = [
                LayerRows(first, *(each.clone() for each in self.read(layer, length, first)))
                for layer, first in self._first_keys(length)
            ]

    def drop_saved_windows_except(self, prompt_lengths: Collection[int]) -> None:
        """Drops the saved windows, except at these lengths and at those of the last few turns."""
        kept = {*prompt_lengths, *self._turn_lengths[-TURNS_WITH_SAVED_WINDOWS:]}
        self._saved_windows = {n: each for n, each in self._saved_windows.items() if n in kept}

    def save_windows_for_turn(self, length: int) -> None:
        """Saves the windows at the length where a turn begins, and drops those of all but the last
        few turns, since a conversation is rarely cut back further."""
        if length not in self._saved_windows:
            self.save_windows([length])
            self._turn_lengths.append(length)
        for old in self._turn_lengths[:-TURNS_WITH_SAVED_WINDOWS]:
            self._saved_windows.pop(old, None)
        del self._turn_lengths[:-TURNS_WITH_SAVED_WINDOWS]

    def _first_keys(self, length: int) -> list[tuple[int, int]]:
        """Returns the layers with a window, each with the first key that the row at ``length``
        sees there."""
        pairs = enumerate(self._windows)
        return [(layer, each.first_key(length)) for layer, each in pairs if each is not None]

    def _window_rows_at(self, length: int) -> dict[int, LayerRows]:
        """Returns, for each layer with a window, the rows that the row at ``length`` needs there.

        There are three cases:

        * Every layer still holds the rows that the row at ``length`` sees. Then these are
          returned, and before them the rows that would be needed after cutting back
          ``ROWS_TO_CUT_BACK`` tokens, as far as the layer still holds them.
        * A layer has evicted some of them. Then the windows saved at ``length`` are returned.
        * A layer has evicted rows and ``length`` is 0. Then the result has no rows.
        """
        if length >= self._first_length:
            rows = {}
            for layer, first in self._first_keys(max(0, length - ROWS_TO_CUT_BACK)):
                first = max(first, self.starts[layer])
                rows[layer] = LayerRows(first, *self.read(layer, length, first))
            return rows
        layers = [layer for layer, _ in self._first_keys(length)]
        if length:
            return dict(zip(layers, self._saved_windows[length], strict=True))
        pairs = ((self.keys[layer][:, :0], self.values[layer][:, :0]) for layer in layers)
        return {layer: LayerRows(0, *pair) for layer, pair in zip(layers, pairs, strict=True)}

    def _replace_rows(self, layer: int, rows: LayerRows) -> None:
        """Replaces all rows that a layer holds with these."""
        self.starts[layer] = rows.start
        count = rows.keys.shape[1]
        for tensors in (self.keys, self.values):
            old = tensors[layer]
            if count > old.shape[1]:
                tensors[layer] = old.new_empty(old.shape[0], count, old.shape[2])
        self.write(layer, rows.start, rows.keys, rows.values)

    def remove_rows(self, start: int, count: int) -> None:
        """Removes ``count`` rows from ``start`` on; those after them move up in the same memory."""
        assert not self.evicts_keys, "rows cannot be moved in a cache that evicts keys"
        for tensor in (*self.keys, *self.values):
            rows_after = tensor[:, start + count : self.length].clone()
            tensor[:, start : self.length - count] = rows_after
        self.length -= count

    def select(
        self,
        rows: Int[Tensor, " kept"] | Int[Tensor, "layer kv_head kept"],
        room: int,
        layers: int | None = None,
        *,
        pooled: bool = True,
    ) -> Cache:
        """Returns a new cache with copies of these rows and room for ``room`` more. Recurrent
        states are copied too, and hidden states are not.

        There is one set of rows for all heads, or one for each layer and head. With ``layers`` only
        so many first layers are copied. With ``pooled`` the new cache is allocated in this one's
        pool, if there is one; a cache that is only copied from later does not need that. Raises
        ValueError in a cache that evicts keys.
        """
        if self.evicts_keys:
            raise ValueError("a choice among rows needs a cache that keeps all keys")
        depth = len(self.keys) if layers is None else layers
        new = Cache(
            self.shapes[:depth],
            rows.shape[-1] + room,
            dtype=self._dtype,
            devices=[keys.device for keys in self.keys[:depth]],
            pool=self.pool if pooled else None,
            states=None if self.states is None else self.states.copy(),
        )
        # The rows of all heads are numbered as one list, in which the first row of head h has the
        # number h * capacity. index_select over such numbers is many times faster than
        # torch.gather.
        head_offsets = {
            heads: torch.arange(heads, device=rows.device)[:, None] * self.capacity
            for heads in {shape.kv_heads for shape in new.shapes}
        }
        for layer, shape in enumerate(new.shapes):
            heads = shape.kv_heads
            chosen_rows = rows[layer] if rows.ndim > 1 else rows
            flat_rows = (chosen_rows + head_offsets[heads]).flatten().to(self.keys[layer].device)
            for old, copy in ((self.keys, new.keys), (self.values, new.values)):
                width = old[layer].shape[2]
                picked = old[layer].view(-1, width).index_select(0, flat_rows)
                copy[layer][:, : rows.shape[-1]] = picked.view(heads, -1, width)
        new.length = rows.shape[-1]
        return new

    def copy_rows(self) -> Cache:
        """Returns a copy of what this cache holds except hidden states, without room for more and
        outside its pool."""
        if not self.evicts_keys:
            device = self.keys[0].device if self.keys else None
            return self.select(torch.arange(self.length, device=device), 0, pooled=False)
        rows = self._window_rows_at(self.length)
        # The capacity does not matter: ``_replace_rows`` makes larger tensors where rows need them.
        new = Cache(
            self.shapes,
            capacity=1,
            dtype=self._dtype,
            devices=[keys.device for keys in self.keys],
            states=None if self.states is None else self.states.copy(),
            windows=self._windows,
        )
        for layer in range(len(self.keys)):
            layer_rows = rows.get(layer)
            if layer_rows is None:
                layer_rows = LayerRows(0, *self.read(layer, self.length))
            new._replace_rows(layer, layer_rows)
        new.length, new._saved_windows = self.length, dict(self._saved_windows)
        return new

    def exchange(
        self,
        source: Cache,
        old_rows: Int[Tensor, "layer kv_head kept"],
        new_rows: Int[Tensor, "layer kv_head kept"],
    ) -> Int[Tensor, "layer kv_head kept"]:
        """Changes which rows of the source this cache holds copies of.

        ``old_rows`` says for each layer, head and place which row of the source is there now.
        ``new_rows`` are those that are wanted, in any order. Rows that are in both stay where they
        are, and each other new row takes the place of one that leaves. That is allowed because
        attention does not depend on the order of keys. Returns which row is in each place then.
        """
        size = int(torch.maximum(old_rows.max(), new_rows.max())) + 1
        is_new = torch.zeros(*old_rows.shape[:2], size, dtype=torch.bool, device=old_rows.device)
        is_old = is_new.clone().scatter_(-1, old_rows, True)
        is_new.scatter_(-1, new_rows, True)
        # The places whose rows leave. In a head with the old rows 2, 5, 7 and the new rows 2, 7, 9
        # row 5 leaves place 1, and row 9 takes that place.
        layers, heads, places = (~is_new.gather(-1, old_rows)).nonzero(as_tuple=True)
        # In each head as many rows arrive as leave. Both lists are ordered by layer and head.
        arriving = new_rows[~is_old.gather(-1, new_rows)]
        counts = torch.bincount(layers, minlength=len(old_rows)).tolist()
        for layer, count in enumerate(counts):
            # The entries of the lists that belong to this layer.
            own = (layers == layer).nonzero().squeeze(-1) if count else layers[:0]
            device = self.keys[layer].device
            to = heads[own].to(device), places[own].to(device)
            origin = heads[own].to(device), arriving[own].to(device)
            self.keys[layer][to] = source.keys[layer][origin]
            self.values[layer][to] = source.values[layer][origin]
        rows_by_place = old_rows.clone()
        rows_by_place[layers, heads, places] = arriving
        return rows_by_place

    def extend(self, source: Cache, start: int, stop: int, at: int | None = None) -> None:
        """Copies rows ``start:stop`` of the source to row ``at`` and after; by default to the end.

        They become this cache's last rows. Only as many layers are copied as this cache has. If
        this cache evicts keys, it must be empty, ``start`` must be 0, and the source must evict
        keys too. ``stop`` must be a length to which the source can be truncated, if there are
        windows or recurrent states.
        """
        if at is not None:
            # Not truncate(), which would cut the states too: they are copied whole below.
            self.length = at
        end = self.length + stop - start
        if not self.evicts_keys:
            self.reserve(end)
        rows_by_layer = source._window_rows_at(stop) if self.evicts_keys else {}
        for layer in range(len(self.keys)):
            rows = rows_by_layer.get(layer)
            if rows is None:
                self._reserve_in_layer(layer, end)
                self.write(layer, self.length, *source.read(layer, stop, start))
            else:
                self._replace_rows(layer, rows)
        if self.evicts_keys:
            self._saved_windows = {
                n: each for n, each in source._saved_windows.items() if n <= stop
            }
        if self.hidden is not None and source.hidden is not None:
            self.hidden.extend(source.hidden, start, stop, self.length)
        self.length += stop - start
        if self.states is not None and source.states is not None:
            source_states_length = source.states.length - (source.length - stop)
            self.states.copy_from(source.states, source_states_length)


def send_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns numbers on a device.

    From the CPU to a GPU they are copied from pinned memory, so that the CPU does not wait.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def as_slice(columns: Int[Tensor, " column"]) -> slice | Int[Tensor, " column"]:
    """Returns increasing columns as a slice where they are adjacent, because a slice is read
    without a copy."""
    if len(columns) and int(columns[-1] - columns[0]) + 1 == len(columns):
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return columns


class Pages:
    """Rows of the target's cache, the ``source``, in pages of a few rows each, for a draft that
    reads few of them.

    At each step of the draft, the step's queries choose the pages to whose mean keys they attend
    the most. Only these are copied into the first rows of the draft's own cache, and read there.
    """

    def __init__(self, source: Cache, paged: Paged, layers: int) -> None:
        """Computes the mean keys of the pages, in the first ``layers`` layers of the source."""
        self._source = source
        self._pages_per_step = paged.pages_per_step
        # For each layer: the rows of each page, [page, rows of a page].
        self._rows = [paged.rows.to(keys.device) for keys in source.keys[:layers]]
        # For each layer: the mean key of each page, [kv_head, head_dim, page].
        self._mean_keys = [
            keys[:, rows].mean(2).transpose(1, 2).contiguous()
            for keys, rows in zip(source.keys, self._rows, strict=False)
        ]

    def attend(
        self,
        cache: Cache,
        layer: int,
        attend_to_keys: Callable[..., Tensor],
        q: Float[Tensor, "head new head_dim"],
        keys: Float[Tensor, "kv_head key head_dim"],
        values: Float[Tensor, "kv_head key head_dim"],
        bias: Float[Tensor, "rows last"] | None,
        scale: float,
    ) -> Float[Tensor, "head new head_dim"]:
        """Attends row by row: over the pages that the row's queries choose, and over the other rows
        of the draft's ``cache``.

        ``attend_to_keys`` is called once a row with that row's queries, the keys, the values, the
        row's bias and the scale, and returns what the row attends to, [head, 1, head_dim].

        ``keys`` and ``values`` are those of ``cache``, without a copy. For each row of ``q`` the
        first rows of ``cache`` are overwritten with the pages that this row chooses. ``bias`` is
        added to the logits of the last keys, or of all keys, and has one column for each of them.
        """
        new = q.shape[1]
        outputs = []
        for row in range(new):
            row_q = q[:, row : row + 1]
            self.copy_best_pages(cache, layer, row_q * scale)
            # Some kernels take one bias of ``new`` rows for all query heads of a group. Others take
            # a copy of these rows for each of the heads, one copy below another. In both cases
            # every ``new``-th row of the bias, from ``row`` on, is about this row.
            row_bias = None if bias is None else bias[row::new]
            outputs.append(attend_to_keys(row_q, keys, values, row_bias, scale))
        return torch.cat(outputs, 1)

    def best_pages(
        self, layer: int, q: Float[Tensor, "head one head_dim"]
    ) -> Int[Tensor, "kv_head page"]:
        """Returns the pages that these scaled queries choose. The query heads of a group choose
        together."""
        mean_keys = self._mean_keys[layer]
        logits = torch.bmm(q.reshape(len(mean_keys), -1, q.shape[-1]), mean_keys)
        return logits.float().softmax(-1).sum(1).topk(self._pages_per_step).indices

    def copy_best_pages(
        self, cache: Cache, layer: int, q: Float[Tensor, "head one head_dim"]
    ) -> None:
        """Writes the keys and values of the chosen pages over the first rows of a cache."""
        kv_heads, capacity, width = self._source.keys[layer].shape
        # As in Cache.select, the rows of all heads are numbered as one list.
        rows = self._rows[layer][self.best_pages(layer, q)].flatten(1)
        flat = (rows + torch.arange(kv_heads, device=rows.device)[:, None] * capacity).flatten()
        for source_layers, copied_layers in (
            (self._source.keys, cache.keys),
            (self._source.values, cache.values),
        ):
            picked = source_layers[layer].view(-1, width).index_select(0, flat)
            copied_layers[layer][:, : rows.shape[1]] = picked.view(kv_heads, -1, width)
