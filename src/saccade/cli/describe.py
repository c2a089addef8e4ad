"""``saccade describe``, and the printing of an answer while it is decoded."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import (
    ClipOptions,
    LoadOptions,
    ModelOptions,
    SamplingOptions,
    with_option_groups,
)
from saccade.cli.terminal import (
    Json,
    Quiet,
    Verbose,
    err,
    out,
    prepare,
    progress_bars,
    silence_output,
)
from saccade.core.answer_text import TextDecoder
from saccade.core.errors import INVALID_LOGITS_MESSAGE, ModelError, OptionError

if TYPE_CHECKING:
    from rich.text import Text

    from saccade.core.result import Result
    from saccade.engine.generate import Stream
    from saccade.inputs import Loaded

OutputDetail = Literal["all", "text", "nothing"]
# What is shown while a phase of the work (``Stream``) goes on, by the phase's name.
PHASE_TEXTS = {
    "costs": "timing forwards on this machine, once",
    "vision": "looking at the frames",
    "prefill": "reading the prompt",
    "guide": "choosing what the draft sees",
    "decode": "drafting",
}


@with_option_groups
def describe(
    models: ModelOptions,
    frames: ClipOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    video: Annotated[
        str | None, typer.Argument(help="A video, GIF, image or folder of frames; - is stdin.")
    ] = None,
    question: command_options.Question = None,
    prompt: command_options.Prompt = command_options.QUESTION,
    document: command_options.Documents = None,
    method: command_options.Method = None,
    max_new_tokens: command_options.Tokens = 256,
    seed: command_options.Seed = None,
    exact: command_options.Exact = False,
    tp: command_options.Tp = False,
    trace: command_options.Trace = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer a question about a video or document, streaming text as it is drafted and accepted.

    A target over several GPUs: torchrun --nproc-per-node 4 -m saccade describe ... --tp
    """
    video, question = command_options.split_arguments(video, question, bool(document))
    prompt = command_options.resolve_question(question, prompt)
    settings = run_setup.resolve_settings(models, loading, method, tp=tp)
    detail = output_detail(as_json, quiet)
    if tp:
        _prepare_process(video or "", exact)
    subject = run_setup.read_subject(
        video,
        document,
        frames.sampling(),
        quiet=detail != "all",
        warn=not quiet,
        target=settings.target,
    )
    prepare(settings.threads, verbose, quiet=detail != "all")
    from saccade.answering.chat_model import stream_answer
    from saccade.drafting.recipe import for_split_target
    from saccade.model import tensor_parallel

    (recipe,) = run_setup.resolve_recipes([settings.method], exact)
    recipe = for_split_target(recipe) if tp else recipe
    pair = settings.load_models(quiet=detail != "all", tp=tp)
    if tp and seed is None:
        seed = tensor_parallel.broadcast_from_rank_0(secrets.randbits(63))
    start = partial(
        stream_answer,
        pair,
        pair.ask(prompt, **subject.ask_arguments),
        recipe,
        captioner=settings.make_captioner(subject.frames),
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        **sampling.generation_settings(),
    )
    result = print_answer(pair.target, start, detail)
    if tp:
        tensor_parallel.disconnect()
        if tensor_parallel.rank() != 0:
            return  # Only the first process writes the trace and the JSON.
    if trace is not None:
        from saccade.engine import trace as traces

        traces.write_trace(trace, result)
    if as_json:
        typer.echo(json.dumps(result_fields(result, subject.frame_count, subject.warnings)))


def _prepare_process(video: str, exact: bool) -> None:
    """Silences this process unless it is the first one of --tp.

    Raises OptionError for options that do not work with --tp.
    """
    from saccade.model import tensor_parallel

    if tensor_parallel.rank():
        silence_output()
    if exact:
        raise OptionError(
            "--exact needs a fixed order of additions, which a split target does not have: leave "
            "out --exact or --tp"
        )
    if video == "-":
        raise OptionError("with --tp every process reads the video: give a file and not stdin")


def output_detail(as_json: bool, quiet: bool) -> OutputDetail:
    """Returns how much of an answer is printed while it is decoded."""
    if as_json:
        return "nothing"
    return "text" if quiet else "all"


def print_answer(target: Loaded, start: Callable[..., Stream], detail: OutputDetail) -> Result:
    """Prints an answer while it is decoded, and returns its result.

    ``start`` starts the answer's stream. Its argument ``on_phase`` is a function that the stream
    calls with the name of each phase, such as "prefill", when the phase begins. Raises ModelError
    after printing what there is, if the model's logits were invalid.
    """
    from saccade.answering import coloured_text

    write: Callable[[Text | str], None] = {
        "all": lambda text: out.print(text, end="", soft_wrap=True, markup=False),
        "text": lambda text: typer.echo(str(text), nl=False),
        "nothing": lambda text: None,
    }[detail]
    with progress_bars(quiet=detail != "all") as show_progress:

        def on_phase(phase: str) -> None:
            show_progress(PHASE_TEXTS.get(phase, phase))

        # The first round comes when the prompt has been read, and ends the progress bar.
        rounds = start(on_phase=on_phase)
        first = next(rounds)
    text_decoder = rounds.text_decoder or TextDecoder(target.decode)
    coloured = coloured_text.IncrementalDecoder(text_decoder)
    result: Result | None = None
    try:
        for round in chain([first], rounds):
            write(coloured.styled_text(round.to_record()))
        (result,) = rounds.results
    finally:
        # The decoder withholds text that later tokens might have changed. It is written now, even
        # after Ctrl-C, and the line end keeps the shell's prompt off the answer's last line.
        write(coloured.rest(None if result is None else result.text) + "\n")
    if result.finish_reason == "error":
        raise ModelError(INVALID_LOGITS_MESSAGE)
    if detail == "all":
        if out.is_terminal and any(round.tokens for round in result.rounds):
            out.print(coloured_text.legend())  # It explains the colours of the answer above it.
        rate = result.tokens_per_second or 0.0
        reused = f", {result.reused_tokens} tokens reused" if result.reused_tokens else ""
        tau = "" if result.tau is None else f", tau {result.tau:.2f}"
        err.print(
            f"[dim]{len(result.ids)} tokens, {rate:.0f} per second{tau}; "
            f"first after {result.timings.first_token:.2f} s{reused}; "
            f"{result.timings.total:.2f} s in all[/dim]"
        )
        for warning in filter(None, [*result.warnings, result.fallback_reason]):
            err.print(warning, style="yellow", markup=False)
    return result


def result_fields(
    result: Result, frame_count: int, media_warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of an answer's JSON.

    ``frame_count`` is how many frames the question was about. ``media_warnings`` are the warnings
    of reading them.
    """
    import torch

    timings = result.timings
    prompt_seconds = timings.vision + timings.prefill + timings.guide + timings.draft_prefill
    # The part of captioning that ran beside the target's prefill took no time of its own.
    prefill_seconds = prompt_seconds + timings.caption - timings.caption_hidden
    return {
        "text": result.text,
        "token_ids": result.ids,
        "method": result.method,
        "finish_reason": result.finish_reason,
        "fallback_reason": result.fallback_reason,
        "tokens": len(result.ids),
        "tau": result.tau,
        "acceptance_rate": result.acceptance_rate,
        "rounds": len(result.forwards),
        "decode_seconds": timings.decode,
        "prefill_seconds": prefill_seconds,
        "total_seconds": timings.total,
        "tokens_per_second": result.tokens_per_second,
        "visual_tokens": result.visual_tokens,
        "draft_visual_tokens": result.draft_visual_tokens,
        "reused_tokens": result.reused_tokens,
        "peak_bytes": result.peak_bytes,
        "frames": frame_count,
        "threads": torch.get_num_threads(),
        "timings": asdict(timings),
        "warnings": [*media_warnings, *result.warnings],
    }
