"""What a request's last judged rows attended to: told from their queries, when somebody asks.

A verification computes attention anyway, and forgets it. Here its queries are kept, a few rows of
numbers, of those rows alone that were committed; their products with the keys are taken again only
for a draft that wants to look where the target looks now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.model.attention import Asked
from saccade.model.cache import Cache

Mass = Float[Tensor, "layer kv_head seen"]


@dataclass(frozen=True)
class JudgedRow:
    """A row of a forward, and how many keys of its request's cache it sees."""

    asked: Asked
    number: int
    seen: int


class Recent:
    """The last ``rows`` rows of a request that were committed."""

    def __init__(self, rows: int) -> None:
        self._rows: deque[JudgedRow] = deque(maxlen=rows)

    def add(self, row: JudgedRow) -> None:
        self._rows.append(row)

    def clear(self) -> None:
        """The text goes on elsewhere: what was seen of it is no longer there."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    @torch.no_grad()
    def attended(self, cache: Cache, columns: Int[Tensor, " seen"]) -> tuple[Mass, Mass]:
        """``Prefill.mass`` and ``Prefill.relevance`` of these rows: the softmax mass on each of the
        columns, over all keys and over the columns alone, averaged over rows and a group's heads.
        """
        end = max(row.seen for row in self._rows)
        sees = torch.tensor([row.seen for row in self._rows])
        every = columns.numel() and int(columns[-1] - columns[0]) + 1 == len(columns)
        mass, relevance = [], []
        for layer in range(len(cache.keys)):
            keys, _ = cache.read(layer, end)
            kv_heads, _, width = keys.shape
            q = torch.stack([row.asked.row(layer, row.number) for row in self._rows], 1)
            q = q.view(kv_heads, -1, width).float()
            logits = (q @ keys.float().transpose(1, 2)).view(kv_heads, -1, len(sees), end)
            hidden = torch.arange(end) >= sees[:, None]
            logits.masked_fill_(hidden.to(logits.device), float("-inf"))
            here = (
                slice(int(columns[0]), int(columns[-1]) + 1) if every else columns.to(keys.device)
            )
            relevance.append(logits[..., here].softmax(-1).mean((1, 2)).to(columns.device))
            mass.append(logits.softmax(-1)[..., here].mean((1, 2)).to(columns.device))
        return torch.stack(mass), torch.stack(relevance)
