"""Claims about sampled answers: over models that are tables, the law of three tokens is the exact
product law, whatever drafts them. Everything between laws and tokens is the package's own.

Joint law of three tokens over a vocabulary of three: 26 degrees of freedom, chi-square at 1e-4.
With 3,000 samples a law 0.085 away in total variation is found with probability above 0.99
(non-centrality at least 4 x 0.085^2 x 3000 = 86), 0.025 by the slow tests' 40,000; the planted
bugs below, most of them subtler than they look, fail it with fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers import TableDraft, TableSession, chi_square, random_table
from transformers.generation import logits_process as hf

from saccade.core import noise, sampling
from saccade.core import verify as verify_module
from saccade.core.noise import uniform
from saccade.core.protocols import Growing, Shape, State
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, add, depth
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Chain, Static

pytestmark = pytest.mark.usefixtures("unchecked")

V, TOKENS, SAMPLES, ALPHA = 3, 3, 3000, 1e-4
TARGET = random_table(3, V, TOKENS, sharp=0.8)
DRAFT = random_table(4, V, TOKENS, sharp=0.8)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Asked once for the same two objects: there are only forty rows of logits, and their laws."""
    known: dict[tuple[int, int], Any] = {}

    def call_once(*args: Any) -> Any:
        key = id(args[0]), id(args[1])
        if key not in known:
            known[key] = function(*args), args  # kept, so that no id is used again
        return known[key][0]

    return call_once


@pytest.fixture(autouse=True)
def _remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampling, "apply_rules", once(Sampling.apply_rules))
    monkeypatch.setattr(Sampling, "law_from_scores", once(Sampling.law_from_scores))
    monkeypatch.setattr(verify_module, "residual", once(verify_module.residual))


def _rules(*processors: Any) -> Sampling:
    return Sampling(True, processors, seed=7)


RULES = {
    "temperature 1": lambda: _rules(),
    "temperature 0.7, top-k 2": lambda: _rules(
        hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(2)
    ),
    "top-p 0.8": lambda: _rules(hf.TopPLogitsWarper(0.8)),
}


@dataclass(frozen=True)
class Wide(Shape):
    """Each node has ``width`` children, independent draws from the one law after it."""

    levels: int
    width: int

    def grow(self, state: State) -> Growing:
        tree, frontier = Tree(), [ROOT]
        for _ in range(self.levels):
            scores = yield tree
            below = []
            for node in frontier:
                law = scores.law(node)
                at = scores.answer_length + depth(tree, node)
                for sibling in range(self.width):
                    u = uniform(
                        scores.rules.seed,
                        scores.request,
                        "draft",
                        at,
                        sibling,
                        scores.answer_length,
                    )
                    tree = add(tree, node, sampling.draw(law, u), law)
                    below.append(len(tree) - 1)
            frontier = below
        return tree


@dataclass(frozen=True)
class Best(Shape):
    """A chain of arg-maxes of a sampling draft; ``lie`` attaches the law to them all the same."""

    levels: int
    lie: bool = False

    def grow(self, state: State) -> Growing:
        tree = Tree()
        for _ in range(self.levels):
            scores = yield tree
            last = len(tree) - 1
            law = scores.law(last)
            tree = add(tree, last, int(law.argmax()), law if self.lie else None)
        return tree


SHAPES: dict[str, Shape] = {
    "sampled chain": Chain(2),
    "chosen tree": Static(((0,), (1,), (0, 0), (0, 1), (1, 0))),
    "sampled tree": Wide(2, 2),
    "chosen chain": Best(2),
    "nothing": Chain(0),
}


def answers(shape: Shape, rules: Sampling, samples: int = SAMPLES) -> list[list[int]]:
    """Three tokens for each of many requests, by the package's own schedule."""
    every = [rules] * samples
    texts: list[list[int]] = [[] for _ in every]

    def cut(request: int, tokens: Sequence[int]) -> tuple[int, Any]:
        room = TOKENS - len(texts[request])
        texts[request] += tokens[:room]
        return min(room, len(tokens)), "length" if len(tokens) >= room else None

    target, draft = TableSession(TARGET, every), TableDraft(DRAFT, every, shape)
    for _ in serial(target, draft, range(samples), cut):
        pass
    return texts


def exact(rules: Sampling) -> torch.Tensor:
    """The product law of three tokens, from the target's table."""
    law = torch.zeros((V,) * TOKENS, dtype=torch.double)
    for text in product(range(V), repeat=TOKENS):
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(rules.law(TARGET[text[:i]], text[:i])[token])
        law[text] = chance
    return law.flatten()


def counts(texts: list[list[int]]) -> torch.Tensor:
    cells = torch.tensor([(a * V + b) * V + c for a, b, c in texts])
    return torch.bincount(cells, minlength=V**TOKENS)


CASES = [  # each shape and each kind of rules; the slow test takes them all together
    ("sampled chain", "temperature 0.7, top-k 2"),
    ("chosen tree", "top-p 0.8"),
    ("sampled tree", "temperature 1"),
    ("chosen chain", "top-p 0.8"),
    ("nothing", "temperature 1"),
]


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("shape", "rules"), CASES)
def test_the_joint_law_of_three_tokens_is_the_targets(shape, rules):
    """Claim: sampling is lossless. Power and size as the module says; the seed is fixed."""
    settled = RULES[rules]()
    law = exact(settled)
    assert int((law > 0.005).sum()) >= 8, "a law of few cells proves little"
    assert chi_square(counts(answers(SHAPES[shape], settled)), law) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_joint_law_of_many_more_samples_is_the_targets(shape, rules):
    """The claim above with 40,000 samples: finds 0.025 in total variation."""
    settled = RULES[rules]()
    assert chi_square(counts(answers(SHAPES[shape], settled, 40_000)), exact(settled)) > ALPHA


def _no_residual(monkeypatch: pytest.MonkeyPatch) -> Shape:
    monkeypatch.setattr(verify_module, "residual", lambda p, q: p)
    return Chain(2)


def _residual_of_a_point(monkeypatch: pytest.MonkeyPatch) -> Shape:
    residual = verify_module.residual

    def wrong(p: Any, q: Any) -> Any:
        return residual(p, q if isinstance(q, int) else int(q.argmax()))

    monkeypatch.setattr(verify_module, "residual", wrong)
    return Chain(2)


def _one_noise_for_two_roles(monkeypatch: pytest.MonkeyPatch) -> Shape:
    monkeypatch.setattr(noise, "ROLES", {"draft": 1, "accept": 1, "own": 1})
    return Chain(2)


def _a_draft_that_lies(monkeypatch: pytest.MonkeyPatch) -> Shape:
    return Best(2, lie=True)


def _siblings_that_share_a_draw(monkeypatch: pytest.MonkeyPatch) -> Shape:
    numbers = sampling.uniform

    def same(*key: Any) -> float:
        return numbers(*key[:4], 0, key[5])

    monkeypatch.setitem(Wide.grow.__globals__, "uniform", same)
    return Wide(2, 2)


def _q_before_the_rules(monkeypatch: pytest.MonkeyPatch) -> Shape:
    """The draft draws by the rules and hands on the law without them."""
    drawn = sampling.Scores.draw

    def wrong(self: Any, node: int, law: Any = None) -> Any:
        token, _ = drawn(self, node, law)
        return token, torch.softmax(self.raw_logits(node), -1)

    monkeypatch.setattr(sampling.Scores, "draw", wrong)
    return Chain(2)


def _p_before_the_rules(monkeypatch: pytest.MonkeyPatch) -> Shape:
    """The target is verified without the rules."""
    monkeypatch.setattr(TableSession, "score", _raw(TableSession.score))
    return Chain(2)


BARE = Sampling(True, (), 7)


def _raw(score: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: TableSession, trees: Any) -> Any:
        all_scores = score(self, trees)
        if self.table is not TARGET:
            return all_scores
        return {request: replace(scores, rules=BARE) for request, scores in all_scores.items()}

    return wrong


BUGS: dict[str, Callable[[pytest.MonkeyPatch], Shape]] = {
    "no residual": _no_residual,
    "the residual of a point": _residual_of_a_point,
    "one noise for two roles": _one_noise_for_two_roles,
    "a soft q on a chosen node": _a_draft_that_lies,
    "siblings that share a draw": _siblings_that_share_a_draw,
    "q before the rules": _q_before_the_rules,
    "p before the rules": _p_before_the_rules,
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("bug", BUGS)
def test_control_a_planted_bug_bends_the_law(bug, monkeypatch):
    """Control: each of these must fail the very same test, or the test has no power."""
    settled = RULES["temperature 0.7, top-k 2" if "rules" in bug else "temperature 1"]()
    law = exact(settled)
    shape = BUGS[bug](monkeypatch)
    assert chi_square(counts(answers(shape, settled)), law) < ALPHA


@pytest.mark.parametrize("shape", ["sampled chain", "chosen tree", "sampled tree"])
def test_greedy_over_tables_is_the_tables_greedy_text(shape):
    """Claim: the same loop without sampling emits arg-max after arg-max for every request."""
    text: list[int] = []
    while len(text) < TOKENS:
        text.append(int(TARGET[tuple(text)].argmax()))
    rules = Sampling()
    if shape == "sampled tree":
        texts = answers(Best(2), rules=replace(rules, sample=True, processors=(_cold,)), samples=20)
    else:
        texts = answers(SHAPES[shape], rules, samples=20)
    assert texts == [text] * 20


def _cold(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * 1e6


def test_a_seed_means_the_same_whatever_the_draft():
    """Claim: noise is keyed by position, not by round: with a draft that is the target itself, a
    sampled chain of one and of two emit the very same seeded answers.

    Fails if noise is drawn from a stream, so that timing decides what a seed means.
    """
    rules = _rules()
    every = [rules] * 200

    def run(length: int) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in every]

        def cut(request: int, tokens: Sequence[int]) -> tuple[int, Any]:
            room = TOKENS - len(texts[request])
            texts[request] += tokens[:room]
            return min(room, len(tokens)), "length" if len(tokens) >= room else None

        target, draft = TableSession(TARGET, every), TableDraft(TARGET, every, Chain(length))
        accepted = [
            len(round.verdict.accepted) == len(round.tree)
            for round in serial(target, draft, range(200), cut)
            if round.finish is None
        ]
        assert all(accepted), "p = q is always accepted"
        return texts

    three, again = run(3), run(3)
    assert three == again and len({tuple(text) for text in three}) > 10
    drafted = TableDraft(TARGET, every, Chain(3)).propose(dict.fromkeys(range(200)))
    assert [list(tree.tokens) for tree in drafted.values()] == three
    assert all(tree.parents == (ROOT, 0, 1) for tree in drafted.values())
