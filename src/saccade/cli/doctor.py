"""``saccade doctor``: can these two work together, do they fit, and is it worth it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from saccade.cli import loading, options
from saccade.cli.options import FrameOptions, grouped
from saccade.cli.terminal import Json, Verbose, err, out, prepare, status
from saccade.core.errors import SaccadeError

if TYPE_CHECKING:
    from saccade.bench.hardware.doctor import Diagnosis

TOKENS, ANSWER = 8192, 256


@grouped
def doctor(
    frames: FrameOptions,
    video: Annotated[
        str | None, typer.Argument(help="A video to count the tokens of; else --tokens.")
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target", "-t", help="A folder, a hub id, or a published size (Qwen2.5-VL-32B)."
        ),
    ] = "shapes",
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="Likewise.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Of the prompt, without a video; else {TOKENS}.")
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.001, max=1, help="The share of them the draft reads.")
    ] = 0.1,
    prompt: options.Prompt = options.QUESTION,
    dtype: options.Dtype = None,
    device: options.Device = None,
    draft_device: options.DraftDevice = None,
    memory: Annotated[
        float | None, typer.Option(min=0, help="Plan for this many GiB and not for this machine.")
    ] = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Look at a pair before any weight is loaded: does it fit together, in memory, and pay?

    Exits with 1 where it cannot work. The speedup is an expectation from the bytes each model
    reads and, on a GPU, a fixed time for each of its layers; `saccade calibrate` measures it.
    """
    from saccade.bench.hardware.published import CONFIGS

    if draft is None and target == "shapes":
        draft = "shapes-draft"
    loading.look_for(*(name for name in (target, draft) if name not in CONFIGS), weights=False)
    clip = None if video is None else loading.read(video, frames.sampling(), quiet=as_json)
    prepare(None, verbose)
    from saccade.bench.hardware.doctor import examine
    from saccade.inputs import loading as reading
    from saccade.inputs import questions
    from saccade.model.memory import GIB, available

    place = reading.pick_device(device)
    with status("reading the configs", quiet=as_json):
        mine = _config(target, trust_remote_code)
        theirs = None if draft is None else (draft, _config(draft, trust_remote_code))
        problems, notes = _together((target, mine), theirs, trust_remote_code)
    if clip is not None:
        reader = reading.read_processor(target, mine, trust_remote_code=trust_remote_code)
        shown = questions.shown(clip)
        asked = questions.put(
            target, reader, prompt, shown.get("clips", ()), shown.get("images", ()), ()
        )
        tokens = int(asked["input_ids"].shape[1])
    elsewhere = None if draft_device is None else reading.pick_device(draft_device)
    precision = reading.precision(dtype, place)
    bits = None if quantize is None else reading.bits(quantize)
    found = examine(
        (target, mine),
        theirs,
        tokens=(tokens or TOKENS) + ANSWER,
        keep=keep,
        dtype=precision,
        device=place.type,
        there=available(place) if memory is None else int(memory * GIB),
        draft_there=None if elsewhere in (None, place) else available(elsewhere),
        bits=bits,
        problems=problems,
        notes=notes,
    )
    if as_json:
        typer.echo(json.dumps(found.json()))
    else:
        _show(found, place.type)
    if found.problems:
        raise typer.Exit(1)


def _config(name: str, trust: bool) -> Any:
    from saccade.bench.hardware.published import CONFIGS
    from saccade.inputs import loading as reading

    made = CONFIGS.get(name)
    if made is not None:
        return made()
    return reading.read_config(name, trust_remote_code=trust, weights=False)


def _together(
    target: tuple[str, Any], draft: tuple[str, Any] | None, trust: bool
) -> tuple[list[str], list[str]]:
    """Why they cannot work, and what is worth knowing."""
    from saccade.bench.hardware.published import CONFIGS
    from saccade.inputs import architectures
    from saccade.inputs import loading as reading
    from saccade.model import families

    problems: list[str] = []
    notes: list[str] = []
    both = [target] if draft is None else [target, draft]
    for name, config in both:
        try:
            architectures.model_class(config)
            families.refuse(config, architectures.text_config(config))
        except SaccadeError as error:
            problems.append(f"{name}: {error}")
    if problems or draft is None:
        return problems, notes
    if any(name in CONFIGS for name, _ in both):
        notes.append("a published size has no tokenizer here, so tokens were not compared")
    else:
        readers = [
            reading.read_processor(name, config, trust_remote_code=trust) for name, config in both
        ]
        inner = [getattr(reader, "tokenizer", reader) for reader in readers]
        try:
            reading.check_tokenizers(target[0], inner[0], draft[0], inner[1])
            notes.append("their tokenizers agree, token by token")
        except SaccadeError as error:
            problems.append(str(error))
    sizes = [architectures.text_config(config).vocab_size for _, config in both]
    if sizes[0] != sizes[1]:
        notes.append(f"vocabularies padded to {sizes[0]} and {sizes[1]}: the common part is used")
    kinds = [config.model_type for _, config in both]
    if kinds[0] != kinds[1]:
        notes.append(f"different families ({kinds[0]}, {kinds[1]}): each looks with its own eyes")
    if architectures.reads_text_only(draft[1]) and not architectures.reads_text_only(target[1]):
        notes.append("the draft reads text only: it guesses without the video")
    return problems, notes


def _fixed(device: str) -> str:
    """What else a step is expected to cost."""
    return "" if device == "cpu" else " and a fixed time a layer"


def _show(found: Diagnosis, device: str) -> None:
    from saccade.bench.terminal_output import make_table
    from saccade.model.memory import gib

    table = make_table(["model"], ["weights", "cache", "a step reads"])
    for part in found.parts:
        table.add_row(Text(part.name), gib(part.weights), gib(part.cache), gib(part.step))
    out.print(table)
    out.print(
        f"[dim]{found.tokens} tokens; {gib(found.needed)} needed, {gib(found.there)} free on "
        f"{device}[/dim]\n"
    )
    if found.outlook:
        expected = make_table([], ["accepted", "best chain", "decode x"])
        for each in found.outlook:
            expected.add_row(f"{each.rate:.0%}", str(each.length), f"{each.speedup:.2f}")
        out.print(expected)
        out.print(
            f"[dim]expected from the bytes read{_fixed(device)}: a draft's step costs "
            f"{found.ratio:.3f} of the target's; measure with saccade calibrate[/dim]\n"
        )
    for note in found.notes:
        err.print(note, style="dim", markup=False)
    if found.outlook or found.problems:
        style = "bold red" if found.problems else "bold"
        out.print(found.verdict, style=style, markup=False, soft_wrap=True)
