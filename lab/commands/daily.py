"""The commands ``python -m lab busy | live``.

They check two things that users do every day: asking while other programs run, and asking about a
long live video.
"""

from __future__ import annotations

from typing import Annotated

import typer

from saccade.cli.terminal import Threads, Verbose, prepare

MIB = 2**20


def busy() -> None:
    """Compare saccade describe alone with one beside two busy loops, in under two minutes.

    Run it on idle cores. Exits with 1 if it is over 3 times as slow, or tau changes by over 20 %.
    """
    from lab.hardware.busy_machine import MAX_SLOWDOWN, MAX_TAU_CHANGE, measure_busy_machine

    measured = measure_busy_machine()
    for name, runs in (("alone", measured.alone), ("beside two loops", measured.beside)):
        typer.echo(
            f"{name}: " + ", ".join(f"{run.seconds:.1f} s, tau {run.tau:.2f}" for run in runs)
        )
    typer.echo(
        f"{'holds' if measured.passes else 'FAILS'}: {measured.slowdown:.2f} times as slow "
        f"(at most {MAX_SLOWDOWN:g}), tau changed by {measured.tau_change:.0%} "
        f"(at most {MAX_TAU_CHANGE:.0%})"
    )
    if not measured.passes:
        raise typer.Exit(1)


def live(
    method: Annotated[str, typer.Option(help="How answers are drafted.")] = "specvlm",
    window: Annotated[str, typer.Option(help="How much of the video is kept.")] = "64 frames",
    size: Annotated[int, typer.Option(min=56, help="Side of a frame, in pixels.")] = 112,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Append 600 frames to a live video: memory stays flat, and five answers are generate's.

    Exits with 1 if memory grows by over 2 % after frame 200, or if an answer differs.
    """
    prepare(threads, verbose)
    from lab.hardware.live_memory import ALLOWED_GROWTH, watch_frames
    from saccade.inputs import Pair, load

    measured = watch_frames(
        Pair(load("shapes"), load("shapes-draft")),
        method,
        window=window,
        size=size,
        on_measure=lambda frames, resident: typer.echo(
            f"{frames} frames: {resident / MIB:.0f} MiB"
        ),
    )
    equal = sum(measured.equal_answers)
    typer.echo(
        f"{'holds' if measured.passes else 'FAILS'}: memory grew by {measured.growth:.1%} after "
        f"frame 200 (at most {ALLOWED_GROWTH:.0%}), {equal} of {len(measured.equal_answers)} "
        "answers are generate's"
    )
    if not measured.passes:
        raise typer.Exit(1)
