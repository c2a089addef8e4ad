"""Keeps the caller's default device out of what Saccade computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """In this scope tensors that name no device are made on the CPU.

    A notebook may have called ``torch.set_default_device``. Saccade names the device of what
    belongs on a GPU; masks, ids and random numbers that belong on the host name none.
    """
    if torch.get_default_device().type == "cpu":
        yield
    else:
        with torch.device("cpu"):
            yield
