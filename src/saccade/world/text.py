"""Conversations about a scene: prompts, questions with their answers, and further turns.

Answers are determined by the pixels (``descriptions``); only prompts and questions are drawn at
random. Pure functions; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from saccade.world.descriptions import (
    WORDS,
    cap,
    change,
    counted,
    describe,
    describe_diff,
    describe_image,
    events,
    final,
    join,
    motion,
    named,
    size_of,
    summary,
    voice_of,
    within,
)
from saccade.world.scenes import COLORS, KINDS, SHAPES, STEPS, Scene, State, seen

TASKS = ("describe", "events", "qa", "chat", "image", "diff")


@dataclass(frozen=True)
class Exchange:
    """One prompt and its answer."""

    question: str
    answer: str


T = TypeVar("T")
Words = dict[str, str]
Drawn = Callable[[Scene, np.random.Generator], Words | None]
"""Draws the words of a question and of its answer; None where the scene does not allow it."""


@dataclass(frozen=True)
class Question:
    """One kind of question: the words that are drawn, and the sentences they fill."""

    words: Drawn
    asked: Sequence[str]
    answer: str

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Exchange | None:
        words = self.words(scene, rng)
        if words is None:
            return None
        question = _pick(rng, self.asked).format(**words)
        return Exchange(question, cap(self.answer.format(**words)))


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


# -- words of one object -----------------------------------------------------------------------


def _about(scene: Scene, index: int, color: str = "") -> Words:
    """``name`` ('red circle') is how a question names it: by its colour when it is first seen."""
    thing = scene.objects[index]
    return {
        "name": named(scene, index, size=False),
        "color": color,
        "shape": thing.shape,
        "size": size_of(scene, thing),
        "does": motion(scene, thing),
        "start": within(thing.start),
        "end": within(thing.end),
    }


def _one_of(scene: Scene, rng: np.random.Generator, states: Sequence[State]) -> Words | None:
    if not states:
        return None
    state = _pick(rng, states)
    return _about(scene, state.index, state.color)


# -- words of several --------------------------------------------------------------------------


def _those(scene: Scene, indices: Iterable[int]) -> str:
    return join([f"the {named(scene, i)}" for i in indices] or ["none of them"])


def _count_colour(scene: Scene, rng: np.random.Generator) -> Words:
    here = [s.color for s in seen(scene, 0.0)]
    color = _pick(rng, here) if rng.random() < 0.75 else _pick(rng, COLORS)
    return {"color": color, "number": counted(here.count(color), voice_of(scene).noun)}


def _movers(scene: Scene, rng: np.random.Generator) -> Words:
    ways = [o.motion for o in scene.objects if o.start != o.end]
    way = _pick(rng, ways) if ways and rng.random() < 0.7 else _pick(rng, list(STEPS))
    who = [i for i, o in enumerate(scene.objects) if o.motion == way]
    return {"way": way, "who": _those(scene, who)}


def _event(scene: Scene, rng: np.random.Generator) -> Words:
    which, at = _pick(rng, (("first", 0), ("last", -1)))
    said = change(scene, scene.events[at]) + "." if scene.events else voice_of(scene).nothing
    return {"which": which, "said": said}


_VERBS = {"recolour": "change colour", "vanish": "vanish", "appear": "appear"}


def _changed(scene: Scene, rng: np.random.Generator) -> Words:
    present = [e.kind for e in scene.events]
    kind = _pick(rng, present) if present and rng.random() < 0.8 else _pick(rng, KINDS)
    who = sorted(e.index for e in scene.events if e.kind == kind)
    verb = "appear later" if kind == "appear" else _VERBS[kind]
    return {"verb": verb, "who": _those(scene, who)}


def _when(scene: Scene, rng: np.random.Generator) -> Words | None:
    if not scene.events:
        return None
    event = _pick(rng, scene.events)
    name, when = named(scene, event.index, size=False), voice_of(scene).when[event.quarter]
    return {"name": name, "verb": _VERBS[event.kind], "when": when}


def _exists(scene: Scene, rng: np.random.Generator) -> Words:
    looks = [(scene.objects[s.index].shape, s.color) for s in seen(scene, 0.0)]
    if rng.random() < 0.5:
        shape, color = _pick(rng, looks)
    else:
        shape, color = _pick(rng, SHAPES), _pick(rng, COLORS)
    yes = (shape, color) in looks
    answer = f"Yes, there is a {color} {shape}." if yes else "No, there is none."
    return {"color": color, "shape": shape, "answer": answer}


def _above(scene: Scene, rng: np.random.Generator) -> Words | None:
    here = [s.index for s in seen(scene, 0.0)]
    order = [here[int(i)] for i in rng.permutation(len(here))[:2]]
    if len(order) < 2:
        return None
    first, second = (scene.objects[i].start for i in order)
    if first[0] != second[0]:
        word, yes = "above", first[0] < second[0]
    else:
        word, yes = "to the left of", first[1] < second[1]
    one, other = (named(scene, i, size=False) for i in order)
    answer = "Yes, it is." if yes else "No, it is not."
    return {"relation": f"the {one} {word} the {other}", "answer": answer}


def _told(scene: Scene, rng: np.random.Generator) -> Words:
    which, index = _pick(rng, (("first", 0), ("last", len(scene.objects) - 1)))
    return {"which": which, "name": named(scene, index)}


def _scene(scene: Scene, rng: np.random.Generator) -> Words:
    """What is true of the whole scene; nothing is drawn."""
    noun = voice_of(scene).noun
    return {
        "number": counted(len(scene.objects), noun),
        "number_at_end": counted(len(final(scene)), noun),
        "texture": scene.texture,
        "colours": join([o.color for o in scene.objects]),
        "shapes": join([o.shape for o in scene.objects]),
        "summary": summary(scene),
        "events": events(scene),
    }


# -- the questions -----------------------------------------------------------------------------

DRAWN: dict[str, Drawn] = {
    "scene": _scene,
    "at start": lambda scene, rng: _one_of(scene, rng, seen(scene, 0.0)),
    "at end": lambda scene, rng: _one_of(scene, rng, final(scene)),
    "any": lambda scene, rng: _about(scene, _pick(rng, range(len(scene.objects)))),
    "count colour": _count_colour,
    "movers": _movers,
    "event": _event,
    "changed": _changed,
    "when": _when,
    "exists": _exists,
    "above": _above,
    "told": _told,
}


def _read(kind: str) -> tuple[Question, ...]:
    return tuple(Question(**{**each, "words": DRAWN[each["words"]]}) for each in WORDS[kind])


QUESTIONS, FOLLOW = _read("questions"), _read("follow")  # a follow-up is about a description


def _questions(scene: Scene, rng: np.random.Generator, number: int) -> list[Exchange]:
    """Up to `number` questions of different kinds."""
    turns: list[Exchange] = []
    for index in rng.permutation(len(QUESTIONS)):
        if len(turns) == number:
            break
        turn = QUESTIONS[int(index)](scene, rng)
        if turn is not None:
            turns.append(turn)
    return turns


def conversation(scene: Scene, task: str, seed: int) -> tuple[Exchange, ...]:
    """The turns of one of TASKS about a scene; `seed` draws the prompts and questions.

    describe, events, image, diff: one turn. qa: 3 to 6 short ones. chat: a description and 1 to
    3 turns that ask about the video or about what was just said. image speaks of
    `image_frame(scene, ...)`; diff of that frame and the one of `edit(scene, seed)`.
    """
    if task not in TASKS:
        raise ValueError(f"no such task: {task!r}")
    key = [2, scene.seed, TASKS.index(task), seed]
    rng = np.random.Generator(np.random.PCG64(key))
    if task == "qa":
        return tuple(_questions(scene, rng, int(rng.integers(3, 7))))
    if task == "chat":
        turn = Exchange(_pick(rng, WORDS["prompts"]["describe"]), describe(scene))
        number = int(rng.integers(1, 4))
        about = rng.permutation(len(FOLLOW))[: int(rng.integers(1, number + 1))]
        more = [found for i in about if (found := FOLLOW[int(i)](scene, rng)) is not None]
        more += _questions(scene, rng, number - len(more))
        return (turn, *(more[int(i)] for i in rng.permutation(len(more))))
    prompt = _pick(rng, WORDS["prompts"][task])
    if task == "diff":
        return (Exchange(prompt, describe_diff(scene, seed)),)
    texts = {"describe": describe, "events": events, "image": describe_image}
    return (Exchange(prompt, texts[task](scene)),)
