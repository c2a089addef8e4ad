"""What a captured step takes with our kernels, in torch's own words, and by ``torch.compile``.

For a machine with a GPU: elsewhere nothing is captured, and the times mean nothing. An acceptance
calls :func:`rivals` and writes down what it yields.
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

WARMUP = 3  # steps before those that are timed


@dataclass(frozen=True)
class Rival:
    """The median time of a captured step of one kind, against an ordinary forward's numbers."""

    kind: str  # "kernels", "torch" or "compiled"
    rows: int
    context: int
    milliseconds: float
    difference: float  # of its logits from an ordinary forward's, as a share of the largest


def rivals(
    model: Backbone,
    context: int,
    rows: Sequence[int] = (1, 4, 16),
    *,
    repeat: int = 15,
    compiler: Callable[[Any], Any] = torch.compile,
) -> Iterator[Rival]:
    """Times steps of ``rows`` new tokens over ``context`` cached ones: by the kernels of few rows
    where this device has them, by torch, and by torch with the layers compiled as a whole."""
    kinds = {"torch": _without_kernels(model), "compiled": _compiled(model, compiler)}
    if model.few_row_kernels is not None:
        kinds = {"kernels": model, **kinds}
    for count in rows:
        ordinary, _ = _measured(model, context, count, 1, cuda_graphs=False)
        largest = float(ordinary.abs().max())
        for name, each in kinds.items():
            logits, seconds = _measured(each, context, count, repeat, cuda_graphs=True)
            apart = float((logits - ordinary).abs().max()) / largest
            yield Rival(name, count, context, seconds * 1e3, apart)


def _measured(
    model: Backbone, context: int, rows: int, repeat: int, *, cuda_graphs: bool
) -> tuple[Tensor, float]:
    """The logits of a step, and its median time in seconds once it is captured."""
    session = cost_measurement.filled_session(
        model, context, 1, 4 * rows + 64, cuda_graphs=cuda_graphs
    )
    cost_measurement.time_step(session, context, rows)
    capture_new_sizes()
    took = [cost_measurement.time_step(session, context, rows) for _ in range(WARMUP + repeat)][
        WARMUP:
    ]
    request = session.requests[0]
    assert request.root_logits is not None
    return torch.stack([request.root_logits, *request.node_logits]).float(), median(took)


def _without_kernels(model: Backbone) -> Backbone:
    """The same model, whose captured forwards attend as torch does."""
    plain = copy(model)
    plain.few_row_kernels, plain.graphs = None, {}
    return plain


def _compiled(model: Backbone, compiler: Callable[[Any], Any]) -> Backbone:
    """The same without our kernels, its layers compiled."""
    plain = _without_kernels(model)
    assert plain.fused is not None, "only the fused decoder is captured"
    plain.fused = copy(plain.fused)
    vars(plain.fused)["decode"] = compiler(plain.fused.decode)
    return plain
