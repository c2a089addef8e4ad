"""The layout of the page of ``saccade ui --watch``, which watches a video as if it were live.

Its buttons call ``watching.PageWatcher``, which plays a video and answers questions about it. It
plays one video at a time, for the browser tab that started it, and refuses other tabs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from saccade.answering.chat_model import Model
from saccade.ui.page import add_head, error_html
from saccade.ui.page_run import PageSettings
from saccade.ui.watching import PageWatcher, conversation_html, frames_html

TITLE = "Saccade watches"
ABOUT = (
    "A video is played as if it were live. Ask whenever you like: the answer is about the frames "
    "that have come so far, and it is the one that the model alone would give."
)
QUESTION = "What is happening now?"
REFRESH_SECONDS = 1.0


def build_watch_page(model: Model, settings: PageSettings) -> gr.Blocks:
    """Returns the page as gradio blocks."""
    watcher = PageWatcher(model, settings)

    def start(upload: str | None, window: str, request: gr.Request) -> tuple[str, str, str]:
        tab = str(request.session_hash)
        try:
            watcher.start(tab, upload, window)
        except Exception as error:
            return error_html(error), "", ""
        return "", frames_html(watcher.get(tab)), ""

    def latest_frames(request: gr.Request) -> str:
        return frames_html(watcher.get(str(request.session_hash)))

    def ask(question: str, request: gr.Request) -> Iterator[tuple[str, str]]:
        tab = str(request.session_hash)
        try:
            for text in watcher.ask(tab, question):
                yield "", conversation_html(watcher.get(tab), question, text)
        except Exception as error:
            yield error_html(error), conversation_html(watcher.get(tab))
            return
        yield "", conversation_html(watcher.get(tab))

    def stop(request: gr.Request) -> None:
        watcher.stop(str(request.session_hash))

    # Every 600 seconds, gradio deletes uploaded files that are older than 3600 seconds.
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        add_head(TITLE, ABOUT, settings)
        with gr.Row():
            with gr.Column(min_width=320):
                upload = gr.File(label="A video, played as if it were live", height=120)
                window = gr.Textbox("60 s", label="Kept at most: seconds, frames or tokens")
                with gr.Row():
                    watch_button = gr.Button("Watch", variant="primary")
                    stop_button = gr.Button("Stop")
                question = gr.Textbox(QUESTION, label="Question, at any time", lines=1)
                ask_button = gr.Button("Ask")
            # Without ``js_on_load=None``, gradio would add a script that reports every click on a
            # view. Nothing here listens to such clicks.
            with gr.Column(min_width=320):
                frames_view = gr.HTML("", elem_id="sac-live", js_on_load=None)
        error_view = gr.HTML("", elem_id="sac-error", js_on_load=None)
        conversation_view = gr.HTML("", elem_id="sac-said", js_on_load=None)
        options: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # The values that ``start`` returns are shown in these views, in this order, and those of
        # ``ask`` in ``answer_views``.
        start_views = [error_view, frames_view, conversation_view]
        watch_button.click(start, [upload, window], start_views, **options)
        stop_button.click(stop, **options)
        answer_views = [error_view, conversation_view]
        ask_events = [ask_button.click, question.submit]
        gr.on(ask_events, ask, question, answer_views, concurrency_limit=1, **options)
        gr.Timer(REFRESH_SECONDS).tick(latest_frames, None, frames_view, queue=False, **options)
        page.unload(stop)
    return page.queue(max_size=16)  # At most 16 clicks wait for their turn.
