"""One request as a language model reads it, and what the target's reading of it revealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CONTEXT = "context_mask"  # among inputs: [requests, tokens], where a view may drop text
PARAGRAPH = 64  # tokens of a document that count as a frame


@dataclass(frozen=True)
class Paged:
    """Rows of a whole prompt in pages, a few of which a head reads at each step of a draft: those
    that the step's own queries point at."""

    rows: Int[Tensor, "page size"]
    read: int  # pages a step

    @property
    def slots(self) -> int:
        """How many rows a head reads of them at a step."""
        return self.read * self.rows.shape[1]


@dataclass(frozen=True)
class Prompt:
    """One request as a language model reads it: embedded, with its true positions.

    Written by ``Backbone.prompts``; a view keeps a subset of its rows with :meth:`select`.
    """

    context: Int[Tensor, " full"]  # ids of the whole prompt, whatever was pruned: penalties see it
    embeds: Float[Tensor, "len dim"]
    positions: Int[Tensor, "axes len"]
    visual: Bool[Tensor, " len"]  # rows a view may drop: of pictures, and of text named as context
    fixed: Bool[Tensor, " len"]  # rows a tower made that no view may drop: sound, newlines
    grid: Int[Tensor, "seen 4"]  # (medium, t, h, w) of each visual row
    index: Int[Tensor, " len"]  # where each row stands in the whole prompt
    next_position: int
    deepstack: tuple[Float[Tensor, "seen dim"], ...] = ()  # rows some models add to early layers
    heads: Int[Tensor, "layer kv_head kept"] | None = None
    """Rows of the whole prompt each head keeps, where heads differ (Sparse-to-Dense)."""
    paged: Paged | None = None
    """Rows of the whole prompt, none of them here, that are read page by page."""
    blank: Int[Tensor, " len"] | None = None
    """Ids of rows whose embeddings the model has yet to look up (words put in the place of a
    video), -1 elsewhere; ``Backbone.written`` fills them in."""
    coarse: Float[Tensor, "seen dim"] | None = None
    """The visual rows as they are where what the vision tower gives is averaged in 2x2 blocks
    before the projector: each block's row at all its cells. Only where a view asks for them."""
    stills: int = 0  # how many of a whole prompt's visual rows are of images
    moved: bool = False  # text stands as the model was trained to see it, and not as in `generate`

    def __len__(self) -> int:
        return self.embeds.shape[0]

    def to(self, device: torch.device) -> Prompt:
        """The prompt with all its tensors on a device; itself where they are there already."""
        if self.embeds.device == device:
            return self
        return replace(self, **_moved(self, device))

    @property
    def seen(self) -> int:
        """How many visual rows a head sees."""
        if self.heads is not None:
            return self.heads.shape[-1] - int((~self.visual).sum())
        return self.grid.shape[0] + (self.paged.slots if self.paged else 0)

    def held(self, whole: Prompt) -> Bool[Tensor, "layer kv_head seen"]:
        """Which visual rows of the whole prompt this one kept, as far as heads differ in it."""
        rows = self.index.view(1, 1, -1) if self.heads is None else self.heads
        kept = torch.zeros(*rows.shape[:2], len(whole), dtype=torch.bool, device=rows.device)
        return kept.scatter_(-1, rows, True)[..., whole.visual]

    def select(self, keep: Int[Tensor, " kept"]) -> Prompt:
        """The prompt with all its text and only these visual rows, at their original positions.

        ``keep`` counts visual rows, in any order; the rows stay in prompt order.
        """
        chosen = torch.zeros(self.seen, dtype=torch.bool, device=keep.device)
        chosen[keep] = True
        rows = ~self.visual
        rows[self.visual] = chosen
        return self.rows(rows)

    def text_after(self) -> Int[Tensor, " text"]:
        """Text rows after the last visual one (all text where nothing is visual)."""
        rows = torch.arange(len(self), device=self.visual.device)
        seen = rows[self.visual]
        return rows[(rows > (seen[-1] if len(seen) else -1)) & ~self.fixed]

    def deepstack_of(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """What a forward of these rows adds to the first layers: see ``Backbone.forward``."""
        if not self.deepstack:
            return None
        before = int(self.visual[:start].sum())
        mask = self.visual[start:stop]
        rows = slice(before, before + int(mask.sum()))
        return mask, torch.stack([layer[rows] for layer in self.deepstack])

    def rows(self, rows: Bool[Tensor, " len"]) -> Prompt:
        """The prompt with these rows only, text or visual, at their original positions."""
        chosen = rows[self.visual]
        return Prompt(
            context=self.context,
            embeds=self.embeds[rows],
            positions=self.positions[:, rows],
            visual=self.visual[rows],
            fixed=self.fixed[rows],
            grid=self.grid[chosen],
            index=self.index[rows],
            next_position=self.next_position,
            deepstack=tuple(layer[chosen] for layer in self.deepstack),
        )


def with_context(prompt: Prompt, marked: Bool[Tensor, " len"]) -> Prompt:
    """The prompt with rows of text that a view may drop like a video's: a document.

    Text that stands together is one more medium, of frames of ``PARAGRAPH`` tokens in a line.
    """
    marked = marked & ~prompt.visual & ~prompt.fixed
    at = marked.nonzero().squeeze(-1)
    begins = torch.ones_like(at, dtype=torch.bool)
    begins[1:] = at[1:] - at[:-1] != 1
    medium = begins.long().cumsum(0) - 1
    along = at - at[begins][medium]
    media = int(prompt.grid[:, 0].max()) + 1 if len(prompt.grid) else 0
    cells = prompt.grid.new_zeros(len(prompt), 4)
    cells[prompt.visual] = prompt.grid
    cells[marked] = torch.stack(
        [medium + media, along // PARAGRAPH, torch.zeros_like(along), along % PARAGRAPH], 1
    )
    visual = prompt.visual | marked
    added = [prompt.embeds.new_zeros(len(prompt), prompt.embeds.shape[1]) for _ in prompt.deepstack]
    for rows, layer in zip(added, prompt.deepstack, strict=True):
        rows[prompt.visual] = layer
    return replace(
        prompt, visual=visual, grid=cells[visual], deepstack=tuple(rows[visual] for rows in added)
    )


def _moved(of: Prompt | Prefill, device: torch.device) -> dict[str, Any]:
    """The fields that are tensors, or tuples of them, on a device."""
    found: dict[str, Any] = {}
    for each in fields(of):
        value = getattr(of, each.name)
        if isinstance(value, Tensor):
            found[each.name] = value.to(device)
        elif isinstance(value, Paged):
            found[each.name] = replace(value, rows=value.rows.to(device))
        elif isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value):
            found[each.name] = tuple(part.to(device) for part in value)
    return found


Texts = tuple[tuple[int, ...], ...]
"""Ids to write in the place of media: one text for all of them, or one each in prompt order."""


@dataclass(frozen=True)
class Prefill:
    """What the target's prefill revealed, for a view to choose by."""

    prompt: Prompt
    cache: Any  # a ``model.cache.Cache``, or None
    logits: Float[Tensor, " vocab"]  # raw, after the prompt
    mass: Float[Tensor, "layer kv_head seen"] | None = None
    """Softmax mass each visual key got, averaged over the text queries after the last visual row
    and over the heads of a group; recorded only when a view asks (``View.attention``)."""
    relevance: Float[Tensor, "layer kv_head seen"] | None = None
    """The same with the softmax over the visual keys alone (HIPPO, Eq. 2)."""
    again: Callable[[], Prefill] | None = None
    """The same with the attention of the rows judged last, where a view follows the answer."""
    words: Mapping[str, Texts] = field(default_factory=dict)
    """What a view may write in the place of videos and images: "newline", "caption"."""

    def to(self, device: torch.device) -> Prefill:
        """What a view reads of it on a device: for a draft elsewhere than the target. The cache
        stays where it is."""
        if self.logits.device == device and self.prompt.embeds.device == device:
            return self
        return replace(self, prompt=self.prompt.to(device), **_moved(self, device))


@dataclass(frozen=True)
class Turn:
    """How a conversation goes on: its last ``drop`` tokens are taken back, then ``ids`` follow.

    Counted in text tokens, so it means the same to a draft that saw another prompt.
    """

    drop: int
    ids: tuple[int, ...]


Inputs = Mapping[str, Any]
"""What a Hugging Face processor returns, and in ``CONTEXT`` which of its ids are a document's."""
