"""Conversations about a scene: prompts, questions with their answers, and further turns.

The embedded pair of models is trained and tested on them. The sentences, with gaps in braces, are
in ``words.yaml`` (``WORDS``), and this module fills the gaps. Answers are determined by the pixels
(``descriptions``); only prompts and questions are drawn at random. Each scene has a *voice*
(``voice_of``), the wording in which it is described: what an object is called, how a time is
named, and so on. These are pure functions and know no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from saccade.world.descriptions import (
    WORDS,
    capitalize,
    count_phrase,
    describe,
    describe_diff,
    describe_image,
    event_clause,
    events,
    final_states,
    join_words,
    motion_phrase,
    object_name,
    place_phrase,
    size_word,
    summary,
    voice_of,
)
from saccade.world.scenes import COLORS, KINDS, SHAPES, STEPS, Scene, State, visible_states

TASKS = ("describe", "events", "qa", "chat", "image", "diff")


@dataclass(frozen=True)
class Exchange:
    """One prompt and its answer."""

    question: str
    answer: str


T = TypeVar("T")
Words = dict[str, str]
"""What fills the gaps of a question and of its answer, by the name of the gap: {"color": "red"} for
"It is {color}."."""
DrawWords = Callable[[Scene, np.random.Generator], Words | None]
"""Draws the words of a question and its answer; None where the scene does not allow it."""


@dataclass(frozen=True)
class Question:
    """One kind of question: a function that draws its words, and the sentences they fill."""

    draw_words: DrawWords
    prompts: Sequence[str]  # Ways to put the question, of which one is drawn.
    answer: str

    def __call__(self, scene: Scene, rng: np.random.Generator) -> Exchange | None:
        """Draws a question about the scene; None where the scene does not allow it."""
        words = self.draw_words(scene, rng)
        if words is None:
            return None
        question = _pick(rng, self.prompts).format(**words)
        return Exchange(question, capitalize(self.answer.format(**words)))


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


# -- words of one object -----------------------------------------------------------------------


def _object_words(scene: Scene, index: int, color: str = "") -> Words:
    """Returns the words of one object.

    An object's colour may change. ``color`` is the one at the time that a question is about, and is
    left out for a question that is about no time. ``name`` ('red circle') always has the colour at
    the start.
    """
    thing = scene.objects[index]
    return {
        "name": object_name(scene, index, size=False),
        "color": color,
        "shape": thing.shape,
        "size": size_word(scene, thing),
        "does": motion_phrase(scene, thing),
        "start": place_phrase(thing.start),
        "end": place_phrase(thing.end),
    }


def _words_of_one(scene: Scene, rng: np.random.Generator, states: Sequence[State]) -> Words | None:
    """Draws one of these objects and returns its words; None where there are no objects."""
    if not states:
        return None
    state = _pick(rng, states)
    return _object_words(scene, state.index, state.color)


# -- words of several objects ------------------------------------------------------------------


def _object_list(scene: Scene, indices: Iterable[int]) -> str:
    return join_words([f"the {object_name(scene, i)}" for i in indices] or ["none of them"])


def _count_colour(scene: Scene, rng: np.random.Generator) -> Words:
    """Draws a colour, mostly one that is visible at the start, and counts the objects that have it
    at the start."""
    colors = [s.color for s in visible_states(scene, 0.0)]
    color = _pick(rng, colors) if rng.random() < 0.75 else _pick(rng, COLORS)
    return {"color": color, "number": count_phrase(colors.count(color), voice_of(scene).noun)}


def _moving_objects(scene: Scene, rng: np.random.Generator) -> Words:
    """Draws a direction, mostly one in which an object travels, and names all that travel in it."""
    motions = [o.motion for o in scene.objects if o.start != o.end]
    motion = _pick(rng, motions) if motions and rng.random() < 0.7 else _pick(rng, list(STEPS))
    movers = [i for i, o in enumerate(scene.objects) if o.motion == motion]
    return {"way": motion, "who": _object_list(scene, movers)}


def _first_or_last_event(scene: Scene, rng: np.random.Generator) -> Words:
    """Draws "first" or "last", and tells that event of the scene, or that nothing happens."""
    which, index = _pick(rng, (("first", 0), ("last", -1)))
    clause = (
        event_clause(scene, scene.events[index]) + "." if scene.events else voice_of(scene).nothing
    )
    return {"which": which, "clause": clause}


_EVENT_VERBS = {"recolour": "change colour", "vanish": "vanish", "appear": "appear"}


def _changed_objects(scene: Scene, rng: np.random.Generator) -> Words:
    """Draws a kind of event, mostly one of the scene's, and names the objects it happens to."""
    present = [e.kind for e in scene.events]
    kind = _pick(rng, present) if present and rng.random() < 0.8 else _pick(rng, KINDS)
    changed = sorted(e.index for e in scene.events if e.kind == kind)
    verb = "appear later" if kind == "appear" else _EVENT_VERBS[kind]
    return {"verb": verb, "who": _object_list(scene, changed)}


def _event_time(scene: Scene, rng: np.random.Generator) -> Words | None:
    """Draws an event, and tells when it happens; None where there are no events."""
    if not scene.events:
        return None
    event = _pick(rng, scene.events)
    return {
        "name": object_name(scene, event.index, size=False),
        "verb": _EVENT_VERBS[event.kind],
        "when": voice_of(scene).when[event.time_index],
    }


def _existence(scene: Scene, rng: np.random.Generator) -> Words:
    """Draws a shape and a colour, and answers whether such an object is visible at the start."""
    looks = [(scene.objects[s.index].shape, s.color) for s in visible_states(scene, 0.0)]
    if rng.random() < 0.5:
        shape, color = _pick(rng, looks)
    else:
        shape = _pick(rng, SHAPES)
        color = _pick(rng, COLORS)
    exists = (shape, color) in looks
    answer = f"Yes, there is a {color} {shape}." if exists else "No, there is none."
    return {"color": color, "shape": shape, "answer": answer}


def _relation(scene: Scene, rng: np.random.Generator) -> Words | None:
    """Draws two objects that are visible at the start, and answers whether the first starts above
    the second; None where fewer are visible. Of two objects in one row, the question is whether the
    first starts to the left of the second."""
    visible = [s.index for s in visible_states(scene, 0.0)]
    order = [visible[int(i)] for i in rng.permutation(len(visible))[:2]]
    if len(order) < 2:
        return None
    first, second = (scene.objects[i].start for i in order)
    if first[0] != second[0]:
        relation = "above"
        is_true = first[0] < second[0]
    else:
        relation = "to the left of"
        is_true = first[1] < second[1]
    subject, reference = (object_name(scene, i, size=False) for i in order)
    answer = "Yes, it is." if is_true else "No, it is not."
    return {"relation": f"the {subject} {relation} the {reference}", "answer": answer}


def _described_object(scene: Scene, rng: np.random.Generator) -> Words:
    """Draws "first" or "last", and names that object in the order of the description."""
    which, index = _pick(rng, (("first", 0), ("last", len(scene.objects) - 1)))
    return {"which": which, "name": object_name(scene, index)}


def _scene_words(scene: Scene, rng: np.random.Generator) -> Words:
    """Returns what is true of the whole scene; nothing is drawn at random."""
    noun = voice_of(scene).noun
    return {
        "number": count_phrase(len(scene.objects), noun),
        "number_at_end": count_phrase(len(final_states(scene)), noun),
        "texture": scene.texture,
        "colours": join_words([o.color for o in scene.objects]),
        "shapes": join_words([o.shape for o in scene.objects]),
        "summary": summary(scene),
        "events": events(scene),
    }


# -- the questions -----------------------------------------------------------------------------

WORD_DRAWERS: dict[str, DrawWords] = {
    "scene": _scene_words,
    "at start": lambda scene, rng: _words_of_one(scene, rng, visible_states(scene, 0.0)),
    "at end": lambda scene, rng: _words_of_one(scene, rng, final_states(scene)),
    "any": lambda scene, rng: _object_words(scene, _pick(rng, range(len(scene.objects)))),
    "count colour": _count_colour,
    "movers": _moving_objects,
    "event": _first_or_last_event,
    "changed": _changed_objects,
    "when": _event_time,
    "exists": _existence,
    "above": _relation,
    "described": _described_object,
}
"""The functions that draw words, by their names in ``words.yaml``."""


def _load_questions(kind: str) -> tuple[Question, ...]:
    return tuple(
        Question(WORD_DRAWERS[each["words"]], each["prompts"], each["answer"])
        for each in WORDS[kind]
    )


QUESTIONS = _load_questions("questions")
FOLLOW_UPS = _load_questions("follow")  # Questions about a description that was just given.


def _questions(scene: Scene, rng: np.random.Generator, number: int) -> list[Exchange]:
    """Returns up to `number` questions of different kinds with their answers."""
    turns: list[Exchange] = []
    for index in rng.permutation(len(QUESTIONS)):
        if len(turns) == number:
            break
        turn = QUESTIONS[int(index)](scene, rng)
        if turn is not None:
            turns.append(turn)
    return turns


def conversation(scene: Scene, task: str, seed: int) -> tuple[Exchange, ...]:
    """Returns the turns of one of TASKS about a scene; `seed` draws the prompts and questions.

    The tasks "describe" and "events" have one turn about the clip. "image" has one turn about the
    picture of the scene (`drawing.image_frame`). "diff" has one turn about two pictures: that of
    the scene, and that of the changed scene `scenes.edit(scene, seed)`. "qa" has 3 to 6 short
    questions about the clip. "chat" has a description of the clip, then 1 to 3 turns about the clip
    or about that description.
    """
    if task not in TASKS:
        raise ValueError(f"no such task: {task!r}")
    # The generators in ``scenes`` have keys that begin with 0 or 1. With a 2 in the first place,
    # this one draws other numbers than those.
    key = [2, scene.seed, TASKS.index(task), seed]
    rng = np.random.Generator(np.random.PCG64(key))
    if task == "qa":
        return tuple(_questions(scene, rng, int(rng.integers(3, 7))))
    if task == "chat":
        turn = Exchange(_pick(rng, WORDS["prompts"]["describe"]), describe(scene))
        # One or more follow-ups, which are about the description, are drawn first. Some of them may
        # not fit the scene. Questions about the clip make up the number of further turns.
        further_count = int(rng.integers(1, 4))
        order = rng.permutation(len(FOLLOW_UPS))
        follow_ups = order[: int(rng.integers(1, further_count + 1))]
        drawn = [FOLLOW_UPS[int(i)](scene, rng) for i in follow_ups]
        further_turns = [exchange for exchange in drawn if exchange is not None]
        further_turns += _questions(scene, rng, further_count - len(further_turns))
        return (turn, *(further_turns[int(i)] for i in rng.permutation(len(further_turns))))
    prompt = _pick(rng, WORDS["prompts"][task])
    if task == "diff":
        return (Exchange(prompt, describe_diff(scene, seed)),)
    texts = {"describe": describe, "events": events, "image": describe_image}
    return (Exchange(prompt, texts[task](scene)),)
