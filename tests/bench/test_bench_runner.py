"""Claims about a run on the embedded pair: complete, interleaved, resumable, answers compared."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from written_out import Embedded, Ran, lines

import saccade.drafting.schedule
from saccade.bench import records, runner
from saccade.bench.peers import PEERS, TimedRun
from saccade.bench.records import Answer
from saccade.bench.suites.types import Item
from saccade.core.errors import MethodError, OptionError
from saccade.core.result import Verdict
from saccade.core.tree import ROOT, Tree
from saccade.core.verify import verify
from saccade.drafting.drafters import ModelDrafter
from saccade.inputs import Pair
from saccade.world import suites

pytestmark = pytest.mark.usefixtures("unchecked")

KNOWN = suites.suites()
CAPTION, CHAT, PAIR = KNOWN["shapes-caption"], KNOWN["shapes-chat"], KNOWN["shapes-diff"]
Key = tuple[str, str, str, int]
KEY = ("suite", "item", "method", "turn")


def keys(answers: Sequence[Answer]) -> list[Key]:
    return [(each.suite, each.item, each.method, each.turn) for each in answers]


def short(*methods: str, suite: suites.DrawnSuite = CAPTION) -> runner.Benchmark:
    return runner.Benchmark((suite,), methods, limit=1, max_new_tokens=12)


def by_method(answers: Sequence[Answer]) -> dict[str, Answer]:
    return {each.method: each for each in answers}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(item, method) of every timed answer, none of them computed."""
    pairs: list[tuple[str, str]] = []

    def note(self: Any, name: str, recipe: Any, settings: dict[str, Any]) -> list[Answer]:
        if settings["max_new_tokens"] != runner.WARM_UP_TOKENS:
            pairs.append((self.item.id, name))
        return [self.empty_answer(name, 0)]

    monkeypatch.setattr(runner._ItemRun, "answer", note)
    return pairs


# -- what a run holds ----------------------------------------------------------------------------


def test_every_method_once_ar_first(ran: Ran) -> None:
    """Claim: every method answers every turn of every item once, ar first in the file.

    Fails if a method is skipped, warm-ups are recorded, or the rotation shows in the file.
    """
    expected = [
        (suite.name, item.id, method, turn)
        for suite, item in ran.plan.items()
        for method in ("ar", "hf", "specvlm")
        for turn in range(1 + len(item.later_questions))
    ]
    assert len(expected) == 2 * 3 + 2 * 3 * 2
    assert keys(ran.answers) == expected
    written = [tuple(line[name] for name in KEY) for line in lines(ran.folder)]
    assert written == expected


def test_answers_are_plain_decodings(ran: Ran) -> None:
    """Claim: every answer, ours and the peer's, is ar's, and says how it came about.

    Fails if turns or items are compared crosswise, or a figure is left at its default.
    """
    plain = {(each.item, each.turn): each.ids for each in ran.answers if each.method == "ar"}
    assert len(set(plain.values())) >= 4, "answers that are all alike prove little"
    for each in ran.answers:
        assert each.identical is True and each.error is each.fallback is None
        assert each.ids == plain[each.item, each.turn] and each.text
        assert 0 < each.first <= each.total and 0 < each.decode <= each.total
        assert each.prompt_tokens > 256
        assert (each.rounds > 0) == (each.method != "hf")
        if each.rounds:
            assert sum(each.accepted) + each.own == len(each.ids) - 1
            assert each.visual_tokens == 256 and each.counted == len(each.ids) - 1
    drafted = [each for each in ran.answers if each.method == "specvlm"]
    assert all(each.rounds < len(each.ids) and each.draft_visual_tokens == 26 for each in drafted)
    assert all(all(d <= n for d, n in zip(e.drafted, e.nodes, strict=True)) for e in drafted)
    assert any(max(each.nodes) > max(each.drafted) for each in drafted)  # a tree is no chain


def test_second_turns_reuse_the_first(ran: Ran) -> None:
    """Claim: a conversation's second question reads only what is new, in every method of ours.

    Fails if a turn starts afresh: nothing would be reused of some 300 tokens.
    """
    ours = [each for each in ran.answers if each.method != "hf"]
    assert all(each.reused_tokens == 0 for each in ours if each.turn == 0)
    later = [each for each in ours if each.turn == 1]
    assert len(later) == 4
    for each in later:
        assert 256 < each.reused_tokens < each.prompt_tokens
        assert each.answers == ()  # only the first question's is known


def test_items_of_one_batch_have_captions_of_their_own(embedded: Embedded) -> None:
    """Claim: a batch of items asks each item's captioner, and gives each request its captions.
    Fails if one captioner gets the media of all items."""
    items = list(KNOWN["shapes-diff"].items())[:2]

    def sums(media: Sequence[Any]) -> list[str]:
        return [str(int(frames[0].sum())) for frames in media]

    def captioner(media: Sequence[Any]) -> Any:
        return lambda inputs: [sums(media)]

    runs = [
        runner._ItemRun(Pair(*embedded), item, runner.turn_arguments(item), captioner, 0, False)
        for item in items
    ]
    expected = [sums([[medium.read()] for medium in item.media]) for item in items]
    assert expected[0] != expected[1]
    assert runner._BatchRun(runs)._captioner()({}) == expected


@pytest.mark.extra
def test_a_second_turn_may_show_a_picture_of_its_own(embedded: Embedded, tmp_path: Path) -> None:
    """Claim: where the second turn is the next item its picture stands in its own message, after
    the first answer, and a captioner gives each picture its caption.
    Fails where both pictures stand in the first message, or the second is not shown."""
    suite = KNOWN["shapes-second-qa"]
    (item,) = list(suite.items())[:1]
    assert item.next_item is not None
    seen: list[int] = []

    def captioner(media: Sequence[Any]) -> Any:
        return lambda inputs: (seen.append(len(media)), [["a picture"] * len(media)])[1]

    plan = replace(short("ar", "sd/view=caption", suite=suite), max_new_tokens=6)
    answers = runner.run_benchmark(plan, *embedded, tmp_path, make_captioner=captioner)
    assert [(each.method, each.turn) for each in answers] == [
        (method, turn) for method in plan.methods for turn in (0, 1)
    ]
    assert all(each.identical and not each.error and not each.fallback for each in answers)
    assert {each.visual_tokens for each in answers if each.rounds} == {256, 512}
    assert seen[-2:] == [1, 2]

    images = [each.media[0].read() for each in (item, item.next_item)]
    first_answer = answers[0].text
    pair = Pair(*embedded)
    (both, _) = pair.ask(
        item.next_item.question,
        images=images,
        history=[(item.question, first_answer)],
        parts=[{"type": "image"}, {"type": "text", "text": item.question}],
        last=[{"type": "image"}, {"type": "text", "text": item.next_item.question}],
    )
    ids = both["input_ids"][0].tolist()
    assert len(ids) == answers[1].prompt_tokens
    own = embedded.target.tokenizer(first_answer, add_special_tokens=False).input_ids
    answer_at = next(i for i in range(len(ids)) if ids[i : i + len(own)] == own)
    places = [i for i, token in enumerate(ids) if token in embedded.target.backbone.placeholders]
    assert sum(place < answer_at for place in places) == 256 and len(places) == 512


@pytest.mark.slow
def test_a_sampled_run_claims_no_equality(embedded: Embedded, tmp_path: Path) -> None:
    """Claim: with a temperature answers are drawn, ours by the plan's seed and a peer's by torch's,
    nothing is said of equality, and another temperature is another plan. Control: at 0 all are
    plain decoding's."""
    greedy = runner.Benchmark((CAPTION,), ("sd", "hf"), limit=1, max_new_tokens=10)
    drawn = replace(greedy, temperature=4.0)
    first = {each.method: each for each in runner.run_benchmark(drawn, *embedded, tmp_path / "a")}
    again = {each.method: each for each in runner.run_benchmark(drawn, *embedded, tmp_path / "b")}
    plain = {each.method: each for each in runner.run_benchmark(greedy, *embedded, tmp_path / "c")}
    assert {each.identical for each in first.values()} == {None}
    assert {each.identical for each in plain.values()} == {True}
    assert all(first[name].ids == again[name].ids != plain[name].ids for name in first)
    with pytest.raises(OptionError, match="another plan"):
        runner.run_benchmark(greedy, *embedded, tmp_path / "a")


# -- order, shards, limits ---------------------------------------------------------------------


def test_order_rotates(embedded: Embedded, calls: list[tuple[str, str]], tmp_path: Path) -> None:
    """Claim: each item's methods all run before the next item, another one first each time.

    Fails if one method is always first, or methods run one after the other over all items. The
    rotation goes on where an interrupted run left off.
    """
    plan = runner.Benchmark((CAPTION,), ("sd", "hf"), limit=2, max_new_tokens=5)
    runner.run_benchmark(plan, *embedded, tmp_path)
    runner.run_benchmark(replace(plan, limit=5), *embedded, tmp_path)
    items = [item.id for _, item in replace(plan, limit=5).items()]
    assert [item for item, _ in calls] == [item for item in items for _ in range(3)]
    orders = [[m for item, m in calls if item == each] for each in items]
    assert orders[:3] == [["ar", "sd", "hf"], ["sd", "hf", "ar"], ["hf", "ar", "sd"]]
    assert orders[3:] == orders[:2]


def test_batches_rotate_as_without_an_interruption(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Claim: also where the last batch of a suite is a short one, the method that comes first after
    an interruption is the one that would have come first without it."""
    order: list[str] = []
    answer = runner._BatchRun.answer

    def recorded(self: Any, name: str, recipe: Any, settings: Any) -> Any:
        if settings["max_new_tokens"] == 5:
            order.append(name)
        return answer(self, name, recipe, settings)

    monkeypatch.setattr(runner._BatchRun, "answer", recorded)
    # Each suite has one batch, which is a short one.
    plan = runner.Benchmark((CAPTION, CHAT), ("sd",), limit=1, max_new_tokens=5, batch=2)
    runner.run_benchmark(plan, *embedded, tmp_path / "whole")
    whole = order.copy()
    order.clear()
    # Only the item of the first suite is answered before the interruption.
    kept = list(plan.items())[:1]
    with monkeypatch.context() as patch:
        patch.setattr(runner.Benchmark, "items", lambda self: iter(kept))
        runner.run_benchmark(plan, *embedded, tmp_path / "cut")
    runner.run_benchmark(plan, *embedded, tmp_path / "cut")
    assert order == whole == ["ar", "sd", "sd", "ar"]


@pytest.mark.parametrize(("count", "limit"), [(1, 4), (2, 5), (3, 7), (5, 3)])
def test_shards_partition_the_items(count: int, limit: int) -> None:
    """Claim: n shards hold each of the first ``limit`` items of each suite once, none other.

    Fails if the limit is taken per shard, or a shard drops its remainder.
    """
    plan = runner.Benchmark((CAPTION, CHAT), ("ar",), limit=limit)
    whole = [(suite.name, item.id) for suite, item in plan.items()]
    assert whole == [
        (suite.name, item.id) for suite in (CAPTION, CHAT) for item in list(suite.items())[:limit]
    ]
    parts = [
        [(suite.name, item.id) for suite, item in replace(plan, shard=(number, count)).items()]
        for number in range(count)
    ]
    assert sorted(sum(parts, [])) == sorted(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2  # one a suite


def test_shards_run_apart(embedded: Embedded, calls: list[tuple[str, str]], tmp_path: Path) -> None:
    """Claim: shards run into folders of their own, and a folder takes one shard only."""
    plan = runner.Benchmark((CAPTION,), ("ar",), limit=3, shard=(0, 2), max_new_tokens=5)
    first = runner.run_benchmark(plan, *embedded, tmp_path / "1")
    second = runner.run_benchmark(replace(plan, shard=(1, 2)), *embedded, tmp_path / "2")
    assert len(first) == 2 and len(second) == 1
    assert sorted(item for item, _ in calls) == [item.id for item in list(CAPTION.items())[:3]]


def test_fingerprint(embedded: Embedded) -> None:
    """Claim: everything that decides an answer decides the fingerprint; how many items does not.

    Fails if a run of other methods, seed, length, suite, shard or draft could be gone on with.
    """
    plan = short("ar", "sd")

    def key(plan: runner.Benchmark, draft: Any = embedded.draft) -> str:
        return str(plan.about(embedded.target, draft)["fingerprint"])

    others = [
        replace(plan, seed=1),
        replace(plan, methods=("ar", "sd", "hf")),
        replace(plan, max_new_tokens=13),
        replace(plan, suites=(CHAT,)),
        replace(plan, shard=(0, 2)),
        replace(plan, model_options=(("quantize", "bnb-4bit"),)),
    ]
    fingerprints = [key(plan), *map(key, others), key(plan, None)]
    assert len(set(fingerprints)) == len(fingerprints)
    assert key(replace(plan, limit=9)) == key(short("ar", "sd")) == fingerprints[0]


def test_unknown_method_writes_nothing(embedded: Embedded, tmp_path: Path) -> None:
    """Claim: a method nobody knows is refused before the folder is made."""
    with pytest.raises(MethodError, match="hf-lookup"):
        runner.run_benchmark(short("ar", "magic"), *embedded, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- interruptions -----------------------------------------------------------------------------


@pytest.mark.extra
def test_interrupted_and_gone_on_with(ran: Ran, embedded: Embedded, tmp_path: Path) -> None:
    """Claim: interrupted in the middle of an item, a run goes on to what it would have been.

    Fails if an item is run twice, lost, or answered otherwise than without the interruption.
    """

    def stop(what: str, done: int, whole: int) -> None:
        assert whole == 4
        if done == 1 and what.endswith(": ar"):  # others have answered this item
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_benchmark(ran.plan, *embedded, tmp_path, on_progress=stop)
    before = records.read_and_repair_run(tmp_path)[1]
    assert keys(before) == keys(ran.answers)[:3]
    progress: list[int] = []
    answers = runner.run_benchmark(
        ran.plan, *embedded, tmp_path, on_progress=lambda what, done, whole: progress.append(done)
    )
    assert min(progress) == 1 and max(progress) == 4
    assert answers[:3] == before and answers == records.read_and_repair_run(tmp_path)[1]
    assert keys(answers) == keys(ran.answers)
    assert [each.ids for each in answers] == [each.ids for each in ran.answers]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_and_gone_on_with(embedded: Embedded, tmp_path: Path) -> None:
    """Claim: a process killed by SIGKILL leaves whole items, and another one finishes the run.

    Fails if the file holds half an item, or an item is run twice or answered otherwise.
    """
    plan = runner.Benchmark((CHAT,), ("ar", "sd"), max_new_tokens=8)
    file = tmp_path / "killed" / records.RESULTS_FILE
    work = (plan, *embedded, tmp_path / "killed")
    process = get_context("fork").Process(target=runner.run_benchmark, args=work, daemon=True)
    process.start()
    while process.is_alive() and not (file.exists() and file.stat().st_size):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    counted = Counter(line["item"] for line in lines(tmp_path / "killed"))
    assert counted and set(counted.values()) == {4}  # two methods, two turns

    plan = replace(plan, limit=len(counted) + 1)
    answers = runner.run_benchmark(plan, *embedded, tmp_path / "killed")
    whole = runner.run_benchmark(plan, *embedded, tmp_path / "whole")
    assert keys(answers) == keys(whole) and len(answers) == 4 * (len(counted) + 1)
    assert [each.ids for each in answers] == [each.ids for each in whole]


# -- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.extra
def test_a_peers_crash_is_a_row(
    embedded: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a peer that raises is a row with the error, and the others go on.

    Fails if it ends the run or passes for an answer. Hugging Face's prompt lookup crashes on
    videos; if a release mends it, its row must hold ar's ids.
    """

    def crash(*given: Any) -> TimedRun:
        raise AssertionError  # without a word

    monkeypatch.setitem(PEERS, "hf-crash", crash)
    plan = short("hf-crash", "hf-lookup", "hf", "ar", suite=CHAT)
    answers = runner.run_benchmark(plan, *embedded, tmp_path)
    assert Counter(each.method for each in answers)["ar"] == 2
    rows = {each.method: each for each in answers if not each.turn}
    assert list(rows) == ["ar", "hf-crash", "hf-lookup", "hf"]
    assert rows["hf-crash"].error == "AssertionError: "
    assert rows["hf-crash"].identical is None and rows["hf-crash"].ids == ()
    assert rows["hf"].identical is True and rows["hf"].error is None
    lookup = rows["hf-lookup"]
    assert lookup.identical is True or (lookup.error or "").startswith("ValueError: Video")


def test_our_own_crash_ends_the_run(
    embedded: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: an error of ours is no row: it ends the run, and nothing half done is written."""

    def crash(*given: Any, **named: Any) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(saccade.drafting.schedule, "judge", crash)
    with pytest.raises(AssertionError, match="ours"):
        runner.run_benchmark(short("ar"), *embedded, tmp_path)
    assert not (tmp_path / records.RESULTS_FILE).exists()


@pytest.mark.extra
def test_a_fallback_says_so(
    embedded: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a draft that fails leaves ar's answer and the reason, in its own row alone.

    Fails if plain decoding passes for the method.
    """

    def fail(self: Any, *given: Any) -> None:
        raise RuntimeError("the draft is out")

    monkeypatch.setattr(ModelDrafter, "propose", fail)
    rows = by_method(runner.run_benchmark(short("ar", "sd", "hf"), *embedded, tmp_path))
    assert "the draft is out" in (rows["sd"].fallback or "")
    assert rows["sd"].identical is True and not any(rows["sd"].drafted)
    assert rows["ar"].fallback is rows["hf"].fallback is None


@pytest.mark.extra
def test_a_draft_that_changes_answers_shows(
    embedded: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with a verification that believes the draft, ``identical`` is False, and only there.

    Fails if ``identical`` is not measured.
    """

    def believe(tree: Tree, law: Any, noise: Any) -> Verdict:
        if not len(tree):
            return verify(tree, law, noise)
        path = tuple(range(len(tree)))  # a chain
        assert tree.parents == (ROOT, *path[:-1])
        return Verdict(path, tree.tokens, None, None)

    monkeypatch.setattr(saccade.drafting.schedule, "verify", believe)
    plan = replace(short("ar", "sd/view=none", "hf"), max_new_tokens=40)
    rows = by_method(runner.run_benchmark(plan, *embedded, tmp_path))
    blind = rows["sd/view=none"]
    assert blind.identical is False and blind.ids != rows["ar"].ids
    assert rows["ar"].identical is rows["hf"].identical is True


@pytest.mark.extra
def test_pictures_run_too(embedded: Embedded, tmp_path: Path) -> None:
    """Claim: items of pictures are answered like those of videos, by a seeing peer as well."""
    plan = short("ar", "specvlm", "hf", "hf-assisted-seeing", suite=PAIR)
    answers = runner.run_benchmark(plan, *embedded, tmp_path)
    assert [each.error for each in answers] == [None] * 4
    assert all(each.identical for each in answers) and answers[0].visual_tokens == 256


def test_media_are_read_once_an_item(
    embedded: Embedded, calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Claim: a medium is read once for all methods, and not at all for items already done."""
    read: list[str] = []

    class Counting:
        name, setting = "counting", CAPTION.setting

        def items(self) -> Any:
            for item in CAPTION.items():
                (medium,) = item.media
                yield replace(item, media=(replace(medium, read=lambda m=medium: note(m)),))

    def note(medium: Any) -> Any:
        read.append(medium.name)
        return medium.read()

    plan = runner.Benchmark((Counting(),), ("ar", "sd", "hf"), limit=2, max_new_tokens=5)
    runner.run_benchmark(plan, *embedded, tmp_path)
    runner.run_benchmark(plan, *embedded, tmp_path)
    first: list[Item] = list(CAPTION.items())[:2]
    assert read == [item.media[0].name for item in first]
    assert len(calls) == 6


# -- batches -------------------------------------------------------------------------------------


def test_a_batch_gives_the_answers_of_single_items(embedded: Embedded, tmp_path: Path) -> None:
    """Claim: three items in batches of two have the ids that each has alone, by every method, with
    the rounds of each; a peer, which answers no batches, says so. Fails if answers change places
    within a batch, or the last, smaller batch is left out."""
    methods = ("ar", "specvlm", "hf")
    plan = runner.Benchmark((CAPTION,), methods, limit=3, max_new_tokens=10)
    alone, together = (
        runner.run_benchmark(each, *embedded, tmp_path / f"{each.batch}")
        for each in (replace(plan, methods=("ar",)), replace(plan, batch=2))
    )
    plain = {each.item: each.ids for each in alone}
    assert len(set(plain.values())) == 3
    assert [(each.item, each.method) for each in together] == [
        (item, method) for item in plain for method in methods
    ]
    for each in together:
        if each.method == "hf":
            assert each.error is not None and "answers no batches" in each.error
        else:
            assert each.ids == plain[each.item] and each.identical is True
            assert each.rounds and sum(each.accepted) + each.own == len(each.ids) - 1


def test_a_batch_is_part_of_the_plan(embedded: Embedded) -> None:
    """Claim: a run in batches is another run than one without, and earlier runs keep their
    fingerprint. Fails if one could be gone on with as the other."""
    plan = runner.Benchmark((CAPTION,), ("ar",), limit=3)
    about = plan.about(embedded.target, embedded.draft)
    batched = replace(plan, batch=8).about(embedded.target, embedded.draft)
    assert batched["plan"]["batch"] == 8 and "batch" not in about["plan"]
    assert batched["fingerprint"] != about["fingerprint"]


def test_batches_hold_items_of_one_suite() -> None:
    """Claim: a batch has one suite's items, in order."""
    plan = runner.Benchmark((CAPTION, CHAT), ("ar",), limit=3)
    batches = [(suite.name, len(items)) for suite, items in runner._batches([*plan.items()], 2)]
    assert batches == [
        ("shapes-caption", 2),
        ("shapes-caption", 1),
        ("shapes-chat", 2),
        ("shapes-chat", 1),
    ]
