"""The code of the draft's process, which drafts while its parent, the caller's process, runs the
target. ``worker_drafter`` is the parent's side.

It drafts one token at a time and reads its messages before each, so that a rejection stops it
within one step. It sends the tokens' ids. When sampling it also writes the laws that they were
drawn from to shared memory, where the parent reads the one row that a rejection needs.

**A drawn token is published before anything is computed from it**: its law is written and its id is
sent at once. So whatever happens in this process after the draw (an error, NaN, a crash, a step
without end, no memory), the parent has the token, and it is judged like any other.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from saccade.core.capabilities import Capability
from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import EarlyChoice, EarlyView, View
from saccade.core.sampling import Sampling, Scores
from saccade.core.timing import now
from saccade.core.tree import Tree, add, chain_without_first
from saccade.drafting.parallel.channel import Channel, SharedTensor
from saccade.drafting.shapes.policies import Chain
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes, has_new_sizes
from saccade.model.kernels.few_bits import Rounding
from saccade.model.session import Session

log = logging.getLogger(__name__)

HEAD_START_TOKENS = 64  # A draft has at most this many tokens before the target is ready.
PARENT_CHECK_SECONDS = 1.0  # between two checks that the parent process is still running


Laws = SharedTensor | None
"""The laws that tokens were drawn from, [request, slot, vocab]; None where nothing is sampled."""


class Abandoned(Exception):
    """The job was ended while its prompt was read."""


@dataclass(frozen=True)
class Job:
    """What a worker needs to know about the answers to one call's requests."""

    view: View
    rules: Sequence[Sampling]  # by request
    vocab: int  # Only ids below this may be drafted.
    banned: Sequence[int]  # ids that may not be drafted
    room: int  # how many tokens an answer may have
    shape: Chain
    laws: Laws
    threads: int = 1  # of the CPU, for the draft's process


@dataclass
class Draft:
    """One request's draft: the tokens after the committed text, and how many there may be."""

    limit: int  # the chain may have this many tokens
    chain: Tree = Tree()
    # The number of commits and turns so far. It is sent with every token, so that the parent can
    # ignore tokens that were drafted after a text that is no longer the committed one.
    epoch: int = 0
    sent: int = 0  # the number of tokens sent so far, which decides the slot of the next one's law
    answer_tokens: int = 0  # the number of committed tokens of this answer
    # ``answer_tokens`` when this draft began. The noise of its draws depends on it, so they are
    # independent of an earlier draft's draws at the same positions.
    start: int = 0
    # Whether no token may follow the chain's last one: the shape has stopped there, or the answer
    # would be complete. The draft goes on once that token is committed or the chain is dropped.
    paused: bool = False

    @property
    def may_grow(self) -> bool:
        """Whether the draft may grow."""
        return len(self.chain) < self.limit and not self.paused


class JobRunner:
    """Carries out one job in the draft's process. A message of the parent about the job is the name
    of one of these methods, followed by its arguments."""

    def __init__(
        self,
        backbone: Backbone,
        job: Job,
        send: Callable[..., None],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backbone = backbone
        self._job = job
        self._send = send
        self._is_abandoned = is_abandoned
        self._session = Session(
            backbone, job.rules, vocab=job.vocab, banned=job.banned, room=job.room
        )
        self._prompts: list[Prompt] = []
        # What the draft read of each request before the target's prefill ended. Empty where the
        # view has to wait for the prefill.
        self._early: list[EarlyChoice] = []
        self._drafts: dict[int, Draft] = {}
        self._reading = self._choosing = self._drafting = 0.0  # seconds so far

    def prefill(self, prompts: Sequence[Prompt] | None, inputs: Inputs | None) -> None:
        """Makes the draft's prompts, from ``inputs`` or else from the target's ``prompts``.

        If the view can choose before the target's prefill has ended, the draft reads that choice
        now. A greedy draft then begins to grow.
        """
        if inputs is not None:
            self._prompts = self._backbone.prompts(
                inputs,
                # Some views read visual rows that were averaged in blocks before the projector.
                with_averaged_rows=Capability.AVERAGES_BEFORE_PROJECTOR in self._job.view.needs,
            )
        else:
            self._prompts = [self._backbone.adopt(prompt) for prompt in prompts or ()]
        view = self._job.view
        # Only views that need a draft beside the target can choose early. They are ``EarlyView``s.
        if Capability.BESIDE_TARGET not in view.needs:
            return
        early_view = cast(EarlyView, view)
        with self._timing_choice():
            self._early = [early_view.choose_early(prompt) for prompt in self._prompts]
        pairs = zip(self._prompts, self._early, strict=True)
        self._read([prompt.select(early.tokens) for prompt, early in pairs])
        # A sampled draft starts in ``ready``, which may drop rows of the prompt and so change the
        # laws. If the draft started here, this process's speed would decide how many tokens are
        # drawn from the laws before the change, and the same seed could give another answer.
        if self._job.laws is None:
            self._drafts = {i: Draft(HEAD_START_TOKENS) for i in range(len(self._prompts))}

    def ready(self, prefills: Sequence[Prefill]) -> None:
        """Takes the results of the target's prefill, and makes the view's choice by them.

        If a choice was read early, the tokens that the view does not keep are dropped from the
        cache. Otherwise the view's choice is read now.
        """
        prefills = [prefill.to(self._backbone.device) for prefill in prefills]
        view = self._job.view
        visual_tokens: dict[int, int] = {}
        if not self._early:
            pairs = zip(prefills, self._prompts, strict=True)
            with self._timing_choice():
                pruned = [view(prefill, prompt) for prefill, prompt in pairs]
            self._read([self._backbone.embed_missing_rows(prompt) for prompt in pruned])
            visual_tokens = {i: prompt.visual_tokens for i, prompt in enumerate(pruned)}
        for i, early in enumerate(self._early):
            full_prompt = self._prompts[i]
            with self._timing_choice():
                chosen = cast(EarlyView, view).choose(prefills[i], full_prompt, early)
            visual_tokens[i] = len(chosen)
            if len(chosen) < len(early.tokens):
                # The places in the whole prompt of the rows that were read, and of those to keep.
                read_places = full_prompt.select(early.tokens).places
                kept_places = full_prompt.select(chosen).places
                is_kept = torch.isin(read_places, kept_places)
                self._session.keep_prompt_rows(i, is_kept.nonzero().squeeze(-1))
        for i in visual_tokens:
            self._drafts.setdefault(i, Draft(self._job.shape.length))
        self._send("ready", visual_tokens, self._reading, self._choosing)

    @contextmanager
    def _timing_choice(self) -> Iterator[None]:
        """Counts the seconds of the block as the view's."""
        start = now()
        yield
        self._choosing += now() - start

    def _read(self, prompts: Sequence[Prompt]) -> None:
        """Reads prompts piece by piece. Raises Abandoned after a piece if the job was ended."""
        start = now()
        for number, prompt in enumerate(prompts):
            # ``noise_number`` is the request's number in the call, which selects its noise.
            for _ in self._session.prefill_in_chunks(number, prompt, noise_number=number):
                if self._is_abandoned():
                    raise Abandoned
        self._reading += now() - start

    def limit(self, limits: Mapping[int, int]) -> None:
        """Sets how long each chain may get."""
        for request, limit in limits.items():
            self._drafts[request].limit = limit

    def commit(self, commits: Mapping[int, tuple[Sequence[int], int | None]]) -> None:
        """Commits each request's emitted tokens.

        ``commits`` has, for each request, these tokens and the length of the next proposal, or
        None. A length means that the draft's chain begins with the emitted tokens. Then the rest of
        the chain is kept, and the target judges its first tokens next, as many as that length. Some
        of these may still have to be drafted. Before the first proposal the length is 0. None means
        that the chain does not begin with the emitted tokens, and all of it is dropped.
        """
        for request, (tokens, next_proposal_length) in commits.items():
            draft = self._drafts[request]
            self._session.commit({request: tokens})
            draft.chain = (
                Tree()
                if next_proposal_length is None
                else chain_without_first(draft.chain, len(tokens))
            )
            # The chain may have the tokens that are judged next, and after them those of one more
            # proposal, which is drafted while these are judged.
            draft.limit = (next_proposal_length or 0) + self._job.shape.length
            draft.epoch += 1
            draft.answer_tokens += len(tokens)
            if next_proposal_length is None:
                draft.start = draft.answer_tokens
            # A paused draft stays so while its last token is in the chain. The first token of a
            # chain is always drawn, so an empty chain is not paused.
            draft.paused = draft.paused and len(draft.chain) > 0

    def end(self, request: int) -> None:
        """Frees a request whose answer is complete."""
        self._drafts.pop(request, None)
        self._session.end(request)

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling], laws: Laws) -> None:
        """Takes the next turns of conversations, and starts new drafts after them."""
        self._job = replace(self._job, rules=rules, laws=laws)
        self._session.start_turn(turns, rules)
        for request in turns:
            old = self._drafts[request]
            self._drafts[request] = Draft(
                self._job.shape.length, epoch=old.epoch + 1, sent=old.sent
            )

    def is_busy(self) -> bool:
        """Returns whether any draft may grow."""
        return any(draft.may_grow for draft in self._drafts.values())

    def step(self) -> None:
        """Drafts one more token for every request that may have one, if its shape goes on."""
        growing = {request: draft for request, draft in self._drafts.items() if draft.may_grow}
        start = now()
        scored = self._session.score({r: draft.chain for r, draft in growing.items()})
        self._drafting += now() - start
        for request, draft in growing.items():
            scores = replace(scored[request], draft_start=draft.start)
            longer = self._add_token(request, draft, scores)
            if longer is not None:
                self._publish(request, draft, longer)
                draft.chain = longer
                draft.sent += 1
            # ``may_go_on`` is false after an id that ends the answer, and where the accepted chain
            # and the target's own token would make the answer as long as it may be.
            if longer is None or not scores.may_go_on(longer, len(longer) - 1):
                draft.paused = True
                self._send("paused", request, draft.epoch)

    def _add_token(self, request: int, draft: Draft, scores: Scores) -> Tree | None:
        """Returns the chain with one more token; None where the shape stops.

        If the shape fails after it has drawn a token, that token is published before the error is
        raised.
        """
        try:
            return self._job.shape.add_token(draft.chain, scores)
        except Exception:
            for parent, token, law in scores.draws:
                self._publish(request, draft, add(draft.chain, parent, token, law))
            raise

    def _publish(self, request: int, draft: Draft, longer: Tree) -> None:
        """Sends the chain's last token, after writing the law that it was drawn from."""
        q = longer.q[-1]
        slot = None
        if q is not None and self._job.laws is not None:
            # The slots are used in turn, so the oldest law is overwritten.
            slot = draft.sent % self._job.laws.shape[1]
            self._job.laws.tensor[request, slot] = q
        self._send("token", request, draft.epoch, longer.tokens[-1], slot, self._drafting)


def work(channel: Channel) -> None:
    """Runs a worker until the parent closes the connection, which raises ConnectionError. The first
    message has the parent's ``sys.path``."""
    (sys.path[:],) = channel.receive()
    WorkerLoop(channel).work()


class WorkerLoop:
    """The loop of a worker, with its unread messages, its models and its job.

    A message from the parent is a name and arguments. It is about the worker itself (see
    :meth:`_handle`), or about the current job, which passes it to :class:`JobRunner`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[tuple[Any, ...]] = deque()  # received and not handled yet
        self._models: dict[int, Backbone] = {}
        self._runner: JobRunner | None = None  # of the current job
        self._job_number = 0  # of the current job; every message to the parent begins with it

    def work(self) -> None:
        """Handles messages first, then drafts one step, again and again. Raises ConnectionError
        once the parent has closed the connection."""
        while True:
            try:
                while self._messages or self._fetch():
                    self._handle(*self._messages.popleft())
                if self._runner is not None and self._runner.is_busy():
                    self._runner.step()
                    self._capture_new_sizes()
            except ConnectionError:
                raise
            except Abandoned:
                self._runner = None
            except Exception as error:
                log.exception("drafting failed")
                self._runner = None
                self._send("failed", f"{type(error).__name__}: {error}")

    def _capture_new_sizes(self) -> None:
        """Captures CUDA graphs of the new sizes of a step. The parent is told, so that it waits
        longer: kernels may be compiled, which takes seconds in a new process."""
        if has_new_sizes():
            self._send("capturing")
            capture_new_sizes()
            self._send("captured")

    def _fetch(self) -> bool:
        """Receives a message, and waits for one if there is nothing to draft. Returns whether one
        came."""
        is_busy = self._runner is not None and self._runner.is_busy()
        message = self._channel.receive(0.0 if is_busy else None)
        if message is not None:
            self._messages.append(message)
        return message is not None

    def _is_abandoned(self) -> bool:
        """Returns whether a message ends the current job."""
        while (message := self._channel.receive(0.0)) is not None:
            self._messages.append(message)
        return any(name in ("done", "begin") for name, *_ in self._messages)

    def _send(self, *message: Any) -> None:
        self._channel.send((self._job_number, *message))

    def _handle(self, name: str, *content: Any) -> None:
        """Handles one message. Messages about a job that has ended are ignored."""
        handlers: dict[str, Callable[..., None]] = {
            "begin": self._begin,
            "model": self._add_model,
            "forget": self._forget,
            "job": self._start,
            "done": self._stop,
        }
        if name in handlers:
            handlers[name](*content)
        elif self._runner is not None:
            getattr(self._runner, name)(*content)

    def _begin(self, number: int, threads: int) -> None:
        """Ends the current job, and takes the number and the threads of the next one."""
        self._job_number, self._runner = number, None
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _add_model(self, key: int, model: Any, fused: bool, rounding: Rounding | None) -> None:
        _prepare_classes(model)
        backbone = Backbone(model, fused=fused)
        self._models[key] = backbone if rounding is None else backbone.rounded(rounding)
        self._send("model_ready")

    def _forget(self, key: int) -> None:
        self._models.pop(key, None)

    def _start(self, key: int, job: Job) -> None:
        self._runner = JobRunner(self._models[key], job, self._send, self._is_abandoned)

    def _stop(self) -> None:
        self._runner = None
        self._send("idle")


def _prepare_classes(model: Any) -> None:
    """Constructs this model and the models in it once more, without weights.

    When a model is constructed, transformers notes which outputs its class can record, such as
    hidden states. Unpickling a model does not construct it.
    """
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            with suppress(Exception), torch.device("meta"):
                type(part)(part.config)


def main(handle: int, parent: int) -> None:
    """Runs the process. ``handle`` is the descriptor of its connection to the parent, and
    ``parent`` the parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    with suppress(ConnectionError):
        work(Channel(socket.socket(fileno=handle)))


def _exit_with_parent(parent: int) -> None:
    """Ends this process soon after its parent, whatever it is doing. A closed connection is not
    enough, because a fork of the parent may keep the other end open."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(0)
