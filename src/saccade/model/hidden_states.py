"""Stores the hidden states of some layers for every token of a request. A draft head reads them.

They lie beside the keys in a request's cache, row for row, and are committed and rolled back with
them. A forward writes them for each of its requests whose cache stores hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

AFTER_NORM = -1
"""Stands for the hidden states after the model's last norm, which its output matrix reads."""


class HiddenStates:
    """Rows of hidden states, one for each row of a cache.

    ``layers`` says which states of a token are stored. A number n stands for the input of layer n,
    so 0 is the embedding. In a model of 32 layers, 32 stands for the input of the last norm.
    ``AFTER_NORM`` stands for that norm's output. A row has these states side by side.
    """

    def __init__(
        self,
        layers: Sequence[int],
        width: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self._width = width
        self._rows = torch.empty(
            max(1, capacity), len(self.layers) * width, dtype=dtype, device=device
        )

    @property
    def bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def read(self, rows: slice | Int[Tensor, " row"]) -> Float[Tensor, "row layers_width"]:
        """Returns the hidden states of some rows of the cache; for a slice they are a view."""
        return self._rows[rows]

    def write(self, layer: int, at: int, hidden: Float[Tensor, "new width"]) -> None:
        """Writes one layer's hidden states of new tokens from row ``at`` on."""
        self._reserve(at + len(hidden))
        for place, each in enumerate(self.layers):
            if each == layer:
                columns = slice(place * self._width, (place + 1) * self._width)
                self._rows[at : at + len(hidden), columns] = hidden.to(self._rows.device)

    def move(self, origin: Int[Tensor, " row"], at: int) -> None:
        """Copies rows ``origin`` to the rows from ``at`` on, as the cache does with the keys of an
        accepted path."""
        rows = self._rows.index_select(0, origin.to(self._rows.device))
        self._rows[at : at + len(rows)] = rows

    def extend(self, source: HiddenStates, start: int, stop: int, at: int) -> None:
        """Copies rows ``start:stop`` of another request to the rows from ``at`` on."""
        self._reserve(at + stop - start)
        self._rows[at : at + stop - start] = source._rows[start:stop]

    def copy(self, length: int) -> HiddenStates:
        """Returns a copy of the first ``length`` rows."""
        new = HiddenStates(
            self.layers, self._width, length, dtype=self._rows.dtype, device=self._rows.device
        )
        new.extend(self, start=0, stop=length, at=0)
        return new

    def _reserve(self, length: int) -> None:
        capacity = len(self._rows)
        if length > capacity:
            rows = self._rows.new_empty(max(length, capacity * 3 // 2), self._rows.shape[1])
            rows[:capacity] = self._rows
            self._rows = rows
