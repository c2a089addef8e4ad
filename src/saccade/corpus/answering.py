"""Answers questions about files: ``saccade.load`` loads two models and returns what answers.

This module combines ``inputs`` (files to frames, names to models) and ``engine`` (frames to text),
which can also be used alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, cast

from saccade.core.errors import OptionError, suggest
from saccade.core.generation_settings import GenerateArguments, suggest_argument
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.drafting.recipe import Recipe
from saccade.engine.conversation import Conversation
from saccade.engine.generate import DEFAULT_METHOD, Stream, stream
from saccade.inputs import captions, media
from saccade.inputs.loading import load_pair, use_threads
from saccade.inputs.media import Clip, FrameSampling, Source
from saccade.inputs.questions import Pair, clip_arguments
from saccade.inputs.training_domain import warn_outside_domain
from saccade.methods import resolve

QUESTION = "Describe the video in detail."
EMBEDDED_TARGET = "shapes"

Media = Source | Clip
"""A video, an animation, an image, a folder of frames, its bytes, or frames already read."""
MediaInput = Media | Sequence[Media] | None


class Frames(TypedDict, total=False):
    """Which frames are taken of each video, as :class:`saccade.inputs.media.FrameSampling` says."""

    fps: float | None
    num_frames: int | None
    start: float | None
    end: float | None
    every: bool


class NoOtherArguments(TypedDict):
    """No other arguments, so that an unknown one is refused by name."""


@dataclass(frozen=True)
class Model:
    """A target, its draft if there is one, and the method by which they answer.

    The answers are the target's own, whatever the method. In every question ``media`` is one
    video or picture, several, or None for text alone. Media that cannot be used raise
    VideoInputError.
    """

    pair: Pair
    method: str | Recipe = DEFAULT_METHOD

    def describe(
        self,
        media: MediaInput,
        question: str = QUESTION,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> Result:
        """Returns the answer to a question about media, with its statistics.

        Args:
            media: one video or picture, several, or None.
            question: the question about it.
            documents: long texts beside it, of which a draft may see a part.
            frames: which frames to take, such as ``{"fps": 2}``; by default 2 a second.
            exact: bit for bit plain decoding's answer in bf16 and fp16 too.
            seed: of the noise that sampling uses.
            settings: ``GenerationConfig``'s names: max_new_tokens (else the model's own, or 256),
                do_sample, temperature, ...

        Raises:
            VideoInputError, OptionError, ModelError: in one sentence.
        """
        options: dict[str, Any] = {"documents": documents, "frames": frames}
        options |= {"exact": exact, "seed": seed}
        return self.stream(media, question, **options, **settings).finish()[0]

    def stream(
        self,
        media: MediaInput,
        question: str = QUESTION,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> Stream:
        """Yields the rounds of an answer as they come, each with the ``text`` it adds.

        Arguments are those of :meth:`describe`. ``results`` has the whole answer afterwards.
        """
        clips = self._read_clips(media, frames)
        encoded = self.pair.ask(question, **_media_arguments(clips), documents=documents)
        options = {"captioner": self._captioner(clips), "exact": exact, "seed": seed}
        return stream_answer(self.pair, encoded, self.method, **options, **settings)

    def batch(
        self,
        questions: Sequence[tuple[MediaInput, str]],
        *,
        frames: Frames | None = None,
        seed: int | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> list[Result]:
        """Returns the answers to several questions, each with its media, decoded in one batch.

        Raises OptionError where they cannot share a batch: videos beside pictures.
        """
        try:
            pairs = [(media, question) for media, question in questions]
        except (TypeError, ValueError) as error:
            raise OptionError(
                'questions are pairs of media and words: [("clip.mp4", "What happens?")]'
            ) from error
        if not pairs:
            return []
        encoded = [
            self.pair.ask(question, **_media_arguments(self._read_clips(media, frames)))
            for media, question in pairs
        ]
        batch = self.pair.batch(encoded)
        return stream_answer(self.pair, batch, self.method, seed=seed, **settings).finish()

    def chat(
        self,
        media: MediaInput,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> Chat:
        """Starts a conversation about the same media, to be used in a ``with``.

        Arguments are those of :meth:`describe`. Caches stay from turn to turn, so only new tokens
        are prefilled.
        """
        clips = self._read_clips(media, frames)
        conversation = Conversation(
            self.pair.target.backbone,
            draft=self.pair.draft_backbone,
            method=self.method,
            tokenizer=self.pair.target.tokenizer,
            captioner=self._captioner(clips),
            exact=exact,
            seed=seed,
            **settings,
        )
        return Chat(self.pair, conversation, {**_media_arguments(clips), "documents": documents})

    def _read_clips(self, several: MediaInput, frames: Frames | None) -> list[Clip]:
        """Decodes every video or picture, and issues the warnings that come with it."""
        sampling = _frame_sampling({} if frames is None else frames)
        clips = []
        for each in _media_list(several):
            clip = each if isinstance(each, Clip) else media.read(each, sampling)
            clips.append(warn_outside_domain(clip, self.pair.target.domain))
        for warning in dict.fromkeys(warning for clip in clips for warning in clip.warnings):
            warnings.warn(warning, stacklevel=4)
        return clips
        return clips

    def _captioner(self, clips: Sequence[Clip]) -> Any:
        """Returns the captioner for views that read a caption; only the embedded pair has one."""
        frames = [list(clip.frames) for clip in clips]
        return captions.lazy_captioner(None, self.pair.target.name, frames) if frames else None


class Chat(AbstractContextManager["Chat"]):
    """A conversation about the same media. Close it, or use it in a ``with``, to free the caches.

    ``history`` has every earlier question with its answer.
    """

    def __init__(
        self, pair: Pair, conversation: Conversation, media_arguments: dict[str, Any]
    ) -> None:
        self.history: list[tuple[str, str]] = []
        self._pair = pair
        self._conversation = conversation
        self._media_arguments = media_arguments

    def ask(self, question: str, **settings: Unpack[GenerateArguments]) -> Result:
        """Returns the next answer; the settings are for this turn alone."""
        inputs, draft_inputs = self._pair.ask(
            question, **self._media_arguments, history=self.history
        )
        result = self._conversation.run(inputs, draft_inputs=draft_inputs, **settings)
        self.history.append((question, result.text or ""))
        return result

    def close(self) -> None:
        self._conversation.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def load(
    target: str = EMBEDDED_TARGET,
    draft: str | None = None,
    *,
    method: str | Recipe = DEFAULT_METHOD,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    draft_device: str | None = None,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    positions: Literal["auto", "library", "trained"] = "auto",
    threads: int | None = None,
    **others: Unpack[NoOtherArguments],
) -> Model:
    """Loads a target, and a draft for it, to ask them about videos.

    Args:
        target: a checkpoint folder or hub id, such as "Qwen/Qwen2.5-VL-7B-Instruct". Without one
            the embedded pair answers, which has only ever seen drawn shapes.
        draft: a smaller model of the same family, likewise; without one the target may draft for
            itself, where that pays.
        method: how to draft, NAME/axis=value/...; see ``saccade methods``.
        dtype: "float32", "bfloat16" or "float16"; by default float32 on a CPU, else the
            checkpoint's own.
        device: by default a GPU where there is one.
        device_map: "auto" spreads the target over the devices there are.
        draft_device: where the draft is, if not beside the target: "cuda:1", say.
        quantize: "bnb-8bit", "bnb-4bit" or "torchao-int8", for the target.
        trust_remote_code: whether to run code that comes with a checkpoint.
        positions: of text after a Qwen2.5-VL video; "library" is where ``generate`` puts it,
            "trained" where the published checkpoints learnt it and vLLM puts it; "auto" goes by the
            checkpoint, and a result's ``warnings`` say where the two differ.
        threads: of the CPU, for all of PyTorch.

    Raises:
        ModelError, OptionError, MethodError: in one sentence, if possible before weights are read.
    """
    for name in others:
        raise OptionError(
            f"saccade.load does not take {name}{suggest_argument(name, load.__annotations__)}"
        )
    recipe = method if isinstance(method, Recipe) else resolve(method)
    use_threads(threads)
    pair = Pair(
        *load_pair(
            target,
            draft,
            draft_device=draft_device,
            dtype=dtype,
            device=device,
            device_map=device_map,
            quantize=quantize,
            trust_remote_code=trust_remote_code,
            positions=positions,
        )
    )
    return Model(pair, recipe)


def _media_list(media: MediaInput) -> Sequence[Media]:
    """Returns media as a list. Bytes are one video, though Python counts them as a sequence."""
    if isinstance(media, list | tuple):
        if not media:
            raise OptionError("no media: give a video, or None for text alone")
        return media
    return () if media is None else [cast(Media, media)]


def _frame_sampling(frames: Any) -> FrameSampling:
    """Returns how frames are sampled. Raises OptionError for unknown names."""
    if not isinstance(frames, Mapping):
        raise OptionError(f'frames= are by name, such as {{"fps": 2}}, not {frames!r}')
    names = Frames.__annotations__
    for name in frames:
        if name not in names:
            hint = suggest(str(name), names)
            raise OptionError(f"frames= knows no {name!r}{hint}; known: {', '.join(names)}")
    return FrameSampling(**frames)


def _media_arguments(clips: Sequence[Clip]) -> dict[str, Any]:
    """Returns clips as arguments of :meth:`Pair.ask`, where single pictures are images."""
    arguments: dict[str, Any] = {"clips": [], "images": []}
    for clip in clips:
        for kind, values in clip_arguments(clip).items():
            arguments[kind].extend(values)
    return arguments


def stream_answer(
    pair: Pair, question: tuple[Inputs, Inputs | None], method: str | Recipe, /, **settings: Any
) -> Stream:
    """Returns the stream of an answer to a question that :meth:`Pair.ask` has encoded.

    ``settings`` are those of :func:`saccade.stream`. Raises OptionError where they name a draft or
    a method.
    """
    inputs, draft_inputs = question
    if misplaced := sorted({"draft", "method"} & settings.keys()):
        raise OptionError(f"{misplaced[0]}= belongs where the models are loaded: saccade.load")
    return stream(
        pair.target.backbone,
        inputs,
        draft=pair.draft_backbone,
        draft_inputs=draft_inputs,
        method=method,
        tokenizer=pair.target.tokenizer,
        **settings,
    )
