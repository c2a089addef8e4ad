"""The text of an answer as it comes, each piece in the colour of its token's kind."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from saccade.core.answer_text import TextDecoder
from saccade.core.result import RoundRecord, TokenKind

KIND_STYLES: dict[TokenKind, str] = {
    "accepted": "green",
    "recovered": "bold yellow",
    "bonus": "bold cyan",
}
KIND_MEANINGS: dict[TokenKind, str] = {
    "accepted": "accepted draft tokens",
    "recovered": "corrected by the target",
    "bonus": "added by the target",
}


class IncrementalDecoder:
    """Turns tokens into text as they come, and gives each piece the kind of its token.

    Text that later tokens may still change is withheld: a character of several tokens until it is
    complete, and the possible beginning of a stop string until it is certain to be none.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._certain_text = ""

    def styled_text(self, round: RoundRecord) -> Text:
        """Returns the text that a round adds, coloured by the kind of each token."""
        added = Text()
        for text, kind in self.pieces(round):
            added.append(text, style=KIND_STYLES[kind])
        return added

    def pieces(self, round: RoundRecord) -> Iterator[tuple[str, TokenKind]]:
        """Yields the text that a round adds in pieces, each with the kind of its token."""
        for token, kind in zip(round.emitted, round.kinds, strict=True):
            self._ids.append(token)
            text = self._decoder.certain_text(self._ids)
            if len(text) > len(self._certain_text):
                yield text[len(self._certain_text) :], kind
                self._certain_text = text

    def rest(self, answer_text: str | None = None) -> str:
        """Returns the text that is still withheld at the end. ``answer_text`` is the text of the
        whole answer, if it is known. Without it a stop string that ended the answer is included."""
        text = self._decoder.decode(self._ids) if answer_text is None else answer_text
        return text[len(self._certain_text) :]


def legend() -> Text:
    """Returns the meaning of each colour, as one line."""
    return Text(", ").join(
        Text(words, style=KIND_STYLES[kind]) for kind, words in KIND_MEANINGS.items()
    )
