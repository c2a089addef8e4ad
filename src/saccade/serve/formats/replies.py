"""The forms answers take: a chat's message or plain text, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from saccade.core.result import Result
from saccade.serve.formats.tools import Dialect, MadeCall, split

Body = dict[str, Any]
"""What a choice holds beside its index, its likelihoods and its end."""


@dataclass(frozen=True)
class TextForm:
    """Plain text, which is written piece by piece as it comes."""

    whole: ClassVar[str] = "text_completion"
    piece: ClassVar[str] = "text_completion"
    mark: ClassVar[str] = "cmpl"  # of ids

    def choice(self, result: Result) -> Body:
        return {"text": result.text, "finish_reason": result.finish_reason}

    def pieces(self) -> TextForm:
        return self

    def begin(self) -> list[Body]:
        return []

    def write(self, piece: str) -> list[Body]:
        """What is certain once a piece of text has come."""
        return [{"text": piece}] if piece else []

    def end(self, result: Result) -> tuple[list[Body], Body, str]:
        """What was held back, the last body, and why it ended."""
        return [], {"text": ""}, result.finish_reason


@dataclass(frozen=True)
class ChatForm:
    """A chat's message. ``dialect`` is how tools are called, None where none may be."""

    dialect: Dialect | None = None
    names: Collection[str] = ()  # of the tools

    whole: ClassVar[str] = "chat.completion"
    piece: ClassVar[str] = "chat.completion.chunk"
    mark: ClassVar[str] = "chatcmpl"

    def choice(self, result: Result) -> Body:
        words, calls = self.split(result.text or "", done=True)
        message: Body = {"role": "assistant", "content": words or None, "refusal": None}
        if calls:
            message["tool_calls"] = [call.told() for call in calls]
        else:
            message["content"] = words
        return {"message": message, "finish_reason": self.reason(result, calls)}

    def pieces(self) -> ChatPieces:
        return ChatPieces(self)

    def split(self, text: str, *, done: bool) -> tuple[str, list[MadeCall]]:
        """Words and calls, as far as they are certain."""
        if self.dialect is None:
            return text, []
        return split(self.dialect, text, self.names, done=done)

    def reason(self, result: Result, calls: list[MadeCall]) -> str:
        return "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason


class ChatPieces:
    """A chat's message under way: what has been told of its words and calls."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._text, self._words, self._calls = "", 0, 0

    def begin(self) -> list[Body]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def write(self, piece: str) -> list[Body]:
        self._text += piece
        return self._new(*self._form.split(self._text, done=False)) if piece else []

    def end(self, result: Result) -> tuple[list[Body], Body, str]:
        words, calls = self._form.split(self._text, done=True)
        return self._new(words, calls), {"delta": {}}, self._form.reason(result, calls)

    def _new(self, words: str, calls: list[MadeCall]) -> list[Body]:
        bodies: list[Body] = []
        if len(words) > self._words:
            bodies.append({"delta": {"content": words[self._words :]}})
            self._words = len(words)
        for index, call in enumerate(calls[self._calls :], start=self._calls):
            bodies.append({"delta": {"tool_calls": [{"index": index, **call.told()}]}})
        self._calls = len(calls)
        return bodies


Form = TextForm | ChatForm
"""How the answers to one request are written."""

# What answers look like, for those who read the schema; a test checks what is sent against it.


class Cached(BaseModel):
    cached_tokens: int  # of the prompt, read for an earlier request


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class ToldFunction(BaseModel):
    name: str
    arguments: str


class ToldCall(BaseModel):
    id: str
    type: Literal["function"]
    function: ToldFunction


class Answer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToldCall] | None = None


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


class Told(BaseModel):
    """What every whole answer holds; a stream's events hold the same in pieces."""

    id: str
    created: int
    model: str
    usage: Usage
    metrics: dict[str, Any]
    saccade: dict[str, Any]


class Completion(Told):
    object: Literal["chat.completion"]
    choices: list[Choice]


class TextCompletion(Told):
    object: Literal["text_completion"]
    choices: list[TextChoice]
