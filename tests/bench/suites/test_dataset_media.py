"""Media beside the rows: folders, archives whole and in parts, hostile members; and the hub."""

from __future__ import annotations

import json
import math
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
from handmade_layouts import CASES, Art, Layout, tarred, unusable, zipped
from openpyxl.cell.rich_text import CellRichText, TextBlock
from openpyxl.cell.text import InlineFont

from saccade.bench.suites import archives, datasets, rows, wording
from saccade.bench.suites.datasets import Dataset, message_parts
from saccade.bench.suites.media_index import VIDEO_SUFFIXES, MediaIndex
from saccade.bench.suites.search import open_dataset
from saccade.bench.suites.types import Item, LayoutError
from saccade.core.errors import OptionError, VideoInputError
from saccade.inputs.media import Clip


def fresh(name: str, art: Art) -> Layout:
    return next(case for case in CASES if case.name == name).fresh(art)


def only(suite: Dataset) -> Item:
    (item,) = suite.items()
    return item


def clip_of(item: Item) -> Clip:
    clip = item.media[0].read()
    assert isinstance(clip, Clip)
    return clip


def vdc(root: Path, names: list[str], files: dict[str, bytes]) -> Dataset:
    rows = [{"video_name": name, "question": "Describe it.", "answer": "A."} for name in names]
    layout = Layout({"data/test-00000-of-00001.parquet": rows}, files=files)
    return open_dataset("videodetailcaption", layout.write(root))


@pytest.mark.parametrize("suffix", ["mp4", "MP4", "mkv", "MKV", "avi", "AVI", "webm", "WebM"])
@pytest.mark.parametrize("packed", [False, True])
def test_any_case_and_extension_is_found(suffix: str, packed: bool, art: Art, tmp_path: Path):
    """Claim: Test_Videos/<name> is found whatever it ends in, beside the rows or in the zip."""
    name = f"Test_Videos/v_one.{suffix}"
    files = {"videos.zip": zipped({name: art.clip})} if packed else {name: art.clip}
    assert clip_of(only(vdc(tmp_path / "d", ["v_one"], files))).frames.shape[0] == 12


def test_names_that_differ_in_case_alone_are_two(art: Art, tmp_path: Path):
    """Claim: of abC and ABc the one asked for is read, and of web ids no other stands in.

    Fails if a benchmark silently shows another video.
    """
    files = {"Test_Videos/abC.mp4": art.clip, "Test_Videos/ABc.mp4": art.clip[:100]}
    first, second = vdc(tmp_path / "a", ["abC", "ABc"], files).items()
    assert clip_of(first).frames.shape[0] == 12
    with pytest.raises(VideoInputError):
        second.media[0].read()
    layout = fresh("video-mme", art)
    layout.lose("data/fFjv93ACGo8.mp4")
    suite = open_dataset("video-mme/short", layout.write(tmp_path / "b"))
    assert not list(suite.items())
    assert unusable(suite)[0].reason == "fFjv93ACGo8 is missing"


def test_linked_folders_are_followed_and_circles_end(art: Art, tmp_path: Path):
    """Claim: videos behind a link to a folder are found, once, and a link to itself ends."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "v.mp4").write_bytes(art.clip)
    root = tmp_path / "d"
    root.mkdir()
    (root / "Test_Videos").symlink_to(store, target_is_directory=True)
    (store / "again").symlink_to(root, target_is_directory=True)
    assert clip_of(only(vdc(root, ["v"], {}))).frames.shape[0] == 12


def test_two_files_of_one_name_are_not_guessed_between(art: Art, tmp_path: Path):
    """Claim: which of two is meant is not guessed: the item is unusable."""
    files = {"a/Test_Videos/v.mp4": art.clip, "b/Test_Videos/v.mp4": art.clip}
    suite = vdc(tmp_path / "d", ["v"], files)
    assert unusable(suite)[0].reason == "there are 2 files named v"


def test_a_plain_file_goes_before_a_packed_one(art: Art, tmp_path: Path, unpacked: Path):
    """Claim: what is already unpacked is not unpacked again."""
    name = "Test_Videos/v.mp4"
    files = {name: art.clip, "videos.zip": zipped({name: art.clip})}
    clip_of(only(vdc(tmp_path / "d", ["v"], files)))
    assert not unpacked.exists()


def test_only_the_member_asked_for_is_unpacked_and_once(art: Art, tmp_path: Path, unpacked: Path):
    """Claim: listing unpacks nothing, reading one member only, and the second time none."""
    names = {f"Test_Videos/v{n}.mp4": art.clip for n in range(3)}
    suite = vdc(tmp_path / "d", ["v0", "v1", "v2"], {"videos.zip": zipped(names)})
    items = list(suite.items())
    assert not unpacked.exists()
    clip_of(items[1])
    (made,) = [path for path in unpacked.rglob("*") if path.is_file()]
    assert made.name == "v1.mp4" and made.read_bytes() == art.clip
    before = made.stat().st_mtime_ns
    clip_of(items[1])
    assert made.stat().st_mtime_ns == before


def test_a_newer_archive_is_unpacked_again(art: Art, tmp_path: Path, unpacked: Path):
    """Claim: what was unpacked of an older archive of the same name is not read."""
    root, name = tmp_path / "d", "Test_Videos/v.mp4"
    suite = vdc(root, ["v"], {"videos.zip": zipped({name: art.clip[:-9]})})
    try:
        only(suite).media[0].read()
    except VideoInputError:
        pass
    clip_of(only(vdc(root, ["v"], {"videos.zip": zipped({name: art.clip})})))
    made = [path.read_bytes() for path in unpacked.rglob("*.mp4") if path.is_file()]
    assert sorted(map(len, made)) == [len(art.clip) - 9, len(art.clip)]


def test_a_tar_in_parts_lacking_one_says_which(art: Art, tmp_path: Path):
    """Claim: the missing part is named; without the last one, what came before it is used."""
    layout = fresh("longvideobench", art)
    root = layout.write(tmp_path / "a")
    (root / "videos.tar.part.ab").unlink()
    suite = open_dataset("longvideobench", root, paper="hippo")
    assert unusable(suite)[0].reason == (
        "yt_1.mp4 is missing (videos.tar is in parts and part ab is missing)"
    )
    root = fresh("longvideobench", art).write(tmp_path / "b")
    for part in ("ab", "ac"):
        (root / f"videos.tar.part.{part}").unlink()
    suite = open_dataset("longvideobench", root, paper="hippo")
    assert clip_of(only(suite)).frames.shape[0] == 12
    reason = "yt_2.mp4 is missing (videos.tar is cut short or damaged)"
    assert [entry.reason for entry in unusable(suite)] == [reason]


def test_parts_beside_their_whole_archive_are_left_out(tmp_path: Path) -> None:
    """Claim: an archive that was joined by hand, and its parts, are one archive: the whole one."""
    files = [tmp_path / f"videos.zip{end}" for end in (".001", ".002", "")]
    for file in files:
        file.write_bytes(zipped({"a.txt": b"x"}))
    (archive,) = archives.find_archives(files)
    assert archive.files == (files[-1],) and archive.listing == ({"a.txt": 1}, "")


@pytest.mark.parametrize(
    ("ends", "other"),
    [
        (("aa", "ab"), "asc"),
        (("001", "002"), "asc"),
        (("001", "002"), "md"),
        (("aaa", "aab"), "md"),
    ],
)
def test_a_file_beside_parts_is_no_part(ends: tuple[str, str], other: str, tmp_path: Path) -> None:
    """Claim: a signature or another small file, whose ending looks like a part's, is none of the
    archive's parts. Fails if the archive is said to lack the parts before it."""
    whole = zipped({"one.mp4": b"x" * 50})
    halves = (whole[:60], whole[60:])
    files = [tmp_path / f"v.zip.{end}" for end in ends]
    for path, data in zip(files, halves, strict=True):
        path.write_bytes(data)
    beside = tmp_path / f"v.zip.{other}"
    beside.write_bytes(b"signed")
    (archive,) = archives.find_archives(sorted([*files, beside]))
    assert archive.files == tuple(files) and archive.listing == ({"one.mp4": 50}, "")


def test_lettered_and_numbered_parts_of_one_name_are_two_archives(tmp_path: Path) -> None:
    """Claim: parts that are numbered in two ways are not mixed into one archive, and each archive
    is listed. Fails with a ValueError where letters are read as a number."""
    for end in (".aa", ".001"):
        (tmp_path / f"videos.tar{end}").write_bytes(tarred({"a.txt": b"x"}))
    found = archives.find_archives(sorted(tmp_path.iterdir()))
    assert [len(archive.files) for archive in found] == [1, 1]
    assert [archive.listing for archive in found] == [({"a.txt": 1}, "")] * 2


def test_a_tar_may_have_zip_in_its_name(tmp_path: Path) -> None:
    """Claim: the ending of a name says what an archive is, and not what stands before it."""
    path = tmp_path / "data.zips.tar"
    path.write_bytes(tarred({"a.txt": b"x"}))
    assert archives.find_archives([path])[0].listing == ({"a.txt": 1}, "")


def test_a_member_of_a_long_name_is_unpacked(tmp_path: Path, unpacked: Path) -> None:
    """Claim: the name of an unpacked file is as long as a file system allows, in bytes."""
    name = f"{'視' * 100}.mp4"
    (tmp_path / "v.zip").write_bytes(zipped({name: b"x"}))
    path = MediaIndex((tmp_path,), VIDEO_SUFFIXES).find(name).local()
    assert path.read_bytes() == b"x" and path.suffix == ".mp4"


@pytest.mark.parametrize("cell", [[1], 5, ["ab"], {"a": 1}])
def test_samples_of_a_row_that_are_no_rows_are_refused(cell: Any, tmp_path: Path) -> None:
    """Claim: a cell that should have a list of samples and has something else is a sentence."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"q": cell}]))
    with pytest.raises(LayoutError, match="a q of rows.json is not a list of rows"):
        rows.read_rows([path], nested="q")


def test_columns_of_a_workbook_have_names_of_text(tmp_path: Path) -> None:
    """Claim: a numeric name becomes text, and a column without a name is left out."""
    book = openpyxl.Workbook()
    for line in (["id", None, 2024], ["a", "x", "b"], [None, None, None]):
        book.active.append(line)
    book.save(tmp_path / "book.xlsx")
    table = rows.read_rows([tmp_path / "book.xlsx"])
    assert table.names == ("id", "2024") and [*table.rows_at([0])] == [{"id": "a", "2024": "b"}]


def test_members_that_differ_in_their_extensions_spelling_are_two(
    tmp_path: Path, unpacked: Path
) -> None:
    """Claim: both are unpacked, each to a file of its own."""
    (tmp_path / "v.zip").write_bytes(zipped({"clip.mp4": b"lower", "clip.MP4": b"upper"}))
    index = MediaIndex((tmp_path,), VIDEO_SUFFIXES)
    contents = [index.find(name).local().read_bytes() for name in ("clip.mp4", "clip.MP4")]
    assert contents == [b"lower", b"upper"]


def test_every_lettered_option_stays() -> None:
    """Claim: letters are removed where all options have them, and no option is lost with them."""
    lettered = [f"{letter}. text {letter}" for letter in wording.LETTERS]
    texts = wording.column_texts({"options": lettered}, ["options"])
    assert texts == tuple(f"text {letter}" for letter in wording.LETTERS)
    more = [*lettered, "one more"]
    assert wording.column_texts({"options": more}, ["options"]) == tuple(more)


def test_a_member_that_is_cut_short_is_reported_when_it_is_read(
    art: Art, tmp_path: Path, unpacked: Path
):
    """Claim: a member whose header is there and whose bytes are not is refused, and not kept."""
    root = tmp_path / "d"
    root.mkdir()
    (root / "v.tar").write_bytes(tarred({"v.mp4": art.clip})[:1000])
    with pytest.raises(VideoInputError, match="v.mp4 cannot be unpacked from v.tar: unexp"):
        MediaIndex((root,), VIDEO_SUFFIXES).find("v.mp4").local()
    assert not [path for path in unpacked.rglob("*") if path.is_file()]


@pytest.mark.parametrize("end", ["gz", "xz", "zst", "zip", "tar", "tgz"])
def test_the_end_of_an_archive_is_no_part(end: str):
    """Claim: "videos.tar.xz" is a whole archive, and "videos.tar.ab" is the part ab of one."""
    assert archives._split_part(f"videos.tar.{end}") == (f"videos.tar.{end}", "")
    assert archives._split_part("videos.tar.ab") == ("videos.tar", "ab")


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_a_member_that_is_damaged_is_refused_in_a_sentence(
    tmp_path: Path, unpacked: Path, method: int
) -> None:
    """Claim: whatever compresses a zip, a damaged member is an error that names it.

    Fails if an error of one of the decompressors is not expected.
    """
    path = tmp_path / "v.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("v.mp4", bytes(range(256)) * 200)
    data = bytearray(path.read_bytes())
    data[50:90] = b"\xff" * 40
    path.write_bytes(bytes(data))
    (archive,) = archives.find_archives([path])
    with pytest.raises(VideoInputError, match=r"v.mp4 cannot be unpacked from v.zip"):
        archive.extract(["v.mp4"], unpacked / "v")


def test_an_archive_that_is_cut_short_is_named(art: Art, tmp_path: Path):
    """Claim: half a zip makes its videos unusable, with the reason."""
    data = zipped({"Test_Videos/v.mp4": art.clip})
    suite = vdc(tmp_path / "d", ["v"], {"videos.zip": data[: len(data) // 2]})
    reason = "v is missing (videos.zip is cut short or damaged)"
    assert [entry.reason for entry in unusable(suite)] == [reason]


CLIMBING = ["../evil.mp4", "/tmp/evil.mp4", "a/../../evil.mp4", "..\\evil.mp4", "C:/evil.mp4"]


@pytest.mark.parametrize("member", CLIMBING)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_member_cannot_climb_out(
    kind: str, member: str, art: Art, tmp_path: Path, unpacked: Path
):
    """Claim: names that climb or are absolute are no members; nothing is written anywhere."""
    root = tmp_path / "d"
    root.mkdir()
    pack = zipped if kind == "zip" else tarred
    (root / f"videos.{kind}").write_bytes(pack({member: art.clip, "ok.mp4": art.clip}))
    index = MediaIndex((root,), VIDEO_SUFFIXES)
    with pytest.raises(LayoutError, match="evil.mp4 is missing|no name that can be looked up"):
        index.find("evil.mp4")
    with pytest.raises(LayoutError):
        index.find(member)
    made = index.find("ok.mp4").local()
    assert made.is_relative_to(unpacked) and made.read_bytes() == art.clip
    assert not list(tmp_path.rglob("evil*"))


def test_links_in_archives_are_no_members(art: Art, tmp_path: Path):
    """Claim: symbolic and hard links, in tar and zip, are not followed and not made."""
    root = tmp_path / "d"
    root.mkdir()
    with tarfile.open(root / "a.tar", "w") as archive:
        for name, kind in (("soft.mp4", tarfile.SYMTYPE), ("hard.mp4", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    with zipfile.ZipFile(root / "b.zip", "w") as book:
        entry = zipfile.ZipInfo("link.mp4")
        entry.external_attr = 0o120777 << 16
        book.writestr(entry, "/etc/passwd")
    index = MediaIndex((root,), VIDEO_SUFFIXES)
    for name in ("soft.mp4", "hard.mp4", "link.mp4"):
        with pytest.raises(LayoutError, match=f"{name} is missing"):
            index.find(name)


def test_a_member_longer_than_declared_is_refused(art: Art, tmp_path: Path, unpacked: Path):
    """Claim: no more bytes are written than the archive declared; nothing is left behind."""
    root = tmp_path / "d"
    root.mkdir()
    data = bytearray(zipped({"v.mp4": b"0" * 5000}))
    at = data.rfind(b"PK\x01\x02") + 24  # the size in the zip's directory
    data[at : at + 4] = (100).to_bytes(4, "little")
    (root / "v.zip").write_bytes(bytes(data))
    with pytest.raises(VideoInputError, match="v.mp4 cannot be unpacked from v.zip"):
        MediaIndex((root,), VIDEO_SUFFIXES).find("v.mp4").local()
    assert not [path for path in unpacked.rglob("*") if path.is_file()]


def test_a_folder_of_frames_is_three_a_second(art: Art, tmp_path: Path):
    """Claim: MVBench's JPEG folders are videos of 3 frames a second, beside the rows and packed."""
    layout = fresh("mvbench", art)
    for number, root in enumerate((tmp_path / "packed", tmp_path / "plain")):
        if number:
            layout.files |= layout.zips.pop("video/tvqa.zip")
        suite = open_dataset("mvbench/episodic_reasoning", layout.write(root))
        clip = clip_of(only(replace(suite, setting=replace(suite.setting, frames=7))))
        assert clip.frames.shape == (7, 24, 36, 3)
        np.testing.assert_allclose(clip.timestamps, np.arange(7) / 3, atol=1e-6)
        assert clip.duration == pytest.approx(7 / 3) and clip.fps == pytest.approx(3)
        assert clip.sampled_fps == pytest.approx(3)


@pytest.mark.parametrize(
    ("cell", "seconds"), [(1, 1.0), (2.5, 2.5), ("12.5", 12.5), (None, None), ("", None)]
)
def test_a_cell_of_seconds_may_be_text_or_empty(cell: Any, seconds: float | None) -> None:
    """Claim: a number that a table keeps as text is a number, and an empty cell is none."""
    assert datasets._seconds({"start": cell}, "start") == seconds
    assert datasets._seconds({"start": math.nan}, "start") is None


@pytest.mark.parametrize("cell", ["soon", "0:12", True, [1.0], math.inf])
def test_a_cell_that_is_no_number_of_seconds_is_refused(cell: Any) -> None:
    """Claim: such a row is unusable, with the reason. Fails if the whole video is read instead."""
    with pytest.raises(LayoutError, match="its end is .* no number of seconds"):
        datasets._seconds({"end": cell}, "end")


def test_start_and_end_count_for_whole_videos_only(art: Art, tmp_path: Path):
    """Claim: of a video that is not cut, the seconds from start to end; a cut one is read whole.

    Fails if a segment is cut a second time, or a whole video is shown uncut.
    """
    layout = fresh("mvbench", art)
    suite = open_dataset("mvbench/action_sequence", layout.write(tmp_path / "cut"))
    clip = clip_of(only(suite))
    assert clip.timestamps[0] == 0 and clip.frames.shape[0] == 12
    members = layout.zips["video/star.zip"]
    members["Charades_v1_480/action_sequence_1.mp4"] = members.pop(
        "star/Charades_segment/action_sequence_1.mp4"
    )  # without the folder that is named like the zip
    suite = open_dataset("mvbench/action_sequence", layout.write(tmp_path / "whole"))
    clip = clip_of(only(suite))
    assert 1.0 <= clip.timestamps[0] < 1.3 and clip.timestamps[-1] <= 2.5


def test_a_cut_video_of_which_there_are_two_is_not_replaced_by_the_whole_one(
    art: Art, tmp_path: Path
):
    """Claim: which of two files is meant is asked for. Fails if the uncut video is read instead."""
    layout = fresh("mvbench", art)
    members = layout.zips["video/star.zip"]
    cut = "star/Charades_segment/action_sequence_1.mp4"
    members["Charades_v1_480/action_sequence_1.mp4"] = members[cut]
    layout.zips["video/other.zip"] = {f"other/{cut}": members[cut]}
    members[f"again/{cut}"] = members.pop(cut)
    suite = open_dataset("mvbench/action_sequence", layout.write(tmp_path / "d"))
    (sample,) = unusable(suite)
    assert sample.reason == "there are 2 files named action_sequence_1.mp4"


def test_columns_that_only_some_files_have_are_columns(tmp_path: Path) -> None:
    """Claim: rows of a parquet file without a column have None there, whichever file is first."""
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    Layout({"a.parquet": [{"x": 1}, {"x": 2}], "b.parquet": [{"x": 3, "y": "new"}]}).write(tmp_path)
    for order in (paths, paths[::-1]):
        table = rows.read_rows(order)
        assert set(table.names) == {"x", "y"}
        assert sorted(table.column("y"), key=str) == [None, None, "new"]
        cells = [row.get("y") for row in table.rows_at(range(3))]
        assert cells == table.column("y")


def test_the_fallback_folder_of_mvbench_is_found(art: Art, tmp_path: Path):
    """Claim: videos below data0613/ are found by the same folders."""
    layout = fresh("mvbench", art)
    name = "clevrer/video_validation/moving_count_1.mp4"
    data = layout.zips["video/clevrer.zip"].pop(name)
    layout.zips["video/data0613.zip"] = {f"data0613/{name}": data}
    assert clip_of(only(open_dataset("mvbench/moving_count", layout.write(tmp_path / "d"))))


def test_rows_and_media_of_two_revisions_are_put_together(art: Art, tmp_path: Path):
    """Claim: MVBench's rows in one snapshot of the cache and its videos in another are one set."""
    base = tmp_path / "hf" / "hub" / "datasets--OpenGVLab--MVBench" / "snapshots"
    layout = fresh("mvbench", art)
    Layout(layout.rows).write(base / "main")
    Layout({}, zips=layout.zips).write(base / "video")
    items = list(open_dataset("mvbench").items())
    assert len(items) == 20 and clip_of(items[0]).frames.shape[0] == 12


def test_videos_that_lmms_eval_unpacked_are_found(art: Art, tmp_path: Path):
    """Claim: without a root, media below HF_HOME where lmms-eval puts them are used."""
    layout = fresh("video-mme", art)
    base = tmp_path / "hf" / "hub" / "datasets--lmms-lab--Video-MME" / "snapshots" / "0a1b"
    Layout(layout.rows).write(base)
    files = {name: data for members in layout.zips.values() for name, data in members.items()}
    Layout({}, files=files).write(tmp_path / "hf" / "videomme")
    assert len(list(open_dataset("video-mme").items())) == 2


def test_samples_are_drawn_once_and_replaced_where_unusable(art: Art, tmp_path: Path):
    """Claim: the draw is numpy's with seed 42, the same each time; an unusable one is replaced."""
    names = [f"v{n}" for n in range(20)]
    drawn = sorted(np.random.default_rng(42).permutation(20)[:5])
    files = {f"Test_Videos/{name}.mp4": art.clip for name in names}
    suite = vdc(tmp_path / "a", names, files)
    suite = replace(suite, setting=replace(suite.setting, samples=5))
    assert [item.id for item in suite.items()] == [f"v{n}#{n}" for n in drawn]
    del files[f"Test_Videos/v{drawn[2]}.mp4"]
    lacking = vdc(tmp_path / "b", names, files)
    lacking = replace(lacking, setting=replace(lacking.setting, samples=5))
    assert len(list(lacking.items())) == 5
    assert [entry.id for entry in unusable(lacking)] == [f"v{drawn[2]}#{drawn[2]}"]
    everything = replace(suite, setting=replace(suite.setting, samples=None))
    assert [item.id for item in everything.items()] == [f"v{n}#{n}" for n in range(20)]


def test_a_message_has_its_images_where_the_paper_puts_them(art: Art, tmp_path: Path):
    """Claim: marks become images in order; without marks the media come first."""
    root = fresh("iedit", art).write(tmp_path / "d")
    item = list(open_dataset("iedit", root).items())[0]
    first, second = item.media
    head = "Please provide instructions for editing the source image to match the target image. "
    wanted = (head + "Source Image:", first, "Target Image:", second, "Instruction:")
    assert message_parts(item) == wanted
    vqa = fresh("textvqa", art).write(tmp_path / "e")
    item = list(open_dataset("textvqa", vqa).items())[0]
    assert message_parts(item) == (item.media[0], "what is the brand of this camera?")


def test_a_story_needs_its_captions_and_its_images(art: Art, tmp_path: Path):
    """Claim: a story of four images, or without captions, is unusable and says why."""
    layout = fresh("pororosv", art)
    rows = [
        r for r in layout.rows["in_domain/test-00000-of-00001.parquet"] if "Poro" in r["sub_task"]
    ]
    rows[0]["image_4"] = None
    rows[1]["question"] = "Finish it."
    rows.append(dict(rows[0], image_4=rows[0]["image_3"]))
    layout.rows = {"in_domain/test-00000-of-00001.parquet": rows}
    suite = open_dataset("pororosv", layout.write(tmp_path / "d"))
    assert len(list(suite.items())) == 1
    assert [entry.reason for entry in unusable(suite)] == [
        "it has 4 images where the prompt has 5",
        "its question has no caption1",
    ]


def test_an_answer_that_is_no_option_is_reported(art: Art, tmp_path: Path):
    """Claim: letters, texts and "(B) text" are understood; anything else is not guessed."""
    layout = fresh("mvbench", art)
    given = ["Put down.", "b", "(C) Throw.", "Jump."]
    row = layout.rows["json/state_change.json"][0]
    layout.rows["json/state_change.json"] = [{**row, "answer": answer} for answer in given]
    root = layout.write(tmp_path / "d")
    suite = open_dataset("mvbench/state_change", root, paper="hippo")
    assert [item.answers for item in suite.items()] == [("A",), ("B",), ("C",)]
    assert unusable(suite)[0].reason == "its answer 'Jump.' is none of its options"


def test_a_damaged_picture_is_refused_by_its_name(art: Art, tmp_path: Path):
    """Claim: reading it says which it is and nothing of where it lies."""
    layout = fresh("chartqa", art)
    layout.rows["data/test-00000-of-00001.parquet"][0]["image"]["bytes"] = art.png[:40]
    item = list(open_dataset("chartqa", layout.write(tmp_path / "d")).items())[0]
    with pytest.raises(VideoInputError, match="^picture.png is damaged or cut short"):
        item.media[0].read()


# -- the hub -----------------------------------------------------------------------------------


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_only_small_annotations_are_fetched(
    online: None, art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    """Claim: rows without pictures are fetched and said; pictures and videos never are."""
    downloads: list[tuple[str, Any]] = []

    def fetch(repo: str, **options: Any) -> str:
        downloads.append((repo, options["allow_patterns"]))
        return str(fresh("gsm8k", art).write(tmp_path / "fetched"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert len(list(open_dataset("gsm8k").items())) == 2
    assert downloads == [("openai/gsm8k", ["main/test-*.parquet"])]
    assert "fetching main/test-*.parquet of openai/gsm8k from the hub" in caplog.text
    downloads.clear()
    with pytest.raises(OptionError, match="TextVQA is not in the local hub cache: fetch it with"):
        open_dataset("textvqa")
    assert not downloads

    def rows_only(repo: str, **options: Any) -> str:
        layout = fresh("videodetailcaption", art)
        layout.zips = {}
        return str(layout.write(tmp_path / "rows"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", rows_only)
    with pytest.raises(OptionError, match=r"its videos \(videos.zip\) are missing: .*videos.zip"):
        open_dataset("videodetailcaption")


def test_what_is_cached_is_not_fetched_in_another_form(
    online: None, art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Claim: LVBench's original in the cache is used though the other could be fetched."""

    def refuse(repo: str, **options: Any) -> str:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    case = next(case for case in CASES if case.repos[0] == "zai-org/LVBench")
    base = tmp_path / "hf" / "hub" / "datasets--THUDM--LVBench" / "snapshots" / "0a1b"
    case.fresh(art).write(base)
    assert len(list(open_dataset("lvbench").items())) == 2


def test_a_gated_dataset_says_what_to_accept(online: None, monkeypatch: pytest.MonkeyPatch):
    """Claim: the hub's refusal becomes a sentence with the page and the two commands."""
    from huggingface_hub.errors import GatedRepoError

    def refuse(repo: str, **options: Any) -> str:
        raise GatedRepoError.__new__(GatedRepoError)  # else it wants a web server's answer

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(OptionError) as caught:
        open_dataset("longvideobench")
    words = str(caught.value)
    assert words.startswith("LongVideoBench is gated: fetch it with `hf download longvideobench/")
    assert "https://huggingface.co/datasets/longvideobench/LongVideoBench" in words
    assert "`hf auth login`" in words and "\n" not in words


def test_a_hub_that_cannot_be_reached_is_an_absent_dataset(
    online: None, monkeypatch: pytest.MonkeyPatch
):
    """Claim: whatever the client raises, the user reads what to fetch."""

    def fail(repo: str, **options: Any) -> str:
        raise OSError("no network at /home/me")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(OptionError, match="NQ is not in the local hub cache: fetch it with") as e:
        open_dataset("nq")
    assert "/home/me" not in str(e.value)


def test_without_pyarrow_one_sentence_says_so(
    art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Claim: the extra is named; sets in JSON need none of it."""
    gsm8k = fresh("gsm8k", art).write(tmp_path / "a")
    mvbench = fresh("mvbench", art).write(tmp_path / "b")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        OptionError, match=r"needs pyarrow: `uv run --extra datasets.*pip install 'PATH/TO/CLONE\["
    ):
        open_dataset("gsm8k", gsm8k)
    assert len(list(open_dataset("mvbench", mvbench).items())) == 20


def test_a_workbook_is_read_as_it_is_shown(tmp_path: Path):
    """Claim: rich texts, numbers and rows with gaps are read as they are shown."""
    book = openpyxl.Workbook()
    book.active.append(["ID", CellRichText("na", TextBlock(InlineFont(b=True), "me"))])
    book.active["B2"], book.active["A4"] = "x", 7
    path = tmp_path / "book.xlsx"
    book.save(path)
    sheet = rows.read_rows([path])
    assert list(sheet.rows_at([0, 1])) == [{"ID": None, "name": "x"}, {"ID": "7", "name": None}]
