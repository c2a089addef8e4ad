"""Answers questions about files: ``saccade.load`` loads two models and returns what answers.

This module combines ``inputs`` (files to frames, names to models) and ``engine`` (frames to text),
which can also be used alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, cast

from saccade.core.errors import OptionError, suggest
from saccade.core.generation_settings import GenerateArguments, suggest_argument
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.corpus.live import Live, Window, frames_of
from saccade.drafting.recipe import Recipe
from saccade.engine.conversation import Conversation
from saccade.engine.generate import DEFAULT_METHOD, Stream, stream
from saccade.inputs import captions, media
from saccade.inputs.loading import load_pair, use_threads
from saccade.inputs.media import Clip, FrameSampling, Source
from saccade.inputs.questions import Dialogue, Pair, check_documents, clip_arguments
from saccade.methods import resolve
from saccade.model.vision_cache import ConversationVision
from saccade.world import drawn_world

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
        """Starts a conversation about media, to be used in a ``with``.

        Arguments are those of :meth:`describe`; later questions may bring media of their own.
        Caches stay from turn to turn, so only what is new is encoded and read.
        """
        conversation = Conversation(
            self.pair.target.backbone,
            draft=self.pair.draft_backbone,
            method=self.method,
            tokenizer=self.pair.target.tokenizer,
            exact=exact,
            seed=seed,
            **settings,
        )
        return Chat(self, conversation, self._read_clips(media, frames), documents, frames)

    def watch(
        self,
        source: Source | Iterable[Any] | None = None,
        *,
        window: float | str | Window = 60.0,
        fps: float = 2.0,
        segment: int | None = None,
        realtime: bool = True,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> Live:
        """Watches a live video, to be used in a ``with``: ``live.ask`` answers at any time.

        Args:
            source: a file, or an iterator of frames such as a camera's; it is read in a thread of
                its own. None where frames are given to ``live.append``.
            window: how much is kept at most: seconds, "120 frames" or "8000 tokens". When that is
                exceeded the oldest are dropped until half of it is left.
            fps: frames a second that are taken of a file; of other sources, how fast they come.
            segment: frames that are one clip of the prompt; by default 4.
            realtime: whether a file's frames come at the speed at which it plays.
            exact, seed, settings: as for :meth:`describe`.

        An answer is what ``generate`` answers to ``live.inputs(question)``; see
        ``saccade.corpus.live``.

        Raises:
            OptionError, ModelError: in one sentence.
        """
        size = Window.of(window)
        conversation = Conversation(
            self.pair.target.backbone,
            draft=self.pair.draft_backbone,
            method=self.method,
            tokenizer=self.pair.target.tokenizer,
            vision=ConversationVision(runs_separately=True),
            exact=exact,
            seed=seed,
            **settings,
        )
        frames = None if source is None else frames_of(source, fps, realtime)
        return Live(self.pair, conversation, window=size, fps=fps, segment=segment, source=frames)

    def _read_clips(self, several: MediaInput, frames: Frames | None) -> list[Clip]:
        """Decodes every video or picture, and issues the warnings that come with it."""
        sampling = _frame_sampling({} if frames is None else frames)
        clips = []
        for each in _media_list(several):
            clip = each if isinstance(each, Clip) else media.read(each, sampling)
            clips.append(drawn_world.warn_if_foreign(clip, self.pair.target.name))
        for warning in dict.fromkeys(warning for clip in clips for warning in clip.warnings):
            warnings.warn(warning, stacklevel=4)
        return clips

    def _captioner(self, clips: Sequence[Clip]) -> Any:
        """Returns the captioner for views that read a caption; only the embedded pair has one."""
        frames = [list(clip.frames) for clip in clips]
        return captions.lazy_captioner(None, self.pair.target.name, frames) if frames else None


class Chat(AbstractContextManager["Chat"]):
    """A conversation about media, of which every question may bring more.

    Close it, or use it in a ``with``, to free the caches. ``history`` has every earlier question
    with its answer.
    """

    def __init__(
        self,
        model: Model,
        conversation: Conversation,
        clips: Sequence[Clip],
        documents: Sequence[str],
        frames: Frames | None,
    ) -> None:
        self._model = model
        self._conversation = conversation
        self._frames = frames
        # What came before the first question and belongs to it.
        self._first_clips, self._first_documents = [*clips], documents
        self._clips: list[Clip] = []  # of all turns so far
        self._dialogue = Dialogue()
        self._history: list[tuple[str, str]] = []
        self._asked: _Asked | None = None

    @property
    def history(self) -> list[tuple[str, str]]:
        """Every earlier question with its answer."""
        self._finish_turn()
        return self._history

    def ask(
        self,
        question: str,
        media: MediaInput = None,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> Result:
        """Returns the next answer.

        Args:
            question: the next question.
            media: videos and pictures that come with it; only these are encoded.
            documents: long texts that come with it.
            frames: which frames to take of them; by default as for the chat's first media.
            settings: of this turn alone.

        Raises:
            VideoInputError, OptionError, ModelError: in one sentence; the conversation stays as it
                was.
        """
        options: dict[str, Any] = {"documents": documents, "frames": frames, **settings}
        result = self.stream(question, media, **options).finish()[0]
        self._finish_turn()
        return result

    def stream(
        self,
        question: str,
        media: MediaInput = None,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        **settings: Unpack[GenerateArguments],
    ) -> Stream:
        """Yields the rounds of the next answer; arguments are those of :meth:`ask`.

        Exhaust it before the next question. A question whose stream was closed is forgotten.
        """
        self._finish_turn()
        model, is_first = self._model, not self._dialogue.turns
        clips = model._read_clips(media, self._frames if frames is None else frames)
        check_documents(documents)
        if is_first:
            check_documents(self._first_documents)
            clips = [*self._first_clips, *clips]
            documents = [*self._first_documents, *documents]
        dialogue = self._dialogue.ask(question, **_media_arguments(clips), documents=documents)
        inputs, draft_inputs = model.pair.converse(dialogue)
        captioner = model._captioner([*self._clips, *clips])
        stream = self._conversation.stream(
            inputs, draft_inputs=draft_inputs, captioner=captioner, **settings
        )
        self._asked = _Asked(question, dialogue, clips, stream)
        return stream

    def _finish_turn(self) -> None:
        """Adds the last question and its answer to the dialogue, once the answer is whole."""
        asked = self._asked
        if asked is None or not asked.stream.results:
            return
        answer = asked.stream.results[0].text or ""
        self._history.append((asked.question, answer))
        self._dialogue = asked.dialogue.answer(answer)
        self._clips += asked.clips
        self._asked = None

    def close(self) -> None:
        self._conversation.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Asked:
    """A question whose answer is under way."""

    question: str
    dialogue: Dialogue
    clips: Sequence[Clip]
    stream: Stream


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
