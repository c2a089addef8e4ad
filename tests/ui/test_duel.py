"""Claims about the two answers that take turns: fair, exact, stoppable, and honest about time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from saccade.core.errors import MethodError, ModelError
from saccade.core.result import Result, Round, Timings, Verdict
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree, chain
from saccade.engine.generate import run
from saccade.inputs import ask
from saccade.inputs.media import Limits
from saccade.ui.duel import Duel, OnPhase, run_duel
from saccade.ui.page_run import PageModels, PageQuestion, PageRun, PageSettings, run_question

SHORT = "Five shapes, short (256)"
TOKENS = 24
UNREAD = Scores(Tree(), [], Sampling(), (), 0)


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """A stream whose every round takes the same time and emits tokens 1, 2, 3, ..."""

    def __init__(
        self, clock: Clock, tell: OnPhase, prefill: float, each: float, rounds: int
    ) -> None:
        self.results: list[Result] = []
        self.closed = False
        self._work = self._rounds(clock, tell, prefill, each, rounds)

    def __next__(self) -> Round:
        return next(self._work)

    def close(self) -> None:
        self.closed = True

    def _rounds(
        self, clock: Clock, tell: OnPhase, prefill: float, each: float, rounds: int
    ) -> Iterator[Round]:
        tell("prefill")
        clock.now += prefill
        tell("decode")
        for token in range(1, rounds + 1):
            clock.now += each
            yield Round(0, Tree(), Verdict((), (), token, "bonus"), None, UNREAD, None, 0.0, each)
        ids = tuple(range(1, rounds + 1))
        text = spelt(ids)
        self.results.append(Result(ids, text, "x", "stop", (), Timings(), 1, 0, None))


def spelt(ids: Any) -> str:
    return "".join(chr(96 + token) for token in ids)


def raced(
    plain: tuple[float, float, int], drafted: tuple[float, float, int], **others: Any
) -> tuple[list[Duel], list[Steps]]:
    """All snapshots of two made-up streams: (seconds of prefill, seconds a round, rounds)."""
    clock, streams = Clock(), []

    def begin(shape: tuple[float, float, int]) -> Callable[[OnPhase], Steps]:
        def start(tell: OnPhase) -> Steps:
            streams.append(Steps(clock, tell, *shape))
            return streams[-1]

        return start

    sides = ("ar", begin(plain)), ("x", begin(drafted))
    return list(run_duel(*sides, spelt, snapshot_seconds=0.0, clock=clock, **others)), streams


def question_for(method: str, **others: Any) -> PageQuestion:
    plain: dict[str, Any] = {"example": SHORT, "upload": None, "prompt": "Describe the video."}
    plain |= {"method": method, "tokens": TOKENS, "temperature": 0.0, "seed": 0}
    return PageQuestion(**{**plain, **others})


def last(pair: PageModels, question: PageQuestion) -> list[PageRun]:
    return list(run_question(pair, PageSettings(), question, lambda: False))


@pytest.mark.parametrize(("slow", "fast"), [(3.0, 1.0), (1.0, 7.0), (2.0, 2.0)])
def test_neither_side_works_more_than_a_step_ahead_of_the_other(slow: float, fast: float) -> None:
    """Claim: while both go on, their own seconds differ by one step of the longer at most.

    Fails if they took turns step by step, or by the tokens they have."""
    snapshots, _ = raced((0.0, slow, 20), (0.0, fast, 20))
    both = [now for now in snapshots if now.plain.result is None and now.drafted.result is None]
    assert len(both) > 20
    assert max(abs(now.plain.seconds - now.drafted.seconds) for now in both) <= max(slow, fast)


def test_each_clock_counts_its_own_work_alone_and_the_ratio_follows() -> None:
    """Claim: seconds, seconds before decoding, and both speed-ups are each side's own.

    Fails if a side's clock ran while the other worked, or if the first token, which comes of the
    prefill, counted as decoding."""
    snapshots, streams = raced((4.0, 2.0, 11), (5.0, 1.0, 11))
    end = snapshots[-1]
    assert end.is_complete and end.has_same_tokens and not end.stopped
    assert (end.plain.seconds, end.plain.seconds_before_decoding) == (26.0, 4.0)
    assert (end.drafted.seconds, end.drafted.seconds_before_decoding) == (16.0, 5.0)
    assert end.plain.seconds_per_token == pytest.approx(2.2)
    assert end.speedup == pytest.approx(2.0)
    assert end.end_to_end_speedup == pytest.approx(26 / 16)
    assert all(stream.closed for stream in streams)


def test_other_tokens_are_called_other_tokens() -> None:
    """Control: answers that differ must not be called the same."""
    snapshots, _ = raced((0.0, 1.0, 5), (0.0, 1.0, 6))
    assert snapshots[-1].has_same_tokens is False
    assert snapshots[0].has_same_tokens is None and snapshots[0].speedup is None


def test_stopping_ends_both_before_another_step() -> None:
    """Claim: once asked to stop no step is taken, the last snapshot says so, streams are closed."""
    asks = iter([False] * 9 + [True] * 99)
    snapshots, streams = raced((1.0, 1.0, 50), (1.0, 1.0, 50), should_stop=lambda: next(asks))
    end = snapshots[-1]
    assert end.stopped and not end.is_complete
    assert end.plain.token_count + end.drafted.token_count <= 5
    assert {end.plain.phase, end.drafted.phase} == {"stopped"}
    assert len(streams) == 2 and all(stream.closed for stream in streams)


def test_a_stop_before_the_first_token_keeps_the_seconds() -> None:
    """Claim: an answer that is stopped while it reads its prompt shows how long it has read."""
    clock = Clock()

    def start(tell: OnPhase) -> Steps:
        return Steps(clock, tell, prefill=4.0, each=1.0, rounds=50)

    def has_read() -> bool:
        return clock.now > 0

    snapshots = list(
        run_duel(("ar", start), ("x", start), spelt, should_stop=has_read, clock=clock)
    )
    assert snapshots[-1].stopped and snapshots[-1].plain.seconds == 4.0


def test_closing_it_closes_both_streams() -> None:
    """Claim: whoever stops asking for snapshots leaves no stream open behind."""
    clock, streams = Clock(), []

    def begin(tell: OnPhase) -> Steps:
        streams.append(Steps(clock, tell, 1.0, 1.0, 50))
        return streams[-1]

    going = run_duel(("ar", begin), ("x", begin), spelt, snapshot_seconds=0.0, clock=clock)
    for _ in range(6):
        next(going)
    going.close()
    assert len(streams) == 2 and all(stream.closed for stream in streams)


def test_a_round_is_spelt_in_pieces_of_its_kinds() -> None:
    """Claim: accepted tokens and the target's own are told apart, in order."""
    rounds = iter(
        [
            Round(0, chain([1, 2, 9]), Verdict((0, 1), (1, 2), 3, "recovered"), None, UNREAD, None,
                  0.0, 0.0),
            Round(0, chain([4]), Verdict((0,), (4,), 5, "bonus"), "stop", UNREAD, None, 0.0, 0.0),
        ]
    )  # fmt: skip

    class Made:
        results = [Result((1, 2, 3, 4, 5), "abcde", "x", "stop", (), Timings(), 1, 0, None)]

        def __next__(self) -> Round:
            return next(rounds)

        def close(self) -> None: ...

    clock = Clock()
    sides = ("ar", lambda tell: Steps(clock, tell, 0.0, 1.0, 1)), ("x", lambda tell: Made())
    side = list(run_duel(*sides, spelt, snapshot_seconds=0.0, clock=clock))[-1].drafted
    kinds = "accepted", "accepted", "recovered", "accepted", "bonus"
    assert [(piece.text, piece.kind) for piece in side.pieces] == list(
        zip("abcde", kinds, strict=True)
    )
    assert (side.tau, side.acceptance_rate) == (2.5, 3 / 4)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["auto", "sage", "tabed", "specvlm-self"])
def test_both_answers_are_the_ones_each_gives_alone(models: PageModels, method: str) -> None:
    """Claim: taking turns over one target changes neither answer, and the pieces spell them.

    Fails if one stream's work leaks into the other's."""
    runs = last(models, question_for(method))
    end = runs[-1].duel
    inputs = ask(models.target, "Describe the video.", clips=[runs[-1].clip])
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}
    alone = run(models.target.backbone, inputs, method="ar", **settings)
    assert end.has_same_tokens
    assert end.plain.result is not None and end.plain.result.ids == alone.ids
    assert end.drafted.result is not None and end.drafted.result.ids == alone.ids
    assert end.drafted.result.fallback_reason is None
    assert end.drafted.text == end.drafted.result.text == end.plain.text
    assert end.drafted.rounds == end.drafted.result.rounds
    assert end.plain.seconds > 0 and end.speedup is not None


@pytest.mark.extra
def test_a_sampled_answer_is_the_one_its_seed_gives_alone(models: PageModels) -> None:
    """Claim: temperature and seed reach the drafted side; and the plain one, so that both draw."""
    last_run = last(models, question_for("sd", temperature=1.5, seed=7))[-1]
    inputs = ask(models.target, "Describe the video.", clips=[last_run.clip])
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 1.5}
    for method, side in (("ar", last_run.duel.plain), ("sd", last_run.duel.drafted)):
        draft = None if models.draft is None else models.draft.backbone
        alone = run(models.target.backbone, inputs, draft=draft, method=method, seed=7, **settings)
        assert side.result is not None and side.result.ids == alone.ids


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["specvlm", "specvlm/view=pooled", "std", "tabed"])
def test_what_is_shown_as_kept_is_as_much_as_the_draft_read(
    models: PageModels, method: str
) -> None:
    """Claim: the picture's counts are the engine's, and the shares add up to them.

    Fails if the view was applied to another prompt, or drawn at other cells."""
    end = last(models, question_for(method, tokens=4))[-1]
    assert end.views and end.duel.drafted.result is not None
    counts = [one.kept_count for one in end.views]
    assert max(counts) == end.duel.drafted.result.draft_visual_tokens
    for one in end.views:
        assert one.share.shape == (16, 4, 4) and one.total_count == 256
        assert float(one.share.sum()) == pytest.approx(one.kept_count, abs=1e-2)


def test_a_draft_that_fails_says_why_and_the_answer_stands(
    models: PageModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a draft that raises midway leaves the same answer, and its reason in the result."""
    from saccade.drafting.drafters import ModelDrafter

    def broken(*_: Any) -> Any:
        raise RuntimeError("no more guesses")

    monkeypatch.setattr(ModelDrafter, "commit", broken)
    end = last(models, question_for("specvlm"))[-1].duel
    assert end.has_same_tokens and end.drafted.result is not None
    assert "no more guesses" in str(end.drafted.result.fallback_reason)


def test_the_recipe_of_a_run_is_always_that_of_the_drafted_answer(models: PageModels) -> None:
    """Claim: while the plain answer is under way, a run has the recipe that the question names.

    Fails if it has the plain answer's: the page would explain another method until the drafted
    answer starts.
    """
    runs = run_question(models, PageSettings(), question_for("pearl", tokens=2), lambda: False)
    assert all(each.recipe.drafts_beside_target for each in runs)


def test_a_picture_that_fails_costs_no_answer(
    models: PageModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: when what the draft saw cannot be worked out, both answers stand and it says so."""
    from saccade.ui import page_run

    def broken(*_: Any) -> Any:
        raise RuntimeError("no grid")

    monkeypatch.setattr(page_run, "measure_kept_tokens", broken)
    end = last(models, question_for("specvlm", tokens=4))[-1]
    assert end.duel.is_complete and end.views_error == "What the draft saw cannot be shown: no grid"


@pytest.mark.parametrize(
    ("question", "error", "says"),
    [
        ({"method": "hippo/shape=tree"}, MethodError, "after each token .* shape=chain-N"),
        ({"method": "nothing"}, MethodError, "unknown method"),
        ({"tokens": 0}, Exception, "1 to 1024 tokens"),
        ({"temperature": -1.0}, Exception, "temperature is a number from 0"),
        ({"prompt": "  "}, Exception, "no question"),
        ({"example": None}, Exception, "pick an example clip"),
        ({"method": "sd/view=caption"}, Exception, "--captioner"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(
    models: PageModels, question: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Claim: nonsense raises one of our errors, whose words say what was wrong."""
    from saccade.core.errors import SaccadeError

    with pytest.raises(SaccadeError, match=says) as refused:
        last(models, question_for(**{"method": "auto", **question}))
    assert isinstance(refused.value, error)


def test_a_prompt_beyond_the_house_limit_is_refused_before_any_work(models: PageModels) -> None:
    """Claim: a clip of more tokens than the page takes is refused with both numbers."""
    settings = PageSettings(limits=Limits(), max_prompt=100)
    with pytest.raises(Exception, match=r"are 2\d\d tokens and the page takes 100"):
        list(run_question(models, settings, question_for("auto"), lambda: False))


def test_a_missing_draft_is_a_sentence(models: PageModels) -> None:
    """Claim: a method that wants a draft model says so where there is none."""
    alone = PageModels(models.target, None)
    with pytest.raises(ModelError, match="drafts with a second model"):
        last(alone, question_for("specvlm"))
