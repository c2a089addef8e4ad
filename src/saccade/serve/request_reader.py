"""Turns a request of the HTTP API into requests that the engine can run.

It refuses what this server does not allow, loads and decodes media, makes the model's inputs, and
sets the options of each answer: seed, limits, grammar, and the tokens that end it.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
import sys
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from saccade.core import generation_settings
from saccade.core.prompt import Inputs
from saccade.core.sampling import Grammar
from saccade.engine.request import Request, without_end
from saccade.inputs import Loaded, captions, literal_text
from saccade.inputs.media import Clip, FrameSampling
from saccade.inputs.media.decoder_pool import DecoderPool, StopSignal
from saccade.inputs.media.fetch import FetchedMedia
from saccade.inputs.questions import cast_pixels, conversation_inputs, same_inputs
from saccade.model.prefix_cache import PrefixCache, cache_preprocessing, digest
from saccade.serve.api_errors import ApiError
from saccade.serve.formats import grammar, tool_calls
from saccade.serve.formats.chat_forms import ChatForm, ResponseForm, TextForm
from saccade.serve.formats.reasoning import PROMPT_END_TOKENS, Reasoning, find_marks
from saccade.serve.formats.strict_json import parse_object
from saccade.serve.request_schema import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    DocumentPart,
    ImagePart,
    JsonObject,
    JsonSchema,
    Message,
    Part,
    PixelLimits,
    TextPart,
    TextRequest,
    Tool,
    VideoPart,
    content_parts,
    tool_calls_of,
)
from saccade.serve.server_settings import ServerSettings

log = logging.getLogger(__name__)

MAX_CHARACTERS_PER_TOKEN = 16  # On average. A text with more is refused before it is tokenized.
MODEL_NAME = "this model"  # Errors do not show a checkpoint's name, which may be a path.
TEMPLATE_ROLES = {"developer": "system"}  # Templates know a developer's role by its older name.
# The long ``data:`` URLs that were cut out of a request's body before it was parsed, by the short
# name that stands in the request in the place of each; see `request_bodies`.
DataUrls = dict[str, memoryview]
# No client may set these variables of templates, nor those that are parameters of
# `apply_chat_template`.
RESERVED_VARIABLES = ("messages", "conversations", "bos_token", "eos_token")
SCALING = Image.Resampling.BICUBIC  # How frames are resized to ``min_pixels`` or ``max_pixels``.
LOW_DETAIL_SIZE = (512, 512)  # In pixels. A picture of detail "low" is shrunk to fit into it.


def scaled_size(height: int, width: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Returns the (height, width) of a picture that is scaled until its pixels are within bounds.

    Its shape stays about the same. It never has more than ``max_pixels``. It has at least
    ``min_pixels`` unless rounding to whole sides takes it below, which may happen where the two
    bounds are close together or the picture is very narrow.
    """
    pixels = height * width
    scale = math.sqrt(min(max(pixels, min_pixels), max_pixels) / pixels)
    if scale == 1:
        return height, width
    # Sides are rounded down where the picture was too large, and up where it was too small.
    to_whole = math.floor if scale < 1 else math.ceil
    height, width = (max(1, to_whole(side * scale)) for side in (height, width))
    if height * width > max_pixels:
        # A side of one pixel cannot get shorter, so the other one must. And where the picture was
        # enlarged to about ``max_pixels``, rounding up may have gone beyond it.
        height = min(height, max(1, int(max_pixels // width)))
        width = min(width, max(1, int(max_pixels // height)))
    return height, width


@dataclass(frozen=True)
class ReadRequest:
    """A request as the engine runs it: one engine request for each answer, and the form in which
    the answers are written."""

    answers: list[Request]
    form: ResponseForm
    warnings: list[str]  # About the media.


class RequestReader:
    """Reads requests: media, text and options. Any thread may call it."""

    def __init__(
        self,
        target: Loaded,
        draft: Loaded | None,
        settings: ServerSettings,
        decoders: DecoderPool,
        prefix_cache: PrefixCache,
    ) -> None:
        self._target, self._media = target, settings.media
        self._decoders, self._prefix_cache = decoders, prefix_cache
        # The draft if its processor makes other inputs than the target's, else None.
        self._draft = None if draft is None or same_inputs(target, draft) else draft
        self._captioner, self._target_name = settings.captioner, settings.target
        self._max_answer_tokens = settings.max_answer_tokens
        self._max_positions = target.backbone.max_positions or sys.maxsize
        eos_ids = generation_settings.end_ids(target.backbone.model.generation_config)
        self._config_end_ids = eos_ids
        self._vocabulary = grammar.GrammarVocabulary(
            target.tokenizer, target.backbone.vocab, eos_ids
        )
        template = getattr(target.processor, "chat_template", None) or ""
        # How the model writes a call of a tool; None if its template has no way that is known here.
        self._dialect = tool_calls.find_dialect(template)
        # The texts around the model's reasoning, such as <think> and </think>; None if it has none.
        self._marks = find_marks(target.tokenizer, template)
        marks = self._marks
        # A decoder that writes the marks although they are special tokens. It is None where no mark
        # is a special token, because then any decoder writes the marks.
        self._decode_reasoning = None if marks is None else marks.decoder(target.tokenizer)
        self._logged: set[str] = set()  # The messages about ignored fields, each logged once.
        # A tokenizer changes its own settings while it works, so threads use it one at a time.
        self._processor_lock = threading.Lock()

    def check(self, request: CompletionRequest) -> None:
        """Checks, before any work, that this server allows the request. Raises ApiError."""
        max_tokens = self._max_answer_tokens
        if request.token_limit is not None and request.token_limit > max_tokens:
            # The error names the field by which the client has set the limit.
            newer_field = "max_completion_tokens"
            field = newer_field if vars(request).get(newer_field) is not None else "max_tokens"
            raise ApiError(400, f"{field}: this server writes at most {max_tokens} tokens", field)
        characters = sum(map(len, request.texts))
        if characters > MAX_CHARACTERS_PER_TOKEN * self._max_positions:
            message = f"{characters} characters are more than this model reads: send less text"
            raise ApiError(400, message, _prompt_field(request))
        if (request.min_tokens or 0) > max_tokens:
            message = f"min_tokens: this server writes at most {max_tokens} tokens"
            raise ApiError(400, message, "min_tokens")
        vocab = self._target.backbone.vocab
        if any(token >= vocab for token in request.stop_token_ids or ()):
            message = f"stop_token_ids: this model has {vocab} ids"
            raise ApiError(400, message, "stop_token_ids")
        if isinstance(request, ChatRequest):
            self._check_chat(request)
        has_grammar = self._has_grammar(request)
        for field in ("min_tokens", "ignore_eos"):
            if has_grammar and getattr(request, field):
                reason = "an answer that must follow a format ends where the format does"
                raise ApiError(400, f"{field}: {reason}: leave one of them out", field)

    def log_ignored(self, fields: Iterable[str]) -> None:
        """Logs, once for each field, that it changes nothing."""
        for field in sorted(fields):
            self._log_once(f"{field} changes nothing here and is ignored")

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.warning("%s.", message)

    def _check_chat(self, request: ChatRequest) -> None:
        max_items = self._media.max_items
        if len(request.media_urls) > max_items:
            message = f"messages: at most {max_items} images and videos together"
            raise ApiError(400, message, "messages")
        if not self._media.clients_may_choose_frames:
            for field in ("media_io_kwargs", "mm_processor_kwargs"):
                if request.frame_options_of(field):
                    message = f"{field} is not allowed here: the server chooses the frames"
                    option = "--allow-media-options lets requests choose them"
                    raise ApiError(400, f"{message} ({option})", field)
        self._sampling(request)  # This raises for options of frames that contradict each other.
        self._check_template_kwargs(request)
        calls = [call.function for turn in request.messages for call in tool_calls_of(turn)]
        if (request.callable_tools or calls) and self._dialect is None:
            reason = "this model's chat template carries no tools in a way that is known here"
            raise ApiError(400, f"tools: {reason}", "tools")
        texts = [tool.model_dump_json() for tool in request.callable_tools]
        texts += [call.name for call in calls]
        token = literal_text.find_control_token(self._target.processor, texts)
        if token is not None:
            message = f"tools: {token} is a control token of this model, so leave it out"
            raise ApiError(400, message, "tools")
        if request.required_tools and _format_source(request) is not None:
            reason = "a call that is required has a format of its own: leave the other one out"
            raise ApiError(400, f"tool_choice: {reason}", "tool_choice")

    def _check_template_kwargs(self, request: ChatRequest) -> None:
        """Raises ApiError for template variables that only the server or other fields may set, and
        for control tokens in their values."""
        variables = request.chat_template_kwargs or {}
        field = "chat_template_kwargs"
        parameters = inspect.signature(self._target.processor.apply_chat_template).parameters
        for name in variables:
            if name in {*parameters, *RESERVED_VARIABLES}:
                message = f"{field} cannot set {name[:40]}: it is a field of its own, or the server"
                raise ApiError(400, f"{message} sets it", field)
        token = literal_text.find_control_token(
            self._target.processor, [json.dumps(variables, ensure_ascii=False)]
        )
        if token is not None:
            message = f"{field}: {token} is a control token of this model, so leave it out"
            raise ApiError(400, message, field)

    def _template_variables(self, request: ChatRequest, template: str) -> dict[str, Any]:
        """Returns the request's template variables, without those that this template never reads.

        ``reasoning_effort`` becomes a variable where the template reads it. Otherwise an effort of
        "none" sets ``enable_thinking`` to False, where the template reads that. If the request has
        this variable in ``chat_template_kwargs``, that value stays.
        """
        variables = dict(request.chat_template_kwargs or {})
        effort = request.reasoning_effort
        if effort is not None:
            if _reads(template, "reasoning_effort"):
                variables.setdefault("reasoning_effort", effort)
            elif effort == "none" and _reads(template, "enable_thinking"):
                variables.setdefault("enable_thinking", False)
            else:
                self._log_once("reasoning_effort is not read by this model's template")
        unread = [name for name in variables if not _reads(template, name)]
        for name in unread:
            del variables[name]
        if unread:
            self._log_once("chat_template_kwargs has names that the template does not read")
        return variables

    def read(
        self, request: CompletionRequest, stop: StopSignal, data_urls: DataUrls
    ) -> ReadRequest:
        """Returns an engine request for each answer, their form, and warnings about the media.

        The answers differ in their seeds. Media are removed from ``data_urls`` as they are
        read, which frees their memory. Another thread may stop this reading by ``stop``. Raises
        SaccadeError.
        """
        if isinstance(request, ChatRequest):
            return self._read_chat(request, stop, data_urls)
        assert isinstance(request, TextRequest)
        with self._processor_lock:
            inputs = self._target.tokenizer(request.prompt, return_tensors="pt")
        answers = self._engine_requests(
            request, inputs, draft_inputs=None, captioner=None, reasoning=None
        )
        return ReadRequest(answers, TextForm(), [])

    def _read_chat(
        self, request: ChatRequest, stop: StopSignal, data_urls: DataUrls
    ) -> ReadRequest:
        # The media are loaded and decoded, in the order of the messages.
        sampling = self._sampling(request)
        clips: list[Clip] = []
        images: list[np.ndarray] = []
        media: list[Sequence[np.ndarray]] = []  # The frames of each, for a captioner.
        for part in (part for turn in request.messages for part in content_parts(turn)):
            stop.check()
            if isinstance(part, ImagePart):
                image = self._image(self._load_media(part.image_url.url, data_urls), stop)
                if part.image_url.detail == "low":
                    image = _shrink(image)
                (image,) = self._scale(image[None], part.pixel_limits, request)
                images.append(image)
                media.append(images[-1:])
            elif isinstance(part, VideoPart):
                video = self._load_media(part.video_url.url, data_urls)
                clip = self._clip(video, sampling, stop)
                frames = self._scale(clip.frames, part.pixel_limits, request)
                clips.append(replace(clip, frames=frames))
                media.append(list(clips[-1].frames))
        # The messages and the media become the inputs of the target, and of the draft if its
        # processor makes others.
        draft_inputs = None
        with self._processor_lock:
            inputs = self._inputs(self._target, request, clips, images)
            if self._draft is not None:
                draft_inputs = self._inputs(self._draft, request, clips, images)
        device = str(self._target.backbone.device)
        captioner = captions.lazy_captioner(self._captioner, self._target_name, media, device)
        reasoning = self._reasoning(request, inputs)
        answers = self._engine_requests(request, inputs, draft_inputs, captioner, reasoning)
        warnings = [warning for clip in clips for warning in clip.warnings]
        all_frames = [*(image[None] for image in images), *(clip.frames for clip in clips)]
        # A checkpoint that was trained on one kind of picture alone has a warning for all others.
        domain = self._target.training_domain
        if domain is not None and not all(map(domain.includes, all_frames)):
            warnings.append(domain.warning)
        tool_names = frozenset(tool.function.name for tool in request.callable_tools)
        form = ChatForm(
            self._dialect if tool_names else None,
            tool_names,
            reasoning,
            shows_reasoning=request.include_reasoning is not False,
        )
        return ReadRequest(answers, form, warnings)

    def _reasoning(self, request: ChatRequest, inputs: Inputs) -> Reasoning | None:
        """Returns the object that finds the reasoning in the answers, by the marks around it.

        Returns None where the model has no marks for reasoning, and where a grammar allows none.
        """
        if self._marks is None:
            return None
        closes_by_token = self._marks.closing_id is not None
        if not closes_by_token and self._has_grammar(request):
            # A grammar reads ids, so without a closing token it cannot tell where reasoning ends.
            # It applies from the first token on and leaves no room for reasoning.
            return None
        # A template may end the prompt with a mark. After an opening mark the answer begins within
        # reasoning ("open"), after a closing one it has none ("closed"), and after any other text
        # it may have some ("possible").
        prompt_end = inputs["input_ids"][0, -PROMPT_END_TOKENS:].tolist()
        text = self._target.tokenizer.decode(prompt_end, skip_special_tokens=False)
        start = self._marks.start_after(text)
        return Reasoning(self._marks, start)

    def _scale(self, frames: np.ndarray, limits: PixelLimits, request: ChatRequest) -> np.ndarray:
        """Scales frames so that the number of pixels of each is within ``limits``, which are those
        of one part of a message. A limit that the part lacks is taken from the request."""
        common = request.mm_processor_kwargs or PixelLimits()
        min_pixels = limits.min_pixels or common.min_pixels or 0
        max_pixels = limits.max_pixels or common.max_pixels or math.inf
        old_height, old_width = frames.shape[1:3]
        height, width = scaled_size(old_height, old_width, min_pixels, max_pixels)
        if (height, width) == (old_height, old_width):
            return frames
        max_bytes = self._media.limits.max_memory
        needed_bytes = len(frames) * height * width * 3  # A pixel has 3 bytes.
        if height * width > old_height * old_width and max_bytes and needed_bytes > max_bytes:
            message = "min_pixels: so many frames of that size do not fit: ask for smaller ones"
            raise ApiError(400, message, "min_pixels")
        resized = [Image.fromarray(frame).resize((width, height), SCALING) for frame in frames]
        return np.stack([np.asarray(frame) for frame in resized])

    def _inputs(
        self,
        loaded: Loaded,
        request: ChatRequest,
        clips: Sequence[Clip],
        images: Sequence[np.ndarray],
    ) -> Inputs:
        turns = [_template_turn(turn) for turn in request.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in request.callable_tools]
        template = str(getattr(loaded.processor, "chat_template", None) or "")
        with cache_preprocessing(loaded.processor, self._prefix_cache):
            inputs = conversation_inputs(
                MODEL_NAME,
                loaded.processor,
                turns,
                clips,
                images,
                tools=tools,
                continues_last_turn=request.continues_last_message,
                opens_answer=request.add_generation_prompt is not False,
                variables=self._template_variables(request, template),
            )
            return cast_pixels(inputs, loaded.backbone.dtype)

    def _engine_requests(
        self,
        request: CompletionRequest,
        inputs: Inputs,
        draft_inputs: Inputs | None,
        captioner: Any,
        reasoning: Reasoning | None,
    ) -> list[Request]:
        """Returns an engine request for each answer. Raises ApiError for a prompt too long."""
        # The prompt and the answer must fit into the model's positions.
        prompt_tokens = int(inputs["input_ids"].shape[1])
        room = self._max_positions - prompt_tokens
        if room < (request.token_limit or 1):
            answer = f" and {request.token_limit} of answer" if request.token_limit else ""
            field = _prompt_field(request)
            advice = "send fewer frames or less text" if field == "messages" else "send less text"
            raise ApiError(
                400,
                f"{prompt_tokens} tokens of prompt{answer} are more than the {self._max_positions} "
                f"this model reads: {advice}",
                field,
            )
        # The answers differ in their seeds.
        source = self._grammar_source(request)
        answers = [
            Request.of(
                self._target.backbone,
                inputs,
                draft_inputs=draft_inputs,
                tokenizer=self._target.tokenizer,
                seed=None if request.seed is None else (request.seed + choice) % 2**63,
                captioner=captioner,
                max_new_tokens=request.token_limit or min(room, self._max_answer_tokens),
                stop_strings=request.stops or None,
                grammar=None if source is None else self._compile_grammar(*source, reasoning),
                eos_token_id=self._end_ids(request, has_grammar=source is not None),
                skip_special_tokens=request.skip_special_tokens is not False,
                **request.sampling_options,
            )
            for choice in range(request.n or 1)
        ]
        # How the answers' tokens become text depends on which special tokens are shown.
        if request.skip_special_tokens is False:
            # The engine's decoder then writes special tokens, marks of reasoning among them, and
            # leaves out the token that ends the answer.
            return answers
        decode = self._decode_reasoning if reasoning is not None else None
        if decode is not None:
            answers = [replace(each, decode=decode) for each in answers]
        if request.stop_token_ids:
            # A stop token is never shown, even if it is an ordinary token.
            ends = request.stop_token_ids
            answers = [replace(each, decode=without_end(each.decode, ends)) for each in answers]
        return answers

    def _compile_grammar(self, source: str, field: str, reasoning: Reasoning | None) -> Grammar:
        """Returns the grammar of this source, for one answer.

        With ``reasoning`` it is applied after the reasoning, if the answer may have any. An error
        names ``field``, the request's field that asks for the grammar.
        """
        compiled = self._vocabulary.grammar(source, field)
        if reasoning is None:
            return compiled
        end_ids = sorted(self._vocabulary.eos_ids)
        return reasoning.grammar(compiled, end_ids, self._target.backbone.vocab)

    def _end_ids(self, request: CompletionRequest, *, has_grammar: bool) -> list[int] | None:
        """Returns the tokens that end an answer; None leaves them to the model's config."""
        end_ids = set(self._config_end_ids)
        if request.ignore_eos:
            end_ids = set()
        elif has_grammar:
            # The token that ends a format ends the answer. Where the config names no end tokens,
            # the vocabulary of grammars has the tokenizer's instead.
            end_ids = set(self._vocabulary.eos_ids)
        elif not request.stop_token_ids:
            return None
        return sorted({*end_ids, *(request.stop_token_ids or ())})

    def _has_grammar(self, request: CompletionRequest) -> bool:
        """Returns whether an answer must follow a grammar. The grammar is not compiled for this,
        because compiling may take long."""
        return _format_source(request) is not None or bool(self._required_tools(request))

    def _grammar_source(self, request: CompletionRequest) -> tuple[str, str] | None:
        """Returns the source of the grammar that an answer must follow, and the field that asks for
        it; None where no field does."""
        format_source = _format_source(request)
        if format_source is not None:
            return format_source
        required = self._required_tools(request)
        if self._dialect is None or not required:
            return None
        functions = [tool.function.model_dump(exclude_none=True) for tool in required]
        return tool_calls.call_grammar(self._dialect, functions, self._vocabulary), "tools"

    def _required_tools(self, request: CompletionRequest) -> Sequence[Tool]:
        """Returns the tools of which one must be called."""
        if not isinstance(request, ChatRequest) or self._dialect is None:
            return ()
        return request.required_tools

    def _sampling(self, request: ChatRequest) -> FrameSampling:
        """Returns how frames are chosen: as the request says, else by the server's settings."""
        options = {
            **request.frame_options_of("media_io_kwargs"),
            **request.frame_options_of("mm_processor_kwargs"),
        }
        return FrameSampling(**options) if options else self._media.sampling

    def _load_media(self, url: str, data_urls: DataUrls) -> FetchedMedia:
        sources = self._media.sources
        data_url = data_urls.pop(url, None)
        return sources.load(url) if data_url is None else sources.decode_data_url(data_url)

    def _image(self, media: FetchedMedia, stop: StopSignal) -> np.ndarray:
        if media.kind == "frames":
            raise ApiError(400, "an image_url holds a list of frames: use video_url", "messages")
        source = media.data if media.path is None else media.path
        return self._prefix_cache.get_or_compute(
            ("image", _content_key(media)),
            lambda: self._decoders.read_image(source, self._media.limits, stop),
            lambda image: image.nbytes,
        )

    def _clip(self, media: FetchedMedia, sampling: FrameSampling, stop: StopSignal) -> Clip:
        limits = self._media.limits
        if media.kind == "frames":
            # Only a request's own num_frames is an error: the server's is meant for videos.
            is_chosen_by_request = sampling != self._media.sampling
            if sampling.num_frames is not None and is_chosen_by_request:
                message = "num_frames: a list of frames is taken whole, so leave it out"
                raise ApiError(400, message, "num_frames")
        source = media.data if media.path is None else media.path

        def decode() -> Clip:
            if media.kind == "frames":
                return self._decoders.read_frames(media.frames, sampling.fps, limits, stop)
            return self._decoders.read(source, sampling, limits, stop)

        key = ("clip", _content_key(media), sampling)
        return self._prefix_cache.get_or_compute(key, decode, lambda clip: clip.frames.nbytes)


def _prompt_field(request: CompletionRequest) -> str:
    """Returns the name of the field that has a request's prompt."""
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _format_source(request: CompletionRequest) -> tuple[str, str] | None:
    """Returns the source of the grammar of the format that a request asks for, and the field that
    asks for it; None where no field does.

    Required calls of tools are not looked at. Raises ApiError where two fields ask for a format.
    """
    outputs = request.structured_outputs
    response_format = vars(request).get("response_format")
    regexes = {"guided_regex": request.guided_regex}
    schemas = {"guided_json": request.guided_json}
    if outputs is not None:
        regexes["structured_outputs.regex"] = outputs.regex
        schemas["structured_outputs.json"] = outputs.json_form
    if isinstance(response_format, JsonObject):
        schemas["response_format"] = {"type": "object"}
    if isinstance(response_format, JsonSchema):
        schemas["response_format"] = response_format.json_schema.json_form
    sources = [
        (grammar.regex_grammar(regex), field)
        for field, regex in regexes.items()
        if regex is not None
    ]
    sources += [
        (grammar.json_schema_grammar(schema), field)
        for field, schema in schemas.items()
        if schema is not None
    ]
    if len(sources) > 1:
        first_field = sources[0][1]
        second_field = sources[1][1]
        message = f"{first_field} and {second_field} ask for two forms: leave one of them out"
        raise ApiError(400, message, second_field)
    return sources[0] if sources else None


def _content_key(media: FetchedMedia) -> Hashable:
    """Returns the cache's key for media: a digest of their bytes, or a file's path and state."""
    if media.path is None:
        return digest(media.kind, media.data, media.frames)
    try:
        state = media.path.stat()
    except OSError as error:
        raise ApiError(400, "the file cannot be read: send another", "messages") from error
    return media.path, state.st_mtime_ns, state.st_size, state.st_ino


def _reads(template: str, name: str) -> bool:
    """Returns whether the name occurs as a word in a chat template, so that it may be a variable
    that the template reads."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _shrink(image: np.ndarray) -> np.ndarray:
    """Returns the image, made smaller where it does not fit into ``LOW_DETAIL_SIZE``."""
    small = Image.fromarray(image)
    small.thumbnail(LOW_DETAIL_SIZE)
    return np.array(small)


def _template_turn(turn: Message) -> dict[str, Any]:
    """Returns a message in the form that chat templates take."""
    content = [_template_part(part) for part in content_parts(turn)]
    role = TEMPLATE_ROLES.get(turn.role, turn.role)
    template_turn: dict[str, Any] = {"role": role, "content": content}
    calls = [call.function for call in tool_calls_of(turn)]
    if calls:
        template_turn["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": parse_object(call.arguments)},
            }
            for call in calls
        ]
    if isinstance(turn, AssistantMessage) and turn.reasoning_text:
        template_turn[literal_text.REASONING] = turn.reasoning_text
    return template_turn


def _template_part(part: Part) -> dict[str, str]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case DocumentPart():
            return literal_text.document_part(part.text)
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}
