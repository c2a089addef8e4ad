"""``saccade watch``: plays a file as if it were live, and asks about it again and again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import LoadOptions, ModelOptions, with_option_groups
from saccade.cli.describe import output_detail, print_answer, result_fields
from saccade.cli.terminal import Json, Quiet, Verbose, err, prepare
from saccade.core.errors import OptionError

if TYPE_CHECKING:
    from saccade.engine.generate import Stream

QUESTION = "What is happening now?"


@with_option_groups
def watch(
    models: ModelOptions,
    loading: LoadOptions,
    video: Annotated[str, typer.Argument(help="A video, GIF or folder of frames.")],
    ask: Annotated[
        str, typer.Option("--ask", help="What to ask about what was seen so far.")
    ] = QUESTION,
    every: Annotated[float, typer.Option(help="Seconds of video between two questions.")] = 5.0,
    window: Annotated[
        str, typer.Option(help='How much is kept: "60 s", "120 frames" or "8000 tokens".')
    ] = "60 s",
    fps: Annotated[float, typer.Option(help="Frames to take per second.")] = 2.0,
    realtime: Annotated[
        bool, typer.Option(help="Play the file at its own speed, or as fast as it is read.")
    ] = True,
    method: command_options.Method = None,
    max_new_tokens: command_options.Tokens = 64,
    seed: command_options.Seed = None,
    exact: command_options.Exact = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Watch a file as if it were live, and ask about it every few seconds.

    Frames are read as they come. Old ones are dropped, so that memory stays bounded.
    """
    if not every > 0:
        raise OptionError("--every is a number of seconds, above 0")
    settings = run_setup.resolve_settings(models, loading, method)
    detail = output_detail(as_json, quiet)
    prepare(settings.threads, verbose, quiet=detail != "all")
    from saccade.answering.chat_model import Model
    from saccade.answering.live_video import Window, frames_of

    if video == "-":
        raise OptionError(
            "saccade watch reads its file piece by piece, and cannot go back in standard input: "
            "save the video to a file"
        )
    limits = Window.of(window)
    (recipe,) = run_setup.resolve_recipes([settings.method], exact)
    # A file that cannot be read is refused before models are loaded.
    if next(frames_of(video, fps, realtime), None) is None:
        raise OptionError(f"{video} has no frames")
    pair = settings.load_models(quiet=detail != "all")
    model = Model(pair, recipe)
    domain = pair.target.training_domain
    # The file begins to play when its first frame is taken. Frames that were due while the models
    # loaded would all come at once, so the file is opened again here.
    frames = frames_of(video, fps, realtime)
    first_frame, first_time = next(frames)
    if not quiet and domain is not None and not domain.includes(first_frame[None]):
        run_setup.warn_about_training(settings.target)
    with model.watch(
        window=limits,
        fps=fps,
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    ) as live:

        def answer(time: float) -> None:
            def start(**arguments: Any) -> Stream:
                stream = live.stream(ask, **arguments)
                if detail == "all":
                    # The stream has taken the latest frames, which may push old ones out.
                    begin, _ = live.kept_seconds
                    err.print(f"[dim]{time:.1f} s (kept from {begin:.1f} s)[/dim]")
                return stream

            result = print_answer(pair.target, start, detail)
            if as_json:
                frame_count = sum(len(segment.clip.frames) for segment in live.segments)
                fields = result_fields(result, frame_count)
                fields |= {"time": time, "kept_seconds": live.kept_seconds}
                typer.echo(json.dumps({"question": ask, **fields}))

        live.append(first_frame, first_time)
        last_time = first_time
        last_question_time = None
        next_question = every
        for frame, time in frames:
            if time >= next_question:
                answer(last_time)
                last_question_time = last_time
                # If several questions were due before this frame, only one was asked. With one
                # every 5 s, a frame at 4 s and the next frame at 17 s, the questions due at 5, 10
                # and 15 s are asked as one, and the next is due at 20 s.
                missed_questions = (time - next_question) // every
                next_question += every * (1 + missed_questions)
            live.append(frame, time)
            last_time = time
        if last_question_time != last_time:
            answer(last_time)
