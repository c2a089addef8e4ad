"""Lays out the page of ``saccade ui --chat``, on which a user asks one question after another.

Here are the fields and buttons of the page, and the functions that gradio calls when they are used.
``conversing`` keeps the conversations and answers the questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from saccade.answering.chat_model import Model
from saccade.ui.conversing import PageConversation
from saccade.ui.page import QUESTION, add_head, error_html
from saccade.ui.page_run import PageSettings

TITLE = "Saccade converses"
ABOUT = (
    "Ask on as long as you like. Every question may bring pictures, videos and texts, and only "
    "what is new is read."
)


def build_chat_page(model: Model, settings: PageSettings) -> gr.Blocks:
    """Returns the page as gradio blocks."""
    conversations = PageConversation(model, settings)
    unchanged = gr.skip()

    def ask(
        question: str, uploads: list[str] | None, request: gr.Request
    ) -> Iterator[tuple[str, str, Any]]:
        """Yields the contents of ``outputs`` (error, conversation, uploads) as the answer grows."""
        tab = str(request.session_hash)
        try:
            for text in conversations.ask(tab, question, uploads or ()):
                yield "", conversations.html(tab, question, text), unchanged
        except Exception as error:
            yield error_html(error), conversations.html(tab), unchanged
            return
        # None empties the field of uploads, because the files belong to that question alone.
        yield "", conversations.html(tab), None

    def begin_anew(request: gr.Request) -> tuple[str, str, None]:
        conversations.end(str(request.session_hash))
        return "", "", None

    def leave(request: gr.Request) -> None:
        conversations.end(str(request.session_hash))

    # Every 600 seconds gradio deletes the uploaded files that are older than 3600 seconds.
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        add_head(TITLE, ABOUT, settings)
        with gr.Row():
            with gr.Column(min_width=320):
                question = gr.Textbox(QUESTION, label="Question", lines=1, max_lines=4)
                with gr.Row():
                    ask_button = gr.Button("Ask", variant="primary", min_width=120)
                    anew_button = gr.Button("Begin anew", min_width=120)
            with gr.Column(min_width=320):
                uploads = gr.File(
                    label="With this question: videos, GIFs, pictures or texts",
                    file_count="multiple",
                    height=120,
                )
        error_view = gr.HTML("", elem_id="sac-error", js_on_load=None)
        conversation_view = gr.HTML("", elem_id="sac-said", js_on_load=None)
        outputs = [error_view, conversation_view, uploads]
        ask_events = [ask_button.click, question.submit]
        hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        gr.on(ask_events, ask, [question, uploads], outputs, concurrency_limit=1, **hidden)
        anew_button.click(begin_anew, None, outputs, **hidden)
        page.unload(leave)
    return page.queue(max_size=16)
