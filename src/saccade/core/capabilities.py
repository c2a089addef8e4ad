"""What the parts of a method need from each other, and what they offer.

A part (view, drafter, shape or schedule) states its ``needs`` and its ``offers``. A recipe is legal
if and only if every need of a part is offered by another part or by the engine. The error for any
other recipe describes the missing capability, so no part has to know any other part by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Protocol, runtime_checkable


class Capability(Enum):
    """Something that a part of a method offers, or needs.

    Each member has a ``description``, which follows "needs" in an error, and a ``choice``: one or
    more options, any of which meets the need or removes it. For example, the schedule "parallel"
    needs OWN_PROCESS: "drafter=model" offers it, and with "schedule=serial" nothing needs it. What
    the engine offers to every method has no ``choice``. The unmet needs of a part are reported in
    the order of the members.
    """

    # The engine offers these.
    ATTENTION = "what the target's text attends to, recorded in its prefill"
    COSTS = "the seconds that forwards take on this machine"
    AVERAGES_BEFORE_PROJECTOR = (
        "visual rows averaged in blocks before the projector, if the draft's family allows it"
    )
    NEWLINE = "a newline in the place of each video"
    CAPTION = "a caption in the place of each video"
    HIDDEN_STATES = "the target's hidden states, recorded in its forwards"

    # Drafters offer these.
    PLAIN_DECODING = "a drafter that drafts nothing", "drafter=none"
    READS_VIEW = "a drafter that reads what the view keeps", "drafter=model"
    # A drafter with STARTS_FROM_TARGET_KEYS does not prefill: it starts from the target's own keys
    # of the prompt. No part needs this capability. Where a drafter offers it, the target's layers
    # with a sliding window must keep the keys that the window has passed.
    STARTS_FROM_TARGET_KEYS = "the target itself as the drafter", "drafter=self"
    # A view needs TARGET_KEYS if it chooses different keys for different key heads, or chooses
    # again during the answer.
    TARGET_KEYS = (
        "a drafter that picks among the target's own keys",
        "drafter=self",
    )
    DRAFT_MODEL = "a draft model in the target's process", "drafter=model"
    OWN_PROCESS = "a draft model in a process of its own", "drafter=model, or schedule=serial"
    MIXTURE = "an ensemble, which mixes the laws of several views", "drafter=ensemble"
    # No part needs this one, but ``Recipe.can_add_media`` depends on it.
    ADDS_MEDIA = "a drafter that reads the new media of a later turn alone", "drafter=model"

    # Views offer these.
    PROMPT_ROWS = (
        "a view that is a choice among the rows of the prompt",
        "view=scattered, or drafter=model",
    )
    ORIGINAL_POSITIONS = (
        "a view that keeps positions, because the target's own keys cannot be re-packed",
        "positions=original, or drafter=model",
    )
    SEVERAL_VIEWS = "several views", "view=full+text"
    WHOLE_PROMPT = "the whole prompt as its view", "view=full"
    AVERAGED_ROWS = "a view whose rows are means of several tokens", "view=pooled"

    # Shapes offer these.
    # A draft of such a shape can grow one token at a time while the target runs.
    GROWS_TOKEN_BY_TOKEN = (
        "a shape that decides after each token whether to draft another one",
        "shape=chain-N, shape=fit or schedule=serial",
    )
    FIXED_LENGTH = (
        "a shape that drafts a chain whose length does not depend on probabilities",
        "shape=chain-N",
    )
    FIXED_FORM = "a shape that does not depend on earlier rounds or on clocks", "shape=chain-N"
    WORKS_WITHOUT_DRAFT_MODEL = "a shape that also works without a draft model", "shape=auto"
    COPIES = "a shape that copies from the text", "shape=auto"

    # Schedules offer these.
    BESIDE_TARGET = "a draft that works beside the target", "schedule=parallel"
    SHARED_FORWARDS = "rounds whose forwards several requests share", "schedule=serial"

    def __init__(self, description: str, choice: str = "") -> None:
        self.description = description
        self.choice = choice


Capabilities = frozenset[Capability]

NO_CAPABILITIES: Capabilities = frozenset()
OFFERED_BY_ENGINE: Capabilities = frozenset(
    {
        Capability.ATTENTION,
        Capability.COSTS,
        Capability.AVERAGES_BEFORE_PROJECTOR,
        Capability.NEWLINE,
        Capability.CAPTION,
        Capability.HIDDEN_STATES,
    }
)


def capabilities_that_hold(conditions: Mapping[Capability, bool]) -> Capabilities:
    """Returns the capabilities whose condition holds."""
    return frozenset(capability for capability, holds in conditions.items() if holds)


@runtime_checkable
class Part(Protocol):
    """A part of a method, with what it needs from the others and what it offers them."""

    @property
    def needs(self) -> Capabilities: ...

    @property
    def offers(self) -> Capabilities: ...


def find_unmet_needs(
    parts: Iterable[tuple[str, Part]], offered: Capabilities = OFFERED_BY_ENGINE
) -> Iterator[str]:
    """Yields an error's text for every need that no part offers and that is not ``offered`` by the
    engine. ``parts`` are given with the words for them, as in "view full"."""
    named = list(parts)
    offered = offered.union(*(part.offers for _, part in named))
    for words, part in named:
        for capability in Capability:
            if capability in part.needs and capability not in offered:
                use = f"; use {capability.choice}" if capability.choice else ""
                yield f"{words} needs {capability.description}{use}"
