"""Claims about shapes and a request's rules: no shape drafts what the rules forbid, and every shape
ranks tokens as the rules do. Whatever is registered is a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from transformers.generation import logits_process as hf

from saccade.core.costs import Costs
from saccade.core.protocols import Shape
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree, height, path
from saccade.drafting.drafters import drive
from saccade.methods import SHAPE_FAMILIES, SHAPES

VOCAB = 24
CONTEXT = [3, 5, 7]
COSTS = Costs((1, 64), (1.0, 1.1), 0.02)


def _shapes() -> Iterator[tuple[str, Shape]]:
    yield from SHAPES.items()
    for family in SHAPE_FAMILIES.values():
        yield from ((f"{family.family}-{each}", family.parse(each)) for each in family.examples)


EVERY = {name: shape.prepare(lambda: COSTS) for name, shape in _shapes()}


def _allow_multiples_of_three(answer: Sequence[int]) -> torch.Tensor:
    """A grammar that lets 0, 3, 6, ... follow an even number of tokens, and 1, 4, 7, ... an odd."""
    return torch.arange(VOCAB) % 3 == len(answer) % 2


def _is_allowed(place: int, token: int) -> bool:
    return token % 3 == place % 2


BANNED = (0, 2, 4, 9, 11, 13)
RULES: dict[str, Sampling] = {
    "a grammar": Sampling(grammar=_allow_multiples_of_three),
    "banned words": Sampling(
        processors=(hf.NoBadWordsLogitsProcessor([[word] for word in BANNED], eos_token_id=None),)
    ),
    "suppressed tokens": Sampling(processors=(hf.SuppressTokensLogitsProcessor(list(BANNED)),)),
    "two tokens of top-k": Sampling(True, (hf.TopKLogitsWarper(2),), seed=3),
    "a grammar, sampled": Sampling(True, seed=4, grammar=_allow_multiples_of_three),
}


def _row(ids: Sequence[int]) -> torch.Tensor:
    """The draft's own logits after these ids: peaked, the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
    return 2 * torch.randn(VOCAB, generator=generator)


def _score(rules: Sampling, tree: Tree, answer_length: int = 0) -> Scores:
    paths = [[tree.tokens[above] for above in path(tree, node)] for node in range(len(tree))]
    rows = [_row([*CONTEXT, *ids]) for ids in ([], *paths)]
    return Scores(tree, rows, rules, CONTEXT, answer_length)


def _grow(
    shape: Shape,
    rules: Sampling,
    watch: Callable[[Tree], object] = lambda tree: None,
    answer_length: int = 0,
) -> Tree:
    """Returns a draft. ``watch`` is called with the tree of each of its forwards."""

    def score(trees: dict[int, Tree]) -> dict[int, Scores]:
        watch(trees[0])
        return {0: _score(rules, trees[0], answer_length)}

    return drive(score, {0: shape.grow(shape.start())}, {})[0]


@pytest.mark.parametrize("rules", ["a grammar", "a grammar, sampled"])
@pytest.mark.parametrize("name", EVERY)
def test_no_shape_drafts_what_a_grammar_forbids(name, rules):
    """Claim: each drafted token is one the grammar allows at its place. Fails if a shape ranks the
    draft's own logits."""
    tree = _grow(EVERY[name], RULES[rules])
    assert all(
        _is_allowed(len(path(tree, node)) - 1, token) for node, token in enumerate(tree.tokens)
    )


@pytest.mark.parametrize("rules", ["banned words", "suppressed tokens"])
@pytest.mark.parametrize("name", EVERY)
def test_no_shape_drafts_a_banned_word(name, rules):
    """Claim: no banned word is drafted at any node."""
    assert not {*_grow(EVERY[name], RULES[rules]).tokens} & {*BANNED}


@pytest.mark.parametrize("name", EVERY)
def test_no_shape_drafts_what_top_k_leaves_out(name):
    """Claim: under top-k 2 no node has a token that is not among the two likeliest."""
    tree = _grow(EVERY[name], RULES["two tokens of top-k"])
    for node, token in enumerate(tree.tokens):
        above = [tree.tokens[each] for each in path(tree, node)[:-1]]
        assert token in _row([*CONTEXT, *above]).topk(2).indices.tolist()


@pytest.mark.parametrize("name", EVERY)
def test_every_shape_ranks_tokens_as_a_penalty_does(name):
    """Claim: the first token of a greedy draft is among the likeliest under a penalty, which takes
    the draft's own favourite out of them. Fails if a shape ranks the draft's own logits."""
    penalty = hf.RepetitionPenaltyLogitsProcessor(50.0)
    raw = _row(CONTEXT)
    tempting = [int(raw.argmax()), *CONTEXT]
    row = penalty(torch.tensor([tempting]), raw[None].clone())[0]
    assert int(row.argmax()) != int(raw.argmax()), "the penalty has to matter"

    def score(trees: dict[int, Tree]) -> dict[int, Scores]:
        scores = _score(Sampling(processors=(penalty,)), trees[0])
        return {0: Scores(scores.tree, scores.rows, scores.rules, tempting, 0)}

    shape = EVERY[name]
    tree = drive(lambda trees: score(dict(trees)), {0: shape.grow(shape.start())}, {})[0]
    if len(tree):
        # a context of four ids: the rows of the tree are still those after CONTEXT
        assert tree.tokens[0] in row.topk(3).indices.tolist()
        assert tree.tokens[0] != int(raw.argmax())


ENDS = tuple(range(0, VOCAB, 3))


@pytest.mark.parametrize("name", EVERY)
def test_no_shape_drafts_below_a_token_that_ends_the_answer(name):
    """Claim: such a token has no children, and where only such tokens are left no forward of the
    draft follows."""
    tree = _grow(EVERY[name], Sampling(end_ids=ENDS))
    assert not {tree.tokens[parent] for parent in tree.parents if parent != ROOT} & {*ENDS}
    forwards: list[Tree] = []
    _grow(EVERY[name], Sampling(end_ids=tuple(range(VOCAB))), forwards.append)
    assert len(forwards) <= 1


@pytest.mark.parametrize("left", [1, 2, 3, 4])
@pytest.mark.parametrize("name", EVERY)
def test_no_shape_drafts_more_levels_than_an_answer_can_take(name, left):
    """Claim: where an answer may have a few more tokens, all but the last of them are drafted at
    most, since the last one is the target's own. No forward of the draft is made for more. One
    token is always drafted, because a forward of the draft is needed to read the newest text."""
    forwards: list[Tree] = []
    rules = Sampling(max_tokens=20 + left)
    tree = _grow(EVERY[name], rules, forwards.append, answer_length=20)
    levels = max(1, left - 1)
    assert height(tree.parents) <= levels
    forwards_of_a_level = 5 if name == "best-5" else 1  # It scores one node at a time.
    assert len(forwards) <= levels * forwards_of_a_level


def test_control_shapes_draft_on_where_the_answer_goes_on():
    """Control: without an end in sight most shapes draft further than in the tests above."""
    trees = [_grow(shape, Sampling()) for shape in EVERY.values()]
    assert sum(height(tree.parents) > 3 for tree in trees) > len(trees) / 3
    below = [
        {tree.tokens[parent] for parent in tree.parents if parent != ROOT} & {*ENDS}
        for tree in trees
    ]
    assert sum(map(bool, below)) > len(trees) / 3


def test_control_the_drafts_own_logits_are_forbidden_here():
    """Control: without the rules most shapes draft something that they forbid."""
    drafted = [_grow(shape, Sampling()) for shape in EVERY.values()]
    odd = [tree for tree in drafted if {*tree.tokens} & {*BANNED}]
    assert len(odd) > len(drafted) / 2
