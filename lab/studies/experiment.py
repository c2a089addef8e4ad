"""Runs methods on clips that the embedded pair was never trained on. Every study uses this.

The embedded pair is the small target and drafts that come with this package. Where a study compares
many views, the tau of a chain is computed rather than run (``taus_by_view``). One forward of the
draft over the target's own greedy answer shows at which places the draft's arg-max is the target's
token. From these places follows exactly how many tokens of every chain would be accepted.
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
from saccade.bench.comparison import WARM_UP_TOKENS
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
CHAIN_LENGTH = 5  # Of the chain whose tau is computed.
RANDOM_DRAWS = 5  # Draws of a random view, for each clip.
TAU = "tau (tokens per target forward)"


@dataclass(frozen=True)
class AnsweredClip:
    """One clip with the target's prefill and its greedy answer."""

    number: int
    clip: Clip
    inputs: Inputs
    guide: Prefill  # The target's, with the attention recorded.
    ids: tuple[int, ...]  # The greedy answer.


@dataclass
class Experiment:
    """The embedded pair, and the first ``clips`` unseen clips of ``size`` visual tokens.

    Answers have ``tokens`` tokens at most.
    """

    clips: int = 4
    size: int = 2048
    tokens: int = 128
    on_progress: Callable[[str], None] = lambda text: None
    target: Loaded = field(default_factory=lambda: load("shapes"))
    # Answered clips by (number, size, tokens), which the experiments of several studies may share.
    shared_clips: dict[tuple[int, int, int], AnsweredClip] | None = None
    _last_clip: AnsweredClip | None = None

    @cached_property
    def drafts(self) -> Mapping[str, Loaded]:
        """The drafts by what they were trained on.

        The one that never saw pruning comes first, because it is the fair one for comparing views.
        """
        return {what: load(name) for what, name in DRAFTS.items()}

    @cached_property
    def draft(self) -> Loaded:
        """The draft of every run that is given no other: the one trained on pruned video."""
        return load("shapes-draft")

    def inputs(self, number: int, size: int | None = None) -> tuple[Clip, Inputs]:
        """Returns a clip and the inputs of its question, of the experiment's size or another."""
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
        """Runs a method on one clip and returns its greedy answer.

        Raises RuntimeError where drafting fell back to plain decoding, because the figure would be
        wrong.
        """
        self.on_progress(f"{method}, clip {number + 1} of {self.clips}")
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
        """Runs a method on any question about a clip. Raises RuntimeError as ``run`` does."""
        result = run(
            self.target.backbone,
            inputs,
            draft=(draft or self.draft).backbone,
            method=method,
            tokenizer=self.target.tokenizer,
            captioner=captioner(SHAPES, [list(clip.frames)]),
            **{"max_new_tokens": self.tokens, "do_sample": False, **settings},
        )
        if result.fallback_reason is not None:
            raise RuntimeError(f"{method}: {result.fallback_reason}")
        return result

    def run_interleaved(
        self, *methods: str, size: int | None = None, **settings: Any
    ) -> dict[str, list[Answer]]:
        """Answers each clip by every method or peer in turn, so that their seconds can be compared.

        A short run of each method comes first and is not counted. The methods rotate, so that
        another one begins on every clip.
        """
        answers: dict[str, list[Answer]] = {method: [] for method in methods}
        warm_up_settings = {**settings, "max_new_tokens": WARM_UP_TOKENS}
        for number in range(self.clips):
            clip, inputs = self.inputs(number, size)
            for method in methods if number == 0 else ():
                self.on_progress(f"{method}, a short run")
                self._run_timed(method, clip, inputs, warm_up_settings)
            first = number % len(methods)
            for method in (*methods[first:], *methods[:first]):
                self.on_progress(f"{method}, clip {number + 1} of {self.clips}")
                own = self._run_timed(method, clip, inputs, settings)
                answers[method].append(replace(own, item=str(number)))
        return answers

    def _run_timed(
        self, method: str, clip: Clip, inputs: Inputs, settings: dict[str, Any]
    ) -> Answer:
        blank = Answer(suite="shapes", item="", turn=0, method=method)
        if method not in PEERS:
            return replace(
                blank, **records.result_fields(self.answer(method, clip, inputs, **settings))
            )
        settings = {"max_new_tokens": self.tokens, "do_sample": False, **settings}
        timed = PEERS[method](self.target, self.draft, inputs, settings)
        return replace(blank, **records.peer_fields(timed))

    def rounds(self, method: str, number: int = 0) -> Sequence[RoundRecord]:
        """Runs a method on one clip and returns its rounds."""
        return self.run(method, number).forwards

    def tau_by_clip(self, method: str, draft: Loaded | None = None) -> list[float]:
        """Returns the tau of every clip's answer."""
        runs = (self.run(method, number, draft=draft) for number in range(self.clips))
        return [run.tau or 0.0 for run in runs]

    def mean_tau(self, method: str) -> float:
        """Returns the mean tau over the clips."""
        return mean(self.tau_by_clip(method))

    def mean_taus(self, *methods: str) -> dict[str, float]:
        return {method: self.mean_tau(method) for method in methods}

    def answered_clip(self, number: int) -> AnsweredClip:
        """Returns a clip with the target's prefill and answer.

        The last one is stored, or every one where ``shared_clips`` is given.
        """
        if self.shared_clips is not None:
            key = (number, self.size, self.tokens)
            if key not in self.shared_clips:
                self.shared_clips[key] = self._answer_clip(number)
            return self.shared_clips[key]
        if self._last_clip is None or self._last_clip.number != number:
            self._last_clip = self._answer_clip(number)
        return self._last_clip

    def _answer_clip(self, number: int) -> AnsweredClip:
        self.on_progress(f"the target reads clip {number + 1} of {self.clips}")
        return self.answer_clip(number, *self.inputs(number))

    def answer_clip(self, number: int, clip: Clip, inputs: Inputs) -> AnsweredClip:
        """Prefills and answers any question about a clip."""
        guide = agreement.prefill_with_attention(self.target.backbone, inputs)
        # The view ``text`` puts a newline in the place of a video.
        newline = self.target.tokenizer.encode("\n", add_special_tokens=False)
        guide = replace(guide, replacement_texts={"newline": (tuple(newline),)})
        return AnsweredClip(number, clip, inputs, guide, self.answer("ar", clip, inputs).ids)

    def draft_logits(
        self, clip: AnsweredClip, view: str, draft: Loaded
    ) -> Float[Tensor, "answer vocab"]:
        """Returns the draft's logits at every place of the target's answer, under a named view."""
        resolved_view = resolve(f"sd/view={view}").view
        return agreement.draft_logits(draft, self.target, clip.guide, resolved_view, clip.ids)

    def draft_agreement(self, clip: AnsweredClip, view: str, draft: Loaded) -> list[bool]:
        """Returns for each token of the target's answer whether the draft's arg-max is that token.

        The draft sees the clip under the named view.
        """
        return agreement.agreeing_tokens(draft, self.target, clip.guide, view, clip.ids)

    def taus_by_view(
        self, views: Sequence[str], draft: Loaded, first: int = 0
    ) -> dict[str, list[float]]:
        """Returns the tau of a greedy chain of five under each view, clip by clip.

        The clips are as many as the experiment has, from number ``first`` on. A view is given by
        its name and axes (``specvlm/keep=0.1``). The random view has the mean tau of
        ``RANDOM_DRAWS`` draws for each clip, where its name has axes (``random/keep=0.1``).
        """
        taus: dict[str, list[float]] = {view: [] for view in views}
        for number in range(first, first + self.clips):
            clip = self.answered_clip(number)
            for view in views:
                agreements = (self.draft_agreement(clip, way, draft) for way in _random_draws(view))
                taus[view].append(mean(agreement.tau(own, CHAIN_LENGTH) for own in agreements))
        return taus


def _random_draws(view: str) -> list[str]:
    """Returns the names of a random view's draws. Of any other view it returns the name alone."""
    if not view.startswith("random/"):
        return [view]
    return [f"{view}/draw={number}" for number in range(RANDOM_DRAWS)]


def interval_over_clips(
    values: Sequence[float], figure: Callable[..., np.ndarray] = np.mean
) -> Interval:
    """Returns the mean (or another figure) with its 95 % bootstrap interval over clips."""
    interval = measures.interval(values, figure)
    assert interval is not None, "no clips"
    return interval


def rounded_taus(taus: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Returns taus clip by clip, rounded for a figure's JSON.

    The claims compare methods and views on the same clips by these lists.
    """
    return {name: [round(tau, 4) for tau in own] for name, own in taus.items()}
