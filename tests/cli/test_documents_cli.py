"""Long texts on the command line: the same option, and the same sentences, wherever it is taken."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from commands import Call

from saccade.cli.chat import DOCUMENT_ADDED
from saccade.inputs import subjects
from saccade.model.backbone import Backbone

WORDS = "A red circle moves left. " * 20
OTHER = "A blue square waits. " * 20


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(WORDS)
    return path


@pytest.fixture
def reads_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the target had been made for few tokens."""
    made = Backbone.__init__

    def less(self: Backbone, *given: Any, **more: Any) -> None:
        made(self, *given, **more)
        self.max_positions = 800

    monkeypatch.setattr(Backbone, "__init__", less)


@pytest.mark.extra
def test_what_is_no_text_is_reported_before_any_model(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a document that is missing, a folder, empty, no text, or larger than a model reads
    ends describe, chat and compare in the same sentence, which names the file, and no video is
    opened. Fails if one of them reads it in a way of its own."""
    made = {
        "empty.txt": b" \n",
        "frame.png": b"\x89PNG\xff",
        "zeros.txt": b"a\0b",
        "long.txt": b"a" * 99,
    }
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(subjects, "MAX_DOCUMENT_BYTES", 90)
    says = {
        "nowhere.txt": "does not exist",
        ".": "cannot be read",
        "empty.txt": "is empty",
        "frame.png": "is no text",
        "zeros.txt": "is no text",
        "long.txt": "more than a model reads",
    }
    for name, reason in says.items():
        file = tmp_path / name
        outcomes = {
            call(each, "nope.mp4", "--document", file) for each in ("describe", "chat", "compare")
        }
        ((code, printed, line),) = outcomes
        assert code == 2 and not printed and reason in line and str(file) in line
        assert len(line.splitlines()) == 1 and "nope.mp4" not in line


@pytest.mark.slow
def test_too_long_a_document_is_reported(call: Call, tmp_path: Path, reads_little: None) -> None:
    """Claim: of more tokens than the model reads there is one sentence, with both numbers."""
    long = tmp_path / "long.txt"
    long.write_text(WORDS * 12)
    code, printed, messages = call("compare", "--document", long, "-m", "ar", "What moves?")
    assert code == 2 and not printed and "tokens, and this model reads" in messages
    assert "shorter document" in messages and "Traceback" not in messages


@pytest.mark.slow
def test_compare_asks_about_a_document(call: Call, notes: Path, clip: Path) -> None:
    """Claim: methods side by side about a document alone, and about a video with it, say what plain
    decoding says, generate() among them, and drafts see less of it than there is."""
    how = ["--document", notes, "-m", "ar,std,hf", "-n", 6, "--repeat", 1, "--json"]
    counted = []
    for arguments in (["What moves?"], [clip, "What moves?", "--num-frames", 4]):
        code, printed, messages = call("compare", *arguments, *how)
        assert code == 0, messages
        report = json.loads(printed)
        assert all(row["identical_to_ar"] for row in report["methods"].values())
        assert report["documents"] == ["notes.txt"]
        counted.append((report["video"], report["visual_tokens"]))
    (alone, few), (video, more) = counted
    assert (alone, video) == (None, clip.name) and 0 < few < more


@pytest.mark.slow
def test_a_conversation_about_documents(
    call: Call, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_little: None
) -> None:
    """Claim: chat answers about a document as describe does; one that is added in between, and none
    that is no text or too long, stands before what was said, which is kept; /reset leaves both."""
    more, empty, long = (tmp_path / name for name in ("more.txt", "empty.txt", "long.txt"))
    for path, content in ((more, OTHER), (empty, ""), (long, WORDS * 12)):
        path.write_text(content)
    how = ["--document", notes, "-n", 6, "-m", "std", "--json"]
    lines = ["What moves?", f"/document {empty}", f"/document {long}", "What waits?"]
    lines += [f"/document {more}", "And now?", "/reset", "What moves?", "/document"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code, printed, messages = call("chat", *how)
    assert code == 0, messages
    first, second, third, last = map(json.loads, printed.splitlines())
    assert first["token_ids"] == json.loads(call("describe", "What moves?", *how)[1])["token_ids"]
    assert second["reused_tokens"] > 0 and second["visual_tokens"] == first["visual_tokens"]
    assert third["reused_tokens"] == 0 and third["visual_tokens"] > first["visual_tokens"]
    both = json.loads(call("describe", "What moves?", *how, "--document", more)[1])
    assert last["token_ids"] == both["token_ids"]
    assert last["visual_tokens"] == both["visual_tokens"] == third["visual_tokens"]
    assert (
        messages.count(DOCUMENT_ADDED) == 1
        and "is empty" in messages
        and "this model reads" in messages
    )
    assert "name a file of text" in messages
