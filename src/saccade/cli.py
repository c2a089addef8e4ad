"""The command line. Parses, calls, shows; everything heavy is imported only when a command runs."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from saccade.errors import OptionError, SaccadeError
from saccade.shapes.commands import shapes_app
from saccade.terminal import PIPED_WIDTH, Json, Threads, Verbose, err, out, prepare, status

if TYPE_CHECKING:
    from saccade.media import Clip, Sampling
    from saccade.models import Loaded
    from saccade.types import Inputs, Result

app = typer.Typer(
    help="Vision-language models that answer faster, with exactly the same answers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(shapes_app, name="shapes")

QUESTION = "Describe the video in detail."
DEMO_SEED, DEMO_FRAMES, DEMO_SIZE = 20_000_002, 64, 224  # never trained on

Target = Annotated[str, typer.Option(help="Target: a checkpoint folder or hub id.")]
Draft = Annotated[str | None, typer.Option(help="Draft: a checkpoint folder or hub id.")]
Method = Annotated[str, typer.Option(help="NAME or NAME/axis=value/...; see `saccade methods`.")]
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
    target: Target = "shapes",
    draft: Draft = None,
    method: Method = "specvlm/shape=fit",
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
    prepare(threads, verbose)
    from saccade.systems import resolve

    recipe = resolve(method)
    sampling = _sampling(fps, num_frames, every_frame, start, end)
    clip = _read(video, sampling, quiet=as_json)
    models = _models(target, draft, dtype, device, quiet=as_json)
    settings = _settings(max_new_tokens, temperature, top_p, top_k, stop)
    inputs = _inputs(models.target, clip, prompt)
    result = _answer(models, inputs, recipe, settings, seed, quiet=as_json)
    if trace is not None:
        from saccade.measure import trace as traces

        traces.write(trace, result)
    if as_json:
        typer.echo(json.dumps(_described(result, clip)))


@app.command()
def compare(
    video: Annotated[str, typer.Argument(help="A video, GIF, image or folder of frames.")],
    methods: Annotated[
        str, typer.Option(help="Comma-separated; hf, hf-assisted, hf-lookup too.")
    ] = ("ar,specvlm/shape=fit,hf"),
    prompt: Prompt = QUESTION,
    target: Target = "shapes",
    draft: Draft = None,
    max_new_tokens: Tokens = 256,
    repeat: Repeat = 3,
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
    prepare(threads, verbose)
    from saccade.measure.compare import named

    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    named(names)
    sampling = _sampling(fps, num_frames, every_frame, start, end)
    clip = _read(video, sampling, quiet=as_json)
    models = _models(target, draft, dtype, device, quiet=as_json)
    settings = {"max_new_tokens": max_new_tokens}
    found = _compared(models, clip, Path(video).name, prompt, names, repeat, settings, seed)
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
    """The named methods and the choices on each axis."""
    from saccade.systems import DRAFTERS, SCHEDULES, SHAPES, SYSTEMS, VIEWS

    axes = {
        "view": sorted(VIEWS),
        "keep": ["share of visual tokens, 0 to 1"],
        "positions": ["original", "repacked"],
        "drafter": sorted(DRAFTERS),
        "shape": ["chain-N", *sorted(SHAPES)],
        "schedule": sorted(SCHEDULES),
    }
    about = {name: recipe.about for name, recipe in SYSTEMS.items()}
    if as_json:
        typer.echo(json.dumps({"methods": about, "axes": axes}))
        return
    listed = Table(box=None, pad_edge=False, show_header=False)
    for name, line in about.items():
        listed.add_row(f"[bold]{name}[/bold]", line)
    out.print(listed)
    out.print(
        "\nAny choice can be swapped: NAME/axis=value/..., e.g. specvlm/shape=chain-7/keep=0.05\n"
    )
    choices = Table(box=None, pad_edge=False, show_header=False)
    for axis, values in axes.items():
        choices.add_row(f"[bold]{axis}[/bold]", ", ".join(values))
    out.print(choices)


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


def _answer(
    models: Models,
    inputs: Inputs,
    recipe: Any,
    settings: dict[str, Any],
    seed: int | None,
    *,
    quiet: bool,
) -> Result:
    from saccade import show
    from saccade.engine import stream

    tokenizer = models.target.tokenizer
    typist = show.Typist(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    with status("starting", quiet=quiet) as tell:
        rounds = stream(
            models.target.backbone,
            inputs,
            draft=None if models.draft is None else models.draft.backbone,
            method=recipe,
            tokenizer=tokenizer,
            seed=seed,
            on_phase=tell,
            **settings,
        )
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
        err.print(
            f"[dim]{len(result.ids)} tokens, {rate:.0f} per second, tau {result.tau:.2f}; "
            f"{result.timings.total:.2f} s in all[/dim]"
        )
        if recipe.drafts:
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


def _inputs(target: Loaded, clip: Clip, prompt: str) -> Inputs:
    from saccade.models import ask

    if len(clip.frames) == 1 and clip.source_frames == 1:
        return ask(target, prompt, images=list(clip.frames))
    return ask(target, prompt, clips=[clip])


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
