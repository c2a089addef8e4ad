"""The JSON of requests: OpenAI's completions, of chats and of plain text, as far as supported.

Unknown fields are refused. docs/http.md lists the fields that are accepted and change nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from saccade.serve.formats.strict_json import parse_object

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
# A lower temperature is greedy, since logits divided by it leave the range of floats.
MIN_SAMPLING_TEMPERATURE = 1e-5
SEED_RANGE = 2**63


def _check_surrogates(text: Any) -> Any:
    """Refuses text with half of a surrogate pair, which no tokenizer accepts."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a character (a lone surrogate): send whole text") from None
    return text


Text = Annotated[str, BeforeValidator(_check_surrogates)]
Zero = Literal[0]


class Strict(BaseModel):
    """A schema that refuses unknown fields and does not convert strings to numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)


class Address(Strict):
    url: Annotated[Text, Field(min_length=1)]


class ImageAddress(Address):
    """``low`` shrinks the picture (`request_reader.LOW_DETAIL_SIZE`); the others change nothing."""

    detail: Literal["auto", "low", "high"] | None = None


class VideoAddress(Address):
    detail: Literal["auto"] | None = None


class ClientObject(Strict):
    """A part of a conversation, which clients send back as they received it.

    The objects of their libraries may have more fields than an answer used, null or empty. An
    unknown field is left out where it is empty, and refused like any other where it is not.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_unknown_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: field
            for name, field in value.items()
            if name in fields or not (field is None or field in ("", [], {}))
        }


class TextPart(ClientObject):
    type: Literal["text"]
    text: Text


class DocumentPart(ClientObject):
    """A long text that views may prune like a video."""

    type: Literal["document"]
    text: Annotated[Text, Field(pattern=r"\S")]


class ImagePart(ClientObject):
    type: Literal["image_url"]
    image_url: ImageAddress


class VideoPart(ClientObject):
    type: Literal["video_url"]
    video_url: VideoAddress


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
        if self.content is None and not self.tool_calls:
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
    include_usage: bool = False


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


class MediaOptions(Strict):
    video: VideoOptions = VideoOptions()


class CompletionRequest(Strict, ABC):
    """The fields of every completion: its length, sampling rules and format."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-SEED_RANGE, lt=SEED_RANGE)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: Pattern | None = None
    guided_json: dict[str, Any] | None = None
    # These say who sends the request and what to store of it; they change nothing here.
    user: Text | None = None
    metadata: dict[str, Text] | None = None
    store: Literal[False] | None = None
    service_tier: Text | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        forms = (self.structured_outputs, self.guided_regex, self.guided_json)
        if sum(form is not None for form in forms) > 1:
            raise ValueError("structured_outputs, guided_regex, guided_json: give one of them")
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
        """The sampling rules by `GenerationConfig`'s names; None is the model's own default."""
        penalty = {"repetition_penalty": self.repetition_penalty}
        truncation = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        if self.temperature is None and not any(value is not None for value in truncation.values()):
            return penalty
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature < MIN_SAMPLING_TEMPERATURE:
            return {**penalty, "do_sample": False}
        return {**penalty, **truncation, "do_sample": True, "temperature": temperature}

    @property
    @abstractmethod
    def texts(self) -> list[str]:
        """All texts that are to be tokenized."""

    @property
    def media_urls(self) -> list[str]:
        """The addresses of all images and videos."""
        return []


class ChatRequest(CompletionRequest):
    """A chat completion. Penalties other than ``repetition_penalty`` must be zero."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: Format | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = (
        None  # It changes nothing: the model makes as many as it likes.
    )
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: VideoOptions | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        last = self.messages[-1]
        if last.role in ("system", "developer"):
            raise ValueError("the last of messages must be the user's, a tool's or the assistant's")
        if last.role == "assistant" and tool_calls_of(last):
            raise ValueError("the last of messages calls tools: what they gave must follow")
        texts = [part.text for part in content_parts(last) if isinstance(part, TextPart)]
        if last.role == "assistant" and not "".join(texts).strip():
            raise ValueError("the last of messages is the assistant's, to be continued, and empty")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not among tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice needs tools")
        return self

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
        images = [part.image_url for part in all_parts if isinstance(part, ImagePart)]
        return [
            *(image.url for image in images),
            *(part.video_url.url for part in all_parts if isinstance(part, VideoPart)),
        ]


class TextRequest(CompletionRequest):
    """A completion of plain text, without a chat template."""

    prompt: Annotated[Text, Field(min_length=1)]
    echo: Literal[False] | None = None
    suffix: Literal[None] = None
    best_of: Literal[1] | None = None

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
