"""The command line called in this process, and a clip for it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from saccade import cli
from saccade.models import EMBEDDED
from saccade.terminal import PIPED_WIDTH

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["saccade", *map(str, words)])
        consoles = {
            "out": Console(highlight=False, width=PIPED_WIDTH),
            "err": Console(stderr=True, highlight=False, width=400),
        }
        for name in [name for name in sys.modules if name.startswith("saccade.cli.")]:
            for word, console in consoles.items():
                if hasattr(sys.modules[name], word):
                    monkeypatch.setattr(sys.modules[name], word, console)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capfd.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else int(code is not None)), *captured

    return run


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from saccade.shapes import world

    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    world.write_clip(world.scene(20_000_001), path, 16, 112)
    return path


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """The embedded draft with two ids that mean each other's token."""
    folder = tmp_path / "other"
    shutil.copytree(EMBEDDED / "draft", folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = [token for token, number in vocab.items() if number in (300, 301)]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    path.write_text(json.dumps(tokenizer))
    return folder
