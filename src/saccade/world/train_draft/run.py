"""Trains a draft for a target: the work of ``saccade train-draft``.

The draft is a model of its own or an EAGLE-3 head. A recipe has phases, each of which is one run of
the Hugging Face Trainer and trains some parts of the draft. A run that was interrupted can be
resumed.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.trainer_utils import get_last_checkpoint

from saccade.core.errors import ModelError, OptionError
from saccade.inputs.loading import Loaded, load
from saccade.inputs.pair_check import check_pair
from saccade.model.backbone import Backbone
from saccade.world.train_draft import conversations, eagle3
from saccade.world.train_draft.assembly import assemble_draft
from saccade.world.train_draft.conversations import LlavaConversation
from saccade.world.train_draft.recipes import (
    DraftRecipe,
    Settings,
    parts_by_parameter,
    select_recipe,
    share_steps,
)
from saccade.world.train_draft.trainer import OnProgress, PhaseRun, make_trainer

# What a run writes into the draft's folder: a file of its settings and results, and a folder of the
# checkpoints from which it can be resumed.
STATE, CHECKPOINTS = "train-draft.json", "checkpoints"
# Hidden size, vocabulary, and the vision tower's hidden size of the target that is part of this
# package. For a target of these sizes, a fresh draft begins with random weights.
EMBEDDED_SIZES = (192, 1024, 96)


def make_untrained_model(config: Any, seed: int) -> Any:
    """Returns a model with random weights in fp32, of the family of the pair that is part of this
    package (Qwen2.5-VL)."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float().train()
    # Weights whose output is added to the residual stream are smaller in deeper models, as in
    # GPT-2. Their standard deviation there is 0.02 / sqrt(2 layers). Here it is twice that, and a
    # model of fewer than 4 layers gets that of 4 layers.
    layers = max(config.text_config.num_hidden_layers, 4)
    output_std = 2 * (0.02 / (2 * layers) ** 0.5)
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            nn.init.normal_(p, std=output_std)
        # In the vision tower the spread follows from a weight's number of inputs.
        elif "visual" in name and p.ndim == 2:
            nn.init.normal_(p, std=0.5 * p.shape[1] ** -0.5)
        elif name.endswith("patch_embed.proj.weight"):
            nn.init.normal_(p, std=p[0].numel() ** -0.5)
    return model


def make_starting_draft(target: Loaded, recipe: DraftRecipe, settings: Settings) -> Loaded:
    """Returns the draft before training: the one that the settings name, or else a fresh one.

    For a target of ``EMBEDDED_SIZES`` a fresh draft has random weights and the target's vision
    tower. For any other target, or if the settings choose its parts, it is assembled from a
    published language model and a vision tower.
    """
    if settings.draft is not None:
        draft = load(settings.draft, dtype="float32", fused=False)
        check_pair(target, draft)
        return draft
    vision = target.backbone.model.config.to_dict().get("vision_config", {})
    sizes = (target.backbone.config.hidden_size, target.backbone.vocab, vision.get("hidden_size"))
    parts_are_chosen = settings.language is not None or settings.tower is not None
    if sizes == EMBEDDED_SIZES and not parts_are_chosen:
        return make_fresh_draft(target, recipe.layers, settings.seed)
    return assemble_draft(
        target, settings.language or recipe.language, settings.tower, settings.seed
    )


def make_fresh_draft(target: Loaded, layers: int, seed: int) -> Loaded:
    """Returns an untrained draft for a target of the embedded family.

    Its vision tower is the target's, because no recipe starts from an untrained tower. LLaVA-1.5's
    recipes do not train the tower at all.
    """
    config = deepcopy(target.backbone.model.config)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = config.text_config.layer_types[:layers]
    model = make_untrained_model(config, seed)
    part_by_name = parts_by_parameter(model)
    target_weights = target.backbone.model.state_dict()
    tower = {name: target_weights[name] for name, part in part_by_name.items() if part == "vision"}
    model.load_state_dict(tower, strict=False)
    model.generation_config = target.backbone.model.generation_config
    return Loaded("a fresh draft", Backbone(model, fused=False), target.processor)


def train_draft(
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    on_progress: OnProgress = lambda phase, done, total, loss: None,
    save_every_s: float = 60.0,
) -> dict[str, Any]:
    """Trains a draft and saves it as a checkpoint in the folder ``out``.

    Returns the settings and, under "phases", what each phase did; both are also written into the
    folder. ``on_progress`` takes (phase, samples done, samples in all, last loss or None). With
    ``resume`` the run continues bit for bit from the last checkpoint. One is saved at the end of a
    step if ``save_every_s`` seconds have passed since the one before.
    """
    recipe = _check_settings(settings)
    state = _read_state(out, settings, resume)
    if state.get("phases"):  # That run is complete.
        return state
    llava_conversations = (
        conversations.read_conversations(settings.data, settings.images) if settings.data else ()
    )
    target = load(settings.target, dtype="float32", fused=False)
    # Only the recipe of a head has ``unroll_steps``; all others train a draft model.
    kind = HeadTraining if recipe.unroll_steps else DraftTraining
    training = kind(target, recipe, settings, llava_conversations)
    out.mkdir(parents=True, exist_ok=True)
    (out / STATE).write_text(json.dumps({"settings": asdict(settings)}, indent=1) + "\n")
    phases = []
    steps_by_phase = share_steps(settings.steps, recipe.phases)
    for number, (phase, steps) in enumerate(zip(recipe.phases, steps_by_phase, strict=True)):
        checkpoints = out / CHECKPOINTS / f"{number + 1}-{phase.name}"
        phase_run = PhaseRun(
            phase, steps, settings, number, checkpoints, save_every_s, llava_conversations
        )
        phases.append(_run(phase_run, training, on_progress))
    training.save(out)
    result = {"settings": asdict(settings), "out": str(out), "phases": phases}
    (out / STATE).write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(out / CHECKPOINTS)
    return result


class Training(ABC):
    """What a run trains, and how it is saved."""

    model: nn.Module

    @abstractmethod
    def trainer(self, phase_run: PhaseRun, on_progress: OnProgress) -> Any:
        """Returns the Trainer of a phase."""

    @abstractmethod
    def save(self, out: Path) -> None:
        """Writes what was trained as a checkpoint."""


class DraftTraining(Training):
    """Trains a draft that is a model of its own."""

    def __init__(
        self,
        target: Loaded,
        recipe: DraftRecipe,
        settings: Settings,
        llava_conversations: Sequence[LlavaConversation],
    ) -> None:
        # The conversations are not read here, because the Trainer gets them from its ``PhaseRun``.
        # They are an argument because ``train_draft`` makes a ``HeadTraining`` in the same way.
        self._target = target
        self._draft = make_starting_draft(target, recipe, settings)
        self.model = self._draft.backbone.model
        # This raises for a model that no recipe fits, before anything is written.
        parts_by_parameter(self.model)
        if settings.distill and type(self.model) is not type(target.backbone.model):
            raise ModelError(
                f"{target.name} cannot teach {self._draft.name}, which reads its inputs in another "
                "form; choose models of one family, or leave --distill out"
            )

    def trainer(self, phase_run: PhaseRun, on_progress: OnProgress) -> Any:
        return make_trainer(phase_run, self._draft, self._target, on_progress)

    def save(self, out: Path) -> None:
        self._draft.backbone.model.save_pretrained(out)
        self._draft.processor.save_pretrained(out)


class HeadTraining(Training):
    """Trains a draft that is an EAGLE-3 head of the target."""

    def __init__(
        self,
        target: Loaded,
        recipe: DraftRecipe,
        settings: Settings,
        llava_conversations: Sequence[LlavaConversation],
    ) -> None:
        self._target, self._unroll_steps = target, recipe.unroll_steps
        ids = eagle3.known_ids(target, settings, recipe, llava_conversations)
        self.model: eagle3.TrainedHead = eagle3.TrainedHead(target, ids, settings.seed)

    def trainer(self, phase_run: PhaseRun, on_progress: OnProgress) -> Any:
        return eagle3.make_head_trainer(
            phase_run, self.model, self._target, self._unroll_steps, on_progress
        )

    def save(self, out: Path) -> None:
        self.model.save(out)


def _run(phase_run: PhaseRun, training: Training, on_progress: OnProgress) -> dict[str, Any]:
    """Runs one phase, from its last checkpoint if it has one, and returns what it did.

    "loss_first" is the first loss that was logged, and "loss_last" the mean over the last tenth of
    those losses. "parameters" counts the parameters that the phase trains.
    """
    trainer: Any = training.trainer(phase_run, on_progress)
    trainer.train(resume_from_checkpoint=_last_checkpoint(phase_run.checkpoints))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    last_tenth = losses[-max(1, len(losses) // 10) :]
    return {
        "phase": phase_run.phase.name,
        "steps": trainer.state.global_step,
        "samples": trainer.state.global_step * phase_run.batch_size,
        "parameters": sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        "loss_first": losses[0],
        "loss_last": sum(last_tenth) / len(last_tenth),
        "trains": list(phase_run.phase.trains),
    }


def _last_checkpoint(folder: Path) -> str | None:
    """Returns the last complete checkpoint of a phase, and removes incomplete ones."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / "trainer_state.json").exists():  # This file is written last.
            shutil.rmtree(checkpoint)
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def _check_settings(settings: Settings) -> DraftRecipe:
    """Returns the recipe; raises OptionError for settings that cannot be run."""
    recipe = select_recipe(settings.recipe, settings.phases)
    if recipe.unroll_steps:
        eagle3.check_settings(settings)
    share_steps(settings.steps, recipe.phases)  # This raises if there are too few steps.
    if not 0 <= settings.distill <= 1:
        raise OptionError(f"--distill {settings.distill} is not a weight between 0 and 1")
    if not 0 <= settings.drop_visual <= 1:
        raise OptionError(f"--drop-visual {settings.drop_visual} is not a share between 0 and 1")
    if settings.batch_size is not None and settings.batch_size < 1:
        raise OptionError(f"--batch-size {settings.batch_size} must be at least 1")
    if settings.draft is not None and (settings.language or settings.tower):
        raise OptionError("--language and --tower are a fresh draft's: leave --draft out")
    if settings.images and not settings.data:
        raise OptionError("--images is where the pictures of --data lie: give that too")
    if not 0 < settings.lr_scale < inf:
        raise OptionError(f"--lr-scale {settings.lr_scale} is not a number above 0")
    return recipe


def _read_state(out: Path, settings: Settings, resume: bool) -> dict[str, Any]:
    """Returns the state of the earlier run in ``out``, or {} if ``out`` is empty or does not exist.

    Raises OptionError unless that run may be resumed.
    """
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file; give a folder for the draft")
    if not out.exists() or not any(out.iterdir()):
        return {}
    if not resume:
        raise OptionError(f"{out} is not empty; give --resume to go on there, or another folder")
    try:
        state: dict[str, Any] = json.loads((out / STATE).read_text())
        earlier_settings = replace(Settings(), **state["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{out} holds no run of train-draft to resume") from error
    for name, value in asdict(settings).items():
        if value != (earlier_value := asdict(earlier_settings)[name]):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{out} was begun with {option} {earlier_value}, not {value}; resume with that"
            )
    return state
