"""Claims about the command line: what cannot be is said in one sentence, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--trace", "/nowhere/rounds.jsonl"), "there is no folder /nowhere"),
        (("--target", ""), "a model is a checkpoint folder or a hub id, not ''"),
        (("--draft", ""), "a model is a checkpoint folder or a hub id, not ''"),
        (("--method", ""), "unknown method ''"),
        (("--threads", "100000"), "--threads 100000 is more than this machine bears"),
        (("--temperature", "inf"), "temperature=inf must be a number above 0"),
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "1", "--top-p", "2"), "top_p=2.0 must be a number above 0 and up to 1"),
        (("--temperature", "1", "--top-p", "nan"), "nan"),
        (("--method", "sd/shape=paths-0,1000000"), "ranks go from 0 to 63, not to 1000000"),
        (("--temperature", "1e-300"), "numbers broke down"),
    ],
)
def test_impossible_arguments_are_refused_in_a_sentence(
    call: Call, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    """Claim: exit code 2 and a sentence; nothing is computed that is then lost."""
    clip = tmp_path / "clip.mp4"
    assert call("shapes", "make", "--frames", "4", "--size", "56", "--out", str(clip))[0] == 0
    code, _, messages = call("describe", str(clip), "--max-new-tokens", "4", *words)
    assert code == 2 and says in messages and "Traceback" not in messages


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "shapes make --out there.txt",
            "cannot write there.txt as an .mp4: Could not determine",
        ),
        ("shapes make --out folder", "cannot write folder as an .mp4"),
        ("shapes make --out nowhere/x.mp4", "cannot write nowhere/x.mp4 as an .mp4"),
        ("shapes make --fps 1e12 --out x.mp4", "cannot write x.mp4 as"),
        ("shapes make --size 9999998 --frames 1 --out x.mp4", "Unable to allocate"),
        ("caption there.txt --out folder", "folder: Is a directory"),
        ("describe there.txt --config nowhere.yaml", "nowhere.yaml: No such file or directory"),
        ("bench --suite shapes-caption --methods ar --out /dev/null", "/dev/null: File exists"),
        ("calibrate there.txt --out folder", "cannot write folder"),
        (
            "bench --suite shapes-caption --methods ar --out there.txt",
            "there.txt: File exists",
        ),
        ("bench --suite shapes-capton", "no suite 'shapes-capton' (did you mean shapes-caption?)"),
        ("bench --suite shapes-caption --methods ,", "name a method: saccade methods"),
        ("describe there.txt there.txt", "there.txt is a file"),
        ("describe there.txt folder", "folder is a file or folder"),
    ],
)
def test_obstacles_are_reported(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    """Claim: a file where a folder is wanted, the reverse, a clip larger than memory and a name
    that is misspelt are a sentence and exit code 2."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("there.txt").write_text("clip.mp4\n")
    code, _, messages = call(*words.split())
    assert code == 2 and says in messages and "Traceback" not in messages


def test_a_missing_video_is_not_reported_as_a_folder(call: Call) -> None:
    """Claim: an empty name is refused, and not read as the current folder."""
    code, _, messages = call("describe", "")
    assert code == 2 and "name a video" in messages
