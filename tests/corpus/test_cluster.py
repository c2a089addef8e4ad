"""Claims about a corpus over a Ray cluster: workers and nodes may die, rows are there once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import OptionError
from saccade.corpus import cluster, manifest
from saccade.corpus.worker import CorpusWorker
from saccade.inputs.media import FrameSampling

pytestmark = pytest.mark.usefixtures("unchecked")

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: uv sync --extra ray",
)


def on_a_cluster(tmp_path: Path, kind: str, *rest: object) -> tuple[list[Any], Any]:
    """The rows and what was told, of a process of its own: Ray leaves threads and sockets."""
    command = [
        sys.executable,
        Path(__file__).parent / "on_cluster.py",
        tmp_path / "out.jsonl",
        kind,
    ]
    environment = {
        **os.environ,
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [str(word) for word in [*command, *rest]],
        capture_output=True, text=True, timeout=280, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "out.jsonl"
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return rows, json.loads((tmp_path / "told.json").read_text())


@needs_ray
def test_nothing_is_lost_or_doubled_when_workers_die(tmp_path: Path) -> None:
    """Claim: two nodes share twelve videos; workers killed half way cost no row and double none.

    What died with its worker once is answered by another; what kills every worker is one error
    row after three. Control: both were tried as often as that.
    """
    rows, (done, errors, progress) = on_a_cluster(tmp_path, "standing")
    by_id = {row["id"]: row for row in rows}
    assert sorted(by_id) == sorted([*"abcdefghij", "once", "poison"]) and len(rows) == 12
    assert (done, errors) == (12, 1) and progress == sorted(progress)
    tries = [len(list(tmp_path.glob(f"{id}.*.tried"))) for id in ("once", "poison", "a")]
    assert tries == [2, 3, 1]
    assert "death of 3 workers" in by_id["poison"]["error"]
    nodes = {row["text"] for row in rows if not row["error"]}
    assert len(nodes) == 2  # both nodes did something


@needs_ray
@pytest.mark.slow
def test_a_lost_node_costs_no_row(videos: Path, tmp_path: Path) -> None:
    """Claim: with the real worker, the rows are those of this process though a node was lost."""
    rows, (done, errors, gone) = on_a_cluster(tmp_path, "losing", videos)
    assert gone and (done, errors) == (6, 1) and len({row["id"] for row in rows}) == 6 == len(rows)
    work = manifest.CaptionSettings(
        method="ar",
        max_new_tokens=8,
        sampling=FrameSampling(num_frames=4),
        load=(("device", "cpu"),),
    )
    truth = CorpusWorker(work)(manifest.read_jobs(videos, "Describe the video in detail."))
    assert {row["id"]: row["text"] for row in rows} == {row.id: row.text for row in truth}


@needs_ray
@pytest.mark.slow
def test_workers_that_cannot_be_made_end_the_run(tmp_path: Path) -> None:
    """Claim: where no worker can be made at all, the run ends with a sentence that says why."""
    rows, (kind, message) = on_a_cluster(tmp_path, "broken")
    assert not rows and kind == "OptionError" and "no such thing here" in message


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: without the extra, --ray is refused by its name."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"uv run --extra ray.*CLONE\[ray\]"):
        cluster.answer_on_cluster(manifest.CaptionSettings(), "auto")
