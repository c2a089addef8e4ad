"""``saccade compare``, and the comparison that ``saccade demo`` shows too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from saccade.cli import loading, options
from saccade.cli.options import ClipOptions, LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Json, Verbose, err, out, prepare, status

if TYPE_CHECKING:
    from saccade.core.result import Result
    from saccade.inputs import Pair
    from saccade.inputs.texts import About

REPEAT, MANY = 3, 8
PEERS = ("hf", "hf-assisted", "hf-assisted-seeing", "hf-lookup")  # others' implementations


@grouped
def compare(
    models: ModelOptions,
    frames: ClipOptions,
    how: LoadOptions,
    video: options.Video = None,
    question: options.Question = None,
    document: options.Documents = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", "-m", help="Comma-separated, or all; hf, hf-assisted, hf-lookup too."
        ),
    ] = None,
    prompt: options.Prompt = options.QUESTION,
    max_new_tokens: options.Tokens = 256,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Interleaved runs a method; else {REPEAT}, or 1 of more than {MANY} methods.",
        ),
    ] = None,
    seed: options.Seed = None,
    exact: options.Exact = False,
    trace: options.Trace = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run several methods on one video or document, interleaved, and show what each one costs."""
    video, question = options.shown(video, question, bool(document))
    prompt = options.asked(question, prompt)
    known = loading.known(models, how)
    names = loading.method_names(f"ar,{known.method},hf" if methods is None else methods)
    loading.check_methods(names, beside=PEERS)
    seen = loading.about(video, document, frames.sampling(), quiet=as_json, target=known.target)
    prepare(known.threads, verbose, quiet=as_json)
    from saccade.bench.compare import resolve_methods

    ours = [name for name, recipe in resolve_methods(names).items() if recipe is not None]
    loading.recipes(ours, exact)
    pair = known.models(quiet=as_json)
    found = compared(
        pair,
        seen,
        {
            "video": None if video is None else Path(video).name,
            **({"documents": [file.name for file in document]} if document else {}),
        },
        prompt,
        names,
        repeat=repeat or (REPEAT if len(names) <= MANY else 1),
        max_new_tokens=max_new_tokens,
        seed=seed,
        captioner=known.captions(seen.frames),
        exact=exact,
    )
    if trace is not None:
        from saccade.engine import trace as traces

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
    warning: str | None = None  # why not to trust the times

    def json(self) -> dict[str, Any]:
        warned = {} if self.warning is None else {"warning": self.warning}
        rows = {name: row.json() for name, row in self.rows.items()}
        return {**self.about, **warned, "methods": rows}

    def show(self, page: Console) -> None:
        from saccade.bench import terminal_output

        about, times = self.about, self.about["repeat"]
        runs = "one run each" if times == 1 else f"medians of {times} interleaved runs"
        page.print(terminal_output.summary_table(self.rows))
        page.print(
            f"[dim]{about['visual_tokens']} visual tokens, {about['dtype']} on {about['device']}, "
            f"{about['threads']} threads; {runs}; "
            "x against ar in the same run; before: vision, prefill, guidance[/dim]"
        )
        terminal_output.print_notes(page, self.rows)
        if self.warning is not None:
            err.print(self.warning, style="yellow", markup=False, soft_wrap=True)


def compared(
    models: Pair,
    seen: About,
    called: Mapping[str, Any],
    prompt: str,
    names: Sequence[str],
    *,
    repeat: int,
    max_new_tokens: int,
    **others: Any,
) -> Comparison:
    """Methods side by side on one question about what is ``seen``, ``called`` so in the JSON;
    ``others`` as :func:`saccade.bench.compare.run_interleaved`."""
    import torch

    from saccade.bench.compare import BASELINE, resolve_methods, run_interleaved
    from saccade.bench.hardware.others import Watch

    backbone = models.target.backbone
    asked = models.ask(prompt, **seen.asked)
    watch = Watch()
    with status("comparing", quiet=not err.is_terminal) as tell:
        timed = run_interleaved(
            models,
            asked,
            resolve_methods(names),
            repeat=repeat,
            settings={"max_new_tokens": max_new_tokens, "do_sample": False},
            on_run=lambda name, round: tell(f"run {round} of {repeat}: {name}"),
            **others,
        )
    warning = watch.said([run.decode for run in timed.runs[BASELINE]])
    results = timed.last_results()
    base = results[BASELINE]
    about = {
        **called,
        "visual_tokens": base.visual_tokens,
        "max_new_tokens": max_new_tokens,
        "device": str(backbone.device),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "repeat": repeat,
    }
    return Comparison(about, timed.summaries(), results, base.text or "", warning)
