"""Trains the adapter by which a pretrained language model learns to see (`adapted_llama.py`).

The model has the vision tower of the embedded pair. The adapter has the merger, which makes visual
tokens of the tower's output, and terms of low rank beside the matrices of the language model. These
are the stages:

words   The merger alone learns to make each visual token close to the language model's embeddings
        of the words for what the token shows, such as "red" and "circle".
sees    The merger and the low-rank terms learn to answer questions and to describe clips.
longer  They learn the same over clips of up to 512 visual tokens, short ones among them.

The tower and the language model's own weights do not change. An interrupted stage is continued, and
what a stage leaves are the mean weights of its last steps, as in the training of the embedded pair
(`train.py`).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from lab.training import adapted_llama
from lab.training.batch import Batch
from lab.training.labels import PROBES
from lab.training.model import embed, run_decoder, vision_features
from lab.training.stages import SEEING, Stage
from lab.training.train import HAS_BF16, Run, accuracies, load_state, run_steps, update_running_mean
from saccade.world.scenes import COLORS, MOTIONS, SHAPES, SIZES

log = logging.getLogger(__name__)

DTYPE = torch.bfloat16 if HAS_BF16 else torch.float32
# The weight in the loss of a token whose word does not depend on the pixels. The others weigh 1.
PLAIN_WORD_WEIGHT = 0.25
# The words for the classes of a visual token's labels, one tuple for each of PROBES, which are the
# labels' names: shape, color, size, motion, row, column and time. Class 0 is background where a
# label has one.
CLASS_NAMES: Sequence[Sequence[str]] = (
    ("background", *SHAPES),
    ("", *COLORS),
    ("", *SIZES),
    ("", *MOTIONS),
    ("top", "middle", "bottom"),
    ("left", "centre", "right"),
    ("start", "early", "late", "end"),
)


def round_frozen_weights(full_model: Any) -> None:
    """Rounds the language model's frozen matrices to ``DTYPE``, the type that a step computes in.

    So no step has to round them again.
    """
    for part in full_model.model.language_model.modules():
        if isinstance(part, nn.Linear):
            part.to(DTYPE)


def class_embeddings(model: Any, tok: Any) -> list[Tensor]:
    """Returns the language model's embeddings of the words for each label's classes.

    Each tensor is [classes, hidden]. A word of several tokens has their mean. The empty word, which
    stands for background, has zeros.
    """
    words = model.model.language_model.embed_tokens.weight

    def row(word: str) -> Tensor:
        ids = tok(f" {word}", add_special_tokens=False).input_ids if word else []
        embedding: Tensor = words[ids].sum(0) / max(1, len(ids))
        return embedding

    return [torch.stack([row(word) for word in names]) for names in CLASS_NAMES]


class Optimizer:
    """AdamW over an adapter's weights, with their gradients clipped to norm 1."""

    def __init__(self, adapter: nn.Module, lr: float) -> None:
        self.lr = lr
        self._all = list(adapter.parameters())
        self.adam = torch.optim.AdamW(self._all, lr, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, scale: float) -> None:
        """Makes one update at `scale` times the learning rate, and clears the gradients."""
        nn.utils.clip_grad_norm_(self._all, 1.0)
        self.adam.param_groups[0]["lr"] = self.lr * scale
        self.adam.step()
        self.adam.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state)


class SeeingRun(Run):
    """A stage of the training; `model` is the adapter and `full_model` the model that has it."""

    def __init__(self, stage: Stage, full_model: Any, tok: Any) -> None:
        self.full_model = full_model
        self._class_embeddings = class_embeddings(full_model, tok)
        adapter = adapted_llama.Adapter(full_model).requires_grad_(True)
        round_frozen_weights(full_model)
        self._head = full_model.lm_head.weight.to(DTYPE)
        mean = AveragedModel(adapter, multi_avg_fn=update_running_mean)
        super().__init__(stage, adapter, tok, Optimizer(adapter, stage.lr), mean)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        with torch.no_grad():
            features = vision_features(self.full_model, batch.frames)
        visual = self.model.get_submodule("merger")(features)
        if self.stage.probe:  # This is the stage `words`.
            loss = self._word_loss(visual, batch.probes)
            return loss, {"words": float(loss.detach())}
        at = batch.labels >= 0
        with torch.autocast("cpu", torch.bfloat16, HAS_BF16):
            hidden = run_decoder(
                self.full_model, embed(self.full_model, batch.ids, visual), batch.positions
            )
            logits = F.linear(hidden[at], self._head).float()
        ce = F.cross_entropy(logits, batch.labels[at], reduction="none")
        weight = torch.where(batch.kinds[at] > 0, 1.0, PLAIN_WORD_WEIGHT)
        scores = {"ce": float(ce.detach().mean()), **accuracies(logits.detach(), batch)}
        return (weight * ce).sum() / weight.sum(), scores

    def _word_loss(self, visual: Tensor, labels: Tensor) -> Tensor:
        """Returns how far visual tokens are from the words for what they show.

        The target of a visual token is half the sum of its words' embeddings. The loss is the mean
        squared distance from it, relative to the mean square of all targets. Tokens of the
        background count a fifth. `labels` is [visual tokens, 7], a class for each of PROBES.
        """
        words = [rows[labels[:, i]] for i, rows in enumerate(self._class_embeddings)]
        targets = torch.stack(words).sum(0) / 2
        weight = torch.where(labels[:, PROBES.index("shape")] > 0, 1.0, 0.2)
        errors = (visual - targets).square().mean(-1) / targets.square().mean()
        return (weight * errors).sum() / weight.sum()


def train(run_dir: Path, seconds: float | None = None, text: Path | None = None) -> None:
    """Trains the stages that are not finished, and writes the adapter into `run_dir`.

    `seconds` replaces the CPU time of the last stage alone. `text` is the language model's folder;
    by default it is that of `saccade real make`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    before = ""
    for stage in SEEING:
        if stage is SEEING[-1]:
            stage = replace(stage, cpu_s=seconds or stage.cpu_s)
        if not (run_dir / f"{stage.name}.pt").exists():
            log.info("%s: %.0f CPU seconds", stage.name, stage.cpu_s)
            torch.manual_seed(0)
            run = SeeingRun(stage, *adapted_llama.load_untrained(text))
            if before:  # The stage begins with the mean weights of the stage before.
                run.mean.load_state_dict(load_state(run_dir, before)["mean"])
                run.model.load_state_dict(run.mean.module.state_dict())
                run.mean.n_averaged.zero_()
            run_steps(run, run_dir)
        before = stage.name
    export(run_dir)


def export(run_dir: Path) -> Path:
    """Writes the adapter from the last stage that the run has reached, and returns its file."""
    reached = [s.name for s in SEEING if any(run_dir.glob(f"{s.name}.*pt"))]
    mean = load_state(run_dir, reached[-1])["mean"]
    prefix = "module."  # The names of AveragedModel begin so, its count of steps excepted.
    file = run_dir / adapted_llama.ADAPTER_FILE
    adapted_llama.write_adapter(
        {n.removeprefix(prefix): v for n, v in mean.items() if n.startswith(prefix)}, file
    )
    return file
