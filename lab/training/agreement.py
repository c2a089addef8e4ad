"""Measures the agreement of the embedded pair's drafts with its target, under each view.

Agreement is the share of positions of the target's greedy answer at which the draft's arg-max is
the target's token. These positions determine which drafted tokens a greedy run accepts, so tau is
computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lab.training.wholeness import is_whole
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

SIZES = (256, 2048)  # Visual tokens of the clips.
FRAMES = {
    64: (8, 112),
    256: (32, 112),
    1024: (32, 224),
    2048: (64, 224),
    4096: (128, 224),
    8192: (256, 224),
}
"""(frames, pixels a side) by the number of visual tokens."""
EXTRA_FRAMES = {512: (16, 224)}
"""A further entry of the same kind, for a size that figures over all sizes leave out."""
FIRST_SEED = 20_000_000  # Far from every seed of training and checking.
DRAFTS = ("shapes-draft-naive", "shapes-draft")  # The first was trained without pruned views.
VIEWS = ("full", "specvlm", "attention", "uniform", "random", "none")
KEEP = 0.1  # The share of the visual tokens that a pruned view keeps.
CHAIN_LENGTH = 5  # Drafted tokens of the chains that tau is computed for.
ANSWER_TOKENS = 192  # The most tokens of an answer on which agreement is measured.
# The most tokens of an answer that must be whole. True descriptions have up to 256.
MAX_ANSWER_TOKENS = 300


def unseen_clip(number: int, size: int, *, max_objects: int = 6) -> tuple[scenes.Scene, Clip, str]:
    """Returns a scene that no training drew, its clip of ``size`` visual tokens, and a question.

    The question asks for a description. ``number`` counts the unseen scenes from 0 on.
    """
    frames, side = (FRAMES | EXTRA_FRAMES)[size]
    scene = scenes.scene(FIRST_SEED + number, max_objects=max_objects)
    pictures = drawing.render(scene, frames, side)
    seconds = 8.0
    times = (np.arange(frames) * seconds / frames).astype(np.float64)
    rate = frames / seconds
    clip = Clip(pictures, times, seconds, rate, frames, rate)
    return scene, clip, dialogues.conversation(scene, "describe", number)[0].question


def measure_agreement(
    *,
    clips: int = 50,
    sizes: Sequence[int] = SIZES,
    on_progress: Callable[[str], None] = lambda s: None,
) -> dict[str, Any]:
    """Measures agreement and tau on ``clips`` unseen clips, with 95 % intervals over clips.

    Results are by size (as text), then by draft and then by view (``_summarize``).
    """
    target = load("shapes")
    drafts = {name: load(name) for name in DRAFTS}
    results: dict[str, Any] = {}
    for size in sizes:
        rows: dict[str, dict[str, list[list[bool]]]] = {
            name: {view: [] for view in VIEWS} for name in DRAFTS
        }
        for number in range(clips):
            on_progress(f"{size} visual tokens, clip {number + 1} of {clips}")
            _, clip, question = unseen_clip(number, size)
            inputs = ask(target, question, clips=[clip])
            ids = run(
                target.backbone, inputs, method="ar", max_new_tokens=ANSWER_TOKENS, do_sample=False
            ).ids
            prefill = prefill_with_attention(target.backbone, inputs)
            for name, draft in drafts.items():
                for view in VIEWS:
                    view_and_budget = view
                    if view not in ("full", "none"):
                        view_and_budget = f"{view}/keep={KEEP}"
                    rows[name][view].append(
                        agreeing_tokens(draft, target, prefill, view_and_budget, ids)
                    )
        results[str(size)] = {
            name: {view: _summarize(lists) for view, lists in views.items()}
            for name, views in rows.items()
        }
    return results


def broken_answers(
    target: Loaded, *, clips: int, size: int, on_progress: Callable[[str], None] = lambda s: None
) -> list[str]:
    """Returns those of the target's greedy descriptions that are not whole.

    A description is not whole if a sentence breaks off, if it has no end within
    ``MAX_ANSWER_TOKENS``, or if its sentences are in an order that no true description has. The
    clips are unseen and have up to five objects.
    """
    texts = []
    for number in range(clips):
        on_progress(f"{size} visual tokens, whole answers: clip {number + 1} of {clips}")
        _, clip, question = unseen_clip(number, size, max_objects=5)
        inputs = ask(target, question, clips=[clip])
        result = run(
            target.backbone, inputs, tokenizer=target.processor, method="ar",
            max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False,
        )  # fmt: skip
        text = result.text or ""
        if result.finish_reason != "stop" or not is_whole(text):
            texts.append(text)
    return texts


def prefill_with_attention(target: Backbone, inputs: Inputs) -> Prefill:
    """Returns the target's prefill of a prompt, with the attention that views choose by."""
    session = Session(target, [Sampling()])
    return session.prefill(target.prompts(inputs), record=True)[0]


def draft_logits(
    draft: Loaded, target: Loaded, prefill: Prefill, view: View, ids: Sequence[int]
) -> Float[Tensor, "answer vocab"]:
    """Returns the draft's logits for every token of the target's answer, under a view.

    ``ids`` are the answer's. Row i has the logits for token i, after the prompt and the i tokens
    before it.
    """
    model = draft.backbone
    prompt = prefill.prompt
    if model.shares_rows_with(target.backbone):
        prompt = model.adopt(prompt)
    session = Session(model, [Sampling()], banned=list(target.backbone.placeholders))
    session.prefill([model.embed_missing_rows(view(prefill, prompt))])
    scores = session.score({0: chain(ids[:-1])})[0]
    return torch.stack([scores.raw_logits(node) for node in range(ROOT, len(ids) - 1)])


def agreeing_tokens(
    draft: Loaded, target: Loaded, prefill: Prefill, view: str, ids: Sequence[int]
) -> list[bool]:
    """Returns for each token of the target's answer whether the draft's arg-max is that token.

    ``view`` has the view's name and budget, such as ``specvlm/keep=0.1``.
    """
    guesses = (
        draft_logits(draft, target, prefill, resolve(f"sd/view={view}").view, ids)
        .argmax(-1)
        .tolist()
    )
    return [guess == token for guess, token in zip(guesses, ids, strict=True)]


def tau(agreements: Sequence[bool], length: int = CHAIN_LENGTH) -> float:
    """Returns the tokens per target forward that greedy chains of ``length`` tokens would give.

    ``agreements`` says for each token of the answer whether the draft's arg-max is that token. The
    first token does not count, because it comes from the prefill. A round accepts tokens up to the
    first disagreement, and ends with the target's own token: [_, yes, yes, no, yes, no] are two
    rounds, of 3 and of 2 tokens, so tau is 2.5.
    """
    place = 1
    rounds = 0
    while place < len(agreements):
        accepted = 0
        for agrees in agreements[place : place + length]:
            if not agrees:
                break
            accepted += 1
        place += accepted + 1
        rounds += 1
    return (len(agreements) - 1) / max(1, rounds)


def _summarize(lists: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Returns the means of agreement and tau over clips, with 95 % intervals.

    ``lists`` has the result of ``agreeing_tokens`` for each clip. The intervals are from 1,000
    resamples of the clips.
    """
    shares = np.array([np.mean(agreements) for agreements in lists])
    taus = np.array([tau(agreements) for agreements in lists])
    resamples = np.random.default_rng(0).integers(len(lists), size=(1000, len(lists)))
    return {
        "agreement": float(shares.mean()),
        "agreement_95": [float(v) for v in np.quantile(shares[resamples].mean(1), (0.025, 0.975))],
        "tau": float(taus.mean()),
        "tau_95": [float(v) for v in np.quantile(taus[resamples].mean(1), (0.025, 0.975))],
    }
