"""Claims about Hugging Face's ways to decode: a seeing assistant, and how decoding is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers import few
from torch import nn
from written_out import Embedded

from saccade.bench.comparison import BASELINE, resolve_methods, run_interleaved
from saccade.bench.peers import PEERS, TimedRun, peer_run
from saccade.core.errors import ModelError
from saccade.core.prompt import Inputs
from saccade.inputs import Pair, ask
from saccade.inputs.media import Clip
from saccade.world import suites

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = 40


def make_inputs(embedded: Embedded, suite: str, number: int = 0) -> Inputs:
    item = list(suites.suites()[suite].items())[number]
    media = [medium.read() for medium in item.media]
    return ask(
        embedded.target,
        item.question,
        clips=[each for each in media if isinstance(each, Clip)],
        images=[each for each in media if not isinstance(each, Clip)],
    )


@contextmanager
def forwards(module: nn.Module) -> Iterator[list[int]]:
    """How many times a module runs."""
    count = [0]

    def tick(*given: Any) -> None:
        count[0] += 1

    handle = module.register_forward_hook(tick)
    try:
        yield count
    finally:
        handle.remove()


def peer(name: str, embedded: Embedded, inputs: Inputs, **more: Any) -> tuple[TimedRun, int]:
    """A peer's answer and the target's decoder forwards it took."""
    settings = {"do_sample": False, "max_new_tokens": TOKENS, **more}
    with forwards(embedded.target.backbone.model.get_decoder()) as count:
        run = PEERS[name](*embedded, inputs, settings)
    return run, count[0]


@pytest.mark.slow
@pytest.mark.parametrize("suite", few(["shapes-caption", "shapes-diff"], 1))
def test_a_seeing_assistant_helps(embedded: Embedded, suite: str) -> None:
    """Claim: hf-assisted-seeing gives plain generate's ids in far fewer target calls than
    hf-assisted, whose assistant never sees the video or the pictures.

    Fails if the hook does not bring the pixels to the assistant. Control: plain generate takes a
    call a token.
    """
    inputs = make_inputs(embedded, suite, 1)
    plain, calls = peer("hf", embedded, inputs)
    blind, with_blind = peer("hf-assisted", embedded, inputs)
    seeing, with_seeing = peer("hf-assisted-seeing", embedded, inputs)
    assert calls == len(plain.ids) > TOKENS // 2
    assert seeing.ids == blind.ids == plain.ids
    assert 2 * with_seeing < with_blind <= calls
    # several tokens come first, and are no decoding
    assert len(plain.ids) - plain.decoded_tokens == 1 < len(seeing.ids) - seeing.decoded_tokens


@pytest.mark.extra
def test_the_hook_is_removed(embedded: Embedded) -> None:
    """Claim: the assistant's hook is there while it generates, and gone afterwards, come what may.

    Fails if an error leaves it: whatever used the draft next would be shown an old video.
    """
    hooks = embedded.draft.backbone.model._forward_pre_hooks
    inputs = make_inputs(embedded, "shapes-caption")
    seen: list[int] = []

    def fail(ids: Any, scores: Any) -> Any:
        seen.append(len(hooks))
        raise RuntimeError("in the middle")

    before = len(hooks)
    with pytest.raises(RuntimeError, match="in the middle"):
        peer("hf-assisted-seeing", embedded, inputs, logits_processor=[fail])
    assert seen[0] == before + 1 and len(hooks) == before
    peer("hf-assisted-seeing", embedded, inputs, max_new_tokens=4)
    assert len(hooks) == before
    with pytest.raises(ValueError, match="needs a draft"):
        PEERS["hf-assisted-seeing"](embedded.target, None, inputs, {})


def decoding(ids: tuple[int, ...], first: float, total: float, early: int = 1) -> object:
    run = peer_run(ids, first, total, early)
    return run.decode_seconds, run.decoded_tokens


def test_what_counts_as_decoding() -> None:
    """Claim: a peer's decoding is what follows the tokens it handed over first, by hand.

    Fails if the first tokens' time is left out and they themselves are not.
    """
    ids = tuple(range(10))
    assert decoding(ids, 2.0, 5.0) == (3.0, 9)
    assert decoding(ids, 2.0, 5.0, early=4) == (3.0, 6)
    assert decoding(ids, 5.0, 5.0, early=10) == (5.0, 10)  # all at once: everything counts
    assert decoding(ids[:1], 2.0, 2.0) == (2.0, 1)
    assert decoding((), 0.0, 2.0) == (2.0, 1)


def test_compare_counts_decoding_from_the_second_token(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a comparison's figures are per token that came of decoding, by hand.

    Fails if a peer that hands over 4 of 10 tokens at first is credited with all 10, or ours with
    the token that came of the prefill.
    """
    given = peer_run(tuple(range(10)), 2.0, 5.0, early=4)
    monkeypatch.setitem(PEERS, "hf-early", lambda *whatever: given)
    settings = {"do_sample": False, "max_new_tokens": 6}
    inputs = make_inputs(embedded, "shapes-caption")
    timed = run_interleaved(
        Pair(*embedded), (inputs, None), resolve_methods(["hf-early"]), repeat=1, settings=settings
    )
    rows, results = timed.summaries(), timed.last_results()
    row, plain = rows["hf-early"], rows[BASELINE]
    assert (row.decode_seconds, row.prefill_seconds, row.total_seconds) == (3.0, 2.0, 5.0)
    assert row.tokens == 10 and row.tokens_per_second == pytest.approx(6 / 3)
    times = results[BASELINE].timings
    assert plain.tokens == 6 and plain.decode_seconds == times.decode
    assert plain.tokens_per_second == pytest.approx(5 / times.decode)
    assert plain.speedup_decode == plain.speedup_end_to_end == 1.0
    assert row.speedup_decode == pytest.approx((times.decode / 5) / (3 / 6))
    assert row.speedup_end_to_end == pytest.approx((times.total / 6) / (5 / 10))
    assert TimedRun((), 1.0, 2.0, 3).result is None


def test_a_peer_that_fails_without_a_word_is_a_row(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a peer's error without a message is a row with its kind.

    Fails if the first line of nothing is asked for.
    """

    def crash(*given: Any) -> TimedRun:
        raise AssertionError

    monkeypatch.setitem(PEERS, "hf-crash", crash)
    settings = {"do_sample": False, "max_new_tokens": 3}
    inputs = make_inputs(embedded, "shapes-qa")
    rows = run_interleaved(
        Pair(*embedded), (inputs, None), resolve_methods(["hf-crash"]), repeat=1, settings=settings
    ).summaries()
    assert (rows["hf-crash"].error or "").startswith("AssertionError")
    assert rows[BASELINE].tokens == 3


@pytest.mark.extra
def test_a_method_that_needs_another_draft_ends_no_comparison(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: where many methods are compared at once, one that this pair cannot run has a row with
    the sentence that says why, and the others have their runs. Control: named by itself it is
    refused."""
    inputs = make_inputs(embedded, "shapes-qa")
    settings = {"do_sample": False, "max_new_tokens": 4}

    def race(may_refuse: tuple[str, ...]) -> Any:
        recipes = resolve_methods(("head", "sd"))
        pair = Pair(*embedded)
        return run_interleaved(
            pair, (inputs, None), recipes, repeat=1, settings=settings, may_refuse=may_refuse
        )

    rows = race(("head",)).summaries()
    assert "name a head with draft=" in rows["head"].error
    assert rows["sd"].identical_to_ar and rows["sd"].error is None
    with pytest.raises(ModelError, match="name a head"):
        race(())

    def fail(*_: Any, **options: Any) -> Any:
        raise ModelError("too long for this machine")

    # Without plain decoding there is nothing to compare with, so its refusal is everybody's.
    monkeypatch.setattr("saccade.bench.comparison.stream_answer", fail)
    with pytest.raises(ModelError, match="too long"):
        race(("ar", "head", "sd"))
