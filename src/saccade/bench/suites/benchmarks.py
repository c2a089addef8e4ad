"""The table of benchmarks: of each its ids, files, columns, and where its media are.

An id has two generations where the project that publishes it changed its name; local copies carry
either. Of the names of a column or a folder the first that exists counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from saccade.bench.suites.places import IMAGE, VIDEO
from saccade.bench.suites.types import Task


@dataclass(frozen=True)
class Source:
    """One publication of a benchmark."""

    repos: tuple[str, ...]  # the newest id first; all of them hold the same files
    files: Mapping[str, tuple[str, ...]]  # by split, patterns of which the first that fits counts
    small: bool = False  # the files hold no pictures, so they may be fetched unasked
    gated: bool = False
    nested: str | None = None  # a column whose list holds the rows
    revisions: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Media:
    """Media that lie beside the rows."""

    folders: Mapping[str, tuple[str, ...]]  # by part ("" is every part), the first that has it
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # uncut: mind start and end
    packed: tuple[str, ...] = ()  # patterns of the archives, for messages
    unpacked: tuple[str, ...] = ()  # below HF_HOME, where lmms-eval unpacks them
    frame_rate: float = 1.0  # of folders of frames, per second
    suffixes: tuple[str, ...] = VIDEO
    fold: bool = True  # names may differ in case


@dataclass(frozen=True)
class Join:
    """Pictures kept apart from the questions."""

    files: Mapping[str, tuple[str, ...]]
    key: str  # of the pictures
    on: str  # of the questions
    column: str


@dataclass(frozen=True)
class Benchmark:
    """What is known of one benchmark. Of a column's names those that exist are used."""

    title: str
    sources: tuple[Source, ...]
    task: Task
    columns: Mapping[str, tuple[str, ...]]  # id, question, answer, options, image, video, ...
    media: Media | None = None
    join: Join | None = None
    parts: tuple[str, ...] = ()
    part_column: str | None = None  # holds the part; without it each part has its own files
    where: tuple[str, str] | None = None  # a column and the value its rows have
    option: str = "{letter}. {text}"
    optional: frozenset[str] = frozenset({"id", "options", "start", "end", "then"})


def _columns(**names: str) -> dict[str, tuple[str, ...]]:
    """Columns by what they hold: the names each may have, or has all of."""
    named = {"question": "question", "answer": "answer", **names}
    return {what: tuple(each.split()) for what, each in named.items()}


def _hub(name: str) -> tuple[str, ...]:
    """Both generations of the ids of lmms-eval's image sets."""
    return f"lmms-lab-encoder/{name}", f"lmms-lab/{name}"


def _data(*splits: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"data/{split}-*.parquet", f"{split}-*.parquet") for split in splits}


def _pictures(title: str, task: Task, *sources: Source, **names: str) -> Benchmark:
    """A benchmark whose rows hold their pictures."""
    columns = _columns(**{"id": "question_id", "image": "image", **names})
    return Benchmark(title, sources, task, columns)


def _interleave(name: str) -> Benchmark:
    """A sub-task of LLaVA-NeXT-Interleave-Bench, by its column."""
    files = ("in_domain/test-*.parquet", "data/in_domain-*.parquet")
    source = Source(_hub("LLaVA-NeXT-Interleave-Bench"), {"test": files})
    images = " ".join(f"image_{number}" for number in range(12))
    found = _pictures(name, "caption", source, id="sample_id", image=images)
    return replace(found, where=("sub_task", name))


# The videos of a sub-task: cut to the question's seconds (the revision `video`), or whole.
_PERCEPTION, _CLEVRER = ("perception/videos",), ("clevrer/video_validation",)
_MVBENCH_CUT = {
    "action_antonym": ("ssv2_video_mp4", "ssv2_video"),
    "action_count": _PERCEPTION,
    "action_localization": ("sta/sta_video_segment",),
    "action_prediction": ("star/Charades_segment",),
    "action_sequence": ("star/Charades_segment",),
    "character_order": _PERCEPTION,
    "counterfactual_inference": _CLEVRER,
    "egocentric_navigation": ("vlnqa",),
    "episodic_reasoning": ("tvqa/video_fps3_hq_segment",),
    "fine_grained_action": ("Moments_in_Time_Raw/videos",),
    "fine_grained_pose": ("nturgbd_convert", "nturgbd"),
    "moving_attribute": _CLEVRER,
    "moving_count": _CLEVRER,
    "moving_direction": _CLEVRER,
    "object_existence": _CLEVRER,
    "object_interaction": ("star/Charades_segment",),
    "object_shuffle": _PERCEPTION,
    "scene_transition": ("scene_qa/video",),
    "state_change": _PERCEPTION,
    "unexpected_action": ("FunQA_test/test",),
}
_MVBENCH_WHOLE = {
    "action_localization": ("sta/sta_video",),
    "action_prediction": ("star/Charades_v1_480",),
    "action_sequence": ("star/Charades_v1_480",),
    "object_interaction": ("star/Charades_v1_480",),
    "episodic_reasoning": ("tvqa/frames_fps3_hq",),
}

BENCHMARKS: Mapping[str, Benchmark] = {
    "videodetailcaption": Benchmark(
        "VideoDetailCaption",
        (
            Source(
                ("lmms-lab/VideoDetailCaption", "lmms-lab/VideoDetailDescription"),
                _data("test"),
                small=True,
            ),
        ),
        "caption",
        _columns(id="video_name", video="video_name"),
        Media(
            {"": ("Test_Videos", "")},
            packed=("videos.zip",),
            unpacked=("video_detail_description", "datasets/video_detail_description"),
        ),
    ),
    "mvbench": Benchmark(
        "MVBench",
        (
            Source(
                ("OpenGVLab/MVBench",),
                {"train": ("json/{part}.json", "{part}/train-*.parquet")},
                small=True,
                revisions=("video", None),
            ),
        ),
        "choice",
        _columns(options="candidates", video="video", start="start", end="end"),
        Media(
            _MVBENCH_CUT,
            _MVBENCH_WHOLE,
            packed=("video/*.zip",),
            unpacked=("mvbench_video",),
            frame_rate=3.0,
        ),
        parts=tuple(_MVBENCH_CUT),
        option="({letter}) {text}",
        optional=frozenset({"id", "start", "end"}),
    ),
    "mlvu": Benchmark(
        "MLVU",
        (
            Source(("sy1998/MLVU_dev",), _data("test"), small=True),
            Source(  # the original, a file a task
                ("MLVU/MVLU",),
                {"test": ("MLVU/json/*.json", "json/*.json")},
                small=True,
                gated=True,
            ),
        ),
        "choice",
        _columns(id="question_id", options="candidates", video="video_name video"),
        Media({"": ("",)}, packed=("*.zip",), unpacked=("mlvu", "mlvu_test")),
        option="({letter}) {text}",
    ),
    "longvideobench": Benchmark(
        "LongVideoBench",
        (
            Source(
                ("longvideobench/LongVideoBench",),
                {
                    "validation": (*_data("validation")["validation"][::-1], "lvb_val.json"),
                    "test": (*_data("test")["test"][::-1], "lvb_test_wo_gt.json"),
                },
                small=True,
                gated=True,
            ),
        ),
        "choice",
        _columns(
            id="id",
            answer="correct_choice",
            options="candidates option0 option1 option2 option3 option4",
            video="video_path",
        ),
        Media(
            {"": ("videos", "")},
            packed=("videos.tar.part.*",),
            unpacked=("longvideobench",),
            fold=False,
        ),
        optional=frozenset({"id", "answer"}),  # the test split keeps its answers to itself
    ),
    "video-mme": Benchmark(
        "Video-MME",
        (
            Source(
                ("lmms-eval/Video-MME", "lmms-lab/Video-MME"),
                {"test": ("videomme/test-*.parquet", "test-*.parquet")},
                small=True,
            ),
        ),
        "choice",
        _columns(id="question_id", options="options", video="videoID"),
        Media(
            {"": ("data", "")}, packed=("videos_chunked_*.zip",), unpacked=("videomme",), fold=False
        ),
        parts=("short", "medium", "long"),
        part_column="duration",
        optional=frozenset({"id"}),
    ),
    "lvbench": Benchmark(
        "LVBench",
        (
            Source(("lmms-eval/LVBench", "lmms-lab/LVBench"), _data("train"), small=True),
            Source(
                ("zai-org/LVBench", "THUDM/LVBench"),
                {"train": ("video_info.meta.jsonl", "data/video_info.meta.jsonl")},
                small=True,
                nested="qa",
            ),
        ),
        "choice",
        _columns(id="uid", options="options", video="video_path key"),
        Media({"": ("",)}, packed=("video_chunks/*.zip",), unpacked=("lvbench",), fold=False),
        option="({letter}) {text}",
    ),
    "textvqa": _pictures(
        "TextVQA",
        "short",
        Source(_hub("textvqa"), _data("validation")),
        answer="answers",
    ),
    "gqa": Benchmark(
        "GQA",
        (Source(_hub("GQA"), {"testdev": ("testdev_balanced_instructions/testdev-*.parquet",)}),),
        "short",
        _columns(id="id"),
        join=Join(
            {"testdev": ("testdev_balanced_images/testdev-*.parquet",)}, "id", "imageId", "image"
        ),
    ),
    "chartqa": _pictures("ChartQA", "short", Source(_hub("ChartQA"), _data("test"))),
    "seed-bench": replace(
        _pictures(
            "SEED-Bench",
            "choice",
            Source(_hub("SEED-Bench"), _data("test")),
            options="choice_a choice_b choice_c choice_d",
        ),
        optional=frozenset({"id"}),
    ),
    "llava-bench-wild": _pictures(
        "LLaVA-Bench in the wild",
        "open",
        Source(_hub("llava-bench-in-the-wild"), _data("train")),
        answer="gpt_answer",
    ),
    "docvqa": _pictures(
        "DocVQA",
        "short",
        Source(_hub("LMMs-Eval-Lite"), {"lite": ("docvqa_val/lite-*.parquet",)}),
        id="questionId question_id",
        answer="answers",
    ),
    "pope": _pictures("POPE", "short", Source(_hub("POPE"), _data("test"))),
    "mm-vet": _pictures("MM-Vet", "open", Source(_hub("MMVet"), _data("test"))),
    "spot-the-diff": _interleave("Spot-the-Diff"),
    "iedit": _interleave("IEdit"),
    "magicbrush": _interleave("MagicBrush"),
    "pororosv": _interleave("PororoSV"),
    "vist": _interleave("VIST"),
    "ocrbench": _pictures("OCRBench", "short", Source(("echo840/OCRBench",), _data("test"))),
    "textcaps": _pictures(
        "TextCaps",
        "caption",
        Source(_hub("TextCaps"), _data("val")),
        answer="caption_str reference_strs",
    ),
    "convbench": Benchmark(
        "ConvBench",
        (Source(("liushuo12345/ConvBench",), {"test": ("ConvBench.xlsx",)}, small=True),),
        "open",
        _columns(
            id="ID",
            question="The_first_turn_instruction",
            answer="first_turn_answer",
            image="image_id",
            then="The_second_turn_instruction The_third_turn_instruction",
        ),
        Media({"": ("visit_bench_images", "")}, packed=("visit_bench_images/*",), suffixes=IMAGE),
        optional=frozenset({"id"}),
    ),
    "gsm8k": Benchmark(
        "GSM8K",
        (
            Source(
                ("openai/gsm8k", "gsm8k"),
                {"test": ("main/test-*.parquet", "test.jsonl")},
                small=True,
            ),
        ),
        "text",
        _columns(),
    ),
    "humaneval": Benchmark(
        "HumanEval",
        (
            Source(
                ("openai/openai_humaneval", "openai_humaneval"),
                {"test": ("openai_humaneval/test-*.parquet", "HumanEval.jsonl")},
                small=True,
            ),
        ),
        "text",
        _columns(id="task_id", question="prompt", answer="canonical_solution"),
    ),
    "nq": Benchmark(
        "NQ",
        (
            Source(
                ("google-research-datasets/nq_open", "nq_open"),
                {"validation": ("nq_open/validation-*.parquet", "NQ-open.dev.jsonl")},
                small=True,
            ),
        ),
        "short",
        _columns(),
    ),
}
