"""Saccade as a model of lmms-eval: ``lmms-eval --model saccade --model_args target=...,draft=...``.

lmms-eval finds it through the entry point ``lmms_eval.models``; nothing in the package imports it.
A task's chat messages become a question and its media, its generation settings become ours, and
what cannot be honoured is refused or warned about by name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm
from transformers import GenerationConfig

from saccade.cli import loading
from saccade.cli.options import LoadOptions
from saccade.core.errors import OptionError, SaccadeError
from saccade.core.options import MAX_NEW_TOKENS
from saccade.core.result import Result, emitted_each
from saccade.corpus.answering import stream_answer
from saccade.engine.generate import DEFAULT_METHOD
from saccade.inputs import captions, media
from saccade.inputs.loading import use_threads
from saccade.inputs.media import Clip, FrameSampling
from saccade.inputs.media.choose import DEFAULT_FPS
from saccade.inputs.media.clip import enlarged
from saccade.world import drawing

try:
    from lmms_eval.api.model import lmms as Model
except ImportError:  # all but lmms-eval's own formats is tested without it
    Model = object

log = logging.getLogger(__name__)

KNOWN = frozenset(GenerationConfig().to_dict())
DRAWING = ("temperature", "top_p", "top_k", "min_p", "typical_p")  # of no use to greedy decoding


def manifest() -> Any:
    """What the entry point resolves to: lmms-eval's card of this model."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("saccade", chat_class_path=f"{__name__}.Saccade")


class Saccade(Model):
    """A target and its draft, answering one request after the other.

    Args (``--model_args``; all but ``target`` may be left out):
        target, draft: a checkpoint folder, a hub id, or one of the embedded models.
        method: as in ``saccade methods``; in quotes if it has commas.
        device, draft_device, dtype, device_map, quantize, trust_remote_code, positions: as
            :func:`saccade.inputs.load_pair`.
        threads: of the CPU.
        frames: to take of each video, evenly in time; else 2 a second, at least 4.
        max_new_tokens: for tasks that set no limit.
        until: false ignores a task's stop strings, as lmms-eval's vLLM wrapper does.
        seed: names the noise of sampling; the n-th request of a run draws with seed + n.
        captioner: an image-to-text model, for views that read a caption.
        batch_size: 1.

    Raises OptionError, ModelError or MethodError, in one sentence.
    """

    is_simple = False  # of lmms-eval's two interfaces, the one with chat messages

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
        **how: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) != "1":
            raise OptionError(f"batch_size={batch_size}: saccade answers one request at a time")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise OptionError("saccade runs in one process; share a task out by --offset, --limit")
        use_threads(threads)
        (self._recipe,) = loading.recipes([method.strip("\"'")])
        self._sampling = FrameSampling(num_frames=frames)
        self._longest, self._until, self._seed = max_new_tokens, until, seed
        self._captioner, self._device = captioner, how.get("device")
        self._models = loading.models(target, draft, quiet=True, **LoadOptions(**how).load)
        self._warned: set[str] = set()

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Answers in the order asked; then logs what they took."""
        from lmms_eval.api.instance import GenerationResult, TokenCounts
        from lmms_eval.models.model_utils.gen_metrics import log_metrics

        results = list(self.results(requests))
        log_metrics(**summary(results))
        return [
            GenerationResult(each.text or "", TokenCounts(each.prompt_tokens, len(each.ids)))
            for each in results
        ]

    def results(self, requests: Sequence[Any]) -> Iterator[Result]:
        """One a request, in the order asked. An error says which document it is about."""
        for number, request in enumerate(tqdm(requests, desc="saccade")):
            _, messages, given, document, task, split = request.args
            try:
                found = self._answer(messages(self.task_dict[task][split][document]), given, number)
            except SaccadeError as error:
                error.add_note(f"(document {document} of {task}, split {split})")
                raise
            if found.fallback_reason is not None:
                self._warn(f"plain decoding took over: {found.fallback_reason}")
            if found.finish_reason == "error":
                log.warning("document %s of %s: the target's logits hold NaN", document, task)
            yield found

    def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
        raise OptionError("saccade writes answers and scores none: use a generate_until task")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[Any]:
        raise OptionError("saccade answers tasks of one round: use a generate_until task")

    def _answer(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], number: int
    ) -> Result:
        target = self._models.target
        if any(message["role"] == "system" for message in messages):
            self._warn("system messages are put in front of the first question")
        asked = question(messages, self._sampling)
        settings, unknown = generation(given, self._longest, until=self._until)
        for name in unknown:
            self._warn(f"generation_kwargs: {name} is no generation setting and is left out")
        shown = [list(clip.frames) for clip in asked["clips"]]
        shown += [[picture] for picture in asked["images"]]
        caption = captions.chosen(self._captioner, target.name, shown, self._device)
        rounds = stream_answer(
            self._models,
            self._models.ask(**asked),
            self._recipe,
            captioner=caption if shown else None,
            seed=settings.pop("seed", self._seed) + number,
            **settings,
        )
        return rounds.finish()[0]

    def _warn(self, what: str) -> None:
        """Once a run."""
        if what not in self._warned:
            log.warning(what)
            self._warned.add(what)


def generation(
    given: Mapping[str, Any], longest: int, *, until: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """A task's generation_kwargs as :func:`saccade.run` takes them, and the names it does not.

    Greedy at temperature 0, without ``do_sample``, and where neither is set. ``longest`` is for
    tasks that limit no answer; ``until`` says whether their stop strings count.
    """
    found = {name: value for name, value in given.items() if value is not None}
    stops = found.pop("until", ())
    stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
    unknown = sorted(found.keys() - KNOWN - {"seed"})
    found = {name: value for name, value in found.items() if name not in unknown}
    heat = found.get("temperature")
    found["do_sample"] = bool(found.get("do_sample", heat)) and heat != 0
    if not found["do_sample"]:
        found = {name: value for name, value in found.items() if name not in DRAWING}
    if "max_length" not in found:
        found.setdefault("max_new_tokens", longest)
    if until and stops:
        found["stop_strings"] = stops
    return found, unknown


def question(messages: Sequence[Mapping[str, Any]], sampling: FrameSampling) -> dict[str, Any]:
    """Chat messages as what `ask` takes, their media read: ``sampling`` says what of a video.

    System messages go in front of the first question. Raises OptionError for sound, for media
    after the first question, and where user and assistant do not take turns.
    """
    turns = [[*_parts(message)] for message in messages if message["role"] != "system"]
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not len(roles) % 2 or roles != [("user", "assistant")[n % 2] for n in range(len(roles))]:
        raise OptionError(f"not a conversation that ends in a question: {', '.join(roles)}")
    told = [part for message in messages if message["role"] == "system" for part in _parts(message)]
    turns[0] = [*({**part, "text": f"{part['text']}\n\n"} for part in told), *turns[0]]
    if strange := {part["type"] for turn in turns for part in turn} - {"text", "image", "video"}:
        raise OptionError(f"saccade is shown text, images and videos, not {', '.join(strange)}")
    if any(part["type"] != "text" for turn in turns[1:] for part in turn):
        raise OptionError("media after the first question of a conversation are not supported")
    texts = ["".join(part["text"] for part in turn if part["type"] == "text") for turn in turns]
    shown = {
        "question": texts[-1],
        "history": list(zip(texts[:-1:2], texts[1::2], strict=True)),
        "clips": [clip(part, sampling) for part in turns[0] if part["type"] == "video"],
        "images": [picture(part["url"]) for part in turns[0] if part["type"] == "image"],
    }
    if shown["clips"] or shown["images"]:
        kept = ("type", "text")
        shown["parts"] = [{key: part[key] for key in kept if key in part} for part in turns[0]]
    return shown


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def picture(shown: Any) -> np.ndarray:
    """[height width 3] of a picture in memory, a file's path, or a file's bytes."""
    if isinstance(shown, Mapping):  # as the datasets library leaves it undecoded
        shown = shown.get("bytes") or shown.get("path")
    if isinstance(shown, Image.Image):
        shown = np.array(shown.convert("RGB"))  # writable, as torch wants it
    if isinstance(shown, np.ndarray) and shown.dtype == np.uint8 and shown.shape[2:] == (3,):
        return enlarged(shown)
    if not isinstance(shown, str | Path | bytes):
        raise OptionError(f"a picture cannot be read from {type(shown).__name__}")
    return media.read_image(shown)


def clip(part: Mapping[str, Any], sampling: FrameSampling) -> Clip:
    """A video in a file, whole or from start to end, or its pictures, taken to be 2 a second."""
    shown, start, end = part["url"], part.get("start_time"), part.get("end_time")
    if isinstance(shown, Mapping):
        start, end = shown.get("video_start", start), shown.get("video_end", end)
        shown = shown.get("video") or shown.get("url") or shown.get("path")
    if isinstance(shown, str | Path | bytes):
        return media.read(shown, replace(sampling, start=start, end=end))
    if start is not None or end is not None or not isinstance(shown, list | np.ndarray):
        raise OptionError(f"no such part of a video can be read from {type(shown).__name__}")
    frames = np.stack([picture(each) for each in shown])
    whole = len(frames)
    count = min(sampling.num_frames or whole, whole)
    taken = drawing.make_clip(frames[np.arange(count) * whole // count], whole / DEFAULT_FPS)
    return replace(taken, fps=DEFAULT_FPS, source_frames=whole)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What the answers took, as lmms-eval's `log_metrics` takes it. Seconds are ours alone."""
    tokens = sum(len(each.ids) for each in results)
    whole = sum(each.timings.total for each in results)
    decode = sum(each.timings.decode for each in results)
    rounds = [round for each in results for round in each.rounds]
    return {
        "total_elapsed_time": whole,
        "total_gen_tokens": tokens,
        "avg_speed": tokens / whole if whole else 0.0,
        "additional_metrics": {
            "tau": emitted_each(rounds) or 0.0,
            "decode_speed": tokens / decode if decode else 0.0,
            "fallbacks": sum(each.fallback_reason is not None for each in results),
        },
    }
