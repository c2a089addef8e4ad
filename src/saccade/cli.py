"""The command line. Parses, calls, shows; everything heavy is imported only when a command runs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from saccade.errors import OptionError, SaccadeError
from saccade.measure.calibrate_command import calibrate
from saccade.measure.figure_command import figure
from saccade.shapes.commands import shapes_app
from saccade.shapes.train_draft_command import train_draft
from saccade.terminal import PIPED_WIDTH, Json, Threads, Verbose, err, out, prepare, status

if TYPE_CHECKING:
    from saccade.engine import Stream
    from saccade.media import Clip, Sampling
    from saccade.models import Loaded
    from saccade.recipe import Recipe
    from saccade.types import Inputs, Result

app = typer.Typer(
    help="Vision-language models that answer faster, with exactly the same answers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(shapes_app, name="shapes")

QUESTION = "Describe the video in detail."
DEFAULT_METHOD = "specvlm/shape=fit"
REPEAT, MANY = 3, 8
DEMO_SEED, DEMO_FRAMES, DEMO_SIZE = 20_000_002, 64, 224  # never trained on

Target = Annotated[
    str | None, typer.Option(help="Target: a checkpoint folder or hub id; else the embedded pair.")
]
Draft = Annotated[str | None, typer.Option(help="Draft: a checkpoint folder or hub id.")]
Method = Annotated[
    str | None,
    typer.Option(help=f"NAME/axis=value/..., see `saccade methods`; else {DEFAULT_METHOD}."),
]
Config = Annotated[
    Path | None, typer.Option(help="Take what is not given from this file of `calibrate`.")
]
Captioner = Annotated[
    str | None,
    typer.Option(help="Image-to-text model for views that read a caption: a folder or hub id."),
]
Prompt = Annotated[str, typer.Option(help="What to ask about the video.")]
Tokens = Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Seed = Annotated[int | None, typer.Option(help="Names the noise of sampling.")]
Fps = Annotated[float | None, typer.Option(help="Frames to take per second.")]
NumFrames = Annotated[int | None, typer.Option(help="Frames to take in all, evenly in time.")]
Every = Annotated[bool, typer.Option("--every-frame", help="Take every frame.")]
Start = Annotated[float | None, typer.Option(help="Start at this second.")]
End = Annotated[float | None, typer.Option(help="End at this second.")]
Repeat = Annotated[int, typer.Option(min=1, help="Interleaved runs of each method.")]


@dataclass(frozen=True)
class Models:
    """What a command works with."""

    target: Loaded
    draft: Loaded | None


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from saccade import __version__

        typer.echo(f"saccade {__version__}")
        raise typer.Exit()


@app.command()
def demo(
    max_new_tokens: Tokens = 256,
    repeat: Repeat = 3,
    threads: Threads = None,
    picture: Annotated[Path | None, typer.Option(help="Save what is shown as an SVG.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Describe a video twice with the embedded pair, plainly and by SpecVLM, and compare."""
    prepare(threads, verbose)
    from saccade import media, show
    from saccade.shapes import text, world

    scene = world.scene(DEMO_SEED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.mp4"
        world.write_clip(scene, path, DEMO_FRAMES, DEMO_SIZE)
        clip = media.read(path, media.Sampling(every=True))
    models = _models("shapes", None, None, None, quiet=as_json)
    methods = ["ar", "specvlm/shape=fit", "hf"]
    found = _compared(
        models,
        clip,
        "demo.mp4",
        QUESTION,
        methods,
        repeat,
        {"max_new_tokens": max_new_tokens},
        None,
    )
    if as_json:
        typer.echo(json.dumps(found.json()))
        return
    page = Console(
        highlight=False,
        record=True,
        width=out.width if out.is_terminal and not picture else PIPED_WIDTH,
    )
    result = found.results["specvlm/shape=fit"]
    typist = show.Typist(lambda ids: models.target.tokenizer.decode(ids, skip_special_tokens=True))
    page.print(show.frames(clip.frames))
    page.print(
        "[bold]The target's answer, drafted by SpecVLM:[/bold] ",
        *[*(typist.type(round) for round in result.rounds), typist.rest()],
        sep="",
    )
    page.print(show.legend())
    page.print(f"\n[bold]What the generator drew:[/bold] [dim]{text.describe(scene)}[/dim]\n")
    found.show(page)
    if picture is not None:
        picture.write_text(show.offline_svg(page.export_svg(title="saccade demo")))


@app.command()
def describe(
    video: Annotated[
        str, typer.Argument(help="A video, GIF, image or folder of frames; - is stdin.")
    ],
    prompt: Prompt = QUESTION,
    target: Target = None,
    draft: Draft = None,
    method: Method = None,
    config: Config = None,
    captioner: Captioner = None,
    max_new_tokens: Tokens = 256,
    fps: Fps = None,
    num_frames: NumFrames = None,
    every_frame: Every = False,
    start: Start = None,
    end: End = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text (repeatable).")] = None,
    seed: Seed = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    trace: Annotated[Path | None, typer.Option(help="Write the rounds here (JSON lines).")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Answer a question about a video, streaming text as it is drafted and accepted."""
    known = _known(config, target, draft, method)
    prepare(threads or known.threads, verbose)
    from saccade.engine import stream

    (recipe,) = _recipes([known.method])
    sampling = _sampling(fps, num_frames, every_frame, start, end)
    clip = _read(video, sampling, quiet=as_json)
    models = _models(known.target, known.draft, dtype, device, quiet=as_json)
    settings = _settings(max_new_tokens, temperature, top_p, top_k, stop)
    inputs = _inputs(models.target, clip, prompt)

    def start_stream(tell: Callable[[str], None]) -> Stream:
        return stream(
            models.target.backbone,
            inputs,
            draft=None if models.draft is None else models.draft.backbone,
            method=recipe,
            tokenizer=models.target.tokenizer,
            captioner=_captioner(captioner, known.target, clip, device),
            seed=seed,
            on_phase=tell,
            **settings,
        )

    result = _answer(models.target, start_stream, quiet=as_json)
    if trace is not None:
        from saccade.measure import trace as traces

        traces.write(trace, result)
    if as_json:
        typer.echo(json.dumps(_described(result, clip)))


@app.command()
def chat(
    video: Annotated[str, typer.Argument(help="A video, GIF, image or folder of frames.")],
    target: Target = None,
    draft: Draft = None,
    method: Method = None,
    config: Config = None,
    captioner: Captioner = None,
    max_new_tokens: Tokens = 256,
    fps: Fps = None,
    num_frames: NumFrames = None,
    every_frame: Every = False,
    start: Start = None,
    end: End = None,
    seed: Seed = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Ask one question after another about a video; only what is new is read.

    A question a line on standard input; an empty line or the end of input ends it.
    """
    known = _known(config, target, draft, method)
    prepare(threads or known.threads, verbose)
    from saccade.conversation import Conversation

    (recipe,) = _recipes([known.method])
    clip = _read(video, _sampling(fps, num_frames, every_frame, start, end), quiet=as_json)
    models = _models(known.target, known.draft, dtype, device, quiet=as_json)
    history: list[tuple[str, str]] = []
    asking = sys.stdin.isatty() and not as_json
    with Conversation(
        models.target.backbone,
        draft=None if models.draft is None else models.draft.backbone,
        method=recipe,
        tokenizer=models.target.tokenizer,
        captioner=_captioner(captioner, known.target, clip, device),
        seed=seed,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    ) as talk:
        while question := _question(asking):
            inputs = _inputs(models.target, clip, question, history)
            result = _answer(
                models.target,
                lambda tell, inputs=inputs: talk.stream(inputs, on_phase=tell),
                quiet=as_json,
            )
            if as_json:
                typer.echo(json.dumps({"question": question, **_described(result, clip)}))
            history.append((question, result.text or ""))


@app.command()
def compare(
    video: Annotated[str, typer.Argument(help="A video, GIF, image or folder of frames.")],
    methods: Annotated[
        str | None,
        typer.Option(help="Comma-separated, or all; hf, hf-assisted, hf-lookup too."),
    ] = None,
    prompt: Prompt = QUESTION,
    target: Target = None,
    draft: Draft = None,
    config: Config = None,
    captioner: Captioner = None,
    max_new_tokens: Tokens = 256,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Interleaved runs a method; else {REPEAT}, or 1 of more than {MANY} methods.",
        ),
    ] = None,
    fps: Fps = None,
    num_frames: NumFrames = None,
    every_frame: Every = False,
    start: Start = None,
    end: End = None,
    seed: Seed = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the rounds here, a file a method.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run several methods on one video, interleaved, and show what each one costs."""
    known = _known(config, target, draft, None)
    prepare(threads or known.threads, verbose)
    from saccade.measure.compare import named
    from saccade.systems import SYSTEMS

    given = (methods or f"ar,{known.method},hf").split(",")
    names = [name.strip() for name in given if name.strip()]
    names = [each for name in names for each in (SYSTEMS if name == "all" else [name])]
    names = list(dict.fromkeys(names))
    _recipes([name for name, recipe in named(names).items() if recipe is not None])
    sampling = _sampling(fps, num_frames, every_frame, start, end)
    clip = _read(video, sampling, quiet=as_json)
    models = _models(known.target, known.draft, dtype, device, quiet=as_json)
    settings = {"max_new_tokens": max_new_tokens}
    often = repeat or (REPEAT if len(names) <= MANY else 1)
    caption = _captioner(captioner, known.target, clip, device)
    found = _compared(models, clip, Path(video).name, prompt, names, often, settings, seed, caption)
    if trace is not None:
        from saccade.measure import trace as traces

        for name, result in found.results.items():
            safe = name.replace("/", "_")
            traces.write(trace.with_name(f"{trace.stem}-{safe}{trace.suffix}"), result)
    if as_json:
        typer.echo(json.dumps(found.json()))
        return
    out.print(found.answer, markup=False)
    out.print()
    found.show(out)


@app.command()
def methods(as_json: Json = False) -> None:
    """The named methods, what each chooses, and the choices there are on each axis."""
    from saccade.systems import SYSTEMS, axes, choices

    if as_json:
        listed = {
            name: {"about": recipe.about, **choices(recipe)} for name, recipe in SYSTEMS.items()
        }
        typer.echo(json.dumps({"methods": listed, "axes": axes()}))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, recipe in SYSTEMS.items():
        chosen = "/".join(f"{axis}={value}" for axis, value in choices(recipe).items())
        table.add_row(f"[bold]{name}[/bold]", f"{recipe.about}\n[dim]{chosen}[/dim]")
    out.print(table)
    out.print(
        "\nAny choice can be swapped: NAME/axis=value/..., e.g. specvlm/shape=chain-7/keep=0.05\n"
    )
    known = Table(box=None, pad_edge=False, show_header=False)
    for axis, values in axes().items():
        known.add_row(f"[bold]{axis}[/bold]", ", ".join(values))
    out.print(known)


app.command()(calibrate)
app.command()(figure)
app.command("train-draft")(train_draft)


# -- what the commands share --------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Rows and what they were measured on: the JSON contract of `compare` and `demo`."""

    about: dict[str, Any]
    rows: dict[str, Any]
    results: dict[str, Result]
    answer: str

    def json(self) -> dict[str, Any]:
        return {**self.about, "methods": {name: row.json() for name, row in self.rows.items()}}

    def show(self, page: Console) -> None:
        from saccade import show

        about = self.about
        page.print(show.table(self.rows))
        page.print(
            f"[dim]{about['visual_tokens']} visual tokens, {about['dtype']} on {about['device']}, "
            f"{about['threads']} threads; medians of {about['repeat']} interleaved runs; "
            "x against ar in the same run; before: vision, prefill, guidance[/dim]"
        )
        show.notes(page, self.rows)


def _compared(
    models: Models,
    clip: Clip,
    video: str,
    prompt: str,
    names: list[str],
    repeat: int,
    settings: dict[str, Any],
    seed: int | None,
    captioner: Any = None,
) -> Comparison:
    import torch

    from saccade.measure.compare import compare as measure

    target = models.target
    inputs = _inputs(target, clip, prompt)
    with status("comparing", quiet=not err.is_terminal) as tell:
        rows, results = measure(
            target,
            models.draft,
            inputs,
            names,
            repeat=repeat,
            settings={**settings, "do_sample": False},
            seed=seed,
            captioner=captioner,
            on_run=lambda name, round: tell(f"run {round} of {repeat}: {name}"),
        )
    base = results["ar"]
    about = {
        "video": video,
        "visual_tokens": base.visual_tokens,
        "max_new_tokens": settings["max_new_tokens"],
        "device": str(target.backbone.device),
        "dtype": str(target.backbone.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "repeat": repeat,
    }
    return Comparison(about, rows, results, base.text or "")


@dataclass(frozen=True)
class Known:
    """What to run, from the command line, a configuration file, or our defaults, in that order."""

    target: str
    draft: str | None
    method: str
    threads: int | None


def _known(config: Path | None, target: str | None, draft: str | None, method: str | None) -> Known:
    found: dict[str, str] = {}
    if config is not None:
        from saccade.measure.calibrate import defaults

        found = defaults(config)
    same = target is None or target == found.get("target")  # a file's draft goes with its target
    threads = found.get("threads")
    return Known(
        target or found.get("target", "shapes"),
        draft or (found.get("draft") if same else None),
        method or found.get("method", DEFAULT_METHOD),
        None if threads is None else int(threads),
    )


def _recipes(methods: Sequence[str]) -> list[Recipe]:
    """Recipes by name; a process for a draft in parallel starts while the models load."""
    from saccade import worker
    from saccade.schedule import parallel
    from saccade.systems import resolve

    recipes = [resolve(method) for method in methods]
    if any(recipe.schedule is parallel for recipe in recipes):
        worker.prepare()
    return recipes


def _captioner(name: str | None, target: str, clip: Clip, device: str | None) -> Any:
    """A function from inputs to captions, loaded only if it is called; None without a model."""
    if name is None and target != "shapes":
        return None

    def caption(inputs: Inputs) -> list[str]:
        from saccade import captions

        return captions.captioner(name or captions.SHAPES, list(clip.frames), device)(inputs)

    return caption


def _question(asking: bool) -> str:
    """The next line of standard input; empty at the end."""
    if asking:
        err.print("\n[bold]?[/bold] ", end="")
    return sys.stdin.readline().strip()


def _answer(
    target: Loaded, begin: Callable[[Callable[[str], None]], Stream], *, quiet: bool
) -> Result:
    """Runs a stream to its end and shows it as it goes."""
    from saccade import show

    tokenizer = target.tokenizer
    typist = show.Typist(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    with status("starting", quiet=quiet) as tell:
        rounds = begin(tell)
        first = next(rounds)
    try:
        for round in chain([first], rounds):
            if not quiet:
                out.print(typist.type(round.scalars()), end="", soft_wrap=True)
    finally:  # Ctrl-C leaves what was written
        if not quiet:
            out.print(typist.rest(), markup=False)
    result = rounds.results[0]
    if not quiet:
        rate = result.tokens_per_second or 0.0
        reused = f", {result.reused_tokens} tokens reused" if result.reused_tokens else ""
        err.print(
            f"[dim]{len(result.ids)} tokens, {rate:.0f} per second, tau {result.tau:.2f}; "
            f"first after {result.timings.first_token:.2f} s{reused}; "
            f"{result.timings.total:.2f} s in all[/dim]"
        )
        if any(round.tokens for round in result.rounds):
            err.print(show.legend())
        if result.fallback_reason:
            err.print(result.fallback_reason, style="yellow", markup=False)
    return result


def _described(result: Result, clip: Clip) -> dict[str, Any]:
    import torch

    timings = result.timings
    return {
        "text": result.text,
        "token_ids": result.ids,
        "method": result.method,
        "finish_reason": result.finish_reason,
        "fallback_reason": result.fallback_reason,
        "tokens": len(result.ids),
        "tau": result.tau,
        "acceptance_rate": result.acceptance_rate,
        "rounds": len(result.rounds),
        "decode_seconds": timings.decode,
        "prefill_seconds": timings.vision + timings.prefill + timings.guide,
        "total_seconds": timings.total,
        "tokens_per_second": result.tokens_per_second,
        "visual_tokens": result.visual_tokens,
        "draft_visual_tokens": result.draft_visual_tokens,
        "reused_tokens": result.reused_tokens,
        "frames": len(clip.frames),
        "threads": torch.get_num_threads(),
        "timings": asdict(timings),
        "warnings": [*clip.warnings, *result.warnings],
    }


def _sampling(
    fps: float | None, frames: int | None, every: bool, start: float | None, end: float | None
) -> Sampling:
    from saccade.media import Sampling

    return Sampling(fps=fps, num_frames=frames, every=every, start=start, end=end)


def _read(video: str, sampling: Sampling, *, quiet: bool) -> Clip:
    from saccade import media

    with status("reading the video", quiet=quiet) as tell:
        clip = media.read(
            video, sampling, progress=lambda done, total: tell(f"reading frames {done}/{total}")
        )
    for warning in clip.warnings:
        err.print(warning, style="yellow", markup=False)
    return clip


def _models(
    target: str, draft: str | None, dtype: str | None, device: str | None, *, quiet: bool
) -> Models:
    from saccade.models import check_pair, load

    with status("loading the models", quiet=quiet):
        loaded = load(target, dtype=dtype, device=device)
        if draft is None and target == "shapes":
            draft = "shapes-draft"
        drafter = None if draft is None else load(draft, dtype=dtype, device=device)
        if drafter is not None:
            check_pair(loaded, drafter)
    return Models(loaded, drafter)


def _inputs(
    target: Loaded, clip: Clip, prompt: str, history: Sequence[tuple[str, str]] = ()
) -> Inputs:
    from saccade.models import ask

    if len(clip.frames) == 1 and clip.source_frames == 1:
        return ask(target, prompt, images=list(clip.frames), history=history)
    return ask(target, prompt, clips=[clip], history=history)


def _settings(
    tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    stop: list[str] | None,
) -> dict[str, Any]:
    if temperature == 0 and (top_p is not None or top_k is not None):
        raise OptionError("--top-p and --top-k sample, so they need --temperature above 0")
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if stop:
        settings["stop_strings"] = stop
    return settings


def main() -> None:
    """Runs the command line: an error meant for a person is one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except SaccadeError as error:
        err.print(f"saccade: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
