"""Claims about ``saccade caption``: shards, their merge, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("unchecked")

WORDS = ["--max-new-tokens", 4, "--num-frames", 4, "--method", "ar", "--device", "cpu"]


@pytest.fixture
def videos(clip: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for name in ("one.mp4", "two.mp4"):
        shutil.copy(clip, folder / name)
    (folder / "bad.mp4").write_bytes(b"no video at all")
    return folder


@pytest.mark.extra
def test_shards_and_their_merge(call: Call, videos: Path, tmp_path: Path) -> None:
    """Claim: two shards' files joined are the whole, in order; until then it says what is missing.

    Fails if the exit code says that all is well while a row is missing or an error.
    """
    out = tmp_path / "captions.jsonl"
    code, printed, messages = call("caption", videos, "--out", out, *WORDS, "--shard", "2/2")
    assert code == 0 and "has 1 of 1 rows, 0 of them errors" in printed, messages
    second = tmp_path / "captions-2-of-2.jsonl"
    code, printed, _ = call("caption-merge", videos, second, "--out", out)
    assert code == 1 and "missing: 2 (bad.mp4, two.mp4)" in printed
    code, printed, _ = call(
        "caption", videos, "--out", out, *WORDS, "--shard", "1/2", "--batch", 2, "--json"
    )
    report = json.loads(printed)
    assert (code, report["done"], report["errors"]) == (0, 2, 1)
    code, printed, _ = call("caption-merge", videos, second, report["out"], "--out", out)
    assert code == 1 and "missing" not in printed and "errors: 1 (bad.mp4)" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["bad.mp4", "one.mp4", "two.mp4"]
    assert rows[1]["text"] == rows[2]["text"] != ""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shard", "3/2"], "i/n"),
        (["--method", "nothing"], "nothing"),
        (["--out", "nowhere/out.jsonl"], "no folder nowhere"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_what_it_refuses(call: Call, videos: Path, words: list[str], why: str) -> None:
    """Claim: a wrong option is one sentence and exit code 2, before any model is loaded."""
    code, _, messages = call("caption", videos, *words)
    assert code == 2 and why in messages and "Traceback" not in messages
