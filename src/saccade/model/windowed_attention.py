"""Attention by an explicit mask: layers with a window, and prompts read in both directions.

In most layers a row (a token of a forward) sees the keys of all tokens before it, which
:mod:`saccade.model.attention` computes without such a mask. In some it sees others: with a sliding
window the last keys alone (Gemma, Mistral), with chunks those of its own chunk (Llama 4), and in a
picture that is read in both directions also keys after it (Gemma 3 and 4, PaliGemma). Here a mask
over all keys of the cache says which of them each row sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.model.segments import Segment
from saccade.model.window_rule import KeyWindow

Queries = Float[Tensor, "head new head_dim"]
# Attention with ``LogitExtras`` writes its logits to a tensor. To bound the memory, rows are
# computed in groups of at most this many logits. A single row may have more.
MAX_LOGITS_AT_ONCE = 2**25


@dataclass(frozen=True)
class LogitExtras:
    """What a layer does to its logits besides scaling them.

    ``softcap`` is the c of c tanh(x / c), which bounds them (Gemma 2). ``sinks`` has one more logit
    for each head. Its share of the softmax goes to no value (gpt-oss).
    """

    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None

    def __bool__(self) -> bool:
        return self.softcap is not None or self.sinks is not None


def windows_of(config: Any, layers: Sequence[int]) -> list[KeyWindow | None]:
    """Returns the windows of these layers of a language model, by its config; None for each layer
    without one."""
    described = config.to_dict()
    kinds = described.get("layer_types")
    if kinds is None:
        size = described.get("sliding_window")
        # Mistral's configs have no layer types, so their window applies to every layer. Qwen2's
        # have a window that is used only if they say so.
        is_used = size is not None and described.get("use_sliding_window", True)
        return [KeyWindow(size) if is_used else None for _ in layers]
    window_by_kind = {kind: window_of_kind(config, kind) for kind in {*kinds}}
    return [window_by_kind[kinds[layer]] for layer in layers]


def window_of_kind(config: Any, kind: str) -> KeyWindow | None:
    """Returns the window of the layers of a kind, such as "sliding_attention"; None where they have
    none."""
    described = config.to_dict()
    size = described.get("sliding_window")
    chunk = described.get("attention_chunk_size")
    if "chunked" in kind and chunk is not None:
        return KeyWindow(chunk, chunked=True)
    if "sliding" in kind and size is not None:
        return KeyWindow(size)
    return None


def visible_keys(
    segment: Segment, window: KeyWindow | None
) -> tuple[Bool[Tensor, "new visible"], int]:
    """Returns which keys each row of a segment sees, and the first key that any row sees.

    The mask's first column is for that key, so the keys before it need not be read.

    A window measures distance in the text that ends with the row: the committed tokens, and then
    the nodes of a tree on the row's own path. For example, 10 committed tokens are followed by node
    0 and its two children, nodes 1 and 2, whose keys are in rows 10, 11 and 12 of the cache. In the
    text that ends with node 2, node 0 has the place 10 and node 2 has the place 11. So a window of
    two tokens shows node 0 to node 2.
    """
    new = segment.stop - segment.start
    key_count = segment.first_key + new
    # The columns of ``mask`` are the last keys of the cache. Without a window, every row sees all
    # keys before these.
    mask = segment.mask
    first_masked_key = key_count - mask.shape[1]
    # The cache row of the tree's first node. There are three cases, because ``scored_nodes`` or
    # ``committed_rows`` is 0, or both are:
    # - The segment begins with committed rows. The whole tree follows them, if there is one.
    # - Earlier forwards have scored the first nodes of the tree. The keys of these nodes are right
    #   before the segment's own.
    # - The segment is the whole tree.
    tree_start = segment.first_key - segment.scored_nodes + segment.committed_rows
    visible = torch.ones(new, key_count, dtype=torch.bool)
    visible[:, first_masked_key:] = mask
    layer_sees_ahead = window is not None or not segment.sees_ahead_in_windows_only
    if segment.last_visible_row is not None and layer_sees_ahead:
        # Rows with the same last visible row see each other.
        reach = segment.last_visible_row.cpu()
        visible[:, segment.first_key :] |= reach[:, None] == reach
    if window is None:
        return visible, 0
    # A "place" is a row's or a key's number, from 0 on, in the text that ends with the row. The
    # comments below give the numbers of node 2 in the example above.
    path = visible[segment.committed_rows :, tree_start:]  # Ancestors and the node itself: 1, 0, 1.
    row_places = segment.first_key + torch.arange(new)
    row_places[segment.committed_rows :] = tree_start - 1 + path.sum(1)  # 10 - 1 + 2 = 11.
    key_places = torch.arange(key_count).repeat(new, 1)
    # For each node, how many nodes of the path come after it: 1, 0, 0. A sum from the right also
    # counts the node itself.
    nodes_after = path.int().flip(1).cumsum(1).flip(1) - 1
    # The row's place less this number is the place of a node of the path: 10 for node 0 and 11 for
    # node 2. The places of other nodes do not matter, because `visible` leaves them out.
    node_row_places = row_places[segment.committed_rows :, None]
    key_places[segment.committed_rows :, tree_start:] = node_row_places - nodes_after
    visible &= window.covers(row_places[:, None], key_places)
    first = int(visible.any(0).int().argmax())
    return visible[:, first:], first


def attend_visible(
    q: Queries,
    k: Float[Tensor, "kv_head key head_dim"],
    v: Float[Tensor, "kv_head key value_dim"],
    visible: Bool[Tensor, "new key"],
    scale: float,
    extras: LogitExtras,
) -> Float[Tensor, "head new value_dim"]:
    """Returns attention over the keys that each row sees. Values may have a width of their own."""
    if extras:
        return _attend_with_extras(q, k, v, visible, scale, extras)
    grouped = q.shape[0] != k.shape[0]
    out = scaled_dot_product_attention(
        q[None], k[None], v[None], visible[None, None], scale=scale, enable_gqa=grouped
    )
    return out[0]


def _attend_with_extras(
    q: Queries, k: Tensor, v: Tensor, visible: Tensor, scale: float, extras: LogitExtras
) -> Tensor:
    """Does what :func:`attend_visible` does, for a layer with a softcap or with sinks."""
    heads, new, width = q.shape
    kv_heads, key_count = k.shape[:2]
    rows_at_once = max(1, MAX_LOGITS_AT_ONCE // (heads * key_count))
    outputs = []
    for start in range(0, new, rows_at_once):
        rows = slice(start, start + rows_at_once)
        grouped_queries = q[:, rows].reshape(kv_heads, -1, width)
        logits = (grouped_queries @ k.transpose(1, 2)).view(heads, -1, key_count) * scale
        if extras.softcap is not None:
            logits = torch.tanh(logits / extras.softcap) * extras.softcap
        logits = logits.masked_fill(~visible[rows], float("-inf")).float()
        if extras.sinks is not None:
            sinks = extras.sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
            weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        weights = weights.to(v.dtype).reshape(kv_heads, -1, key_count)
        outputs.append((weights @ v).view(heads, -1, v.shape[-1]))
    return torch.cat(outputs, 1)


def last_visible_rows(
    mask: Bool[Tensor, "len len"], window: KeyWindow | None = None
) -> Int[Tensor, " len"] | None:
    """Returns the last key that each row of a prompt sees, by the mask that a model made for it;
    None where no row sees a key after itself.

    For example, it is 0, 3, 3, 3, 4 for a row of text, a picture of three rows that see each other,
    and a row of text.

    Raises ValueError unless the mask follows from these numbers and from the ``window``. By such a
    mask a row sees two kinds of keys: those up to its own, and later ones whose rows have the same
    number. With a window it sees only those of them that are in the window.
    """
    length = len(mask)
    places = torch.arange(length, device=mask.device)
    reach = torch.where(mask, places, -1).amax(1).clamp(min=places)
    expected = (places <= places[:, None]) | (reach == reach[:, None])
    if window is not None:
        expected &= window.covers(places[:, None], places[None])
    if not bool((mask == expected).all()):
        raise ValueError("rows that see one later key do not all see each other")
    return None if torch.equal(reach, places) else reach
