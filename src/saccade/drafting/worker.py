"""A draft in a process of its own, working while the target works (PEARL, HIPPO).

The worker drafts one token at a time and looks at its mail before each, so that news of a refusal
stops it within a step. It sends ids; when sampling it writes its laws to shared memory, where
the one row a refusal needs is read. Its death or silence costs speed and nothing else.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.multiprocessing  # teaches connections to send tensors through shared memory
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import State, View
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree, add
from saccade.drafting.drafters import Team
from saccade.drafting.policies import Chain
from saccade.drafting.views import Pruned
from saccade.model.backbone import REMEMBERED, Backbone
from saccade.model.session import Session

log = logging.getLogger(__name__)

HEAD_START = 64  # tokens drafted at most before the target is ready
UP = 120.0  # seconds a worker may take to start
PATIENCE = 2.0  # seconds the target waits for a token of a draft that is at work
READY = 60.0  # seconds it waits for the draft's prefill; when sampling, for any token


class DraftError(RuntimeError):
    """The draft process failed, died or fell silent."""


# -- in the worker -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker is told once about the answers to come."""

    view: View
    rules: Sequence[Sampling]
    vocab: int
    banned: Sequence[int]
    room: int
    length: int  # gamma
    words: Sequence[Mapping[str, tuple[int, ...]]]
    laws: Float[Tensor, "request slot vocab"] | None  # shared memory; None: nothing is sampled


@dataclass
class Line:
    """One request's draft: what follows the committed text, and how far it may go."""

    limit: int
    chain: Tree = Tree()
    epoch: int = 0  # commits so far
    sent: int = 0  # tokens ever, for the slot of a law
    text: int = 0  # tokens of the answer so far, and
    began: int = 0  # when it last began anew: names the noise of what is drawn


class Desk:
    """The worker's side of the conversation: one method per message."""

    def __init__(self, backbone: Backbone, job: Job, tell: Callable[..., None]) -> None:
        self._backbone = backbone
        self._job = job
        self._tell = tell
        self._session = Session(
            backbone, job.rules, vocab=job.vocab, banned=job.banned, room=job.room
        )
        self._prompts: list[Prompt] = []
        self._held: list[Int[Tensor, " held"] | None] = []
        self._lines: dict[int, Line] = {}
        self._reading = 0.0  # seconds it took to read the prompts

    def look(self, prompts: Sequence[Prompt] | None, inputs: Inputs | None) -> None:
        """Reads the prompts, the target's or by its own eyes; starts to draft if the view may."""
        if inputs is not None:
            self._prompts = self._backbone.prompts(inputs)
        else:
            self._prompts = [self._backbone.adopt(prompt) for prompt in prompts or ()]
        view = self._job.view
        if not isinstance(view, Pruned) or view.early == "wait":
            return
        self._held = [view.start(prompt) for prompt in self._prompts]
        self._read(
            [
                prompt if held is None else prompt.select(held)
                for prompt, held in zip(self._prompts, self._held, strict=True)
            ]
        )
        if self._job.laws is None:  # what is sampled must not depend on how fast it was
            self._lines = {i: Line(HEAD_START) for i in range(len(self._prompts))}

    def guide(self, prefills: Sequence[Prefill]) -> None:
        """Cuts what was read to the view's choice, or reads only now."""
        view, seen = self._job.view, {}
        if not self._held:
            told = [
                replace(prefill, words=words)
                for prefill, words in zip(prefills, self._job.words, strict=True)
            ]
            pruned = [view(*shown) for shown in zip(told, self._prompts, strict=True)]
            self._read([self._backbone.written(prompt) for prompt in pruned])
            seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        for i, held in enumerate(self._held):
            assert isinstance(view, Pruned) and held is not None
            whole = self._prompts[i]
            kept = view.choose(prefills[i], whole, held)
            seen[i] = len(kept)
            if len(kept) < len(held):
                self._session.narrow(i, _within(whole, held, kept))
        for i in seen:
            self._lines.setdefault(i, Line(self._job.length))
        self._tell("ready", seen, self._reading)

    def _read(self, prompts: Sequence[Prompt]) -> None:
        began = time.perf_counter()
        self._session.prefill(prompts)
        self._reading = time.perf_counter() - began

    def limit(self, limits: Mapping[int, int]) -> None:
        """How long each chain may get from here."""
        for request, limit in limits.items():
            self._lines[request].limit = limit

    def commit(self, news: Mapping[int, tuple[Sequence[int], int | None]]) -> None:
        """(what was emitted, how many drafted tokens fly on; None: drop them all)."""
        for request, (tokens, flying) in news.items():
            line = self._lines[request]
            self._session.commit({request: tokens})
            line.chain = Tree() if flying is None else _tail(line.chain, len(tokens))
            line.limit = (flying or 0) + self._job.length
            line.epoch += 1
            line.text += len(tokens)
            if flying is None:
                line.began = line.text

    def end(self, request: int) -> None:
        """This request's answer is complete."""
        self._lines.pop(request, None)
        self._session.end(request)

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        """A further question; drafting starts again from its end."""
        self._session.turn(turns, rules)
        for request in turns:
            old = self._lines[request]
            self._lines[request] = Line(self._job.length, epoch=old.epoch + 1, sent=old.sent)

    def busy(self) -> bool:
        return any(len(line.chain) < line.limit for line in self._lines.values())

    def step(self) -> None:
        """One more token for every request that may have one."""
        wanted = {r: line for r, line in self._lines.items() if len(line.chain) < line.limit}
        scored = self._session.score({r: line.chain for r, line in wanted.items()})
        for request, line in wanted.items():
            tip = len(line.chain) - 1
            token, q = replace(scored[request], began=line.began).draw(tip)
            slot = None
            if q is not None and self._job.laws is not None:
                slot = line.sent % self._job.laws.shape[1]
                self._job.laws[request, slot] = q
            line.chain = add(line.chain, tip, token, None)
            line.sent += 1
            self._tell("token", request, line.epoch, token, slot)


def _tail(chain: Tree, count: int) -> Tree:
    tokens = chain.tokens[count:]
    return Tree(tokens, tuple(range(-1, len(tokens) - 1)), (None,) * len(tokens))


def _within(whole: Prompt, held: Tensor, kept: Tensor) -> Int[Tensor, " row"]:
    """Rows of the prompt cut to ``held`` that are text or in ``kept``."""
    stays = torch.zeros(whole.seen, dtype=torch.bool, device=held.device)
    stays[kept] = True
    rows = torch.ones(len(whole), dtype=torch.bool, device=held.device)
    rows[whole.visual] = stays
    there = torch.ones_like(rows)
    there[whole.visual] = torch.zeros_like(stays).index_fill(0, held, True)
    return rows[there].nonzero().squeeze(-1)


def work(connection: Connection) -> None:
    """The worker's life: mail first, then one step of drafting, until the line is closed."""
    desk: Desk | None = None

    number = 0

    def tell(*message: Any) -> None:
        connection.send((number, *message))

    key, path, threads = connection.recv()
    multiprocessing.current_process().authkey = key  # for tensors in shared memory
    sys.path[:] = path
    torch.set_num_threads(threads)
    models: dict[int, Backbone] = {}
    while True:
        try:
            while connection.poll(0 if desk is not None and desk.busy() else None):
                name, *content = connection.recv()
                if name == "model":
                    number, key, model, lean = content
                    _acquaint(model)
                    models[key] = Backbone(model, lean=lean)
                    tell("taught")
                elif name == "forget":
                    models.pop(content[0], None)
                elif name == "job":
                    number, key, job = content
                    desk = Desk(models[key], job, tell)
                elif name == "done":
                    desk = None
                elif desk is not None:
                    getattr(desk, name)(*content)
            if desk is not None and desk.busy():
                desk.step()
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            log.exception("drafting failed")
            tell("failed", f"{type(error).__name__}: {error}")
            desk = None


def _acquaint(model: Any) -> None:
    """Builds every class of model once, without weights: transformers notes what a model can record
    when one is made, and one that came by mail was never made here."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            with suppress(Exception), torch.device("meta"):
                type(part)(part.config)


def main(handle: int) -> None:
    """The process's entry: ``handle`` is the file descriptor of its line to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with suppress(EOFError, ConnectionError):
        work(Connection(handle))


# -- in the parent -----------------------------------------------------------------------------


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
                f"from saccade.drafting.worker import main; main({other.fileno()})",
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
                self.send("model", self._job, number, bare, backbone.lean is not None)
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


def hire(backbone: Backbone) -> Worker:
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


@dataclass
class Sight:
    """What the parent knows of one request's draft."""

    tokens: list[int] = field(default_factory=list)  # drafted after the committed text
    slots: list[int | None] = field(default_factory=list)
    batch: int | None = None  # how many of them fly next; None: as many as there are
    limit: int = HEAD_START  # how many there may be
    epoch: int = 0  # commits so far
    valid: int = 0  # tokens of earlier epochs follow a text that was not emitted


class WorkerDraft:
    """The parent's side: a Draft whose model works in a process of its own.

    Until the draft has read its prompt the target decodes plainly; it waits only when sampling,
    where neither the answer to a seed nor the rows of a forward may depend on who was faster.
    """

    def __init__(self, team: Team) -> None:
        assert isinstance(team.shape, Chain), "Recipe refuses other shapes"
        self._team = team
        self._length = team.shape.length
        self._model = team.drafting()
        self._vocab, self._banned = team.common()
        self._shares = self._model.sees_as(team.target)
        view = team.view
        self._early = isinstance(view, Pruned) and view.early != "wait"
        self._samples = any(rule.sample for rule in team.rules)
        self._laws = None
        if self._samples:
            slots = 4 * self._length + 8  # more than are ever out at once
            self._laws = torch.zeros(len(team.rules), slots, self._vocab).share_memory_()
        self._sights = {i: Sight() for i in range(len(team.rules))}
        self._owed: dict[int, tuple[list[int], int | None]] = {}
        self._since = time.monotonic()
        self._seen: dict[int, int] | None = None  # once the draft is ready
        self._worker: Worker | None = None
        # a seed means the same however busy the machine is, unless the draft has died
        self._patience = READY if self._samples else PATIENCE
        self._threads = torch.get_num_threads()

    def start(self) -> State:
        return None

    def fold(self, state: State, round: Round) -> State:
        return state

    def begin(self, inputs: Inputs) -> None:
        self._worker = hire(self._model)
        job = Job(
            view=self._team.view,
            rules=[_portable(rule) for rule in self._team.rules],
            vocab=self._vocab,
            banned=self._banned,
            room=self._team.room,
            length=self._length,
            words=self._team.words.say(self._team.view, inputs),
            laws=self._laws,
        )
        self._worker.hand(self._model, job)
        if not self._shares:
            self._share_threads()
            self._worker.send("look", None, dict(self._team.readable(inputs)))

    def look(self, prompts: Sequence[Prompt]) -> None:
        if self._shares:
            if self._early:
                self._share_threads()
            self._hired.send("look", list(prompts), None)

    def guide(self, prefills: Sequence[Prefill]) -> float:
        self._share_threads()
        self._since = time.monotonic()
        self._hired.send("guide", [_light(prefill) for prefill in prefills])
        return 0.0

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        """What is to fly: the first time all there is, then each batch once it is complete."""
        self._hear()
        if self._samples:
            self._wait(lambda: self._seen is not None, READY)
        if self._seen is not None:
            self._settle()
        sights = {request: self._sights[request] for request in stems}
        limits = {}
        for request, sight in sights.items():
            if sight.batch is None:  # when sampling, not as many as happen to be there
                sight.batch = self._length if self._samples else len(sight.tokens)
                sight.limit = limits[request] = sight.batch + self._length
        if limits:
            self._hired.send("limit", limits)
        if self._seen is not None:
            whole = [(sight, sight.batch or 0) for sight in sights.values()]
            self._wait(lambda: all(len(s.tokens) >= n for s, n in whole), self._patience)
        return {
            request: self._chain(request, min(sight.batch or 0, len(sight.tokens)))
            for request, sight in sights.items()
        }

    def ahead(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        """Waits for the token after each flight; not for a draft that is still reading."""
        for request, flight in flights.items():
            self._sights[request].limit = len(flight) + self._length
        self._hear()
        if self._seen is None:
            if time.monotonic() - self._since > READY:
                self._give_up(READY)
            return dict(flights)
        self._settle()
        wanted = {request: len(flight) + 1 for request, flight in flights.items()}
        self._wait(
            lambda: all(len(self._sights[r].tokens) >= n for r, n in wanted.items()), self._patience
        )
        return {request: self._chain(request, count) for request, count in wanted.items()}

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            sight, count = self._sights[request], len(new)
            before, flying = self._owed.get(request, ([], 0))
            if sight.tokens[:count] == list(new) and flying is not None:
                del sight.tokens[:count], sight.slots[:count]
                flying = sight.batch = max(0, sight.limit - count)
            else:
                sight.tokens, sight.slots = [], []
                flying, sight.batch = None, 0
                sight.valid = sight.epoch + 1
            sight.limit = sight.batch + self._length
            self._owed[request] = [*before, *new], flying
        self._hear()
        if self._seen is not None:  # a worker that still reads would not read this
            self._settle()

    def _settle(self) -> None:
        """Tells the worker what was emitted since it was told last."""
        owed, self._owed = self._owed, {}
        for request in owed:
            self._sights[request].epoch += 1
        if owed:
            self._hired.send("commit", owed)

    def end(self, request: int) -> None:
        self._settle()
        self._hired.send("end", request)

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._share_threads()
        self._settle()
        for request in turns:
            epoch = self._sights[request].epoch + 1
            self._sights[request] = Sight(limit=self._length, epoch=epoch, valid=epoch)
        self._hired.send("turn", turns, [_portable(rule) for rule in rules])

    def scores(self, request: int) -> Scores | None:
        return None

    def noted(self, request: int) -> tuple[float, ...]:
        return ()

    def visible(self, request: int) -> int | None:
        return None if self._seen is None else self._seen.get(request)

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        worker, self._worker = self._worker, None
        if worker is not None:
            release(worker)

    # -- the line ------------------------------------------------------------------------------

    @property
    def _hired(self) -> Worker:
        if self._worker is None:
            raise DraftError("the draft process was never started")
        return self._worker

    def _share_threads(self) -> None:
        """On a CPU the two processes share what threads there are."""
        if self._team.target.device.type == "cpu":
            torch.set_num_threads(max(1, self._threads - self._hired.threads))

    def _chain(self, request: int, count: int) -> Tree:
        sight, laws = self._sights[request], self._laws
        q = tuple(
            None if laws is None or slot is None else laws[request, slot]
            for slot in sight.slots[:count]
        )
        return Tree(tuple(sight.tokens[:count]), tuple(range(-1, count - 1)), q)

    def _hear(self, patience: float = 0.0) -> bool:
        """Takes in what has arrived, at least one message within ``patience``; whether one did."""
        heard = False
        while (message := self._hired.receive(0.0 if heard else patience)) is not None:
            heard = True
            name, *content = message
            if name == "failed":
                raise DraftError(content[0])
            if name == "ready":
                self._seen, reading = content
                # no step takes longer than a prefill
                self._patience = max(self._patience, 2 * reading)
            if name == "token":
                request, epoch, token, slot = content
                sight = self._sights[request]
                if epoch >= sight.valid:
                    sight.tokens.append(token)
                    sight.slots.append(slot)
        return heard

    def _wait(self, done: Callable[[], bool], patience: float) -> None:
        while not done():
            if not self._hear(patience):
                self._give_up(patience)

    def _give_up(self, patience: float) -> None:
        self._hired.kill()
        raise DraftError(f"the draft process was silent for {patience:g} s")


def _light(prefill: Prefill) -> Prefill:
    """What views read of a prefill, without the big tensors."""
    prompt = prefill.prompt
    bare = replace(prompt, embeds=torch.empty(len(prompt), 0), deepstack=())
    return replace(prefill, prompt=bare, cache=None, tip=torch.empty(0))


def _portable(rule: Sampling) -> Sampling:
    """The rule without what cannot be sent; a draft may follow any law."""
    kept = []
    for processor in rule.processors:
        try:
            pickle.dumps(processor)
        except Exception:
            log.info("%s stays with the target", type(processor).__name__)
        else:
            kept.append(processor)
    return replace(rule, processors=tuple(kept))
