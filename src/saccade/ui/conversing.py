"""What the page for a conversation does, without its layout."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from saccade.bench.terminal_output import IncrementalDecoder
from saccade.core.errors import OptionError
from saccade.corpus.answering import Chat, Model
from saccade.inputs.media import Clip
from saccade.ui import pictures
from saccade.ui.page_run import PageSettings, read_clip


@dataclass(frozen=True)
class Exchange:
    """A question, the pictures and videos that came with it, and the answer."""

    question: str
    clips: Sequence[Clip]
    answer: str
    reused_tokens: int

    @property
    def html(self) -> str:
        strips = "".join(pictures.strip(clip.frames, [*clip.timestamps]) for clip in self.clips)
        reused = f" · {self.reused_tokens} tokens were read before" if self.reused_tokens else ""
        return pictures.exchange(f"{self.question}{reused}", self.answer, strips)


@dataclass
class _Talk:
    """The conversation of one browser tab."""

    tab: str
    chat: Chat
    exchanges: list[Exchange] = field(default_factory=list)
    prompt_tokens: int = 0


class Conversations:
    """The conversation of the page: one at a time, for the browser tab that began it.

    A model is quickest, and safe, when one thread uses it.
    """

    def __init__(self, model: Model, settings: PageSettings) -> None:
        self.model, self._settings = model, settings
        self._talk: _Talk | None = None
        self._lock = threading.Lock()

    def ask(self, tab: str, question: str, uploads: Sequence[str] = ()) -> Iterator[str]:
        """Yields the answer as it grows. Only what is new is read. Raises SaccadeError."""
        if not question.strip():
            raise OptionError("there is no question: write one")
        clips = [read_clip(None, upload, self._settings) for upload in uploads]
        talk = self._talk_of(tab)
        if talk.prompt_tokens > self._settings.max_prompt:
            raise OptionError(
                f"the conversation has {talk.prompt_tokens} tokens, and the page allows "
                f"{self._settings.max_prompt}: press Begin anew"
            )
        stream = talk.chat.stream(question, clips or None)
        decoder, text = IncrementalDecoder(self.model.pair.target.decode), ""
        for round in stream:
            text += str(decoder.type(round.scalars()))
            yield text
        (result,) = stream.results
        talk.prompt_tokens = result.prompt_tokens
        answer = result.text or ""
        talk.exchanges.append(Exchange(question, clips, answer, result.reused_tokens))
        yield answer

    def _talk_of(self, tab: str) -> _Talk:
        with self._lock:
            if self._talk is None:
                chat = self.model.chat(
                    None, max_new_tokens=self._settings.max_new_tokens, do_sample=False
                )
                self._talk = _Talk(tab, chat)
            if self._talk.tab != tab:
                raise OptionError("another tab has a conversation here: press Begin anew in it")
            return self._talk

    def html(self, tab: str, question: str = "", answer: str = "") -> str:
        """Returns what was said, the latest first; ``question`` is one whose ``answer`` grows."""
        talk = self._talk
        if talk is None or talk.tab != tab:
            return ""
        return pictures.conversation([each.html for each in talk.exchanges], question, answer)

    def end(self, tab: str) -> None:
        """Ends a tab's conversation, if it has one, and frees its caches."""
        with self._lock:
            talk = self._talk
            if talk is not None and talk.tab == tab:
                self._talk = None
                talk.chat.close()
