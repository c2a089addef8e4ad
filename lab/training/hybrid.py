"""Trains a hybrid target and draft (`hybrid_model.py`) from the embedded pair, on one CPU core.

A hybrid has layers of Gated DeltaNet beside layers of attention, as Qwen3.5 has. The embedded pair
is the small Qwen2.5-VL target and draft of this package. These are the stages:

tower    The hybrid's vision tower learns the visual tokens of the embedded tower, and each of its
         blocks the output of the same block there.
decoder  The target's decoder learns true answers from the embedded tower's visual tokens.
hybrid   The target's decoder goes on behind the hybrid's own tower, which does not change any more,
         with longer clips.
early    The draft's decoder learns true answers from the embedded tower's visual tokens.
draft    The draft learns the target's probabilities from views with visual tokens dropped.

The stages `tower`, `decoder` and `early` need no other, so they may run side by side. An
interrupted stage is continued, and what a stage leaves are the mean weights of its last steps, as
in the training of the embedded pair (`train.py`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lab.training import build
from lab.training.batch import Batch
from lab.training.hybrid_model import (
    DRAFT_PATTERN,
    DRAFT_SOURCES,
    HYBRID,
    TARGET_PATTERN,
    TARGET_SOURCES,
    TimestampForm,
    convert,
    create_hybrid,
    make_hybrid_processor,
    run_tower,
)
from lab.training.model import encode_frames, vision_block_outputs
from lab.training.stages import HYBRID as STAGES
from lab.training.stages import Stage
from lab.training.train import (
    HAS_BF16,
    Optimizer,
    PairRun,
    Run,
    load_state,
    run_steps,
    update_running_mean,
)
from saccade.inputs.checkpoints import EMBEDDED
from saccade.inputs.training_domain import DOMAIN_FILE

log = logging.getLogger(__name__)

BLOCK_WEIGHT = 0.3  # The weight of each block's error in the tower's loss; visual tokens have 1.
# For each stage the kinds of its model's layers, Gated DeltaNet or attention.
PATTERNS: dict[str, tuple[str, ...]] = dict.fromkeys(("tower", "decoder", "hybrid"), TARGET_PATTERN)
PATTERNS |= {"early": DRAFT_PATTERN, "draft": DRAFT_PATTERN}
FORM = TimestampForm()  # Prompts of a hybrid have a timestamp before each pair of frames.


class TowerRun(Run):
    """The stage in which the hybrid's tower learns the visual tokens of the embedded tower."""

    prompt_form, forward = FORM, HYBRID

    def __init__(self, stage: Stage, model: Any, teacher: Any, tok: Any) -> None:
        self.teacher = teacher
        model.requires_grad_(False)
        model.model.visual.requires_grad_(True)
        params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        mean = AveragedModel(model, multi_avg_fn=update_running_mean)
        super().__init__(stage, model, tok, Optimizer(params, stage.lr), mean)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        with torch.autocast("cpu", torch.bfloat16, HAS_BF16):
            with torch.no_grad():
                wanted_blocks = vision_block_outputs(self.teacher, batch.frames)
                wanted = encode_frames(self.teacher, batch.frames)
            visual, blocks = run_tower(self.model, batch.frames)
        error = _relative_error(visual, wanted)
        block_errors = [_relative_error(a, b) for a, b in zip(blocks, wanted_blocks, strict=True)]
        scores = {
            "error": float(error.detach()),
            "blocks": [round(float(e.detach()), 4) for e in block_errors],
        }
        return error + BLOCK_WEIGHT * torch.stack(block_errors).sum(), scores


def _relative_error(actual: Tensor, wanted: Tensor) -> Tensor:
    """Returns the mean squared error, relative to the variance of ``wanted`` over its rows."""
    wanted = wanted.float()
    return (actual.float() - wanted).square().mean() / (wanted - wanted.mean(0)).square().mean()


class HybridRun(PairRun):
    """A stage of the hybrid target or draft."""

    prompt_form, forward = FORM, HYBRID


class DecoderRun(HybridRun):
    """A stage in which a hybrid's decoder learns from the visual tokens of another model.

    That model, `encoder`, is of the embedded pair.
    """

    def __init__(self, stage: Stage, model: Any, encoder: Any, tok: Any) -> None:
        super().__init__(stage, model, None, tok)
        self.forward = HYBRID._replace(encode=lambda _, frames: encode_frames(encoder, frames))


def train(
    run_dir: Path,
    stages: Sequence[str] = tuple(s.name for s in STAGES),
    budget: Mapping[str, float] | None = None,
) -> None:
    """Trains these stages in order. `budget` has CPU seconds by stage, in place of a stage's own.

    Each stage writes `<stage>.pt` and `<stage>.jsonl` in `run_dir`; a finished stage is not
    repeated.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    tok = build.load_processor(EMBEDDED / "target").tokenizer
    for stage in STAGES:
        if stage.name not in stages or (run_dir / f"{stage.name}.pt").exists():
            continue
        stage = replace(stage, cpu_s=(budget or {}).get(stage.name, stage.cpu_s))
        log.info("%s: %.0f CPU seconds", stage.name, stage.cpu_s)
        torch.manual_seed(0)
        run_steps(RUNS[stage.name](stage, run_dir, tok), run_dir)


def load_stage(run_dir: Path, name: str) -> Any:
    """Returns the model of a stage, finished or not, with the mean weights of its last steps.

    Raises FileNotFoundError if the stage was not begun.
    """
    mean = AveragedModel(create_hybrid(PATTERNS[name]))
    mean.load_state_dict(load_state(run_dir, name)["mean"])
    return mean.module


def _begin_tower(stage: Stage, run_dir: Path, tok: Any) -> Run:
    teacher = build.load(EMBEDDED / "target").requires_grad_(False)
    return TowerRun(stage, convert(teacher, TARGET_PATTERN, TARGET_SOURCES), teacher, tok)


def _begin_decoder(stage: Stage, run_dir: Path, tok: Any) -> Run:
    # The target too begins with the two layers of the embedded draft (`TARGET_SOURCES`).
    source = build.load(EMBEDDED / "draft-naive").requires_grad_(False)
    return DecoderRun(stage, convert(source, TARGET_PATTERN, TARGET_SOURCES), source, tok)


def _begin_target(stage: Stage, run_dir: Path, tok: Any) -> Run:
    target = _with_tower(load_stage(run_dir, "decoder"), load_stage(run_dir, "tower"))
    return HybridRun(stage, target, None, tok)


def _begin_early_draft(stage: Stage, run_dir: Path, tok: Any) -> Run:
    source = build.load(EMBEDDED / "draft-naive").requires_grad_(False)
    return DecoderRun(stage, convert(source, DRAFT_PATTERN, DRAFT_SOURCES), source, tok)


def _begin_draft(stage: Stage, run_dir: Path, tok: Any) -> Run:
    target = load_stage(run_dir, "hybrid").requires_grad_(False)
    draft = _with_tower(load_stage(run_dir, "early"), target)
    return HybridRun(stage, draft, target, tok)


def _with_tower(model: Any, other: Any) -> Any:
    """Gives a model the vision tower of another, bit for bit, and returns it."""
    model.model.visual.load_state_dict(other.model.visual.state_dict())
    return model


RUNS = {
    "tower": _begin_tower,
    "decoder": _begin_decoder,
    "hybrid": _begin_target,
    "early": _begin_early_draft,
    "draft": _begin_draft,
}


def missing_stages(run_dir: Path) -> list[str]:
    """Returns the stages that the run has not begun and without which nothing can be exported."""
    return [name for name in ("tower", "decoder", "early") if name not in _reached(run_dir)]


def _reached(run_dir: Path) -> list[str]:
    """Returns the stages that the run has begun or finished, in their order."""
    return [s.name for s in STAGES if any(run_dir.glob(f"{s.name}.*pt"))]


def training_seconds(run_dir: Path) -> dict[str, float]:
    """Returns the CPU seconds of each stage that the run has begun."""
    return {name: float(load_state(run_dir, name)["counts"][1]) for name in _reached(run_dir)}


def export(run_dir: Path, out: Path) -> None:
    """Writes the folders `target` and `draft` from the latest stages that the run has begun.

    Raises FileNotFoundError if the tower, the target or the draft has no stage yet.
    """
    reached = _reached(run_dir)
    tower = load_stage(run_dir, "hybrid" if "hybrid" in reached else "tower")
    processor = make_hybrid_processor(build.load_processor(EMBEDDED / "target").tokenizer)
    for folder, names in (("target", ("decoder", "hybrid")), ("draft", ("early", "draft"))):
        last = [name for name in names if name in reached] or [names[0]]
        # Target and draft get the same tower, as in the embedded pair.
        model = _with_tower(load_stage(run_dir, last[-1]), tower).eval()
        model.save_pretrained(out / folder)
        processor.save_pretrained(out / folder)
        shutil.copy(EMBEDDED / "target" / DOMAIN_FILE, out / folder)
