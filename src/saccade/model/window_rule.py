"""Which keys the rows of a layer with a window see at most."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class KeyWindow:
    """Which keys a row of a layer sees at most: the last ``size``, itself included, or those of its
    own chunk of ``size`` tokens."""

    size: int
    chunked: bool = False

    def covers(
        self, rows: Int[Tensor, "new 1"], keys: Int[Tensor, "#new key"]
    ) -> Bool[Tensor, "new key"]:
        """Returns whether keys are in the windows of rows, both by their places in the text."""
        if self.chunked:
            return keys // self.size == rows // self.size
        return rows - keys < self.size

    def first_key(self, row: int) -> int:
        """Returns the first key that a row sees, and with it all rows after it."""
        if self.chunked:
            return row // self.size * self.size
        return max(0, row - self.size + 1)

    def first_row(self, key: int) -> int:
        """Returns the first row that sees no key before this one."""
        if self.chunked:
            return -(-key // self.size) * self.size
        return key + self.size - 1 if key else 0
