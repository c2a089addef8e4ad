"""The embedded pair and clips it was never trained on: what every study measures with.

Acceptance by a chain follows exactly from where, along the target's own greedy answer, the draft's
arg-max is the target's token: one forward of the draft a view, instead of a run of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.captions import SHAPES, captioner
from saccade.engine import run
from saccade.media import Clip
from saccade.models import Loaded, ask, load
from saccade.shapes import agreement
from saccade.systems import resolve
from saccade.types import Inputs, Prefill, Result, RoundRecord

DRAFTS = {"never saw pruning": "shapes-draft-naive", "trained on pruned video": "shapes-draft"}
GAMMA = 5  # of the chain a tau is computed for


@dataclass(frozen=True)
class Shot:
    """One clip, and what the target makes of it."""

    number: int
    clip: Clip
    inputs: Inputs
    guide: Prefill  # with its attention recorded
    ids: tuple[int, ...]  # its greedy answer


@dataclass
class Lab:
    """The first ``clips`` unseen clips of ``size`` visual tokens, answers of ``tokens`` at most."""

    clips: int = 4
    size: int = 2048
    tokens: int = 128
    tell: Callable[[str], None] = lambda text: None
    target: Loaded = field(default_factory=lambda: load("shapes"))
    _shot: Shot | None = None

    @cached_property
    def drafts(self) -> Mapping[str, Loaded]:
        """The one that never saw pruning first: the fair one for comparing views."""
        return {what: load(name) for what, name in DRAFTS.items()}

    @cached_property
    def draft(self) -> Loaded:
        return load("shapes-draft")

    def inputs(self, number: int, size: int | None = None) -> tuple[Clip, Inputs]:
        """A clip, of the lab's size or another, and the question put to the target."""
        _, clip, question = agreement.held_out(number, size or self.size)
        return clip, ask(self.target, question, clips=[clip])

    def run(
        self,
        method: str,
        number: int = 0,
        *,
        size: int | None = None,
        draft: Loaded | None = None,
        **settings: Any,
    ) -> Result:
        """One greedy answer. A draft that gave up would make a wrong picture: an error."""
        self.tell(f"{method}, clip {number + 1} of {self.clips}")
        clip, inputs = self.inputs(number, size)
        found = run(
            self.target.backbone,
            inputs,
            draft=(draft or self.draft).backbone,
            method=method,
            tokenizer=self.target.tokenizer,
            captioner=captioner(SHAPES, list(clip.frames)),
            **{"max_new_tokens": self.tokens, "do_sample": False, **settings},
        )
        if found.fallback_reason is not None:
            raise RuntimeError(f"{method}: {found.fallback_reason}")
        return found

    def rounds(self, method: str, number: int = 0) -> Sequence[RoundRecord]:
        return self.run(method, number).rounds

    def tau(self, method: str) -> float:
        """The mean over the clips."""
        rounds = [self.rounds(method, number) for number in range(self.clips)]
        return mean(mean(len(round.emitted) for round in own) for own in rounds)

    def taus(self, *methods: str) -> dict[str, float]:
        return {method: self.tau(method) for method in methods}

    def shot(self, number: int) -> Shot:
        """What the target makes of a clip; the last one asked for is kept."""
        if self._shot is None or self._shot.number != number:
            self.tell(f"the target reads clip {number + 1} of {self.clips}")
            clip, inputs = self.inputs(number)
            backbone = self.target.backbone
            answer = run(
                backbone, inputs, method="ar", max_new_tokens=self.tokens, do_sample=False
            ).ids
            guide = agreement.guided(backbone, inputs)
            self._shot = Shot(number, clip, inputs, guide, answer)
        return self._shot

    def along(self, shot: Shot, view: str, draft: Loaded) -> Float[Tensor, "answer vocab"]:
        """The draft's logits at every place of the target's answer, under a view by name."""
        chosen = resolve(f"sd/view={view}").view
        return agreement.along(draft, self.target, shot.guide, chosen, shot.ids)

    def agrees(self, shot: Shot, view: str, draft: Loaded) -> list[bool]:
        return agreement.agrees(draft, self.target, shot.guide, view, shot.ids)

    def by_view(self, views: Sequence[str], draft: Loaded) -> dict[str, list[float]]:
        """Tau of a greedy chain of five under each view (``specvlm/keep=0.1``), clip by clip."""
        found: dict[str, list[float]] = {view: [] for view in views}
        for number in range(self.clips):
            shot = self.shot(number)
            for view in views:
                found[view].append(agreement.tau(self.agrees(shot, view, draft), GAMMA))
        return found


def interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % bootstrap interval over clips."""
    found = measures.interval(values, np.mean)
    assert found is not None, "no clips"
    return found
