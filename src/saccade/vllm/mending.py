"""What vLLM 0.32 gets wrong on a CPU as soon as anyone drafts, set right in the draft's process.

Both are vLLM's own and meet its n-grams too (docs/upstream-vllm.md): temperature, top-k and top-p
of drafted rows are read from memory that nobody wrote, and top-k fails where a step has no draft.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor


def mend() -> None:
    """Puts both right; again changes nothing."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    if rejection_sampler.expand_batch_to_tokens is not expanded:
        rejection_sampler.expand_batch_to_tokens = expanded
        topk_topp_sampler.apply_top_k_only = of_rows(topk_topp_sampler.apply_top_k_only)


def expanded(
    x: Float[Tensor, " request"] | Int[Tensor, " request"],
    ends: Int[Tensor, " request"],
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Each request's value once for each of its drafted tokens, [token]; ``ends`` counts these up
    to and with each request."""
    spread = x.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    assert len(spread) == num_tokens
    return spread.where(spread != replace_from, replace_to)


def of_rows(limit: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """``limit`` for logits that may have no row."""

    def limited(logits: Float[Tensor, "token vocab"], k: Int[Tensor, " token"]) -> Tensor:
        return limit(logits, k) if len(logits) else logits

    return limited
