"""``docs/results/shapes``: how the pair learnt, what it gets right, how far its members agree.

One JSON file holds every number; the page and the figure are made from it.
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
KINDS = ("all", "content", "colour", "shape", "size", "where", "count", "motion", "time", "texture")
POINTS = 60  # kept of a learning curve
CURVE = ("cpu_s", "ce", "content")


def measure(
    folder: Path,
    run_dir: Path,
    *,
    clips: int,
    sizes: Sequence[int],
    before: dict[str, Any],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Every number of the page. Curves come from the training run, else from ``before``."""
    accuracy: dict[str, Any] = {}
    for size in sizes:
        frames, side = agreement.FRAMES[size]
        canvas = Canvas("video", frames, side, side)
        accuracy[str(size)] = {}
        for name in FOLDERS:
            tell(f"accuracy of {name} at {size} visual tokens")
            accuracy[str(size)][name] = evaluate.teacher_forced(
                folder / name, canvas, clips, "describe"
            )
    return {
        "clips": clips,
        "keep": agreement.KEEP,
        "chain": agreement.LENGTH,
        "environment": environment(),
        "curves": curves(run_dir) or before.get("curves", {}),
        "accuracy": accuracy,
        "broken": {
            str(size): agreement.broken(load("shapes"), clips=clips, size=size, tell=tell)
            for size in sizes
        },
        "agreement": agreement.evaluate(clips=clips, sizes=sizes, tell=tell),
    }


def curves(run_dir: Path) -> dict[str, list[dict[str, float]]]:
    """Each stage's content-word accuracy and loss over CPU seconds, averaged to ``POINTS``."""
    found = {}
    for path in sorted(run_dir.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [step for step in steps if "content" in step]
        width = max(1, len(steps) // POINTS)
        groups = [steps[i : i + width] for i in range(0, len(steps) - width + 1, width)]
        points = [
            {key: round(sum(step[key] for step in group) / width, 4) for key in CURVE}
            for group in groups
        ]
        if points:
            found[path.stem] = points
    return found


def page(found: dict[str, Any], figure_name: str | None, command: str) -> str:
    """The results as Markdown."""
    lines = ["# The embedded pair", "", f"Made by `{command}`. {_machine(found)}", ""]
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
        f"Next-token accuracy on the true descriptions of {found['clips']} unseen clips, teacher "
        "forced; *other* gives it another clip's video, *none* no visual tokens. What remains "
        "there the text itself gives away. Content words are those that depend on the pixels.",
    ]
    for size, models in found["accuracy"].items():
        lines += ["", f"### {size} visual tokens", "", _row("model", "video", *KINDS)]
        lines.append("|" + "-|" * (2 + len(KINDS)))
        for name, views in models.items():
            for view, row in views.items():
                numbers = [f"{row[kind]:.3f}" if kind in row else "" for kind in KINDS]
                lines.append(_row(name, view, *numbers))
    for size, answers in found.get("broken", {}).items():
        shown = "".join(f" *{answer}*" for answer in answers)
        lines += [
            "",
            f"Of the target's greedy descriptions of {found['clips']} unseen clips of up to five "
            f"shapes at {size} visual tokens, {len(answers) or 'none'} broke off or were put "
            f"together as no true one is{':' if answers else '.'}{shown}",
        ]
    lines += [
        "",
        "## How far draft and target agree",
        "",
        "Share of positions along the target's own greedy answer at which the draft's arg-max is "
        f"the target's token, {found['clips']} unseen clips, {found['keep']:.0%} of the visual "
        f"tokens kept unless *full* or *none*; and the tau of a chain of {found['chain']} that "
        "follows. 95 % intervals over clips. The draft that never saw pruning comes first: it is "
        "the fair one for comparing views.",
    ]
    for size, drafts in found["agreement"].items():
        lines += ["", f"### {size} visual tokens", "", _row("draft", "view", "agreement", "tau")]
        lines.append("|-|-|-|-|")
        for name, views in drafts.items():
            for view, row in views.items():
                lines.append(
                    _row(name, view, _interval(row, "agreement", 3), _interval(row, "tau", 2))
                )
    return "\n".join(lines) + "\n"


def figure(found: dict[str, Any], path: Path) -> None:
    """Learning curves, one panel a stage, readable in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = found["curves"]
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


def _machine(found: dict[str, Any]) -> str:
    about = found["environment"]
    return (
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, "
        f"transformers {about['transformers']}."
    )


def _interval(row: dict[str, Any], key: str, digits: int) -> str:
    low, high = row[f"{key}_95"]
    return f"{row[key]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
