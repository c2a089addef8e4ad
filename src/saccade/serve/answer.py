"""Rounds to what a client reads: text as it becomes certain, log-probabilities, numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.result import UNFINISHED, Result, Round, RoundRecord
from saccade.core.tree import ROOT

WINDOW = 32  # tokens that are enough for a decoder to know how the next is written


class Writer:
    """Tokens to text, piece by piece; the pieces together are the answer's text.

    Held back is a character of which only some bytes have come, and what may turn out to be the
    beginning of a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []  # the last ones, which are decoded again with every piece
        self._before, self._repeated = "", ""  # the text up to them; their own part of it
        self._shown = ""

    def write(self, tokens: Sequence[int]) -> str:
        self._ids += tokens
        late = self._decode(self._ids)
        whole = self._before + late[len(self._repeated) :]
        if len(self._ids) > 2 * WINDOW and not late.endswith(UNFINISHED):
            self._ids = self._ids[-WINDOW:]
            self._before, self._repeated = whole, self._decode(self._ids)
        whole = whole.rstrip(UNFINISHED)
        held = max((_begun(whole, stop) for stop in self._stops), default=0)
        return self._upto(whole[: len(whole) - held])

    def finish(self, text: str) -> str:
        """The rest, now that the whole answer is known."""
        return self._upto(text)

    def _upto(self, text: str) -> str:
        if len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece


def _begun(text: str, stop: str) -> int:
    """How many of a text's last characters may belong to a stop string."""
    if stop in text:
        return len(text) - text.index(stop)
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Likely:
    """A token, what the target gave it, and the likeliest there: natural logs, no sampling rule."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def likelihoods(round: Round, top: int) -> list[Likely]:
    """One for each token a round emitted, from the rows that verified it."""
    found = []
    for token, node in zip(round.tokens, (ROOT, *round.verdict.path), strict=False):
        law = round.p.raw(node).float().log_softmax(-1)
        best = law.topk(min(top, len(law)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append(Likely(token, float(law[token]), tuple(pairs)))
    return found


def logprobs(likely: Sequence[Likely], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """OpenAI's form of it."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        # a token of a few bytes of a character has no bytes that text could tell
        spelt = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": spelt}

    return {
        "content": [
            {**one(each.token, each.logprob), "top_logprobs": [one(*pair) for pair in each.top]}
            for each in likely
        ],
        "refusal": None,
    }


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of a prompt that was read for each of its answers, counted once."""
    prompt, written = results[0].prompt_tokens, sum(len(result.ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": results[0].reused_tokens},
    }


def speculation(rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """What drafting did, in the shape vLLM gives it; a step is a round with drafted tokens.

    ``mean_acceptance_length`` counts the target's own token; of a tree every node is drafted.
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


def about(results: Sequence[Result], warnings: Sequence[str]) -> dict[str, Any]:
    """What only this server tells: by which method, and what did not go as asked."""
    reasons = [result.fallback_reason for result in results if result.fallback_reason]
    said = [*warnings, *(text for result in results for text in result.warnings)]
    return {
        "method": results[0].method,
        "fallback_reason": reasons[0] if reasons else None,
        "warnings": list(dict.fromkeys(said)),
        "timings": {
            "first_token": results[0].timings.first_token,
            "decode": max(result.timings.decode for result in results),
            "total": max(result.timings.total for result in results),
        },
    }
