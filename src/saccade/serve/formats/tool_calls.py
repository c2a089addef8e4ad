"""Reads tool calls in the forms in which Qwen's and Llama's models write them.

Qwen's (and Hermes') models write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for
each call. Llama's models (from 3.1 on) write ``{"name": ..., "parameters": {...}}`` as the whole
answer, and put ``;`` between several calls.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import OptionError
from saccade.serve.formats.grammar import JSON_WHITESPACE, GrammarVocabulary
from saccade.serve.formats.reasoning import mark_overlap
from saccade.serve.formats.strict_json import NotJson, Unfinished, read_object


@dataclass(frozen=True)
class Dialect:
    """How a model writes a call: as a JSON object with the function's name and its arguments."""

    opening: str  # The mark before the object; "" where calls are the whole answer.
    closing: str  # The mark after the object, or "".
    arguments_key: str  # The key of the arguments in the object.


QWEN = Dialect("<tool_call>", "</tool_call>", "arguments")
LLAMA = Dialect("", "", "parameters")


@dataclass(frozen=True)
class ParsedCall:
    """A tool call that a model made; ``arguments`` is JSON, as the model wrote it."""

    name: str
    arguments: str

    def response_fields(self) -> dict[str, Any]:
        """Returns the call in OpenAI's form, under a fresh id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def find_dialect(template: Any) -> Dialect | None:
    """Returns the dialect that a chat template asks for, None where it is not one of these two."""
    text = template if isinstance(template, str) else json.dumps(template, default=str)
    # Templates of Qwen's coder models have "<function=". These models write calls in a third way.
    if "tools" not in text or "<function=" in text:
        return None
    if QWEN.opening in text:
        return QWEN
    # Quotes have a backslash where the template was dumped as JSON.
    return LLAMA if '"parameters"' in text or '\\"parameters\\"' in text else None


def call_grammar(
    dialect: Dialect, tools: Sequence[Mapping[str, Any]], vocabulary: GrammarVocabulary
) -> str:
    r"""Returns the grammar (llguidance's Lark) of one call of one of these functions.

    In Qwen's dialect a first function, ``add``, has these two lines. j0 stands for its arguments::

        f0: <tool_call> "\n{\"name\": \"add\", \"arguments\": " j0 "}\n" </tool_call>
        j0: %json {"type": "object", ...}

    ``<tool_call>`` has no quotes here, because it is an added token of ``vocabulary``, which
    llguidance knows by name. A mark that is ordinary text is written in quotes.
    """
    from llguidance import LLMatcher

    newline = "\n" if dialect.opening else ""
    opening, closing = (_mark(mark, vocabulary) for mark in (dialect.opening, dialect.closing))
    lines = ["start: " + " | ".join(f"f{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        before = f'{newline}{{"name": {json.dumps(tool["name"])}, "{dialect.arguments_key}": '
        after = json.dumps("}" + newline)
        lines += [
            f"f{number}: {opening} {json.dumps(before)} j{number} {after} {closing}",
            f"j{number}: %json {json.dumps(_arguments_schema(tool))}",
        ]
    return str(LLMatcher.grammar_from_lark("\n".join(lines)))


def _mark(mark: str, vocabulary: GrammarVocabulary) -> str:
    """Returns a mark in Lark: the name of its token, or its text in quotes; "" if it is empty."""
    if not mark:
        return ""
    return mark if vocabulary.must_be_named(mark) else json.dumps(mark)


def _arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function's arguments. Raises OptionError if the parameters are
    not of type object."""
    parameters = tool.get("parameters") or {}
    if parameters.get("type", "object") != "object":
        raise OptionError(f"tools: the parameters of {tool['name']} must be of type object")
    return {"type": "object", "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **parameters}


def split_answer(
    dialect: Dialect, text: str, tool_names: Collection[str], *, is_complete: bool
) -> tuple[str, list[ParsedCall]]:
    """Returns an answer's words and its calls. The words are the text before the first call.

    Of an incomplete answer it returns only what later tokens cannot change. Text between and after
    calls is left out, as in vLLM. If the answer calls none of ``tool_names``, all of it is returned
    as words, even a call that was cut off. A call's object is read as JSON, so that a mark inside
    one of its strings is part of that string.
    """
    if not dialect.opening:
        return _split_unmarked(dialect, text, tool_names, is_complete)
    calls: list[ParsedCall] = []
    words_end: int | None = None  # Where the words end. None means that all text may be words.
    at = 0
    while (start := text.find(dialect.opening, at)) >= 0:
        try:
            call, at = _marked_call(dialect, text, start, tool_names)
        except Unfinished:
            if words_end is None and not is_complete:
                words_end = start
            break
        if call is not None:
            if words_end is None:
                words_end = start
            calls.append(call)
    words = text[:words_end]
    if not is_complete and words_end is None:
        # The text may end with the first characters of an opening mark.
        words = words[: len(words) - mark_overlap(words, dialect.opening)]
    # Blanks before a call are left out. An incomplete answer may still go on with a call.
    if calls or not is_complete:
        words = words.rstrip()
    return words, calls


def _marked_call(
    dialect: Dialect, text: str, start: int, tool_names: Collection[str]
) -> tuple[ParsedCall | None, int]:
    """Returns the call whose opening mark is at ``start``, and the index at which to read on.

    The call is None where no call of a known tool follows the mark. Raises Unfinished where the
    text ends before that can be said.
    """
    inside = start + len(dialect.opening)
    try:
        members, end = read_object(text, inside)
    except NotJson:
        return None, inside
    rest = text[end:].lstrip()
    if rest.startswith(dialect.closing):
        closing_start = len(text) - len(rest)
        return _call(dialect, members, tool_names), closing_start + len(dialect.closing)
    if dialect.closing.startswith(rest):  # More of the closing mark may follow.
        raise Unfinished
    return None, end


def _split_unmarked(
    dialect: Dialect, text: str, tool_names: Collection[str], is_complete: bool
) -> tuple[str, list[ParsedCall]]:
    """Does what :func:`split_answer` does for a dialect without marks, in which an answer is either
    all calls or all words."""
    unread = text.strip()
    if not is_complete:  # Calls are returned only when all of the answer is known to be calls.
        may_be_calls = not unread or unread.startswith("{")
        return ("", []) if may_be_calls else (text.rstrip(), [])
    calls: list[ParsedCall] = []
    while unread:
        try:
            members, end = read_object(unread)
        except (NotJson, Unfinished):
            return text, []
        call = _call(dialect, members, tool_names)
        if call is None:
            return text, []
        calls.append(call)
        unread = unread[end:].lstrip("; \n")
    return ("", calls) if calls else (text, [])


def _call(
    dialect: Dialect, members: Mapping[str, str], tool_names: Collection[str]
) -> ParsedCall | None:
    """Returns the call that an object stands for, None where it is no call of a known tool.

    ``members`` has the object's values as the model wrote them, so a string has its quotes.
    """
    name = members.get("name", "")
    arguments = members.get(dialect.arguments_key, "")
    if not (name.startswith('"') and arguments.startswith("{")):
        return None
    tool_name = json.loads(name)
    return ParsedCall(tool_name, arguments) if tool_name in tool_names else None
