"""From files to answers: ``saccade.load`` names two models, and what it gives is asked questions.

Everything here is put together from ``inputs`` (files to frames, names to models) and ``engine``
(frames to text), which can be used alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, cast

from saccade.core.errors import OptionError, suggest
from saccade.core.options import Asked, ours
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.drafting.recipe import Recipe
from saccade.engine.conversation import Conversation
from saccade.engine.generate import DEFAULT_METHOD, Stream, stream
from saccade.inputs import captions, media
from saccade.inputs.loading import load_pair, use_threads
from saccade.inputs.media import Clip, FrameSampling, Source
from saccade.inputs.questions import Pair, clip_arguments
from saccade.methods import resolve
from saccade.world import knowing

QUESTION = "Describe the video in detail."
ALONE = "shapes"

Media = Source | Clip
"""A video, an animation, an image, a folder of frames, its bytes, or frames already read."""
Several = Media | Sequence[Media] | None


class Frames(TypedDict, total=False):
    """Which frames are taken of each video, as :class:`saccade.inputs.media.FrameSampling` says."""

    fps: float | None
    num_frames: int | None
    start: float | None
    end: float | None
    every: bool


class Nothing(TypedDict):
    """No other arguments: what is not known is refused by name."""


@dataclass(frozen=True)
class Model:
    """A target, the draft beside it if there is one, and the method they answer by.

    Answers are the target's own, whatever the method. In every question ``media`` is one thing to
    look at, several, or None for text alone; what is wrong with it raises VideoInputError.
    """

    pair: Pair
    method: str | Recipe = DEFAULT_METHOD

    def describe(
        self,
        media: Several,
        question: str = QUESTION,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[Asked],
    ) -> Result:
        """The answer to a question about one or several videos, with how it came about.

        Args:
            media: what to look at.
            question: what is asked about it.
            documents: long texts beside it, of which a draft may see a part.
            frames: which frames to take, such as ``{"fps": 2}``; by default 2 a second.
            exact: bit for bit plain decoding's answer in bf16 and fp16 too.
            seed: names the noise of sampling.
            settings: ``GenerationConfig``'s names: max_new_tokens (else the model's own, or 256),
                do_sample, temperature, ...

        Raises:
            VideoInputError, OptionError, ModelError: in one sentence.
        """
        how: dict[str, Any] = {"documents": documents, "frames": frames}
        how |= {"exact": exact, "seed": seed}
        return self.stream(media, question, **how, **settings).finish()[0]

    def stream(
        self,
        media: Several,
        question: str = QUESTION,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[Asked],
    ) -> Stream:
        """The rounds of an answer as they come, each with the ``text`` it adds; arguments as
        :meth:`describe`. The whole is in ``results`` afterwards."""
        clips = self._clips(media, frames)
        asked = self.pair.ask(question, **_seen(clips), documents=documents)
        how = {"captioner": self._captioner(clips), "exact": exact, "seed": seed}
        return answered(self.pair, asked, self.method, **how, **settings)

    def batch(
        self,
        questions: Sequence[tuple[Several, str]],
        *,
        frames: Frames | None = None,
        seed: int | None = None,
        **settings: Unpack[Asked],
    ) -> list[Result]:
        """The answers to several questions, each with its media, worked on together.

        Raises OptionError where they cannot stand in one batch: videos beside pictures.
        """
        try:
            pairs = [(media, question) for media, question in questions]
        except (TypeError, ValueError) as error:
            raise OptionError(
                'questions are pairs of media and words: [("clip.mp4", "What happens?")]'
            ) from error
        if not pairs:
            return []
        asked = [
            self.pair.ask(question, **_seen(self._clips(media, frames)))
            for media, question in pairs
        ]
        together = self.pair.batch(asked)
        return answered(self.pair, together, self.method, seed=seed, **settings).finish()

    def chat(
        self,
        media: Several,
        *,
        documents: Sequence[str] = (),
        frames: Frames | None = None,
        exact: bool = False,
        seed: int | None = None,
        **settings: Unpack[Asked],
    ) -> Chat:
        """A conversation about the same media, for a ``with``: caches stay from turn to turn, and
        only what is new is read. Arguments as :meth:`describe`."""
        clips = self._clips(media, frames)
        talk = Conversation(
            self.pair.target.backbone,
            draft=self.pair.draft_backbone,
            method=self.method,
            tokenizer=self.pair.target.tokenizer,
            captioner=self._captioner(clips),
            exact=exact,
            seed=seed,
            **settings,
        )
        return Chat(self.pair, talk, {**_seen(clips), "documents": documents})

    def _clips(self, several: Several, frames: Frames | None) -> list[Clip]:
        """Every video, decoded; what is worth knowing about one is a warning."""
        sampling = _sampling({} if frames is None else frames)
        clips = [
            each if isinstance(each, Clip) else media.read(each, sampling)
            for each in _many(several)
        ]
        clips = [knowing.remarked(clip, self.pair.target.name) for clip in clips]
        for warning in dict.fromkeys(said for clip in clips for said in clip.warnings):
            warnings.warn(warning, stacklevel=4)
        return clips

    def _captioner(self, clips: Sequence[Clip]) -> Any:
        """Who puts frames into words, for views that read a caption: the embedded pair alone."""
        frames = [list(clip.frames) for clip in clips]
        return captions.lazy_captioner(None, self.pair.target.name, frames) if frames else None


class Chat(AbstractContextManager["Chat"]):
    """A conversation about the same media. Close it, or use it in a ``with``, to free the caches.

    ``history`` is every earlier question with its answer.
    """

    def __init__(self, pair: Pair, talk: Conversation, seen: dict[str, Any]) -> None:
        self.history: list[tuple[str, str]] = []
        self._pair, self._talk, self._seen = pair, talk, seen

    def ask(self, question: str, **settings: Unpack[Asked]) -> Result:
        """The next answer; settings hold for this one."""
        inputs, own = self._pair.ask(question, **self._seen, history=self.history)
        result = self._talk.run(inputs, draft_inputs=own, **settings)
        self.history.append((question, result.text or ""))
        return result

    def close(self) -> None:
        self._talk.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def load(
    target: str = ALONE,
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
    **others: Unpack[Nothing],
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
        ModelError, OptionError, MethodError: in one sentence, before any weight is read where that
        can be known.
    """
    for name in others:
        raise OptionError(f"saccade.load does not take {name}{ours(name, load.__annotations__)}")
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


def _many(several: Several) -> Sequence[Media]:
    """Bytes are one video, though Python counts them as a sequence."""
    if isinstance(several, list | tuple):
        if not several:
            raise OptionError("no media: give a video, or None for text alone")
        return several
    return () if several is None else [cast(Media, several)]


def _sampling(frames: Any) -> FrameSampling:
    """Frames as asked for. Raises OptionError for names that nobody knows."""
    if not isinstance(frames, Mapping):
        raise OptionError(f'frames= are by name, such as {{"fps": 2}}, not {frames!r}')
    known = Frames.__annotations__
    for name in frames:
        if name not in known:
            told = suggest(str(name), known)
            raise OptionError(f"frames= knows no {name!r}{told}; known: {', '.join(known)}")
    return FrameSampling(**frames)


def _seen(clips: Sequence[Clip]) -> dict[str, Any]:
    """Clips as questions take them: single pictures are images."""
    seen = [clip_arguments(clip) for clip in clips]
    return {
        kind: [each for one in seen for each in one.get(kind, ())] for kind in ("clips", "images")
    }


def answered(
    pair: Pair, asked: tuple[Inputs, Inputs | None], method: str | Recipe, /, **settings: Any
) -> Stream:
    """The answer of both models to what :meth:`Pair.ask` made of a question; ``settings`` as
    :func:`saccade.stream`'s."""
    inputs, own = asked
    if said := sorted({"draft", "method"} & settings.keys()):
        raise OptionError(f"{said[0]}= belongs where the models are loaded: saccade.load")
    return stream(
        pair.target.backbone,
        inputs,
        draft=pair.draft_backbone,
        draft_inputs=own,
        method=method,
        tokenizer=pair.target.tokenizer,
        **settings,
    )
