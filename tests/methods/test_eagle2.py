"""Claims about EAGLE-2's tree, against its two phases written as loops over whole paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree, path
from saccade.methods import resolve
from saccade.methods.eagle2 import Eagle2

VOCAB = 7
Path = tuple[int, ...]


def law_after(path: Path, seed: int) -> torch.Tensor:
    """The draft's logits after a path, which no other path has."""
    rng = np.random.default_rng([seed, len(path), *path])
    return torch.tensor(rng.normal(size=VOCAB) * 2, dtype=torch.float32)


def grow(shape: Eagle2, seed: int, banned: int | None = None) -> tuple[set[Path], list[int], Tree]:
    """The paths of the shape's tree, how many nodes each forward had newly, and the tree."""
    growing, new, scored = shape.grow(shape.start()), [], 0
    try:
        tree = next(growing)
        while True:
            new.append(len(tree) - scored)
            scored = len(tree)
            rows = [law_after(words(tree, node), seed) for node in range(ROOT, len(tree))]
            if banned is not None:
                rows = [row.index_fill(0, torch.tensor(banned), -math.inf) for row in rows]
            tree = growing.send(Scores(tree, rows, Sampling(), (), 0))
    except StopIteration as stop:
        final: Tree = stop.value
        return {words(final, node) for node in range(len(final))}, new, final


def words(tree: Tree, node: int) -> Path:
    return tuple(tree.tokens[at] for at in path(tree, node))


def by_hand(shape: Eagle2, seed: int, *, by_own: bool = False, reranks: bool = True) -> set[Path]:
    """Expand, then rerank, as the paper says it. Expanding by a token's own probability alone, and
    leaving the second phase out, are mistakes that the tests have to notice."""

    def value(path: Path) -> float:
        laws = [law_after(path[:end], seed).double().softmax(-1) for end in range(len(path))]
        return math.prod(float(law[token]) for law, token in zip(laws, path, strict=True))

    layer: list[Path] = [()]
    candidates: list[Path] = []
    expanded: list[Path] = []
    for _ in range(shape.levels):
        children = []
        for above in layer:
            best = law_after(above, seed).argsort(descending=True)[: shape.top].tolist()
            children += [(*above, token) for token in best]
        candidates += children
        worth = (lambda path: value(path) / value(path[:-1])) if by_own else value
        layer = sorted(children, key=worth, reverse=True)[: shape.top]
        expanded += layer
    if not reranks:
        return set(expanded)
    return set(sorted(candidates, key=lambda path: (-value(path), len(path)))[: shape.nodes])


@pytest.mark.representatives(12)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("levels, top, nodes", [(1, 3, 2), (3, 2, 5), (4, 3, 12), (6, 4, 30)])
def test_it_expands_and_reranks_as_the_paper_says(levels, top, nodes, seed):
    """Claim: any laws give the paper's tree. Fails if nodes are expanded by their own probability
    alone, if the tree is what was expanded, or if equals or levels are mixed up."""
    shape = Eagle2(levels=levels, top=top, nodes=nodes)
    assert grow(shape, seed)[0] == by_hand(shape, seed)


@pytest.mark.parametrize("mistake", [{"by_own": True}, {"reranks": False}])
def test_another_rule_gives_another_tree(mistake):
    """Control: each mistake gives another tree for some laws."""
    shape = Eagle2(levels=4, top=3, nodes=12)
    assert any(grow(shape, seed)[0] != by_hand(shape, seed, **mistake) for seed in range(6))


def test_a_level_is_one_forward_of_at_most_ten_nodes():
    """Claim: by default six forwards, of the text and then of ten nodes each, and 60 nodes or as
    many as there are. Fails if candidates that nobody expands are scored."""
    shape = resolve("specvlm/shape=eagle-2").shape
    assert shape == Eagle2(levels=6, top=10, nodes=60)
    paths, new, tree = grow(shape, 3)
    assert new == [0, VOCAB, *[10] * 4]  # The first level has no more than the vocabulary.
    assert len(tree) == len(paths) == 60


def test_a_forbidden_token_is_in_no_tree():
    """Claim: what the request's rules forbid is no candidate, and every parent stands before its
    children. Fails if a probability of zero is drafted."""
    paths, _, tree = grow(Eagle2(levels=3, top=VOCAB, nodes=40), 1, banned=2)
    assert paths and not any(2 in path for path in paths)
    assert all(parent < node for node, parent in enumerate(tree.parents))
