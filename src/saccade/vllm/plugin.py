"""The plug-in that vLLM calls in each process (``vllm.general_plugins``) gives drafts a runner.

vLLM gives a custom class its config and no runner (docs/upstream-vllm.md asks for one). So the
runner's constructor is patched to hand the runner to a draft of ours. The runner's module is not
imported for that: an import hook waits for it, because most of vLLM's processes never load it and
the hundreds of modules that come with it.
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

RUNNER_MODULE, RUNNER_CLASS = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
ENTRY_POINT = "saccade"
PATCHED_MARK = "_meets_saccade"


class RunnerAware(ABC):
    """A draft that needs the runner that made it."""

    @abstractmethod
    def set_runner(self, runner: Any) -> None:
        """Is called once, when the runner has been made with this draft."""


def register() -> None:
    """Patches runners of this process, now or when imported; a second call changes nothing."""
    if not any(isinstance(finder, _RunnerModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RunnerModuleFinder())
    if (module := sys.modules.get(RUNNER_MODULE)) is not None:
        patch_runners(module)


def patch_runners(module: ModuleType) -> None:
    """Patches the runner class of vLLM's module; a second call changes nothing."""
    runner_class = vars(module).get(RUNNER_CLASS, object)
    if runner_class is object or PATCHED_MARK in vars(runner_class):
        return
    original_init = runner_class.__init__

    @functools.wraps(original_init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        draft = vars(self).get("drafter")
        if isinstance(draft, RunnerAware):
            draft.set_runner(self)

    runner_class.__init__ = patched_init
    setattr(runner_class, PATCHED_MARK, True)


def check_patched() -> None:
    """Raises OptionError where no runner of this process would reach its draft."""
    module = sys.modules.get(RUNNER_MODULE)
    if module is not None and PATCHED_MARK in vars(vars(module).get(RUNNER_CLASS, object)):
        return
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and ENTRY_POINT not in plugins.split(","):
        raise OptionError(
            f"VLLM_PLUGINS={plugins} leaves out the plug-in by which vLLM's runner reaches its "
            f"draft: add {ENTRY_POINT} to it, or unset it"
        )
    raise OptionError(
        "vLLM did not call the plug-in by which its runner reaches its draft: install Saccade (a "
        "folder on the path has no entry point vllm.general_plugins), beside vLLM 0.32 or newer"
    )


class _RunnerModuleFinder(MetaPathFinder):
    """An import hook that patches the runner's module as soon as it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != RUNNER_MODULE:
            return None
        finders = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_patch(module: ModuleType) -> None:
                exec_module(module)
                patch_runners(module)

            # Import hooks replace this method.
            spec.loader.exec_module = exec_and_patch  # type: ignore[method-assign]
        return spec
