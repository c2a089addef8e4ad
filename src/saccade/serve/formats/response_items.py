"""Writes an answer as the items of OpenAI's Responses API, and as the events that build them.

An item is reasoning, a message or a call of a function. Its first events announce it, further ones
add text to it, and the last ones repeat it as a whole. A response that is not streamed has the
items that its stream would have.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.core.result import Result
from saccade.serve.formats.chat_forms import AnswerParts, ChatForm
from saccade.serve.formats.tool_calls import ParsedCall

Event = dict[str, Any]
"""A streamed event, still without its ``sequence_number``."""
Logprobs = Sequence[dict[str, Any]]
"""The log-probabilities of tokens, each in OpenAI's form."""


@dataclass(frozen=True)
class ItemKind:
    """How an item of text is written: its type, its part's type, and the names of its events."""

    item_type: str  # the item's "type"
    id_prefix: str  # The item's id is this, "_" and random digits.
    part_type: str  # the "type" of its only part, which has the text
    # With ".delta" after it, this is the type of the events that add text. With ".done", it is that
    # of the event that repeats the whole text.
    event_prefix: str
    has_logprobs: bool = False  # whether its events and its part have log-probabilities


REASONING = ItemKind("reasoning", "rs", "reasoning_text", "response.reasoning_text")
MESSAGE = ItemKind("message", "msg", "output_text", "response.output_text", has_logprobs=True)


@dataclass
class ItemInProgress:
    """An item of text (reasoning or a message) that is being written."""

    kind: ItemKind
    output_index: int  # the item's place among the items of the response
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    random_digits: str = field(default_factory=lambda: secrets.token_hex(12))  # for its id

    @property
    def place(self) -> dict[str, Any]:
        """The fields of an event that say which item, and which part of it, the event is about."""
        item_id = f"{self.kind.id_prefix}_{self.random_digits}"
        return {"item_id": item_id, "output_index": self.output_index, "content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        """The item's only part, with the text so far."""
        part: dict[str, Any] = {"type": self.kind.part_type, "text": self.text}
        if self.kind.has_logprobs:
            part |= {"annotations": [], "logprobs": list(self.logprobs)}
        return part

    def fields(self, status: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the JSON of the item, with this status and these parts."""
        kind = self.kind
        fields = {"type": kind.item_type, "id": self.place["item_id"], "status": status}
        # A message has a role. An item of reasoning has an (empty) summary instead.
        kind_fields: dict[str, Any] = {"role": "assistant"} if kind is MESSAGE else {"summary": []}
        return {**fields, **kind_fields, "content": list(parts)}

    def begin(self) -> list[Event]:
        """Returns the events that announce the item."""
        item = self.fields("in_progress", [])
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.output_index,
                "item": item,
            },
            {"type": "response.content_part.added", **self.place, "part": self.part},
        ]

    def write(self, piece: str, logprobs: Logprobs) -> Event:
        """Adds a piece of text and returns the event that says so."""
        self.text += piece
        event = {"type": f"{self.kind.event_prefix}.delta", **self.place, "delta": piece}
        if self.kind.has_logprobs:
            self.logprobs += logprobs
            event["logprobs"] = list(logprobs)
        return event

    def end(self, status: str) -> list[Event]:
        """Returns the events that end the item and repeat it as a whole."""
        done = {"type": f"{self.kind.event_prefix}.done", **self.place, "text": self.text}
        if self.kind.has_logprobs:
            done["logprobs"] = list(self.logprobs)
        item = self.fields(status, [self.part])
        return [
            done,
            {"type": "response.content_part.done", **self.place, "part": self.part},
            {"type": "response.output_item.done", "output_index": self.output_index, "item": item},
        ]


class ItemStream:
    """Turns the text of one answer into events, and collects the ``items`` that are done."""

    def __init__(self, form: ChatForm) -> None:
        self.items: list[dict[str, Any]] = []
        self._form = form
        self._answer = ""
        self._open: ItemInProgress | None = None
        self._sent_calls = 0
        self._sent = {REASONING: 0, MESSAGE: 0}  # How many characters of each were sent.
        # The log-probabilities that have not been sent yet. With each comes the number of
        # characters of the answer up to the end of its token.
        self._waiting_logprobs: list[tuple[int, dict[str, Any]]] = []

    def write(self, piece: str, logprobs: Logprobs = (), length: int = 0) -> list[Event]:
        """Adds a piece of text and returns events for all text that is certain now.

        ``logprobs`` are those of the tokens that came with the piece. Some of their text may be
        held back, to come with a later piece. ``length`` is how many characters the answer has with
        these tokens, held-back ones included. The log-probabilities are sent with the message's
        next event that adds text.
        """
        self._answer += piece
        self._waiting_logprobs += [(length, entry) for entry in logprobs]
        return self._advance(self._form.split(self._answer, is_complete=False))

    def end(self, result: Result) -> list[Event]:
        """Returns the last events. An answer that says nothing has an empty message."""
        events = self._advance(self._form.split(self._answer, is_complete=True))
        if self._open is None and not self.items:
            events += self._begin(MESSAGE)
        if self._open is not None and self._open.kind is MESSAGE and self._waiting_logprobs:
            # The token that ends the answer has log-probabilities, and no text.
            events.append(self._write("", self._open))
        status = "incomplete" if result.finish_reason == "length" else "completed"
        return events + self._close(status)

    def _advance(self, answer: AnswerParts) -> list[Event]:
        """Returns the events for what was not sent yet of the answer so far."""
        events: list[Event] = []
        for kind, text in ((REASONING, answer.reasoning), (MESSAGE, answer.text)):
            piece = text[self._sent[kind] :]
            if not piece:
                continue
            self._sent[kind] += len(piece)
            if self._open is None or self._open.kind is not kind:
                events += self._close("completed") + self._begin(kind)
                if kind is MESSAGE:
                    # Tokens that end before the message, such as the mark that ends reasoning, are
                    # no part of it.
                    start = self._form.text_start(self._answer)
                    self._waiting_logprobs = [
                        (length, entry)
                        for length, entry in self._waiting_logprobs
                        if length > start
                    ]
            assert self._open is not None
            events.append(self._write(piece, self._open))
        for call in answer.calls[self._sent_calls :]:
            self._waiting_logprobs = []  # The items of calls have no log-probabilities.
            events += self._close("completed") + self._call(call)
        self._sent_calls = len(answer.calls)
        return events

    def _write(self, piece: str, item: ItemInProgress) -> Event:
        """Returns the event that adds a piece to an item. An item that has log-probabilities takes
        those that wait."""
        if not item.kind.has_logprobs:
            return item.write(piece, ())
        event = item.write(piece, [entry for _, entry in self._waiting_logprobs])
        self._waiting_logprobs = []
        return event

    def _begin(self, kind: ItemKind) -> list[Event]:
        self._open = ItemInProgress(kind, len(self.items))
        return self._open.begin()

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.items.append(events[-1]["item"])
        self._open = None
        return events

    def _call(self, call: ParsedCall) -> list[Event]:
        """Adds a call and returns its events. Its arguments come in one piece."""
        index = len(self.items)
        item_id = f"fc_{secrets.token_hex(12)}"
        fields = {
            "type": "function_call",
            "id": item_id,
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
        }
        added = {**fields, "arguments": "", "status": "in_progress"}
        done = {**fields, "arguments": call.arguments, "status": "completed"}
        self.items.append(done)
        place = {"item_id": item_id, "output_index": index}
        name = "response.function_call_arguments"
        return [
            {"type": "response.output_item.added", "output_index": index, "item": added},
            {"type": f"{name}.delta", **place, "delta": call.arguments},
            {"type": f"{name}.done", **place, "name": call.name, "arguments": call.arguments},
            {"type": "response.output_item.done", "output_index": index, "item": done},
        ]
