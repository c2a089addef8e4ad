"""Turns tokens into text piece by piece, as soon as each piece is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saccade.core.answer_text import UNFINISHED, withheld_length

DECODE_WINDOW_TOKENS = 32  # A decoder needs no more tokens to know how the next one is written.


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
        """``decode_with_special`` decodes with special tokens, which a stop string may have."""
        self._decode, self._stops = decode, stops
        self._decode_with_special = decode_with_special or decode
        self._window: list[int] = []  # The last tokens, which are decoded again with every piece.
        self._text_before_window = ""
        self._window_prefix = ""  # The part of the window's text that the text before it includes.
        self._emitted_text = ""

    def write(self, tokens: Sequence[int]) -> str:
        """Returns the text that has become certain with these tokens."""
        self._window += tokens
        window_text = self._decode(self._window)
        text = self._text_before_window + window_text[len(self._window_prefix) :]
        if len(self._window) > 2 * DECODE_WINDOW_TOKENS and not window_text.endswith(UNFINISHED):
            self._window = self._window[-DECODE_WINDOW_TOKENS:]
            self._text_before_window = text
            self._window_prefix = self._decode(self._window)
        text = text.rstrip(UNFINISHED)
        withheld = withheld_length(text, self._stops)
        if (
            self._stops
            and withheld_length(self._decode_with_special(self._window), self._stops) > withheld
        ):
            return ""  # Special tokens that the text leaves out may begin a stop string.
        return self._emit_up_to(text[: len(text) - withheld])

    def finish(self, text: str) -> str:
        """Returns the rest of the text, once the whole answer is known."""
        return self._emit_up_to(text)

    def _emit_up_to(self, text: str) -> str:
        if len(text) <= len(self._emitted_text) or not text.startswith(self._emitted_text):
            return ""
        piece = text[len(self._emitted_text) :]
        self._emitted_text = text
        return piece
