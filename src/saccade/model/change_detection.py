"""Notices that a model was changed after its weights were fused, and says what was changed.

Fusing stacks weights that are multiplied by the same input, such as those of q, k and v, into one
matrix. The fused layers run without the model's modules, and must follow every change of these. A
caller may add adapters to the model, hook or patch a module, swap the head, delete a layer or write
into a weight, before the first answer or between two answers. So every answer begins with
:meth:`Snapshot.is_current`, which compares the modules with what they were when they were fused, in
a few microseconds for each layer. A :class:`Description` is made only where something differs. It
takes milliseconds and says whether the difference matters.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, is_
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saccade.core.errors import ModelError

# The dictionaries in which a module has its parameters, buffers, submodules and hooks.
REGISTRIES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
)
# The folders of the code of torch and transformers, and that of this package.
LIBRARIES = tuple(
    f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, transformers)
)
OUR_FILES = f"{Path(__file__).parents[1]}{os.sep}"
# These attributes of modules and of configs do not change what is computed here. In
# ``max_seq_len_cached`` a rotary rule that depends on length stores the longest length so far.
IRRELEVANT_SETTINGS = {"training", "gradient_checkpointing", "max_seq_len_cached"}
# In these, transformers looks up the attention function that a config names, and its mask.
ATTENTION_REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
Setting = int | float | bool | str


# -- one thread at a time --------------------------------------------------------------------------


class ModuleLock:
    """Lets one thread at a time run a model by its modules, hook them or fuse them.

    It is an attribute of a model, which may be copied or pickled. A copy gets a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ModuleLock], tuple[()]]:
        return ModuleLock, ()


_locks: WeakKeyDictionary[nn.Module, ModuleLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def lock_of(module: nn.Module) -> ModuleLock:
    """Returns the lock of a module. Everybody who uses the module gets the same one."""
    with _locks_lock:
        return _locks.setdefault(module, ModuleLock())


# -- whose code it is ------------------------------------------------------------------------------


def comes_from(function: Any, folders: Sequence[str] = LIBRARIES) -> bool:
    """Returns whether a function's code is in one of these folders, which are torch's and
    transformers' unless others are named.

    A partial function is judged by the function that it calls. A method of an object of this
    package is taken to be in ``OUR_FILES``, even if a decorator from elsewhere wraps it.
    """
    function = getattr(function, "func", function)
    if OUR_FILES in folders and _is_method_of_ours(function):
        return True
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and str(code.co_filename).startswith(tuple(folders))


def _is_method_of_ours(function: Any) -> bool:
    """Returns whether a function is a method of an object of this package, decorated or not."""
    owner = type(getattr(function, "__self__", None))
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return file is not None and file.startswith(OUR_FILES)


def foreign_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks of a module's forward that are neither transformers' nor ours.

    transformers adds its own hooks to layers where it records hidden states.
    """
    hooks = (hook for name in HOOKS for hook in vars(module)[name].values())
    return [hook for hook in hooks if not comes_from(hook, (*LIBRARIES, OUR_FILES))]


def is_patched(module: nn.Module) -> bool:
    """Returns whether somebody else than us replaced a module's forward, in the module or in its
    class. Of classes, only those of torch and transformers are checked."""
    instance_forward = vars(module).get("forward")
    if instance_forward is not None:
        return not comes_from(instance_forward, (OUR_FILES,))
    kind = type(module)
    return is_from_library(kind) and not comes_from(kind.forward)


def is_from_library(kind: type) -> bool:
    """Returns whether a class of modules is torch's or transformers'."""
    return kind.__module__.partition(".")[0] in ("torch", "transformers")


def patched_functions(modules: Iterable[nn.Module]) -> list[str]:
    """Returns the names of functions and classes that somebody replaced, in those files of
    transformers that define these modules, by ones of a package that such files do not import."""
    names = []
    for file_name in sorted({type(module).__module__ for module in modules}):
        if not file_name.startswith("transformers.models."):
            continue
        for name, value in vars(sys.modules[file_name]).items():
            # The package is "None" where a value does not say its module.
            package = str(getattr(value, "__module__", None)).partition(".")[0]
            # A function from a package that such files do not import was put there by somebody.
            if callable(value) and package not in {*IMPORTED_BY_MODELING_FILES, "None"}:
                names.append(f"{file_name}.{name}")
    return names


def foreign_attention(config: Any) -> list[Any]:
    """Returns the functions for attention and masks of modules with this config, if somebody else
    than transformers or us has registered them."""
    name = vars(config).get("_attn_implementation_internal")
    functions = (registry.get(name) for registry in ATTENTION_REGISTRIES)
    return [
        function
        for function in functions
        if function is not None and not comes_from(function, (*LIBRARIES, OUR_FILES))
    ]


# The packages that modeling files of transformers import from.
IMPORTED_BY_MODELING_FILES = {
    "transformers", "torch", "typing", "collections", "dataclasses", "functools", "math", "copy",
    "builtins", "abc", "_abc", "contextlib", "itertools", "numpy", "huggingface_hub", "packaging",
    "kernels", "enum", "warnings", "operator", "_operator", "logging", "re", "os", "_functools",
    "_collections", "types", "inspect", "random", "torchvision", "PIL", "einops",
}  # fmt: skip


# -- comparing -------------------------------------------------------------------------------------


class Snapshot:
    """The state of modules when they were fused, to compare with their state now."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        configs: Sequence[Any] = (),
        outer: Iterable[nn.Module] = (),
    ) -> None:
        """Takes the snapshot.

        Args:
            modules: all modules whose change matters.
            configs: the configs that they read while they compute.
            outer: those modules that contain the language model. They store something about each
                prompt in their attributes, so only their registries are compared.
        """
        outer_ids = {*map(id, outer)}
        self._modules = modules
        self._types: list[Any] = [*map(type, modules)]
        kinds = list(dict.fromkeys(self._types))
        self._forwards: list[tuple[Any, Any]] = [(kind, kind.forward) for kind in kinds]
        # Of the modules in this list only the registries are compared, and a forward that was set
        # on the module itself. Of every other module all attributes are compared.
        self._registries = [
            (module, _registries(module))
            for module in modules
            if id(module) in outer_ids or _has_tensor_attributes(module)
        ]
        partly_compared = {id(module) for module, _ in self._registries}
        # The entries of all modules' registries are compared as well, and those of global hooks.
        all_registries = [vars(module)[name] for module in modules for name in REGISTRIES]
        all_registries += GLOBAL_HOOKS
        # Those that are empty now are listed apart, because any entry in them is a change.
        self._empty = [registry for registry in all_registries if not registry]
        self._dicts: list[dict[Any, Any]] = [
            *(vars(module) for module in modules if id(module) not in partly_compared),
            *(registry for registry in all_registries if registry),
            *_contents_of_modeling_files(kinds),
            *(config.__dict__ for config in configs),
        ]
        self._values = [tuple(each.values()) for each in self._dicts]
        self._configs = configs
        self._attention = [*map(foreign_attention, configs)]
        self._weights = [tensor for _, tensor in _weights(modules) if _has_own_memory(tensor)]
        # The weights whose version says how often they were written to.
        self._versioned = [each for each in self._weights if version_of(each) is not None]
        self._addresses = [*map(Tensor.data_ptr, self._weights)]
        self._versions = [*map(_version, self._versioned)]

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[()]]:
        return _never_current, ()

    def is_current(self) -> bool:
        """Returns whether no module, weight, version, hook, forward or setting differs."""
        try:
            return (
                # No hook, submodule or weight was added to a registry that had none.
                not any(self._empty)
                # Attributes, registries, config fields and names in modeling files are the same.
                and all(map(eq, map(tuple, map(dict.values, self._dicts)), self._values))
                # No module has got another class.
                and [*map(type, self._modules)] == self._types
                # No weight has moved to other memory.
                and [*map(Tensor.data_ptr, self._weights)] == self._addresses
                # No weight was written to, as far as torch counts (``version_of``).
                and [*map(_version, self._versioned)] == self._versions
                # No class has got another forward.
                and all(kind.forward is forward for kind, forward in self._forwards)
                # No attention function was registered in the place of another.
                and [*map(foreign_attention, self._configs)] == self._attention
                # The modules that are compared by their registries alone have the same ones.
                and all(
                    all(map(is_, _registries(module), registries))
                    for module, registries in self._registries
                )
            )
        except RuntimeError:  # Comparing raises where one tensor was replaced by another.
            return False


def _registries(module: nn.Module) -> tuple[Any, ...]:
    """Returns the forward that somebody set on a module itself, or None, and its registries."""
    attributes = vars(module)
    return attributes.get("forward"), *(attributes[name] for name in REGISTRIES)


def _never_current() -> Snapshot:
    """Returns the snapshot of a copied model, whose modules are not those that were fused."""
    snapshot = Snapshot(())
    snapshot._types = [nn.Module]  # It has no modules, so this list never equals their types.
    return snapshot


_version = attrgetter("_version")  # For tensors whose writes are counted; see ``version_of``.


def version_of(tensor: Tensor) -> int | None:
    """Returns how often a tensor was written to, as torch counts.

    Writes by way of ``tensor.data`` are not counted. Returns None for a tensor that was made in
    inference mode, of which no writes are counted. Such tensors are found by reading their version,
    which raises. ``is_inference`` does not find all of them: it is False for a parameter that was
    made there and converted outside, as by ``.to``.
    """
    try:
        return tensor._version
    except RuntimeError:
        return None


def _has_tensor_attributes(module: nn.Module) -> bool:
    """Returns whether a plain attribute of a module is a tensor, which ``==`` cannot compare."""
    return any(isinstance(value, Tensor) for value in vars(module).values())


def _contents_of_modeling_files(kinds: Iterable[type]) -> list[dict[str, Any]]:
    """Returns the names and values in those files of transformers that define these classes."""
    names = {kind.__module__ for kind in kinds}
    # Such files are transformers.models.* and transformers.modeling_*.
    return [vars(sys.modules[name]) for name in sorted(names) if name.startswith("transformers.m")]


def _weights(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for module in modules:
        for registry in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[registry].items():
                if tensor is not None:
                    yield name, tensor


def _has_own_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor's numbers are at ``data_ptr``; quantised ones wrap other tensors."""
    return type(tensor.data) is Tensor and not tensor.is_meta


@dataclass(frozen=True)
class Description:
    """Everything that matters about a model, to compare with what it was when it was fused."""

    structure: tuple[Any, ...]  # Modules, their forwards, hooks and settings.
    weights: tuple[Any, ...]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], configs: Sequence[Any]) -> Description:
        """Describes these modules and the configs that they read while they compute."""
        structure = [
            *(_structure(module) for module in modules),
            *(settings(config) for config in configs),
            *(tuple(foreign_attention(config)) for config in configs),
            *(tuple(hooks.values()) for hooks in GLOBAL_HOOKS),
            tuple(patched_functions(modules)),
        ]
        return cls(tuple(structure), tuple(_identity(tensor) for _, tensor in _weights(modules)))

    def __reduce__(self) -> tuple[type[Description], tuple[tuple[()], tuple[()]]]:
        # A copied model gets an empty description. It differs from any other, so the copy is fused
        # anew.
        return Description, ((), ())


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Returns what matters about a module apart from the numbers of its weights."""
    kind = type(module)
    children = tuple(vars(module)["_modules"].items())
    foreign_forward = vars(module).get("forward")
    if foreign_forward is not None and comes_from(foreign_forward, (OUR_FILES,)):
        foreign_forward = None
    parameters = vars(module)["_parameters"].items()
    return (
        kind,
        tuple((name, _kind_of(parameter)) for name, parameter in parameters),
        kind.forward,
        foreign_forward,
        children,
        tuple(foreign_hooks(module)),
        settings(module),
    )


def _kind_of(parameter: Tensor | None) -> tuple[type, torch.dtype, torch.Size] | None:
    return None if parameter is None else (type(parameter.data), parameter.dtype, parameter.shape)


def settings(owner: object, leave_out: str = "") -> tuple[tuple[str, Setting], ...]:
    """Returns the attributes that a module or a config computes by: numbers, texts and booleans.

    Left out are the one that is named ``leave_out``, ``IRRELEVANT_SETTINGS``, and those whose names
    begin with "_".
    """
    return tuple(
        (name, value)
        for name, value in vars(owner).items()
        if isinstance(value, Setting)
        and name not in IRRELEVANT_SETTINGS
        and name != leave_out
        and not name.startswith("_")
    )


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Returns values of a weight that change when it is replaced.

    For a plain tensor whose writes torch counts, they also change when it is written to.
    """
    if not _has_own_memory(tensor):
        return id(tensor), type(tensor.data), tensor.shape
    return tensor.data_ptr(), version_of(tensor), tensor.dtype, tensor.shape


# -- describing changes ----------------------------------------------------------------------------


def unusual_changes(named_modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Returns what was done to these modules beyond loading them, in words."""
    changes = [
        f"hooks on every module ({names_of(hooks.values())})" for hooks in GLOBAL_HOOKS if hooks
    ]
    named = list(named_modules)
    for name, module in named:
        place = name or type(module).__name__
        if hooks := foreign_hooks(module):
            changes.append(f"a hook on {place} ({names_of(hooks)})")
        if is_patched(module):
            changes.append(f"another forward in {place}")
        weight = vars(module)["_parameters"].get("weight")
        if weight is not None and type(weight.data) is not Tensor:
            changes.append(f"{type(weight.data).__name__} weights in {place}")
        elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            changes.append(f"{type(module).__name__} in the place of {place}")
    return changes + [f"another {name}" for name in patched_functions(each for _, each in named)]


def names_of(hooks: Iterable[Any]) -> str:
    """Returns the names of hooks or functions, or of their classes, for a sentence."""
    return ", ".join(str(getattr(hook, "__qualname__", type(hook).__name__)) for hook in hooks)


def refuse_autocast(device: torch.device) -> None:
    """Raises ModelError inside ``torch.autocast`` for this kind of device.

    Autocast rounds the inputs of every matrix product, in a way that depends on the number of rows
    that are multiplied at once.
    """
    if torch.is_autocast_enabled(device.type):
        raise ModelError(
            f"torch.autocast is on for {device.type}, under which Saccade cannot answer as "
            "generate() does: call Saccade outside of the autocast block, or load the model in "
            f"{str(torch.get_autocast_dtype(device.type)).removeprefix('torch.')}"
        )
