"""The command line called in this process, and a clip for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import Call, caller

from saccade import cli
from saccade.inputs.checkpoints import EMBEDDED


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line in this process: (exit code, standard output, standard error)."""
    return caller(cli.main, "saccade.cli", monkeypatch, capfd)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from saccade.world import drawing, scenes

    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), path, 16, 112)
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
