"""Runs this library and transformers, which share one environment.

A worker process (``lab.peers.worker``) imports this module and uses ``START_BY_ROW``. A row is a
line of the table of engines, such as "Saccade, `auto`". Starting a row loads its models, and
returns a function that gives one timed answer of at most so many tokens.
"""

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
    """Loads the embedded pair and the task's clip, and sets torch's threads: once for each task."""
    torch.set_num_threads(task.threads)
    target, draft = load_pair("shapes", "shapes-draft")
    assert draft is not None
    return PairWithClip(target, draft, make_clip(np.load(task.frames), task.seconds), task.words)


def with_processor_time(
    decode: Callable[[PairWithClip, Inputs, int], Turn],
) -> Callable[[Task], Callable[[int], Turn]]:
    """Returns the function that starts a row, given how it decodes from the model's inputs.

    The seconds in which transformers' processor makes these inputs are added to those of decoding.
    """

    def start(task: Task) -> Callable[[int], Turn]:
        own = load_task(task)

        def answer(tokens: int) -> Turn:
            began = time.perf_counter()
            inputs = own.make_inputs()
            processing = time.perf_counter() - began
            turn = decode(own, inputs, tokens)
            return replace(turn, first=processing + turn.first, total=processing + turn.total)

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
        # ``decoded_tokens`` leaves out the tokens that came together with the first one. Only where
        # the whole answer came together does it count all of them.
        came_together = answer.decoded_tokens == len(answer.ids)
        early = len(answer.ids) if came_together else len(answer.ids) - answer.decoded_tokens
        return Turn(answer.ids, answer.first_token_seconds, answer.total_seconds, early)

    return decode


def plain_decoding(seconds: Callable[[Task], float]) -> Callable[[Task], Callable[[int], Turn]]:
    """Returns the function that starts plain decoding at other positions than transformers'.

    The positions after a video are those that the models were trained with, and they depend on its
    length. ``seconds`` returns the length that the clip is said to have. Only the ids of these
    answers are used: other engines are compared with them.
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
    # A step of the video's grid has two frames. With this length, each step lasts a second.
    A_SECOND: plain_decoding(lambda task: task.scene[1] / 2),
}
