"""Attention by an explicit mask: layers with a window, and prompts read in both directions.

Most layers see every key before them, which :mod:`saccade.model.attention` computes without a mask.
Some do not: in a layer with a sliding window a row sees the last keys alone (Gemma, Mistral), in a
chunked one those of its own chunk (Llama 4), and the pictures of some families are read in both
directions (Gemma 3 and 4, PaliGemma). For these a mask says which keys of the cache each row sees.
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
# Attention with ``Extras`` writes its logits to a tensor. To bound the memory, rows are computed in
# groups of at most this many logits. A single row may have more.
MAX_LOGITS_AT_ONCE = 2**25


@dataclass(frozen=True)
class Extras:
    """What a layer does to its logits besides scaling them.

    ``softcap`` is the c of c tanh(x / c), which bounds them (Gemma 2). ``sinks`` has one more logit
    for each head. Its share of the softmax goes to no value (gpt-oss).
    """

    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None

    def __bool__(self) -> bool:
        return self.softcap is not None or self.sinks is not None


def windows_of(config: Any, layers: Sequence[int]) -> list[KeyWindow | None]:
    """Returns the windows of these layers of a language model, by its config."""
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
    size, chunk = described.get("sliding_window"), described.get("attention_chunk_size")
    if "chunked" in kind and chunk is not None:
        return KeyWindow(chunk, chunked=True)
    if "sliding" in kind and size is not None:
        return KeyWindow(size)
    return None


def visible_keys(
    segment: Segment, window: KeyWindow | None
) -> tuple[Bool[Tensor, "new visible"], int]:
    """Returns which keys each row of a segment sees, and the first key that any row sees.

    The columns begin with that key. The window counts tokens along each row's own path. For example
    nodes 0, 1 and 2 of a tree, of which 1 and 2 are both children of 0, follow 10 committed tokens.
    Then node 2 has place 11 in its text and sees node 0 at place 10, although the keys of these
    nodes are in rows 12 and 10 of the cache.
    """
    new = segment.stop - segment.start
    key_count = segment.first_key + new
    mask = segment.mask
    masked_keys = mask.shape[1]
    # The key of the tree's first node. Nodes that were scored earlier come before the segment's
    # rows. Committed rows, if there are any, come first in the segment.
    tree_start = segment.first_key - segment.scored_nodes + segment.committed_rows
    visible = torch.ones(new, key_count, dtype=torch.bool)
    visible[:, key_count - masked_keys :] = mask
    sees_later = window is not None or not segment.sees_ahead_in_windows_only
    if segment.last_visible_row is not None and sees_later:
        reach = segment.last_visible_row.cpu()
        visible[:, segment.first_key :] |= reach[:, None] == reach
    if window is None:
        return visible, 0
    # A window measures distance in the text that ends with the row: the committed tokens and then
    # the row's ancestors. A "place" is a row's or key's number in that text, from 0 on.
    path = visible[segment.committed_rows :, tree_start:]  # Each node's ancestors and itself.
    row_places = segment.first_key + torch.arange(new)
    row_places[segment.committed_rows :] = tree_start - 1 + path.sum(1)
    key_places = torch.arange(key_count).repeat(new, 1)
    # An ancestor's place is that of the row less the number of nodes after the ancestor on the
    # row's path. The places of other nodes do not matter, because `visible` leaves them out.
    path_nodes_from = path.int().flip(1).cumsum(1).flip(1)  # This node and those after it.
    node_row_places = row_places[segment.committed_rows :, None]
    key_places[segment.committed_rows :, tree_start:] = node_row_places - (path_nodes_from - 1)
    visible &= window.covers(row_places[:, None], key_places)
    first = int(visible.any(0).int().argmax())
    return visible[:, first:], first


def attend_visible(
    q: Queries,
    k: Float[Tensor, "kv_head key head_dim"],
    v: Float[Tensor, "kv_head key value_dim"],
    visible: Bool[Tensor, "new key"],
    scale: float,
    extras: Extras,
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
    q: Queries, k: Tensor, v: Tensor, visible: Tensor, scale: float, extras: Extras
) -> Tensor:
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

    In such a mask each row sees the keys before it, as far as the ``window`` of its layers reaches.
    Of the keys after it, it sees exactly the rows that have the same last key. Raises ValueError
    for any other mask.
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
