"""Claims about commands that take media as they come: ``chat`` with /add, and ``watch``."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from saccade.cli.chat import FILE_ADDED, NAME_A_FILE
from saccade.world import drawing, scenes

Call = Callable[..., tuple[int, str, str]]


def test_chat_takes_another_file_in_between(
    call: Call, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: /add shows a picture, and a text, with the next question; what was read stays read; a
    file that is neither is one sentence and the conversation goes on; /reset keeps all that was
    shown. Fails if the first video is read again, or the new media are not seen."""
    picture, notes = tmp_path / "second.png", tmp_path / "notes.txt"
    Image.fromarray(drawing.render(scenes.scene(20_000_003), 1, 112)[0]).save(picture)
    notes.write_text("The blue circle moves slowly. " * 20)
    broken = tmp_path / "broken.bin"
    broken.write_bytes(bytes(range(256)) * 4)
    lines = ["What moves?", "/add", f"/add {broken}", f"/add {picture}", "And here?"]
    lines += [f"/add {notes}", "What now?", "/reset", "What moves?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code, printed, messages = call("chat", clip, "-n", 8, "-m", "specvlm", "--json")
    assert code == 0, messages
    first, second, third, last = map(json.loads, printed.splitlines())
    assert messages.count(FILE_ADDED) == 2 and NAME_A_FILE in messages and "broken.bin" in messages
    assert second["reused_tokens"] > first["visual_tokens"]
    assert first["visual_tokens"] < second["visual_tokens"] < third["visual_tokens"]
    assert third["reused_tokens"] > second["reused_tokens"]
    assert second["frames"] == third["frames"] == last["frames"] == first["frames"] + 1
    assert last["visual_tokens"] == third["visual_tokens"] and last["fallback_reason"] is None


def test_an_answer_of_one_token_is_printed(
    call: Call, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: an answer without a forward of decoding has its line of figures, without a tau."""
    monkeypatch.setattr("sys.stdin", io.StringIO("What moves?\nAnd now?\n"))
    code, _, messages = call("chat", clip, "-n", 1, "-m", "sd")
    assert code == 0 and messages.count("1 tokens") == 2 and "tau" not in messages


def test_a_file_is_watched_and_asked_about(call: Call, tmp_path: Path) -> None:
    """Claim: a question every few seconds and one at the end, each about what was seen by then and
    kept; the window bounds it. Without --json the answers are printed under their times, which are
    those that the answer saw. Fails if the range is read before new frames push old ones out."""
    path = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), path, 24, 112, fps=2.0)
    words = ["watch", path, "--every", 3, "--ask", "What is there?", "-n", 6, "--no-realtime"]
    words += ["--fps", 2, "-m", "sd", "--window", "16 frames"]
    code, printed, messages = call(*words, "--json")
    assert code == 0, messages
    answers = [json.loads(line) for line in printed.splitlines()]
    assert len(answers) >= 3 and all(each["tokens"] <= 6 for each in answers)
    times = [each["time"] for each in answers]
    assert all(0 < b - a <= 3.5 for a, b in pairwise(times))
    assert answers[-1]["kept_seconds"][1] == times[-1]
    assert any(each["reused_tokens"] > 0 for each in answers)
    assert all(0 < each["frames"] <= 16 for each in answers)
    code, printed, messages = call(*words)
    assert code == 0 and printed.strip()
    begins = [float(begin) for begin in re.findall(r"kept from ([\d.]+) s", messages)]
    assert begins == [pytest.approx(each["kept_seconds"][0], abs=0.06) for each in answers]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nope.mp4",), "does not exist"),
        (("-",), "save the video to a file"),
        (("nope.mp4", "--every", 0), "--every"),
        (("nope.mp4", "--window", "3 cats"), "window="),
    ],
)
def test_watch_refuses_in_a_sentence(call: Call, words: tuple, sentence: str) -> None:
    """Claim: what cannot be watched is refused before models are loaded."""
    code, printed, messages = call("watch", *words)
    assert code == 2 and printed == "" and sentence in messages and "Traceback" not in messages
