"""One answer, from a processor's output to token ids: prefill, run a schedule, stop, report.

``generate`` returns ids like Hugging Face's and is what ``custom_generate`` expects, ``run`` a
:class:`Result`, ``stream`` the rounds as they happen. All three are one loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from saccade import options
from saccade.backbone import Backbone
from saccade.draft import Guarded
from saccade.errors import OptionError
from saccade.recipe import Recipe
from saccade.sampling import Sampling
from saccade.session import Session
from saccade.systems import resolve
from saccade.types import Inputs, Result, Round, RoundRecord, Timings

DEFAULT_METHOD = "specvlm/shape=fit"
PREPARED = ("attention_mask", "position_ids", "mm_token_type_ids", "mm_encoder_outputs")
IGNORABLE = ("past_key_values", "logits_to_keep", "use_cache", "synced_gpus")  # generate's own

Phase = Callable[[str], None]


class Stream(Iterator[Round]):
    """Rounds as they happen. ``results`` are complete once it is exhausted, one per request.

    ``on_phase`` is told when "vision", "prefill", "guide" and "decode" begin.
    """

    def __init__(
        self,
        target: Backbone,
        inputs: Inputs,
        recipe: Recipe,
        *,
        draft: Backbone | None = None,
        draft_inputs: Inputs | None = None,
        rules: Callable[[Sequence[Tensor]], list[Sampling]],
        stops: Callable[[Sequence[Tensor]], options.Stops],
        decode: Callable[[Sequence[int]], str] | None = None,
        on_phase: Phase | None = None,
    ) -> None:
        self.recipe = recipe.fit(target, draft, int(inputs["input_ids"].shape[1]))
        self._target, self._draft_model = target, draft
        self._inputs, self._draft_inputs = inputs, draft_inputs
        self._rules, self._stops, self._decode = rules, stops, decode
        self._phase: Phase = on_phase or (lambda name: None)
        self.results: list[Result] = []
        self._rounds = self._work()

    def __next__(self) -> Round:
        return next(self._rounds)

    def close(self) -> None:
        """Stops decoding; nothing more is emitted."""
        self._rounds.close()

    def _work(self) -> Generator[Round, None, None]:
        target, recipe = self._target, self.recipe
        clock = _Clock(target.device)
        self._phase("vision")
        prompts = target.prompts(self._inputs)
        contexts = [prompt.context for prompt in prompts]
        rules, stops = self._rules(contexts), self._stops(contexts)
        room = stops.options.max_new_tokens
        draft = Guarded(recipe.bind(target, self._draft_model, rules, room), target.vocab)
        draft.begin(self._inputs if self._draft_inputs is None else self._draft_inputs)
        vision = clock.lap()

        self._phase("prefill")
        session = Session(target, rules, room=room)
        prefills = session.prefill(prompts, record=recipe.drafts and recipe.view.attention)
        prefill = clock.lap()

        self._phase("guide")
        draft.guide(prefills)
        guide = clock.lap()

        self._phase("decode")
        records: list[list[RoundRecord]] = [[] for _ in prompts]
        finish: dict[int, Any] = {}
        first = 0.0
        rounds = recipe.schedule(session, draft, range(len(prompts)), stops.cut)
        for round in rounds:
            first = first or clock.since()
            records[round.request].append(round.scalars())
            if round.finish is not None:
                finish[round.request] = round.finish
                session.end(round.request)
            yield round
        decode = clock.lap()

        timings = Timings(vision, prefill, guide, decode, first, clock.since())
        for request, prompt in enumerate(prompts):
            answer = stops.answers[request]
            self.results.append(
                Result(
                    ids=tuple(answer),
                    text=self._text(answer, stops.stopped_by.get(request)),
                    method=recipe.name,
                    finish_reason=finish[request],
                    rounds=tuple(records[request]),
                    timings=timings,
                    prompt_tokens=len(prompt),
                    visual_tokens=prompt.seen,
                    draft_visual_tokens=draft.visible(request),
                    fallback_reason=draft.reason,
                )
            )

    def _text(self, answer: Sequence[int], stop: str | None) -> str | None:
        if self._decode is None:
            return None
        text = self._decode(answer)
        return text if stop is None else text[: text.rfind(stop)]


class _Clock:
    """Wall-clock laps; waits for the device before it reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, self._now()
        return self._last - before

    def since(self) -> float:
        return self._now() - self._start


def stream(
    model: nn.Module | Backbone,
    inputs: Inputs,
    *,
    draft: nn.Module | Backbone | None = None,
    draft_inputs: Inputs | None = None,
    method: str | Recipe = DEFAULT_METHOD,
    tokenizer: Any = None,
    seed: int | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[..., list[int]] | None = None,
    on_phase: Phase | None = None,
    **settings: Any,
) -> Stream:
    """The rounds of an answer as they happen; ``.results`` afterwards.

    Args:
        model: the target, a loaded Hugging Face model.
        inputs: what the target's processor returned, one or several requests.
        draft: the draft model, for methods that use one.
        draft_inputs: the draft's processor output, where it differs from the target's.
        method: a method's name with overrides, or a recipe; see ``saccade methods``.
        tokenizer: a tokenizer or processor, for text in the result and for stop strings.
        seed: names the noise of sampling; a fresh one when None.
        settings: ``GenerationConfig``'s names (max_new_tokens, do_sample, temperature, ...).

    Raises:
        OptionError, MethodError, ModelError: before any work, in one sentence.
    """
    target = _backbone(model)
    config = options.settle(target.model, generation_config, settings)
    decode = _decoder(tokenizer)
    longest = int(inputs["input_ids"].shape[1])
    bounds = options.limits(config, longest, tuple(stopping_criteria or ()))

    def rules(contexts: Sequence[Tensor]) -> list[Sampling]:
        return options.rules(
            target.model,
            config,
            contexts,
            length=bounds.max_new_tokens,
            extra=logits_processor,
            allowed=prefix_allowed_tokens_fn,
            seed=seed,
        )

    if bounds.stop and decode is None:
        raise OptionError("stop strings need the tokenizer: pass tokenizer=")
    return Stream(
        target,
        inputs,
        resolve(method) if isinstance(method, str) else method,
        draft=None if draft is None else _backbone(draft),
        draft_inputs=draft_inputs,
        rules=rules,
        stops=lambda contexts: options.Stops(bounds, contexts, decode),
        decode=decode,
        on_phase=on_phase,
    )


def run(model: nn.Module | Backbone, inputs: Inputs, **arguments: Any) -> Result:
    """One answer with its measures; arguments as :func:`stream`. One request at a time."""
    if int(inputs["input_ids"].shape[0]) != 1:
        raise OptionError("saccade.run answers one request; use saccade.generate for a batch")
    rounds = stream(model, inputs, **arguments)
    for _ in rounds:
        pass
    return rounds.results[0]


@torch.no_grad()
def generate(
    model: nn.Module | Backbone,
    inputs: Inputs | Tensor,
    *,
    draft: nn.Module | Backbone | None = None,
    draft_inputs: Inputs | None = None,
    method: str | Recipe = DEFAULT_METHOD,
    tokenizer: Any = None,
    seed: int | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[..., list[int]] | None = None,
    streamer: Any = None,
    **settings: Any,
) -> Int[Tensor, "batch len"]:
    """Prompt and answer ids, like Hugging Face's ``generate``; answers are padded to the longest.

    Called directly with a processor's output, or by transformers:
    ``model.generate(**inputs, custom_generate=saccade.generate, draft=..., method=...)``. There the
    pixels are already used up, so a draft with a vision tower of its own needs ``draft_inputs=``.
    Arguments as :func:`stream`; ``streamer`` is a transformers streamer.
    """
    direct = not isinstance(inputs, Tensor)
    if isinstance(inputs, Tensor):
        assert generation_config is not None, "transformers passes its generation config"
        rounds = _prepared(
            model,
            inputs,
            settings,
            draft=draft,
            draft_inputs=draft_inputs,
            method=method,
            seed=seed,
            config=generation_config,
            processors=logits_processor or LogitsProcessorList(),
            criteria=tuple(stopping_criteria or ()),
        )
        ids = inputs
    else:
        ids = inputs["input_ids"]
        rounds = stream(
            model,
            inputs,
            draft=draft,
            draft_inputs=draft_inputs,
            method=method,
            tokenizer=tokenizer,
            seed=seed,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            **settings,
        )
        if streamer is not None:
            streamer.put(ids.cpu())
    if streamer is not None and len(ids) > 1:
        raise OptionError("streamer= needs a single request")
    for round in rounds:
        if streamer is not None:
            streamer.put(torch.tensor(round.tokens))
    if streamer is not None:
        streamer.end()
    config = options.settle(_backbone(model).model, generation_config, settings if direct else {})
    pad = config.pad_token_id
    if pad is None:
        eos = config.eos_token_id
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    answers = [torch.tensor(result.ids, dtype=ids.dtype) for result in rounds.results]
    padded = nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=float(pad))
    return torch.cat([ids, padded.to(ids)], dim=1)


def _prepared(
    model: Any,
    ids: Tensor,
    given: Mapping[str, Any],
    *,
    draft: nn.Module | Backbone | None,
    draft_inputs: Inputs | None,
    method: str | Recipe,
    seed: int | None,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: tuple[Any, ...],
) -> Stream:
    """The call transformers makes: rules and stops are ready made, pixels already features."""
    target = _backbone(model)
    checked = options.settle(target.model, config, {})
    features = {key: given[key] for key in PREPARED if given.get(key) is not None}
    others = {k for k, v in given.items() if k not in (*PREPARED, *IGNORABLE) and v is not None}
    if unknown := others - {name for name in others if name.endswith(("_grid_thw", "_ts"))}:
        raise OptionError(f"saccade.generate does not take {', '.join(sorted(unknown))}")
    features |= {name: given[name] for name in others}
    recipe = resolve(method) if isinstance(method, str) else method
    drafter = None if draft is None else _backbone(draft)
    own_tower = drafter is not None and not drafter.sees_as(target)
    if recipe.drafts and own_tower and draft_inputs is None and target.placeholders:
        raise OptionError(
            "transformers does not pass the pixels on, and this draft has a vision tower of its "
            "own: give draft_inputs= with the processor's output"
        )
    sampling = Sampling(
        bool(checked.do_sample), tuple(processors), seed if seed is not None else _seed()
    )
    mask = given.get("attention_mask")
    if sampling.contextual and mask is not None and not bool(mask.bool().all()):
        raise OptionError(
            "a padded batch with penalties cannot come through custom_generate: call "
            "saccade.generate directly"
        )
    bounds = options.limits(checked, ids.shape[1], criteria)
    inputs = {"input_ids": ids, **features}
    return Stream(
        target,
        inputs,
        recipe,
        draft=drafter,
        draft_inputs=draft_inputs,
        rules=lambda contexts: [sampling] * len(contexts),
        # stop strings are among the criteria already
        stops=lambda contexts: options.Stops(
            options.Options(bounds.max_new_tokens, bounds.eos, (), bounds.criteria), contexts, None
        ),
    )


def _seed() -> int:
    """A seed from torch's generator, so that ``torch.manual_seed`` fixes it as it does there."""
    return int(torch.randint(2**62, ()))


def _backbone(model: Any) -> Backbone:
    return model if isinstance(model, Backbone) else Backbone.of(model)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
