"""Makes the table of docs/results/pairs.md: what pairs of published shapes need and may gain.

A shape is the config of a published checkpoint. No weights are read and nothing is timed: memory
and seconds are computed from the sizes, and speedups are given for assumed acceptance rates.
"""

from __future__ import annotations

from saccade.bench.hardware.pair_fit import TYPICAL_RATE, Diagnosis, Outlook, examine
from saccade.bench.hardware.published import CONFIGS
from saccade.cli.doctor import ANSWER_TOKENS
from saccade.model.memory import format_bytes

PAIRS = (
    ("Qwen2.5-VL-72B", "Qwen2.5-VL-7B"),
    ("Qwen2.5-VL-32B", "Qwen2.5-VL-7B"),
    ("Qwen2.5-VL-32B", "Qwen2.5-VL-3B"),
    ("Qwen2.5-VL-7B", "Qwen2.5-VL-3B"),
    ("Qwen2-VL-72B", "Qwen2-VL-2B"),
    ("Qwen2-VL-7B", "Qwen2-VL-2B"),
    ("Qwen3-VL-32B", "Qwen3-VL-2B"),
    ("Qwen3-VL-8B", "Qwen3-VL-2B"),
    ("LLaVA-OneVision-72B", "LLaVA-OneVision-7B"),
    ("LLaVA-OneVision-72B", "LLaVA-OneVision-0.5B"),
    ("LLaVA-OneVision-7B", "LLaVA-OneVision-0.5B"),
    ("LLaVA-1.5-13B", "LLaVA-1.5-7B"),
    ("LLaVA-NeXT-13B", "LLaVA-NeXT-7B"),
)
"""The papers' pairs and their neighbours."""


def examine_pair(target: str, draft: str, tokens: int = 8192, keep: float = 0.1) -> Diagnosis:
    """Returns what a published pair needs and may gain in bfloat16 on a GPU with enough memory.

    The prompt has ``tokens`` tokens, and ``ANSWER_TOKENS`` of an answer come after them. The draft
    reads the share ``keep`` of both together, be they visual tokens or text.
    """
    return examine(
        (target, CONFIGS[target]()),
        (draft, CONFIGS[draft]()),
        tokens=tokens + ANSWER_TOKENS,
        keep=keep,
        device="cuda",
        free_bytes=2**60,  # More than any pair needs, so that every pair fits.
    )


def table(tokens: int = 8192, keep: float = 0.1) -> str:
    """Returns a Markdown table of what the papers' pairs need and may gain on a GPU in bfloat16.

    The pair with the largest expected speedup at ``TYPICAL_RATE`` comes first. ``tokens`` and
    ``keep`` are those of ``examine_pair``, so memory is that of prompt and answer.
    """
    lines = [
        f"| target | draft | memory at {tokens} tokens | T(1) ms | draft step ms | best chain | "
        f"expected decode x at {TYPICAL_RATE:.0%} / 90% accepted | in short |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    diagnoses = {pair: examine_pair(*pair, tokens, keep) for pair in PAIRS}
    for pair, diagnosis in sorted(
        diagnoses.items(), key=lambda item: -_outlook_at(item[1], TYPICAL_RATE).speedup
    ):
        typical = _outlook_at(diagnosis, TYPICAL_RATE)
        good = _outlook_at(diagnosis, 0.9)
        target_ms, draft_ms = (part.h100_seconds * 1e3 for part in diagnosis.parts)
        lines.append(
            f"| {pair[0]} | {pair[1]} | {format_bytes(diagnosis.needed)} | "
            f"{target_ms:.1f} | {draft_ms:.1f} | "
            f"{typical.length} | {typical.speedup:.1f} / {good.speedup:.1f} | "
            f"{diagnosis.conclusion.split(':')[0]} |"
        )
    return "\n".join(lines)


def _outlook_at(diagnosis: Diagnosis, rate: float) -> Outlook:
    """Returns the best chain and its expected speedup at one of the diagnosis's rates."""
    return next(each for each in diagnosis.outlook if each.rate == rate)
