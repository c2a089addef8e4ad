"""Runs a target that is split over several processes (tensor parallelism), and keeps them in step.

transformers splits every layer's projections over the processes of ``torchrun``. Each process has
the keys and values of its own heads. All run the same loop over the same logits, which are gathered
and therefore equal to the bit. Rank 0 decides what could still differ: the drafted trees, and where
answers end. A draft that fails in one process is given up in all. A process that no longer
answers raises an error in the others after a while.
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

from saccade.core.capabilities import NO_CAPABILITIES
from saccade.core.errors import ModelError
from saccade.core.protocols import Cut, Drafter, Schedule, Scoring, State
from saccade.core.result import FinishReason, Round
from saccade.core.tree import Tree

T = TypeVar("T")
TIMEOUT_SECONDS = 120.0  # How long a process waits for the others between forwards.


@dataclass(frozen=True)
class HeadShares:
    """Which key heads of every layer this process has.

    The heads are split in order into ``count`` equal shares. This process has share ``rank``,
    counted from 0.
    """

    rank: int
    count: int

    def gather_heads(
        self, local_attention: Float[Tensor, "layer local_head visual"]
    ) -> Float[Tensor, "layer kv_head visual"]:
        """Returns the attention of all key heads to the visual tokens, gathered from every
        process."""
        if self.count == 1:
            return local_attention
        parts = [torch.empty_like(local_attention) for _ in range(self.count)]
        dist.all_gather(parts, local_attention.contiguous())
        return torch.cat(parts, 1)

    def own_heads(self, chosen: Int[Tensor, "layer kv_head kept"]) -> Int[Tensor, "layer own kept"]:
        """Returns the part of ``chosen``, which has an entry for every key head, that belongs to
        this process's heads."""
        return chosen.chunk(self.count, 1)[self.rank]


def head_shares(layer: nn.Module) -> HeadShares:
    """Returns how a model's layers are split over processes, as seen from one of its layers.

    Raises ModelError where they are split in a way that is not by heads.
    """
    split = {
        name: parameter
        for name, parameter in layer.named_parameters()
        if isinstance(parameter.data, DTensor)
    }
    if not split:
        return HeadShares(rank=0, count=1)
    keys = split.get("self_attn.k_proj.weight")
    mesh = None if keys is None else cast(Any, keys.data).device_mesh
    if mesh is None or mesh.ndim != 1 or mesh.size() != world_size():
        raise ModelError("this model is split over processes in a way Saccade does not know")
    return HeadShares(rank(), mesh.size())


def world_size() -> int:
    """Returns how many processes ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@cache
def _control_group() -> Any:
    """Returns a process group for small objects, which needs no GPU."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))


def broadcast_from_rank_0(value: T) -> T:
    """Returns rank 0's value in every process.

    Raises ModelError where a process does not answer in time.
    """
    return gather_from_all(value)[0]


def gather_from_all(value: T) -> list[T]:
    """Returns the value of every process, by rank.

    Raises ModelError where a process does not answer in time.
    """
    values = [value] * world_size()
    try:
        dist.all_gather_object(values, value, group=_control_group())
    except RuntimeError as error:
        raise ModelError(
            f"rank {rank()} lost the other processes, or waited {TIMEOUT_SECONDS:g} s for them: "
            "one has ended or hangs, and its own output may say why; start all of them again"
        ) from error
    return values


def disconnect() -> None:
    """Ends the connection between the processes, after the last answer."""
    if dist.is_initialized():
        dist.barrier(group=_control_group())
        dist.destroy_process_group()
        _control_group.cache_clear()


def agree_on_drafts(schedule: Schedule) -> Schedule:
    """Returns a serial schedule, changed so that every process uses rank 0's drafts and ends its
    answers where rank 0 does.

    Each process makes its own verdicts, which must be equal (:func:`agree_on_cut`).
    """

    def run(target: Scoring, draft: Drafter, requests: Sequence[int], cut: Cut) -> Iterator[Round]:
        agreed_draft = cast(Drafter, _AgreedDraft(draft))
        yield from schedule(target, agreed_draft, requests, agree_on_cut(cut))

    # A serial schedule also offers rounds whose forwards several requests share. The server's
    # scheduler makes such rounds itself, without ``run``, so rank 0 would not decide in them.
    return replace(schedule, run=run, offers=NO_CAPABILITIES)


def agree_on_cut(cut: Cut) -> Cut:
    """Returns a function that ends answers where rank 0 does, in every process of a split target.

    A cut takes a request and its new tokens, and returns how many of them the answer keeps, and why
    the answer ends, if it does. Raises ModelError where a process has other new tokens than rank 0.
    """

    def agreed_cut(request: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        local_cut = cut(request, tokens)
        rank_0_tokens, rank_0_cut = broadcast_from_rank_0((tuple(tokens), local_cut))
        if rank_0_tokens != tuple(tokens):
            raise ModelError(
                f"rank {rank()} and rank 0 do not agree on the next tokens: all processes need "
                "the same files, versions and GPUs"
            )
        return rank_0_cut

    return agreed_cut


class _AgreedDraft:
    """A draft that proposes what rank 0's draft proposes; everything else is each process's own.

    A failure in one process ends drafting in all. Where the split target drafts for itself, each of
    the draft's forwards needs all processes, so the others would wait for one that decodes plainly.
    """

    def __init__(self, draft: Any) -> None:
        # A ``Fallback``: its ``reason`` says why drafting was given up, and is None until then.
        self._draft = draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        empty_trees = dict.fromkeys(states, Tree())
        # Failures are exchanged before the draft's forwards too. If the target drafts for itself,
        # either all processes begin these forwards or none.
        if self._has_failed(gather_from_all(self._draft.reason)):
            return empty_trees
        local_trees = self._draft.propose(states)
        laws = [law for tree in local_trees.values() for law in tree.q if law is not None]
        device = laws[0].device if laws else torch.device("cpu")
        # Rank 0 sends its trees, and every process sends why its draft failed, if it did.
        sent = _move_laws(local_trees, torch.device("cpu")) if rank() == 0 else None
        reasons, trees = zip(*gather_from_all((self._draft.reason, sent)), strict=True)
        return empty_trees if self._has_failed(reasons) else _move_laws(trees[0], device)

    def _has_failed(self, reasons: Sequence[str | None]) -> bool:
        """Returns whether a draft has failed in any process; if so, gives up this one's."""
        failed_rank = next((number for number, reason in enumerate(reasons) if reason), None)
        if failed_rank is not None and self._draft.reason is None:
            reason = f"rank {failed_rank}: {reasons[failed_rank]}"
            self._draft.give_up(reason, RuntimeError(reason))
        return failed_rank is not None


def _move_laws(trees: Mapping[int, Tree], device: torch.device) -> dict[int, Tree]:
    """Returns the trees with the draft's distributions on a device.

    They are sent between processes on the CPU, because a GPU tensor is readable in its own process
    only.
    """
    return {
        request: replace(tree, q=tuple(law if law is None else law.to(device) for law in tree.q))
        for request, tree in trees.items()
    }
