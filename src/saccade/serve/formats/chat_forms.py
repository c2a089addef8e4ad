"""Writes answers in OpenAI's form: a chat's message or plain text, whole or as a stream."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from saccade.core.result import Result
from saccade.serve.formats.reasoning import Reasoning
from saccade.serve.formats.tool_calls import Dialect, ParsedCall, split_answer

Body = dict[str, Any]
"""One answer of a completion: an entry of ``choices``, still without its index and its
log-probabilities. In a stream it is a part of an answer, and its finish reason is added later."""


@dataclass(frozen=True)
class TextForm:
    """The form of a text completion, whole or streamed.

    In a stream, pieces of plain text are sent as they come. Nothing has to be remembered, so the
    form is its own stream, where a chat needs a :class:`ChatStream`.
    """

    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl"

    def choice(self, result: Result) -> Body:
        return {"text": result.text, "finish_reason": result.finish_reason}

    def reasoning_tokens(self, result: Result) -> int:
        """Returns how many tokens of an answer are reasoning: a plain text has none."""
        return 0

    def stream(self) -> TextForm:
        return self

    def begin(self) -> list[Body]:
        return []

    def write(self, piece: str) -> list[Body]:
        """Returns the bodies that can be sent after one more piece of the answer's text."""
        return [{"text": piece}] if piece else []

    def end(self, result: Result) -> tuple[list[Body], Body, str]:
        """Returns the bodies that have not been sent yet, the last body, and the finish reason."""
        return [], {"text": ""}, result.finish_reason


@dataclass(frozen=True)
class AnswerParts:
    """What a chat's answer consists of."""

    reasoning: str
    text: str
    calls: list[ParsedCall]


def reasoning_fields(text: str) -> Body:
    """Returns reasoning under both of the names by which vLLM's clients know it."""
    return {"reasoning": text, "reasoning_content": text}


@dataclass(frozen=True)
class ChatForm:
    """The form of a chat completion.

    ``dialect`` is how the model writes calls of ``tool_names``, None where it may call no tool.
    ``reasoning`` finds the reasoning in an answer, None where answers are not searched for it.
    """

    dialect: Dialect | None = None
    tool_names: Collection[str] = ()
    reasoning: Reasoning | None = None
    shows_reasoning: bool = True  # Otherwise the reasoning is left out.

    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"
    id_prefix: ClassVar[str] = "chatcmpl"

    def choice(self, result: Result) -> Body:
        answer = self.split(result.text or "", is_complete=True)
        has_other_parts = bool(answer.calls or answer.reasoning)
        message: Body = {"role": "assistant", "content": answer.text, "refusal": None}
        if has_other_parts and not answer.text:
            message["content"] = None
        if answer.calls:
            message["tool_calls"] = [call.response_fields() for call in answer.calls]
        if answer.reasoning and self.shows_reasoning:
            message |= reasoning_fields(answer.reasoning)
        return {"message": message, "finish_reason": self.finish_reason(result, answer.calls)}

    def reasoning_tokens(self, result: Result) -> int:
        """Returns how many tokens of an answer are reasoning."""
        if self.reasoning is None:
            return 0
        return self.reasoning.count_tokens(result.ids, result.text or "")

    def stream(self) -> ChatStream:
        return ChatStream(self)

    def split(self, text: str, *, is_complete: bool) -> AnswerParts:
        """Returns the parts of an answer. From an incomplete answer, text that may still turn out
        to belong to another part is left out."""
        reasoning = ""
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split(text, is_complete=is_complete)
        if self.dialect is None:
            return AnswerParts(reasoning, text, [])
        words, calls = split_answer(self.dialect, text, self.tool_names, is_complete=is_complete)
        return AnswerParts(reasoning, words, calls)

    def text_start(self, text: str) -> int:
        """Returns how many characters of an answer come before the text that follows its
        reasoning."""
        if self.reasoning is None:
            return 0
        _, rest = self.reasoning.split(text, is_complete=True)
        return len(text) - len(rest)

    def finish_reason(self, result: Result, calls: list[ParsedCall]) -> str:
        """Returns why an answer ended: "tool_calls" if it stopped by itself and has calls. With
        calls that were cut by the token limit it is still "length"."""
        return "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason


class ChatStream:
    """Writes a chat's message as deltas. It remembers how much of each part has been sent."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._answer = ""
        self._sent_reasoning_characters = 0
        self._sent_text_characters = 0
        self._sent_calls = 0

    def begin(self) -> list[Body]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def write(self, piece: str) -> list[Body]:
        if not piece:
            return []
        self._answer += piece
        return self._deltas(self._form.split(self._answer, is_complete=False))

    def end(self, result: Result) -> tuple[list[Body], Body, str]:
        answer = self._form.split(self._answer, is_complete=True)
        reason = self._form.finish_reason(result, answer.calls)
        return self._deltas(answer), {"delta": {}}, reason

    def _deltas(self, answer: AnswerParts) -> list[Body]:
        """Returns what has not been sent of an answer's parts, and counts it as sent."""
        bodies: list[Body] = []
        text, calls = answer.text, answer.calls
        new_reasoning = answer.reasoning[self._sent_reasoning_characters :]
        if self._form.shows_reasoning and new_reasoning:
            bodies.append({"delta": reasoning_fields(new_reasoning)})
            self._sent_reasoning_characters = len(answer.reasoning)
        if new_text := text[self._sent_text_characters :]:
            bodies.append({"delta": {"content": new_text}})
            self._sent_text_characters = len(text)
        for index, call in enumerate(calls[self._sent_calls :], start=self._sent_calls):
            fields = {"index": index, **call.response_fields()}
            bodies.append({"delta": {"tool_calls": [fields]}})
        self._sent_calls = len(calls)
        return bodies


ResponseForm = TextForm | ChatForm
"""How the answers to one request are written."""

# The schema of responses, for the OpenAPI page. A test checks real responses against it.


class PromptTokensDetails(BaseModel):
    cached_tokens: int  # Tokens of the prompt that were read for an earlier request.


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int  # Tokens of the answers before the reasoning ended.


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ResponseFunction(BaseModel):
    name: str
    arguments: str


class ResponseToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: ResponseFunction


class Answer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ResponseToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # The older name of ``reasoning``.


class Choice(BaseModel):
    index: int
    message: Answer
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class AnyCompletion(BaseModel):
    """The fields of every completion. Each event of a stream has some of them."""

    id: str
    created: int
    model: str
    usage: Usage
    metrics: dict[str, Any]
    saccade: dict[str, Any]


class Completion(AnyCompletion):
    object: Literal["chat.completion"]
    choices: list[Choice]


class TextCompletion(AnyCompletion):
    object: Literal["text_completion"]
    choices: list[TextChoice]
