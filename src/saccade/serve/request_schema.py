"""The JSON of requests for OpenAI's chat completions and plain-text completions.

``responses_schema`` has the requests of OpenAI's Responses API, which become a ``ChatRequest``.

Unknown fields are refused. docs/http.md lists the fields that are accepted and ignored, and the
fields that are accepted only with a value that changes nothing, such as null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from saccade.serve.formats.strict_json import parse_object

MAX_STOP_STRINGS = 16  # Also the most ``stop_token_ids``.
MAX_TOP_LOGPROBS = 20
MAX_MIN_PIXELS = 1 << 22  # A client may have a small picture enlarged to so many pixels at most.
# A lower temperature is greedy, since logits divided by it leave the range of floats.
MIN_SAMPLING_TEMPERATURE = 1e-5
SEED_RANGE = 2**63  # Seeds go from -SEED_RANGE to SEED_RANGE - 1.


def _check_surrogates(text: Any) -> Any:
    """Refuses text with half of a surrogate pair, which no tokenizer accepts."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a character (a lone surrogate): send whole text") from None
    return text


Text = Annotated[str, BeforeValidator(_check_surrogates)]

IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "verbosity",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "cache_salt",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "truncation",
        "include",
    }
)
"""Fields that known clients send and that change no answer here; the log names them once."""


class Strict(BaseModel):
    """A schema that refuses unknown fields and does not convert strings to numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)


def _check_pixel_order(min_pixels: int | None, max_pixels: int | None) -> None:
    if min_pixels and max_pixels and min_pixels > max_pixels:
        raise ValueError("min_pixels is more than max_pixels")


class PixelLimits(Strict):
    """Bounds on the pixels of a picture or of each video frame. A picture outside the bounds is
    scaled to the nearer one.

    The model's processor may resize the result afterwards, as it does with every picture.
    """

    min_pixels: Annotated[int, Field(ge=1, le=MAX_MIN_PIXELS)] | None = None
    max_pixels: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> PixelLimits:
        _check_pixel_order(self.min_pixels, self.max_pixels)
        return self


class Address(PixelLimits):
    url: Annotated[Text, Field(min_length=1)]


class ImageAddress(Address):
    """The ``detail`` "low" shrinks the picture (`request_reader.LOW_DETAIL_SIZE`). Other values
    change nothing."""

    detail: Literal["auto", "low", "high"] | None = None


class VideoAddress(Address):
    detail: Literal["auto"] | None = None


def _as_address(value: Any) -> Any:
    """Wraps an address given as a bare string in the object that OpenAI documents."""
    return {"url": value} if isinstance(value, str) else value


class ClientObject(Strict):
    """A part of a conversation, which clients send back as they received it.

    Client libraries may add fields that the answer did not have, set to null or left empty. An
    unknown field is dropped if it is null or empty, and refused otherwise. ``cache_control``, a
    hint for another provider, is always dropped.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_unknown_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known_names = {field.alias or name for name, field in cls.model_fields.items()}

        def is_dropped(name: str, field: Any) -> bool:
            if name in known_names:
                return False
            return name == "cache_control" or field is None or field in ("", [], {})

        return {name: field for name, field in value.items() if not is_dropped(name, field)}


class TextPart(ClientObject):
    type: Literal["text"]
    text: Text


class DocumentPart(ClientObject):
    """A long text. The draft may read only a part of it, as it does of a video; the target always
    reads all of it."""

    type: Literal["document"]
    text: Annotated[Text, Field(pattern=r"\S")]


class MediaPart(ClientObject, PixelLimits):
    """An image or a video. ``uuid`` is the cache key that vLLM's clients may send. It is
    ignored."""

    uuid: Text | None = None

    @property
    @abstractmethod
    def address(self) -> ImageAddress | VideoAddress:
        """The address object of the image or video."""

    @property
    def pixel_limits(self) -> PixelLimits:
        """The pixel limits of this part. A limit inside the address object wins over the same limit
        of the part itself."""
        min_pixels, max_pixels = self._nearest_limits
        return PixelLimits(min_pixels=min_pixels, max_pixels=max_pixels)

    @property
    def _nearest_limits(self) -> tuple[int | None, int | None]:
        """(min_pixels, max_pixels), each from the address object, or else from the part."""
        inner = self.address
        return inner.min_pixels or self.min_pixels, inner.max_pixels or self.max_pixels

    @model_validator(mode="after")
    def _check_nearest_limits(self) -> MediaPart:
        _check_pixel_order(*self._nearest_limits)
        return self


class ImagePart(MediaPart):
    type: Literal["image_url"]
    image_url: Annotated[ImageAddress, BeforeValidator(_as_address)]

    @property
    def address(self) -> ImageAddress:
        return self.image_url


class VideoPart(MediaPart):
    type: Literal["video_url"]
    video_url: Annotated[VideoAddress, BeforeValidator(_as_address)]

    @property
    def address(self) -> VideoAddress:
        return self.video_url


Part = Annotated[TextPart | DocumentPart | ImagePart | VideoPart, Field(discriminator="type")]
TextContent = Text | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(ClientObject):
    role: Literal["system", "developer"]
    content: TextContent
    name: Text | None = None


class UserMessage(ClientObject):
    role: Literal["user"]
    content: Text | Annotated[list[Part], Field(min_length=1)]
    name: Text | None = None


class CalledFunction(ClientObject):
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text

    @model_validator(mode="after")
    def _check_arguments(self) -> CalledFunction:
        try:
            parse_object(self.arguments)
        except ValueError:
            raise ValueError("arguments must be a JSON object in a string") from None
        return self


class ToolCall(ClientObject):
    """A tool call. Clients that assemble it from a stream leave the stream's ``index`` in it."""

    id: Text
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class AssistantMessage(ClientObject):
    role: Literal["assistant"]
    content: TextContent | None = None
    name: Text | None = None
    refusal: Literal["", None] = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # The newer name of ``reasoning_content``.
    # Client libraries derive these two from the content, so they are ignored.
    annotations: list[Any] | None = None
    parsed: Any = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("content") == []:
            return {name: field for name, field in value.items() if name != "content"}
        return value

    @model_validator(mode="after")
    def _check_content(self) -> AssistantMessage:
        if self.content is None and not (self.tool_calls or self.reasoning_text):
            raise ValueError("content is needed where there are no tool_calls")
        return self

    @property
    def reasoning_text(self) -> str:
        """The reasoning before the answer, under either of its names."""
        return self.reasoning_content or self.reasoning or ""


class ToolMessage(ClientObject):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: Text
    name: Text | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class StreamOptions(Strict):
    """``include_obfuscation`` changes nothing, because no text is padded here."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class PlainText(Strict):
    type: Literal["text"]


class JsonObject(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema as OpenAI wraps it; answers follow it exactly, ``strict`` or not."""

    name: Text | None = None
    description: Text | None = None
    json_form: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchema(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]
Pattern = Annotated[Text, Field(min_length=1, max_length=10_000)]


class StructuredOutputs(Strict):
    """vLLM's extension, of which exactly one field must be set."""

    regex: Pattern | None = None
    json_form: Annotated[dict[str, Any] | None, Field(alias="json")] = None

    @model_validator(mode="after")
    def _check_one_is_set(self) -> StructuredOutputs:
        if (self.regex is None) == (self.json_form is None):
            raise ValueError("give regex or json, and not both")
        return self


class Function(Strict):
    name: Annotated[Text, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenName(Strict):
    name: Text


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenName


class VideoOptions(Strict):
    """How a video's frames are chosen; the server's own limits stay."""

    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[float, Field(ge=1e-4, le=1000)] | None = None

    @property
    def frame_options(self) -> dict[str, Any]:
        """The options that choose frames, by the names of `FrameSampling`."""
        options = {"num_frames": self.num_frames, "fps": self.fps}
        return {name: value for name, value in options.items() if value is not None}


class ProcessorOptions(VideoOptions, PixelLimits):
    """vLLM's options of a processor: frames, and the pixels of every picture and frame."""


class MediaOptions(Strict):
    video: VideoOptions = VideoOptions()


class RequestFields(Strict):
    """The fields that requests of every kind share: sampling rules, stops and forms of answers."""

    model: Text
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | Literal[-1] | None = None  # vLLM writes -1 for all.
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-SEED_RANGE, lt=SEED_RANGE)] | None = None
    stop: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_STRINGS)] | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: Pattern | None = None
    guided_json: dict[str, Any] | None = None
    # These are ignored, see `IGNORED_FIELDS`.
    user: Text | None = None
    metadata: dict[str, Text] | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Text | None = None
    cache_salt: Text | None = None
    priority: int | None = None
    request_id: Text | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None

    client_name_by_field: ClassVar[Mapping[str, str]] = {}
    """The client's name of each field of a ``CompletionRequest`` that has another name in the
    client's API. For example, our "messages" is "input" in the Responses API. Errors use the
    client's names."""

    @property
    def ignored_fields(self) -> frozenset[str]:
        """The fields of this request that change nothing."""
        sent = IGNORED_FIELDS & self.model_fields_set
        return frozenset(name for name in sent if vars(self)[name] is not None)


class CompletionRequest(RequestFields, ABC):
    """The fields of every completion, of a chat or of plain text."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    # These could change the answer. Only values that have no effect are accepted.
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    store: Literal[False] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    bad_words: Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_token_ids: Annotated[list[Any], Field(max_length=0)] | None = None
    prompt_logprobs: Literal[None] = None
    truncate_prompt_tokens: Literal[None] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        forms = (self.structured_outputs, self.guided_regex, self.guided_json)
        if sum(form is not None for form in forms) > 1:
            raise ValueError("structured_outputs, guided_regex, guided_json: give one of them")
        if self.token_limit is not None and (self.min_tokens or 0) > self.token_limit:
            raise ValueError("min_tokens is more than max_tokens")
        return self

    @property
    def completion_request(self) -> CompletionRequest:
        """The completion to run, which is this request. A ``ResponsesRequest`` has this property
        too, and returns the ``ChatRequest`` that it becomes."""
        return self

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have, where the request limits them."""
        return self.max_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        """How many of the likeliest tokens to report; None reports no log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The sampling rules by `GenerationConfig`'s names.

        A rule that is None or left out has the model's own default. A request with a temperature,
        ``top_p``, ``top_k`` or ``min_p`` is sampled, unless its temperature is below
        ``MIN_SAMPLING_TEMPERATURE``. Its temperature is 1 where it names none.
        """
        rules: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_new_tokens": self.min_tokens,
        }
        top_k = 0 if self.top_k == -1 else self.top_k  # Transformers writes 0 for all.
        truncation = {"top_p": self.top_p, "top_k": top_k, "min_p": self.min_p}
        if self.temperature is None and not any(value is not None for value in truncation.values()):
            return rules
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature < MIN_SAMPLING_TEMPERATURE:
            return {**rules, "do_sample": False}
        return {**rules, **truncation, "do_sample": True, "temperature": temperature}

    @property
    @abstractmethod
    def texts(self) -> list[str]:
        """All texts that are to be tokenized."""

    @property
    def media_urls(self) -> list[str]:
        """The addresses of all images and videos."""
        return []


class ChatRequest(CompletionRequest):
    """A chat completion."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: Format | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    # These could change the answer. Only values that have no effect are accepted.
    chat_template: Literal[None] = None
    documents: Annotated[list[Any], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Literal[None] = None
    prediction: Literal[None] = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None
    web_search_options: Literal[None] = None
    # These are ignored, see `IGNORED_FIELDS`. The model alone decides how many tools it calls.
    parallel_tool_calls: bool | None = None
    verbosity: Text | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        last = self.messages[-1]
        if last.role in ("system", "developer"):
            raise ValueError(
                "the last of the messages must be the user's, a tool's or the assistant's"
            )
        if last.role == "assistant" and tool_calls_of(last):
            raise ValueError("the last of the messages calls tools: add their results after it")
        if self.continue_final_message and last.role != "assistant":
            raise ValueError("continue_final_message needs the last of messages to be assistant's")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt: give one of them")
        texts = [part.text for part in content_parts(last) if isinstance(part, TextPart)]
        if self.continues_last_message and not "".join(texts).strip():
            raise ValueError("the last of the messages is to be continued, and it has no text")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not among tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice needs tools")
        return self

    def frame_options_of(self, field: str) -> dict[str, Any]:
        """Returns the options that choose a video's frames, as the request gives them in
        ``field``: "media_io_kwargs" or "mm_processor_kwargs"."""
        video = None if self.media_io_kwargs is None else self.media_io_kwargs.video
        options = {"media_io_kwargs": video, "mm_processor_kwargs": self.mm_processor_kwargs}[field]
        return {} if options is None else options.frame_options

    @property
    def continues_last_message(self) -> bool:
        """Whether the answer continues the text of the last message, which is the assistant's.

        ``continue_final_message`` decides. If it is not given, an assistant's message is continued,
        except with ``add_generation_prompt``, which asks for a new message.
        """
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].role == "assistant" and not self.add_generation_prompt

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have; the newer name wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def required_tools(self) -> list[Tool]:
        """The tools of which one must be called; none where the model may choose not to."""
        choice = self.tool_choice
        if isinstance(choice, ChosenTool):
            name = choice.function.name
            return [tool for tool in self.callable_tools if tool.function.name == name]
        return self.callable_tools if choice == "required" else []

    @property
    def texts(self) -> list[str]:
        """The texts of all messages and tools, without the addresses of media."""
        all_parts = [part for turn in self.messages for part in content_parts(turn)]
        calls = [call for turn in self.messages for call in tool_calls_of(turn)]
        return [
            *(part.text for part in all_parts if isinstance(part, TextPart | DocumentPart)),
            *(turn.reasoning_text for turn in self.messages if isinstance(turn, AssistantMessage)),
            *(text for call in calls for text in (call.function.name, call.function.arguments)),
            *(tool.model_dump_json() for tool in self.callable_tools),
        ]

    @property
    def media_urls(self) -> list[str]:
        all_parts = [part for turn in self.messages for part in content_parts(turn)]
        return [part.address.url for part in all_parts if isinstance(part, MediaPart)]


class TextRequest(CompletionRequest):
    """A completion of plain text, without a chat template."""

    prompt: Annotated[Text, Field(min_length=1)]
    suffix: Literal[None] = None

    @property
    def texts(self) -> list[str]:
        return [self.prompt]


def content_parts(turn: Message) -> Sequence[Part]:
    """Returns a message's content as parts."""
    content = turn.content
    if content is None:
        return []
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def tool_calls_of(turn: Message) -> Sequence[ToolCall]:
    """Returns the tool calls of a message, which only an assistant's message has."""
    return (turn.tool_calls or ()) if isinstance(turn, AssistantMessage) else ()
