"""The layout of the page of ``saccade ui``, and what each event of it displays.

The page answers one question twice: plainly, and with a draft. ``page_run`` decodes the answers and
``pictures`` draws what is displayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr

from saccade.answering.coloured_text import KIND_MEANINGS
from saccade.core.errors import SaccadeError
from saccade.drafting.views.basic import views_to_read
from saccade.inputs.checkpoints import is_embedded
from saccade.methods import METHODS
from saccade.ui import method_controls, pictures
from saccade.ui.page_run import (
    PageModels,
    PageQuestion,
    PageRun,
    PageSettings,
    read_clip,
    run_question,
)

log = logging.getLogger(__name__)

TITLE = "Saccade"
INTERNAL_ERROR = "something went wrong inside Saccade; the terminal it was started from says what"
ABOUT = (
    "One question about a video, answered twice by the same model: plainly, and with a draft that "
    "guesses several tokens at a time. The answer is the same; the time is not."
)
QUESTION = "Describe the video in detail."
CSS = Path(__file__).with_name("page.css")
WAITING = pictures.message("Waiting for its turn …")
VIEWS_HEADING = "<h2>What the draft saw</h2>"
TREE_HEADING = "<h2>What it guessed in one round</h2>"
ROUNDS_HEADING = "<h2>Round by round</h2>"
AXIS_LABELS = {  # The label of each control, by the part of a method that it edits.
    "drafter": "Drafter",
    "view": "View of the draft",
    "keep": "Share of visual tokens kept",
    "shape": "Shape of the draft",
    "schedule": "Schedule",
}


# -- what events show --------------------------------------------------------------------------


def error_html(error: Exception) -> str:
    """Returns an error as a sentence. Anything but a SaccadeError is a bug: the sentence is then
    ``INTERNAL_ERROR``, and the traceback is logged."""
    if isinstance(error, SaccadeError):
        return pictures.message(str(error), "error")
    log.error("an event of the page failed", exc_info=error)
    return pictures.message(INTERNAL_ERROR, "error")


def add_head(title: str, about: str, settings: PageSettings) -> None:
    """Adds a page's title, its purpose and the names of its models, inside the page's blocks."""
    head = pictures.static_html("head", title, about, describe_models(settings))
    gr.HTML(head, elem_classes="sac-head", js_on_load=None)


def preview_clip(example: str | None, upload: str | None, settings: PageSettings) -> str:
    """Returns the uploaded clip, or else the example, as frames; or the sentence why it cannot be
    read."""
    try:
        clip = read_clip(example, upload, settings)
    except Exception as error:
        return error_html(error)
    count = len(clip.frames)
    about = f"{count} frames of {clip.duration:.1f} s" if count > 1 else "one picture"
    notes = "".join(pictures.message(note) for note in clip.warnings)
    return pictures.strip(clip.frames, clip.timestamps.tolist()) + pictures.message(about) + notes


def describe_models(settings: PageSettings) -> str:
    """Returns the name of the target, and of the draft if there is one. For the embedded target it
    says instead that it is embedded, and what it knows."""
    drafted_by = f", drafted by {settings.draft}" if settings.draft else ""
    if is_embedded(settings.target):
        what = "target" if settings.draft else "pair"
        return f"the embedded {what}, which knows drawn shapes only{drafted_by}"
    return settings.target + drafted_by


def explain_method_html(method: str) -> str:
    """Returns the description of a method, or the sentence why it is impossible."""
    possible, words = method_controls.explain_method(method)
    return pictures.message(words, "note" if possible else "error")


def views_html(run_state: PageRun) -> str:
    """Returns the frames with what the draft kept of them, or a sentence why there is nothing to
    show."""
    if run_state.views_error:
        return pictures.message(run_state.views_error)
    if run_state.views is None:
        return pictures.message("working out what the draft saw …")
    if not run_state.views:
        if run_state.recipe.drafts:
            return pictures.message("The draft of this method looks at no picture.")
        return pictures.message("Plain decoding: nothing is drafted.")
    clip = run_state.clip
    times = clip.timestamps.tolist()
    return VIEWS_HEADING + "".join(
        pictures.kept_frames(clip.frames, times, view) for view in run_state.views
    )


def round_html(pair: PageModels, run_state: PageRun | None, number: int) -> tuple[str, str]:
    """Returns the tree of round ``number``, counted from 1, and a chart that marks this round.

    A number beyond the last round means the last one. Without rounds both are empty.
    """
    if run_state is None or not run_state.rounds:
        return "", ""
    rounds = run_state.rounds
    index = max(1, min(int(number), len(rounds))) - 1
    ensemble = views_to_read(run_state.recipe.view)
    views = [view.name for view in ensemble] if len(ensemble) > 1 else []
    emitted_before = [token for round in rounds[:index] for token in round.emitted]
    text_before = pair.token_text(emitted_before[-1]) if emitted_before else ""
    # ``RoundRecord.note`` has the draft's probability of each node. In an ensemble it has the
    # weights of the views instead, which the tree must not show as probabilities.
    picture = pictures.tree(
        rounds[index], pair.token_text, text_before, notes_are_weights=bool(views)
    )
    return TREE_HEADING + picture, ROUNDS_HEADING + pictures.rounds_chart(rounds, views, index)


# -- the page ----------------------------------------------------------------------------------


def build_page(
    get_models: Callable[[], PageModels],
    settings: PageSettings = PageSettings(),  # noqa: B008 frozen
) -> gr.Blocks:
    """Returns the page as gradio blocks; ``get_models`` is called when there is a question.

    First come the functions that answer the page's events. They return what each component is to
    display, by component. Then come the components, and at last each event gets its function.
    """
    # A model is quickest when one thread uses it, but gradio runs an event in any free thread.
    worker = ThreadPoolExecutor(1, "saccade-ui")
    stop_events: dict[str, Event] = {}  # Each stops the run of one browser tab, by its session.

    def run(
        example: str | None,
        upload: str | None,
        prompt: str,
        method: str,
        tokens: float | None,
        temperature: float | None,
        seed: float | None,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        question = PageQuestion(
            example=example,
            upload=upload,
            prompt=prompt,
            method=method,
            tokens=int(tokens or 0),
            temperature=float(temperature or 0.0),
            seed=None if seed is None else int(seed),
        )
        empty = {
            error_view: "",
            result_view: "",
            views_view: "",
            tree_view: "",
            rounds_view: "",
            last_run: None,
        }
        hidden = {slider: gr.Slider(visible=False), details: gr.Accordion(visible=False)}
        yield {
            **empty,
            **hidden,
            plain_view: "",
            drafted_view: "",
            note_view: "",
            stop_button: gr.Button(visible=True),
        }
        sampled = question.temperature > 0
        tab = str(request.session_hash)
        stop_event = stop_events[tab] = Event()
        states = run_question(get_models(), settings, question, stop_event.is_set)
        try:
            # The worker's thread takes the next state of the run; None says that there is none.
            while (run_state := worker.submit(next, states, None).result()) is not None:
                yield _answers_so_far(run_state, sampled) | _draft_pictures(run_state)
        except SaccadeError as failure:
            refusal = pictures.message(str(failure), "error")
            yield {error_view: refusal, result_view: "", answers_column: gr.Column(visible=False)}
        except Exception as failure:
            log.error("a run failed", exc_info=failure)
            yield {error_view: pictures.message(INTERNAL_ERROR, "error"), result_view: ""}
        finally:  # This also runs where the tab was closed and nobody reads any more.
            stop_events.pop(tab, None)
            worker.submit(states.close)
        yield {stop_button: gr.Button(visible=False)}

    def _answers_so_far(run_state: PageRun, sampled: bool) -> dict[Any, Any]:
        # The note "how" says that the two answers take turns on the same cores. If the draft works
        # in a process of its own, the note adds that it also works in the plain answer's turns.
        note = pictures.static_html("how", run_state.recipe.drafts_beside_target)
        return {
            answers_column: gr.Column(visible=True),
            plain_view: pictures.column(run_state.duel.plain, coloured=False),
            drafted_view: pictures.column(run_state.duel.drafted, coloured=True),
            result_view: pictures.outcome(run_state.duel, sampled),
            note_view: note,
        }

    def _draft_pictures(run_state: PageRun) -> dict[Any, Any]:
        """Returns what is drawn once the answers are complete or stopped."""
        if not (run_state.duel.is_complete or run_state.duel.stopped) or not run_state.rounds:
            return {}
        count = len(run_state.rounds)
        # The round with the most drafted tokens is shown first, counted from 1 as on the slider.
        largest = max(range(count), key=lambda i: len(run_state.rounds[i].tokens)) + 1
        picture, chart = round_html(get_models(), run_state, largest)
        new_slider = gr.Slider(maximum=max(2, count), value=largest, visible=count > 1)
        frames = views_html(run_state) if run_state.duel.is_complete else ""
        pictures_by_view = {
            tree_view: picture,
            rounds_view: chart,
            slider: new_slider,
            views_view: frames,
        }
        return {last_run: run_state, details: gr.Accordion(visible=True), **pictures_by_view}

    def stop(request: gr.Request) -> None:
        if (stop_event := stop_events.get(str(request.session_hash))) is not None:
            stop_event.set()

    from saccade.world.demo_clips import EXAMPLES

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        add_head(TITLE, ABOUT, settings)
        last_run = gr.State(None)
        with gr.Row():
            with gr.Column(min_width=320):
                prompt = gr.Textbox(QUESTION, label="Question", lines=1, max_lines=4)
                with gr.Row(elem_classes="sac-buttons"):
                    go = gr.Button("Answer", variant="primary")
                    stop_button = gr.Button("Stop", visible=False)
                example = gr.Radio([*EXAMPLES], value=next(iter(EXAMPLES)), label="Example video")
                with gr.Accordion("Advanced", open=False):
                    method = gr.Dropdown(
                        [*METHODS],
                        value=settings.method,
                        label="Method: a name, or NAME/axis=value/...",
                        elem_id="sac-method",
                        allow_custom_value=True,
                    )
                    about = gr.HTML(
                        explain_method_html(settings.method), elem_id="sac-about", js_on_load=None
                    )
                    with gr.Row():
                        axes = [_make_control(axis) for axis in AXIS_LABELS]
                    with gr.Row():
                        tokens = gr.Number(192, label="Max new tokens", precision=0)
                        temperature = gr.Number(0, label="Temperature (0: greedy)", step=0.1)
                        seed = gr.Number(0, label="Seed", precision=0)
            with gr.Column(min_width=320):
                upload = gr.File(label="Your own: a video, a GIF, a picture", height=120)
                clip_view = gr.HTML(
                    preview_clip(next(iter(EXAMPLES)), None, settings), js_on_load=None
                )
        error_view = gr.HTML("", elem_id="sac-error", js_on_load=None)
        result_view = gr.HTML("", elem_id="sac-result", js_on_load=None)
        with gr.Column(visible=False, elem_id="sac-answers") as answers_column:
            with gr.Row(equal_height=True):
                with gr.Column(min_width=320):
                    plain_view = gr.HTML("", elem_id="sac-plain", js_on_load=None)
                with gr.Column(min_width=320):
                    drafted_view = gr.HTML("", elem_id="sac-drafted", js_on_load=None)
            gr.HTML(pictures.static_html("legend", KIND_MEANINGS), js_on_load=None)
        with gr.Accordion("What the draft did", open=True, visible=False) as details:
            note_view = gr.HTML("", js_on_load=None)
            views_view = gr.HTML("", elem_id="sac-seen", js_on_load=None)
            slider = gr.Slider(1, 2, 1, step=1, label="Round (in the picture below)", visible=False)
            tree_view = gr.HTML("", elem_id="sac-tree", js_on_load=None)
            rounds_view = gr.HTML("", elem_id="sac-rounds", js_on_load=None)

        # Options of events that are handled at once: they do not wait until an answer is complete.
        quick_event: dict[str, Any] = {"show_progress": "hidden", "queue": False}
        quick_event |= {"api_visibility": "private"}
        for axis, control in zip(AXIS_LABELS, axes, strict=True):
            control.input(
                lambda name, value, axis=axis: method_controls.set_axis(name, axis, value or ""),
                [method, control],
                method,
                **quick_event,
            )
        method.change(_describe_method, method, [about, *axes], **quick_event)
        preview = partial(preview_clip, settings=settings)
        # An example takes the place of an uploaded file, and an uploaded file that of an example.
        example.input(lambda: None, None, upload, **quick_event)
        example.input(
            lambda chosen: (preview(chosen, None), ""),
            example,
            [clip_view, error_view],
            **quick_event,
        )
        upload.change(
            lambda chosen, uploaded: (preview(chosen, uploaded), "", None if uploaded else chosen),
            [example, upload], [clip_view, error_view, example], **quick_event,
        )  # fmt: skip
        form = [example, upload, prompt, method, tokens, temperature, seed]
        outputs: Any = {
            error_view,
            result_view,
            plain_view,
            drafted_view,
            note_view,
            views_view,
            slider,
            tree_view,
            rounds_view,
            last_run,
            stop_button,
        }
        outputs |= {answers_column, details}
        gr.on([go.click, prompt.submit], lambda: WAITING, None, result_view, **quick_event).then(
            run,
            form,
            outputs,
            concurrency_limit=1,
            show_progress="hidden",
            api_visibility="private",
        )
        stop_button.click(stop, **quick_event)
        slider.change(
            lambda run_state, number: round_html(get_models(), run_state, number), 
            [last_run, slider], [tree_view, rounds_view],
            **quick_event,
        )  # fmt: skip
        page.unload(stop)
    return page.queue(max_size=16)


def _make_control(axis: str) -> Any:
    """Returns the control that edits one part of a method, such as its view."""
    if axis not in method_controls.MENU:
        return gr.Textbox("", label=AXIS_LABELS[axis], placeholder="share, 0 to 1")
    menu = [(name, name) for name in method_controls.MENU[axis]]
    unchanged = method_controls.UNCHANGED
    return gr.Dropdown(
        [("its own", unchanged), *menu],
        value=unchanged,
        label=AXIS_LABELS[axis],
        allow_custom_value=True,
    )


def _describe_method(method: str) -> list[Any]:
    """Returns a method's description, and the value that each control shows for it."""
    _, axes = method_controls.split_method(method)
    return [
        explain_method_html(method),
        *(axes.get(axis, method_controls.UNCHANGED) for axis in AXIS_LABELS),
    ]


def make_app(page: gr.Blocks, settings: PageSettings = PageSettings()) -> Any:  # noqa: B008 frozen
    """Returns the page as an ASGI application, which loads nothing from any other host."""
    from fastapi import FastAPI

    plain = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(font=plain, font_mono=["ui-monospace", "monospace"])
    return gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="",
        show_error=False,
        ssr_mode=False,
        footer_links=[],
        max_file_size=settings.limits.max_bytes,
        theme=theme,
        css=CSS.read_text(),
    )
