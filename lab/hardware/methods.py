"""Runs every method on three clips: whether its ids are those of plain decoding, tau, speedups.

The command is ``python -m lab methods``. Speedups count only clips during which no other process
was at work on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from saccade.bench.comparison import BASELINE, resolve_methods, run_interleaved
from saccade.bench.hardware.disturbance import DisturbanceWatch
from saccade.inputs import Pair, captions, media
from saccade.world import drawing, scenes

SEEDS = (20_000_002, 20_000_003, 20_000_004)  # The first is the clip of docs/results/methods.md.
FRAMES, SIZE = 64, 224  # Frames of a clip, and pixels a side of each.
QUESTION = "Describe the video in detail."
# The lines of docs/results/methods.md between which the section is written.
MARKS = "<!-- all methods -->", "<!-- end of all methods -->"
HEAD = "| method | same ids | tau, clip by clip | decode × | whole × |\n|-|-|-|-|-|"


def compare_on_clip(
    pair: Pair, seed: int, methods: Sequence[str], *, repeat: int, tokens: int
) -> dict[str, Any]:
    """Runs the methods on one clip, as ``saccade compare --every-frame --methods all`` does.

    Returns the record that is stored: the clip's seed, the ids by plain decoding, a warning (None
    unless other processes were at work), and by name a row for each method that can run with this
    pair.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        drawing.write_clip(scenes.scene(seed), path, FRAMES, SIZE)
        clip = media.read(path, media.FrameSampling(every=True))
    watch = DisturbanceWatch()
    timed = run_interleaved(
        pair,
        pair.ask(QUESTION, clips=[clip]),
        resolve_methods(methods),
        repeat=repeat,
        settings={"max_new_tokens": tokens, "do_sample": False},
        captioner=captions.lazy_captioner(
            name=None, target="shapes", media=[list(clip.frames)], device=None
        ),
        # Methods that draft with a head refuse, because this pair has none. They get no row.
        may_refuse=methods,
    )
    summaries = timed.summaries().items()
    rows = {name: row.json() for name, row in summaries if name not in timed.errors}
    ids = rows[BASELINE]["token_ids"]
    for row in rows.values():
        del row["token_ids"]
    warning = watch.warning([run.decode_seconds for run in timed.runs[BASELINE]])
    return {"seed": seed, "token_ids": ids, "warning": warning, "methods": rows}


def page_section(facts: Mapping[str, Any]) -> str:
    """Returns the section of docs/results/methods.md about a stored run of the command.

    ``facts`` has the records of :func:`compare_on_clip` as "clips", the command and the machine.
    Speedups are left empty if every clip was disturbed.
    """
    clips: Sequence[Mapping[str, Any]] = facts["clips"]
    undisturbed_clips = [clip for clip in clips if clip["warning"] is None]
    lengths = ", ".join(str(len(clip["token_ids"])) for clip in clips)
    times = "not told, since other processes were at work"
    if undisturbed_clips:
        times = (
            f"medians over the {len(undisturbed_clips)} during which no other process was at work"
        )
    lines = [
        f"All {len(clips[0]['methods'])} methods on {len(clips)} clips of 2,048 visual tokens, "
        f"answers of {lengths} tokens, by `{facts['command']}`: {facts['machine']}. "
        f"Ratios to `ar`: {times}.",
        "",
        HEAD,
    ]
    for name in clips[0]["methods"]:
        rows = [clip["methods"][name] for clip in clips]
        same = sum(row["identical_to_ar"] for row in rows)
        tau = ", ".join(f"{row['tau']:.2f}" for row in rows)
        timed_rows = [clip["methods"][name] for clip in undisturbed_clips]
        ratios = [
            f"{median(row[f'speedup_{part}'] for row in timed_rows):.2f}" if timed_rows else ""
            for part in ("decode", "end_to_end")
        ]
        cells = [f"`{name}`", f"{same} of {len(rows)}", tau, *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
