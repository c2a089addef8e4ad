"""Turns GenerationConfig's names into sampling rules and limits of answers.

Every argument that could change an answer is supported or refused by name, never ignored.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxTimeCriteria

from saccade.core.errors import OptionError, first_line, suggest
from saccade.core.numpy_numbers import to_plain
from saccade.core.sampling import GeneratedTokenPenalties, Grammar, Processor, Sampling
from saccade.core.stopping import MAX_NEW_TOKENS, StopConditions


class Settings(TypedDict, total=False):
    """The names of ``GenerationConfig`` that are in use, for editors and type checkers.

    Other names of ``GenerationConfig`` are accepted too; an unknown name is an error.
    """

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


class GenerateArguments(Settings, total=False):
    """The settings, and what else ``generate`` of Transformers takes."""

    generation_config: GenerationConfig | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: Sequence[Any] | None
    prefix_allowed_tokens_fn: Callable[..., list[int]] | None


OUR_NAMES = {  # Our name of an argument, by the name that other libraries give it.
    "assistant_model": "draft",
    "assistant_tokenizer": "draft_inputs",
    "max_tokens": "max_new_tokens",
    "stop": "stop_strings",
}
INTEGER_MINIMUMS = {  # The least value of each setting that is a whole number.
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "max_length": 1,
    "min_length": 0,
    "top_k": -1,  # Some checkpoints' configs say -1. Transformers refuses it when it samples.
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}
# Each setting has to be above the first number and at most the second. The rules of sampling among
# them may also equal the first number when decoding is greedy.
RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e6),
    "encoder_repetition_penalty": (0.0, 1e6),
    "max_time": (0.0, 1e9),
}
RETURN_SETTINGS = ("return_dict_in_generate", "output_scores", "output_logits")
BOOLEAN_SETTINGS = ("do_sample", "renormalize_logits", "remove_invalid_values", *RETURN_SETTINGS)
TOKEN_IDS = ("eos_token_id", "pad_token_id", "bad_words_ids", "suppress_tokens")

# Settings that are numbers, switches or lists of ids.
PLAIN_SETTINGS = {
    *INTEGER_MINIMUMS,
    *RANGES,
    *BOOLEAN_SETTINGS,
    *TOKEN_IDS,
    "num_return_sequences",
}

# Arguments of other calls, with the advice that the error gives.
OTHER_CALLS = {
    **dict.fromkeys(
        ("torch_dtype", "dtype"),
        "dtype= belongs to the call that loads the model: saccade.load or from_pretrained",
    ),
    "attn_implementation": "Saccade computes attention itself, so leave it out",
    "device_map": "it belongs to the call that loads the model: saccade.load or from_pretrained",
    **dict.fromkeys(
        ("prompt", "messages", "image", "images", "video", "videos"),
        "Model.describe(media, question) takes it as a positional argument",
    ),
    "stream": "saccade.stream and Model.stream give an answer as it grows",
    **dict.fromkeys(("nframes", "max_frames"), "Model.describe takes num_frames="),
    **dict.fromkeys(
        ("fps", "num_frames"),
        "give it to Model.describe, or FrameSampling(fps=..., num_frames=...) to "
        "saccade.inputs.media.read",
    ),
}

# Rules of sampling, each with the values that agree with greedy decoding: they turn the rule off
# or leave only the likeliest token. A caller may give these without do_sample=True.
GREEDY_COMPATIBLE_VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0, 1),
    "top_p": (0, 1),
    "top_k": (-1, 0, 1),
    "min_p": (0,),
    "typical_p": (0, 1),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (1,),
}

# Settings that `saccade.generate` alone honours, since they are about what it returns.
GENERATE_SETTINGS = frozenset({*RETURN_SETTINGS, "num_return_sequences"})

# Settings that this engine does not support, each with the values that change nothing.
UNSUPPORTED_SETTINGS: dict[str, tuple[Any, ...]] = {
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
# What a caller should do instead of giving a refused setting. Where there is no entry, it should
# leave the setting out.
INSTEAD = {
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "constraints", "force_words_ids"),
        "beams are not searched here: decode greedily or with do_sample=True",
    ),
    "prompt_lookup_num_tokens": 'write method="lookup"',
    "num_return_sequences": "only saccade.generate returns several answers to a prompt",
    **dict.fromkeys(RETURN_SETTINGS, "only saccade.generate returns scores and logits"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states"),
        "a forward judges several drafted tokens and keeps neither: call the model itself",
    ),
    "cache_implementation": "Saccade has a cache of its own: leave it out",
}


def merge_settings(
    model: Any,
    generation_config: GenerationConfig | None,
    settings: Mapping[str, Any],
    supported_by_caller: frozenset[str] = frozenset(),
) -> GenerationConfig:
    """Returns the model's generation config, or the caller's, with the caller's settings over it.

    It is a copy, so neither config is changed. A setting of None counts as not given, so the
    config's value stays, while Transformers' ``generate`` would replace it with None.
    ``supported_by_caller`` are settings of ``UNSUPPORTED_SETTINGS`` that the caller of this
    function supports. Raises OptionError naming a setting that is unknown, wrong or not supported.
    """
    if not isinstance(generation_config, GenerationConfig | None):
        kind = type(generation_config).__name__
        raise OptionError(f"generation_config= is transformers' GenerationConfig, not {kind}")
    config = copy.deepcopy(generation_config or model.generation_config)
    for name in PLAIN_SETTINGS & vars(config).keys():
        setattr(config, name, _as_plain(vars(config)[name]))
    overrides = {name: _as_plain(value) for name, value in settings.items() if value is not None}
    _check_settings({**config.to_dict(), **overrides})
    _check_sampling(config, overrides)
    try:
        unknown = config.update(**overrides)
    except (ValueError, TypeError) as error:
        raise OptionError(first_line(error)) from error
    if config.eos_token_id == []:  # No token ends the answer.
        config.eos_token_id = None
    if unknown:
        known_names = config.to_dict()
        for name in OTHER_CALLS.keys() & unknown.keys():
            raise OptionError(f"{name}= is no setting of an answer: {OTHER_CALLS[name]}")
        hints = [f"{name}{suggest_argument(name, known_names)}" for name in sorted(unknown)]
        raise OptionError(f"unknown generation argument {', '.join(hints)}")
    merged = config.to_dict()
    for name, allowed in UNSUPPORTED_SETTINGS.items():
        if name not in supported_by_caller and merged.get(name) not in allowed:
            instead = INSTEAD.get(name, "leave it out")
            raise OptionError(f"{name}={merged[name]!r} is not supported by saccade; {instead}")
    return config


def _check_sampling(config: GenerationConfig, overrides: Mapping[str, Any]) -> None:
    """Raises OptionError for a sampling rule of a caller who did not ask for sampling.

    Greedy decoding ignores such a rule, so the caller may have forgotten ``do_sample=True``. A
    caller who says ``do_sample=False`` decodes greedily on purpose and gets no error, as in
    ``generate``.
    """
    if config.do_sample or "do_sample" in overrides:
        return
    for name, compatible_values in GREEDY_COMPATIBLE_VALUES.items():
        value = overrides.get(name)
        if value is None or value in compatible_values:
            continue
        if value != vars(config).get(name):  # To repeat the config's own value is no mistake.
            raise OptionError(
                f"{name}={value!r} is a rule of sampling: add do_sample=True, or leave it out"
            )


def returned_settings(config: GenerationConfig) -> frozenset[str]:
    """Returns which of ``RETURN_SETTINGS`` are on. Raises OptionError where scores or logits are
    asked for without ``return_dict_in_generate``, since a tensor of ids has no place for them."""
    turned_on = frozenset(name for name in RETURN_SETTINGS if getattr(config, name, None))
    if turned_on and "return_dict_in_generate" not in turned_on:
        raise OptionError(
            f"{min(turned_on)}=True needs return_dict_in_generate=True, which returns more than ids"
        )
    return turned_on


def sequence_count(config: GenerationConfig) -> int:
    """Returns how many answers each request gets. Raises OptionError where they would be equal."""
    count = config.num_return_sequences
    check_whole("num_return_sequences", count)
    if count is None or count == 1:
        return 1
    if count < 1:
        raise OptionError(f"num_return_sequences={count} must be at least 1")
    if not config.do_sample:
        raise OptionError(
            f"num_return_sequences={count} needs do_sample=True: greedy answers are all the same"
        )
    return int(count)


def suggest_argument(name: str, names: Iterable[str]) -> str:
    """Returns what to add to an error about an unknown argument: our name of it, or the nearest of
    ``names``."""
    our_name = OUR_NAMES.get(name)
    return suggest(name, names) if our_name is None else f" (did you mean {our_name}?)"


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises OptionError for a setting of the wrong type, or out of range."""
    for name, least in INTEGER_MINIMUMS.items():
        value = settings.get(name)
        check_whole(name, value)
        if value is not None and value < least:
            raise OptionError(f"{name}={value} must be at least {least}")
    for name, (low, high) in RANGES.items():
        value = settings.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Greedy decoding does not use these rules, so ``temperature=0`` is allowed there.
        is_unused = name in GREEDY_COMPATIBLE_VALUES and not settings.get("do_sample")
        if is_number and value == low and is_unused:
            continue
        if not is_number or not low < value <= high:
            raise OptionError(f"{name}={value!r} must be a number above {low:g} and up to {high:g}")
    for name in BOOLEAN_SETTINGS:
        if not isinstance(settings.get(name, False), bool | None):
            raise OptionError(f"{name}={settings[name]!r} is neither True nor False")
    for name in TOKEN_IDS:
        for token in _flatten(settings.get(name)):
            check_whole(name, token)
    _check_stop_strings(settings.get("stop_strings"))


def _check_stop_strings(stop: Any) -> None:
    """Raises OptionError unless these are a string, a list of strings or None."""
    if stop is None:
        return
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list | tuple) or not all(isinstance(each, str) for each in stop):
        raise OptionError(f"stop_strings={stop!r} is neither a string nor a list of strings")
    for text in stop:
        check_text("a stop string", text)


def _as_plain(value: Any) -> Any:
    """Returns a setting as Python's own numbers and lists, whatever library made it."""
    return to_plain(value.tolist() if isinstance(value, torch.Tensor) else value)


def check_text(name: str, text: str) -> None:
    """Raises OptionError for text with half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "holds half a character (a lone surrogate): give whole text"
        raise OptionError(f"{name} {what}") from None


def check_callables(**arguments: Any) -> None:
    """Raises OptionError unless each argument is None or a list of callables."""
    for name, value in arguments.items():
        if value is None:
            continue
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(callable(each) for each in value):
            raise OptionError(f"{name}= is a list of functions or other callables, not {value!r}")


def check_number(name: str, value: Any) -> None:
    """Raises OptionError unless the value is None or a finite number."""
    value = to_plain(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
        raise OptionError(f"{name}={value!r} is not a number")


def check_whole(name: str, value: Any) -> None:
    """Raises OptionError unless the value is None or a whole number."""
    value = to_plain(value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"{name}={value!r} is not a whole number")


def _flatten(tokens: Any) -> list[Any]:
    """Returns all ids of nested lists."""
    if not isinstance(tokens, list | tuple):
        return [tokens]
    return [token for each in tokens for token in _flatten(each)]


def sampling_rules(
    model: Any,
    config: GenerationConfig,
    contexts: Sequence[torch.Tensor],
    *,
    length: int = MAX_NEW_TOKENS,
    extra: LogitsProcessorList | None = None,
    allowed: Callable[..., list[int]] | None = None,
    seed: int | None = None,
    grammar: Grammar | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> list[Sampling]:
    """Returns each request's sampling rules, for answers up to ``length`` tokens.

    ``contexts`` are the ids of each prompt. ``extra`` are the caller's own logits processors, and
    ``allowed`` is the caller's ``prefix_allowed_tokens_fn``. Transformers' own code makes the list
    of logits processors, from the config and these. It gets the presence and frequency penalties as
    one more processor, which it applies before temperature and truncation. All requests get the
    same seed, a random one if none is given. Raises OptionError where Transformers refuses the
    settings.
    """
    rules = []
    seed = secrets.randbits(63) if seed is None else seed
    own_processors = copy_processors(extra or (), len(contexts))
    for request, context in enumerate(contexts):
        request_config = copy.copy(config)
        # Some processors act at the end of the longest possible text (forced_eos_token_id).
        request_config.max_length = len(context) + length
        # Each request is a batch of one row here.
        request_config.num_beams = request_config.num_return_sequences = 1
        penalties: list[Processor] = []
        if presence_penalty or frequency_penalty:
            penalties.append(
                GeneratedTokenPenalties(len(context), presence_penalty, frequency_penalty)
            )
        try:
            model._prepare_special_tokens(request_config, device=context.device)
            processors = model._get_logits_processor(
                generation_config=request_config,
                input_ids_seq_length=len(context),
                encoder_input_ids=context[None],
                prefix_allowed_tokens_fn=allowed and _for_request(allowed, request),
                logits_processor=LogitsProcessorList([*own_processors[request], *penalties]),
                device=str(context.device),
                model_kwargs={},
            )
        except (ValueError, TypeError) as error:
            reason = first_line(error)
            raise OptionError(f"these generation settings cannot be used: {reason}") from error
        rules.append(
            Sampling(
                sample=bool(config.do_sample),
                processors=tuple(processors),
                seed=seed,
                end_ids=end_ids(config),
                max_tokens=length,
                grammar=grammar,
            )
        )
    return rules


def copy_processors(processors: Sequence[Processor], count: int) -> list[list[Processor]]:
    """Returns the caller's processors for each of ``count`` requests.

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


def _for_request(allowed: Callable[..., list[int]], request: int) -> Callable[..., list[int]]:
    """Returns the caller's ``prefix_allowed_tokens_fn`` for one request.

    Transformers calls the result with 0, because each request is a batch of one row here. The
    caller's function then gets the request's number in the caller's batch.
    """
    return lambda batch, ids: allowed(request, ids)


def end_ids(config: GenerationConfig) -> tuple[int, ...]:
    """Returns the ids that end an answer."""
    eos = config.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns stop strings as a tuple. Raises OptionError for a wrong type or an empty string."""
    _check_stop_strings(stop)
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not string for string in strings):
        raise OptionError("a stop string must not be empty")
    return strings


def answer_limits(
    config: GenerationConfig, longest: int, criteria: Sequence[Any] = ()
) -> StopConditions:
    """Returns where answers stop.

    An answer has at most ``config.max_new_tokens`` tokens. If that is None, ``config.max_length``
    limits the prompt and the answer together, and ``longest`` is how many tokens the longest prompt
    has. If both are None, the limit is ``MAX_NEW_TOKENS``. ``criteria`` are the caller's stopping
    criteria. Raises OptionError where nothing is left for the answer.
    """
    length = config.max_new_tokens
    if length is None:
        length = MAX_NEW_TOKENS if config.max_length is None else config.max_length - longest
        if length < 1:
            raise OptionError(
                f"max_length={config.max_length} leaves no room after a prompt of {longest} "
                "tokens; set max_new_tokens instead"
            )
    strings = stop_strings(config.stop_strings)
    timed = () if config.max_time is None else (MaxTimeCriteria(max_time=config.max_time),)
    ends = end_ids(config)
    pad = config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    return StopConditions(length, ends, strings, (*criteria, *timed), pad)
