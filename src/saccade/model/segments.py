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
    ``first_key`` on. ``recent_mask`` has one row for each token, and one column for each of the
    last keys in the cache, the tokens' own included. A token attends to the keys that its row
    marks, and to all keys before the first column. None stands for a causal mask.
    """

    cache: Cache
    start: int
    stop: int
    first_key: int
    recent_mask: Bool[Tensor, "new last"] | None = None
    recorder: MassRecorder | None = None
    """Adds up the attention that some of these tokens give to the prompt's visual tokens; None if
    no token's attention is recorded."""
    row_queries: RowQueries | None = None
    """Stores the queries of the segment's last rows, or of all its rows, so that their attention
    can be computed after the forward."""
    pages: Pages | None = None
    """The target's cache in pages of a few rows each, for a draft that reads few of them; None if
    the tokens read ``cache`` alone.

    The first rows of ``cache`` only make room for pages. In each layer the tokens attend one after
    another. A token's queries choose pages, the keys and values of these pages are copied into that
    room, and the token attends to them and to the rows of ``cache`` after them."""
    committed_rows: int = 0  # how many of the first tokens are committed once the forward has ended
    scored_nodes: int = 0  # how many of the tree's first nodes earlier forwards have scored
    last_visible_row: Int[Tensor, " new"] | None = None
    """For each token, the last row of ``cache`` that it sees; None where no token sees a row that
    comes after its own.

    Tokens with the same last row see each other, for example those of a picture that is read in
    both directions."""
    sees_ahead_in_windows_only: bool = False
    """Whether ``last_visible_row`` holds only in layers with a sliding window. All other layers are
    causal then."""
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    """The ids among which the likeliest tokens are searched."""

    @property
    def end_key(self) -> int:
        """The cache row after the last one that the tokens' keys are written to."""
        return self.first_key + self.stop - self.start

    def needs_full_mask(self, window: KeyWindow | None) -> bool:
        """Returns whether a layer with this window (None: full attention) needs a mask over all
        keys. A ``recent_mask`` alone is no reason, because the attention kernels apply it
        themselves."""
        if window is not None:
            return True
        return self.last_visible_row is not None and not self.sees_ahead_in_windows_only

    @property
    def mask(self) -> Bool[Tensor, "new last"]:
        """``recent_mask``, or a causal mask over the tokens' own keys where it is None."""
        new = self.stop - self.start
        if self.recent_mask is None:
            return torch.ones(new, new, dtype=torch.bool).tril_()
        return self.recent_mask


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
        """Returns whether hidden states after the last of ``depth`` layers are written, so that
        this layer has to be computed for every row."""
        return not self.layers.isdisjoint({depth, AFTER_NORM})

    def write(self, layer: int, hidden: Float[Tensor, "all width"]) -> None:
        """Writes hidden states of every row of the forward to those caches that store them.

        ``layer`` is a number n for the input of layer n, or ``AFTER_NORM``, as in
        ``HiddenStates.layers``.
        """
        if layer not in self.layers:
            return
        for segment in self._segments:
            if segment.cache.hidden is not None:
                segment.cache.hidden.write(
                    layer, segment.first_key, hidden[segment.start : segment.stop]
                )
