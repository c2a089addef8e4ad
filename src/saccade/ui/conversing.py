"""The logic of the page of ``saccade ui --chat``: a conversation with the model about files.

``chat_page`` has the page's layout, and calls :class:`PageConversation`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from saccade.answering.chat_model import Chat, Model
from saccade.core.errors import OptionError
from saccade.inputs.media import Clip
from saccade.inputs.subjects import is_text_file, read_document
from saccade.ui import pictures
from saccade.ui.page_run import PageSettings, growing_answer, read_clip


@dataclass(frozen=True)
class Uploads:
    """The files of a question: pictures and videos, and texts with their files' names."""

    clips: Sequence[Clip]  # The pictures and videos.
    documents: Sequence[str]  # The texts.
    document_names: Sequence[str]

    @classmethod
    def read(cls, files: Sequence[str], settings: PageSettings) -> Uploads:
        """Reads files. Raises SaccadeError for one that is neither a text, a picture nor a
        video."""
        texts: list[Path] = []
        others: list[str] = []
        for file in files:
            if is_text_file(Path(file)):
                texts.append(Path(file))
            else:
                others.append(file)
        return cls(
            [read_clip(example=None, upload=file, settings=settings) for file in others],
            [read_document(file) for file in texts],
            [file.name for file in texts],
        )


@dataclass(frozen=True)
class Exchange:
    """A question, the files that came with it, and the answer."""

    question: str
    uploads: Uploads
    answer: str
    reused_tokens: int  # Tokens of the prompt that were in the conversation's KV cache.

    @property
    def html(self) -> str:
        """The exchange as HTML, with strips of the frames of its clips."""
        clips = self.uploads.clips
        strips = "".join(pictures.strip(clip.frames, [*clip.timestamps]) for clip in clips)
        reused = f"{self.reused_tokens} tokens reused from the cache" if self.reused_tokens else ""
        heading = [self.question, *self.uploads.document_names, reused]
        return pictures.exchange(" · ".join(filter(None, heading)), self.answer, strips)


@dataclass
class _TabConversation:
    """The conversation of one browser tab."""

    tab: str
    chat: Chat
    exchanges: list[Exchange] = field(default_factory=list)
    prompt_tokens: int = 0  # The last question's prompt, which has all turns before it.


class PageConversation:
    """The page's only conversation, which belongs to the browser tab that began it.

    Callers must not run two answers at once. The page's events have a concurrency limit of 1.
    """

    def __init__(self, model: Model, settings: PageSettings) -> None:
        self.model, self._settings = model, settings
        self._conversation: _TabConversation | None = None
        self._lock = threading.Lock()

    def ask(self, tab: str, question: str, files: Sequence[str] = ()) -> Iterator[str]:
        """Yields the answer's text so far, round by round. Raises SaccadeError.

        Only tokens that the conversation's KV cache lacks are prefilled.
        """
        if not question.strip():
            raise OptionError("there is no question: write one")
        uploads = Uploads.read(files, self._settings)
        self._check_length(tab, uploads.documents)
        conversation = self._conversation_of(tab)
        try:
            stream = conversation.chat.stream(
                question, uploads.clips or None, documents=uploads.documents
            )
            result = yield from growing_answer(stream, self.model.pair.target.decode)
        except Exception:
            if not conversation.exchanges:
                # The first question of the conversation failed, so another tab may begin one.
                self.end(tab)
            raise
        conversation.prompt_tokens = result.prompt_tokens
        answer = result.text or ""
        conversation.exchanges.append(Exchange(question, uploads, answer, result.reused_tokens))
        yield answer

    def _check_length(self, tab: str, documents: Sequence[str]) -> None:
        """Raises OptionError if the last prompt and the new documents exceed the page's limit."""
        max_tokens = self._settings.max_prompt
        conversation = self._conversation
        prompt_tokens = 0
        if conversation is not None and conversation.tab == tab:
            prompt_tokens = conversation.prompt_tokens
        if prompt_tokens > max_tokens:
            raise OptionError(
                f"the conversation has {prompt_tokens} tokens, and the page allows {max_tokens}: "
                "press Begin anew"
            )
        tokenizer = self.model.pair.target.tokenizer
        total = prompt_tokens + sum(len(tokenizer(each)["input_ids"]) for each in documents)
        if total > max_tokens:
            raise OptionError(
                f"with these texts the conversation has over {total} tokens, and the page allows "
                f"{max_tokens}: give shorter texts, or start saccade ui with a larger --max-prompt"
            )

    def _conversation_of(self, tab: str) -> _TabConversation:
        """Returns the conversation, and begins it if there is none. Raises OptionError if it is
        another tab's."""
        with self._lock:
            if self._conversation is None:
                chat = self.model.chat(
                    None, max_new_tokens=self._settings.max_new_tokens, do_sample=False
                )
                self._conversation = _TabConversation(tab, chat)
            if self._conversation.tab != tab:
                raise OptionError("another tab has a conversation here: press Begin anew in it")
            return self._conversation

    def html(self, tab: str, question: str = "", answer: str = "") -> str:
        """Returns the conversation as HTML, the latest exchange first; "" for a tab that has none.

        ``question`` is being answered, and ``answer`` is the answer's text so far. Where no
        question is being answered, both are empty.
        """
        conversation = self._conversation
        if conversation is None or conversation.tab != tab:
            return ""
        return pictures.conversation(
            [each.html for each in conversation.exchanges], question, answer
        )

    def end(self, tab: str) -> None:
        """Ends a tab's conversation, if it has one, and frees its caches."""
        with self._lock:
            conversation = self._conversation
            if conversation is not None and conversation.tab == tab:
                self._conversation = None
                conversation.chat.close()
