"""Reads a user's conversations, in LLaVA's format, as batches to train a draft on.

The file is a JSON list, or has one entry a line (.jsonl). An entry is ``{"id", "image" or "video",
"conversations": [{"from": "human" or "gpt", "value"}, ...]}``. ``<image>`` and ``<video>`` in a
human's text mark where its media stand; without a mark they come first. Every answer of a
conversation is learnt. With the same conversations and settings, a batch depends only on the run's
seed, the number of the training phase and the batch's index, as it does for the drawn scenes of
``samples``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from saccade.core.errors import OptionError
from saccade.core.json_text import read_json
from saccade.core.tree import common_length
from saccade.inputs import Loaded, media, questions
from saccade.world.train_draft.samples import append_answer, collate, draw_kept_mask

log = logging.getLogger(__name__)

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"system": "system"}
MEDIA_MARKS = re.compile(r"(<image>|<video>)")
FRAMES_PER_VIDEO = 32  # As in LLaVA-OneVision.


@dataclass(frozen=True)
class LlavaConversation:
    """A conversation: turns as chat templates take them, and media files.

    Every question has an answer. A turn of the system may stand anywhere.
    """

    id: str  # "" where the entry has none.
    turns: tuple[Mapping[str, Any], ...]
    images: tuple[Path, ...] = ()  # In the order in which the turns mention them.
    videos: tuple[Path, ...] = ()  # The same.


def read_conversations(data: str, folder: str | None = None) -> tuple[LlavaConversation, ...]:
    """Returns every conversation of a file.

    Paths of media are relative to ``folder``, by default the file's own. Raises OptionError for a
    file that cannot be read, and, with the number of the entry, for an entry that is incomplete or
    whose media do not exist.
    """
    path = Path(data)
    root = path.parent if folder is None else Path(folder)
    try:
        rows = read_json(path)
    except OSError as error:
        raise OptionError(f"cannot read {data}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"{data} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise OptionError(f"{data} is no list of conversations, as LLaVA's data are")
    conversations = []
    for number, row in enumerate(rows):
        try:
            conversations.append(_parse_conversation(row, root))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise OptionError(
                f"entry {number} of {data} is not in LLaVA's format: {reason}"
            ) from error
    return tuple(conversations)


def _parse_conversation(row: Mapping[str, Any], root: Path) -> LlavaConversation:
    """Parses one entry. Where it is malformed, raises ValueError, KeyError, TypeError or
    AttributeError."""
    files = {kind: _media_files(row.get(kind), root) for kind in ("image", "video")}
    turns: list[dict[str, Any]] = []
    for message in row["conversations"]:
        if (role := ROLES.get(message["from"])) is None:
            raise ValueError(f"unknown speaker {message['from']!r}; known: {', '.join(ROLES)}")
        text = message["value"]
        if role == "user":
            parts = [_content_part(piece) for piece in MEDIA_MARKS.split(text)]
        else:  # Only a user shows media, so a mark is an ordinary word here.
            parts = [_text_part(text)]
        content = [part for part in parts if part is not None]
        if not content:
            raise ValueError(f"{message['from']} says nothing in it")
        turns.append({"role": role, "content": content})
    roles = [turn["role"] for turn in turns if turn["role"] != "system"]
    expected_roles = [("user", "assistant")[i % 2] for i in range(len(roles))]
    if not roles or roles != expected_roles:
        raise ValueError("a human and gpt do not take turns in it")
    if len(roles) < 2:
        raise ValueError("nothing is answered in it")
    kinds = [part["type"] for turn in turns for part in turn["content"]]
    first = next(turn for turn in turns if turn["role"] == "user")
    for kind, paths in files.items():
        if paths and not kinds.count(kind):
            first["content"] = [{"type": kind} for _ in paths] + first["content"]
        elif len(paths) != kinds.count(kind):
            raise ValueError(f"it has {len(paths)} {kind}s and {kinds.count(kind)} marks for them")
    if roles[-1] == "user":  # The last question has no answer, so it and its media are left out.
        last_question = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
        unanswered = [part["type"] for part in turns[last_question]["content"]]
        turns = turns[:last_question]  # A system turn after the question goes with it.
        files = {
            kind: paths[: len(paths) - unanswered.count(kind)] for kind, paths in files.items()
        }
    return LlavaConversation(str(row.get("id", "")), tuple(turns), files["image"], files["video"])


def _content_part(piece: str) -> dict[str, str] | None:
    if MEDIA_MARKS.fullmatch(piece):
        return {"type": piece.strip("<>")}
    return _text_part(piece)


def _text_part(text: str) -> dict[str, str] | None:
    return {"type": "text", "text": text.strip()} if text.strip() else None


def _media_files(value: Any, root: Path) -> tuple[Path, ...]:
    """Returns the paths of an entry's "image" or "video": one name, a list of names, or nothing."""
    names = [value] if isinstance(value, str) else value or []
    paths = tuple(root / name for name in names)
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}")
    return paths


class Conversations(Dataset[dict[str, Tensor]]):
    """Batches of conversations; every conversation comes once before any comes again.

    A conversation that is too long for the draft loses its last turns. One whose first question
    alone is too long is replaced by the next one that fits, which comes again at its own place.
    There are ``count`` batches of ``batch`` conversations each. Of the visual tokens of each
    conversation a random share, at most ``max_drop``, is hidden from the draft.
    """

    def __init__(
        self,
        loaded: Loaded,
        conversations: Sequence[LlavaConversation],
        seed: tuple[int, int],  # The run's seed, and the number of the training phase.
        *,
        count: int,
        batch: int,
        max_drop: float,
    ) -> None:
        self._loaded, self._conversations, self._seed = loaded, conversations, seed
        self._count, self._batch, self._max_drop = count, batch, max_drop

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng([*self._seed, index])
        positions = range(index * self._batch, (index + 1) * self._batch)
        return collate([self._sample(position, rng) for position in positions])

    def _sample(self, position: int, rng: np.random.Generator) -> dict[str, Tensor]:
        total = len(self._conversations)
        for skipped in range(total):
            epoch, offset = divmod(position + skipped, total)
            order = np.random.default_rng([*self._seed, epoch]).permutation(total)
            conversation = self._conversations[int(order[offset])]
            if (
                sample := training_sample(self._loaded, conversation, rng, self._max_drop)
            ) is not None:
                return sample
            log.warning("conversation %s is too long for the draft: passed over", conversation.id)
        raise OptionError(f"every conversation is too long for {self._loaded.name}")


def training_sample(
    loaded: Loaded, conversation: LlavaConversation, rng: np.random.Generator, max_drop: float
) -> dict[str, Tensor] | None:
    """Returns a conversation as a model reads it, with the tokens of every answer as labels.

    ``max_drop`` is the largest share of visual tokens that may be hidden from the draft. Returns
    None where the first question leaves no room for an answer.
    """
    name, processor, eos = loaded.name, loaded.processor, loaded.tokenizer.eos_token_id
    images = [media.read_image(path) for path in conversation.images]
    clips = [
        media.read(path, media.FrameSampling(num_frames=FRAMES_PER_VIDEO))
        for path in conversation.videos
    ]
    max_length = loaded.backbone.max_positions or 1 << 30  # 2^30 stands for no limit.
    answer_turns = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
    # The sample ends with one answer, and its prompt is everything before that. The last answer is
    # tried first, then the one before it, and so on, until prompt and answer fit. The first answer
    # is cut if it does not fit.
    for last in reversed(answer_turns):
        turns = conversation.turns[:last]
        parts = [part["type"] for turn in turns for part in turn["content"]]
        visible_clips = clips[: parts.count("video")]
        visible_images = images[: parts.count("image")]
        inputs = questions.conversation_inputs(
            name, processor, turns, visible_clips, visible_images
        )
        inputs = questions.cast_pixels(inputs, loaded.backbone.dtype)
        room = max_length - inputs["input_ids"].shape[1]
        answer = conversation.turns[last]["content"][0]["text"]
        answer_ids = [*loaded.tokenizer(answer, add_special_tokens=False).input_ids, eos]
        can_be_cut = last == answer_turns[0] and room > 0
        if len(answer_ids) <= room or can_be_cut:
            break
    else:
        return None
    answer_ids = answer_ids[:room]
    sample = append_answer(inputs, answer_ids, draw_kept_mask(loaded, inputs, rng, max_drop))
    # So far the labels are those of the last answer. Those of the answers in the prompt are added.
    ids = sample["input_ids"][0]
    labels = sample["labels"][0]
    prompt_ids = ids[: -len(answer_ids)]
    for start, stop in _answer_spans(loaded, turns, prompt_ids):
        # The label at a position is the token that comes next.
        labels[start - 1 : stop - 1] = ids[start:stop]
    return sample


def _answer_spans(
    loaded: Loaded, turns: Sequence[Mapping[str, Any]], ids: Tensor
) -> list[tuple[int, int]]:
    """Returns (start, stop) of each answer in a prompt's ids, with the end token (EOS) after it
    where there is one.

    The answers are found first in the template's ids, where each medium is one placeholder, and
    then in ``ids``, where a medium has many. Without the placeholders, both end in the same text
    tokens. So an answer has the same place in both, if text tokens are counted from the end. In
    this example Q is a token that opens a question, P is a placeholder, and the answer is "yes":

        template   Q P is it red ? yes Q why ?       yes is the fourth text token from the end
        ids        Q P P P P is it red ? yes Q why ? so it is the fourth here too
    """
    name, processor = loaded.name, loaded.processor
    template_ids = questions.template_ids(name, processor, turns)
    placeholders = sorted(loaded.backbone.placeholders)
    text_positions = (~torch.isin(ids, torch.tensor(placeholders))).nonzero()[:, 0].tolist()
    template_text_positions = [
        i for i, token in enumerate(template_ids) if token not in placeholders
    ]
    # ``ids`` may have more text tokens than the template. If they stand before the answers, the
    # answers still have the same places counted from the end.
    extra_tokens = len(text_positions) - len(template_text_positions)
    spans = []
    for turn in range(1, len(turns)):
        if turns[turn]["role"] != "assistant":
            continue
        # The conversation is written twice more: up to the place where the answer begins, and up to
        # the place where it ends. Up to that place, each of these two texts has the same ids as the
        # whole conversation. So the place is found as the number of leading ids that agree.
        ids_before_answer = questions.template_ids(name, processor, turns[:turn])
        ids_with_answer = questions.template_ids(
            name, processor, turns[: turn + 1], continues_last_turn=True
        )
        answer_start = common_length(template_ids, ids_before_answer)
        answer_stop = common_length(template_ids, ids_with_answer)
        # The answer's tokens, by their numbers among the text tokens of the template.
        numbers = [
            number
            for number, i in enumerate(template_text_positions)
            if answer_start <= i < answer_stop
        ]
        not_found = f"the answers in a conversation of {name} cannot be told apart"
        if not numbers:  # Some templates write an earlier answer without its reasoning.
            raise OptionError(not_found)
        start = text_positions[extra_tokens + numbers[0]]
        stop = text_positions[extra_tokens + numbers[-1]] + 1
        answer_ids = [template_ids[template_text_positions[number]] for number in numbers]
        if ids[start:stop].tolist() != answer_ids:
            raise OptionError(not_found)
        if int(ids[stop]) == loaded.tokenizer.eos_token_id:
            stop += 1
        spans.append((start, stop))
    return spans
