"""The draft's process as its parent knows it: started, lent to one answer at a time, given back.

Its death or silence costs speed and nothing else.

Every running process is listed here, so the collector never finishes one before what uses it. An
answer has a :class:`Lending`: it ends when the answer is closed or when nobody refers to it any
more, whichever comes first, and it ends once.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from saccade.drafting.parallel.channel import Channel, LineClosed
from saccade.drafting.parallel.child import Job
from saccade.model.backbone import REMEMBERED, Backbone

UP = 120.0  # seconds a worker may take to start
STOP_SECONDS = 5.0  # that a worker may take to stop what it is at when its answer is closed

Weights = tuple[tuple[int, int], ...]
"""Where a model's weights are, and how often each was changed in place."""


class DraftError(RuntimeError):
    """The draft process failed, died or fell silent."""


class Worker:
    """A running process, lent to one answer at a time; it keeps the models it was taught.

    It owns its end of the line to the process, and both are ended by :meth:`end`.
    """

    def __init__(self) -> None:
        self._job = 0
        self._parent = os.getpid()
        self._models: WeakKeyDictionary[Backbone, tuple[int, Weights]] = WeakKeyDictionary()
        self._taught: set[int] = set()
        here, there = socket.socketpair()
        self.channel = Channel(here)
        try:
            with there:
                # not multiprocessing.Process: that would run a caller's script again to import it
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        "from saccade.drafting.parallel.child import main; "
                        f"main({there.fileno()}, {os.getpid()})",
                    ],
                    pass_fds=[there.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self.channel.close()
            raise
        _running[id(self)] = self
        self.send(sys.path)

    def knows(self, backbone: Backbone) -> bool:
        return backbone in self._models

    def hand(self, backbone: Backbone, job: Job) -> None:
        """Begins new answers; what the worker still has to say about older ones is ignored."""
        self._job += 1
        self.send("begin", self._job, job.threads)
        for gone in self._taught - {number for number, _ in self._models.values()}:
            self._taught.discard(gone)
            self.send("forget", gone)
        weights = _weights_of(backbone.model)
        number, known = self._models.get(backbone, (0, ()))
        if known != weights:
            number = number or max(self._taught, default=0) + 1
            bare = copy(backbone.model)
            vars(bare).pop(REMEMBERED, None)
            with _mailable(bare):
                self.send("model", number, bare, backbone.fused is not None)
            if self.receive(UP) != ("taught",):
                raise DraftError("the draft process could not take the model")
            self._models[backbone] = number, weights
            self._taught.add(number)
        self.send("job", number, job)

    def send(self, *message: Any) -> None:
        """Sends a message. Raises DraftError where nobody reads it, OSError where no descriptor or
        memory is left for its tensors."""
        try:
            self.channel.send(message, UP)
        except (LineClosed, TimeoutError) as error:
            raise DraftError("the draft process has died") from error

    def receive(self, patience: float) -> tuple[Any, ...] | None:
        """The next message about this job, or None if none comes within ``patience`` seconds. What
        a process sent before it died is received first."""
        deadline = time.monotonic() + patience
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                found = self.channel.receive(left)
                if found is None:
                    return None
                job, *message = found
                if job == self._job:
                    return tuple(message)
        except LineClosed as error:
            raise DraftError("the draft process has died") from error

    def stop(self, patience: float) -> None:
        """Ends the job under way, and waits so long for the process to be idle.

        Without patience it is idle within a step or a piece of its prompt. Raises DraftError where
        it does not read that, or is still at work.
        """
        try:
            self.channel.send(("done",), patience)
        except (LineClosed, TimeoutError) as error:
            raise DraftError("the draft process has died") from error
        deadline = time.monotonic() + patience
        while patience:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise DraftError("the draft process does not stop")
            if message == ("idle",):
                return

    def kill(self) -> None:
        """Ends the process; what it had sent can still be received. In a fork of the process that
        has started it nothing happens: it is not the fork's."""
        if os.getpid() == self._parent:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """Ends the process and closes the line; a second time nothing happens."""
        _running.pop(id(self), None)
        self.kill()
        self.channel.close()


def _weights_of(model: Any) -> Weights:
    """Changes when a weight is replaced, or changed in place by anything that torch counts."""
    return tuple(map(_weight_of, (*model.parameters(), *model.buffers())))


def _weight_of(weight: Tensor) -> tuple[int, int]:
    place = weight.data_ptr() if type(weight.data) is Tensor else id(weight)
    return place, 0 if weight.is_inference() else weight._version


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

_running: dict[int, Worker] = {}
"""Every worker that has not been ended, by its id."""
_idle: deque[Worker] = deque()
"""Those that are lent to nobody. Only single operations of a deque are used, which are atomic: the
collector may give a worker back at any moment, in any thread."""


class Lending:
    """One answer's use of a worker. It is given back once, by :meth:`close` or, where nobody closes
    it, when nobody refers to this object any more; from then on nothing reaches the worker."""

    def __init__(
        self, worker: Worker, give_back: Callable[[Worker, float], None] | None = None
    ) -> None:
        self._worker = worker
        self._give_back = take_back if give_back is None else give_back
        self._unclosed = weakref.finalize(self, self._give_back, worker, 0.0)
        self._unclosed.atexit = False  # The end of the interpreter ends all workers at once.

    @property
    def worker(self) -> Worker:
        """Raises DraftError once it was given back."""
        if not self._unclosed.alive:
            raise DraftError("the draft process was given back")
        return self._worker

    def close(self) -> None:
        """Gives the worker back, idle; a second time nothing happens."""
        if self._unclosed.detach() is not None:
            self._give_back(self._worker, STOP_SECONDS)


def lend(backbone: Backbone) -> Lending:
    """Lends an idle worker, one that knows the model if there is one, or a new process."""
    found: list[Worker] = []
    with suppress(IndexError):
        while True:
            found.append(_idle.pop())
    for worker in [worker for worker in found if worker.process.poll() is not None]:
        found.remove(worker)
        worker.end()
    if not found:
        return Lending(Worker())
    best = max(found, key=lambda worker: worker.knows(backbone))
    found.remove(best)
    _idle.extend(found)
    return Lending(best)


def take_back(worker: Worker, patience: float) -> None:
    """Puts a worker among the idle ones; one that has died or does not stop is ended."""
    try:
        worker.stop(patience)
    except Exception:
        worker.end()
    else:
        _idle.append(worker)


def prepare() -> None:
    """Starts a process ahead of need: it takes seconds, beside which models can load."""
    if not _idle:
        _idle.append(Worker())


def _dismiss() -> None:
    """Ends every idle worker."""
    with suppress(IndexError):
        while True:
            _idle.pop().end()


@atexit.register
def _end_all() -> None:
    """Ends every worker, also one whose answer was left half way."""
    _idle.clear()
    for worker in list(_running.values()):
        worker.end()


def _disown_all() -> None:
    """In a fork of this process: its parent's workers stay its parent's."""
    _idle.clear()
    for worker in list(_running.values()):
        worker.channel.close()
        worker.process.returncode = 0  # So that Popen does not wait for a stranger's child.
    _running.clear()


os.register_at_fork(after_in_child=_disown_all)
