"""The table of pairs in docs/families.md: what they need and may gain, by published shapes."""

from __future__ import annotations

from saccade.bench.hardware.doctor import TYPICAL, examine
from saccade.bench.hardware.published import CONFIGS
from saccade.cli.doctor import ANSWER
from saccade.model.memory import gib

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


def table(tokens: int = 8192, keep: float = 0.1) -> str:
    """What the papers' pairs need and may gain on a GPU in bfloat16, as Markdown."""
    lines = [
        f"| target | draft | memory at {tokens} tokens | draft step | best chain | "
        f"expected decode x at {TYPICAL:.0%} / 90% accepted |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for target, draft in PAIRS:
        found = examine(
            (target, CONFIGS[target]()),
            (draft, CONFIGS[draft]()),
            tokens=tokens + ANSWER,
            keep=keep,
            device="cuda",
            there=2**60,
        )
        typical, good = (
            next(each for each in found.outlook if each.rate == rate) for rate in (TYPICAL, 0.9)
        )
        lines.append(
            f"| {target} | {draft} | {gib(found.needed)} | {found.ratio:.3f} | {typical.length} | "
            f"{typical.speedup:.1f} / {good.speedup:.1f} |"
        )
    return "\n".join(lines)
