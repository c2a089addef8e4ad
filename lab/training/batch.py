"""Batches of conversations about the world, laid out as the processor and model would.

Every sample of a batch has the same kind and visual grid (a `Canvas`). Knows the world, its text
and the tokenizer; knows no weights.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLModel

from lab.training.labels import PROBES, content_words, labels
from lab.training.model import CELL, PATCH, config
from saccade.world import dialogues
from saccade.world import scenes as world
from saccade.world.train_draft import samples
from saccade.world.train_draft.samples import EVAL_SEED, Canvas, Dialogue, render_pictures

KINDS = (
    *("colour", "shape", "size", "where", "count", "motion", "time", "event", "texture", "truth"),
)


def visual_tokens(canvas: Canvas) -> int:
    """Visual tokens of one sample."""
    steps = {"video": canvas.frames // 2, "image": 1, "diff": 2}[canvas.kind]
    return steps * (canvas.height // CELL) * (canvas.width // CELL)


class Example(NamedTuple):
    """One sample's text: ids, what they stand for, the labels (-100 outside answers), their kinds.

    `media` is 1 for tokens of a picture and 2 for a video's; `kinds` is 0, or 1 + the index in
    KINDS for tokens of content words.
    """

    talk: Dialogue
    ids: list[int]
    media: list[int]
    labels: list[int]
    kinds: list[int]


class Batch(NamedTuple):
    """Tensors of a batch, written by `collate`; `index` b, `n` tokens, `g` frame pairs."""

    canvas: Canvas
    frames: Tensor  # uint8 [g, 2, H, W, 3]
    ids: Tensor  # [b, n]
    media: Tensor  # [b, n]: 1 where a picture stands, 2 where a video
    positions: Tensor  # [3, b, n]
    labels: Tensor  # [b, n]: the token each position has to predict, or -100
    kinds: Tensor  # [b, n]: of the token to predict
    probes: Tensor  # [visual tokens of the batch, 7], or [0, 7] where nobody asked


@lru_cache(maxsize=8192)
def _pieces(tok: Any, s: str) -> tuple[int, ...]:
    return tuple(tok(s, add_special_tokens=False).input_ids)


def _answer(tok: Any, s: str) -> tuple[list[int], list[int]]:
    coded = tok(s, add_special_tokens=False, return_offsets_mapping=True)
    kinds = [0] * len(coded.input_ids)
    for start, end, kind in content_words(s):
        for i, (a, b) in enumerate(coded.offset_mapping):
            if b > start and a < end:
                kinds[i] = 1 + KINDS.index(kind)
    return coded.input_ids, kinds


def row(tok: Any, talk: Dialogue, canvas: Canvas) -> Example:
    """The conversation as the chat template and the processor spell it."""
    name, medium = ("<|video_pad|>", 2) if canvas.kind == "video" else ("<|image_pad|>", 1)
    names = ["<|vision_start|>", name, "<|vision_end|>"]
    start, pad, end_of = tok.convert_tokens_to_ids(names)
    visuals = 2 if canvas.kind == "diff" else 1
    shown = [start, *[pad] * (visual_tokens(canvas) // visuals), end_of] * visuals
    ids: list[int] = []
    wanted: list[int] = []
    kinds: list[int] = []
    for i, turn in enumerate(dialogues.conversation(talk.scene, talk.task, talk.seed)):
        ask = [*_pieces(tok, "<|im_start|>user\n"), *(shown if i == 0 else ())]
        ask += [*_pieces(tok, turn.question), *_pieces(tok, "<|im_end|>\n<|im_start|>assistant\n")]
        said, said_kinds = _answer(tok, turn.answer)
        end = _pieces(tok, "<|im_end|>\n")
        ids += [*ask, *said, *end]
        wanted += [*[-100] * len(ask), *said, end[0], *[-100] * (len(end) - 1)]
        kinds += [*[0] * len(ask), *said_kinds, *[0] * len(end)]
    # The token at position i predicts the one at i + 1.
    media = [medium * (token == pad) for token in ids]
    return Example(talk, ids, media, [*wanted[1:], -100], [*kinds[1:], 0])


def draw(
    tok: Any, canvas: Canvas, seed: int, task: str | None = None, max_objects: int = 6
) -> Example:
    """A random row of the canvas; its scene, task, questions and length all follow from `seed`."""
    return row(tok, samples.draw_dialogue(canvas, seed, task, max_objects), canvas)


def pixels(talk: Dialogue, canvas: Canvas, *, probes: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Frame pairs uint8 [g, 2, H, W, 3] and probe labels [visual tokens, 7] (or [0, 7])."""
    frames = render_pictures(talk, canvas)
    if canvas.kind == "video":
        shown = [(talk.scene, canvas.frames)]
        pairs = frames.reshape(-1, 2, *frames.shape[1:])
    else:
        both = [talk.scene, world.edit(talk.scene, talk.seed)]
        shown = [(scene, 1) for scene in both[: len(frames)]]
        pairs = np.stack([frames, frames], 1)
    if not probes:
        return pairs, np.zeros((0, len(PROBES)), dtype=np.int64)
    found = [labels(scene, n, canvas.height, canvas.width) for scene, n in shown]
    stacked = [np.stack([x[p] for p in PROBES], -1).reshape(-1, len(PROBES)) for x in found]
    return pairs, np.concatenate(stacked)


def _padded(lists: Sequence[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(each) for each in lists], True, value)


_ROPE = cast(Any, SimpleNamespace(config=config(1)))
_ROPE.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(
    _ROPE, *a, **k
)


def collate(rows: Sequence[Example], canvas: Canvas, *, probes: bool = True) -> Batch:
    """Render and pad; the M-RoPE ids are computed by Hugging Face's own function."""
    ids, media, kinds = (
        _padded(lists, 0) for lists in zip(*[(r.ids, r.media, r.kinds) for r in rows], strict=True)
    )
    wanted = _padded([r.labels for r in rows], -100)
    drawn = [pixels(r.talk, canvas, probes=probes) for r in rows]
    video = canvas.kind == "video"
    visuals = 2 if canvas.kind == "diff" else 1
    grid = [canvas.frames // 2 if video else 1, canvas.height // PATCH, canvas.width // PATCH]
    grids = torch.tensor([grid] * (visuals * len(rows)))
    positions, _ = Qwen2_5_VLModel.get_rope_index(
        _ROPE,
        ids,
        mm_token_type_ids=media.int(),
        image_grid_thw=None if video else grids,
        video_grid_thw=grids if video else None,
        # The processor's temporal_patch_size / fps.
        second_per_grid_ts=torch.tensor([2 / (canvas.frames / r.talk.seconds) for r in rows])
        if video
        else None,
    )
    frames = torch.from_numpy(np.concatenate([d[0] for d in drawn]))
    shown = torch.from_numpy(np.concatenate([d[1] for d in drawn]))
    return Batch(canvas, frames, ids, media, positions, wanted, kinds, shown)


class Source:
    """An endless stream of training batches; a few are drawn together and sorted by length."""

    def __init__(
        self,
        tok: Any,
        canvases: Sequence[tuple[Canvas, float]],
        tokens: int,
        seed: int,
        max_objects: Callable[[float], int] = lambda progress: 6,
        tasks: Sequence[str | None] = (None,),
        *,
        probes: bool = True,
    ) -> None:
        self._probes, self._tasks = probes, tasks
        self._tok, self._tokens, self._max_objects = tok, tokens, max_objects
        self._canvases = [p for p, _ in canvases]
        weights = np.array([w for _, w in canvases])
        self._shares = weights / weights.sum()
        self._rng = np.random.default_rng(seed)
        self._queues: dict[Canvas, list[list[Example]]] = {p: [] for p in self._canvases}

    def next(self, progress: float) -> Batch:
        """A batch of about `tokens` tokens; `progress` in 0..1 sets how rich the scenes are."""
        canvas = self._canvases[int(self._rng.choice(len(self._canvases), p=self._shares))]
        queue = self._queues[canvas]
        if not queue:
            size = max(1, self._tokens // (visual_tokens(canvas) + 190))
            most = self._max_objects(progress)
            count = size * 4 if size > 1 else 2
            seeds = self._rng.integers(0, EVAL_SEED, count)
            rows = [
                draw(self._tok, canvas, int(s), self._tasks[int(s) % len(self._tasks)], most)
                for s in seeds
            ]
            rows.sort(key=lambda r: len(r.ids))
            queue += [rows[i : i + size] for i in range(0, count, size)]
            self._rng.shuffle(cast(Any, queue))
        return collate(queue.pop(), canvas, probes=self._probes)


def drop(batch: Batch, kept: Tensor) -> Batch:
    """The batch without the visual tokens outside `kept` [b, visual tokens], equal in number.

    Positions stay what they were: only the reader's text tensors shrink, not `frames`.
    """
    stay = batch.media == 0
    stay = stay.masked_scatter(~stay, kept)
    index = stay.nonzero()[:, 1].view(len(stay), -1)
    return batch._replace(
        ids=batch.ids.gather(1, index),
        media=batch.media.gather(1, index),
        positions=batch.positions.gather(2, index.expand(3, -1, -1)),
        labels=batch.labels.gather(1, index),
        kinds=batch.kinds.gather(1, index),
    )
