"""Claims about the page for a conversation, without a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import saccade
from saccade.core.errors import ModelError, OptionError, VideoInputError
from saccade.ui.conversing import PageConversation
from saccade.ui.page_run import PageSettings
from saccade.world import drawing, scenes


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / f"{number}.mp4" for number in range(2)]
    for number, path in enumerate(paths):
        drawing.write_clip(scenes.scene(20_000_001 + number), path, 8, 112, fps=2.0)
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def model() -> saccade.Model:
    return saccade.load(method="sd", device="cpu")


def test_a_question_brings_a_video_and_only_that_is_read(model, clips):
    """Claim: each question may bring files; its answer is that of ``Model.chat`` given the same
    files, what was said before is not read again, and all of it is on the page.

    Fails if a file goes with another question than its own."""
    page = PageConversation(model, PageSettings(max_new_tokens=8))
    questions = [("What is there?", clips[:1]), ("And here?", clips[1:]), ("How many?", [])]
    with model.chat(None, max_new_tokens=8, do_sample=False) as chat:
        for question, files in questions:
            *_, answer = page.ask("one", question, files)
            assert answer == chat.ask(question, files or None).text
    exchanges = page._conversation.exchanges
    assert [len(each.uploads.clips) for each in exchanges] == [1, 1, 0]
    assert exchanges[0].reused_tokens == 0 < exchanges[1].reused_tokens
    html = page.html("one")
    assert all(question in html for question, _ in questions) and html.count("sac-strip") == 2
    page.end("one")
    assert page.html("one") == ""


def test_a_conversation_is_its_tabs(model, clips):
    """Claim: another tab is refused while one converses and sees nothing of it, and takes its turn
    once that has ended."""
    page = PageConversation(model, PageSettings(max_new_tokens=2))
    assert [*page.ask("one", "What?", clips[:1])]
    with pytest.raises(OptionError, match="another tab"):
        next(page.ask("two", "What?"))
    page.end("two")
    assert page.html("two") == "" != page.html("one")
    page.end("one")
    assert [*page.ask("two", "What?")]
    page.end("two")


@pytest.mark.parametrize("error", [OptionError, RuntimeError])
def test_a_first_question_that_fails_holds_no_conversation(model, clips, monkeypatch, error):
    """Claim: where a tab's first question cannot be asked, or is not answered, for whatever reason,
    another tab may begin a conversation."""
    page = PageConversation(model, PageSettings(max_new_tokens=2))

    def refuse(*whatever: object, **more: object) -> None:
        raise error("this model reads no videos")

    def fail(*whatever: object, **more: object) -> Iterator[None]:
        raise error("this model reads no videos")
        yield

    for stream in (refuse, fail):
        with monkeypatch.context() as patch:
            patch.setattr("saccade.answering.chat_model.Chat.stream", stream)
            with pytest.raises(error, match="no videos"):
                next(page.ask("one", "What?", clips[:1]))
        assert [*page.ask("two", "What?", clips[:1])]
        page.end("two")


def test_an_answer_that_nobody_waits_for_is_closed(model, clips):
    """Claim: who leaves in the middle of an answer may ask the next question. Fails if the answer
    stays under way."""
    page = PageConversation(model, PageSettings(max_new_tokens=4))
    answer = page.ask("one", "What?", clips[:1])
    next(answer)
    answer.close()
    assert [*page.ask("one", "What now?")]
    page.end("one")


class BrokenStream:
    """A stream that ends because the logits are NaN."""

    results = (Mock(finish_reason="error", text=""),)

    def __iter__(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None: ...


def test_invalid_logits_are_no_empty_answer(model, clips, monkeypatch):
    """Claim: an answer that ends in an error is told as one, as on the command line, and another
    tab may begin a conversation."""
    page = PageConversation(model, PageSettings(max_new_tokens=2))
    with monkeypatch.context() as patch:
        patch.setattr("saccade.answering.chat_model.Chat.stream", lambda *_, **__: BrokenStream())
        with pytest.raises(ModelError, match="NaN"):
            [*page.ask("one", "What?", clips[:1])]
    assert [*page.ask("two", "What?", clips[:1])]
    page.end("two")


def test_what_cannot_be_asked_leaves_the_conversation(model, clips, tmp_path: Path):
    """Claim: an empty question, a file that is no video and a conversation that has grown too long
    are each a sentence, after which the conversation is what it was."""
    page = PageConversation(model, PageSettings(max_new_tokens=2, max_prompt=32))
    bad = tmp_path / "bad.mp4"
    bad.write_text("no video")
    assert [*page.ask("one", "What?", clips[:1])]
    before = page.html("one")
    with pytest.raises(OptionError, match="no question"):
        next(page.ask("one", "  "))
    with pytest.raises(VideoInputError, match="bad.mp4"):
        next(page.ask("one", "What?", [str(bad)]))
    with pytest.raises(OptionError, match="press Begin anew"):
        next(page.ask("one", "What?"))
    assert page.html("one") == before
    page.end("one")


def test_a_text_comes_with_its_question(model, clips, tmp_path: Path):
    """Claim: a file of text is read as a document, beside a video, and is named on the page; one
    that is longer than the page allows, or is no text, is a sentence."""
    page = PageConversation(model, PageSettings(max_new_tokens=8))
    notes, others = tmp_path / "notes.txt", tmp_path / "other" / "notes.txt"
    notes.write_text("a red circle moves to the left. " * 5)
    others.parent.mkdir()
    others.write_text("a blue square stands still. ")  # Of the same name, and read as well.
    with model.chat(None, max_new_tokens=8, do_sample=False) as chat:
        texts = [notes.read_text(), others.read_text()]
        expected = chat.ask("What?", clips[:1], documents=texts)
        plain = chat.ask("What?")
    *_, answer = page.ask("one", "What?", [clips[0], str(notes), str(others)])
    assert answer == expected.text
    assert page._conversation.prompt_tokens == expected.prompt_tokens < plain.prompt_tokens
    assert "notes.txt" in page.html("one")
    before = page.html("one")
    notes.write_text("word " * 20_000)
    with pytest.raises(OptionError, match="larger --max-prompt"):
        next(page.ask("one", "What?", [str(notes)]))
    notes.write_bytes(b"\0\xff")
    with pytest.raises(OptionError, match="no text"):
        next(page.ask("one", "What?", [str(notes)]))
    assert page.html("one") == before
    page.end("one")


def test_an_answer_is_text_on_the_page(model):
    """Claim: markup in a question is shown as it was written. Fails on a page that runs it."""
    page = PageConversation(model, PageSettings(max_new_tokens=2))
    assert [*page.ask("one", "<script>alert(1)</script>")]
    assert "<script>" not in page.html("one") and "&lt;script&gt;" in page.html("one")
    page.end("one")
