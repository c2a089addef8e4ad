"""Rotary rules that depend on how long a text is (dynamic NTK, longrope).

transformers takes the length from the largest position in a forward, remembers the largest length
it has met, and rotates every row of the forward by it. So with rows of several requests, or several
drafted tokens, a row would be rotated by its neighbours' length. Here each row is rotated as in a
text of its own that ends there, by a module that remembers nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.errors import ModelError

BY_LENGTH = ("dynamic", "longrope")


def depends_on_length(text: Any) -> bool:
    """Whether a decoder's rotary rule depends on the length of the text.

    Raises ModelError where it does in a way that cannot be followed row by row.
    """
    rules = text.config.to_dict().get("rope_parameters") or {}
    nested = [rule for rule in rules.values() if isinstance(rule, dict)]
    if any(_by_length(rule) for rule in nested):
        raise ModelError(
            f"{type(text).__name__} has rotary rules that depend on the text's length and differ "
            "by layer, which Saccade does not follow"
        )
    if not _by_length(rules):
        return False
    if "rotary_emb" not in vars(text)["_modules"]:
        raise ModelError(
            f"{type(text).__name__} rotates by the text's length in a place Saccade does not know"
        )
    return True


def _by_length(rule: dict[str, Any]) -> bool:
    return any(kind in str(rule.get("rope_type")) for kind in BY_LENGTH)


@torch.no_grad()
def rotate_by_length(
    rotary: Any,
    lengths: Int[Tensor, " rows"] | Int[Tensor, " 1"],
    x: Float[Tensor, "1 rows dim"],
    position_ids: Int[Tensor, "*axes rows"],
    **more: Any,
) -> tuple[Float[Tensor, "*axes rows head_dim"], Float[Tensor, "*axes rows head_dim"]]:
    """cos and sin of each row, as the rotary module gives them in a text of that row's length.

    ``lengths``: of each row's text, or one for all. A position that ends the text comes along to
    tell the rule its length.
    """
    lengths = lengths.expand(position_ids.shape[-1])
    parts: list[tuple[Tensor, Tensor]] = []
    for length, count in zip(*_runs(lengths), strict=True):
        done = sum(part[0].shape[-2] for part in parts)
        own = position_ids[..., done : done + count]
        end = own.new_full((*own.shape[:-1], 1), length - 1)
        fresh = type(rotary)(rotary.config).to(x.device)
        cos, sin = fresh(x, torch.cat([own, end], -1), **more)
        parts.append((cos[..., :-1, :], sin[..., :-1, :]))
    cosines, sines = zip(*parts, strict=True)
    return torch.cat(cosines, -2), torch.cat(sines, -2)


def _runs(lengths: Int[Tensor, " rows"]) -> tuple[list[int], list[int]]:
    """Each run of equal lengths, and of how many rows it is."""
    values, counts = torch.unique_consecutive(lengths, return_counts=True)
    return values.tolist(), counts.tolist()
