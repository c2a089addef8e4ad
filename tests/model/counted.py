"""Captures on a CPU that count themselves."""

from __future__ import annotations

import torch

from saccade.model.cuda_graphs import Forward


class Counted:
    """A capture as CUDA graphs are: made once a size, then repeated on the memory seen then."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Forward) -> Forward:
        self.captures += 1
        work()  # the warm-up runs for real

        def replay() -> torch.Tensor:
            self.replays += 1
            return work()

        return replay
