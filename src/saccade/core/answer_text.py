"""Decodes an answer: the text that is certain so far, and the whole text at its end.

Text is certain once more tokens cannot change it. Two endings of a text are not certain yet: the
first bytes of a character, whose other bytes are in the next tokens, and text that may be the
beginning of a stop string, which would not be part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UNFINISHED = "\ufffd"  # This is how the first bytes of a character decode.

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, which may begin or end within a character."""


def withheld_length(text: str, stops: Sequence[str]) -> int:
    """Returns how many of the text's last characters may belong to a stop string."""
    return max((_withheld_for(stop, text) for stop in stops), default=0)


def _withheld_for(stop: str, text: str) -> int:
    """Returns how many of the text's last characters are withheld for one stop string: all from its
    first occurrence on, or else the longest beginning of it that the text ends with."""
    if stop in text:
        return len(text) - text.index(stop)
    longest = min(len(stop), len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class TextDecoder:
    """Turns the ids of an answer into text."""

    decode: Decode
    """Leaves special tokens out."""
    decode_with_special: Decode | None = None
    """Includes special tokens, which may be part of a stop string. If None, ``decode`` is used."""
    stops: tuple[str, ...] = ()

    def certain_text(self, ids: Sequence[int]) -> str:
        """Returns the part of the text of an unfinished answer that more ids cannot change."""
        for count in range(len(ids), 0, -1):
            text = self.decode(ids[:count])
            if text.endswith(UNFINISHED):
                continue
            withheld = withheld_length(text, self.stops)
            # A stop string may have a special token in it, which ``text`` leaves out. Such a stop
            # string may have begun if more characters are withheld from the text with special
            # tokens than from ``text``. Then the text is not certain up to this id, so one id fewer
            # is tried.
            spelled = self._spelled(ids[:count]) if self.stops else text
            if withheld_length(spelled, self.stops) <= withheld:
                return text[: len(text) - withheld]
        return ""

    def whole_text(self, ids: Sequence[int], stop: str | None) -> str:
        """Returns the text of a finished answer, up to the string that it stopped at."""
        text = self.decode(ids)
        if stop is None:
            return text
        before, separator, _ = text.partition(stop)
        return before if separator else self._text_before_special(ids, stop)

    def added_text(
        self, ids: Sequence[int], start: int, end: int, is_finished: bool, stop: str | None
    ) -> str:
        """Returns the text that became certain with ``ids[start:end]``.

        If ``is_finished``, the answer ends at ``end``, and all its text is certain. ``stop`` is the
        stop string that it ended with, if there is one.
        """
        text_before = self.certain_text(ids[:start])
        ids_so_far = ids[:end]
        if is_finished:
            text = self.whole_text(ids_so_far, stop)
        else:
            text = self.certain_text(ids_so_far)
        return text[len(text_before) :]

    def _text_before_special(self, ids: Sequence[int], stop: str) -> str:
        """Returns the text before a stop string that contains special tokens.

        For example, the tokens "one", " two" and "<end>" with the stop string "wo<end>" give
        "one t".
        """
        spelled = self._spelled(ids)
        end = spelled.find(stop)
        if end < 0:  # A decoder that tidies up the whole text may have changed the stop string.
            return self.decode(ids)
        # Only the ids that are spelled wholly before the stop string are kept.
        count = len(ids)
        while count:
            head = self._spelled(ids[:count])
            if len(head) <= end and spelled.startswith(head):
                break
            count -= 1
        text = self.decode(ids[:count])
        # The stop string begins in the next token, which is in the text unless it is special.
        if self.decode(ids[count : count + 1]):
            text += spelled[len(self._spelled(ids[:count])) : end]
        return text

    def _spelled(self, ids: Sequence[int]) -> str:
        """Returns the text of ids with the special tokens in it, if a decoder for that is given."""
        return (self.decode_with_special or self.decode)(ids)
