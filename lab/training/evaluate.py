"""Measures how often a saved model of the pair predicts the next token of true answers.

The answers are about unseen clips or pictures, and each prediction follows the true tokens before
it (teacher-forced accuracy). ``python -m lab eval`` prints it. The seeds of the samples are above
`FIRST_EVAL_SEED`, and training draws only seeds below it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoProcessor

from lab.training import build
from lab.training.batch import (
    KINDS,
    QWEN25,
    Batch,
    PromptForm,
    collate,
    draw_example,
    drop_visual_tokens,
    visual_tokens,
)
from lab.training.model import PAIR, Forward, embed
from saccade.world.train_draft.samples import FIRST_EVAL_SEED, Canvas

View = Literal["own", "other", "none"]
"""What the model sees: the sample's own pixels, those of another sample, which shows what the words
alone give away, or no visual tokens."""
VIEWS: tuple[View, ...] = ("own", "other", "none")


class Counts(NamedTuple):
    """How many tokens of a batch's answers were predicted right, by the kind of token.

    The kinds are `KINDS`, those of content words. Index 0 is for all other tokens.
    """

    right: Tensor  # [1 + kinds]: how many are predicted right.
    total: Tensor  # [1 + kinds]: how many there are.
    nll: float  # The sum over tokens of -log of the probability of the true one, in nats.


class Family(NamedTuple):
    """How models of one family are loaded, what their prompts look like, and how they compute."""

    load: Callable[[Path], Any]  # Returns the model that is saved in a folder.
    form: PromptForm
    forward: Forward


EMBEDDED_FAMILY = Family(build.load, QWEN25, PAIR)


def evaluation_batches(
    proc: Any,
    canvas: Canvas,
    samples: int,
    task: str | None = None,
    *,
    max_objects: int = 6,
    form: PromptForm = QWEN25,
) -> list[Batch]:
    """Returns samples of a canvas in batches, the shortest texts first.

    The seeds are fixed, so all models of a family are measured on the same samples.
    """
    first = FIRST_EVAL_SEED + 1_000_000
    seeds = range(first, first + samples)
    rows = [draw_example(proc.tokenizer, canvas, s, task, max_objects, form) for s in seeds]
    rows.sort(key=lambda r: len(r.ids))
    # Batches of about eight. A single last sample joins the batch before it, because under the view
    # "other" each sample of a batch sees the visual tokens of another one. If there is only one
    # sample in all, it sees its own under that view.
    batches = [rows[i : i + 8] for i in range(0, samples, 8)]
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [batches[-2] + batches[-1]]
    return [collate(each, canvas, probes=False, form=form) for each in batches]


@torch.no_grad()
def logits_under_view(
    model: Any, batch: Batch, view: View = "own", forward: Forward = PAIR
) -> Tensor:
    """Returns a batch's logits [answer tokens, vocabulary] under a view."""
    visual: Tensor | None = None
    if view == "none":
        nothing = torch.zeros(len(batch.ids), visual_tokens(batch.canvas), dtype=torch.bool)
        batch = drop_visual_tokens(batch, nothing)
    else:
        visual = forward.encode(model, batch.frames)
        if view == "other":  # Each sample gets the visual tokens of the sample before it.
            visual = visual.roll(visual_tokens(batch.canvas), 0)
    hidden = forward.decode(model, embed(model, batch.ids, visual), batch.positions)
    return F.linear(hidden[batch.labels >= 0], model.lm_head.weight)


def count_right(scores: Tensor, batch: Batch) -> Counts:
    """Counts the answer tokens of a batch that these logits predict right.

    ``scores`` is [answer tokens, vocabulary], as ``logits_under_view`` returns it.
    """
    at = batch.labels >= 0
    labels = batch.labels[at]
    kinds = batch.kinds[at]
    right = (scores.argmax(-1) == labels).double()
    zeros = torch.zeros(1 + len(KINDS), dtype=torch.double)
    return Counts(
        zeros.index_add(0, kinds, right),
        zeros.index_add(0, kinds, torch.ones_like(right)),
        float(F.cross_entropy(scores, labels, reduction="sum")),
    )


def summarize(counts: Sequence[Counts]) -> dict[str, float]:
    """Returns the accuracy of all answer tokens ("all"), of content words and of each kind of them,
    the number of tokens, and the mean negative log probability of the true ones ("nll")."""
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
    family: Family = EMBEDDED_FAMILY,
) -> dict[View, dict[str, float]]:
    """Returns what ``summarize`` says of a saved model, by view."""
    model = family.load(folder).eval()
    proc = AutoProcessor.from_pretrained(folder)
    batches = evaluation_batches(
        proc, canvas, samples, task, max_objects=max_objects, form=family.form
    )
    return {
        v: summarize(
            [count_right(logits_under_view(model, b, v, family.forward), b) for b in batches]
        )
        for v in VIEWS
    }


@torch.no_grad()
def agreement(
    target: Path, draft: Path, canvas: Canvas, samples: int = 64, task: str | None = None
) -> float:
    """Returns the share of positions of true answers at which both models' arg-maxes agree."""
    p = build.load(target).eval()
    q = build.load(draft).eval()
    same = total = 0.0
    for b in evaluation_batches(build.load_processor(target), canvas, samples, task):
        hits = logits_under_view(p, b).argmax(-1) == logits_under_view(q, b).argmax(-1)
        same = same + float(hits.sum())
        total = total + hits.numel()
    return same / total
