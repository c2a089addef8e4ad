"""Captured forwards of hybrid models, some of whose layers have a state instead of keys.

A captured forward is a CUDA graph. A GPU replays it as a whole, so its kernels need not be sent
one by one. For a step of a few rows, sending them is most of the cost. ``cuda_graphs`` captures the
fused decoder of other models. A hybrid runs by its own modules, which are captured as they are. Its
layers with a state compute by :class:`StaticRows`, whose inputs and outputs stay at their
addresses.

``recurrent`` describes these layers. A state is a *window*, the last inputs of a convolution, and
in a Gated DeltaNet also a *memory*. The *update* of a row is how the row would change the state if
it were committed: its input of the convolution, and what it writes to the memory.

The rows of a request in a forward are one tree that starts at the request's committed state. First
come the rows that the forward itself commits, one after the other, and then the drafted nodes. If a
forward commits no rows, its nodes may also continue nodes that earlier forwards have scored. These
earlier nodes then come after the committed state and before the rows of the forward. So captured
forwards of one size serve plain decoding, chains and trees. A forward reads the committed state and
never changes it. It leaves behind the state after its committed rows, and the updates of all new
nodes, which ``commit`` applies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from saccade.core.errors import ModelError
from saccade.core.once import once
from saccade.model.attention import NO_EXTRAS, AttentionOutput, NewKeys
from saccade.model.backbone import MAX_ROUNDING_DIFFERENCE, Backbone, state_rows
from saccade.model.cache import Cache
from saccade.model.cache_pool import CachePool, Lease
from saccade.model.change_detection import is_from_library, unusual_changes
from saccade.model.cuda_graphs import (
    CHECKED_LAYERS,
    Attention,
    AttentionKind,
    Capture,
    CudaGraphs,
    Probe,
    RowLogits,
    Rows,
    Size,
    StaticInputs,
    difference_share,
    restore_keys,
    written_hidden_states,
)
from saccade.model.kernels.attention_mass import Queries
from saccade.model.recurrent import (
    DeltaRows,
    Mixer,
    State,
    StatesByLayer,
    Updates,
    Values,
    Writes,
    find_taps,
    no_writes,
    score_tree,
)
from saccade.model.segments import Segment
from saccade.model.windowed_attention import LogitExtras

# The types of text models whose modules can be captured. Models with experts are left out: their
# experts are chosen by the host in every forward, which a CUDA graph cannot repeat.
CAPTURABLE_MODEL_TYPES = ("qwen3_5_text", "lfm2")
# The most requests of a captured forward. The states of more would take gigabytes, because they are
# stored twice: in caches and here.
MAX_REQUESTS = 4
# A captured forward has room for one of these numbers of earlier nodes of each request's tree.
EARLIER_SIZES = (0, 16, 128)
SOLVED_TOGETHER = 8  # This many rows of a triangular system are solved at once.
PROBED_NODES = 2  # A size with room for earlier nodes is tried with this many of each request.


@once
def can_be_captured(backbone: Backbone) -> bool:
    """Returns whether the steps of a model whose layers have states can be captured.

    It must be of one of the ``CAPTURABLE_MODEL_TYPES``. All its modules must be those of torch and
    transformers, unchanged, on one device.
    """
    # If this is only the first layers of a model (``Backbone.first_layers``), perhaps none of them
    # has keys. They can be captured all the same if the whole model, whose pool they use, has
    # layers with keys.
    full = backbone.full_backbone or backbone
    is_hybrid = bool(backbone.mixers) and bool(full.key_layer_count)
    is_split = backbone.shares.count > 1  # Over several processes.
    if is_split or not is_hybrid:
        return False
    # Captured forwards support none of these.
    if backbone.windows or backbone.has_uneven_heads or backbone.rotates_by_length:
        return False
    if backbone.config.model_type not in CAPTURABLE_MODEL_TYPES:
        return False
    from_library = all(is_from_library(type(module)) for module in backbone.text.modules())
    if not from_library or unusual_changes(backbone.text.named_modules()):
        return False
    devices = {parameter.device for parameter in backbone.text.parameters()}
    return len(devices) == 1 and torch.device("meta") not in devices


@dataclass(frozen=True)
class RecurrentSize(Size):
    """The size of a captured forward of a model with states."""

    earlier: int = 0  # For how many earlier nodes of each request it has room.


class StaticStates:
    """The states that captured forwards read and leave behind.

    All forwards with the same number of requests share them. Forwards start from
    ``committed_states``. ``states_after`` are the states after the rows that a forward commits. All
    tensors are ``[layer, request, ...]``.
    """

    def __init__(self, empty: State, requests: int) -> None:
        """``empty`` has the states of all layers before the first token, ``[layer, ...]``."""
        self.committed_states = _repeat_for_requests(empty, requests)
        self.states_after = _repeat_for_requests(empty, requests)
        self._filled: list[weakref.ref[StatesByLayer] | None] = [None] * requests
        self._earlier: dict[int, Updates] = {}

    def earlier(self, count: int) -> Updates:
        """Returns the buffer for the updates of ``count`` earlier nodes of each request. All
        forwards that read as many share this buffer."""
        if count not in self._earlier:
            self._earlier[count] = self.no_updates(count)
        return self._earlier[count]

    def no_updates(self, count: int) -> Updates:
        """Returns new updates of zeros, for ``count`` nodes of each request."""
        window, memory = self.committed_states.window, self.committed_states.memory
        layers, requests, _, channels = window.shape
        inputs = window.new_zeros(layers, requests, count, channels)
        if memory is None:
            return Updates(inputs)
        heads, key, value = memory.shape[2:]
        writes = Writes(
            memory.new_zeros(layers, requests, heads, count, key),
            memory.new_zeros(layers, requests, heads, count, value),
            memory.new_zeros(layers, requests, heads, count),
        )
        return Updates(inputs, writes)

    def fill(self, request: int, states: StatesByLayer) -> None:
        """Copies a request's states to its place among the committed states, unless they are there
        already."""
        filled = self._filled[request]
        if filled is not None and filled() is states:  # States are never changed in place.
            return
        source = states.stacked()
        target = _state_of(self.committed_states, request)
        target.window.copy_(source.window)
        if target.memory is not None and source.memory is not None:
            target.memory.copy_(source.memory)
        self._filled[request] = weakref.ref(states)


class StaticRows:
    """The rows of a captured forward of one size, as layers with a state see them.

    Like ``StaticInputs`` it is filled in place before each replay. It is what layers call
    (``recurrent.MixerRows``) while the forward is captured.
    """

    def __init__(self, size: RecurrentSize, states: StaticStates) -> None:
        self.size, self._states = size, states
        self._earlier = states.earlier(size.earlier)
        self._new = states.no_updates(size.rows)
        window = states.committed_states.window
        self._past = window.shape[2]  # How many earlier inputs a row's convolution reads.
        self._numbers = torch.zeros(self._bytes(), dtype=torch.uint8, device=window.device)
        parts = self._parts(self._numbers)
        self._taps, self._window_places, self._ancestors, self._is_committed = parts
        self._filled: tuple[tuple[int, int, int], ...] | None = None

    # -- what the host fills in and takes ------------------------------------------------------

    def fill(self, segments: Sequence[Segment]) -> None:
        """Writes the inputs of a step: the places and masks of :meth:`_parts`, the states of its
        requests, and the updates of their nodes that were scored before."""
        self._fill_numbers(segments)
        for request, segment in enumerate(segments):
            states = segment.cache.states
            assert states is not None
            self._states.fill(request, states.states)
            if count := segment.scored_nodes:
                target = _updates_of(self._earlier, request).first(count)
                _copy_updates(target, states.earlier_of_all_layers(count))

    def take(self, segments: Sequence[Segment]) -> None:
        """Gives the requests copies of what the forward left behind: the states after the committed
        rows, and the updates of all nodes, earlier ones included. The next forward overwrites the
        originals."""
        for request, segment in enumerate(segments):
            states, committed = segment.cache.states, segment.committed_rows
            assert states is not None
            if committed:
                states.store_committed_of_all_layers(
                    _state_of(self._states.states_after, request).clone()
                )
            new = segment.stop - segment.start
            if new == committed:
                continue
            updates = _updates_of(self._new, request).first(new)
            if committed:
                updates = updates.rows(slice(committed, None))
            if segment.scored_nodes:
                updates = states.earlier_of_all_layers(segment.scored_nodes).followed_by(updates)
            else:
                updates = updates.clone()
            states.put_of_all_layers(updates)

    def _bytes(self) -> int:
        """Returns the size of the buffer of :meth:`_parts`: integers, then a byte a boolean."""
        requests, rows, earlier = self.size.requests, self.size.rows, self.size.earlier
        integers = requests * rows * (self._past + 1) + requests * self._past
        booleans = requests * rows * (earlier + rows) + requests * rows
        return torch.long.itemsize * integers + booleans

    def _parts(
        self, flat: Tensor
    ) -> tuple[
        Int[Tensor, "request rows tap"],
        Int[Tensor, "request past"],
        Bool[Tensor, "request rows all"],
        Bool[Tensor, "request rows"],
    ]:
        """Returns four parts of a flat buffer, as views.

        A convolution has for each request these inputs: the last ``past`` inputs before the
        request's tree, those of its earlier nodes, and those of its rows. The first two parts are
        indices into these inputs, of all requests one after another, and the others are masks:

        * the taps: which inputs each row's convolution reads;
        * the window places: which inputs are the window after the committed rows, from which a
          later forward starts. These are the last ``past`` inputs up to the last committed row;
        * the ancestors: which earlier nodes, and then which rows, are on the path to each row;
        * which rows the forward commits.
        """
        requests, rows = self.size.requests, self.size.rows
        shapes = (
            ((requests, rows, self._past + 1), torch.long),
            ((requests, self._past), torch.long),
            ((requests, rows, self.size.earlier + rows), torch.bool),
            ((requests, rows), torch.bool),
        )
        parts, start = [], 0
        for shape, dtype in shapes:
            stop = start + torch.Size(shape).numel() * dtype.itemsize
            parts.append(flat[start:stop].view(dtype).view(shape))
            start = stop
        return parts[0], parts[1], parts[2], parts[3]

    def _fill_numbers(self, segments: Sequence[Segment]) -> None:
        """Writes what :meth:`_parts` returns, unless it is there already from the step before."""
        # For chains all of it follows from three counts of each request. Trees are always written.
        are_chains = all(segment.recent_mask is None for segment in segments)
        counts = tuple(
            (each.stop - each.start, each.committed_rows, each.scored_nodes) for each in segments
        )
        if are_chains and counts == self._filled:
            return
        host = torch.zeros(self._bytes(), dtype=torch.uint8)
        taps, window_places, ancestors, is_committed = self._parts(host)
        rows, past, earlier = self.size.rows, self._past, self.size.earlier
        # Rows that only pad a request or the step see themselves alone.
        ancestors[..., earlier:] = torch.eye(rows, dtype=torch.bool)
        for request, segment in enumerate(segments):
            ancestors[request, : segment.stop - segment.start] = self._paths(segment)
            is_committed[request, : segment.committed_rows] = True
        for request in range(self.size.requests):
            # The place of the request's first input among those of all requests.
            first = request * (past + earlier + rows)
            taps[request] = first + find_taps(ancestors[request], past)
            committed_count = segments[request].committed_rows if request < len(segments) else 0
            committed = range(past + earlier, past + earlier + committed_count)
            # The inputs up to the last committed row are the `past` ones before the tree and one
            # for each committed row. The window has the last `past` of them, so as many of the
            # first are left out as there are committed rows. With past = 3 and one committed row,
            # it has two of the inputs before the tree and the input of the committed row.
            window_inputs = [*range(past), *committed][committed_count:]
            window_places[request] = first + torch.tensor(window_inputs, dtype=torch.long)
        if self._numbers.device.type == "cuda":
            host = host.pin_memory()  # Torch does not free it before the copy is done.
        self._numbers.copy_(host, non_blocking=True)
        self._filled = counts if are_chains else None

    def _paths(self, segment: Segment) -> Bool[Tensor, "new all"]:
        """Returns which rows are on the path to each row of a segment, as ``_parts`` says."""
        new = segment.stop - segment.start
        committed, scored = segment.committed_rows, segment.scored_nodes
        nodes = state_rows(segment).ancestors  # For each new node: earlier nodes, then new ones.
        # A row is on its own path. The first ``earlier`` columns are for the earlier nodes, the
        # others for the rows. The committed rows are on the path to every row after them.
        paths = torch.zeros(new, self.size.earlier + self.size.rows, dtype=torch.bool)
        paths[committed:, :scored] = nodes[:, :scored]
        new_paths = paths[:, self.size.earlier : self.size.earlier + new]
        new_paths[:, :committed] = torch.ones(new, committed, dtype=torch.bool).tril_()
        new_paths[committed:, committed:] = nodes[:, scored:]
        return paths

    # -- what layers call ----------------------------------------------------------------------

    def convolve(
        self, mixer: Mixer, inputs: Float[Tensor, "all channel"], layer: int
    ) -> Float[Tensor, "all channel"]:
        """Returns the convolution of each row with the inputs before it on its path.

        It stores the inputs of all rows, and leaves behind the window after the committed rows.
        """
        inputs_by_request = inputs.view(self.size.requests, self.size.rows, -1)
        old_window = self._states.committed_states.window[layer]
        parts = [old_window, self._earlier.inputs[layer], inputs_by_request]
        all_inputs = torch.cat(parts, 1).flatten(0, 1)
        self._new.inputs[layer].copy_(inputs_by_request)
        window = all_inputs.index_select(0, self._window_places.flatten())
        self._states.states_after.window[layer].copy_(window.view_as(old_window))
        taps = all_inputs.index_select(0, self._taps.flatten())
        taps = taps.view(len(inputs), self._past + 1, -1)
        out = (taps.float() * mixer.conv.weight[:, 0].T.float()).sum(1)
        if mixer.conv.bias is not None:
            out = out + mixer.conv.bias.float()
        return mixer.activate(out.to(inputs))

    def read(self, delta: DeltaRows, layer: int) -> Values:
        """Returns what each row reads from its memory, ``[head, row, value]``.

        It stores what the rows write, and leaves behind the memory after the committed rows.
        """
        states = self._states
        rows = delta.by_request(self.size.requests)
        assert states.committed_states.memory is not None and states.states_after.memory is not None
        memory = states.committed_states.memory[layer]
        earlier = self._earlier_writes(layer) if self.size.earlier else no_writes(rows)
        read, writes = score_tree(rows, memory, earlier, self._ancestors, solve_in_blocks)
        new_writes = writes.rows(slice(self.size.earlier, None))
        is_committed = self._is_committed[:, None]
        # Decays are logarithms. ``rows.decay`` has each row's own, and ``total_decay`` has their
        # sum on the path from the committed state to each row. The committed rows follow one
        # another, so the total at the last of them is the sum of the decays of all of them.
        committed_decay = (rows.decay * is_committed).sum(-1, keepdim=True)
        # What a committed row writes decays in the committed rows after it. Other rows add nothing.
        later_decay = committed_decay - new_writes.total_decay
        remaining = later_decay.masked_fill(~is_committed, float("-inf")).exp()
        written = (new_writes.keys * remaining[..., None]).transpose(-1, -2) @ new_writes.values
        memory_after = memory * committed_decay.exp()[..., None] + written
        states.states_after.memory[layer].copy_(memory_after)
        stored_writes = self._new.of_layers(layer).writes
        assert stored_writes is not None
        stored_writes.keys.copy_(new_writes.keys)
        stored_writes.values.copy_(new_writes.values)
        # The nodes' updates are applied to the state after the committed rows, so the decay of the
        # committed rows is taken out of each node's total.
        stored_writes.total_decay.copy_(new_writes.total_decay - committed_decay)
        return read.transpose(0, 1).flatten(1, 2)

    def _earlier_writes(self, layer: int) -> Writes:
        """Returns the writes of earlier nodes; zeros where there is no such node.

        The buffer's places for nodes that do not exist hold what was left there, which may be NaN,
        and 0 x NaN is NaN.
        """
        writes = self._earlier.of_layers(layer).writes
        assert writes is not None
        unused = ~self._ancestors[..., : self.size.earlier].any(1)[:, None]
        return Writes(
            writes.keys.masked_fill(unused[..., None], 0),
            writes.values.masked_fill(unused[..., None], 0),
            writes.total_decay.masked_fill(unused, 0),
        )


def solve_in_blocks(overlap: Float[Tensor, "*batch row row"], right: Tensor) -> Tensor:
    """Returns x, where (1 + L) x = ``right`` and L is the part of ``overlap`` below its diagonal.

    ``right`` and x are [*batch, row, column].

    This is the triangular system of a tree's rows. It is solved by products of matrices alone,
    because these can be captured on every GPU.

    Blocks of few rows are solved one after another, each by its inverse. The matrix of a block is
    1 - N, where N is -L within the block. For n rows N^n is zero, so the inverse is the sum of the
    powers of N below n. For n = 4 it is 1 + N + N^2 + N^3 = (1 + N^2)(1 + N), and for larger n
    there are further factors 1 + N^4 and so on. No entry of N is above 1 in size and a block has
    few rows, so the powers of N stay small.
    """
    rows = overlap.shape[-1]
    parts: list[Tensor] = []
    for start in range(0, rows, SOLVED_TOGETHER):
        block = slice(start, min(start + SOLVED_TOGETHER, rows))
        known = right[..., block, :]
        # The rows that are solved already go to the right side.
        if parts:
            known = known - overlap[..., block, :start] @ torch.cat(parts, -2)
        power = -overlap[..., block, block].tril(-1)  # N
        # So far ``known`` is multiplied by the sum of the powers of N below ``reach``.
        reach = 1
        while reach < block.stop - block.start:
            if reach > 1:
                power = power @ power
            known = known + power @ known
            reach = 2 * reach
        parts.append(known)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


class _KeyAttention:
    """The attention of a captured forward, as modules of transformers call it: see
    ``attention.ForwardAttention``."""

    def __init__(
        self, attention: Attention, key_layers: dict[int, int], segments: Sequence[Segment]
    ) -> None:
        self.segments = segments
        self._attention, self._key_layers = attention, key_layers

    def key_layer(self, layer: int) -> int:
        """Returns the number of a layer among those that have keys."""
        return self._key_layers[layer]

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
        assert not extras, "no model that is captured has sinks or caps"
        return self._attention(layer, q, k, v, scale)


class RecurrentGraphs(CudaGraphs):
    """The captured forwards of a model some of whose layers have a state."""

    def __init__(
        self, backbone: Backbone, capture: Capture | None = None, pool: CachePool | None = None
    ) -> None:
        self._rows: dict[tuple[int, int, int], StaticRows] = {}
        self._states: dict[int, StaticStates] = {}
        super().__init__(backbone, capture, pool)

    @staticmethod
    def refuse_unsupported(backbone: Backbone) -> None:
        """Raises ModelError for a model that :func:`can_be_captured` excludes."""
        if not can_be_captured(backbone):
            raise ModelError(
                f"captured steps do not support this {backbone.config.model_type}: they need the "
                f"unchanged modules of {', '.join(CAPTURABLE_MODEL_TYPES)} on one device"
            )

    def _size(self, segments: Sequence[Segment], kind: AttentionKind) -> Size | None:
        """Returns the smallest size for these segments, with room for their earlier nodes; None
        where there is none."""
        size = super()._size(segments, kind)
        scored = max(segment.scored_nodes for segment in segments)
        if size is None or size.requests > MAX_REQUESTS or scored > EARLIER_SIZES[-1]:
            return None
        if any(segment.scored_nodes and segment.committed_rows for segment in segments):
            # No session makes such a segment. Committed tokens are rows of a forward only if they
            # have no keys yet, and then no node after them can have been scored. ``StaticRows``
            # could not describe such a segment either, because there a request's earlier nodes come
            # before all rows of the forward, the committed ones included.
            return None
        if size.hidden_layers:
            # These layers' hidden states have to be written to the requests' caches. A forward
            # finds the caches by its segments, and a captured forward is run without segments.
            return None
        earlier = next(count for count in EARLIER_SIZES if count >= scored)
        return RecurrentSize(size.requests, size.rows, size.masked_keys, size.keys, earlier=earlier)

    def _rows_of(self, size: Size) -> StaticRows:
        """Returns the rows of a size.

        Sizes that differ only in how many keys attention reads (``keys``), or in how many of these
        have a mask (``masked_keys``), share their rows.
        """
        assert isinstance(size, RecurrentSize)
        key = size.requests, size.rows, size.earlier
        if key not in self._rows:
            if size.requests not in self._states:
                empty = self._backbone.empty_states()
                assert empty is not None
                states = StaticStates(empty.states.stacked(), size.requests)
                self._states[size.requests] = states
            self._rows[key] = StaticRows(size, self._states[size.requests])
        return self._rows[key]

    def _fill(
        self,
        size: Size,
        rows: Rows,
        leases: Sequence[Lease],
        spare: Lease,
        vocabularies: Sequence[int],
    ) -> None:
        super()._fill(size, rows, leases, spare, vocabularies)
        self._rows_of(size).fill(rows.segments)

    def _replay(self, kind: AttentionKind, size: Size, rows: Rows) -> RowLogits:
        logits = super()._replay(kind, size, rows)
        self._rows_of(size).take(rows.segments)
        return logits

    def _grow_table(self, last: int) -> None:
        """Does nothing: there is no rotary table, because the modules compute their rotations
        themselves."""

    def _hidden_states(
        self, kind: AttentionKind, inputs: StaticInputs, segments: Sequence[Segment] = ()
    ) -> Float[Tensor, "row dim"]:
        """Computes the hidden states of a step.

        Those of the layers that the caches of ``segments`` record (``Cache.hidden``) are written to
        these caches. A captured forward is given no segments, so it writes none.
        """
        model = self._backbone
        ids, positions = inputs.tokens[:2].flatten(1)
        attention = kind.attention(inputs, self.pool, model.heads // model.kv_heads)
        return model.forward(
            model.embed(ids),
            positions.expand(model.axes, -1),
            _KeyAttention(attention, model.key_layers, segments),
            mixer_rows=self._rows_of(inputs.size),
        )

    def _first_layers_agree(self, kind: AttentionKind, size: Size, probe: Probe) -> bool:
        """Returns whether the hidden states after the first layers of a captured forward are those
        of an ordinary one, to rounding."""
        depth = min(CHECKED_LAYERS, self._backbone.layer_count)
        rows = probe.rows(size, self._backbone.embedding_count, kind.may_branch)
        # Each segment has a recorder. A forward writes to it what the first ``depth`` layers have
        # computed for the segment's rows.
        with written_hidden_states(rows.segments, depth, self._backbone) as recorders:
            # The static inputs are still those of the forward that was just tried.
            self._hidden_states(kind, self._inputs[size], rows.segments)
            captured = [each.written for each in recorders]
            probe.ordinary(rows)
            ordinary = [each.written for each in recorders]
        limit = MAX_ROUNDING_DIFFERENCE[self._backbone.dtype]
        return all(
            captured_hidden is not None
            and ordinary_hidden is not None
            and difference_share(captured_hidden, ordinary_hidden) <= limit
            for captured_hidden, ordinary_hidden in zip(captured, ordinary, strict=True)
        )

    def _capture_one(self, kind: AttentionKind, size: Size, probe: Probe) -> None:
        """Captures a size and compares it with an ordinary forward, as ``CudaGraphs`` does.

        The states and keys of the requests that it is tried with are restored afterwards.
        """
        assert isinstance(size, RecurrentSize)
        earlier = PROBED_NODES if size.earlier else 0
        probe = RecurrentProbe(probe.caches, probe.position, probe.ordinary, earlier)
        with ExitStack() as stack:
            for cache in probe.caches:
                cache.reserve(cache.length + earlier + size.rows)
                assert cache.states is not None
                stack.enter_context(cache.states.restored())
            if earlier:
                nodes = probe.earlier_rows(size, self._backbone.embedding_count)
                stack.enter_context(restore_keys(nodes.segments))
                # An ordinary forward puts the earlier nodes' keys and updates into the caches.
                probe.ordinary(nodes)
            super()._capture_one(kind, size, probe)


@dataclass(frozen=True)
class RecurrentProbe(Probe):
    """What a new size is tried with, to compare it with an ordinary forward.

    In sizes without room for earlier nodes, each request has a committed row and new nodes after
    it. In sizes with room, it has new nodes alone. They follow ``earlier`` nodes, which an ordinary
    forward has to score first (:meth:`earlier_rows`).
    """

    earlier: int  # 0 for sizes without room for earlier nodes.

    def rows(self, size: Size, embeddings: int, may_branch: bool) -> Rows:
        """Returns the rows of a trial, for a model of ``embeddings`` ids."""
        rows = super().rows(size, embeddings, may_branch)
        segments = []
        for segment in rows.segments:
            recent_mask = segment.recent_mask
            if recent_mask is not None:
                # The earlier nodes are a chain, which every row follows and sees.
                recent_mask = pad(recent_mask, (self.earlier, 0), value=True)
            segments.append(
                replace(
                    segment,
                    first_key=self._start(segment.cache, size) + self.earlier,
                    recent_mask=recent_mask,
                    committed_rows=0 if self.earlier else 1,
                    scored_nodes=self.earlier,
                )
            )
        return rows._replace(segments=segments)

    def earlier_rows(self, size: Size, embeddings: int) -> Rows:
        """Returns the nodes to be scored before the others: a chain after each cache's tokens."""
        segments = []
        for number, cache in enumerate(self.caches):
            start = number * self.earlier
            first_key = self._start(cache, size)
            segments.append(Segment(cache, start, start + self.earlier, first_key))
        rows = range(self.earlier * len(segments))
        # The factor is a prime, so the ids all differ unless the vocabulary is a multiple of it.
        ids = [(104729 * (row + 1)) % embeddings for row in rows]
        positions = [self.position + 1 + row % self.earlier for row in rows]
        return Rows(segments, ids, positions, [*rows])

    def _start(self, cache: Cache, size: Size) -> int:
        """Returns the first row of a cache that the trial writes.

        It is the row after the tokens in the cache. If not all rows of the trial fit after these,
        in the cache or among the keys that the size reads, it is an earlier row.
        """
        room = min(cache.capacity, size.keys)
        return max(0, min(cache.length, room - size.rows - self.earlier))


def _repeat_for_requests(empty: State, requests: int) -> State:
    """Returns a state that stacks those of so many requests, ``[layer, request, ...]``, each of
    which is a copy of ``empty``."""
    window = empty.window[:, None].repeat(1, requests, 1, 1)
    if empty.memory is None:
        return State(window)
    return State(window, empty.memory[:, None].repeat(1, requests, 1, 1, 1))


def _state_of(states: State, request: int) -> State:
    """Returns one request's part of states ``[layer, request, ...]``, as a view."""
    memory = None if states.memory is None else states.memory[:, request]
    return State(states.window[:, request], memory)


def _updates_of(updates: Updates, request: int) -> Updates:
    """Returns one request's part of updates ``[layer, request, ...]``, as a view."""
    writes = updates.writes
    if writes is not None:
        writes = Writes(
            writes.keys[:, request], writes.values[:, request], writes.total_decay[:, request]
        )
    return Updates(updates.inputs[:, request], writes)


def _copy_updates(target: Updates, source: Updates) -> None:
    """Copies the numbers of ``source`` into the tensors of ``target``."""
    target.inputs.copy_(source.inputs)
    if target.writes is not None and source.writes is not None:
        target.writes.keys.copy_(source.writes.keys)
        target.writes.values.copy_(source.writes.values)
        target.writes.total_decay.copy_(source.writes.total_decay)
