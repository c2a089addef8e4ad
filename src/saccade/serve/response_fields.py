"""Makes the fields of the server's responses that describe how an answer was decoded.

These are log-probabilities, usage, the statistics of drafting, and the field ``saccade``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.answer_text import UNFINISHED
from saccade.core.result import Result, Round, RoundRecord
from saccade.core.tree import ROOT

MIN_LOGPROB = -9999.0  # OpenAI writes this where a probability is zero, since JSON has no infinity.


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability under the target and those of the likeliest tokens in its place.

    Logarithms are natural, and of the logits before any sampling rule.
    """

    token: int  # its id
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), likeliest first


def token_logprobs(round: Round, top_count: int) -> list[TokenLogprobs]:
    """Returns one entry for each token that a round emitted, from the target's scores (``p``) that
    verified it."""
    entries = []
    # Each token was judged by the scores at the node before it, the first one by those at the root.
    # Where the target adds no token of its own, for example because a stop has cut the round, no
    # token comes after the last node. So there is one node more than tokens, and zip leaves it out.
    for token, node in zip(round.emitted, (ROOT, *round.verdict.path), strict=False):
        logprobs = round.p.raw_logits(node).float().log_softmax(-1)
        best = logprobs.topk(min(top_count, len(logprobs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        entries.append(TokenLogprobs(token, float(logprobs[token]), tuple(pairs)))
    return entries


def logprobs_field(
    entries: Sequence[TokenLogprobs], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Returns OpenAI's ``logprobs`` of a choice."""

    def token_fields(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        # A token that is only a part of a character decodes to a replacement character, which does
        # not show the token's bytes.
        encoded = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": encoded}

    return {
        "content": [
            {
                **token_fields(entry.token, entry.logprob),
                "top_logprobs": [token_fields(*pair) for pair in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def usage_field(results: Sequence[Result], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Returns OpenAI's ``usage``; a prompt that has several answers is counted once."""
    prompt_tokens = results[0].prompt_tokens
    completion_tokens = sum(len(result.ids) for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": results[0].reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def speculation_field(rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """Returns the statistics of drafting, in vLLM's form; a step is a round with drafted tokens.

    ``mean_acceptance_length`` counts the target's own token too. Every node of a tree counts as a
    drafted token.
    """
    steps = [round for round in rounds if round.tokens]
    accepted = [len(round.accepted) for round in steps]
    drafted = [len(round.tokens) for round in steps]
    longest = max(accepted, default=0)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps) if steps else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if steps else 0.0,
        "acceptance_histogram": [accepted.count(length) for length in range(longest + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": max(drafted, default=0),
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def saccade_field(results: Sequence[Result], warnings: Sequence[str]) -> dict[str, Any]:
    """Returns what only this server reports: the method, and what did not go as requested."""
    reasons = [result.fallback_reason for result in results if result.fallback_reason]
    all_warnings = [*warnings, *(text for result in results for text in result.warnings)]
    return {
        "method": results[0].method,
        "fallback_reason": reasons[0] if reasons else None,
        "warnings": list(dict.fromkeys(all_warnings)),
        "timings": {
            "first_token": results[0].timings.first_token,
            "decode": max(result.timings.decode for result in results),
            "total": max(result.timings.total for result in results),
        },
    }
