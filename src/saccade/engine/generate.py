"""One answer, from a processor's output to token ids.

``generate`` returns ids like Hugging Face's and is what ``custom_generate`` expects, ``run`` a
:class:`Result`, ``stream`` the rounds as they happen. All three are one :class:`Call`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from saccade.core.errors import OptionError
from saccade.core.options import Asked, Settings
from saccade.core.prompt import Inputs
from saccade.core.result import Result, Round, spelt
from saccade.core.timing import Clock, Phase, untold
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Captioner
from saccade.engine.call import Call
from saccade.engine.request import Request, Spans, backbone, check_streamer
from saccade.methods import resolve
from saccade.model import kernels, memory
from saccade.model.backbone import Backbone

DEFAULT_METHOD = "auto"

Decode = Callable[[Sequence[int]], str]


class Stream(Iterator[Round]):
    """Rounds as they happen. ``results`` are complete once it is exhausted, one per request.

    ``on_phase`` is told when "costs" (timing forwards, where that was not done before), "vision",
    "prefill", "guide" and "decode" begin. With ``keep`` the caches stay afterwards, as ``call``,
    for a later turn to go on from.
    """

    def __init__(
        self,
        target: Backbone,
        request: Request,
        recipe: Recipe,
        *,
        draft: Backbone | None = None,
        on_phase: Phase | None = None,
        call: Call | None = None,
        keep: bool = False,
        exact: bool = False,
    ) -> None:
        phase = on_phase or untold
        same = call is not None and (call.target, call.draft) == (target, draft)
        if call is None or not same or not call.goes_on(request, recipe, exact):
            before = call
            call = Call(target, recipe, request, draft=draft, exact=exact, phase=phase)
            if before is not None:
                before.close()  # another method or video: nothing to go on from
        self.recipe = call.recipe  # as it is used here
        self.call: Call | None = call
        self.closed = False
        self.results: list[Result] = []
        self._ids: dict[int, list[int]] = {}  # emitted so far, by request
        self._rounds = self._work(call, phase, keep)

    def __next__(self) -> Round:
        return next(self._rounds)

    def finish(self) -> list[Result]:
        """Decodes to the end; the results."""
        for _ in self:
            pass
        return self.results

    def close(self) -> None:
        """Stops decoding; nothing more is emitted."""
        self.closed = True
        self._rounds.close()

    def _spelling(self, round: Round, decode: Decode | None) -> Round:
        """The round with how its text is spelt, which costs nothing until somebody reads it."""
        if decode is None:
            return round
        ids = self._ids.setdefault(round.request, [])
        ids += round.tokens
        ends = len(ids) - len(round.tokens), len(ids), round.finish is not None
        return replace(round, spell=partial(spelt, decode, ids, *ends))

    def _work(self, call: Call, phase: Phase, keep: bool) -> Generator[Round, None, None]:
        peak = memory.Peak(call.target.devices)

        def told(round: Round) -> Round:
            if round.finish is not None and not keep:
                call.end(round.request)
            return self._spelling(round, call.request.decode)

        try:
            for opening in call.reading(phase, keep):
                if opening is not None:
                    yield told(opening)
            phase("decode")
            clock = Clock(call.target.device)
            for round in call.rounds():
                yield told(round)
            self.results = call.results(clock.since(), peak.bytes())
        except (RuntimeError, MemoryError) as error:
            if not memory.ran_out(error):
                raise
            raise call.request.too_long(call.target) from error
        finally:
            kernels.release_threads()
            if not (keep and call.decoding):  # half read, there is nothing to go on from
                call.close()
                self.call, self.closed = None, True


def stream(
    model: nn.Module | Backbone,
    inputs: Inputs,
    *,
    draft: nn.Module | Backbone | None = None,
    draft_inputs: Inputs | None = None,
    method: str | Recipe = DEFAULT_METHOD,
    tokenizer: Any = None,
    seed: int | None = None,
    captioner: Captioner | None = None,
    context: Spans | Sequence[Spans] | None = None,
    on_phase: Phase | None = None,
    call: Call | None = None,
    keep: bool = False,
    exact: bool = False,
    **settings: Unpack[Asked],
) -> Stream:
    """The rounds of an answer as they happen; ``.results`` afterwards.

    Args:
        model: the target, a loaded Hugging Face model.
        inputs: what the target's processor returned, one or several requests.
        draft: the draft model, for methods that use one.
        draft_inputs: the draft's processor output, where it differs from the target's.
        method: a method's name with overrides, or a recipe; see ``saccade methods``.
        tokenizer: a tokenizer or processor: text in rounds and results, and stop strings.
        seed: names the noise of sampling; a fresh one when None.
        captioner: inputs -> of each request one caption, or one a video and image in prompt order,
            for views that read them; called in a thread of its own where a core is free.
        context: which text is a document that views may prune, as :meth:`Request.of` takes it.
        call: an earlier stream's ``call`` (made with ``keep``): ``inputs`` are its conversation
            gone on, and only what is new is read. Other videos or pixels start afresh.
        keep: leaves the caches for a later turn; see :class:`saccade.Conversation`.
        exact: bit for bit the answer of ``method="ar", exact=True``, in bf16 and fp16 too; drafts
            are chains, and a forward costs as much as one of 16 rows. See ``docs/lossless.md``.
        settings: ``GenerationConfig``'s names, of which :class:`Asked` has those in use;
            ``max_new_tokens`` is 256 where neither they nor the model's own config say.

    Raises:
        OptionError, MethodError, ModelError: before any work, in one sentence.
    """
    target = backbone(model)
    return Stream(
        target,
        Request.of(
            target,
            inputs,
            draft_inputs=draft_inputs,
            tokenizer=tokenizer,
            seed=seed,
            captioner=captioner,
            context=context,
            **settings,
        ),
        method if isinstance(method, Recipe) else resolve(method),
        draft=None if draft is None else backbone(draft),
        on_phase=on_phase,
        call=call,
        keep=keep,
        exact=exact,
    )


def run(
    model: nn.Module | Backbone,
    inputs: Inputs,
    *,
    draft: nn.Module | Backbone | None = None,
    draft_inputs: Inputs | None = None,
    method: str | Recipe = DEFAULT_METHOD,
    tokenizer: Any = None,
    seed: int | None = None,
    captioner: Captioner | None = None,
    context: Spans | Sequence[Spans] | None = None,
    on_phase: Phase | None = None,
    exact: bool = False,
    **settings: Unpack[Asked],
) -> Result:
    """One answer with its measures; arguments as :func:`stream`. One request at a time."""
    rounds = stream(
        model,
        inputs,
        draft=draft,
        draft_inputs=draft_inputs,
        method=method,
        tokenizer=tokenizer,
        seed=seed,
        captioner=captioner,
        context=context,
        on_phase=on_phase,
        exact=exact,
        **settings,
    )
    if len(inputs["input_ids"]) != 1:
        raise OptionError("saccade.run answers one request; use saccade.generate for a batch")
    return rounds.finish()[0]


@torch.no_grad()
def generate(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor,
    *,
    context: Spans | Sequence[Spans] | None = None,
    draft: nn.Module | Backbone | None = None,
    draft_inputs: Inputs | None = None,
    method: str | Recipe = DEFAULT_METHOD,
    tokenizer: Any = None,
    seed: int | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[..., list[int]] | None = None,
    captioner: Captioner | None = None,
    exact: bool = False,
    streamer: Any = None,
    **settings: Unpack[Settings],
) -> Int[Tensor, "batch len"]:
    """Prompt and answer ids, like Hugging Face's ``generate``; answers are padded to the longest.

    Called directly with a processor's output, or by transformers:
    ``model.generate(**inputs, custom_generate=saccade.generate, draft=..., method=...)``. There the
    pixels are already used up, so a draft with a vision tower of its own needs ``draft_inputs=``.
    Arguments as :func:`stream`, written out since transformers looks for their names here;
    ``streamer`` is a transformers streamer. Without a length (``max_new_tokens``, ``max_length``,
    or the model's generation config) an answer gets 256 tokens at most, as everywhere here;
    transformers gives 20, and does so where it calls this.
    """
    target, drafting = backbone(model), None if draft is None else backbone(draft)
    recipe = method if isinstance(method, Recipe) else resolve(method)
    own: dict[str, Any] = {
        "draft_inputs": draft_inputs,
        "tokenizer": tokenizer,
        "seed": seed,
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "captioner": captioner,
        "context": context,
    }
    direct = not isinstance(inputs, Tensor)
    if isinstance(inputs, Tensor):
        ids = inputs
        request = Request.prepared(target, ids, settings, **own)
        own_tower = drafting is not None and not drafting.shares_rows_with(target)
        if recipe.drafts and own_tower and draft_inputs is None and target.placeholders:
            raise OptionError(
                "transformers does not pass the pixels on, and this draft has a vision tower of "
                "its own: give draft_inputs= with the processor's output"
            )
    else:
        own["prefix_allowed_tokens_fn"] = prefix_allowed_tokens_fn
        request = Request.of(target, inputs, **own, **settings)
        ids = inputs["input_ids"]
    check_streamer(streamer, len(ids))
    rounds = Stream(target, request, recipe, draft=drafting, exact=exact)
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
