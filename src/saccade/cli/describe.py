"""``saccade describe``, and how an answer is shown as it comes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from saccade.cli import loading, options
from saccade.cli.options import ClipOptions, DrawOptions, LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Json, Quiet, Verbose, err, hush, out, prepare, steps
from saccade.core.errors import BROKEN, ModelError, OptionError

if TYPE_CHECKING:
    from rich.text import Text

    from saccade.core.result import Result
    from saccade.engine.generate import Stream
    from saccade.inputs import Loaded
    from saccade.inputs.texts import About


Shown = Literal["all", "text", "nothing"]
PHASES = {
    "costs": "timing forwards on this machine, once",
    "vision": "looking at the frames",
    "prefill": "reading the prompt",
    "guide": "choosing what the draft sees",
    "decode": "drafting",
}


@grouped
def describe(
    models: ModelOptions,
    frames: ClipOptions,
    drawing: DrawOptions,
    how: LoadOptions,
    video: Annotated[
        str | None, typer.Argument(help="A video, GIF, image or folder of frames; - is stdin.")
    ] = None,
    question: options.Question = None,
    prompt: options.Prompt = options.QUESTION,
    document: options.Documents = None,
    method: options.Method = None,
    max_new_tokens: options.Tokens = 256,
    seed: options.Seed = None,
    exact: options.Exact = False,
    tp: options.Tp = False,
    trace: options.Trace = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer a question about a video or document, streaming text as it is drafted and accepted.

    A target over several GPUs: torchrun --nproc-per-node 4 -m saccade describe ... --tp
    """
    video, question = options.shown(video, question, bool(document))
    prompt = options.asked(question, prompt)
    if tp and method is None:  # auto times forwards, which processes would do apart
        method = "specvlm" if models.draft or models.target in (None, "shapes") else "std"
    known, show = loading.known(models, how, method), showing(as_json, quiet)
    if tp:
        _in_several_processes(video or "", exact)
    seen = loading.about(
        *(video, document, frames.sampling()),
        quiet=show != "all",
        warn=not quiet,
        target=known.target,
    )
    prepare(known.threads, verbose, quiet=show != "all")
    from saccade.corpus.answering import stream_answer
    from saccade.drafting.recipe import split
    from saccade.model import tensor_parallel

    (recipe,) = loading.recipes([known.method], exact)
    recipe = split(recipe) if tp else recipe
    pair = known.models(quiet=show != "all", tp=tp)
    if tp and seed is None:
        seed = tensor_parallel.agreed(secrets.randbits(63))
    begin = partial(
        stream_answer,
        pair,
        pair.ask(prompt, **seen.asked),
        recipe,
        captioner=known.captions(seen.frames),
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        **drawing.settings(),
    )
    result = answer(pair.target, begin, show)
    if tp:
        tensor_parallel.leave()
        if tensor_parallel.rank():
            return
    if trace is not None:
        from saccade.engine import trace as traces

        traces.write(trace, result)
    if as_json:
        typer.echo(json.dumps(described(result, seen)))


def _in_several_processes(video: str, exact: bool) -> None:
    """Of the processes of --tp the first speaks. Raises OptionError for what they cannot do."""
    from saccade.model import tensor_parallel

    if tensor_parallel.rank():
        hush()
    if exact:
        raise OptionError("--exact adds in one order, a split target does not: leave out one")
    if video == "-":
        raise OptionError("with --tp every process reads the video: give a file and not stdin")


def showing(as_json: bool, quiet: bool) -> Shown:
    return "nothing" if as_json else "text" if quiet else "all"


def answer(target: Loaded, begin: Callable[..., Stream], shown: Shown) -> Result:
    """Runs a stream to its end and shows it as it goes; ``begin`` is given ``on_phase``."""
    from saccade.bench import terminal_output

    typist = terminal_output.IncrementalDecoder(target.decode)
    write: Callable[[Text | str], None] = {
        "all": lambda text: out.print(text, end="", soft_wrap=True, markup=False),
        "text": lambda text: typer.echo(str(text), nl=False),
        "nothing": lambda text: None,
    }[shown]
    with steps(quiet=shown != "all") as tell:

        def on_phase(phase: str) -> None:
            tell(PHASES.get(phase, phase))

        rounds = begin(on_phase=on_phase)
        first = next(rounds)
    try:
        for round in chain([first], rounds):
            write(typist.type(round.scalars()))
    finally:  # Ctrl-C leaves what was written, and the prompt on a line of its own
        write(typist.rest() + "\n")
    result = rounds.results[0]
    if result.finish_reason == "error":
        raise ModelError(BROKEN)
    if shown == "all":
        rate = result.tokens_per_second or 0.0
        reused = f", {result.reused_tokens} tokens reused" if result.reused_tokens else ""
        err.print(
            f"[dim]{len(result.ids)} tokens, {rate:.0f} per second, tau {result.tau:.2f}; "
            f"first after {result.timings.first_token:.2f} s{reused}; "
            f"{result.timings.total:.2f} s in all[/dim]"
        )
        if any(round.tokens for round in result.rounds):
            err.print(terminal_output.legend())
        for told in filter(None, [*result.warnings, result.fallback_reason]):
            err.print(told, style="yellow", markup=False)
    return result


def described(result: Result, seen: About) -> dict[str, Any]:
    import torch

    timings = result.timings
    before = timings.vision + timings.prefill + timings.guide + timings.draft_prefill
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
        "prefill_seconds": before + timings.caption - timings.caption_hidden,
        "total_seconds": timings.total,
        "tokens_per_second": result.tokens_per_second,
        "visual_tokens": result.visual_tokens,
        "draft_visual_tokens": result.draft_visual_tokens,
        "reused_tokens": result.reused_tokens,
        "peak_bytes": result.peak_bytes,
        "frames": seen.told["frames"],
        "threads": torch.get_num_threads(),
        "timings": asdict(timings),
        "warnings": [*seen.told["warnings"], *result.warnings],
    }
