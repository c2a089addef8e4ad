"""Conversations in LLaVA's format, to train a draft on: a list of ``{"id", "image" or "video",
"conversations": [{"from": "human" or "gpt", "value"}, ...]}`` as JSON, or such an entry a line.

``<image>`` and ``<video>`` in what a human says mark where its media stand; without a mark they
come first. Every answer of a conversation is learnt. Like the world's samples an item follows from
(seed, phase, index) alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from saccade.core.errors import OptionError
from saccade.core.tree import common
from saccade.inputs import Loaded, media, questions
from saccade.world.train_draft.samples import answered, kept, together

log = logging.getLogger(__name__)

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"system": "system"}
MARKS = re.compile(r"(<image>|<video>)")
FRAMES = 32  # of a video, as LLaVA-OneVision takes them


@dataclass(frozen=True)
class Told:
    """A conversation: turns as chat templates take them, an answer last, and its media's files."""

    id: str
    turns: tuple[Mapping[str, Any], ...]
    images: tuple[Path, ...] = ()
    videos: tuple[Path, ...] = ()


def read(data: str, folder: str | None = None) -> tuple[Told, ...]:
    """Every conversation of a file. Raises OptionError, naming the entry, for one that is not whole
    or whose media are not below ``folder`` (the file's own where none is given)."""
    path = Path(data)
    root = path.parent if folder is None else Path(folder)
    try:
        text = path.read_text(encoding="utf-8")
        lines = path.suffix == ".jsonl"
        rows = (
            [json.loads(line) for line in text.splitlines() if line] if lines else json.loads(text)
        )
    except OSError as error:
        raise OptionError(f"cannot read {data}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"{data} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise OptionError(f"{data} is no list of conversations, as LLaVA's data are")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(_told(row, root))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise OptionError(
                f"entry {number} of {data} is not in LLaVA's format: {why}"
            ) from error
    return tuple(found)


def _told(row: Mapping[str, Any], root: Path) -> Told:
    """One entry. Raises ValueError, KeyError or TypeError for what is not as it should be."""
    files = {kind: _files(row.get(kind), root) for kind in ("image", "video")}
    turns: list[dict[str, Any]] = []
    for said in row["conversations"]:
        if (role := ROLES.get(said["from"])) is None:
            raise ValueError(f"nobody is called {said['from']!r}; known: {', '.join(ROLES)}")
        pieces = MARKS.split(said["value"]) if role == "user" else [said["value"]]
        content = [part for piece in pieces if (part := _part(piece)) is not None]
        if not content:
            raise ValueError(f"{said['from']} says nothing in it")
        turns.append({"role": role, "content": content})
    roles = [turn["role"] for turn in turns if turn["role"] != "system"]
    if not roles or roles[::2] != ["user"] * len(roles[::2]) or "user" in roles[1::2]:
        raise ValueError("a human and gpt do not take turns in it")
    if roles[-1] == "user":  # asked and not answered
        del turns[-1]
    if len(roles) < 2:
        raise ValueError("nothing is answered in it")
    parts = [part["type"] for turn in turns for part in turn["content"]]
    first = next(turn for turn in turns if turn["role"] == "user")
    for kind, paths in files.items():
        if paths and not parts.count(kind):
            first["content"] = [{"type": kind} for _ in paths] + first["content"]
        elif len(paths) != parts.count(kind):
            raise ValueError(f"it has {len(paths)} {kind}s and {parts.count(kind)} marks for them")
    return Told(str(row.get("id", "")), tuple(turns), files["image"], files["video"])


def _part(piece: str) -> dict[str, str] | None:
    if MARKS.fullmatch(piece):
        return {"type": piece.strip("<>")}
    return {"type": "text", "text": piece.strip()} if piece.strip() else None


def _files(named: Any, root: Path) -> tuple[Path, ...]:
    names = [named] if isinstance(named, str) else named or []
    for path in (found := tuple(root / name for name in names)):
        if not path.exists():
            raise ValueError(f"there is no {path}")
    return found


class Conversations(Dataset[dict[str, Tensor]]):
    """Batches of conversations, every one once before any comes again; one too long for the draft
    loses its last turns, and one whose first question is too long is passed over."""

    def __init__(
        self,
        loaded: Loaded,
        told: Sequence[Told],
        seed: tuple[int, int],
        *,
        count: int,
        batch: int,
        drop: float,
    ) -> None:
        self._loaded, self._told, self._seed = loaded, told, seed
        self._count, self._batch, self._drop = count, batch, drop

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng([*self._seed, index])
        places = range(index * self._batch, (index + 1) * self._batch)
        return together([self._sample(place, rng) for place in places])

    def _sample(self, place: int, rng: np.random.Generator) -> dict[str, Tensor]:
        whole = len(self._told)
        for ahead in range(whole):
            again, at = divmod(place + ahead, whole)
            order = np.random.default_rng([*self._seed, again]).permutation(whole)
            told = self._told[int(order[at])]
            if (found := learnt(self._loaded, told, rng, self._drop)) is not None:
                return found
            log.warning("conversation %s is too long for the draft: passed over", told.id)
        raise OptionError(f"every conversation is too long for {self._loaded.name}")


def learnt(
    loaded: Loaded, told: Told, rng: np.random.Generator, drop: float
) -> dict[str, Tensor] | None:
    """A conversation as a model reads it, with the label of every answer's tokens; None where its
    first question leaves no room for an answer."""
    name, processor, eos = loaded.name, loaded.processor, loaded.tokenizer.eos_token_id
    images = [media.read_image(path) for path in told.images]
    clips = [media.read(path, media.FrameSampling(num_frames=FRAMES)) for path in told.videos]
    most = loaded.backbone.context or 1 << 30
    answers = [at for at, turn in enumerate(told.turns) if turn["role"] == "assistant"]
    for last in reversed(answers):
        turns = told.turns[:last]
        parts = [part["type"] for turn in turns for part in turn["content"]]
        seen = clips[: parts.count("video")], images[: parts.count("image")]
        inputs = questions.conversation_inputs(name, processor, turns, *seen)
        room = most - inputs["input_ids"].shape[1]
        answer = told.turns[last]["content"][0]["text"]
        said = [*loaded.tokenizer(answer, add_special_tokens=False).input_ids, eos]
        if len(said) <= room or (last == answers[0] and room > 0):
            break
    else:
        return None
    found = answered(inputs, said[:room], kept(loaded, inputs, rng, drop))
    ids, labels = found["input_ids"][0], found["labels"][0]
    for start, stop in _spans(loaded, turns, ids[: -len(said[:room])]):
        labels[start - 1 : stop - 1] = ids[start:stop]
    return found


def _spans(
    loaded: Loaded, turns: Sequence[Mapping[str, Any]], ids: Tensor
) -> list[tuple[int, int]]:
    """Where the earlier answers stand in a prompt's ids, the token that ends each included.

    Found in the template without its media, whose rows would only be counted: what is no medium's
    is the same in both.
    """
    name, processor = loaded.name, loaded.processor
    bare = questions.template_ids(name, processor, turns)
    pads = sorted(loaded.backbone.placeholders)
    place = (~torch.isin(ids, torch.tensor(pads))).nonzero()[:, 0].tolist()
    words = [at for at, token in enumerate(bare) if token not in pads]
    found = []
    for before, turn in pairwise(range(len(turns))):
        if turns[turn]["role"] != "assistant":
            continue
        asked = questions.template_ids(name, processor, turns[: before + 1])
        told = questions.template_ids(name, processor, turns[: turn + 1], continues_last_turn=True)
        span = [at for at in words if common(bare, asked) <= at < common(bare, told)]
        start, stop = (
            place[len(place) - len(words) + words.index(at)] for at in (span[0], span[-1])
        )
        stop += 1
        if ids[start:stop].tolist() != [bare[at] for at in span]:
            raise OptionError(f"the answers in a conversation of {name} cannot be told apart")
        stop += int(ids[stop]) == loaded.tokenizer.eos_token_id
        found.append((start, stop))
    return found
