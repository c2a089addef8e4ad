"""The page: its layout, and which event shows what. Knows gradio and how to put it in words;
the work is ``duel``'s, the drawing ``pictures``'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from saccade import media
from saccade.draft import Words
from saccade.engine import Captioner, stream
from saccade.errors import OptionError, SaccadeError
from saccade.media import Clip
from saccade.models import Loaded, ask, ask_draft
from saccade.recipe import Recipe
from saccade.schedule import parallel
from saccade.systems import SYSTEMS, resolve
from saccade.types import RoundRecord
from saccade.ui import pictures, spelling
from saccade.ui.duel import Decode, Duel, Tell, duel
from saccade.ui.examples import EXAMPLES
from saccade.ui.kept import Kept, kept
from saccade.ui.watched import Watched
from saccade.view import Several

log = logging.getLogger(__name__)

TITLE = "Saccade"
INTRO = (
    "One question about a video, answered twice by the same model: plainly, and with a draft that "
    "guesses several tokens at a time. The answer is the same; the time is not."
)
HOW = (
    "Both answers share one process and the same cores. They take turns, whichever has worked "
    "least so far going next, and each has a clock of its own: so they advance at their true "
    "relative speeds. A demonstration, not a measurement; <code>saccade compare</code> measures."
)
BESIDE = (
    " The draft of this method works in a process of its own, also while the plain answer has its "
    "turn: here its clock flatters it."
)
WRONG = "something went wrong inside Saccade; the terminal it was started from says what"
QUESTION = "Describe the video in detail."
CSS = Path(__file__).with_name("page.css")
WAITING = pictures.message("Waiting for its turn …")
SAW = "<h2>What the draft saw</h2>"
TREE = "<h2>What it guessed in one round</h2>"
ROUNDS = "<h2>Round by round</h2>"
AXES = ("view", "keep", "drafter", "shape", "schedule")


@dataclass(frozen=True)
class Pair:
    """What answers: the models, and who puts frames into words (None: nobody)."""

    target: Loaded
    draft: Loaded | None
    captioner: Callable[[Sequence[np.ndarray]], Captioner | None] = lambda frames: None

    @property
    def decode(self) -> Decode:
        tokenizer = self.target.tokenizer
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)

    def word(self, token: int) -> str:
        return self.target.tokenizer.decode([token])

    def encode(self, text: str) -> list[int]:
        return self.target.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class House:
    """The rules of the house: what may be asked for."""

    method: str = "auto"
    limits: media.Limits = media.Limits(max_bytes=200 << 20, max_frames=64)
    max_prompt: int = 16_384  # tokens
    max_new_tokens: int = 1024


@dataclass(frozen=True)
class Asked:
    """What a person asked for."""

    example: str | None
    upload: str | None
    prompt: str
    method: str
    tokens: int
    temperature: float
    seed: int | None


@dataclass(frozen=True)
class Shown:
    """What there is to show: the duel, then what the draft saw."""

    duel: Duel
    recipe: Recipe
    clip: Clip
    seen: tuple[Kept, ...] | None = None  # None: not known yet
    why: str = ""  # it never will be


@dataclass
class Desk:
    """Who is at work for which browser tab."""

    working: dict[str, Watched[Shown]] = field(default_factory=dict)

    def start(self, tab: str, work: Callable[[Callable[[], bool]], Iterator[Shown]]) -> Any:
        """One at a time: whoever was at work is stopped and waited for first."""
        for other in [*self.working]:
            self.stop(other)
            self.working.pop(other).join()
        self.working[tab] = Watched(work)
        return self.working[tab]

    def stop(self, tab: str) -> None:
        if tab in self.working:
            self.working[tab].stop()


def read(example: str | None, upload: str | None, house: House) -> Clip:
    """The clip asked about. Raises SaccadeError."""
    if upload is not None:
        return media.read(upload, limits=house.limits)
    if example in EXAMPLES:
        return EXAMPLES[example].clip()
    raise OptionError("pick an example clip, or drop a video")


def checked(asked: Asked, house: House) -> Asked:
    """What was asked for, if the house allows it. Raises OptionError."""
    if not 1 <= asked.tokens <= house.max_new_tokens:
        raise OptionError(f"an answer may have 1 to {house.max_new_tokens} tokens")
    if not 0 <= asked.temperature <= 10:
        raise OptionError("the temperature is a number from 0 (greedy) to 10")
    if not asked.prompt.strip():
        raise OptionError("there is no question: write one")
    return asked


def answers(pair: Pair, house: House, asked: Asked, halted: Callable[[], bool]) -> Iterator[Shown]:
    """The whole of a run: both answers, then what the draft saw. Raises SaccadeError."""
    recipe = resolve(checked(asked, house).method)
    clip = read(asked.example, asked.upload, house)
    shown = _media(clip)
    inputs = ask(pair.target, asked.prompt, **shown)
    length = int(inputs["input_ids"].shape[1])
    if length > house.max_prompt:
        raise OptionError(
            f"this clip and question are {length} tokens and the page takes {house.max_prompt}: "
            "use a shorter or smaller clip, or start it with a larger --max-prompt"
        )
    own = None if pair.draft is None else ask_draft(pair.target, pair.draft, asked.prompt, **shown)
    captioner = pair.captioner(list(clip.frames))
    draft = None if pair.draft is None else pair.draft.backbone
    settled = [recipe]

    def begin(method: Recipe, tell: Tell, **others: Any) -> Any:
        found = stream(
            pair.target.backbone,
            inputs,
            draft=draft,
            draft_inputs=own,
            method=method,
            tokenizer=pair.target.tokenizer,
            captioner=captioner,
            seed=asked.seed,
            on_phase=tell,
            **{**_settings(asked), **others},
        )
        settled[0] = found.recipe
        return found

    def ready(method: Recipe, tell: Tell) -> Any:
        """As ``begin``; a draft's process is started before anything is timed."""
        if method.schedule is parallel:
            for _ in begin(method, tell, max_new_tokens=1):
                pass
        return begin(method, tell)

    plain = "ar", partial(ready, SYSTEMS["ar"])
    drafted = asked.method, partial(ready, recipe)
    last = None
    for now in duel(plain, drafted, pair.decode, halted=halted):
        last = Shown(now, settled[0], clip)
        yield last
    if last is None or not last.duel.over:
        return
    words = Words(pair.encode, captioner)
    try:
        seen = kept(pair.target.backbone, draft, settled[0], inputs, own, words)
        yield replace(last, seen=seen)
    except Exception as error:  # the answers stand, whatever the picture of them does
        log.warning("the picture of what the draft saw failed", exc_info=error)
        yield replace(last, why=f"What the draft saw cannot be shown: {error}")


def _media(clip: Clip) -> dict[str, Any]:
    if len(clip.frames) == 1 and clip.source_frames == 1:
        return {"images": list(clip.frames)}
    return {"clips": [clip]}


def _settings(asked: Asked) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": asked.tokens, "do_sample": asked.temperature > 0}
    return settings | ({"temperature": asked.temperature} if asked.temperature > 0 else {})


# -- what events show --------------------------------------------------------------------------


def look(example: str | None, upload: str | None, house: House) -> str:
    """The clip as frames, or the sentence why it cannot be read."""
    try:
        clip = read(example, upload, house)
    except SaccadeError as error:
        return pictures.message(str(error), "error")
    except Exception as error:  # a bug: the person gets a sentence, the terminal the rest
        log.error("a clip could not be shown", exc_info=error)
        return pictures.message(WRONG, "error")
    count = len(clip.frames)
    about = f"{count} frames of {clip.duration:.1f} s" if count > 1 else "one picture"
    notes = "".join(pictures.message(note) for note in clip.warnings)
    return pictures.strip(clip.frames, clip.timestamps.tolist()) + pictures.message(about) + notes


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
    return SAW + pictures.seen(clip.frames, clip.timestamps.tolist(), shown.seen)


def rounds(shown: Shown) -> tuple[RoundRecord, ...]:
    return shown.duel.drafted.rounds


def round_of(pair: Pair, shown: Shown | None, number: int) -> tuple[str, str]:
    """The tree of a round, counted from 1, and all rounds with that one pointed at."""
    if shown is None or not rounds(shown):
        return "", ""
    found = rounds(shown)
    at = max(1, min(int(number), len(found))) - 1
    view = shown.recipe.view
    views = [part.name for part in view.views] if isinstance(view, Several) else []
    before = [token for round in found[:at] for token in round.emitted][-1:]
    start = pair.word(before[0]) if before else ""
    picture = pictures.tree(found[at], pair.word, start)
    return TREE + picture, ROUNDS + pictures.over_rounds(found, views, at)


# -- the page ----------------------------------------------------------------------------------


def build(pair: Callable[[], Pair], house: House = House()) -> gr.Blocks:  # noqa: B008 frozen
    """The page as gradio blocks; ``pair`` is asked for when there is something to answer."""
    desk = Desk()

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
        asked = Asked(example, upload, prompt, method, *numbers)
        blank = {error: "", result: "", saw_frames: "", tree: "", over: "", last: None}
        yield {**blank, left: "", right: "", note: "", slider: gr.Slider(visible=False)}
        tab = str(request.session_hash)
        try:
            watched = desk.start(tab, partial(answers, pair(), house, asked))
        except SaccadeError as wrong:
            yield {error: pictures.message(str(wrong), "error")}
            return
        try:
            for shown in watched:
                yield _progress(shown, asked.temperature > 0) | _complete(shown)
        except SaccadeError as wrong:
            yield {error: pictures.message(str(wrong), "error"), left: "", right: ""}
        except Exception as wrong:
            log.error("a run failed", exc_info=wrong)
            yield {error: pictures.message(WRONG, "error")}
        finally:
            watched.stop()

    def _progress(shown: Shown, sampled: bool) -> dict[Any, Any]:
        beside = BESIDE if shown.recipe.schedule is parallel else ""
        return {
            left: pictures.column(shown.duel.plain, False),
            right: pictures.column(shown.duel.drafted, True),
            result: pictures.outcome(shown.duel, sampled),
            note: f'<p class="sac-how">{HOW}{beside}</p>',
        }

    def _complete(shown: Shown) -> dict[Any, Any]:
        """What is drawn once the answers are complete, or stopped."""
        if not (shown.duel.over or shown.duel.halted) or not rounds(shown):
            return {}
        count = len(rounds(shown))
        chosen = max(range(count), key=lambda i: len(rounds(shown)[i].tokens)) + 1
        picture, lines = round_of(pair(), shown, chosen)
        moved = gr.Slider(maximum=max(2, count), value=chosen, visible=count > 1)
        frames = saw(shown) if shown.duel.over else ""
        return {last: shown, tree: picture, over: lines, slider: moved, saw_frames: frames}

    def stop(request: gr.Request) -> None:
        desk.stop(str(request.session_hash))

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.HTML(f"<h1>{TITLE}</h1><p>{INTRO}</p>", elem_classes="sac-head", js_on_load=None)
        last = gr.State(None)
        with gr.Row():
            with gr.Column():
                example = gr.Radio([*EXAMPLES], value=next(iter(EXAMPLES)), label="Example clip")
                upload = gr.File(label="… or your own: a video, a GIF, a picture", height=140)
                clip = gr.HTML(look(next(iter(EXAMPLES)), None, house), js_on_load=None)
                prompt = gr.Textbox(QUESTION, label="Question", lines=1, max_lines=4)
            with gr.Column():
                name, _ = spelling.taken_apart(house.method)
                method = gr.Textbox(house.method, label="Method", placeholder="NAME/axis=value/...")
                about = gr.HTML(explain(house.method), js_on_load=None)
                with gr.Row():
                    system = gr.Dropdown([*SYSTEMS], value=name, label="Named method")
                    view = _menu("view", "What the draft sees")
                    keep = gr.Textbox("", label="Keep", placeholder="share, 0 to 1")
                with gr.Row():
                    drafter = _menu("drafter", "Who drafts")
                    shape = _menu("shape", "In what shape")
                    schedule = _menu("schedule", "When")
                with gr.Row():
                    tokens = gr.Number(192, label="Tokens at most", precision=0)
                    temperature = gr.Number(0, label="Temperature (0: greedy)", step=0.1)
                    seed = gr.Number(0, label="Seed", precision=0)
                with gr.Row():
                    go = gr.Button("Run", variant="primary")
                    halt = gr.Button("Stop")
        error = gr.HTML("", elem_id="sac-error", js_on_load=None)
        result = gr.HTML("", elem_id="sac-result", js_on_load=None)
        gr.HTML(pictures.legend(), js_on_load=None)
        with gr.Row(equal_height=True):
            with gr.Column(min_width=320):
                left = gr.HTML("", elem_id="sac-plain", js_on_load=None)
            with gr.Column(min_width=320):
                right = gr.HTML("", elem_id="sac-drafted", js_on_load=None)
        note = gr.HTML("", js_on_load=None)
        saw_frames = gr.HTML("", elem_id="sac-seen", js_on_load=None)
        slider = gr.Slider(1, 2, 1, step=1, label="Round (in the picture below)", visible=False)
        tree = gr.HTML("", elem_id="sac-tree", js_on_load=None)
        over = gr.HTML("", elem_id="sac-rounds", js_on_load=None)

        axes: list[Any] = [view, keep, drafter, shape, schedule]
        quiet: dict[str, Any] = {"show_progress": "hidden", "queue": False}
        quiet |= {"api_visibility": "private"}
        system.input(lambda chosen: chosen, system, method, **quiet)
        for axis, control in zip(AXES, axes, strict=True):
            control.input(
                lambda now, value, axis=axis: spelling.changed(now, axis, value or ""),
                [method, control],
                method,
                **quiet,
            )
        method.change(_controls, method, [about, system, *axes], **quiet)
        seeing = partial(look, house=house)
        example.input(lambda: None, None, upload, **quiet)
        example.input(lambda chosen: (seeing(chosen, None), ""), example, [clip, error], **quiet)
        upload.change(lambda *of: (seeing(*of), ""), [example, upload], [clip, error], **quiet)
        asked = [example, upload, prompt, method, tokens, temperature, seed]
        drawn: Any = {error, result, left, right, note, saw_frames, slider, tree, over, last}
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


def _menu(axis: str, label: str) -> gr.Dropdown:
    offered = [
        ("its own", spelling.AS_IT_IS),
        *((name, name) for name in spelling.MENU[axis]),
    ]
    return gr.Dropdown(offered, value=spelling.AS_IT_IS, label=label, allow_custom_value=True)


def _controls(method: str) -> list[Any]:
    """What the method is, and the controls as it is written."""
    name, axes = spelling.taken_apart(method)
    chosen = [axes.get(axis, spelling.AS_IT_IS) for axis in AXES]
    return [explain(method), name if name in SYSTEMS else None, *chosen]


def app(page: gr.Blocks, house: House = House()) -> Any:  # noqa: B008 frozen
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
        max_file_size=house.limits.max_bytes,
        theme=theme,
        css=CSS.read_text(),
    )
