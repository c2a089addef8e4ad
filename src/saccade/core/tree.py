"""Trees of drafted tokens, and pure functions on them.

A shape grows a tree, the target scores all its nodes in one forward, and ``verify`` accepts a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

ROOT = -1
"""The parent of a tree's first nodes: the end of the committed text."""


@dataclass(frozen=True)
class Tree:
    """Drafted tokens. A chain is a tree; an empty tree is plain decoding.

    ``parents[i]`` is a node before ``i`` or ``ROOT``. ``q[i]`` is the law node ``i`` was *sampled*
    from, or None when it was *chosen* (arg-max, top-k), which counts as a law with all mass on it.
    Siblings that carry a q must be independent draws from one law, which each of them carries.
    ``confidences`` are the draft's probabilities of the nodes, empty unless the shape reads them.
    ``match_length`` is above 0 only for a draft that was copied from the text. It is how many of
    the text's last tokens were also found right before the passage that was copied.

    **The rule of every shape: a drawn token stands.** Whether tokens are drawn below a node, and
    how many, may depend on laws and on the path down to that node, its own token included. It must
    not depend on which tokens are drawn there, nor on anything drawn after them. For example, a
    chain may stop after an unlikely token, but it must not draw a token, see that it is unlikely
    and leave it out. What the next draft looks like may depend on laws and on tokens that the
    target judged, never on drawn tokens that it did not judge (proof: ``docs/lossless.md``;
    ``tests/laws`` holds shapes to it).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[Float[Tensor, " vocab"] | None, ...] = ()
    confidences: tuple[float, ...] = ()
    match_length: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


def add(
    tree: Tree,
    parent: int,
    token: int,
    q: Float[Tensor, " vocab"] | None = None,
    confidence: float | None = None,
) -> Tree:
    """Returns the tree with one more node under ``parent``."""
    # Drafts grow by a node at a time, and `dataclasses.replace` would take three times as long.
    return Tree(
        (*tree.tokens, token),
        (*tree.parents, parent),
        (*tree.q, q),
        tree.confidences if confidence is None else (*tree.confidences, confidence),
        tree.match_length,
    )


def chain(tokens: Sequence[int], q: Sequence[Float[Tensor, " vocab"] | None] | None = None) -> Tree:
    """Returns a chain of tokens: drawn from ``q``, or chosen where it is None."""
    laws = (None,) * len(tokens) if q is None else tuple(q)
    return Tree(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), laws)


def children(tree: Tree, node: int) -> list[int]:
    """Returns the nodes right under ``node``, in the order in which they were drafted."""
    return [child for child, parent in enumerate(tree.parents) if parent == node]


def count_drawn_at_level(tree: Tree, level: int) -> int:
    """Returns how many nodes of a level were drawn, not chosen; first tokens are level 1."""
    levels = depths(tree.parents)
    return sum(at == level and q is not None for at, q in zip(levels, tree.q, strict=True))


def path(tree: Tree, node: int) -> list[int]:
    """Returns the nodes from the root down to ``node`` inclusive; empty for ``ROOT``."""
    nodes: list[int] = []
    while node != ROOT:
        nodes.append(node)
        node = tree.parents[node]
    return nodes[::-1]


def depth(tree: Tree, node: int) -> int:
    """Returns the depth of a node: 1 for a first token, 0 for ``ROOT``."""
    return len(path(tree, node))


def depths(parents: Sequence[int]) -> list[int]:
    """Returns the depth of every node, from the parents of a tree or of a recorded round."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent == ROOT else levels[parent] + 1)
    return levels


def height(parents: Sequence[int]) -> int:
    """Returns the depth of the deepest node; 0 for an empty tree."""
    return max(depths(parents), default=0)


def is_chain(tree: Tree) -> bool:
    """Returns whether every node follows the one before it."""
    return all(parent == node - 1 for node, parent in enumerate(tree.parents))


@lru_cache(maxsize=256)
def ancestors(parents: tuple[int, ...]) -> Bool[Tensor, "node node"]:
    """Returns the tree's attention mask: row i marks node i and those above it. Do not modify."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return torch.from_numpy(mask)


def tree_mask(tree: Tree, cached_count: int, pending_count: int) -> Bool[Tensor, "new last"]:
    """Returns which of the newest keys each row of a forward may attend to. Older keys are not in
    the mask, because every row comes after all of them.

    There are two cases. If ``pending_count`` is 0, the first ``cached_count`` nodes have keys
    from earlier forwards: the rows are the other nodes, and the columns are all nodes. Otherwise
    the last ``pending_count`` committed tokens have no keys yet, and neither has any node, so
    ``cached_count`` is 0: rows and columns are these tokens, and then all nodes.
    """
    # The pending tokens are a chain, and the tree's first nodes follow the last of them. After two
    # pending tokens, a tree with the parents (-1, -1, 0) becomes (-1, 0, 1, 1, 2).
    pending_parents = range(ROOT, ROOT + pending_count)
    parents = (*pending_parents, *(parent + pending_count for parent in tree.parents))
    return ancestors(parents)[cached_count:]


def count_shared_nodes(first: Tree, second: Tree) -> int:
    """Returns how many leading nodes two trees have in common."""
    return common_length(
        zip(first.tokens, first.parents, strict=True),
        zip(second.tokens, second.parents, strict=True),
    )


def common_length(first: Iterable[object], second: Iterable[object]) -> int:
    """Returns how many leading items are equal."""
    count = 0
    for first_item, second_item in zip(first, second, strict=False):
        if first_item != second_item:
            break
        count += 1
    return count


def follow(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """Returns the nodes on the way from the root along ``tokens``, as far as the tree has them.

    Of siblings with the same token only the first is followed.
    """
    nodes: list[int] = []
    here = ROOT
    for token in tokens:
        matching = [child for child in children(tree, here) if tree.tokens[child] == token]
        if not matching:
            break
        here = matching[0]
        nodes.append(here)
    return nodes


def chain_without_first(line: Tree, count: int) -> Tree:
    """Returns what follows the first ``count`` nodes of a chain, as a chain of its own.

    It has no ``confidences`` and no ``match_length``.
    """
    return chain(line.tokens[count:], line.q[count:])


def subtree(tree: Tree, node: int) -> Tree:
    """Returns the nodes below ``node``, as a tree whose root is ``node``."""
    index = {node: ROOT}
    nodes: list[int] = []
    for child, parent in enumerate(tree.parents):
        if parent in index:
            index[child] = len(nodes)
            nodes.append(child)
    return Tree(
        tuple(tree.tokens[each] for each in nodes),
        tuple(index[tree.parents[each]] for each in nodes),
        tuple(tree.q[each] for each in nodes),
        tuple(tree.confidences[each] for each in nodes) if tree.confidences else (),
        tree.match_length,
    )


def prefix(tree: Tree, count: int) -> Tree:
    """Returns the first ``count`` nodes, as a tree."""
    return replace(
        tree,
        tokens=tree.tokens[:count],
        parents=tree.parents[:count],
        q=tree.q[:count],
        confidences=tree.confidences[:count],
    )


def find_fault(tree: Tree, vocab: int) -> tuple[int, str] | None:
    """Returns the first malformed node and what is wrong with it; None for a sound tree.

    The nodes before it are sound, so the target can verify them. No drawn token is dropped for its
    value (see ``Tree``): an id that was drawn from a q of at most ``vocab`` numbers is always below
    ``vocab``, and a longer q is a fault whatever was drawn. So only a chosen token is ever refused
    for its id.
    """
    complete = min(len(tree.tokens), len(tree.parents), len(tree.q))
    for node in range(complete):
        token = tree.tokens[node]
        parent = tree.parents[node]
        q = tree.q[node]
        if not ROOT <= parent < node:
            return node, f"node {node} has parent {parent}: parents must come first"
        if not 0 <= token < vocab or (q is not None and q.shape[0] > vocab):
            return node, f"a drafted id is outside the vocabulary of {vocab}"
    if not len(tree.tokens) == len(tree.parents) == len(tree.q):
        return complete, "a tree needs one token, one parent and one q (or None) per node"
    return None
