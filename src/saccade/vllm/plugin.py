"""What vLLM calls in each of its processes (``vllm.general_plugins``): runners meet their drafts.

vLLM gives a custom class its config and no runner (docs/upstream-vllm.md asks for one). So a runner
that was made with a draft of ours shows itself to it, once. Its module is awaited, not imported:
most of vLLM's processes never load it, and the hundreds of others that come with it.
"""

from __future__ import annotations

import functools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from saccade.core.errors import OptionError

MODULE, CLASS = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
NAME = "saccade"  # of the entry point
MARK = "_meets_saccade"


class Meeting(ABC):
    """A draft that asks for the runner that made it."""

    @abstractmethod
    def meet(self, runner: Any) -> None:
        """This runner has just been made, with this draft."""


def register() -> None:
    """Runners made in this process from now on meet their drafts; again changes nothing."""
    if not any(isinstance(finder, _Awaited) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited())
    if (module := sys.modules.get(MODULE)) is not None:
        introduce(module)


def introduce(module: ModuleType) -> None:
    """Has the runners of vLLM's module meet their drafts; again changes nothing."""
    runners = vars(module).get(CLASS, object)
    if runners is object or MARK in vars(runners):
        return
    make = runners.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        draft = vars(self).get("drafter")
        if isinstance(draft, Meeting):
            draft.meet(self)

    runners.__init__ = made
    setattr(runners, MARK, True)


def check() -> None:
    """Raises OptionError where no runner of this process would meet its draft."""
    module = sys.modules.get(MODULE)
    if module is not None and MARK in vars(vars(module).get(CLASS, object)):
        return
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and NAME not in chosen.split(","):
        raise OptionError(
            f"VLLM_PLUGINS={chosen} leaves out the plug-in by which vLLM's runner reaches its "
            f"draft: add {NAME} to it, or unset it"
        )
    raise OptionError(
        "vLLM did not call the plug-in by which its runner reaches its draft: install Saccade (a "
        "folder on the path has no entry point vllm.general_plugins), beside vLLM 0.32 or newer"
    )


class _Awaited(MetaPathFinder):
    """Waits for the runner's module: whoever finds it, it is introduced when it has been run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        others = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def ran(module: ModuleType) -> None:
                run(module)
                introduce(module)

            spec.loader.exec_module = ran  # type: ignore[method-assign]  # as import hooks do
        return spec
