"""``saccade calibrate``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.options import DeviceOptions, FrameOptions, grouped
from saccade.cli.terminal import Json, Verbose, err, out, prepare, status
from saccade.core.errors import OptionError

if TYPE_CHECKING:
    from saccade.bench.calibrate import Calibration
    from saccade.inputs.media import Clip

FIRST_SEED = 30_000_000  # neither trained on nor what `evidence eval` measures
CLIPS, FRAMES, SIZE = 4, 64, 224  # of the clips, half are held out


@grouped
def calibrate(
    frames: FrameOptions,
    how: DeviceOptions,
    videos: Annotated[
        list[str] | None,
        typer.Argument(help="Videos, GIFs, images or folders; the target shapes makes its own."),
    ] = None,
    prompt: options.Prompt = options.QUESTION,
    target: Annotated[
        str, typer.Option("--target", "-t", help="A checkpoint folder or hub id.")
    ] = "shapes",
    draft: options.Draft = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Where to start; an axis set here (NAME/keep=0.2) stays. "
            "Without it: auto, or specvlm-self where there is no draft.",
        ),
    ] = None,
    max_new_tokens: options.Tokens = 128,
    seconds: Annotated[float, typer.Option(min=1, help="About how long it may take.")] = 600,
    out_file: Annotated[
        Path, typer.Option("--out", help="The file to write, for --config.")
    ] = Path("saccade.yaml"),
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find the view, share of visual tokens and shape that decode fastest here, as a YAML file.

    Half of the videos are held out: what was found replaces auto only where it beats both auto and
    plain decoding on those. It holds for this pair, videos like these, and this machine, when
    nothing else keeps it busy.
    """
    _check_writable(out_file)
    if method is not None:
        loading.check_methods([method])
    if not videos and target != "shapes":
        raise OptionError(
            f"give a video or more: only the target shapes makes its own, not {target}"
        )
    loading.look_for(target, draft)
    sampling = frames.sampling()
    clips = [loading.read(video, sampling, quiet=as_json) for video in videos or ()]
    prepare(how.threads, verbose, quiet=as_json)
    from saccade.bench import calibrate as calibrating
    from saccade.bench.hardware.others import Watch
    from saccade.cli.config import write
    from saccade.inputs import shown

    if method is not None:
        calibrating.check_method(method)
    with status("loading the models", quiet=as_json) as tell:
        clips = clips or _own(tell)
        models = loading.models(target, draft, quiet=True, **how.load)
        asked = [models.ask(prompt, **shown(clip)) for clip in clips]
        watch = Watch()
        found = calibrating.calibrate(
            models,
            asked,
            method=method,
            seconds=seconds,
            max_new_tokens=max_new_tokens,
            on_progress=tell,
        )
    if (warning := watch.said()) is not None:
        err.print(warning, style="yellow", markup=False, soft_wrap=True)
    write(out_file, found)
    if as_json:
        typer.echo(json.dumps(found.json()))
        return
    _show(found)
    out.print(f"Written to {out_file}: saccade describe VIDEO --config {out_file}", soft_wrap=True)


def _show(found: Calibration) -> None:
    """What was tried, and what came out of it."""
    from saccade.bench.terminal_output import make_table

    tried = make_table(["stage", "method"], ["runs", "tau", "decode x", "whole x", "auto x"])
    for trial in found.table:
        beside = found.speedup_over_auto(trial)
        tried.add_row(
            trial.stage,
            trial.method,
            str(len(trial.summaries)),
            f"{trial.tau:.2f}",
            f"{trial.speedup:.2f}" + ("" if trial.fallback is None else " (gave up)"),
            f"{trial.end_to_end_speedup:.2f}",
            "" if beside is None else f"{beside:.2f}",
            style="bold" if trial is found.best else None,
        )
    out.print(tried)
    out.print(
        "[dim]x: against ar run by run, medians; whole: with all before the first token; "
        "auto x: decoding, against auto run by run[/dim]",
        soft_wrap=True,
    )
    out.print(
        f"\n{found.advice} (tau {found.best.tau:.2f}; {found.seconds:.0f} s in all)",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    if found.skipped:
        err.print(
            f"no time for: {', '.join(found.skipped)}; give more --seconds",
            style="yellow",
            markup=False,
        )


def _check_writable(path: Path) -> None:
    """Before minutes are spent: whether the file can be written in the end."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise OptionError(f"cannot write {path}; give --out a file in a folder that can be written")


def _own(tell: Callable[[str], None]) -> list[Clip]:
    """Clips of the synthetic world that nothing was trained on."""
    from saccade.world import drawing, scenes

    clips = []
    for number in range(CLIPS):
        tell(f"drawing clip {number + 1} of {CLIPS}")
        clips.append(drawing.render_through_mp4(scenes.scene(FIRST_SEED + number), FRAMES, SIZE))
    return clips
