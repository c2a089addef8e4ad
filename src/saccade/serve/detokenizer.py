"""Turns the tokens of an answer into text for a stream, piece by piece as soon as it is certain.

``core.answer_text`` does the same by decoding the whole answer again and again. Here the time for a
piece does not grow with the answer, because only its last tokens (the window) are decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saccade.core.answer_text import UNFINISHED, withheld_length

# How a token is written may depend on the tokens before it, but on no more than this many.
DECODE_WINDOW_TOKENS = 32


class StreamingDetokenizer:
    """Turns tokens into text piece by piece; the pieces together are the answer's text.

    A character of which only some bytes have come is held back, and so is text that may turn out
    to be the beginning of a stop string.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        decode_with_special: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """``decode`` leaves special tokens out of the text. ``decode_with_special`` includes them,
        because a stop string may contain some. ``stops`` are the stop strings."""
        self._decode, self._stops = decode, stops
        self._decode_with_special = decode_with_special or decode
        self._window: list[int] = []  # The last tokens, which are decoded again with every piece.
        # When the window is cut to its last tokens, two texts are noted: that of all tokens so far,
        # and that of the window alone, such as "a red car" and " car". Whatever the window's text
        # has after " car" later is new.
        self._text_at_cut = ""
        self._window_text_at_cut = ""
        self._emitted_text = ""
        # How many characters the tokens so far have, those that are held back included. Those of
        # which only some bytes have come count as one or more.
        self.length = 0

    def write(self, tokens: Sequence[int]) -> str:
        """Returns the text that has become certain with these tokens."""
        self._window += tokens
        window_text = self._decode(self._window)
        text = self._text_at_cut + window_text[len(self._window_text_at_cut) :]
        if len(self._window) > 2 * DECODE_WINDOW_TOKENS and not window_text.endswith(UNFINISHED):
            self._window = self._window[-DECODE_WINDOW_TOKENS:]
            self._text_at_cut = text
            self._window_text_at_cut = self._decode(self._window)
        self.length = len(text)
        text = text.rstrip(UNFINISHED)
        withheld = withheld_length(text, self._stops)
        # The window's end may be the beginning of a stop string with special tokens, which ``text``
        # lacks. How much of the text belongs to it is not known yet, so nothing is returned.
        if (
            self._stops
            and withheld_length(self._decode_with_special(self._window), self._stops) > withheld
        ):
            return ""
        return self._emit_up_to(text[: len(text) - withheld])

    def finish(self, text: str) -> str:
        """Returns the rest of the answer, whose whole text is ``text``."""
        return self._emit_up_to(text)

    def _emit_up_to(self, text: str) -> str:
        """Returns what ``text`` adds to the text that was emitted before, and counts it as emitted.

        Nothing is added by a text that is no continuation of it.
        """
        if len(text) <= len(self._emitted_text) or not text.startswith(self._emitted_text):
            return ""
        piece = text[len(self._emitted_text) :]
        self._emitted_text = text
        return piece
