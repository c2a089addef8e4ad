"""Words of a person that spell a special token, kept as words.

A processor makes one string of template and words and then looks for special tokens in all of it,
so that a question with ``<|video_pad|>`` in it would hold a place for a video there is not, and one
with ``<|im_end|>`` would end the person's turn. Here such a text stands in the string as one token
that occurs nowhere else; in the ids that token gives way to the text's own, encoded as if nothing
were special. A text that spells no special token is left alone.

A document goes the same way, so that it is known which ids are its: see ``CONTEXT``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from tokenizers import AddedToken

from saccade.core.errors import OptionError
from saccade.core.prompt import CONTEXT, Inputs

DOCUMENT = "document"  # the type of a part of a message
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
    """A special token that one of these texts spells."""
    special = _special(processor)
    return next((token for text in texts for token in special if token in text), None)


def hold(processor: Any, turns: Sequence[Mapping[str, Any]]) -> Held:
    """Takes out of every text that spells a special token all but the blanks around it."""
    special = re.compile("|".join(map(re.escape, _special(processor))) or r"\b\B")
    written = [part.get("text", "") for turn in turns for part in turn["content"]]
    marks = (f"@{number}:" for number in count())
    used = {mark for text in written for mark in re.findall(r"@\d+:", text)}
    mark = next(mark for mark in marks if mark not in used)
    texts: list[str] = []
    documents: set[int] = set()

    def held(part: Mapping[str, str]) -> dict[str, str]:
        text, document = part.get("text", ""), part.get("type") == DOCUMENT
        if not (special.search(text) or (document and text.strip())):
            return dict(part)
        if document:
            documents.add(len(texts))
        texts.append(text.strip())
        standing = text.replace(texts[-1], f"{mark}{len(texts) - 1}@")
        return {**part, "type": "text", "text": standing}

    changed = [{**turn, "content": [held(part) for part in turn["content"]]} for turn in turns]
    return Held(changed, tuple(texts), mark, frozenset(documents))


def stand_in(name: str, processor: Any, templated: str, held: Held) -> tuple[str, Standing | None]:
    """The templated string with one token for every text held, and what is to replace it."""
    if not held.texts:
        return templated, None
    tokenizer = getattr(processor, "tokenizer", processor)
    marks = re.compile(re.escape(held.mark) + r"(\d+)@")
    order = [int(found[1]) for found in marks.finditer(templated)]
    ids = [_encoded(name, processor, text) for text in held.texts]
    for number, added in tokenizer.added_tokens_decoder.items():
        plain = not (added.lstrip or added.rstrip or added.single_word)
        spoken_for = added.content in {*_placeholders(processor), tokenizer.unk_token}
        if not plain or spoken_for or added.content in templated:
            continue
        text = marks.sub(lambda found, token=added.content: token, templated)
        if tokenizer(text)["input_ids"].count(number) == len(order):
            documents = tuple(i in held.documents for i in order)
            return text, Standing(number, tuple(ids[i] for i in order), documents)
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


def _special(processor: Any) -> list[str]:
    """What a tokenizer or its processor would not read as text, the longest first."""
    tokenizer = getattr(processor, "tokenizer", processor)
    added = tokenizer.added_tokens_decoder.values()
    found = {token.content for token in added if token.special} | _placeholders(processor)
    return sorted(found - {""}, key=lambda token: (-len(token), token))


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
    forbidden = {tokenizer.convert_tokens_to_ids(token) for token in special}
    forbidden -= {tokenizer.unk_token_id}
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
