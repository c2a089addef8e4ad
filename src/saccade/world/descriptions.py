"""What is said about a scene at length: descriptions, lists of events, differences of two pictures.

All of it is determined by the pixels: the wording (one of four voices) belongs to the background
texture, and objects come in reading order of their start cells, so that little is left to guess
once the video is seen. Pure functions; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from saccade.world.scenes import Cell, Happening, Object, Scene, State, changes, place, seen

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True)
class Voice:
    """The wording of one texture: its words, and its sentences with their gaps."""

    noun: str
    small: str
    large: str
    move: str
    turn: str
    vanish: str
    appear: str
    when: Sequence[str]  # of the quarters
    still: str
    nothing: str  # where there is no event
    opening: str
    later: str  # how many of the objects are there at the start, where some come later
    starts: str  # an object that is there from the start, and what it does
    comes: str  # one that is not
    stands: str  # an object in a picture
    final: str  # what is visible at the end


WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
VOICES = tuple(Voice(**each) for each in WORDS["voices"])

# -- words -------------------------------------------------------------------------------------


def voice_of(scene: Scene) -> Voice:
    return VOICES[scene.voice]


def cap(text: str) -> str:
    return text[0].upper() + text[1:]


def join(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def counted(number: int, noun: str) -> str:
    return f"{NUMBERS[number]} {noun}{'' if number == 1 else 's'}"


def size_of(scene: Scene, thing: Object) -> str:
    return voice_of(scene).large if thing.size == "large" else voice_of(scene).small


def named(scene: Scene, index: int, color: str | None = None, *, size: bool = True) -> str:
    """'large red circle', in the scene's voice; with its start colour unless told."""
    thing = scene.objects[index]
    words = [color or thing.color, thing.shape]
    return " ".join([size_of(scene, thing), *words] if size else words)


def within(cell: Cell) -> str:
    return f"in the {place(cell)}"


def motion(scene: Scene, thing: Object) -> str:
    """What a thing does, as a predicate: 'moves right to the top right', 'stays still'."""
    voice = voice_of(scene)
    if thing.motion == "still":
        return voice.still
    if thing.motion == "loop":
        return f"{voice.move} in a loop"
    return f"{voice.move} {thing.motion} to the {place(thing.end)}"


def change(scene: Scene, event: Happening) -> str:
    """An event as a clause without its time: 'the large red circle turns green'."""
    voice, thing = voice_of(scene), scene.objects[event.index]
    where = f" {within(thing.start)}" if thing.start == thing.end else ""
    name = named(scene, event.index)
    if event.kind == "recolour":
        return f"the {name}{where} {voice.turn} {event.color}"
    if event.kind == "vanish":
        return f"the {name}{where} {voice.vanish}"
    return f"a {name} {voice.appear}{where}"


def final(scene: Scene) -> list[State]:
    """What is visible at the end, in reading order of where it is then."""
    return sorted(seen(scene, 1.0), key=lambda s: (scene.objects[s.index].end, s.index))


def _of_them(number: int) -> str:
    """A number that stands alone: 'none', 'one', 'two'."""
    return NUMBERS[number] if number else "none"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


# -- sentences ---------------------------------------------------------------------------------


def _opening(scene: Scene, number: int, **medium: str) -> str:
    voice = voice_of(scene)
    words = {"things": counted(number, voice.noun), "are": _are(number), "texture": scene.texture}
    return cap(voice.opening.format(**medium, **words))


def _sentence(scene: Scene, index: int) -> str:
    """The sentence of a description about one object."""
    voice, thing = voice_of(scene), scene.objects[index]
    comes = any(e.index == index and e.kind == "appear" for e in scene.events)
    words = {"where": within(thing.start), "place": place(thing.start)}
    does = motion(scene, thing)
    said = voice.comes if comes else voice.starts
    return cap(said.format(name=named(scene, index), does=does, **words))


def _timed(scene: Scene) -> list[str]:
    """A sentence an event, or the one that there is none."""
    voice = voice_of(scene)
    said = [cap(f"{voice.when[e.quarter]}, {change(scene, e)}.") for e in scene.events]
    return said or [voice.nothing]


def _relation(scene: Scene, one: State, other: State, cells: tuple[Cell, Cell]) -> str:
    """How the first thing stands to the last."""
    word = "above" if cells[0][0] < cells[1][0] else "to the left of"
    first, last = (named(scene, state.index, state.color) for state in (one, other))
    return f"The {first} is {word} the {last}."


def _recap(scene: Scene) -> list[str]:
    """What is visible at the end, then how many moved, then one relation."""
    last, voice, number = final(scene), voice_of(scene), len(scene.objects)
    names = [
        f"a {named(scene, s.index, s.color, size=False)} {within(scene.objects[s.index].end)}"
        for s in last
    ]
    said = [voice.final.format(things=join(names or ["nothing"]))]
    moving = sum(o.start != o.end for o in scene.objects)
    staying = number - moving
    if number == 1:
        does = "goes to another place" if moving else "keeps its place"
        said.append(f"The only {voice.noun} {does}.")
    else:
        said.append(
            f"In all, {counted(moving, voice.noun)} {'goes' if moving == 1 else 'go'} to another "
            f"place and {_of_them(staying)} {'keeps its' if staying == 1 else 'keep their'} place."
        )
    if len(last) > 1:
        ends = scene.objects[last[0].index].end, scene.objects[last[-1].index].end
        said.append(_relation(scene, last[0], last[-1], ends))
    return said


def _empty_rows(cells: Sequence[Cell]) -> str:
    rows = ("top", "middle", "bottom")
    free = [name for r, name in enumerate(rows) if all(cell[0] != r for cell in cells)]
    if not free:
        return "No row is empty."
    return f"The {join(free)} {'rows are' if len(free) > 1 else 'row is'} empty."


# -- texts -------------------------------------------------------------------------------------


def describe(scene: Scene) -> str:
    """The long description of a video: opening, objects, events in time order, recap."""
    number = len(scene.objects)
    said = [_opening(scene, number, video="video", clip="clip")]
    later = sum(e.kind == "appear" for e in scene.events)
    if later:
        there = number - later
        words = voice_of(scene).later.format(there=NUMBERS[there], are=_are(there))
        said.append(cap(words))
    said += [_sentence(scene, i) for i in range(number)]
    rows = _empty_rows([scene.objects[state.index].start for state in seen(scene, 0.0)])
    said.append(f"At the start, {rows[0].lower()}{rows[1:]}")
    return " ".join([*said, *_timed(scene), *_recap(scene)])


def summary(scene: Scene) -> str:
    """One short sentence about a video, in the words of a small captioner."""
    names = [f"a {o.color} {o.shape}" for o in scene.objects]
    return f"{cap(join(names))} on a {scene.texture} background."


def events(scene: Scene) -> str:
    """The list of changes with their times, then who travels where."""
    moves = [
        f"the {named(scene, i)} {motion(scene, o)}"
        for i, o in enumerate(scene.objects)
        if o.start != o.end
    ]
    none = f"No {voice_of(scene).noun} goes to another place."
    return " ".join([*_timed(scene), f"{cap(join(moves))}." if moves else none])


def describe_image(scene: Scene) -> str:
    """The long description of the picture at time 0.5."""
    voice = voice_of(scene)
    states = sorted(seen(scene, 0.5), key=lambda s: (s.cell, s.index))
    number = len(states)
    said = [_opening(scene, number, video="image", clip="picture")]
    for s in states:
        words = {"where": within(s.cell), "place": place(s.cell)}
        said.append(cap(voice.stands.format(name=named(scene, s.index, s.color), **words)))
    if states:
        large = sum(scene.objects[s.index].size == "large" for s in states)
        small = number - large
        said.append(
            f"In all, {_of_them(large)} {_are(large)} {voice.large} and "
            f"{_of_them(small)} {_are(small)} {voice.small}."
        )
        said.append(_empty_rows([s.cell for s in states]))
    if number > 1:
        said.append(_relation(scene, states[0], states[-1], (states[0].cell, states[-1].cell)))
    return " ".join(said)


def describe_diff(scene: Scene, seed: int) -> str:
    """The differences between the pictures of `scene` and of `edit(scene, seed)`."""
    edited, found = changes(scene, seed)
    said = ["There is one difference." if len(found) == 1 else "There are two differences."]
    for each in found:
        size, color, shape, where = each.look
        look = f"{size} {color} {shape} in the {where}"
        said.append(WORDS["differences"][each.kind].format(look=look, word=each.word))
    before, after = (len(seen(s, 0.5)) for s in (scene, edited))
    if before == after:
        said.append(f"Both images have {counted(after, 'shape')}.")
    else:
        said.append(
            f"The first image has {counted(before, 'shape')} and the second has {_of_them(after)}."
        )
    return " ".join(said)
