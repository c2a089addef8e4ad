"""What a person sees: on a terminal, in a pipe, with --quiet, after Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lab import checkpoints
from saccade.cli import terminal

Call = Callable[..., tuple[int, str, str]]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(
    r"\x1b\[(?:[0-9]+;)*(?:3[0-7]|4[0-7]|9[0-7]|38;[0-9;]*|48;[0-9;]*)(?:;[0-9]+)*m"
)


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    return {**kept, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONUTF8": "1", **more}


def started(*words: object, out: int, err: int, **more: str) -> subprocess.Popen[bytes]:
    """The command line as a process of its own, in a group of its own as a shell would have it."""
    command = [sys.executable, "-m", "saccade", *map(str, words)]
    return subprocess.Popen(
        command, stdout=out, stderr=err, env=environment(**more), start_new_session=True
    )


def on_a_terminal(*words: object, **more: str) -> tuple[int, str]:
    """Exit code, and everything a terminal was sent."""
    ours, theirs = pty.openpty()
    process = started(*words, out=theirs, err=theirs, **more)
    os.close(theirs)
    output = bytearray()
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    return process.wait(), output.decode(errors="replace")


@pytest.mark.slow
def test_a_terminal_gets_bars_and_colours(clip: Path) -> None:
    """Claim: on a terminal every step shows a bar that goes again, and the answer's pieces are
    coloured by how they came; with NO_COLOR the same text comes without one colour."""
    words = ("describe", clip, "--max-new-tokens", 24, "--method", "sd", "--threads", 1)
    code, seen = on_a_terminal(*words)
    plain = ESCAPE.sub("", seen)
    assert code == 0
    for step in ("opening the video", "reading the prompt", "accepted draft tokens"):
        assert step in plain, plain
    assert re.search(r"\d+/\d+", plain) and "\x1b[2K" in seen  # a count, and lines taken back
    assert "\x1b[32m" in seen and COLOUR.search(seen)
    code, bare = on_a_terminal(*words, NO_COLOR="1")
    assert code == 0 and not COLOUR.search(bare)
    answers = [said_last(ESCAPE.sub("", text)) for text in (seen, bare)]
    assert answers[0] == answers[1] and len(answers[0]) > 20


def said_last(plain: str) -> str:
    """The line before the one that counts tokens."""
    return re.split(r"[\r\n]+24 tokens,", plain)[0].splitlines()[-1].strip()


@pytest.mark.extra
def test_quiet_is_the_answer_alone(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: with --quiet standard output is the answer's text and a newline, standard error is
    empty, warnings about the video and all; without it there are both. Errors are still said."""
    cut = tmp_path / "many.mp4"
    cut.write_bytes(clip.read_bytes())
    words = ["describe", cut, "--num-frames", 500, "--max-new-tokens", 20, "--method", "sd"]
    code, printed, messages = call(*words, "--quiet")
    answer = json.loads(call(*words, "--json")[1])["text"]
    assert (code, printed, messages) == (0, answer + "\n", "")
    _, printed, messages = call(*words)
    assert "took all" in messages and "per second" in messages and printed.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO("Describe the video in detail.\n"))
    code, printed, messages = call("chat", *words[1:], "--quiet")
    assert (code, printed, messages) == (0, answer + "\n", "")
    latin = io.TextIOWrapper(io.BytesIO("Un caf\xe9 ?\n".encode("latin-1")), "utf-8")
    monkeypatch.setattr("sys.stdin", latin)
    code, printed, messages = call("chat", *words[1:], "--quiet")
    assert code == 2 and printed == "" and len(messages.splitlines()) == 1
    code, printed, messages = call("describe", "nowhere.mp4", "--quiet")
    assert code == 2 and printed == "" and len(messages.splitlines()) == 1


@pytest.mark.extra
def test_json_is_the_same_with_and_without_quiet(call: Call, clip: Path) -> None:
    """Claim: --quiet takes nothing from --json but what went to standard error."""
    words = ["describe", clip, "--num-frames", 500, "--max-new-tokens", 8, "--json"]
    _, loud, messages = call(*words)
    _, printed, nothing = call(*words, "--quiet")
    one, two = json.loads(loud), json.loads(printed)
    assert one.keys() == two.keys() and one["token_ids"] == two["token_ids"]
    assert one["warnings"][0] == two["warnings"][0] and "took all" in one["warnings"][0]
    assert "took all" in messages and nothing == ""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that never ends its answer."""
    folder = tmp_path_factory.mktemp("endless")
    return Path(checkpoints.make("qwen2.5-vl", f"{folder}/qwen2.5-vl"))


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_written(endless: Path, clip: Path, tmp_path: Path) -> None:
    """Claim: interrupted in mid-answer, the command ends with 130, what was written stands in
    full with a newline after it, without escape codes in a pipe and without a traceback."""
    with (tmp_path / "err").open("wb") as err:
        process = started(
            *("describe", clip, "--target", endless, "--method", "ar", "--threads", 1),
            *("--num-frames", 2, "--max-new-tokens", 12_000),
            out=subprocess.PIPE,
            err=err.fileno(),
        )
    assert process.stdout is not None
    with process.stdout:
        first = process.stdout.read(20)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    assert process.wait(60) == 130
    messages = (tmp_path / "err").read_text()
    assert len(first) == 20 and rest.endswith(b"\n")
    assert len(first + rest) < 12_000, "it was over before the interrupt"
    assert b"\x1b[" not in first + rest
    assert "Traceback" not in messages


def test_a_bar_counts_or_pulses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: on a terminal a step with an end shows its count and one without pulses, the last
    step only; off a terminal, or when quiet, nothing is written at all."""
    for on_terminal, quiet in ((True, False), (False, False), (True, True)):
        page = io.StringIO()
        console = Console(file=page, force_terminal=on_terminal, width=100)
        monkeypatch.setattr(terminal, "err", console)
        with terminal.progress_bars(quiet=quiet) as tell:
            tell("one")
            for i in range(3):
                tell("two", i + 1, 3)
        printed = page.getvalue()
        assert ("two" in printed and "3/3" in printed) == (on_terminal and not quiet)
        assert bool(printed) == (on_terminal and not quiet)
