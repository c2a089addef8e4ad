"""vLLM engines in processes of their own: waves of questions in, answers and counts of drafts out.

An engine's memory, threads and caches die with its process. All are forked from one server that has
imported vLLM already: importing it takes longer than what most engines are asked.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

FPS = 8.0
COUNTED = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preempted",
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OURS = {"method": "custom_class", "model": "saccade.vllm.Draft"}


@dataclass(frozen=True)
class Question:
    """A prompt: media of the synthetic world by their seeds, then words."""

    words: str = "Describe the video in detail."
    videos: tuple[tuple[int, int, int], ...] = ()  # (seed, frames, pixels a side)
    images: tuple[tuple[int, int], ...] = ()


Wave = Sequence[Question]


@dataclass(frozen=True)
class Setup:
    """How an engine is made."""

    target: str
    options: Mapping[str, Any] | None = None  # of our draft; None: vLLM alone
    most: int = 8
    engine: Mapping[str, Any] = field(default_factory=dict)
    ngram: bool = False  # vLLM's own drafts
    breaks: bool = False  # whether the draft's third forward raises
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's

    def speculative(self) -> dict[str, Any] | None:
        if not self.ngram and self.options is None:
            return None
        method: Mapping[str, Any] = NGRAM if self.ngram else OURS
        return {**method, "num_speculative_tokens": self.most}


@dataclass(frozen=True)
class Ran:
    """What came of one or more waves."""

    answers: list[list[list[int]]]  # by wave and question
    seconds: list[float]  # by wave, from the first question to the last token
    decoding: list[float]  # by wave, between the first token and the last, the longest of them
    prompts: list[list[int]]  # tokens
    drafted: int
    accepted: int
    preempted: int

    @property
    def rate(self) -> float:
        """Of drafted tokens, how many were accepted."""
        return self.accepted / max(1, self.drafted)


class Engine:
    """One engine, from its start until ``close``. Raises RuntimeError with what it said."""

    def __init__(self, setup: Setup, timeout: float = 300) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._timeout = timeout
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = _server().Process(target=_serve, args=(setup, theirs, self._log))
        self._process.start()
        theirs.close()
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise

    def ask(self, waves: Sequence[Wave], **sampling: Any) -> Ran:
        """Answers of every wave, whose questions are asked at once; greedy unless told."""
        self._pipe.send((waves, sampling))
        return Ran(**self._answer())

    @property
    def said(self) -> str:
        """On both streams so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        self._pipe.close()  # it ends by itself, or else it is ended
        self._process.join(5)
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        try:
            if not self._pipe.poll(self._timeout):
                raise RuntimeError(f"no answer in {self._timeout:g} s\n{self.said[-6000:]}")
            found = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(self.said[-6000:]) from error
        if isinstance(found, str):
            raise RuntimeError(found + self.said[-6000:])
        return dict(found)


@cache
def _server() -> ForkServerContext:
    # as many threads as there are cores that nobody else wants: one on a busy machine
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    }.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.hardware.vllm_modules"])
    return context


def _serve(setup: Setup, pipe: Connection, log: Path) -> None:
    """What the process does."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        os.environ.update(setup.environment)
        made = _Made(setup)
        pipe.send({})
        while True:
            waves, sampling = pipe.recv()
            pipe.send(made.ask(waves, sampling))
    except EOFError:
        pass
    except Exception:
        pipe.send(traceback.format_exc())


class _Made:
    """vLLM's engine and its processor."""

    def __init__(self, setup: Setup) -> None:
        from transformers import AutoProcessor
        from vllm import LLM

        if setup.breaks:
            _break()
        given = dict(setup.engine)
        if setup.options is not None:
            given["additional_config"] = {"saccade": dict(setup.options)}
        self._engine: Any = LLM(
            setup.target,
            speculative_config=setup.speculative(),
            **{
                "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 32, "seed": 0,
                "limit_mm_per_prompt": {"video": 2, "image": 2}, "disable_log_stats": False,
                "skip_mm_profiling": True, "enforce_eager": True, **given,
            },
        )  # fmt: skip
        self._processor = AutoProcessor.from_pretrained(setup.target)

    def ask(self, waves: Sequence[Wave], sampling: Mapping[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        rules = SamplingParams(**{"temperature": 0, "max_tokens": 64, **sampling})
        kind = self._engine.llm_engine.model_config.hf_config.model_type
        told = [[_prompt(each, self._processor, kind) for each in wave] for wave in waves]
        ran: dict[str, Any] = {"answers": [], "seconds": [], "decoding": [], "prompts": []}
        before = self._counts()
        for wave in told:
            began = time.perf_counter()
            outputs = self._engine.generate(wave, rules, use_tqdm=False)
            ran["seconds"].append(time.perf_counter() - began)
            spans = [one.metrics.last_token_ts - one.metrics.first_token_ts for one in outputs]
            ran["decoding"].append(max(spans))
            ran["answers"].append([list(each.token_ids) for one in outputs for each in one.outputs])
            ran["prompts"].append([len(one.prompt_token_ids) for one in outputs])
        after = self._counts()
        return ran | {name: after[name] - before[name] for name in COUNTED.values()}

    def _counts(self) -> dict[str, int]:
        found = dict.fromkeys(COUNTED.values(), 0)
        for one in self._engine.get_metrics():
            if one.name in COUNTED:
                found[COUNTED[one.name]] = int(one.value)
        return found


def _break() -> None:
    from saccade.model.session import Session

    score, calls = Session.score, itertools.count()

    def broken(self: Session, trees: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("broken on purpose")
        return score(self, trees)

    Session.score = broken  # type: ignore[method-assign]


def _prompt(question: Question, processor: Any, kind: str) -> dict[str, Any]:
    """As ``LLM.generate`` takes it."""
    from saccade.world import drawing, scenes

    parts = [{"type": "video"} for _ in question.videos]
    parts += [{"type": "image"} for _ in question.images]
    words = {"type": "text", "text": question.words}
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*parts, words]}], tokenize=False, add_generation_prompt=True
    )
    media: dict[str, Any] = {}
    if question.videos:
        clips = [drawing.render(scenes.scene(s), n, side) for s, n, side in question.videos]
        media["video"] = clips if kind.startswith("llava") else [_with_times(c) for c in clips]
    if question.images:
        from PIL import Image

        drawn = (drawing.image_frame(scenes.scene(s), side) for s, side in question.images)
        media["image"] = [Image.fromarray(one) for one in drawn]
    asked: dict[str, Any] = {"prompt": text}
    if media:
        asked["multi_modal_data"] = media
    if question.videos:
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
