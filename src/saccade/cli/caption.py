"""``saccade caption`` and ``saccade caption-merge``: one file of answers about many videos."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import ClipOptions, LoadOptions, ModelOptions, with_option_groups
from saccade.cli.interruption_hint import explain_interruption
from saccade.cli.terminal import Json, Verbose, out, prepare, progress_line
from saccade.core.errors import OptionError

if TYPE_CHECKING:
    from saccade.corpus.caption_run import AnswerJobs, Progress

MAX_IDS_IN_MESSAGE = 5

Manifest = Annotated[
    Path,
    typer.Argument(help="Paths, a line each; JSONL or CSV of id, video, prompt; or a folder."),
]


@with_option_groups
def caption(
    manifest: Manifest,
    models: ModelOptions,
    frames: ClipOptions,
    loading: LoadOptions,
    out_path: Annotated[
        Path,
        typer.Option("--out", help="One JSON row a video; an interrupted run is gone on with."),
    ] = Path("captions.jsonl"),
    prompt: command_options.Prompt = command_options.QUESTION,
    shard: Annotated[
        str, typer.Option(help="i/n: every n-th video, from the i-th, to a file of its own.")
    ] = "1/1",
    batch: Annotated[int, typer.Option(min=1, help="Videos answered together.")] = 1,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Answer videos again whose row is an error.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Spread over a Ray cluster: local (a new one of this machine alone), auto (the "
            "one that this machine belongs to) or host:port."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray. Default: one per GPU, or one per node without GPUs."),
    ] = None,
    method: command_options.Method = None,
    max_new_tokens: command_options.Tokens = 256,
    exact: command_options.Exact = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Put every video of a corpus into words, greedily; one bad video costs one error row.

    Ctrl-C or a kill loses only the videos under way: the same command goes on. Each shard writes
    its own file (captions-2-of-4.jsonl); `saccade caption-merge` joins them.
    """
    if workers is not None and ray is None:
        raise OptionError(
            "--workers is for a Ray cluster: add --ray, or give each process its own --shard"
        )
    from saccade.corpus import json_lines

    settings = run_setup.resolve_settings(models, loading, method)
    shard_place = json_lines.parse_shard(shard)  # (index from 0, number of shards)
    prepare(settings.threads, verbose)
    from saccade.corpus import caption_run
    from saccade.corpus import manifest as manifests

    # A wrong method is refused here, before any worker loads models.
    run_setup.resolve_recipes([settings.method], exact)
    caption_settings = manifests.CaptionSettings(
        **vars(settings),
        max_new_tokens=max_new_tokens,
        sampling=frames.sampling(),
        exact=exact,
    )

    # This loads models, so ``run_jobs`` calls it only if a video is still to be answered.
    def make_answerer() -> AnswerJobs:
        if ray is not None:
            from saccade.corpus.cluster import answer_on_cluster

            return answer_on_cluster(caption_settings, ray, workers)
        from saccade.corpus.worker import answer_locally

        return answer_locally(caption_settings)

    jobs = json_lines.shard_items(manifests.read_jobs(manifest, prompt), shard_place)
    path = caption_run.shard_path(out_path, shard_place)
    run_setup.warn_about_training(settings.target)
    what_stays = f"the rows of {path} stay"
    with explain_interruption(what_stays), progress_line("loading the models") as say:

        def say_progress(current: Progress) -> None:
            is_last_line = current.done == current.whole
            say(str(current), is_last_line)

        progress = caption_run.run_jobs(
            jobs,
            path,
            caption_settings,
            make_answerer,
            batch=batch,
            retry=retry_errors,
            on_progress=say_progress,
        )
    if as_json:
        typer.echo(json.dumps({"out": str(path), **asdict(progress)}))
        return
    hint = "; --retry-errors does these again" if progress.errors else ""
    out.print(
        f"{path} has {progress.done} of {progress.whole} rows, "
        f"{progress.errors} of them errors{hint}",
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
    """Join shards in the manifest's order; exits with 1 if a row is missing or is an error."""
    from saccade.corpus import caption_run
    from saccade.corpus import manifest as manifests

    result = caption_run.merge_shards(
        manifests.read_jobs(manifest, command_options.QUESTION), parts, out_path
    )
    if as_json:
        typer.echo(json.dumps({"out": str(out_path), **asdict(result)}))
    else:
        out.print(f"{out_path} has {result.rows} rows", markup=False, soft_wrap=True)
        for what, ids in (
            ("missing", result.missing),
            ("errors", result.errors),
            ("in several files", result.doubled),
            ("not in the manifest, left out", result.unknown),
        ):
            if ids:
                ellipsis = ", ..." if len(ids) > MAX_IDS_IN_MESSAGE else ""
                id_list = ", ".join(ids[:MAX_IDS_IN_MESSAGE]) + ellipsis
                out.print(f"{what}: {len(ids)} ({id_list})", markup=False, soft_wrap=True)
    if result.missing or result.errors:
        raise typer.Exit(1)
