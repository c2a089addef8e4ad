"""The wire format: OpenAI's chat completions, as far as they are honoured; no field is ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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
    detail: Literal["auto"] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: Words


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: Address


class VideoPart(Strict):
    type: Literal["video_url"]
    video_url: Address


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Words | Annotated[list[TextPart], Field(min_length=1)]
    name: Literal[None] = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Words | Annotated[list[Part], Field(min_length=1)]
    name: Literal[None] = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Words | Annotated[list[TextPart], Field(min_length=1)]
    name: Literal[None] = None
    refusal: Literal[None] = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class StreamOptions(Strict):
    include_usage: bool = False


class PlainText(Strict):
    type: Literal["text"]


class VideoOptions(Strict):
    """How a video's frames are chosen; the server's own ceilings stay."""

    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[float, Field(ge=1e-4, le=1000)] | None = None


class MediaOptions(Strict):
    video: VideoOptions = VideoOptions()


class ChatRequest(Strict):
    """A chat completion. Penalties, tools and other formats than text are not supported: their
    neutral values are taken, any other is refused."""

    model: Words
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[Words, Field(min_length=1)]
        | Annotated[list[Annotated[Words, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    presence_penalty: Neutral | None = None
    frequency_penalty: Neutral | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: PlainText | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    user: Words | None = None  # says who asks, and changes nothing
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: VideoOptions | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.messages[-1].role != "user":
            raise ValueError("the last of messages must be the user's")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens asked for at most; the newer name wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampled(self) -> dict[str, Any]:
        """`GenerationConfig`'s names for how tokens are drawn; None is the model's own choice."""
        given = [each for each in (self.temperature, self.top_p, self.top_k) if each is not None]
        temperature = 1.0 if self.temperature is None else self.temperature
        if not given or temperature < COLDEST:
            return {"do_sample": False if given else None}
        drawn = {"temperature": temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"do_sample": True, **drawn}

    @property
    def characters(self) -> int:
        """Of all texts, addresses left out."""
        words = (part for turn in self.messages for part in parts(turn))
        return sum(len(part.text) for part in words if isinstance(part, TextPart))

    @property
    def addresses(self) -> int:
        return sum(not isinstance(part, TextPart) for turn in self.messages for part in parts(turn))


def parts(turn: Message) -> Sequence[Part]:
    """A message's content as parts."""
    content = turn.content
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


# What answers look like, for those who read the schema; a test checks what is sent against it.


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(BaseModel):
    index: int
    message: Answer
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """A whole answer; a stream's events hold the same in pieces."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    metrics: dict[str, Any]
    saccade: dict[str, Any]
