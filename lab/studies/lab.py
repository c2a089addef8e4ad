"""The embedded pair and clips it was never trained on: what every study measures with.

Acceptance by a chain follows exactly from where, along the target's own greedy answer, the draft's
arg-max is the target's token: one forward of the draft a view, instead of a run of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lab.training import agreement
from saccade.bench import measures, records
from saccade.bench.compare import WARM_UP_TOKENS
from saccade.bench.measures import Interval
from saccade.bench.peers import PEERS
from saccade.bench.records import Answer
from saccade.core.prompt import Inputs, Prefill
from saccade.core.result import Result, RoundRecord
from saccade.drafting.recipe import Recipe
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask, load
from saccade.inputs.captions import SHAPES, captioner
from saccade.inputs.media import Clip
from saccade.methods import resolve

DRAFTS = {"never saw pruning": "shapes-draft-naive", "trained on pruned video": "shapes-draft"}
GAMMA = 5  # of the chain a tau is computed for
DRAWS = 5  # at random, a clip
TAU = "tau (tokens per target forward)"


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
    album: dict[tuple[int, int, int], Shot] | None = None  # shared by the labs of many studies
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
        _, clip, question = agreement.unseen_clip(number, size or self.size)
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
        """One greedy answer about a clip. A draft that gave up is an error: a wrong picture."""
        self.tell(f"{method}, clip {number + 1} of {self.clips}")
        return self.answer(method, *self.inputs(number, size), draft=draft, **settings)

    def answer(
        self,
        method: str | Recipe,
        clip: Clip,
        inputs: Inputs,
        *,
        draft: Loaded | None = None,
        **settings: Any,
    ) -> Result:
        """The same to any question about a clip."""
        found = run(
            self.target.backbone,
            inputs,
            draft=(draft or self.draft).backbone,
            method=method,
            tokenizer=self.target.tokenizer,
            captioner=captioner(SHAPES, [list(clip.frames)]),
            **{"max_new_tokens": self.tokens, "do_sample": False, **settings},
        )
        if found.fallback_reason is not None:
            raise RuntimeError(f"{method}: {found.fallback_reason}")
        return found

    def race(
        self, *methods: str, size: int | None = None, **settings: Any
    ) -> dict[str, list[Answer]]:
        """Each clip answered by every method, or peer, in turn: for their seconds.

        A short run of each comes first and is not counted; then another begins every clip.
        """
        found: dict[str, list[Answer]] = {method: [] for method in methods}
        short = {**settings, "max_new_tokens": WARM_UP_TOKENS}
        for number in range(self.clips):
            clip, inputs = self.inputs(number, size)
            for method in methods if not number else ():
                self.tell(f"{method}, a short run")
                self._timed(method, clip, inputs, short)
            turn = number % len(methods)
            for method in (*methods[turn:], *methods[:turn]):
                self.tell(f"{method}, clip {number + 1} of {self.clips}")
                own = self._timed(method, clip, inputs, settings)
                found[method].append(replace(own, item=str(number)))
        return found

    def _timed(self, method: str, clip: Clip, inputs: Inputs, settings: dict[str, Any]) -> Answer:
        blank = Answer("shapes", "", 0, method)
        if method not in PEERS:
            return replace(
                blank, **records.result_fields(self.answer(method, clip, inputs, **settings))
            )
        settings = {"max_new_tokens": self.tokens, "do_sample": False, **settings}
        timed = PEERS[method](self.target, self.draft, inputs, settings)
        return replace(blank, **records.peer_fields(timed))

    def rounds(self, method: str, number: int = 0) -> Sequence[RoundRecord]:
        return self.run(method, number).forwards

    def by_clip(self, method: str, draft: Loaded | None = None) -> list[float]:
        """Tau of every clip's answer."""
        runs = (self.run(method, number, draft=draft) for number in range(self.clips))
        return [run.tau or 0.0 for run in runs]

    def tau(self, method: str) -> float:
        """The mean over the clips."""
        return mean(self.by_clip(method))

    def taus(self, *methods: str) -> dict[str, float]:
        return {method: self.tau(method) for method in methods}

    def shot(self, number: int) -> Shot:
        """What the target makes of a clip; the last one asked for is kept, or all (``album``)."""
        if self.album is not None:
            key = (number, self.size, self.tokens)
            if key not in self.album:
                self.album[key] = self._look(number)
            return self.album[key]
        if self._shot is None or self._shot.number != number:
            self._shot = self._look(number)
        return self._shot

    def _look(self, number: int) -> Shot:
        self.tell(f"the target reads clip {number + 1} of {self.clips}")
        return self.look(number, *self.inputs(number))

    def look(self, number: int, clip: Clip, inputs: Inputs) -> Shot:
        """What the target makes of any question about a clip."""
        guide = agreement.prefill_with_attention(self.target.backbone, inputs)
        newline = self.target.tokenizer.encode("\n", add_special_tokens=False)
        guide = replace(guide, words={"newline": (tuple(newline),)})  # for the view ``text``
        return Shot(number, clip, inputs, guide, self.answer("ar", clip, inputs).ids)

    def along(self, shot: Shot, view: str, draft: Loaded) -> Float[Tensor, "answer vocab"]:
        """The draft's logits at every place of the target's answer, under a view by name."""
        chosen = resolve(f"sd/view={view}").view
        return agreement.draft_logits(draft, self.target, shot.guide, chosen, shot.ids)

    def agrees(self, shot: Shot, view: str, draft: Loaded) -> list[bool]:
        return agreement.agreeing_tokens(draft, self.target, shot.guide, view, shot.ids)

    def by_view(
        self, views: Sequence[str], draft: Loaded, first: int = 0
    ) -> dict[str, list[float]]:
        """Tau of a greedy chain of five under each view (``specvlm/keep=0.1``), clip by clip, from
        clip ``first`` on; at random the mean of ``DRAWS``."""
        found: dict[str, list[float]] = {view: [] for view in views}
        for number in range(first, first + self.clips):
            shot = self.shot(number)
            for view in views:
                agrees = (self.agrees(shot, way, draft) for way in _draws(view))
                found[view].append(mean(agreement.tau(own, GAMMA) for own in agrees))
        return found


def _draws(view: str) -> list[str]:
    if not view.startswith("random/"):
        return [view]
    return [f"{view}/draw={number}" for number in range(DRAWS)]


def interval(values: Sequence[float], figure: Callable[..., np.ndarray] = np.mean) -> Interval:
    """The mean (or the median) with its 95 % bootstrap interval over clips."""
    found = measures.interval(values, figure)
    assert found is not None, "no clips"
    return found


def rounded(taus: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Clip by clip, for comparing views on the same clips."""
    return {name: [round(tau, 4) for tau in own] for name, own in taus.items()}
