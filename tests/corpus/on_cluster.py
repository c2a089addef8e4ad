"""What ``test_cluster.py`` runs in a process of its own: a corpus on a Ray cluster of two nodes.

    python on_cluster.py OUT KIND

Workers die on the way as their job's id asks for; the real worker loads the embedded pair.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from saccade.corpus import caption_run, manifest
from saccade.corpus import cluster as spread
from saccade.corpus.manifest import CaptionSettings, ClipJob, Row
from saccade.inputs.media import FrameSampling


def main(out: str, kind: str, *rest: str) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    second = cluster.add_node(num_cpus=1)
    try:
        KINDS[kind](Path(out), cluster, second, *rest)
    finally:
        cluster.shutdown()


def standing(out: Path, cluster: Cluster, second: Any) -> None:
    """Twelve jobs and a stand-in for the worker, killed in the middle of two of them."""
    folder = out.parent

    class Standin:
        """Answers with its process and node, and dies where a job's id says so."""

        def __init__(self, work: CaptionSettings) -> None:
            self._node = ray.get_runtime_context().get_node_id()

        def __call__(self, jobs: Sequence[ClipJob]) -> list[Row]:
            for job in jobs:
                tried = folder / f"{job.id}.{os.getpid()}.{time.monotonic_ns()}.tried"
                tried.touch()
                first = len(list(folder.glob(f"{job.id}.*.tried"))) == 1
                if "poison" in job.id or ("once" in job.id and first):
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
            return [
                Row(job.id, job.video, job.prompt, CaptionSettings().key, text=self._node)
                for job in jobs
            ]

    names = [*"abcde", "once", *"fghij", "poison"]
    jobs = [ClipJob(name, f"{name}.mp4", "?", f"/{name}.mp4") for name in names]
    progress: list[int] = []
    totals = caption_run.run_jobs(
        jobs,
        out,
        CaptionSettings(),
        lambda: spread.answer_on_cluster(CaptionSettings(), cluster.address, 2, Standin),
        batch=2,
        on_progress=lambda now: progress.append(now.done),
    )
    (folder / "told.json").write_text(json.dumps([totals.done, totals.errors, progress]))


def losing(out: Path, cluster: Cluster, second: Any, videos: str) -> None:
    """Real workers, one a node; a node is lost as soon as there are two rows."""
    work = CaptionSettings(
        method="specvlm/shape=chain-3",
        max_new_tokens=8,
        sampling=FrameSampling(num_frames=4),
        load=(("device", "cpu"),),
        threads=1,
    )
    gone = False

    def tell(now: caption_run.Progress) -> None:
        nonlocal gone
        if now.done >= 2 and not gone:
            gone = True
            cluster.remove_node(second, allow_graceful=False)

    jobs = manifest.read_jobs(Path(videos), "Describe the video in detail.")
    totals = caption_run.run_jobs(
        jobs,
        out,
        work,
        lambda: spread.answer_on_cluster(work, cluster.address, 2),
        on_progress=tell,
    )
    (out.parent / "told.json").write_text(json.dumps([totals.done, totals.errors, gone]))


def broken(out: Path, cluster: Cluster, second: Any) -> None:
    """Workers that cannot be made at all."""

    class Never:
        def __init__(self, work: CaptionSettings) -> None:
            raise ModuleNotFoundError("no such thing here")

    jobs = [ClipJob(name, name, "?", name) for name in "ab"]
    try:
        caption_run.run_jobs(
            jobs,
            out,
            CaptionSettings(),
            lambda: spread.answer_on_cluster(CaptionSettings(), cluster.address, 1, Never),
        )
    except Exception as error:
        (out.parent / "told.json").write_text(json.dumps([type(error).__name__, str(error)]))


KINDS = {"standing": standing, "losing": losing, "broken": broken}

if __name__ == "__main__":
    main(*sys.argv[1:])
