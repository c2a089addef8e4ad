"""Turns logits into laws and laws into tokens, with noise that does not depend on timing.

A law is the probability distribution of the next token.

The rules (temperature, top-k, penalties, ...) are Hugging Face's own logits processors. They are
applied at every node over prompt + committed text + path, to the target's logits and the draft's
alike. Processors that may remember earlier calls are applied to the target's alone
(:func:`may_remember`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.core.noise import uniform
from saccade.core.tree import ROOT, Tree, count_drawn_at_level, depth, path

Law = int | Float[Tensor, " _vocab"]
"""A probability law over token ids: one id (all mass on it) or a vector of probabilities."""

Processor = Callable[[Any, Any], Any]

Grammar = Callable[[Sequence[int]], Bool[Tensor, " vocab"] | None]
"""(an answer's ids so far) -> a mask of the tokens that may follow, on the CPU; None allows all."""

# On a CPU, rows are not stacked for one arg-max if all of them together have more logits than this.
MAX_COPIED_LOGITS = 2**16
NO_TOKEN = -1  # Stands for an id where a logit is NaN, or fewer ids are allowed than asked for.

# Hugging Face's processors that look at the logits alone, so they need no ids.
CONTEXT_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
)


# Hugging Face's own processors that remember earlier calls; all others read ids and logits alone.
STATEFUL = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
)


@dataclass(frozen=True)
class GeneratedTokenPenalties:
    """Lowers the logits of tokens that the answer already contains, by OpenAI's formula.

    The logit of a token that was generated ``n`` times falls by ``frequency * n``, and by
    ``presence`` more where ``n`` is not zero. The tokens of the prompt do not count, so
    ``prompt_length`` says how many there are. Source: OpenAI's API reference, "frequency and
    presence penalties".
    """

    prompt_length: int  # in tokens
    presence: float = 0.0
    frequency: float = 0.0

    def __call__(
        self, ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        generated = ids[:, self.prompt_length :]
        # A draft may know fewer tokens than the target. It cannot repeat those that it lacks.
        is_known = generated < scores.shape[1]
        counts = torch.zeros_like(scores).scatter_add_(
            1, generated.where(is_known, 0), is_known.to(scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class Stateless:
    """A logits processor of the caller's that keeps nothing from call to call.

    ``logits_processor=[saccade.Stateless(rule)]`` says that ``rule`` reads only the ids and the
    logits of a call, whatever was called before. Drafts then apply the rule too, so more of their
    tokens are accepted. A rule that does remember earlier calls would make answers wrong. The
    logits of a draft may be fewer than the target's, so the rule may not index beyond their length.
    """

    processor: Processor

    def __call__(
        self, ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        return self.processor(ids, scores)


def may_remember(processor: Processor) -> bool:
    """Whether a logits processor may keep state from call to call.

    A caller's function cannot be inspected. So this is true of every processor that is neither
    Hugging Face's nor ours, unless it is wrapped in :class:`Stateless`. A processor that may keep
    state is called for the target alone, once for each token of the answer and in order, which is
    how ``generate`` calls it.
    """
    if isinstance(processor, GeneratedTokenPenalties | Stateless):
        return False
    is_from_transformers = type(processor).__module__.startswith("transformers.")
    return not is_from_transformers or isinstance(processor, STATEFUL)


class BrokenLaw(ArithmeticError):
    """The logits make no law: one of them is NaN or, when sampling, the rules allow no id."""


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens: greedily unless ``sample``; the seed decides the noise.

    ``end_ids`` are the ids that end an answer, which has at most ``max_tokens`` tokens. Drafts end
    where the answer would (:meth:`Scores.may_go_on`).
    """

    sample: bool = False
    processors: tuple[Processor, ...] = ()
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    grammar: Grammar | None = None  # applied before any other rule

    @property
    def reads_ids(self) -> bool:
        """Whether some processor reads the ids of the text."""
        return not all(isinstance(rule, CONTEXT_FREE) for rule in self.processors)

    @property
    def is_plain(self) -> bool:
        """Whether each token is simply the model's arg-max."""
        return not (self.sample or self.processors or self.grammar)

    @property
    def for_drafts(self) -> Sampling:
        """The rules that a draft can follow: those without processors that may remember calls."""
        processors = tuple(rule for rule in self.processors if not may_remember(rule))
        return replace(self, processors=processors)

    def apply_grammar(
        self, logits: Float[Tensor, " vocab"], answer: Sequence[int]
    ) -> Float[Tensor, " vocab"]:
        """Returns the logits with -inf for what the grammar forbids.

        They are unchanged where it forbids everything that this model knows.
        """
        allowed = None if self.grammar is None else self.grammar(answer)
        if allowed is None:
            return logits
        missing = len(logits) - len(allowed)
        if missing > 0:
            allowed = torch.nn.functional.pad(allowed, (0, missing))
        elif missing < 0:
            # A draft may know fewer ids than the grammar.
            allowed = allowed[:missing]
        scores = torch.where(allowed.to(logits.device), logits, float("-inf"))
        # Some drafts know only scattered ids of the target's, and have -inf for all others. If the
        # grammar allows none that the draft knows, every score is -inf.
        return logits if float(scores.max()) == float("-inf") else scores

    def apply_rules(
        self, logits: Float[Tensor, " vocab"], ids: Sequence[int], answer: Sequence[int] = ()
    ) -> Float[Tensor, " vocab"]:
        """Returns the logits after the grammar and every processor, as ``generate`` has them.

        ``ids`` are those of prompt, text and path; ``answer`` is the part of them after the
        prompt.
        """
        scores = self.apply_grammar(logits, answer)
        if not self.processors:
            return scores
        scores = scores.float().unsqueeze(0).clone()
        history = torch.tensor([list(ids)], device=logits.device, dtype=torch.long)
        for rule in self.processors:
            scores = rule(history, scores)
        return scores.squeeze(0)

    def law(
        self, logits: Float[Tensor, " vocab"], ids: Sequence[int], answer: Sequence[int] = ()
    ) -> Law:
        """Returns the law over the next token, from the arguments of :meth:`apply_rules`."""
        return self.law_from_scores(self.apply_rules(logits, ids, answer))

    def law_from_scores(self, scores: Float[Tensor, " vocab"]) -> Law:
        """Returns the law over the next token from logits that have the rules applied: a single id
        when greedy, else probabilities (fp32).

        Raises BrokenLaw on NaN, because an arg-max over NaN is no token. When sampling it is also
        raised where the rules allow no token.
        """
        if not self.sample:
            token = _likeliest(scores)
            if token is None:
                raise BrokenLaw("the logits hold NaN")
            return token
        law = torch.softmax(scores.float(), dim=-1)
        if bool(law[0].isnan()):  # One NaN spreads over the whole softmax.
            raise BrokenLaw("the logits hold NaN, or the rules allow no token")
        return law


class TopTokens(NamedTuple):
    """The two likeliest tokens after a row and their probabilities by the softmax.

    ``token`` is NO_TOKEN where a logit is NaN.
    """

    token: int
    runner_up: int
    probability: float
    runner_up_probability: float


Draw = tuple[int, int, Tensor]
"""A draw: the node it was drawn after, the token, and the law it was drawn from."""


@dataclass(frozen=True)
class Scores:
    """A model's logits at the end of the committed text (row 0) and at each node (row i + 1).

    Shapes grow drafts by :meth:`logits`, :meth:`law`, :meth:`top` and :meth:`draw`, all of which
    apply the request's rules. ``rows`` and :meth:`raw_logits` are the model's own logits, for
    comparing models.
    """

    tree: Tree
    rows: Sequence[Float[Tensor, " vocab"]]  # logits before any rule
    rules: Sampling  # the request's, which are applied to ``rows``
    context: Sequence[int]  # ids of prompt and committed text, valid until the next commit
    answer_length: int  # how many ids of ``context`` are this answer's, and not those before it
    request: int = 0  # the request's number in its call; its noise depends on it and on the seed
    draft_start: int | None = field(default=None, kw_only=True)
    """How many tokens the answer had when this draft began. That is fewer than ``answer_length`` if
    tokens of this draft have been committed since. None means ``answer_length``."""
    top_readers: Sequence[Callable[[], TopTokens] | None] = field(
        default=(), kw_only=True, compare=False, repr=False
    )
    """For each row a function that returns its likeliest tokens, or None where the forward did not
    compute them. Empty where it computed none at all."""
    draws: list[Draw] = field(default_factory=list, init=False, compare=False, repr=False)
    """Every draw made from these scores, in order. All of them have to be judged (see ``Tree``)."""
    _logits_by_node: dict[int, Tensor] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def may_go_on(self, tree: Tree, node: int) -> bool:
        """Returns whether a token after ``node`` may be of use to the answer. ``tree`` is the draft
        so far, which may have more nodes than were scored.

        It is of no use after an id that ends the answer. Nor is it where the accepted tokens up to
        ``node``, and the token that the target adds to them, would make the answer as long as it
        may be.
        """
        if node != ROOT and tree.tokens[node] in self.rules.end_ids:
            return False
        limit = self.rules.max_tokens
        return limit is None or self.answer_length + depth(tree, node) + 1 < limit

    def raw_logits(self, node: int) -> Float[Tensor, " vocab"]:
        """Returns the model's own logits after ``node``, before any rule."""
        return self.rows[node + 1]

    def logits(self, node: int) -> Float[Tensor, " vocab"]:
        """Returns the logits after ``node`` with the request's rules applied: -inf for what they
        forbid.

        The rules are applied once per node, however often this is called.
        """
        if node not in self._logits_by_node:
            ids: Sequence[int] = ()
            if self.rules.reads_ids:
                ids = [*self.context, *self._path_tokens(node)]
            row = self.rows[node + 1]
            self._logits_by_node[node] = self.rules.apply_rules(row, ids, self._answer(node))
        return self._logits_by_node[node]

    def law(self, node: int) -> Law | None:
        """Returns the law after ``node``, rules applied; None where the model has no row for it."""
        if node + 1 >= len(self.rows):
            return None
        token = self._computed_token(node)
        if token == NO_TOKEN:
            raise BrokenLaw("the logits hold NaN")
        return self.rules.law_from_scores(self.logits(node)) if token is None else token

    def every_law(self) -> Callable[[int], Law | None]:
        """Returns :meth:`law`, or a faster function that gives the same laws.

        The faster function needs laws that are all an arg-max. Those that the forward has not
        computed already are computed here, for all nodes at once. :meth:`law` itself is returned if
        fewer than two are left to compute, if many logits would be copied on a CPU, or if a logit
        is NaN.
        """
        nodes = [node for node in range(ROOT, len(self.rows) - 1) if not self._has_token(node)]
        rows = [self.rows[node + 1] for node in nodes]
        copied_logits = sum(len(row) for row in rows if row.device.type == "cpu")
        is_faster = len(rows) >= 2 and copied_logits <= MAX_COPIED_LOGITS
        if not self.rules.is_plain or not is_faster:
            return self.law
        best, tokens = torch.stack(rows).max(-1)
        ids = tokens.masked_fill_(best.isnan(), NO_TOKEN).tolist()
        if NO_TOKEN in ids:
            return self.law
        laws = dict(zip(nodes, ids, strict=True))
        return lambda node: laws[node] if node in laws else self.law(node)

    def _has_token(self, node: int) -> bool:
        """Returns whether the forward computed the likeliest token after ``node``."""
        return node + 1 < len(self.top_readers) and self.top_readers[node + 1] is not None

    def _computed_token(self, node: int) -> int | None:
        """Returns the forward's likeliest token after ``node``; NO_TOKEN where a logit is NaN.

        Returns None if the forward computed none, or if the rules may choose another token.
        """
        top = self.computed_top(node)
        return None if top is None else top.token

    def computed_top(self, node: int) -> TopTokens | None:
        """Returns the forward's two likeliest tokens after ``node``. It computes nothing itself.

        Returns None if the forward computed none, or if the rules may choose others.
        """
        if not self.rules.is_plain or node + 1 >= len(self.top_readers):
            return None
        read_top = self.top_readers[node + 1]
        return None if read_top is None else read_top()

    def _path_tokens(self, node: int) -> list[int]:
        """Returns the tokens from the root down to ``node``."""
        return [self.tree.tokens[n] for n in path(self.tree, node)]

    def _answer(self, node: int) -> Sequence[int]:
        """Returns the answer's ids up to ``node``; only a grammar reads them."""
        if self.rules.grammar is None:
            return ()
        return [*self.context[len(self.context) - self.answer_length :], *self._path_tokens(node)]

    def top(self, node: int, count: int) -> list[int]:
        """Returns the ``count`` likeliest tokens after ``node``, likeliest first; fewer where the
        rules leave no more."""
        return self.tops({node: count})[node]

    def tops(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Returns :meth:`top` of each node, for all at once, so that a GPU is waited for once."""
        if not counts:
            return {}
        # The forward may have computed the one token that is asked for after each node.
        wants_one_each = set(counts.values()) == {1}
        if wants_one_each and self.rules.is_plain and all(map(self._has_token, counts)):
            tokens = {node: self._computed_token(node) for node in counts}
            if NO_TOKEN not in tokens.values():
                return {node: [token] for node, token in tokens.items() if token is not None}
        rows = {node: self.logits(node) for node in counts}
        if all(row.device.type != "cpu" for row in rows.values()):
            largest_count = max(counts.values())
            if len(rows) > 1:
                all_rows = torch.stack([*rows.values()])
            else:
                all_rows = next(iter(rows.values()))[None]
            best = self._likeliest_first(all_rows, largest_count).tolist()
        else:  # On a CPU nothing is gained by stacking, which copies the rows.
            best = [self._likeliest_first(rows[n], count).tolist() for n, count in counts.items()]
        return {
            node: [token for token in tokens[:count] if token != NO_TOKEN]
            for (node, count), tokens in zip(counts.items(), best, strict=True)
        }

    def _likeliest_first(
        self, logits: Float[Tensor, "*rows vocab"], count: int
    ) -> Int[Tensor, "*rows count"]:
        """Returns the ids of the largest logits, largest first; NO_TOKEN where the rules forbid
        one."""
        best = torch.topk(logits, min(count, logits.shape[-1]))
        if not self.rules.processors and self.rules.grammar is None:
            # No rule can forbid a token, so the mask, which takes a GPU two kernels, is left out.
            return best.indices
        return best.indices.masked_fill(best.values.isneginf(), NO_TOKEN)

    def draw(self, node: int, law: Law | None = None) -> tuple[int, Float[Tensor, " vocab"] | None]:
        """Returns a token after ``node`` and the law it was drawn from, or None for the law if the
        token was the arg-max.

        ``law`` is the law to draw from, if the caller has it already. Every draw of a level of the
        tree has noise of its own, so siblings and cousins are drawn independently. The caller may
        not take a token back because of what was drawn: every draw must be judged (see ``Tree``).
        An earlier draft may have drawn tokens at the same positions, after a token that was then
        rejected. The noise also depends on where this draft began, so new draws are independent of
        those.
        """
        law = self.law(node) if law is None else law
        assert law is not None, "a node that is drawn after has a row"
        if isinstance(law, int):
            return law, None
        node_level = depth(self.tree, node)
        # The token is drawn for the level below the node's. Earlier draws for that level are nodes
        # of the tree already, or are in ``draws``: those made since the tree was scored.
        new_draws = sum(depth(self.tree, parent) == node_level for parent, *_ in self.draws)
        earlier_draws = count_drawn_at_level(self.tree, node_level + 1) + new_draws
        draft_start = self.answer_length if self.draft_start is None else self.draft_start
        position = self.position + node_level
        u = uniform(self.rules.seed, self.request, "draft", position, earlier_draws, draft_start)
        token = draw(law, u)
        self.draws.append((node, token, law))
        return token, law

    def noise(self, role: str, below: int, sibling: int) -> float:
        """Returns uniform noise for a place below the root of the draft's tree.

        ``below`` is how many tokens stand between the committed text and that place: 0 for the
        first token after the committed text.
        The role "accept" is for the test of a drafted token, which is number ``sibling`` among its
        siblings. The role "own" is for the target's own token, with ``sibling`` 0.
        """
        return uniform(self.rules.seed, self.request, role, self.position + below, sibling)

    @property
    def position(self) -> int:
        """How many tokens there are, with the prompt and earlier turns.

        The noise depends on it, so one seed gives every turn of a conversation noise of its own.
        Where ``context`` is left empty, only the answer's tokens are counted.
        """
        return max(len(self.context), self.answer_length)


def _likeliest(scores: Float[Tensor, " vocab"]) -> int | None:
    """Returns the id of the largest score; None where one is NaN."""
    best, token = scores.max(-1)
    if scores.device.type == "cpu":
        return None if isnan(best.item()) else int(token)
    token_id = int(token.masked_fill(best.isnan(), NO_TOKEN))  # This waits for the GPU only once.
    return None if token_id == NO_TOKEN else token_id


def prob(law: Law, token: int) -> float:
    """Returns the probability of ``token``; 0 for an id that the law's vocabulary lacks."""
    if isinstance(law, int):
        return float(law == token)
    return float(law[token]) if token < law.shape[0] else 0.0


def draw(law: Law, u: float) -> int:
    """Returns the token at quantile ``u`` of the law; never one of probability zero."""
    if isinstance(law, int):
        return law
    cumulative = law.double().cumsum(0)
    token = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    if token >= law.shape[0]:  # The quantile was rounded up to the whole mass.
        token = int(law.nonzero()[-1])
    return token
