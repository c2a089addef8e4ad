"""Sparse-to-Dense: A Free Lunch for Lossless Acceleration of Video Understanding in LLMs.

Zhang, Du et al., 2025. The target drafts for itself. Per layer and KV head it reads all text keys,
and only those K visual keys that its text attends to most. The visual keys are chosen at prefill
(Sec. 3), for a text of m_t tokens:

    K_{l,h} = the K visual keys j with the largest  sum_g mean_i A_{l,g}[i, j]
    m_t + K = 1024,  gamma = 9

i are the text queries, and g the query heads that share the KV head h in layer l.

By these numbers the draft would read the whole of a video that has at most 1024 - m_t tokens. For
such a video K is an eighth of its tokens instead. ``keys=N`` puts N in the place of 1024, and then
a video that fits is read whole. The baselines of Table 1 are ``streaming`` (attention sinks and a
window, m_t + K keys in all) and ``layerskip``, without tuning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.errors import MethodError
from saccade.core.prompt import Prefill, Prompt, Reading
from saccade.core.protocols import KeyUpdates, Refresh, View
from saccade.drafting.drafters import EarlyExit, SelfDrafter
from saccade.drafting.provides import Provides, Setting, parse_whole
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views import saliency

TOTAL_KEYS = 1024  # m_t + K
GAMMA = 9  # Tokens of a draft.
SINKS = 4  # First tokens of the prompt that ``Streaming`` keeps.
SHORT_VIDEO_DIVISOR = 8  # Short videos keep one visual token in eight.


def visual_budget(prompt: Prompt, keep: float | None, keys: int | None = None) -> int:
    """Returns K, the number of visual keys that a draft reads.

    Without a video it is 0. With ``keep`` it is that share of the video. With ``keys`` it is
    ``keys`` minus the text tokens, but no more than the video has. With neither it is the paper's
    1024 - m_t, or an eighth of the video if the whole video would fit into that.

    Raises MethodError where the text leaves no keys.
    """
    if keep is not None or not prompt.visual_tokens:
        return saliency.budget(prompt.visual_tokens, keep or 0)
    text = len(prompt) - prompt.visual_tokens
    total = keys or TOTAL_KEYS
    if text >= total:
        raise MethodError(
            f"the text has {text} tokens, and text and video keys together are to be {total}: use "
            f"keys={text + TOTAL_KEYS}, or keep=0.1 for a share of the video"
        )
    if keys is None and prompt.visual_tokens <= total - text:
        return max(1, prompt.visual_tokens // SHORT_VIDEO_DIVISOR)
    return min(prompt.visual_tokens, total - text)


def largest_places(mass: Float[Tensor, "*heads seen"], count: int) -> Int[Tensor, "*heads count"]:
    """Returns the places of the ``count`` largest values, ascending. Of equal values the first win.

    A sort would take five times as long. A view that chooses its keys again, such as ``fresh``,
    does this in every round.
    """
    least = mass.topk(count).values[..., -1:]
    above = mass > least
    equal = mass == least
    # The values equal to the least one fill the places that larger values leave, from the left.
    ties_taken = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= ties_taken))
    return chosen.nonzero()[:, -1].view(*mass.shape[:-1], count)


@dataclass(frozen=True)
class Budgeted(View):
    """A view of K visual keys: see ``visual_budget``."""

    name: str = ""
    keep: float | None = None
    keys: int | None = None  # of text and video together

    def budget(self, prompt: Prompt) -> int:
        return visual_budget(prompt, self.keep, self.keys)


@dataclass(frozen=True)
class PerHead(Budgeted):
    """A view of all text keys and, per layer and KV head, of the most attended visual keys."""

    name: str = "per-head"
    refresh: Refresh | None = None  # When keys are chosen again in an answer; None means never.

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability.ATTENTION, Capability.TARGET_KEYS})

    @property
    def key_updates(self) -> KeyUpdates:
        return KeyUpdates(refresh=self.refresh)

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        assert prefill.mass is not None, "the view asked for the text's attention"
        # ``chosen`` numbers the visual tokens alone, from 0 on. ``prompt.places`` turns these
        # numbers, and the rows of text, into places in the whole prompt.
        chosen = largest_places(prefill.mass, self.budget(prompt))  # [layer, kv_head, kept]
        visual = prompt.places[prompt.visual][chosen]
        text = prompt.places[~prompt.visual].expand(*visual.shape[:2], -1)
        rows = torch.cat([text, visual], -1).sort(-1).values
        return replace(prompt, reading=Reading(heads=rows))


@dataclass(frozen=True)
class Streaming(Budgeted):
    """A view of the prompt's first tokens (attention sinks) and of its last ones, as many in all as
    ``PerHead`` keeps."""

    name: str = "streaming"
    # If this is a number, the draft always reads so many first tokens of the prompt. The window
    # after them slides: as the answer grows, the window's oldest tokens of the prompt are dropped.
    # If it is None, there are ``SINKS`` first tokens, and the window does not slide: no token is
    # dropped.
    sinks: int | None = SINKS

    @property
    def key_updates(self) -> KeyUpdates:
        return KeyUpdates(sinks=self.sinks)

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        count = len(prompt) - prompt.visual_tokens + self.budget(prompt)
        row = torch.arange(len(prompt), device=prompt.visual.device)
        sinks = SINKS if self.sinks is None else self.sinks
        window_start = len(prompt) - (count - sinks)
        return prompt.keep_rows((row < sinks) | (row >= window_start))


STD = Recipe(
    name="std",
    about="Sparse-to-Dense: the target drafts on each head's own most attended visual keys",
    drafter=SelfDrafter,
    view=PerHead(),
    shape=Chain(GAMMA),
)

STREAMING = replace(
    STD,
    name="streaming",
    about="the target drafts on attention sinks and a window of recent tokens",
    view=Streaming(),
    study="each draft step reads all of the target's weights",
)

LAYERSKIP = Recipe(
    name="layerskip",
    about="the target's first half drafts for the whole, without tuning",
    drafter=EarlyExit,
    shape=Chain(GAMMA),
    study="each draft step reads half of the target's weights, and most drafts are rejected",
)


@dataclass(frozen=True)
class KeysSetting(Setting):
    """Sets how many keys of text and video together a draft reads.

    It cannot be combined with ``keep``, which sets the number of visual keys as a share.
    """

    def write(self, owner: Budgeted, value: int) -> Budgeted:
        if owner.keep is not None:
            raise MethodError("keys and keep both say how much is kept: give one of them")
        return replace(owner, keys=value)


KEYS = KeysSetting(
    axis="keys",
    owner=Budgeted,
    field="keys",
    parse=parse_whole,
    choices="text and video keys together, as in 1024",
    unmet_message="needs view=per-head, streaming or pages",
)

PROVIDES = Provides(
    recipes=(STD, STREAMING, LAYERSKIP),
    views=(PerHead(), Streaming(), Streaming("streaming-still", sinks=None)),
    axes={"keys": KEYS},
)
