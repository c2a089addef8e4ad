"""The draft's process: it drafts one token at a time and looks at its mail before each, so that a
refusal stops it within a step. It sends ids; when sampling it writes its laws to shared memory,
where the one row a refusal needs is read.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # teaches connections to send tensors through shared memory
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import View
from saccade.core.sampling import Sampling
from saccade.core.timing import now
from saccade.core.tree import Tree, after
from saccade.drafting.shapes.policies import Chain
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.session import Session

log = logging.getLogger(__name__)

HEAD_START = 64  # tokens drafted at most before the target is ready


Laws = Float[Tensor, "request slot vocab"] | None
"""What tokens were drawn from, in shared memory; None: nothing is sampled."""


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

    def __init__(self, backbone: Backbone, job: Job, tell: Callable[..., None]) -> None:
        self._backbone = backbone
        self._job = job
        self._tell = tell
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
        began = now()
        self._session.prefill(prompts)
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
            longer = self._job.shape.longer(line.chain, scores)
            if longer is None:
                line.paused = True
                self._tell("paused", request, line.epoch)
                continue
            q, slot = longer.q[-1], None
            if q is not None and self._job.laws is not None:
                slot = line.sent % self._job.laws.shape[1]
                self._job.laws[request, slot] = q
            line.chain = longer
            line.sent += 1
            self._tell("token", request, line.epoch, longer.tokens[-1], slot, self._drafting)


def work(connection: Connection) -> None:
    """The worker's life: mail first, then one step of drafting, until the line is closed."""
    child: Child | None = None

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
            while connection.poll(0 if child is not None and child.busy() else None):
                name, *content = connection.recv()
                if name == "model":
                    number, key, model, fused = content
                    _acquaint(model)
                    models[key] = Backbone(model, fused=fused)
                    tell("taught")
                elif name == "forget":
                    models.pop(content[0], None)
                elif name == "job":
                    number, key, job = content
                    child = Child(models[key], job, tell)
                elif name == "done":
                    child = None
                elif child is not None:
                    getattr(child, name)(*content)
            if child is not None and child.busy():
                child.step()
                capture_new_sizes()
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            log.exception("drafting failed")
            tell("failed", f"{type(error).__name__}: {error}")
            child = None


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
