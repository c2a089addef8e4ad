"""What Prometheus asks for, with vLLM's names behind our prefix."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from saccade.core.result import Result, RoundRecord

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    """One server's numbers."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"saccade_{name}", about, labels, registry=own)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"saccade_{name}", about, buckets=buckets, registry=own)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"saccade_{name}", about, registry=own)

        self.running = gauge("num_requests_running", "Requests whose rows are worked on.")
        self.waiting = gauge("num_requests_waiting", "Requests let in that wait.")
        self.kept = gauge("prefix_cache_bytes", "Media and prompts kept for later requests.")
        self._success = counter("request_success", "Answers, by how they ended.", "finished_reason")
        self.refused = counter(
            "request_refused", "Requests without an answer, by status.", "status"
        )
        self.cancelled = counter("request_cancelled", "Requests whose client hung up.")
        self._prompt = counter("prompt_tokens", "Tokens read.")
        self._hits = counter("prefix_cache_hits", "Tokens of prompts kept from earlier requests.")
        self._written = counter("generation_tokens", "Tokens written.")
        self._fallbacks = counter("spec_decode_fallbacks", "Answers finished by plain decoding.")
        self._drafts = counter("spec_decode_num_drafts", "Rounds with drafted tokens.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._places = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place in the draft.",
            "position",
        )
        self._first = histogram(
            "time_to_first_token_seconds", "From a request's JSON to its first token.", FIRST
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Seconds a token of a round took.", BETWEEN
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From a request's JSON to its last token.", WHOLE
        )

    def answered(self, result: Result, first: float, whole: float) -> None:
        """``first`` and ``whole`` in seconds since the request came."""
        self._success.labels(result.finish_reason).inc()
        self._prompt.inc(result.prompt_tokens)
        self._hits.inc(result.reused_tokens)
        self._written.inc(len(result.ids))
        self._fallbacks.inc(result.fallback_reason is not None)
        self._first.observe(first)
        self._whole.observe(whole)
        for round in result.forwards:
            self._round(round)

    def _round(self, round: RoundRecord) -> None:
        emitted = len(round.emitted)
        for _ in range(emitted):
            self._between.observe((round.draft_seconds + round.verify_seconds) / emitted)
        if round.tokens:
            self._drafts.inc()
            self._drafted.inc(len(round.tokens))
            self._accepted.inc(len(round.accepted))
            for place in range(len(round.accepted)):
                self._places.labels(str(place)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
