"""What was measured on real weights, as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.bench.measures import interval
from saccade.real.measure import SHARES

Row = Mapping[str, Any]


def page(found: Mapping[str, Any]) -> str:
    """Markdown from what ``measure.recorded`` keeps."""
    measured: Sequence[Row] = found["measured"]
    plain = {row["document"]: row for row in measured if row["method"] == "ar"}
    same = sum(row["same"] for row in measured)
    lines = [
        "# Real weights",
        "",
        f"{found['model']}: {len(plain)} documents of {_range(measured)} prompt tokens, answers of "
        f"{found['max_new_tokens']} tokens at most. {found['machine']}",
        "",
        f"Made by `{found['command']}`. Of {len(measured)} answers {same} are `generate()`'s, "
        "token for token.",
        "",
        "## Drafting",
        "",
        "tau is tokens emitted a forward of the target, its own included; the interval is a "
        "bootstrap over documents. Speed is of decoding, against `ar` in the same run.",
        "",
        "| method | tau | 95 % | accepted | document kept | speed |",
        "|-|-|-|-|-|-|",
    ]
    for method in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == method]
        middle, low, high = interval([row["tau"] for row in own]) or (0.0, 0.0, 0.0)
        accepted = [row["accepted"] for row in own if row["accepted"] is not None]
        speeds = [
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"]
            for row in own
            if row["document"] in plain and row["decode_seconds"]
        ]
        speed = interval(speeds)
        lines.append(
            f"| `{method}` | {middle:.2f} | {low:.2f} to {high:.2f} | {_mean(accepted)} | "
            f"{_kept(own)} | {'' if speed is None else f'{speed[0]:.2f}'} |"
        )
    lines += [
        "",
        "## Where the target looks while it answers",
        "",
        "Of the attention that the document gets at a moment of the answer, the share on a set of "
        "its tokens, by how the set is chosen and how much of the document it holds; mean over "
        "heads, layers, moments and documents.",
        "",
        "| set | " + " | ".join(f"{share:g}" for share in SHARES) + " |",
        "|-|" + "-|" * len(SHARES),
    ]
    looked: Sequence[Row] = found["looked"]
    for chosen in dict.fromkeys(row["chosen"] for row in looked):
        means = [
            _mean([r["mass"] for r in looked if (r["chosen"], r["keep"]) == (chosen, share)])
            for share in SHARES
        ]
        lines.append(f"| {chosen} | " + " | ".join(means) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else ""


def _kept(rows: Sequence[Row]) -> str:
    kept = [row["kept"] / row["prompt_tokens"] for row in rows if row["kept"] is not None]
    return f"{sum(kept) / len(kept):.0%}" if kept else ""


def _range(rows: Sequence[Row]) -> str:
    lengths = [row["prompt_tokens"] for row in rows]
    return f"{min(lengths):,} to {max(lengths):,}"
