"""This library's rows and those of transformers, which live in one environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from lab.peers.rows import A_SECOND, GENERATE, TRAINED, Asked, Turn
from saccade.bench.peers import Peer, hf, hf_assisted, hf_assisted_seeing, hf_lookup
from saccade.core.prompt import Inputs
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask, load, load_pair
from saccade.world import drawing


@dataclass(frozen=True)
class Shown:
    """The embedded pair, and a clip for it."""

    target: Loaded
    draft: Loaded
    clip: Any
    words: str

    def read(self) -> Inputs:
        return ask(self.target, self.words, clips=[self.clip])


@cache
def shown(asked: Asked) -> Shown:
    torch.set_num_threads(asked.threads)
    target, draft = load_pair("shapes", "shapes-draft")
    assert draft is not None
    return Shown(
        target, draft, drawing.make_clip(np.load(asked.frames), asked.seconds), asked.words
    )


def timed(decode: Callable[[Shown, Inputs, int], Turn]) -> Callable[[Asked], Callable[[int], Turn]]:
    """A row: how it decodes from inputs; the processor's time is added."""

    def made(asked: Asked) -> Callable[[int], Turn]:
        own = shown(asked)

        def answer(tokens: int) -> Turn:
            began = time.perf_counter()
            inputs = own.read()
            reading = time.perf_counter() - began
            turn = decode(own, inputs, tokens)
            return replace(turn, first=reading + turn.first, total=reading + turn.total)

        return answer

    return made


def ours(method: str) -> Callable[[Shown, Inputs, int], Turn]:
    def decode(own: Shown, inputs: Inputs, tokens: int) -> Turn:
        result = run(
            own.target.backbone,
            inputs,
            draft=own.draft.backbone,
            method=method,
            tokenizer=own.target.tokenizer,
            max_new_tokens=tokens,
        )
        return Turn(result.ids, result.timings.first_token, result.timings.total)

    return decode


def theirs(peer: Peer) -> Callable[[Shown, Inputs, int], Turn]:
    def decode(own: Shown, inputs: Inputs, tokens: int) -> Turn:
        settings = {"max_new_tokens": tokens, "do_sample": False}
        found = peer(own.target, own.draft, inputs, settings)
        early = len(found.ids) - found.counted or len(found.ids)  # or all came at once
        return Turn(found.ids, found.first, found.total, early)

    return decode


def plain(seconds: Callable[[Asked], float]) -> Callable[[Asked], Callable[[int], Turn]]:
    """Plain decoding at the authors' positions, of a clip of so many seconds: for its ids alone."""

    def made(asked: Asked) -> Callable[[int], Turn]:
        target = load("shapes", positions="trained")
        clip = drawing.make_clip(np.load(asked.frames), seconds(asked))

        def answer(tokens: int) -> Turn:
            inputs = ask(target, asked.words, clips=[clip])
            result = run(target.backbone, inputs, method="ar", max_new_tokens=tokens)
            return Turn(result.ids, result.timings.first_token, result.timings.total)

        return answer

    return made


MADE = {
    "Saccade, `ar`": timed(ours("ar")),
    "Saccade, `auto`": timed(ours("auto")),
    GENERATE: timed(theirs(hf)),
    "transformers, assisted": timed(theirs(hf_assisted)),
    "transformers, assisted, seeing": timed(theirs(hf_assisted_seeing)),
    "transformers, prompt lookup": timed(theirs(hf_lookup)),
    TRAINED: plain(lambda asked: asked.seconds),
    # two frames are one cell of the grid
    A_SECOND: plain(lambda asked: asked.scene[1] / 2),
}
