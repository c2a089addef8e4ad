"""Agreement of draft and target of the embedded pair, under each view.

It is measured along the target's own greedy answer: the share of positions at which the
draft's arg-max is the target's token. It decides a greedy run exactly, so tau follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lab.training.wholeness import whole
from saccade.core.prompt import Inputs, Prefill
from saccade.core.protocols import View
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, chain
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask, load
from saccade.inputs.media import Clip
from saccade.methods import resolve
from saccade.model.backbone import Backbone
from saccade.model.session import Session
from saccade.world import dialogues, drawing, scenes

SIZES = (256, 2048)
FRAMES = {
    64: (8, 112),
    256: (32, 112),
    1024: (32, 224),
    2048: (64, 224),
    4096: (128, 224),
    8192: (256, 224),
}
MIDDLE = {512: (16, 224)}  # not among the sizes that figures go through
FIRST_SEED = 20_000_000  # far from every training and checking seed
DRAFTS = ("shapes-draft-naive", "shapes-draft")  # the one that never saw pruning comes first
SHOWN = ("full", "specvlm", "attention", "uniform", "random", "none")
KEEP = 0.1
LENGTH = 5  # of the chain tau is computed for
ANSWER = 192
LONGEST = 300  # true descriptions have up to 256 tokens


def held_out(number: int, size: int, *, max_objects: int = 6) -> tuple[scenes.Scene, Clip, str]:
    """A scene no training stage drew, its frames and a question; ``size`` visual tokens."""
    frames, side = (FRAMES | MIDDLE)[size]
    scene = scenes.scene(FIRST_SEED + number, max_objects=max_objects)
    pictures = drawing.render(scene, frames, side)
    seconds = 8.0
    times = (np.arange(frames) * seconds / frames).astype(np.float64)
    rate = frames / seconds
    clip = Clip(pictures, times, seconds, rate, frames, rate)
    return scene, clip, dialogues.conversation(scene, "describe", number)[0].question


def evaluate(
    *, clips: int = 50, sizes: Sequence[int] = SIZES, tell: Callable[[str], None] = lambda s: None
) -> dict[str, Any]:
    """By size, draft and view: agreement and tau, with 95 % bootstrap intervals over clips."""
    target = load("shapes")
    drafts = {name: load(name) for name in DRAFTS}
    found: dict[str, Any] = {}
    for size in sizes:
        rows: dict[str, dict[str, list[list[bool]]]] = {
            name: {view: [] for view in SHOWN} for name in DRAFTS
        }
        for number in range(clips):
            tell(f"{size} visual tokens, clip {number + 1} of {clips}")
            _, clip, question = held_out(number, size)
            inputs = ask(target, question, clips=[clip])
            ids = run(
                target.backbone, inputs, method="ar", max_new_tokens=ANSWER, do_sample=False
            ).ids
            guide = guided(target.backbone, inputs)
            for name, draft in drafts.items():
                for view in SHOWN:
                    pruned = view if view in ("full", "none") else f"{view}/keep={KEEP}"
                    rows[name][view].append(agrees(draft, target, guide, pruned, ids))
        found[str(size)] = {
            name: {view: _summary(lists) for view, lists in views.items()}
            for name, views in rows.items()
        }
    return found


def broken(
    target: Loaded, *, clips: int, size: int, tell: Callable[[str], None] = lambda s: None
) -> list[str]:
    """The target's greedy descriptions of unseen clips of up to five shapes that end within
    something, go on for good, or are put together as no true description is."""
    found = []
    for number in range(clips):
        tell(f"{size} visual tokens, whole answers: clip {number + 1} of {clips}")
        _, clip, question = held_out(number, size, max_objects=5)
        inputs = ask(target, question, clips=[clip])
        told = run(
            target.backbone, inputs, tokenizer=target.processor, method="ar",
            max_new_tokens=LONGEST, do_sample=False,
        )  # fmt: skip
        said = told.text or ""
        if told.finish_reason != "stop" or not whole(said):
            found.append(said)
    return found


def guided(target: Backbone, inputs: Inputs) -> Prefill:
    """The target's prefill with its attention recorded."""
    session = Session(target, [Sampling()])
    return session.prefill(target.prompts(inputs), record=True)[0]


def along(
    draft: Loaded, target: Loaded, guide: Prefill, view: View, ids: Sequence[int]
) -> Float[Tensor, "answer vocab"]:
    """The draft's logits at every place of the target's answer, under a view of the guide's
    prompt."""
    model = draft.backbone
    prompt = model.adopt(guide.prompt) if model.shares_rows_with(target.backbone) else guide.prompt
    session = Session(model, [Sampling()], banned=list(target.backbone.placeholders))
    session.prefill([model.embed_missing_rows(view(guide, prompt))])
    scores = session.score({0: chain(ids[:-1])})[0]
    return torch.stack([scores.raw(node) for node in range(ROOT, len(ids) - 1)])


def agrees(
    draft: Loaded, target: Loaded, guide: Prefill, view: str, ids: Sequence[int]
) -> list[bool]:
    """Whether the draft would have guessed each token of the target's answer, under the view of
    this name and budget (``specvlm/keep=0.1``)."""
    guesses = along(draft, target, guide, resolve(f"sd/view={view}").view, ids).argmax(-1).tolist()
    return [guess == token for guess, token in zip(guesses, ids, strict=True)]


def tau(agrees: Sequence[bool], length: int = LENGTH) -> float:
    """Tokens per target forward of a greedy chain, from where draft and target agree; the first
    token, which the prefill tells, left out."""
    at, rounds = 1, 0
    while at < len(agrees):
        run = 0
        while run < length and at + run < len(agrees) and agrees[at + run]:
            run += 1
        at += run + 1
        rounds += 1
    return (len(agrees) - 1) / max(1, rounds)


def _summary(lists: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Means over clips and 95 % intervals from 1,000 resamples of the clips."""
    share = np.array([np.mean(agrees) for agrees in lists])
    length = np.array([tau(agrees) for agrees in lists])
    draws = np.random.default_rng(0).integers(len(lists), size=(1000, len(lists)))
    return {
        "agreement": float(share.mean()),
        "agreement_95": [float(v) for v in np.quantile(share[draws].mean(1), (0.025, 0.975))],
        "tau": float(length.mean()),
        "tau_95": [float(v) for v in np.quantile(length[draws].mean(1), (0.025, 0.975))],
    }
