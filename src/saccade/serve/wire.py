"""The wire format: OpenAI's completions, of chats and of plain text, as far as they are honoured.

What is not known is refused; what is taken and changes nothing is told in docs/http.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from saccade.serve.formats.strict_json import parse_object

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
COLDEST = 1e-5  # a lower temperature is greedy: dividing by it leaves the range of floats
SEEDS = 2**63


def _clean(text: Any) -> Any:
    """Half a surrogate pair is no text, and no tokenizer takes it."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a character (a lone surrogate): send whole text") from None
    return text


Words = Annotated[str, BeforeValidator(_clean)]
Neutral = Literal[0]


class Strict(BaseModel):
    """Refuses fields it does not know, and takes no text for a number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)


class Address(Strict):
    url: Annotated[Words, Field(min_length=1)]


class ImageAddress(Address):
    """``low`` shrinks the picture first (`reading.LOW`); the others leave it as it is."""

    detail: Literal["auto", "low", "high"] | None = None


class VideoAddress(Address):
    detail: Literal["auto"] | None = None


class Replayed(Strict):
    """A part of a conversation, which clients send back as they got it.

    Their objects have more fields than an answer used, null or empty. A field that is not known
    here and says nothing is left out; one that says something is refused like any other.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_silent_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value
            for name, value in given.items()
            if name in known or not (value is None or value in ("", [], {}))
        }


class TextPart(Replayed):
    type: Literal["text"]
    text: Words


class DocumentPart(Replayed):
    """A long text that views may prune like a video."""

    type: Literal["document"]
    text: Annotated[Words, Field(pattern=r"\S")]


class ImagePart(Replayed):
    type: Literal["image_url"]
    image_url: ImageAddress


class VideoPart(Replayed):
    type: Literal["video_url"]
    video_url: VideoAddress


Part = Annotated[TextPart | DocumentPart | ImagePart | VideoPart, Field(discriminator="type")]
Texts = Words | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(Replayed):
    role: Literal["system", "developer"]
    content: Texts
    name: Words | None = None


class UserMessage(Replayed):
    role: Literal["user"]
    content: Words | Annotated[list[Part], Field(min_length=1)]
    name: Words | None = None


class Called(Replayed):
    name: Annotated[Words, Field(min_length=1)]
    arguments: Words

    @model_validator(mode="after")
    def _object(self) -> Called:
        try:
            parse_object(self.arguments)
        except ValueError:
            raise ValueError("arguments must be a JSON object in a string") from None
        return self


class ToolCall(Replayed):
    """A call. Clients that put a stream's pieces together leave its ``index`` in it."""

    id: Words
    type: Literal["function"]
    function: Called
    index: int | None = None


class AssistantMessage(Replayed):
    role: Literal["assistant"]
    content: Texts | None = None
    name: Words | None = None
    refusal: Literal["", None] = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Words | None = None
    reasoning: Words | None = None  # The newer name of the same.
    # What a client's library found in the words. The words say it.
    annotations: list[Any] | None = None
    parsed: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_content(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("content") == []:
            return {name: value for name, value in given.items() if name != "content"}
        return given

    @model_validator(mode="after")
    def _says(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is needed where there are no tool_calls")
        return self

    @property
    def thought(self) -> str:
        """The reasoning before the answer."""
        return self.reasoning_content or self.reasoning or ""


class ToolMessage(Replayed):
    role: Literal["tool"]
    content: Texts
    tool_call_id: Words
    name: Words | None = None


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
    """A JSON schema as OpenAI wraps it; it is followed to the letter, ``strict`` or not."""

    name: Words | None = None
    description: Words | None = None
    form: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchema(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]
Pattern = Annotated[Words, Field(min_length=1, max_length=10_000)]


class StructuredOutputs(Strict):
    """vLLM's extension: exactly one of them."""

    regex: Pattern | None = None
    form: Annotated[dict[str, Any] | None, Field(alias="json")] = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if (self.regex is None) == (self.form is None):
            raise ValueError("give regex or json, and not both")
        return self


class Function(Strict):
    name: Annotated[Words, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: Words | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenName(Strict):
    name: Words


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenName


class VideoOptions(Strict):
    """How a video's frames are chosen; the server's own ceilings stay."""

    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[float, Field(ge=1e-4, le=1000)] | None = None


class MediaOptions(Strict):
    video: VideoOptions = VideoOptions()


class CompletionRequest(Strict, ABC):
    """What every completion may say: how long, by which rules, in what form."""

    model: Words
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[Words, Field(min_length=1)]
        | Annotated[list[Annotated[Words, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Neutral | None = None
    frequency_penalty: Neutral | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: Pattern | None = None
    guided_json: dict[str, Any] | None = None
    # these say who asks and what is to be kept of it, and change nothing
    user: Words | None = None
    metadata: dict[str, Words] | None = None
    store: Literal[False] | None = None
    service_tier: Words | None = None

    @model_validator(mode="after")
    def _streams(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        forms = (self.structured_outputs, self.guided_regex, self.guided_json)
        if sum(form is not None for form in forms) > 1:
            raise ValueError("structured_outputs, guided_regex, guided_json: give one of them")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens asked for at most."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens to tell; None tells nothing of likelihoods."""
        return None

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampled(self) -> dict[str, Any]:
        """`GenerationConfig`'s names for how tokens are drawn; None is the model's own choice."""
        ruled = {"repetition_penalty": self.repetition_penalty}
        drawn = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        if self.temperature is None and not any(value is not None for value in drawn.values()):
            return ruled
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature < COLDEST:
            return {**ruled, "do_sample": False}
        return {**ruled, **drawn, "do_sample": True, "temperature": temperature}

    @property
    @abstractmethod
    def texts(self) -> list[str]:
        """All that is to be tokenized."""

    @property
    def addresses(self) -> list[str]:
        """Of media, wherever they stand."""
        return []


class ChatRequest(CompletionRequest):
    """A chat completion. Of penalties other than ``repetition_penalty`` the neutral values are
    taken, any other is refused."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: Format | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None  # as many as the model makes, whatever it says
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: VideoOptions | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        last = self.messages[-1]
        if last.role in ("system", "developer"):
            raise ValueError("the last of messages must be the user's, a tool's or the assistant's")
        if last.role == "assistant" and called(last):
            raise ValueError("the last of messages calls tools: what they gave must follow")
        said = [each.text for each in parts(last) if isinstance(each, TextPart)]
        if last.role == "assistant" and not "".join(said).strip():
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
    def limit(self) -> int | None:
        """Tokens asked for at most; the newer name wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def due(self) -> list[Tool]:
        """The tools of which one must be called; none where the model may choose to."""
        chosen = self.tool_choice
        if isinstance(chosen, ChosenTool):
            return [tool for tool in self.usable if tool.function.name == chosen.function.name]
        return self.usable if chosen == "required" else []

    @property
    def texts(self) -> list[str]:
        """Of all messages and tools, addresses left out."""
        words = [part for turn in self.messages for part in parts(turn)]
        calls = [call for turn in self.messages for call in called(turn)]
        return [
            *(part.text for part in words if isinstance(part, TextPart | DocumentPart)),
            *(turn.thought for turn in self.messages if isinstance(turn, AssistantMessage)),
            *(text for call in calls for text in (call.function.name, call.function.arguments)),
            *(tool.model_dump_json() for tool in self.usable),
        ]

    @property
    def addresses(self) -> list[str]:
        every = [part for turn in self.messages for part in parts(turn)]
        images = [part.image_url for part in every if isinstance(part, ImagePart)]
        return [
            *(image.url for image in images),
            *(part.video_url.url for part in every if isinstance(part, VideoPart)),
        ]


class TextRequest(CompletionRequest):
    """A completion of plain text, without a chat template."""

    prompt: Annotated[Words, Field(min_length=1)]
    echo: Literal[False] | None = None
    suffix: Literal[None] = None
    best_of: Literal[1] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.prompt]


def parts(turn: Message) -> Sequence[Part]:
    """A message's content as parts."""
    content = turn.content
    if content is None:
        return []
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def called(turn: Message) -> Sequence[ToolCall]:
    """The calls of an assistant's message."""
    return (turn.tool_calls or ()) if isinstance(turn, AssistantMessage) else ()
