"""What one request read and a later one need not read again, in so many bytes.

Four kinds share the bytes: decoded media and what processors made of them (a server's reader keeps
these), what a vision tower gave for pixels, and the keys and values of prompts' beginnings. What
was used least recently goes first.
All is found by its content: pixels by a digest, a prompt's rows by the rows themselves (embeddings
and positions), so that whatever a view, a template or another model changed is another prompt.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.core.prompt import Prompt
from saccade.model.cache import Cache

T = TypeVar("T")

WORTH = 64  # rows; fewer that are new are read again sooner than kept
LOOKS = ("get_image_features", "get_video_features")  # of Hugging Face's models
PREPARES = ("image_processor", "video_processor")  # of its processors


class Kept:
    """Values by key, up to ``most`` bytes; any thread may call."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._told: Any = WeakTensorKeyDictionary()  # tensors' versions and digests

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> Any:
        """The value, which is now the one used last; None where there is none."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Keeps a value of so many bytes, and lets go of what there is no room for any more."""
        self.drop(key)
        if size > self.most:
            return
        with self._lock:
            self._held[key] = value, size
            self.bytes += size
            while self.bytes > self.most:
                self.bytes -= self._held.popitem(last=False)[1][1]

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self.bytes -= self._held.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Lets go of everything."""
        with self._lock:
            self._held.clear()
            self.bytes = 0

    def items(self) -> list[tuple[Hashable, Any]]:
        """All there is at this moment, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._held.items()]

    def made(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value, made where there is none."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found, size(found))
        return found

    def send_pixels(self, inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """A processor's output with its pixels on a device, digested before they are sent there."""
        found = dict(inputs)
        for name, value in inputs.items():
            pixels = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
            if pixels and value.device != device and not value.is_inference():
                sent = found[name] = value.to(device)
                self._told[sent] = sent._version, _of_tensor(value)
        return found

    def digest(self, *values: Any) -> bytes:
        """:func:`digest`, which reads a tensor that is seen again only once."""

        def told(tensor: Tensor) -> bytes:
            if tensor.is_inference():  # it does not tell whether it was written to
                return _of_tensor(tensor)
            version, found = self._told.get(tensor, (None, b""))
            if version != tensor._version:
                found = _of_tensor(tensor)
                self._told[tensor] = tensor._version, found
            return found

        return digest(*values, told=told)


# -- prompts' beginnings ------------------------------------------------------------------------


@dataclass(frozen=True)
class Beginning:
    """A prompt that was read, and its keys and values."""

    owner: object  # whose keys these are
    prompt: Prompt
    ids: Tensor  # of its rows
    cache: Cache


class Beginnings:
    """What one model has read, among all that is kept."""

    def __init__(self, kept: Kept, owner: object) -> None:
        self._kept, self._owner = kept, owner

    def lend(self, prompt: Prompt, cache: Cache, most: int) -> tuple[int, Hashable]:
        """Copies to an empty cache the rows that the longest common beginning has, ``most`` at the
        highest; how many, and the key of whose they are."""
        ids = _ids(prompt)
        best, key, chosen = 0, None, None
        for name, each in self._kept.items():
            mine = isinstance(each, Beginning) and each.owner is self._owner
            if mine and _first_other(each.ids, ids) > best:
                same = shared(each.prompt, prompt)
                if same > best:
                    best, key, chosen = same, name, each
        if chosen is None:
            return 0, None
        self._kept.get(key)  # used just now
        rows = min(best, most)
        cache.extend(chosen.cache, 0, rows)
        return rows, key

    def keep(self, prompt: Prompt, cache: Cache, key: Hashable) -> None:
        """Keeps a prompt that was read, if enough of it is new; ``key`` is whose rows it began
        with, and goes where this one goes on from its end."""
        before: Beginning | None = None if key is None else self._kept.get(key)
        same = 0 if before is None else shared(before.prompt, prompt)
        if len(prompt) - same < WORTH:
            return
        if before is not None and same == len(before.prompt):
            self._kept.drop(key)
        rows = torch.arange(len(prompt), device=prompt.index.device)
        found = Beginning(self._owner, prompt, _ids(prompt), cache.select(rows, 0, pooled=False))
        own = size([prompt.embeds, prompt.positions, *prompt.media.deepstack])
        self._kept.put(found.cache, found, found.cache.bytes + own)


def shared(one: Prompt, other: Prompt) -> int:
    """With how many equal rows two prompts begin: embeddings, positions, what early layers add."""
    length = min(len(one), len(other))
    equal = (one.embeds[:length] == other.embeds[:length]).all(-1)
    equal &= (one.positions[:, :length] == other.positions[:, :length]).all(0)
    equal &= one.visual[:length] == other.visual[:length]
    if one.media.deepstack or other.media.deepstack:
        seen = min(int(one.visual[:length].sum()), int(other.visual[:length].sum()))
        same = torch.ones(seen, dtype=torch.bool, device=equal.device)
        for mine, theirs in zip(one.media.deepstack, other.media.deepstack, strict=True):
            same &= (mine[:seen] == theirs[:seen]).all(-1)
        rows = one.visual[:length].nonzero()[:seen, 0]
        equal[rows] &= same
    return length if bool(equal.all()) else int(equal.int().argmin())


def _ids(prompt: Prompt) -> Tensor:
    """Of its rows; they differ sooner than embeddings are compared."""
    return prompt.context[prompt.index]


def _first_other(one: Tensor, other: Tensor) -> int:
    length = min(len(one), len(other))
    equal = one[:length] == other[:length]
    return length if bool(equal.all()) else int(equal.int().argmin())


# -- what was looked at -------------------------------------------------------------------------


def looked_at(model: Any, kept: Kept | None) -> AbstractContextManager[None]:
    """What the model's vision tower gave for pixels before, it gives again without looking."""
    base = model.base_model
    names = [name for name in LOOKS if name in dir(type(base))]
    return nullcontext() if kept is None else remembering(base, names, kept)


@contextmanager
def prepared(processor: Any, kept: Kept | None) -> Iterator[None]:
    """What a processor made of pictures and videos before, it gives again without reckoning."""
    with ExitStack() as stack:
        for each in (vars(processor).get(name) for name in PREPARES):
            if kept is not None and each is not None:
                stack.enter_context(remembering(each, ["preprocess"], kept))
        yield


@contextmanager
def remembering(owner: Any, names: Sequence[str], kept: Kept) -> Iterator[None]:
    """These methods give for equal arguments what they gave before."""
    inside = False  # one of them may call the other

    def wrapped(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return look(*args, **kwargs)
            inside = True
            try:
                told = kept.digest(args, sorted(kwargs.items(), key=lambda kv: kv[0]))
                found = kept.made((id(owner), name, told), lambda: look(*args, **kwargs), size)
                # who gets a mapping may take from it
                return copy(found) if isinstance(found, MutableMapping) else found
            finally:
                inside = False

        return remembered

    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    vars(owner).update({name: wrapped(name, getattr(owner, name)) for name in names})
    try:
        yield
    finally:
        for name in names:
            del vars(owner)[name]
        vars(owner).update(before)


def _of_tensor(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous()
    found = hashlib.blake2b(f"{flat.dtype}{tuple(flat.shape)}".encode(), digest_size=20)
    found.update(flat.view(-1).view(torch.uint8).numpy().data)
    return found.digest()


def digest(*values: Any, told: Callable[[Tensor], bytes] = _of_tensor) -> bytes:
    """Of tensors and arrays by their bytes, of sequences and mappings by what they hold, else of
    the text."""
    found = hashlib.blake2b(digest_size=20)

    def add(value: Any) -> None:
        match value:
            case Tensor():
                found.update(told(value))
            case np.ndarray():
                found.update(f"{value.dtype}{value.shape}".encode())
                found.update(np.ascontiguousarray(value).data)
            case bytes() | bytearray():
                found.update(f"{len(value)}:".encode())
                found.update(value)
            case list() | tuple():
                found.update(f"[{len(value)}".encode())
                for each in value:
                    add(each)
            case dict():
                add(list(value.items()))
            case _:
                found.update(repr(value).encode())

    add(values)
    return found.digest()


def size(value: Any) -> int:
    """Bytes of the tensors that an output holds."""
    match value:
        case Tensor():
            return value.numel() * value.element_size()
        case list() | tuple():
            return sum(map(size, value))
        case Mapping():
            return sum(map(size, value.values()))
    return 0
