"""The table of pairs in docs/families.md: what they need and may gain, by published shapes."""

from __future__ import annotations

from saccade.bench.hardware.doctor import TYPICAL_RATE, Diagnosis, Outlook, examine
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
    """What a published pair needs and may gain on a GPU with room, in bfloat16."""
    return examine(
        (target, CONFIGS[target]()),
        (draft, CONFIGS[draft]()),
        tokens=tokens + ANSWER_TOKENS,
        keep=keep,
        device="cuda",
        free_bytes=2**60,
    )


def table(tokens: int = 8192, keep: float = 0.1) -> str:
    """What the papers' pairs need and may gain on a GPU in bfloat16, as Markdown: first what pays
    most."""
    lines = [
        f"| target | draft | memory at {tokens} tokens | T(1) ms | draft step ms | best chain | "
        f"expected decode x at {TYPICAL_RATE:.0%} / 90% accepted | in short |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    found = {pair: examine_pair(*pair, tokens, keep) for pair in PAIRS}
    for pair, one in sorted(found.items(), key=lambda item: -_at(item[1], TYPICAL_RATE).speedup):
        typical, good = _at(one, TYPICAL_RATE), _at(one, 0.9)
        step, drafted = (part.h100_seconds * 1e3 for part in one.parts)
        lines.append(
            f"| {pair[0]} | {pair[1]} | {format_bytes(one.needed)} | {step:.1f} | {drafted:.1f} | "
            f"{typical.length} | {typical.speedup:.1f} / {good.speedup:.1f} | "
            f"{one.verdict.split(':')[0]} |"
        )
    return "\n".join(lines)


def _at(found: Diagnosis, rate: float) -> Outlook:
    return next(each for each in found.outlook if each.rate == rate)
