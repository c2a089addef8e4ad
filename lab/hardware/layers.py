"""Times a decoding step with our kernels, with torch's attention and with compiled layers.

A step is one forward of a few new tokens. On a GPU it is captured as a CUDA graph, which replays
all its kernels at once. This module is for a machine with a GPU, because elsewhere nothing is
captured and the times mean nothing. ``python -m lab accept`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from saccade.drafting.shapes import cost_measurement
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes

WARM_UP_STEPS = 3  # Steps before those that are timed.


@dataclass(frozen=True)
class StepVariant:
    """The median time of a captured step of one kind, and how exact its logits are.

    They are compared with those of an ordinary forward: the same model's, not captured.
    """

    kind: str  # "kernels", "torch" or "compiled".
    rows: int  # New tokens of the step.
    context: int  # Cached tokens.
    milliseconds: float
    difference: float  # The largest absolute one of a logit, over the largest ordinary |logit|.


def measure_step_variants(
    model: Backbone,
    context: int,
    rows: Sequence[int] = (1, 4, 16),
    *,
    repeat: int = 15,
    compiler: Callable[[Any], Any] = torch.compile,
) -> Iterator[StepVariant]:
    """Times steps over ``context`` cached tokens, for each number of new tokens in ``rows``.

    Each step is made in every kind, and the median of ``repeat`` steps is taken. The kinds are our
    kernels for few rows where this device has them, torch's attention, and torch's attention with
    the layers compiled as a whole (by ``compiler``).
    """
    kinds = {"torch": _without_kernels(model), "compiled": _with_compiled_layers(model, compiler)}
    if model.few_row_kernels is not None:
        kinds = {"kernels": model, **kinds}
    for count in rows:
        ordinary, _ = _measure_step(model, context, count, repeat=1, cuda_graphs=False)
        largest = float(ordinary.abs().max())
        for name, each in kinds.items():
            logits, seconds = _measure_step(each, context, count, repeat, cuda_graphs=True)
            apart = float((logits - ordinary).abs().max()) / largest
            yield StepVariant(name, count, context, seconds * 1e3, apart)


def _measure_step(
    model: Backbone, context: int, rows: int, repeat: int, *, cuda_graphs: bool
) -> tuple[Tensor, float]:
    """Returns the logits of a step over ``context`` cached tokens, and its median seconds.

    With ``cuda_graphs`` the step is captured before it is timed.
    """
    session = cost_measurement.filled_session(
        model, context, requests=1, room=4 * rows + 64, cuda_graphs=cuda_graphs
    )
    cost_measurement.time_step(session, context, rows)  # After it, this size is to be captured.
    capture_new_sizes()
    seconds = [
        cost_measurement.time_step(session, context, rows) for _ in range(WARM_UP_STEPS + repeat)
    ]
    request = session.requests[0]
    assert request.root_logits is not None
    return torch.stack([request.root_logits, *request.node_logits]).float(), median(
        seconds[WARM_UP_STEPS:]
    )


def _without_kernels(model: Backbone) -> Backbone:
    """Returns the same model with torch's attention in its captured forwards."""
    plain = copy(model)
    plain.few_row_kernels, plain.graphs = None, {}
    return plain


def _with_compiled_layers(model: Backbone, compiler: Callable[[Any], Any]) -> Backbone:
    """Returns the same model without our kernels and with its layers compiled."""
    plain = _without_kernels(model)
    assert plain.fused is not None, "only the fused decoder is captured"
    plain.fused = copy(plain.fused)
    vars(plain.fused)["decode"] = compiler(plain.fused.decode)
    return plain
