"""From messages to a model's inputs: media loaded, decoded in a guarded process, and worded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image

from saccade.core import options
from saccade.core.prompt import Inputs
from saccade.engine.request import Request
from saccade.inputs import Loaded, captions, literal
from saccade.inputs.checkpoints import embedded
from saccade.inputs.media import Clip, FrameSampling
from saccade.inputs.media.fetch import Fetched
from saccade.inputs.media.guard import Guard, Stop
from saccade.inputs.questions import converse, same_inputs
from saccade.model.kept import Kept, digest, prepared
from saccade.serve.errors import ApiError
from saccade.serve.formats import grammar, tools
from saccade.serve.formats.replies import ChatForm, Form, TextForm
from saccade.serve.formats.strict_json import parse_object
from saccade.serve.settings import Settings
from saccade.serve.wire import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    DocumentPart,
    ImagePart,
    JsonObject,
    JsonSchema,
    Message,
    Part,
    TextPart,
    TextRequest,
    VideoPart,
    called,
    parts,
)
from saccade.world import drawn_world

CHARACTERS = 16  # a token holds on average at most; more text is not even tokenized
MODEL = "this model"  # a checkpoint's name may be a path of this machine
ROLES = {"developer": "system"}  # the newer name of the same
Apart = dict[str, memoryview]  # a body's long data: addresses, see `bodies`
LOW = (512, 512)  # pixels a picture of low detail fits in


class RequestReader:
    """Loads, decodes and words requests; any thread may call."""

    def __init__(
        self,
        target: Loaded,
        draft: Loaded | None,
        settings: Settings,
        guard: Guard,
        kept: Kept,
    ) -> None:
        self._target, self._media, self._guard, self._kept = target, settings.media, guard, kept
        # whose inputs are not the target's
        self._own = None if draft is None or same_inputs(target, draft) else draft
        self._captioner, self._name = settings.captioner, settings.target
        self._most_tokens = settings.most_tokens
        self._context = target.backbone.context or sys.maxsize
        ends = options.ends(target.backbone.model.generation_config)
        self._vocabulary = grammar.Vocabulary(target.tokenizer, target.backbone.vocab, ends)
        self._dialect = tools.dialect(getattr(target.processor, "chat_template", None) or "")
        # a tokenizer's settings are switched while it works
        self._processor = threading.Lock()

    def form(self, asked: CompletionRequest) -> Form:
        """How answers to this are written."""
        if not isinstance(asked, ChatRequest):
            return TextForm()
        names = frozenset(tool.function.name for tool in asked.usable)
        return ChatForm(self._dialect if names else None, names)

    def check(self, asked: CompletionRequest) -> None:
        """Refuses, before any work, what this server does not allow. Raises ApiError."""
        if asked.limit is not None and asked.limit > self._most_tokens:
            newer = "max_completion_tokens"
            name = newer if vars(asked).get(newer) is not None else "max_tokens"
            most = self._most_tokens
            raise ApiError(400, f"{name}: this server writes at most {most} tokens", name)
        characters = sum(map(len, asked.texts))
        if characters > CHARACTERS * self._context:
            said = f"{characters} characters are more than this model reads: send less text"
            raise ApiError(400, said, "messages" if isinstance(asked, ChatRequest) else "prompt")
        if isinstance(asked, ChatRequest):
            self._check_chat(asked)

    def _check_chat(self, asked: ChatRequest) -> None:
        if len(asked.addresses) > self._media.most:
            most = self._media.most
            raise ApiError(400, f"messages: at most {most} images and videos together", "messages")
        if not self._media.options:
            for name in ("media_io_kwargs", "mm_processor_kwargs"):
                if getattr(asked, name) is not None:
                    raise ApiError(
                        400, f"{name} is not allowed here: the server chooses the frames", name
                    )
        self._sampling(asked)
        calls = [call.function for turn in asked.messages for call in called(turn)]
        if (asked.usable or calls) and self._dialect is None:
            said = "this model's chat template carries no tools in a way that is known here"
            raise ApiError(400, f"tools: {said}", "tools")
        told = [tool.model_dump_json() for tool in asked.usable]
        told += [call.name for call in calls]
        spelt = literal.special_in(self._target.processor, told)
        if spelt is not None:
            raise ApiError(400, f"tools: {spelt} means something else to this model", "tools")
        if asked.due and _grammar(asked) is not None:
            said = "a call that is due has a form of its own: leave the other one out"
            raise ApiError(400, f"tool_choice: {said}", "tool_choice")

    def read(
        self, asked: CompletionRequest, stop: Stop, apart: Apart
    ) -> tuple[list[Request], list[str]]:
        """What the engine takes, for each answer asked for, and what is to be said of the media.

        The answers differ in the noise they draw. Media that stand ``apart`` are taken out there as
        they are read. Another thread may stop the decoding. Raises SaccadeError.
        """
        if isinstance(asked, ChatRequest):
            return self._chat(asked, stop, apart)
        assert isinstance(asked, TextRequest)
        with self._processor:
            inputs = self._target.tokenizer(asked.prompt, return_tensors="pt")
        return self._settled(asked, inputs, None, None), []

    def _chat(
        self, asked: ChatRequest, stop: Stop, apart: Apart
    ) -> tuple[list[Request], list[str]]:
        sampling = self._sampling(asked)
        clips: list[Clip] = []
        images: list[np.ndarray] = []
        media: list[Sequence[np.ndarray]] = []
        for part in (part for turn in asked.messages for part in parts(turn)):
            stop.check()
            if isinstance(part, ImagePart):
                picture = self._image(self._loaded(part.image_url.url, apart), stop)
                images.append(_lowered(picture) if part.image_url.detail == "low" else picture)
                media.append(images[-1:])
            elif isinstance(part, VideoPart):
                found = self._loaded(part.video_url.url, apart)
                clips.append(self._clip(found, sampling, stop))
                media.append(list(clips[-1].frames))
        own = self._own
        with self._processor:
            inputs = self._inputs(self._target, asked, clips, images)
            draft_inputs = None if own is None else self._inputs(own, asked, clips, images)
        device = str(self._target.backbone.device)
        captioner = captions.chosen(self._captioner, self._name, media, device)
        answers = self._settled(asked, inputs, draft_inputs, captioner)
        warnings = [warning for clip in clips for warning in clip.warnings]
        shown = [*(image[None] for image in images), *(clip.frames for clip in clips)]
        if embedded(self._name) and not all(map(drawn_world.is_drawn_world, shown)):
            warnings.append(drawn_world.FOREIGN_CLIP_WARNING)
        return answers, warnings

    def _inputs(
        self,
        loaded: Loaded,
        asked: ChatRequest,
        clips: Sequence[Clip],
        images: Sequence[np.ndarray],
    ) -> Inputs:
        turns = [_turn(turn) for turn in asked.messages]
        told = [tool.model_dump(exclude_none=True) for tool in asked.usable]
        continued = asked.messages[-1].role == "assistant"
        try:
            with prepared(loaded.processor, self._kept):
                return converse(
                    MODEL, loaded.processor, turns, clips, images, tools=told, continued=continued
                )
        except TemplateError as error:
            said = " ".join(str(error).split())[:200]
            raise ApiError(400, f"the model's template refuses this: {said}", "messages") from None

    def _settled(
        self, asked: CompletionRequest, inputs: Inputs, draft_inputs: Inputs | None, captioner: Any
    ) -> list[Request]:
        prompt = int(inputs["input_ids"].shape[1])
        room = self._context - prompt
        if room < (asked.limit or 1):
            wanted = f" and {asked.limit} of answer" if asked.limit else ""
            raise ApiError(
                400,
                f"{prompt} tokens of prompt{wanted} are more than the {self._context} this model "
                "reads: send fewer frames or less text",
                "messages",
            )
        source = _grammar(asked) or self._due(asked)
        # what ends a form ends the answer, also where the checkpoint's config names no end
        ends = None if source is None else sorted(self._vocabulary.ends)
        return [
            Request.of(
                self._target.backbone,
                inputs,
                draft_inputs=draft_inputs,
                tokenizer=self._target.tokenizer,
                seed=None if asked.seed is None else (asked.seed + choice) % 2**63,
                captioner=captioner,
                max_new_tokens=asked.limit or min(room, self._most_tokens),
                stop_strings=asked.stops or None,
                grammar=None if source is None else self._vocabulary.grammar(*source),
                eos_token_id=ends,
                **asked.sampled,
            )
            for choice in range(asked.n or 1)
        ]

    def _due(self, asked: CompletionRequest) -> tuple[str, str] | None:
        """The grammar of a call that must be made."""
        if not isinstance(asked, ChatRequest) or not asked.due or self._dialect is None:
            return None
        functions = [tool.function.model_dump(exclude_none=True) for tool in asked.due]
        return tools.grammar(self._dialect, functions), "tools"

    def _sampling(self, asked: ChatRequest) -> FrameSampling:
        video = None if asked.media_io_kwargs is None else asked.media_io_kwargs.video
        given: dict[str, Any] = {}
        for chosen in (video, asked.mm_processor_kwargs):
            given |= {} if chosen is None else chosen.model_dump(exclude_none=True)
        return FrameSampling(**given) if given else self._media.sampling

    def _loaded(self, url: str, apart: Apart) -> Fetched:
        sources, cut = self._media.sources, apart.pop(url, None)
        return sources.load(url) if cut is None else sources.written(cut)

    def _image(self, found: Fetched, stop: Stop) -> np.ndarray:
        if found.kind == "frames":
            raise ApiError(400, "an image_url holds a list of frames: use video_url", "messages")
        source = found.data if found.path is None else found.path
        return self._kept.made(
            ("image", _content(found)),
            lambda: self._guard.read_image(source, self._media.limits, stop),
            lambda image: image.nbytes,
        )

    def _clip(self, found: Fetched, sampling: FrameSampling, stop: Stop) -> Clip:
        limits = self._media.limits
        if found.kind == "frames":
            if sampling.num_frames is not None and sampling != self._media.sampling:
                said = "num_frames: a list of frames is taken whole, so leave it out"
                raise ApiError(400, said, "num_frames")
        source = found.data if found.path is None else found.path

        def decoded() -> Clip:
            if found.kind == "frames":
                return self._guard.read_frames(found.frames, sampling.fps, limits, stop)
            return self._guard.read(source, sampling, limits, stop)

        key = ("clip", _content(found), sampling)
        return self._kept.made(key, decoded, lambda clip: clip.frames.nbytes)


def _grammar(asked: CompletionRequest) -> tuple[str, str] | None:
    """The form an answer must have, and the field that says so. Raises ApiError for two of them."""
    outputs, wanted = asked.structured_outputs, vars(asked).get("response_format")
    regexes = {"guided_regex": asked.guided_regex}
    forms = {"guided_json": asked.guided_json}
    if outputs is not None:
        regexes["structured_outputs.regex"] = outputs.regex
        forms["structured_outputs.json"] = outputs.form
    if isinstance(wanted, JsonObject):
        forms["response_format"] = {"type": "object"}
    if isinstance(wanted, JsonSchema):
        forms["response_format"] = wanted.json_schema.form
    found = [(grammar.regex(told), name) for name, told in regexes.items() if told is not None]
    found += [(grammar.json_schema(told), name) for name, told in forms.items() if told is not None]
    if len(found) > 1:
        said = f"{found[0][1]} and {found[1][1]} ask for two forms: leave one of them out"
        raise ApiError(400, said, found[1][1])
    return found[0] if found else None


def _content(found: Fetched) -> Hashable:
    """What tells media apart: their bytes, or the state of a file."""
    if found.path is None:
        return digest(found.kind, found.data, found.frames)
    try:
        state = found.path.stat()
    except OSError as error:
        raise ApiError(400, "the file cannot be read: send another", "messages") from error
    return found.path, state.st_mtime_ns, state.st_size, state.st_ino


def _lowered(picture: np.ndarray) -> np.ndarray:
    """A picture that fits into ``LOW``."""
    small = Image.fromarray(picture)
    small.thumbnail(LOW)
    return np.array(small)


def _turn(turn: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    content = [_worded(part) for part in parts(turn)]
    found: dict[str, Any] = {"role": ROLES.get(turn.role, turn.role), "content": content}
    calls = [call.function for call in called(turn)]
    if calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": parse_object(call.arguments)},
            }
            for call in calls
        ]
    if isinstance(turn, AssistantMessage) and turn.thought:
        found[literal.REASONING] = turn.thought
    return found


def _worded(part: Part) -> dict[str, str]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case DocumentPart():
            return literal.document(part.text)
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}
