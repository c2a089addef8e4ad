"""The draft's process: it drafts one token at a time and looks at its mail before each, so that a
refusal stops it within a step. It sends ids; when sampling it writes its laws to shared memory,
where the one row a refusal needs is read.

**A drawn token is published before anything is computed from it**: its law is written and its id is
sent at once. So whatever a drawn token brings about in this process (an error, NaN, a crash, a step
without end, no memory), the parent has that token, and it is judged like any other.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import View
from saccade.core.sampling import Sampling, Scores
from saccade.core.timing import now
from saccade.core.tree import Tree, add, after
from saccade.drafting.parallel.channel import Channel, SharedTensor
from saccade.drafting.shapes.policies import Chain
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.session import Session

log = logging.getLogger(__name__)

HEAD_START = 64  # tokens drafted at most before the target is ready
PARENT_CHECK_SECONDS = 1.0  # between two looks whether the parent is still there


Laws = SharedTensor | None
"""What tokens were drawn from, by (request, slot, vocab); None: nothing is sampled."""


class Abandoned(Exception):
    """The job under way was ended while its prompt was read."""


@dataclass(frozen=True)
class Job:
    """What a worker is told once about the answers to come."""

    view: View
    rules: Sequence[Sampling]
    vocab: int
    banned: Sequence[int]
    room: int
    shape: Chain
    laws: Laws
    threads: int = 1  # of the CPU, for the draft's process


@dataclass
class Line:
    """One request's draft: what follows the committed text, and how far it may go."""

    limit: int
    chain: Tree = Tree()
    epoch: int = 0  # commits so far
    sent: int = 0  # tokens ever, for the slot of a law
    text: int = 0  # tokens of the answer so far, and
    began: int = 0  # when it last began anew: names the noise of what is drawn
    paused: bool = False  # the shape stops here, until the target has judged

    @property
    def open(self) -> bool:
        """Whether its draft may grow."""
        return len(self.chain) < self.limit and not self.paused


class Child:
    """The worker's side of the conversation: one method per message."""

    def __init__(
        self,
        backbone: Backbone,
        job: Job,
        tell: Callable[..., None],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backbone = backbone
        self._job = job
        self._tell = tell
        self._is_abandoned = is_abandoned
        self._session = Session(
            backbone, job.rules, vocab=job.vocab, banned=job.banned, room=job.room
        )
        self._prompts: list[Prompt] = []
        self._held: list[Int[Tensor, " held"]] = []  # visual tokens read before the target was
        self._lines: dict[int, Line] = {}
        self._reading = self._drafting = 0.0  # seconds so far

    def prefill(self, prompts: Sequence[Prompt] | None, inputs: Inputs | None) -> None:
        """Reads the prompts, the target's or by its own eyes; starts to draft if the view may."""
        if inputs is not None:
            self._prompts = self._backbone.prompts(inputs, coarse=self._job.view.coarse)
        else:
            self._prompts = [self._backbone.adopt(prompt) for prompt in prompts or ()]
        view = self._job.view
        if view.early == "wait":
            return
        for prompt in self._prompts:
            held = view.start(prompt)
            assert held is not None, "a view that waits has returned above"
            self._held.append(held)
        self._read([p.select(held) for p, held in zip(self._prompts, self._held, strict=True)])
        if self._job.laws is None:  # what is sampled must not depend on how fast it was
            self._lines = {i: Line(HEAD_START) for i in range(len(self._prompts))}

    def ready(self, prefills: Sequence[Prefill]) -> None:
        """Cuts what was read to the view's choice, or reads only now."""
        began, before = now(), self._reading
        prefills = [prefill.to(self._backbone.device) for prefill in prefills]
        view, seen = self._job.view, {}
        if not self._held:
            pruned = [view(*shown) for shown in zip(prefills, self._prompts, strict=True)]
            self._read([self._backbone.written(prompt) for prompt in pruned])
            seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        for i, held in enumerate(self._held):
            whole = self._prompts[i]
            kept = view.choose(prefills[i], whole, held)
            seen[i] = len(kept)
            if len(kept) < len(held):
                stays = torch.isin(whole.select(held).index, whole.select(kept).index)
                self._session.narrow(i, stays.nonzero().squeeze(-1))
        for i in seen:
            self._lines.setdefault(i, Line(self._job.shape.length))
        self._reading = before + now() - began
        self._tell("ready", seen, self._reading)

    def _read(self, prompts: Sequence[Prompt]) -> None:
        """Reads prompts a piece at a time. Raises Abandoned after one where nobody wants them."""
        began = now()
        for number, prompt in enumerate(prompts):
            for _ in self._session.reading(number, prompt, place=number):
                if self._is_abandoned():
                    raise Abandoned
        self._reading += now() - began

    def limit(self, limits: Mapping[int, int]) -> None:
        """How long each chain may get from here."""
        for request, limit in limits.items():
            self._lines[request].limit = limit

    def commit(self, news: Mapping[int, tuple[Sequence[int], int | None]]) -> None:
        """(what was emitted, how many drafted tokens stay in flight; None: drop them all)."""
        for request, (tokens, kept) in news.items():
            line = self._lines[request]
            self._session.commit({request: tokens})
            line.chain = Tree() if kept is None else after(line.chain, len(tokens))
            line.limit = (kept or 0) + self._job.shape.length
            line.epoch += 1
            line.text += len(tokens)
            if kept is None:
                line.began = line.text
            line.paused = line.paused and len(line.chain) > 0

    def end(self, request: int) -> None:
        """This request's answer is complete."""
        self._lines.pop(request, None)
        self._session.end(request)

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling], laws: Laws) -> None:
        """A further question; drafting starts again from its end."""
        self._job = replace(self._job, rules=rules, laws=laws)
        self._session.turn(turns, rules)
        for request in turns:
            old = self._lines[request]
            self._lines[request] = Line(self._job.shape.length, epoch=old.epoch + 1, sent=old.sent)

    def busy(self) -> bool:
        return any(line.open for line in self._lines.values())

    def step(self) -> None:
        """One more token for every request that may have one, where the shape goes on."""
        wanted = {request: line for request, line in self._lines.items() if line.open}
        began = now()
        scored = self._session.score({r: line.chain for r, line in wanted.items()})
        self._drafting += now() - began
        for request, line in wanted.items():
            scores = replace(scored[request], began=line.began)
            longer = self._longer(request, line, scores)
            if longer is None:
                line.paused = True
                self._tell("paused", request, line.epoch)
                continue
            self._publish(request, line, longer)
            line.chain = longer
            line.sent += 1

    def _longer(self, request: int, line: Line, scores: Scores) -> Tree | None:
        """The chain with one more token; None where the shape stops. Where the shape fails after it
        has drawn one, that is published all the same."""
        try:
            return self._job.shape.longer(line.chain, scores)
        except Exception:
            for parent, token, law in scores.drawn:
                self._publish(request, line, add(line.chain, parent, token, law))
            raise

    def _publish(self, request: int, line: Line, longer: Tree) -> None:
        """Hands the last token over, with the law it was drawn from."""
        q, slot = longer.q[-1], None
        if q is not None and self._job.laws is not None:
            slot = line.sent % self._job.laws.shape[1]
            self._job.laws.tensor[request, slot] = q
        self._tell("token", request, line.epoch, longer.tokens[-1], slot, self._drafting)


def work(channel: Channel) -> None:
    """The worker's life: mail first, then one step of drafting, until the line is closed."""
    (sys.path[:],) = channel.receive()
    Desk(channel).work()


class Desk:
    """What a worker has before it: its mail, the models it knows and the job under way."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._mail: deque[tuple[Any, ...]] = deque()
        self._models: dict[int, Backbone] = {}
        self._child: Child | None = None
        self._number = 0  # of the job, with which all that is said of it is marked

    def work(self) -> None:
        """Raises ConnectionError once the parent has closed the line."""
        while True:
            try:
                while self._mail or self._fetch():
                    self._act(*self._mail.popleft())
                if self._child is not None and self._child.busy():
                    self._child.step()
                    capture_new_sizes()
            except ConnectionError:
                raise
            except Abandoned:
                self._child = None
            except Exception as error:
                log.exception("drafting failed")
                self._child = None
                self._tell("failed", f"{type(error).__name__}: {error}")

    def _fetch(self) -> bool:
        """Takes in the mail there is, and waits for some where there is nothing to do."""
        is_busy = self._child is not None and self._child.busy()
        message = self._channel.receive(0.0 if is_busy else None)
        if message is not None:
            self._mail.append(message)
        return message is not None

    def _is_abandoned(self) -> bool:
        """Whether the mail ends the job under way."""
        while (message := self._channel.receive(0.0)) is not None:
            self._mail.append(message)
        return any(name in ("done", "begin") for name, *_ in self._mail)

    def _tell(self, *message: Any) -> None:
        self._channel.send((self._number, *message))

    def _act(self, name: str, *content: Any) -> None:
        own: dict[str, Callable[..., None]] = {
            "begin": self._begin,
            "model": self._learn,
            "forget": self._forget,
            "job": self._start,
            "done": self._stop,
        }
        if name in own:
            own[name](*content)
        elif self._child is not None:
            getattr(self._child, name)(*content)

    def _begin(self, number: int, threads: int) -> None:
        self._number, self._child = number, None
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _learn(self, key: int, model: Any, fused: bool) -> None:
        _acquaint(model)
        self._models[key] = Backbone(model, fused=fused)
        self._tell("taught")

    def _forget(self, key: int) -> None:
        self._models.pop(key, None)

    def _start(self, key: int, job: Job) -> None:
        self._child = Child(self._models[key], job, self._tell, self._is_abandoned)

    def _stop(self) -> None:
        self._child = None
        self._tell("idle")


def _acquaint(model: Any) -> None:
    """Builds every class of model once, without weights: transformers notes what a model can record
    when one is made, and one that came by mail was never made here."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            with suppress(Exception), torch.device("meta"):
                type(part)(part.config)


def main(handle: int, parent: int) -> None:
    """The process's entry: ``handle`` is the file descriptor of its line to the parent, which is
    the process of that id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with suppress(ConnectionError):
        work(Channel(socket.socket(fileno=handle)))


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, whatever it is at, and although a fork of the parent
    may have kept the other end of the line open."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(0)
