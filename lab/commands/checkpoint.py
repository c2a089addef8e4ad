"""The command ``python -m lab make-checkpoint``, which writes tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Json, out, prepare
from saccade.core.errors import OptionError, suggest

# The families of ``lab.checkpoints``, repeated here because importing that takes seconds.
FAMILIES = (
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "llava-onevision",
    "llava-1.5",
    "llava-next",
    "llava-next-video",
    "qwen2.5-omni",
    "llama",
    "internvl",
    "video-llava",
    "video-llama-3",
    "smolvlm",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen3-omni-moe",
    "glm4v",
    "glm4.6v",
    "glm4v-moe",
    "gemma3",
    "gemma3n",
    "gemma4",
    "paligemma",
    "mistral3",
    "llama4",
    "aya-vision",
    "perception-lm",
    "fast-vlm",
    "idefics3",
    "ovis2",
    "deepseek-vl",
    "lfm2-vl",
    "lfm3-vl",
    "step3.7",
    "ernie4.5-vl-moe",
    "kimi-k2.5",
    "hunyuan-vl",
    "paddleocr-vl",
    "minimax-m3-vl",
    "minicpm-v4.6",
    "minicpm-v4.7",
    "molmo2",
)


def make_checkpoint(
    family: Annotated[str, typer.Argument(help="qwen2.5-vl, llava-onevision, ...; or list.")],
    folder: Annotated[Path | None, typer.Argument(help="A new or empty folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the language model.")] = 2,
    hidden: Annotated[int, typer.Option(min=64, help="Its width, a multiple of 64.")] = 128,
    vocab: Annotated[int, typer.Option(min=1, help="Rows of its embedding.")] = 320,
    noise: Annotated[
        float,
        typer.Option(min=0, help="Noise in the weights; 0.05 makes a draft that is often right."),
    ] = 0.0,
    true_vocabulary: Annotated[
        bool,
        typer.Option(
            "--true-vocabulary",
            help="Have the tokens and the chat template of Qwen's real checkpoints.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a tiny random checkpoint of a model family, with tokenizer, processor and template.

    Nothing is downloaded. The model answers nonsense; use it to try a family and in tests.
    """
    if family == "list":
        typer.echo(json.dumps(FAMILIES) if as_json else "\n".join(FAMILIES))
        return
    if family not in FAMILIES:
        suggestion = suggest(family, FAMILIES)
        raise OptionError(f"unknown family {family!r}{suggestion}; known: {', '.join(FAMILIES)}")
    if folder is None:
        raise OptionError("give a folder to write the checkpoint to")
    if hidden % 64:
        raise OptionError(f"--hidden {hidden} must be a multiple of 64, because heads are 32 wide")
    prepare(threads=None, verbose=False)
    from lab.checkpoints import Size, make

    path = make(
        family,
        folder,
        seed=seed,
        size=Size(layers, hidden, vocab),
        noise=noise,
        true_vocabulary=true_vocabulary,
    )
    if as_json:
        typer.echo(json.dumps({"family": family, "folder": str(path), "seed": seed}))
    else:
        out.print(f"{path} holds a random {family}", markup=False, soft_wrap=True)
