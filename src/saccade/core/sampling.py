"""Logits to laws, laws to tokens, and noise that does not depend on timing.

The rules (temperature, top-k, penalties, ...) are Hugging Face's own logits processors, applied at
every node over prompt + committed text + path, to the target's logits and the draft's alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.core.tree import ROOT, Tree, depth, drawn_at, path

Law = int | Float[Tensor, " _vocab"]
"""A probability law over token ids: one id (all mass on it) or a vector of probabilities."""

Processor = Callable[[Any, Any], Any]

Grammar = Callable[[Sequence[int]], Bool[Tensor, " vocab"] | None]
"""An answer's beginning -> the tokens it lets follow, on the CPU; None where it has no say."""

AT_ONCE = 2**16  # logits
NO_TOKEN = -1  # in the place of an id where the logits hold NaN or the rules forbid all
ROLES = {"draft": 1, "accept": 2, "own": 3}

# These look at the logits alone, so they need no ids.
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


def may_remember(processor: Processor) -> bool:
    """Whether a logits processor may keep state from call to call.

    Nobody can look into a caller's function, so every processor counts that is not one of Hugging
    Face's own. Such a processor is called for the target alone, once for each token of the answer
    and in order, which is how ``generate`` calls it.
    """
    own = type(processor).__module__.startswith("transformers.")
    return not own or isinstance(processor, STATEFUL)


class BrokenLaw(ArithmeticError):
    """Logits that make no law: NaN somewhere."""


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens. Greedy unless ``sample``; a seed names the noise.

    No draft goes on after one of ``ends``, the ids that end an answer.
    """

    sample: bool = False
    processors: tuple[Processor, ...] = ()
    seed: int = 0
    ends: tuple[int, ...] = ()
    grammar: Grammar | None = None  # what answers have to obey, before any other rule

    @property
    def contextual(self) -> bool:
        return not all(isinstance(rule, CONTEXT_FREE) for rule in self.processors)

    @property
    def plain(self) -> bool:
        """Whether each token is the likeliest by the model itself."""
        return not (self.sample or self.processors or self.grammar)

    @property
    def for_drafts(self) -> Sampling:
        """The same rules without processors that may remember calls: those a draft can follow."""
        processors = tuple(rule for rule in self.processors if not may_remember(rule))
        return replace(self, processors=processors)

    def obeyed(
        self, logits: Float[Tensor, " vocab"], answer: Sequence[int]
    ) -> Float[Tensor, " vocab"]:
        """The logits of what the grammar lets follow; all where it leaves none of these."""
        allowed = None if self.grammar is None else self.grammar(answer)
        if allowed is None:
            return logits
        missing = len(logits) - len(allowed)
        if missing > 0:
            allowed = torch.nn.functional.pad(allowed, (0, missing))
        elif missing < 0:  # of a draft that knows fewer ids
            allowed = allowed[:missing]
            if not bool(allowed.any()):
                return logits
        return torch.where(allowed.to(logits.device), logits, float("-inf"))

    def ruled(
        self, logits: Float[Tensor, " vocab"], ids: Sequence[int], answer: Sequence[int] = ()
    ) -> Float[Tensor, " vocab"]:
        """The logits after the grammar and every processor, as ``generate`` would have them.

        ``ids`` are those of prompt, text and path, ``answer`` what of them has been answered.
        """
        scores = self.obeyed(logits, answer)
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
        """The law over the next token, given what :meth:`ruled` takes: see :meth:`law_by`."""
        return self.law_by(self.ruled(logits, ids, answer))

    def law_by(self, scores: Float[Tensor, " vocab"]) -> Law:
        """The law over the next token by logits that have the rules in them: a single id when
        greedy, else probabilities (fp32).

        Raises BrokenLaw on NaN: an arg-max of nothing must not pass for a token.
        """
        if not self.sample:
            token = _likeliest(scores)
            if token is None:
                raise BrokenLaw("the logits hold NaN")
            return token
        law = torch.softmax(scores.float(), dim=-1)
        if bool(law[0].isnan()):  # one NaN spreads over the whole softmax
            raise BrokenLaw("the logits hold NaN")
        return law


Drawn = tuple[int, int, Tensor]
"""A draw: the node it was drawn after, the token, and the law it was drawn from."""


@dataclass(frozen=True)
class Scores:
    """What a session saw at the end of the committed text (row 0) and at each node (row i + 1).

    Whoever grows a draft reads :meth:`logits`, :meth:`law`, :meth:`top` and :meth:`draw`, all of
    which have the request's rules in them. ``rows`` and :meth:`raw` are the model's own numbers,
    for those who compare models.
    """

    tree: Tree
    rows: Sequence[Float[Tensor, " vocab"]]  # logits before any rule
    rules: Sampling
    context: Sequence[int]  # ids of prompt and committed text; read it before the next commit
    offset: int  # how many of those were generated
    request: int = 0
    began: int | None = field(default=None, kw_only=True)
    """How many tokens were generated when the draft under way began; None: ``offset`` of them."""
    drawn: list[Drawn] = field(default_factory=list, init=False, compare=False, repr=False)
    """Every draw made by these scores, in order: what must be handed over, come what may."""
    _ruled: dict[int, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    def raw(self, node: int) -> Float[Tensor, " vocab"]:
        """The model's own logits after ``node``, before any rule."""
        return self.rows[node + 1]

    def logits(self, node: int) -> Float[Tensor, " vocab"]:
        """The logits after ``node`` with the request's rules in them; -inf for what they forbid.

        The rules are applied once for each node, however often this is read.
        """
        if node not in self._ruled:
            ids: Sequence[int] = ()
            if self.rules.contextual:
                ids = [*self.context, *self._below(node)]
            self._ruled[node] = self.rules.ruled(self.rows[node + 1], ids, self._answer(node))
        return self._ruled[node]

    def law(self, node: int) -> Law | None:
        """The law after ``node``, rules applied; None where the session has not looked."""
        return None if node + 1 >= len(self.rows) else self.rules.law_by(self.logits(node))

    def every_law(self) -> Callable[[int], Law | None]:
        """:meth:`law`, to be asked of many nodes: found for all at once where they are likeliest
        tokens and no logit is NaN, unless that would copy much on a CPU."""
        copied = sum(len(row) for row in self.rows if row.device.type == "cpu")
        if not self.rules.plain or len(self.rows) < 2 or copied > AT_ONCE:
            return self.law
        best, tokens = torch.stack(list(self.rows)).max(-1)
        found = tokens.masked_fill_(best.isnan(), NO_TOKEN).tolist()
        return self.law if NO_TOKEN in found else dict(enumerate(found, ROOT)).get

    def _below(self, node: int) -> list[int]:
        return [self.tree.tokens[n] for n in path(self.tree, node)]

    def _answer(self, node: int) -> Sequence[int]:
        """The answer up to ``node``, for a grammar."""
        if self.rules.grammar is None:
            return ()
        return [*self.context[len(self.context) - self.offset :], *self._below(node)]

    def top(self, node: int, count: int) -> list[int]:
        """The ``count`` likeliest tokens after ``node``, likeliest first; fewer where the rules
        leave no more."""
        return self.tops({node: count})[node]

    def tops(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """:meth:`top` of each node; of all nodes on a GPU together, which is waited for once."""
        if not counts:
            return {}
        rows = {node: self.logits(node) for node in counts}
        if all(row.device.type != "cpu" for row in rows.values()):
            most = max(counts.values())
            every = torch.stack([*rows.values()]) if len(rows) > 1 else rows[next(iter(rows))][None]
            best = self._likeliest_first(every, most).tolist()
        else:  # on a CPU stacking would copy what need not be copied
            best = [self._likeliest_first(rows[n], count).tolist() for n, count in counts.items()]
        return {
            node: [token for token in tokens[:count] if token != NO_TOKEN]
            for (node, count), tokens in zip(counts.items(), best, strict=True)
        }

    def _likeliest_first(
        self, logits: Float[Tensor, "*rows vocab"], count: int
    ) -> Int[Tensor, "*rows count"]:
        """The ids of the largest logits, largest first; NO_TOKEN for what the rules forbid."""
        best = torch.topk(logits, min(count, logits.shape[-1]))
        if not self.rules.processors and self.rules.grammar is None:
            return best.indices  # There is nothing to forbid, and a GPU is sent two kernels less.
        return best.indices.masked_fill(best.values.isneginf(), NO_TOKEN)

    def draw(self, node: int, law: Law | None = None) -> tuple[int, Float[Tensor, " vocab"] | None]:
        """A token after ``node`` and the law it was drawn from (None: greedy, it was chosen).

        ``law`` is the law to draw from, if it is known already. Every draw of a level of the tree
        has noise of its own, so siblings and cousins are drawn independently.
        What is drawn stands (see ``Tree``). Its noise is named by where this draft began too, so
        that a draft after a refusal draws anew what the refused one had drawn beyond.
        """
        law = self.law(node) if law is None else law
        if law is None or isinstance(law, int):
            return int(self.logits(node).argmax()) if law is None else law, None
        level = depth(self.tree, node)
        before = drawn_at(self.tree, level + 1) + sum(
            depth(self.tree, parent) == level for parent, *_ in self.drawn
        )
        began = self.offset if self.began is None else self.began
        place = self.position + level
        u = uniform(self.rules.seed, self.request, "draft", place, before, began)
        token = draw(law, u)
        self.drawn.append((node, token, law))
        return token, law

    def noise(self, role: str, below: int, sibling: int) -> float:
        """Uniform noise for verification ``below`` tokens after the committed text."""
        return uniform(self.rules.seed, self.request, role, self.position + below, sibling)

    @property
    def position(self) -> int:
        """The place of the text's end among all tokens, prompt and earlier turns included: what
        names the noise, so that one seed gives every turn of a conversation noise of its own.

        A session that knows no context counts the tokens it generated.
        """
        return max(len(self.context), self.offset)


def _likeliest(scores: Float[Tensor, " vocab"]) -> int | None:
    """The id of the largest score; None where one is NaN."""
    best, token = scores.max(-1)
    if scores.device.type == "cpu":
        return None if isnan(best.item()) else int(token)
    found = int(token.masked_fill(best.isnan(), NO_TOKEN))  # a GPU is waited for once
    return None if found == NO_TOKEN else found


def prob(law: Law, token: int) -> float:
    """The probability of ``token``; 0 beyond a shorter vocabulary."""
    if isinstance(law, int):
        return float(law == token)
    return float(law[token]) if token < law.shape[0] else 0.0


def draw(law: Law, u: float) -> int:
    """The token at quantile ``u`` of the law; never one of probability zero."""
    if isinstance(law, int):
        return law
    cumulative = law.double().cumsum(0)
    token = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    if token >= law.shape[0]:  # u rounded up to the whole mass
        token = int(law.nonzero()[-1])
    return token


def uniform(
    seed: int, request: int, role: str, position: int, sibling: int, began: int = 0
) -> float:
    """A number in [0, 1) that depends on its keys and on nothing else (Philox counter)."""
    key = np.array([seed % 2**64, request], dtype=np.uint64)
    counter = np.array([ROLES[role], position, sibling, began], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
