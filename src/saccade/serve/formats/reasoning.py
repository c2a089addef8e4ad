"""Separates a thinking model's reasoning from its answer, by the marks around the reasoning.

Which marks a model uses is found in its tokenizer and its chat template, never by its name. A
template may write the opening mark itself, as the last thing of the prompt, or both marks where
thinking is switched off. So the end of the prompt tells whether an answer begins within reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from saccade.core.sampling import Grammar

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
PROMPT_END_TOKENS = 16  # how many of a prompt's last tokens are searched for a mark at its end

Start = Literal["open", "possible", "closed"]
"""Whether an answer begins within reasoning, may begin with it, or has none."""


@dataclass(frozen=True)
class Marks:
    """The texts before and after a model's reasoning, with their ids if both are single tokens."""

    opening: str
    closing: str
    opening_id: int | None = None
    closing_id: int | None = None

    def start_after(self, prompt_end: str) -> Start:
        """Returns how an answer begins after a prompt that ends in this text: within reasoning
        ("open"), perhaps with it ("possible"), or without it ("closed")."""
        end = prompt_end.rstrip()
        if end.endswith(self.opening):
            return "open"
        return "closed" if end.endswith(self.closing) else "possible"

    def decoder(self, tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
        """Returns a decoder that leaves out special tokens, but writes the marks.

        It is None where no mark is a special token, because any decoder writes the marks then.
        """
        by_id = {self.opening_id: self.opening, self.closing_id: self.closing}
        marks = {token: text for token, text in by_id.items() if token is not None}
        if marks.keys().isdisjoint(tokenizer.all_special_ids):
            return None

        def decode_between_marks(ids: Sequence[int]) -> str:
            text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
            return text

        def decode(ids: Sequence[int]) -> str:
            pieces: list[str] = []
            start = 0
            for index, token in enumerate(ids):
                if token in marks:
                    pieces += [decode_between_marks(ids[start:index]), marks[token]]
                    start = index + 1
            pieces.append(decode_between_marks(ids[start:]))
            return "".join(pieces)

        return decode


@lru_cache(maxsize=8)
def _token_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's added tokens."""
    return {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}


def find_marks(tokenizer: Any, template: Any) -> Marks | None:
    """Returns the marks that a tokenizer has as tokens, or else those whose closing mark a chat
    template contains; None if there are none."""
    added = _token_ids(tokenizer)
    for opening, closing in MARKS:
        if opening in added and closing in added:
            return Marks(opening, closing, added[opening], added[closing])
    text = str(template)
    return next((Marks(*marks) for marks in MARKS if marks[1] in text), None)


@dataclass(frozen=True)
class Reasoning:
    """Finds the reasoning in one answer."""

    marks: Marks
    start: Start

    def split(self, text: str, *, is_complete: bool) -> tuple[str, str]:
        """Splits an answer into its reasoning and the rest.

        Of an incomplete answer it returns only text that later tokens cannot change. Line ends
        around the reasoning belong to neither. Without reasoning the rest is the whole text.
        """
        if self.start == "closed":
            return "", text
        marks = self.marks
        stripped = text.lstrip()
        begins_with_mark = stripped.startswith(marks.opening)
        is_part_of_mark = marks.opening.startswith(stripped) and not begins_with_mark
        if is_part_of_mark and not is_complete:
            return "", ""  # Later tokens may complete the mark.
        if not begins_with_mark and self.start == "possible":
            return "", text
        body = stripped[len(marks.opening) :] if begins_with_mark else text
        reasoning, closing, rest = body.partition(marks.closing)
        if closing:
            return reasoning.strip("\n"), rest.lstrip("\n")
        if not is_complete:
            reasoning = reasoning[: len(reasoning) - mark_overlap(reasoning, marks.closing)]
        return reasoning.strip("\n"), ""

    def count_tokens(self, ids: Sequence[int], text: str) -> int:
        """Returns how many of an answer's tokens are reasoning, its marks included.

        ``text`` is the answer's text. Returns 0 where the closing mark is not a single token,
        because the end cannot then be found in the ids.
        """
        if self.start == "closed" or self.marks.closing_id is None:
            return 0
        if self.start != "open" and not text.lstrip().startswith(self.marks.opening):
            return 0
        end = _index(ids, self.marks.closing_id)
        return len(ids) if end is None else end + 1

    def grammar(self, grammar: Grammar, end_ids: Sequence[int], vocab: int) -> Grammar:
        """Returns the grammar of an answer that may reason first and then follows ``grammar``.

        It is ``grammar`` itself if the answer has no reasoning, or if the marks are not single
        tokens.
        """
        opening_id, closing_id = self.marks.opening_id, self.marks.closing_id
        if self.start == "closed" or opening_id is None or closing_id is None:
            return grammar
        return GrammarAfterReasoning(
            grammar, opening_id, closing_id, self.start == "open", tuple(end_ids), vocab
        )


@dataclass(frozen=True)
class GrammarAfterReasoning:
    """Allows any reasoning that does not end the answer, and applies a grammar to what follows."""

    grammar: Grammar
    opening_id: int
    closing_id: int
    is_open: bool  # Whether the prompt ends within reasoning.
    end_ids: tuple[int, ...]  # The ids that end an answer, which are not allowed within reasoning.
    vocab: int  # The number of ids, which is the length of a mask.

    def __call__(self, answer: Sequence[int]) -> Bool[Tensor, " vocab"] | None:
        """Returns a mask of the tokens that may come next; None where all may."""
        if self.is_open or (answer and answer[0] == self.opening_id):
            end = _index(answer, self.closing_id)
            if end is not None:
                return self.grammar(answer[end + 1 :])
            allowed = torch.ones(self.vocab, dtype=torch.bool)
            allowed[[token for token in self.end_ids if token < self.vocab]] = False
            return allowed
        mask = self.grammar(answer)
        if mask is None or answer:
            return mask
        # The first token may open reasoning instead.
        allowed = mask.clone()
        allowed[self.opening_id] = True
        return allowed


def mark_overlap(text: str, mark: str) -> int:
    """Returns how many of the text's last characters may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _index(ids: Sequence[int], token: int) -> int | None:
    """Returns the place of a token's first occurrence."""
    return next((index for index, each in enumerate(ids) if each == token), None)
