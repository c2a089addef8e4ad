"""Training a draft phase by phase, each a run of the Hugging Face Trainer; resumable.

Knows nothing of the command line.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.trainer_utils import get_last_checkpoint

from saccade.core.errors import ModelError, OptionError
from saccade.inputs.loading import Loaded, check_pair, load
from saccade.model.backbone import Backbone
from saccade.world.train_draft import conversations
from saccade.world.train_draft.assembling import assembled
from saccade.world.train_draft.recipes import DraftRecipe, Settings, parts, recipe, shared
from saccade.world.train_draft.trainer import Tell, Training, trainer

STATE, CHECKPOINTS = "train-draft.json", "checkpoints"
EMBEDDED_SIZES = (192, 1024, 96)  # of hidden states, the vocabulary and what the tower computes in


def untrained(config: Any, seed: int) -> Any:
    """A model of the embedded family with this configuration, in fp32."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config).float().train()
    out = (0.02 / (2 * max(config.text_config.num_hidden_layers, 4)) ** 0.5) * 2
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            nn.init.normal_(p, std=out)
        elif "visual" in name and p.ndim == 2:
            nn.init.normal_(p, std=0.5 * p.shape[1] ** -0.5)
        elif name.endswith("patch_embed.proj.weight"):
            nn.init.normal_(p, std=p[0].numel() ** -0.5)
    return model


def started(target: Loaded, chosen: DraftRecipe, settings: Settings) -> Loaded:
    """The draft before any training: the one that is named, or a fresh one."""
    vision = target.backbone.model.config.to_dict().get("vision_config", {})
    sizes = (target.backbone.config.hidden_size, target.backbone.vocab, vision.get("hidden_size"))
    if settings.draft is not None:
        draft = load(settings.draft, dtype="float32", fused=False)
        check_pair(target, draft)
        return draft
    if sizes == EMBEDDED_SIZES and settings.language is settings.tower is None:
        return fresh(target, chosen.layers, settings.seed)
    return assembled(target, settings.language or chosen.language, settings.tower, settings.seed)


def fresh(target: Loaded, layers: int, seed: int) -> Loaded:
    """An untrained draft for a member of the embedded family, behind that one's vision tower.

    The recipes never start from an untrained tower; LLaVA-1.5's would leave it as it is.
    """
    config = deepcopy(target.backbone.model.config)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = config.text_config.layer_types[:layers]
    model = untrained(config, seed)
    kinds, theirs = parts(model), target.backbone.model.state_dict()
    tower = {name: theirs[name] for name, part in kinds.items() if part == "vision"}
    model.load_state_dict(tower, strict=False)
    model.generation_config = target.backbone.model.generation_config
    return Loaded("a fresh draft", Backbone(model, fused=False), target.processor)


def train_draft(
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    tell: Tell = lambda phase, done, total, loss: None,
    save_every_s: float = 60.0,
) -> dict[str, Any]:
    """Trains a draft into the checkpoint folder ``out``; returns what was done, phase by phase.

    ``tell`` hears (phase, samples done, samples in all, last loss). With ``resume`` the run goes on
    from the last checkpoint, taken at least every ``save_every_s`` seconds, bit for bit.
    """
    chosen = _checked(settings)
    stored = _stored(out, settings, resume)
    if stored.get("phases"):
        return stored
    told = conversations.read(settings.data, settings.images) if settings.data else ()
    target = load(settings.target, dtype="float32", fused=False)
    draft = started(target, chosen, settings)
    model: Any = draft.backbone.model
    parts(model)  # refuses before anything is written
    if settings.distill and type(model) is not type(target.backbone.model):
        raise ModelError(
            f"{target.name} cannot teach {draft.name}, which reads its inputs in another form; "
            "choose models of one family, or leave --distill out"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / STATE).write_text(json.dumps({"settings": asdict(settings)}, indent=1) + "\n")
    found = []
    for number, (phase, steps) in enumerate(
        zip(chosen.phases, shared(settings.steps, chosen.phases), strict=True)
    ):
        place = out / CHECKPOINTS / f"{number + 1}-{phase.name}"
        work = Training(phase, steps, settings, number, place, save_every_s, told)
        found.append(_run(work, draft, target, tell))
    model.save_pretrained(out)
    draft.processor.save_pretrained(out)
    result = {"settings": asdict(settings), "out": str(out), "phases": found}
    (out / STATE).write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(out / CHECKPOINTS)
    return result


def _run(work: Training, draft: Loaded, target: Loaded, tell: Tell) -> dict[str, Any]:
    """One phase, from its last checkpoint if it left one."""
    run: Any = trainer(work, draft, target, tell)
    run.train(resume_from_checkpoint=_last(work.place))
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "phase": work.phase.name,
        "steps": run.state.global_step,
        "samples": run.state.global_step * work.batch_size,
        "parameters": sum(p.numel() for p in draft.backbone.model.parameters() if p.requires_grad),
        "loss_first": losses[0],
        "loss_last": sum(tail) / len(tail),
        "trains": list(work.phase.trains),
    }


def _last(place: Path) -> str | None:
    """The last whole checkpoint of a phase; one cut while it was written is taken away."""
    for half in place.glob("checkpoint-*"):
        if not (half / "trainer_state.json").exists():  # what is written last
            shutil.rmtree(half)
    return get_last_checkpoint(str(place)) if place.is_dir() else None


def _checked(settings: Settings) -> DraftRecipe:
    """The recipe; raises OptionError for whatever cannot be run."""
    chosen = recipe(settings.recipe, settings.phases)
    shared(settings.steps, chosen.phases)
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
    if settings.lr_scale <= 0:
        raise OptionError(f"--lr-scale {settings.lr_scale} must be above 0")
    return chosen


def _stored(out: Path, settings: Settings, resume: bool) -> dict[str, Any]:
    """What an earlier run left in ``out``; raises OptionError unless it may go on there."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file; give a folder for the draft")
    if not out.exists() or not any(out.iterdir()):
        return {}
    if not resume:
        raise OptionError(f"{out} is not empty; give --resume to go on there, or another folder")
    try:
        stored: dict[str, Any] = json.loads((out / STATE).read_text())
        before = replace(Settings(), **stored["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{out} holds no run of train-draft to resume") from error
    for name, value in asdict(settings).items():
        if value != (was := asdict(before)[name]):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{out} was begun with {option} {was}, not {value}; resume with that")
    return stored
