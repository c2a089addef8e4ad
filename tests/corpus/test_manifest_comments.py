"""Comments in manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saccade.core.errors import OptionError
from saccade.corpus.manifest import read_jobs

WRITTEN = {
    "list.txt": "# mine\na.mp4\n\n#b.mp4\nc.mp4\n",
    "list.jsonl": '# mine\n{"video": "a.mp4"}\n# {"video": "b.mp4"}\n{"video": "c.mp4"}\n',
    "list.csv": "# mine\n# more\nvideo,prompt\na.mp4,what?\n#b.mp4,what?\nc.mp4,\n",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_lines_that_begin_with_a_hash_are_comments(tmp_path: Path, name: str) -> None:
    """Claim: in every kind of manifest, before its head too, and lines are counted with them."""
    path = tmp_path / name
    path.write_text(WRITTEN[name])
    assert [job.video for job in read_jobs(path, "?")] == ["a.mp4", "c.mp4"]
    path.write_text(WRITTEN[name] + WRITTEN[name].splitlines()[-1] + "\n")
    last = len(WRITTEN[name].splitlines())
    with pytest.raises(OptionError, match=f"line {last + 1} .* has the id of line {last}"):
        read_jobs(path, "?")


@pytest.mark.parametrize("end", ["\u2028", "\x85", "\x0b", "\x0c"])
def test_only_line_feeds_end_the_lines_of_a_manifest(tmp_path: Path, end: str) -> None:
    """Claim: what else Unicode counts as the end of a line may stand in prompts and names."""
    prompt, name = f"one{end}two", f"a{end}b.mp4"
    texts = {
        "list.txt": f"{name}\nc.mp4\n",
        "list.jsonl": "".join(json.dumps({"video": v}) + "\n" for v in (name, "c.mp4")),
        "list.csv": f"video,prompt\n{name},{prompt}\nc.mp4,\n",
    }
    for file, text in texts.items():
        path = tmp_path / file
        path.write_text(text, encoding="utf-8")
        assert [job.video for job in read_jobs(path, "?")] == [name, "c.mp4"]
    assert [job.prompt for job in read_jobs(tmp_path / "list.csv", "?")] == [prompt, "?"]
