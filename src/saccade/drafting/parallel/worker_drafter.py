"""A drafter whose model works in a process of its own, while the target works (PEARL, HIPPO).

Here is the side of the *parent*, the process with the target. ``child`` has the code of the draft's
process. The two exchange messages: the parent sends what was committed and how long each draft may
get, and the child sends every token that it drafts.

**Where the process fails, the tokens it drew still stand.** Its failure may depend on what it drew
(NaN after one token, a crash, a step without end). Dropping a drawn token, so that the target alone
draws in its place, would bend the target's law. The process publishes each token before it computes
anything from it. Where the process fails, the parent kills it first, then receives all tokens that
it published, and passes them on with the error (``DraftFailed``). The target verifies all of them.
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

from saccade.core.capabilities import Capability
from saccade.core.errors import DraftFailed
from saccade.core.prompt import Inputs, Prefill, Prompt, Texts, Turn
from saccade.core.protocols import (
    Drafter,
    DraftReport,
    DraftSeconds,
    EarlierTurns,
    ParallelWork,
    State,
)
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add, chain, chain_without_first
from saccade.drafting.captioning import Captioning
from saccade.drafting.parallel.channel import SharedTensor
from saccade.drafting.parallel.child import HEAD_START_TOKENS, Job, Laws
from saccade.drafting.parallel.process import DraftError, Lending, Worker, lend
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain

log = logging.getLogger(__name__)

# A greedy target waits at least this long for the next token before it gives the draft up. After a
# long prefill of the draft it waits longer.
TOKEN_PATIENCE_SECONDS = 2.0
# The target waits at least this long for the draft's prefill and for its CUDA graph captures. When
# sampling, it waits at least this long for any token.
READING_PATIENCE_SECONDS = 60.0
# For the draft's prefill the target waits READING_PATIENCE_SECONDS, and in addition as long as the
# prompts take to be read at this speed.
MIN_PREFILL_TOKENS_PER_SECOND = 1000.0


@dataclass
class DraftState:
    """The parent's record of one request's draft."""

    chain: Tree = Tree()  # the drafted tokens after the committed text
    next_proposal_length: int | None = (
        None  # tokens of the next proposal; None before the first proposal
    )
    # How many tokens the chain may have. Once there are proposals, these are the tokens of one
    # proposal and ``Chain.length`` more, which are drafted while the target verifies that proposal.
    limit: int = HEAD_START_TOKENS
    # How many commits and turns the draft was sent. Each of its tokens comes with the epoch in
    # which it was drafted.
    epoch: int = 0
    # The first epoch whose tokens follow the committed text. Tokens of earlier ones are ignored:
    # they follow a token that was rejected meanwhile, or an earlier turn.
    valid_from: int = 0
    paused: bool = False  # whether the shape has stopped after the chain's last token

    def can_propose(self, count: int) -> bool:
        """Returns whether a proposal of ``count`` tokens need not wait for the draft: the chain has
        that many, or it has fewer and the draft has stopped until the next verdict."""
        return self.paused or len(self.chain) >= count


class WorkerDrafter(Drafter, ParallelWork):
    """The parent's side of the draft's process.

    A greedy target decodes plainly until the draft has read its prompt. When sampling, the target
    waits for the draft instead, because neither the answer to a seed nor the rows of a forward may
    depend on the draft's speed.
    """

    name = "model"
    # The schedule has to run the draft beside the target, and the shape has to be a chain that can
    # be grown one token at a time.
    needs = frozenset({Capability.BESIDE_TARGET, Capability.GROWS_TOKEN_BY_TOKEN})
    offers = frozenset({Capability.READS_VIEW, Capability.OWN_PROCESS})

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.shape, Chain), "Recipe refuses other shapes"
        self._setup = setup
        self._shape = setup.shape
        self._length = setup.shape.length
        self._model = setup.draft_model()
        self._vocab, self._banned = setup.shared_vocabulary()
        # Whether the draft takes the target's visual rows, or else encodes its own inputs.
        self._shares_rows = not setup.needs_averaged_rows and self._model.shares_rows_with(
            setup.target
        )
        # Whether its view chooses tokens before the target's prefill has ended.
        self._starts_early = Capability.BESIDE_TARGET in setup.view.needs
        self._inputs: Inputs = {}
        self._captioning: Captioning | None = None
        self._drafts = {i: DraftState() for i in range(len(setup.rules))}
        # For each request, what the next "commit" message will tell the draft, as (tokens, count).
        # The tokens are those that were emitted since the last such message. The count says how
        # many drafted tokens after them are verified next. It is 0 before the first proposal, whose
        # length ``propose`` decides, and None if the draft has to start anew, because its chain did
        # not begin with the emitted tokens.
        self._unsent_commits: dict[int, tuple[list[int], int | None]] = {}
        self._ready_sent_at = time.monotonic()
        # By request, how many visual tokens the draft reads. None until it has read its prompts.
        self._visual_tokens: dict[int, int] | None = None
        self._lending: Lending | None = None
        self._failure: Exception | None = None  # If set, nothing more is drafted.
        # On a CPU the two processes share the caller's threads while the draft works.
        self._threads = torch.get_num_threads()
        self._draft_threads = max(1, self._threads // 2)
        self._shares_threads = setup.target.device.type == "cpu"
        self._target_threads = max(1, self._threads - self._draft_threads)
        self._is_sharing_now = False  # whether the draft works on some of the threads
        self._is_within_scope = False  # whether the caller is within ``sharing_threads``
        if self._shares_threads:
            # The target chooses its kernels for this number of threads now, so that no answer waits
            # for it.
            setup.target.prepare(self._target_threads)
        # The seconds that the draft's process has reported so far: of reading prompts, of its
        # view's choice of visual tokens, and of its steps.
        self._reading = self._choosing = self._drafting = 0.0
        self._reading_patience = READING_PATIENCE_SECONDS
        self._patience = TOKEN_PATIENCE_SECONDS
        self._is_draft_capturing = False
        self._laws: Laws = None
        self._use_rules(setup.rules)

    @property
    def parallel_work(self) -> ParallelWork:
        return self

    def _use_rules(self, rules: Sequence[Sampling]) -> None:
        """Prepares for these sampling rules."""
        self._samples = any(rule.sample for rule in rules)
        if self._samples:
            # A seed must give the same answer on a busy machine, so the target does not give up a
            # draft that is merely slow.
            self._patience = max(READING_PATIENCE_SECONDS, self._patience)
        if self._samples and self._laws is None:
            # A token's law stays in its slot until the token is verified. There are more slots than
            # tokens of a request that may be unverified at once.
            slots = 4 * self._length + 8
            self._laws = SharedTensor((len(rules), slots, self._vocab))

    @contextmanager
    def sharing_threads(self) -> Iterator[None]:
        """Returns a context in which the target has only the threads that a working draft leaves
        it."""
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
        """Starts the draft's job. A draft that takes the target's visual rows has to wait for
        ``prefill``; any other is sent its own inputs now."""
        self._lending = lend(self._model)
        self._inputs = inputs
        job = Job(
            view=self._setup.view,
            rules=[_sendable_rule(rule) for rule in self._setup.rules],
            vocab=self._vocab,
            banned=self._banned,
            room=self._setup.room,
            shape=self._shape,
            laws=self._laws,
            threads=self._draft_threads,
        )
        self._worker.start_job(self._model, job)
        if not self._shares_rows:
            self._begin_sharing_threads()
            prompts = None  # The draft's process makes them from the inputs.
            self._worker.send("prefill", prompts, dict(self._setup.draft_inputs(inputs)))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Sends the prompts to a draft that takes the target's visual rows. It begins to read them
        now if its view can choose before the target's prefill has ended."""
        if self._shares_rows:
            if self._starts_early:
                self._begin_sharing_threads()
            self._worker.send("prefill", list(prompts), None)
        self._captioning = Captioning(self._setup, self._inputs)
        self._inputs = {}

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        assert self._captioning is not None, "prefill comes first"
        texts = self._captioning.texts()
        self._begin_sharing_threads()
        self._reading_patience = reading_patience([len(prefill.prompt) for prefill in prefills])
        self._ready_sent_at = time.monotonic()
        self._worker.send("ready", [*map(_without_big_tensors, prefills, texts)])
        return 0.0  # The seconds that the target waited: none, as the draft reads beside it.

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        """Returns the drafts to verify next.

        The first proposal has all tokens that were drafted by now; when sampling, a fixed number.
        The number of tokens of later ones is set by ``commit``. The target waits for tokens that
        are missing, unless the shape has stopped before them. A greedy target does not wait while
        the draft still reads its prompt.
        """
        self._receive()
        if self._samples:
            self._wait(lambda: self._has_read_prompts, self._reading_patience)
        if self._has_read_prompts:
            self._send_commits()
        drafts = {request: self._drafts[request] for request in states}
        limits = {}
        for request, draft in drafts.items():
            if draft.next_proposal_length is None:
                # When sampling, the number must not depend on the draft's speed.
                draft.next_proposal_length = self._length if self._samples else len(draft.chain)
                draft.limit = limits[request] = draft.next_proposal_length + self._length
        if limits:
            self._send("limit", limits)
        if self._has_read_prompts:
            wanted_counts = [(draft, draft.next_proposal_length or 0) for draft in drafts.values()]
            self._wait(
                lambda: all(draft.can_propose(count) for draft, count in wanted_counts),
                self._patience,
            )
        self._raise_if_failed()
        return {
            request: self._chain(request, draft.next_proposal_length or 0)
            for request, draft in drafts.items()
        }

    def extend(self, in_flight: Mapping[int, Tree]) -> dict[int, Tree]:
        """Returns each tree in flight with the next drafted token, for which it waits.

        A tree is returned as it is if the shape has stopped after its last token. While the draft
        still reads its prompt, all trees are returned as they are.
        """
        # ``commit`` takes the length of the next proposal from this limit: the tokens in flight,
        # and after them those of one more proposal, less the committed ones. The draft is not sent
        # the limit itself. It gets that length with the commit, and computes its own limit from it.
        for request, tree in in_flight.items():
            self._drafts[request].limit = len(tree) + self._length
        self._receive()
        if not self._has_read_prompts:
            waited = time.monotonic() - self._ready_sent_at
            if self._failure is None and waited > self._reading_patience:
                self._give_up(self._reading_patience)
            self._raise_if_failed()
            return dict(in_flight)
        self._send_commits()
        counts = {request: len(tree) + 1 for request, tree in in_flight.items()}
        self._wait(
            lambda: all(self._drafts[r].can_propose(count) for r, count in counts.items()),
            self._patience,
        )
        self._raise_if_failed()
        return {request: self._chain(request, count) for request, count in counts.items()}

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        # Whether the draft may go on depends below on the tokens that have arrived. When sampling,
        # that must not depend on the draft's speed, so none are received before it is decided.
        if not self._samples:
            self._receive()
        for request, new in tokens.items():
            draft = self._drafts[request]
            count = len(new)
            # Before the first proposal nothing is in flight. What is committed then is the first
            # token of the answer, which the target alone has chosen.
            is_before_proposals = draft.next_proposal_length is None
            unsent, unsent_count = self._unsent_commits.get(request, ([], 0))
            # A commit that makes the draft start anew and is not sent yet stays in force.
            must_start_anew = unsent_count is None
            # If the chain begins with the emitted tokens, what is left of it follows the committed
            # text.
            draft_still_holds = draft.chain.tokens[:count] == tuple(new) and not must_start_anew
            next_proposal_length: int | None = None
            if draft_still_holds:
                draft.chain = chain_without_first(draft.chain, count)
                # A paused draft goes on once the whole chain is committed, because a shape never
                # stops before the first token of a chain.
                draft.paused = draft.paused and len(draft.chain) > 0
                # Before the first proposal its length is not known: ``propose`` decides it and
                # sends it as a limit. Until then 0 lets the draft grow to ``Chain.length`` tokens.
                # A later proposal asks for as many tokens as the chain may have after the committed
                # ones, whether they are drafted yet or not. If a chain may have 4 tokens and its
                # first one was committed, it asks for 3.
                next_proposal_length = 0 if is_before_proposals else max(0, draft.limit - count)
            else:
                draft.chain = Tree()
                # The draft starts anew when it is sent this commit, which begins the next epoch.
                draft.valid_from = draft.epoch + 1
                draft.paused = False
            if not is_before_proposals:
                draft.next_proposal_length = next_proposal_length or 0
                draft.limit = draft.next_proposal_length + self._length
            self._unsent_commits[request] = [*unsent, *new], next_proposal_length
        self._receive()
        if self._has_read_prompts:  # Until then commits wait.
            self._send_commits()
        self._raise_if_failed()

    def _send_commits(self) -> None:
        """Sends the worker the tokens that were emitted since the last call."""
        commits, self._unsent_commits = self._unsent_commits, {}
        for request in commits:
            self._drafts[request].epoch += 1
        if commits:
            self._send("commit", commits)

    def end(self, request: int) -> None:
        self._send_commits()
        self._send("end", request)
        self._raise_if_failed()

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._begin_sharing_threads()
        self._send_commits()
        for request in turns:
            epoch = self._drafts[request].epoch + 1
            self._drafts[request] = DraftState(limit=self._length, epoch=epoch, valid_from=epoch)
        self._raise_if_failed()
        self._use_rules(rules)
        self._send("start_turn", turns, [_sendable_rule(rule) for rule in rules], self._laws)

    def report(self) -> DraftReport:
        caption_seconds = hidden_seconds = 0.0
        if self._captioning is not None:
            # The second number is how many of the first passed beside other work.
            caption_seconds, hidden_seconds = self._captioning.seconds
        seconds = DraftSeconds(
            self._reading,
            self._choosing,
            self._drafting,
            caption=caption_seconds,
            caption_hidden=hidden_seconds,
        )
        return DraftReport(visual_tokens=self._visual_tokens or {}, seconds=seconds)

    def close(self) -> None:
        self._is_sharing_now = False
        if self._is_within_scope:
            torch.set_num_threads(self._threads)
        self._laws = None
        if self._lending is not None:
            self._lending.close()

    # -- messages to and from the draft's process ----------------------------------------------

    @property
    def _worker(self) -> Worker:
        if self._lending is None:
            raise DraftError("the draft process was never started")
        return self._lending.worker

    @property
    def _has_read_prompts(self) -> bool:
        """Whether the draft has read its prompts, which it reports by the message "ready"."""
        return self._visual_tokens is not None

    def _begin_sharing_threads(self) -> None:
        """Leaves the draft its part of the threads from now on, if the two share them at all."""
        self._is_sharing_now = self._shares_threads
        if self._is_sharing_now and self._is_within_scope:
            torch.set_num_threads(self._target_threads)

    def _chain(self, request: int, count: int) -> Tree:
        """Returns the first ``count`` tokens of a request's draft, or all if there are fewer."""
        drafted = self._drafts[request].chain
        return chain(drafted.tokens[:count], drafted.q[:count])

    def _send(self, *message: Any) -> None:
        """Sends a message, unless the draft has failed. An error of sending is such a failure."""
        if self._failure is None:
            try:
                self._worker.send(*message)
            except Exception as error:
                self._fail(error)

    def _receive(self, patience: float = 0.0) -> bool:
        """Handles the messages that have arrived, and waits up to ``patience`` seconds for one.
        Returns whether there was any."""
        received = False
        try:
            while self._failure is None:
                message = self._worker.receive(0.0 if received else patience)
                if message is None:
                    break
                received = True
                self._handle(message)
        except Exception as error:  # The process has died, or a message cannot be read.
            self._fail(error)
        return received

    def _handle(self, message: tuple[Any, ...]) -> None:
        """Handles one message."""
        name, *content = message
        if name == "failed":  # Only this job has failed, so the process is not killed.
            self._failure = DraftError(content[0])
        if name == "ready":
            self._visual_tokens, self._reading, self._choosing = content
            # No step of the draft takes longer than its prefill did. The target waits for a token
            # at least twice as long as that.
            self._patience = max(self._patience, 2 * self._reading)
        if name == "token":
            request, epoch, token, slot, self._drafting = content
            draft = self._drafts[request]
            if epoch >= draft.valid_from:
                laws = None if self._laws is None else self._laws.tensor
                law = None if slot is None or laws is None else laws[request, slot]
                draft.chain = add(draft.chain, len(draft.chain) - 1, token, law)
                draft.paused = False
        if name in ("capturing", "captured"):
            self._is_draft_capturing = name == "capturing"
        if name == "paused":
            request, epoch = content
            draft = self._drafts[request]
            # If the chain's last token was committed meanwhile, the draft is no longer paused.
            draft.paused = epoch >= draft.valid_from and len(draft.chain) > 0

    def _wait(self, is_done: Callable[[], bool], patience: float) -> None:
        """Waits until ``is_done`` holds or the draft has failed. A draft that sends nothing for
        ``patience`` seconds has failed; one that captures its steps may take longer."""
        while self._failure is None and not is_done():
            allowed_silence = patience
            if self._is_draft_capturing:
                allowed_silence = max(patience, READING_PATIENCE_SECONDS)
            if not self._receive(allowed_silence) and self._failure is None:
                self._give_up(allowed_silence)

    def _give_up(self, patience: float) -> None:
        self._fail(DraftError(f"the draft process was silent for {patience:g} s"))

    def _fail(self, error: Exception) -> None:
        """Stops drafting, ends the process, and receives everything that it published."""
        self._failure = error
        with suppress(Exception):  # ``error`` is reported. An error while ending adds nothing.
            self._worker.kill()
            while (message := self._worker.receive(0.0)) is not None:
                self._handle(message)

    def _raise_if_failed(self) -> None:
        """Raises DraftFailed, with everything that has been drafted after the committed text."""
        if self._failure is not None:
            chains = {request: draft.chain for request, draft in self._drafts.items()}
            raise DraftFailed(chains) from self._failure


def reading_patience(lengths: Sequence[int]) -> float:
    """Returns the seconds that a draft may take to read prompts of so many tokens."""
    return READING_PATIENCE_SECONDS + sum(lengths) / MIN_PREFILL_TOKENS_PER_SECOND


def _without_big_tensors(prefill: Prefill, texts: dict[str, Texts]) -> Prefill:
    """Returns a prefill with the texts that stand for its media, and without the large tensors
    that no view reads."""
    prompt = prefill.prompt
    media = replace(prompt.media, deepstack=())
    bare = replace(prompt, embeds=torch.empty(len(prompt), 0), media=media)
    return replace(prefill, prompt=bare, cache=None, logits=torch.empty(0), replacement_texts=texts)


def _sendable_rule(rule: Sampling) -> Sampling:
    """Returns the rule without the processors and the grammar that cannot be sent. A draft may do
    without them, because it may follow any law."""
    grammar = rule.grammar if _is_sendable(rule.grammar) else None
    return replace(rule, processors=tuple(filter(_is_sendable, rule.processors)), grammar=grammar)


def _is_sendable(part: object) -> bool:
    """Returns whether another process can unpickle this. It cannot import what the caller's script
    defines."""
    try:
        sendable = b"__main__" not in pickle.dumps(part)
    except Exception:
        sendable = False
    if not sendable:
        log.info("%s stays with the target", type(part).__name__)
    return sendable
