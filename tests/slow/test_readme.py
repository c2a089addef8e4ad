"""README's commands and snippets, word for word in a fresh folder, as a new user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
LATER = (  # what needs a hub or an hour, or serves until it is told to end
    *("pip install uv && uv run pytest", "uv run saccade describe"),
    *("uv run --extra serve", "uv run --extra ui"),
)
MADE = {"clip.mp4", "other.mp4", "clip.json", "mine.yaml", "videos.txt", "captions.jsonl"}


def _commands(block: str) -> list[str]:
    """A block's commands without their comments, lines that go on joined."""
    lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    return [line.split("  #")[0].strip() for line in lines]


def test_a_new_users_first_hour(tmp_path: Path) -> None:
    """Claim: in a folder that holds nothing, README's blocks one after the other, shell and Python,
    each end without an error and leave what the next ones read. Fails on a file, an option or a
    name in a snippet that nothing before it made."""
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT)}
    ran = 0
    for kind, block in BLOCKS:
        steps = [[sys.executable, "-c", block]] if kind == "python" else _commands(block)
        for step in steps:
            if isinstance(step, str) and step.startswith(LATER):
                continue
            command = step.removeprefix("pip install uv && uv run ") if kind == "" else step
            done = subprocess.run(
                command,
                shell=kind == "",
                cwd=tmp_path,
                env=env,
                input="What happens?\n",  # of `saccade chat`
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (command, done.stderr)
            assert "Traceback" not in done.stderr, (command, done.stderr)
            ran += 1
    assert ran >= 16
    assert {path.name for path in tmp_path.iterdir()} >= {*MADE, "big", "small", "runs"}
