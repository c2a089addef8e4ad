"""Runs this library and transformers, which share one environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from lab.peers.rows import A_SECOND, GENERATE, TRAINED, Task, Turn
from saccade.bench.peers import Peer, hf, hf_assisted, hf_assisted_seeing, hf_lookup
from saccade.core.prompt import Inputs
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask, load, load_pair
from saccade.inputs.media.clip import make_clip


@dataclass(frozen=True)
class PairWithClip:
    """The embedded pair, and a clip and words to ask it about."""

    target: Loaded
    draft: Loaded
    clip: Any
    words: str

    def make_inputs(self) -> Inputs:
        """Returns the processor's inputs for the clip and the words."""
        return ask(self.target, self.words, clips=[self.clip])


@cache
def load_task(task: Task) -> PairWithClip:
    """Loads the embedded pair and the task's clip once."""
    torch.set_num_threads(task.threads)
    target, draft = load_pair("shapes", "shapes-draft")
    assert draft is not None
    return PairWithClip(target, draft, make_clip(np.load(task.frames), task.seconds), task.words)


def with_processor_time(
    decode: Callable[[PairWithClip, Inputs, int], Turn],
) -> Callable[[Task], Callable[[int], Turn]]:
    """Returns the function that starts a row, given how it decodes from inputs.

    The processor's time is added to that of decoding.
    """

    def start(task: Task) -> Callable[[int], Turn]:
        own = load_task(task)

        def answer(tokens: int) -> Turn:
            began = time.perf_counter()
            inputs = own.make_inputs()
            reading = time.perf_counter() - began
            turn = decode(own, inputs, tokens)
            return replace(turn, first=reading + turn.first, total=reading + turn.total)

        return answer

    return start


def decode_with_saccade(method: str) -> Callable[[PairWithClip, Inputs, int], Turn]:
    """Returns how a row decodes by a method of this library."""

    def decode(own: PairWithClip, inputs: Inputs, tokens: int) -> Turn:
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


def decode_with_peer(peer: Peer) -> Callable[[PairWithClip, Inputs, int], Turn]:
    """Returns how a row decodes by one of transformers' ways."""

    def decode(own: PairWithClip, inputs: Inputs, tokens: int) -> Turn:
        settings = {"max_new_tokens": tokens, "do_sample": False}
        answer = peer(own.target, own.draft, inputs, settings)
        # A run that counts all its tokens is one whose tokens came all at once.
        early = len(answer.ids) - answer.counted or len(answer.ids)
        return Turn(answer.ids, answer.first, answer.total, early)

    return decode


def plain_decoding(seconds: Callable[[Task], float]) -> Callable[[Task], Callable[[int], Turn]]:
    """Returns the function that starts plain decoding at the positions of the models' training.

    ``seconds`` is the length that the clip is said to have. Only the ids are used.
    """

    def start(task: Task) -> Callable[[int], Turn]:
        target = load("shapes", positions="trained")
        clip = make_clip(np.load(task.frames), seconds(task))

        def answer(tokens: int) -> Turn:
            inputs = ask(target, task.words, clips=[clip])
            result = run(target.backbone, inputs, method="ar", max_new_tokens=tokens)
            return Turn(result.ids, result.timings.first_token, result.timings.total)

        return answer

    return start


START_BY_ROW = {
    "Saccade, `ar`": with_processor_time(decode_with_saccade("ar")),
    "Saccade, `auto`": with_processor_time(decode_with_saccade("auto")),
    GENERATE: with_processor_time(decode_with_peer(hf)),
    "transformers, assisted": with_processor_time(decode_with_peer(hf_assisted)),
    "transformers, assisted, seeing": with_processor_time(decode_with_peer(hf_assisted_seeing)),
    "transformers, prompt lookup": with_processor_time(decode_with_peer(hf_lookup)),
    TRAINED: plain_decoding(lambda task: task.seconds),
    # Two frames are one cell of the grid, so that each cell lasts a second.
    A_SECOND: plain_decoding(lambda task: task.scene[1] / 2),
}
