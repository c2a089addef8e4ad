"""A corpus over a Ray cluster: actors hold the models, and whoever is free takes the next videos.

Plain actors and not ``ray.data``, whose pools give a video that kills its worker to one worker
after the other without end: here what died with its worker is tried again, alone, and is an error
row after ``TRIES``. Rows are written by the caller, in one process, so none can be doubled.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from saccade.core.errors import OptionError, first_line, how_to_install
from saccade.corpus.keeping import Answer
from saccade.corpus.manifest import UNEXPECTED, ClipJob, Row, Work

TRIES = 3  # times a video may take its worker down with it
LOCAL = "local"  # the address of a cluster of this machine alone, made for the run


def models(work: Work) -> Callable[[Sequence[ClipJob]], list[Row]]:
    """The worker that answers; whoever hands out work need not load what it needs."""
    from saccade.corpus.worker import CorpusWorker

    return CorpusWorker(work)


class Held:
    """A worker as an actor: ``ready`` returns once the models are loaded."""

    def __init__(self, work: Work, make: Callable[[Work], Any]) -> None:
        self._worker = make(work)

    def ready(self) -> None: ...

    def answer(self, jobs: Sequence[ClipJob]) -> list[Row]:
        rows: list[Row] = self._worker(jobs)
        return rows


def over(
    work: Work,
    address: str,
    workers: int | None = None,
    make: Callable[[Work], Any] = models,
) -> Answer:
    """Answers on a Ray cluster: "local", "auto" (the one this machine belongs to) or an address.

    ``workers`` is one a GPU, or one a node where there are none. Every node needs this package, the
    checkpoints and the videos under the same paths. Raises OptionError where there is no cluster.
    """
    ray = join(address, f"--ray needs Ray: {how_to_install('ray')}")
    there = ray.cluster_resources()
    gpus = int(there.get("GPU", 0))
    count = workers or gpus or len([node for node in ray.nodes() if node["Alive"]])
    needs = {"num_gpus": 1 if gpus else 0, "num_cpus": 1}
    # a worker is not restarted by Ray: one that died comes back as another, and is counted
    worker = ray.remote(Held).options(max_restarts=0, max_task_retries=0, **needs)

    def answers(groups: Iterable[Sequence[ClipJob]]) -> Iterator[Sequence[Row]]:
        waiting = deque(list(group) for group in groups)
        deaths: Counter[str] = Counter()  # of workers, by the video they died with
        vain = 0  # deaths since a worker last did anything
        loading: dict[Any, Any] = {}  # only who has the models is given videos
        busy: dict[Any, tuple[Any, list[ClipJob]]] = {}
        idle: list[Any] = []

        def start_worker() -> None:
            actor = worker.remote(work, make)
            loading[actor.ready.remote()] = actor

        try:
            for _ in range(min(count, len(waiting))):
                start_worker()
            while waiting or busy:
                while waiting and idle:
                    actor, group = idle.pop(), waiting.popleft()
                    busy[actor.answer.remote(group)] = actor, group
                (done,), _ = ray.wait([*busy, *loading], num_returns=1)
                actor, group = busy.pop(done) if done in busy else (loading.pop(done), [])
                try:
                    rows = ray.get(done)
                except ray.exceptions.RayError as error:
                    vain += 1
                    if vain >= TRIES * (count + 1):
                        raise OptionError(
                            f"{vain} workers died one after the other, the last of "
                            f"{_why(error)}: what is done is kept"
                        ) from error
                    ray.kill(actor)
                    start_worker()
                    again, lost = _shared_out(work, group, deaths, error)
                    waiting.extendleft(again)
                    if lost:
                        yield lost
                    continue
                idle.append(actor)
                if rows:
                    vain = 0
                    yield rows
        finally:
            for actor in [*idle, *loading.values(), *(actor for actor, _ in busy.values())]:
                ray.kill(actor)
            ray.shutdown()

    return answers


def join(address: str, missing: str, **local: Any) -> Any:
    """Ray, once this process belongs to the cluster at that address; ``local`` is for a new one.

    Raises OptionError where there is no Ray (``missing`` says what to do) or no cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise OptionError(missing)
    # under `uv run`, Ray would copy this folder to its workers and install it for each
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray: Any = importlib.import_module("ray")  # which need not be there
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False if address == LOCAL else None,
            **(local if address == LOCAL else {}),
        )
    except Exception as error:  # ConnectionError, ValueError, its own: whatever it says is why
        said = first_line(error) or type(error).__name__
        raise OptionError(f"no Ray cluster at {address}: {said}") from error
    return ray


def _shared_out(
    work: Work, group: Sequence[ClipJob], deaths: Counter[str], error: Exception
) -> tuple[list[list[ClipJob]], list[Row]]:
    """What died with its worker: alone from now on, or an error after so many times."""
    deaths.update(job.id for job in group)
    died = f"{UNEXPECTED}death of {TRIES} workers, the last of {_why(error)}"
    again = [[job] for job in group if deaths[job.id] < TRIES]
    return again, [work.row(job, error=died) for job in group if deaths[job.id] >= TRIES]


def _why(error: Exception) -> str:
    """The line of Ray's long story that says what happened."""
    told = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {told[-1] if told else ''}"
