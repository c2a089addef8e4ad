"""Where commands run: outputs that lack characters or are full, users without a name or a home."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import output_streams
from saccade.core import home

SAID = "─── 3 × “é” → 😀 ▀▀ …"


def saccade(*words: str, out: Any, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "saccade", *words],
        stdout=out,
        stderr=subprocess.PIPE,
        env={**os.environ, **more},
        text=True,
    )


@pytest.mark.representatives(2)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437", "utf-8"])
def test_every_text_can_be_printed(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Claim: what an encoding lacks is written otherwise and nothing is lost; JSON stays JSON."""
    kept = io.BytesIO()
    stream = io.TextIOWrapper(kept, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(UnicodeEncodeError):
        (SAID + "\ud83d").encode(encoding)
    output_streams.prepare_streams()
    stream.write(json.dumps(SAID, ensure_ascii=False))
    stream.flush()
    written = kept.getvalue().decode(encoding)
    read = json.loads(written)
    plain = {"─": "-", "→": "->", "▀": "#", "…": "...", "×": "x"}
    for character in SAID:
        assert character in read or plain[character] in read
    assert (read == SAID) == (encoding == "utf-8")
    stream.write("the rows of m\udcff.jsonl")  # The name of a file that is not UTF-8.
    stream.flush()
    assert kept.getvalue().endswith(b"the rows of m\\udcff.jsonl")


def test_control_python_alone_cannot_print_them() -> None:
    """Control: without care the same text ends a program."""
    with pytest.raises(UnicodeEncodeError):
        io.TextIOWrapper(io.BytesIO(), encoding="cp1252").write(SAID)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("words", [("--version",), ("describe", "--help"), ("methods",)])
def test_a_full_disk_is_one_sentence(words: tuple[str, ...]) -> None:
    """Claim: output that cannot be written is told in a sentence, with exit code 2, also where it
    fails only as the program ends. Fails with a traceback, or with exit code 0."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as out:
        done = saccade(*words, out=out)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "the output cannot be written" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_the_demo_runs_where_characters_lack(encoding: str) -> None:
    """Claim: the demo ends well in every encoding."""
    words = ("demo", "--repeat", "1", "--max-new-tokens", "8")
    done = saccade(*words, out=subprocess.DEVNULL, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process whose user has no home; its temporary files lie in the folder."""

    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    for name in ("SACCADE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(home, "_temporary_home", home._temporary_home.__wrapped__)
    return tmp_path


def test_a_user_without_a_home_gets_a_folder_of_their_own(homeless: Path) -> None:
    """Claim: it is theirs alone, the same each time, and remembers."""
    folder = home.home()
    assert folder.parent == homeless and folder == home.home()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    numbers = home.MeasurementFile("numbers.json")
    numbers.save("a", 5)
    assert numbers.load("a") == 5


@pytest.mark.parametrize("trap", ["open to others", "a link", "a link to nothing", "a file"])
def test_a_folder_that_is_not_theirs_alone_is_not_used(
    homeless: Path, tmp_path_factory: pytest.TempPathFactory, trap: str
) -> None:
    """Claim: compiled code is never loaded from where another user may have put it."""
    place = homeless / f"saccade-{os.getuid()}"
    if trap == "open to others":
        place.mkdir()
        place.chmod(0o777)
    elif trap == "a link":
        place.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    elif trap == "a link to nothing":
        place.symlink_to(homeless / "nowhere")
    else:
        place.write_text("")
    folder = home.home()
    assert folder != place and folder.parent == homeless and folder.is_dir()


def test_without_any_place_to_write_a_value_is_remembered_in_this_process(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: with no folder to write in at all, a value is measured once for each process.

    Fails if a value that could not be written is forgotten, so that every answer measures anew.
    """

    def refuse() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    numbers = home.MeasurementFile("numbers.json")
    numbers.save("a", 5)
    assert numbers.load("a") == 5
    assert home.MeasurementFile("numbers.json").load("a") is None


@pytest.mark.extra
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_a_name_is_answered(tmp_path: Path) -> None:
    """Claim: a process of a user that the system does not know, as containers run them, starts."""
    tmp_path.chmod(0o777)
    code = "import os; os.setuid(54321); from saccade.core.home import home; print(home())"
    kept = {name: os.environ[name] for name in os.environ.keys() - {"HOME", "SACCADE_CACHE"}}
    folder = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, saccade.core.home; {code}"],
        env={**{k: v for k, v in kept.items() if k != "XDG_CACHE_HOME"}, **folder},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("saccade-54321")
