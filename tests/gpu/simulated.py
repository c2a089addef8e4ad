"""Models on a pretended GPU that take the time of large ones, by a clock of their own.

Nothing waits: a replay, a capture and an ordinary forward move a :class:`FakeClock` on by what the
models of a :class:`Pace` would take, and Saccade's clocks read it. What the host computes takes no
time, so what is measured is the same on every machine and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from saccade.core import timing
from saccade.model import cuda_graphs
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import CudaGraphs


class FakeClock:
    """Seconds that pass only where somebody says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(frozen=True)
class Pace:
    """What a model's forwards take, in seconds."""

    replay: Mapping[int, float]  # of a captured one, by rows at most
    capture: float
    ordinary: float  # sent kernel by kernel: the same however few rows
    a_token: float = 20e-6  # of a prompt, beyond the ordinary forward

    def step(self, rows: int) -> float:
        """Seconds of a captured forward of so many rows."""
        return next(seconds for most, seconds in sorted(self.replay.items()) if rows <= most)


# A 7B in bf16 on an H100 over 12,000 keys, and a draft of 0.5B: 1.9 / 7.0 = 0.27.
TARGET_7B = Pace({1: 7.0e-3, 4: 7.1e-3, 8: 7.2e-3, 16: 7.4e-3, 32: 7.8e-3, 512: 9e-3}, 0.12, 22e-3)
DRAFT_HALF_B = Pace({1: 1.9e-3, 4: 1.9e-3, 16: 2.0e-3, 512: 2.4e-3}, 0.1, 18e-3, 3e-6)


@dataclass
class Simulated:
    """Counts of what a model did."""

    captures: int = 0
    replays: int = 0
    ordinary: int = 0
    rounds: list[float] = field(default_factory=list)


@contextmanager
def simulate(paces: Mapping[Backbone, Pace]) -> Iterator[dict[Backbone, Simulated]]:
    """For the length of a block these models take the time of others, and Saccade's clocks read a
    :class:`FakeClock`. Gives what each model did."""
    clock = FakeClock()
    done = {model: Simulated() for model in paces}
    with patch.object(timing, "time", clock):
        for model, pace in paces.items():
            device = model.device
            real = (
                cuda_graphs.cuda_graph_capture(device)
                if device.type == "cuda"
                else lambda work: work
            )
            model.graphs[model.key_layer_count] = CudaGraphs(
                model, _slow_capture(real, pace, clock, done[model])
            )
            vars(model)["forward"] = _slow_forward(model.forward, pace, clock, done[model])
        try:
            yield done
        finally:
            for model in paces:
                model.graphs.clear()
                del vars(model)["forward"]


def _slow_capture(
    real: cuda_graphs.Capture, pace: Pace, clock: FakeClock, done: Simulated
) -> cuda_graphs.Capture:
    def capture(work: cuda_graphs.Forward) -> cuda_graphs.Forward:
        done.captures += 1
        clock.pass_by(pace.capture)
        again = real(work)

        def replay() -> Any:
            done.replays += 1
            out = again()
            clock.pass_by(pace.step(out.shape[0]))
            return out

        return replay

    return capture


def _slow_forward(
    real: Callable[..., Any], pace: Pace, clock: FakeClock, done: Simulated
) -> Callable[..., Any]:
    def forward(embeds: Any, *rest: Any, **named: Any) -> Any:
        done.ordinary += 1
        clock.pass_by(pace.ordinary + pace.a_token * embeds.shape[0])
        return real(embeds, *rest, **named)

    return forward
