"""Makes the drawn scenes, of coloured shapes in motion, that the embedded models know.

These models are trained on videos of such scenes, and the demo and tests ask about others. A
`Scene` is a few objects on a textured background for one clip, whose time runs from 0 to 1.
Everything here is a pure function of its arguments: a seed gives the same scene on every machine.
This module knows numpy only. `drawing` makes a scene's pixels, and `descriptions` and `dialogues`
the texts about it.

Places are the cells of a 3 x 3 grid. The paths of two objects never share a cell, so that no object
hides another.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")
COLORS = ("red", "green", "blue", "yellow", "cyan", "purple", "white", "black")
SIZES = ("small", "large")
CELLS = (
    *("top left", "top middle", "top right"),
    *("middle left", "centre", "middle right"),
    *("bottom left", "bottom middle", "bottom right"),
)
MOTIONS = ("still", "left", "right", "up", "down", "loop")
TEXTURES = ("plain", "striped", "checkered", "speckled")
TIMES = (0.25, 0.5, 0.75)  # Events are near these times.

COUNT_WEIGHTS = (0.12, 0.26, 0.28, 0.20, 0.09, 0.05)  # Of 1, 2, ... objects.
EVENT_WEIGHTS = (0.30, 0.35, 0.23, 0.12)  # Of 0, 1, ... events.
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
# Objects that travel to another cell move between these times. At 0.5, when pictures are taken, the
# centre of such an object is a sixth of a cell from the nearest border, so it is clear which cell
# the object is in.
LEAVE_TIME, ARRIVE_TIME = 0.1, 0.7
LOOP_RADIUS = 0.2  # In cells.
TIME_JITTER = 0.04  # An event is at most this fraction of the clip before or after one of TIMES.

LOOP_PROBABILITY = 0.3  # Of an object that does not travel to another cell.
TRAVEL_PROBABILITY = 0.65  # Of an object that may travel and finds a free path.

Kind = Literal["recolour", "vanish", "appear"]
KINDS: tuple[Kind, ...] = ("recolour", "vanish", "appear")
KIND_WEIGHTS = (0.4, 0.3, 0.3)  # Of KINDS.
Cell = tuple[int, int]

# The random numbers of scenes and those of edits are drawn from generators with different keys.
# These are the first numbers of the keys.
SCENE_DRAWS, EDIT_DRAWS = 0, 1


@dataclass(frozen=True)
class Object:
    """One object, in the words of the tuples above. `start` and `end` are cells (row, col), counted
    from 0 at the top left."""

    shape: str
    color: str
    size: str
    start: Cell
    motion: str
    end: Cell


@dataclass(frozen=True)
class Event:
    """A change of `objects[index]` at `time`, a fraction of the clip near one of TIMES.

    `color` is the new colour of a recolouring, None for the other kinds.
    """

    kind: Kind
    index: int
    time: float
    color: str | None = None

    @property
    def time_index(self) -> int:
        """Which of TIMES the event is near: 0, 1 or 2."""
        return min(range(len(TIMES)), key=lambda i: abs(TIMES[i] - self.time))


@dataclass(frozen=True)
class Scene:
    """A clip: objects in reading order of their start cells, events in order of time.

    `voice` is the index of the wording that describes the scene. It equals the index of `texture`
    in TEXTURES, so that a model can tell from the pixels which wording is expected.
    """

    seed: int
    objects: tuple[Object, ...]
    events: tuple[Event, ...]
    texture: str
    voice: int


@dataclass(frozen=True)
class State:
    """One visible object at one time: its index in the scene, its colour then, and its centre.

    `y` and `x` are in units of cells from the top left: 0.5 is the middle of the first row or
    column, and 3 the far border of the picture.
    """

    index: int
    color: str
    y: float
    x: float

    @property
    def cell(self) -> Cell:
        """The cell (row, col) the centre is in."""
        return min(2, int(self.y)), min(2, int(self.x))


def cell_name(cell: Cell) -> str:
    """Returns the name in CELLS of (row, col)."""
    return CELLS[3 * cell[0] + cell[1]]


def _generator(*key: int) -> np.random.Generator:
    """Returns a random generator whose draws depend on ``key`` alone.

    ``key`` begins with what is drawn, ``SCENE_DRAWS`` or ``EDIT_DRAWS``, and goes on with seeds.
    """
    return np.random.Generator(np.random.PCG64(list(key)))


def _draw_index(rng: np.random.Generator, weights: tuple[float, ...]) -> int:
    """Draws an index with probabilities in proportion to the weights."""
    point = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return len(weights) - 1


def _path(start: Cell, direction: str, distance: int) -> tuple[Cell, ...]:
    """Returns the cells after `start` on a straight path; none if the path leaves the grid."""
    dy, dx = STEPS[direction]
    cells = tuple((start[0] + dy * i, start[1] + dx * i) for i in range(1, distance + 1))
    return cells if all(0 <= r <= 2 and 0 <= c <= 2 for r, c in cells) else ()


def _used_looks(scene: Scene) -> set[tuple[str, str]]:
    """Returns every (colour, shape) that is ever used, so that a new object can differ."""
    looks = {(o.color, o.shape) for o in scene.objects}
    recoloured = [(e.color, e.index) for e in scene.events if e.color is not None]
    return looks | {(color, scene.objects[index].shape) for color, index in recoloured}


def scene(seed: int, *, max_objects: int = 6) -> Scene:
    """Returns the scene of `seed` (any int >= 0): 1 to `max_objects` objects, 0 to 3 events.

    There are never more than 6 objects, and never more events than objects. No two objects ever
    have the same colour and shape, and no two paths share a cell. Objects that appear or vanish do
    not travel, so one cell says where they are.
    """
    rng = _generator(SCENE_DRAWS, seed)
    # How many objects there are, where, and what they look like.
    texture = int(rng.integers(len(TEXTURES)))
    count = 1 + _draw_index(rng, COUNT_WEIGHTS[:max_objects])
    cells: list[Cell] = [(int(c) // 3, int(c) % 3) for c in sorted(rng.permutation(9)[:count])]
    # Each of the 48 = 8 x 6 numbers stands for a colour and a shape: (index in COLORS, in SHAPES).
    looks = [(int(n) // len(SHAPES), int(n) % len(SHAPES)) for n in rng.permutation(48)[:count]]
    sizes = [SIZES[int(rng.integers(2))] for _ in range(count)]

    # Which events happen to which objects: at most one event per object and per time.
    event_count = min(_draw_index(rng, EVENT_WEIGHTS), count)
    event_objects = [int(i) for i in rng.permutation(count)[:event_count]]
    time_indices = sorted(int(i) for i in rng.permutation(len(TIMES))[:event_count])
    used_looks = {(COLORS[c], SHAPES[s]) for c, s in looks}
    events: list[Event] = []
    appearing = 0
    for index, time_index in zip(event_objects, time_indices, strict=True):
        kind = KINDS[_draw_index(rng, KIND_WEIGHTS)]
        if kind == "appear" and appearing == count - 1:
            kind = "recolour"  # At least one object is there from the start.
        appearing += kind == "appear"
        color: str | None = None
        shape = SHAPES[looks[index][1]]
        if kind == "recolour":
            unused_colors = [c for c in COLORS if (c, shape) not in used_looks]
            color = unused_colors[int(rng.integers(len(unused_colors)))]
            used_looks.add((color, shape))
        time = TIMES[time_index] + TIME_JITTER * (2 * rng.random() - 1)
        events.append(Event(kind, index, round(float(time), 4), color))

    # How each object moves. No other object may enter a cell of a travelling object's path.
    immobile = {e.index for e in events if e.kind != "recolour"}
    occupied = set(cells)
    objects: list[Object] = []
    for index in range(count):
        start = end = cells[index]
        motion = "loop" if rng.random() < LOOP_PROBABILITY else "still"
        if index not in immobile and rng.random() < TRAVEL_PROBABILITY:
            # The first direction in which the object can go, in random order: MOTIONS[1:5].
            for direction in (MOTIONS[1 + int(d)] for d in rng.permutation(4)):
                paths = [_path(start, direction, distance) for distance in (1, 2)]
                paths = [path for path in paths if path and not occupied & set(path)]
                if paths:
                    path = paths[int(rng.integers(len(paths)))]
                    motion = direction
                    end = path[-1]
                    occupied |= set(path)
                    break
        color_index, shape_index = looks[index]
        objects.append(
            Object(SHAPES[shape_index], COLORS[color_index], sizes[index], start, motion, end)
        )
    return Scene(seed, tuple(objects), tuple(events), TEXTURES[texture], texture)


def visible_states(scene: Scene, time: float) -> tuple[State, ...]:
    """Returns the objects visible at `time` in [0, 1], in the order of the scene."""
    return tuple(
        state for i in range(len(scene.objects)) if (state := state_at(scene, i, time)) is not None
    )


def state_at(scene: Scene, index: int, time: float) -> State | None:
    """Returns one object's state at a time, or None where it is not visible."""
    thing = scene.objects[index]
    color = thing.color
    for event in scene.events:
        if event.index != index:
            continue
        if event.kind == "appear" and time < event.time:
            return None
        if event.kind == "vanish" and time >= event.time:
            return None
        if event.color is not None and time >= event.time:
            color = event.color
    y = thing.start[0] + 0.5
    x = thing.start[1] + 0.5
    if thing.motion == "loop":
        y += LOOP_RADIUS * math.sin(2 * math.pi * time)
        x += LOOP_RADIUS * math.cos(2 * math.pi * time)
    else:
        progress = min(1.0, max(0.0, (time - LEAVE_TIME) / (ARRIVE_TIME - LEAVE_TIME)))
        y += progress * (thing.end[0] - thing.start[0])
        x += progress * (thing.end[1] - thing.start[1])
    return State(index, color, y, x)


ChangeKind = Literal["color", "size", "shape", "place", "gone", "new"]


class Change(NamedTuple):
    """A difference between two pictures, each of which shows its scene at time 0.5.

    `look` is the object's (size, colour, shape, place) in the first picture, or in the second for
    "new". `word` is its new colour, size, shape or place, and empty for "gone" and "new".
    """

    kind: ChangeKind
    look: tuple[str, str, str, str]
    word: str


def _without_object(base: Scene, index: int) -> Scene:
    """Returns `base` without one object and its events."""
    # The indices of the objects after it become smaller by one.
    events = tuple(
        replace(e, index=e.index - 1 if e.index > index else e.index)
        for e in base.events
        if e.index != index
    )
    objects = base.objects[:index] + base.objects[index + 1 :]
    return replace(base, objects=objects, events=events)


def _with_object(base: Scene, thing: Object) -> Scene:
    """Returns `base` with one more object, in reading order."""
    position = sum(o.start < thing.start for o in base.objects)
    # The indices of the objects after it become larger by one.
    events = tuple(
        replace(e, index=e.index + 1 if e.index >= position else e.index) for e in base.events
    )
    return replace(
        base, objects=(*base.objects[:position], thing, *base.objects[position:]), events=events
    )


def edit_with_changes(scene: Scene, seed: int) -> tuple[Scene, tuple[Change, ...]]:
    """Returns a scene whose picture at time 0.5 differs from that of `scene` in one or two things,
    and the list of these differences, in reading order of their places.

    `seed` determines which things change, and how.
    """
    rng = _generator(EDIT_DRAWS, scene.seed, seed)

    def pick(options: list[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    edited, changes = scene, []
    visible = [scene.objects[s.index] for s in visible_states(scene, 0.5)]
    order = [visible[int(i)] for i in rng.permutation(len(visible))]
    for thing in order[: 1 + int(rng.integers(2))]:  # One or two of the objects are changed.
        index = edited.objects.index(thing)
        state = state_at(edited, index, 0.5)
        assert state is not None
        look = (thing.size, state.color, thing.shape, cell_name(state.cell))
        # The object keeps the colour that it has at 0.5 and loses its events, so that the pictures
        # differ in nothing but what is chosen below.
        others = _without_object(edited, index)
        new_thing = replace(thing, color=state.color)
        used_looks = _used_looks(others) | {(state.color, thing.shape), (thing.color, thing.shape)}
        free_cells = _free_cells(edited)
        is_still = thing.start == thing.end
        kinds: list[ChangeKind] = ["color", "size", "shape", "gone"]
        if free_cells and is_still:
            kinds += ["place", "place"]  # This kind is twice as likely as each of the others.
        kind: ChangeKind = pick(kinds)
        word = ""
        if kind == "color":
            word = pick([c for c in COLORS if (c, thing.shape) not in used_looks])
            new_thing = replace(new_thing, color=word)
        elif kind == "size":
            word = SIZES[1 - SIZES.index(thing.size)]
            new_thing = replace(new_thing, size=word)
        elif kind == "shape":
            word = pick([s for s in SHAPES if (state.color, s) not in used_looks])
            new_thing = replace(new_thing, shape=word)
        elif kind == "place":
            cell = pick(free_cells)
            word = cell_name(cell)
            new_thing = replace(new_thing, start=cell, end=cell)
        edited = others if kind == "gone" else _with_object(others, new_thing)
        changes.append(Change(kind, look, word))
    # A new object is added if nothing was changed, because nothing is visible at 0.5. If one object
    # was changed, it is added with a probability of a quarter.
    free_cells = _free_cells(edited)
    if free_cells and (not changes or (len(changes) == 1 and rng.random() < 0.25)):
        used_looks = _used_looks(edited) | _used_looks(scene)
        cell = pick(free_cells)
        color, shape = pick([(c, s) for c in COLORS for s in SHAPES if (c, s) not in used_looks])
        size = pick(list(SIZES))
        edited = _with_object(edited, Object(shape, color, size, cell, "still", cell))
        changes.append(Change("new", (size, color, shape, cell_name(cell)), ""))
    changes.sort(key=lambda c: CELLS.index(c.look[3]))
    return edited, tuple(changes)


def edit(scene: Scene, seed: int) -> Scene:
    """Returns the scene of :func:`edit_with_changes`, without the list of differences."""
    return edit_with_changes(scene, seed)[0]


def _free_cells(scene: Scene) -> list[Cell]:
    """Returns every cell that no object is ever in."""
    cells = {(r, c) for r in range(3) for c in range(3)}
    for o in scene.objects:
        (r0, c0), (r1, c1) = sorted((o.start, o.end))
        cells -= {(r, c) for r in range(r0, r1 + 1) for c in range(min(c0, c1), max(c0, c1) + 1)}
    return sorted(cells)


def scene_facts(
    scene: Scene, frames: int, height: int, width: int | None = None, *, fps: float = 8.0
) -> dict[str, Any]:
    """Returns all facts of the clip, ready for JSON; times in seconds of the clip."""
    seconds = frames / fps
    return {
        "seed": scene.seed,
        "frames": frames,
        "height": height,
        "width": height if width is None else width,
        "fps": fps,
        "seconds": seconds,
        "texture": scene.texture,
        "objects": [
            {**asdict(o), "start": cell_name(o.start), "end": cell_name(o.end)}
            for o in scene.objects
        ],
        "events": [
            {"kind": e.kind, "object": e.index, "seconds": e.time * seconds, "color": e.color}
            for e in scene.events
        ],
    }
