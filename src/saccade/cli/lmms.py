"""Saccade as a model of lmms-eval: ``lmms-eval --model saccade --model_args target=...,draft=...``.

lmms-eval finds this model through the entry point ``lmms_eval.models``, so nothing in the package
imports this file. A task's chat messages become a question and its media, and its generation
settings become ours. What is not supported is refused, or left out with a warning that names it.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm
from transformers import GenerationConfig

from saccade.answering.chat_model import stream_answer
from saccade.cli import run_setup
from saccade.cli.command_options import LoadOptions
from saccade.core.errors import OptionError, SaccadeError, suggest
from saccade.core.result import Result, emitted_per_forward
from saccade.core.stopping import MAX_NEW_TOKENS
from saccade.engine.generate import DEFAULT_METHOD
from saccade.inputs import captions, media
from saccade.inputs.loading import use_threads
from saccade.inputs.media import Clip, FrameSampling
from saccade.inputs.media.clip import enlarge, make_clip
from saccade.inputs.media.frame_sampling import DEFAULT_FPS
from saccade.inputs.python_media import stack_frames

try:
    from lmms_eval.api.model import lmms as Model
except ImportError:  # Most tests of this file run without lmms-eval.
    Model = object

log = logging.getLogger(__name__)

# The names of transformers' generation settings. A task's entries with other names are left out,
# except for "until" and "seed".
KNOWN_SETTINGS = frozenset(GenerationConfig().to_dict())
# Rules of sampling. Where decoding is greedy they are left out, because Saccade refuses most of
# their values there.
IGNORED_WHEN_GREEDY = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def manifest() -> Any:
    """Returns lmms-eval's manifest of this model, to which the entry point resolves."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("saccade", chat_class_path=f"{__name__}.Saccade")


class Saccade(Model):
    """A target and its draft, answering one request after the other.

    Args (``--model_args``; all but ``target`` may be left out):
        target, draft: a checkpoint folder, a hub id, or one of the embedded models.
        method: as in ``saccade methods``; in quotes if it has commas.
        device, draft_device, draft_quantize, dtype, device_map, quantize, trust_remote_code,
            positions: as :func:`saccade.inputs.load_pair`.
        threads: how many CPU threads PyTorch uses.
        frames: how many frames to take of each video, evenly in time; else 2 a second, at least 4,
            or all of them where a video is given as pictures.
        max_new_tokens: the limit of answers for tasks that set none.
        until: whether a task's stop strings are used; lmms-eval's vLLM wrapper ignores them.
        seed: request n, counted from 0, samples with seed + n. A task's own seed replaces this one.
        captioner: an image-to-text model, for views that read a caption.
        batch_size: 1.

    Raises OptionError, ModelError or MethodError, and VideoInputError for ``frames``, in one
    sentence.
    """

    is_simple = False  # This selects the interface of lmms-eval with chat messages.

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        method: str = DEFAULT_METHOD,
        *,
        threads: int | None = None,
        frames: int | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        until: bool = True,
        seed: int = 0,
        captioner: str | None = None,
        batch_size: int | str = 1,
        **load_options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) != "1":
            raise OptionError(f"batch_size={batch_size}: saccade answers one request at a time")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError("saccade runs in one process: split a task by --offset and --limit")
        known_options = [field.name for field in fields(LoadOptions)]
        for name in load_options.keys() - known_options:
            hint = suggest(name, [*known_options, *inspect.signature(Saccade).parameters])
            raise OptionError(f"unknown argument {name!r} of the model{hint}")
        use_threads(threads)
        (self._recipe,) = run_setup.resolve_recipes([method.strip("\"'")])
        self._sampling = FrameSampling(num_frames=frames)
        self._max_new_tokens, self._uses_stops, self._seed = max_new_tokens, until, seed
        self._captioner = captioner
        self._device = load_options.get("device")
        self._models = run_setup.load_models(
            target, draft, quiet=True, **LoadOptions(**load_options).load_arguments
        )
        self._warned: set[str] = set()

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Returns answers in the order of the requests, and logs their statistics."""
        from lmms_eval.api.instance import GenerationResult, TokenCounts
        from lmms_eval.models.model_utils.gen_metrics import log_metrics

        results = list(self.results(requests))
        log_metrics(**summary(results))
        return [
            GenerationResult(each.text or "", TokenCounts(each.prompt_tokens, len(each.ids)))
            for each in results
        ]

    def results(self, requests: Sequence[Any]) -> Iterator[Result]:
        """Yields one result a request, in order. Where a SaccadeError is raised, its note names the
        document."""
        for number, request in enumerate(tqdm(requests, desc="saccade")):
            # A document is a sample of a task, given by its number in the split.
            _, make_messages, kwargs, document, task, split = request.args
            try:
                messages = make_messages(self.task_dict[task][split][document])
                result = self._answer(messages, kwargs, number)
            except SaccadeError as error:
                error.add_note(f"(document {document} of {task}, split {split})")
                raise
            if result.fallback_reason is not None:
                self._warn(f"plain decoding took over: {result.fallback_reason}")
            if result.finish_reason == "error":
                log.warning("document %s of %s: the target's logits hold NaN", document, task)
            yield result

    def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
        raise OptionError("saccade writes answers and scores none: use a generate_until task")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[Any]:
        raise OptionError("saccade answers tasks of one round: use a generate_until task")

    def _answer(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], number: int
    ) -> Result:
        target = self._models.target
        if any(message["role"] == "system" for message in messages):
            self._warn("system messages are put in front of the first question")
        arguments = ask_arguments(messages, self._sampling)
        settings, unknown = translate_generation_kwargs(
            kwargs, self._max_new_tokens, uses_stops=self._uses_stops
        )
        for name in unknown:
            self._warn(f"generation_kwargs: {name} is no generation setting and is left out")
        all_frames = _frames_in_order(arguments)
        captioner = captions.lazy_captioner(self._captioner, target.name, all_frames, self._device)
        stream = stream_answer(
            self._models,
            self._models.ask(**arguments),
            self._recipe,
            captioner=captioner if all_frames else None,
            seed=settings.pop("seed", self._seed) + number,
            **settings,
        )
        return stream.finish()[0]

    def _warn(self, message: str) -> None:
        """Logs a warning, once a run."""
        if message not in self._warned:
            log.warning(message)
            self._warned.add(message)


def translate_generation_kwargs(
    kwargs: Mapping[str, Any], max_new_tokens: int, *, uses_stops: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Translates a task's generation_kwargs into arguments of :func:`saccade.run`.

    Returns them, and the names of the entries that are no generation settings.

    Decoding is greedy if ``temperature`` is 0, if ``do_sample`` is false, or if neither is given.
    If only a temperature above 0 is given, tokens are sampled. ``max_new_tokens`` limits the
    answers of tasks that set no limit. The strings of ``until`` become ``stop_strings`` if
    ``uses_stops``, and are dropped otherwise.
    """
    settings = {name: value for name, value in kwargs.items() if value is not None}
    stops = settings.pop("until", ())
    stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
    unknown = sorted(settings.keys() - KNOWN_SETTINGS - {"seed"})
    settings = {name: value for name, value in settings.items() if name not in unknown}
    temperature = settings.get("temperature")
    # Where ``do_sample`` is not given, a temperature asks for sampling.
    asks_for_sampling = bool(settings.get("do_sample", temperature))
    settings["do_sample"] = asks_for_sampling and temperature != 0
    if not settings["do_sample"]:
        settings = {
            name: value for name, value in settings.items() if name not in IGNORED_WHEN_GREEDY
        }
    if "max_length" not in settings:
        settings.setdefault("max_new_tokens", max_new_tokens)
    if uses_stops and stops:
        settings["stop_strings"] = stops
    return settings, unknown


def ask_arguments(messages: Sequence[Mapping[str, Any]], sampling: FrameSampling) -> dict[str, Any]:
    """Turns chat messages into keyword arguments of :meth:`saccade.inputs.Pair.ask`, and reads
    their media.

    System messages go in front of the first question. Raises OptionError for sound, for media
    after the first question, and where user and assistant do not take turns.
    """
    dialogue = [message for message in messages if message["role"] != "system"]
    turns = [[*_parts(message)] for message in dialogue]
    roles = [message["role"] for message in dialogue]
    # The user has the first turn and the last, as in user, assistant, user.
    expected_roles = ["assistant" if number % 2 else "user" for number in range(len(roles))]
    has_odd_length = len(roles) % 2 == 1
    if not has_odd_length or roles != expected_roles:
        raise OptionError(f"not a conversation that ends in a question: {', '.join(roles)}")
    system = [message for message in messages if message["role"] == "system"]
    system_parts = [part for message in system for part in _parts(message)]
    if any(part["type"] != "text" for part in system_parts):
        raise OptionError("a system message has something other than text, which is not supported")
    preface = [{**part, "text": f"{part['text']}\n\n"} for part in system_parts]
    turns[0] = [*preface, *turns[0]]
    kinds = {part["type"] for turn in turns for part in turn}
    if unsupported := kinds - {"text", "image", "video"}:
        raise OptionError(f"saccade reads text, images and videos, not {', '.join(unsupported)}")
    if any(part["type"] != "text" for turn in turns[1:] for part in turn):
        raise OptionError("media after the first question of a conversation are not supported")
    texts = ["".join(part["text"] for part in turn if part["type"] == "text") for turn in turns]
    # ``texts`` are a question, its answer, the next question and so on, up to the last question.
    earlier_questions = texts[:-1:2]
    answers = texts[1::2]
    arguments = {
        "question": texts[-1],
        "history": list(zip(earlier_questions, answers, strict=True)),
        "clips": [read_clip(part, sampling) for part in turns[0] if part["type"] == "video"],
        "images": [read_picture(part["url"]) for part in turns[0] if part["type"] == "image"],
    }
    if arguments["clips"] or arguments["images"]:
        # ``parts`` is the whole first message. It says between which words each medium stands.
        keys = ("type", "text")
        arguments["parts"] = [{key: part[key] for key in keys if key in part} for part in turns[0]]
    return arguments


def _frames_in_order(arguments: Mapping[str, Any]) -> list[list[np.ndarray]]:
    """Returns the frames of each video and picture, in the order of the prompt."""
    clips = iter(arguments["clips"])
    images = iter(arguments["images"])
    frames: list[list[np.ndarray]] = []
    for part in arguments.get("parts", ()):
        if part["type"] == "video":
            frames.append(list(next(clips).frames))
        elif part["type"] == "image":
            frames.append([next(images)])
    return frames


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def read_picture(source: Any) -> np.ndarray:
    """Returns the pixels [height width 3] of a picture, which is given in memory, or as a file's
    path or bytes. A tiny picture is enlarged."""
    if isinstance(source, Mapping):  # The datasets library has this form before decoding.
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        source = np.array(source.convert("RGB"))  # A copy, because torch needs a writable array.
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape[2:] == (3,):
        return enlarge(source)
    if not isinstance(source, str | Path | bytes):
        raise OptionError(f"a picture cannot be read from {type(source).__name__}")
    return media.read_image(source)


def read_clip(part: Mapping[str, Any], sampling: FrameSampling) -> Clip:
    """Reads the video of a part of a message. If the part names a start or an end, in seconds, what
    lies before the start or after the end is left out.

    A video is a file, or else a list or an array of pictures. Pictures are taken as a video of
    ``DEFAULT_FPS`` frames a second, for which a start or an end raises OptionError.
    """
    source = part["url"]
    start = part.get("start_time")
    end = part.get("end_time")
    if isinstance(source, Mapping):
        start = source.get("video_start", start)
        end = source.get("video_end", end)
        sources = [source.get(key) for key in ("video", "url", "path")]
        # An array has no truth value, so each source is compared with None.
        source = next((each for each in sources if each is not None), None)
    if isinstance(source, str | Path | bytes):
        return media.read(source, replace(sampling, start=start, end=end))
    if start is not None or end is not None or not isinstance(source, list | np.ndarray):
        raise OptionError(f"cannot read a video, or a part of one, from {type(source).__name__}")
    frames = stack_frames([read_picture(each) for each in source])
    total = len(frames)
    count = min(sampling.num_frames or total, total)
    evenly_spaced = np.arange(count) * total // count  # 4 of 10 frames are 0, 2, 5 and 7.
    source_seconds = total / DEFAULT_FPS
    sampled = make_clip(frames[evenly_spaced], source_seconds)
    # ``make_clip`` takes the sampled frames for the whole source. So its times, its frame rate and
    # its number of source frames are replaced. Each picture keeps its time in the whole source.
    times = evenly_spaced / DEFAULT_FPS
    return replace(sampled, timestamps=times, fps=DEFAULT_FPS, source_frames=total)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Returns statistics of the answers for lmms-eval's `log_metrics`, by Saccade's own timings."""
    tokens = sum(len(each.ids) for each in results)
    total = sum(each.timings.total for each in results)
    # The first token of an answer is the prefill's.
    decoded_tokens = sum(max(0, len(each.ids) - 1) for each in results)
    decode = sum(each.timings.decode for each in results)
    rounds = [round for each in results for round in each.rounds]
    return {
        "total_elapsed_time": total,
        "total_gen_tokens": tokens,
        "avg_speed": tokens / total if total else 0.0,
        "additional_metrics": {
            "tau": emitted_per_forward(rounds) or 0.0,
            "decode_speed": decoded_tokens / decode if decode else 0.0,
            "fallbacks": sum(each.fallback_reason is not None for each in results),
        },
    }
