"""One request as a language model reads it, and the results of the target's prefill of it.

A ``Prompt`` has a row for each token: its embedding, its position, and where it comes from. Views
read the target's ``Prefill`` and make of a whole prompt the one that a draft reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

DOCUMENT_MASK = "context_mask"  # A key of inputs: [requests, tokens], true for document tokens.
DOCUMENT_FRAME_TOKENS = 64  # So many tokens of a document are one frame of it in ``Prompt.grid``.


@dataclass(frozen=True)
class Paged:
    """Rows of a whole prompt in pages. At each step of a draft, each KV head reads the few pages
    that match the step's queries best."""

    rows: Int[Tensor, "page size"]  # the indices of each page's rows
    pages_per_step: int  # how many pages a KV head reads at a step

    @property
    def slots(self) -> int:
        """How many rows of pages a KV head reads at a step."""
        return self.pages_per_step * self.rows.shape[1]


@dataclass(frozen=True)
class Media:
    """What is known of a prompt besides its embeddings and positions, mostly of its videos and
    images."""

    deepstack: tuple[Float[Tensor, "visual dim"], ...] = ()
    """For each of the first layers of some models (Qwen3-VL), what is added, after that layer, to
    the hidden states of the visual rows."""
    averaged_rows: Float[Tensor, "visual dim"] | None = None
    """The visual rows as they would be if the vision tower's output were averaged in blocks of 2x2
    cells before the projector. The four cells of a block have the same row. None unless a view
    needs ``Capability.AVERAGES_BEFORE_PROJECTOR``."""
    image_rows: int = 0  # how many of a whole prompt's visual rows are of images
    last_visible_row: Int[Tensor, " len"] | None = None
    """For each row, the index of the last row that it attends to; None where attention is causal.

    A row attends to the rows up to its own. Of the later rows it attends only to those that have
    the same index as itself. For example, the indices are 0, 3, 3, 3, 4 for a row of text, a
    picture of three rows that is read in both directions, and a row of text. The rows with one
    index are those of one picture, of all pictures and frames (Molmo 2; text between them has other
    indices), or of the whole prompt (PaliGemma)."""
    sees_ahead_in_windows_only: bool = False
    """Whether ``last_visible_row`` holds only in layers with a sliding window (Gemma 4). All other
    layers are causal then."""
    row_arguments: Mapping[str, Shaped[Tensor, "len ..."]] = field(default_factory=dict)
    """What a language model reads of each row besides its embedding, by the name of its argument
    (``families.ROW_ARGUMENTS``)."""
    has_trained_positions: bool = False
    """Whether this prompt's positions differ from those that Hugging Face's ``generate`` would use,
    because text after a video has the positions that it had in the model's training."""
    first_document: int | None = None
    """The number in ``Prompt.grid`` of the first medium that is a document. Documents come after
    all videos and images there."""


@dataclass(frozen=True)
class Reading:
    """How a draft reads a prompt that a view made. By default it reads the prompt's rows as they
    are."""

    heads: Int[Tensor, "layer kv_head kept"] | None = None
    """Rows of the whole prompt that each KV head reads, where these heads differ
    (Sparse-to-Dense)."""
    paged: Paged | None = None
    """Rows of the whole prompt that are read page by page, besides the rows of this prompt."""
    ids_to_embed: Int[Tensor, " len"] | None = None
    """Ids of rows that the model has yet to embed (words in the place of a video), -1 elsewhere;
    ``Backbone.embed_missing_rows`` embeds them."""


@dataclass(frozen=True)
class Prompt:
    """One request as a language model reads it: embedded, with its true positions.

    ``Backbone.prompts`` returns whole prompts. A view keeps a subset of the rows with
    :meth:`select`, which leaves each row its position, so there may be gaps between positions.
    """

    full_ids: Int[Tensor, " full"]  # ids of the whole prompt before pruning, for penalties
    embeds: Float[Tensor, "len dim"]
    positions: Int[Tensor, "axes len"]  # three axes for M-RoPE (time, height, width), else one
    visual: Bool[Tensor, " len"]  # rows that a view may drop: of videos, images and documents
    fixed: Bool[Tensor, " len"]  # rows of a tower that no view may drop: sound, newlines
    # For each visual row (medium, t, h, w): the number of its video, image or document, and its
    # frame, line and column in that.
    grid: Int[Tensor, "visual 4"]
    places: Int[Tensor, " len"]  # each row's place in the whole prompt
    next_position: int  # of the first token after the prompt, on every axis
    media: Media = Media()
    reading: Reading = Reading()

    def __len__(self) -> int:
        return self.embeds.shape[0]

    def to(self, device: torch.device) -> Prompt:
        """Returns the prompt with all its tensors on a device; itself if they are there already."""
        # ``positions`` show on which device a prompt is. ``embeds`` may not: in a prompt that was
        # sent to a draft's process, they are an empty tensor on the CPU.
        if self.positions.device == device:
            return self
        return replace(self, **_fields_on(self, device))

    @property
    def visual_tokens(self) -> int:
        """How many visual rows each KV head of the model reads at a step."""
        if self.reading.heads is not None:
            # For each KV head, ``heads`` has all rows that are not visual, and some visual rows.
            other_rows = int((~self.visual).sum())
            return self.reading.heads.shape[-1] - other_rows
        own_visual_rows = self.grid.shape[0]
        return own_visual_rows + (self.reading.paged.slots if self.reading.paged else 0)

    def chosen_mask(self, full_prompt: Prompt) -> Bool[Tensor, "layer kv_head visual"]:
        """Returns which visual rows of the whole prompt are in this one; the first two dimensions
        are 1 where KV heads do not differ."""
        rows = self.places.view(1, 1, -1) if self.reading.heads is None else self.reading.heads
        mask = torch.zeros(*rows.shape[:2], len(full_prompt), dtype=torch.bool, device=rows.device)
        return mask.scatter_(-1, rows, True)[..., full_prompt.visual]

    def select(self, keep: Int[Tensor, " kept"]) -> Prompt:
        """Returns the prompt with all its text and only these visual rows, at their old positions.

        ``keep`` holds numbers of visual rows, counted from 0 among the visual rows alone, in any
        order; the rows stay in prompt order. This works only for a prompt with the default
        ``reading``.
        """
        chosen = torch.zeros(self.visual_tokens, dtype=torch.bool, device=keep.device)
        chosen[keep] = True
        is_kept = ~self.visual
        is_kept[self.visual] = chosen
        return self.keep_rows(is_kept)

    @property
    def document_rows(self) -> Bool[Tensor, " visual"]:
        """Which of the visual rows are text of documents."""
        first = self.media.first_document
        if first is None:
            return torch.zeros(len(self.grid), dtype=torch.bool, device=self.grid.device)
        return self.grid[:, 0] >= first

    def text_after(self) -> Int[Tensor, " text"]:
        """Returns the indices of the text rows after the last visual row, or of all text rows where
        nothing is visual."""
        rows = torch.arange(len(self), device=self.visual.device)
        visual = rows[self.visual]
        last = visual[-1] if len(visual) else -1
        return rows[(rows > last) & ~self.fixed]

    @property
    def changes_with_more_text(self) -> bool:
        """Whether text appended to the prompt may change the keys of its rows.

        Where a whole prompt is read in both directions, its rows would attend to the new text too.
        An earlier row that attends to the last row is taken as the sign of that. In most families
        only rows of a picture attend to later rows, and text follows the picture.
        """
        last_rows = self.media.last_visible_row
        return last_rows is not None and bool((last_rows[:-1] == len(self) - 1).any())

    def largest_cut(self, length: int) -> int:
        """Returns the largest length, up to ``length``, at which the prompt can be cut: no row
        before the cut sees a row after it (``Media.last_visible_row``).

        So a picture that is read in both directions stays whole. In a prompt of one row of text and
        such a picture of three rows, the largest cut up to 2 is 1, and the largest up to 4 is 4.
        """
        if self.media.last_visible_row is None or length == len(self):
            return length
        cuts = torch.arange(1, length + 1, device=self.media.last_visible_row.device)
        # A cut is allowed if no row before it sees a row at the cut or after it.
        last_seen_before_cut = self.media.last_visible_row[:length].cummax(0).values
        is_allowed = last_seen_before_cut < cuts
        return int((is_allowed * cuts).amax()) if length else 0

    def deepstack_of(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Returns which of these rows are visual, and what a forward of them adds to the visual
        ones in each of the first layers (``Backbone.forward``); None where nothing is added."""
        if not self.media.deepstack:
            return None
        before = int(self.visual[:start].sum())
        mask = self.visual[start:stop]
        rows = slice(before, before + int(mask.sum()))
        return mask, torch.stack([layer[rows] for layer in self.media.deepstack])

    def keep_rows(self, rows: Bool[Tensor, " len"]) -> Prompt:
        """Returns the prompt with these rows only, text or visual, at their old positions.

        ``Media.averaged_rows``, ``image_rows`` and ``has_trained_positions`` are not kept, and
        ``reading`` is the default.
        """
        chosen = rows[self.visual]
        return Prompt(
            full_ids=self.full_ids,
            embeds=self.embeds[rows],
            positions=self.positions[:, rows],
            visual=self.visual[rows],
            fixed=self.fixed[rows],
            grid=self.grid[chosen],
            places=self.places[rows],
            next_position=self.next_position,
            media=Media(
                tuple(layer[chosen] for layer in self.media.deepstack),
                last_visible_row=self._last_visible_among(rows),
                sees_ahead_in_windows_only=self.media.sees_ahead_in_windows_only,
                row_arguments={name: each[rows] for name, each in self.media.row_arguments.items()},
                first_document=self.media.first_document,
            ),
        )

    def keep_first(self, stop: int) -> Prompt:
        """Returns the first ``stop`` rows of a whole prompt as a whole prompt.

        ``Media.averaged_rows``, ``image_rows`` and ``has_trained_positions`` are not kept.
        """
        part = self.keep_rows(torch.arange(len(self), device=self.visual.device) < stop)
        next_position = int(part.positions[:, -1].max()) + 1
        return replace(part, full_ids=self.full_ids[:stop], next_position=next_position)

    def keep_from(self, start: int) -> Prompt:
        """Returns the prompt's rows from ``start`` on, as a prompt of their own for a view.

        Its media keep their numbers. ``Media.image_rows`` and ``has_trained_positions`` are not
        kept.
        """
        rows = torch.arange(len(self), device=self.visual.device) >= start
        part = self.keep_rows(rows)
        averaged_rows = self.media.averaged_rows
        if averaged_rows is not None:
            averaged_rows = averaged_rows[rows[self.visual]]
        return replace(part, media=replace(part.media, averaged_rows=averaged_rows))

    def _last_visible_among(self, rows: Bool[Tensor, " len"]) -> Int[Tensor, " kept"] | None:
        """Returns ``Media.last_visible_row`` of these rows as indices among these rows alone.

        Rows that saw each other still do. For example, 0, 3, 3, 3, 4 becomes 0, 2, 2, 3 if row 3,
        the last one of the picture, is not among them.
        """
        if self.media.last_visible_row is None:
            return None
        # The rows with the same last visible row are a group. The last kept row of a group becomes
        # the last visible row of the whole group.
        _, groups = torch.unique(self.media.last_visible_row[rows], return_inverse=True)
        places = torch.arange(len(groups), device=groups.device)
        last = torch.zeros_like(places).scatter_reduce(0, groups, places, "amax")
        return last[groups]


def with_documents(prompt: Prompt, is_document: Bool[Tensor, " len"]) -> Prompt:
    """Returns the prompt with these rows of text as documents, which a view may drop like a video's
    rows.

    Each run of neighbouring rows becomes one more medium of the grid, whose frames are
    ``DOCUMENT_FRAME_TOKENS`` rows each. For example, rows 3, 4, 5 and 9 become two documents, and
    their offsets in these are 0, 1, 2 and 0.
    """
    is_document = is_document & ~prompt.visual & ~prompt.fixed
    places = is_document.nonzero().squeeze(-1)
    begins_document = torch.ones_like(places, dtype=torch.bool)
    begins_document[1:] = places[1:] - places[:-1] != 1
    document = begins_document.long().cumsum(0) - 1  # the number of each row's document, from 0 on
    offset = places - places[begins_document][document]  # of each row in its document
    first_document = int(prompt.grid[:, 0].max()) + 1 if len(prompt.grid) else 0
    cells = prompt.grid.new_zeros(len(prompt), 4)
    cells[prompt.visual] = prompt.grid
    cells[is_document] = torch.stack(
        [
            first_document + document,
            offset // DOCUMENT_FRAME_TOKENS,
            torch.zeros_like(offset),
            offset % DOCUMENT_FRAME_TOKENS,
        ],
        1,
    )
    visual = prompt.visual | is_document
    deepstack = prompt.media.deepstack
    # Deepstack has a row for each visual row, and so one for each row of a document from here on.
    # It is zero, because nothing is added to documents.
    added = [prompt.embeds.new_zeros(len(prompt), prompt.embeds.shape[1]) for _ in deepstack]
    for rows, layer in zip(added, deepstack, strict=True):
        rows[prompt.visual] = layer
    document_media = replace(
        prompt.media,
        deepstack=tuple(rows[visual] for rows in added),
        first_document=first_document,
    )
    return replace(prompt, visual=visual, grid=cells[visual], media=document_media)


def _fields_on(
    owner: Prompt | Prefill | Media | Reading | Paged, device: torch.device
) -> dict[str, Any]:
    """Returns the fields that hold tensors, by name, with the tensors moved to a device.

    A field may be a tensor, a tuple or mapping of tensors, or a ``Media``, ``Reading`` or
    ``Paged``."""
    moved: dict[str, Any] = {}
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device)
        elif isinstance(value, Media | Reading | Paged):
            moved[name] = replace(value, **_fields_on(value, device))
        elif isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value):
            moved[name] = tuple(part.to(device) for part in value)
        elif isinstance(value, Mapping) and all(isinstance(v, Tensor) for v in value.values()):
            moved[name] = {key: part.to(device) for key, part in value.items()}
    return moved


Texts = tuple[tuple[int, ...], ...]
"""Ids that replace media: one text for all of them, or one each in prompt order."""


@dataclass(frozen=True)
class Prefill:
    """The results of the target's prefill, by which a view chooses."""

    prompt: Prompt
    cache: Any  # a ``model.cache.Cache``; None for a draft that cannot read the target's
    # Raw, for the first token after the prompt. They are empty where ``cache`` is None.
    logits: Float[Tensor, " vocab"]
    mass: Float[Tensor, "layer kv_head visual"] | None = None
    """The attention that each visual key got: softmax mass, averaged over the text queries after
    the last visual row and over the query heads of a KV head. It is recorded only when a view needs
    ``Capability.ATTENTION``."""
    relevance: Float[Tensor, "layer kv_head visual"] | None = None
    """The same with the softmax over the visual keys alone (HIPPO, Eq. 2)."""
    with_latest_attention: Callable[[], Prefill] | None = None
    """Returns this prefill with ``mass`` and ``relevance`` measured anew, as the attention that the
    visual keys got from the rows committed last instead of from the prompt's text. None unless the
    view follows the answer (``View.key_updates``)."""
    replacement_texts: Mapping[str, Texts] = field(default_factory=dict)
    """Texts that a view may put in the place of videos and images, by the kind of text: "newline",
    "caption"."""

    def tail(self, start: int) -> Prefill:
        """Returns the results for the prompt's rows from ``start`` on."""
        rows = torch.arange(len(self.prompt), device=self.prompt.visual.device) >= start
        columns = rows[self.prompt.visual]
        mass = None if self.mass is None else self.mass[..., columns]
        relevance = None if self.relevance is None else self.relevance[..., columns]
        return replace(self, prompt=self.prompt.keep_from(start), mass=mass, relevance=relevance)

    def to(self, device: torch.device) -> Prefill:
        """Returns the results with the tensors that a view reads on the draft's device. The cache
        stays where it is."""
        if self.prompt.positions.device == device:
            return self
        return replace(self, prompt=self.prompt.to(device), **_fields_on(self, device))


@dataclass(frozen=True)
class Turn:
    """How a conversation continues: its last ``drop`` tokens are removed, then ``ids`` follow.

    All of these are text tokens, so a turn means the same to a draft whose prompt was pruned.
    """

    drop: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class SharedPrefix:
    """The leading rows and the media of a new prompt that earlier turns have prefilled already."""

    shared_rows: int  # how many leading rows of the target's prompt are those of earlier turns
    shared_media: frozenset[int]  # the numbers of the media that are wholly among them

    @classmethod
    def of(cls, prompt: Prompt, shared_rows: int) -> SharedPrefix:
        """Returns the prefix of ``shared_rows`` rows, with the media that lie wholly in it."""
        rows = prompt.visual.nonzero().squeeze(-1)
        media = prompt.grid[:, 0]
        media_with_new_rows = {*media[rows >= shared_rows].tolist()}
        return cls(shared_rows, frozenset({*media.tolist()} - media_with_new_rows))


Inputs = Mapping[str, Any]
"""What a Hugging Face processor returns, and under ``DOCUMENT_MASK`` which ids are documents'."""
