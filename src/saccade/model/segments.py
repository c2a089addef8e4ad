"""The tokens of one request in a forward, and what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.model.cache import Cache, Pages
from saccade.model.hidden_states import AFTER_NORM
from saccade.model.kernels.attention_mass import MassRecorder, RowQueries
from saccade.model.likeliest import WHOLE_VOCABULARY, Vocabulary
from saccade.model.window_rule import KeyWindow


@dataclass(frozen=True)
class Segment:
    """The tokens of one request in a forward.

    They are rows ``start:stop`` of the forward, and their keys are written to the cache from row
    ``at`` on. ``block`` is their attention mask over the last keys, which end with their own: a row
    sees the marked ones, and all keys before the last ones. None is a causal mask.
    """

    cache: Cache
    start: int
    stop: int
    at: int
    block: Bool[Tensor, "new last"] | None = None
    recorder: MassRecorder | None = None
    row_queries: RowQueries | None = None
    pages: Pages | None = None
    """Pages that each row's queries choose, whose keys are read into the cache's first rows."""
    committed_rows: int = 0  # leading rows that are committed when the forward has ended
    scored_nodes: int = 0  # leading nodes of the tree that were scored before
    reach: Int[Tensor, " new"] | None = None
    """The last key that each row of a prompt sees, where that may be after the row itself. Rows
    with the same last key see each other."""
    reaches_in_windows_only: bool = False  # Layers without a window see no later key then.
    vocabulary: Vocabulary = WHOLE_VOCABULARY  # that the request's likeliest tokens are from

    def needs_full_mask(self, window: KeyWindow | None) -> bool:
        """Returns whether a layer with this window (None: full attention) needs a mask over all
        keys. ``block`` is no reason, because the attention kernels apply it themselves."""
        return window is not None or (self.reach is not None and not self.reaches_in_windows_only)

    @property
    def mask(self) -> Bool[Tensor, "new last"]:
        """``block``, or the mask that it stands for where it is None."""
        new = self.stop - self.start
        if self.block is None:
            return torch.ones(new, new, dtype=torch.bool).tril_()
        return self.block


class HiddenStateWriter:
    """Writes the hidden states that a forward computes to the caches of its segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.layers = frozenset(
            layer
            for segment in segments
            if segment.cache.hidden is not None
            for layer in segment.cache.hidden.layers
        )

    def needs_last_layer(self, depth: int) -> bool:
        """Returns whether every row of the last layer, of ``depth``, has to be computed."""
        return not self.layers.isdisjoint({depth, AFTER_NORM})

    def write(self, layer: int, hidden: Float[Tensor, "all width"]) -> None:
        """Writes a layer's hidden states of every row of the forward, where they are needed."""
        if layer not in self.layers:
            return
        for segment in self._segments:
            if segment.cache.hidden is not None:
                segment.cache.hidden.write(layer, segment.at, hidden[segment.start : segment.stop])
