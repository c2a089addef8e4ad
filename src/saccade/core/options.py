"""What a caller asked for: GenerationConfig's names to sampling rules and stop rules.

Every argument is honoured or refused by name, never ignored.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxTimeCriteria

from saccade.core.errors import OptionError, first_line, suggest
from saccade.core.plain import to_plain
from saccade.core.result import FinishReason
from saccade.core.sampling import Grammar, Processor, Sampling

MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Options:
    """How long an answer may get and where it stops."""

    max_new_tokens: int = MAX_NEW_TOKENS
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()
    pad: int = 0  # what the shorter answers of a batch are padded with


class Settings(TypedDict, total=False):
    """``GenerationConfig``'s names as editors offer them; no other is passed over in silence."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    max_length: int | None
    max_time: float | None
    do_sample: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    stop_strings: str | list[str] | None


class Asked(Settings, total=False):
    """What else ``generate`` of Transformers takes."""

    generation_config: GenerationConfig | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: Sequence[Any] | None
    prefix_allowed_tokens_fn: Callable[..., list[int]] | None


OURS = {  # what others call it, and how it is written here
    "assistant_model": "draft",
    "assistant_tokenizer": "draft_inputs",
    "max_tokens": "max_new_tokens",
    "stop": "stop_strings",
}
WHOLE = {  # the least each may be
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "max_length": 1,
    "min_length": 0,
    "top_k": -1,  # as some checkpoints say; refused where it is used
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
RANGES = {  # above the first, up to the second
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "encoder_repetition_penalty": (0.0, 1e6),
    "max_time": (0.0, 1e9),
}
DRAWN = ("temperature", "top_p", "typical_p")  # They say nothing where nothing is drawn.
SWITCHES = ("do_sample", "renormalize_logits", "remove_invalid_values")
TOKENS = ("eos_token_id", "pad_token_id", "bad_words_ids", "suppress_tokens")

PLAIN = {*WHOLE, *RANGES, *SWITCHES, *TOKENS}  # Numbers, switches and lists of ids.

# Generation settings that change what `generate` computes in ways this engine does not.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "return_dict_in_generate": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None,),
}


def settle(
    model: Any, generation_config: GenerationConfig | None, settings: Mapping[str, Any]
) -> GenerationConfig:
    """The model's generation config with the caller's over it. Raises OptionError by name."""
    if not isinstance(generation_config, GenerationConfig | None):
        said = type(generation_config).__name__
        raise OptionError(f"generation_config= is transformers' GenerationConfig, not {said}")
    config = copy.deepcopy(generation_config or model.generation_config)
    for name in PLAIN & vars(config).keys():
        setattr(config, name, _plain(vars(config)[name]))
    wanted = {name: _plain(value) for name, value in settings.items() if value is not None}
    _sound({**config.to_dict(), **wanted})
    try:
        unknown = config.update(**wanted)
    except (ValueError, TypeError) as error:
        raise OptionError(first_line(error)) from error
    if unknown:
        told = [f"{name}{ours(name, config.to_dict())}" for name in sorted(unknown)]
        raise OptionError(f"unknown generation argument {', '.join(told)}")
    given = config.to_dict()
    for name, allowed in REFUSED.items():
        if given.get(name) not in allowed:
            raise OptionError(f"{name}={given[name]!r} is not supported by saccade; leave it out")
    return config


def ours(name: str, known: Iterable[str]) -> str:
    """:func:`suggest`, which knows what others call our arguments."""
    own = OURS.get(name)
    return suggest(name, known) if own is None else f" (did you mean {own}?)"


def _sound(given: Mapping[str, Any]) -> None:
    """Raises OptionError for a setting that is no number where it must be one, or out of range."""
    for name, least in WHOLE.items():
        value = given.get(name)
        check_whole(name, value)
        if value is not None and value < least:
            raise OptionError(f"{name}={value} must be at least {least}")
    for name, (low, high) in RANGES.items():
        value = given.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        is_unused = name in DRAWN and not given.get("do_sample")
        if number and value == low and is_unused:
            continue
        if not number or not low < value <= high:
            raise OptionError(f"{name}={value!r} must be a number above {low:g} and up to {high:g}")
    for name in SWITCHES:
        if not isinstance(given.get(name, False), bool | None):
            raise OptionError(f"{name}={given[name]!r} is neither True nor False")
    for name in TOKENS:
        for token in _flat(given.get(name)):
            check_whole(name, token)
    stop = given.get("stop_strings")
    if stop is not None and not isinstance(stop, str):
        if not isinstance(stop, list | tuple) or not all(isinstance(each, str) for each in stop):
            raise OptionError(f"stop_strings={stop!r} is neither a string nor a list of strings")
    for text in [stop] if isinstance(stop, str) else stop or ():
        check_text("a stop string", text)


def _plain(value: Any) -> Any:
    """A setting as Python's own numbers and lists, whatever library made it."""
    return to_plain(value.tolist() if isinstance(value, torch.Tensor) else value)


def check_text(name: str, text: str) -> None:
    """Raises OptionError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "holds half a character (a lone surrogate): give whole text"
        raise OptionError(f"{name} {what}") from None


def check_called(**given: Any) -> None:
    """Raises OptionError unless each, where it is there, is a list of what can be called."""
    for name, several in given.items():
        if several is not None and not (
            isinstance(several, list | tuple) and all(callable(each) for each in several)
        ):
            raise OptionError(f"{name}= is a list of functions or such objects, not {several!r}")


def check_whole(name: str, value: Any) -> None:
    """Raises OptionError for what is there and no whole number."""
    value = to_plain(value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"{name}={value!r} is not a whole number")


def _flat(tokens: Any) -> list[Any]:
    """Ids, however deep they lie in lists."""
    if not isinstance(tokens, list | tuple):
        return [tokens]
    return [token for each in tokens for token in _flat(each)]


def rules(
    model: Any,
    config: GenerationConfig,
    contexts: Sequence[torch.Tensor],
    *,
    length: int = MAX_NEW_TOKENS,
    extra: LogitsProcessorList | None = None,
    allowed: Callable[..., list[int]] | None = None,
    seed: int | None = None,
    grammar: Grammar | None = None,
) -> list[Sampling]:
    """Each request's sampling rules: Hugging Face's own, for answers up to ``length`` tokens."""
    found = []
    seed = secrets.randbits(63) if seed is None else seed
    own_processors = copies(extra or (), len(contexts))
    for request, context in enumerate(contexts):
        own = copy.copy(config)
        own.max_length = len(context) + length
        own.num_beams = own.num_return_sequences = 1  # Each request is a batch of one row here.
        try:
            model._prepare_special_tokens(own, device=context.device)
            processors = model._get_logits_processor(
                generation_config=own,
                input_ids_seq_length=len(context),
                encoder_input_ids=context[None],
                prefix_allowed_tokens_fn=allowed and _numbered(allowed, request),
                logits_processor=LogitsProcessorList(own_processors[request]),
                device=str(context.device),
                model_kwargs={},
            )
        except (ValueError, TypeError) as error:
            said = first_line(error)
            raise OptionError(f"these generation settings cannot be used: {said}") from error
        rule = Sampling(bool(config.do_sample), tuple(processors), seed, ends(config), grammar)
        found.append(rule)
    return found


def copies(processors: Sequence[Processor], count: int) -> list[list[Processor]]:
    """The caller's processors for each of ``count`` requests.

    A request alone gets the objects themselves, as in ``generate``. Several requests get copies,
    since each is drafted at its own pace and a processor may remember earlier calls.

    Raises OptionError naming the processor that cannot be copied.
    """
    if count == 1:
        return [list(processors)]
    return [[_copy(processor) for processor in processors] for _ in range(count)]


def _copy(processor: Processor) -> Processor:
    try:
        return copy.deepcopy(processor)
    except Exception as error:
        raise OptionError(
            f"the logits processor {type(processor).__name__} cannot be copied "
            f"({first_line(error)}), and each request of a batch needs its own: pass one request"
        ) from error


def _numbered(allowed: Callable[..., list[int]], request: int) -> Callable[..., list[int]]:
    """Tells the caller's function which request asks: each is alone in its own batch here."""
    return lambda batch, ids: allowed(request, ids)


def ends(config: GenerationConfig) -> tuple[int, ...]:
    """The ids that end an answer."""
    eos = config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def limits(config: GenerationConfig, longest: int, criteria: Sequence[Any] = ()) -> Options:
    """Where answers stop. ``longest`` is the longest prompt, for ``max_length``."""
    length = config.max_new_tokens
    if length is None:
        length = MAX_NEW_TOKENS if config.max_length is None else config.max_length - longest
        if length < 1:
            raise OptionError(
                f"max_length={config.max_length} leaves no room after a prompt of {longest} "
                "tokens; set max_new_tokens instead"
            )
    stop = config.stop_strings
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not string for string in strings):
        raise OptionError("a stop string must not be empty")
    timed = () if config.max_time is None else (MaxTimeCriteria(max_time=config.max_time),)
    pad = (*ends(config), 0)[0] if config.pad_token_id is None else config.pad_token_id
    return Options(length, ends(config), strings, (*criteria, *timed), pad)


class Stops:
    """Cuts what verification let through at the first end of sequence, stop string or limit.

    Stop strings are looked for in the text that is shown (``decode``) and, since a special token
    may be one or stand in one, in the text with special tokens written out (``spell``).
    """

    def __init__(
        self,
        options: Options,
        contexts: Sequence[torch.Tensor],
        decode: Callable[[Sequence[int]], str] | None,
        spell: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.options = options
        self.answers: list[list[int]] = [[] for _ in contexts]
        self.stopped_by: dict[int, str] = {}
        self._contexts = contexts
        self._readings = [reading for reading in (decode, spell) if reading is not None]
        # A token is at least a byte, save a few special ones that decode to nothing.
        self._window = max((len(s.encode()) for s in options.stop), default=0) + 8

    def cut(self, request: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of ``tokens`` stand, and why the request ends if it does."""
        answer = self.answers[request]
        for count, token in enumerate(tokens, start=1):
            answer.append(token)
            if token in self.options.eos or self._says_stop(request):
                return count, "stop"
            if len(answer) >= self.options.max_new_tokens:
                return count, "length"
            if self.options.criteria and self._criteria(request):
                return count, "stop"
        return len(tokens), None

    def _says_stop(self, request: int) -> bool:
        if not self.options.stop:
            return False
        late = self.answers[request][-self._window :]
        for tail in (read(late) for read in self._readings):
            found = [(tail.find(string), string) for string in self.options.stop if string in tail]
            if found:
                self.stopped_by[request] = min(found)[1]
                return True
        return False

    def _criteria(self, request: int) -> bool:
        context = self._contexts[request]
        new = torch.tensor(self.answers[request], device=context.device)
        ids = torch.cat([context, new])[None]
        return any(bool(torch.as_tensor(rule(ids, None)).all()) for rule in self.options.criteria)
