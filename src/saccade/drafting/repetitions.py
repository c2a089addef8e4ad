"""Finds what followed an earlier occurrence of a text's ending, so that a draft can copy it.

Answers repeat their prompts and themselves: names, code that is changed, a document that is quoted.
A draft that sees only a part of a document cannot repeat the rest of it; a copy can, and costs no
forward of a draft (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from saccade.core.protocols import Repetition
from saccade.model.likeliest import Vocabulary

SHORTEST_MATCH = 3  # tokens; shorter endings occur everywhere
LONGEST_MATCH = 32  # A longer match tells no more.
MAX_COPIED_TOKENS = 48  # of one draft
# A text is taken to continue the text that was read before it if this many tokens, the last ones of
# the earlier text, are at the same places in both texts.
COMPARED_TAIL_TOKENS = 64


class RepetitionIndex:
    """The places of a growing text where each run of ``SHORTEST_MATCH`` tokens occurred last.

    Ids outside the vocabulary are in no run, and are not copied.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._excluded = frozenset(vocabulary.banned)
        self._size = sys.maxsize if vocabulary.size is None else vocabulary.size
        # The place of the token after each run.
        self._next_places: dict[tuple[int, ...], int] = {}
        self._length = 0  # of the text that was read last
        self._tail: list[int] = []  # the last tokens of that text

    def find(self, text: Sequence[int], count: int) -> Repetition | None:
        """Returns up to ``count`` tokens that followed the last earlier occurrence of the text's
        ending; None where the ending is new, or where the token after it must not be copied.

        The ending is the last ``SHORTEST_MATCH`` tokens. The result's ``match_length`` says how
        many tokens match in all, counted up to ``LONGEST_MATCH``.

        The copy ends before the first token that must not be copied. Copied tokens that reach the
        end of the text start again from the first copied one. After the text 7 8 9 1 7 8 9, the
        copy is 1 7 8 9 1 7 8 9 ...
        """
        self._read(text)
        place = self._next_places.get(tuple(text[-SHORTEST_MATCH:]))
        if place is None:
            return None
        # The tokens before the run may match too.
        match_length = SHORTEST_MATCH
        while (
            match_length < min(LONGEST_MATCH, place)
            and text[place - match_length - 1] == text[-match_length - 1]
        ):
            match_length += 1
        period = len(text) - place  # How many tokens there are to copy before the text ends.
        tokens: list[int] = []
        while len(tokens) < count and self._is_allowed(text[place + len(tokens) % period]):
            tokens.append(text[place + len(tokens) % period])
        return Repetition(tuple(tokens), match_length) if tokens else None

    def _read(self, text: Sequence[int]) -> None:
        """Adds the text's new runs to the index, all but the one at its end, which no token follows
        yet. A text that does not continue the text that was read before is read from its
        beginning."""
        if list(text[max(0, self._length - COMPARED_TAIL_TOKENS) : self._length]) != self._tail:
            self._next_places.clear()
            self._length = 0
        # The run at the end of the earlier text is the first new one, since a token follows it now.
        start = max(0, self._length - SHORTEST_MATCH)
        allowed_since = start  # All tokens from this place on are allowed.
        for place in range(start, len(text)):
            if place - allowed_since >= SHORTEST_MATCH:
                self._next_places[tuple(text[place - SHORTEST_MATCH : place])] = place
            if not self._is_allowed(text[place]):
                allowed_since = place + 1
        self._length = len(text)
        self._tail = list(text[-COMPARED_TAIL_TOKENS:])

    def _is_allowed(self, token: int) -> bool:
        return token < self._size and token not in self._excluded


class Repetitions:
    """What the texts of several requests repeat: an index for each."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._indexes: dict[int, RepetitionIndex] = {}

    def find(self, request: int, text: Sequence[int]) -> Repetition | None:
        """Returns what a draft of this request may copy, as :meth:`RepetitionIndex.find` does."""
        index = self._indexes.setdefault(request, RepetitionIndex(self._vocabulary))
        return index.find(text, MAX_COPIED_TOKENS)

    def end(self, request: int) -> None:
        """Frees the index of a request whose answer is complete."""
        self._indexes.pop(request, None)
