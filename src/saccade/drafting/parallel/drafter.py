"""A drafter whose model works in a process of its own, while the target works (PEARL, HIPPO).

**Where the process fails, what it drew still stands.** Whether it fails may depend on what it drew
(NaN after one token, a crash, a step without end), so a drawn token that is dropped, and drawn
again by the target alone, would bend the target's law. The process publishes each token before it
computes anything from it (``child``). So when it fails it is ended first, then all that it
published is taken in and handed over with the error (``DraftFailed``), to be judged to its end.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from saccade.core.errors import DraftFailed
from saccade.core.prompt import Inputs, Prefill, Prompt, Texts, Turn
from saccade.core.protocols import Drafter, State
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add, after, chain
from saccade.drafting.captioning import Captioning
from saccade.drafting.parallel.channel import SharedTensor
from saccade.drafting.parallel.child import HEAD_START, Job, Laws
from saccade.drafting.parallel.process import DraftError, Lending, Worker, lend
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain

log = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds the target waits for a token of a draft that is at work
READY = 60.0  # seconds it waits for the draft's prefill; when sampling, for any token
SLOWEST = 1000.0  # prompt tokens a second that a draft reads at least, beyond those seconds


@dataclass
class Sight:
    """What the parent knows of one request's draft."""

    chain: Tree = Tree()  # drafted after the committed text
    batch: int | None = None  # how many of them are judged next; None: as many as there are
    limit: int = HEAD_START  # how many there may be
    epoch: int = 0  # commits so far
    valid: int = 0  # tokens of earlier epochs follow a text that was not emitted
    paused: bool = False  # the shape stops after the last of them

    def has(self, count: int) -> bool:
        """Whether this many are there, or no more will come before they are judged."""
        return self.paused or len(self.chain) >= count


class WorkerDrafter(Drafter):
    """The parent's side of the draft's process.

    Until the draft has read its prompt the target decodes plainly; it waits only when sampling,
    where neither the answer to a seed nor the rows of a forward may depend on who was faster.
    """

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.shape, Chain), "Recipe refuses other shapes"
        self._setup = setup
        self._shape = setup.shape
        self._length = setup.shape.length
        self._model = setup.draft_model()
        self._vocab, self._banned = setup.shared_vocabulary()
        self._shares = not setup.coarse and self._model.shares_rows_with(setup.target)
        self._early = setup.view.early != "wait"
        self._inputs: Inputs = {}
        self._captioning: Captioning | None = None
        self._sights = {i: Sight() for i in range(len(setup.rules))}
        self._owed: dict[int, tuple[list[int], int | None]] = {}
        self._since = time.monotonic()
        self._visual_tokens: dict[int, int] | None = None  # once the draft is ready
        self._lending: Lending | None = None
        self._failure: Exception | None = None  # why nothing more is drafted
        # On a CPU the two processes share what threads there are.
        self._threads = torch.get_num_threads()
        self._draft_threads = max(1, self._threads // 2)
        self._shares_threads = setup.target.device.type == "cpu"
        self._target_threads = max(1, self._threads - self._draft_threads)
        self._is_sharing_now = self._is_within_scope = False
        if self._shares_threads:
            setup.target.prepare(self._target_threads)
        self._reading = self._drafting = 0.0  # seconds in the draft's process
        self._bearable = READY
        self._patience = PATIENCE
        self._laws: Laws = None
        self._follow(setup.rules)

    def _follow(self, rules: Sequence[Sampling]) -> None:
        """Makes ready for what these rules need."""
        self._samples = any(rule.sample for rule in rules)
        if self._samples:
            # a seed means the same however busy the machine is, unless the draft has died
            self._patience = max(READY, self._patience)
        if self._samples and self._laws is None:
            slots = 4 * self._length + 8  # more than are ever out at once
            self._laws = SharedTensor((len(rules), slots, self._vocab))

    @contextmanager
    def sharing_threads(self) -> Iterator[None]:
        """From when the draft works on, the target has the threads that are left in this scope."""
        before = torch.get_num_threads()
        self._is_within_scope = True
        try:
            if self._is_sharing_now:
                torch.set_num_threads(self._target_threads)
            yield
        finally:
            self._is_within_scope = False
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def encode(self, inputs: Inputs) -> None:
        self._lending = lend(self._model)
        self._inputs = inputs
        job = Job(
            view=self._setup.view,
            rules=[_portable(rule) for rule in self._setup.rules],
            vocab=self._vocab,
            banned=self._banned,
            room=self._setup.room,
            shape=self._shape,
            laws=self._laws,
            threads=self._draft_threads,
        )
        self._worker.hand(self._model, job)
        if not self._shares:
            self._share_threads()
            self._worker.send("prefill", None, dict(self._setup.draft_inputs(inputs)))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if self._shares:
            if self._early:
                self._share_threads()
            self._worker.send("prefill", list(prompts), None)
        self._captioning = Captioning(self._setup, self._inputs)
        self._inputs = {}

    def ready(self, prefills: Sequence[Prefill]) -> float:
        assert self._captioning is not None, "prefill comes first"
        words = self._captioning.texts()
        self._share_threads()
        self._bearable = bearable([len(prefill.prompt) for prefill in prefills])
        self._since = time.monotonic()
        self._worker.send("ready", [*map(_light, prefills, words)])
        return 0.0

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        """What is judged next: the first time all there is, then each batch once it is complete."""
        self._hear()
        if self._samples:
            self._wait(lambda: self._visual_tokens is not None, self._bearable)
        if self._visual_tokens is not None:
            self._settle()
        sights = {request: self._sights[request] for request in states}
        limits = {}
        for request, sight in sights.items():
            if sight.batch is None:  # when sampling, not as many as happen to be there
                sight.batch = self._length if self._samples else len(sight.chain)
                sight.limit = limits[request] = sight.batch + self._length
        if limits:
            self._send("limit", limits)
        if self._visual_tokens is not None:
            whole = [(sight, sight.batch or 0) for sight in sights.values()]
            self._wait(lambda: all(sight.has(count) for sight, count in whole), self._patience)
        self._raise_if_failed()
        return {
            request: self._chain(request, sight.batch or 0) for request, sight in sights.items()
        }

    def extend(self, in_flight: Mapping[int, Tree]) -> dict[int, Tree]:
        """Waits for the token after each tree in flight; not for a draft that still reads."""
        for request, tree in in_flight.items():
            self._sights[request].limit = len(tree) + self._length
        self._hear()
        if self._visual_tokens is None:
            if self._failure is None and time.monotonic() - self._since > self._bearable:
                self._give_up(self._bearable)
            self._raise_if_failed()
            return dict(in_flight)
        self._settle()
        wanted = {request: len(tree) + 1 for request, tree in in_flight.items()}
        self._wait(
            lambda: all(self._sights[r].has(count) for r, count in wanted.items()), self._patience
        )
        self._raise_if_failed()
        return {request: self._chain(request, count) for request, count in wanted.items()}

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        if not self._samples:  # else what stands must not depend on how fast the draft was
            self._hear()
        for request, new in tokens.items():
            sight, count = self._sights[request], len(new)
            first = sight.batch is None  # the prefill's own token: nothing was in flight
            before, kept = self._owed.get(request, ([], 0))
            if sight.chain.tokens[:count] == tuple(new) and kept is not None:
                sight.chain = after(sight.chain, count)
                sight.paused = sight.paused and len(sight.chain) > 0  # as the child sees it
                kept = 0 if first else max(0, sight.limit - count)
            else:
                kept, sight.chain = None, Tree()
                sight.valid, sight.paused = sight.epoch + 1, False
            if not first:
                sight.batch = kept or 0
                sight.limit = sight.batch + self._length
            self._owed[request] = [*before, *new], kept
        self._hear()
        if self._visual_tokens is not None:  # a worker that still reads would not read this
            self._settle()
        self._raise_if_failed()

    def _settle(self) -> None:
        """Tells the worker what was emitted since it was told last."""
        owed, self._owed = self._owed, {}
        for request in owed:
            self._sights[request].epoch += 1
        if owed:
            self._send("commit", owed)

    def end(self, request: int) -> None:
        self._settle()
        self._send("end", request)
        self._raise_if_failed()

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._share_threads()
        self._settle()
        for request in turns:
            epoch = self._sights[request].epoch + 1
            self._sights[request] = Sight(limit=self._length, epoch=epoch, valid=epoch)
        self._raise_if_failed()
        self._follow(rules)
        self._send("turn", turns, [_portable(rule) for rule in rules], self._laws)

    def parallel_seconds(self) -> tuple[float, float]:
        return self._reading, self._drafting

    def captioning_seconds(self) -> tuple[float, float]:
        return (0.0, 0.0) if self._captioning is None else self._captioning.seconds

    def visual_tokens(self, request: int) -> int | None:
        return None if self._visual_tokens is None else self._visual_tokens.get(request)

    def close(self) -> None:
        self._is_sharing_now = False
        if self._is_within_scope:
            torch.set_num_threads(self._threads)
        self._laws = None
        if self._lending is not None:
            self._lending.close()

    # -- the line ------------------------------------------------------------------------------

    @property
    def _worker(self) -> Worker:
        if self._lending is None:
            raise DraftError("the draft process was never started")
        return self._lending.worker

    def _share_threads(self) -> None:
        self._is_sharing_now = self._shares_threads
        if self._is_sharing_now and self._is_within_scope:
            torch.set_num_threads(self._target_threads)

    def _chain(self, request: int, count: int) -> Tree:
        line = self._sights[request].chain
        return chain(line.tokens[:count], line.q[:count])

    def _send(self, *message: Any) -> None:
        """Sends a message to a process that has not failed."""
        if self._failure is None:
            try:
                self._worker.send(*message)
            except Exception as error:
                self._fail(error)

    def _hear(self, patience: float = 0.0) -> bool:
        """Takes in what has arrived, at least one message within ``patience``; whether one did."""
        heard = False
        try:
            while self._failure is None:
                message = self._worker.receive(0.0 if heard else patience)
                if message is None:
                    break
                heard = True
                self._take(message)
        except Exception as error:  # It has died, or it speaks nonsense.
            self._fail(error)
        return heard

    def _take(self, message: tuple[Any, ...]) -> None:
        """Takes in one message."""
        name, *content = message
        if name == "failed":  # The process itself is as good as before, and says no more of this.
            self._failure = DraftError(content[0])
        if name == "ready":
            self._visual_tokens, self._reading = content
            # no step takes longer than a prefill
            self._patience = max(self._patience, 2 * self._reading)
        if name == "token":
            request, epoch, token, slot, self._drafting = content
            sight = self._sights[request]
            if epoch >= sight.valid:
                laws = None if self._laws is None else self._laws.tensor
                law = None if slot is None or laws is None else laws[request, slot]
                sight.chain = add(sight.chain, len(sight.chain) - 1, token, law)
                sight.paused = False
        if name == "paused":
            request, epoch = content
            sight = self._sights[request]
            # of a token committed meanwhile it says nothing: the draft has gone on
            sight.paused = epoch >= sight.valid and len(sight.chain) > 0

    def _wait(self, is_done: Callable[[], bool], patience: float) -> None:
        """Until this holds, or the draft has failed, which it has where it says nothing so long."""
        while self._failure is None and not is_done():
            if not self._hear(patience) and self._failure is None:
                self._give_up(patience)

    def _give_up(self, patience: float) -> None:
        self._fail(DraftError(f"the draft process was silent for {patience:g} s"))

    def _fail(self, error: Exception) -> None:
        """Nothing more is drafted, and everything that was published is taken in."""
        self._failure = error
        with suppress(Exception):  # of what it says no more than tokens count by now
            self._worker.kill()
            while (message := self._worker.receive(0.0)) is not None:
                self._take(message)

    def _raise_if_failed(self) -> None:
        """Raises DraftFailed, with everything that has been drafted after the committed text."""
        if self._failure is not None:
            chains = {request: sight.chain for request, sight in self._sights.items()}
            raise DraftFailed(chains) from self._failure


def bearable(lengths: Sequence[int]) -> float:
    """Seconds that a draft may take to read prompts of so many tokens."""
    return READY + sum(lengths) / SLOWEST


def _light(prefill: Prefill, words: dict[str, Texts]) -> Prefill:
    """What views read of a prefill and of words for its video, without the big tensors."""
    prompt = prefill.prompt
    bare = replace(prompt, embeds=torch.empty(len(prompt), 0), deepstack=())
    return replace(prefill, prompt=bare, cache=None, logits=torch.empty(0), words=words)


def _portable(rule: Sampling) -> Sampling:
    """The rule without what cannot be sent; a draft may follow any law."""
    grammar = rule.grammar if _sendable(rule.grammar) else None
    return replace(rule, processors=tuple(filter(_sendable, rule.processors)), grammar=grammar)


def _sendable(part: object) -> bool:
    """Whether another process can read it; what a script defines itself, none can import."""
    try:
        sendable = b"__main__" not in pickle.dumps(part)
    except Exception:
        sendable = False
    if not sendable:
        log.info("%s stays with the target", type(part).__name__)
    return sendable
