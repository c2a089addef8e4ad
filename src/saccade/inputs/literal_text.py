"""Keeps users' text literal where it spells a control token.

A processor writes template and text into one string and then looks for control tokens in all of
it. A question with ``<|video_pad|>`` in it would therefore reserve a place for a video that does
not exist, and one with ``<|im_end|>`` would end the user's turn. So a text that spells a control
token, alone or together with its neighbours, is handled in three steps:

1. It is taken out of its turn, and a mark such as ``@0:3@`` (for the text number 3) is put there.
2. The template is rendered. Then a placeholder takes the place of every mark in the string. It is
   an added token of the tokenizer that occurs nowhere else in the string.
3. The processor makes ids of the string. There the id of each placeholder is replaced by the ids of
   the text, encoded as if no token were special.

Every token that was added to the tokenizer's vocabulary is a control token, whether it is flagged
as special or not. Single characters and runs of blanks count only if they are flagged. Adjacent
texts can spell a control token together, and only the template knows which texts are adjacent. So
the conversation is also rendered with a mark in the place of every text. If this rendering and the
ordinary one have different control tokens, the texts made the difference, and all are replaced.

Documents are replaced in the same way, which shows which ids are theirs: see ``DOCUMENT_MASK``.
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
from saccade.core.prompt import DOCUMENT_MASK, Inputs

DOCUMENT = "document"  # The type of a message's part.
REASONING = "reasoning_content"  # The name that templates use for a turn's reasoning.
REASONING_START, REASONING_END = "<think>", "</think>"
BLANK = "\u2581"  # SentencePiece writes a blank like this.
# The outputs of a processor that have one number for each token.
FIELDS_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def document_part(text: str) -> dict[str, str]:
    """Returns a document as a part of a message."""
    return {"type": DOCUMENT, "text": f"{text.strip()}\n\n"}


@dataclass(frozen=True)
class Extraction:
    """Texts that were taken out of turns, and the turns with a mark in the place of each."""

    turns: list[dict[str, Any]]
    texts: tuple[str, ...] = ()
    mark: str = ""  # How every mark begins, such as "@0:". A text's index and "@" follow.
    documents: frozenset[int] = frozenset()  # The indices of the texts that are documents.


@dataclass(frozen=True)
class Placeholders:
    """What is needed to put texts in the place of their placeholders, once there are ids.

    All placeholders of a conversation are the same token. The first stands for the first text.
    """

    token: int  # The placeholder's id.
    ids: tuple[list[int], ...]  # The ids of each text, in order.
    are_documents: tuple[bool, ...]  # Whether each text is a document.


def find_control_token(processor: Any, texts: Iterable[str]) -> str | None:
    """Returns a control token that one of these texts spells, None where none does."""
    tokens = _control_token_texts(processor)
    return next((token for text in texts for token in tokens if token in text), None)


def extract_control_texts(
    processor: Any, turns: Sequence[Mapping[str, Any]], rendered_without_marks: str = ""
) -> Extraction:
    """Takes out every document and every text that spells a control token.

    Blanks around a text stay in the turn. The mark is chosen so that it does not occur in the turns
    or in ``rendered_without_marks``. This is the string that a template made of the turns before
    any text was taken out, or empty if there is none yet.
    """
    matches_nothing = r"\b\B"
    control_tokens = "|".join(map(re.escape, _control_token_texts(processor)))
    pattern = re.compile(control_tokens or matches_nothing)
    return _extract(turns, lambda text: pattern.search(text) is not None, rendered_without_marks)


def extract_all(turns: Sequence[Mapping[str, Any]], rendered_without_marks: str = "") -> Extraction:
    """Takes out every text; otherwise as :func:`extract_control_texts`."""
    return _extract(turns, lambda text: True, rendered_without_marks)


def render_conversation(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
) -> tuple[str, Placeholders | None]:
    """Returns the conversation as ``render`` (a chat template) writes it, and its placeholders.

    Placeholders are in the place of documents and of texts that must stay literal; they are None if
    there are neither. Besides its content a turn may have ``reasoning_content`` and ``tool_calls``,
    whose arguments are text of the model or a client as well. ``name`` is the model's, for errors.
    Raises OptionError if a tokenizer cannot encode a text literally.
    """
    turns = [_separate_reasoning(processor, turn) for turn in turns]

    def extract(rendered_without_marks: str) -> tuple[Extraction, str]:
        """Returns what has to be taken out of the turns, and the rest as the template writes it."""
        extraction = extract_control_texts(processor, turns, rendered_without_marks)
        written = render(extraction.turns)
        full_extraction = extract_all(turns, rendered_without_marks)
        if full_extraction.texts != extraction.texts:
            skeleton = render(full_extraction.turns)  # It has a mark in the place of every text.
            # A difference means that adjacent texts spell a control token together.
            tokens_written = _control_tokens_in(processor, written)
            if tokens_written != _control_tokens_in(processor, skeleton):
                return full_extraction, skeleton
        return extraction, written

    extraction, written = extract("")
    if extraction.texts:
        # The mark must not occur in what the template itself writes either, such as tools. So the
        # turns are rendered once without marks, and the mark is chosen again. Most conversations
        # have no text to extract and do without this.
        extraction, written = extract(render([_with_documents_as_text(turn) for turn in turns]))
    return insert_placeholders(name, processor, written, extraction)


def insert_placeholders(
    name: str, processor: Any, templated: str, extraction: Extraction
) -> tuple[str, Placeholders | None]:
    """Returns the templated string with placeholders in the place of marks, and the texts' ids, or
    None if nothing was extracted.

    Texts that the template left out have no placeholder. Texts that the template wrote next to each
    other are encoded together, and have one placeholder. A document is encoded by itself, so that
    its ids can be told from those of other texts. Raises OptionError if a text cannot be encoded
    literally, or if no added token can be the placeholder.
    """
    if not extraction.texts:
        return templated, None
    tokenizer = getattr(processor, "tokenizer", processor)
    mark = re.escape(extraction.mark) + r"(\d+)@"
    texts: list[tuple[str, bool]] = []  # Each text, and whether it is a document.
    pieces: list[str] = []
    done = 0
    for match in re.finditer(mark, templated):
        number = int(match[1])
        text = extraction.texts[number]
        is_document = number in extraction.documents
        follows_a_mark = bool(texts) and match.start() == done
        previous_text, previous_is_document = texts[-1] if texts else ("", False)
        if follows_a_mark and not (is_document or previous_is_document):
            texts[-1] = (previous_text + text, False)
        else:
            pieces.append(templated[done : match.start()])
            texts.append((text, is_document))
        done = match.end()
    pieces.append(templated[done:])
    ids = tuple(_encode_literally(name, processor, text) for text, _ in texts)
    # The first added token that is fit for it becomes the placeholder.
    for number, added in tokenizer.added_tokens_decoder.items():
        # A token with one of these flags takes the blanks beside it, or is not read inside a word.
        is_plain = not (added.lstrip or added.rstrip or added.single_word)
        is_reserved = added.content in {*_media_tokens(processor), tokenizer.unk_token}
        if not is_plain or is_reserved or added.content in templated:
            continue
        text = added.content.join(pieces)
        reads_every_placeholder = tokenizer(text)["input_ids"].count(number) == len(texts)
        if reads_every_placeholder:
            are_documents = tuple(is_document for _, is_document in texts)
            return text, Placeholders(number, ids, are_documents)
    raise _cannot_encode_error(name)


def replace_placeholders(name: str, inputs: Inputs, placeholders: Placeholders | None) -> Inputs:
    """Returns the processor's inputs with the ids of every text in the place of its placeholder.

    The inputs are those of one conversation. If a text is a document, ``DOCUMENT_MASK`` is added to
    them. Raises OptionError where there are more or fewer placeholders than texts.
    """
    if placeholders is None:
        return inputs
    length = inputs["input_ids"].shape[1]
    places = (inputs["input_ids"][0] == placeholders.token).nonzero()[:, 0]
    if len(places) != len(placeholders.ids):
        raise _cannot_encode_error(name)
    # Each placeholder is first repeated as often as its text has ids, in every field. If the ids
    # are [a, P, b] and the text of P has three ids, ``rows`` is [0, 1, 1, 1, 2].
    repeats = torch.ones(length, dtype=torch.long)
    lengths = torch.tensor([len(ids) for ids in placeholders.ids], dtype=torch.long)
    repeats[places] = lengths
    rows = torch.arange(length).repeat_interleave(repeats)
    expanded = {key: inputs[key][:, rows] for key in FIELDS_PER_TOKEN if key in inputs}
    ids = expanded["input_ids"]
    is_text = ids == placeholders.token
    all_text_ids = [i for text_ids in placeholders.ids for i in text_ids]
    ids[is_text] = torch.tensor(all_text_ids, dtype=ids.dtype)
    if any(placeholders.are_documents):
        is_document = torch.tensor(placeholders.are_documents).long().repeat_interleave(lengths)
        expanded[DOCUMENT_MASK] = torch.zeros_like(ids).masked_scatter(is_text, is_document)
    return {**inputs, **expanded}


def _with_documents_as_text(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a turn with its documents as plain text, because templates know no documents."""
    content = [
        {**part, "type": "text"} if part.get("type") == DOCUMENT else dict(part)
        for part in turn["content"]
    ]
    return {**turn, "content": content}


def _extract(
    turns: Sequence[Mapping[str, Any]],
    must_extract: Callable[[str], bool],
    rendered_without_marks: str,
) -> Extraction:
    """Puts a mark in the place of every document, and of each text that must be extracted."""
    used = set(re.findall(r"@\d+:", repr(turns) + rendered_without_marks))
    mark = next(mark for mark in (f"@{number}:" for number in count()) if mark not in used)
    texts: list[str] = []
    documents: set[int] = set()

    def put_mark(text: str, extracted: str) -> str:
        """Stores ``extracted``, and returns ``text`` with a mark in the place of all but the blanks
        around it.

        ``extracted`` is the text without those blanks, as a template writes it: in the arguments of
        a call it has JSON's escapes.
        """
        texts.append(extracted)
        return text.replace(text.strip(), f"{mark}{len(texts) - 1}@")

    def extract_from_part(part: Mapping[str, str]) -> dict[str, str]:
        text = part.get("text", "")
        is_document = part.get("type") == DOCUMENT
        if not text.strip() or not (is_document or must_extract(text)):
            return dict(part)
        if is_document:
            documents.add(len(texts))
        return {**part, "type": "text", "text": put_mark(text, text.strip())}

    def extract_from_argument(value: Any) -> Any:
        """Handles the arguments of a call, whose strings templates write as JSON."""
        match value:
            case str() if value.strip() and must_extract(value):
                in_quotes = json.dumps(value.strip(), ensure_ascii=False)
                return put_mark(value, in_quotes[1:-1])
            case dict():
                return {
                    extract_from_argument(key): extract_from_argument(each)
                    for key, each in value.items()
                }
            case list():
                return [extract_from_argument(each) for each in value]
        return value

    def extract_from_call(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {
            **call,
            "function": {**function, "arguments": extract_from_argument(function["arguments"])},
        }

    def extract_from_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
        new_turn = {**turn, "content": [extract_from_part(part) for part in turn["content"]]}
        reasoning = turn.get(REASONING, "")
        if reasoning.strip() and must_extract(reasoning):
            new_turn[REASONING] = put_mark(reasoning, reasoning.strip())
        if "tool_calls" in turn:
            new_turn["tool_calls"] = [extract_from_call(call) for call in turn["tool_calls"]]
        return new_turn

    new_turns = [extract_from_turn(turn) for turn in turns]
    return Extraction(new_turns, tuple(texts), mark, frozenset(documents))


def _separate_reasoning(processor: Any, turn: Mapping[str, Any]) -> dict[str, Any]:
    """Moves the reasoning of an assistant's turn into a field of its own. Text before the reasoning
    is dropped.

    Templates that support reasoning look for its end in the text, to leave it out of earlier turns.
    They could not find it in a text that has been extracted.
    """
    texts = [part.get("text", "") for part in turn["content"]]
    supports_reasoning = REASONING in str(getattr(processor, "chat_template", ""))
    if turn["role"] != "assistant" or not supports_reasoning:
        return dict(turn)
    if len(texts) != 1 or REASONING in turn:
        return dict(turn)
    before, end, after = texts[0].rpartition(REASONING_END)
    if not end:
        return dict(turn)
    reasoning = before.rpartition(REASONING_START)[2].strip("\n")
    content = [{**turn["content"][0], "text": after.lstrip("\n")}]
    return {**turn, "content": content, REASONING: reasoning}


def _control_tokens_in(processor: Any, text: str) -> tuple[list[int], list[int]]:
    """Returns which control tokens a text has, to compare it with another text.

    The first list has the ids of those that the tokenizer reads, in order. The second list has a
    count for each token that the processor itself looks for: how often it occurs in the text.
    """
    control_texts = _control_token_texts(processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = _control_ids(tokenizer, control_texts)
    read = [number for number in tokenizer(text)["input_ids"] if number in ids]
    media_tokens = sorted(_media_tokens(processor) & set(control_texts))
    return read, [text.count(token) for token in media_tokens]


def _control_ids(tokenizer: Any, tokens: Iterable[str]) -> set[int]:
    ids = {tokenizer.convert_tokens_to_ids(token) for token in tokens}
    return ids - {tokenizer.unk_token_id}


def _control_token_texts(processor: Any) -> list[str]:
    """Returns the texts of all control tokens of a tokenizer and its processor, longest first.

    Some vocabularies have runs of blanks or single characters as added tokens. Those are text,
    unless they are flagged as special.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    added = tokenizer.added_tokens_decoder.values()
    tokens = {token.content for token in added if token.special or _is_control(token.content)}
    tokens |= _media_tokens(processor)
    return sorted(tokens - {""}, key=lambda token: (-len(token), token))


def _is_control(content: str) -> bool:
    """Returns whether an added token that is not flagged as special is a control token: it is
    longer than a character and no run of blanks."""
    return len(content) > 1 and bool(content.replace(BLANK, " ").strip())


def _media_tokens(processor: Any) -> set[str]:
    """Returns the tokens that a processor itself looks for, such as those of images."""
    fields = {key: value for key, value in vars(processor).items() if key.endswith("_token")}
    return {str(value) for value in fields.values() if isinstance(value, str | AddedToken)}


def _encode_literally(name: str, processor: Any, text: str) -> list[int]:
    """Returns the ids of a text whose control tokens are encoded as ordinary characters.

    A tokenizer may have a mode for this (``split_special_tokens``). Otherwise each control token is
    cut after its first character (``<`` and ``|im_end|>``), and the pieces are encoded one by one.
    A result is used only if it has no control id, and if the control tokens are written out in the
    text that it decodes to. Raises OptionError if neither result is like that.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    control_texts = _control_token_texts(processor)
    forbidden = _control_ids(tokenizer, control_texts)
    present = [token for token in control_texts if token in text]
    encoding = _copy_tokenizer(tokenizer)(text, add_special_tokens=False, split_special_tokens=True)
    after_first_characters = "|".join(
        f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in control_texts
    )
    ids_of_pieces: list[int] = []
    for piece in re.split(after_first_characters, text):
        if piece:
            ids_of_pieces += tokenizer(piece, add_special_tokens=False)["input_ids"]
    for ids in (encoding["input_ids"], ids_of_pieces):
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if not forbidden & set(ids) and all(token in decoded for token in present):
            return list(ids)
    raise _cannot_encode_error(name)


@lru_cache(maxsize=4)
def _copy_tokenizer(tokenizer: Any) -> Any:
    """Copies a tokenizer, because ``split_special_tokens`` is a switch on it, which other threads
    that use the original would see."""
    return copy.deepcopy(tokenizer)


def _cannot_encode_error(name: str) -> OptionError:
    return OptionError(f"{name} cannot read special tokens as text: leave them out of the question")
