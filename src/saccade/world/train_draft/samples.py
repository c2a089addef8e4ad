"""Samples to train a draft on: conversations about the world, spelled by a model's own processor.

Any family whose processor ``saccade.inputs.ask`` can drive will do. An item follows from (seed,
phase, index) alone, so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from saccade.inputs import Loaded, ask
from saccade.world import drawing, scenes, text
from saccade.world.train_draft.recipes import Kind

EVAL_SEED = 10_000_000  # training draws its scenes below it
TASKS = {"describe": 0.45, "events": 0.10, "qa": 0.15, "chat": 0.15}  # of videos, and their shares
KIND_SHARES = {"video": 0.8, "image": 0.1, "diff": 0.1}
FILLER = {  # on the right of the shorter samples of a batch, where causal attention never looks
    "labels": -100, "input_ids": 0, "attention_mask": 0, "stay": 0, "mm_token_type_ids": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Canvas:
    """What a sample shows: a clip of `frames`, one picture, or two pictures to compare."""

    kind: Kind
    frames: int
    height: int
    width: int


# Frames, height, width: clips of 64 to 512 visual tokens, pictures of 16 to 144.
_SIZES = [(8, 112, 112), (16, 112, 112), (32, 112, 112), (16, 168, 168), (8, 224, 224)]
_SIZES += [(24, 112, 140), (64, 112, 112), (4, 336, 336)]
CANVASES: dict[Kind, list[Canvas]] = {
    "video": [Canvas("video", *size) for size in _SIZES],
    "image": [Canvas("image", 1, side, side) for side in (112, 168, 224, 336)],
    "diff": [Canvas("diff", 1, side, side) for side in (112, 224)],
}


def readable(loaded: Loaded, kinds: Sequence[Kind]) -> Sequence[Kind]:
    """Those of these kinds that a model's processor takes: some know no videos."""
    videos = getattr(loaded.processor, "video_processor", None) is not None
    return [kind for kind in kinds if kind != "video" or videos]


@dataclass(frozen=True)
class Dialogue:
    """A conversation to be had: about which scene, which of the world's tasks, drawn by `seed`."""

    scene: scenes.Scene
    task: str
    seed: int
    seconds: float  # of the clip


def draw(canvas: Canvas, seed: int, task: str | None = None, max_objects: int = 6) -> Dialogue:
    """A random talk of the canvas; its scene, task, questions and length all follow from `seed`."""
    rng = np.random.default_rng([7, seed])
    if task is None:
        task = canvas.kind
        if canvas.kind == "video":
            shares = np.array(list(TASKS.values()))
            task = str(rng.choice(list(TASKS), p=shares / shares.sum()))
    seconds = float(np.exp(rng.uniform(np.log(2), np.log(60))))
    return Dialogue(scenes.scene(seed, max_objects=max_objects), task, seed, seconds)


def pictures(talk: Dialogue, canvas: Canvas) -> NDArray[np.uint8]:
    """The frames of the clip, or the pictures, [g, H, W, 3]."""
    if canvas.kind == "video":
        return drawing.render(talk.scene, canvas.frames, canvas.height, canvas.width)
    both = [talk.scene, scenes.edit(talk.scene, talk.seed)][: 2 if canvas.kind == "diff" else 1]
    return np.stack([drawing.image_frame(each, canvas.height, canvas.width) for each in both])


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
        canvases = CANVASES[self._media[int(rng.choice(len(self._media), p=self._shares))]]
        canvas = canvases[int(rng.integers(len(canvases)))]
        return together([self._sample(canvas, rng) for _ in range(self._batch)])

    def _sample(self, canvas: Canvas, rng: np.random.Generator) -> dict[str, Tensor]:
        """One conversation up to the end of one of its answers, which is to be learnt."""
        loaded = self._loaded
        talk = draw(canvas, int(rng.integers(EVAL_SEED)))
        turns = text.conversation(talk.scene, talk.task, talk.seed)
        last = int(rng.integers(len(turns)))
        frames = pictures(talk, canvas)
        media: dict[str, Any] = {"images": list(frames)}
        if canvas.kind == "video":
            media = {"clips": [drawing.clip(frames, talk.seconds)]}
        history = [(turn.question, turn.answer) for turn in turns[:last]]
        inputs = ask(loaded, turns[last].question, history=history, **media)
        said = loaded.tokenizer(turns[last].answer, add_special_tokens=False).input_ids
        stay = kept(loaded, inputs, rng, self._drop)
        return answered(inputs, [*said, loaded.tokenizer.eos_token_id], stay)


def kept(
    loaded: Loaded, inputs: Mapping[str, Any], rng: np.random.Generator, drop: float
) -> Bool[Tensor, "1 len"]:
    """Which of a prompt's tokens a draft gets: all but up to a share ``drop`` of the visual."""
    visual = torch.isin(inputs["input_ids"], torch.tensor(sorted(loaded.backbone.placeholders)))
    stay = ~visual
    seen = int(visual.sum())
    lost = round(rng.uniform(0, drop) * seen)
    stay[visual] = torch.from_numpy(rng.permutation(seen) >= lost)
    return stay


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
    """Samples as one batch, padded on the right; one may show nothing, or more tiles."""
    found = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        rows = [sample[name] for sample in samples if name in sample]
        if name in FILLER:
            none = [torch.zeros_like(sample["input_ids"]) for sample in samples]
            whole = [sample.get(name, zeros) for sample, zeros in zip(samples, none, strict=True)]
            found[name] = pad_sequence([row[0] for row in whole], True, FILLER[name])
        elif rows[0].ndim > 4:  # pictures in tiles: those that are not there are never looked at
            tiles = [row for each in rows for row in each]
            found[name] = pad_sequence(tiles, True)
        else:
            found[name] = torch.cat(rows)
    return found
