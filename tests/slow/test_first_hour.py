"""The commands and snippets of a new user's pages, word for word in a fresh folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
PAGES = (
    *("docs/first-answer.md", "docs/command-line.md", "docs/python.md"),
    *("docs/from-transformers.md", "README.md"),
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
SKIPPED = (  # What needs a hub, an hour or a file of others, or serves until it is told to end.
    *("pip install uv && uv run pytest", "uv run saccade", "uv run --extra"),
    "saccade train-draft",
)
FOLDERS_BY_HUB_ID = {
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": "big",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "small",
}
MADE = {"clip.mp4", "other.mp4", "clip.json", "mine.yaml", "videos.txt", "captions.jsonl"}


def _commands(block: str) -> list[str]:
    """A block's commands without their comments, lines that go on joined."""
    lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    return [line.split("  #")[0].split(" #")[0].strip() for line in lines]


def _snippets(page: Path) -> list[str]:
    """A page's Python up to each of its blocks, since later ones go on from earlier ones."""
    blocks = [code for kind, code in BLOCK.findall(page.read_text()) if kind == "python"]
    for hub_id, folder in FOLDERS_BY_HUB_ID.items():
        blocks = [block.replace(hub_id, folder) for block in blocks]
    return ["\n".join(blocks)] if blocks else []


def test_a_new_users_first_hour(tmp_path: Path) -> None:
    """Claim: in a folder that holds nothing, the pages' commands one after the other, then each
    page's Python, end without an error and leave what the next ones read. Fails on a file, an
    option or a name in a snippet that nothing before it made."""
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT)}
    ran = 0
    for page in (ROOT / name for name in PAGES):
        blocks = [code for kind, code in BLOCK.findall(page.read_text()) if kind == ""]
        commands = [command for block in blocks for command in _commands(block)]
        steps: list[str | list[str]] = [c for c in commands if not c.startswith(SKIPPED)]
        steps += [[sys.executable, "-c", snippet] for snippet in _snippets(page)]
        for step in steps:
            if isinstance(step, str):
                step = step.removeprefix("pip install uv && uv run ")
            done = subprocess.run(
                step,
                shell=isinstance(step, str),
                cwd=tmp_path,
                env=env,
                input="What happens?\n",  # of `saccade chat`
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (page.name, step, done.stderr)
            assert "Traceback" not in done.stderr, (page.name, step, done.stderr)
            ran += 1
    assert ran >= 25
    assert {path.name for path in tmp_path.iterdir()} >= {*MADE, "big", "small"}
