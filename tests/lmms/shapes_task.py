"""The data of the local lmms-eval tasks in ``task/``: clips and pictures of the shapes world.

uv run python tests/lmms/shapes_task.py      # into runs/lmms, where the tasks look
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.world import drawing, scenes
from saccade.world import suites as shapes

TASKS = Path(__file__).parent / "task"
FOLDER = Path("runs/lmms")  # from where lmms-eval is run
COUNT = 4


def write(folder: Path = FOLDER, count: int = COUNT) -> None:
    """``count`` clips of 8 frames as MP4 and as many pairs of PNGs, with questions and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    suites = shapes.suites()
    clips: list[dict[str, Any]] = []
    for number, item in enumerate(islice(suites["shapes-caption"].items(), count)):
        path = folder / f"clip-{number}.mp4"
        drawing.write_clip(scenes.scene(item.meta["seed"]), path, 8, 224, fps=shapes.FPS)
        clips.append({"question": item.question, "answer": item.answers[0], "clip": str(path)})
    pairs: list[dict[str, Any]] = []
    for number, item in enumerate(islice(suites["shapes-diff"].items(), count)):
        paths = [folder / f"{medium.name}-{number}.png" for medium in item.media]
        for medium, path in zip(item.media, paths, strict=True):
            Image.fromarray(medium.read()).save(path)
        media = {"pictures": [str(path) for path in paths]}
        pairs.append({"question": item.question, "answer": item.answers[0], **media})
    for name, rows in (("clips", clips), ("pictures", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write()
