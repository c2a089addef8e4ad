"""Makes training batches of conversations about the synthetic world, for `lab.training`.

Token ids and positions are those that the processor and the model would compute. Every sample of a
batch shows a video, a picture or two pictures that differ ("diff"), of one size: a `Canvas`. Probes
are seven labels of each visual token that say what it shows, such as a shape or a colour. The
vision tower learns to predict them. This module uses the tokenizer but no weights.
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

from lab.training.labels import PROBES, content_words, token_labels
from lab.training.model import CELL, PATCH, pair_config
from saccade.world import dialogues
from saccade.world import scenes as world
from saccade.world.train_draft import samples
from saccade.world.train_draft.samples import FIRST_EVAL_SEED, Canvas, DialogueSpec, render_pictures

# Kinds of content words: the words of an answer that depend on what is shown.
KINDS = (
    "colour",
    "shape",
    "size",
    "where",
    "count",
    "motion",
    "time",
    "event",
    "texture",
    "truth",
)


TEXT_TOKENS = 190  # Allowed for the text of one sample when a batch's size is chosen.


def visual_tokens(canvas: Canvas) -> int:
    """Returns the number of visual tokens of one sample."""
    steps = {"video": canvas.frames // 2, "image": 1, "diff": 2}[canvas.kind]
    return steps * (canvas.height // CELL) * (canvas.width // CELL)


class Example(NamedTuple):
    """One sample's text: its ids, and for each id its medium, its label and the label's kind.

    `media` is 1 for tokens of a picture, 2 for those of a video, else 0. The label of a place is
    the next id, if that belongs to an answer or ends one, and else -100. `kinds` are those of the
    next id too: 1 + the index in KINDS for a token of a content word, else 0.
    """

    dialogue: DialogueSpec
    ids: list[int]
    media: list[int]
    labels: list[int]
    kinds: list[int]


class Batch(NamedTuple):
    """The tensors of a batch of `b` samples, `n` tokens and `g` frame pairs; `collate` makes it."""

    canvas: Canvas
    frames: Tensor  # uint8 [g, 2, H, W, 3].
    ids: Tensor  # [b, n].
    media: Tensor  # [b, n]: 1 for tokens of a picture, 2 for those of a video, else 0.
    positions: Tensor  # [3, b, n]: time, height and width.
    labels: Tensor  # [b, n]: the token that each position has to predict, or -100.
    kinds: Tensor  # [b, n]: the kind of the token to predict, as in `Example`.
    # What each visual token shows, [visual tokens of the batch, 7] in the order of
    # `labels.PROBES`; [0, 7] for a batch without probes.
    probes: Tensor


@lru_cache(maxsize=8192)
def _token_ids(tokenizer: Any, s: str) -> tuple[int, ...]:
    return tuple(tokenizer(s, add_special_tokens=False).input_ids)


def _answer_ids_and_kinds(tokenizer: Any, s: str) -> tuple[list[int], list[int]]:
    """Returns an answer's ids, and for each id 1 + the kind of its content word, or 0 for none."""
    coded = tokenizer(s, add_special_tokens=False, return_offsets_mapping=True)
    kinds = [0] * len(coded.input_ids)
    for word_start, word_end, kind in content_words(s):
        for i, (token_start, token_end) in enumerate(coded.offset_mapping):
            overlaps = token_end > word_start and token_start < word_end
            if overlaps:
                kinds[i] = 1 + KINDS.index(kind)
    return coded.input_ids, kinds


class PromptForm:
    """How a family writes pictures and videos into a prompt; this one is Qwen2.5-VL's."""

    def video_ids(self, tokenizer: Any, canvas: Canvas, seconds: float) -> list[int]:
        """Returns the ids of a clip that lasts so many seconds."""
        return _visual_ids(tokenizer, "<|video_pad|>", visual_tokens(canvas))

    def positions(
        self, ids: Tensor, media: Tensor, grids: Tensor, is_video: bool, rates: Tensor
    ) -> Tensor:
        """Returns M-RoPE positions [3, b, n] by Hugging Face's own function.

        ``ids`` and ``media`` are [b, n], ``grids`` has (time, height, width) of each picture or
        clip, and ``rates`` the frames per second of each sample.
        """
        return Qwen2_5_VLModel.get_rope_index(
            _ROPE,
            ids,
            mm_token_type_ids=media.int(),
            image_grid_thw=None if is_video else grids,
            video_grid_thw=grids if is_video else None,
            # This is the processor's temporal_patch_size / fps.
            second_per_grid_ts=2 / rates if is_video else None,
        )[0]


QWEN25 = PromptForm()


def _visual_ids(tokenizer: Any, name: str, count: int) -> list[int]:
    names = ["<|vision_start|>", name, "<|vision_end|>"]
    start, pad, end = tokenizer.convert_tokens_to_ids(names)
    return [start, *[pad] * count, end]


def make_example(
    tokenizer: Any, dialogue: DialogueSpec, canvas: Canvas, form: PromptForm = QWEN25
) -> Example:
    """Returns the conversation's ids as the chat template and the processor make them."""
    name, medium = ("<|video_pad|>", 2) if canvas.kind == "video" else ("<|image_pad|>", 1)
    pad = tokenizer.convert_tokens_to_ids(name)
    visuals = 2 if canvas.kind == "diff" else 1
    if canvas.kind == "video":
        visual_ids = form.video_ids(tokenizer, canvas, dialogue.seconds)
    else:
        visual_ids = _visual_ids(tokenizer, name, visual_tokens(canvas) // visuals) * visuals
    ids: list[int] = []
    target_ids: list[int] = []
    kinds: list[int] = []
    turns = dialogues.conversation(dialogue.scene, dialogue.task, dialogue.seed)
    for i, turn in enumerate(turns):
        # The visual tokens are in the first question. Of a turn, the answer and the token that ends
        # it are to be predicted.
        ask = [*_token_ids(tokenizer, "<|im_start|>user\n"), *(visual_ids if i == 0 else ())]
        ask += [
            *_token_ids(tokenizer, turn.question),
            *_token_ids(tokenizer, "<|im_end|>\n<|im_start|>assistant\n"),
        ]
        answer_ids, answer_kinds = _answer_ids_and_kinds(tokenizer, turn.answer)
        end = _token_ids(tokenizer, "<|im_end|>\n")
        ids += [*ask, *answer_ids, *end]
        target_ids += [*[-100] * len(ask), *answer_ids, end[0], *[-100] * (len(end) - 1)]
        kinds += [*[0] * len(ask), *answer_kinds, *[0] * len(end)]
    # The token at position i predicts the one at i + 1.
    media = [medium * (token == pad) for token in ids]
    return Example(dialogue, ids, media, [*target_ids[1:], -100], [*kinds[1:], 0])


def draw_example(
    tokenizer: Any,
    canvas: Canvas,
    seed: int,
    task: str | None = None,
    max_objects: int = 6,
    form: PromptForm = QWEN25,
) -> Example:
    """Draws a random example; its scene, task, questions and length all follow from `seed`."""
    dialogue = samples.draw_dialogue(canvas, seed, task, max_objects)
    return make_example(tokenizer, dialogue, canvas, form)


def render_pixels(
    dialogue: DialogueSpec, canvas: Canvas, *, probes: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Returns frame pairs, uint8 [g, 2, H, W, 3], and probe labels [visual tokens, 7].

    Without `probes` the labels are [0, 7].
    """
    frames = render_pictures(dialogue, canvas)
    if canvas.kind == "video":
        scenes_and_frames = [(dialogue.scene, canvas.frames)]
        pairs = frames.reshape(-1, 2, *frames.shape[1:])
    else:
        both = [dialogue.scene, world.edit(dialogue.scene, dialogue.seed)]
        scenes_and_frames = [(scene, 1) for scene in both[: len(frames)]]
        pairs = np.stack([frames, frames], 1)  # A picture is a pair of equal frames.
    if not probes:
        return pairs, np.zeros((0, len(PROBES)), dtype=np.int64)
    labels_by_scene = [
        token_labels(scene, n, canvas.height, canvas.width) for scene, n in scenes_and_frames
    ]
    stacked = [
        np.stack([x[p] for p in PROBES], -1).reshape(-1, len(PROBES)) for x in labels_by_scene
    ]
    return pairs, np.concatenate(stacked)


def _pad(lists: Sequence[list[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(each) for each in lists], True, value)


# Hugging Face computes positions in a method of the model that needs no weights. In calls of that
# method, this object stands for the model.
_ROPE = cast(Any, SimpleNamespace(config=pair_config(1)))
_ROPE.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(
    _ROPE, *a, **k
)


def collate(
    examples: Sequence[Example],
    canvas: Canvas,
    *,
    probes: bool = True,
    form: PromptForm = QWEN25,
) -> Batch:
    """Makes a batch of examples, which are padded on the right. Their pictures are drawn here."""
    ids, media, kinds = (
        _pad(lists, 0) for lists in zip(*[(r.ids, r.media, r.kinds) for r in examples], strict=True)
    )
    target_ids = _pad([r.labels for r in examples], -100)
    rendered = [render_pixels(r.dialogue, canvas, probes=probes) for r in examples]
    video = canvas.kind == "video"
    visuals = 2 if canvas.kind == "diff" else 1
    grid = [canvas.frames // 2 if video else 1, canvas.height // PATCH, canvas.width // PATCH]
    grids = torch.tensor([grid] * (visuals * len(examples)))
    rates = torch.tensor([canvas.frames / r.dialogue.seconds for r in examples])
    positions = form.positions(ids, media, grids, video, rates)
    frames = torch.from_numpy(np.concatenate([d[0] for d in rendered]))
    probe_labels = torch.from_numpy(np.concatenate([d[1] for d in rendered]))
    return Batch(canvas, frames, ids, media, positions, target_ids, kinds, probe_labels)


class Source:
    """An endless stream of training batches.

    Several batches are drawn together and sorted by length, so that little is padded.
    ``canvases`` has each canvas with its share of the batches, and ``tokens`` is about how many
    tokens a batch has. ``max_objects`` returns how many objects a scene may have, by the progress
    of the training from 0 to 1. The task of each sample is drawn evenly from ``tasks``; for None
    `draw_dialogue` draws it. Without ``probes`` batches have no labels for probes.
    """

    def __init__(
        self,
        tokenizer: Any,
        canvases: Sequence[tuple[Canvas, float]],
        tokens: int,
        seed: int,
        max_objects: Callable[[float], int] = lambda progress: 6,
        tasks: Sequence[str | None] = (None,),
        *,
        probes: bool = True,
        form: PromptForm = QWEN25,
    ) -> None:
        self._probes, self._tasks, self._form = probes, tasks, form
        self._tok, self._tokens, self._max_objects = tokenizer, tokens, max_objects
        self._canvases = [p for p, _ in canvases]
        weights = np.array([w for _, w in canvases])
        self._shares = weights / weights.sum()
        self._rng = np.random.default_rng(seed)
        self._queues: dict[Canvas, list[list[Example]]] = {p: [] for p in self._canvases}

    def next(self, progress: float) -> Batch:
        """Returns a batch of about `tokens` tokens.

        `progress`, from 0 to 1, determines how many objects the scenes have at most. It counts only
        when batches are drawn; a batch that was drawn in an earlier call keeps its scenes.
        """
        canvas = self._canvases[int(self._rng.choice(len(self._canvases), p=self._shares))]
        queue = self._queues[canvas]
        if not queue:
            size = max(1, self._tokens // (visual_tokens(canvas) + TEXT_TOKENS))
            most = self._max_objects(progress)
            count = size * 4 if size > 1 else 2
            seeds = self._rng.integers(0, FIRST_EVAL_SEED, count)
            rows = [
                draw_example(
                    self._tok,
                    canvas,
                    int(s),
                    self._tasks[int(s) % len(self._tasks)],
                    most,
                    self._form,
                )
                for s in seeds
            ]
            rows.sort(key=lambda r: len(r.ids))
            queue += [rows[i : i + size] for i in range(0, count, size)]
            self._rng.shuffle(cast(Any, queue))
        return collate(queue.pop(), canvas, probes=self._probes, form=self._form)


def drop_visual_tokens(batch: Batch, kept_tokens: Tensor) -> Batch:
    """Returns the batch without the visual tokens outside `kept_tokens`.

    `kept_tokens` is bool [b, visual tokens], with equally many True in each row. Positions do not
    change, and `frames` and `probes` keep what they have of the dropped tokens.
    """
    remaining = batch.media == 0
    remaining = remaining.masked_scatter(~remaining, kept_tokens)
    index = remaining.nonzero()[:, 1].view(len(remaining), -1)
    return batch._replace(
        ids=batch.ids.gather(1, index),
        media=batch.media.gather(1, index),
        positions=batch.positions.gather(2, index.expand(3, -1, -1)),
        labels=batch.labels.gather(1, index),
        kinds=batch.kinds.gather(1, index),
    )
