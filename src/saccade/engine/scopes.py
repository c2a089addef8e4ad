"""The scopes in which requests are planned and rounds are computed.

In both, tensors that name no device are made on the CPU, whatever default the caller has set. While
other programs keep cores busy, both may reduce PyTorch's number of threads; their docstrings say
when they do not.
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

    The number of threads is limited only where the target is on a CPU, and even there it is left
    alone in two cases. With ``exact=True`` the answer may depend on it. And a draft in a process of
    its own divides the threads between itself and the target in its own way (``sharing_threads``).
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

    Costs depend on the number of threads that they are measured with. A seed has to give the same
    answer on a busy machine as on an idle one. So if tokens are sampled (``samples``) and the
    recipe needs costs, the number of threads is not reduced.
    """
    if samples and recipe.needs_costs:
        with cpu_by_default():
            yield
    else:
        with step_scope(target, recipe, exact):
            yield
