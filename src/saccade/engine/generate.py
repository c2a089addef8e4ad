"""Answers requests, from a processor's output to token ids.

``generate`` returns ids as Hugging Face's does, and transformers can call it by
``custom_generate``. ``run`` returns a :class:`Result`, and ``stream`` yields the rounds as they
happen. All three run one :class:`RequestBatch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import (
    Any,
    Literal,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    get_type_hints,
    overload,
    runtime_checkable,
)

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from saccade.core import generation_settings
from saccade.core.default_device import cpu_by_default
from saccade.core.errors import OptionError
from saccade.core.generation_settings import Settings
from saccade.core.prompt import Inputs
from saccade.core.result import Result, Round
from saccade.core.scoped_steps import each_within
from saccade.core.timing import Clock, Phase, ignore_phase
from saccade.drafting.recipe import Recipe
from saccade.engine.request import (
    NON_GENERATION_ARGUMENTS,
    Request,
    RequestArguments,
    check_streamer,
    current_backbone,
)
from saccade.engine.request_batch import RequestBatch
from saccade.engine.returned_scores import ReturnedScores
from saccade.engine.scopes import planning_scope, step_scope
from saccade.engine.transformers_call import current_transformers_call, is_from_transformers
from saccade.methods import resolve
from saccade.model import kernels, memory
from saccade.model.backbone import Backbone
from saccade.model.kernels.few_bits import rounding_named
from saccade.model.vision_cache import ConversationVision

DEFAULT_METHOD = "auto"

Function = TypeVar("Function", bound=Callable[..., Any])


class Stream(Iterator[Round]):
    """Yields rounds as they happen. After the last one ``results`` has one entry per answer.

    ``on_phase`` is called with the name of each phase as the phase begins: "costs" (timing
    forwards, where that was not done before), "vision", "prefill", "guide" (choosing what the draft
    sees, and the draft's own prefill) and "decode". With ``keep`` the caches stay in ``batch``
    afterwards, so that a later turn can continue from them. Without it, and after an error,
    ``batch`` is None.
    """

    def __init__(
        self,
        target: Backbone,
        request: Request,
        recipe: Recipe,
        *,
        draft: Backbone | None = None,
        on_phase: Phase | None = None,
        batch: RequestBatch | None = None,
        keep: bool = False,
        exact: bool = False,
        vision: ConversationVision | None = None,
    ) -> None:
        phase = on_phase or ignore_phase
        # The old batch goes on if it has the same models and its caches can be continued. Otherwise
        # a new one is made.
        has_same_models = batch is not None and (batch.target, batch.draft) == (target, draft)
        if batch is None or not has_same_models or not batch.try_continue(request, recipe, exact):
            old_batch = batch
            if vision is None and keep:
                vision = ConversationVision()
            if old_batch is not None and has_same_models and old_batch.vision is not None:
                vision = old_batch.vision  # Media that stay are not run through the tower again.
            # Planning has a scope of its own, because costs may be measured in it.
            with planning_scope(target, recipe, exact, request.is_sampled):
                batch = RequestBatch(
                    target, recipe, request, draft=draft, exact=exact, phase=phase, vision=vision
                )
            if old_batch is not None:
                # Its caches cannot be continued, for example because the method or media differ.
                old_batch.close()
        self.recipe = batch.recipe  # as it was planned for this machine
        self.batch: RequestBatch | None = batch
        self.closed = False
        self.text_decoder = batch.request.text_decoder
        self._phase = phase
        self.results: list[Result] = []
        self._ids: dict[int, list[int]] = {}  # emitted so far, by request
        self._keep = keep
        self._rounds = self._decode(batch, phase, keep)

    def __next__(self) -> Round:
        return next(self._rounds)

    def finish(self) -> list[Result]:
        """Decodes to the end and returns the results. If that fails, the stream is closed."""
        try:
            for _ in self:
                pass
        except BaseException:
            self.close()
            raise
        return self.results

    def read_ahead(self) -> None:
        """Prefills the media of the prompts without answering, so that a later turn with a question
        need not wait for them.

        It takes the place of iterating: call it on a new stream, which is closed afterwards. See
        :meth:`saccade.Conversation.read_ahead`.
        """
        assert self.batch is not None, "the stream has ended"
        self.closed = True
        try:
            self.batch.read_ahead(self._phase)
        except BaseException as error:
            self.batch.close()
            batch, self.batch = self.batch, None
            if not memory.is_out_of_memory(error):
                raise
            raise batch.request.too_long_error(batch.target, batch.hidden_layers) from error
        finally:
            kernels.release_threads()

    def close(self) -> None:
        """Stops decoding; nothing more is emitted."""
        self.closed = True
        has_started = inspect.getgeneratorstate(self._rounds) != inspect.GEN_CREATED
        self._rounds.close()
        # A generator that has not started does not run its ``finally``, which closes the batch.
        if not (has_started or self._keep) and self.batch is not None:
            self.batch.close()
            self.batch = None

    def _with_text(self, round: Round, batch: RequestBatch) -> Round:
        """Returns the round with a function for its text, which runs only if the text is read."""
        if self.text_decoder is None:
            return round
        ids = self._ids.setdefault(round.request, [])
        start = len(ids)
        ids += round.emitted
        is_finished = round.finish is not None
        # The stop string that ended the answer, if one did.
        stop_string = batch.stops.stopped_by.get(round.request)
        # Later rounds add to ``ids``, so the function gets the end of this round's tokens too.
        end = len(ids)
        decode_text = partial(
            self.text_decoder.added_text, ids, start, end, is_finished, stop_string
        )
        return replace(round, decode_text=decode_text)

    def _decode(
        self, batch: RequestBatch, phase: Phase, keep: bool
    ) -> Generator[Round, None, None]:
        peak = memory.PeakMemory(batch.target.devices)
        # Each piece of a prompt and each round is computed in a scope of its own, in which PyTorch
        # may use fewer threads while other programs keep cores busy. The scope ends before the
        # round is yielded, so the caller's code never runs in it.
        scope = partial(step_scope, batch.target, self.recipe, batch.exact)

        def emit(round: Round) -> Round:
            """Adds the text to a round. If the round ended its request, this also frees the
            request's caches, unless they are kept for a later turn."""
            if round.finish is not None and not keep:
                batch.end(round.request)
            return self._with_text(round, batch)

        # A later turn can continue from the caches only if both models have read their prompts
        # (``has_read_prompts``) and no forward failed half way.
        can_continue = False
        try:
            # ``read`` yields None after each piece of a prompt, so that the stream can be closed
            # there. When a request's prompt has been read, it yields that request's opening round,
            # which has the first token.
            for opening in each_within(scope, batch.read(phase, keep)):
                if opening is not None:
                    yield emit(opening)
            phase("decode")
            clock = Clock(batch.target.device)
            for round in each_within(scope, batch.rounds()):
                yield emit(round)
            with cpu_by_default():
                self.results = batch.results(clock.elapsed(), peak.bytes())
            can_continue = batch.has_read_prompts
        except GeneratorExit:
            # The stream was closed between two rounds, or while a prompt was being read.
            can_continue = batch.has_read_prompts
            raise
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            raise batch.request.too_long_error(batch.target, batch.hidden_layers) from error
        finally:
            kernels.release_threads()
            if not (keep and can_continue):
                batch.close()
                self.batch, self.closed = None, True


class CallArguments(RequestArguments, total=False):
    """What a call may ask for beside its model and inputs."""

    draft: nn.Module | Backbone | None
    """The draft model, for methods that use one."""
    draft_quantize: str | None
    """Rounds the draft's weights: to "int8" or "int4" on a CPU, to "fp8" on a GPU that can multiply
    FP8 numbers. Without a draft the target drafts for itself with a rounded copy of its weights.
    The answer stays the target's."""
    method: str | Recipe
    """A method's name with overrides, or a recipe; see ``saccade methods``."""
    exact: bool
    """Gives bit for bit the answer of ``method="ar", exact=True``, in bf16 and fp16 too. Drafts are
    chains then, and a forward costs as much as one of 16 rows. See ``docs/lossless.md``."""


@dataclass(frozen=True)
class _ResolvedCall:
    """The arguments of a call after they are resolved. ``request`` has those that belong to the
    request."""

    draft: Backbone | None
    recipe: Recipe
    exact: bool
    request: RequestArguments

    @classmethod
    def of(cls, target: Backbone, arguments: CallArguments) -> _ResolvedCall:
        request: dict[str, Any] = {**arguments}
        draft = request.pop("draft", None)
        method = request.pop("method", DEFAULT_METHOD)
        backbone = None if draft is None else current_backbone(draft)
        rounding = request.pop("draft_quantize", None)
        if rounding is not None:
            backbone = (backbone or target).rounded(rounding_named(rounding))
        return cls(
            backbone,
            method if isinstance(method, Recipe) else resolve(method),
            request.pop("exact", False),
            cast(RequestArguments, request),
        )


def _with_named_arguments(function: Function) -> Function:
    """Puts the names of :class:`CallArguments` into a function's signature, where editors and
    transformers look for them. Those of ``Settings`` are not listed: ``**settings`` stands for
    them."""
    # The last parameter is ``**arguments``, from which the named ones are made.
    *parameters, var_keyword = inspect.signature(function).parameters.values()
    defaults = {"method": DEFAULT_METHOD, "exact": False}
    hints = get_type_hints(CallArguments)
    named = [
        var_keyword.replace(
            name=name,
            kind=var_keyword.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=hint,
        )
        for name, hint in hints.items()
        if name not in Settings.__annotations__
    ]
    settings = var_keyword.replace(name="settings", annotation=Unpack[Settings])
    vars(function)["__signature__"] = inspect.Signature([*parameters, *named, settings])
    return function


@_with_named_arguments
def stream(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor | None = None,
    *,
    on_phase: Phase | None = None,
    batch: RequestBatch | None = None,
    keep: bool = False,
    vision: ConversationVision | None = None,
    **arguments: Unpack[CallArguments],
) -> Stream:
    """Yields the rounds of an answer as they happen; its ``results`` are there afterwards.

    Args:
        model: the target, a loaded Hugging Face model.
        inputs: what the target's processor returned, for one request or several, or ids alone. They
            may also be given as ``**inputs``.
        on_phase: called as each phase of the work begins; see :class:`Stream`.
        batch: an earlier stream's ``batch`` (made with ``keep``). ``inputs`` continue its
            conversation, and only new media and tokens are read. If the first media differ, the
            whole conversation is read again.
        keep: leaves the caches for a later turn; see :class:`saccade.Conversation`.
        vision: with ``keep``, the store of vision tower outputs that turns share; a new one by
            default.
        arguments: see :class:`CallArguments` and :class:`RequestArguments`. All others are
            ``GenerationConfig``'s names, of which :class:`GenerateArguments` lists those in use.
            ``max_new_tokens`` is 256 where neither they nor the model's config set a length.

    Raises:
        OptionError, MethodError, ModelError: in one sentence, and before any prompt is read if
            possible.
    """
    return start_stream(model, inputs, arguments, on_phase, batch, keep, vision)


def start_stream(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor | None,
    arguments: CallArguments,
    on_phase: Phase | None = None,
    batch: RequestBatch | None = None,
    keep: bool = False,
    vision: ConversationVision | None = None,
    *,
    several_requests_error: str | None = None,
) -> Stream:
    """Checks everything and returns the stream, before any prompt is read.

    The only work that may be done here is timing forwards, where the method needs costs that are
    not measured yet. The arguments are those of :func:`stream`. ``several_requests_error`` is the
    message of the OptionError that is raised for inputs of several requests, and None where several
    are welcome.
    """
    with cpu_by_default():
        target = current_backbone(model)
        inputs, others = _split_inputs(inputs, arguments)
        resolved = _ResolvedCall.of(target, cast(CallArguments, others))
        request = Request.of(target, inputs, **resolved.request)
        if several_requests_error is not None and len(request.inputs["input_ids"]) > 1:
            raise OptionError(several_requests_error)
        return Stream(
            target,
            request,
            resolved.recipe,
            draft=resolved.draft,
            on_phase=on_phase,
            batch=batch,
            keep=keep,
            exact=resolved.exact,
            vision=vision,
        )


@_with_named_arguments
def run(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor | None = None,
    *,
    on_phase: Phase | None = None,
    **arguments: Unpack[CallArguments],
) -> Result:
    """Returns the answer to a single request, with its measures. The arguments are those of
    :func:`stream`."""
    rounds = start_stream(
        model,
        inputs,
        arguments,
        on_phase,
        several_requests_error=(
            "saccade.run answers one request; use saccade.generate for a batch"
        ),
    )
    return rounds.finish()[0]


@runtime_checkable
class Generate(Protocol):
    """The type of :func:`generate`, whose result depends on ``return_dict_in_generate``."""

    @overload
    def __call__(
        self,
        model: nn.Module | Backbone,
        inputs: Inputs | Tensor | None = None,
        *,
        streamer: Any = None,
        return_dict_in_generate: Literal[True],
        **arguments: Any,
    ) -> GenerateDecoderOnlyOutput: ...

    @overload
    def __call__(
        self,
        model: nn.Module | Backbone,
        inputs: Inputs | Tensor | None = None,
        *,
        streamer: Any = None,
        **arguments: Any,
    ) -> Tensor: ...

    def with_(self, **arguments: Any) -> partial[Any]: ...


def with_arguments(**arguments: Any) -> partial[Any]:
    """Returns :func:`generate` with arguments bound to it.

    It is for ``custom_generate=``, where transformers does not pass on every argument::

        fast = saccade.generate.with_(draft=small, streamer=streamer, tokenizer=tokenizer)
        model.generate(**inputs, custom_generate=fast, stop_strings=["."], max_new_tokens=64)
    """
    return partial(generate, **arguments)


def _as_generate(function: Callable[..., Any]) -> Generate:
    """Gives a function its method ``with_``."""
    vars(function)["with_"] = with_arguments
    return cast(Generate, function)


@_as_generate
@_with_named_arguments
@cpu_by_default()
@torch.no_grad()
def generate(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor | None = None,
    *,
    streamer: Any = None,
    stop_strings: str | list[str] | None = None,
    **arguments: Unpack[CallArguments],
) -> Int[Tensor, "batch len"] | GenerateDecoderOnlyOutput:
    """Returns ids of prompt and answer, like Hugging Face's ``generate``; shorter answers are
    padded.

    Call it with a processor's output, ``generate(model, inputs)`` or ``generate(model, **inputs)``,
    with ids alone, or let transformers call it:
    ``model.generate(**inputs, custom_generate=saccade.generate, draft=..., method=...)``. In the
    last case the pixels have been read already, so a draft with a vision tower of its own needs
    ``draft_inputs=``, and stop strings need ``custom_generate=saccade.generate.with_(tokenizer=)``.
    The arguments are those of :func:`stream`. ``streamer`` is a transformers streamer; its ``end``
    is called whatever happens. Without a length (``max_new_tokens``, ``max_length``, or the model's
    generation config) an answer gets 256 tokens at most, and 20 where transformers calls this.

    With ``num_return_sequences`` and sampling, each request has so many answers next to each other.
    With ``return_dict_in_generate`` the result is transformers' ``GenerateDecoderOnlyOutput``;
    ``output_logits`` and ``output_scores`` put a float32 tensor [batch, vocab] for each token into
    it, before and after the rules of sampling, with zeros where an answer has ended.
    """
    call_arguments: dict[str, Any] = {**arguments, "stop_strings": stop_strings}
    is_called_by_transformers = isinstance(inputs, Tensor) and is_from_transformers(call_arguments)
    streamer_has_prompt = False
    check_streamer(streamer)
    try:
        if is_called_by_transformers:
            # Transformers does not pass on its own ``streamer=`` and ``assistant_model=``. They are
            # taken from its call, which is found on the stack.
            transformers_call = current_transformers_call()
            if streamer is not None and transformers_call.streamer not in (None, streamer):
                transformers_call.streamer.end()
                raise OptionError(
                    "streamer= is given twice, to model.generate and to with_: give one"
                )
            if transformers_call.streamer is not None:
                streamer = transformers_call.streamer
                streamer_has_prompt = True  # transformers gave it the prompt before this call.
            if transformers_call.assistant_model is not None:
                if call_arguments.get("draft") not in (None, transformers_call.assistant_model):
                    raise OptionError(
                        "assistant_model= and draft= are two drafts: give one of them"
                    )
                call_arguments["draft"] = transformers_call.assistant_model
        target = current_backbone(model)
        resolved, request, ids = _read_call(
            target, inputs, call_arguments, is_called_by_transformers
        )
        if streamer is not None and len(request.inputs["input_ids"]) > 1:
            raise OptionError("streamer= needs a single request")
        rounds = Stream(
            target, request, resolved.recipe, draft=resolved.draft, exact=resolved.exact
        )
        if streamer is not None and not streamer_has_prompt:
            streamer.put(ids.cpu())
        # ``returned`` has those of the settings return_dict_in_generate, output_scores and
        # output_logits that are on. It is empty where ids alone are returned.
        scores = ReturnedScores(request.returned)
        for round in rounds:
            scores.add(round)
            if streamer is not None:
                streamer.put(torch.tensor(round.emitted))
    finally:
        # This also runs after an error. A thread that iterates over the streamer would wait for
        # ever if ``end`` were never called.
        if streamer is not None:
            streamer.end()
    pad, copies = request.limits.pad, request.copies
    # Transformers returns the answers to one request next to each other. Ours stand as whole blocks
    # of all requests: with two answers each to A and B they are A, B, A, B, so ``order`` is
    # [0, 2, 1, 3].
    order = [copy * len(ids) + row for row in range(len(ids)) for copy in range(copies)]
    answers = [torch.tensor(rounds.results[number].ids, dtype=ids.dtype) for number in order]
    padded = nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=float(pad))
    sequences = torch.cat([ids.repeat_interleave(copies, dim=0), padded.to(ids)], dim=1)
    return scores.output(sequences, order) if request.returned else sequences


def _read_call(
    target: Backbone,
    inputs: Inputs | Tensor | None,
    arguments: dict[str, Any],
    is_called_by_transformers: bool,
) -> tuple[_ResolvedCall, Request, Int[Tensor, "requests prompt"]]:
    """Returns the arguments of a call of :func:`generate`, its request, and the prompts' ids."""
    if not is_called_by_transformers:
        inputs, arguments = _split_inputs(inputs, arguments)
        resolved = _ResolvedCall.of(target, cast(CallArguments, arguments))
        request = Request.of(
            target,
            inputs,
            # ``run`` and ``stream`` refuse these settings, which are about what this call returns.
            supported_by_caller=generation_settings.GENERATE_SETTINGS,
            **resolved.request,
        )
        return resolved, request, inputs["input_ids"]
    assert isinstance(inputs, Tensor)
    resolved = _ResolvedCall.of(target, cast(CallArguments, arguments))
    request = Request.from_transformers(target, inputs, **resolved.request)
    # A draft that cannot take the target's visual rows has to encode the pixels itself.
    draft_needs_pixels = (
        resolved.recipe.drafts
        and resolved.draft is not None
        and not resolved.draft.shares_rows_with(target)
    )
    has_draft_inputs = resolved.request.get("draft_inputs") is not None
    if draft_needs_pixels and not has_draft_inputs and target.placeholders:
        raise OptionError(
            "transformers does not pass the pixels on, and this draft has a vision tower of "
            "its own: give draft_inputs= with the processor's output"
        )
    return resolved, request, inputs


def _split_inputs(
    inputs: Inputs | Tensor | None, arguments: Mapping[str, Any]
) -> tuple[Inputs, dict[str, Any]]:
    """Returns the processor's output and the other arguments of ``generate(model, **inputs)``.

    An argument that is a tensor, or a list of them, is an input, unless it has the name of another
    argument. Raises OptionError where there are no inputs, or where they are given both as
    ``inputs`` and by name.
    """
    names = (
        NON_GENERATION_ARGUMENTS
        | CallArguments.__annotations__.keys()
        | GenerationConfig().to_dict().keys()
    )
    tensor_inputs = {
        name: value for name, value in arguments.items() if name not in names and _is_tensors(value)
    }
    others = {name: value for name, value in arguments.items() if name not in tensor_inputs}
    if isinstance(inputs, Tensor):
        return {"input_ids": inputs, **tensor_inputs}, others
    if inputs is None and "input_ids" not in tensor_inputs:
        raise OptionError(
            "there is nothing to answer: give what the processor returned, as in "
            "saccade.generate(model, inputs)"
        )
    if inputs is None:
        return tensor_inputs, others
    if tensor_inputs:
        raise OptionError(
            f"{min(tensor_inputs)}= is a part of the processor's output, which was also given as "
            "inputs: give all of it once"
        )
    return inputs, others


def _is_tensors(value: Any) -> bool:
    """Returns whether this is a tensor or a list of tensors."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return all(isinstance(each, Tensor) for each in (value if is_list else [value]))
