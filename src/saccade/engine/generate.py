"""Answers requests, from a processor's output to token ids.

``generate`` returns ids as Hugging Face's does, and transformers can call it by
``custom_generate``. ``run`` returns a :class:`Result`, and ``stream`` yields the rounds as they
happen. All three run one :class:`RequestBatch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, Unpack, cast, get_type_hints

import torch
from jaxtyping import Int
from torch import Tensor, nn

from saccade.core.errors import OptionError
from saccade.core.generation_settings import Settings
from saccade.core.prompt import Inputs
from saccade.core.result import Result, Round, added_text
from saccade.core.timing import Clock, Phase, ignore_phase
from saccade.drafting.recipe import Recipe
from saccade.engine.request import (
    NO_SETTINGS,
    Request,
    RequestArguments,
    check_streamer,
    current_backbone,
)
from saccade.engine.request_batch import RequestBatch
from saccade.methods import resolve
from saccade.model import kernels, memory
from saccade.model.backbone import Backbone

DEFAULT_METHOD = "auto"

Decode = Callable[[Sequence[int]], str]
Function = TypeVar("Function", bound=Callable[..., Any])


class Stream(Iterator[Round]):
    """Yields rounds as they happen. ``results`` has one entry per request once it is exhausted.

    ``on_phase`` is called as "costs" (timing forwards, where that was not done before), "vision",
    "prefill", "guide" and "decode" begin. With ``keep`` the caches stay in ``call`` afterwards, so
    that a later turn can continue from them.
    """

    def __init__(
        self,
        target: Backbone,
        request: Request,
        recipe: Recipe,
        *,
        draft: Backbone | None = None,
        on_phase: Phase | None = None,
        call: RequestBatch | None = None,
        keep: bool = False,
        exact: bool = False,
    ) -> None:
        phase = on_phase or ignore_phase
        same = call is not None and (call.target, call.draft) == (target, draft)
        if call is None or not same or not call.try_continue(request, recipe, exact):
            before = call
            call = RequestBatch(target, recipe, request, draft=draft, exact=exact, phase=phase)
            if before is not None:
                before.close()  # The method or the videos are others, so its caches are of no use.
        self.recipe = call.recipe  # as it was planned for this machine
        self.call: RequestBatch | None = call
        self.closed = False
        self.results: list[Result] = []
        self._ids: dict[int, list[int]] = {}  # emitted so far, by request
        self._rounds = self._decode(call, phase, keep)

    def __next__(self) -> Round:
        return next(self._rounds)

    def finish(self) -> list[Result]:
        """Decodes to the end and returns the results."""
        for _ in self:
            pass
        return self.results

    def close(self) -> None:
        """Stops decoding; nothing more is emitted."""
        self.closed = True
        self._rounds.close()

    def _with_spelling(self, round: Round, decode: Decode | None) -> Round:
        """Returns the round with a function for its text, which runs only if the text is read."""
        if decode is None:
            return round
        ids = self._ids.setdefault(round.request, [])
        ids += round.tokens
        ends = len(ids) - len(round.tokens), len(ids), round.finish is not None
        return replace(round, spell=partial(added_text, decode, ids, *ends))

    def _decode(self, call: RequestBatch, phase: Phase, keep: bool) -> Generator[Round, None, None]:
        peak = memory.PeakMemory(call.target.devices)

        def emit(round: Round) -> Round:
            """Frees a request that has ended, and adds the text to its round."""
            if round.finish is not None and not keep:
                call.end(round.request)
            return self._with_spelling(round, call.request.decode)

        try:
            for opening in call.read(phase, keep):
                if opening is not None:
                    yield emit(opening)
            phase("decode")
            clock = Clock(call.target.device)
            for round in call.rounds():
                yield emit(round)
            self.results = call.results(clock.since(), peak.bytes())
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            raise call.request.too_long(call.target) from error
        finally:
            kernels.release_threads()
            if not (keep and call.decoding):  # A later turn cannot continue half-read prompts.
                call.close()
                self.call, self.closed = None, True


class CallArguments(RequestArguments, total=False):
    """What a call may ask for beside its model and inputs."""

    draft: nn.Module | Backbone | None
    """The draft model, for methods that use one."""
    method: str | Recipe
    """A method's name with overrides, or a recipe; see ``saccade methods``."""
    exact: bool
    """Gives bit for bit the answer of ``method="ar", exact=True``, in bf16 and fp16 too. Drafts are
    chains then, and a forward costs as much as one of 16 rows. See ``docs/lossless.md``."""


@dataclass(frozen=True)
class _Call:
    """The arguments of a call: those of its request apart from the others."""

    draft: Backbone | None
    recipe: Recipe
    exact: bool
    request: RequestArguments

    @classmethod
    def of(cls, arguments: CallArguments) -> _Call:
        request: dict[str, Any] = {**arguments}
        draft, method = request.pop("draft", None), request.pop("method", DEFAULT_METHOD)
        return cls(
            None if draft is None else current_backbone(draft),
            method if isinstance(method, Recipe) else resolve(method),
            request.pop("exact", False),
            cast(RequestArguments, request),
        )


def _named(function: Function) -> Function:
    """Names the arguments of a call one by one in a function's signature, where editors and
    transformers look for them."""
    *own, rest = inspect.signature(function).parameters.values()
    defaults = {"method": DEFAULT_METHOD, "exact": False}
    hints = get_type_hints(CallArguments)
    named = [
        rest.replace(
            name=name,
            kind=rest.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=hint,
        )
        for name, hint in hints.items()
        if name in NO_SETTINGS or name not in RequestArguments.__annotations__
    ]
    settings = rest.replace(name="settings", annotation=Unpack[Settings])
    vars(function)["__signature__"] = inspect.Signature([*own, *named, settings])
    return function


@_named
def stream(
    model: nn.Module | Backbone,
    inputs: Inputs,
    *,
    on_phase: Phase | None = None,
    call: RequestBatch | None = None,
    keep: bool = False,
    **arguments: Unpack[CallArguments],
) -> Stream:
    """Yields the rounds of an answer as they happen; its ``results`` are there afterwards.

    Args:
        model: the target, a loaded Hugging Face model.
        inputs: what the target's processor returned, for one request or several.
        on_phase: called as each phase of the work begins; see :class:`Stream`.
        call: an earlier stream's ``call`` (made with ``keep``). ``inputs`` continue its
            conversation, and only the new tokens are read. Other videos or pixels start afresh.
        keep: leaves the caches for a later turn; see :class:`saccade.Conversation`.
        arguments: see :class:`CallArguments` and :class:`RequestArguments`. All others are
            ``GenerationConfig``'s names, of which :class:`GenerateArguments` lists those in use.
            ``max_new_tokens`` is 256 where neither they nor the model's config set a length.

    Raises:
        OptionError, MethodError, ModelError: before any work, in one sentence.
    """
    return _start(model, inputs, arguments, on_phase, call, keep)


def _start(
    model: nn.Module | Backbone,
    inputs: Inputs,
    arguments: CallArguments,
    on_phase: Phase | None,
    batch: RequestBatch | None = None,
    keep: bool = False,
) -> Stream:
    """Checks everything and returns the stream, before any work."""
    target, call = current_backbone(model), _Call.of(arguments)
    request = Request.of(target, inputs, **call.request)
    return Stream(
        target,
        request,
        call.recipe,
        draft=call.draft,
        on_phase=on_phase,
        call=batch,
        keep=keep,
        exact=call.exact,
    )


@_named
def run(
    model: nn.Module | Backbone,
    inputs: Inputs,
    *,
    on_phase: Phase | None = None,
    **arguments: Unpack[CallArguments],
) -> Result:
    """Returns one answer with its measures; arguments as :func:`stream`. One request at a time."""
    rounds = _start(model, inputs, arguments, on_phase)
    if len(inputs["input_ids"]) != 1:
        raise OptionError("saccade.run answers one request; use saccade.generate for a batch")
    return rounds.finish()[0]


@_named
@torch.no_grad()
def generate(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor,
    *,
    streamer: Any = None,
    **arguments: Unpack[CallArguments],
) -> Int[Tensor, "batch len"]:
    """Returns ids of prompt and answer, like Hugging Face's ``generate``; shorter answers are
    padded.

    Call it with a processor's output, or let transformers call it:
    ``model.generate(**inputs, custom_generate=saccade.generate, draft=..., method=...)``. In the
    second case the pixels have been read already, so a draft with a vision tower of its own needs
    ``draft_inputs=``. The arguments are those of :func:`stream`. ``streamer`` is a transformers
    streamer. Without a length (``max_new_tokens``, ``max_length``, or the model's generation
    config) an answer gets 256 tokens at most, and 20 where transformers calls this.
    """
    target, call = current_backbone(model), _Call.of(arguments)
    direct = not isinstance(inputs, Tensor)
    if isinstance(inputs, Tensor):
        ids = inputs
        request = Request.from_transformers(target, ids, **call.request)
        own_tower = call.draft is not None and not call.draft.shares_rows_with(target)
        has_pixels = call.request.get("draft_inputs") is not None
        if call.recipe.drafts and own_tower and not has_pixels and target.placeholders:
            raise OptionError(
                "transformers does not pass the pixels on, and this draft has a vision tower of "
                "its own: give draft_inputs= with the processor's output"
            )
    else:
        request = Request.of(target, inputs, **call.request)
        ids = inputs["input_ids"]
    check_streamer(streamer, len(ids))
    rounds = Stream(target, request, call.recipe, draft=call.draft, exact=call.exact)
    if streamer is not None and direct:
        streamer.put(ids.cpu())
    for round in rounds:
        if streamer is not None:
            streamer.put(torch.tensor(round.tokens))
    if streamer is not None:
        streamer.end()
    pad = request.limits.pad
    answers = [torch.tensor(result.ids, dtype=ids.dtype) for result in rounds.results]
    padded = nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=float(pad))
    return torch.cat([ids, padded.to(ids)], dim=1)
