"""Whether a target and a draft go together and whether that pays, before any weight is loaded.

From the configs and tokenizers alone. The speedup is the model of costs in
:mod:`saccade.core.costs`. A forward costs the bytes it reads (weights it passes through, keys and
values). On a GPU each layer costs a fixed time as well, which is most of a small draft's step. On a
CPU rows beyond the first cost something too. It is an expectation: ``saccade calibrate`` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saccade.core.errors import ModelError
from saccade.core.pace import expected_chain
from saccade.inputs.footprint import (
    BYTES_PER_WEIGHT,
    Footprint,
    footprint,
    number_size,
    weight_size,
)
from saccade.model.memory import GIB, SPARE, gib

RATES = (0.6, 0.7, 0.8, 0.9)
LONGEST = 12
SLOPE = {"cpu": 0.055, "cuda": 0.005}
"""What one more row adds to a verifying forward, as a share of T(1): on a CPU measured on tiny
models (notebook/LOG.md), on a GPU assumed, since nothing has been timed there."""
H100_BYTES_PER_SECOND = 3.35e12  # as published
REACHED_BANDWIDTH = 0.85  # the share of it that a step's products reach; assumed
SECONDS_PER_LAYER = 64e-6  # about twenty small kernels in a captured step; assumed
FIXED = {"cpu": 0.0, "cuda": SECONDS_PER_LAYER * REACHED_BANDWIDTH * H100_BYTES_PER_SECOND}
"""What a layer of a step costs beside its bytes, as the bytes that could be read meanwhile."""
PROCESS_BYTES = GIB // 2
"""What a further process takes on a GPU for CUDA itself; about."""
PAYS, HARDLY = 1.3, 1.05
TYPICAL = 0.8  # an acceptance rate the papers' pairs reach


@dataclass(frozen=True)
class Outlook:
    """What to expect at one acceptance rate."""

    rate: float
    length: int  # of the chain that pays best
    speedup: float  # of decoding


@dataclass(frozen=True)
class Part:
    """What one model needs, in bytes."""

    name: str
    weights: int
    cache: int
    step: float  # read by a forward of one token
    fixed: float = 0.0  # what a forward costs beside: bytes that could be read meanwhile

    @property
    def cost(self) -> float:
        """A forward of one token, in bytes."""
        return self.step + self.fixed

    @property
    def h100_seconds(self) -> float:
        """Seconds of a forward of one token on an H100, on paper."""
        return self.cost / (REACHED_BANDWIDTH * H100_BYTES_PER_SECOND)


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a pair, and what it rests on."""

    parts: tuple[Part, ...]
    there: int  # bytes free
    tokens: int
    ratio: float  # a draft's step against the target's
    outlook: tuple[Outlook, ...]
    problems: tuple[str, ...]  # why the two cannot work together or do not fit
    notes: tuple[str, ...]
    child: int = 0  # bytes that a draft in a process of its own takes beside all that

    @property
    def needed(self) -> int:
        return sum(part.weights + part.cache for part in self.parts)

    @property
    def verdict(self) -> str:
        if self.problems:
            return "no: " + "; ".join(self.problems)
        if not self.outlook:
            return "it fits; with a draft, whether drafting pays is said too"
        typical = next(each for each in self.outlook if each.rate == TYPICAL)
        about = f"about {typical.speedup:.1f} times as fast where {TYPICAL:.0%} are accepted"
        if typical.speedup >= PAYS:
            return f"worth it: {about}"
        if typical.speedup >= HARDLY:
            return f"little to gain: {about}"
        return f"not worth it: {about}, so plain decoding (--method ar) is the better choice"

    def json(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "needed": self.needed, "verdict": self.verdict}


def examine(
    target: tuple[str, Any],
    draft: tuple[str, Any] | None,
    *,
    tokens: int,
    keep: float = 0.1,
    dtype: Any = "auto",
    device: str = "cpu",
    there: int,
    draft_there: int | None = None,
    bits: int | None = None,
    problems: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Diagnosis:
    """The verdict on (name, config) of a target and a draft; without one, the target alone.

    Args:
        tokens: of the prompt and the answer together.
        keep: the share of them the draft reads.
        there: bytes free on ``device``.
        draft_there: bytes free where the draft is, if that is another device.
        bits: a weight of the target takes, where it is to be quantised on the way in.
    """
    found = list(problems)
    try:
        parts = [_part(*target, tokens, dtype, bits, device)]
        if draft is not None:
            parts.append(_part(*draft, max(1, int(tokens * keep)), dtype, None, device))
    except ModelError as error:
        why = (*dict.fromkeys([*found, str(error)]),)
        return Diagnosis((), there, tokens, 1.0, (), why, tuple(notes))
    outlook: tuple[Outlook, ...] = ()
    ratio = parts[-1].cost / parts[0].cost
    if draft is not None and not found:
        slope = SLOPE.get(device, SLOPE["cuda"])
        outlook = tuple(_best(rate, ratio, slope) for rate in RATES)
    beside = parts if draft_there is None else parts[:1]
    needed = sum(part.weights + part.cache for part in beside)
    if needed > there * (1 - SPARE):
        who = "together they need" if len(beside) > 1 else f"{target[0]} needs"
        found.append(
            f"{who} {gib(needed)}, and {device} has {gib(there)} free"
            + _smaller(beside, there, weight_size(dtype, target[1], bits))
        )
    if draft is not None and draft_there is not None:
        own = parts[1].weights + parts[1].cache
        if own > draft_there * (1 - SPARE):
            found.append(
                f"{draft[0]} needs {gib(own)}, and the draft's device has {gib(draft_there)} free"
            )
    child, more = 0, list(notes)
    if draft is not None and device != "cpu":
        child = PROCESS_BYTES
        if draft_there is None:
            more.append(_beside(child, needed, there))
        else:
            more.append(_beside(child, parts[1].weights + parts[1].cache, draft_there))
    return Diagnosis(tuple(parts), there, tokens, ratio, outlook, tuple(found), tuple(more), child)


def _beside(child: int, needed: int, there: int) -> str:
    """What a parallel method needs where the draft is, in a sentence."""
    sentence = (
        f"parallel methods (hippo, pearl) need about {gib(child)} more: their draft is a process "
        "of its own, over the same weights"
    )
    if needed <= there * (1 - SPARE) < needed + child:
        return f"{sentence}, which does not fit; other methods do"
    return sentence


def _part(name: str, config: Any, tokens: int, dtype: Any, bits: int | None, device: str) -> Part:
    try:
        counted: Footprint = footprint(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    size = number_size(dtype, config)
    weight = weight_size(dtype, config, bits)
    return Part(
        name,
        counted.weights(weight),
        counted.kv * tokens * size,
        counted.step(weight, tokens, size),
        counted.layers * FIXED.get(device, FIXED["cuda"]),
    )


def _best(rate: float, ratio: float, slope: float) -> Outlook:
    """The chain length that pays best: E[tokens] / (length * c + T(length + 1) / T(1))."""
    speed = {
        length: expected_chain(rate, length) / (length * ratio + 1 + slope * length)
        for length in range(1, LONGEST + 1)
    }
    length = max(speed, key=lambda each: speed[each])
    return Outlook(rate, length, speed[length])


def _smaller(parts: Sequence[Part], there: int, size: float) -> str:
    """What would fit instead; a number of the target's weights takes ``size`` bytes now."""
    room = there * (1 - SPARE)
    cache = sum(part.cache for part in parts)
    weights = sum(part.weights for part in parts)
    numbers, rest = parts[0].weights / size, weights - parts[0].weights
    for way, each in BYTES_PER_WEIGHT.items():
        # another type is the draft's and the caches' too, fewer bits are of the target's weights
        typed = way.startswith("--dtype")
        needed = (weights + cache) * each / size if typed else numbers * each + rest + cache
        if each < size and needed < room:
            return f"; {way} would fit ({gib(needed)})"
    if weights < room:
        return f"; a prompt of {int((room - weights) / cache * 100)} % of that length would fit"
    return ""
