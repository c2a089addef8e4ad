"""Training samples for a draft: conversations about the world, encoded by a model's processor.

They fit any model whose processor ``saccade.inputs.ask`` can call. A batch depends only on the
run's seed, the number of the training phase and the batch's index in it. So a resumed run sees what
an uninterrupted run would have seen.
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
from saccade.inputs.media.clip import make_clip
from saccade.world import dialogues, drawing, scenes
from saccade.world.train_draft.recipes import Kind

FIRST_EVAL_SEED = 10_000_000  # Training draws scenes of seeds below this one only.
# How often each task is drawn for a video. The weights need not add up to 1.
VIDEO_TASK_WEIGHTS = {"describe": 0.45, "events": 0.10, "qa": 0.15, "chat": 0.15}
KIND_SHARES = {"video": 0.8, "image": 0.1, "diff": 0.1}  # How often each kind of medium is drawn.
# Names under which processors say what each token is: 0 for text.
TOKEN_TYPES = {"mm_token_type_ids", "token_type_ids"}
# By name, the value that fills up a batch's shorter samples. They are filled up on the right, where
# causal attention does not look.
PADDING_VALUES = {
    **{"labels": -100, "input_ids": 0, "attention_mask": 0, "kept_mask": 0},
    **dict.fromkeys(TOKEN_TYPES, 0),
}


@dataclass(frozen=True)
class Canvas:
    """The medium of a sample: a clip ("video"), one picture ("image"), or two pictures to compare
    ("diff")."""

    kind: Kind
    frames: int  # Of a clip; 1 for pictures.
    height: int  # In pixels, like ``width``.
    width: int


# Frames, height, width: clips of 64 to 512 visual tokens, pictures of 16 to 144.
_SIZES = [(8, 112, 112), (16, 112, 112), (32, 112, 112), (16, 168, 168), (8, 224, 224)]
_SIZES += [(24, 112, 140), (64, 112, 112), (4, 336, 336)]
CANVASES: dict[Kind, list[Canvas]] = {
    "video": [Canvas("video", *size) for size in _SIZES],
    "image": [Canvas("image", frames=1, height=side, width=side) for side in (112, 168, 224, 336)],
    "diff": [Canvas("diff", frames=1, height=side, width=side) for side in (112, 224)],
}


def readable_kinds(loaded: Loaded, kinds: Sequence[Kind]) -> Sequence[Kind]:
    """Returns the kinds that a model's processor takes; some processors take no videos."""
    takes_videos = getattr(loaded.processor, "video_processor", None) is not None
    return [kind for kind in kinds if kind != "video" or takes_videos]


@dataclass(frozen=True)
class DialogueSpec:
    """A conversation that is drawn and not rendered yet: its scene, one of the world's tasks, and
    the seed of its words."""

    scene: scenes.Scene
    task: str
    seed: int
    seconds: float  # Of the clip.


def draw_dialogue(
    canvas: Canvas, seed: int, task: str | None = None, max_objects: int = 6
) -> DialogueSpec:
    """Draws a conversation by `seed`: its scene and the length of its clip.

    `task` is one of the world's tasks. If it is None, a video's task is drawn as well, and the task
    of pictures is the kind of their canvas. A scene has at most `max_objects` objects.
    """
    # ``scenes.scene`` draws by the same seed. The 7 makes the draws here independent of its draws.
    rng = np.random.default_rng([7, seed])
    if task is None:
        task = canvas.kind
        if canvas.kind == "video":
            shares = np.array(list(VIDEO_TASK_WEIGHTS.values()))
            task = str(rng.choice(list(VIDEO_TASK_WEIGHTS), p=shares / shares.sum()))
    # From 2 to 60 seconds, such that 2 to 4 seconds are as likely as 15 to 30.
    seconds = float(np.exp(rng.uniform(np.log(2), np.log(60))))
    return DialogueSpec(scenes.scene(seed, max_objects=max_objects), task, seed, seconds)


def render_pictures(dialogue: DialogueSpec, canvas: Canvas) -> NDArray[np.uint8]:
    """Returns the frames of the clip, or the one or two pictures: uint8 [picture, H, W, 3]."""
    if canvas.kind == "video":
        return drawing.render(dialogue.scene, canvas.frames, canvas.height, canvas.width)
    pictured_scenes = [dialogue.scene]
    if canvas.kind == "diff":
        pictured_scenes.append(scenes.edit(dialogue.scene, dialogue.seed))
    return np.stack(
        [drawing.image_frame(each, canvas.height, canvas.width) for each in pictured_scenes]
    )


class Samples(Dataset):
    """The batches of a training phase, one for each forward. The samples of a batch have the same
    medium and size."""

    def __init__(
        self,
        loaded: Loaded,
        media: Sequence[Kind],
        seed: tuple[int, int],
        *,
        count: int,
        batch: int,
        max_drop: float,
    ) -> None:
        """``seed`` is (the run's seed, the phase's number). There are ``count`` batches of
        ``batch`` samples. A random share of each sample's visual tokens, at most ``max_drop``, is
        not read by the draft.
        """
        self._loaded = loaded
        self._media = list(media)
        self._seed = seed
        self._count, self._batch, self._max_drop = count, batch, max_drop
        shares = np.array([KIND_SHARES[kind] for kind in media])
        self._shares = shares / shares.sum()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng([*self._seed, index])
        canvases = CANVASES[self._media[int(rng.choice(len(self._media), p=self._shares))]]
        canvas = canvases[int(rng.integers(len(canvases)))]
        return collate([self._sample(canvas, rng) for _ in range(self._batch)])

    def _sample(self, canvas: Canvas, rng: np.random.Generator) -> dict[str, Tensor]:
        """Returns one conversation up to one of its answers, whose tokens are the labels."""
        loaded = self._loaded
        dialogue = draw_dialogue(canvas, int(rng.integers(FIRST_EVAL_SEED)))
        turns = dialogues.conversation(dialogue.scene, dialogue.task, dialogue.seed)
        last = int(rng.integers(len(turns)))
        frames = render_pictures(dialogue, canvas)
        media: dict[str, Any] = {"images": list(frames)}
        if canvas.kind == "video":
            media = {"clips": [make_clip(frames, dialogue.seconds)]}
        history = [(turn.question, turn.answer) for turn in turns[:last]]
        inputs = ask(loaded, turns[last].question, history=history, **media)
        answer_ids = loaded.tokenizer(turns[last].answer, add_special_tokens=False).input_ids
        kept_mask = draw_kept_mask(loaded, inputs, rng, self._max_drop)
        return append_answer(inputs, [*answer_ids, loaded.tokenizer.eos_token_id], kept_mask)


def draw_kept_mask(
    loaded: Loaded, inputs: Mapping[str, Any], rng: np.random.Generator, max_drop: float
) -> Bool[Tensor, "1 len"]:
    """Draws which tokens of the prompt the draft reads: all text, and the visual tokens except for
    a random share of them, which is at most ``max_drop``."""
    visual = torch.isin(inputs["input_ids"], torch.tensor(sorted(loaded.backbone.placeholders)))
    kept_mask = ~visual
    visual_count = int(visual.sum())
    drop_count = round(rng.uniform(0, max_drop) * visual_count)
    # The visual tokens are numbered in random order, and those with the first numbers are dropped.
    kept_mask[visual] = torch.from_numpy(rng.permutation(visual_count) >= drop_count)
    return kept_mask


def append_answer(
    inputs: Mapping[str, Any], answer: Sequence[int], kept_mask: Bool[Tensor, "1 len"]
) -> dict[str, Tensor]:
    """Returns a processor's output followed by the ids of an answer, as a sample of n tokens.

    The sample's ``labels`` [1, n] hold the token to predict at each position, or -100 where none is
    learnt. Its ``kept_mask`` [1, n] is False for visual tokens that the draft does not get. The
    argument ``kept_mask`` is that of the prompt alone; the draft gets the whole answer.
    """
    answer_ids = torch.tensor([list(answer)])
    ids = torch.cat([inputs["input_ids"], answer_ids], 1)
    labels = torch.full_like(ids, -100)
    labels[:, -len(answer) - 1 : -1] = answer_ids  # A token's label stands one place before it.
    sample = {**inputs, "input_ids": ids, "labels": labels}
    sample["attention_mask"] = torch.ones_like(ids)
    sample["kept_mask"] = torch.cat([kept_mask, torch.ones_like(answer_ids, dtype=torch.bool)], 1)
    for name in TOKEN_TYPES & inputs.keys():
        types = inputs[name]
        text_types = torch.zeros_like(answer_ids, dtype=types.dtype)  # An answer is text: type 0.
        sample[name] = torch.cat([types, text_types], 1)
    return sample


def collate(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns samples as one batch, padded on the right; their media may differ in number."""
    batch = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        rows = [sample[name] for sample in samples if name in sample]
        if name in PADDING_VALUES:
            # A sample that lacks this entry has zeros instead.
            rows = [sample.get(name, torch.zeros_like(sample["input_ids"])) for sample in samples]
            batch[name] = pad_sequence([row[0] for row in rows], True, PADDING_VALUES[name])
        elif rows[0].ndim > 4:
            # These are pictures cut into tiles, [picture, tile, channel, height, width]. Pictures
            # with fewer tiles get empty ones, which the model never looks at.
            tiles = [row for each in rows for row in each]
            batch[name] = pad_sequence(tiles, True)
        else:
            batch[name] = torch.cat(rows)
    return batch
