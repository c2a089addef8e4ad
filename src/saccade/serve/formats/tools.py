"""Calls of tools, as chat templates carry them: Qwen's and Llama's ways of writing one.

Qwen's (and Hermes') models write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as
often as they call; Llama's (from 3.1 on) ``{"name": ..., "parameters": {...}}`` and nothing else,
with ``;`` between several.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import OptionError
from saccade.serve.formats.grammar import SPACES
from saccade.serve.formats.strict_json import NotJson, Unfinished, read_object


@dataclass(frozen=True)
class Dialect:
    """How a model writes a call: between two marks (or nothing else at all), under these keys."""

    opening: str
    closing: str
    arguments: str


QWEN = Dialect("<tool_call>", "</tool_call>", "arguments")
LLAMA = Dialect("", "", "parameters")


@dataclass(frozen=True)
class MadeCall:
    name: str
    arguments: str  # JSON

    def told(self) -> dict[str, Any]:
        """OpenAI's form of it, under a fresh id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def dialect(template: Any) -> Dialect | None:
    """The one a chat template asks for; None where it has none that is known here."""
    text = template if isinstance(template, str) else json.dumps(template, default=str)
    if "tools" not in text or "<function=" in text:  # a third one, of Qwen's coders
        return None
    if QWEN.opening in text:
        return QWEN
    return LLAMA if '"parameters"' in text or '\\"parameters\\"' in text else None


def grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> str:
    """The grammar (llguidance's Lark) of one call of one of these functions."""
    from llguidance import LLMatcher

    line = "\n" if dialect.opening else ""
    lines = ["start: " + " | ".join(f"f{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        before = f'{dialect.opening}{line}{{"name": {json.dumps(tool["name"])}, '
        before += f'"{dialect.arguments}": '
        after = "}" + line + dialect.closing
        lines += [
            f"f{number}: {json.dumps(before)} j{number} {json.dumps(after)}",
            f"j{number}: %json {json.dumps(_form(tool))}",
        ]
    return str(LLMatcher.grammar_from_lark("\n".join(lines)))


def _form(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    given = tool.get("parameters") or {}
    if given.get("type", "object") != "object":
        raise OptionError(f"tools: the parameters of {tool['name']} must be of type object")
    return {"type": "object", "x-guidance": {"whitespace_pattern": SPACES}, **given}


def split(
    dialect: Dialect, text: str, names: Collection[str], *, done: bool
) -> tuple[str, list[MadeCall]]:
    """The words and the calls of an answer; of one under way (not ``done``) those that are certain.

    What is no call of one of ``names`` is words, and so is a call that was cut off. A call's object
    is read as JSON, so that a mark inside a string of it is a part of that string.
    """
    if not dialect.opening:
        return _whole(dialect, text, names, done)
    calls: list[MadeCall] = []
    words_end: int | None = None  # where the words end, once that is known
    at = 0
    while (start := text.find(dialect.opening, at)) >= 0:
        try:
            call, at = _marked_call(dialect, text, start, names)
        except Unfinished:
            if words_end is None and not done:
                words_end = start
            break
        if call is not None:
            calls.append(call)
            words_end = start if words_end is None else words_end
    words = text[:words_end]
    if not done and words_end is None:
        words = words[: len(words) - _begun(words, dialect.opening)]
    return (words if done and not calls else words.rstrip()), calls


def _marked_call(
    dialect: Dialect, text: str, start: int, names: Collection[str]
) -> tuple[MadeCall | None, int]:
    """The call whose opening mark stands at ``start``, None if it is none, and where to go on.

    Raises Unfinished where the text ends before that is certain.
    """
    inside = start + len(dialect.opening)
    try:
        members, end = read_object(text, inside)
    except NotJson:
        return None, inside
    rest = text[end:].lstrip()
    if rest.startswith(dialect.closing):
        return _call(dialect, members, names), len(text) - len(rest) + len(dialect.closing)
    if dialect.closing.startswith(rest):
        raise Unfinished
    return None, end


def _whole(
    dialect: Dialect, text: str, names: Collection[str], done: bool
) -> tuple[str, list[MadeCall]]:
    """An answer that is calls, or that is words."""
    rest = text.strip()
    if not done:
        return ("", []) if rest[:1] in ("", "{") else (text.rstrip(), [])
    calls: list[MadeCall] = []
    while rest:
        try:
            members, end = read_object(rest)
        except (NotJson, Unfinished):
            return text, []
        call = _call(dialect, members, names)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip("; \n")
    return ("", calls) if calls else (text, [])


def _call(dialect: Dialect, members: Mapping[str, str], names: Collection[str]) -> MadeCall | None:
    """The call that an object makes, its arguments as the model wrote them."""
    name, arguments = members.get("name", ""), members.get(dialect.arguments, "")
    if not (name.startswith('"') and arguments.startswith("{")):
        return None
    called = json.loads(name)
    return MadeCall(called, arguments) if called in names else None


def _begun(text: str, mark: str) -> int:
    """How many of the last characters may be a mark's first."""
    most = min(len(mark) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
