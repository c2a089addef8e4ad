"""vLLM's rows, in the environment of ``make vllm``: the engines of ``lab vllm``."""

from __future__ import annotations

from collections.abc import Callable

from lab.hardware import inside
from lab.hardware.engines import Engine, Question
from lab.peers.rows import Asked, Turn


def engine(row: str) -> Callable[[Asked], Callable[[int], Turn]]:
    def made(asked: Asked) -> Callable[[int], Turn]:
        standing = Engine(inside.settled(row, 1), 600)
        wave = [Question(asked.words, videos=(asked.scene,))]

        def answer(tokens: int) -> Turn:
            ran = standing.ask([wave], max_tokens=tokens)
            return Turn(tuple(ran.answers[0][0]), ran.seconds[0] - ran.decoding[0], ran.seconds[0])

        return answer

    return made


MADE = {
    "vLLM, eager": engine("vLLM, eager"),
    "vLLM, compiled": engine("vLLM, compiled"),
    "vLLM, our draft": engine("ours"),
    "vLLM, our draft, compiled": engine("ours, compiled"),
}
