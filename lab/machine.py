"""Says in words where numbers were measured."""

from __future__ import annotations

from saccade.engine.trace import environment


def describe_machine(*, on_gpu: bool = False) -> str:
    """Returns the processor with its threads, or the GPU beside it, and torch's version."""
    words = "{gpu} beside {processor}" if on_gpu else "{processor}, {threads} threads"
    return f"{words}, torch {{torch}}".format(**environment())
