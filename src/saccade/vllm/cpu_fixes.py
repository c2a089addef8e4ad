"""Fixes two errors of vLLM 0.32 on a CPU that appear as soon as anything drafts.

Both are vLLM's own and appear with its n-grams too (docs/upstream-vllm.md): temperature, top-k and
top-p of drafted rows are read from uninitialised memory, and top-k fails in a step without a draft.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor


def apply_fixes() -> None:
    """Installs both fixes in this process; a second call changes nothing."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    if rejection_sampler.expand_batch_to_tokens is not expand_to_tokens:
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens
        topk_topp_sampler.apply_top_k_only = skip_empty(topk_topp_sampler.apply_top_k_only)


def expand_to_tokens(
    x: Float[Tensor, " request"] | Int[Tensor, " request"],
    ends: Int[Tensor, " request"],
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Repeats each request's value once for each of its drafted tokens, [token].

    It takes the place of vLLM's ``expand_batch_to_tokens``. ``num_tokens`` is the length of the
    result. ``ends`` has the number of drafted tokens up to and including each request. A value that
    equals ``replace_from`` becomes ``replace_to``.
    """
    values = x.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    assert len(values) == num_tokens
    return values.where(values != replace_from, replace_to)


def skip_empty(limit: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Wraps vLLM's top-k function ``limit``, which fails for logits without rows: these are
    returned as they are."""

    def limit_rows(logits: Float[Tensor, "token vocab"], k: Int[Tensor, " token"]) -> Tensor:
        return limit(logits, k) if len(logits) else logits

    return limit_rows
