"""A target split over several processes (tensor parallelism): what each holds, and agreeing.

transformers splits every layer's projections over the processes of ``torchrun``; each keeps keys
and values of its own heads. All run the same loop over the same logits, which are gathered and so
equal to the bit. Rank 0 decides what could still differ: the drafted trees and what stands of them.
A draft that fails in one process is given up in all; one that no longer answers is told of in time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from saccade.core.capabilities import NOTHING
from saccade.core.errors import ModelError
from saccade.core.protocols import Cut, Drafter, Schedule, Scoring, State
from saccade.core.result import FinishReason, Round
from saccade.core.tree import Tree

T = TypeVar("T")
PATIENCE = 120.0  # seconds the processes wait for each other between forwards


@dataclass(frozen=True)
class Shares:
    """The key heads of every layer, dealt out in order: this process has the ``rank``-th share."""

    rank: int
    count: int

    def every_head(
        self, noted: Float[Tensor, "layer own seen"]
    ) -> Float[Tensor, "layer kv_head seen"]:
        """What was noted per key head, with that of the other processes' heads."""
        if self.count == 1:
            return noted
        parts = [torch.empty_like(noted) for _ in range(self.count)]
        dist.all_gather(parts, noted.contiguous())
        return torch.cat(parts, 1)

    def own_heads(self, chosen: Int[Tensor, "layer kv_head kept"]) -> Int[Tensor, "layer own kept"]:
        """Of what was chosen per key head, this process's part."""
        return chosen.chunk(self.count, 1)[self.rank]


def shares(layer: nn.Module) -> Shares:
    """How a model's layers are split over processes, seen from one of them.

    Raises ModelError where they are split in a way that is not by heads.
    """
    split = {
        name: parameter
        for name, parameter in layer.named_parameters()
        if isinstance(parameter.data, DTensor)
    }
    if not split:
        return Shares(0, 1)
    keys = split.get("self_attn.k_proj.weight")
    mesh = None if keys is None else cast(Any, keys.data).device_mesh
    if mesh is None or mesh.ndim != 1 or mesh.size() != world():
        raise ModelError("this model is split over processes in a way Saccade does not know")
    return Shares(rank(), mesh.size())


def world() -> int:
    """How many processes ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@cache
def _control() -> Any:
    """A group for small objects, which need no GPU."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))


def agreed(mine: T) -> T:
    """Rank 0's value, in every process. Raises ModelError where one does not answer in time."""
    return everyones(mine)[0]


def everyones(mine: T) -> list[T]:
    """The value of every process, by rank. Raises ModelError where one does not answer in time."""
    found = [mine] * world()
    try:
        dist.all_gather_object(found, mine, group=_control())
    except RuntimeError as error:
        raise ModelError(
            f"rank {rank()} waited for the other processes in vain ({PATIENCE:g} s): one has ended "
            "or hangs, and its own output may say why; start all of them again"
        ) from error
    return found


def leave() -> None:
    """Ends the processes' connection, after the last answer."""
    if dist.is_initialized():
        dist.barrier(group=_control())
        dist.destroy_process_group()
        _control.cache_clear()


def together(schedule: Schedule) -> Schedule:
    """A serial schedule whose drafts and whose verdicts are rank 0's in every process."""

    def run(target: Scoring, draft: Drafter, requests: Sequence[int], cut: Cut) -> Iterator[Round]:
        yield from schedule(target, cast(Drafter, _Agreeing(draft)), requests, agreeing(cut))

    return replace(schedule, run=run, offers=NOTHING)


def agreeing(cut: Cut) -> Cut:
    """Where answers end, with rank 0's word in every process of a split target.

    Raises ModelError where a process would have let other tokens stand.
    """

    def judged(request: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        mine = cut(request, tokens)
        first, standing = agreed((tuple(tokens), mine))
        if first != tuple(tokens):
            raise ModelError(
                f"rank {rank()} and rank 0 do not agree on the next tokens: all processes need "
                "the same files, versions and GPUs"
            )
        return standing

    return judged


class _Agreeing:
    """A draft that proposes what rank 0's proposes; all else is each process's own.

    Its failures are everybody's: where one process decodes plainly, the others' drafts would wait
    for it inside the forwards that they share.
    """

    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        plain = dict.fromkeys(states, Tree())
        # asked first too: a self-draft's forwards are shared, and all must begin them or none
        if self._failed(everyones(self._draft.reason)):
            return plain
        mine = self._draft.propose(states)
        laws = [law for tree in mine.values() for law in tree.q if law is not None]
        place = laws[0].device if laws else torch.device("cpu")
        told = _moved(mine, torch.device("cpu")) if rank() == 0 else None
        reasons, trees = zip(*everyones((self._draft.reason, told)), strict=True)
        return plain if self._failed(reasons) else _moved(trees[0], place)

    def _failed(self, reasons: Sequence[str | None]) -> bool:
        """Whether a draft has failed somewhere, and so here."""
        failed = next((place for place, reason in enumerate(reasons) if reason), None)
        if failed is not None and self._draft.reason is None:
            said = f"rank {failed}: {reasons[failed]}"
            self._draft.give_up(said, RuntimeError(said))
        return failed is not None


def _moved(trees: Mapping[int, Tree], place: torch.device) -> dict[int, Tree]:
    """Trees with their laws on a device; any process can read those on a CPU."""
    return {
        request: replace(tree, q=tuple(law if law is None else law.to(place) for law in tree.q))
        for request, tree in trees.items()
    }
