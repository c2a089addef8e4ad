"""Gives Saccade's draft its model runner: a plug-in that vLLM loads in each of its processes.

A model runner is vLLM's object that runs the target on one device. Our draft reads from it which
requests there are, and what the vision tower returned for their media. But vLLM passes a custom
draft class its config and no runner (docs/upstream-vllm.md asks for one). So the constructors of
runner classes are patched to pass the runner to our draft. A runner class is named
``...ModelRunner`` and its module ``...model_runner...``, in hardware plug-ins too. None of these
modules is imported here, because most of vLLM's processes need neither a runner nor the hundreds of
modules behind it. An import hook patches each of them when vLLM imports it.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from saccade.core.errors import OptionError

# Examples are vllm.v1.worker.gpu_model_runner and vllm_ascend.worker.model_runner_v1. The package's
# name has to begin with "vllm".
RUNNER_MODULE = re.compile(r"vllm\w*\.(\w+\.)*\w*model_runner\w*")
RUNNER_CLASS = re.compile(r"\w*ModelRunner(V\d+)?")
ENTRY_POINT = "saccade"  # The plug-in's name, as in VLLM_PLUGINS and in pyproject.toml.
PATCHED_ATTRIBUTE = "_saccade_patched"  # It is set on runner classes that were patched.
DRAFT_ATTRIBUTE = "_saccade_draft"  # It holds, in a runner, the draft that was given this runner.


class RunnerAware(ABC):
    """A draft that needs the runner whose constructor has made it."""

    @abstractmethod
    def set_runner(self, runner: Any) -> None:
        """Is called once, after the runner's constructor, or that of its base class, has made this
        draft. The constructor of a derived class may still be running then."""


def register() -> None:
    """Patches all runner classes of this process: those that exist now, and others when they are
    imported. vLLM calls it as a plug-in. A second call changes nothing."""
    if not any(isinstance(finder, _RunnerModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RunnerModuleFinder())
    for module in _imported_runner_modules():
        patch_runners(module)


def patch_runners(module: ModuleType) -> None:
    """Patches the runner classes that a module defines and that have a constructor of their own.
    Others inherit the constructor of their base class. A second call changes nothing."""
    for runner_class in _runner_classes(module):
        if "__init__" in vars(runner_class) and PATCHED_ATTRIBUTE not in vars(runner_class):
            _patch(runner_class)


def _patch(runner_class: type) -> None:
    """Makes the constructor of a runner class give the new runner to its draft."""
    original_init = vars(runner_class)["__init__"]

    @functools.wraps(original_init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        draft = vars(self).get("drafter")
        # This runs twice where the constructors of a class and of its base class are both patched.
        if isinstance(draft, RunnerAware) and vars(self).get(DRAFT_ATTRIBUTE) is not draft:
            vars(self)[DRAFT_ATTRIBUTE] = draft
            draft.set_runner(self)

    runner_class.__init__ = patched_init
    setattr(runner_class, PATCHED_ATTRIBUTE, True)


def _runner_classes(module: ModuleType) -> Iterator[type]:
    """Yields the classes that a module defines itself and that are named like runners."""
    for name, value in [*vars(module).items()]:
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and RUNNER_CLASS.fullmatch(name):
            yield value


def _imported_runner_modules() -> Iterator[ModuleType]:
    """Yields the imported modules that are named like modules of runners."""
    for name, module in [*sys.modules.items()]:
        if module is not None and RUNNER_MODULE.fullmatch(name):
            yield module


def check_patched() -> None:
    """Raises OptionError if no runner class of this process is patched, so that the draft would
    never be given its runner."""
    for module in _imported_runner_modules():
        if any(PATCHED_ATTRIBUTE in vars(each) for each in _runner_classes(module)):
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
    """An import hook that patches modules of runners as soon as they have been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not RUNNER_MODULE.fullmatch(name):
            return None
        finders = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_patch(module: ModuleType) -> None:
                exec_module(module)
                patch_runners(module)

            # To replace a loader's method is the usual way to run code after an import.
            spec.loader.exec_module = exec_and_patch  # type: ignore[method-assign]
        return spec
