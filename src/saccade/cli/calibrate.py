"""``saccade calibrate``: finds the method that decodes fastest on a pair and its videos."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import DeviceOptions, FrameOptions, with_option_groups
from saccade.cli.terminal import Json, Verbose, err, out, prepare, status
from saccade.core.errors import OptionError
from saccade.inputs.checkpoints import EMBEDDED_TARGET

if TYPE_CHECKING:
    from saccade.bench.calibration import Calibration
    from saccade.inputs.media import Clip

# The share of the time in which roundings of the draft's weights are tried. The search for a method
# gets the rest.
ROUNDING_SHARE = 0.25


@with_option_groups
def calibrate(
    frames: FrameOptions,
    device_options: DeviceOptions,
    videos: Annotated[
        list[str] | None,
        typer.Argument(
            help="Videos, images or folders. If none, clips are drawn for the target 'shapes'."
        ),
    ] = None,
    prompt: command_options.Prompt = command_options.QUESTION,
    target: Annotated[
        str, typer.Option("--target", "-t", help="A checkpoint folder or hub id.")
    ] = EMBEDDED_TARGET,
    draft: command_options.Draft = None,
    draft_quantize: command_options.DraftQuantize = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Where to start; an axis set here (NAME/keep=0.2) stays. "
            "Without it: auto, or specvlm-self where there is no draft.",
        ),
    ] = None,
    max_new_tokens: command_options.Tokens = 128,
    seconds: Annotated[float, typer.Option(min=1, help="How long it may take in all.")] = 600,
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
    deadline = time.monotonic() + seconds
    _check_writable(out_file)
    if method is not None:
        run_setup.check_methods([method])
    if not videos and target != EMBEDDED_TARGET:
        raise OptionError(
            f"give a video or more: clips are drawn only for the target 'shapes', not for {target}"
        )
    run_setup.check_checkpoints(target, draft)
    sampling = frames.sampling()
    clips = [run_setup.read_clip(video, sampling, quiet=as_json) for video in videos or ()]
    prepare(device_options.threads, verbose, quiet=as_json)
    from saccade.bench import calibration
    from saccade.bench.hardware.disturbance import DisturbanceWatch
    from saccade.cli.config_file import write_config
    from saccade.inputs import clip_arguments

    if method is not None:
        calibration.check_method(method)
    with status("loading the models", quiet=as_json) as tell:
        clips = clips or _draw_clips(tell)
        models = run_setup.load_models(
            target,
            draft,
            quiet=True,
            draft_quantize=draft_quantize,
            **device_options.load_arguments,
        )
        requests = [models.ask(prompt, **clip_arguments(clip)) for clip in clips]
        # On a CPU, roundings of the draft's weights are tried, unless the user has chosen one.
        proposes_rounding = draft_quantize is None and models.target.backbone.device.type == "cpu"
        search_share = 1 - ROUNDING_SHARE if proposes_rounding else 1.0
        watch = DisturbanceWatch()  # It notices other programs that keep the processor busy.
        result = calibration.calibrate(
            models,
            requests,
            method=method,
            seconds=max(1.0, search_share * (deadline - time.monotonic())),
            max_new_tokens=max_new_tokens,
            on_progress=tell,
        )
        if draft_quantize is not None:
            # A rounded copy of a draft has a name that cannot be loaded, such as "NAME (int8)". So
            # the file gets ``--draft`` and ``--draft-quantize`` as they were given.
            result = replace(result, draft=draft, draft_quantize=draft_quantize)
        elif proposes_rounding:
            seconds_left = deadline - time.monotonic()
            result = calibration.propose_rounding(
                models, requests, result, tell, seconds=seconds_left
            )
    if (warning := watch.warning()) is not None:
        err.print(warning, style="yellow", markup=False, soft_wrap=True)
    write_config(out_file, result)
    if as_json:
        typer.echo(json.dumps(result.json()))
        return
    _print_result(result)
    written = f"Written to {out_file}: saccade describe VIDEO --config {out_file}"
    out.print(written, soft_wrap=True, markup=False)


def _print_result(result: Calibration) -> None:
    """Prints the trials and the result."""
    from saccade.bench.terminal_output import make_table

    trials = make_table(["stage", "method"], ["runs", "tau", "decode x", "whole x", "auto x"])
    for trial in result.table:
        against_auto = result.speedup_over_auto(trial)
        trials.add_row(
            trial.stage,
            trial.method,
            str(len(trial.summaries)),
            f"{trial.tau:.2f}",
            f"{trial.speedup:.2f}" + ("" if trial.fallback is None else " (gave up)"),
            f"{trial.end_to_end_speedup:.2f}",
            "" if against_auto is None else f"{against_auto:.2f}",
            style="bold" if trial is result.best else None,
        )
    out.print(trials)
    out.print(
        "[dim]Speeds are medians of ratios, run by run. decode x: decoding against ar; whole x: "
        "the whole answer against ar; auto x: decoding against auto.[/dim]",
        soft_wrap=True,
    )
    out.print(
        f"\n{result.advice} (tau {result.best.tau:.2f}; {result.seconds:.0f} s in all)",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    if result.skipped:
        err.print(
            f"no time for: {', '.join(result.skipped)}; give more --seconds",
            style="yellow",
            markup=False,
        )


def _check_writable(path: Path) -> None:
    """Raises OptionError, before minutes are spent, where the file could not be written."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise OptionError(f"cannot write {path}; give --out a file in a folder that can be written")


def _draw_clips(tell: Callable[[str], None]) -> list[Clip]:
    """Draws clips of the synthetic world that no model was trained on."""
    from saccade.world import demo_clips

    return demo_clips.calibration_clips(tell)
