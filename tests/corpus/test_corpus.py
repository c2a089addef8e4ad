"""Claims about a corpus: one row a video, whatever is killed, broken, batched or sharded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.core.errors import OptionError
from saccade.corpus import caption_run, json_lines
from saccade.corpus import manifest as manifests
from saccade.corpus import worker as workers
from saccade.corpus.manifest import CaptionSettings, ClipJob, Row
from saccade.corpus.worker import CorpusWorker, answer_locally
from saccade.inputs.media import FrameSampling

pytestmark = pytest.mark.usefixtures("unchecked")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> dict[str, Any]:
    """What stands for each id; fails where one stands twice."""
    rows = read(path)
    assert len({each["id"] for each in rows}) == len(rows)
    return {each["id"]: each["text"] for each in rows}


def make_row(work: CaptionSettings, job: ClipJob, **more: Any) -> Row:
    return Row(job.id, job.video, job.prompt, work.key, **{"text": "said", **more})


def saying(
    work: CaptionSettings, log: list[str], fail: Callable[[str], Any] = lambda id: None
) -> Any:
    """Work without a model: says the same of every video, or what `fail` makes of its id."""

    def answers(groups: Iterable[Sequence[ClipJob]]) -> Iterator[list[Row]]:
        for group in groups:
            log.extend(job.id for job in group)
            errors = [fail(job.id) for job in group]
            yield [make_row(work, job, error=e) for job, e in zip(group, errors, strict=True)]

    return lambda: answers


@pytest.mark.extra
def test_a_manifest_names_documents(tmp_path: Path, videos: Path) -> None:
    """Claim: rows with a document, with and without a video beside it, are answered about it, one
    that is missing is a row's error, and a row whose document changed is not taken for its answer;
    files of rows that say nothing of documents go on being read."""
    (tmp_path / "notes.txt").write_text("A red circle moves left. " * 20)
    rows = [
        {"document": "notes.txt"},
        {"id": "both", "video": str(videos / "clip0.mp4"), "document": "notes.txt"},
        {"document": "missing.txt"},
    ]
    listed, out = tmp_path / "jobs.jsonl", tmp_path / "captions.jsonl"
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = CaptionSettings(
        method="std",
        max_new_tokens=4,
        sampling=FrameSampling(num_frames=4),
        load=(("device", "cpu"),),
    )
    jobs = manifests.read_jobs(listed, "What moves?")
    caption_run.run_jobs(jobs, out, work, lambda: answer_locally(work), batch=2)
    alone, both, missing = read(out)
    assert alone["error"] is None is both["error"] and alone["text"] and both["frames"] == 4
    assert (alone["id"], alone["frames"]) == ("notes.txt", 0)
    assert 0 < alone["visual_tokens"] < both["visual_tokens"]
    assert "missing.txt does not exist" in missing["error"]
    changed = [replace(jobs[1], document="other.txt")]
    with pytest.raises(OptionError, match=r"notes\.txt, which is not"):
        caption_run.run_jobs(changed, out, work, lambda: answer_locally(work))
    before = {k: v for k, v in both.items() if k != "document"}
    out.write_text(json.dumps(before) + "\n")
    with pytest.raises(OptionError, match="not what the manifest asks"):
        caption_run.run_jobs(jobs[1:2], out, work, lambda: answer_locally(work))
    out.write_text(json.dumps({**before, "id": "a.mp4", "video": "a.mp4"}) + "\n")
    old = [ClipJob("a.mp4", "a.mp4", "What moves?", "a.mp4")]
    assert caption_run.run_jobs(old, out, work, lambda: answer_locally(work)).done == 1


# -- real answers ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, videos: Path) -> dict[str, dict[str, Any]]:
    """Every video's row, answered one by one."""
    work = CaptionSettings(
        method="ar",
        max_new_tokens=8,
        sampling=FrameSampling(num_frames=4),
        load=(("device", "cpu"),),
    )
    path = tmp_path_factory.mktemp("alone") / "captions.jsonl"
    caption_run.run_jobs(
        manifests.read_jobs(videos, "Describe the video in detail."),
        path,
        work,
        lambda: answer_locally(work),
    )
    return {each["id"]: each for each in read(path)}


def test_a_bad_video_costs_one_row(alone: dict[str, dict[str, Any]]) -> None:
    """Claim: five videos are answered and measured, the broken sixth is a sentence in its row."""
    bad, alone = alone["bad.mp4"], {k: v for k, v in alone.items() if k != "bad.mp4"}
    assert bad["text"] is None and "bad.mp4" in bad["error"]
    assert not bad["error"].startswith(manifests.UNEXPECTED_PREFIX)
    assert len(alone) == 5 and len({each["text"] for each in alone.values()}) > 1
    for each in alone.values():
        assert each["error"] is None and each["tokens"] == 8 and each["frames"] == 4
        assert each["seconds"] > 0 and each["tau"] == 1.0 and each["visual_tokens"] > 0


def test_a_batch_answers_what_each_answers_alone(
    alone: dict[str, dict[str, Any]], jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: drafted in batches of 4, in fp32, the rows say what plain decoding says one by one.

    Fails if a request of a batch reads another's; the videos were together if ``together`` says 4.
    """
    path = tmp_path / "captions.jsonl"
    totals = caption_run.run_jobs(jobs, path, work, lambda: answer_locally(work), batch=4)
    assert (totals.done, totals.errors) == (6, 1)
    assert texts(path) == {name: each["text"] for name, each in alone.items()}
    assert sorted(each["together"] for each in read(path)) == [1, 2, 2, 3, 3, 3]
    assert max(each["tau"] or 0 for each in read(path)) > 1.0


def test_prompts_of_several_lengths_are_one_batch(
    jobs: list[ClipJob], work: CaptionSettings
) -> None:
    """Claim: padding to the longest prompt changes no answer. Control: the prompts do."""
    worker = CorpusWorker(work)
    batch = [replace(jobs[1], id="a"), replace(jobs[1], id="b", prompt="What is there? " * 4)]
    together = worker(batch)
    assert [each.together for each in together] == [2, 2]
    apart = [row for job in batch for row in worker([job])]
    assert [each.text for each in together] == [each.text for each in apart]
    assert together[0].text != together[1].text


@pytest.mark.extra
def test_what_cannot_be_one_batch_is_answered_one_by_one(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: a picture beside a video is no batch, and both are answered all the same."""
    from PIL import Image

    Image.new("RGB", (56, 56), "red").save(tmp_path / "red.png")
    picture = replace(jobs[1], id="red", video="red.png", video_path=str(tmp_path / "red.png"))
    rows = CorpusWorker(work)([jobs[1], picture])
    assert [(each.error, each.together) for each in rows] == [(None, 1), (None, 1)]


@pytest.mark.slow
def test_a_kill_loses_no_finished_row(
    alone: dict[str, dict[str, Any]], videos: Path, tmp_path: Path
) -> None:
    """Claim: SIGKILL in the middle leaves whole rows; the same command does the rest, none twice.

    Fails if the lock outlives its process, or a row is done again: the rows stay byte for byte.
    """
    path = tmp_path / "captions.jsonl"
    words = ["caption", videos, "--out", path, "--method", "ar", "--max-new-tokens", 8]
    command = [sys.executable, "-m", "saccade", *map(str, words), "--num-frames", "4"]
    command += ["--threads", "1", "--device", "cpu"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    kept = path.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    with path.open("ab") as file:  # what a kill within the write would leave
        file.write(b'{"id": "clip4.mp4", "te')
    second = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert second.returncode == 0, second.stderr
    assert path.read_bytes().startswith(kept)
    assert texts(path) == {name: each["text"] for name, each in alone.items()}
    assert not list(tmp_path.glob("*.lock"))


# -- the bookkeeping, without a model ----------------------------------------------------------


def test_what_has_a_row_is_not_done_again(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: a second run asks for no worker; errors are done again only on request, once."""
    path, log = tmp_path / "out.jsonl", list[str]()
    fail = {"bad.mp4": "too bad"}.get
    totals = caption_run.run_jobs(jobs, path, work, saying(work, log, fail))
    assert (totals.done, totals.errors, len(log)) == (6, 1, 6)

    def never() -> Any:
        raise AssertionError("models loaded for nothing")

    assert caption_run.run_jobs(jobs, path, work, never).done == 6
    assert caption_run.run_jobs(jobs, path, work, saying(work, log), retry=True).errors == 0
    assert log[6:] == ["bad.mp4"] and len(texts(path)) == 6
    assert caption_run.run_jobs(jobs, path, work, never, retry=True).done == 6


def test_retrying_one_shard_keeps_the_other_rows(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: rows of jobs that are not asked for stay in the file, errors too."""
    path = tmp_path / "out.jsonl"
    caption_run.run_jobs(jobs, path, work, saying(work, [], lambda id: "bad"))
    log: list[str] = []
    caption_run.run_jobs(jobs[:2], path, work, saying(work, log), retry=True)
    assert log == [job.id for job in jobs[:2]]
    assert sum(each["error"] == "bad" for each in read(path)) == 4 and len(texts(path)) == 6


def test_an_interrupt_keeps_finished_rows(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: Ctrl-C in the fourth video leaves three rows and no lock."""

    def fail(id: str) -> None:
        if id == jobs[3].id:
            raise KeyboardInterrupt

    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        caption_run.run_jobs(jobs, path, work, saying(work, [], fail))
    assert [each["id"] for each in read(path)] == [job.id for job in jobs[:3]]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_two_workers_do_not_write_one_file(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: while one process writes, another is refused, by name; afterwards it is not."""
    path = tmp_path / "out.jsonl"
    with json_lines.write_lock(path):
        with pytest.raises(OptionError, match=f"process {os.getpid()}.*--shard"):
            caption_run.run_jobs(jobs, path, work, saying(work, []))
    assert caption_run.run_jobs(jobs, path, work, saying(work, [])).done == 6


def test_another_runs_file_is_refused(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: answers of another length or to another question are not mixed with these.

    Control: another method, which answers the same, goes on.
    """
    path = tmp_path / "out.jsonl"
    caption_run.run_jobs(jobs[:3], path, work, saying(work, []))
    longer = replace(work, max_new_tokens=9)
    with pytest.raises(OptionError, match="another target, length"):
        caption_run.run_jobs(jobs, path, longer, saying(longer, []))
    other = [replace(job, prompt="Why?") for job in jobs]
    with pytest.raises(OptionError, match="not what the manifest asks"):
        caption_run.run_jobs(other, path, work, saying(work, []))
    path.with_name("not.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(OptionError, match="no file of captions"):
        caption_run.run_jobs(jobs, path.with_name("not.jsonl"), work, saying(work, []))
    same = replace(work, method="ar", draft="some-draft")
    assert caption_run.run_jobs(jobs, path, same, saying(same, [])).done == 6


def test_a_broken_machine_stops_the_run(work: CaptionSettings, tmp_path: Path) -> None:
    """Claim: ten unexpected failures in a row end a run; ten bad videos do not."""
    many = [ClipJob(str(i), str(i), "?", str(i)) for i in range(30)]
    path, log = tmp_path / "out.jsonl", list[str]()
    broken = saying(work, log, lambda id: f"{manifests.UNEXPECTED_PREFIX}RuntimeError: no GPU")
    with pytest.raises(OptionError, match="10 videos in a row.*no GPU"):
        caption_run.run_jobs(many, path, work, broken)
    assert len(log) == len(read(path)) == 10
    totals = caption_run.run_jobs(many, path, work, saying(work, log, lambda id: "bad"), retry=True)
    assert totals.done == totals.errors == 30


def test_an_unexpected_error_is_reported_as_such(
    jobs: list[ClipJob], work: CaptionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: what is no fault of a video fails its row, by type and message, and not the run."""
    worker = CorpusWorker(work)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setattr(workers, "stream_answer", broken)
    (row,) = worker([jobs[1]])
    assert row.error == f"{manifests.UNEXPECTED_PREFIX}RuntimeError: a kernel" and row.text is None


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    """Claim: rows the disk does not take end the run with a sentence, and not a traceback."""
    if not Path("/dev/full").exists():
        pytest.skip("no device here that is always full")
    path = tmp_path / "out.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OptionError, match="cannot write .*space"):
        json_lines.append_rows(path, [{"id": "a"}])


@given(st.data())
def test_a_file_cut_anywhere_is_gone_on_with(data: st.DataObject) -> None:
    """Claim: cut at any byte, a file's whole rows stay and the rest is done again, once each."""
    import tempfile

    work = CaptionSettings()
    many = [ClipJob(f"é{i}", f"v{i}.mp4", "?", "v") for i in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        caption_run.run_jobs(many, path, work, saying(work, []))
        whole = path.read_bytes()
        size = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:size])
        log: list[str] = []
        caption_run.run_jobs(many, path, work, saying(work, log))
        assert len(log) == 4 - whole[:size].count(b"\n")
        assert path.read_bytes() == whole


def test_the_merge_prefers_answers_and_tells_of_strangers(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: an id two files have is one row, its answer before its error; others are left out."""
    one, two, out = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "out"))
    caption_run.run_jobs(jobs, one, work, saying(work, [], lambda id: "bad"))
    caption_run.run_jobs(jobs[:2], two, work, saying(work, []))
    merge = caption_run.merge_shards(jobs[1:], [one, two], out)
    assert merge.doubled == tuple(job.id for job in jobs[:2]) and not merge.missing
    assert merge.unknown == (jobs[0].id,) and merge.errors == tuple(j.id for j in jobs[2:])
    assert [each["error"] for each in read(out)] == [None, *["bad"] * 4]
    longer = replace(work, max_new_tokens=9)
    caption_run.run_jobs(jobs[:1], tmp_path / "three.jsonl", longer, saying(longer, []))
    with pytest.raises(OptionError, match="different runs"):
        caption_run.merge_shards(jobs, [one, tmp_path / "three.jsonl"], out)
    both = tmp_path / "both.jsonl"
    both.write_text(one.read_text() + (tmp_path / "three.jsonl").read_text())
    with pytest.raises(OptionError, match="the rows of .*both.jsonl are of different runs"):
        caption_run.merge_shards(jobs, [both], out)


def test_a_shard_without_videos_leaves_a_file(
    jobs: list[ClipJob], work: CaptionSettings, tmp_path: Path
) -> None:
    """Claim: where there are more shards than videos, all of them can be merged."""
    parts = [tmp_path / f"{i}.jsonl" for i in range(2)]
    caption_run.run_jobs(jobs, parts[0], work, saying(work, []))
    caption_run.run_jobs([], parts[1], work, saying(work, []))
    assert caption_run.merge_shards(jobs, parts, tmp_path / "out.jsonl").rows == 6


# -- manifests ---------------------------------------------------------------------------------


def test_every_kind_of_manifest(videos: Path, tmp_path: Path) -> None:
    """Claim: a list, JSONL, CSV and a folder name the same videos; prompts and ids are theirs."""
    names = sorted(path.name for path in videos.iterdir())
    (tmp_path / "list.txt").write_text("\n".join(str(videos / name) for name in names) + "\n\n")
    lines = [{"id": i, "video": str(videos / name)} for i, name in enumerate(names)]
    lines[0] |= {"prompt": "Why?"}
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = "".join(f'{i},"{videos / name}",Why?\n' for i, name in enumerate(names))
    (tmp_path / "list.csv").write_text("\ufeffid, video, prompt\n" + table)
    (videos.parent / "beside.txt").write_text("\n".join(f"{videos.name}/{n}" for n in names))
    every = [tmp_path / name for name in ("list.txt", "list.jsonl", "list.csv")]
    every += [videos, videos.parent / "beside.txt"]
    for manifest in every:
        assert [Path(job.video_path) for job in manifests.read_jobs(manifest, "?")] == [
            videos / name for name in names
        ]
    assert [job.prompt for job in manifests.read_jobs(every[1], "?")] == ["Why?", *["?"] * 5]
    assert {job.prompt for job in manifests.read_jobs(every[2], "?")} == {"Why?"}
    assert [job.id for job in manifests.read_jobs(every[2], "?")] == list("012345")
    assert [job.id for job in manifests.read_jobs(videos, "?")] == names


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a": 1}\r{"b": 2}', b'{"a": 1'])
def test_a_line_that_is_no_json_is_named(line: bytes, tmp_path: Path) -> None:
    """Claim: lists that are nested too deeply for a parser, and lines that end as on old Macs, are
    refused with the line's number. Fails if such a line ends the program or is passed over."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0}\n' + line + b"\n")
    with pytest.raises(OptionError, match="line 2 of .* is no JSON"):
        json_lines.read_and_repair(path)
    with pytest.raises(OptionError, match="line 2 of .* is no JSON object"):
        json_lines.parse_object(path, 2, line)


def test_comments_and_blank_lines_of_a_table_are_skipped(tmp_path: Path) -> None:
    """Claim: a comment is a line that begins with # outside quotes, also before the header.

    Fails if a quoted cell counts as a comment, or a quote in a comment swallows the lines after it.
    """
    manifest = tmp_path / "a.csv"
    rows = '\n# "mine\n\nvideo,prompt\n# a,"b\n"#1.mp4","Two\n# lines?"\n\na.mp4,Why?\n'
    manifest.write_text(rows)
    jobs = manifests.read_jobs(manifest, "?")
    assert [(job.id, job.prompt) for job in jobs] == [
        ("#1.mp4", "Two\n# lines?"),
        ("a.mp4", "Why?"),
    ]
    manifest.write_text(rows + "a.mp4,again\n")
    with pytest.raises(OptionError, match="line 10 .* the id of line 9"):
        manifests.read_jobs(manifest, "?")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.jsonl", '{"video": "a"}\n{"video": "b", "id": "a"}\n', "line 2 .*the id of line 1: a"),
        ("a.jsonl", '{"video": "a"}\nnot json\n', "line 2 .*no JSON object"),
        ("a.jsonl", '{"name": "a"}\n', "line 1 .*no video"),
        ("a.csv", "name,path\n1,2\n", "line 2 .*no video"),
        ("a.csv", f'video,prompt\na.mp4,"{"x" * 140_000}', "line 2 .*no CSV: field larger"),
        ("a.txt", "\n \n", "names no video"),
        ("a.txt", "a.mp4\na.mp4\n", "line 2 .*the id of line 1"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(
    name: str, text: str, why: str, tmp_path: Path
) -> None:
    """Claim: what cannot be read is told with its line."""
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=why):
        manifests.read_jobs(tmp_path / name, "?")
    with pytest.raises(OptionError, match="no manifest"):
        manifests.read_jobs(tmp_path / "none.txt", "?")


@given(st.integers(1, 9), st.integers(0, 40))
def test_shards_share_out_the_items(count: int, items: int) -> None:
    """Claim: every item is in exactly one of n shards, and no shard is two larger than another."""
    parts = [
        json_lines.shard_items(range(items), json_lines.parse_shard(f"{i + 1}/{count}"))
        for i in range(count)
    ]
    assert sorted(item for part in parts for item in part) == [*range(items)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_how_far_it_is_in_words() -> None:
    """Claim: the time left is what is to be done by the rate of this run, not of earlier ones."""
    assert str(caption_run.Progress(10, 4, 1, 0, 0.0)) == "4 of 10 done, 1 errors"
    sentence = str(caption_run.Progress(1000, 400, 2, 100, 50.0))
    assert sentence == "400 of 1000 done, 2 errors, 2.00 a second, 0:05:00 left"
