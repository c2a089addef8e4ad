"""Stores outputs of a vision tower, so that later prompts with the same media do not run it again.

A prompt's pictures reach the tower in one call. Here such a call is cut into its media (pictures
and videos), and the tower runs only on those that are new. Neighbouring new media run together, and
are stored as one output under the digests of all of them. Such an output is never taken apart:
outputs of several runs are only joined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from saccade.model.prefix_cache import digest, intercept_calls, tensor_bytes

VISION_METHODS = ("get_image_features", "get_video_features")  # of Hugging Face's models
UNREAD_FIELDS = {"hidden_states", "attentions"}  # Language models do not read these of an output.
# Fields of an output that are lists with one tensor for each layer. They are joined layer by layer.
FIELDS_BY_LAYER = {"deepstack_features"}


@runtime_checkable
class Store(Protocol):
    """Where outputs are stored: a server's ``PrefixCache``, or a conversation's own."""

    @property
    def runs_media_separately(self) -> bool:
        """Whether new media run one by one. Otherwise those side by side run together."""

    def get(self, key: Hashable) -> Any:
        """Returns what is stored under a key; None where nothing is."""

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Stores a value of ``size`` bytes."""

    def digest(self, *values: Any) -> bytes:
        """Returns a digest of values, the same for equal values."""


class ConversationVision:
    """What the vision towers of target and draft returned for the media of one conversation.

    Outputs that a model's latest prompt did not use are dropped, so at most one prompt's outputs
    are held for each model. With ``runs_media_separately`` each medium runs by itself, so that
    neighbours can be dropped one by one.
    """

    def __init__(self, runs_media_separately: bool = False) -> None:
        self.runs_media_separately = runs_media_separately
        self._outputs: dict[Hashable, Any] = {}
        self._used: set[Hashable] = set()

    def get(self, key: Hashable) -> Any:
        """Returns an output and counts it as used; None where there is none."""
        if key in self._outputs:
            self._used.add(key)
        return self._outputs.get(key)

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Stores an output; its size in bytes does not matter here."""
        self._outputs[key] = value
        self._used.add(key)

    def digest(self, *values: Any) -> bytes:
        """Returns :func:`saccade.model.prefix_cache.digest` of values."""
        return digest(*values)

    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        """While a model reads a prompt, notes which outputs the model uses. Then drops all other
        outputs of this model, whose keys begin with the ``id`` of its base model."""
        model_id = id(model.base_model)
        self._used = set()
        yield
        self._outputs = {
            key: value
            for key, value in self._outputs.items()
            if key in self._used or not (isinstance(key, tuple) and key[0] == model_id)
        }

    @property
    def bytes(self) -> int:
        """Bytes of all outputs that are stored."""
        return sum(map(tensor_bytes, self._outputs.values()))


@dataclass(frozen=True)
class MediaCall:
    """A call of a vision method, cut into its media.

    ``row_bounds`` has a 0, and then the end of each medium among the rows of the pixels. Two
    pictures of 64 rows each give 0, 64, 128.
    """

    method: Callable[..., Any]
    arguments: Mapping[str, Any]  # all arguments, by their names
    pixels: str  # the name of the argument that has the pixels
    row_bounds: Sequence[int]

    @classmethod
    def of(
        cls, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> MediaCall | None:
        """Returns the call cut into its media; None where its arguments show no way to do so.

        With a ``..._grid_thw`` argument, a medium has t * h * w rows of the pixels. Without such an
        argument each row is a medium, and the pixels must have three dimensions or more.
        """
        # All arguments get their names. That is impossible for those of a ``*args``.
        try:
            bound = inspect.signature(method).bind(*args, **kwargs)
        except TypeError:
            return None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                return None
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        tensors = {name: each for name, each in arguments.items() if isinstance(each, Tensor)}
        # The pixels are the first tensor of floats.
        pixels = next((name for name, each in tensors.items() if each.is_floating_point()), None)
        if pixels is None:
            return None
        grid = next((each for name, each in tensors.items() if name.endswith("grid_thw")), None)
        counts = [1] * len(tensors[pixels]) if tensors[pixels].ndim >= 3 else []
        if grid is not None:
            counts = grid.prod(-1).tolist()
        row_bounds = [0, *torch.tensor(counts, dtype=torch.long).cumsum(0).tolist()]
        call = cls(method, arguments, pixels, row_bounds)
        covers_pixels = bool(counts) and row_bounds[-1] == len(tensors[pixels])
        # Each tensor must have one entry for each medium, or one for each row of the pixels, so
        # that :meth:`part` can cut it.
        lengths = {each.shape[0] if each.ndim else 0 for each in tensors.values()}
        can_be_cut = lengths <= {len(call), row_bounds[-1]}
        return call if covers_pixels and can_be_cut else None

    def __len__(self) -> int:
        return len(self.row_bounds) - 1

    def part(self, start: int, stop: int) -> dict[str, Any]:
        """Returns the arguments for the media ``start:stop`` alone."""
        if (start, stop) == (0, len(self)):
            return dict(self.arguments)

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if len(value) == len(self):  # It has one entry for each medium.
                return value[start:stop]
            return value[self.row_bounds[start] : self.row_bounds[stop]]

        return {name: cut(value) for name, value in self.arguments.items()}

    def run(self, start: int, stop: int) -> Any:
        """Runs the method on the media ``start:stop``."""
        return self.method(**self.part(start, stop))


def cache_vision(model: Any, store: Store | None) -> AbstractContextManager[None]:
    """Returns a context in which the model's vision tower does not run on media whose output is
    stored. Without a store it changes nothing."""
    if store is None:
        return nullcontext()
    base_model = model.base_model

    def run_or_reuse(
        name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Is called in the place of a vision method, and returns the method's output."""
        media = MediaCall.of(method, args, kwargs)
        if media is not None:
            return run_new_media(store, (id(base_model), name), media)
        # A call that cannot be cut is stored as a whole.
        key = id(base_model), name, store.digest(args, sorted(kwargs.items()))
        output = store.get(key)
        if output is None:
            output = method(*args, **kwargs)
            store.put(key, output, tensor_bytes(output))
        return copy(output)

    names = [name for name in VISION_METHODS if name in dir(type(base_model))]
    return intercept_calls(base_model, names, run_or_reuse)


def run_new_media(store: Store, owner: tuple[Hashable, ...], media: MediaCall) -> Any:
    """Returns the output of a call, and runs the call only on those media that the store lacks.

    ``owner`` begins every key of the store: it names the model and its method. Neighbouring new
    media run together, or one by one if the store ``runs_media_separately``. Where it is unknown
    how the outputs can be joined, the method runs once more on all media.
    """
    digests = [
        store.digest(sorted(media.part(number, number + 1).items())) for number in range(len(media))
    ]
    outputs: list[Any] = []
    first_new = 0  # Media from here up to ``at`` are new and have not run yet.
    at = 0
    while at < len(media):
        length, output = _longest_stored(store, owner, digests, at)
        if length:
            if first_new < at:
                outputs.append(_run_and_store(store, owner, digests, media, first_new, at))
            outputs.append(output)
            at += length
            first_new = at
        else:
            at += 1
            if store.runs_media_separately:
                outputs.append(_run_and_store(store, owner, digests, media, first_new, at))
                first_new = at
    if first_new < at:
        outputs.append(_run_and_store(store, owner, digests, media, first_new, at))
    joined = join_outputs(outputs)
    if joined is None:
        joined = _run_and_store(store, owner, digests, media, start=0, stop=len(media))
    return copy(joined)


def _longest_stored(
    store: Store, owner: tuple[Hashable, ...], digests: Sequence[bytes], start: int
) -> tuple[int, Any]:
    """Finds the longest run of media from number ``start`` onwards whose common output is stored.

    Returns how many media the run has, and their common output; (0, None) where there is none.
    """
    # How many media each earlier run had that began with this medium, such as {1, 3}.
    lengths: frozenset[int] = store.get((*owner, digests[start], "lengths")) or frozenset()
    for length in sorted(lengths, reverse=True):
        output = store.get((*owner, *digests[start : start + length]))
        if output is not None:
            return length, output
    return 0, None


def _run_and_store(
    store: Store,
    owner: tuple[Hashable, ...],
    digests: Sequence[bytes],
    media: MediaCall,
    start: int,
    stop: int,
) -> Any:
    """Runs media ``start:stop`` together and stores their output under all of their digests.

    The number of media is also added to the set of numbers that is stored under the first digest
    and "lengths". So :func:`_longest_stored` need not try every number.
    """
    output = media.run(start, stop)
    if isinstance(output, ModelOutput):
        output = _make_output(type(output), _read_fields(output))
    key = *owner, digests[start], "lengths"
    lengths: frozenset[int] = store.get(key) or frozenset()
    store.put(key, lengths | {stop - start}, 0)
    store.put((*owner, *digests[start:stop]), output, tensor_bytes(output))
    return output


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Joins the outputs of consecutive media into one; returns None where it is unknown how."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return join_values(outputs)
    if not isinstance(first, ModelOutput):
        return None
    values = [_read_fields(each) for each in outputs]
    if any(each.keys() != values[0].keys() for each in values):
        return None
    joined = {name: _join_field(name, [each[name] for each in values]) for name in values[0]}
    if any(each is None for each in joined.values()):
        return None
    return _make_output(type(first), joined)


def _read_fields(output: ModelOutput) -> dict[str, Any]:
    """Returns the fields of an output that language models read.

    In transformers 5.17 models also set attributes that the class of their output does not declare,
    so attributes are read besides declared fields.
    """
    return {
        name: each
        for name, each in (vars(output) | {**output}).items()
        if each is not None and name not in UNREAD_FIELDS
    }


def _make_output(kind: type[ModelOutput], values: Mapping[str, Any]) -> ModelOutput:
    """Returns an output with these values. A value that is no field of its class becomes an
    attribute."""
    make: Any = kind
    declared = {each.name for each in fields(make)}
    output: ModelOutput = make(**{name: values[name] for name in values if name in declared})
    for name in values.keys() - declared:
        setattr(output, name, values[name])
    return output


def _join_field(name: str, values: Sequence[Any]) -> Any:
    """Joins a field of several outputs; returns None where it is unknown how."""
    if name not in FIELDS_BY_LAYER:
        return join_values(values)
    layers = [join_values(layer) for layer in zip(*values, strict=True)]
    return None if any(layer is None for layer in layers) else layers


def join_values(values: Sequence[Any]) -> Any:
    """Joins tensors along their first dimension, or lists and tuples that have entries by medium.

    Returns None for anything else, and for tensors whose further dimensions differ.
    """
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat([*values]) if len({each.shape[1:] for each in values}) == 1 else None
    if isinstance(first, list | tuple):
        return type(first)(each for value in values for each in value)
    return None
