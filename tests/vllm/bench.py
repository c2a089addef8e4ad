"""The table of docs/vllm.md: tokens a second of vLLM alone, with its n-grams, with our draft.

Every cell is a process of its own, and the rows take turns: ``--repeat`` rounds of all of them, so
that a busy minute falls on all alike. What is compared are medians within this one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from engines import Job, Ran, clips, run

from saccade.inputs.checkpoints import NAMES

TARGET, DRAFT = str(NAMES["shapes"]), str(NAMES["shapes-draft"])
ROWS: dict[str, dict[str, Any]] = {
    "vLLM, eager": {},
    "vLLM, compiled": {"engine": {"enforce_eager": False}},
    "vLLM, its n-grams": {"method": "ngram", "most": 5},
    "ours": {"options": {"draft": DRAFT}},
    "ours, 6 always": {"options": {"draft": DRAFT, "length": 6}, "most": 6},
    "ours, compiled": {"options": {"draft": DRAFT}, "engine": {"enforce_eager": False}},
    "ours, lookup": {"options": {"draft": "lookup"}},
}


def job(row: dict[str, Any], at_once: int, frames: int, side: int, tokens: int) -> Job:
    """Two waves of this many clips after one that warms up."""
    seeds = range(20000400, 20000400 + 3 * at_once)
    waves = tuple(
        clips(seeds[start : start + at_once], frames, side)
        for start in range(0, 3 * at_once, at_once)
    )
    engine = {
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "max_num_batched_tokens": 4096,
        **row.get("engine", {}),
    }
    more = {key: value for key, value in row.items() if key != "engine"}
    return Job(TARGET, waves, engine=engine, sampling={"max_tokens": tokens}, warm=1, **more)


def speeds(ran: Ran) -> tuple[float, float]:
    """Tokens a second while decoding, and in all."""
    tokens = sum(len(answer) for wave in ran.answers for answer in wave)
    first = sum(len(wave) for wave in ran.answers)
    return (tokens - first) / sum(ran.decoding), tokens / sum(ran.seconds)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32])
    reader.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    reader.add_argument("--repeat", type=int, default=3)
    reader.add_argument("--frames", type=int, default=64)
    reader.add_argument("--side", type=int, default=224)
    reader.add_argument("--tokens", type=int, default=192)
    reader.add_argument("--timeout", type=float, default=900)
    reader.add_argument("--out", type=Path, default=Path("runs/vllm.json"))
    asked = reader.parse_args()
    found: list[dict[str, Any]] = []
    for at_once in asked.at_once:
        answers: dict[str, Any] = {}
        for _ in range(asked.repeat):
            for name in asked.rows:
                order = job(ROWS[name], at_once, asked.frames, asked.side, asked.tokens)
                one: dict[str, Any] = {"row": name, "at once": at_once, "load": os.getloadavg()[0]}
                try:
                    ran = run(order, timeout=asked.timeout)
                    decoding, whole = speeds(ran)
                    equal = answers.setdefault("", ran.answers) == ran.answers
                    one |= {"decoding": decoding, "whole": whole, "equal": equal, "rate": ran.rate}
                    one["prompt"] = ran.prompts[0][0]
                except Exception as error:  # a row that hangs or breaks is a result too
                    one["failed"] = f"{type(error).__name__}: {str(error)[-200:]}"
                found.append(one)
                sys.stderr.write(json.dumps(one) + "\n")
                asked.out.parent.mkdir(parents=True, exist_ok=True)
                asked.out.write_text(json.dumps({"settings": _told(asked), "runs": found}))
    sys.stdout.write(table(found))


def table(found: list[dict[str, Any]]) -> str:
    """Medians, and what they are times the first row's."""
    lines = [
        "| | at once | decoding, tokens/s | whole, tokens/s | accepted | answers |",
        "|-" * 6 + "|",
    ]
    for at_once in dict.fromkeys(one["at once"] for one in found):
        mine = [one for one in found if one["at once"] == at_once]
        base: dict[str, float] = {}
        for name in dict.fromkeys(one["row"] for one in mine):
            runs = [one for one in mine if one["row"] == name and "failed" not in one]
            if not runs:
                lines.append(f"| {name} | {at_once} | did not finish | | | |")
                continue
            cells = []
            for what in ("decoding", "whole"):
                value = statistics.median(one[what] for one in runs)
                base.setdefault(what, value)
                cells.append(f"{value:.0f} ({value / base[what]:.2f}x)")
            rate = f"{runs[-1]['rate']:.2f}" if runs[-1]["rate"] else ""
            equal = "equal" if all(one["equal"] for one in runs) else "differ"
            lines.append(f"| {name} | {at_once} | {' | '.join(cells)} | {rate} | {equal} |")
    return "\n".join(lines) + "\n"


def _told(asked: argparse.Namespace) -> dict[str, Any]:
    told = {key: str(value) for key, value in vars(asked).items()}
    return told | {"threads": os.environ.get("OMP_NUM_THREADS", "1"), "cores": os.cpu_count()}


if __name__ == "__main__":
    main()
