"""The metrics that Prometheus scrapes. Those that vLLM has too have its names behind our prefix."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from saccade.core.result import Result, RoundRecord

# Upper bounds of the histograms' buckets, in seconds.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    """One server's metrics."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(f"saccade_{name}", description, labels, registry=registry)

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"saccade_{name}", description, buckets=buckets, registry=registry)

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(f"saccade_{name}", description, registry=registry)

        self.running = gauge(
            "num_requests_running", "Requests that are being prefilled or decoded."
        )
        self.waiting = gauge(
            "num_requests_waiting", "Admitted requests that wait, also for their media."
        )
        self.cache_bytes = gauge("prefix_cache_bytes", "Media and prompts kept for later requests.")
        self._success = counter("request_success", "Answers, by how they ended.", "finished_reason")
        self.refused = counter(
            "request_refused", "Requests without an answer, by status.", "status"
        )
        self.cancelled = counter("request_cancelled", "Requests whose client hung up.")
        self._prompt = counter("prompt_tokens", "Tokens read.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens whose keys were reused.")
        self._generated = counter("generation_tokens", "Tokens written.")
        self._fallbacks = counter("spec_decode_fallbacks", "Answers finished by plain decoding.")
        self._drafts = counter("spec_decode_num_drafts", "Rounds with drafted tokens.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place in the draft.",
            "position",
        )
        self._first_token_seconds = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival, before its body is read, to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token_seconds = histogram(
            "inter_token_latency_seconds",
            "A round's seconds divided by its tokens.",
            INTER_TOKEN_BUCKETS,
        )
        self._request_seconds = histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival, before its body is read, to its last token.",
            LATENCY_BUCKETS,
        )

    def count_answer(
        self, result: Result, first_token_seconds: float, total_seconds: float
    ) -> None:
        """Counts a finished answer; both times are seconds since its request arrived."""
        self._success.labels(result.finish_reason).inc()
        self._prompt.inc(result.prompt_tokens)
        self._hits.inc(result.reused_tokens)
        self._generated.inc(len(result.ids))
        self._fallbacks.inc(result.fallback_reason is not None)
        self._first_token_seconds.observe(first_token_seconds)
        self._request_seconds.observe(total_seconds)
        for round in result.forwards:
            self._count_round(round)

    def _count_round(self, round: RoundRecord) -> None:
        # A round's tokens come together, so each is counted with an equal part of its seconds.
        emitted = len(round.emitted)
        for _ in range(emitted):
            self._inter_token_seconds.observe(
                (round.draft_seconds + round.verify_seconds) / emitted
            )
        if round.tokens:
            self._drafts.inc()
            self._drafted.inc(len(round.tokens))
            self._accepted.inc(len(round.accepted))
            for position in range(len(round.accepted)):
                self._accepted_per_position.labels(str(position)).inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
