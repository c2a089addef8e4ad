"""``saccade compare``, and the comparison that ``saccade demo`` shows too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from saccade.cli import loading, options
from saccade.cli.terminal import Json, Threads, Verbose, err, out, prepare, status

if TYPE_CHECKING:
    from saccade.core.result import Result
    from saccade.inputs.media import Clip

REPEAT, MANY = 3, 8


def compare(
    video: Annotated[str, typer.Argument(help="A video, GIF, image or folder of frames.")],
    methods: Annotated[
        str | None,
        typer.Option(help="Comma-separated, or all; hf, hf-assisted, hf-lookup too."),
    ] = None,
    prompt: options.Prompt = options.QUESTION,
    target: options.Target = None,
    draft: options.Draft = None,
    config: options.Config = None,
    captioner: options.Captioner = None,
    max_new_tokens: options.Tokens = 256,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Interleaved runs a method; else {REPEAT}, or 1 of more than {MANY} methods.",
        ),
    ] = None,
    fps: options.Fps = None,
    num_frames: options.NumFrames = None,
    every_frame: options.Every = False,
    start: options.Start = None,
    end: options.End = None,
    seed: options.Seed = None,
    exact: options.Exact = False,
    threads: Threads = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.Trust = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the rounds here, a file a method.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run several methods on one video, interleaved, and show what each one costs."""
    known = loading.known(config, target, draft, None)
    prepare(threads or known.threads, verbose)
    from saccade.bench.compare import named
    from saccade.methods import SYSTEMS

    given = (methods or f"ar,{known.method},hf").split(",")
    names = [name.strip() for name in given if name.strip()]
    names = [each for name in names for each in (SYSTEMS if name == "all" else [name])]
    names = list(dict.fromkeys(names))
    ours = [name for name, recipe in named(names).items() if recipe is not None]
    loading.recipes(ours, exact)
    sampling = loading.sampling(fps, num_frames, every_frame, start, end)
    clip = loading.read(video, sampling, quiet=as_json)
    place = loading.Place(dtype, device, device_map, quantize, trust_remote_code)
    models = loading.models(known.target, known.draft, place, quiet=as_json)
    settings = {"max_new_tokens": max_new_tokens}
    often = repeat or (REPEAT if len(names) <= MANY else 1)
    caption = loading.captioner(captioner, known.target, clip, device)
    title = Path(video).name
    found = compared(models, clip, title, prompt, names, often, settings, seed, caption, exact)
    if trace is not None:
        from saccade.bench import trace as traces

        for name, result in found.results.items():
            safe = name.replace("/", "_")
            traces.write(trace.with_name(f"{trace.stem}-{safe}{trace.suffix}"), result)
    if as_json:
        typer.echo(json.dumps(found.json()))
        return
    out.print(found.answer, markup=False)
    out.print()
    found.show(out)


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
        from saccade.bench import show

        about = self.about
        page.print(show.table(self.rows))
        page.print(
            f"[dim]{about['visual_tokens']} visual tokens, {about['dtype']} on {about['device']}, "
            f"{about['threads']} threads; medians of {about['repeat']} interleaved runs; "
            "x against ar in the same run; before: vision, prefill, guidance[/dim]"
        )
        show.notes(page, self.rows)


def compared(
    models: loading.Models,
    clip: Clip,
    video: str,
    prompt: str,
    names: list[str],
    repeat: int,
    settings: dict[str, Any],
    seed: int | None,
    captioner: Any = None,
    exact: bool = False,
) -> Comparison:
    import torch

    from saccade.bench.compare import named, race

    target = models.target
    inputs = loading.inputs(target, clip, prompt)
    draft_inputs = loading.draft_inputs(models, clip, prompt)
    with status("comparing", quiet=not err.is_terminal) as tell:
        raced = race(
            target,
            models.draft,
            inputs,
            named(names),
            repeat=repeat,
            settings={**settings, "do_sample": False},
            seed=seed,
            captioner=captioner,
            exact=exact,
            draft_inputs=draft_inputs,
            on_run=lambda name, round: tell(f"run {round} of {repeat}: {name}"),
        )
    results = raced.last()
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
    return Comparison(about, raced.rows(), results, base.text or "")
