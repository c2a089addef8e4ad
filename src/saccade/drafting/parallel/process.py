"""Starts draft processes, lends each to one answer at a time, and takes it back.

A draft process runs a draft model beside the target (the parallel schedule). One that dies or falls
silent costs speed and nothing else, because the answer then goes on by plain decoding.

``_running`` lists every process until it is ended, so that all can be ended with the interpreter.
An answer holds a :class:`Lending`, which ends once: when the answer is closed, or when nothing
refers to the lending any more.
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

from saccade.core.own_processes import count_as_own
from saccade.drafting.parallel.channel import Channel, ConnectionClosed
from saccade.drafting.parallel.child import Job
from saccade.model.backbone import BACKBONE_ATTRIBUTE, Backbone
from saccade.model.change_detection import version_of

START_SECONDS = 120.0  # that a worker may take to start, or to take a message or a model
STOP_SECONDS = 5.0  # that a worker may take to stop when its answer is closed

# Transformers gives a model this attribute once it has added hooks that record hidden states.
HOOKS_INSTALLED_ATTRIBUTE = "_output_capturing_hooks_installed"

WeightVersions = tuple[tuple[int, int], ...]
"""The address of each weight of a model, and how often it was changed in place."""


class DraftError(RuntimeError):
    """The draft process failed, died or fell silent."""


class Worker:
    """A running draft process, lent to one answer at a time; it keeps the models that it was sent.

    This object owns the process and the parent's end of the connection to it. :meth:`end` ends
    both.
    """

    def __init__(self) -> None:
        self._job_number = 0
        self._parent_pid = os.getpid()
        # Each model's number in the process, and its weights as they were sent. A model that is
        # freed here drops out by itself, and its number stays in ``_sent_models`` until the process
        # has been told.
        self._models: WeakKeyDictionary[Backbone, tuple[int, WeightVersions]] = WeakKeyDictionary()
        self._sent_models: set[int] = set()
        parent_end, child_end = socket.socketpair()
        self.channel = Channel(parent_end)
        try:
            with child_end:
                # multiprocessing.Process would run the caller's script again to import it.
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        "from saccade.drafting.parallel.child import main; "
                        f"main({child_end.fileno()}, {os.getpid()})",
                    ],
                    pass_fds=[child_end.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self.channel.close()
            raise
        count_as_own(self.process)
        _running[id(self)] = self
        try:
            self.send(sys.path)
        except BaseException:
            self.end()
            raise

    def has_model(self, backbone: Backbone) -> bool:
        """Returns whether the process has this model already, perhaps with older weights."""
        return backbone in self._models

    def start_job(self, backbone: Backbone, job: Job) -> None:
        """Starts a job. Before that, sends the model if the process lacks it or its weights have
        changed. Messages about older jobs are ignored from now on."""
        self._job_number += 1
        self.send("begin", self._job_number, job.threads)
        # The process forgets models that were freed here since the last job.
        for freed in self._sent_models - {number for number, _ in self._models.values()}:
            self._sent_models.discard(freed)
            self.send("forget", freed)
        # The model is sent if the process does not have it, or if its weights were changed.
        versions = _weight_versions(backbone.model)
        # Number 0 stands for a model that the process does not have.
        number, sent_versions = self._models.get(backbone, (0, ()))
        if sent_versions != versions:
            number = number or max(self._sent_models, default=0) + 1
            model = copy(backbone.model)
            vars(model).pop(BACKBONE_ATTRIBUTE, None)  # The process makes a backbone of its own.
            with _without_local_hooks(model):
                is_fused = backbone.fused is not None
                self.send("model", number, model, is_fused, backbone.rounding)
            if self.receive(START_SECONDS) != ("model_ready",):
                raise DraftError("the draft process could not take the model")
            self._models[backbone] = number, versions
            self._sent_models.add(number)
        self.send("job", number, job)

    def send(self, *message: Any) -> None:
        """Sends a message. Raises DraftError where the process does not read it, and OSError where
        no descriptor or memory is left for its tensors."""
        try:
            self.channel.send(message, START_SECONDS)
        except ConnectionClosed as error:
            raise DraftError("the draft process has died") from error
        except TimeoutError as error:
            raise DraftError("the draft process takes no messages") from error

    def receive(self, patience: float) -> tuple[Any, ...] | None:
        """Returns the next message about this job; None if none comes within ``patience`` seconds.

        Messages that a process sent before it died are still received.
        """
        deadline = time.monotonic() + patience
        try:
            while True:
                seconds_left = max(0.0, deadline - time.monotonic())
                received = self.channel.receive(seconds_left)
                if received is None:
                    return None
                job_number, *message = received
                if job_number == self._job_number:
                    return tuple(message)
        except ConnectionClosed as error:
            raise DraftError("the draft process has died") from error

    def stop(self, patience: float) -> None:
        """Ends the current job, and waits up to ``patience`` seconds until the process is idle.

        With zero patience it does not wait; the process will be idle after its current step or
        piece of a prompt. Raises DraftError where the process has died or is still busy.
        """
        try:
            self.channel.send(("done",), patience)
        except ConnectionClosed as error:
            raise DraftError("the draft process has died") from error
        except TimeoutError as error:
            raise DraftError("the draft process does not stop") from error
        if not patience:
            return
        deadline = time.monotonic() + patience
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise DraftError("the draft process does not stop")
            if message == ("idle",):
                return

    def kill(self) -> None:
        """Kills the process; the messages that it has sent can still be received. In a fork of the
        parent this does nothing, because the worker is the parent's."""
        if os.getpid() == self._parent_pid:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """Ends the process and closes the connection; a second call does nothing."""
        _running.pop(id(self), None)
        self.kill()
        self.channel.close()


def _weight_versions(model: Any) -> WeightVersions:
    """Returns a value that changes when a weight is replaced, or is changed in place in a way that
    torch counts."""
    return tuple(map(_weight_version, (*model.parameters(), *model.buffers())))


def _weight_version(weight: Tensor) -> tuple[int, int]:
    # A weight of another class than torch's own, such as a quantised one, is known by its object.
    address = weight.data_ptr() if type(weight.data) is Tensor else id(weight)
    return address, version_of(weight) or 0


@contextmanager
def _without_local_hooks(model: Any) -> Iterator[None]:
    """For the length of a block, removes from a model the hooks that cannot be pickled.

    To record hidden states, transformers adds hooks that are defined inside another function, which
    pickle cannot send. It also sets the flag ``HOOKS_INSTALLED_ATTRIBUTE``. The flag is removed as
    well, so that transformers adds such hooks to the worker's copy of the model.
    """
    hooks_before: list[tuple[dict[Any, Any], dict[Any, Any], set[Any]]] = []
    flags: list[tuple[Any, Any]] = []
    for part in model.modules():
        if HOOKS_INSTALLED_ATTRIBUTE in part.__dict__:
            flags.append((part, part.__dict__.pop(HOOKS_INSTALLED_ATTRIBUTE)))
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            removed = {key for key, hook in hooks.items() if "<locals>" in _qualified_name(hook)}
            hooks_before.append((hooks, dict(hooks), removed))
            for key in removed:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before, removed in hooks_before:
            # Hooks are called in the order of the dict, so those that were removed above are put
            # back in their old places. Hooks that the block removed stay removed, and hooks that it
            # added come last.
            now = dict(hooks)
            hooks.clear()
            hooks.update(
                {key: hook for key, hook in before.items() if key in now or key in removed}
            )
            hooks.update(now)
        for part, flag in flags:
            part.__dict__[HOOKS_INSTALLED_ATTRIBUTE] = flag


def _qualified_name(hook: Any) -> str:
    """Returns the qualified name of a hook's class, with the hook's own where it is a function."""
    return type(hook).__qualname__ + str(getattr(hook, "__qualname__", ""))


_running: dict[int, Worker] = {}
"""Every worker that has not been ended, by its id."""
_idle: deque[Worker] = deque()
"""The workers that are not lent. Only single operations of a deque are used, which are atomic,
because the garbage collector may return a worker at any moment and in any thread."""


class Lending:
    """One answer's use of a worker.

    The worker is given back once: by :meth:`close`, or when nothing refers to this object any more.
    From then on nothing reaches the worker through it.
    """

    def __init__(
        self, worker: Worker, give_back: Callable[[Worker, float], None] | None = None
    ) -> None:
        """``give_back`` is called when the worker is given back, by default :func:`take_back`.

        It takes the worker, and the seconds that it may wait until the worker is idle.
        """
        self._worker = worker
        self._give_back = take_back if give_back is None else give_back
        patience = 0.0  # A finalizer does not wait until the worker is idle.
        self._finalizer = weakref.finalize(self, self._give_back, worker, patience)
        self._finalizer.atexit = False  # ``_end_all`` ends the worker when the interpreter ends.

    @property
    def worker(self) -> Worker:
        """The worker. Raises DraftError once it was given back."""
        if not self._finalizer.alive:
            raise DraftError("the draft process was given back")
        return self._worker

    def close(self) -> None:
        """Gives the worker back once it is idle, or ends it; a second call does nothing."""
        if self._finalizer.detach() is not None:
            self._give_back(self._worker, STOP_SECONDS)


def lend(backbone: Backbone) -> Lending:
    """Lends an idle worker, if possible one that has the model already; else a new process."""
    idle: list[Worker] = []
    with suppress(IndexError):
        while True:
            idle.append(_idle.pop())
    workers: list[Worker] = []
    for worker in idle:
        if worker.process.poll() is None:
            workers.append(worker)
        else:
            worker.end()
    if not workers:
        return Lending(Worker())
    best = max(workers, key=lambda worker: worker.has_model(backbone))
    workers.remove(best)
    _idle.extend(workers)
    return Lending(best)


def take_back(worker: Worker, patience: float) -> None:
    """Puts a worker among the idle ones. One that has died or does not stop is ended."""
    try:
        worker.stop(patience)
    except Exception:
        worker.end()
    else:
        _idle.append(worker)


def prepare() -> None:
    """Starts a draft process if none is idle, so that it starts up while the models load."""
    if not _idle:
        _idle.append(Worker())


def _dismiss() -> None:
    """Ends every idle worker."""
    with suppress(IndexError):
        while True:
            _idle.pop().end()


@atexit.register
def _end_all() -> None:
    """Ends every worker, whether its answer is complete or not."""
    _idle.clear()
    for worker in list(_running.values()):
        worker.end()


def _disown_all() -> None:
    """Forgets all workers in a fork of this process, because they are the parent's."""
    _idle.clear()
    for worker in list(_running.values()):
        worker.channel.close()
        worker.process.returncode = 0  # So that Popen does not wait for the parent's child.
    _running.clear()


os.register_at_fork(after_in_child=_disown_all)
