"""Computes rotary embeddings row by row, for rotary rules that depend on the text's length.

Such rules are dynamic NTK and longrope, and ``backbone`` uses this module for them. transformers
takes the length from the largest position in a forward, remembers the largest length so far, and
rotates every row of the forward by it. With rows of several requests, or with several drafted
tokens, a row would be rotated by its neighbours' length. Here the caller says how long each row's
text is, and each row is rotated as in a text of that length, by a module that remembers nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.errors import ModelError

LENGTH_DEPENDENT_RULES = ("dynamic", "longrope")


def depends_on_length(text: Any) -> bool:
    """Returns whether a decoder's rotary rule depends on the length of the text.

    Raises ModelError for a rule that does and that cannot be applied row by row.
    """
    rules = text.config.to_dict().get("rope_parameters") or {}
    nested = [rule for rule in rules.values() if isinstance(rule, dict)]
    if any(_is_length_dependent(rule) for rule in nested):
        raise ModelError(
            f"{type(text).__name__} has rotary rules that depend on the text's length and differ "
            "by layer, which Saccade does not follow"
        )
    if not _is_length_dependent(rules):
        return False
    if "rotary_emb" not in vars(text)["_modules"]:
        raise ModelError(
            f"{type(text).__name__} rotates by the text's length in a place Saccade does not know"
        )
    return True


def _is_length_dependent(rule: dict[str, Any]) -> bool:
    return any(name in str(rule.get("rope_type")) for name in LENGTH_DEPENDENT_RULES)


@torch.no_grad()
def rotary_by_length(
    rotary: Any,
    lengths: Int[Tensor, " rows"] | Int[Tensor, " 1"],
    x: Float[Tensor, "1 rows dim"],
    position_ids: Int[Tensor, "*axes rows"],
    **rotary_arguments: Any,
) -> tuple[Float[Tensor, "*axes rows head_dim"], Float[Tensor, "*axes rows head_dim"]]:
    """Returns cos and sin of each row, as ``rotary`` gives them in a text of that row's length.

    ``lengths`` has the number of tokens of each row's text, or one number for all rows. The rule
    takes the length from the largest position that it gets. So the last position of the text is
    passed along with the rows, and what is returned for that position is dropped.
    """
    lengths = lengths.expand(position_ids.shape[-1])
    parts: list[tuple[Tensor, Tensor]] = []
    start = 0  # The first row of a run of rows whose texts are equally long.
    for length, count in zip(*_runs_of_equal_lengths(lengths), strict=True):
        positions = position_ids[..., start : start + count]
        end = positions.new_full((*positions.shape[:-1], 1), length - 1)
        # ``rotary`` itself would remember the largest length that it has seen.
        fresh_rotary = type(rotary)(rotary.config).to(x.device)
        cos, sin = fresh_rotary(x, torch.cat([positions, end], -1), **rotary_arguments)
        parts.append((cos[..., :-1, :], sin[..., :-1, :]))
        start += count
    cosines, sines = zip(*parts, strict=True)
    return torch.cat(cosines, -2), torch.cat(sines, -2)


def _runs_of_equal_lengths(lengths: Int[Tensor, " rows"]) -> tuple[list[int], list[int]]:
    """Returns the length of each run of equal lengths, and how many rows it has."""
    values, counts = torch.unique_consecutive(lengths, return_counts=True)
    return values.tolist(), counts.tolist()
