"""What is said about a scene: descriptions, lists of events, questions with their answers.

Answers are determined by the pixels: the wording (one of four voices) belongs to the background
texture, and objects come in reading order of their start cells, so that little is left to guess
once the video is seen. Only prompts are drawn at random. Pure functions; knows `world`, no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from saccade.world.scenes import (
    COLORS,
    KINDS,
    SHAPES,
    TEXTURES,
    Cell,
    Event,
    Object,
    Scene,
    State,
    changes,
    place,
    seen,
)

TASKS = ("describe", "events", "qa", "chat", "image", "diff")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True)
class Turn:
    """One prompt and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Voice:
    """The wording of one texture: its nouns, sizes, verbs and words for the quarters."""

    noun: str
    small: str
    large: str
    move: str
    turn: str
    vanish: str
    appear: str
    when: tuple[str, str, str]


VOICES = (
    Voice(
        *("shape", "small", "large", "moves", "turns", "vanishes", "appears"),
        ("after a quarter of the time", "halfway through", "after three quarters of the time"),
    ),
    Voice(
        *("object", "little", "big", "slides", "becomes", "disappears", "shows up"),
        ("early on", "midway", "late"),
    ),
    Voice(
        *("figure", "small", "large", "travels", "changes to", "is gone", "arrives"),
        ("in the first half", "at half time", "in the second half"),
    ),
    Voice(
        *("thing", "little", "big", "drifts", "turns", "leaves", "pops up"),
        ("soon", "in the middle of the clip", "near the end"),
    ),
)


def _voice(scene: Scene) -> Voice:
    return VOICES[scene.voice]


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _join(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{NUMBERS[number]} {noun}{'' if number == 1 else 's'}"


def _of_them(number: int) -> str:
    """A number that stands alone: 'none', 'one', 'two'."""
    return NUMBERS[number] if number else "none"


def _size(voice: Voice, thing: Object) -> str:
    return voice.large if thing.size == "large" else voice.small


def _name(scene: Scene, index: int, color: str | None = None, *, size: bool = True) -> str:
    """'large red circle', in the scene's voice; with its start colour unless told."""
    thing = scene.objects[index]
    words = [color or thing.color, thing.shape]
    return " ".join([_size(_voice(scene), thing), *words] if size else words)


def _in(cell: Cell) -> str:
    return f"in the {place(cell)}"


def _event_of(scene: Scene, index: int) -> Event | None:
    return next((e for e in scene.events if e.index == index), None)


def _appears(scene: Scene, index: int) -> bool:
    event = _event_of(scene, index)
    return event is not None and event.kind == "appear"


def _final(scene: Scene) -> list[State]:
    """What is visible at the end, in reading order of where it is then."""
    return sorted(seen(scene, 1.0), key=lambda s: (scene.objects[s.index].end, s.index))


def _opening(scene: Scene) -> str:
    voice, number = _voice(scene), len(scene.objects)
    things, are = _count(number, voice.noun), "is" if number == 1 else "are"
    texture = scene.texture
    first = (
        f"The video shows {things} on a {texture} background.",
        f"On a {texture} background there {are} {things}.",
        f"This clip has a {texture} background and {things}.",
        f"{_cap(things)} can be seen here, and the background is {texture}.",
    )[scene.voice]
    later = sum(_appears(scene, i) for i in range(number))
    if not later:
        return first
    there = number - later
    return (
        first
        + " "
        + (
            f"{_cap(NUMBERS[there])} of them {'is' if there == 1 else 'are'} visible at the start.",
            f"At the start, only {NUMBERS[there]} of them can be seen.",
            f"It begins with {NUMBERS[there]} of them.",
            f"At first there {'is' if there == 1 else 'are'} only {NUMBERS[there]}.",
        )[scene.voice]
    )


def _motion(scene: Scene, thing: Object) -> str:
    """What a thing does, as a predicate: 'moves right to the top right', 'stays still'."""
    move = _voice(scene).move
    if thing.motion == "still":
        return ("stays still", "does not move", "rests", "remains still")[scene.voice]
    if thing.motion == "loop":
        return f"{move} in a loop"
    return f"{move} {thing.motion} to the {place(thing.end)}"


def _sentence(scene: Scene, index: int) -> str:
    """The sentence of a description about one object."""
    thing, name = scene.objects[index], _name(scene, index)
    where, does = _in(thing.start), _motion(scene, thing)
    if _appears(scene, index):
        return (
            f"A {name} comes later {where}, and it {does}.",
            f"{_cap(where)}, there will be a {name} that {does}.",
            f"The {place(thing.start)} is empty at first but gets a {name}, which {does}.",
            f"There is a {name} {where} only later: it {does}.",
        )[scene.voice]
    return (
        f"A {name} starts {where}, and it {does}.",
        f"{_cap(where)}, there is a {name} that {does}.",
        f"The {place(thing.start)} has a {name}, which {does}.",
        f"There is a {name} {where} from the start: it {does}.",
    )[scene.voice]


def _change(scene: Scene, event: Event) -> str:
    """An event as a clause without its time: 'the large red circle turns green'."""
    voice, thing = _voice(scene), scene.objects[event.index]
    where = f" {_in(thing.start)}" if thing.start == thing.end else ""
    name = _name(scene, event.index)
    if event.kind == "recolour":
        return f"the {name}{where} {voice.turn} {event.color}"
    if event.kind == "vanish":
        return f"the {name}{where} {voice.vanish}"
    return f"a {name} {voice.appear}{where}"


def _timed(scene: Scene, event: Event) -> str:
    return _cap(f"{_voice(scene).when[event.quarter]}, {_change(scene, event)}.")


def _nothing(scene: Scene) -> str:
    return (
        "Nothing appears, vanishes or turns to another colour.",
        "All of the colours stay the same, and nothing disappears.",
        "Nothing else changes.",
        "All things keep their colour and nothing leaves.",
    )[scene.voice]


def _recap(scene: Scene) -> str:
    """What is visible at the end, then how many moved, then one relation."""
    final, voice = _final(scene), _voice(scene)
    start = ("At the end", "In the end", "The last picture has", "When it ends")[scene.voice]
    link = (", we see ", " there is ", " ", ", what can be seen is ")[scene.voice]
    if not final:
        said = [f"{start}{link}nothing."]
    else:
        names = [
            f"a {_name(scene, s.index, s.color, size=False)} {_in(scene.objects[s.index].end)}"
            for s in final
        ]
        said = [f"{start}{link}{_join(names)}."]
    moving = sum(o.start != o.end for o in scene.objects)
    staying = len(scene.objects) - moving
    if len(scene.objects) == 1:
        thing = f"The only {voice.noun}"
        said.append(f"{thing} goes to another place." if moving else f"{thing} keeps its place.")
    else:
        said.append(
            f"In all, {_count(moving, voice.noun)} {'goes' if moving == 1 else 'go'} to another "
            f"place and {_of_them(staying)} {'keeps its' if staying == 1 else 'keep their'} place."
        )
    if len(final) > 1:
        first, last = final[0], final[-1]
        a, b = scene.objects[first.index].end, scene.objects[last.index].end
        relation = "above" if a[0] < b[0] else "to the left of"
        said.append(
            f"The {_name(scene, first.index, first.color)} is {relation} "
            f"the {_name(scene, last.index, last.color)}."
        )
    return " ".join(said)


def describe(scene: Scene) -> str:
    """The long description of a video: opening, objects, events in time order, recap."""
    said = [_opening(scene), *(_sentence(scene, i) for i in range(len(scene.objects)))]
    here = [scene.objects[state.index].start for state in seen(scene, 0.0)]
    rows = _empty_rows(here)
    said.append(f"At the start, {rows[0].lower()}{rows[1:]}")
    said += [_timed(scene, e) for e in scene.events] or [_nothing(scene)]
    return " ".join([*said, _recap(scene)])


def _empty_rows(cells: Sequence[Cell]) -> str:
    rows = ("top", "middle", "bottom")
    free = [name for r, name in enumerate(rows) if all(cell[0] != r for cell in cells)]
    if not free:
        return "No row is empty."
    return f"The {_join(free)} {'rows are' if len(free) > 1 else 'row is'} empty."


def summary(scene: Scene) -> str:
    """One short sentence about a video, in the words of a small captioner."""
    names = [f"a {o.color} {o.shape}" for o in scene.objects]
    return f"{_cap(_join(names))} on a {scene.texture} background."


def events(scene: Scene) -> str:
    """The list of changes with their times, then who travels where."""
    said = [_timed(scene, e) for e in scene.events] or [_nothing(scene)]
    moves = [
        f"the {_name(scene, i)} {_motion(scene, o)}"
        for i, o in enumerate(scene.objects)
        if o.start != o.end
    ]
    noun = _voice(scene).noun
    said.append(_cap(_join(moves)) + "." if moves else f"No {noun} goes to another place.")
    return " ".join(said)


def describe_image(scene: Scene) -> str:
    """The long description of the picture at time 0.5."""
    voice = _voice(scene)
    states = sorted(seen(scene, 0.5), key=lambda s: (s.cell, s.index))
    number, texture = len(states), scene.texture
    things, are = _count(number, voice.noun), "is" if number == 1 else "are"
    said = [
        (
            f"The image shows {things} on a {texture} background.",
            f"On a {texture} background there {are} {things}.",
            f"This picture has a {texture} background and {things}.",
            f"{_cap(things)} can be seen here, and the background is {texture}.",
        )[scene.voice]
    ]
    for s in states:
        name = _name(scene, s.index, s.color)
        said.append(
            (
                f"A {name} is {_in(s.cell)}.",
                f"{_cap(_in(s.cell))}, there is a {name}.",
                f"The {place(s.cell)} has a {name}.",
                f"There is a {name} {_in(s.cell)}.",
            )[scene.voice]
        )
    if states:
        large = sum(scene.objects[s.index].size == "large" for s in states)
        said.append(
            f"In all, {_of_them(large)} {'is' if large == 1 else 'are'} {voice.large} and "
            f"{_of_them(number - large)} {'is' if number - large == 1 else 'are'} {voice.small}."
        )
        said.append(_empty_rows([s.cell for s in states]))
    if len(states) > 1:
        first, last = states[0], states[-1]
        relation = "above" if first.cell[0] < last.cell[0] else "to the left of"
        said.append(
            f"The {_name(scene, first.index, first.color)} is {relation} "
            f"the {_name(scene, last.index, last.color)}."
        )
    return " ".join(said)


def describe_diff(scene: Scene, seed: int) -> str:
    """The differences between the pictures of `scene` and of `edit(scene, seed)`."""
    found = changes(scene, seed)[1]
    said = ["There is one difference." if len(found) == 1 else "There are two differences."]
    for change in found:
        size, color, shape, where = change.look
        the = f"he {size} {color} {shape} in the {where}"
        said.append(
            {
                "color": f"T{the} is {change.word} in the second image.",
                "size": f"T{the} is {change.word} in the second image.",
                "shape": f"T{the} is a {change.word} in the second image.",
                "place": f"T{the} is in the {change.word} in the second image.",
                "gone": f"T{the} is missing in the second image.",
                "new": f"The second image has a new {size} {color} {shape} in the {where}.",
            }[change.kind]
        )
    before, after = (len(seen(s, 0.5)) for s in (scene, changes(scene, seed)[0]))
    if before == after:
        said.append(f"Both images have {_count(after, 'shape')}.")
    else:
        said.append(
            f"The first image has {_count(before, 'shape')} and the second has {_of_them(after)}."
        )
    return " ".join(said)


PROMPTS: dict[str, tuple[str, ...]] = {
    "describe": (
        "Describe the video in detail.",
        "Please describe this video in detail.",
        "What happens in this video? Tell me everything.",
        "Give a detailed description of the clip.",
        "Tell me all that can be seen in this video, from the start to the end.",
    ),
    "events": (
        "List the events in order, and say what moves.",
        "Which events happen in the video, and when?",
        "Give a list of all changes in the clip.",
        "What changes during the video? List the events.",
    ),
    "image": (
        "Describe the image in detail.",
        "What can be seen in this image? Tell me everything.",
        "Give a detailed description of the picture.",
        "Please describe this picture in detail.",
    ),
    "diff": (
        "What is different between the two images?",
        "Spot the differences between the two images.",
        "Compare the two images. What has changed?",
        "List the differences between the first and the second image.",
    ),
}

T = TypeVar("T")

# A maker of one question: (scene, rng) -> turn, or None where the scene does not allow it.
Maker = Callable[[Scene, np.random.Generator], Turn | None]


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def _names_or_none(scene: Scene, indices: Sequence[int]) -> str:
    if not indices:
        return "None of them."
    return _cap(_join([f"the {_name(scene, i)}" for i in indices])) + "."


def _some(scene: Scene, rng: np.random.Generator) -> int:
    return int(rng.integers(len(scene.objects)))


def _plain(scene: Scene, index: int) -> str:
    """'red circle': how a question names an object, by its colour when it is first seen."""
    return _name(scene, index, size=False)


def _ask_colour_at(scene: Scene, rng: np.random.Generator) -> Turn | None:
    here = [s for s in seen(scene, 0.0)]
    state = _pick(rng, here)
    where = _in(scene.objects[state.index].start)
    question = _pick(
        rng,
        (
            f"What colour is the shape {where} at the start?",
            f"At the start, which colour is {where}?",
            f"Name the colour of the shape that starts {where}.",
        ),
    )
    return Turn(question, f"It is {state.color}.")


def _ask_shape_at(scene: Scene, rng: np.random.Generator) -> Turn | None:
    thing = scene.objects[_pick(rng, seen(scene, 0.0)).index]
    where = _in(thing.start)
    question = _pick(
        rng, (f"Which shape is {where} at the start?", f"What is {where} at the start?")
    )
    return Turn(question, f"A {thing.color} {thing.shape}.")


def _ask_shape_end(scene: Scene, rng: np.random.Generator) -> Turn | None:
    final = _final(scene)
    if not final:
        return None
    state = _pick(rng, final)
    thing = scene.objects[state.index]
    where = _in(thing.end)
    question = _pick(rng, (f"Which shape is {where} at the end?", f"What is {where} at the end?"))
    return Turn(question, f"A {state.color} {thing.shape}.")


def _ask_colour_end(scene: Scene, rng: np.random.Generator) -> Turn | None:
    final = _final(scene)
    if not final:
        return None
    index, color = _pick(rng, [(s.index, s.color) for s in final])
    name = _plain(scene, index)
    question = _pick(
        rng,
        (f"What colour is the {name} at the end?", f"Which colour does the {name} end with?"),
    )
    return Turn(question, f"It is {color}.")


def _ask_size(scene: Scene, rng: np.random.Generator) -> Turn | None:
    index = _some(scene, rng)
    name, voice = _plain(scene, index), _voice(scene)
    question = _pick(rng, (f"What size is the {name}?", f"How large is the {name}?"))
    return Turn(question, f"It is {_size(voice, scene.objects[index])}.")


def _ask_count(scene: Scene, rng: np.random.Generator) -> Turn | None:
    question = _pick(
        rng, ("How many shapes are there in all?", "Count all of the shapes in the video.")
    )
    number = len(scene.objects)
    return Turn(question, f"{_cap(_count(number, _voice(scene).noun))}.")


def _ask_count_colour(scene: Scene, rng: np.random.Generator) -> Turn | None:
    here = [s.color for s in seen(scene, 0.0)]
    color = _pick(rng, here) if rng.random() < 0.75 else _pick(rng, COLORS)
    question = _pick(
        rng,
        (
            f"How many {color} shapes are there at the start?",
            f"Count the {color} shapes at the start.",
        ),
    )
    return Turn(question, f"{_cap(_count(here.count(color), _voice(scene).noun))}.")


def _ask_count_end(scene: Scene, rng: np.random.Generator) -> Turn | None:
    question = _pick(
        rng, ("How many shapes are visible at the end?", "Count the shapes at the end.")
    )
    return Turn(question, f"{_cap(_count(len(_final(scene)), _voice(scene).noun))}.")


def _ask_start(scene: Scene, rng: np.random.Generator) -> Turn | None:
    state = _pick(rng, seen(scene, 0.0))
    name = _plain(scene, state.index)
    question = _pick(rng, (f"Where is the {name} at the start?", f"Where does the {name} start?"))
    return Turn(question, f"{_cap(_in(scene.objects[state.index].start))}.")


def _ask_end(scene: Scene, rng: np.random.Generator) -> Turn | None:
    final = _final(scene)
    if not final:
        return None
    index = _pick(rng, final).index
    name = _plain(scene, index)
    question = _pick(rng, (f"Where is the {name} at the end?", f"Where does the {name} end?"))
    return Turn(question, f"{_cap(_in(scene.objects[index].end))}.")


def _ask_motion(scene: Scene, rng: np.random.Generator) -> Turn | None:
    index = _some(scene, rng)
    name = _plain(scene, index)
    question = _pick(rng, (f"How does the {name} move?", f"What is the motion of the {name}?"))
    return Turn(question, f"It {_motion(scene, scene.objects[index])}.")


def _ask_mover(scene: Scene, rng: np.random.Generator) -> Turn | None:
    ways = [o.motion for o in scene.objects if o.start != o.end]
    way = _pick(rng, ways) if ways and rng.random() < 0.7 else _pick(rng, _DIRECTIONS)
    who = [i for i, o in enumerate(scene.objects) if o.motion == way]
    question = _pick(rng, (f"Which shapes move {way}?", f"Name all shapes that move {way}."))
    return Turn(question, _names_or_none(scene, who))


_DIRECTIONS = ("left", "right", "up", "down")


def _ask_first(scene: Scene, rng: np.random.Generator) -> Turn | None:
    which, at = _pick(rng, (("first", 0), ("last", -1)))
    question = _pick(rng, (f"What is the {which} event?", f"Which event comes {which}?"))
    answer = _cap(_change(scene, scene.events[at])) + "." if scene.events else _nothing(scene)
    return Turn(question, answer)


def _ask_who(scene: Scene, rng: np.random.Generator) -> Turn | None:
    present = [e.kind for e in scene.events]
    kind = _pick(rng, present) if present and rng.random() < 0.8 else _pick(rng, KINDS)
    who = sorted(e.index for e in scene.events if e.kind == kind)
    verb = {"recolour": "change colour", "vanish": "vanish", "appear": "appear later"}[kind]
    question = _pick(rng, (f"Which shapes {verb}?", f"Name all shapes that {verb}."))
    return Turn(question, _names_or_none(scene, who))


def _ask_when(scene: Scene, rng: np.random.Generator) -> Turn | None:
    if not scene.events:
        return None
    event = _pick(rng, scene.events)
    name = _plain(scene, event.index)
    verb = {"recolour": "change colour", "vanish": "vanish", "appear": "appear"}[event.kind]
    question = _pick(rng, (f"When does the {name} {verb}?", f"Say when the {name} will {verb}."))
    return Turn(question, f"{_cap(_voice(scene).when[event.quarter])}.")


def _ask_exists(scene: Scene, rng: np.random.Generator) -> Turn | None:
    looks = [(scene.objects[s.index].shape, s.color) for s in seen(scene, 0.0)]
    if rng.random() < 0.5:
        shape, color = _pick(rng, looks)
    else:
        shape, color = _pick(rng, SHAPES), _pick(rng, COLORS)
    question = _pick(
        rng,
        (
            f"Is there a {color} {shape} at the start?",
            f"Can you see a {color} {shape} at the start?",
        ),
    )
    yes = (shape, color) in looks
    return Turn(question, f"Yes, there is a {color} {shape}." if yes else "No, there is none.")


def _ask_background(scene: Scene, rng: np.random.Generator) -> Turn | None:
    question = _pick(rng, ("What is the background like?", "Describe only the background."))
    return Turn(question, f"The background is {scene.texture}.")


def _ask_above(scene: Scene, rng: np.random.Generator) -> Turn | None:
    here = [s.index for s in seen(scene, 0.0)]
    order = [here[int(i)] for i in rng.permutation(len(here))[:2]]
    if len(order) < 2:
        return None
    a, b = order
    first, second = scene.objects[a].start, scene.objects[b].start
    if first[0] != second[0]:
        word, yes = "above", first[0] < second[0]
    else:
        word, yes = "to the left of", first[1] < second[1]
    relation = f"the {_plain(scene, a)} {{}} {word} the {_plain(scene, b)}"
    question = f"At the start, is {relation.format('')}?".replace("  ", " ")
    return Turn(question, f"{'Yes' if yes else 'No'}, it is{'' if yes else ' not'}.")


QUESTIONS: dict[str, Maker] = {
    "colour at place": _ask_colour_at,
    "shape at place": _ask_shape_at,
    "shape at end": _ask_shape_end,
    "colour at end": _ask_colour_end,
    "size": _ask_size,
    "count": _ask_count,
    "count colour": _ask_count_colour,
    "count at end": _ask_count_end,
    "start": _ask_start,
    "end": _ask_end,
    "motion": _ask_motion,
    "mover": _ask_mover,
    "event": _ask_first,
    "who": _ask_who,
    "when": _ask_when,
    "exists": _ask_exists,
    "background": _ask_background,
    "above": _ask_above,
}


def _say_first(scene: Scene, rng: np.random.Generator) -> Turn:
    which, index = _pick(rng, (("first", 0), ("last", len(scene.objects) - 1)))
    question = _pick(rng, (f"Which shape did you describe {which}?", f"What did you name {which}?"))
    return Turn(question, f"The {_name(scene, index)}.")


def _say_colours(scene: Scene, rng: np.random.Generator) -> Turn:
    question = _pick(
        rng, ("Name only the colours, in order.", "Repeat only the colours in the same order.")
    )
    return Turn(question, _cap(_join([o.color for o in scene.objects])) + ".")


def _say_shapes(scene: Scene, rng: np.random.Generator) -> Turn:
    question = _pick(
        rng, ("Name only the shapes, in order.", "Repeat only the shapes in the same order.")
    )
    return Turn(question, _cap(_join([o.shape for o in scene.objects])) + ".")


def _say_short(scene: Scene, rng: np.random.Generator) -> Turn:
    question = _pick(
        rng, ("Say it in one sentence.", "Now give a short summary.", "Make it short.")
    )
    return Turn(question, summary(scene))


def _say_events(scene: Scene, rng: np.random.Generator) -> Turn:
    question = _pick(
        rng, ("Now list only the events and what moves.", "And the events only, please?")
    )
    return Turn(question, events(scene))


_FOLLOW = (_say_first, _say_colours, _say_shapes, _say_short, _say_events)


def _questions(scene: Scene, rng: np.random.Generator, number: int) -> list[Turn]:
    """Up to `number` questions of different kinds."""
    makers = list(QUESTIONS.values())
    turns: list[Turn] = []
    for index in rng.permutation(len(makers)):
        if len(turns) == number:
            break
        turn = makers[int(index)](scene, rng)
        if turn is not None:
            turns.append(turn)
    return turns


def conversation(scene: Scene, task: str, seed: int) -> tuple[Turn, ...]:
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
        turns = [Turn(_pick(rng, PROMPTS["describe"]), describe(scene))]
        number = int(rng.integers(1, 4))
        about = rng.permutation(len(_FOLLOW))[: int(rng.integers(1, number + 1))]
        more = [_FOLLOW[int(i)](scene, rng) for i in about]
        more += _questions(scene, rng, number - len(more))
        return (*turns, *(more[int(i)] for i in rng.permutation(len(more))))
    prompt = _pick(rng, PROMPTS[task])
    if task == "describe":
        return (Turn(prompt, describe(scene)),)
    if task == "events":
        return (Turn(prompt, events(scene)),)
    if task == "image":
        return (Turn(prompt, describe_image(scene)),)
    return (Turn(prompt, describe_diff(scene, seed)),)


# Longest readings first: a phrase claims its words before a single word can.
_TIME = (
    r"after a (quarter) of the time|(halfway) through|after (three quarters) of the time",
    r"(early) on|(midway)|(late)\b|in the (first half)|at (half time)|in the (second half)",
    r"(soon)|in the (middle of the clip)|(near the end)",
)
_MOTION = (
    r"(?:moves|slides|travels|drifts) (left|right|up|down)",
    r"in a (loop)|(stays still|does not move|rests|remains still)",
)
_EVENT = (
    rf"(turns|becomes|changes to) (?:{'|'.join(COLORS)})",
    r"(vanishes|disappears|is gone|leaves)[,.]",
    r"(appears|shows up|arrives|pops up) in|(missing|new)\b|(comes later|only later|will be)",
)
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("time", "|".join(_TIME)),
    ("motion", "|".join(_MOTION)),
    ("event", "|".join(_EVENT)),
    ("colour", rf"\b({'|'.join(COLORS)})\b"),
    ("shape", rf"\b({'|'.join(SHAPES)})\b"),
    ("size", r"\b(small|large|little|big)\b"),
    ("texture", rf"\b({'|'.join(TEXTURES)})\b"),
    ("count", r"\b(one|two|three|four|five|six|seven|eight|no(?= \w+s\b))\b"),
    ("where", r"\b(top|bottom|left|right|middle|centre|above)\b"),
    ("truth", r"\b(yes|no|none|nothing)\b"),
)
_COMPILED = tuple((kind, re.compile(p, re.IGNORECASE)) for kind, p in _PATTERNS)


def content_words(text: str) -> list[tuple[int, int, str]]:
    """(start, end, kind) of the words that depend on the pixels, in order of `start`.

    Kinds: colour, shape, size, where, count, motion, time, event, texture, truth (yes or no).
    Spans of one kind may hold two or three words ('stays still'); spans never overlap.
    """
    spans: list[tuple[int, int, str]] = []
    taken = bytearray(len(text))
    for kind, pattern in _COMPILED:
        for match in pattern.finditer(text):
            group = match.lastindex or 0
            start, end = match.span(group)
            if not any(taken[start:end]):
                taken[start:end] = b"\1" * (end - start)
                spans.append((start, end, kind))
    return sorted(spans)
