"""Logits to laws, laws to tokens, and noise that does not depend on timing.

The rules (temperature, top-k, penalties, ...) are Hugging Face's own logits processors, applied at
every node over prompt + committed text + path, to the target's logits and the draft's alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.core.tree import ROOT, Tree, depth, path

Law = int | Float[Tensor, " _vocab"]
"""A probability law over token ids: one id (all mass on it) or a vector of probabilities."""

Processor = Callable[[Any, Any], Any]

Grammar = Callable[[Sequence[int]], Bool[Tensor, " vocab"] | None]
"""An answer's beginning -> the tokens it lets follow, on the CPU; None where it has no say."""

AT_ONCE = 2**16  # logits
NO_TOKEN = -1  # in the place of an id, where the logits hold NaN
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

    def law(
        self, logits: Float[Tensor, " vocab"], ids: Sequence[int], answer: Sequence[int] = ()
    ) -> Law:
        """The law over the next token: a single id when greedy, else probabilities (fp32).

        ``ids`` are those of prompt, text and path, ``answer`` what of them has been answered.
        Raises BrokenLaw on NaN: an arg-max of nothing must not pass for a token.
        """
        scores = self.obeyed(logits, answer)
        if self.processors:
            scores = scores.float().unsqueeze(0).clone()
            history = torch.tensor([list(ids)], device=logits.device, dtype=torch.long)
            for rule in self.processors:
                scores = rule(history, scores)
            scores = scores.squeeze(0)
        if not self.sample:
            token = _likeliest(scores)
            if token is None:
                raise BrokenLaw("the logits hold NaN")
            return token
        law = torch.softmax(scores.float(), dim=-1)
        if bool(law[0].isnan()):  # one NaN spreads over the whole softmax
            raise BrokenLaw("the logits hold NaN")
        return law


@dataclass(frozen=True)
class Scores:
    """What a session saw at the end of the committed text (row 0) and at each node (row i + 1)."""

    tree: Tree
    rows: Sequence[Float[Tensor, " vocab"]]  # raw logits
    rules: Sampling
    context: Sequence[int]  # ids of prompt and committed text; read it before the next commit
    offset: int  # how many of those were generated
    request: int = 0
    began: int | None = field(default=None, kw_only=True)
    """How many tokens were generated when the draft under way began; None: ``offset`` of them."""

    def logits(self, node: int) -> Float[Tensor, " vocab"]:
        return self.rows[node + 1]

    def law(self, node: int) -> Law | None:
        """The law after ``node``, rules applied; None where the session has not looked."""
        if node + 1 >= len(self.rows):
            return None
        ids: Sequence[int] = ()
        if self.rules.contextual:
            ids = [*self.context, *self._below(node)]
        return self.rules.law(self.rows[node + 1], ids, self._answer(node))

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
        """The ``count`` likeliest tokens after ``node``, likeliest first: by the raw logits, of
        those that a grammar lets follow."""
        row = self.rules.obeyed(self.rows[node + 1], self._answer(node))
        return torch.topk(row, min(count, row.shape[0])).indices.tolist()

    def tops(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """:meth:`top` of each node; of all nodes on a GPU together, which is waited for once."""
        rows = {node: self.rows[node + 1] for node in counts}
        on_cpu = any(row.device.type == "cpu" for row in rows.values())
        if on_cpu or self.rules.grammar is not None or len(rows) < 2:
            return {node: self.top(node, count) for node, count in counts.items()}
        every = torch.stack([*rows.values()])
        found = every.topk(min(max(counts.values()), every.shape[1])).indices.tolist()
        return {n: best[:count] for (n, count), best in zip(counts.items(), found, strict=True)}

    def draw(self, node: int, law: Law | None = None) -> tuple[int, Float[Tensor, " vocab"] | None]:
        """A token after ``node`` and the law it was drawn from (None: greedy, it was chosen).

        ``law`` is the law there, if it is known already.
        What is drawn stands (see ``Tree``). Its noise is named by where this draft began too, so
        that a draft after a refusal draws anew what the refused one had drawn beyond.
        """
        law = self.law(node) if law is None else law
        if law is None or isinstance(law, int):
            return int(self.rows[node + 1].argmax()) if law is None else law, None
        position = self.offset + depth(self.tree, node)
        began = self.offset if self.began is None else self.began
        u = uniform(self.rules.seed, self.request, "draft", position, 0, began)
        return draw(law, u), law

    def noise(self, role: str, below: int, sibling: int) -> float:
        """Uniform noise for verification ``below`` tokens after the committed text."""
        return uniform(self.rules.seed, self.request, role, self.offset + below, sibling)


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
