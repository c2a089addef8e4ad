"""Writes the texts that the embedded models are trained to answer with about a drawn scene.

There is a long description of a video or a picture, a short summary, a list of events, and the
differences of two pictures. The pixels determine every word of them, so that a model that sees them
has little to guess: each background texture has a wording of its own, called its voice, and objects
are described in reading order of their start cells. These are pure functions and know no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from saccade.world.scenes import (
    Cell,
    Event,
    Object,
    Scene,
    State,
    cell_name,
    edit_with_changes,
    visible_states,
)

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True)
class Voice:
    """The wording of one texture: single words and phrases, then templates of whole sentences.

    The examples are those of the first voice in ``words.yaml``.
    """

    noun: str  # What an object is called: "shape".
    small: str  # The word for the size "small".
    large: str  # The word for the size "large".
    move: str  # "moves"
    turn: str  # "turns", before the new colour.
    vanish: str  # "vanishes"
    appear: str  # "appears"
    # When an event happens: a phrase for each of the times in ``scenes.TIMES`` near which events
    # are, the earliest first. The second one is "halfway through".
    when: Sequence[str]
    still: str  # What an object does that does not move: "stays still".
    nothing: str  # The sentence that there is no event.
    opening: str  # "The {video} shows {things} on a {texture} background."
    # "{there} of them {are} visible at the start." It is left out if no object appears later.
    later: str
    starts: str  # The sentence about an object that is there from the start.
    comes: str  # The sentence about an object that appears later.
    stands: str  # The sentence about an object in a picture.
    final: str  # "At the end, we see {things}."


WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
VOICES = tuple(Voice(**each) for each in WORDS["voices"])

# -- words -------------------------------------------------------------------------------------


def voice_of(scene: Scene) -> Voice:
    return VOICES[scene.voice]


def capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def join_words(parts: Sequence[str]) -> str:
    """Joins words as 'a', 'a and b' or 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def count_phrase(number: int, noun: str) -> str:
    return f"{NUMBERS[number]} {noun}{'' if number == 1 else 's'}"


def size_word(scene: Scene, thing: Object) -> str:
    return voice_of(scene).large if thing.size == "large" else voice_of(scene).small


def object_name(scene: Scene, index: int, color: str | None = None, *, size: bool = True) -> str:
    """Returns 'large red circle' in the scene's voice, or without ``size`` 'red circle'.

    The colour is that at the start unless ``color`` gives another.
    """
    thing = scene.objects[index]
    words = [color or thing.color, thing.shape]
    return " ".join([size_word(scene, thing), *words] if size else words)


def place_phrase(cell: Cell) -> str:
    return f"in the {cell_name(cell)}"


def motion_phrase(scene: Scene, thing: Object) -> str:
    """Returns what an object does: 'moves right to the top right', 'stays still'."""
    voice = voice_of(scene)
    if thing.motion == "still":
        return voice.still
    if thing.motion == "loop":
        return f"{voice.move} in a loop"
    return f"{voice.move} {thing.motion} to the {cell_name(thing.end)}"


def event_clause(scene: Scene, event: Event) -> str:
    """Returns an event as a clause without its time: 'the large red circle turns green'."""
    voice = voice_of(scene)
    thing = scene.objects[event.index]
    where = f" {place_phrase(thing.start)}" if thing.start == thing.end else ""
    name = object_name(scene, event.index)
    if event.kind == "recolour":
        return f"the {name}{where} {voice.turn} {event.color}"
    if event.kind == "vanish":
        return f"the {name}{where} {voice.vanish}"
    return f"a {name} {voice.appear}{where}"


def final_states(scene: Scene) -> list[State]:
    """Returns what is visible at the end, in reading order of the last places."""
    return sorted(visible_states(scene, 1.0), key=lambda s: (scene.objects[s.index].end, s.index))


def _number_word(number: int) -> str:
    """Returns a number that stands alone: 'none', 'one', 'two'."""
    return NUMBERS[number] if number else "none"


def _is_or_are(number: int) -> str:
    return "is" if number == 1 else "are"


# -- sentences ---------------------------------------------------------------------------------


def _opening(scene: Scene, number: int, **medium: str) -> str:
    """Returns the first sentence: how many objects there are, on which background.

    ``medium`` has the words that take the places of {video} and {clip} in the template.
    """
    voice = voice_of(scene)
    words = {
        "things": count_phrase(number, voice.noun),
        "are": _is_or_are(number),
        "texture": scene.texture,
    }
    return capitalize(voice.opening.format(**medium, **words))


def _sentence(scene: Scene, index: int) -> str:
    """Returns the sentence of a description about one object."""
    voice = voice_of(scene)
    thing = scene.objects[index]
    appears_later = any(e.index == index and e.kind == "appear" for e in scene.events)
    words = {"where": place_phrase(thing.start), "place": cell_name(thing.start)}
    does = motion_phrase(scene, thing)
    template = voice.comes if appears_later else voice.starts
    return capitalize(template.format(name=object_name(scene, index), does=does, **words))


def _event_sentences(scene: Scene) -> list[str]:
    """Returns a sentence per event, or the sentence that there is none."""
    voice = voice_of(scene)
    sentences = [
        capitalize(f"{voice.when[e.time_index]}, {event_clause(scene, e)}.") for e in scene.events
    ]
    return sentences or [voice.nothing]


def _relation(scene: Scene, first_state: State, last_state: State, cells: tuple[Cell, Cell]) -> str:
    """Returns the sentence that the first object is above the last, or to the left of it in the
    same row.

    ``cells`` are the cells of the two, of which the first comes earlier in reading order.
    """
    word = "above" if cells[0][0] < cells[1][0] else "to the left of"
    first, last = (
        object_name(scene, state.index, state.color) for state in (first_state, last_state)
    )
    return f"The {first} is {word} the {last}."


def _recap(scene: Scene) -> list[str]:
    """Returns what is visible at the end, how many objects moved, and one relation."""
    end_states = final_states(scene)
    voice = voice_of(scene)
    number = len(scene.objects)
    names = []
    for state in end_states:
        name = object_name(scene, state.index, state.color, size=False)
        names.append(f"a {name} {place_phrase(scene.objects[state.index].end)}")
    sentences = [voice.final.format(things=join_words(names or ["nothing"]))]
    moving = sum(o.start != o.end for o in scene.objects)
    staying = number - moving
    if number == 1:
        does = "goes to another place" if moving else "keeps its place"
        sentences.append(f"The only {voice.noun} {does}.")
    else:
        go = "goes" if moving == 1 else "go"
        keep = "keeps its" if staying == 1 else "keep their"
        sentences.append(
            f"In all, {count_phrase(moving, voice.noun)} {go} to another place "
            f"and {_number_word(staying)} {keep} place."
        )
    if len(end_states) > 1:
        ends = scene.objects[end_states[0].index].end, scene.objects[end_states[-1].index].end
        sentences.append(_relation(scene, end_states[0], end_states[-1], ends))
    return sentences


def _empty_rows(cells: Sequence[Cell]) -> str:
    """Returns the sentence about the rows of the grid that have none of these cells."""
    rows = ("top", "middle", "bottom")
    empty = [name for r, name in enumerate(rows) if all(cell[0] != r for cell in cells)]
    if not empty:
        return "No row is empty."
    return f"The {join_words(empty)} {'rows are' if len(empty) > 1 else 'row is'} empty."


# -- texts -------------------------------------------------------------------------------------


def describe(scene: Scene) -> str:
    """Returns the long description of a video: opening, objects, events in time order, recap."""
    number = len(scene.objects)
    sentences = [_opening(scene, number, video="video", clip="clip")]
    later = sum(e.kind == "appear" for e in scene.events)
    if later:
        at_start = number - later
        words = voice_of(scene).later.format(there=NUMBERS[at_start], are=_is_or_are(at_start))
        sentences.append(capitalize(words))
    sentences += [_sentence(scene, i) for i in range(number)]
    start_cells = [scene.objects[state.index].start for state in visible_states(scene, 0.0)]
    empty_rows = _empty_rows(start_cells)
    sentences.append(f"At the start, {empty_rows[0].lower()}{empty_rows[1:]}")
    return " ".join([*sentences, *_event_sentences(scene), *_recap(scene)])


def summary(scene: Scene) -> str:
    """Returns one short sentence about a video: its objects and its background.

    Apart from the texture's name, it has the same words in every voice.
    """
    names = [f"a {o.color} {o.shape}" for o in scene.objects]
    return f"{capitalize(join_words(names))} on a {scene.texture} background."


def events(scene: Scene) -> str:
    """Returns the list of changes with their times, then which object travels where."""
    moves = [
        f"the {object_name(scene, i)} {motion_phrase(scene, o)}"
        for i, o in enumerate(scene.objects)
        if o.start != o.end
    ]
    none = f"No {voice_of(scene).noun} goes to another place."
    return " ".join(
        [*_event_sentences(scene), f"{capitalize(join_words(moves))}." if moves else none]
    )


def describe_image(scene: Scene) -> str:
    """Returns the long description of the picture at time 0.5."""
    voice = voice_of(scene)
    states = sorted(visible_states(scene, 0.5), key=lambda s: (s.cell, s.index))
    number = len(states)
    sentences = [_opening(scene, number, video="image", clip="picture")]
    for s in states:
        words = {"where": place_phrase(s.cell), "place": cell_name(s.cell)}
        sentences.append(
            capitalize(voice.stands.format(name=object_name(scene, s.index, s.color), **words))
        )
    if states:
        large = sum(scene.objects[s.index].size == "large" for s in states)
        small = number - large
        sentences.append(
            f"In all, {_number_word(large)} {_is_or_are(large)} {voice.large} and "
            f"{_number_word(small)} {_is_or_are(small)} {voice.small}."
        )
        sentences.append(_empty_rows([s.cell for s in states]))
    if number > 1:
        sentences.append(_relation(scene, states[0], states[-1], (states[0].cell, states[-1].cell)))
    return " ".join(sentences)


def describe_diff(scene: Scene, seed: int) -> str:
    """Returns the differences between the pictures of `scene` and of `scenes.edit(scene, seed)`."""
    edited, differences = edit_with_changes(scene, seed)
    sentences = [
        "There is one difference." if len(differences) == 1 else "There are two differences."
    ]
    for difference in differences:
        # The template of this kind of difference takes what the object looks like and one new word.
        size, color, shape, where = difference.look
        look = f"{size} {color} {shape} in the {where}"
        sentences.append(
            WORDS["differences"][difference.kind].format(look=look, word=difference.word)
        )
    before, after = (len(visible_states(s, 0.5)) for s in (scene, edited))
    if before == after:
        sentences.append(f"Both images have {count_phrase(after, 'shape')}.")
    else:
        sentences.append(
            f"The first image has {count_phrase(before, 'shape')} "
            f"and the second has {_number_word(after)}."
        )
    return " ".join(sentences)
