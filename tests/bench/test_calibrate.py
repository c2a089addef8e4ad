"""`saccade calibrate` without models: the search over measurements made up here, and its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.bench import calibrate as calibrating
from saccade.bench.calibrate import (
    CANDIDATES,
    CONFIRM,
    START,
    Calibration,
    Trial,
    choose,
    read,
    search,
    write,
)
from saccade.bench.compare import Summary
from saccade.core.errors import MethodError, OptionError
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.model.backbone import Backbone

AXES = tuple(CANDIDATES)
STANDARD = {"lambda": "0.5", "keep": "0.1", "shape": "tree"}  # what "specvlm" is without overrides


def chosen(method: str) -> dict[str, str]:
    """The value on each axis of a method that starts from `specvlm`."""
    overrides = dict(part.split("=") for part in method.split("/")[1:])
    return {**STANDARD, **overrides}


def reading(
    speedup: float, tau: float, identical: bool = True, fallback: str | None = None
) -> Summary:
    return Summary(
        speedup_decode=speedup, tau=tau, identical_to_ar=identical, fallback_reason=fallback
    )


class Bench:
    """A made-up machine: what each method gains, a clock that its runs move, and what was run."""

    def __init__(self, gain: Callable[[str, int], float], seconds: float = 0.0) -> None:
        self.gain, self.seconds = gain, seconds
        self.now = 1000.0
        self.calls: list[tuple[int, list[str]]] = []

    def clock(self) -> float:
        return self.now

    def __call__(self, video: int, methods: Sequence[str]) -> dict[str, Summary]:
        self.calls.append((video, list(methods)))
        self.now += self.seconds * (len(methods) + 1)
        return {m: reading(self.gain(m, video), tau=self.gain(m, video)) for m in methods}

    def search(self, base: str = "specvlm", videos: int = 3, **more: Any) -> Any:
        return search(base, videos, self, clock=self.clock, **{"seconds": 600, **more})


def trial(method: str, *speedups: float, taus: Sequence[float] = (), **more: Any) -> Trial:
    pairs = zip(speedups, taus or speedups, strict=True)
    return Trial("stage", method, tuple(reading(speed, tau, **more) for speed, tau in pairs))


# -- the search ---------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.fixed_dictionaries({axis: st.permutations(CANDIDATES[axis]) for axis in AXES}))
def test_the_search_finds_what_an_obvious_loop_finds(order: Mapping[str, Sequence[str]]) -> None:
    """Claim: where axes gain independently, the best value of every axis is found.

    The oracle tries all 225 combinations. Fails if a stage forgets the best so far, drops a
    candidate or prefers a slower one.
    """

    def gain(method: str, video: int) -> float:
        total = 1.0 + 0.01 * video
        for axis, value in chosen(method).items():
            total *= 1.1 ** order[axis].index(value)
        return total

    best = max(
        (
            f"specvlm/lambda={a}/keep={b}/shape={c}"
            for a in CANDIDATES["lambda"]
            for b in CANDIDATES["keep"]
            for c in CANDIDATES["shape"]
        ),
        key=lambda method: gain(method, 0),
    )
    found, _, skipped = Bench(gain).search()
    assert found.method == best and skipped == ()


def test_every_candidate_is_run_on_every_video_in_one_run() -> None:
    """Claim: a stage hands all its methods to one interleaved run a video; the start and the
    confirmation run alone. Fails if candidates are compared across runs or videos."""
    bench = Bench(lambda method, video: 2.0)
    bench.search(videos=2)
    sizes = [len(CANDIDATES[axis]) for axis in AXES]
    assert [(video, len(methods)) for video, methods in bench.calls] == [
        (0, 1),
        *((video, size) for size in sizes for video in (0, 1)),
        (0, 1),
        (1, 1),
    ]
    for (first, one), (second, two) in zip(bench.calls[1::2], bench.calls[2::2], strict=True):
        assert (first, second) == (0, 1) and one == two


def test_the_score_is_the_median_over_videos() -> None:
    """Claim: one video on which a setting shines does not win. Fails with a mean or a maximum."""

    def gain(method: str, video: int) -> float:
        return {"chain-3": (9.0, 1.0, 1.0), "chain-7": (2.0, 2.0, 2.0)}.get(
            chosen(method)["shape"], (1.5, 1.5, 1.5)
        )[video]

    found, table, _ = Bench(gain).search()
    assert chosen(found.method)["shape"] == "chain-7"
    assert next(t for t in table if t.method.endswith("chain-3")).speedup == 1.0


def test_what_is_reported_chose_nothing() -> None:
    """Claim: speedup and tau come from the runs after the choice. A stage that was lucky (x 9)
    is measured again (x 2); fails if the flattering timing is reported."""
    bench = Bench(lambda method, video: 2.0 if len(bench.calls[-1][1]) == 1 else 9.0)
    found, table, _ = bench.search()
    assert found.stage == CONFIRM and found.speedup == 2.0 and found is table[-1]
    assert max(t.speedup for t in table) == 9.0


def test_an_axis_that_is_set_stays_and_one_that_is_not_there_is_left_out() -> None:
    """Claim: `keep=0.2` is kept; `sd`, which sees everything, is calibrated in shape alone."""
    bench = Bench(lambda method, video: 2.0)
    _, table, skipped = bench.search("specvlm/keep=0.2")
    assert {t.stage for t in table} == {START, "lambda", "shape", CONFIRM} and skipped == ()
    assert all(chosen(t.method)["keep"] == "0.2" for t in table)
    _, table, skipped = bench.search("sd")
    assert {t.stage for t in table} == {START, "shape", CONFIRM} and skipped == ()
    assert all(resolve(t.method).view is resolve("sd").view for t in table)


def test_the_best_so_far_is_always_measured_again() -> None:
    """Claim: every stage holds the setting it would change, once: under a candidate's spelling
    where one says the same (lambda=0.5), else as it is (sage's own shape)."""
    _, table, _ = Bench(lambda method, video: 2.0).search("sage")
    shapes = [t.method for t in table if t.stage == "shape"]
    assert [m for m in shapes if resolve(m).shape == resolve("sage").shape] == [shapes[0]]
    assert len(shapes) == 1 + len(CANDIDATES["shape"])
    lambdas = [t.method for t in table if t.stage == "lambda"]
    assert lambdas == [f"sage/lambda={value}" for value in CANDIDATES["lambda"]]


def test_other_tokens_are_an_error() -> None:
    """Claim: the first answer that is not plain decoding's ends the search, by name and video."""

    def measure(video: int, methods: Sequence[str]) -> dict[str, Summary]:
        return {m: reading(2.0, 2.0, identical=not (video and "0.65" in m)) for m in methods}

    with pytest.raises(MethodError, match=r"^specvlm/lambda=0\.65 wrote other tokens .* video 2"):
        search("specvlm", 3, measure)


# -- time ---------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(1, 400), st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.0, 3.0]))
def test_nothing_begins_that_would_run_past_the_time(budget: int, videos: int, pace: float) -> None:
    """Claim: at an even pace the time is never exceeded, but for the start, which always runs; and
    a stage loses videos, never candidates. Fails if a stage begins that cannot end."""
    bench = Bench(lambda method, video: 2.0, seconds=pace)
    found, table, skipped = bench.search(videos=videos, seconds=budget)
    assert bench.now - 1000 <= max(budget, 2 * pace) + 1e-9
    stages = [t.stage for t in table]
    assert stages[0] == START and found in table
    for axis in AXES:
        assert stages.count(axis) in (0, len(CANDIDATES[axis]))
        assert (axis in skipped) == (axis not in stages)
    assert (CONFIRM in skipped) == (found.stage != CONFIRM)
    assert len({len(t.readings) for t in table if t.stage == "shape"}) <= 1


def test_no_time_at_all_still_gives_an_answer() -> None:
    """Claim: with a second where runs take ten, the start is the answer and the rest is said."""
    bench = Bench(lambda method, video: 2.0, seconds=10)
    found, table, skipped = bench.search(seconds=1)
    assert found.method == "specvlm" and table == (found,)
    assert skipped == (*AXES, CONFIRM) and len(bench.calls) == 1


def test_time_that_just_suffices_is_used() -> None:
    """Claim: 26 runs of a second (plain decoding included) are done in 26 seconds; with 25 only
    the confirmation is left out; 8 are the start and the first stage. Fails if the runs of a stage
    are counted wrong."""
    runs = 2 + sum(1 + len(CANDIDATES[axis]) for axis in AXES) + 2
    ends = [(runs, ()), (runs - 1, (CONFIRM,)), (8, ("keep", "shape", CONFIRM))]
    for seconds, left_out in ends:
        bench = Bench(lambda method, video: 2.0, seconds=1.0)
        assert bench.search(videos=1, seconds=seconds)[2] == left_out


def test_an_early_stage_leaves_time_for_the_later_ones() -> None:
    """Claim: with time for about half, every stage runs, on fewer videos. Fails if the first stage
    takes all the time there is."""
    bench = Bench(lambda method, video: 2.0, seconds=1.0)
    _, table, skipped = bench.search(videos=20, seconds=160)
    assert skipped == ()
    assert all(1 < len(t.readings) < 20 for t in table if t.stage in AXES)


# -- choosing -----------------------------------------------------------------------------------


def test_ties_go_to_the_cheaper() -> None:
    """Claim: within 2 % the one that keeps less wins, then the one that changes nothing; beyond
    that, the faster. The taus rule nothing out here: more tokens are kept and more accepted."""
    less, more = "specvlm/keep=0.1/shape=fit", "specvlm/keep=0.3/shape=fit"
    close = [trial(less, 1.985), trial(more, 2.0)]
    apart = [trial(less, 1.95), trial(more, 2.0)]
    assert choose(close, kept=more).method == less
    assert choose(close[::-1], kept=more).method == less
    assert choose(apart, kept=less).method == more
    shapes = [trial("sd/shape=chain-3", 2.0), trial("sd/shape=chain-5", 1.99)]
    assert choose(shapes, kept="sd/shape=chain-5").method == "sd/shape=chain-5"
    assert choose(shapes, kept="sd").method == "sd/shape=chain-3"


def test_a_noisy_clock_is_not_believed() -> None:
    """Claim: the same fixed shape over fewer visual tokens, accepted as often on every video, is
    not slower, so a clock that says so loses; nor is a lambda chosen that changed no round.

    Controls that must choose the faster: a shape that adapts, another shape, a video on which
    more was accepted.
    """
    less, more = trial("specvlm/keep=0.1", 1.5, taus=[4.8]), trial("specvlm/keep=0.3", 2.2)
    same = trial("specvlm/keep=0.3", 2.2, taus=[4.8])
    assert choose([less, same], kept=same.method) is less
    one, two = (trial(f"specvlm/lambda={n}", x, taus=[4.8]) for n, x in ((0.5, 1.0), (0.2, 2.0)))
    assert choose([one, two], kept=one.method) is one
    assert choose([one, two], kept="neither") is two
    assert choose([less, replace_tau(more, 4.9)], kept=less.method).method == more.method
    fit = trial("specvlm/keep=0.3/shape=fit", 2.2, taus=[4.8])
    assert choose([trial("specvlm/keep=0.1/shape=fit", 1.5, taus=[4.8]), fit], "x") is fit
    chain = trial("specvlm/keep=0.3/shape=chain-5", 2.2, taus=[4.8])
    assert choose([less, chain], "x") is chain
    several = trial("specvlm/keep=0.3", 2.2, 2.2, taus=[4.8, 5.0])
    fewer = trial("specvlm/keep=0.1", 1.5, 1.5, taus=[5.8, 4.9])
    assert choose([fewer, several], "x") is several


def replace_tau(given: Trial, tau: float) -> Trial:
    return replace(given, readings=tuple(replace(r, tau=tau) for r in given.readings))


def test_a_draft_that_gave_up_is_no_choice() -> None:
    """Claim: a fallback to plain decoding is passed over, unless there is nothing else."""
    gone, sound = trial("sd/shape=fit", 3.0, fallback="no memory"), trial("sd", 1.1)
    assert choose([gone, sound], kept="sd") is sound
    assert choose([gone], kept="sd") is gone


def calibration(best: Trial, **more: Any) -> Calibration:
    given: dict[str, Any] = {
        "best": best,
        "table": (best,),
        "skipped": (),
        "target": "shapes",
        "draft": "shapes-draft",
        "visual_tokens": (512, 2048),
        "max_new_tokens": 48,
        "threads": 2,
        "seconds": 12.34,
        "environment": {"processor": "one", "gpu": None},
    }
    return Calibration(**{**given, **more})


def test_worth_it_says_whether_it_beats_plain_decoding() -> None:
    """Claim: true above 1 only, and never of a draft that gave up."""
    assert calibration(trial("sd", 1.01)).worth_it
    assert not calibration(trial("sd", 1.0)).worth_it
    assert not calibration(trial("sd", 0.4)).worth_it
    assert not calibration(trial("sd", 3.0, fallback="no memory")).worth_it


# -- over `race` -----------------------------------------------------------------------------


def stub(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[str], Summary]
) -> Callable[..., Calibration]:
    """`calibrate` over a `race` that runs nothing."""

    def race(*given: Any, repeat: int, settings: dict[str, Any], on_run: Any, **more: Any) -> Any:
        methods = given[3]
        on_run("ar", 0)
        assert settings == {"max_new_tokens": 128, "do_sample": False} and repeat == 1
        assert more == {"draft_inputs": None}
        last = {"ar": SimpleNamespace(visual_tokens=given[2]["n"])}
        return SimpleNamespace(rows=lambda: {m: rows(m) for m in methods}, last=lambda: last)

    monkeypatch.setattr(calibrating, "race", race)
    loaded = Loaded("big", Backbone(helpers.qwen25()), None)
    return lambda videos, **more: calibrating.calibrate(
        loaded, None, [{"n": n} for n in videos], **more
    )


def test_rows_become_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: speedup, tau, identity and fallback are the comparison's; the rest is what it was
    measured on."""
    told: list[str] = []
    run = stub(
        monkeypatch,
        lambda m: Summary(identical_to_ar=True, speedup_decode=0.5, tau=3.0, fallback_reason=None),
    )
    found = run([7, 9], tell=told.append)
    assert (found.best.speedup, found.best.tau, found.worth_it) == (0.5, 3.0, False)
    assert found.visual_tokens == (7, 9) and (found.target, found.draft) == ("big", None)
    assert found.environment["torch"] and found.threads == 1 and "video 2 of 2" in told[-1]
    gave_up = stub(
        monkeypatch,
        lambda m: Summary(identical_to_ar=True, speedup_decode=2.0, tau=1.0, fallback_reason="why"),
    )
    assert gave_up([7]).best.fallback == "why"


def test_a_mismatch_of_the_comparison_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a row whose tokens differ from ar's raises. Fails if identity is taken for granted."""
    run = stub(monkeypatch, lambda m: Summary(identical_to_ar="keep" not in m, speedup_decode=2.0))
    with pytest.raises(MethodError, match="other tokens"):
        run([7])


def test_what_cannot_be_calibrated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: plain decoding, peers, no video and no time are one sentence each."""
    run = stub(monkeypatch, lambda m: Summary(identical_to_ar=True, speedup_decode=2.0))
    for refusal, kind, word in [
        (lambda: run([7], method="ar"), OptionError, "drafts nothing"),
        (lambda: run([7], method="hf"), MethodError, "unknown method"),
        (lambda: run([]), OptionError, "a video"),
        (lambda: run([7], seconds=0), OptionError, "seconds"),
    ]:
        with pytest.raises(kind, match=word):
            refusal()


# -- the file -----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def make(text: str) -> Path:
        path = tmp_path / "saccade.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Claim: method, names and threads come back; what was measured stands below; the environment
    may hold torch's own kind of string. Fails on anything YAML or JSON cannot hold."""
    from saccade.engine.trace import environment

    path = tmp_path / "saccade.yaml"
    best = trial("specvlm/lambda=0.35/keep=0.2/shape=chain-9", 1.25, 2.5, taus=[3.0, 4.0])
    found = calibration(best, environment=environment())
    write(path, found)
    config = read(path)
    measured = config.pop("measured")
    assert config == {
        "method": best.method,
        "target": "shapes",
        "draft": "shapes-draft",
        "threads": 2,
    }
    assert measured["speedup"] == 1.875 and measured["worth_it"] is True
    assert measured["trials"] == [
        {"stage": "stage", "method": best.method, "videos": 2, "speedup": 1.875, "tau": 3.5}
    ]
    assert measured["environment"] == {
        key: value if value is None else type(value).__mro__[-2](value)
        for key, value in environment().items()
    }


def test_the_file_says_what_it_is_for_a_person(tmp_path: Path) -> None:
    """Claim: it begins with comments, says it where the setting is slower, and leaves out what
    there is none of; a line a trial."""
    path = tmp_path / "saccade.yaml"
    write(path, calibration(trial("specvlm-self", 0.66), draft=None))
    text = path.read_text()
    assert text.startswith("# Made by `saccade calibrate`") and "SLOWER" in text
    assert "draft:" not in text and "draft" not in read(path)
    assert yaml.safe_load(text)["measured"]["worth_it"] is False
    assert sum("specvlm-self" in line for line in text.splitlines()) == 2
    write(path, calibration(trial("sd", 2.0)))
    assert "SLOWER" not in path.read_text()


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("", None),
        ("# nothing but a comment\n", None),
        ("target: somewhere/else\n", None),
        ("method:\n", None),
        ("method: sd", "sd"),
        ("keep: 0.2\nlambda: 0.3", "specvlm/keep=0.2/lambda=0.3"),
        ("lambda: 0.3\nkeep: 0.2\nmethod: sage", "sage/lambda=0.3/keep=0.2"),
        ("method: specvlm/keep=0.2\nshape: chain-9", "specvlm/keep=0.2/shape=chain-9"),
        ("view: uniform\nkeep: .05\npositions: repacked",
         "specvlm/view=uniform/keep=0.05/positions=repacked"),
        ("method: sd\nview: none", "sd/view=none"),
        ("shape: [[0], [1], [0, 0]]", "specvlm/shape=paths-0,1,0.0"),
        ("method: sd\nshape:\n- [0]\n- [0, 2]\n", "sd/shape=paths-0,0.2"),
        ("keep: 1", "specvlm/keep=1"),
    ],
)  # fmt: skip
def test_axes_may_be_keys(file: Callable[[str], Path], text: str, method: str | None) -> None:
    """Claim: a key named as an axis is an override, in the file's order; the method resolves, and
    a list of paths is that tree."""
    path = file(text)
    assert read(path).get("method") == method
    if method is not None and "paths" in method:
        shape: Any = resolve(method).shape
        asked = yaml.safe_load(text)["shape"]
        assert sorted(shape.paths) == sorted(map(tuple, asked))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methd: sd", ["'methd'", "known keys", "method", "threads", "keep"]),
        ("1: sd", ["unknown key 1"]),
        ("method: [sd]", ["method must be a name", "sd"]),
        ("method: 5", ["method must be a name"]),
        ("method: ''", ["method must be a name"]),
        ("target: 2026-01-01", ["target must be a name"]),
        ("draft: {a: b}", ["draft must be a name"]),
        ("threads: two", ["threads must be a whole number"]),
        ("threads: true", ["threads must be a whole number", "True"]),
        ("threads: 0", ["threads must be a whole number from 1"]),
        ("threads: 1.5", ["threads must be a whole number"]),
        ("keep: much", ["keep must be a number", "much"]),
        ("lambda: yes", ["lambda must be a number"]),
        ("keep: 1.5", ["1.5", "between 0 and 1"]),
        ("keep: .nan", ["nan", "between 0 and 1"]),
        ("keep: 0", ["keep"]),
        ("measured: 3", ["measured must be"]),
        ("shape: {a: 1}", ["shape must be", "[[0], [1], [0, 0]]"]),
        ("shape: [0, 1]", ["shape must be"]),
        ("shape: [[0.5]]", ["shape must be"]),
        ("shape: [[true]]", ["shape must be"]),
        ("shape: []", ["paths"]),
        ("shape: [[]]", ["paths"]),
        ("shape: [[0, 0]]", ["no parent [0]"]),
        ("shape: [[-1]]", ["ranks from 0"]),
        ("shape: blob", ["blob", "chain-N"]),
        ("view: blob", ["blob", "uniform"]),
        ("method: magic", ["magic", "specvlm"]),
        ("method: sd\nlambda: 0.3", ["lambda", "specvlm"]),
        ("method: ar\nkeep: 0.3", ["drafts nothing"]),
        ("method: sd/shape=fit\nshape: tree", ["'shape' is given twice"]),
        ("keep: 0.1\nkeep: 0.2", ["'keep' is given twice"]),
        ("just a sentence", ["known keys"]),
        ("- method: sd", ["known keys"]),
        ("method: sd: fit", ["YAML", "line 1"]),
        ("method: sd\n  keep: [", ["YAML", "line 2"]),
        ("method: sd\n---\nmethod: sd", ["YAML"]),
        ("method: !!python/name:os.system", ["YAML"]),
        ("method: !!timestamp soon", ["YAML"]),
        ("? [a]\n: b", ["YAML"]),
        ("shape: " + "[" * 500, ["YAML"]),
        ("# " + "x" * 200_000, ["too large"]),
        ("\0\1\2", ["YAML"]),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(
    file: Callable[[str], Path], text: str, words: list[str]
) -> None:
    """Claim: unknown keys, wrong types, impossible methods and no YAML are an OptionError of one
    line that names the file and what is wrong."""
    path = file(text)
    with pytest.raises(OptionError) as refused:
        read(path)
    said = str(refused.value)
    assert str(path) in said and len(said.splitlines()) == 1 and len(said) < 700
    for word in words:
        assert word in said


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    """Claim: no file, a folder, bytes that are no text, and a place that cannot be written are
    one sentence."""
    (tmp_path / "video.mp4").write_bytes(b"\xff\xd8\xfe\x00" * 8)
    for name in ("nowhere.yaml", ".", "video.mp4"):
        with pytest.raises(OptionError) as refused:
            read(tmp_path / name)
        assert str(tmp_path / name) in str(refused.value)
    with pytest.raises(OptionError, match="cannot write"):
        write(tmp_path / "no" / "such.yaml", calibration(trial("sd", 2.0)))
