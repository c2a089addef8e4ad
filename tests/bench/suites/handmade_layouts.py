"""Every benchmark's own layout, written out by hand from its publication, a row or two each.

Nothing here reads the loader's table: the two are to be independent.
"""

from __future__ import annotations

import copy
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq

from saccade.bench.suites.datasets import Dataset, Unusable

DESCRIBE = (
    "Please provide a detailed description of the video, focusing on the main subjects, "
    "their actions, and the background scenes."
)


@dataclass(frozen=True)
class Art:
    """Bytes of a clip (12 frames of 32 by 48 in 3 seconds) and of pictures of 24 by 36."""

    clip: bytes
    png: bytes
    jpg: bytes


@dataclass
class Layout:
    """Files of a dataset: rows by file, other files, archives as members by file."""

    rows: dict[str, list[dict[str, Any]]]
    files: dict[str, bytes] = field(default_factory=dict)
    zips: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tars: dict[str, dict[str, bytes]] = field(default_factory=dict)  # each cut into three parts

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in self.rows.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            WRITERS[path.suffix](path, rows)
        files = dict(self.files)
        files |= {name: zipped(members) for name, members in self.zips.items()}
        for name, members in self.tars.items():
            data = tarred(members)
            third = len(data) // 3 + 1
            parts = [data[at : at + third] for at in range(0, len(data), third)]
            files |= {f"{name}.part.a{letter}": p for letter, p in zip("abc", parts, strict=True)}
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    def drop(self, column: str) -> None:
        """A layout that changed: the column is gone."""
        for rows in self.rows.values():
            for row in rows:
                for inner in [row, *row.get("qa", [])]:
                    inner.pop(column, None)

    def lose(self, medium: str) -> None:
        """A file that was never fetched; or, of a column, a picture whose bytes are not there."""
        for members in (self.files, *self.zips.values(), *self.tars.values()):
            if medium in members:
                del members[medium]
                return
        first = next(iter(self.rows.values()))[0]
        if isinstance(first[medium], str):
            first[medium] = "n0"
        else:
            first[medium] = [EMPTY] if isinstance(first[medium], list) else EMPTY


EMPTY = {"bytes": None, "path": None}


def unusable(suite: Dataset) -> list[Unusable]:
    """What was drawn and cannot be used: a medium that is missing, a row that is not whole."""
    return [entry for entry in suite.entries() if isinstance(entry, Unusable)]


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def _json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


def _jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _xlsx(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    book = openpyxl.Workbook()
    for line in (list(rows[0]), *(list(row.values()) for row in rows)):
        book.active.append(line)
    book.save(path)


WRITERS: dict[str, Callable[[Path, Sequence[Mapping[str, Any]]], None]] = {
    ".parquet": _parquet, ".json": _json, ".jsonl": _jsonl, ".xlsx": _xlsx,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout, its ids, how to break it, and what its first item must be."""

    name: str
    repos: tuple[str, ...]  # both generations where there are two
    layout: Callable[[Art], Layout]
    question: str  # the first item's, as the paper words it
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    task: str = "short"
    media: tuple[str, ...] = ("image",)
    column: str = "question"  # that the layout loses
    lost: str = "image"  # the first item's medium
    reason: str = "an image of it is empty"
    paper: str | None = None
    items: int = 2
    then: tuple[str, ...] = ()

    def fresh(self, art: Art) -> Layout:
        return copy.deepcopy(self.layout(art))


def _picture(art: Art) -> dict[str, Any]:
    return {"bytes": art.png, "path": "picture.png"}


def _vdc(art: Art) -> Layout:
    rows = [
        {"video_name": name, "question": "Describe it.", "answer": "A dog runs."}
        for name in ("v_one.a", "v_two")
    ]
    return Layout(
        {"data/test-00000-of-00001.parquet": rows},
        zips={
            "videos.zip": {"Test_Videos/v_one.a.mp4": art.clip, "Test_Videos/v_two.MP4": art.clip}
        },
    )


MVBENCH = {
    "object_interaction": "star/Charades_segment",
    "action_sequence": "star/Charades_segment",
    "action_prediction": "star/Charades_segment",
    "action_localization": "sta/sta_video_segment",
    "moving_count": "clevrer/video_validation",
    "fine_grained_pose": "nturgbd_convert",
    "character_order": "perception/videos",
    "object_shuffle": "perception/videos",
    "egocentric_navigation": "vlnqa",
    "moving_direction": "clevrer/video_validation",
    "episodic_reasoning": "tvqa/video_fps3_hq_segment",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "scene_transition": "scene_qa/video",
    "state_change": "perception/videos",
    "moving_attribute": "clevrer/video_validation",
    "action_antonym": "ssv2_video_mp4",
    "unexpected_action": "FunQA_test/test",
    "counterfactual_inference": "clevrer/video_validation",
    "object_existence": "clevrer/video_validation",
    "action_count": "perception/videos",
}


def _mvbench(art: Art) -> Layout:
    layout = Layout({})
    for task, folder in MVBENCH.items():
        name = f"{task}_1" if task == "episodic_reasoning" else f"{task}_1.mp4"
        row: dict[str, Any] = {
            "video": name,
            "question": f"What of {task}?",
            "candidates": ["Put down.", "Pick up.", "Throw."],
            "answer": "Pick up.",
        }
        if task == "action_sequence":
            row |= {"start": 1.0, "end": 2.5}
        layout.rows[f"json/{task}.json"] = [row]
        members = layout.zips.setdefault(f"video/{folder.split('/')[0]}.zip", {})
        if task == "episodic_reasoning":  # a folder of frames, 3 a second
            members |= {f"{folder}/{name}/{n:05d}.jpg": art.jpg for n in range(1, 8)}
        else:
            members[f"{folder}/{name}"] = art.clip
    return layout


def _mlvu(art: Art) -> Layout:
    rows = [
        {
            "video_name": name,
            "duration": 480.0,
            "question": "What color?\n(A) Red\n(B) Dark blue\n(C) Green\n(D) White",
            "answer": "B",
            "task_type": "PQA",
            "question_id": f"Q{n}",
        }
        for n, name in enumerate(("movie101_66.mp4", "needle_3.mp4"))
    ]
    return Layout(
        {"data/test-00000-of-00001.parquet": rows},
        zips={
            "video_part_1.zip": {"movie101_66.mp4": art.clip},
            "video_part_2.zip": {"video_part_2/needle_3.mkv": art.clip},
        },
    )


def _mlvu_original(art: Art) -> Layout:
    """A file a task, the videos in folders of the tasks' names."""
    row = {
        "video": "movie101_66.mp4",
        "duration": 480.0,
        "question": "What color?",
        "candidates": ["Red", "Dark blue", "Green", "White"],
        "answer": "Dark blue",
        "question_type": "plotQA",
    }
    return Layout(
        {
            "MLVU/json/1_plotQA.json": [row],
            "MLVU/json/2_needle.json": [{**row, "video": "needle_3.mp4"}],
        },
        files={
            "MLVU/video/1_plotQA/movie101_66.mp4": art.clip,
            "MLVU/video/2_needle/needle_3.mp4": art.clip,
        },
    )


def _lvb_row(number: int, **options: Any) -> dict[str, Any]:
    return {
        "id": f"yt_{number}_0",
        "video_id": f"yt_{number}",
        "video_path": f"yt_{number}.mp4",
        "subtitle_path": f"yt_{number}_en.json",
        "question": "Where is the cup?",
        "question_wo_referring_query": "Where?",
        "correct_choice": 1,
        "position": [10, 20],
        "topic_category": "KC-Knowledge-Computer-Science",
        "question_category": "S2E",
        "level": "L1-Perception",
        "duration_group": 15,
        "duration": 9.6,
        "starting_timestamp_for_subtitles": 0,
        "view_count": 7,
        **options,
    }


def _lvb(art: Art) -> Layout:
    padded = {"option0": "On a shelf", "option1": "On the table", "option2": "N/A"}
    padded |= {"option3": "N/A", "option4": "N/A"}
    rows = [_lvb_row(1, **padded), _lvb_row(2, **padded)]
    return Layout(
        {"validation-00000-of-00001.parquet": rows},
        files={"subtitles.tar": tarred({"subtitles/yt_1_en.json": b"[]"})},
        tars={"videos.tar": {"videos/yt_1.mp4": art.clip, "videos/yt_2.mp4": art.clip}},
    )


def _lvb_json(art: Art) -> Layout:
    listed = {"candidates": ["On a shelf", "On the table"]}
    return Layout(
        {"lvb_val.json": [_lvb_row(1, **listed), _lvb_row(2, **listed)]},
        files={"videos/yt_1.MKV": art.clip, "videos/yt_2.mp4": art.clip},
    )


def _lvb_test(art: Art) -> Layout:
    """The test split has no answers and is what SpecVLM describes."""
    layout = _lvb(art)
    rows = layout.rows.pop("validation-00000-of-00001.parquet")
    layout.rows["test-00000-of-00001.parquet"] = rows
    layout.drop("correct_choice")
    return layout


def _videomme(art: Art) -> Layout:
    rows = [
        {
            "video_id": f"00{n}",
            "duration": length,
            "domain": "Knowledge",
            "sub_category": "Humanity & History",
            "url": "https://www.youtube.com/watch?v=fFjv93ACGo8",
            "videoID": video,
            "question_id": f"00{n}-1",
            "task_type": "Counting Problem",
            "question": "How many?",
            "options": ["A. Apples.", "B. Candles.", "C. Berries.", "D. All."],
            "answer": "C",
        }
        for n, (length, video) in enumerate((("short", "fFjv93ACGo8"), ("long", "fFJV93acGO8")), 1)
    ]
    return Layout(
        {"videomme/test-00000-of-00001.parquet": rows},
        zips={
            "videos_chunked_01.zip": {"data/fFjv93ACGo8.mp4": art.clip},
            "videos_chunked_02.zip": {"data/fFJV93acGO8.mp4": art.clip},
            "subtitle.zip": {"subtitle/fFjv93ACGo8.srt": b"1"},
        },
    )


LV_QUESTION = "What year?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633"


def _lvbench(art: Art) -> Layout:
    rows = [
        {
            "video_path": f"{key}.mp4",
            "uid": str(n),
            "key": key,
            "type": "cartoon",
            "question": LV_QUESTION,
            "answer": "D",
            "question_type": ["key information retrieval"],
            "time_reference": "00:15-00:19",
        }
        for n, key in enumerate(("Cm73ma6Ibcs", "TiQBTesZUJQ"))
    ]
    return Layout(
        {"data/train-00000-of-00001.parquet": rows},
        zips={
            "video_chunks/videos_chunk_001.zip": {"Cm73ma6Ibcs.mp4": art.clip},
            "video_chunks/videos_chunk_002.zip": {"TiQBTesZUJQ.mp4": art.clip},
        },
    )


def _lvbench_original(art: Art) -> Layout:
    rows = [
        {
            "key": "Cm73ma6Ibcs",
            "type": "cartoon",
            "video_info": {"fps": 25.0, "duration_minutes": 60.0},
            "qa": [
                {
                    "uid": uid,
                    "question": LV_QUESTION,
                    "answer": "D",
                    "question_type": ["key information retrieval"],
                    "time_reference": "00:15-00:19",
                }
                for uid in ("0", "1")
            ],
        }
    ]
    data = zipped({"Cm73ma6Ibcs.mp4": art.clip, "other.mp4": art.clip})
    return Layout(
        {"video_info.meta.jsonl": rows},
        files={"all_videos_split.zip.001": data[:900], "all_videos_split.zip.002": data[900:]},
    )


def _textvqa(art: Art) -> Layout:
    rows = [
        {
            "image_id": "003a8ae2ef43b901",
            "question_id": 34602 + n,
            "question": "what is the brand of this camera?",
            "image": _picture(art),
            "answers": ["nous les gosses", "dakota"] + ["dakota"] * 8,
            "ocr_tokens": ["DAKOTA"],
        }
        for n in range(2)
    ]
    return Layout(
        {
            "data/validation-00000-of-00002.parquet": rows[:1],
            "data/validation-00001-of-00002.parquet": rows[1:],
        }
    )


def _gqa(art: Art) -> Layout:
    questions = [
        {
            "id": f"20{n}",
            "imageId": image,
            "question": "Is it overcast?",
            "answer": "no",
            "fullAnswer": "No, it is clear.",
        }
        for n, image in enumerate(("n161313", "n235859"))
    ]
    images = [{"id": image, "image": _picture(art)} for image in ("n235859", "n161313")]
    return Layout(
        {
            "testdev_balanced_instructions/testdev-00000-of-00001.parquet": questions,
            "testdev_balanced_images/testdev-00000-of-00001.parquet": images,
        }
    )


def _chartqa(art: Art) -> Layout:
    rows = [
        {"type": kind, "question": "How many items?", "answer": "14", "image": _picture(art)}
        for kind in ("human_test", "augmented_test")
    ]
    return Layout({"data/test-00000-of-00001.parquet": rows})


def _seed(art: Art) -> Layout:
    rows = [
        {
            "answer": "C",
            "choice_a": "One",
            "choice_b": "Two",
            "choice_c": "Three",
            "choice_d": "Four",
            "data_id": "1454426_2591111986",
            "data_type": kind,
            "question": "How many towels?",
            "question_id": f"10166{n}",
            "question_type_id": 5,
            "image": [_picture(art)] * (n + 1),
            "segment": None,
        }
        for n, kind in enumerate(("image", "video"))
    ]
    return Layout({"data/test-00000-of-00001.parquet": rows})


def _llava(art: Art) -> Layout:
    rows = [
        {
            "question_id": n,
            "question": "What is the name of this famous sight?",
            "image": _picture(art),
            "caption": "An aerial view of Diamond Head.",
            "gpt_answer": "It is Diamond Head.",
            "category": "conv",
            "image_id": "001.jpg",
        }
        for n in range(2)
    ]
    return Layout({"data/train-00000-of-00001.parquet": rows})


def _docvqa_row(number: int, art: Art) -> dict[str, Any]:
    return {
        "questionId": str(49153 + number),
        "question": "What is the total?",
        "question_types": ["table/list"],
        "image": _picture(art),
        "docId": 14465,
        "ucsf_document_id": "pybv0228",
        "ucsf_document_page_no": "81",
        "answers": ["0.28", "$0.28"],
        "data_split": "val",
    }


def _docvqa_lite(art: Art) -> Layout:
    return Layout(
        {"docvqa_val/lite-00000-of-00001.parquet": [_docvqa_row(n, art) for n in range(2)]}
    )


def _pope(art: Art) -> Layout:
    rows = [
        {
            "id": str(n),
            "question_id": "1",
            "question": "Is there a snowboard in the image?",
            "answer": "yes",
            "image_source": "COCO_val2014_000000310196",
            "image": _picture(art),
            "category": category,
        }
        for n, category in enumerate(("adversarial", "popular"))
    ]
    return Layout({"data/test-00000-of-00001.parquet": rows})


def _mmvet(art: Art) -> Layout:
    rows = [
        {
            "question_id": f"v1_{n}",
            "question": "What is x?",
            "answer": "-1<AND>-5<OR>-5",
            "image_source": "v1_0.png",
            "image": _picture(art),
            "capability": "ocr,math",
        }
        for n in range(2)
    ]
    return Layout({"data/test-00000-of-00001.parquet": rows})


def _interleave(art: Art) -> Layout:
    """One file for all sub-tasks, twelve columns of images padded with nulls."""
    story = "Finish it. <image> Caption#1: Loopy cooks. <image> Caption#2: Poby eats <image> "
    story += "Caption#3: Eddy runs. <image> Caption#4: All laugh. <image> Caption#5:"
    sheet = [
        ("Spot-the-Diff", 2, "What has changed?", "The car is gone."),
        ("IEdit", 2, "Please provide the edit instruction.", "Remove the man."),
        ("MagicBrush", 2, "Please provide the edit instruction.", "Add a bus."),
        ("PororoSV", 5, story, "They go home."),
        ("VIST", 5, story.replace("Caption#", "Caption #"), "They go home."),
        ("HQ-Edit", 2, "Please provide the edit instruction.", "Add snow."),
    ]
    rows = []
    for task, count, question, answer in sheet:
        for n in range(2):
            row = {
                "sample_id": f"{task}_{n}",
                "sub_task": task,
                "question": question,
                "answer": answer,
                "question_type": "open-ended",
            }
            row |= {f"image_{i}": _picture(art) if i < count else None for i in range(12)}
            rows.append(row)
    return Layout({"in_domain/test-00000-of-00001.parquet": rows})


def _ocrbench(art: Art) -> Layout:
    rows = [
        {
            "dataset": "IIIT5K",
            "question": "what is written in the image?",
            "question_type": "Regular Text Recognition",
            "answer": ["CENTRE"],
            "image": _picture(art),
        }
        for _ in range(2)
    ]
    return Layout({"data/test-00000-of-00001.parquet": rows})


def _textcaps(art: Art) -> Layout:
    rows = [
        {
            "question_id": "003a8ae2ef43b901",
            "question": "Please carefully observe the image and come up with a caption.",
            "image": _picture(art),
            "image_id": "003a8ae2ef43b901",
            "caption_str": ["A red camera.", "A camera by Dakota."],
            "reference_strs": ["A red camera."],
        }
        for _ in range(2)
    ]
    return Layout({"data/val-00000-of-00001.parquet": rows})


def _convbench(art: Art) -> Layout:
    rows = [
        {
            "ID": n,
            "image_id": name,
            "The_first_turn_instruction": "What animal is it & where?",
            "The_second_turn_instruction": "Why is it there?",
            "The_third_turn_instruction": "Write a poem.",
            "first_turn_answer": "A cat.",
            "second_turn_answer": "It waits.",
            "third_turn_answer": "Roses.",
        }
        for n, name in enumerate(("a1.png", "b2.png"))
    ]
    return Layout(
        {"ConvBench.xlsx": rows},
        files={"visit_bench_images/a1.png": art.png, "visit_bench_images/b2.PNG": art.png},
    )


def _gsm8k(art: Art) -> Layout:
    rows = [{"question": "16 - 3 - 4?", "answer": "It is 9.\n#### 9"}] * 2
    return Layout({"main/test-00000-of-00001.parquet": rows})


def _humaneval(art: Art) -> Layout:
    rows = [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": 'def f(x):\n    """{question}"""\n',
            "canonical_solution": "    return x\n",
            "test": "assert f(1) == 1",
            "entry_point": "f",
        }
        for n in range(2)
    ]
    return Layout({"openai_humaneval/test-00000-of-00001.parquet": rows})


def _nq(art: Art) -> Layout:
    rows = [{"question": "who wrote it", "answer": ["Ann", "Ann Lee"]}] * 2
    return Layout({"nq_open/validation-00000-of-00001.parquet": rows})


REASON = (
    "For the following question, provide a detailed explanation of your reasoning leading to "
    "the answer. "
)
EDIT = (
    "Please provide instructions for editing the source image to match the target image. "
    "Source Image: <image> Target Image: <image> Instruction:"
)
STORY = (
    " <image> Caption #1: Loopy cooks. <image> Caption #2: Poby eats. <image> Caption #3: "
    "Eddy runs. <image> Caption #4: All laugh. <image> Caption #5:"
)
INTERLEAVE = (
    "lmms-lab-encoder/LLaVA-NeXT-Interleave-Bench",
    "lmms-lab/LLaVA-NeXT-Interleave-Bench",
)
PUT = ("Put down.", "Pick up.", "Throw.")
CASES = [
    Case(
        "videodetailcaption",
        ("lmms-lab/VideoDetailCaption", "lmms-lab/VideoDetailDescription"),
        _vdc,
        "Describe it.",
        ("A dog runs.",),
        task="caption",
        media=("video",),
        lost="Test_Videos/v_one.a.mp4",
        reason="v_one.a is missing",
    ),
    Case(
        "mvbench",
        ("OpenGVLab/MVBench",),
        _mvbench,
        "What of action_antonym?\n(A) Put down.\n(B) Pick up.\n(C) Throw.",
        ("B",),
        PUT,
        task="choice",
        media=("video",),
        lost="ssv2_video_mp4/action_antonym_1.mp4",
        reason="action_antonym_1.mp4 is missing",
        paper="hippo",
        items=20,
    ),
    Case(
        "mlvu",
        ("sy1998/MLVU_dev",),
        _mlvu,
        "What color?\n(A) Red\n(B) Dark blue\n(C) Green\n(D) White\nLet's think step by step.",
        ("B",),
        ("Red", "Dark blue", "Green", "White"),
        task="choice",
        media=("video",),
        lost="movie101_66.mp4",
        reason="movie101_66.mp4 is missing",
        paper="std",
    ),
    Case(
        "mlvu",
        ("MLVU/MVLU",),
        _mlvu_original,
        "What color?\n(A) Red\n(B) Dark blue\n(C) Green\n(D) White",
        ("B",),
        ("Red", "Dark blue", "Green", "White"),
        task="choice",
        media=("video",),
        lost="MLVU/video/1_plotQA/movie101_66.mp4",
        reason="movie101_66.mp4 is missing",
        paper="hippo",
    ),
    Case(
        "longvideobench",
        ("longvideobench/LongVideoBench",),
        _lvb,
        "Where is the cup?\nA. On a shelf\nB. On the table",
        ("B",),
        ("On a shelf", "On the table"),
        task="choice",
        media=("video",),
        lost="videos/yt_1.mp4",
        reason="yt_1.mp4 is missing",
        paper="hippo",
    ),
    Case(
        "longvideobench",
        ("longvideobench/LongVideoBench",),
        _lvb_json,
        "Where is the cup?\nA. On a shelf\nB. On the table",
        ("B",),
        ("On a shelf", "On the table"),
        task="choice",
        media=("video",),
        lost="videos/yt_1.MKV",
        reason="yt_1.mp4 is missing",
        paper="hippo",
    ),
    Case(
        "longvideobench",
        ("longvideobench/LongVideoBench",),
        _lvb_test,
        DESCRIBE,
        task="caption",
        media=("video",),
        lost="videos/yt_1.mp4",
        reason="yt_1.mp4 is missing",
    ),
    Case(
        "video-mme",
        ("lmms-eval/Video-MME", "lmms-lab/Video-MME"),
        _videomme,
        "How many?\nA. Apples.\nB. Candles.\nC. Berries.\nD. All.",
        ("C",),
        ("Apples.", "Candles.", "Berries.", "All."),
        task="choice",
        media=("video",),
        lost="data/fFjv93ACGo8.mp4",
        reason="fFjv93ACGo8 is missing",
    ),
    Case(
        "lvbench",
        ("lmms-eval/LVBench", "lmms-lab/LVBench"),
        _lvbench,
        "What year?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633",
        ("D",),
        ("1636", "1366", "1363", "1633"),
        task="choice",
        media=("video",),
        lost="Cm73ma6Ibcs.mp4",
        reason="Cm73ma6Ibcs.mp4 is missing",
    ),
    Case(
        "lvbench",
        ("zai-org/LVBench", "THUDM/LVBench"),
        _lvbench_original,
        "What year?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633",
        ("D",),
        ("1636", "1366", "1363", "1633"),
        task="choice",
        media=("video",),
        lost="all_videos_split.zip.001",
        reason="Cm73ma6Ibcs is missing (all_videos_split.zip is in parts and part 001 is missing)",
    ),
    Case(
        "textvqa",
        ("lmms-lab-encoder/textvqa", "lmms-lab/textvqa"),
        _textvqa,
        "what is the brand of this camera?",
        ("nous les gosses", "dakota"),
    ),
    Case(
        "gqa",
        ("lmms-lab-encoder/GQA", "lmms-lab/GQA"),
        _gqa,
        "Is it overcast?",
        ("no",),
        lost="imageId",
        reason="there is no image",
    ),
    Case(
        "chartqa",
        ("lmms-lab-encoder/ChartQA", "lmms-lab/ChartQA"),
        _chartqa,
        "How many items?",
        ("14",),
    ),
    Case(
        "seed-bench",
        ("lmms-lab-encoder/SEED-Bench", "lmms-lab/SEED-Bench"),
        _seed,
        "How many towels?\nA. One\nB. Two\nC. Three\nD. Four",
        ("C",),
        ("One", "Two", "Three", "Four"),
        task="choice",
    ),
    Case(
        "llava-bench-wild",
        ("lmms-lab-encoder/llava-bench-in-the-wild", "lmms-lab/llava-bench-in-the-wild"),
        _llava,
        REASON + "What is the name of this famous sight?",
        ("It is Diamond Head.",),
        task="open",
    ),
    Case(
        "docvqa",
        ("lmms-lab-encoder/LMMs-Eval-Lite", "lmms-lab/LMMs-Eval-Lite"),
        _docvqa_lite,
        REASON + "What is the total?",
        ("0.28", "$0.28"),
    ),
    Case(
        "pope",
        ("lmms-lab-encoder/POPE", "lmms-lab/POPE"),
        _pope,
        REASON + "Is there a snowboard in the image?",
        ("yes",),
    ),
    Case(
        "mm-vet",
        ("lmms-lab-encoder/MMVet", "lmms-lab/MMVet"),
        _mmvet,
        REASON + "What is x?",
        ("-1<AND>-5", "-5"),
        task="open",
    ),
    Case(
        "spot-the-diff",
        INTERLEAVE,
        _interleave,
        "Explain the disparities between the first and second image. <image> <image> Difference:",
        ("The car is gone.",),
        task="caption",
        media=("image",) * 2,
        lost="image_0",
    ),
    Case(
        "iedit",
        INTERLEAVE,
        _interleave,
        EDIT,
        ("Remove the man.",),
        task="caption",
        media=("image",) * 2,
        lost="",
    ),
    Case(
        "magicbrush",
        INTERLEAVE,
        _interleave,
        EDIT,
        ("Add a bus.",),
        task="caption",
        media=("image",) * 2,
        lost="",
    ),
    Case(
        "pororosv",
        INTERLEAVE,
        _interleave,
        "Given the progression of the story with the first few images, can you write a fitting "
        "end considering the last image?" + STORY,
        ("They go home.",),
        task="caption",
        media=("image",) * 5,
        lost="",
    ),
    Case(
        "vist",
        INTERLEAVE,
        _interleave,
        "With the narratives paired with the initial images, how would you conclude the story "
        "using the last picture?" + STORY,
        ("They go home.",),
        task="caption",
        media=("image",) * 5,
        lost="",
    ),
    Case(
        "ocrbench", ("echo840/OCRBench",), _ocrbench, "what is written in the image?", ("CENTRE",)
    ),
    Case(
        "textcaps",
        ("lmms-lab-encoder/TextCaps", "lmms-lab/TextCaps"),
        _textcaps,
        "Provide a one-sentence caption for the provided image.",
        ("A red camera.", "A camera by Dakota."),
        task="caption",
    ),
    Case(
        "convbench",
        ("liushuo12345/ConvBench",),
        _convbench,
        "What animal is it & where?",
        ("A cat.",),
        task="open",
        column="The_first_turn_instruction",
        lost="visit_bench_images/a1.png",
        reason="a1.png is missing",
        then=("Why is it there?", "Write a poem."),
    ),
    Case(
        "gsm8k",
        ("openai/gsm8k", "gsm8k"),
        _gsm8k,
        "16 - 3 - 4?",
        ("It is 9.\n#### 9",),
        task="text",
        media=(),
        lost="",
    ),
    Case(
        "humaneval",
        ("openai/openai_humaneval", "openai_humaneval"),
        _humaneval,
        'def f(x):\n    """{question}"""\n',
        ("    return x\n",),
        task="text",
        media=(),
        column="prompt",
        lost="",
    ),
    Case(
        "nq",
        ("google-research-datasets/nq_open", "nq_open"),
        _nq,
        "who wrote it",
        ("Ann", "Ann Lee"),
        media=(),
        lost="",
    ),
]
