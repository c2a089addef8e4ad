"""Layers with a state: Gated DeltaNet (Qwen3-Next, Qwen3.5) and short convolutions (LFM2).

Such a layer keeps no keys. It keeps a state that every token changes, and that no token can be
taken out of again. So the state of *committed* tokens alone is kept. A forward starts from it, and
leaves behind for each of its rows the small update that the row would make; ``commit`` applies the
updates of the accepted rows. Nothing is computed twice, no weight is read again, and ``score``
stays a pure function of the prompt, the text and the tree.

The rows of a tree need no states of their own. With S the committed state, g a row's log decay,
G the sum of g along the path to a row, and u the value that a row writes under its key k,

    S_t = e^(G_t) S + sum over a on the path to t of e^(G_t - G_a) k_a u_a^T,
    u_t = beta_t (v_t - e^(G_t) S^T k_t - sum over a above t of e^(G_t - G_a) (k_a . k_t) u_a).

The second line is a triangular system in the rows of the tree, with the tree's mask in the place
of the causal one of the chunked form of Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, softplus
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from saccade.core.errors import ModelError

CHUNK = 64  # rows of committed text whose triangular system is solved at once
MAX_SNAPSHOTS = 4  # Older states cost memory, and conversations go back one turn at most.
STATES_PER_REQUEST = MAX_SNAPSHOTS + 2  # with those of now, and before the path accepted last


# -- the delta rule --------------------------------------------------------------------------------

Heads = Float[Tensor, "head row dim"]
PerRow = Float[Tensor, "head row"]
Memory = Float[Tensor, "head key value"]


@dataclass(frozen=True)
class Delta:
    """What rows ask of a Gated DeltaNet's memory and write into it, in fp32.

    Queries and keys are normalised, queries scaled; ``decay`` is the logarithm g of each row's.
    """

    q: Heads
    k: Heads
    v: Heads
    beta: PerRow
    decay: PerRow

    def rows(self, chosen: slice) -> Delta:
        return Delta(
            self.q[:, chosen],
            self.k[:, chosen],
            self.v[:, chosen],
            self.beta[:, chosen],
            self.decay[:, chosen],
        )


@dataclass(frozen=True)
class Writes:
    """What rows write into a memory: u under k, and the log decay G from the memory to each row."""

    keys: Heads
    values: Heads
    total_decay: PerRow

    def first(self, count: int) -> Writes:
        return Writes(self.keys[:, :count], self.values[:, :count], self.total_decay[:, :count])

    def after(self, path: Sequence[int]) -> Writes:
        """Returns the writes of the rows after a path, seen from the memory at the path's end."""
        start = path[-1] + 1
        passed = self.total_decay[:, path[-1], None]
        return Writes(
            self.keys[:, start:], self.values[:, start:], self.total_decay[:, start:] - passed
        )

    def apply(self, memory: Memory, path: Int[Tensor, " step"]) -> Memory:
        """Returns the memory after the rows of a path, which starts at the memory."""
        keys, values = self.keys.index_select(1, path), self.values.index_select(1, path)
        total = self.total_decay.index_select(1, path)
        last = total[:, -1, None]
        weighted = keys * (last - total).exp()[..., None]
        return memory * last.exp()[..., None] + weighted.transpose(1, 2) @ values


def score_tree(
    rows: Delta, memory: Memory, earlier: Writes, ancestors: Bool[Tensor, "new all"]
) -> tuple[Heads, Writes]:
    """Reads a memory for the rows of a tree, each of which sees its own path alone.

    Args:
        rows: the new rows of the tree.
        memory: the state at the tree's root.
        earlier: what the rows that were scored before would write.
        ancestors: which of all rows, the new ones last, are on the path to each new one, itself
            included.

    Returns:
        what each row reads, and the writes of all rows, earlier ones first.
    """
    scored_rows = earlier.keys.shape[1]
    own = ancestors[:, scored_rows:].to(rows.decay.dtype)
    total = rows.decay @ own.T
    if scored_rows:
        # The nearest earlier ancestor is the last one: rows are in topological order.
        nearest = _last_ancestor(ancestors[:, :scored_rows])
        before = pad(earlier.total_decay, (1, 0)).index_select(1, nearest + 1)
        total = total + before
    keys = torch.cat([earlier.keys, rows.k], 1)
    all_total = torch.cat([earlier.total_decay, total], 1)
    lasting = (total[..., None] - all_total[:, None]).masked_fill(~ancestors, float("-inf")).exp()
    overlap = (rows.k @ keys.transpose(1, 2)) * lasting * rows.beta[..., None]
    expected = total.exp()[..., None] * (rows.k @ memory)
    right = rows.beta[..., None] * (rows.v - expected)
    if scored_rows:
        right = right - overlap[..., :scored_rows] @ earlier.values
    values = torch.linalg.solve_triangular(
        overlap[..., scored_rows:], right, upper=False, unitriangular=True
    )
    writes = Writes(keys, torch.cat([earlier.values, values], 1), all_total)
    reading = (rows.q @ keys.transpose(1, 2)) * lasting
    read = total.exp()[..., None] * (rows.q @ memory) + reading @ writes.values
    return read, writes


def read_text(rows: Delta, memory: Memory) -> tuple[Heads, Memory]:
    """Reads a memory for rows of text, one after the other, and returns the memory after them.

    Rows are taken :data:`CHUNK` at a time: all chunks' triangular systems are solved together, and
    the memory passes through the chunks in turn.
    """
    count = rows.q.shape[1]
    size = min(CHUNK, count)
    chunks = -(-count // size)
    extra = chunks * size - count

    def cut(each: Tensor) -> Tensor:
        # Rows that are added at the end write nothing: their beta and their decay are 0.
        padding = (0, 0, 0, extra) if each.dim() == 3 else (0, extra)
        return pad(each, padding).unflatten(1, (chunks, size))

    q, k, v, beta, decay = map(cut, (rows.q, rows.k, rows.v, rows.beta, rows.decay))
    total = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    lasting = (total[..., None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    overlap = (k @ k.transpose(-1, -2)) * lasting * beta[..., None]
    both = torch.cat([v, k * total.exp()[..., None]], -1) * beta[..., None]
    both = torch.linalg.solve_triangular(overlap, both, upper=False, unitriangular=True)
    values, expected = both.split((v.shape[-1], k.shape[-1]), -1)
    reading = (q @ k.transpose(-1, -2)) * lasting
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    last = total[..., -1].exp()[..., None, None]
    reads = []
    for chunk in range(chunks):
        written = values[:, chunk] - expected[:, chunk] @ memory
        reads.append(q[:, chunk] @ memory + reading[:, chunk] @ written)
        memory = memory * last[:, chunk] + k[:, chunk].transpose(-1, -2) @ written
    return torch.cat(reads, 1)[:, :count], memory


def _last_ancestor(ancestors: Bool[Tensor, "new earlier"]) -> Int[Tensor, " new"]:
    """Returns the last column that is true in each row; -1 where none is."""
    places = torch.arange(1, ancestors.shape[1] + 1, device=ancestors.device)
    return (ancestors * places).amax(1) - 1


# -- what a request keeps --------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a layer with a state remembers of all tokens so far. Never changed in place.

    ``window`` are the last inputs of its convolution; ``memory`` is a Gated DeltaNet's.
    """

    window: Float[Tensor, "past channel"]
    memory: Memory | None = None


@dataclass(frozen=True)
class Updates:
    """What the rows of a tree would do to a state."""

    inputs: Float[Tensor, "row channel"]
    writes: Writes | None = None

    def first(self, count: int) -> Updates:
        writes = None if self.writes is None else self.writes.first(count)
        return Updates(self.inputs[:count], writes)

    def after(self, path: Sequence[int]) -> Updates:
        writes = None if self.writes is None else self.writes.after(path)
        return Updates(self.inputs[path[-1] + 1 :], writes)

    def apply(self, state: State, path: Int[Tensor, " step"]) -> State:
        """Returns the state after the rows of a path that starts at it."""
        past = state.window.shape[0]
        window = torch.cat([state.window, self.inputs.index_select(0, path)])[-past:]
        if self.writes is None or state.memory is None:
            return State(window)
        return State(window, self.writes.apply(state.memory, path))


@dataclass(frozen=True)
class Journal:
    """The updates that were applied last, so that a state of a few tokens ago can be had again."""

    length: int  # of the text before them
    states: list[State]
    updates: list[Updates]
    path: tuple[int, ...]


class LayerStates:
    """The states of all layers that have one, of one request; they go along with its cache.

    ``length`` counts committed tokens. The rows of a tree follow them, and are committed by
    :meth:`keep`. A forward's own committed rows (a prompt's, or tokens that were waiting) are
    counted by :meth:`advance` once it has ended.
    """

    def __init__(self, empty: Sequence[State]) -> None:
        self.length = 0
        self.states = [*empty]
        self._empty = [*empty]
        self._ahead: list[State | None] = [None] * len(empty)
        self._updates: list[Updates | None] = [None] * len(empty)
        self._snapshots: dict[int, list[State]] = {}
        self._journal: Journal | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all states that are kept; a state that is kept twice counts once."""
        stored = [self.states, *self._snapshots.values()]
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
        ahead = self._ahead[layer]
        return self.states[layer] if ahead is None else ahead

    def pass_text(self, layer: int, state: State) -> None:
        """Takes the state after the committed rows of a forward that is under way."""
        self._ahead[layer] = state

    def earlier(self, layer: int, scored_rows: int) -> Updates | None:
        """Returns the updates of the tree's rows that were scored before, which are its first."""
        updates = self._updates[layer]
        return updates.first(scored_rows) if scored_rows and updates is not None else None

    def put(self, layer: int, updates: Updates) -> None:
        """Takes the updates of all rows of the tree."""
        self._updates[layer] = updates

    # -- of an answer --------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Commits the first ``count`` rows of the last forward, whose states are known."""
        if not count:
            return
        pairs = zip(self._ahead, self.states, strict=True)
        self.states = [state if ahead is None else ahead for ahead, state in pairs]
        self.length += count
        self._ahead = [None] * len(self.states)

    def keep(self, path: Sequence[int]) -> None:
        """Commits the rows of a path of the tree. What follows its last row stays scored."""
        self._ahead = [None] * len(self.states)
        if not path:
            return
        updates = [each for each in self._updates if each is not None]
        assert len(updates) == len(self.states), "the tree was not scored"
        self._journal = Journal(self.length, self.states, updates, tuple(path))
        self.states = self._journal_states(self._journal, len(path))
        self._updates = [each.after(path) for each in updates]
        self.length += len(path)

    def snapshot(self, spared: Collection[int] = ()) -> None:
        """Remembers the states of now, to which the text may be cut back.

        Where there are too many, old ones are forgotten, but not the first and not those at the
        ``spared`` lengths. Text can be read again from a length where no picture follows, so the
        end of a prompt's pictures is one of these.
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

    def at(self, length: int) -> list[State]:
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
    def _journal_states(journal: Journal, count: int) -> list[State]:
        if not count:
            return journal.states
        pairs = zip(journal.states, journal.updates, strict=True)
        # The path is sent to each device once, not once a layer.
        devices = {state.window.device for state in journal.states}
        path = {each: torch.tensor(journal.path[:count], device=each) for each in devices}
        return [updates.apply(state, path[state.window.device]) for state, updates in pairs]

    def truncate(self, length: int) -> None:
        """Cuts back to a length at which the states are known. Forgets the tree."""
        self._start_from(self.at(length), length)
        self._snapshots = {n: each for n, each in self._snapshots.items() if n <= length}

    def follow(self, other: LayerStates, length: int) -> None:
        """Takes the states that another request of the same text has after so many tokens."""
        count = len(self.states)
        self._start_from(other.at(length)[:count], length)
        self._snapshots = {n: each[:count] for n, each in other._snapshots.items() if n <= length}

    def _start_from(self, states: list[State], length: int) -> None:
        """Takes these states, of so many tokens, and forgets the tree."""
        self.states, self.length = states, length
        self._ahead = [None] * len(states)
        self._updates = [None] * len(states)
        self._journal = Journal(length, states, [], ())

    def copy(self) -> LayerStates:
        """Returns a copy, which goes its own way from here on."""
        other = copy(self)
        other.states, other._snapshots = [*self.states], dict(self._snapshots)
        other._ahead, other._updates = [*self._ahead], [*self._updates]
        return other

    def first_layers(self, count: int) -> LayerStates:
        """Returns a copy with the states of the first so many layers."""
        other = LayerStates(self._empty[:count])
        other.length, other.states = self.length, self.states[:count]
        other._snapshots = {n: each[:count] for n, each in self._snapshots.items()}
        return other


# -- the layers ------------------------------------------------------------------------------------


class Mixer(ABC):
    """A layer with a state, by the weights of the module that transformers made of it."""

    conv: nn.Conv1d
    activation: bool  # whether what the convolution gives passes through SiLU

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
    def window_numbers(self) -> int:
        """How many numbers the window of a state has."""
        return self.past * self.conv.in_channels

    @property
    def memory_numbers(self) -> int:
        """How many numbers the memory of a state has, in fp32."""
        return 0

    @abstractmethod
    def run(
        self, hidden: Float[Tensor, "all dim"], segments: Sequence[StateRows], layer: int
    ) -> Float[Tensor, "all dim"]:
        """Computes the layer for the rows of several requests, and leaves their updates behind."""

    def convolve(
        self, inputs: Float[Tensor, "all channel"], segments: Sequence[StateRows], layer: int
    ) -> tuple[Float[Tensor, "all channel"], list[Float[Tensor, "row channel"]]]:
        """Convolves each row with the inputs before it on its path.

        Returns also, for each request, the inputs of all rows of its tree.
        """
        mixed, tree_inputs = [], []
        weight = self.conv.weight
        for rows in segments:
            own = inputs[rows.start : rows.stop]
            state = rows.states.states[layer]
            if rows.firm:
                text = torch.cat([state.window.to(own), own[: rows.firm]])
                out = conv1d(text.T, weight, self.conv.bias, groups=weight.shape[0])
                mixed.append(out.T)
                state = replace(state, window=text[len(text) - self.past :])
                rows.states.pass_text(layer, state)
            drafted = own[rows.firm :]
            earlier = rows.states.earlier(layer, rows.scored_rows)
            tree = drafted if earlier is None else torch.cat([earlier.inputs, drafted])
            tree_inputs.append(tree)
            if len(drafted):
                every = torch.cat([state.window.to(own), tree])
                taps = every[rows.taps(self.past)].float()
                out = (taps * weight[:, 0].T.float()).sum(1)
                if self.conv.bias is not None:
                    out = out + self.conv.bias.float()
                mixed.append(out.to(own))
        out = torch.cat(mixed)
        return (nn.functional.silu(out) if self.activation else out), tree_inputs


@dataclass(frozen=True)
class StateRows:
    """The rows of one request in a forward, as layers with a state see them.

    The first ``firm`` of rows ``start:stop`` are committed when the forward has ended; the others
    are nodes of a tree, of which ``scored_rows`` were scored before. ``ancestors`` are those of the
    new nodes among all of the tree, each one's own place included.
    """

    states: LayerStates
    start: int
    stop: int
    firm: int
    scored_rows: int
    ancestors: Bool[Tensor, "new all"]
    _taps: dict[int, Int[Tensor, "new tap"]] = field(default_factory=dict)

    @property
    def _device(self) -> torch.device:
        return self.states.states[0].window.device

    @cached_property
    def ancestors_on_device(self) -> Bool[Tensor, "new all"]:
        """``ancestors`` where the states are. The host made them, and never waits to read them."""
        return self.ancestors.to(self._device)

    def taps(self, past: int) -> Int[Tensor, "new tap"]:
        """Returns, for each new node, the places of the inputs that its convolution reads, in the
        window before the tree and the tree's rows after it. All layers of a forward share them."""
        if past not in self._taps:
            self._taps[past] = self._find_taps(past)
        return self._taps[past]

    def _find_taps(self, past: int) -> Int[Tensor, "new tap"]:
        taps = torch.zeros(len(self.ancestors), past + 1, dtype=torch.long)
        for row, on_path in enumerate(self.ancestors):
            path = [*range(past), *(past + on_path.nonzero().squeeze(-1)).tolist()]
            taps[row] = torch.tensor(path[-past - 1 :])
        return taps.to(self._device)


class ShortConvolution(Mixer):
    """LFM2's: a convolution between two gates."""

    activation = False

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.conv = module.conv

    def run(
        self, hidden: Float[Tensor, "all dim"], segments: Sequence[StateRows], layer: int
    ) -> Float[Tensor, "all dim"]:
        gate_in, gate_out, values = self.module.in_proj(hidden).chunk(3, -1)
        inputs = gate_in * values
        mixed, tree_inputs = self.convolve(inputs, segments, layer)
        for rows, tree in zip(segments, tree_inputs, strict=True):
            if rows.start + rows.firm < rows.stop:
                rows.states.put(layer, Updates(tree))
        return self.module.out_proj((gate_out * mixed).contiguous())


class GatedDelta(Mixer):
    """Qwen3.5's Gated DeltaNet."""

    activation = True

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.conv = module.conv1d

    def empty(self, dtype: torch.dtype) -> State:
        own, state = self.module, super().empty(dtype)
        memory = state.window.new_zeros(
            own.num_v_heads, own.head_k_dim, own.head_v_dim, dtype=torch.float32
        )
        return replace(state, memory=memory)

    @property
    def memory_numbers(self) -> int:
        return int(self.module.num_v_heads * self.module.head_k_dim * self.module.head_v_dim)

    def project(
        self, hidden: Float[Tensor, "all dim"]
    ) -> tuple[Float[Tensor, "all channel"], Tensor, Tensor, Tensor]:
        """Returns the convolution's inputs, the output gate, and the projections that beta and the
        decay are computed from."""
        own = self.module
        return (
            own.in_proj_qkv(hidden),
            own.in_proj_z(hidden),
            own.in_proj_b(hidden),
            own.in_proj_a(hidden),
        )

    def run(
        self, hidden: Float[Tensor, "all dim"], segments: Sequence[StateRows], layer: int
    ) -> Float[Tensor, "all dim"]:
        own = self.module
        inputs, gate, for_beta, for_decay = self.project(hidden)
        mixed, tree_inputs = self.convolve(inputs, segments, layer)
        delta = self._delta(mixed, for_beta, for_decay)
        reads = []
        for rows, tree in zip(segments, tree_inputs, strict=True):
            text = slice(rows.start, rows.start + rows.firm)
            state = rows.states.base(layer)
            assert state.memory is not None
            if rows.firm:
                read, memory = read_text(delta.rows(text), state.memory)
                reads.append(read)
                state = replace(state, memory=memory)
                rows.states.pass_text(layer, state)
            drafted = slice(text.stop, rows.stop)
            if drafted.start < drafted.stop:
                assert state.memory is not None
                nodes = delta.rows(drafted)
                earlier = rows.states.earlier(layer, rows.scored_rows)
                before = _no_writes(nodes) if earlier is None else earlier.writes
                assert before is not None
                read, writes = score_tree(nodes, state.memory, before, rows.ancestors_on_device)
                reads.append(read)
                rows.states.put(layer, Updates(tree, writes))
        core = torch.cat(reads, 1).transpose(0, 1).to(hidden.dtype)
        core = own.norm(core.reshape(-1, own.head_v_dim), gate.reshape(-1, own.head_v_dim))
        return own.out_proj(core.view(len(hidden), -1))

    def _delta(self, mixed: Tensor, for_beta: Tensor, for_decay: Tensor) -> Delta:
        own = self.module
        sizes = (own.key_dim, own.key_dim, own.value_dim)
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(0, 1).float()
            for part, width in zip(
                mixed.split(sizes, -1),
                (own.head_k_dim, own.head_k_dim, own.head_v_dim),
                strict=True,
            )
        )
        times = own.num_v_heads // own.num_k_heads
        q, k = (_normalise(each).repeat_interleave(times, 0) for each in (q, k))
        decay = -own.A_log.float().exp() * softplus(for_decay.float() + own.dt_bias)
        return Delta(
            q * own.head_k_dim**-0.5, k, v, for_beta.sigmoid().float().T, decay.T.contiguous()
        )


class GatedDeltaByGroups(GatedDelta):
    """Qwen3-Next's, whose projections lie group by group."""

    def project(
        self, hidden: Float[Tensor, "all dim"]
    ) -> tuple[Float[Tensor, "all channel"], Tensor, Tensor, Tensor]:
        own = self.module
        q, k, v, z, b, a = own.fix_query_key_value_ordering(
            own.in_proj_qkvz(hidden)[None], own.in_proj_ba(hidden)[None]
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
"""How to drive a module of transformers that has a state, by the name of its class."""


ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""How configs of transformers call layers that keep keys of every token."""


def runner(
    mixer: Mixer, segments: Sequence[StateRows], layer: int
) -> Callable[..., Float[Tensor, "1 all dim"]]:
    """Returns the forward that stands in for the module's own, for the length of one forward."""

    def run(hidden_states: Float[Tensor, "1 all dim"], **_: Any) -> Float[Tensor, "1 all dim"]:
        if not segments:  # The layers are only asked for the shapes of their keys.
            return torch.zeros_like(hidden_states)
        return mixer.run(hidden_states[0], segments, layer)[None]

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
    """Raises ModelError for a language model that has a state, but no kinds of layers that would
    say where it is."""
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


def _normalise(x: Heads) -> Heads:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _no_writes(like: Delta) -> Writes:
    return Writes(like.k[:, :0], like.v[:, :0], like.decay[:, :0])
