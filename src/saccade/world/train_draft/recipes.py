"""The recipes of ``saccade train-draft``: in which phases a draft is trained, and which parameters.

TABED (Lee et al., 2025; appendix H.1, tables 7 and 8) trains small vision-language models as drafts
by two published procedures. LLaVA-1.5 (Liu et al., 2024) aligns the projector, then tunes projector
and language model. LLaVA-OneVision (Li et al., 2024) aligns the projector, then trains everything
in three phases, the vision tower at a fifth of the rate. One more recipe trains an EAGLE-3 head.

Of the requested steps each phase gets one. The phases share the others in the papers' proportions:
samples x epochs / batch size. ``trainer`` trains by these recipes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from saccade.core.errors import ModelError, OptionError
from saccade.inputs.checkpoints import EMBEDDED_TARGET

if TYPE_CHECKING:
    from torch import nn

# What a sample shows: a clip, one picture, or ("diff") two pictures whose difference is asked for.
Kind = Literal["video", "image", "diff"]
ALL_KINDS: tuple[Kind, ...] = ("video", "image", "diff")
# A group of a draft's parameters. A head has one part, "head".
Part = Literal["projector", "language", "vision", "head"]
# What families call the modules between a vision tower and the language model.
PROJECTORS = {"multi_modal_projector", "merger", "deepstack_merger_list", "connector"}
PROJECTORS |= {"aligner", "image_newline"}


@dataclass(frozen=True)
class Phase:
    """One phase of training: which parts it trains, on which data, and how AdamW is set."""

    name: str
    trains: tuple[Part, ...]
    learning_rate: float
    batch_size: int
    samples: int  # In the authors' data. The phase's share of the steps depends on it.
    # What samples of the synthetic world may show. Conversations of --data are not chosen by it.
    media: tuple[Kind, ...] = ALL_KINDS
    vision_rate: float = 1.0  # The vision tower's learning rate over that of the other parts.
    epochs: int = 1
    schedule: str = "cosine"  # Of the learning rate: a ``lr_scheduler_type`` of transformers.
    warmup: float = 0.03  # The share of the phase's steps in which the learning rate rises.
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Settings:
    """The options of ``saccade train-draft``; a run is resumed only with the same values.

    ``phases`` may leave out the first phase for a draft whose projector has been aligned already.
    """

    recipe: Annotated[
        str,
        typer.Option(help="llava-1.5-68m, llava-1.5-160m or llava-onevision-68m; eagle3: a head."),
    ] = "llava-1.5-68m"
    phases: Annotated[
        str | None, typer.Option(help="Comma-separated; all of the recipe's when left out.")
    ] = None
    draft: Annotated[
        str | None, typer.Option(help="A checkpoint to start from; a fresh one when left out.")
    ] = None
    language: Annotated[
        str | None,
        typer.Option(help="The language model of a fresh draft; the recipe's when left out."),
    ] = None
    tower: Annotated[
        str | None,
        typer.Option(help="The vision tower of a fresh draft; the target's own when left out."),
    ] = None
    target: Annotated[
        str, typer.Option(help="The model to draft for: its processor, and the teacher.")
    ] = EMBEDDED_TARGET
    data: Annotated[
        str | None,
        typer.Option(help="Conversations in LLaVA's format (JSON); else the synthetic world's."),
    ] = None
    images: Annotated[
        str | None,
        typer.Option(help="The folder of the pictures that --data names; else the file's own."),
    ] = None
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps, shared by the phases as in the paper.")
    ] = 100
    distill: Annotated[  # The weight of KL(target || draft); the rest is cross-entropy.
        float, typer.Option(metavar="WEIGHT", help="Weight of the target's law in the loss, 0-1.")
    ] = 0.0
    drop_visual: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Samples lose up to this share of visual tokens."),
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples and a fresh draft.")] = 0
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a step; the recipe's own number if left out.")
    ] = None
    lr_scale: Annotated[float, typer.Option(help="Multiplies the recipe's learning rates.")] = 1.0


@dataclass(frozen=True)
class DraftRecipe:
    """How a draft is trained, and what a fresh one is made from."""

    language: str  # The language model that a fresh draft starts from, as in TABED; "" for a head.
    layers: int  # How many decoder layers that language model has, or the head.
    phases: tuple[Phase, ...]
    # How many steps a head is trained to draft in a row. Each step but the first reads the head's
    # own outputs. It is 0 for a draft that is a model.
    unroll_steps: int = 0


# Table 7. TABED's data are single images. Our drafts for the synthetic world are for clips, so they
# train on every kind of medium.
_LLAVA = (
    Phase("pretraining", ("projector",), learning_rate=1e-3, batch_size=256, samples=558_000),
    Phase(
        "instruction",
        ("projector", "language"),
        learning_rate=2e-5,
        batch_size=128,
        samples=665_000,
    ),
)


def _train_all(name: str, samples: int, media: tuple[Kind, ...]) -> Phase:
    """Returns a phase of LLaVA-OneVision that trains every part of the draft."""
    trains: tuple[Part, ...] = ("projector", "language", "vision")
    return Phase(
        name,
        trains,
        learning_rate=1e-5,
        batch_size=512,
        samples=samples,
        media=media,
        vision_rate=0.2,
    )


# Table 8. Samples are Li et al.'s: 558 K, 4 M, 3.2 M and 1.6 M.
_ONEVISION = (
    Phase(
        "alignment",
        ("projector",),
        learning_rate=1e-3,
        batch_size=512,
        samples=558_000,
        media=("image",),
        vision_rate=0.2,
    ),
    _train_all("knowledge", 4_000_000, ("image",)),
    _train_all("single-image", 3_200_000, ("image",)),
    _train_all("onevision", 1_600_000, ALL_KINDS),
)
# LLaMA-68M and LLaMA-160M (Miao et al., 2023). A fresh draft for the small target that comes
# with Saccade takes only the number of layers from them, and its sizes from that target.
_SMALL, _LARGE = "JackFram/llama-68m", "JackFram/llama-160m"
RECIPES = {
    "llava-1.5-68m": DraftRecipe(_SMALL, 2, _LLAVA),
    "llava-1.5-160m": DraftRecipe(_LARGE, 12, _LLAVA),
    "llava-onevision-68m": DraftRecipe(_SMALL, 2, _ONEVISION),
    # EAGLE-3 (arXiv:2503.01840, section 3) trains one layer, unrolled for seven steps.
    "eagle3": DraftRecipe(
        language="",
        layers=1,
        phases=(Phase("head", ("head",), learning_rate=1e-4, batch_size=8, samples=532_000),),
        unroll_steps=7,
    ),
}


def select_recipe(name: str, phases: str | None = None) -> DraftRecipe:
    """Returns a recipe by its name. ``phases`` are the names of the phases that it keeps, separated
    by commas; None keeps all.

    Raises OptionError for an unknown recipe or phase.
    """
    if name not in RECIPES:
        raise OptionError(f"unknown recipe {name!r}; recipes: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if phases is None:
        return recipe
    names = [part.strip() for part in phases.split(",")]
    phase_names = [phase.name for phase in recipe.phases]
    if unknown := [part for part in names if part not in phase_names]:
        raise OptionError(f"{name} has no phase {unknown[0]!r}; phases: {', '.join(phase_names)}")
    return replace(recipe, phases=tuple(p for p in recipe.phases if p.name in names))


def share_steps(steps: int, phases: Sequence[Phase]) -> list[int]:
    """Returns the steps of each phase: one each, and the others in the papers' proportions.

    Raises OptionError if there are fewer steps than phases.
    """
    if steps < len(phases):
        raise OptionError(f"--steps {steps} is too few for {len(phases)} phases; give one for each")
    weights = [phase.samples * phase.epochs / phase.batch_size for phase in phases]
    exact_steps = [1 + (steps - len(phases)) * weight / sum(weights) for weight in weights]
    # Each number is rounded down. The steps that are left go to the phases that lost most by that.
    steps_by_phase = [math.floor(exact) for exact in exact_steps]
    by_remainder = sorted(range(len(phases)), key=lambda i: steps_by_phase[i] - exact_steps[i])
    for i in by_remainder[: steps - sum(steps_by_phase)]:
        steps_by_phase[i] += 1
    return steps_by_phase


def parts_by_parameter(model: nn.Module) -> dict[str, Part]:
    """Returns the part of every parameter, by the parameter's name.

    What decodes, embeds or predicts text is language. Of the rest, what a family puts between
    tower and text (``PROJECTORS``) is the projector, and everything else is vision. Raises
    ModelError for a model without a projector or vision.
    """
    any_model: Any = model
    text = [
        any_model.get_decoder(),
        any_model.get_input_embeddings(),
        any_model.get_output_embeddings(),
    ]
    language = {id(p) for module in text for p in module.parameters()}
    part_by_name: dict[str, Part] = {}
    for name, p in model.named_parameters():
        if id(p) in language:
            part_by_name[name] = "language"
        elif PROJECTORS & set(name.split(".")):
            part_by_name[name] = "projector"
        else:
            part_by_name[name] = "vision"
    for part in ("projector", "vision"):
        if part not in part_by_name.values():
            raise ModelError(f"no {part} is known in {type(model).__name__}, so no recipe fits it")
    return part_by_name


def trained_parameters(model: nn.Module, phase: Phase) -> dict[str, Part]:
    """Returns the parameters of a draft model (not a head) that a phase trains: the part of each,
    by its name."""
    return {name: part for name, part in parts_by_parameter(model).items() if part in phase.trains}
