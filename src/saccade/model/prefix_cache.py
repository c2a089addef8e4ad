"""A cache of results that later requests use again, within a number of bytes.

Four kinds of values share the bytes: decoded media, what processors computed from them (a server's
request reader stores these two), the outputs of a vision tower, and the keys and values of prompts.
The value used least recently is dropped first.

Values are looked up by content: pixels by a digest, a prompt by its rows (embeddings and
positions). A prompt that a view, a template or another model changed is therefore another prompt.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.core.prompt import Prompt
from saccade.model.cache import Cache, send_to_device

T = TypeVar("T")

MIN_NEW_ROWS = 64  # Prompts with fewer new rows are not stored: prefilling those again is cheaper.
PREPROCESSORS = ("image_processor", "video_processor")  # of Hugging Face's processors


class PrefixCache:
    """Stores values by key, up to ``max_bytes``. Any thread may call it."""

    runs_media_separately = False
    """Whether the vision tower is to run each new medium of a prompt by itself. ``vision_cache``
    asks this of every store of outputs. With this cache neighbouring new media run together, and
    their outputs are stored as one value."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._digests: Any = WeakTensorKeyDictionary()  # each tensor's version and its digest

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        """Returns a value and marks it as the one used last; None where there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Stores a value of ``size`` bytes, and drops the least recently used until all fit.

        A value that is larger than the whole cache is not stored.
        """
        with self._lock:
            self._remove(key)
            if size > self.max_bytes:
                return
            self._entries[key] = value, size
            self.bytes += size
            while self.bytes > self.max_bytes:
                self._remove(next(iter(self._entries)))

    def drop(self, key: Hashable) -> None:
        """Removes a value, if there is one."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: Hashable) -> None:
        """Removes a value, if there is one, for a caller that has the lock."""
        self.bytes -= self._entries.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Removes all values."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0

    def items(self) -> list[tuple[Hashable, Any]]:
        """Returns all keys and values there are now, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._entries.items()]

    def get_or_compute(
        self, key: Hashable, compute: Callable[[], T], size_of: Callable[[T], int]
    ) -> T:
        """Returns a value; computes and stores it where there is none."""
        value = self.get(key)
        if value is None:
            value = compute()
            self.put(key, value, size_of(value))
        return value

    def move_pixels(self, inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Returns a processor's output with its pixels on a device.

        Their digests are computed before they are moved, because that is cheaper.
        """
        moved = dict(inputs)
        for name, value in inputs.items():
            is_pixels = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
            # The digest of an inference tensor cannot be remembered, see ``_remembered_digest``.
            if is_pixels and value.device != device and not value.is_inference():
                pixels = send_to_device(value, device)
                moved[name] = pixels
                self._digests[pixels] = pixels._version, _tensor_digest(value)
        return moved

    def digest(self, *values: Any) -> bytes:
        """Returns :func:`digest` of values.

        A tensor is read again only after it was written to. One that was made in inference mode is
        read every time.
        """
        return digest(*values, tensor_digest=self._remembered_digest)

    def _remembered_digest(self, tensor: Tensor) -> bytes:
        # An inference tensor has no version counter, so a write to it would go unnoticed.
        if tensor.is_inference():
            return _tensor_digest(tensor)
        version, tensor_digest = self._digests.get(tensor, (None, b""))
        if version != tensor._version:
            tensor_digest = _tensor_digest(tensor)
            self._digests[tensor] = tensor._version, tensor_digest
        return bytes(tensor_digest)


# -- prompts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt that was prefilled, with its keys and values."""

    owner: object  # the model that computed the keys
    prompt: Prompt
    ids: Tensor  # the token id of each row of the prompt
    cache: Cache


class ModelPrefixes:
    """The prompts in a prefix cache that one model has prefilled."""

    def __init__(self, prefix_cache: PrefixCache, owner: object) -> None:
        self._prefix_cache, self._owner = prefix_cache, owner

    def copy_longest(self, prompt: Prompt, cache: Cache, max_rows: int) -> tuple[int, Hashable]:
        """Copies the longest stored prefix of a prompt, ``max_rows`` at most, to an empty cache.

        Returns the number of copied rows and the key of the stored prompt; (0, None) where no
        stored prompt begins in the same way. Layers with a recurrent state have it for some lengths
        only. So fewer rows may be copied than agree, even none of them.
        """
        ids = _row_ids(prompt)
        best_rows = 0
        best_key: Hashable = None
        best: CachedPrompt | None = None
        for key, value in self._prefix_cache.items():
            is_own = isinstance(value, CachedPrompt) and value.owner is self._owner
            if not is_own or not _can_continue(value.cache, cache):
                continue
            # Ids are compared first, because that is cheaper than comparing embeddings.
            if _common_ids(value.ids, ids) > best_rows:
                rows = common_rows(value.prompt, prompt)
                if rows > best_rows:
                    best_rows, best_key, best = rows, key, value
        if best is None:
            return 0, None
        self._prefix_cache.get(best_key)  # This marks it as used.
        # A cache with recurrent states can be cut back to some lengths only.
        copied_rows = best.cache.nearest_length(min(best_rows, max_rows))
        cache.extend(best.cache, 0, copied_rows)
        return copied_rows, best_key

    def add(self, prompt: Prompt, cache: Cache, prefix_key: Hashable) -> None:
        """Stores a prompt that was prefilled, if enough of it is new.

        ``prefix_key`` is the key of the stored prompt it began with, or None. That prompt is
        dropped if this one continues all of it.
        """
        prefix: CachedPrompt | None = None
        if prefix_key is not None:
            prefix = self._prefix_cache.get(prefix_key)
        shared_rows = 0 if prefix is None else common_rows(prefix.prompt, prompt)
        if len(prompt) - shared_rows < MIN_NEW_ROWS:
            return
        if prefix is not None and shared_rows == len(prefix.prompt):
            self._prefix_cache.drop(prefix_key)
        copied = cache.copy_rows()
        if cache.hidden is not None:
            copied.hidden = cache.hidden.copy(len(prompt))
        cached_prompt = CachedPrompt(self._owner, prompt, _row_ids(prompt), copied)
        prompt_bytes = tensor_bytes([prompt.embeds, prompt.positions, *prompt.media.deepstack])
        # Prompts are found by comparing their rows, so a key need only be unique: it is the cache.
        self._prefix_cache.put(copied, cached_prompt, copied.bytes + prompt_bytes)


def _can_continue(stored: Cache, cache: Cache) -> bool:
    """Returns whether a prompt in an empty cache can begin with rows of a stored one.

    A cache that evicts the keys behind a window cannot continue one that keeps all keys, nor the
    other way round. The stored one must have the hidden states that the cache needs, if any.
    """
    if stored.evicts_keys != cache.evicts_keys:
        return False
    if cache.hidden is None:
        return True
    return stored.hidden is not None and stored.hidden.layers == cache.hidden.layers


def common_rows(one: Prompt, other: Prompt) -> int:
    """Returns how many leading rows of two prompts are equal, so that their keys are equal too.

    Rows are compared by their embeddings and positions, by whether they are visual, by deepstack
    rows (which some models add to the visual rows of their first layers), by the last row that they
    attend to, and by what else a model reads of each row (``Media.row_arguments``).
    """
    length = min(len(one), len(other))
    equal = (one.embeds[:length] == other.embeds[:length]).all(-1)
    equal &= (one.positions[:, :length] == other.positions[:, :length]).all(0)
    equal &= one.visual[:length] == other.visual[:length]
    if one.media.deepstack and other.media.deepstack:  # A prompt without media has none.
        visual_rows = min(int(one.visual[:length].sum()), int(other.visual[:length].sum()))
        same = torch.ones(visual_rows, dtype=torch.bool, device=equal.device)
        for level, other_level in zip(one.media.deepstack, other.media.deepstack, strict=True):
            same &= (level[:visual_rows] == other_level[:visual_rows]).all(-1)
        rows = one.visual[:length].nonzero()[:visual_rows, 0]
        equal[rows] &= same
    if one.media.last_visible_row is not None or other.media.last_visible_row is not None:
        equal &= _last_visible_rows(one)[:length] == _last_visible_rows(other)[:length]
    for name in {*one.media.row_arguments} & {*other.media.row_arguments}:
        values = one.media.row_arguments[name]
        other_values = other.media.row_arguments[name]
        equal &= (values[:length] == other_values[:length]).reshape(length, -1).all(-1)
    # The keys of a row that attends to later rows depend on those. The prompt is therefore not cut
    # inside a picture whose rows do so.
    return one.largest_cut(_leading_true(equal))


def _last_visible_rows(prompt: Prompt) -> Int[Tensor, " len"]:
    """Returns the last row that each row of a prompt attends to; with causal attention, itself."""
    if prompt.media.last_visible_row is not None:
        return prompt.media.last_visible_row
    return torch.arange(len(prompt), device=prompt.embeds.device)


def _row_ids(prompt: Prompt) -> Tensor:
    """Returns the token id of each row of a prompt."""
    return prompt.full_ids[prompt.places]


def _common_ids(one: Tensor, other: Tensor) -> int:
    """Returns how many leading ids are equal."""
    length = min(len(one), len(other))
    return _leading_true(one[:length] == other[:length])


def _leading_true(mask: Tensor) -> int:
    """Returns how many of a mask's first entries are true."""
    return len(mask) if bool(mask.all()) else int(mask.int().argmin())


# -- calls of processors -------------------------------------------------------------------------


CallInterceptor = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(a method's name, the method, its arguments, those by name) -> what the call returns."""


@contextmanager
def cache_preprocessing(processor: Any, prefix_cache: PrefixCache | None) -> Iterator[None]:
    """While this lasts a processor does not process the same pictures and videos again.

    Without a prefix cache it processes them as usual.
    """
    with ExitStack() as stack:
        for preprocessor in (vars(processor).get(name) for name in PREPROCESSORS):
            if prefix_cache is not None and preprocessor is not None:
                intercept = _repeat_cached_output(prefix_cache, id(preprocessor))
                stack.enter_context(intercept_calls(preprocessor, ["preprocess"], intercept))
        yield


def _repeat_cached_output(prefix_cache: PrefixCache, owner: int) -> CallInterceptor:
    """Returns an interceptor that runs a method once for equal arguments and then repeats its
    output."""

    def intercept(
        name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments = prefix_cache.digest(args, sorted(kwargs.items(), key=lambda kv: kv[0]))
        output = prefix_cache.get_or_compute(
            (owner, name, arguments), lambda: method(*args, **kwargs), tensor_bytes
        )
        # A caller may remove entries from a mapping that it gets.
        return copy(output) if isinstance(output, MutableMapping) else output

    return intercept


@contextmanager
def intercept_calls(owner: Any, names: Sequence[str], intercept: CallInterceptor) -> Iterator[None]:
    """Within this context, calls of these methods of ``owner`` go to ``intercept`` instead. A
    method that is called inside an intercepted call runs as usual."""
    is_inside = False

    def intercepted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return method(*args, **kwargs)
            is_inside = True
            try:
                return intercept(name, method, args, kwargs)
            finally:
                is_inside = False

        return call

    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    vars(owner).update({name: intercepted(name, getattr(owner, name)) for name in names})
    try:
        yield
    finally:
        for name in names:
            del vars(owner)[name]
        vars(owner).update(before)


# -- digests and sizes -------------------------------------------------------------------------


def _tensor_digest(value: Tensor) -> bytes:
    """Returns a digest of a tensor's type, shape and bytes."""
    flat = value.detach().cpu().contiguous()
    hasher = hashlib.blake2b(f"{flat.dtype}{tuple(flat.shape)}".encode(), digest_size=20)
    hasher.update(flat.view(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def digest(*values: Any, tensor_digest: Callable[[Tensor], bytes] = _tensor_digest) -> bytes:
    """Returns a digest of values.

    Tensors and arrays count by their types, shapes and bytes, bytes by themselves, lists, tuples
    and dicts by their items, and anything else by its ``repr``.
    """
    hasher = hashlib.blake2b(digest_size=20)
    _add_to_digest(hasher, values, tensor_digest)
    return hasher.digest()


def _add_to_digest(
    hasher: hashlib.blake2b, value: Any, tensor_digest: Callable[[Tensor], bytes]
) -> None:
    """Adds a value and its items to a digest."""
    # This is no nested function of ``digest``, because one that calls itself refers to itself, and
    # would keep the values in memory until Python's garbage collector runs.
    match value:
        case Tensor():
            hasher.update(tensor_digest(value))
        case np.ndarray():
            hasher.update(f"{value.dtype}{value.shape}".encode())
            hasher.update(np.ascontiguousarray(value).data)
        case bytes() | bytearray():
            hasher.update(f"{len(value)}:".encode())
            hasher.update(value)
        case list() | tuple():
            hasher.update(f"[{len(value)}".encode())
            for each in value:
                _add_to_digest(hasher, each, tensor_digest)
        case dict():
            _add_to_digest(hasher, list(value.items()), tensor_digest)
        case _:
            _add_to_digest(hasher, repr(value).encode(), tensor_digest)


def tensor_bytes(value: Any) -> int:
    """Returns the bytes of all tensors in an output."""
    match value:
        case Tensor():
            return value.numel() * value.element_size()
        case list() | tuple():
            return sum(map(tensor_bytes, value))
        case Mapping():
            return sum(map(tensor_bytes, value.values()))
    return 0
