"""Pretended CUDA devices on a CPU, for tests of code that no GPU has run yet.

A tensor "on" a pretended device is an ordinary CPU tensor whose storage is tagged with the device.
Inside :func:`pretend_gpus` the tag answers for ``tensor.device``, and the rules of CUDA hold:

- An operation whose tensors lie on unlike devices raises :class:`DeviceMix`. Zero-dimensional CPU
  tensors and CPU indices are allowed, as torch allows them.
- Kernel launches, graph replays, host syncs and copies between host and device are counted, syncs
  and copies also by the line of code that caused them (:class:`Record`).
- ``torch.cuda.graph`` records what runs on its stream, operation by operation, and a replay repeats
  it on the same memory. A sync or a copy from pageable host memory during a capture raises
  :class:`CaptureError`. Work on a stream of another device is not recorded, it runs at once: a
  capture on the wrong device's stream stays empty, and torch's warning is given.
- Graphs that share a pool share memory: a replay overwrites, with NaN, what graphs captured later
  in the same pool gave.

What a pretended device does not know: time (everything runs at once), races between streams, and
memory that a graph reads after it was freed (the recording keeps it alive). The peak of memory is
the largest of the amounts at which anyone asked for it.

Everything is put back when the block ends; threads started in the block take part in it.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOTAL_MEMORY = 80 * 2**30
PRUNE_AFTER = 20_000  # New tags between two removals of those whose storage is gone.
CPU = torch.device("cpu")

SYNCING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided",
    "eye", "from_numpy", "full", "full_like", "linspace", "logspace", "new_empty", "new_full",
    "new_ones", "new_tensor", "new_zeros", "ones", "ones_like", "rand", "rand_like", "randint",
    "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros", "zeros_like",
}  # fmt: skip
FROM_HOST_DATA = {"as_tensor", "asarray", "new_tensor", "tensor"}
LAYS_ROWS_FIRST = {torch.nn.functional.scaled_dot_product_attention}
"""Composites whose results CUDA may lay out unlike a CPU: see :func:`_rows_before_heads`."""
ONE_KERNEL = {*LAYS_ROWS_FIRST, torch.nn.functional.rms_norm}
"""Composites that are a single kernel on CUDA."""


class DeviceMix(RuntimeError):
    """Tensors of unlike devices met in one operation."""


class CaptureError(RuntimeError):
    """Something that no capture allows happened during one."""


@dataclass
class Record:
    """What happened on the pretended devices since the last :meth:`clear`.

    ``counts`` has the kinds ``launch`` (kernels started one by one), ``recorded`` (kernels written
    into a graph), ``replay``, ``capture``, ``sync`` (the host waits), ``upload``, ``download`` and
    ``peer`` (copies host to device, device to host, device to device).
    """

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, Counter[str]] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    sizes: list[int] = field(default_factory=list)  # operations of each finished capture
    errors: list[str] = field(default_factory=list)  # raised, whoever caught them
    pageable: Counter[str] = field(default_factory=Counter)
    """Uploads from memory that is not pinned, by line: the host waits until they are staged."""

    @property
    def transfers(self) -> int:
        """Copies between host and device, either way."""
        return self.counts["upload"] + self.counts["download"]

    def clear(self) -> None:
        self.counts.clear()
        self.lines.clear()
        self.operations.clear()
        self.sizes.clear()
        self.errors.clear()
        self.pageable.clear()

    def worst(self, kind: str, most: int = 8) -> list[tuple[str, int]]:
        """The lines of code that cause most of a kind."""
        return self.lines.get(kind, Counter()).most_common(most)


class _State(threading.local):
    """What a thread has set: its device, its streams, whether it is observed."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.unobserved = 0


_state = _State()
_record = Record()
_tags: dict[int, tuple[StorageWeakRef, int]] = {}
_pinned: dict[int, StorageWeakRef] = {}
_peaks: Counter[int] = Counter()
_added = 0
_real_device = torch._C.TensorBase.device.__get__
_plain = torch._C.DisableTorchFunction


# -- tags ---------------------------------------------------------------------------------------


def _place(tensor: Tensor) -> int | None:
    """The number of the pretended device a tensor lies on; None on the CPU."""
    with _plain():
        if tensor.layout != torch.strided:
            return None
        known = _tags.get(tensor.untyped_storage()._cdata)
    return None if known is None else known[1]


def _tag(tensor: Tensor, place: int) -> Tensor:
    global _added
    with _plain():
        storage = tensor.untyped_storage()
    # The weak reference keeps the address from being used again, so that a tag stays true.
    _tags[storage._cdata] = StorageWeakRef(storage), place
    _added += 1
    if _added >= PRUNE_AFTER:
        _prune()
    return tensor


def _prune() -> None:
    global _added
    _added = 0
    for address in [a for a, (alive, _) in list(_tags.items()) if alive.expired()]:
        _tags.pop(address, None)
    for address in [a for a, alive in list(_pinned.items()) if alive.expired()]:
        _pinned.pop(address, None)


def _is_pinned(tensor: Tensor) -> bool:
    with _plain():
        return tensor.untyped_storage()._cdata in _pinned


def _pin(tensor: Tensor) -> Tensor:
    with _plain():
        storage = tensor.untyped_storage()
    _pinned[storage._cdata] = StorageWeakRef(storage)
    return tensor


def _device(tensor: Tensor) -> torch.device:
    with _plain():
        real = _real_device(tensor)
    if real.type != "cpu":
        return real
    place = _place(tensor)
    return CPU if place is None else torch.device("cuda", place)


def _number(device: Any) -> int | None:
    """The pretended device that a device argument names; None if it names another kind."""
    if device is None or isinstance(device, Stream):
        return _state.device
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return _state.device if device.index is None else device.index


# -- what is counted ----------------------------------------------------------------------------


def _line() -> str:
    """The innermost line of Saccade in the stack, else the innermost outside torch and here."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__:
            if "/saccade/" in path:
                return f"{path.rsplit('/saccade/')[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
            if not outside and "/torch/" not in path:
                outside = f"{Path(path).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return outside


def _noted(error: RuntimeError) -> RuntimeError:
    """The error, once it is written down: code that falls back on it would hide it."""
    _record.errors.append(str(error))
    return error


def _count(kind: str, what: str) -> None:
    if _state.unobserved:
        return
    _record.counts[kind] += 1
    _record.lines.setdefault(kind, Counter())[f"{_line()} [{what}]"] += 1


def _forbid_in_captures(what: str, place: int | None) -> None:
    """Raises where a stream of this thread is being captured.

    torch captures in the "global" or "thread_local" mode, where a wait anywhere in the thread is an
    error, whichever stream it is for.
    """
    if not _state.unobserved and any(s.capturing is not None for s in _state.streams.values()):
        raise _noted(CaptureError(f"{what} during a capture, at {_line()}"))


def _sync(what: str, place: int | None = None) -> None:
    _forbid_in_captures(what, place)
    _count("sync", what)


def _copied(source: int | None, target: int | None, what: str, waits: bool) -> None:
    """Counts a copy between two places."""
    if source == target:
        return
    if source is not None and target is not None:
        _count("peer", what)
        return
    kind = "upload" if source is None else "download"
    if waits:
        _forbid_in_captures(f"a {kind} that waits ({what})", target)
    _count(kind, what)
    if waits and kind == "download":
        _count("sync", what)
    if waits and kind == "upload" and not _state.unobserved:
        _record.pageable[f"{_line()} [{what}]"] += 1


@contextmanager
def unobserved() -> Iterator[None]:
    """Runs a block of the test's own on the pretended device's memory, as if it did not happen."""
    _state.unobserved += 1
    try:
        yield
    finally:
        _state.unobserved -= 1


def _launched(name: str, place: int, run: Callable[[], Any], out: Any, mutates: bool) -> None:
    """Counts a kernel, or writes it into the graph that its stream is captured into."""
    graph = current_stream(place).capturing
    if graph is None:
        _record.counts["launch"] += 1
        _record.operations[name] += 1
    else:
        _record.counts["recorded"] += 1
        graph.add(run, out, mutates)


# -- what operations do -------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Checks where each operation's tensors lie, and tags its results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _state.unobserved:
            return _tag_results(args, kwargs, func(*args, **kwargs))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with _plain():
            tensors = [x for x in tensors if _real_device(x).type == "cpu"]
        places = [_place(x) for x in tensors]
        known = {place for place in places if place is not None}
        if not known:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if name == "copy_":
            return self._copy(func, args, kwargs)
        self._check(name, args, tensors, places)
        (place,) = known
        if name in SYNCING or (name == "repeat_interleave" and len(args) == 1):
            _sync(name, place)
        if name in INDEXING and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            _sync(f"{name} by a mask", place)
        if name == "_scaled_dot_product_flash_attention":
            run = partial(_flash_attention, *args, **kwargs)
        else:
            run = partial(func, *args, **kwargs)
        with unobserved():
            out = run()
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name not in ("_local_scalar_dense", "equal"):
            for result in results:
                if _place(result) is None:
                    _tag(result, place)
            if _is_kernel(func, tensors, results):
                mutates = func._schema.is_mutable
                _launched(name, place, run, out, mutates)
        return out

    def _check(
        self, name: str, args: Sequence[Any], tensors: list[Tensor], places: list[int | None]
    ) -> None:
        """Raises DeviceMix where CUDA would; indices on the CPU are uploaded."""
        known = {place for place in places if place is not None}
        strangers = [x for x, at in zip(tensors, places, strict=True) if at is None and x.dim()]
        if len(known) == 1 and not strangers:
            return
        if name in INDEXING and len(known) == 1 and _place(args[0]) is not None:
            indices = [id(x) for x in args[1] if x is not None]
            if all(id(x) in indices for x in strangers):
                for _ in strangers:
                    _copied(None, _place(args[0]), f"{name} with indices on the CPU", True)
                return
        where = ", ".join(
            f"{tuple(x.shape)} on {'cpu' if at is None else f'cuda:{at}'}"
            for x, at in zip(tensors, places, strict=True)
        )
        raise _noted(DeviceMix(f"{name} of tensors {where}, at {_line()}"))

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target, source = _place(args[0]), _place(args[1])
        is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host = args[1] if source is None else args[0]
        waits = not (is_async and _is_pinned(host))
        if args[0].numel() and (args[1].dim() or source is not None):
            _copied(source, target, "copy_", waits)
        with unobserved():
            out = func(*args, **kwargs)
        if args[0].numel():
            place = target if target is not None else source
            assert place is not None
            _launched("copy_", place, partial(func, *args, **kwargs), out, True)
        return out


def _is_kernel(func: Any, tensors: list[Tensor], results: list[Tensor]) -> bool:
    """Whether a GPU would run something: not for views of what is there, nor for nothing."""
    if func._schema.is_mutable:
        return any(x.numel() for x in results or tensors)
    with _plain():
        there = {x.untyped_storage()._cdata for x in tensors}
        fresh = [x for x in results if x.untyped_storage()._cdata not in there]
    return any(x.numel() for x in fresh)


def _tag_results(args: Any, kwargs: Any, out: Any) -> Any:
    """Unobserved results lie where the first tagged argument lies."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, Tensor) and (place := _place(each)) is not None:
            for result in tree_leaves(out):
                if isinstance(result, Tensor) and _place(result) is None:
                    _tag(result, place)
            break
    return out


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """CUDA's flash operation by the CPU's: half precision only, groups of heads, and the results
    in the memory layout of CUDA."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    if q.shape[-1] % 8:
        raise RuntimeError("FlashAttention needs a head size that is a multiple of 8")
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.float(), keys, values, is_causal=is_causal, scale=scale
    )
    nothing = torch.zeros(0)
    laid = _rows_before_heads(out.to(q.dtype))
    return laid, sums.float(), nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def _rows_before_heads(out: Tensor) -> Tensor:
    """Attention's result in memory as [batch, row, head, dim], whose shape is [batch, head, row,
    dim].

    CUDA's memory-efficient kernel always lays it out so. Its flash kernels follow the layout of the
    queries, which is this one where they come from a projection. Code has to bear both, and on a
    CPU it meets contiguous results.
    """
    laid = torch.empty_permuted(out.shape, (0, 2, 1, 3), dtype=out.dtype)
    return laid.copy_(out)


# -- what Python calls do -----------------------------------------------------------------------


class _Calls(TorchFunctionMode):
    """Answers calls that name a device, and those that are one kernel on CUDA.

    Torch leaves the mode while it answers: what is called from here is not answered here.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        place = None if first is None or name == "__get__" else _place(first)
        if name in FACTORIES:
            return _make(func, name, args, kwargs, place)
        if first is None or name == "__get__":
            return func(*args, **kwargs)
        method = _METHODS.get(name)
        if method is not None:
            return method(func, args, kwargs, place)
        if place is not None and func in ONE_KERNEL and not _state.unobserved:
            return _run_as_one_kernel(func, name, args, kwargs, place)
        return func(*args, **kwargs)


def _run_as_one_kernel(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], place: int
) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(_place(x) != place for x in tensors if x.dim()):
        raise _noted(DeviceMix(f"{name} of tensors on unlike devices, at {_line()}"))

    def run() -> Any:
        with unobserved(), _plain():
            out = func(*args, **kwargs)
            return _rows_before_heads(out) if func in LAYS_ROWS_FIRST else out

    out = _tag(run(), place)
    _launched(name, place, run, out, False)
    return out


def _make(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], place: int | None
) -> Any:
    """Makes a tensor where its ``device`` says."""
    device = kwargs.get("device")
    pins = bool(kwargs.pop("pin_memory", False))
    inherits = name.endswith("_like") or name.startswith("new_")
    source = args[0] if args and isinstance(args[0], Tensor) else None
    from_data = name in FROM_HOST_DATA and name != "new_tensor"
    if device is None:
        # Without a device, data stays where it is, and what is like a tensor lies beside it.
        target = place if inherits or (from_data and source is not None) else None
    else:
        target = _number(device)
        if target is None and torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
    if from_data and source is not None and name != "tensor" and place == target:
        kwargs.pop("device", None)
        return func(*args, **kwargs)
    with unobserved(), _plain():
        out = func(*args, **kwargs)
        shares = source is not None and out.untyped_storage()._cdata == (
            source.untyped_storage()._cdata
        )
        if shares and place != target:
            out = out.clone()
    if pins:
        _pin(out)
    if from_data and source is not None and out.numel():
        _copied(place, target, name, True)
    if target is None:
        return out
    _tag(out, target)
    if name in FROM_HOST_DATA:
        if source is None and out.numel():
            _copied(None, target, name, True)
    elif out.numel() and not name.startswith(("empty", "new_empty")):
        if not _state.unobserved:
            run = partial(_repeat_factory, func, args, kwargs)
            _launched(name, target, run, out, False)
    return out


def _repeat_factory(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with unobserved(), _plain():
        return func(*args, **kwargs)


def _to(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    tensor: Tensor = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        like: Tensor = args[1]
        target, dtype, is_async = _place(like), like.dtype, False
    else:
        copies = kwargs.pop("copy", False)
        with _plain():
            parsed = torch._C._nn._parse_to(*args[1:], **kwargs)
        device, dtype, is_async, layout = parsed
        if layout is not None:
            kwargs["memory_format"] = layout
        if device is not None and device.type not in ("cuda", "cpu"):
            return func(*args, **kwargs)
        if _real_device_of(tensor).type != "cpu":
            return func(*args, **kwargs)
        target = place if device is None else (None if device.type == "cpu" else _number(device))
        if copies:
            tensor = tensor.clone()
    if place == target:
        if dtype is None or dtype == tensor.dtype:
            return tensor
        with _plain() if _state.unobserved else ExitStack():
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype)
    waits = not (is_async and place is None and _is_pinned(tensor))
    if tensor.numel():
        # A copy that makes a new tensor is not recorded, so a capture must not hold one.
        _forbid_in_captures("a copy by .to", place)
        _copied(place, target, ".to", waits)
    with unobserved(), _plain():
        out = tensor.detach().clone() if dtype is None else tensor.detach().to(dtype, copy=True)
    if target is not None:
        _tag(out, target)
    else:
        _untag(out)
    return out


def _untag(tensor: Tensor) -> None:
    with _plain():
        _tags.pop(tensor.untyped_storage()._cdata, None)


def _real_device_of(tensor: Tensor) -> torch.device:
    with _plain():
        device: torch.device = _real_device(tensor)
    return device


def _cuda(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return _to(func, [args[0], torch.device("cuda", _number(device) or 0)], {}, place)


def _cpu(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    return _to(func, [args[0], CPU], {}, place)


def _tolist(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    if place is not None:
        _copied(place, None, "tolist", True)
    with unobserved(), _plain():
        return func(*args, **kwargs)


def _numpy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    if place is not None:
        raise TypeError(f"can't convert cuda:{place} device type tensor to numpy, at {_line()}")
    return func(*args, **kwargs)


def _ask_pinned(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    return _is_pinned(args[0])


def _pin_memory(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    if place is not None:
        raise RuntimeError("cannot pin a tensor of a device: only dense CPU tensors can be pinned")
    if _is_pinned(args[0]):
        return args[0]
    with unobserved(), _plain():
        return _pin(args[0].clone())


def _type_as(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    return _to(func, args, {}, place)


def _item(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    """Indexing by a list makes a tensor of it on the device, as torch does."""
    if place is None or not isinstance(args[1], list):
        return func(*args, **kwargs)
    with unobserved(), _plain():
        index = _tag(torch.tensor(args[1]), place)
    _copied(None, place, "a list as index", True)
    return func(args[0], index, *args[2:], **kwargs)


def _deepcopy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None) -> Any:
    with unobserved(), _plain():
        out = func(*args, **kwargs)
    return out if place is None else _tag(out, place)


_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cuda": _cuda,
    "cpu": _cpu,
    "tolist": _tolist,
    "numpy": _numpy,
    "__array__": _numpy,
    "is_pinned": _ask_pinned,
    "pin_memory": _pin_memory,
    "type_as": _type_as,
    "__getitem__": _item,
    "__setitem__": _item,
    "__deepcopy__": _deepcopy,
}


# -- streams, events and graphs -----------------------------------------------------------------


class Event:
    """A mark in a stream; all that was launched before it is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _sync("event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    """A queue of one device's work, in which everything runs at once."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.place = _number(device)
        self.capturing: Graph | None = None
        self._before: tuple[int, Stream] | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.place)

    @property
    def device_index(self) -> int:
        assert self.place is not None
        return self.place

    def wait_stream(self, other: Stream) -> None:
        # A stream that waits for a captured one is captured with it.
        if other.capturing is not None and other.place == self.place:
            self._join(other.capturing)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.wait_stream(event.stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _sync("stream.synchronize", self.place)

    def _join(self, graph: Graph) -> None:
        if self.capturing is None:
            self.capturing = graph
            graph.streams.append(self)

    def __enter__(self) -> Stream:
        assert self.place is not None
        self._before = _state.device, current_stream(self.place)
        _state.device, _state.streams[self.place] = self.place, self
        return self

    def __exit__(self, *raised: Any) -> None:
        assert self._before is not None and self.place is not None
        _state.device, _state.streams[self.place] = self._before
        self._before = None


_default_streams: dict[int, Stream] = {}


def current_stream(device: Any = None) -> Stream:
    place = _number(device)
    assert place is not None
    return _state.streams.setdefault(place, default_stream(place))


def default_stream(device: Any = None) -> Stream:
    place = _number(device)
    assert place is not None
    if place not in _default_streams:
        _default_streams[place] = Stream(place)
    return _default_streams[place]


@contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _set_stream(stream: Stream) -> None:
    assert stream.place is not None
    _state.device, _state.streams[stream.place] = stream.place, stream


class _Device:
    """``torch.cuda.device``: the device that work without one goes to."""

    def __init__(self, device: Any) -> None:
        self._place = _number(device)

    def __enter__(self) -> None:
        self._before = _state.device
        if self._place is not None and self._place >= 0:
            _state.device = self._place

    def __exit__(self, *raised: Any) -> None:
        _state.device = self._before


_pools: dict[Any, list[Graph]] = {}


class Graph:
    """``torch.cuda.CUDAGraph``: operations in the order in which they were captured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.streams: list[Stream] = []
        self._steps: list[tuple[Callable[[], Any], list[Tensor], bool]] = []
        self._pool: Any = None
        self._is_fresh = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = current_stream()
        if stream is default_stream(stream.place):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if stream.capturing is not None:
            raise RuntimeError("this stream is being captured already")
        self._pool = _new_pool() if pool is None else pool
        _record.counts["capture"] += 1
        stream._join(self)

    def capture_end(self) -> None:
        for stream in self.streams:
            stream.capturing = None
        self.streams.clear()
        _pools.setdefault(self._pool, []).append(self)
        self._is_fresh = True
        self._spoil_later()
        _record.sizes.append(len(self._steps))
        if not self._steps and sys.exc_info()[0] is None:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be "
                "captured on wrong device or stream.",
                stacklevel=3,
            )

    def add(self, run: Callable[[], Any], out: Any, mutates: bool) -> None:
        results = [] if mutates else [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._steps.append((run, results, mutates))

    def replay(self) -> None:
        _record.counts["replay"] += 1
        self._spoil_later()
        with unobserved():
            for run, results, mutates in self._steps:
                out = run()
                if mutates:
                    continue
                new = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
                for old, fresh in zip(results, new, strict=True):
                    old.copy_(fresh)
        self._is_fresh = True

    def _spoil_later(self) -> None:
        """Overwrites what graphs captured later in the pool hold: they may use the same memory."""
        graphs = _pools.get(self._pool, [])
        later = graphs[graphs.index(self) + 1 :] if self in graphs else []
        with unobserved():
            for graph in later:
                if graph._is_fresh:
                    for _, results, _ in graph._steps:
                        for result in results:
                            if result.is_floating_point():
                                result.fill_(float("nan"))
                graph._is_fresh = False

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        self._steps.clear()
        if self in _pools.get(self._pool, []):
            _pools[self._pool].remove(self)

    def enable_debug_mode(self) -> None: ...


class Capture:
    """``torch.cuda.graph``. Without a ``stream`` it takes one that all captures share, which is a
    stream of the device on which the first of them was made, as torch's is."""

    shared_stream: Stream | None = None

    def __init__(
        self,
        cuda_graph: Graph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        if Capture.shared_stream is None:
            Capture.shared_stream = Stream()
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        self._stream = stream or Capture.shared_stream

    def __enter__(self) -> None:
        _sync("torch.cuda.graph")
        self._stream.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *raised: Any) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*raised)


def _new_pool() -> tuple[int, int]:
    pool = 0, len(_pools) + 1
    _pools[pool] = []
    return pool


# -- torch.cuda ---------------------------------------------------------------------------------


def _allocated(device: Any = None) -> int:
    place = _number(device)
    with _plain():
        storages = [alive for alive, at in list(_tags.values()) if at == place]
        used = 0
        for each in storages:
            if not each.expired():
                # The weak reference's address is the storage's own.
                storage = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
                used += 0 if storage is None else storage.nbytes()
    assert place is not None
    _peaks[place] = max(_peaks[place], used)
    return used


def _peak(device: Any = None) -> int:
    _allocated(device)
    return _peaks[_number(device)]


def _reset_peak(device: Any = None) -> None:
    _peaks[_number(device)] = 0
    _allocated(device)


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="pretended",
        major=9,
        minor=0,
        total_memory=TOTAL_MEMORY,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        warp_size=32,
    )


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _set_device(device: Any) -> None:
    place = _number(device)
    assert place is not None
    _state.device = place


def _is_capturing() -> bool:
    return current_stream().capturing is not None


def _answers(devices: int) -> dict[str, Any]:
    """What ``torch.cuda`` answers, by name."""
    return {
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
        "_lazy_init": _nothing,
        "current_device": lambda: _state.device,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "device": _Device,
        "device_count": lambda: devices,
        "empty_cache": _nothing,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": _properties,
        "graph": Capture,
        "graph_pool_handle": _new_pool,
        "init": _nothing,
        "ipc_collect": _nothing,
        "is_available": lambda: devices > 0,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": _is_capturing,
        "is_initialized": lambda: True,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "max_memory_allocated": _peak,
        "max_memory_reserved": _peak,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - _allocated(device), TOTAL_MEMORY),
        "memory_allocated": _allocated,
        "memory_reserved": _allocated,
        "reset_peak_memory_stats": _reset_peak,
        "set_device": _set_device,
        "set_stream": _set_stream,
        "stream": _use_stream,
        "synchronize": lambda device=None: _sync("torch.cuda.synchronize"),
    }


@contextmanager
def pretend_gpus(devices: int = 1) -> Iterator[Record]:
    """Makes torch see this many CUDA devices for the length of a block.

    Gives the record of what happens on them. Blocks do not nest. Whatever asks for the device of
    a tensor after the block hears "cpu" again.
    """
    if torch.cuda.is_available():
        raise RuntimeError("a machine with a GPU needs no pretended one")
    if isinstance(torch.Tensor.__dict__.get("device"), property):
        raise RuntimeError("a pretended GPU is there already")
    # torch imports this at some first use, and it must see torch.cuda as it is.
    importlib.import_module("torch._dynamo")
    _record.clear()
    thread_run = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Calls(), _Operations():
            thread_run(thread)

    with ExitStack() as stack:
        stack.callback(_forget_everything)
        stack.callback(_forget_cached_answers)
        for name, answer in _answers(devices).items():
            stack.enter_context(patch.object(torch.cuda, name, answer, create=True))
        stack.enter_context(patch.object(threading.Thread, "run", run))
        for name, answer in {
            "device": property(_device),
            "is_cuda": property(lambda tensor: _place(tensor) is not None),
            "get_device": lambda tensor: -1 if (at := _place(tensor)) is None else at,
        }.items():
            setattr(torch.Tensor, name, answer)
            stack.callback(delattr, torch.Tensor, name)
        _forget_cached_answers()
        stack.enter_context(_Calls())
        stack.enter_context(_Operations())
        yield _record


def _forget_everything() -> None:
    _tags.clear()
    _pinned.clear()
    _pools.clear()
    _peaks.clear()
    _default_streams.clear()
    _state.streams.clear()
    _state.device = 0
    Capture.shared_stream = None


def _forget_cached_answers() -> None:
    """Clears what transformers remembers of the devices there are."""
    from transformers.utils import import_utils

    for value in list(vars(import_utils).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
