"""What every process of ``test_tensor_parallel.py`` runs, alone or under torchrun: answers as JSON.

    python split.py OUT TARGET DRAFT METHOD ...

Writes OUT.<rank>.json: the ids of every method's answer, and what the prefill recorded.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from families import zoo

import saccade
from saccade import inputs as models
from saccade.core.errors import ModelError
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.drafters import SelfDrafter
from saccade.drafting.fallback import Fallback
from saccade.drafting.recipe import for_split_target
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.model import tensor_parallel
from saccade.model.session import Session

COUNT = 24
SAMPLED = "sd/shape=chain-3"


def answer(target: Loaded, draft: Loaded, inputs: Inputs, method: str, **more: Any) -> Any:
    recipe = resolve(method)
    result = saccade.run(
        target.backbone,
        inputs,
        draft=draft.backbone,
        method=recipe if tensor_parallel.world_size() == 1 else for_split_target(recipe),
        max_new_tokens=COUNT,
        **{"do_sample": False, **more},
    )
    assert result.fallback_reason is None, result.fallback_reason
    return {"ids": result.ids, "rounds": len(result.rounds)}


def main(out: str, folder: str, drafter: str, *methods: str) -> None:
    torch.set_num_threads(1)
    alone = tensor_parallel.world_size() == 1
    target = models.load(folder, tp=not alone, fused=False if alone else None)
    draft = models.load(drafter)
    inputs = zoo.make_inputs(target, "video", 1)
    report: dict[str, Any] = {
        name: answer(target, draft, inputs, name, tokenizer=target.tokenizer) for name in methods
    }
    report["sampled"] = answer(target, draft, inputs, SAMPLED, do_sample=True, seed=5)
    session = Session(target.backbone, [Sampling()])
    (prefill,) = session.prefill(target.backbone.prompts(inputs), record=True)
    assert prefill.mass is not None and prefill.cache is not None
    report["mass"] = prefill.mass.tolist()
    report["heads"] = len(prefill.cache.keys[0])
    report["fused"] = target.backbone.fused is not None
    if not alone:
        report["odd draft"] = odd_draft(target, draft, inputs)
        report["failed draft"] = failed_draft(target, draft, inputs)
        report["failed view"] = failed_self(target, inputs, "ready")
        report["failed commit"] = failed_self(target, inputs, "commit")
        report["odd verdict"] = odd_verdict(target, draft, inputs)
    Path(f"{out}.{tensor_parallel.rank()}.json").write_text(json.dumps(report))
    tensor_parallel.disconnect()


def odd_draft(target: Loaded, draft: Loaded, inputs: Inputs) -> Any:
    """The answer where every process but rank 0 drafts nonsense, of another length."""
    propose = Fallback.propose

    def nonsense(self: Fallback, states: Any) -> dict[int, Tree]:
        trees = propose(self, states)
        if tensor_parallel.rank() == 0:
            return trees
        return {r: Tree((7, 7), (-1, 0), (None, None)) for r in trees}

    Fallback.propose = nonsense  # type: ignore[method-assign]
    try:
        return answer(target, draft, inputs, "sd/shape=chain-3")
    finally:
        Fallback.propose = propose  # type: ignore[method-assign]


def failed_draft(
    target: Loaded, draft: Loaded, inputs: Inputs, method: str = "sd/shape=chain-3"
) -> tuple[list[int], str]:
    """The answer where the draft of the last process alone fails in its third round."""
    propose, rounds = Fallback.propose, [0]

    def fails(self: Fallback, states: Any) -> dict[int, Tree]:
        rounds[0] += 1
        if rounds[0] == 3 and tensor_parallel.rank() == 1:
            self.give_up("drafting failed with OSError: out of order", OSError())
        return propose(self, states)

    Fallback.propose = fails  # type: ignore[method-assign]
    try:
        recipe = for_split_target(resolve(method))
        result = saccade.run(
            target.backbone, inputs, draft=draft.backbone, max_new_tokens=COUNT, method=recipe
        )
        return list(result.ids), str(result.fallback_reason)
    finally:
        Fallback.propose = propose  # type: ignore[method-assign]


def failed_self(target: Loaded, inputs: Inputs, where: str) -> tuple[list[int], str]:
    """The answer where the last process's self-draft alone raises between two forwards."""
    whole = getattr(SelfDrafter, where)

    def fails(self: SelfDrafter, given: Any) -> Any:
        if tensor_parallel.rank() == 1:
            raise OSError("out of order")
        return whole(self, given)

    setattr(SelfDrafter, where, fails)
    try:
        recipe = for_split_target(resolve("specvlm-self"))
        result = saccade.run(target.backbone, inputs, max_new_tokens=COUNT, method=recipe)
        return list(result.ids), str(result.fallback_reason)
    finally:
        setattr(SelfDrafter, where, whole)


def stuck(folder: str, drafter: str) -> None:
    """Where what fails in one process shares the target's forwards, the others wait inside them."""
    torch.set_num_threads(1)
    tensor_parallel.TIMEOUT_SECONDS = 5.0
    target, draft = models.load(folder, tp=True), models.load(drafter)
    inputs = zoo.make_inputs(target, "video", 1)
    failed_draft(target, draft, inputs, "specvlm-self")


def odd_verdict(target: Loaded, draft: Loaded, inputs: Inputs) -> str | None:
    """What a process says that would let other tokens stand than rank 0."""
    schedule = resolve("ar").schedule

    def other(target: Any, draft: Any, requests: Any, cut: Any) -> Any:
        def changed(request: int, tokens: Any) -> Any:
            return cut(request, tuple(token + tensor_parallel.rank() for token in tokens))

        return schedule(target, draft, requests, changed)

    recipe = replace(
        resolve("ar"), schedule=tensor_parallel.agree_on_drafts(replace(schedule, run=other))
    )
    try:
        saccade.run(target.backbone, inputs, method=recipe, max_new_tokens=2, do_sample=False)
    except ModelError as error:
        return str(error)
    return None


if __name__ == "__main__":
    (stuck if sys.argv[1] == "stuck" else main)(*sys.argv[1 + (sys.argv[1] == "stuck") :])
