"""Measures the embedded pair after its training, and makes the page ``docs/results/shapes.md``.

The embedded pair is the small target with its two drafts that `train.py` trains. One JSON file has
every number, and the page and the figure of learning curves are made from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.training import agreement, evaluate
from saccade.engine.trace import environment
from saccade.inputs import load
from saccade.world.train_draft.samples import Canvas

FOLDERS = ("target", "draft-naive", "draft")
# Columns of the accuracy table: all tokens, those of content words, and content words by kind. The
# kinds "event" and "truth" (`lab.training.labels`) count as content words and have no column.
KINDS = ("all", "content", "colour", "shape", "size", "where", "count", "motion", "time", "texture")
CURVE_POINTS = 60  # A long learning curve is averaged to this many points or up to twice as many.
# Of a step: the stage's CPU seconds so far, the loss in nats, and the accuracy on content words.
CURVE_FIELDS = ("cpu_s", "ce", "content")


def measure(
    folder: Path,
    run_dir: Path,
    *,
    clips: int,
    sizes: Sequence[int],
    before: dict[str, Any],
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measures every number of the page.

    ``folder`` has the three models whose accuracy is measured. Whole answers and agreement are
    measured on the installed pair (``load``), whatever ``folder`` is. Learning curves come from the
    training run in ``run_dir``, or from ``before``, the results that are stored already, if there
    is no such run. ``clips`` is how many clips of each size are used, and ``sizes`` are numbers of
    visual tokens.
    """
    accuracy: dict[str, Any] = {}
    for size in sizes:
        frames, side = agreement.FRAMES[size]
        canvas = Canvas("video", frames, side, side)
        accuracy[str(size)] = {}
        for name in FOLDERS:
            on_progress(f"accuracy of {name} at {size} visual tokens")
            accuracy[str(size)][name] = evaluate.teacher_forced(
                folder / name, canvas, clips, "describe"
            )
    return {
        "clips": clips,
        "keep": agreement.KEEP,
        "chain": agreement.CHAIN_LENGTH,
        "environment": environment(),
        "curves": learning_curves(run_dir) or before.get("curves", {}),
        "accuracy": accuracy,
        "broken": {
            str(size): agreement.broken_answers(
                load("shapes"), clips=clips, size=size, on_progress=on_progress
            )
            for size in sizes
        },
        "agreement": agreement.measure_agreement(clips=clips, sizes=sizes, on_progress=on_progress),
    }


def learning_curves(run_dir: Path) -> dict[str, list[dict[str, float]]]:
    """Returns each stage's accuracy on content words and loss over CPU seconds.

    ``run_dir`` has a log for each stage, and the stages are in the order in which these were
    written last. Each point is the mean of equally many steps, and ``CURVE_POINTS`` says how many
    points there are. Steps at the end that do not fill a point are left out.
    """
    curves = {}
    for path in sorted(run_dir.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [step for step in steps if "content" in step]
        width = max(1, len(steps) // CURVE_POINTS)
        groups = [steps[i : i + width] for i in range(0, len(steps) - width + 1, width)]
        points = [
            {key: round(sum(step[key] for step in group) / width, 4) for key in CURVE_FIELDS}
            for group in groups
        ]
        if points:
            curves[path.stem] = points
    return curves


def page(results: dict[str, Any], figure_name: str | None, command: str) -> str:
    """Returns the page of the results."""
    lines = ["# The embedded pair", "", f"Made by `{command}`. {_machine(results)}", ""]
    if figure_name is not None:
        lines += [
            "## How it learnt",
            "",
            f"![Learning curves]({figure_name})",
            "",
            "Content-word accuracy on the training mix (a fresh clip at every step, mixed sizes "
            "and tasks), teacher forced, by CPU seconds of each stage. See "
            "`lab/training/train.py`.",
            "",
        ]
    lines += [
        "## What it gets right",
        "",
        f"Next-token accuracy on the true descriptions of {results['clips']} unseen clips, teacher "
        "forced; *other* gives it another clip's video, *none* no visual tokens. What remains "
        "there the text itself gives away. Content words are those that depend on the pixels.",
    ]
    for size, models in results["accuracy"].items():
        lines += ["", f"### {size} visual tokens", "", _row("model", "video", *KINDS)]
        lines.append("|" + "-|" * (2 + len(KINDS)))
        for name, views in models.items():
            for view, row in views.items():
                numbers = [f"{row[kind]:.3f}" if kind in row else "" for kind in KINDS]
                lines.append(_row(name, view, *numbers))
    for size, answers in results.get("broken", {}).items():
        quotes = "".join(f" *{answer}*" for answer in answers)
        lines += [
            "",
            f"Of the target's greedy descriptions of {results['clips']} unseen clips of up to five "
            f"shapes at {size} visual tokens, {len(answers) or 'none'} broke off or were put "
            f"together as no true one is{':' if answers else '.'}{quotes}",
        ]
    lines += [
        "",
        "## How far draft and target agree",
        "",
        "Share of positions along the target's own greedy answer at which the draft's arg-max is "
        f"the target's token, {results['clips']} unseen clips, {results['keep']:.0%} of the visual "
        f"tokens kept unless *full* or *none*; and the tau of a chain of {results['chain']} that "
        "follows. 95 % intervals over clips. The draft that never saw pruning comes first: it is "
        "the fair one for comparing views.",
    ]
    for size, drafts in results["agreement"].items():
        lines += ["", f"### {size} visual tokens", "", _row("draft", "view", "agreement", "tau")]
        lines.append("|-|-|-|-|")
        for name, views in drafts.items():
            for view, row in views.items():
                lines.append(
                    _row(name, view, _interval(row, "agreement", 3), _interval(row, "tau", 2))
                )
    return "\n".join(lines) + "\n"


def draw_curves(results: dict[str, Any], path: Path) -> None:
    """Draws the learning curves with one panel a stage, readable in grey.

    Both curves share an axis from 0 to 1, so a loss above 1 nat is not seen.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = results["curves"]
    canvas, axes = pyplot.subplots(
        1, len(stages), figsize=(2.4 * len(stages), 2.6), sharey=True, squeeze=False
    )
    for axis, (name, points) in zip(axes[0], stages.items(), strict=True):
        seconds = [point["cpu_s"] for point in points]
        axis.plot(seconds, [point["content"] for point in points], "k-", label="content words")
        axis.plot(seconds, [point["ce"] for point in points], "k:", label="loss (nats)")
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("CPU seconds", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy, or nats", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="center right")
    canvas.tight_layout()
    canvas.savefig(path, dpi=130)
    pyplot.close(canvas)


def _machine(results: dict[str, Any]) -> str:
    about = results["environment"]
    return (
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, "
        f"transformers {about['transformers']}."
    )


def _interval(row: dict[str, Any], key: str, digits: int) -> str:
    low, high = row[f"{key}_95"]
    return f"{row[key]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
