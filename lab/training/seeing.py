"""Training of the adapter behind which a pretrained language model sees (`shell.py`).

words   the merger alone learns to say, in the language model's own words, what a visual token shows
sees    it and the low-rank terms learn to answer: questions of a few words, and descriptions
longer  the same over clips of up to 512 visual tokens, short ones among them

The tower and the language model stay as they are. A stage goes on where it was cut, and what it
leaves is the mean of its last steps' weights, like the pair's (`train.py`).
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

from lab.training import shell
from lab.training.batch import Batch
from lab.training.labels import PROBES
from lab.training.model import embed, read, tower
from lab.training.stages import SEEING, Stage
from lab.training.train import BF16, Run, nearer, scores_of, state_of, steps
from saccade.world.scenes import COLORS, MOTIONS, SHAPES, SIZES

log = logging.getLogger(__name__)

DTYPE = torch.bfloat16 if BF16 else torch.float32
PLAIN = 0.25  # the weight of a word that does not depend on the pixels
# What the classes of a visual token's label are called, of each of PROBES.
CALLED: Sequence[Sequence[str]] = (
    ("background", *SHAPES),
    ("", *COLORS),
    ("", *SIZES),
    ("", *MOTIONS),
    ("top", "middle", "bottom"),
    ("left", "centre", "right"),
    ("start", "early", "late", "end"),
)


def round_once(whole: Any) -> None:
    """The frozen matrices as a step multiplies by them, so that none is rounded again each step."""
    for part in whole.model.language_model.modules():
        if isinstance(part, nn.Linear):
            part.to(DTYPE)


def meant(model: Any, tok: Any) -> list[Tensor]:
    """The classes of each label as the language model embeds their words: [classes, hidden]."""
    words = model.model.language_model.embed_tokens.weight

    def row(word: str) -> Tensor:
        ids = tok(f" {word}", add_special_tokens=False).input_ids if word else []
        found: Tensor = words[ids].sum(0) / max(1, len(ids))
        return found

    return [torch.stack([row(word) for word in names]) for names in CALLED]


class Optimizer:
    """AdamW, by gradients of norm 1 at most."""

    def __init__(self, adapter: nn.Module, lr: float) -> None:
        self.lr, self._all = lr, list(adapter.parameters())
        self.adam = torch.optim.AdamW(self._all, lr, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, scale: float) -> None:
        """One update at `scale` times the learning rate; clears the gradients."""
        nn.utils.clip_grad_norm_(self._all, 1.0)
        self.adam.param_groups[0]["lr"] = self.lr * scale
        self.adam.step()
        self.adam.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state)


class Seeing(Run):
    """A stage of it: `model` is the adapter, `whole` the shell that it sits in."""

    def __init__(self, stage: Stage, whole: Any, tok: Any) -> None:
        self.whole, self._meant = whole, meant(whole, tok)
        adapter = shell.Adapter(whole).requires_grad_(True)
        round_once(whole)
        self._head = whole.lm_head.weight.to(DTYPE)
        mean = AveragedModel(adapter, multi_avg_fn=nearer)
        super().__init__(stage, adapter, tok, Optimizer(adapter, stage.lr), mean)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        with torch.no_grad():
            seen = tower(self.whole, batch.frames)
        visual = self.model.get_submodule("merger")(seen)
        if self.stage.probe:
            loss = self._said(visual, batch.probes)
            return loss, {"words": float(loss.detach())}
        at = batch.labels >= 0
        with torch.autocast("cpu", torch.bfloat16, BF16):
            hidden = read(self.whole, embed(self.whole, batch.ids, visual), batch.positions)
            logits = F.linear(hidden[at], self._head).float()
        ce = F.cross_entropy(logits, batch.labels[at], reduction="none")
        weight = torch.where(batch.kinds[at] > 0, 1.0, PLAIN)
        scores = {"ce": float(ce.detach().mean()), **scores_of(logits.detach(), batch)}
        return (weight * ce).sum() / weight.sum(), scores

    def _said(self, visual: Tensor, shown: Tensor) -> Tensor:
        """How far the visual tokens are from the sum of their words, halved; background counts a
        fifth."""
        words = [rows[shown[:, i]] for i, rows in enumerate(self._meant)]
        want = torch.stack(words).sum(0) / 2
        weight = torch.where(shown[:, PROBES.index("shape")] > 0, 1.0, 0.2)
        missed = (visual - want).square().mean(-1) / want.square().mean()
        return (weight * missed).sum() / weight.sum()


def train(run_dir: Path, seconds: float | None = None, text: Path | None = None) -> None:
    """Train what has not been, `seconds` of CPU time for the last stage where told, and write
    the adapter. `text` is the language model's folder, unless it is the usual one."""
    run_dir.mkdir(parents=True, exist_ok=True)
    before = ""
    for stage in SEEING:
        if stage is SEEING[-1]:
            stage = replace(stage, cpu_s=seconds or stage.cpu_s)
        if not (run_dir / f"{stage.name}.pt").exists():
            log.info("%s: %.0f CPU seconds", stage.name, stage.cpu_s)
            torch.manual_seed(0)
            run = Seeing(stage, *shell.begin(text))
            if before:
                run.mean.load_state_dict(state_of(run_dir, before)["mean"])
                run.model.load_state_dict(run.mean.module.state_dict())
                run.mean.n_averaged.zero_()
            steps(run, run_dir)
        before = stage.name
    export(run_dir)


def export(run_dir: Path) -> Path:
    """The adapter from the furthest stage the run has reached."""
    reached = [s.name for s in SEEING if any(run_dir.glob(f"{s.name}.*pt"))]
    mean = state_of(run_dir, reached[-1])["mean"]
    prefix = "module."
    file = run_dir / shell.FILE
    shell.write({n.removeprefix(prefix): v for n, v in mean.items() if n.startswith(prefix)}, file)
    return file
