"""Words of a person that spell a control token, kept as words.

A processor makes one string of template and words and then looks for control tokens in all of it,
so that a question with ``<|video_pad|>`` in it would hold a place for a video there is not, and one
with ``<|im_end|>`` would end the person's turn. Here such a text stands in the string as one token
that occurs nowhere else; in the ids that token gives way to the text's own, encoded as if nothing
were special. A text that spells no control token is left alone.

A control token is every token that was added to the tokenizer's vocabulary, marked special or not.
Words can spell one together that none of them spells alone, and a template decides which words
meet. So the written conversation is compared with one in which a mark stands for every text: where
the two hold different control tokens, the words made the difference, and all of them are taken out.

A document goes the same way, so that it is known which ids are its: see ``CONTEXT``.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from tokenizers import AddedToken

from saccade.core.errors import OptionError
from saccade.core.prompt import CONTEXT, Inputs

DOCUMENT = "document"  # the type of a part of a message
REASONING = "reasoning_content"  # the name that templates have for a turn's reasoning
REASONING_START, REASONING_END = "<think>", "</think>"
BLANK = "\u2581"  # how SentencePiece writes a blank
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def document(text: str) -> dict[str, str]:
    """A document as a part of a message."""
    return {"type": DOCUMENT, "text": f"{text.strip()}\n\n"}


@dataclass(frozen=True)
class Held:
    """Texts taken out of turns, and the turns with a mark in the place of each."""

    turns: list[dict[str, Any]]
    texts: tuple[str, ...] = ()
    mark: str = ""
    documents: frozenset[int] = frozenset()  # which of the texts


@dataclass(frozen=True)
class Standing:
    """The id that stands in for texts, and the ids of each, in order."""

    token: int
    ids: tuple[list[int], ...]
    documents: tuple[bool, ...]  # whether each is one


def special_in(processor: Any, texts: Iterable[str]) -> str | None:
    """A control token that one of these texts spells."""
    special = _special(processor)
    return next((token for text in texts for token in special if token in text), None)


def hold(processor: Any, turns: Sequence[Mapping[str, Any]]) -> Held:
    """Takes out of every text that spells a control token all but the blanks around it."""
    special = re.compile("|".join(map(re.escape, _special(processor))) or r"\b\B")
    return _taken_out(turns, lambda text: special.search(text) is not None)


def hold_every(turns: Sequence[Mapping[str, Any]]) -> Held:
    """Takes every text out, all but the blanks around it."""
    return _taken_out(turns, lambda text: True)


def write(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
) -> tuple[str, Standing | None]:
    """The conversation as ``render`` (a chat template) writes it, with words that are only words.

    Besides its content a turn may have ``reasoning_content`` and ``tool_calls``, whose arguments
    are the model's or a client's words as well. Raises OptionError where a tokenizer cannot write
    such words.
    """
    turns = [_with_reasoning_apart(processor, turn) for turn in turns]
    held = hold(processor, turns)
    written = render(held.turns)
    every = hold_every(turns)
    if every.texts != held.texts:
        template = render(every.turns)
        if _controls(processor, written) != _controls(processor, template):
            held, written = every, template
    return stand_in(name, processor, written, held)


def stand_in(name: str, processor: Any, templated: str, held: Held) -> tuple[str, Standing | None]:
    """The templated string with one token for every text held, and what is to replace it.

    Texts that the template put next to each other are encoded together.
    """
    if not held.texts:
        return templated, None
    tokenizer = getattr(processor, "tokenizer", processor)
    one = re.escape(held.mark) + r"(\d+)@"
    order: list[tuple[str, bool]] = []
    pieces: list[str] = []
    done = 0
    for found in re.finditer(one, templated):
        number, is_adjacent = int(found[1]), bool(order) and found.start() == done
        text, is_document = held.texts[number], number in held.documents
        if is_adjacent and not is_document and not order[-1][1]:
            order[-1] = (order[-1][0] + text, False)
        else:
            pieces.append(templated[done : found.start()])
            order.append((text, is_document))
        done = found.end()
    pieces.append(templated[done:])
    ids = tuple(_encoded(name, processor, text) for text, _ in order)
    for number, added in tokenizer.added_tokens_decoder.items():
        plain = not (added.lstrip or added.rstrip or added.single_word)
        spoken_for = added.content in {*_placeholders(processor), tokenizer.unk_token}
        if not plain or spoken_for or added.content in templated:
            continue
        text = added.content.join(pieces)
        if tokenizer(text)["input_ids"].count(number) == len(order):
            return text, Standing(number, ids, tuple(is_document for _, is_document in order))
    raise _cannot(name)


def spell(name: str, inputs: Inputs, standing: Standing | None) -> Inputs:
    """The processor's inputs with every text in its place."""
    if standing is None:
        return inputs
    length = inputs["input_ids"].shape[1]
    places = (inputs["input_ids"][0] == standing.token).nonzero()[:, 0]
    if len(places) != len(standing.ids):
        raise _cannot(name)
    times = torch.ones(length, dtype=torch.long)
    times[places] = torch.tensor([len(ids) for ids in standing.ids])
    rows = torch.arange(length).repeat_interleave(times)
    longer = {key: inputs[key][:, rows] for key in PER_TOKEN if key in inputs}
    ids = longer["input_ids"]
    here = ids == standing.token
    ids[here] = torch.tensor([i for each in standing.ids for i in each])
    if any(standing.documents):
        lengths = torch.tensor([len(each) for each in standing.ids])
        marked = torch.tensor(standing.documents).long().repeat_interleave(lengths)
        longer[CONTEXT] = torch.zeros_like(ids).masked_scatter(here, marked)
    return {**inputs, **longer}


def _taken_out(turns: Sequence[Mapping[str, Any]], is_taken: Callable[[str], bool]) -> Held:
    """The turns with a mark in the place of every document and of each text that is to be taken."""
    used = set(re.findall(r"@\d+:", repr(turns)))
    mark = next(mark for mark in (f"@{number}:" for number in count()) if mark not in used)
    texts: list[str] = []
    documents: set[int] = set()

    def marked(text: str, taken: str) -> str:
        """The text with a mark in the place of all but its blanks, for which ``taken`` is kept."""
        texts.append(taken)
        return text.replace(text.strip(), f"{mark}{len(texts) - 1}@")

    def of_part(part: Mapping[str, str]) -> dict[str, str]:
        text, is_document = part.get("text", ""), part.get("type") == DOCUMENT
        if not text.strip() or not (is_document or is_taken(text)):
            return dict(part)
        if is_document:
            documents.add(len(texts))
        return {**part, "type": "text", "text": marked(text, text.strip())}

    def of_argument(value: Any) -> Any:
        """A call's arguments, in which templates write strings as JSON does."""
        match value:
            case str() if value.strip() and is_taken(value):
                return marked(value, json.dumps(value.strip(), ensure_ascii=False)[1:-1])
            case dict():
                return {of_argument(key): of_argument(each) for key, each in value.items()}
            case list():
                return [of_argument(each) for each in value]
        return value

    def of_call(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {
            **call,
            "function": {**function, "arguments": of_argument(function["arguments"])},
        }

    def of_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
        changed = {**turn, "content": [of_part(part) for part in turn["content"]]}
        reasoning = turn.get(REASONING, "")
        if reasoning.strip() and is_taken(reasoning):
            changed[REASONING] = marked(reasoning, reasoning.strip())
        if "tool_calls" in turn:
            changed["tool_calls"] = [of_call(call) for call in turn["tool_calls"]]
        return changed

    changed = [of_turn(turn) for turn in turns]
    return Held(changed, tuple(texts), mark, frozenset(documents))


def _with_reasoning_apart(processor: Any, turn: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's turn with its reasoning in a field of its own.

    Templates that know of reasoning look for its end in the words to leave it out of earlier turns.
    They could not find it in words that are taken out.
    """
    texts = [part.get("text", "") for part in turn["content"]]
    knows = REASONING in str(getattr(processor, "chat_template", ""))
    if turn["role"] != "assistant" or not knows or len(texts) != 1 or REASONING in turn:
        return dict(turn)
    before, end, after = texts[0].rpartition(REASONING_END)
    if not end:
        return dict(turn)
    reasoning = before.rpartition(REASONING_START)[2].strip("\n")
    content = [{**turn["content"][0], "text": after.lstrip("\n")}]
    return {**turn, "content": content, REASONING: reasoning}


def _controls(processor: Any, text: str) -> tuple[list[int], list[int]]:
    """The control tokens that a tokenizer reads in a text, in order, and how often the text holds
    each of those that a processor looks for."""
    special = _special(processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = _control_ids(tokenizer, special)
    read = [number for number in tokenizer(text)["input_ids"] if number in ids]
    return read, [text.count(token) for token in sorted(_placeholders(processor) & set(special))]


def _control_ids(tokenizer: Any, special: Iterable[str]) -> set[int]:
    ids = {tokenizer.convert_tokens_to_ids(token) for token in special}
    return ids - {tokenizer.unk_token_id}


def _special(processor: Any) -> list[str]:
    """What a tokenizer or its processor would not read as text, the longest first.

    Some vocabularies hold runs of blanks or single characters as added tokens. Those are text.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    added = tokenizer.added_tokens_decoder.values()
    found = {token.content for token in added if token.special or _is_control(token.content)}
    found |= _placeholders(processor)
    return sorted(found - {""}, key=lambda token: (-len(token), token))


def _is_control(content: str) -> bool:
    """Whether an added token that is not marked special may control the model."""
    return len(content) > 1 and bool(content.replace(BLANK, " ").strip())


def _placeholders(processor: Any) -> set[str]:
    """The tokens that a processor itself looks for."""
    named = {key: value for key, value in vars(processor).items() if key.endswith("_token")}
    return {str(value) for value in named.values() if isinstance(value, str | AddedToken)}


def _encoded(name: str, processor: Any, text: str) -> list[int]:
    """The ids of a text in which nothing is special, made sure of: none is, and it reads the same.

    Where a tokenizer knows no such mode, special tokens are cut in two.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    special = _special(processor)
    forbidden = _control_ids(tokenizer, special)
    present = [token for token in special if token in text]
    whole = _unspecial(tokenizer)(text, add_special_tokens=False, split_special_tokens=True)
    pieces = re.split(
        "|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in special), text
    )
    cut = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces if piece]
    for ids in (whole["input_ids"], [number for piece in cut for number in piece]):
        read = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if not forbidden & set(ids) and all(token in read for token in present):
            return list(ids)
    raise _cannot(name)


@lru_cache(maxsize=4)
def _unspecial(tokenizer: Any) -> Any:
    """A tokenizer of its own: this mode is a switch on it, which other threads would see."""
    return copy.deepcopy(tokenizer)


def _cannot(name: str) -> OptionError:
    return OptionError(f"{name} cannot read special tokens as text: leave them out of the question")
