"""Teacher-forced accuracy of a saved member of the pair on clips it never saw.

Three inputs: the clip's own pixels, another clip's pixels (what the words alone give away), and no
visual tokens. Seeds start at `EVAL_SEED`, which training never draws.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.training import build
from lab.training.batch import KINDS, Batch, collate, draw, drop, visual_tokens
from lab.training.model import embed, read, see
from saccade.world.train_draft.samples import EVAL_SEED, Canvas

View = Literal["own", "other", "none"]
VIEWS: tuple[View, ...] = ("own", "other", "none")


class Counts(NamedTuple):
    """Right answers and tokens, of all tokens and by kind; `nll` is a sum."""

    right: Tensor  # [1 + kinds]: index 0 is what no content word holds
    total: Tensor  # [1 + kinds]
    nll: float


def batches(
    proc: Any, canvas: Canvas, samples: int, task: str | None = None, *, max_objects: int = 6
) -> list[Batch]:
    """The evaluation batches of a canvas: the same for every model."""
    first = EVAL_SEED + 1_000_000
    seeds = range(first, first + samples)
    rows = [draw(proc.tokenizer, canvas, s, task, max_objects) for s in seeds]
    rows.sort(key=lambda r: len(r.ids))
    return [collate(rows[i : i + 8], canvas, probes=False) for i in range(0, samples, 8)]


@torch.no_grad()
def logits(model: Any, batch: Batch, view: View = "own") -> Tensor:
    """Logits [answer tokens, vocabulary] of a batch."""
    visual: Tensor | None = None
    if view == "none":
        nothing = torch.zeros(len(batch.ids), visual_tokens(batch.canvas), dtype=torch.bool)
        batch = drop(batch, nothing)
    else:
        seen = see(model, batch.frames)
        visual = seen.roll(visual_tokens(batch.canvas) if view == "other" else 0, 0)
    hidden = read(model, embed(model, batch.ids, visual), batch.positions)
    return F.linear(hidden[batch.labels >= 0], model.lm_head.weight)


def count(scores: Tensor, batch: Batch) -> Counts:
    """Compare logits with the truth."""
    at = batch.labels >= 0
    labels, kinds = batch.labels[at], batch.kinds[at]
    right = (scores.argmax(-1) == labels).double()
    zeros = torch.zeros(1 + len(KINDS), dtype=torch.double)
    return Counts(
        zeros.index_add(0, kinds, right),
        zeros.index_add(0, kinds, torch.ones_like(right)),
        float(F.cross_entropy(scores, labels, reduction="sum")),
    )


def summary(counts: Sequence[Counts]) -> dict[str, float]:
    """Accuracies of all answer tokens, of content words, of each kind; mean nll; tokens."""
    right = torch.stack([c.right for c in counts]).sum(0)
    total = torch.stack([c.total for c in counts]).sum(0)
    out = {
        "nll": sum(c.nll for c in counts) / float(total.sum()),
        "all": float(right.sum() / total.sum()),
        "content": float(right[1:].sum() / total[1:].sum()),
        "tokens": float(total.sum()),
    }
    for i, kind in enumerate(KINDS):
        if total[1 + i]:
            out[kind] = float(right[1 + i] / total[1 + i])
    return out


def teacher_forced(
    folder: Path,
    canvas: Canvas,
    samples: int = 64,
    task: str | None = None,
    *,
    max_objects: int = 6,
) -> dict[View, dict[str, float]]:
    """Accuracies of a saved model under each view. The weights are the folder's, in float32."""
    model, proc = build.load(folder).eval(), build.saved_processor(folder)
    drawn = batches(proc, canvas, samples, task, max_objects=max_objects)
    return {v: summary([count(logits(model, b, v), b) for b in drawn]) for v in VIEWS}


@torch.no_grad()
def agreement(
    target: Path, draft: Path, canvas: Canvas, samples: int = 64, task: str | None = None
) -> float:
    """Share of answer positions where both argmaxes agree, the text being the true answer."""
    p, q = build.load(target).eval(), build.load(draft).eval()
    same = total = 0.0
    for b in batches(build.saved_processor(target), canvas, samples, task):
        hits = logits(p, b).argmax(-1) == logits(q, b).argmax(-1)
        same, total = same + float(hits.sum()), total + hits.numel()
    return same / total
