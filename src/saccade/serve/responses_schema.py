"""The JSON of OpenAI's Responses API, as far as a model alone can answer it.

A request's input is a list of items: messages, calls of functions, outputs of these functions, and
reasoning. The request is converted to a `ChatRequest`, so messages, media, tools and formats mean
the same here as in a chat completion. Nothing is stored: a client sends the items of earlier
responses back itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from saccade.serve.request_schema import (
    MAX_TOP_LOGPROBS,
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    ChosenName,
    ChosenTool,
    ClientObject,
    DocumentPart,
    Effort,
    Format,
    Function,
    ImageAddress,
    ImagePart,
    JsonObject,
    JsonSchema,
    MediaOptions,
    Message,
    NamedSchema,
    Part,
    PlainText,
    ProcessorOptions,
    RequestFields,
    Strict,
    SystemMessage,
    Text,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
    VideoPart,
)

LOGPROBS = "message.output_text.logprobs"  # In ``include`` this asks for log-probabilities.


class TextItem(ClientObject):
    """A text, as clients write it or as an earlier response had it."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: Text
    # Earlier responses have these fields. They are accepted and ignored.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @property
    def part(self) -> TextPart:
        return TextPart(type="text", text=self.text)


class ImageItem(ClientObject):
    type: Literal["input_image"]
    image_url: Annotated[Text, Field(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def part(self) -> ImagePart:
        detail = "high" if self.detail == "original" else self.detail
        address = ImageAddress(url=self.image_url, detail=detail)
        return ImagePart(type="image_url", image_url=address)


Content = Annotated[
    TextItem | ImageItem | TextPart | DocumentPart | ImagePart | VideoPart,
    Field(discriminator="type"),
]


class Item(ClientObject):
    """An item of a conversation. The id and status that an earlier response gave it are ignored."""

    id: Text | None = None
    status: Text | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Content], Field(min_length=1)]
    phase: Text | None = None  # Accepted and ignored.

    @model_validator(mode="after")
    def _check_content(self) -> MessageItem:
        has_media = len(self.texts) < len(self.parts)
        if self.role != "user" and has_media:
            raise ValueError(f"a message of role {self.role} may contain only text")
        return self

    @property
    def parts(self) -> list[Part]:
        """The content as parts of a chat's message."""
        return _parts(self.content)

    @property
    def texts(self) -> list[TextPart]:
        """The texts of the content."""
        return [part for part in self.parts if isinstance(part, TextPart)]


class CallItem(Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Annotated[list[TextItem], Field(min_length=1)]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[TextItem] | None = None
    content: list[TextItem] | None = None

    @property
    def text(self) -> str:
        """The reasoning itself, or else its summary."""
        parts = self.content or self.summary or ()
        return "\n".join(part.text for part in parts if part.text)


def _item_type(value: Any) -> Any:
    """Returns the type of an item; a message may leave it out. Returns None for a value that is not
    an object."""
    if isinstance(value, BaseModel):
        value = vars(value)
    return value.get("type", "message") if isinstance(value, dict) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FlatSchema(NamedSchema):
    """A JSON schema whose fields lie beside ``type``. In chats they lie in ``json_schema``."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """The form of the answer; ``verbosity`` changes nothing."""

    format: Annotated[PlainText | JsonObject | FlatSchema, Field(discriminator="type")] | None = (
        None
    )
    verbosity: Text | None = None


class FlatTool(Function):
    """A function whose fields lie beside ``type``. In chats they lie in ``function``."""

    type: Literal["function"]


class FlatChoice(ChosenName):
    """The choice of a function whose name lies beside ``type``. In chats it lies in
    ``function``."""

    type: Literal["function"]


class ReasoningSettings(Strict):
    """How much the model is to think; reasoning is never summarised."""

    effort: Effort | None = None
    summary: Text | None = None
    generate_summary: Text | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None


class ResponsesRequest(RequestFields):
    """A request of the Responses API."""

    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Text] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    # These three are ignored: nothing is stored, a prompt that is too long is refused, and a model
    # may always call several tools.
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    # These could change the answer. Only values that have no effect are accepted.
    previous_response_id: Literal[None] = None
    conversation: Literal[None] = None
    background: Literal[False] | None = None
    max_tool_calls: Literal[None] = None
    context_management: Annotated[list[Any], Field(max_length=0)] | None = None
    moderation: Literal[None] = None

    # Errors name fields of the `ChatRequest` that is made of this request. These are the names that
    # the client knows them by.
    client_name_by_field: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }

    @property
    def completion_request(self) -> ChatRequest:
        """This request as a request for a chat completion. Raises pydantic's ValidationError."""
        # Fields of both kinds of requests are passed on only if the client has set them.
        shared = {
            name: getattr(self, name)
            for name in RequestFields.model_fields
            if name in self.model_fields_set
        }
        converted = {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": self._chat_choice,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "logprobs": self.wants_logprobs,
            "top_logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "media_io_kwargs": self.media_io_kwargs,
            "mm_processor_kwargs": self.mm_processor_kwargs,
        }
        return ChatRequest.model_validate({**shared, **converted})

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer is to have log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def ignored_fields(self) -> frozenset[str]:
        """The fields that the log names as ignored: those of ``IGNORED_FIELDS`` that the request
        sets. ``include`` is one of them unless log-probabilities are wanted."""
        return super().ignored_fields - ({"include"} if self.wants_logprobs else set())

    @property
    def _chat_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, FlatChoice):
            return ChosenTool(type="function", function=ChosenName(name=choice.name))
        return choice

    @property
    def _response_format(self) -> Format | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, FlatSchema):
            inner = NamedSchema.model_validate(form.model_dump(by_alias=True, exclude={"type"}))
            return JsonSchema(type="json_schema", json_schema=inner)
        return form

    def _messages(self) -> Iterator[Message]:
        """Yields the instructions and the input as messages of a chat."""
        if self.instructions:
            yield SystemMessage(role="system", content=self.instructions)
        if isinstance(self.input, str):
            yield UserMessage(role="user", content=self.input)
            return
        # Items of the model are gathered in ``turn`` until one comes that does not continue it.
        turn = AssistantTurn()
        for item in self.input:
            if not turn.is_continued_by(item):
                yield from turn.messages()
                turn = AssistantTurn()
            match item:
                case MessageItem(role="assistant"):
                    turn.texts += item.texts
                case CallItem():
                    turn.calls.append(item)
                case ReasoningItem():
                    turn.reasoning.append(item.text)
                case CallOutputItem():
                    output = item.output
                    texts = output if isinstance(output, str) else [each.part for each in output]
                    yield ToolMessage(role="tool", content=texts, tool_call_id=item.call_id)
                case MessageItem(role="user"):
                    yield UserMessage(role="user", content=item.parts)
                case MessageItem():  # Of a system or a developer.
                    yield SystemMessage(role="system", content=item.texts)
        yield from turn.messages()


class AssistantTurn:
    """Consecutive items of the model, which become one message of a chat."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[TextPart] = []
        self.calls: list[CallItem] = []

    def is_continued_by(self, item: Item) -> bool:
        """Returns whether an item continues this turn, in which reasoning comes first, then at most
        one message, and then calls."""
        match item:
            case ReasoningItem():
                return not (self.texts or self.calls)
            case MessageItem(role="assistant"):
                return not (self.texts or self.calls)
            case CallItem():
                return True
        return False

    def messages(self) -> Iterator[AssistantMessage]:
        """Yields the turn as a message, unless it is empty."""
        reasoning = "\n".join(text for text in self.reasoning if text)
        if not (reasoning or self.texts or self.calls):
            return
        calls = [
            ToolCall(
                id=call.call_id,
                type="function",
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for call in self.calls
        ]
        yield AssistantMessage(
            role="assistant",
            content=self.texts or None,
            tool_calls=calls or None,
            reasoning_content=reasoning or None,
        )


def _parts(content: str | Sequence[Any]) -> list[Part]:
    """Returns a message's content as the parts of a chat's message."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [each.part if isinstance(each, TextItem | ImageItem) else each for each in content]


def _chat_tool(tool: FlatTool) -> Tool:
    function = Function.model_validate(tool.model_dump(exclude={"type"}))
    return Tool(type="function", function=function)


# The schema of a response, for the OpenAPI page. A test checks real responses against it.


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    metrics: dict[str, Any]
    saccade: dict[str, Any]
