"""What a drafter is made from: models, a view, a shape, each request's rules of sampling, and texts
that replace videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.errors import ModelError, OptionError
from saccade.core.prompt import DOCUMENT_MASK, Inputs, Texts
from saccade.core.protocols import Drafter, Shape, View
from saccade.core.sampling import Sampling
from saccade.model.backbone import Backbone
from saccade.model.heads.head import Head
from saccade.model.vision_cache import ConversationVision

Captions = Sequence[str | Sequence[str]]
"""For each request one caption for all its videos and images, or a list of one for each of them in
prompt order."""

Captioner = Callable[[Inputs], Captions]
"""Makes captions for the inputs. It runs in a thread beside the target's prefill where a core is
free."""

# Views with one of these needs put tokens of text in the place of a video.
NEEDS_TOKENIZER = frozenset({Capability.NEWLINE, Capability.CAPTION})


@dataclass(frozen=True)
class TextMaker:
    """Makes the texts that replace videos: the tokenizer's ``encode`` and a captioner.

    Either may be None if no view needs it.
    """

    encode: Callable[[str], list[int]] | None = None
    captioner: Captioner | None = None

    def check(self, view: View) -> None:
        """Raises OptionError where the view needs a tokenizer or a captioner and there is none."""
        if not view.needs.isdisjoint(NEEDS_TOKENIZER) and self.encode is None:
            raise OptionError(f"view {view.name} writes words, so it needs tokenizer=")
        if Capability.CAPTION in view.needs and self.captioner is None:
            raise OptionError(
                f"view {view.name} reads a caption: give captioner= (--captioner), "
                "a function that returns a caption for each request, or a list of one for each of "
                "its videos and images"
            )

    def captioner_for(self, view: View) -> Captioner | None:
        """Returns the captioner for this view; None for a view that reads no captions."""
        return self.captioner if Capability.CAPTION in view.needs else None

    def replacement_texts(
        self, view: View, inputs: Inputs, captions: Captions | None = None
    ) -> list[dict[str, Texts]]:
        """Returns each request's ``Prefill.replacement_texts``, only those that the view reads: the
        ids of a newline, the ids of captions, or none.

        If the view reads captions and ``captions`` is None, the captioner makes them now.
        """
        requests = int(inputs["input_ids"].shape[0])
        texts: list[dict[str, Texts]] = [{} for _ in range(requests)]
        if Capability.NEWLINE in view.needs and self.encode is not None:
            # Only the last token is taken, since some tokenizers begin a text with a special one.
            newline = tuple(self.encode("\n")[-1:])
            texts = [{"newline": (newline,)} for _ in texts]
        captioner = self.captioner_for(view)
        if self.encode is not None and captioner is not None:
            captions = captioner(inputs) if captions is None else captions
            for request_texts, caption in zip(texts, captions, strict=True):
                by_medium = [caption] if isinstance(caption, str) else caption
                # TABED's published code also writes "image: " before each caption.
                request_texts["caption"] = tuple(
                    tuple(self.encode(f"image: {text}")) for text in by_medium
                )
        return texts


@dataclass(frozen=True)
class Setup:
    """The models, the recipe's view and shape, and each request's rules of sampling."""

    target: Backbone
    draft: Backbone | None
    view: View
    shape: Shape
    rules: Sequence[Sampling]
    room: int  # How many tokens an answer may have at most.
    text_maker: TextMaker = TextMaker()
    vision: ConversationVision | None = None  # Vision towers' outputs for media of earlier turns.

    def draft_model(self) -> Backbone:
        """Returns the draft model. Raises ModelError where there is none."""
        if self.draft is None:
            raise ModelError(
                "this method drafts with a second model: give one with draft= (--draft), "
                "or let the target draft for itself with drafter=self"
            )
        return self.draft

    @property
    def target_as_draft(self) -> Backbone:
        """The target as its own draft: its copy with rounded weights where there is one."""
        if self.draft is not None and self.draft.is_rounded_copy_of(self.target):
            return self.draft
        return self.target

    def head(self) -> Head:
        """Returns the draft as a head. Raises ModelError where it is a model, or there is none."""
        if self.draft is None:
            raise ModelError(
                "this method drafts with a head of the target, and its checkpoint has none that "
                "was loaded with it: name an EAGLE-3 or DFlash head with draft= (--draft), or "
                "another method"
            )
        if not isinstance(self.draft, Head):
            raise ModelError(
                "this method drafts with a head of the target, and the draft is a model: name a "
                "head with draft= (--draft), or let the model draft with drafter=model"
            )
        return self.draft

    def shared_vocabulary(self) -> tuple[int, list[int]]:
        """Returns how many ids both models have, and which of these are placeholders of media in
        either model."""
        draft = self.draft_model()
        common = min(self.target.vocab, draft.vocab)
        placeholders = {*self.target.placeholders, *draft.placeholders}
        return common, sorted(i for i in placeholders if i < common)

    @property
    def needs_averaged_rows(self) -> bool:
        """Whether the draft's prompt also gets ``Media.averaged_rows``: its visual rows
        averaged over blocks of 2x2 cells. It does if the view reads them and the draft model can
        compute them."""
        are_needed = Capability.AVERAGES_BEFORE_PROJECTOR in self.view.needs
        return are_needed and self.draft_model().can_average_rows

    def draft_inputs(self, inputs: Inputs) -> Inputs:
        """Returns the inputs that the draft model can read: the text alone for a language model."""
        if self.draft_model().placeholders or not self.target.placeholders:
            return inputs
        ids = inputs["input_ids"]
        media = torch.isin(ids, torch.tensor([*self.target.placeholders], device=ids.device))
        mask = inputs.get("attention_mask", torch.ones_like(ids)) * ~media
        documents = {DOCUMENT_MASK: inputs[DOCUMENT_MASK]} if DOCUMENT_MASK in inputs else {}
        # The ids of media are masked out. They are replaced by 0, an id that every model has.
        return {"input_ids": ids.masked_fill(media, 0), "attention_mask": mask, **documents}


@runtime_checkable
class MakeDrafter(Protocol):
    """A drafter as a part of a recipe: its class, or whatever else makes one."""

    @property
    def name(self) -> str:
        """The drafter's name in an override, such as ``self`` in ``drafter=self``."""

    @property
    def needs(self) -> Capabilities:
        """What other parts of a recipe, or the engine, have to offer."""

    @property
    def offers(self) -> Capabilities:
        """What it offers to the other parts of a recipe."""

    def __call__(self, setup: Setup, /) -> Drafter:
        """Returns the drafter for the requests of this setup."""
