"""One vLLM engine in a process of its own: a job in, answers and counts of drafts out.

An engine's memory, threads and caches die with its process, so no test sees what another left.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FPS = 8.0


@dataclass(frozen=True)
class Question:
    """A prompt: media of the synthetic world by their seeds, then words."""

    words: str = "Describe the video in detail."
    videos: tuple[tuple[int, int, int], ...] = ()  # (seed, frames, pixels a side)
    images: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Job:
    """An engine, and waves of questions: those of a wave are asked at once."""

    target: str
    waves: tuple[tuple[Question, ...], ...]
    options: Mapping[str, Any] | None = None  # of the draft; None: vLLM alone
    most: int = 8
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    method: str = "saccade"  # or one of vLLM's own
    breaks: bool = False  # whether the draft's third forward raises
    warm: int = 0  # leading waves that are not counted


@dataclass(frozen=True)
class Ran:
    """What came of a job."""

    answers: list[list[list[int]]]  # by wave and question
    seconds: list[float]  # by wave, from the first question to the last token
    decoding: list[float]  # by wave, between the first token and the last, the longest of them
    prompts: list[list[int]]
    drafted: int
    accepted: int
    preempted: int
    said: str  # on both streams

    @property
    def rate(self) -> float:
        """Of drafted tokens, how many were accepted."""
        return self.accepted / max(1, self.drafted)


def run(job: Job, timeout: float = 900, environment: Mapping[str, str] | None = None) -> Ran:
    """The job in a process of its own. Raises RuntimeError with what it said if it fails."""
    own = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # as many threads as there are cores that nobody else wants: one on a busy machine
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "1"),
    }
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "job.json").write_text(json.dumps(asdict(job)))
        done = subprocess.run(
            [sys.executable, __file__, str(there)],
            env={**os.environ, **own, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-6000:])
        return Ran(**json.loads((there / "ran.json").read_text()), said=done.stdout + done.stderr)


def work(there: Path) -> None:
    """What the process does."""
    job = json.loads((there / "job.json").read_text())
    from transformers import AutoProcessor
    from vllm import LLM, SamplingParams

    speculative = None
    settings = dict(job["engine"])
    if job["method"] == "ngram":
        speculative = {
            "method": "ngram", "num_speculative_tokens": job["most"],
            "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    elif job["options"] is not None:
        speculative = {
            "method": "custom_class",
            "model": "saccade.vllm.Draft",
            "num_speculative_tokens": job["most"],
        }
        settings["additional_config"] = {"saccade": job["options"]}
    if job["breaks"]:
        _break()
    engine = LLM(
        job["target"],
        speculative_config=speculative,
        **{
            "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 32, "enforce_eager": True,
            "limit_mm_per_prompt": {"video": 2, "image": 2}, "disable_log_stats": False,
            "skip_mm_profiling": True, "seed": 0, **settings,
        },
    )  # fmt: skip
    processor = AutoProcessor.from_pretrained(job["target"])
    rules = SamplingParams(**{"temperature": 0, "max_tokens": 64, **job["sampling"]})
    kind = engine.llm_engine.model_config.hf_config.model_type
    waves = [[_prompt(each, processor, kind) for each in wave] for wave in job["waves"]]
    ran: dict[str, Any] = {"answers": [], "seconds": [], "decoding": [], "prompts": []}
    before: dict[str, float] = {}
    for number, wave in enumerate(waves):
        began = time.perf_counter()
        outputs = engine.generate(wave, rules, use_tqdm=False)
        took = time.perf_counter() - began
        if number < job["warm"]:
            before = _counts(engine)
            continue
        ran["seconds"].append(took)
        spans = [one.metrics.last_token_ts - one.metrics.first_token_ts for one in outputs]
        ran["decoding"].append(max(spans))
        ran["answers"].append([list(each.token_ids) for one in outputs for each in one.outputs])
        ran["prompts"].append([len(one.prompt_token_ids) for one in outputs])
    counts = _counts(engine)
    for name in ("drafted", "accepted", "preempted"):
        ran[name] = int(counts.get(name, 0) - before.get(name, 0))
    (there / "ran.json").write_text(json.dumps(ran))


def _break() -> None:
    from saccade.model.session import Session

    score, calls = Session.score, itertools.count()

    def broken(self: Session, trees: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("broken on purpose")
        return score(self, trees)

    Session.score = broken  # type: ignore[method-assign]


def _counts(engine: Any) -> dict[str, float]:
    names = {
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:num_preemptions": "preempted",
    }
    return {names[one.name]: one.value for one in engine.get_metrics() if one.name in names}


def _prompt(question: Mapping[str, Any], processor: Any, kind: str) -> dict[str, Any]:
    """As ``LLM.generate`` takes it."""
    from saccade.world import drawing, scenes

    parts = [{"type": "video"} for _ in question["videos"]]
    parts += [{"type": "image"} for _ in question["images"]]
    words = {"type": "text", "text": question["words"]}
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*parts, words]}], tokenize=False, add_generation_prompt=True
    )
    media: dict[str, Any] = {}
    if question["videos"]:
        clips = [drawing.render(scenes.scene(s), n, side) for s, n, side in question["videos"]]
        media["video"] = clips if kind.startswith("llava") else [_with_times(c) for c in clips]
    if question["images"]:
        from PIL import Image

        drawn = (drawing.image_frame(scenes.scene(s), side) for s, side in question["images"])
        media["image"] = [Image.fromarray(one) for one in drawn]
    asked: dict[str, Any] = {"prompt": text}
    if media:
        asked["multi_modal_data"] = media
    if question["videos"]:
        asked["mm_processor_kwargs"] = {"do_sample_frames": False}
    return asked


def _with_times(frames: Any) -> tuple[Any, dict[str, Any]]:
    count = len(frames)
    return frames, {
        "fps": FPS,
        "duration": count / FPS,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def clips(seeds: Sequence[int], frames: int = 16, side: int = 112) -> tuple[Question, ...]:
    """A question about a clip each."""
    return tuple(Question(videos=((seed, frames, side),)) for seed in seeds)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
