"""Says whether a target and a draft fit together and are worth it, before any weight is loaded.

Only the configs and tokenizers are read. The speedup is that of the cost model in
:mod:`saccade.core.costs`. A forward of one row costs the bytes that it reads: the weights that it
passes through, keys and values. On a GPU each layer costs a fixed time as well, which is most of a
small draft's step. Every further row of a forward costs a small share of the first. These speedups
are expected; ``saccade calibrate`` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from saccade.core.costs import EXPECTED_COST_PER_ROW
from saccade.core.errors import ModelError
from saccade.core.round_estimates import expected_chain
from saccade.inputs.footprint import (
    BYTES_PER_WEIGHT,
    Footprint,
    footprint,
    number_size,
    weight_size,
)
from saccade.model.kernels.few_bits import ROUNDINGS, Rounding
from saccade.model.memory import GIB, SPARE_SHARE, format_bytes

ACCEPTANCE_RATES = (0.6, 0.7, 0.8, 0.9)  # A speedup is shown for each.
MAX_CHAIN = 12  # The longest chain that is considered, in tokens.
# By kind of device: what each further row of a forward costs, as a share of the first row's cost.
COST_PER_ROW = EXPECTED_COST_PER_ROW
H100_BYTES_PER_SECOND = 3.35e12  # As published.
# The share of the published bandwidth that the matrix products of a step reach; assumed.
REACHED_BANDWIDTH = 0.85
# The fixed time of a layer: about twenty small kernels, replayed from a CUDA graph; assumed.
SECONDS_PER_LAYER = 64e-6
FIXED_BYTES_PER_LAYER = {
    "cpu": 0.0,
    "cuda": SECONDS_PER_LAYER * REACHED_BANDWIDTH * H100_BYTES_PER_SECOND,
}
"""The fixed time of a layer, as the bytes that could be read in that time."""
PROCESS_BYTES = GIB // 2
"""About what another process takes on a GPU for CUDA itself."""
WORTHWHILE_SPEEDUP = 1.3  # From this speedup on, the verdict is "worth it".
# From this speedup on, the verdict is at least "little to gain". Rounding is suggested only if it
# gains more than this factor.
NOTICEABLE_SPEEDUP = 1.05
SUGGESTED_ROUNDING = ROUNDINGS["int4"]
# The verdict and the suggestion assume this acceptance rate, which the papers' pairs reach. It is
# one of ``ACCEPTANCE_RATES``.
TYPICAL_RATE = 0.8


@dataclass(frozen=True)
class Outlook:
    """The expected speedup at one acceptance rate."""

    rate: float  # The acceptance rate.
    length: int  # The drafted tokens of the best chain.
    speedup: float  # Of decoding, against plain decoding.


@dataclass(frozen=True)
class Part:
    """What one model needs, in bytes."""

    name: str
    weights: int  # With a rounded copy, if the draft has one.
    cache: int  # The keys, values and states of one request.
    step: float  # The bytes that a forward of one token reads.
    # The fixed time of a forward, as the bytes that could be read in that time.
    fixed: float = 0.0
    special_layers: str = ""  # A sentence about its layers that do not keep all keys, if any.
    rounded_copy: int = 0  # The bytes of ``weights`` that are a rounded copy.
    can_be_rounded: bool = True  # Whether ``draft_quantize`` can round a copy of its weights.

    @property
    def cost(self) -> float:
        """The cost of a forward of one token, in bytes."""
        return self.step + self.fixed

    @property
    def h100_seconds(self) -> float:
        """The expected seconds of a forward of one token on an H100."""
        return self.cost / (REACHED_BANDWIDTH * H100_BYTES_PER_SECOND)


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a pair, and the numbers behind it. The field names are those of the JSON."""

    parts: tuple[Part, ...]
    needed: int  # The bytes of what lies on the target's device.
    free_bytes: int  # Of the target's device.
    tokens: int  # Of the prompt and the answer together.
    # The cost of the draft's step divided by that of the target's (``Part.cost``, in bytes). For a
    # target alone it is 1. Where the two are on devices of two kinds, it does not say how long the
    # draft's step takes compared with the target's.
    ratio: float
    # Empty where nothing drafts, where a problem was found before the memory was checked, and where
    # the two are on devices of two kinds.
    outlook: tuple[Outlook, ...]
    problems: tuple[str, ...]  # Why the two cannot work together or do not fit.
    notes: tuple[str, ...]  # What else is true of the two, in sentences.
    # What a draft in a process of its own needs on a GPU beyond ``needed``; 0 on a CPU, for a head,
    # and where there is no draft model.
    draft_process_bytes: int = 0
    suggestion: str = ""  # What rounding the draft's weights would gain, if that is noticeable.

    @property
    def conclusion(self) -> str:
        if self.problems:
            return "no: " + "; ".join(self.problems)
        if not self.outlook and len(self.parts) > 1:
            return "it fits; saccade calibrate measures what drafting gains"
        if not self.outlook:
            return "it fits; name a draft to see what drafting would gain"
        typical = next(each for each in self.outlook if each.rate == TYPICAL_RATE)
        about = f"about {typical.speedup:.1f} times as fast where {TYPICAL_RATE:.0%} are accepted"
        if typical.speedup >= WORTHWHILE_SPEEDUP:
            return f"worth it: {about}"
        if typical.speedup >= NOTICEABLE_SPEEDUP:
            return f"little to gain: {about}"
        return f"not worth it: {about}, so plain decoding (--method ar) is the better choice"

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.conclusion}


def examine(
    target: tuple[str, Any],
    draft: tuple[str, Any] | None,
    *,
    tokens: int,
    keep: float = 0.1,
    dtype: Any = "auto",
    device: str = "cpu",
    free_bytes: int,
    draft_free_bytes: int | None = None,
    draft_device: str | None = None,
    draft_dtype: Any = None,
    bits: int | None = None,
    draft_bits: int | None = None,
    draft_rounding: Rounding | None = None,
    problems: Sequence[str] = (),
    notes: Sequence[str] = (),
    head: Footprint | None = None,
) -> Diagnosis:
    """Returns the verdict on (name, config) of a target and a draft, or of a target alone.

    With ``draft_rounding`` and no draft the target drafts for itself with a rounded copy. Where
    nothing is rounded or quantised and all is on a CPU, there is a suggestion to round, if the
    copy would fit and gain noticeably.

    Args:
        tokens: the number of tokens of the prompt and the answer together.
        keep: the share of those tokens that the draft reads.
        free_bytes: the free bytes of ``device``.
        dtype: the dtype of the weights that are not quantised; "auto" is that of each config.
        device: the kind of the target's device: "cpu" or "cuda".
        draft_free_bytes: the free bytes of the draft's device, if that is another one.
        draft_device: the kind of the draft's device; by default that of the target's.
        draft_dtype: as ``dtype``, for the draft; by default the target's.
        bits: the bits of each of the target's weights, if it is quantised when it is loaded.
        draft_bits: the bits of each of the draft's weights, if it is quantised when it is loaded.
        draft_rounding: how the draft's weights are rounded, in a copy that is kept beside them and
            that the draft's steps read.
        problems: the problems that are already known.
        notes: the notes that are already known.
        head: the size of the draft, if that is a head. The target's config then stands for the
            head's own.
    """
    draft_device = draft_device or device
    draft_dtype = draft_dtype or dtype
    all_problems = list(problems)
    # What each model needs: ``parts`` are the target, and after it the draft if there is one.
    try:
        parts = [_part(*target, tokens, dtype, bits, device)]
        draft_tokens = max(1, int(tokens * keep))
        if draft is not None:
            draft_config = draft[1] if head is None else target[1]
            parts.append(
                _part(
                    draft[0],
                    draft_config,
                    draft_tokens,
                    draft_dtype,
                    draft_bits,
                    draft_device,
                    draft_rounding,
                    head,
                )
            )
        elif draft_rounding is not None:
            parts.append(_own_draft(*target, draft_tokens, dtype, device, draft_rounding))
    except ModelError as error:
        reasons = (*dict.fromkeys([*all_problems, str(error)]),)
        return Diagnosis(
            parts=(),
            needed=0,
            free_bytes=free_bytes,
            tokens=tokens,
            ratio=1.0,
            outlook=(),
            problems=reasons,
            notes=tuple(notes),
        )
    # The expected speedup.
    outlook: tuple[Outlook, ...] = ()
    ratio = parts[-1].cost / parts[0].cost
    cost_per_row = COST_PER_ROW.get(device, COST_PER_ROW["cuda"])
    if len(parts) > 1 and not all_problems and draft_device == device:
        outlook = tuple(_best_chain(rate, ratio, cost_per_row) for rate in ACCEPTANCE_RATES)
    # Whether they fit into memory.
    on_device = parts if draft_free_bytes is None else parts[:1]
    needed = sum(part.weights + part.cache for part in on_device)
    if needed > free_bytes * (1 - SPARE_SHARE):
        who = "together they need" if len(on_device) > 1 else f"{target[0]} needs"
        all_problems.append(
            f"{who} {format_bytes(needed)}, and {device} has {format_bytes(free_bytes)} free"
            + _suggest_smaller(on_device, free_bytes, weight_size(dtype, target[1], bits))
        )
    if draft is not None and draft_free_bytes is not None:
        draft_needs = parts[1].weights + parts[1].cache
        if draft_needs > draft_free_bytes * (1 - SPARE_SHARE):
            all_problems.append(
                f"{draft[0]} needs {format_bytes(draft_needs)}, and the draft's device has "
                f"{format_bytes(draft_free_bytes)} free"
            )
    all_notes = [*notes, *(part.special_layers for part in parts if part.special_layers)]
    if draft_device != device:
        all_notes.append(
            f"the draft runs on a device of another kind ({draft_device}) than the target "
            f"({device}), so no speedup can be told from their sizes: saccade calibrate measures it"
        )
    # Whether a draft with rounded weights would gain noticeably more.
    suggestion = ""
    drafting_part = parts[-1]  # The draft's part, or the target's if there is no other.
    # Only on a CPU can a copy be rounded to ``SUGGESTED_ROUNDING``.
    is_on_cpu = device == draft_device == "cpu"
    # The weights of a head are never rounded.
    can_be_rounded = head is None and drafting_part.can_be_rounded
    # Nothing is suggested beside a target that is quantised when it is loaded.
    has_rounded_weights = any(each is not None for each in (draft_rounding, bits, draft_bits))
    if is_on_cpu and can_be_rounded and not has_rounded_weights and not all_problems:
        drafting_model = target if draft is None else draft
        rounded = _part(
            *drafting_model,
            draft_tokens,
            dtype if draft is None else draft_dtype,
            bits=None,
            device=device,
            rounding=SUGGESTED_ROUNDING,
        )
        new_speedup = _best_chain(TYPICAL_RATE, rounded.cost / parts[0].cost, cost_per_row).speedup
        speedup = next((each.speedup for each in outlook if each.rate == TYPICAL_RATE), 1.0)
        # ``rounded`` has the rounded copy beside the weights that the drafting part has.
        more_bytes = rounded.weights - drafting_part.weights
        if draft is None:
            more_bytes += rounded.cache  # The target as its own draft has a second cache.
        fits = needed + more_bytes <= free_bytes * (1 - SPARE_SHARE)
        if fits and new_speedup > speedup * NOTICEABLE_SPEEDUP:
            suggestion = _suggest_rounding(new_speedup, draft is None)
    # What a parallel method needs, whose draft is a process of its own on a GPU.
    process_bytes = 0
    if draft is not None and head is None and draft_device != "cpu":
        process_bytes = PROCESS_BYTES
        if draft_free_bytes is None:
            all_notes.append(_process_note(process_bytes, needed, free_bytes))
        else:
            draft_needs = parts[1].weights + parts[1].cache
            all_notes.append(_process_note(process_bytes, draft_needs, draft_free_bytes))
    return Diagnosis(
        tuple(parts),
        needed,
        free_bytes,
        tokens,
        ratio,
        outlook,
        tuple(all_problems),
        tuple(all_notes),
        process_bytes,
        suggestion,
    )


def _process_note(process_bytes: int, needed: int, free_bytes: int) -> str:
    """Returns a sentence about what a parallel method needs on the draft's device, which has
    ``free_bytes`` and has to hold ``needed`` bytes with any other method."""
    sentence = (
        f"parallel methods (hippo, pearl) need about {format_bytes(process_bytes)} more: "
        "their draft is a process of its own, over the same weights"
    )
    if needed <= free_bytes * (1 - SPARE_SHARE) < needed + process_bytes:
        return f"{sentence}, which does not fit; other methods do"
    return sentence


def _suggest_rounding(speedup: float, is_own_draft: bool) -> str:
    """Returns a sentence that suggests to round a draft's weights, for this expected speedup."""
    what = "the target as its own draft" if is_own_draft else "the draft"
    return (
        f"--draft-quantize {SUGGESTED_ROUNDING.name} rounds {what}: "
        f"about {speedup:.1f} times as fast where {TYPICAL_RATE:.0%} are accepted"
    )


def _own_draft(
    name: str, config: Any, tokens: int, dtype: Any, device: str, rounding: Rounding
) -> Part:
    """Returns what the target needs as its own draft, in addition to what it needs as the target:
    a rounded copy of its weights, and a cache."""
    with_originals = _part(name, config, tokens, dtype, bits=None, device=device, rounding=rounding)
    # The target's own part has the original weights already, and the sentence about its layers.
    copy = footprint(config).rounded_copy_bytes(rounding.bytes_per_weight)
    return replace(
        with_originals,
        name=f"{name} ({rounding.name})",
        weights=copy,
        special_layers="",
    )


def _part(
    name: str,
    config: Any,
    tokens: int,
    dtype: Any,
    bits: int | None,
    device: str,
    rounding: Rounding | None = None,
    size_of_head: Footprint | None = None,
) -> Part:
    """Returns what a model needs.

    With a ``rounding`` the model is a draft that has a rounded copy beside its weights. Its steps
    read the copy. With ``size_of_head`` it is a draft head of that size, and the target's
    ``config`` only says how many bytes a number takes.
    """
    try:
        model_size: Footprint = size_of_head or footprint(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    bytes_per_number = number_size(dtype, config)  # Of keys and values.
    bytes_per_weight = weight_size(dtype, config, bits)
    copy, read_bytes_per_weight = 0, bytes_per_weight
    if rounding is not None:
        copy = model_size.rounded_copy_bytes(rounding.bytes_per_weight)
        read_bytes_per_weight = rounding.bytes_per_weight
    fixed_bytes = FIXED_BYTES_PER_LAYER.get(device, FIXED_BYTES_PER_LAYER["cuda"])
    return Part(
        name,
        weights=model_size.weight_bytes(bytes_per_weight) + copy,
        cache=model_size.cache_bytes(tokens, bytes_per_number),
        step=model_size.bytes_read_per_token(read_bytes_per_weight, tokens, bytes_per_number),
        fixed=model_size.layers * fixed_bytes,
        special_layers=_describe_layers(name, model_size, bytes_per_number),
        rounded_copy=copy,
        can_be_rounded=model_size.can_be_rounded,
    )


def _describe_layers(name: str, model_size: Footprint, bytes_per_number: float) -> str:
    """Returns a sentence about the layers that do not keep the keys of every token: those with a
    window and those with a state. It is "" where there are none."""
    parts = []
    if model_size.key_windows:
        sizes = sorted({window.size for window in model_size.key_windows})
        parts.append(
            f"{len(model_size.key_windows)} of {name}'s {model_size.layers} layers see the last "
            f"{' or '.join(map(str, sizes))} tokens at most and drop older keys, except with "
            "methods that draft from the target's own keys, which need more memory than this"
        )
    if model_size.stateful_layers:
        state_bytes = format_bytes(model_size.cache_bytes(0, bytes_per_number))
        parts.append(
            f"{model_size.stateful_layers} of {name}'s {model_size.layers} layers keep a state "
            f"instead of keys: {state_bytes} a request, however long it is"
        )
    return "; ".join(parts)


def _best_chain(rate: float, ratio: float, cost_per_row: float) -> Outlook:
    """Returns the chain length with the highest speedup, and that speedup.

    A chain of n tokens takes n steps of the draft and a forward of the target over n + 1 rows. The
    first row costs 1, a step of the draft costs ``ratio``, and each further row ``cost_per_row``.
    The speedup is the expected tokens of the round over its cost, since plain decoding gives one
    token at the cost of 1.
    """
    speedups = {}
    for length in range(1, MAX_CHAIN + 1):
        round_cost = length * ratio + 1 + cost_per_row * length
        speedups[length] = expected_chain(rate, length) / round_cost
    length = max(speedups, key=lambda each: speedups[each])
    return Outlook(rate, length, speedups[length])


def _suggest_smaller(parts: Sequence[Part], free_bytes: int, bytes_per_weight: float) -> str:
    """Returns what would fit instead, in words, or "". ``parts`` are the target and perhaps a
    draft, and ``bytes_per_weight`` is what one weight of the target takes now."""
    room = free_bytes * (1 - SPARE_SHARE)
    cache = sum(part.cache for part in parts)
    weights = sum(part.weights for part in parts)
    copies = sum(part.rounded_copy for part in parts)
    weight_count = parts[0].weights / bytes_per_weight
    draft_weights = weights - parts[0].weights
    for option, new_bytes in BYTES_PER_WEIGHT.items():
        if option.startswith("--dtype"):
            # The type also applies to the draft and to the caches, but not to rounded weights.
            needed = (weights - copies + cache) * new_bytes / bytes_per_weight + copies
        else:
            # Only the target's weights are stored in fewer bits.
            needed = weight_count * new_bytes + draft_weights + cache
        if new_bytes < bytes_per_weight and needed < room:
            return f"; {option} would fit ({format_bytes(needed)})"
    percentage = int((room - weights) / cache * 100)
    return f"; a prompt of {percentage} % of that length would fit" if percentage > 0 else ""
