"""``saccade caption`` and ``saccade caption-merge``: many videos to one file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.options import ClipOptions, LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Json, Verbose, out, pace, prepare
from saccade.core.errors import OptionError

if TYPE_CHECKING:
    from saccade.corpus.caption_run import AnswerJobs

NAMED = 5  # ids named in a message, at most

Manifest = Annotated[
    Path,
    typer.Argument(help="Paths, a line each; JSONL or CSV of id, video, prompt; or a folder."),
]


@grouped
def caption(
    manifest: Manifest,
    models: ModelOptions,
    frames: ClipOptions,
    how: LoadOptions,
    out_path: Annotated[
        Path,
        typer.Option("--out", help="One JSON row a video; an interrupted run is gone on with."),
    ] = Path("captions.jsonl"),
    prompt: options.Prompt = options.QUESTION,
    shard: Annotated[
        str, typer.Option(help="i/n: every n-th video, from the i-th, to a file of its own.")
    ] = "1/1",
    batch: Annotated[int, typer.Option(min=1, help="Videos answered together.")] = 1,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Do again what only an error came of.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(help="Spread over a Ray cluster: local, auto (this machine's) or host:port."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --ray; else one a GPU, or one a node.")
    ] = None,
    method: options.Method = None,
    max_new_tokens: options.Tokens = 256,
    exact: options.Exact = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Put every video of a corpus into words, greedily; one bad video costs one error row.

    Ctrl-C or a kill loses only the videos under way: the same command goes on. Each shard writes
    its own file (captions-2-of-4.jsonl); `saccade caption-merge` joins them.
    """
    if workers is not None and ray is None:
        raise OptionError("--workers are of a cluster: give --ray, or several --shard")
    from saccade.corpus import json_lines

    known = loading.known(models, how, method)
    part = json_lines.parse_shard(shard)
    prepare(known.threads, verbose)
    from saccade.corpus import caption_run
    from saccade.corpus import manifest as manifests

    loading.recipes([known.method], exact)  # refused now, in a sentence, and not by every video
    work = manifests.CaptionSettings(
        **vars(known),
        max_new_tokens=max_new_tokens,
        sampling=frames.sampling(),
        exact=exact,
    )

    def answer() -> AnswerJobs:
        if ray is not None:
            from saccade.corpus.cluster import answer_on_cluster

            return answer_on_cluster(work, ray, workers)
        from saccade.corpus.worker import answer_locally

        return answer_locally(work)

    jobs = json_lines.shard_items(manifests.read_jobs(manifest, prompt), part)
    path = caption_run.shard_path(out_path, part)
    loading.warn_of_embedded(known.target)
    with pace("loading the models") as say:
        found = caption_run.run_jobs(
            jobs,
            path,
            work,
            answer,
            batch=batch,
            retry=retry_errors,
            on_progress=lambda standing: say(str(standing), standing.done == standing.whole),
        )
    if as_json:
        typer.echo(json.dumps({"out": str(path), **asdict(found)}))
        return
    again = "; --retry-errors does these again" if found.errors else ""
    out.print(
        f"{path} has {found.done} of {found.whole} rows, {found.errors} of them errors{again}",
        markup=False,
        soft_wrap=True,
    )


def caption_merge(
    manifest: Manifest,
    parts: Annotated[list[Path], typer.Argument(help="The files of the shards.")],
    out_path: Annotated[Path, typer.Option("--out", help="Where all rows go.")] = Path(
        "captions.jsonl"
    ),
    as_json: Json = False,
) -> None:
    """Join shards in the manifest's order and say what is missing; exits with 1 if anything is."""
    from saccade.corpus import caption_run
    from saccade.corpus import manifest as manifests

    found = caption_run.merge_shards(
        manifests.read_jobs(manifest, options.QUESTION), parts, out_path
    )
    if as_json:
        typer.echo(json.dumps({"out": str(out_path), **asdict(found)}))
    else:
        out.print(f"{out_path} has {found.rows} rows", markup=False, soft_wrap=True)
        for what, ids in (
            ("missing", found.missing),
            ("errors", found.errors),
            ("in several files", found.doubled),
            ("not in the manifest, left out", found.unknown),
        ):
            if ids:
                more = ", ..." if len(ids) > NAMED else ""
                listed = ", ".join(ids[:NAMED]) + more
                out.print(f"{what}: {len(ids)} ({listed})", markup=False, soft_wrap=True)
    if found.missing or found.errors:
        raise typer.Exit(1)
