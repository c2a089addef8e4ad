"""The draft's process as its parent knows it: started, lent to one answer at a time, given back.

Its death or silence costs speed and nothing else.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch

from saccade.drafting.parallel.child import Job
from saccade.model.backbone import REMEMBERED, Backbone

UP = 120.0  # seconds a worker may take to start


class DraftError(RuntimeError):
    """The draft process failed, died or fell silent."""


class Worker:
    """A running process, lent to one answer at a time; it keeps the models it was taught."""

    def __init__(self) -> None:
        self.threads = max(1, torch.get_num_threads() // 2)
        self._job = 0
        self._models: WeakKeyDictionary[Backbone, int] = WeakKeyDictionary()
        self._taught: set[int] = set()
        self.line, other = multiprocessing.Pipe()
        # not multiprocessing.Process: that would run a caller's script again to import it
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from saccade.drafting.parallel.child import main; main({other.fileno()})",
            ],
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        other.close()
        self.send(bytes(multiprocessing.current_process().authkey), sys.path, self.threads)

    def knows(self, backbone: Backbone) -> bool:
        return backbone in self._models

    def hand(self, backbone: Backbone, job: Job) -> None:
        """Begins new answers; what the worker still has to say about older ones is ignored."""
        self._job += 1
        for gone in self._taught - set(self._models.values()):
            self._taught.discard(gone)
            self.send("forget", gone)
        if backbone not in self._models:
            number = max(self._taught, default=0) + 1
            bare = copy(backbone.model)
            vars(bare).pop(REMEMBERED, None)
            with _mailable(bare):
                self.send("model", self._job, number, bare, backbone.fused is not None)
            backbone.accept_moved_weights()  # to memory that both processes share
            if self.receive(UP) != ("taught",):
                raise DraftError("the draft process could not take the model")
            self._models[backbone] = number
            self._taught.add(number)
        self.send("job", self._job, self._models[backbone], job)

    def send(self, *message: Any) -> None:
        try:
            self.line.send(message)
        except OSError as error:
            raise DraftError("the draft process has died") from error

    def receive(self, patience: float) -> tuple[Any, ...] | None:
        """The next message about this job, or None if none comes within ``patience`` seconds."""
        try:
            while self.line.poll(patience):
                job, *message = self.line.recv()
                if job == self._job:
                    return tuple(message)
        except (EOFError, OSError) as error:
            raise DraftError("the draft process has died") from error
        return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def _mailable(model: Any) -> Iterator[None]:
    """For the length of a call, without the hooks that cannot be sent: transformers puts some on
    where it records hidden states, and notes that it has; the worker's copy gets its own."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for part in model.modules():
        flags = {CAPTURING: part.__dict__[CAPTURING]} if CAPTURING in part.__dict__ else {}
        for kept in (part._forward_hooks, part._forward_pre_hooks):
            local = {key: hook for key, hook in kept.items() if "<locals>" in _where(hook)}
            taken.append((kept, local))
        taken.append((part.__dict__, flags))
    for place, things in taken:
        for key in things:
            del place[key]
    try:
        yield
    finally:
        for place, things in taken:
            place.update(things)


def _where(hook: Any) -> str:
    return str(vars(type(hook)).get("__qualname__", "")) + str(getattr(hook, "__qualname__", ""))


CAPTURING = "_output_capturing_hooks_installed"

_idle: list[Worker] = []


@atexit.register
def _dismiss() -> None:
    while _idle:
        _idle.pop().kill()


def prepare() -> None:
    """Starts a process ahead of need: it takes seconds, beside which models can load."""
    if not _idle:
        _idle.append(Worker())


def acquire(backbone: Backbone) -> Worker:
    """An idle worker, one that knows the model if there is one, or a new process."""
    _idle[:] = [worker for worker in _idle if worker.process.poll() is None]
    if not _idle:
        return Worker()
    best = max(_idle, key=lambda worker: worker.knows(backbone))
    _idle.remove(best)
    return best


def release(worker: Worker) -> None:
    """Puts a worker back, to be hired again; a dead one is forgotten, and leaves no zombie."""
    try:
        worker.send("done")
    except DraftError:
        worker.kill()
    else:
        _idle.append(worker)
