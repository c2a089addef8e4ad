"""Runs the engines of ``python -m lab vllm`` in the environment of ``make vllm``."""

from __future__ import annotations

from collections.abc import Callable

from lab.hardware import vllm_comparison
from lab.hardware.vllm_engines import Engine, Question
from lab.peers.rows import Task, Turn


def engine_row(row: str) -> Callable[[Task], Callable[[int], Turn]]:
    """Returns the function that starts the engine of a row of ``python -m lab vllm``.

    Its time to the first token is that of the whole answer, less that between first and last token.
    """

    def start(task: Task) -> Callable[[int], Turn]:
        engine = Engine(vllm_comparison.engine_setup(row, most=1), timeout=600)
        wave = [Question(task.words, videos=(task.scene,))]

        def answer(tokens: int) -> Turn:
            results = engine.ask([wave], max_tokens=tokens)
            return Turn(
                tuple(results.answers[0][0]),
                results.seconds[0] - results.decoding[0],
                results.seconds[0],
            )

        return answer

    return start


START_BY_ROW = {
    "vLLM, eager": engine_row("vLLM, eager"),
    "vLLM, compiled": engine_row("vLLM, compiled"),
    "vLLM, our draft": engine_row("ours"),
    "vLLM, our draft, compiled": engine_row("ours, compiled"),
}
