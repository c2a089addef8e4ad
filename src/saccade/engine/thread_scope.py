"""Decides which answers may change the number of threads while the machine is busy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from saccade.core.free_cores import free_cores
from saccade.drafting.recipe import Recipe
from saccade.model.backbone import Backbone


def thread_scope(target: Backbone, recipe: Recipe, exact: bool) -> AbstractContextManager[None]:
    """Returns a scope with fewer threads where other programs keep this machine's cores busy.

    An exact answer depends on the number of threads, and a draft in a process of its own shares
    them with the target already, so both keep the number that they began with.
    """
    if target.device.type != "cpu" or exact or recipe.drafts_beside_target:
        return nullcontext()
    return free_cores.limit_threads()


def planning_scope(
    target: Backbone, recipe: Recipe, exact: bool, samples: bool
) -> AbstractContextManager[None]:
    """Returns the scope in which a request is planned, and costs may be measured for it.

    Measured costs belong to a number of threads. A seed has to give the same answer on a busy
    machine, so an answer whose tokens are drawn is planned by the costs of all threads.
    """
    if samples and recipe.needs_costs:
        return nullcontext()
    return thread_scope(target, recipe, exact)
