"""``saccade doctor``: checks whether two models work together, fit in memory, and pay off."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import FrameOptions, with_option_groups
from saccade.cli.terminal import Json, Verbose, err, out, prepare, status
from saccade.core.errors import OptionError, SaccadeError
from saccade.inputs.checkpoints import EMBEDDED_DRAFT, EMBEDDED_TARGET

if TYPE_CHECKING:
    from saccade.bench.hardware.pair_fit import Diagnosis

DEFAULT_PROMPT_TOKENS = 8192
ANSWER_TOKENS = 256  # The caches must have room for an answer of this length after the prompt.


@with_option_groups
def doctor(
    frames: FrameOptions,
    video: Annotated[
        str | None,
        typer.Argument(help="A video whose tokens are counted; without one --tokens is used."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target", "-t", help="A folder, a hub id, or a published size (Qwen2.5-VL-32B)."
        ),
    ] = EMBEDDED_TARGET,
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="Likewise.")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"The prompt's length, if no video is named. [default: {DEFAULT_PROMPT_TOKENS}]",
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.001, max=1, help="The share of the prompt that the draft reads.")
    ] = 0.1,
    prompt: command_options.Prompt = command_options.QUESTION,
    dtype: command_options.Dtype = None,
    device: command_options.Device = None,
    draft_device: command_options.DraftDevice = None,
    draft_quantize: command_options.DraftQuantize = None,
    memory: Annotated[
        float | None, typer.Option(min=0, help="Plan for this many GiB and not for this machine.")
    ] = None,
    quantize: command_options.Quantize = None,
    trust_remote_code: command_options.Trust = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check a pair before any weight is loaded: does it work together, fit in memory, and pay?

    Exits with 1 where it cannot work. The speedup is an expectation from the bytes each model
    reads and, on a GPU, a fixed time for each of its layers; `saccade calibrate` measures it.
    """
    from saccade.bench.hardware.published import CONFIGS

    if draft is None and target == EMBEDDED_TARGET:
        draft = EMBEDDED_DRAFT
    run_setup.check_checkpoints(
        *(name for name in (target, draft) if name not in CONFIGS), weights=False
    )
    clip = None if video is None else run_setup.read_clip(video, frames.sampling(), quiet=as_json)
    prepare(threads=None, verbose=verbose)
    from saccade.bench.hardware.pair_fit import examine
    from saccade.inputs import head_checkpoints, loading, packed_checkpoints, questions
    from saccade.model.kernels.few_bits import rounding_named
    from saccade.model.memory import GIB, available_bytes

    target_place = loading.pick_device(device)
    with status("reading the configs", quiet=as_json):
        target_model = (target, _read_config(target, trust_remote_code))
        # The draft may be a head, which drafts from the target's hidden states and is no whole
        # model. Then ``head_kind`` says which kind it is, and ``head_size`` how many weights it has
        # and how much it caches. Both are None for other drafts.
        draft_model = head_size = head_kind = None
        if draft is not None and draft not in CONFIGS:
            settings = head_checkpoints.read_settings(draft)
            head_kind = head_checkpoints.find_kind(settings)
            if head_kind is not None:
                head_size = head_kind.count_footprint(settings, target_model[1])
        if draft is not None:
            config = None if head_kind is not None else _read_config(draft, trust_remote_code)
            draft_model = (draft, config)
        # A head is checked by ``find_problems`` below, so here only the target is checked.
        model_to_compare = None if head_kind is not None else draft_model
        problems, notes = _check_together(target_model, model_to_compare, trust_remote_code)
        if head_kind is not None:
            problems += head_checkpoints.find_problems(settings, target_model[1], draft or "")
            notes.append(f"{draft} is {head_kind.name}: it reads the target's hidden states")
        elif draft is None and head_checkpoints.names_mtp_head(target_model[1]):
            notes.append(
                f"{target} may bring a head along, which then drafts where no draft is named "
                "(docs/methods/heads.md)"
            )
    # The length of the prompt is counted by the target's processor where a video is given.
    if clip is not None:
        if target in CONFIGS:
            raise OptionError(
                f"{target} is a published size without a processor, so a video's tokens cannot be "
                "counted for it: leave the video out, and give --tokens"
            )
        processor = loading.read_processor(*target_model, trust_remote_code=trust_remote_code)
        media = questions.clip_arguments(clip)
        inputs = questions.question_inputs(
            target, processor, prompt, media.get("clips", ()), media.get("images", ()), ()
        )
        tokens = int(inputs["input_ids"].shape[1])
    draft_place = loading.check_draft_options(
        draft, device, draft_device, draft_quantize, is_head=head_kind is not None
    )
    precision = loading.dtype_named(dtype, target_place)
    bits = None if quantize is None else loading.quantizer_bits(quantize)
    rounding = None if draft_quantize is None else rounding_named(draft_quantize)
    # A draft's weights are rounded in one of two ways:
    # - A quantizer rounds them as they are loaded. Then ``draft_bits`` is the bits of a weight.
    # - They are loaded as they are, and a rounded copy is made beside them. Then ``draft_bits`` is
    #   None, as it is without any rounding, and ``makes_rounded_copy`` is true.
    draft_bits = None if rounding is None else loading.draft_quantizer_bits(rounding, draft_place)
    makes_rounded_copy = rounding is not None and draft_bits is None
    # On a CPU some checkpoints with packed weights are unpacked as they are loaded. Their configs
    # are replaced by those of plain weights, so that the memory of plain weights is counted.
    as_loaded = packed_checkpoints.config_as_loaded
    target_model = target, as_loaded(target_model[1], target_place)
    if draft_model is not None and head_kind is None:
        draft_model = draft_model[0], as_loaded(draft_model[1], draft_place, is_draft=True)
    # "cuda" without a number is the first GPU.
    target_index, draft_index = target_place.index or 0, draft_place.index or 0
    is_one_device = target_place.type == draft_place.type and target_index == draft_index
    free_bytes = available_bytes(target_place)
    draft_free_bytes = available_bytes(draft_place)
    if memory is not None:
        free_bytes = draft_free_bytes = int(memory * GIB)
    diagnosis = examine(
        target_model,
        draft_model,
        tokens=(tokens or DEFAULT_PROMPT_TOKENS) + ANSWER_TOKENS,
        keep=keep,
        dtype=precision,
        device=target_place.type,
        free_bytes=free_bytes,
        draft_free_bytes=None if is_one_device else draft_free_bytes,
        draft_device=draft_place.type,
        draft_dtype=loading.dtype_named(dtype, draft_place),
        bits=bits,
        draft_bits=draft_bits,
        draft_rounding=rounding if makes_rounded_copy else None,
        problems=problems,
        notes=notes,
        head=head_size,
    )
    if as_json:
        typer.echo(json.dumps(diagnosis.json()))
    else:
        _print_diagnosis(diagnosis, target_place.type)
    if diagnosis.problems:
        raise typer.Exit(1)


def _read_config(name: str, trust_remote_code: bool) -> Any:
    """Returns the config of a checkpoint, or the stored one if this is the name of a published
    size."""
    from saccade.bench.hardware.published import CONFIGS
    from saccade.inputs import loading

    make_config = CONFIGS.get(name)
    if make_config is not None:
        return make_config()
    return loading.read_config(name, trust_remote_code=trust_remote_code, weights=False)


def _check_together(
    target: tuple[str, Any], draft: tuple[str, Any] | None, trust_remote_code: bool
) -> tuple[list[str], list[str]]:
    """Returns the reasons why two models cannot work together, and notes on what else is true of
    them.

    A model is given as its name and its config. Without a ``draft`` only the target is checked.
    """
    from saccade.bench.hardware.published import CONFIGS
    from saccade.inputs import architectures, loading, pair_check
    from saccade.model import families

    problems: list[str] = []
    notes: list[str] = []
    both = [target] if draft is None else [target, draft]
    for name, config in both:
        try:
            architectures.model_class(config)
            families.refuse_unsupported(config, architectures.text_config(config))
        except SaccadeError as error:
            problems.append(f"{name}: {error}")
    if problems or draft is None:
        return problems, notes
    if any(name in CONFIGS for name, _ in both):
        notes.append("a published size has no tokenizer here, so tokens were not compared")
    else:
        processors = [
            loading.read_processor(name, config, trust_remote_code=trust_remote_code)
            for name, config in both
        ]
        tokenizers = [getattr(each, "tokenizer", each) for each in processors]
        try:
            pair_check.check_tokenizers(target[0], tokenizers[0], draft[0], tokenizers[1])
            notes.append("their tokenizers agree, token by token")
        except SaccadeError as error:
            problems.append(str(error))
    sizes = [architectures.text_config(config).vocab_size for _, config in both]
    if sizes[0] != sizes[1]:
        notes.append(f"vocabularies padded to {sizes[0]} and {sizes[1]}: the common part is used")
    types = [config.model_type for _, config in both]
    if types[0] != types[1]:
        notes.append(
            f"different families ({types[0]}, {types[1]}): each has a vision tower of its own"
        )
    if architectures.reads_text_only(draft[1]) and not architectures.reads_text_only(target[1]):
        notes.append("the draft reads text only: it does not see the video")
    return problems, notes


def _fixed_cost_text(device: str) -> str:
    """Returns the words for what a step costs beside the bytes that it reads, empty if nothing."""
    return "" if device == "cpu" else " and a fixed time per layer"


def _print_diagnosis(diagnosis: Diagnosis, device: str) -> None:
    from saccade.bench.terminal_output import make_table
    from saccade.model.memory import format_bytes

    table = make_table(["model"], ["weights", "cache", "a step reads"])
    for part in diagnosis.parts:
        table.add_row(
            Text(part.name),
            format_bytes(part.weights),
            format_bytes(part.cache),
            format_bytes(part.step),
        )
    out.print(table)
    out.print(
        f"[dim]{diagnosis.tokens} tokens; {format_bytes(diagnosis.needed)} needed, "
        f"{format_bytes(diagnosis.free_bytes)} free on {device}[/dim]\n"
    )
    if diagnosis.outlook:
        expected = make_table([], ["accepted", "best chain", "decode x"])
        for estimate in diagnosis.outlook:
            expected.add_row(
                f"{estimate.rate:.0%}", str(estimate.length), f"{estimate.speedup:.2f}"
            )
        out.print(expected)
        out.print(
            f"[dim]expected from the bytes read{_fixed_cost_text(device)}: a draft's step costs "
            f"{diagnosis.ratio:.3f} of the target's; measure with saccade calibrate[/dim]\n"
        )
    for note in diagnosis.notes:
        err.print(note, style="dim", markup=False)
    style = "bold red" if diagnosis.problems else "bold"
    out.print(diagnosis.conclusion, style=style, markup=False, soft_wrap=True)
    if diagnosis.suggestion:
        out.print(diagnosis.suggestion, markup=False, soft_wrap=True)
