"""Samples to train a draft on: conversations about the world, spelled by a model's own processor.

Any family whose processor ``saccade.inputs.ask`` can drive will do. An item follows from (seed,
phase, index) alone, so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from saccade.inputs import Loaded, ask
from saccade.inputs.media import Clip
from saccade.world import text
from saccade.world.batch import EVAL_SEED, Plan, draw, pixels
from saccade.world.train_draft import Kind

KIND_SHARES = {"video": 0.8, "image": 0.1, "diff": 0.1}
# Frames, height, width: clips of 64 to 512 visual tokens, pictures of 16 to 144.
_SIZES = [(8, 112, 112), (16, 112, 112), (32, 112, 112), (16, 168, 168), (8, 224, 224)]
_SIZES += [(24, 112, 140), (64, 112, 112), (4, 336, 336)]
PLANS: dict[Kind, list[Plan]] = {
    "video": [Plan("video", *size) for size in _SIZES],
    "image": [Plan("image", 1, side, side) for side in (112, 168, 224, 336)],
    "diff": [Plan("diff", 1, side, side) for side in (112, 224)],
}


class Samples(Dataset):
    """The forwards of a phase; each item is a batch of samples with the same medium and size."""

    def __init__(
        self,
        loaded: Loaded,
        media: Sequence[Kind],
        seed: tuple[int, int],
        *,
        count: int,
        batch: int,
        drop: float,
    ) -> None:
        self._loaded, self._media, self._seed = loaded, list(media), seed
        self._count, self._batch, self._drop = count, batch, drop
        shares = np.array([KIND_SHARES[kind] for kind in media])
        self._shares = shares / shares.sum()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng([*self._seed, index])
        plans = PLANS[self._media[int(rng.choice(len(self._media), p=self._shares))]]
        plan = plans[int(rng.integers(len(plans)))]
        return together([self._sample(plan, rng) for _ in range(self._batch)])

    def _sample(self, plan: Plan, rng: np.random.Generator) -> dict[str, Tensor]:
        """One conversation up to the end of one of its answers, which is to be learnt."""
        loaded = self._loaded
        row = draw(loaded.tokenizer, plan, int(rng.integers(EVAL_SEED)))
        turns = text.conversation(row.scene, row.task, row.seed)
        last = int(rng.integers(len(turns)))
        shown = pixels(row, plan, probes=False)[0]
        media: dict[str, Any] = {"images": list(shown[:, 0])}
        if plan.kind == "video":
            times = np.arange(plan.frames) * row.seconds / plan.frames
            rate = plan.frames / row.seconds
            frames = shown.reshape(-1, *shown.shape[2:])
            media = {"clips": [Clip(frames, times, row.seconds, rate, plan.frames, rate)]}
        history = [(turn.question, turn.answer) for turn in turns[:last]]
        inputs = ask(loaded, turns[last].question, history=history, **media)
        said = loaded.tokenizer(turns[last].answer, add_special_tokens=False).input_ids
        visual = torch.isin(inputs["input_ids"], torch.tensor(sorted(loaded.backbone.placeholders)))
        stay = ~visual
        seen = int(visual.sum())
        lost = round(rng.uniform(0, self._drop) * seen)
        stay[visual] = torch.from_numpy(rng.permutation(seen) >= lost)
        return answered(inputs, [*said, loaded.tokenizer.eos_token_id], stay)


def answered(
    inputs: Mapping[str, Any], answer: Sequence[int], stay: Bool[Tensor, "1 len"]
) -> dict[str, Tensor]:
    """A processor's output followed by its answer.

    ``labels`` [1, n] holds at each position the token it has to predict, or -100; ``stay`` [1, n]
    is False for visual tokens the draft does not get.
    """
    said = torch.tensor([list(answer)])
    ids = torch.cat([inputs["input_ids"], said], 1)
    labels = torch.full_like(ids, -100)
    labels[:, -len(answer) - 1 : -1] = said
    found = {**inputs, "input_ids": ids, "labels": labels}
    found["attention_mask"] = torch.ones_like(ids)
    found["stay"] = torch.cat([stay, torch.ones_like(said, dtype=torch.bool)], 1)
    if "mm_token_type_ids" in inputs:
        types = inputs["mm_token_type_ids"]
        found["mm_token_type_ids"] = torch.cat([types, said.to(types.dtype) * 0], 1)
    return found


def together(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Samples as one batch, padded on the right, where causal attention never looks."""
    length = max(sample["input_ids"].shape[1] for sample in samples)
    filler = {"labels": -100, "input_ids": 0, "attention_mask": 0, "stay": 0}
    filler["mm_token_type_ids"] = 0
    found = {}
    for name in samples[0]:
        rows = [sample[name] for sample in samples]
        if name in filler:
            rows = [F.pad(r, (0, length - r.shape[1]), value=filler[name]) for r in rows]
        found[name] = torch.cat(rows)
    return found
