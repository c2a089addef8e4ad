"""One answer, from a processor's output to token ids: prefill, run a schedule, stop, report.

``generate`` returns ids like Hugging Face's and is what ``custom_generate`` expects, ``run`` a
:class:`Result`, ``stream`` the rounds as they happen. All three are one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from saccade.core import options
from saccade.core.errors import ModelError, OptionError
from saccade.core.prompt import Inputs, Prompt, Turn
from saccade.core.result import Result, Round, RoundRecord, Timings
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.drafters import Guarded, Words
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import NO_MEMORY, Sparing
from saccade.methods import resolve
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import ExactSession, check
from saccade.model.session import LONG, Session
from saccade.model.timing import Clock

DEFAULT_METHOD = "auto"
Before = tuple[float, float, float, float]
"""Seconds of vision, prefill, guidance and the draft's prefill."""
PREPARED = ("attention_mask", "position_ids", "mm_token_type_ids", "mm_encoder_outputs")
IGNORABLE = ("past_key_values", "logits_to_keep", "use_cache", "synced_gpus")  # generate's own

Phase = Callable[[str], None]
Captioner = Callable[[Inputs], Sequence[str]]


@dataclass(frozen=True)
class Asked:
    """What one call asks for, settled: what is read, how tokens are drawn, where answers stop."""

    inputs: Inputs
    rules: Callable[[Sequence[Tensor]], list[Sampling]]  # by each request's prompt
    stops: Callable[[Sequence[Tensor]], options.Stops]
    draft_inputs: Inputs | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    words: Words = Words()

    @property
    def for_draft(self) -> Inputs:
        return self.inputs if self.draft_inputs is None else self.draft_inputs

    def contexts(self, device: torch.device) -> list[Tensor]:
        """Each request's ids."""
        return [torch.tensor(ids, device=device) for ids in _unpadded(self.inputs)]

    def tokens(self) -> int:
        """Of all prompts and answers, as far as caches are made for them at first."""
        prompts = sum(len(ids) for ids in _unpadded(self.inputs))
        return prompts + LONG * len(self.inputs["input_ids"])

    def check(self, target: Backbone) -> None:
        """Raises ModelError where the target's device has no memory for these caches."""
        if len(set(target.devices)) == 1:
            memory.check_prompt(self.tokens(), target.token_bytes, target.device)

    def too_long(self, target: Backbone) -> ModelError:
        """What to raise once memory ran out after all."""
        said = memory.too_long(self.tokens(), target.token_bytes, target.device)
        return ModelError(said)

    def text(self, answer: Sequence[int], stop: str | None) -> str | None:
        """An answer in words, up to the string it stopped at."""
        if self.decode is None:
            return None
        text = self.decode(answer)
        return text if stop is None else text.partition(stop)[0]


@dataclass
class Talk:
    """What a conversation keeps between its turns: both models' caches."""

    asked: Recipe
    recipe: Recipe  # the same, fitted to this machine
    session: Session
    draft: Guarded
    prompts: Sequence[Prompt]  # of the first turn
    seen: Mapping[str, Tensor]  # its pixels and their layout
    exact: bool = False

    def turns(self, inputs: Inputs, target: Backbone) -> dict[int, Turn] | None:
        """How these inputs go on from what is cached; None if they show something else."""
        seen = _seen(inputs)
        # an answer right after a video stands elsewhere than the same words in a longer prompt
        if any(bool((prompt.visual | prompt.fixed)[-1]) for prompt in self.prompts):
            return None
        if seen.keys() != self.seen.keys() or len(inputs["input_ids"]) != len(self.prompts):
            return None
        if not all(torch.equal(value, self.seen[name]) for name, value in seen.items()):
            return None
        found: dict[int, Turn] = {}
        for number, new in enumerate(_unpadded(inputs)):
            old = self.session.requests[number].context
            same = 0
            while same < min(len(old), len(new)) and old[same] == new[same]:
                same += 1
            if {*old[same:], *new[same:]} & target.placeholders.keys():
                return None
            found[number] = Turn(len(old) - same, tuple(new[same:]))
        return found


class Stream(Iterator[Round]):
    """Rounds as they happen. ``results`` are complete once it is exhausted, one per request.

    ``on_phase`` is told when "vision", "prefill", "guide" and "decode" begin. With ``keep`` the
    caches stay afterwards, as ``talk``, for a later turn to go on from.
    """

    def __init__(
        self,
        target: Backbone,
        asked: Asked,
        recipe: Recipe,
        *,
        draft: Backbone | None = None,
        on_phase: Phase | None = None,
        talk: Talk | None = None,
        keep: bool = False,
        exact: bool = False,
    ) -> None:
        self._exact = exact
        if exact:
            recipe = recipe.chained()
            check(target)
        self._wanted, self._asked = recipe, asked
        if talk is not None and (talk.asked, talk.exact) != (recipe, exact):
            talk.draft.close()  # another method: nothing to go on from
            talk = None
        self.recipe = (
            talk.recipe
            if talk is not None
            else recipe.fit(target, draft, int(asked.inputs["input_ids"].shape[1]), exact)
        )
        if recipe.drafts:
            asked.words.check(recipe.view)
        self._target, self._draft_model = target, draft
        self._phase: Phase = on_phase or (lambda name: None)
        self._keep = keep
        self.closed = False
        self.talk = talk
        self.results: list[Result] = []
        self._rounds = self._work()

    def __next__(self) -> Round:
        return next(self._rounds)

    def close(self) -> None:
        """Stops decoding; nothing more is emitted."""
        self.closed = True
        self._rounds.close()

    def _work(self) -> Generator[Round, None, None]:
        clock, self._peak = Clock(self._target.device), memory.Peak(self._target.devices)
        turns = None if self.talk is None else self.talk.turns(self._asked.inputs, self._target)
        if self.talk is not None and turns is None:
            self.talk.draft.close()  # another video: nothing to go on from
            self.talk = None
        try:
            try:
                if self.talk is None or turns is None:
                    start = self._begin(clock)
                else:
                    start = self._go_on(self.talk, turns, clock)
            except BaseException:
                self._keep, self.closed = False, True  # nothing to go on from
                raise
            yield from self._decoding(clock, *start)
        except (RuntimeError, MemoryError) as error:
            if not memory.ran_out(error):
                raise
            raise self._asked.too_long(self._target) from error
        finally:
            if self.talk is not None and not self._keep:
                self.talk.draft.close()
                self.talk = None

    def _begin(self, clock: Clock) -> tuple[options.Stops, Before, list[int]]:
        """Reads everything: both models' vision, prefill and what the draft is to see."""
        target, recipe, asked = self._target, self.recipe, self._asked
        self._phase("vision")
        contexts = asked.contexts(target.device)
        rules, stops = asked.rules(contexts), asked.stops(contexts)
        room = stops.options.max_new_tokens
        asked.check(target)
        bound = recipe.bind(target, self._draft_model, rules, room, asked.words)
        draft = Guarded(bound, target.vocab)
        session = (ExactSession if self._exact else Session)(target, rules, room=room)
        seen = _seen(asked.inputs)
        self.talk = Talk(self._wanted, recipe, session, draft, (), seen, self._exact)
        draft.begin(asked.for_draft)
        prompts = self.talk.prompts = target.prompts(asked.inputs)
        vision = clock.lap()

        self._phase("prefill")
        draft.look(prompts)
        prefills = session.prefill(prompts, record=recipe.drafts and recipe.view.attention)
        prefill = clock.lap()

        self._phase("guide")
        reading = draft.guide(prefills)
        guide = max(0.0, clock.lap() - reading)
        return stops, (vision, prefill, guide, reading), [0] * len(prompts)

    def _go_on(
        self, talk: Talk, turns: dict[int, Turn], clock: Clock
    ) -> tuple[options.Stops, Before, list[int]]:
        """Reads only what is new since the last turn; the draft keeps the view it had."""
        contexts = self._asked.contexts(self._target.device)
        rules, stops = self._asked.rules(contexts), self._asked.stops(contexts)
        self._phase("prefill")
        talk.session.turn(turns, rules)
        talk.session.score({request: Tree() for request in turns})
        prefill = clock.lap()
        self._phase("guide")
        talk.draft.turn(turns, rules)
        reused = [len(context) - len(turns[i].ids) for i, context in enumerate(contexts)]
        return stops, (0.0, prefill, 0.0, clock.lap()), reused

    def _decoding(
        self,
        clock: Clock,
        stops: options.Stops,
        before: Before,
        reused: list[int],
    ) -> Generator[Round, None, None]:
        assert self.talk is not None
        session, draft, prompts = self.talk.session, self.talk.draft, self.talk.prompts
        self._phase("decode")
        records: list[list[RoundRecord]] = [[] for _ in prompts]
        finish: dict[int, Any] = {}
        first = 0.0
        judging = Sparing(session, lambda trees, error: draft.give_up(NO_MEMORY, error))
        rounds = self.recipe.schedule(judging, draft, range(len(prompts)), stops.cut)
        for round in rounds:
            first = first or clock.since()
            records[round.request].append(round.scalars())
            if round.finish is not None:
                finish[round.request] = round.finish
                if not self._keep:
                    session.end(round.request)
                    draft.end(round.request)
            yield round
        decode = clock.lap()

        timings, peak = Timings(*before, decode, first, clock.since()), self._peak.bytes()
        lengths = [len(ids) for ids in _unpadded(self._asked.inputs)]
        for request, prompt in enumerate(prompts):
            answer = stops.answers[request]
            self.results.append(
                Result(
                    ids=tuple(answer),
                    text=self._asked.text(answer, stops.stopped_by.get(request)),
                    method=self.recipe.name,
                    finish_reason=finish[request],
                    rounds=tuple(records[request]),
                    timings=timings,
                    prompt_tokens=lengths[request],
                    visual_tokens=prompt.seen,
                    draft_visual_tokens=draft.visible(request),
                    fallback_reason=draft.reason,
                    reused_tokens=reused[request],
                    warnings=warnings(self._wanted, self.recipe),
                    peak_bytes=peak,
                )
            )


def warnings(wanted: Recipe, used: Recipe) -> tuple[str, ...]:
    """What a result says where another method was used than was asked for."""
    if used.drafts or not wanted.drafts:
        return ()
    return ("no draft model was given and the target's own drafts do not pay here: plain",)


def _unpadded(inputs: Inputs) -> list[list[int]]:
    """Each request's ids without its padding."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        return ids.tolist()
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


def _seen(inputs: Inputs) -> dict[str, Tensor]:
    """What of a processor's output is not text."""
    length = inputs["input_ids"].shape
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape[:2] != length
    }


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
    captioner: Captioner | None = None,
    on_phase: Phase | None = None,
    talk: Talk | None = None,
    keep: bool = False,
    exact: bool = False,
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
        captioner: inputs -> one caption a request, for views that read one.
        talk: an earlier stream's ``talk`` (made with ``keep``): ``inputs`` are its conversation
            gone on, and only what is new is read. Other videos or pixels start afresh.
        keep: leaves the caches for a later turn; see :class:`saccade.Conversation`.
        exact: bit for bit the answer of ``method="ar", exact=True``, in bf16 and fp16 too; drafts
            are chains, and a forward costs as much as one of 16 rows. See ``docs/lossless.md``.
        settings: ``GenerationConfig``'s names (max_new_tokens, do_sample, temperature, ...).

    Raises:
        OptionError, MethodError, ModelError: before any work, in one sentence.
    """
    target = _backbone(model)
    return Stream(
        target,
        settled(
            target,
            inputs,
            draft_inputs=draft_inputs,
            tokenizer=tokenizer,
            seed=seed,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            captioner=captioner,
            **settings,
        ),
        resolve(method) if isinstance(method, str) else method,
        draft=None if draft is None else _backbone(draft),
        on_phase=on_phase,
        talk=talk,
        keep=keep,
        exact=exact,
    )


def settled(
    target: Backbone,
    inputs: Inputs,
    *,
    draft_inputs: Inputs | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[..., list[int]] | None = None,
    captioner: Captioner | None = None,
    **settings: Any,
) -> Asked:
    """What is asked for, checked before any work; arguments as :func:`stream`."""
    config = options.settle(target.model, generation_config, settings)
    decode = _decoder(tokenizer)
    longest = int(inputs["input_ids"].shape[1])
    bounds = options.limits(config, longest, tuple(stopping_criteria or ()))
    if bounds.stop and decode is None:
        raise OptionError("stop strings need the tokenizer: pass tokenizer=")

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

    return Asked(
        inputs,
        rules,
        lambda contexts: options.Stops(bounds, contexts, decode),
        draft_inputs,
        decode,
        Words(_encoder(tokenizer), captioner),
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
    captioner: Captioner | None = None,
    exact: bool = False,
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
            words=Words(_encoder(tokenizer), captioner),
            exact=exact,
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
            captioner=captioner,
            exact=exact,
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
    words: Words,
    exact: bool,
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
        bool(checked.do_sample),
        tuple(processors),
        seed if seed is not None else _seed(),
        options.ends(checked),
    )
    mask = given.get("attention_mask")
    if sampling.contextual and mask is not None and not bool(mask.bool().all()):
        raise OptionError(
            "a padded batch with penalties cannot come through custom_generate: call "
            "saccade.generate directly"
        )
    bounds = options.limits(checked, ids.shape[1], criteria)
    asked = Asked(
        {"input_ids": ids, **features},
        lambda contexts: [sampling] * len(contexts),
        # stop strings are among the criteria already
        lambda contexts: options.Stops(
            options.Options(bounds.max_new_tokens, bounds.eos, (), bounds.criteria), contexts, None
        ),
        draft_inputs,
        words=words,
    )
    return Stream(target, asked, recipe, draft=drafter, exact=exact)


def _seed() -> int:
    """A seed from torch's generator, so that ``torch.manual_seed`` fixes it as it does there."""
    return int(torch.randint(2**62, ()))


def _backbone(model: Any) -> Backbone:
    return model if isinstance(model, Backbone) else Backbone.of(model)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    if tokenizer is None:
        return None
    inner = vars(tokenizer).get("tokenizer", tokenizer)  # of a processor
    return lambda text: inner.encode(text, add_special_tokens=False)
