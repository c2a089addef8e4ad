"""Captions a corpus over a Ray cluster: actors hold the models, and an idle one gets the next jobs.

The actors are our own and not those of ``ray.data``, which hands a video that kills its worker to
one worker after another without end. Here the jobs of a dead worker are tried again one by one. A
job that has lost ``MAX_ATTEMPTS`` workers becomes an error row. Only the caller's process writes
rows, so none is written twice.
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
from saccade.corpus.caption_run import AnswerJobs
from saccade.corpus.manifest import UNEXPECTED_PREFIX, CaptionSettings, ClipJob, Row

MAX_ATTEMPTS = 3  # A job with which so many workers died becomes an error row.
LOCAL = "local"  # This address starts a cluster of this machine alone for the run.


def load_worker(settings: CaptionSettings) -> Callable[[Sequence[ClipJob]], list[Row]]:
    """Returns a worker that has loaded its models.

    The worker's module is imported here, because the process that hands out jobs does not need it.
    """
    from saccade.corpus.worker import CorpusWorker

    return CorpusWorker(settings)


class WorkerActor:
    """A worker as a Ray actor: ``ready`` returns once the models are loaded."""

    def __init__(
        self, settings: CaptionSettings, make_worker: Callable[[CaptionSettings], Any]
    ) -> None:
        self._worker = make_worker(settings)

    def ready(self) -> None: ...

    def answer(self, jobs: Sequence[ClipJob]) -> list[Row]:
        rows: list[Row] = self._worker(jobs)
        return rows


def answer_on_cluster(
    settings: CaptionSettings,
    address: str,
    workers: int | None = None,
    make_worker: Callable[[CaptionSettings], Any] = load_worker,
) -> AnswerJobs:
    """Returns a function that answers groups of jobs on a Ray cluster, and yields the rows of each
    group once it is answered, in any order.

    ``address`` is "local", "auto" (the cluster this machine belongs to) or an address. ``workers``
    is by default one per GPU, or one per node where there are no GPUs. ``make_worker`` is called in
    each actor, and returns the function that answers a group of jobs.

    Every node needs this package, the checkpoints and the videos under the same paths. A worker
    that raises an error counts as one that died. Raises OptionError where there is no cluster. The
    function raises OptionError too, once many workers in a row died without a single answer.
    """
    ray = join_cluster(address, f"--ray needs Ray: {how_to_install('ray')}")
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = workers or gpus or len([node for node in ray.nodes() if node["Alive"]])
    resources_per_worker = {"num_gpus": 1 if gpus else 0, "num_cpus": 1}
    # Ray does not restart a worker, because a dead worker's jobs have to be counted.
    actor_class = ray.remote(WorkerActor).options(
        max_restarts=0, max_task_retries=0, **resources_per_worker
    )

    def answers(groups: Iterable[Sequence[ClipJob]]) -> Iterator[Sequence[Row]]:
        waiting = deque(list(group) for group in groups)
        deaths: Counter[str] = Counter()  # By job id, how many workers died while they had the job.
        deaths_in_a_row = 0  # How many workers have died since one last answered.
        # Actors that load their models, by the Ray reference that is ready when they are.
        loading: dict[Any, Any] = {}
        # Actors with the jobs that they answer, by the Ray reference of the rows.
        busy: dict[Any, tuple[Any, list[ClipJob]]] = {}
        idle: list[Any] = []

        def start_worker() -> None:
            actor = actor_class.remote(settings, make_worker)
            loading[actor.ready.remote()] = actor

        try:
            for _ in range(min(count, len(waiting))):
                start_worker()
            while waiting or busy:
                # Idle actors get jobs. Then this waits until one actor has loaded or answered.
                while waiting and idle:
                    actor = idle.pop()
                    group = waiting.popleft()
                    busy[actor.answer.remote(group)] = actor, group
                (done,), _ = ray.wait([*busy, *loading], num_returns=1)
                group = []  # An actor that was loading had no jobs.
                if done in busy:
                    actor, group = busy.pop(done)
                else:
                    actor = loading.pop(done)
                try:
                    rows = ray.get(done)  # None if the actor was loading.
                except ray.exceptions.RayError as error:
                    deaths_in_a_row += 1
                    # A job that kills its workers causes ``MAX_ATTEMPTS`` deaths. After more deaths
                    # without one answer than ``count + 1`` such jobs cause, the machine is taken to
                    # be at fault and not the videos.
                    if deaths_in_a_row > MAX_ATTEMPTS * (count + 1):
                        raise OptionError(
                            f"{deaths_in_a_row} workers died one after the other, the last of "
                            f"{_cause(error)}: finished rows are kept"
                        ) from error
                    ray.kill(actor)
                    start_worker()
                    retried, error_rows = _retry_or_fail(settings, group, deaths, error)
                    waiting.extendleft(retried)
                    if error_rows:
                        yield error_rows
                    continue
                idle.append(actor)
                if rows:
                    deaths_in_a_row = 0
                    yield rows
        finally:
            for actor in [*idle, *loading.values(), *(actor for actor, _ in busy.values())]:
                ray.kill(actor)
            ray.shutdown()

    return answers


def join_cluster(address: str, missing: str, **local_options: Any) -> Any:
    """Joins the Ray cluster at an address and returns the module ``ray``.

    ``local_options`` are for ``ray.init``, where the address starts a new local cluster. Raises
    OptionError where Ray is not installed, with ``missing`` as its message, and where there is no
    cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise OptionError(missing)
    # Under `uv run`, Ray would copy this folder to its workers, and each of them would install it.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray: Any = importlib.import_module("ray")  # Ray is an optional dependency.
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False if address == LOCAL else None,
            **(local_options if address == LOCAL else {}),
        )
    except Exception as error:  # Ray raises ConnectionError, ValueError and errors of its own.
        reason = first_line(error) or type(error).__name__
        raise OptionError(f"no Ray cluster at {address}: {reason}") from error
    return ray


def _retry_or_fail(
    settings: CaptionSettings, group: Sequence[ClipJob], deaths: Counter[str], error: Exception
) -> tuple[list[list[ClipJob]], list[Row]]:
    """Returns a dead worker's jobs that are tried again, as groups of one, and error rows for the
    jobs that have lost ``MAX_ATTEMPTS`` workers."""
    deaths.update(job.id for job in group)
    message = f"{UNEXPECTED_PREFIX}death of {MAX_ATTEMPTS} workers, the last of {_cause(error)}"
    retried = [[job] for job in group if deaths[job.id] < MAX_ATTEMPTS]
    failed = [job for job in group if deaths[job.id] >= MAX_ATTEMPTS]
    return retried, [settings.row(job, error=message) for job in failed]


def _cause(error: Exception) -> str:
    """Returns an error's type and the last line of Ray's long message. That line says what
    happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
