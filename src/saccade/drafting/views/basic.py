"""The basic views. A view decides which part of the prompt the draft reads.

It is called with the results of the target's prefill and with the draft's whole prompt, and returns
the prompt that the draft reads. Most views here are a :class:`Pruned`: a number of visual tokens
(the budget) is kept, and a selector, which is a pure function, says which. The tokens of documents
count as visual ones. All other text is kept. Further views are in ``baseline_pruning`` and beside
the methods of their papers (``saccade.methods``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.capabilities import (
    NO_CAPABILITIES,
    Capabilities,
    Capability,
    capabilities_that_hold,
)
from saccade.core.errors import MethodError
from saccade.core.prompt import Media, Prefill, Prompt, Reading, Texts
from saccade.core.protocols import CostedView, EarlyChoice, EarlyView, KeyUpdates, Refresh, View
from saccade.drafting.views import saliency

GOLDEN_FRACTION = (5**0.5 - 1) / 2  # 1 / phi, about 0.618
SEED_TOKENS = 16  # The seed of a random view is computed from this many visual embeddings.
# The seed is computed from rounded numbers. If m is the mean of their magnitudes, each of them is
# rounded to a multiple of m / SEED_STEPS.
SEED_STEPS = 32

Positions = Literal["original", "repacked"]
Early = Literal["wait", "superset", "all"]

TargetAttention = Float[Tensor, " visual"] | None
"""The attention of the target's text on the visual tokens, moved to the grid of the draft's visual
tokens (``saliency.transfer``): one number for each of these. None for a selector that does not need
it."""

Select = Callable[[Prompt, TargetAttention, int], Int[Tensor, " kept"]]
"""A selector: (the draft's whole prompt, the target's attention, budget) -> the visual tokens to
keep, as indices among the prompt's visual tokens."""

Measure = Callable[[Prefill], Float[Tensor, " visual"]]
"""The target's prefill -> how much its text attends to each visual token of its prompt."""


@runtime_checkable
class Ranking(Protocol):
    """A selector that keeps the most salient tokens, and computes part of their saliency without
    the target's attention."""

    def saliency_without_target(self, prompt: Prompt) -> Float[Tensor, " visual"]:
        """Returns the part of the saliency that needs no attention of the target."""

    def saliency_with_target(
        self,
        prompt: Prompt,
        target_attention: TargetAttention,
        without_target: Float[Tensor, " visual"] | None = None,
    ) -> Float[Tensor, " visual"]:
        """Returns the whole saliency; ``without_target`` saves computing that part again."""

    def __call__(
        self, prompt: Prompt, target_attention: TargetAttention, budget: int
    ) -> Int[Tensor, " kept"]: ...


@dataclass(frozen=True)
class Pruned(EarlyView):
    """Keeps a share ``keep`` of the visual tokens: those that ``select`` chooses.

    ``positions``: "original" leaves each token's position as it was. "repacked" gives the tokens
    that stay new positions 0, 1, 2, ..., the same on every axis. ``early`` is what a draft that
    runs in parallel with the target reads before the target's prefill has ended. "wait" is nothing,
    and "all" is every token. "superset" is twice the budget: the most salient tokens, by the part
    of the saliency that needs no attention of the target.
    """

    name: str
    select: Select
    keep: float = 0.1
    attention: bool = False  # Whether ``select`` needs the attention of the target's text.
    positions: Positions = "original"
    # Computes the attention that ``select`` needs.
    measure: Measure = saliency.attention_over_all_keys
    refresh: Refresh | None = None  # If given, tokens are chosen again during the answer.
    early: Early = "wait"
    rounding: saliency.Rounding = "nearest"  # How ``keep`` times the number of tokens is rounded.
    # The share of images' tokens to keep. If None, it is ``keep``, as for all other visual tokens.
    images: float | None = None

    def __post_init__(self) -> None:
        if self.early == "superset" and not isinstance(self.select, Ranking):
            raise MethodError(
                f"view {self.name} knows no saliency before the target's attention is known; "
                "use early=all or early=wait"
            )
        if self.early != "wait" and self.positions == "repacked":
            raise MethodError("an early start keeps original positions; use early=wait")
        if self.refresh is not None and not self.attention:
            raise MethodError(
                f"view {self.name} does not ask what the target looks at, so nothing can refresh it"
            )

    @property
    def needs(self) -> Capabilities:
        return capabilities_that_hold(
            {
                Capability.ATTENTION: self.attention,
                Capability.TARGET_KEYS: self.refresh is not None,
                Capability.BESIDE_TARGET: self.early != "wait",
            }
        )

    @property
    def offers(self) -> Capabilities:
        keeps_positions = self.positions == "original"
        return capabilities_that_hold(
            {Capability.PROMPT_ROWS: True, Capability.ORIGINAL_POSITIONS: keeps_positions}
        )

    @property
    def key_updates(self) -> KeyUpdates:
        return KeyUpdates(refresh=self.refresh)

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        pruned = prompt.select(self.choose(prefill, prompt))
        return repack(pruned) if self.positions == "repacked" else pruned

    def choose(
        self, prefill: Prefill, prompt: Prompt, early: EarlyChoice | None = None
    ) -> Int[Tensor, " kept"]:
        """Returns the visual tokens to keep of a whole prompt. If ``early`` is given, they are
        chosen among those that the draft has read already (:meth:`choose_early`)."""
        target_attention = None
        if self.attention:
            assert prefill.mass is not None, f"view {self.name} needs recorded attention"
            # The draft may cut the same media into more or fewer visual tokens than the target.
            target_attention = saliency.transfer(
                self.measure(prefill), prefill.prompt.grid, prompt.grid
            )
        count = self.budget(prompt)
        # A draft that has read every visual token already may still keep any of them.
        if early is None or len(early.tokens) == prompt.visual_tokens:
            return self.select(prompt, target_attention, count)
        # Only a ranking can leave tokens out early (see ``__post_init__``).
        assert isinstance(self.select, Ranking)
        token_saliency = self.select.saliency_with_target(
            prompt, target_attention, early.without_target
        )
        return early.tokens[saliency.top(token_saliency[early.tokens], count)]

    def budget(self, prompt: Prompt) -> int:
        """Returns how many visual tokens of a prompt are kept."""
        # Where ``images`` is None, the tokens of images count among the others.
        image_tokens = 0 if self.images is None else prompt.media.image_rows
        other_tokens = prompt.visual_tokens - image_tokens
        kept_others = saliency.budget(other_tokens, self.keep, self.rounding)
        return kept_others + saliency.budget(image_tokens, self.images or 0, self.rounding)

    def choose_early(self, prompt: Prompt) -> EarlyChoice:
        """Returns what a draft may read before the target's prefill has ended."""
        if self.early == "all":
            return EarlyChoice(torch.arange(prompt.visual_tokens, device=prompt.visual.device))
        assert isinstance(self.select, Ranking)
        without_target = self.select.saliency_without_target(prompt)
        return EarlyChoice(saliency.top(without_target, 2 * self.budget(prompt)), without_target)


@dataclass(frozen=True)
class Fixed(Pruned):
    """Keeps all visual tokens or none. So of the settings of ``Pruned`` only ``early`` can be
    overridden: what a draft reads before the target's prefill has ended."""

    @property
    def settings(self) -> frozenset[str]:
        return frozenset({"early"})

    @property
    def offers(self) -> Capabilities:
        return super().offers | capabilities_that_hold({Capability.WHOLE_PROMPT: self.keep == 1})


@dataclass(frozen=True)
class Affordable(CostedView):
    """Keeps as large a share of the tokens as a draft can read cheaply on this machine: an even
    sample of a video or image, and the beginning of a document.

    A share is cheap if a step of the draft over it is hardly slower than over the smallest share,
    and if the draft's prefill, where it has one, takes a small part of the time of the target's.
    Once the models and the machine are known, ``recipe.plan`` measures this share
    (``cost_measurement.affordable_share``) and replaces this view by one that keeps it
    (:meth:`with_share`). A ``keep`` that is given takes the place of the measured share.
    """

    name: str = "affordable"
    keep: float | None = None

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability.COSTS})

    def with_share(self, keep: float) -> Pruned:
        """Returns the view that keeps this share: ``FULL`` for all of it."""
        return replace(SCATTERED, select=scattered_or_first, keep=keep) if keep < 1 else FULL

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        if self.keep is None:
            raise MethodError("how much is affordable is not known yet: see recipe.plan")
        return self.with_share(self.keep)(prefill, prompt)


@dataclass(frozen=True)
class TextView(View):
    """Text in the place of each video or image, without any visual token (TABED's T and C).

    ``text_kind`` says which of ``Prefill.replacement_texts`` it is. Positions are counted as if the
    prompt had always had this text.
    """

    name: str
    text_kind: Literal["newline", "caption"]

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability[self.text_kind.upper()]})

    @property
    def offers(self) -> Capabilities:
        return NO_CAPABILITIES

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        return replace_media(prompt, prefill.replacement_texts[self.text_kind])


def replace_media(prompt: Prompt, texts: Texts) -> Prompt:
    """Returns the prompt with a text in the place of each video and image. The rows of the text
    are not embedded yet: ``reading.ids_to_embed`` has their ids, for the draft model to embed.
    Documents are text already, so they stay.

    A single text is used for every video and image. Raises MethodError if there are several texts,
    but not as many as videos and images.
    """
    ids = prompt.full_ids[prompt.places]
    # One entry for each visual row: whether it is a row of a video or image, not of a document.
    is_picture = ~prompt.document_rows.to(prompt.visual.device)
    # The places of the rows of videos and images among all rows of the prompt.
    picture_rows = prompt.visual.nonzero().squeeze(-1)[is_picture]
    # A fixed row (one that no view may drop) with the id of a picture's rows is a newline within
    # the picture, and is removed with it. Other fixed rows, such as sound, stay.
    is_removed = prompt.fixed & torch.isin(ids, ids[picture_rows])
    is_removed[picture_rows] = True
    media_numbers = prompt.grid[:, 0].to(picture_rows.device)[is_picture]
    # Later entries of a dict replace earlier ones, so in reverse order each medium's first row is
    # the one that stays.
    reversed_numbers = media_numbers.flip(0).tolist()
    reversed_rows = picture_rows.flip(0).tolist()
    first_rows = dict(zip(reversed_numbers, reversed_rows, strict=True))
    is_first = torch.zeros_like(is_removed)  # A medium's text takes the place of its first row.
    is_first[picture_rows.new_tensor([*first_rows.values()])] = True
    media_count = len(first_rows)
    media_texts = texts * media_count if len(texts) == 1 else texts
    if len(media_texts) != media_count:
        raise MethodError(
            f"{len(media_texts)} captions for {media_count} videos and images: "
            "give one for all, or one each"
        )
    # An old row stays one row, is removed, or becomes as many rows as its medium's text has tokens.
    new_row_counts = (~is_removed).long()
    new_row_counts[is_first] = new_row_counts.new_tensor([len(text) for text in media_texts])
    old_rows = torch.arange(len(prompt), device=new_row_counts.device)
    old_rows = old_rows.repeat_interleave(new_row_counts)
    is_text = is_first[old_rows]
    ids_to_embed = torch.full_like(old_rows, -1)
    text_ids = [token for text in media_texts for token in text]
    ids_to_embed[is_text] = ids_to_embed.new_tensor(text_ids)
    text_prompt = replace(
        prompt,
        embeds=prompt.embeds[old_rows],
        positions=prompt.positions[:, old_rows],
        visual=torch.zeros_like(is_text),
        fixed=prompt.fixed[old_rows],
        grid=prompt.grid[:0],
        places=prompt.places[old_rows],
        media=Media(),
        reading=Reading(ids_to_embed=ids_to_embed),
    )
    return repack(text_prompt)


@dataclass(frozen=True)
class Several(View):
    """Several views of one prompt, for an ensemble of drafts by one model (TABED)."""

    views: tuple[View, ...]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.views) < 2:
            raise MethodError("an ensemble needs two views or more, as in view=full+text")
        if any(Capability.TARGET_KEYS in view.needs for view in self.views):
            raise MethodError(
                "an ensemble runs one draft model over several views, and one of these views reads "
                "the target's keys instead"
            )
        object.__setattr__(self, "name", "+".join(view.name for view in self.views))

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability.MIXTURE}).union(*(view.needs for view in self.views))

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.SEVERAL_VIEWS})

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        raise MethodError(f"only an ensemble reads {self.name}; use drafter=ensemble")


def views_to_read(view: View) -> tuple[View, ...]:
    """Returns the views whose prompts a draft reads: those of an ensemble, or the view alone."""
    return view.views if isinstance(view, Several) else (view,)


def repack(prompt: Prompt) -> Prompt:
    """Returns the same rows at positions 0, 1, 2, ... on every axis."""
    row = torch.arange(len(prompt), device=prompt.positions.device)
    return replace(
        prompt,
        positions=row.expand(prompt.positions.shape[0], -1),
        next_position=len(prompt),
    )


@dataclass(frozen=True)
class Random:
    """SpecVLM's SD-Rand: a random choice that is the same for the same video and number ``draw``.

    The seed comes from the first dimension of a few embeddings. They are rounded so coarsely that
    the rounding errors of another batch or device hardly ever change it.
    """

    draw: int = 0

    def __call__(
        self, prompt: Prompt, target_attention: TargetAttention, budget: int
    ) -> Int[Tensor, " kept"]:
        generator = torch.Generator().manual_seed(self.seed(prompt))
        order = torch.randperm(prompt.visual_tokens, generator=generator)
        return order[:budget].sort().values.to(prompt.visual.device)

    def seed(self, prompt: Prompt) -> int:
        """Returns the seed of a prompt's choice."""
        some = saliency.sample_evenly(prompt.visual.nonzero().squeeze(-1), SEED_TOKENS)
        first = prompt.embeds[some, 0].double().cpu()
        steps = (first / first.abs().mean().clamp(min=1e-9) * SEED_STEPS).round().long().tolist()
        key = repr((self.draw, prompt.visual_tokens, steps)).encode()
        return int.from_bytes(sha256(key).digest()[:7], "big")


def uniform(prompt: Prompt, target_attention: TargetAttention, budget: int) -> Int[Tensor, " kept"]:
    """Returns tokens evenly spaced in prompt order."""
    return saliency.sample_evenly(
        torch.arange(prompt.visual_tokens, device=prompt.visual.device), budget
    )


def scattered(
    prompt: Prompt, target_attention: TargetAttention, budget: int
) -> Int[Tensor, " kept"]:
    """Returns tokens as evenly spread as ``uniform``'s, but not in step with the grid.

    In a grid of eight columns, every fourth token would always be in one of two columns. Here the
    tokens are ordered by the fractional part of i / phi, and the first ones are kept: i is a
    token's number, and phi is the golden ratio (Kronecker's low-discrepancy sequence).
    """
    return _scatter(prompt.visual_tokens, budget).to(prompt.visual.device)


def _scatter(count: int, budget: int) -> Int[Tensor, " kept"]:
    """Returns ``budget`` of the numbers below ``count``, in order, by the rule of
    :func:`scattered`."""
    fractions = torch.arange(count, dtype=torch.float64) * GOLDEN_FRACTION % 1
    return fractions.argsort()[:budget].sort().values


def scattered_or_first(
    prompt: Prompt, target_attention: TargetAttention, budget: int
) -> Int[Tensor, " kept"]:
    """Returns ``scattered`` tokens of videos and images, and the first tokens of each document: the
    same share of each.

    A text with holes is of no use to a draft. With every fourth token of a document a draft was no
    better than without the document, and with its first quarter about as good as with all of it
    (notebook/LOG.md).
    """
    media = prompt.grid[:, 0].cpu()
    is_document = prompt.document_rows.cpu()
    share = budget / max(1, prompt.visual_tokens)
    rows = torch.arange(prompt.visual_tokens)
    picture_tokens = rows[~is_document]
    picture_budget = round(share * len(picture_tokens))
    kept = [picture_tokens[_scatter(len(picture_tokens), picture_budget)]]
    # The running sum is rounded, and not each document's part, so that the parts add up to the
    # budget however short the documents are.
    seen_tokens = len(picture_tokens)
    spent_budget = picture_budget
    for number in media[is_document].unique().tolist():
        document_tokens = rows[media == number]
        seen_tokens += len(document_tokens)
        document_budget = round(share * seen_tokens) - spent_budget
        spent_budget += document_budget
        kept.append(document_tokens[:document_budget])
    return torch.cat(kept).sort().values.to(prompt.visual.device)


def attended(
    prompt: Prompt, target_attention: TargetAttention, budget: int
) -> Int[Tensor, " kept"]:
    """Returns the most attended tokens: SpecVLM's stage I alone."""
    assert target_attention is not None
    return saliency.top(target_attention, budget)


FULL = Fixed("full", uniform, keep=1.0)
RANDOM = Pruned("random", Random())
UNIFORM = Pruned("uniform", uniform)
SCATTERED = Pruned("scattered", scattered)
AFFORDABLE = Affordable()
ATTENTION = Pruned("attention", attended, attention=True)
NONE = Fixed("none", uniform, keep=0.0)
VIEWS = (FULL, NONE, RANDOM, UNIFORM, SCATTERED, AFFORDABLE, ATTENTION)
TEXT = TextView("text", "newline")
CAPTION = TextView("caption", "caption")
