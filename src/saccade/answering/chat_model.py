"""Answers questions about files: ``saccade.load`` loads two models and returns a ``Model``.

This module combines ``inputs`` (files to frames, names to models) and ``engine`` (frames to text),
which can also be used alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import torch

from saccade.answering.live_video import Live, Window, frames_of
from saccade.core.errors import OptionError, suggest
from saccade.core.generation_settings import GenerateArguments, suggest_argument
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.drafting.recipe import Recipe
from saccade.engine.conversation import Conversation
from saccade.engine.generate import DEFAULT_METHOD, Stream, stream
from saccade.inputs import captions, python_media
from saccade.inputs.checkpoints import EMBEDDED_TARGET
from saccade.inputs.loading import load_pair, use_threads
from saccade.inputs.media import Clip, FrameSampling, Readable, Source, arrays
from saccade.inputs.media.fetch import Sources
from saccade.inputs.questions import (
    Dialogue,
    Pair,
    check_documents,
    clip_arguments,
    system_turn,
)
from saccade.inputs.training_domain import warn_outside_domain
from saccade.methods import resolve
from saccade.model.change_detection import OUR_FILES
from saccade.model.vision_cache import ConversationVision

QUESTION = "Describe the video in detail."

Media = python_media.Medium | Source
"""One video or picture: a path, bytes or an address of a video, an animation, an image or a folder
of frames; a Pillow image, an array or a tensor of pixels; or a clip that was read already."""
MediaInput = Media | Sequence[Any] | None
"""One such medium, a list of them (in which a list of pictures is one video), messages with media
in them, or None."""


class Frames(TypedDict, total=False):
    """Which frames are taken of each video.

    Only one of ``fps``, ``num_frames`` and ``every`` may be given. Without any of them a video
    gives 2 frames a second, and at least 4 if it has so many. A folder of images gives all of them.
    """

    fps: float | None
    """Frames a second. For frames in memory or in a folder, the rate at which they were taken."""
    num_frames: int | None
    """Frames in all, evenly spaced in time."""
    start: float | None
    """The second of the video at which to begin."""
    end: float | None
    """The second of the video at which to stop."""
    every: bool
    """Whether to take every frame."""


class AnswerArguments(GenerateArguments, total=False):
    """The settings of an answer, and short forms of ``frames``."""

    fps: float | None
    """The same as ``frames={"fps": ...}``."""
    num_frames: int | None
    """The same as ``frames={"num_frames": ...}``."""


class NoOtherArguments(TypedDict):
    """The type of keyword arguments that :func:`load` does not have.

    It has no fields, so a type checker refuses any. At run time :func:`load` refuses them with a
    message about the name that was used.
    """


@dataclass(frozen=True)
class Model:
    """A target, its draft if there is one, and the method by which they answer.

    The answers are the target's own, whatever the method. In every question ``media`` is one
    video or picture, several, or None for text alone. Media that cannot be used raise
    VideoInputError.
    """

    pair: Pair
    method: str | Recipe = DEFAULT_METHOD
    sources: Sources = Sources()
    """The addresses that media may be read from; by default only ``data:`` addresses."""

    def describe(
        self,
        media: MediaInput,
        question: str = QUESTION,
        *,
        system: str | None = None,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[AnswerArguments],
    ) -> Result:
        """Returns the answer to a question about media, with its statistics.

        Args:
            media: one video or picture, several in a list, or None. Each is a path, bytes, an
                address, a Pillow image, an array or tensor of pixels ([height, width, 3] for a
                picture, [frame, height, width, 3] for a video), a list of pictures for a video, or
                a clip. Messages in the form of chat templates or OpenAI may be given instead, with
                the media and the question in them.
            question: the question about it.
            system: a system prompt.
            documents: long texts that the question is about, of which a draft may see a part.
            frames: which frames to take, such as ``{"fps": 2}``; by default 2 a second. ``fps=2``
                and ``num_frames=8`` are short forms. Of frames in memory ``fps`` is the rate at
                which they were taken, by default 1.
            exact: whether the answer equals plain decoding's bit for bit in bf16 and fp16 too.
            seed: of the noise that sampling uses.
            settings: ``GenerationConfig``'s names: max_new_tokens (else the model's own, or 256),
                do_sample, temperature, ...

        Raises:
            VideoInputError, OptionError, ModelError: each with a message of one sentence.
        """
        options: dict[str, Any] = {"documents": documents, "frames": frames, "system": system}
        options |= {"exact": exact, "seed": seed}
        return self.stream(media, question, **options, **settings).finish()[0]

    def stream(
        self,
        media: MediaInput,
        question: str = QUESTION,
        *,
        system: str | None = None,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[AnswerArguments],
    ) -> Stream:
        """Yields the rounds of an answer as they come, each with the ``text`` it adds.

        Arguments are those of :meth:`describe`. ``results`` has the whole answer afterwards.
        """
        sampling, answer_settings = _split_settings(frames, settings)
        if python_media.is_messages(media):
            if question != QUESTION or documents:
                raise OptionError(
                    "messages have the question in them: leave question and documents out, or "
                    "give the media alone"
                )
            clips, encoded = self._read_messages(cast(Sequence[Any], media), system, sampling)
        else:
            clips = self._read_clips(media, sampling)
            arguments = {**_media_arguments(clips), "documents": documents, "system": system}
            encoded = self.pair.ask(question, **arguments)
        options = {"captioner": self._captioner(clips), "exact": exact, "seed": seed}
        return stream_answer(self.pair, encoded, self.method, **options, **answer_settings)

    def batch(
        self,
        questions: Sequence[tuple[MediaInput, str]],
        *,
        system: str | None = None,
        frames: Frames | None = None,
        seed: int | None = None,
        **settings: Unpack[AnswerArguments],
    ) -> list[Result]:
        """Returns the answers to several questions, each with its media, decoded in one batch.

        ``questions`` are pairs of (media, question). Raises OptionError where they are not, or
        where they cannot share a batch: videos beside pictures.
        """
        try:
            pairs = [(media, question) for media, question in questions]
        except (TypeError, ValueError) as error:
            raise OptionError(
                'questions are pairs of media and words: [("clip.mp4", "What happens?")]'
            ) from error
        if not pairs:
            return []
        sampling, answer_settings = _split_settings(frames, settings)
        clips = [self._read_clips(media, sampling) for media, _ in pairs]
        encoded = [
            self.pair.ask(question, **_media_arguments(request_clips), system=system)
            for request_clips, (_, question) in zip(clips, pairs, strict=True)
        ]
        options = {"captioner": self._batch_captioner(clips), "seed": seed}
        batch = self.pair.batch(encoded)
        return stream_answer(self.pair, batch, self.method, **options, **answer_settings).finish()

    def chat(
        self,
        media: MediaInput,
        *,
        system: str | None = None,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[AnswerArguments],
    ) -> Chat:
        """Starts a conversation about media, to be used in a ``with``.

        Arguments are those of :meth:`describe`; later questions may bring media of their own.
        Caches stay from turn to turn, so only what is new is encoded and read.
        """
        _refuse_draft_and_method(settings)
        sampling, answer_settings = _split_settings(frames, settings)
        conversation = Conversation(
            self.pair.target.backbone,
            draft=self.pair.draft_backbone,
            method=self.method,
            tokenizer=self.pair.target.tokenizer,
            exact=exact,
            seed=seed,
            **answer_settings,
        )
        clips = self._read_clips(media, sampling)
        return Chat(self, conversation, clips, documents, sampling, system)

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
                exceeded, the oldest frames are dropped until half of the window is left.
            fps: how many frames a second to take from a file, or how many a second any other
                source delivers.
            segment: how many frames are one clip of the prompt; by default 4.
            realtime: whether a file's frames come at the speed at which it plays.
            exact: as for :meth:`describe`.
            seed: as for :meth:`describe`.
            settings: as for :meth:`describe`.

        An answer is what transformers' ``generate`` answers to ``live.inputs(question)``; see
        ``saccade.answering.live_video``.

        Raises:
            OptionError, ModelError: each with a message of one sentence.
        """
        _refuse_draft_and_method(settings)
        if isinstance(source, Readable):
            raise OptionError("watch cannot read an open file: give its path, or its bytes")
        size = Window.of(window)
        conversation = Conversation(
            self.pair.target.backbone,
            draft=self.pair.draft_backbone,
            method=self.method,
            tokenizer=self.pair.target.tokenizer,
            # Each clip runs through the vision tower by itself, so that old ones can be dropped.
            vision=ConversationVision(runs_media_separately=True),
            exact=exact,
            seed=seed,
            **settings,
        )
        frames = None if source is None else frames_of(source, fps, realtime)
        return Live(self.pair, conversation, window=size, fps=fps, segment=segment, source=frames)

    def _read_clips(self, media: MediaInput, sampling: FrameSampling) -> list[Clip]:
        """Returns every video or picture as a clip, and issues the warnings about them.

        Raises OptionError for messages.
        """
        if python_media.is_messages(media):
            raise OptionError(
                "messages have their questions in them, so describe() and stream() read them; give "
                "chat() and batch() the media alone, and ask the questions one by one"
            )
        clips = [python_media.read(each, sampling, self.sources) for each in _media_list(media)]
        return self._issue_warnings(clips)

    def _issue_warnings(self, clips: Sequence[Clip]) -> list[Clip]:
        """Issues the warnings of these clips, each once, and returns the clips.

        Before that, a clip that is unlike the target's training clips gets one more warning, which
        says so.
        """
        clips = [warn_outside_domain(clip, self.pair.target.training_domain) for clip in clips]
        for warning in dict.fromkeys(warning for clip in clips for warning in clip.warnings):
            warnings.warn(warning, stacklevel=_stack_level_of_caller())
        return clips

    def _read_messages(
        self, messages: Sequence[Any], system: str | None, sampling: FrameSampling
    ) -> tuple[list[Clip], tuple[Inputs, Inputs | None]]:
        """Returns the media in messages as clips, and the messages' inputs for target and draft."""
        parsed = python_media.Messages(messages, sampling, self.sources)
        turns = parsed.turns
        if system is not None:
            if turns[0]["role"] == "system":
                raise OptionError("the messages have a system prompt already: leave system= out")
            turns = [system_turn(system), *turns]
        clips = self._issue_warnings([*parsed.clips, *map(arrays.picture_clip, parsed.images)])
        dialogue = Dialogue(
            tuple(turns), tuple(parsed.clips), tuple(parsed.images), parsed.continues_last_turn
        )
        return clips, self.pair.converse(dialogue)

    def _captioner(self, clips: Sequence[Clip]) -> Any:
        """Returns a captioner of these clips, for views that read a caption.

        Returns None without clips, and where the target is not the embedded one.
        """
        if not clips:
            return None
        frames = [list(clip.frames) for clip in clips]
        # Without a name this is the embedded captioner, which captions for an embedded target only.
        return captions.lazy_captioner(name=None, target=self.pair.target.name, media=frames)

    def _batch_captioner(self, clips: Sequence[Sequence[Clip]]) -> Any:
        """Returns the captioner of a batch from the clips of each of its requests."""
        return captions.join_captioners([self._captioner(each) for each in clips])


class Chat(AbstractContextManager["Chat"]):
    """A conversation about media. Every question may bring more media.

    Close it, or use it in a ``with``, to free the caches. ``history`` has every earlier question
    with its answer.
    """

    def __init__(
        self,
        model: Model,
        conversation: Conversation,
        clips: Sequence[Clip],
        documents: Sequence[str],
        sampling: FrameSampling,
        system: str | None,
    ) -> None:
        self._model = model
        self._conversation = conversation
        self._sampling = sampling
        # The media and documents that the chat began with, which are sent with the first question.
        self._first_clips = [*clips]
        self._first_documents = documents
        self._clips: list[Clip] = []  # of all turns so far
        self._dialogue = Dialogue(() if system is None else (system_turn(system),))
        self._history: list[tuple[str, str]] = []
        self._open_question: _OpenQuestion | None = None

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
            frames: which frames to take of the videos; by default as for the chat's first media.
            settings: of this turn alone.

        Raises:
            VideoInputError, OptionError, ModelError: each with a message of one sentence. The
                conversation stays as it was.
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
        _refuse_draft_and_method(settings)
        self._finish_turn()
        model = self._model
        is_first = not self._history
        clips = model._read_clips(
            media, self._sampling if frames is None else _frame_sampling(frames)
        )
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
        self._open_question = _OpenQuestion(question, dialogue, clips, stream)
        return stream

    def _finish_turn(self) -> None:
        """Adds the open question and its answer to the dialogue, if the answer is whole."""
        open_question = self._open_question
        if open_question is None or not open_question.stream.results:
            return
        answer = open_question.stream.results[0].text or ""
        self._history.append((open_question.question, answer))
        self._dialogue = open_question.dialogue.answer(answer)
        self._clips += open_question.clips
        self._open_question = None

    def close(self) -> None:
        self._conversation.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class _OpenQuestion:
    """A question whose answer is under way."""

    question: str
    dialogue: Dialogue  # All earlier turns, and this question.
    clips: Sequence[Clip]  # The media that came with this question.
    stream: Stream


def load(
    target: str = EMBEDDED_TARGET,
    draft: str | None = None,
    *,
    method: str | Recipe = DEFAULT_METHOD,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    device_map: str | None = None,
    draft_device: str | None = None,
    draft_quantize: str | None = None,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    positions: Literal["auto", "library", "trained"] = "auto",
    threads: int | None = None,
    media_hosts: Sequence[str] = (),
    any_media_host: bool = False,
    private_media_hosts: bool = False,
    media_root: str | Path | None = None,
    **others: Unpack[NoOtherArguments],
) -> Model:
    """Loads a target, and a draft for it, to ask them about videos.

    Args:
        target: a checkpoint folder or hub id, such as "Qwen/Qwen2.5-VL-7B-Instruct". Without one
            the embedded pair answers, which has only ever seen drawn shapes.
        draft: a smaller model of the same family, by its folder or hub id. Without one the target
            may draft for itself, where that pays.
        method: how to draft, NAME/axis=value/...; see ``saccade methods``.
        dtype: "float32", "bfloat16" or "float16", or torch's type of that name; by default float32
            on a CPU, else the checkpoint's own.
        device: by default a GPU where there is one.
        device_map: "auto" spreads the target over the devices there are.
        draft_device: where the draft is, if not beside the target: "cuda:1", say.
        draft_quantize: "int8", "int4" or "fp8" rounds the draft's weights, so that its steps read
            fewer bytes. "fp8" needs a GPU that multiplies fp8 numbers. Without a draft the target
            drafts for itself with a rounded copy. Answers stay the target's.
        quantize: "bnb-8bit", "bnb-4bit" or "torchao-int8", for the target.
        trust_remote_code: whether to run code that comes with a checkpoint.
        positions: the positions of text after a Qwen2.5-VL video. "library" takes those that
            transformers' ``generate`` gives it, "trained" those that the published checkpoints were
            trained with, as vLLM does. "auto" decides by the checkpoint. A result's ``warnings``
            say where the two differ.
        threads: of the CPU, for all of PyTorch.
        media_hosts: the hosts that media may be fetched from, such as "example.com" or
            "*.example.com"; by default none. The rules are those of ``saccade serve``.
        any_media_host: whether media may be fetched from every public host.
        private_media_hosts: whether ``media_hosts`` may be on this machine or its network.
        media_root: the folder that ``file:`` addresses may name files in; by default there is none.
            A plain path may name any file.

    Raises:
        ModelError, OptionError, MethodError: each with a message of one sentence, if possible
            before weights are read.
    """
    for name in others:
        raise OptionError(_refusal(name))
    if isinstance(media_hosts, str):
        media_hosts = [media_hosts]
    if private_media_hosts and not media_hosts:
        raise OptionError("private_media_hosts= is about hosts named by media_hosts=: name them")
    recipe = method if isinstance(method, Recipe) else resolve(method)
    use_threads(threads)
    pair = Pair(
        *load_pair(
            target,
            draft,
            draft_device=draft_device,
            draft_quantize=draft_quantize,
            dtype=str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
            device=device,
            device_map=device_map,
            quantize=quantize,
            trust_remote_code=trust_remote_code,
            positions=positions,
        )
    )
    sources = Sources(
        None if media_root is None else Path(media_root),
        tuple(media_hosts),
        any_host=any_media_host,
        allows_private_hosts=private_media_hosts,
    )
    return Model(pair, recipe, sources)


LOAD_ADVICE = {  # What to write instead of an argument of from_pretrained.
    "torch_dtype": "its name here is dtype=",
    "attn_implementation": "Saccade computes attention itself, so leave it out",
    "load_in_8bit": 'write quantize="bnb-8bit"',
    "load_in_4bit": 'write quantize="bnb-4bit"',
    "quantization_config": 'write quantize="bnb-8bit", "bnb-4bit" or "torchao-int8"',
    "assistant_model": "its name here is draft=",
    "revision": "name a folder that has this revision, such as huggingface_hub.snapshot_download's",
    "low_cpu_mem_usage": "weights are always read directly into their place, so leave it out",
    "cache_dir": "set HF_HUB_CACHE to that folder before Python starts",
    "token": "set HF_TOKEN, or log in once by `hf auth login`",
    "local_files_only": "set HF_HUB_OFFLINE=1 before Python starts",
    "processor": "a loaded model and its processor are for saccade.run(model, inputs)",
    **dict.fromkeys(
        ("min_pixels", "max_pixels", "use_fast"),
        "set it in the checkpoint's preprocessor_config.json",
    ),
    **dict.fromkeys(("fps", "num_frames"), "Model.describe takes it, with each question"),
}


def _refusal(name: str) -> str:
    """Returns the sentence that refuses an argument of :func:`load`."""
    if name in LOAD_ADVICE:
        return f"saccade.load does not take {name}: {LOAD_ADVICE[name]}"
    known = load.__annotations__.keys() - {"others", "return"}
    return f"saccade.load does not take {name}{suggest_argument(name, known)}"


def _split_settings(
    frames: Frames | None, settings: Mapping[str, Any]
) -> tuple[FrameSampling, dict[str, Any]]:
    """Returns how frames are sampled, and the settings that are about the answer.

    Raises OptionError where both ``frames`` and a short form of it are given.
    """
    short_names = AnswerArguments.__annotations__.keys() - GenerateArguments.__annotations__.keys()
    short_forms = {name: settings[name] for name in short_names & settings.keys()}
    short_forms = {name: value for name, value in short_forms.items() if value is not None}
    if short_forms and frames is not None:
        raise OptionError(f"{min(short_forms)}= is a short form of frames=: give one of them")
    answer_settings = {name: settings[name] for name in settings if name not in short_names}
    return _frame_sampling(short_forms if frames is None else frames), answer_settings


def _stack_level_of_caller() -> int:
    """Returns the ``stacklevel`` with which a warning points to the code that called Saccade.

    The function that calls this one passes the result to ``warnings.warn``. Level 1 is that
    function itself, level 2 its caller, and so on.
    """
    level = 1
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        if not frame.f_code.co_filename.startswith(OUR_FILES):
            return level
        level += 1
    return level


def _media_list(media: MediaInput) -> Sequence[Media]:
    """Returns the media as a sequence, empty for None. Raises OptionError for an empty list.

    Only a list or a tuple is several media. Bytes are a sequence in Python too, and one video here.
    """
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
    """Returns clips as arguments of :meth:`Pair.ask`: videos as clips, pictures as images."""
    arguments: dict[str, Any] = {"clips": [], "images": []}
    for clip in clips:
        for kind, values in clip_arguments(clip).items():
            arguments[kind].extend(values)
    return arguments


def _refuse_draft_and_method(settings: Mapping[str, Any]) -> None:
    """Raises OptionError where the settings of an answer name a draft or a method."""
    if misplaced := sorted({"draft", "method"} & settings.keys()):
        raise OptionError(f"{misplaced[0]}= belongs where the models are loaded: saccade.load")


def stream_answer(
    pair: Pair, question: tuple[Inputs, Inputs | None], method: str | Recipe, /, **settings: Any
) -> Stream:
    """Returns the stream of an answer to a question that :meth:`Pair.ask` has encoded.

    ``settings`` are those of :func:`saccade.stream`. Raises OptionError where they name a draft or
    a method.
    """
    inputs, draft_inputs = question
    _refuse_draft_and_method(settings)
    return stream(
        pair.target.backbone,
        inputs,
        draft=pair.draft_backbone,
        draft_inputs=draft_inputs,
        method=method,
        tokenizer=pair.target.tokenizer,
        **settings,
    )
