"""Layers with a state: Gated DeltaNet (Qwen3-Next, Qwen3.5) and short convolutions (LFM2).

Such a layer keeps no keys. It keeps a state that every token changes, and that no token can be
taken out of again. So the state of *committed* tokens alone is kept. A forward starts from it, and
leaves behind for each of its rows the small update that the row would make; ``commit`` applies the
updates of the accepted rows. Nothing is computed twice, no weight is read again, and ``score``
stays a pure function of the prompt, the text and the tree.

The rows of a tree need no states of their own. Row t has a query q_t, a key k_t, a value v_t, a
write strength beta_t and a log decay g_t. With S the committed state, G_t the sum of g along the
path to t, and u_t what the row writes under its key, the state after t is

    S_t = e^(G_t) S + sum over a on the path to t of e^(G_t - G_a) k_a u_a^T,
    u_t = beta_t (v_t - e^(G_t) S^T k_t - sum over a above t of e^(G_t - G_a) (k_a . k_t) u_a),

and the row reads S_t^T q_t. The path to t includes t, and "above t" does not. The second line is a
triangular system in the rows of the tree. The chunked form of Gated DeltaNet has such a system too,
with the causal mask instead of the tree's (Yang et al. 2024, arXiv:2412.06464).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, softplus
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from saccade.core.errors import ModelError

CHUNK = 64  # rows of committed text whose triangular system is solved at once
MAX_SNAPSHOTS = 4  # More would cost memory, and a turn usually goes on from a recent one.
# A request keeps its snapshots, its current states, those before the path accepted last, and the
# empty ones before its first token.
STATES_PER_REQUEST = MAX_SNAPSHOTS + 3


# -- the delta rule --------------------------------------------------------------------------------

Keys = Float[Tensor, "*batch head row key"]
Values = Float[Tensor, "*batch head row value"]
PerRow = Float[Tensor, "*batch head row"]
Memory = Float[Tensor, "*batch head key value"]
"""In these four types, axes before the heads are those of requests or of layers, where several are
computed at once. A memory is the matrix S of the formulas above, for each head."""
Solver = Callable[[Float[Tensor, "*batch row row"], Tensor], Tensor]
"""Solves a triangular system whose diagonal is 1, and reads nothing on the diagonal or above it."""


@dataclass(frozen=True)
class DeltaRows:
    """What rows use to read and to write a Gated DeltaNet's memory, in fp32.

    Queries and keys are normalised, and queries are scaled too. ``decay`` is g, the logarithm of
    the factor by which each row shrinks the memory.
    """

    q: Keys
    k: Keys
    v: Values
    beta: PerRow  # the write strength, from 0 to 1
    decay: PerRow

    def by_request(self, requests: int) -> DeltaRows:
        """Returns the rows with an axis of requests first, for rows [head, row, ...] of several
        requests one after the other. All requests have equally many rows."""

        def cut(each: Tensor) -> Tensor:
            return each.unflatten(1, (requests, -1)).transpose(0, 1)

        return DeltaRows(cut(self.q), cut(self.k), cut(self.v), cut(self.beta), cut(self.decay))

    def rows(self, chosen: slice) -> DeltaRows:
        """Returns some of the rows, which are [head, row, ...] without a batch axis."""
        return DeltaRows(
            self.q[:, chosen],
            self.k[:, chosen],
            self.v[:, chosen],
            self.beta[:, chosen],
            self.decay[:, chosen],
        )


@dataclass(frozen=True)
class Writes:
    """What rows write into a memory."""

    keys: Keys  # k
    values: Values  # u, written under the keys
    total_decay: PerRow  # G, the sum of g from the memory to each row

    def rows(self, chosen: slice) -> Writes:
        return Writes(
            self.keys[..., chosen, :], self.values[..., chosen, :], self.total_decay[..., chosen]
        )

    def after(self, path: Sequence[int]) -> Writes:
        """Returns the writes of all rows after a path's last row, to be applied to the memory that
        the path leaves.

        They are right only for rows that continue the path. In a chain these are all later rows.
        """
        start = path[-1] + 1
        passed = self.total_decay[..., path[-1], None]  # G at the end of the path
        later = self.rows(slice(start, None))
        return replace(later, total_decay=self.total_decay[..., start:] - passed)

    def on_path(self, path: Int[Tensor, " step"]) -> Writes:
        """Returns the writes of the rows of a path."""
        return Writes(
            self.keys.index_select(-2, path),
            self.values.index_select(-2, path),
            self.total_decay.index_select(-1, path),
        )

    def apply(self, memory: Memory, path: Int[Tensor, " step"] | None = None) -> Memory:
        """Returns the memory after a path of rows whose first row follows the memory.

        Without ``path`` all rows are the path, each after the one before it.
        """
        if path is not None:
            return self.on_path(path).apply(memory)
        # This is the formula of S_t for the last row.
        last = self.total_decay[..., -1, None]
        weighted = self.keys * (last - self.total_decay).exp()[..., None]
        return memory * last.exp()[..., None] + weighted.transpose(-1, -2) @ self.values


def solve_by_library(overlap: Float[Tensor, "*batch row row"], right: Tensor) -> Tensor:
    """Solves the triangular system of a tree's rows by torch's own solver."""
    return torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)


def score_tree(
    rows: DeltaRows,
    memory: Memory,
    earlier: Writes,
    ancestors: Bool[Tensor, "*batch new all"],
    solve: Solver = solve_by_library,
) -> tuple[Values, Writes]:
    """Reads a memory for the rows of a tree, each of which sees its own path alone.

    Args:
        rows: the new rows of the tree.
        memory: the memory at the tree's root.
        earlier: the writes of the tree's rows that were scored before.
        ancestors: which of all rows of the tree, the new ones last, are on the path to each new
            one, itself included.
        solve: solves the triangular system of the new rows.

    Returns:
        what each new row reads, and the writes of all rows, earlier ones first.
    """
    scored_nodes = earlier.keys.shape[-2]
    # G of each new row is the sum of g over the new rows of its path, plus G of its nearest earlier
    # ancestor. Rows are in topological order, so that ancestor is the last earlier row on the path.
    new_ancestors = ancestors[..., scored_nodes:].to(rows.decay.dtype)
    total = rows.decay @ new_ancestors.transpose(-1, -2)
    if scored_nodes:
        # Entry 0 of ``before`` is for rows without an earlier ancestor, and entry n + 1 for row n.
        nearest = _last_ancestor(ancestors[..., :scored_nodes]) + 1
        before = pad(earlier.total_decay, (1, 0))
        total = total + before.gather(-1, nearest.unsqueeze(-2).expand_as(total))
    keys = torch.cat([earlier.keys, rows.k], -2)
    all_total = torch.cat([earlier.total_decay, total], -1)
    not_on_path = ~ancestors.unsqueeze(-3)
    # The share of each row's write that remains at each new row: e^(G_t - G_a), 0 off the path.
    remaining = (total[..., None] - all_total.unsqueeze(-2)).masked_fill(not_on_path, float("-inf"))
    remaining = remaining.exp()
    # The triangular system: a row's u, plus ``overlap`` times the u of the rows above it, is
    # ``right_side``. The solver takes the diagonal to be 1. Earlier rows have their u already.
    overlap = (rows.k @ keys.transpose(-1, -2)) * remaining * rows.beta[..., None]
    found_in_memory = total.exp()[..., None] * (rows.k @ memory)
    right_side = rows.beta[..., None] * (rows.v - found_in_memory)
    if scored_nodes:
        right_side = right_side - overlap[..., :scored_nodes] @ earlier.values
    values = solve(overlap[..., scored_nodes:], right_side)
    writes = Writes(keys, torch.cat([earlier.values, values], -2), all_total)
    # Each row reads the committed memory and what the rows of its path have written.
    weights = (rows.q @ keys.transpose(-1, -2)) * remaining
    read = total.exp()[..., None] * (rows.q @ memory) + weights @ writes.values
    return read, writes


def read_text(rows: DeltaRows, memory: Memory) -> tuple[Values, Memory]:
    """Reads a memory for rows of text, one after the other, and returns the memory after them.

    The rows are [head, row, ...] without a batch axis. They are taken :data:`CHUNK` at a time: all
    chunks' triangular systems are solved together, and the memory passes through the chunks in
    turn.
    """
    count = rows.q.shape[1]
    if count == 1:
        return read_token(rows, memory)
    size = min(CHUNK, count)
    chunks = -(-count // size)
    extra = chunks * size - count

    def cut(each: Tensor) -> Tensor:
        # Rows that are added at the end write nothing: their beta and their decay are 0.
        padding = (0, 0, 0, extra) if each.dim() == 3 else (0, extra)
        return pad(each, padding).unflatten(1, (chunks, size))

    q, k, v, beta, decay = map(cut, (rows.q, rows.k, rows.v, rows.beta, rows.decay))
    # The quantities of ``score_tree`` in each chunk. Here all rows before a row are above it.
    total = decay.cumsum(-1)
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    remaining = total[..., None] - total[..., None, :]
    remaining = remaining.masked_fill_(is_later, float("-inf")).exp_()
    overlap = (k @ k.transpose(-1, -2)) * remaining * beta[..., None]
    # What a chunk writes is ``values - memory_factor @ memory``, with the memory before the chunk.
    # Neither part depends on the memory, so both are solved for in all chunks at once.
    both = torch.cat([v, k * total.exp()[..., None]], -1) * beta[..., None]
    both = torch.linalg.solve_triangular(overlap, both, upper=False, unitriangular=True)
    values, memory_factor = both.split((v.shape[-1], k.shape[-1]), -1)
    weights = (q @ k.transpose(-1, -2)) * remaining
    # From here on each query is multiplied by the decay from the chunk's beginning to its row, and
    # each key by the decay from its row to the chunk's end.
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    chunk_decay = total[..., -1].exp()[..., None, None]
    reads = []
    for chunk in range(chunks):
        written = values[:, chunk] - memory_factor[:, chunk] @ memory
        reads.append(q[:, chunk] @ memory + weights[:, chunk] @ written)
        memory = memory * chunk_decay[:, chunk] + k[:, chunk].transpose(-1, -2) @ written
    return torch.cat(reads, 1)[:, :count], memory


def read_token(rows: DeltaRows, memory: Memory) -> tuple[Values, Memory]:
    """Does what :func:`read_text` does for a single row, by the recurrence itself."""
    memory = memory * rows.decay.exp()[..., None]
    written = (rows.v - rows.k @ memory) * rows.beta[..., None]
    memory = torch.baddbmm(memory, rows.k.transpose(-1, -2), written)
    return rows.q @ memory, memory


def _last_ancestor(ancestors: Bool[Tensor, "*batch new earlier"]) -> Int[Tensor, "*batch new"]:
    """Returns the last column that is true in each row; -1 where none is."""
    places = torch.arange(1, ancestors.shape[-1] + 1, device=ancestors.device)
    return (ancestors * places).amax(-1) - 1


# -- what a request keeps --------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a layer with a state remembers of all tokens so far. Never changed in place.

    ``window`` has the last inputs of its convolution, and ``memory`` is that of a Gated DeltaNet.
    The states of several layers may be stacked in one, with an axis of layers before the others.
    """

    window: Float[Tensor, "*layer past channel"]
    memory: Memory | None = None

    @classmethod
    def stack(cls, states: Sequence[State]) -> State:
        """Returns the states of several layers as one. They must have the same shapes."""
        memories = [each.memory for each in states if each.memory is not None]
        return cls(
            torch.stack([each.window for each in states]),
            torch.stack(memories) if memories else None,
        )

    def of_layers(self, chosen: int | slice) -> State:
        """Returns the states of some layers, if this is a stack of several layers' states."""
        return State(self.window[chosen], None if self.memory is None else self.memory[chosen])

    def clone(self) -> State:
        return State(self.window.clone(), None if self.memory is None else self.memory.clone())


@dataclass(frozen=True)
class Updates:
    """How the rows of a tree would change a layer's state if they were committed.

    The updates of several layers may be stacked in one, with an axis of layers before the others.
    """

    inputs: Float[Tensor, "*layer row channel"]  # of the layer's convolution
    writes: Writes | None = None  # to the layer's memory; None for a layer without one

    @classmethod
    def stack(cls, updates: Sequence[Updates]) -> Updates:
        """Returns the updates of several layers as one. They must have the same shapes."""
        writes = [each.writes for each in updates if each.writes is not None]
        stacked = None
        if writes:
            stacked = Writes(
                torch.stack([each.keys for each in writes]),
                torch.stack([each.values for each in writes]),
                torch.stack([each.total_decay for each in writes]),
            )
        return cls(torch.stack([each.inputs for each in updates]), stacked)

    def of_layers(self, chosen: int | slice) -> Updates:
        """Returns the updates of some layers, if this is a stack of several layers' updates."""
        writes = self.writes
        if writes is not None:
            writes = Writes(writes.keys[chosen], writes.values[chosen], writes.total_decay[chosen])
        return Updates(self.inputs[chosen], writes)

    def clone(self) -> Updates:
        writes = self.writes
        if writes is not None:
            writes = Writes(writes.keys.clone(), writes.values.clone(), writes.total_decay.clone())
        return Updates(self.inputs.clone(), writes)

    def rows(self, chosen: slice) -> Updates:
        writes = None if self.writes is None else self.writes.rows(chosen)
        return Updates(self.inputs[..., chosen, :], writes)

    def first(self, count: int) -> Updates:
        return self.rows(slice(count))

    def after(self, path: Sequence[int]) -> Updates:
        """Returns the updates of all rows after a path's last row, as ``Writes.after`` does."""
        writes = None if self.writes is None else self.writes.after(path)
        return Updates(self.inputs[..., path[-1] + 1 :, :], writes)

    def followed_by(self, later: Updates) -> Updates:
        """Returns the updates of these rows, followed by those of later rows of the same tree.

        The decays of both are sums from the tree's root on, so they are joined as they are.
        """
        inputs = torch.cat([self.inputs, later.inputs], -2)
        if self.writes is None or later.writes is None:
            return Updates(inputs)
        writes = Writes(
            torch.cat([self.writes.keys, later.writes.keys], -2),
            torch.cat([self.writes.values, later.writes.values], -2),
            torch.cat([self.writes.total_decay, later.writes.total_decay], -1),
        )
        return Updates(inputs, writes)

    def apply(self, state: State, path: Int[Tensor, " step"] | None = None) -> State:
        """Returns the state after a path of rows whose first row follows the state.

        Without ``path`` all rows are the path, each after the one before it.
        """
        past = state.window.shape[-2]
        inputs = self.inputs if path is None else self.inputs.index_select(-2, path)
        window = torch.cat([state.window, inputs], -2)[..., -past:, :]
        if self.writes is None or state.memory is None:
            return State(window)
        return State(window, self.writes.apply(state.memory, path))


class StatesByLayer:
    """The states of all layers that have one. Never changed in place.

    After an ordinary forward they are a list with one state per layer. After a captured forward,
    one that is replayed as a CUDA graph, they are one stack of all layers, because a GPU needs far
    fewer kernels for a stack. The list is then made of the stack when it is first needed.
    """

    def __init__(self, layers: Sequence[State], stacked: State | None = None) -> None:
        self._stacked = stacked
        self._layers: list[State] | None = [*layers]

    @classmethod
    def of_stack(cls, stacked: State) -> StatesByLayer:
        """Returns states that are stacked in one, with an axis of layers."""
        states = cls([], stacked)
        states._layers = None
        return states

    def __iter__(self) -> Iterator[State]:
        return iter(self._by_layer())

    def __len__(self) -> int:
        return len(self._by_layer()) if self._stacked is None else len(self._stacked.window)

    def __getitem__(self, layer: int) -> State:
        return self._by_layer()[layer]

    def _by_layer(self) -> list[State]:
        if self._layers is None:
            assert self._stacked is not None
            count = len(self._stacked.window)
            self._layers = [self._stacked.of_layers(layer) for layer in range(count)]
        return self._layers

    def stacked(self) -> State:
        """Returns the states of all layers in one stack; it may be a copy."""
        return State.stack(self._by_layer()) if self._stacked is None else self._stacked

    def first(self, count: int) -> StatesByLayer:
        """Returns the states of the first so many layers."""
        if self._stacked is not None:
            return StatesByLayer.of_stack(self._stacked.of_layers(slice(count)))
        return StatesByLayer(self._by_layer()[:count])


class UpdatesByLayer:
    """The updates of all layers for the rows of a tree; None for a layer that made none yet.

    They are a list or one stack, like :class:`StatesByLayer`.
    """

    def __init__(self, layers: Sequence[Updates | None], stacked: Updates | None = None) -> None:
        self._stacked = stacked
        self._layers: list[Updates | None] | None = [*layers]

    @classmethod
    def of_stack(cls, stacked: Updates) -> UpdatesByLayer:
        """Returns updates that are stacked in one, with an axis of layers."""
        updates = cls([], stacked)
        updates._layers = None
        return updates

    def __iter__(self) -> Iterator[Updates | None]:
        return iter(self._by_layer())

    def __getitem__(self, layer: int) -> Updates | None:
        return self._by_layer()[layer]

    def _by_layer(self) -> list[Updates | None]:
        if self._layers is None:
            assert self._stacked is not None
            count = len(self._stacked.inputs)
            self._layers = [self._stacked.of_layers(layer) for layer in range(count)]
        return self._layers

    def _of_every_layer(self) -> list[Updates]:
        updates = [each for each in self._by_layer() if each is not None]
        assert len(updates) == len(self._by_layer()), "the tree was not scored"
        return updates

    def put(self, layer: int, updates: Updates) -> None:
        """Stores the updates of one layer."""
        self._by_layer()[layer] = updates
        self._stacked = None

    def copy(self) -> UpdatesByLayer:
        """Returns a copy, which :meth:`put` may change without changing this."""
        if self._stacked is not None:
            return UpdatesByLayer.of_stack(self._stacked)
        return UpdatesByLayer(self._by_layer())

    def stacked(self) -> Updates:
        """Returns the updates of all layers in one stack; it may be a copy."""
        return Updates.stack(self._of_every_layer()) if self._stacked is None else self._stacked

    def after(self, path: Sequence[int]) -> UpdatesByLayer:
        """Returns the updates of the rows after a path, to be applied to the states that the path
        leaves (``Writes.after``)."""
        if self._stacked is not None:
            return UpdatesByLayer.of_stack(self._stacked.after(path))
        return UpdatesByLayer([each.after(path) for each in self._of_every_layer()])

    def apply(self, states: StatesByLayer, path: Sequence[int]) -> StatesByLayer:
        """Returns the states after the rows of a path that starts at them."""
        if self._stacked is not None:
            (stacked,) = _apply_path([self._stacked], [states.stacked()], path)
            return StatesByLayer.of_stack(stacked)
        return StatesByLayer(_apply_path(self._of_every_layer(), [*states], path))


def _apply_path(
    updates: Sequence[Updates], states: Sequence[State], path: Sequence[int]
) -> list[State]:
    """Returns each of the states after the rows of a path."""
    pairs = [*zip(states, updates, strict=True)]
    # The first rows of a tree are taken by a slice, so no row numbers are sent to a device.
    if [*path] == [*range(len(path))]:
        return [each.first(len(path)).apply(state) for state, each in pairs]
    # The path is sent once to each device, and not once for each layer.
    devices = {state.window.device for state in states}
    path_by_device = {device: torch.tensor(path, device=device) for device in devices}
    return [each.apply(state, path_by_device[state.window.device]) for state, each in pairs]


@dataclass(frozen=True)
class Journal:
    """The path that was committed last, so that the states within it can be computed again."""

    length: int  # how many tokens were committed before the path
    states: StatesByLayer  # before the path
    updates: UpdatesByLayer  # of the whole tree
    path: tuple[int, ...]  # rows of the tree


class LayerStates:
    """One request's states of all layers that have one. The request's KV cache holds this object.

    ``length`` counts the committed tokens. A forward may have two kinds of rows after these. The
    rows of a prompt or of pending tokens are certain. The states after them are stored while the
    forward runs, and :meth:`advance` makes them the current ones when it has ended. The rows of a
    drafted tree wait for a verdict, and :meth:`commit_path` commits those that are accepted.
    """

    def __init__(self, empty: Sequence[State]) -> None:
        self.length = 0
        self.states = StatesByLayer(empty)
        self._empty = self.states
        # The states after the committed rows of the forward under way, by layer or in one stack.
        self._after_forward: dict[int, State] = {}
        self._stack_after_forward: State | None = None
        self._updates = UpdatesByLayer([None] * len(empty))
        self._snapshots: dict[int, StatesByLayer] = {}
        self._journal: Journal | None = None

    @property
    def bytes(self) -> int:
        """The bytes of all stored states. A tensor that is stored twice counts once."""
        stored = [self._empty, self.states, *self._snapshots.values()]
        if self._journal is not None:
            stored.append(self._journal.states)
        tensors = {
            id(each): each
            for states in stored
            for state in states
            for each in (state.window, state.memory)
            if each is not None
        }
        return sum(each.numel() * each.element_size() for each in tensors.values())

    # -- of one forward ------------------------------------------------------------------------

    def base(self, layer: int) -> State:
        """Returns the state at the root of the tree, after the committed rows of this forward."""
        later = self._after_forward.get(layer)
        return self.states[layer] if later is None else later

    def store_committed(self, layer: int, state: State) -> None:
        """Stores the state after the committed rows of a forward that is under way."""
        self._after_forward[layer] = state

    def earlier(self, layer: int, scored_nodes: int) -> Updates | None:
        """Returns the updates of the tree's first rows, which earlier forwards have scored; None if
        ``scored_nodes`` is 0."""
        updates = self._updates[layer]
        return updates.first(scored_nodes) if scored_nodes and updates is not None else None

    def put(self, layer: int, updates: Updates) -> None:
        """Stores the updates of all rows of the tree."""
        self._updates.put(layer, updates)

    def put_writes(self, layer: int, writes: Writes) -> None:
        """Adds the writes of all rows of the tree to their updates, whose inputs are stored."""
        updates = self._updates[layer]
        assert updates is not None
        self.put(layer, replace(updates, writes=writes))

    # -- of one captured forward, which computes all layers at once ----------------------------

    def store_committed_of_all_layers(self, stacked: State) -> None:
        """Does :meth:`store_committed` for all layers."""
        self._stack_after_forward = stacked

    def earlier_of_all_layers(self, scored_nodes: int) -> Updates:
        """Does :meth:`earlier` for all layers. ``scored_nodes`` has to be above 0."""
        return self._updates.stacked().first(scored_nodes)

    def put_of_all_layers(self, stacked: Updates) -> None:
        """Does :meth:`put` for all layers."""
        self._updates = UpdatesByLayer.of_stack(stacked)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Returns a context. When the context ends, all changes that forwards and commits have made
        in it are undone."""
        before = self.copy()
        try:
            yield
        finally:
            vars(self).update(vars(before))

    # -- of an answer --------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Counts the ``count`` committed rows of the last forward, and makes the states after them
        the current ones."""
        if not count:
            return
        if self._stack_after_forward is not None:
            self.states = StatesByLayer.of_stack(self._stack_after_forward)
        elif self._after_forward:
            layers = enumerate(self.states)
            self.states = StatesByLayer([self._after_forward.get(n, state) for n, state in layers])
        self.length += count
        self._forget_forward()

    def commit_path(self, path: Sequence[int]) -> None:
        """Commits the rows of a path of the tree.

        The rows after the path's last one keep their updates, which are right for rows that
        continue the path, such as the rest of a chain. Callers drop all other rows, so nothing
        reads the updates of those.
        """
        self._forget_forward()
        if not path:
            return
        updates = self._updates
        self._updates = updates.after(path)
        self._journal = Journal(self.length, self.states, updates, tuple(path))
        self.states = self._journal_states(self._journal, len(path))
        self.length += len(path)

    def snapshot(self, spared: Collection[int] = ()) -> None:
        """Stores the current states, so that the text can be cut back to this length later.

        If there are more than ``MAX_SNAPSHOTS``, the oldest are dropped. The very first, the
        newest, and those at the ``spared`` lengths stay. A caller spares the length at which a
        prompt's pictures end. If a later turn is cut back to that length, only text has to be read
        again. If it were cut back further, a picture would have to be read again, and a turn
        cannot do that.
        """
        self._snapshots[self.length] = self.states
        old = [length for length in [*self._snapshots][1:-1] if length not in spared]
        for length in old[: max(0, len(self._snapshots) - MAX_SNAPSHOTS)]:
            del self._snapshots[length]

    def nearest(self, length: int) -> int:
        """Returns the largest length up to this one at which the states are known."""
        lengths = [0, self.length, *self._snapshots]
        if self._journal is not None:
            start = self._journal.length
            lengths += range(start, start + len(self._journal.path) + 1)
        return max(each for each in lengths if each <= length)

    def at(self, length: int) -> StatesByLayer:
        """Returns the states at a length of which :meth:`nearest` says that they are known."""
        if length == self.length:
            return self.states
        if length in self._snapshots:
            return self._snapshots[length]
        if length == 0:
            return self._empty
        journal = self._journal
        assert journal is not None
        count = length - journal.length
        assert 0 <= count <= len(journal.path), f"no state of {length} tokens is known"
        return self._journal_states(journal, count)

    @staticmethod
    def _journal_states(journal: Journal, count: int) -> StatesByLayer:
        if not count:
            return journal.states
        path = journal.path[:count]
        return journal.updates.apply(journal.states, path)

    def truncate(self, length: int) -> None:
        """Cuts back to a length at which the states are known. Forgets the tree."""
        self._start_from(self.at(length), length)
        self._snapshots = {n: each for n, each in self._snapshots.items() if n <= length}

    def copy_from(self, source: LayerStates, length: int) -> None:
        """Takes over the states at ``length`` from another request that has the same text up to
        there."""
        count = len(self.states)  # Fewer than the source's if the model stops at an early layer.
        self._start_from(source.at(length).first(count), length)
        snapshots = source._snapshots.items()
        self._snapshots = {n: each.first(count) for n, each in snapshots if n <= length}

    def _start_from(self, states: StatesByLayer, length: int) -> None:
        """Makes these the current states, after ``length`` tokens, and forgets the tree."""
        self.states, self.length = states, length
        self._forget_forward()
        self._updates = UpdatesByLayer([None] * len(states))
        # A journal with an empty path keeps these states known at this length until the next
        # commit, also after more rows have been read.
        self._journal = Journal(length, states, UpdatesByLayer([]), ())

    def _forget_forward(self) -> None:
        self._after_forward = {}
        self._stack_after_forward = None

    def copy(self) -> LayerStates:
        """Returns a copy. Later changes to one of the two do not change the other."""
        copied_states = copy(self)
        copied_states._snapshots = dict(self._snapshots)
        copied_states._after_forward = dict(self._after_forward)
        copied_states._updates = self._updates.copy()
        return copied_states

    def first_layers(self, count: int) -> LayerStates:
        """Returns a copy with the states of the first so many layers, for a text that goes on from
        here. What the tree's rows would change and the path committed last are not copied."""
        first_states = LayerStates([*self._empty.first(count)])
        first_states.length, first_states.states = self.length, self.states.first(count)
        first_states._snapshots = {n: each.first(count) for n, each in self._snapshots.items()}
        return first_states


# -- the layers ------------------------------------------------------------------------------------


class Mixer(ABC):
    """Computes the part of a decoder layer that has a state, with the weights of its module in
    transformers. It mixes what a row has with what earlier rows left, as attention does."""

    conv: nn.Conv1d
    activation: bool  # whether SiLU follows the convolution

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def past(self) -> int:
        """How many earlier inputs the convolution reads."""
        return int(self.conv.kernel_size[0]) - 1

    def empty(self, dtype: torch.dtype) -> State:
        """Returns the state before the first token."""
        device = self.conv.weight.device
        return State(torch.zeros(self.past, self.conv.in_channels, dtype=dtype, device=device))

    @property
    def conv_state_numbers(self) -> int:
        """How many numbers the window of a state has."""
        return self.past * self.conv.in_channels

    @property
    def fp32_state_numbers(self) -> int:
        """How many numbers the memory of a state has, in fp32."""
        return 0

    @abstractmethod
    def compute(
        self, hidden: Float[Tensor, "all dim"], rows: MixerRows, layer: int
    ) -> Float[Tensor, "all dim"]:
        """Computes the layer for the rows of several requests. ``rows`` stores their updates."""

    def run(
        self, hidden: Float[Tensor, "all dim"], segments: Sequence[StateRows], layer: int
    ) -> Float[Tensor, "all dim"]:
        """Does what :meth:`compute` does, one request after the other."""
        return self.compute(hidden, RowsBySegment(segments), layer)

    def activate(self, mixed: Tensor) -> Tensor:
        """Returns the convolution's output after SiLU, if this kind of layer applies it."""
        return nn.functional.silu(mixed) if self.activation else mixed


@runtime_checkable
class MixerRows(Protocol):
    """The rows of a forward, with what layers with a state need to know of the rows before them."""

    def convolve(
        self, mixer: Mixer, inputs: Float[Tensor, "all channel"], layer: int
    ) -> Float[Tensor, "all channel"]:
        """Returns the convolution of each row with the inputs before it on its path, after the
        mixer's ``activate``, and stores the inputs."""

    def read(self, delta: DeltaRows, layer: int) -> Values:
        """Returns what each row reads from its memory, and stores what the rows write."""


class RowsBySegment:
    """The rows of a forward, computed one segment after the other.

    A segment is the rows of one request.
    """

    def __init__(self, segments: Sequence[StateRows]) -> None:
        self._segments = segments
        # For each segment, the updates of the tree's nodes that earlier forwards have scored, in
        # the layer that is being computed.
        self._earlier: list[Updates | None] = []

    def convolve(
        self, mixer: Mixer, inputs: Float[Tensor, "all channel"], layer: int
    ) -> Float[Tensor, "all channel"]:
        mixed: list[Tensor] = []
        past = mixer.past
        self._earlier = []
        for segment in self._segments:
            segment_inputs = inputs[segment.start : segment.stop]
            state = segment.states.states[layer]
            # Rows of text come first, and leave the state at the root of the tree.
            if segment.committed_rows:
                text = torch.cat(
                    [state.window.to(segment_inputs), segment_inputs[: segment.committed_rows]]
                )
                mixed.append(convolve_text(text, mixer.conv))
                state = replace(state, window=text[len(text) - past :])
                segment.states.store_committed(layer, state)
            # The nodes of a tree read the inputs of their own paths (``StateRows.taps``).
            drafted = segment_inputs[segment.committed_rows :]
            earlier = segment.states.earlier(layer, segment.scored_nodes)
            self._earlier.append(earlier)
            if not len(drafted):
                continue
            tree = drafted if earlier is None else torch.cat([earlier.inputs, drafted])
            segment.states.put(layer, Updates(tree))
            known = torch.cat([state.window.to(segment_inputs), tree])
            mixed.append(convolve_taps(known[segment.taps(past)].transpose(1, 2), mixer.conv))
        return mixer.activate(torch.cat(mixed))

    def read(self, delta: DeltaRows, layer: int) -> Values:
        reads = []
        for segment, earlier in zip(self._segments, self._earlier, strict=True):
            text = slice(segment.start, segment.start + segment.committed_rows)
            state = segment.states.base(layer)
            assert state.memory is not None
            if segment.committed_rows:
                read, memory = read_text(delta.rows(text), state.memory)
                reads.append(read)
                state = replace(state, memory=memory)
                segment.states.store_committed(layer, state)
            drafted = slice(text.stop, segment.stop)
            if drafted.start < drafted.stop:
                assert state.memory is not None
                nodes = delta.rows(drafted)
                before = no_writes(nodes) if earlier is None else earlier.writes
                assert before is not None
                read, writes = score_tree(nodes, state.memory, before, segment.ancestors_on_device)
                reads.append(read)
                segment.states.put_writes(layer, writes)
        return torch.cat(reads, 1)


@dataclass(frozen=True)
class StateRows:
    """The rows of one request in a forward, as layers with a state see them.

    The first ``committed_rows`` of rows ``start:stop`` are committed when the forward has ended.
    The others are the new nodes of a tree, which had ``scored_nodes`` nodes before. ``ancestors``
    has for each new node which nodes of the tree are on its path, itself included.
    """

    states: LayerStates
    start: int
    stop: int
    committed_rows: int
    scored_nodes: int
    ancestors: Bool[Tensor, "new all"]
    _taps: dict[int, Int[Tensor, "new tap"]] = field(default_factory=dict)

    @property
    def _device(self) -> torch.device:
        return self.states.states[0].window.device

    @cached_property
    def ancestors_on_device(self) -> Bool[Tensor, "new all"]:
        """``ancestors`` on the device of the states. ``ancestors`` itself is made on the CPU, where
        it can be read without waiting for the device."""
        return self.ancestors.to(self._device)

    def taps(self, past: int) -> Int[Tensor, "new tap"]:
        """Returns, for each new node, the places of the inputs that its convolution reads, in the
        window before the tree and the tree's rows after it. All layers of a forward share them."""
        if past not in self._taps:
            self._taps[past] = find_taps(self.ancestors, past).to(self._device)
        return self._taps[past]


def convolve_text(
    inputs: Float[Tensor, "all channel"], conv: nn.Conv1d
) -> Float[Tensor, "row channel"]:
    """Returns the output of a causal convolution over text. The first inputs are those of the rows
    before the text, which have no output."""
    width = conv.kernel_size[0]
    # For few rows PyTorch's convolution takes longer than ``convolve_taps`` does, as measured on a
    # CPU, so it is used only from about ``CHUNK`` rows on.
    if len(inputs) - width < CHUNK:
        return convolve_taps(inputs.unfold(0, width, 1), conv)
    return conv1d(inputs.T, conv.weight, conv.bias, groups=len(conv.weight)).T


def convolve_taps(
    taps: Float[Tensor, "row channel tap"], conv: nn.Conv1d
) -> Float[Tensor, "row channel"]:
    """Returns the output of a convolution for rows, from the inputs that each of them reads."""
    out = (taps.float() * conv.weight[:, 0].float()).sum(-1)
    if conv.bias is not None:
        out = out + conv.bias.float()
    return out.to(taps)


def find_taps(ancestors: Bool[Tensor, "new all"], past: int) -> Int[Tensor, "new tap"]:
    """Returns the places of the inputs that each row's convolution reads: the last ``past`` + 1 of
    its path, which begins with the ``past`` inputs before the tree.

    For example, with 3 past inputs at the places 0 to 2, nodes of a tree are at 3, 4 and so on. If
    nodes 0 and 1 are children of the root, node 1 reads the places 0, 1, 2 and 4.
    """
    places = torch.arange(past + ancestors.shape[1])
    is_on_path = pad(ancestors, (past, 0), value=True)
    # Sorting puts the places that are off the path (-1) first.
    return torch.where(is_on_path, places, -1).sort(1).values[:, -past - 1 :]


class ShortConvolution(Mixer):
    """LFM2's short convolution, between two gates."""

    activation = False

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.conv = module.conv

    def compute(
        self, hidden: Float[Tensor, "all dim"], rows: MixerRows, layer: int
    ) -> Float[Tensor, "all dim"]:
        gate_in, gate_out, values = self.module.in_proj(hidden).chunk(3, -1)
        mixed = rows.convolve(self, gate_in * values, layer)
        return self.module.out_proj((gate_out * mixed).contiguous())


class GatedDelta(Mixer):
    """Qwen3.5's Gated DeltaNet."""

    activation = True

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.conv = module.conv1d

    def empty(self, dtype: torch.dtype) -> State:
        module = self.module
        state = super().empty(dtype)
        memory = state.window.new_zeros(
            module.num_v_heads, module.head_k_dim, module.head_v_dim, dtype=torch.float32
        )
        return replace(state, memory=memory)

    @property
    def fp32_state_numbers(self) -> int:
        return int(self.module.num_v_heads * self.module.head_k_dim * self.module.head_v_dim)

    def project(
        self, hidden: Float[Tensor, "all dim"]
    ) -> tuple[Float[Tensor, "all channel"], Tensor, Tensor, Tensor]:
        """Returns the convolution's inputs, the output gate, and the projections that beta and the
        decay are computed from."""
        module = self.module
        return (
            module.in_proj_qkv(hidden),
            module.in_proj_z(hidden),
            module.in_proj_b(hidden),
            module.in_proj_a(hidden),
        )

    def compute(
        self, hidden: Float[Tensor, "all dim"], rows: MixerRows, layer: int
    ) -> Float[Tensor, "all dim"]:
        module = self.module
        inputs, gate, for_beta, for_decay = self.project(hidden)
        mixed = rows.convolve(self, inputs, layer)
        reads = rows.read(self._delta(mixed, for_beta, for_decay), layer)
        core = reads.transpose(0, 1).to(hidden.dtype)
        core = module.norm(core.reshape(-1, module.head_v_dim), gate.reshape(-1, module.head_v_dim))
        return module.out_proj(core.view(len(hidden), -1))

    def _delta(self, mixed: Tensor, for_beta: Tensor, for_decay: Tensor) -> DeltaRows:
        """Returns how the rows read and write the memory, from the convolution's output and the
        projections for beta and the decay."""
        module = self.module
        # The output has queries, keys and values side by side. Each [row, heads * width] becomes
        # [head, row, width].
        sizes = (module.key_dim, module.key_dim, module.value_dim)
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(0, 1).float()
            for part, width in zip(
                mixed.split(sizes, -1),
                (module.head_k_dim, module.head_k_dim, module.head_v_dim),
                strict=True,
            )
        )
        value_heads_per_key_head = module.num_v_heads // module.num_k_heads
        q, k = (_normalise(each).repeat_interleave(value_heads_per_key_head, 0) for each in (q, k))
        decay = -module.A_log.float().exp() * softplus(for_decay.float() + module.dt_bias)
        return DeltaRows(
            q * module.head_k_dim**-0.5, k, v, for_beta.sigmoid().float().T, decay.T.contiguous()
        )


class GatedDeltaByGroups(GatedDelta):
    """Qwen3-Next's Gated DeltaNet, whose projection has q, k, v and z of one key head after the
    other."""

    def project(
        self, hidden: Float[Tensor, "all dim"]
    ) -> tuple[Float[Tensor, "all channel"], Tensor, Tensor, Tensor]:
        module = self.module
        q, k, v, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
        )
        inputs = torch.cat([each[0].flatten(1) for each in (q, k, v)], -1)
        return inputs, z[0].flatten(1), b[0], a[0]


MIXERS: dict[str, type[Mixer]] = {
    "Qwen3NextGatedDeltaNet": GatedDeltaByGroups,
    "Qwen3_5GatedDeltaNet": GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": GatedDelta,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
    "Lfm3ShortConv": ShortConvolution,
}
"""The class here that computes a module, by the name of the module's class in transformers."""


ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""The names that configs of transformers give to layers that keep keys, and no state."""


def replacement_forward(
    mixer: Mixer, rows: MixerRows | None, layer: int
) -> Callable[..., Float[Tensor, "1 all dim"]]:
    """Returns the function that replaces the module's forward during one forward of the model."""

    def run(hidden_states: Float[Tensor, "1 all dim"], **_: Any) -> Float[Tensor, "1 all dim"]:
        # Without rows the model is run only to find the shapes of its keys and values
        # (``Backbone._find_head_shapes``), so any output of the right shape will do.
        if rows is None:
            return torch.zeros_like(hidden_states)
        return mixer.compute(hidden_states[0], rows, layer)[None]

    return run


def mixers_of(layers: Sequence[nn.Module], config: Any) -> dict[int, Mixer]:
    """Returns the parts of decoder layers that have a state, by the layer's place.

    Raises ModelError where a layer has a state that Saccade does not know.
    """
    described = config.to_dict()
    kinds = described.get("layer_types") or []
    name = described.get("model_type", "this model")
    mixers = {}
    for place, layer in enumerate(layers):
        mixer = mixer_of(layer)
        if mixer is not None:
            mixers[place] = mixer
        elif place < len(kinds) and kinds[place] not in ATTENTION_KINDS:
            raise ModelError(
                f"{name} has layers of the kind {kinds[place]}, which Saccade does not know; it "
                f"knows {', '.join(ATTENTION_KINDS)} and {', '.join(MIXERS)}"
            )
    if not mixers:
        refuse_unknown_state(config)
    return mixers


def refuse_unknown_state(config: Any) -> None:
    """Raises ModelError for a language model that transformers calls stateful, if its config has
    no ``layer_types`` that would say which layers have the state."""
    described = config.to_dict()
    is_stateful = getattr(MODEL_MAPPING.get(type(config), None), "_is_stateful", False)
    if is_stateful and not described.get("layer_types"):
        raise ModelError(
            f"{described.get('model_type', 'this model')} has recurrent layers whose state Saccade "
            f"does not know how to keep; it knows {', '.join(MIXERS)}"
        )


def mixer_of(layer: nn.Module) -> Mixer | None:
    """Returns the part of a decoder layer that has a state; None where it has none."""
    for module in layer.children():
        kind = MIXERS.get(type(module).__name__)
        if kind is not None:
            return kind(module)
    return None


def _normalise(x: Keys) -> Keys:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def no_writes(like: DeltaRows) -> Writes:
    """Returns the writes of zero rows, with the shapes of ``like`` otherwise."""
    return Writes(like.k[..., :0, :], like.v[..., :0, :], like.decay[..., :0])
