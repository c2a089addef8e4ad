"""Runs vLLM engines in processes of their own, which answer waves of questions.

The tests, the comparison with vLLM and the table of peers use this to run vLLM with and without our
draft. A wave is a list of questions that are sent to the engine at once. An engine's memory,
threads and caches are released when its process ends. All processes are forked from one server that
has imported vLLM, because importing it takes longer than most runs.
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

FPS = 8.0  # Frames a second that a processor is told of a video.
# vLLM's names of the counters that are read -> the fields of ``WaveResults``.
COUNTER_NAMES = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preempted",
}
NGRAM_DRAFT = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OUR_DRAFT = {"method": "custom_class", "model": "saccade.vllm.Draft"}


@dataclass(frozen=True)
class Question:
    """A prompt: media of the synthetic world, named by their seeds, followed by words."""

    words: str = "Describe the video in detail."
    videos: tuple[tuple[int, int, int], ...] = ()  # (seed, number of frames, pixels a side)
    images: tuple[tuple[int, int], ...] = ()  # (seed, pixels a side)


Wave = Sequence[Question]  # Questions that are sent at once.


@dataclass(frozen=True)
class Setup:
    """The settings that an engine is made with."""

    target: str
    options: Mapping[str, Any] | None = None  # Options of our draft; None runs vLLM without it.
    most: int = 8  # The largest number of draft tokens in a round.
    engine: Mapping[str, Any] = field(default_factory=dict)  # Further arguments of ``vllm.LLM``.
    ngram: bool = False  # Whether vLLM drafts by its own n-grams.
    breaks: bool = False  # Whether our draft's third forward raises, to test what follows.
    environment: Mapping[str, str] = field(default_factory=dict)  # Added to this process's own.

    def speculative(self) -> dict[str, Any] | None:
        """Returns vLLM's ``speculative_config``, or None for plain decoding."""
        if not self.ngram and self.options is None:
            return None
        method: Mapping[str, Any] = NGRAM_DRAFT if self.ngram else OUR_DRAFT
        return {**method, "num_speculative_tokens": self.most}


@dataclass(frozen=True)
class WaveResults:
    """The answers and counts of one or more waves."""

    answers: list[list[list[int]]]  # Token ids by wave and question.
    seconds: list[float]  # By wave: from the first question to the last token.
    decoding: list[float]  # By wave: the longest time between an answer's first and last token.
    prompts: list[list[int]]  # The number of prompt tokens by wave and question.
    drafted: int
    accepted: int
    preempted: int

    @property
    def rate(self) -> float:
        """The acceptance rate: the share of drafted tokens that were accepted."""
        return self.accepted / max(1, self.drafted)


class Engine:
    """One engine in its own process, from its start until ``close``.

    Raises RuntimeError with the end of the process's output if it fails or does not answer in time.
    ``timeout`` is how many seconds the start, and later each call of ``ask``, may take.
    """

    def __init__(self, setup: Setup, timeout: float = 300) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._timeout = timeout
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = _fork_server().Process(target=_serve, args=(setup, theirs, self._log))
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except RuntimeError:
            self.close()
            raise

    def ask(self, waves: Sequence[Wave], **sampling: Any) -> WaveResults:
        """Answers waves one after another; the questions of a wave are sent at once.

        ``sampling`` has arguments of ``vllm.SamplingParams``; decoding is greedy by default.
        """
        self._pipe.send((waves, sampling))
        return WaveResults(**self._receive())

    @property
    def output(self) -> str:
        """What the process has written to its standard output and error so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        self._pipe.close()  # The process sees the end of its input, and ends.
        self._process.join(5)  # It is killed if that takes more than 5 seconds.
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        """Returns the dictionary that the process replies.

        Raises RuntimeError if it replies an error, ends, or does not reply in time.
        """
        try:
            if not self._pipe.poll(self._timeout):
                raise RuntimeError(f"no answer in {self._timeout:g} s\n{self.output[-6000:]}")
            reply = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(self.output[-6000:]) from error
        if isinstance(reply, str):
            raise RuntimeError(reply + self.output[-6000:])
        return dict(reply)


@cache
def _fork_server() -> ForkServerContext:
    """Returns the context whose server has imported vLLM, from which engines' processes fork."""
    # The server takes over this environment. vLLM gets one thread and leaves one core free, because
    # other processes may need the cores. Its engine runs in the process that makes it.
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
    """Makes the engine in its process, and answers the waves that come by the pipe.

    An empty dictionary says that the engine is ready, and a text is an error. What the process
    prints, vLLM's own output included, goes to the log.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        os.environ.update(setup.environment)
        engine = _EngineProcess(setup)
        pipe.send({})
        while True:
            waves, sampling = pipe.recv()
            pipe.send(engine.ask(waves, sampling))
    except EOFError:
        pass
    except Exception:
        pipe.send(traceback.format_exc())


class _EngineProcess:
    """vLLM's engine and the processor of its model, inside the engine's process."""

    def __init__(self, setup: Setup) -> None:
        from transformers import AutoProcessor
        from vllm import LLM

        if setup.breaks:
            _break_third_forward()
        options = dict(setup.engine)
        if setup.options is not None:
            options["additional_config"] = {"saccade": dict(setup.options)}
        self._engine: Any = LLM(
            setup.target,
            speculative_config=setup.speculative(),
            **{
                "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 32, "seed": 0,
                "limit_mm_per_prompt": {"video": 2, "image": 2}, "disable_log_stats": False,
                "skip_mm_profiling": True, "enforce_eager": True, **options,
            },
        )  # fmt: skip
        self._processor = AutoProcessor.from_pretrained(setup.target)

    def ask(self, waves: Sequence[Wave], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Answers the waves one after another, and returns the fields of ``WaveResults``."""
        from vllm import SamplingParams

        rules = SamplingParams(**{"temperature": 0, "max_tokens": 64, **sampling})
        kind = self._engine.llm_engine.model_config.hf_config.model_type
        prompts = [[_make_prompt(each, self._processor, kind) for each in wave] for wave in waves]
        results: dict[str, Any] = {"answers": [], "seconds": [], "decoding": [], "prompts": []}
        before = self._counts()  # Counters run on from wave to wave, so differences are returned.
        for wave in prompts:
            began = time.perf_counter()
            outputs = self._engine.generate(wave, rules, use_tqdm=False)
            results["seconds"].append(time.perf_counter() - began)
            spans = [one.metrics.last_token_ts - one.metrics.first_token_ts for one in outputs]
            results["decoding"].append(max(spans))
            results["answers"].append(
                [list(each.token_ids) for one in outputs for each in one.outputs]
            )
            results["prompts"].append([len(one.prompt_token_ids) for one in outputs])
        after = self._counts()
        return results | {name: after[name] - before[name] for name in COUNTER_NAMES.values()}

    def _counts(self) -> dict[str, int]:
        counts = dict.fromkeys(COUNTER_NAMES.values(), 0)
        for one in self._engine.get_metrics():
            if one.name in COUNTER_NAMES:
                counts[COUNTER_NAMES[one.name]] = int(one.value)
        return counts


def _break_third_forward() -> None:
    """Makes the third forward of our draft raise, to test that the engine goes on without it."""
    from saccade.model.session import Session

    score = Session.score
    calls = itertools.count()

    def broken(self: Session, trees: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("broken on purpose")
        return score(self, trees)

    Session.score = broken  # type: ignore[method-assign]


def _make_prompt(question: Question, processor: Any, kind: str) -> dict[str, Any]:
    """Returns a question in the format that ``LLM.generate`` takes. ``kind`` is the model_type."""
    from saccade.world import drawing, scenes

    parts = [{"type": "video"} for _ in question.videos]
    parts += [{"type": "image"} for _ in question.images]
    words = {"type": "text", "text": question.words}
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*parts, words]}], tokenize=False, add_generation_prompt=True
    )
    media: dict[str, Any] = {}
    if question.videos:
        videos = [drawing.render(scenes.scene(s), n, side) for s, n, side in question.videos]
        needs_times = not kind.startswith("llava")
        media["video"] = [_with_frame_times(v) for v in videos] if needs_times else videos
    if question.images:
        from PIL import Image

        drawn = (drawing.image_frame(scenes.scene(s), side) for s, side in question.images)
        media["image"] = [Image.fromarray(one) for one in drawn]
    prompt: dict[str, Any] = {"prompt": text}
    if media:
        prompt["multi_modal_data"] = media
    if question.videos:
        prompt["mm_processor_kwargs"] = {"do_sample_frames": False}
    return prompt


def _with_frame_times(frames: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a video with the metadata by which vLLM knows the times of its frames."""
    count = len(frames)
    return frames, {
        "fps": FPS,
        "duration": count / FPS,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def clip_questions(seeds: Sequence[int], frames: int = 16, side: int = 112) -> tuple[Question, ...]:
    """Returns one question for each seed, about a clip of the scene that is drawn from it.

    A clip has ``frames`` frames of ``side`` x ``side`` pixels.
    """
    return tuple(Question(videos=((seed, frames, side),)) for seed in seeds)
