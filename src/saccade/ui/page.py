"""The page: its layout, and which event shows what. The work is ``asking``'s, the drawing
``pictures``'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr

from saccade.core.errors import SaccadeError
from saccade.drafting.schedule import parallel
from saccade.inputs.checkpoints import is_embedded
from saccade.methods import SYSTEMS
from saccade.ui import pictures, spelling
from saccade.ui.asking import EXAMPLES, PageModels, PageQuestion, PageSettings, Shown, answers, read

log = logging.getLogger(__name__)

TITLE = "Saccade"
WRONG = "something went wrong inside Saccade; the terminal it was started from says what"
QUESTION = "Describe the video in detail."
CSS = Path(__file__).with_name("page.css")
WAITING = pictures.message("Waiting for its turn …")
SAW = "<h2>What the draft saw</h2>"
TREE = "<h2>What it guessed in one round</h2>"
ROUNDS = "<h2>Round by round</h2>"
AXES = {  # what is chosen of a method, and how its control is called
    "drafter": "Drafter",
    "view": "View of the draft",
    "keep": "Share of visual tokens kept",
    "shape": "Shape of the draft",
    "schedule": "Schedule",
}


# -- what events show --------------------------------------------------------------------------


def look(example: str | None, upload: str | None, settings: PageSettings) -> str:
    """The clip as frames, or the sentence why it cannot be read."""
    try:
        clip = read(example, upload, settings)
    except SaccadeError as error:
        return pictures.message(str(error), "error")
    except Exception as error:  # a bug: the person gets a sentence, the terminal the rest
        log.error("a clip could not be shown", exc_info=error)
        return pictures.message(WRONG, "error")
    count = len(clip.frames)
    about = f"{count} frames of {clip.duration:.1f} s" if count > 1 else "one picture"
    notes = "".join(pictures.message(note) for note in clip.warnings)
    return pictures.strip(clip.frames, clip.timestamps.tolist()) + pictures.message(about) + notes


def answering(settings: PageSettings) -> str:
    """Who answers, by name."""
    if is_embedded(settings.target):
        return "the embedded pair, which knows drawn shapes only"
    return settings.target + (f", drafted by {settings.draft}" if settings.draft else "")


def explain(method: str) -> str:
    possible, words = spelling.explained(method)
    return pictures.message(words, "note" if possible else "error")


def saw(shown: Shown) -> str:
    """The frames with what the draft kept of them."""
    if shown.why:
        return pictures.message(shown.why)
    if shown.seen is None:
        return pictures.message("working out what the draft saw …")
    if not shown.seen:
        words = "The draft of this method looks at no picture." if shown.recipe.drafts else ""
        return pictures.message(words or "Plain decoding: nothing is drafted.")
    clip = shown.clip
    times = clip.timestamps.tolist()
    return SAW + "".join(pictures.seen(clip.frames, times, view) for view in shown.seen)


def round_of(pair: PageModels, shown: Shown | None, number: int) -> tuple[str, str]:
    """The tree of a round, counted from 1, and all rounds with that one pointed at."""
    if shown is None or not shown.rounds:
        return "", ""
    found = shown.rounds
    at = max(1, min(int(number), len(found))) - 1
    parts = shown.recipe.view.parts
    views = [part.name for part in parts] if len(parts) > 1 else []
    before = [token for round in found[:at] for token in round.emitted][-1:]
    start = pair.word(before[0]) if before else ""
    picture = pictures.tree(found[at], pair.word, start)
    return TREE + picture, ROUNDS + pictures.over_rounds(found, views, at)


# -- the page ----------------------------------------------------------------------------------


def build(
    pair: Callable[[], PageModels],
    settings: PageSettings = PageSettings(),  # noqa: B008 frozen
) -> gr.Blocks:
    """The page as gradio blocks; ``pair`` is asked for when there is something to answer."""
    # a model works best in one thread, and events come in whichever is free
    worker = ThreadPoolExecutor(1, "saccade-ui")
    halts: dict[str, Event] = {}  # by the browser's tab, while it has a run

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
        numbers = int(tokens or 0), float(temperature or 0.0), None if seed is None else int(seed)
        asked = PageQuestion(example, upload, prompt, method, *numbers)
        blank = {error: "", result: "", saw_frames: "", tree: "", over: "", last: None}
        hidden = {slider: gr.Slider(visible=False), details: gr.Accordion(visible=False)}
        yield {**blank, **hidden, left: "", right: "", note: "", halt: gr.Button(visible=True)}
        tab = str(request.session_hash)
        halted = halts[tab] = Event()
        steps = answers(pair(), settings, asked, halted.is_set)
        try:
            while (shown := worker.submit(next, steps, None).result()) is not None:
                yield _progress(shown, asked.temperature > 0) | _complete(shown)
        except SaccadeError as wrong:
            refused = pictures.message(str(wrong), "error")
            yield {error: refused, result: "", answered: gr.Column(visible=False)}
        except Exception as wrong:
            log.error("a run failed", exc_info=wrong)
            yield {error: pictures.message(WRONG, "error"), result: ""}
        finally:  # also where the tab has gone, and nobody asks for more
            halts.pop(tab, None)
            worker.submit(steps.close)
        yield {halt: gr.Button(visible=False)}

    def _progress(shown: Shown, sampled: bool) -> dict[Any, Any]:
        return {
            answered: gr.Column(visible=True),
            left: pictures.column(shown.duel.plain, False),
            right: pictures.column(shown.duel.drafted, True),
            result: pictures.outcome(shown.duel, sampled),
            note: pictures.mark("how", shown.recipe.schedule is parallel),
        }

    def _complete(shown: Shown) -> dict[Any, Any]:
        """What is drawn once the answers are complete, or stopped."""
        if not (shown.duel.over or shown.duel.halted) or not shown.rounds:
            return {}
        count = len(shown.rounds)
        chosen = max(range(count), key=lambda i: len(shown.rounds[i].tokens)) + 1
        picture, lines = round_of(pair(), shown, chosen)
        moved = gr.Slider(maximum=max(2, count), value=chosen, visible=count > 1)
        frames = saw(shown) if shown.duel.over else ""
        drawn = {tree: picture, over: lines, slider: moved, saw_frames: frames}
        return {last: shown, details: gr.Accordion(visible=True), **drawn}

    def stop(request: gr.Request) -> None:
        if (halt := halts.get(str(request.session_hash))) is not None:
            halt.set()

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        head = pictures.mark("head", TITLE, answering(settings))
        gr.HTML(head, elem_classes="sac-head", js_on_load=None)
        last = gr.State(None)
        with gr.Row():
            with gr.Column(min_width=320):
                prompt = gr.Textbox(QUESTION, label="Question", lines=1, max_lines=4)
                with gr.Row(elem_classes="sac-buttons"):
                    go = gr.Button("Answer", variant="primary")
                    halt = gr.Button("Stop", visible=False)
                example = gr.Radio([*EXAMPLES], value=next(iter(EXAMPLES)), label="Example video")
                with gr.Accordion("Advanced", open=False):
                    method = gr.Dropdown(
                        [*SYSTEMS],
                        value=settings.method,
                        label="Method: a name, or NAME/axis=value/...",
                        elem_id="sac-method",
                        allow_custom_value=True,
                    )
                    about = gr.HTML(explain(settings.method), elem_id="sac-about", js_on_load=None)
                    with gr.Row():
                        axes = [_control(axis) for axis in AXES]
                    with gr.Row():
                        tokens = gr.Number(192, label="Max new tokens", precision=0)
                        temperature = gr.Number(0, label="Temperature (0: greedy)", step=0.1)
                        seed = gr.Number(0, label="Seed", precision=0)
            with gr.Column(min_width=320):
                upload = gr.File(label="Your own: a video, a GIF, a picture", height=120)
                clip = gr.HTML(look(next(iter(EXAMPLES)), None, settings), js_on_load=None)
        error = gr.HTML("", elem_id="sac-error", js_on_load=None)
        result = gr.HTML("", elem_id="sac-result", js_on_load=None)
        with gr.Column(visible=False, elem_id="sac-answers") as answered:
            with gr.Row(equal_height=True):
                with gr.Column(min_width=320):
                    left = gr.HTML("", elem_id="sac-plain", js_on_load=None)
                with gr.Column(min_width=320):
                    right = gr.HTML("", elem_id="sac-drafted", js_on_load=None)
            gr.HTML(pictures.mark("legend", pictures.MEANING), js_on_load=None)
        with gr.Accordion("What the draft did", open=True, visible=False) as details:
            note = gr.HTML("", js_on_load=None)
            saw_frames = gr.HTML("", elem_id="sac-seen", js_on_load=None)
            slider = gr.Slider(1, 2, 1, step=1, label="Round (in the picture below)", visible=False)
            tree = gr.HTML("", elem_id="sac-tree", js_on_load=None)
            over = gr.HTML("", elem_id="sac-rounds", js_on_load=None)

        quiet: dict[str, Any] = {"show_progress": "hidden", "queue": False}
        quiet |= {"api_visibility": "private"}
        for axis, control in zip(AXES, axes, strict=True):
            control.input(
                lambda now, value, axis=axis: spelling.changed(now, axis, value or ""),
                [method, control],
                method,
                **quiet,
            )
        method.change(_controls, method, [about, *axes], **quiet)
        seeing = partial(look, settings=settings)
        example.input(lambda: None, None, upload, **quiet)
        example.input(lambda chosen: (seeing(chosen, None), ""), example, [clip, error], **quiet)
        upload.change(
            lambda chosen, own: (seeing(chosen, own), "", None if own else chosen),
            [example, upload], [clip, error, example], **quiet,
        )  # fmt: skip
        asked = [example, upload, prompt, method, tokens, temperature, seed]
        drawn: Any = {error, result, left, right, note, saw_frames, slider, tree, over, last, halt}
        drawn |= {answered, details}
        gr.on([go.click, prompt.submit], lambda: WAITING, None, result, **quiet).then(
            run,
            asked,
            drawn,
            concurrency_limit=1,
            show_progress="hidden",
            api_visibility="private",
        )
        halt.click(stop, **quiet)
        slider.change(
            lambda shown, number: round_of(pair(), shown, number), [last, slider], [tree, over],
            **quiet,
        )  # fmt: skip
        page.unload(stop)
    return page.queue(max_size=16)


def _control(axis: str) -> Any:
    if axis not in spelling.MENU:
        return gr.Textbox("", label=AXES[axis], placeholder="share, 0 to 1")
    offered = [("its own", spelling.AS_IT_IS), *((name, name) for name in spelling.MENU[axis])]
    at_first = spelling.AS_IT_IS
    return gr.Dropdown(offered, value=at_first, label=AXES[axis], allow_custom_value=True)


def _controls(method: str) -> list[Any]:
    """What the method is, and the controls as it is written."""
    _, axes = spelling.taken_apart(method)
    return [explain(method), *(axes.get(axis, spelling.AS_IT_IS) for axis in AXES)]


def app(page: gr.Blocks, settings: PageSettings = PageSettings()) -> Any:  # noqa: B008 frozen
    """The page as an ASGI application that asks nothing of any other host."""
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
