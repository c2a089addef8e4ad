"""For tests of the parallel schedule: models with known delays, and a draft process without one.

``Pace`` travels with a model into a real worker, so this module imports nothing that is slow to
import. ``Inside`` is the worker's own desk run in this process, a turn at a time, so that every
interleaving of the two sides can be asked for.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from saccade.drafting.parallel import process, worker_drafter
from saccade.drafting.parallel.child import Job, JobRunner
from saccade.drafting.parallel.process import DraftError, Lending
from saccade.model.backbone import Backbone

MANY = 16  # rows a forward has in a prefill, at least

# -- models with known delays ------------------------------------------------------------------


@dataclass
class Pace:
    """Sleeps before each forward of a decoder and writes down what it ran, a JSON line each.

    The file ``begun`` is there as soon as the first step has begun.
    """

    prefill: float = 0.0
    step: float = 0.0
    log: str = ""
    begun: str = ""
    failing: int | None = None  # the step that raises, once
    steps: int = 0
    ids: list[int] = field(default_factory=list)
    started: float = 0.0
    deaf: Any = None

    def embedding(self, module: Any, args: Any) -> None:
        self.ids = args[0].flatten().tolist()

    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        self.started = time.monotonic()
        if "saccade_step" not in kwargs:  # the model is asked for its prompt alone
            return
        many = kwargs["inputs_embeds"].shape[1] >= MANY
        if self.begun and not many:
            Path(self.begun).touch()
        time.sleep(self.prefill if many else self.step)
        if not many:
            self.steps += 1
            if self.steps == self.failing:
                raise RuntimeError(f"step {self.steps} is broken")

    def after(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self.log:
            rows = kwargs["inputs_embeds"].shape[1]
            ids = self.ids if rows == len(self.ids) else []
            line = {"start": self.started, "end": time.monotonic(), "rows": rows, "ids": ids}
            with Path(self.log).open("a") as file:
                file.write(json.dumps(line) + "\n")


def paced(model: nn.Module, pace: Pace) -> Backbone:
    """The model at this pace, over its modules, since hooks are theirs. Changes the model."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    decoder.register_forward_pre_hook(pace.before, with_kwargs=True)
    decoder.register_forward_hook(pace.after, with_kwargs=True)
    decoder.get_input_embeddings().register_forward_pre_hook(pace.embedding)
    return Backbone(model, fused=False)


@dataclass(frozen=True)
class Ran:
    """One forward, on the clock that all processes share."""

    start: float
    end: float
    rows: int
    ids: tuple[int, ...]


def ran(log: str) -> list[Ran]:
    """The forwards a log holds."""
    path = Path(log)
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [Ran(at["start"], at["end"], at["rows"], tuple(at["ids"])) for at in records]


def deafened() -> None:
    """Makes this process's desk draft all it may before it looks at its mail again."""
    step = JobRunner.step

    def deaf(self: JobRunner) -> None:
        while self.is_busy():
            step(self)

    JobRunner.step = deaf


class Deafening:
    """Deafens the process it is unpickled in."""

    def __reduce__(self) -> Any:
        return deafened, ()


# -- a worker without a process ----------------------------------------------------------------


class Killed(BaseException):
    """Raised in the desk of :class:`Inside`, its process dies there as by SIGKILL."""


class Hung(BaseException):
    """Raised in the desk of :class:`Inside`, its process does nothing from there on."""


class Inside(process.Worker):
    """A worker whose process is this one. Its loop gets ``turns()`` turns whenever the parent
    listens, and as many as it takes where the parent is patient: so ``turns`` says who is faster.

    ``dies`` is the number of messages that the process sends before it is dead.
    """

    def __init__(self, turns: Callable[[], int] = lambda: 1, dies: int | None = None) -> None:
        self.process: Any = self
        self.desk: JobRunner | None = None
        self.messages: list[tuple[Any, ...]] = []  # what the parent sent
        self.left = dies
        self.hangs = False  # it does nothing any more, and does not say so
        self._turns = turns
        self._mail: deque[tuple[Any, ...]] = deque()
        self._inbox: deque[tuple[Any, ...]] = deque()
        self._job_number = self._at_work_on = 0

    def poll(self) -> int | None:
        return None if self.left is None or self.left > 0 else -9

    def has_model(self, backbone: Backbone) -> bool:
        return True

    def start_job(self, backbone: Backbone, job: Job) -> None:
        self._job_number += 1
        self.hangs = False
        self.send("job", self._job_number, backbone, job)

    def send(self, *message: Any) -> None:
        self._alive()
        self.messages.append(message)
        self._mail.append(message)

    def receive(self, patience: float) -> tuple[Any, ...] | None:
        for _ in range(self._turns()):
            self.turn()
        while True:
            while self._inbox:  # What a process sent before it died is there all the same.
                job, *message = self._inbox.popleft()
                if job == self._job_number:
                    return tuple(message)
            self._alive()
            if not patience or not self.turn():
                return None

    def turn(self) -> bool:
        """One turn of the worker's loop: mail first, then one step; whether there was any."""
        if self.hangs or self.poll() is not None:
            return False
        read = bool(self._mail)
        try:
            while self._mail:
                name, *content = self._mail.popleft()
                if name == "job":
                    self._at_work_on, backbone, job = content
                    self.desk = JobRunner(backbone, job, self._tell)
                elif name == "done":
                    self.desk = None
                elif self.desk is not None:
                    getattr(self.desk, name)(*content)
            if self.desk is None or not self.desk.is_busy():
                return read
            self.desk.step()
        except Killed:
            self.left = 0
        except Hung:
            self.hangs = True
        except Exception as error:
            self._tell("failed", f"{type(error).__name__}: {error}")
            self.desk = None
        return True

    def kill(self) -> None:
        self.left = 0

    def end(self) -> None:
        self.kill()

    def _tell(self, *message: Any) -> None:
        if self.poll() is None:
            self._inbox.append((self._at_work_on, *message))
            if self.left is not None:
                self.left -= 1

    def _alive(self) -> None:
        if self.poll() is not None:
            raise DraftError("the draft process has died")


@contextmanager
def hired(inside: Inside) -> Iterator[Inside]:
    """Answers in this block are drafted for by ``inside``."""

    def give_back(one: Any, patience: float) -> None:
        one._mail.append(("done",))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_drafter, "lend", lambda backbone: Lending(inside, give_back))
        yield inside


# -- processes that start at once --------------------------------------------------------------


def fork(target: Callable[..., None], *args: Any, daemon: bool = True) -> Any:
    """A process that goes on from here, with all that is imported, in ``target``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside a thread
        context = multiprocessing.get_context("fork")
        process = context.Process(target=target, args=args, daemon=daemon)
        process.start()
    return process


class Forked:
    """``python -c`` as a fork of this process, without the seconds that importing everything anew
    takes. Stands in for ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **rest: Any) -> None:
        at = command.index("-c")
        self._process = fork(_run, command[at + 1], command[at + 2 :], pass_fds)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._process.exitcode


def _run(code: str, arguments: Sequence[str], kept: Sequence[int]) -> None:
    """What the code would do in a new process that has these open files and no others."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, *kept}:
        with suppress(OSError):  # the folder's own
            os.dup2(nothing, handle)
    sys.argv = ["-c", *arguments]
    exec(code, {})


@contextmanager
def forked() -> Iterator[None]:
    """Workers hired in this block start at once, and end with it."""
    fire()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(Popen=Forked))
        yield
    fire()


def fire() -> None:
    """Ends every idle process."""
    process._dismiss()
