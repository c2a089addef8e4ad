"""Every benchmark read from its own layout, and what is said where the layout is broken."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from handmade_layouts import CASES, Art, Case, unusable

from saccade.bench.suites.benchmarks import BENCHMARKS
from saccade.bench.suites.datasets import Dataset
from saccade.bench.suites.search import open_dataset
from saccade.bench.suites.types import Suite
from saccade.core.errors import OptionError
from saccade.inputs.media import Clip

NAMES = [f"{case.name}-{case.layout.__name__}" for case in CASES]
every = pytest.mark.parametrize("case", CASES, ids=NAMES)
with_media = [case for case in CASES if case.lost]


def opened(case: Case, root: Path) -> Dataset:
    return open_dataset(case.name, root, paper=case.paper)


def command(case: Case, words: str) -> None:
    """The sentence names the newest id and is one a person can follow."""
    assert f"`hf download {case.repos[0]} --repo-type dataset" in words
    assert "--include" in words and "\n" not in words


def test_every_benchmark_has_a_case():
    """Claim: the table and the layouts written by hand name the same benchmarks."""
    assert {case.name for case in CASES} == set(BENCHMARKS)


@pytest.mark.representatives(4)
@every
def test_a_benchmark_is_read_from_its_own_layout(case: Case, art: Art, tmp_path: Path):
    """Claim: items, wording, answers, options and media are what was written.

    Fails if a column, a folder or the wording of the paper is not met.
    """
    suite = opened(case, case.fresh(art).write(tmp_path / "data"))
    assert isinstance(suite, Suite)
    items = list(suite.items())
    assert not unusable(suite) and len(items) == case.items
    assert [i.id for i in items] == [i.id for i in suite.items()]
    assert len({item.id for item in items}) == len(items)
    first = items[0]
    assert first.question == case.question
    assert first.answers == case.answers and first.options == case.options
    assert first.task == case.task and first.later_questions == case.then
    assert tuple(medium.kind for medium in first.media) == case.media
    for medium in first.media:
        read = medium.read()
        assert os.sep not in medium.name
        if medium.kind == "video":
            assert isinstance(read, Clip)
            count = 12 if suite.setting.frames else 6  # all there are, none twice; or 2 a second
            assert read.frames.shape == (count, 32, 48, 3)
        else:
            assert isinstance(read, np.ndarray) and read.shape == (24, 36, 3)


SECOND = [case for case in CASES if f"{case.paper or 'tabed'}-qa" in BENCHMARKS[case.name].papers]


@pytest.mark.parametrize("case", SECOND, ids=[f"{c.name}-{c.layout.__name__}" for c in SECOND])
def test_second_turns_follow_the_same_first_ones(case: Case, art: Art, tmp_path: Path):
    """Claim: `NAME@tabed-story` has the items of `NAME@tabed`, each asked for a story afterwards;
    of `NAME@tabed-qa` each goes on with the item after it, pictures and all, the last with the
    first. Fails if other samples are drawn, or an item goes on with itself."""
    root = case.fresh(art).write(tmp_path / "data")
    first, story, more = (
        list(open_dataset(case.name, root, paper=f"tabed{turn}").items())
        for turn in ("", "-story", "-qa")
    )
    question = BENCHMARKS[case.name].papers["tabed-story"].then
    assert [item.id for item in first] == [item.id for item in story] == [i.id for i in more]
    for item, story_item in zip(first, story, strict=True):
        assert story_item.questions == (*item.questions, question)
    for item, after in zip(more, [*more[1:], more[0]], strict=True):
        assert item.next_item is not None and item.next_item.id == after.id
        assert item.questions == (item.question, after.question)
        assert len(item.next_item.media) == len(after.media) > 0


@pytest.mark.representatives(8)
@every
@pytest.mark.parametrize("how", ["name", "owner", "hub", "snapshot"])
def test_both_generations_of_ids_are_found(case: Case, how: str, art: Art, tmp_path: Path):
    """Claim: a folder that holds datasets by name, and the hub's cache, are searched for either id.

    Fails if a copy that carries the old id is not found.
    """
    for number, repo in enumerate(case.repos):
        root = tmp_path / str(number)
        hub = "--".join(["datasets", *repo.split("/")])
        inside = {
            "name": repo.rpartition("/")[2],
            "owner": repo,
            "hub": f"{hub}/snapshots/0a1b",
            "snapshot": "snapshots/0a1b",
        }[how]
        case.fresh(art).write(root / inside)
        assert len(list(opened(case, root).items())) == case.items


@pytest.mark.representatives(8)
@every
def test_without_a_root_the_local_cache_is_used(case: Case, art: Art, tmp_path: Path):
    """Claim: a snapshot in the hub cache, links to blobs, is found without a root and offline."""
    repo = case.repos[-1]
    base = tmp_path / "hf" / "hub" / "--".join(["datasets", *repo.split("/")])
    snapshot = case.fresh(art).write(base / "snapshots" / "0a1b")
    (base / "blobs").mkdir()
    for number, path in enumerate([p for p in snapshot.rglob("*") if p.is_file()]):
        blob = base / "blobs" / str(number)
        path.rename(blob)
        path.symlink_to(blob)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("0a1b")
    items = list(open_dataset(case.name, paper=case.paper).items())
    assert len(items) == case.items
    assert all(medium.read() is not None for medium in items[0].media)


@pytest.mark.representatives(10)
@every
def test_a_missing_column_is_named(case: Case, art: Art, tmp_path: Path):
    """Claim: a layout that changed is refused when it is opened, with what it has."""
    layout = case.fresh(art)
    layout.drop(case.column)
    with pytest.raises(OptionError) as caught:
        opened(case, layout.write(tmp_path / "data"))
    words = str(caught.value)
    assert f"of {BENCHMARKS[case.name].title} has no column {case.column!r} (it has " in words
    command(case, words)


@pytest.mark.representatives(10)
@pytest.mark.parametrize("case", with_media, ids=lambda case: f"{case.name}-{case.layout.__name__}")
def test_a_missing_medium_costs_its_item_only(case: Case, art: Art, tmp_path: Path):
    """Claim: the item is listed with the reason, and the others go on."""
    layout = case.fresh(art)
    layout.lose(case.lost)
    suite = opened(case, layout.write(tmp_path / "data"))
    broken = unusable(suite)
    kept = list(suite.items())
    assert broken and case.reason in broken[0].reason
    assert len(broken) + len(kept) == case.items
    assert len(broken) == (2 if "part 001" in case.reason else 1)
    assert str(tmp_path) not in broken[0].reason


@pytest.mark.representatives(10)
@every
def test_rows_that_are_cut_short_are_reported(case: Case, art: Art, tmp_path: Path):
    """Claim: half a file of rows is refused by its name, with the command that fetches it."""
    layout = case.fresh(art)
    root = layout.write(tmp_path / "data")
    for name in layout.rows:
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(OptionError, match="is cut short or damaged: fetch it with") as caught:
        opened(case, root)
    assert any(f"{Path(name).name} is cut short" in str(caught.value) for name in layout.rows)
    command(case, str(caught.value))


@every
def test_an_empty_or_absent_folder_is_reported(case: Case, tmp_path: Path):
    """Claim: each is a sentence with what the user typed and the command."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="is empty: fetch it with") as caught:
        opened(case, tmp_path / "empty")
    words = str(caught.value)
    newest = BENCHMARKS[case.name].sources[0].repos[0]
    assert f"`hf download {newest} --repo-type dataset" in words
    assert f"--local-dir {tmp_path / 'empty'}" in words
    with pytest.raises(OptionError, match="there is no folder .*absent: fetch it with"):
        opened(case, tmp_path / "absent")
    with pytest.raises(OptionError, match="is not in the local hub cache: fetch it with"):
        open_dataset(case.name)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "video" in case.media or case.name == "convbench"],
    ids=lambda case: f"{case.name}-{case.layout.__name__}",
)
def test_media_never_fetched_are_reported_when_it_is_opened(case: Case, art: Art, tmp_path: Path):
    """Claim: rows without any medium or archive beside them are "half there"."""
    layout = case.fresh(art)
    layout.files, layout.zips, layout.tars = {}, {}, {}
    with pytest.raises(
        OptionError, match="is only half there, its (videos|images) .*missing: "
    ) as e:
        opened(case, layout.write(tmp_path / "data"))
    command(case, str(e.value))
    if case.name == "longvideobench":
        assert "gated" in str(e.value) and "hf auth login" in str(e.value)


def test_a_missing_shard_is_reported(art: Art, tmp_path: Path):
    """Claim: of files numbered 1 and 2 of 2 the one that is missing is named."""
    case = next(case for case in CASES if case.name == "textvqa")
    layout = case.fresh(art)
    del layout.rows["data/validation-00000-of-00002.parquet"]
    with pytest.raises(OptionError, match="half there, validation-00000-of-00002.parquet is missi"):
        opened(case, layout.write(tmp_path / "data"))


def test_a_missing_sub_task_is_reported(art: Art, tmp_path: Path):
    """Claim: MVBench without one of its files is half there; its other sub-tasks open alone."""
    case = next(case for case in CASES if case.name == "mvbench")
    layout = case.fresh(art)
    del layout.rows["json/action_count.json"]
    root = layout.write(tmp_path / "data")
    with pytest.raises(OptionError, match="half there, json/action_count.json is missing"):
        opened(case, root)
    suite = open_dataset("mvbench/state_change", root)
    assert suite.name == "mvbench/state_change"
    assert [item.meta["part"] for item in suite.items()] == ["state_change"]


def test_a_pointer_is_no_file(art: Art, tmp_path: Path):
    """Claim: what git leaves in place of a large file is called by its name."""
    root = tmp_path / "data"
    (root / "main").mkdir(parents=True)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (root / "main" / "test-00000-of-00001.parquet").write_text(pointer)
    with pytest.raises(OptionError, match="is only a Git LFS pointer, not the file itself"):
        open_dataset("gsm8k", root)


def test_mlvus_other_questions_are_not_taken_for_these(art: Art, tmp_path: Path):
    """Claim: MLVU_Test, whose split is also called "test", never stands in for MLVU_dev."""
    case = next(case for case in CASES if case.name == "mlvu")
    case.fresh(art).write(tmp_path / "MLVU_Test")
    with pytest.raises(OptionError, match="MLVU is not in .*: fetch it with"):
        opened(case, tmp_path)


def test_a_part_of_a_column_is_kept_to(art: Art, tmp_path: Path):
    """Claim: Video-MME's short, medium and long are those of its column."""
    case = next(case for case in CASES if case.name == "video-mme")
    root = case.fresh(art).write(tmp_path / "data")
    for part, count in (("short", 1), ("medium", 0), ("long", 1)):
        items = list(open_dataset(f"Video-MME/{part}", root).items())
        assert [item.meta["duration"] for item in items] == [part] * count


def test_names_are_checked():
    """Claim: benchmarks, parts and papers that do not exist are answered with those that do."""
    with pytest.raises(OptionError, match="no benchmark 'imagenet': use videodetailcaption, mvbe"):
        open_dataset("imagenet")
    with pytest.raises(OptionError, match="MVBench has no part 'x': use action_antonym, "):
        open_dataset("mvbench/x")
    with pytest.raises(OptionError, match="TextVQA has no part 'x': use its name alone"):
        open_dataset("textvqa/x")
    with pytest.raises(OptionError, match="GSM8K has no setting 'hippo': use sage, tabed"):
        open_dataset("gsm8k", paper="hippo")
