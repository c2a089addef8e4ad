"""The scopes in which requests are planned and rounds are computed.

Tensors are made where Saccade expects them, and fewer threads work while the machine is busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saccade.core.default_device import cpu_by_default
from saccade.core.free_cores import free_cores
from saccade.drafting.recipe import Recipe
from saccade.model.backbone import Backbone


@contextmanager
def step_scope(target: Backbone, recipe: Recipe, exact: bool) -> Iterator[None]:
    """A scope in which a step of an answer is computed, with fewer threads where other programs
    keep this machine's cores busy.

    An exact answer depends on the number of threads, and a draft in a process of its own shares
    them with the target already, so both keep the number that they began with.
    """
    with cpu_by_default():
        if target.device.type != "cpu" or exact or recipe.drafts_beside_target:
            yield
        else:
            with free_cores.limit_threads():
                yield


@contextmanager
def planning_scope(target: Backbone, recipe: Recipe, exact: bool, samples: bool) -> Iterator[None]:
    """A scope in which a request is planned, and costs may be measured for it.

    Measured costs belong to a number of threads. A seed has to give the same answer on a busy
    machine, so an answer whose tokens are drawn is planned by the costs of all threads.
    """
    if samples and recipe.needs_costs:
        with cpu_by_default():
            yield
    else:
        with step_scope(target, recipe, exact):
            yield
