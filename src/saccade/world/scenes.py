"""The shapes world: seeded scenes of coloured shapes in motion, and their exact pixels.

A `Scene` is a few objects on a textured background for one clip, whose time runs from 0 to 1.
Everything here is a pure function of its arguments: a seed gives the same scene and the same
pixels on every machine, at any number of frames and any size. Knows numpy only; what is *said*
about a scene is in `text.py`, and no model is known here.

Places are the cells of a 3 x 3 grid. Objects never share a cell on their ways, so none hides
another. The background carries a soft tint, red growing with x, green with y and blue with time,
because the vision-language model that looks at it has only relative positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
TIMES = (0.25, 0.5, 0.75)

# RGB of each of COLORS, near the corners of the colour cube.
PALETTE: NDArray[np.uint8] = np.array(
    [
        *((225, 25, 25), (20, 165, 40), (30, 50, 230), (250, 225, 30)),
        *((40, 220, 230), (195, 40, 215), (255, 255, 255), (10, 10, 10)),
    ],
    dtype=np.uint8,
)

COUNT_WEIGHTS = (0.12, 0.26, 0.28, 0.20, 0.09, 0.05)
EVENT_WEIGHTS = (0.30, 0.35, 0.23, 0.12)
# Radius in pixels at 112 x 112 of each of SIZES, against a cell of 37 x 37.
RADII = (10.5, 16.5)
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
# A path is walked between these times, so that at 0.5 a third of a cell is always to spare.
LEAVE, ARRIVE = 0.1, 0.7
LOOP = 0.2
JITTER = 0.04

Kind = Literal["recolour", "vanish", "appear"]
KINDS: tuple[Kind, ...] = ("recolour", "vanish", "appear")
Cell = tuple[int, int]


@dataclass(frozen=True)
class Object:
    """One thing: words from the tuples above, and (row, col) cells with 0..2 from top left."""

    shape: str
    color: str
    size: str
    start: Cell
    motion: str
    end: Cell


@dataclass(frozen=True)
class Event:
    """A change of `objects[index]`: at `time` (a fraction of the clip near one of TIMES).

    `color` is the new colour of a recolouring, None for the other kinds.
    """

    kind: Kind
    index: int
    time: float
    color: str | None = None

    @property
    def quarter(self) -> int:
        """Which of TIMES the event is near: 0, 1 or 2."""
        return min(range(len(TIMES)), key=lambda i: abs(TIMES[i] - self.time))


@dataclass(frozen=True)
class Scene:
    """A clip: objects in reading order of their start cells, events in order of time.

    `voice` is the index of the wording the scene is told in: that of its texture, so that a
    reader of the pixels can know it.
    """

    seed: int
    objects: tuple[Object, ...]
    events: tuple[Event, ...]
    texture: str
    voice: int


@dataclass(frozen=True)
class State:
    """One visible object at one time: index in the scene, colour now, centre in units of cells.

    `y` and `x` run over [0, 3] of the picture's height and width: 0.5 is the centre of cell 0.
    """

    index: int
    color: str
    y: float
    x: float

    @property
    def cell(self) -> Cell:
        """The cell (row, col) the centre is in."""
        return min(2, int(self.y)), min(2, int(self.x))


def place(cell: Cell) -> str:
    """The word of CELLS for (row, col)."""
    return CELLS[3 * cell[0] + cell[1]]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(key)))


def _weighted(rng: np.random.Generator, weights: tuple[float, ...]) -> int:
    point = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return len(weights) - 1


def _path(start: Cell, direction: str, distance: int) -> tuple[Cell, ...]:
    """The cells after `start` on the way; empty when it leaves the grid."""
    dy, dx = STEPS[direction]
    cells = tuple((start[0] + dy * i, start[1] + dx * i) for i in range(1, distance + 1))
    return cells if all(0 <= r <= 2 and 0 <= c <= 2 for r, c in cells) else ()


def _looks(objects: tuple[Object, ...], events: tuple[Event, ...]) -> set[tuple[str, str]]:
    """Every (colour, shape) that is ever used, so that a new one can be kept distinct."""
    looks = {(o.color, o.shape) for o in objects}
    return looks | {(e.color, objects[e.index].shape) for e in events if e.color is not None}


def scene(seed: int, *, max_objects: int = 6) -> Scene:
    """The scene of `seed` (any int >= 0): 1 to `max_objects` objects, 0 to 3 events.

    No two objects ever have the same colour and shape, and no two paths share a cell.
    Objects that appear or vanish do not travel, so their place is one word.
    """
    rng = _generator(0, seed)
    texture = int(rng.integers(len(TEXTURES)))
    count = 1 + _weighted(rng, COUNT_WEIGHTS[:max_objects])
    cells: list[Cell] = [(int(c) // 3, int(c) % 3) for c in sorted(rng.permutation(9)[:count])]
    looks = [(int(n) // len(SHAPES), int(n) % len(SHAPES)) for n in rng.permutation(48)[:count]]
    sizes = [SIZES[int(rng.integers(2))] for _ in range(count)]

    # What happens, and to whom: at most one event per object and per time.
    changes = min(_weighted(rng, EVENT_WEIGHTS), count)
    chosen = [int(i) for i in rng.permutation(count)[:changes]]
    quarters = sorted(int(i) for i in rng.permutation(len(TIMES))[:changes])
    used = {(COLORS[c], SHAPES[s]) for c, s in looks}
    events: list[Event] = []
    appearing = 0
    for index, quarter in zip(chosen, quarters, strict=True):
        kind = KINDS[_weighted(rng, (0.4, 0.3, 0.3))]
        if kind == "appear" and appearing == count - 1:
            kind = "recolour"
        appearing += kind == "appear"
        color: str | None = None
        shape = SHAPES[looks[index][1]]
        if kind == "recolour":
            free = [c for c in COLORS if (c, shape) not in used]
            color = free[int(rng.integers(len(free)))]
            used.add((color, shape))
        time = TIMES[quarter] + JITTER * (2 * rng.random() - 1)
        events.append(Event(kind, index, round(float(time), 4), color))

    settled = {e.index for e in events if e.kind != "recolour"}
    taken = set(cells)
    objects: list[Object] = []
    for index in range(count):
        start = end = cells[index]
        motion = "loop" if rng.random() < 0.3 else "still"
        if index not in settled and rng.random() < 0.65:
            for direction in (MOTIONS[1 + int(d)] for d in rng.permutation(4)):
                ways = [w for w in (_path(start, direction, d) for d in (1, 2)) if w]
                ways = [w for w in ways if not taken & set(w)]
                if ways:
                    way = ways[int(rng.integers(len(ways)))]
                    motion, end = direction, way[-1]
                    taken |= set(way)
                    break
        color_index, shape_index = looks[index]
        objects.append(
            Object(SHAPES[shape_index], COLORS[color_index], sizes[index], start, motion, end)
        )
    return Scene(seed, tuple(objects), tuple(events), TEXTURES[texture], texture)


def seen(scene: Scene, time: float) -> tuple[State, ...]:
    """The objects visible at `time` in [0, 1], in the order of the scene."""
    return tuple(
        state for i in range(len(scene.objects)) if (state := _state(scene, i, time)) is not None
    )


def _state(scene: Scene, index: int, time: float) -> State | None:
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
    y, x = thing.start[0] + 0.5, thing.start[1] + 0.5
    if thing.motion == "loop":
        y += LOOP * math.sin(2 * math.pi * time)
        x += LOOP * math.cos(2 * math.pi * time)
    else:
        done = min(1.0, max(0.0, (time - LEAVE) / (ARRIVE - LEAVE)))
        y += done * (thing.end[0] - thing.start[0])
        x += done * (thing.end[1] - thing.start[1])
    return State(index, color, y, x)


class _Sprite(NamedTuple):
    """Coverage [n, n] in 0..1, the part of it drawn in the contrast colour, and a mask."""

    cover: NDArray[np.float32]
    cue: NDArray[np.float32]
    mask: NDArray[np.bool_]


def _half(radius: float) -> int:
    """Half the side of a sprite, less its middle pixel; the tips of a star reach to 1.1."""
    return math.ceil(1.1 * radius) + 1


@lru_cache(maxsize=256)
def _sprite(shape: str, radius: float) -> _Sprite:
    half = _half(radius)
    fine = 4
    axis = (np.arange((2 * half + 1) * fine) + 0.5) / fine - half - 0.5
    y, x = np.meshgrid(axis / radius, axis / radius, indexing="ij")
    far = np.hypot(y, x)
    cue = np.zeros_like(far, dtype=bool)
    if shape == "circle":
        inside = far <= 1
    elif shape == "square":
        inside = np.maximum(abs(y), abs(x)) <= 0.88
        cue = inside & (abs(y) <= 0.22)
    elif shape == "triangle":
        inside = (y <= 0.85) & (abs(x) <= (y + 1) / 1.85)
    elif shape == "cross":
        inside = (np.minimum(abs(y), abs(x)) <= 0.34) & (np.maximum(abs(y), abs(x)) <= 1)
    elif shape == "ring":
        inside = (far <= 1) & (far >= 0.55)
    elif shape == "star":
        # Fold the plane into one half point, from a tip (angle 0, radius 1.1) to a notch.
        fold = np.pi / 5
        angle = abs((np.arctan2(x, -y) + fold) % (2 * fold) - fold)
        u, v = far * np.cos(angle), far * np.sin(angle)
        notch_u, notch_v = 0.48 * np.cos(fold), 0.48 * np.sin(fold)
        inside = (u - 1.1) * notch_v - v * (notch_u - 1.1) <= 0
        cue = inside & (far <= 0.26)
    else:
        raise ValueError(f"no such shape: {shape!r}")

    def shrink(a: NDArray[np.bool_]) -> NDArray[np.float32]:
        n = 2 * half + 1
        return a.reshape(n, fine, n, fine).mean(axis=(1, 3), dtype=np.float32)

    cover = shrink(inside)
    return _Sprite(cover, shrink(cue), cover >= 0.5)


@lru_cache(maxsize=512)
def _paint(shape: str, radius: float, color: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """(what stays of the ground [n, n, 1], what is added to it [n, n, 3]), float32."""
    sprite = _sprite(shape, radius)
    ink = 245.0 if color in ("black", "blue") else 15.0
    rgb = PALETTE[COLORS.index(color)].astype(np.float32)
    cue = sprite.cue[..., None]
    # The half rounds when the sum is cut to uint8.
    added = (sprite.cover[..., None] - cue) * rgb + cue * ink + np.float32(0.5)
    return 1 - sprite.cover[..., None], added.astype(np.float32)


@lru_cache(maxsize=32)
def _ground(texture: str, height: int, width: int) -> NDArray[np.uint8]:
    """The background without its time tint, [height, width, 3]. Patterns are fixed in pixels."""
    y, x = np.arange(height)[:, None], np.arange(width)[None, :]
    pattern = np.zeros((height, width))
    if texture == "striped":
        pattern += np.where(y % 8 < 4, 14.0, -14.0)
    elif texture == "checkered":
        pattern += np.where((y // 7 + x // 7) % 2 == 0, 14.0, -14.0)
    elif texture == "speckled":
        # An integer hash of 2 x 2 blocks: noise without a generator, the same at every size.
        block = (y // 2).astype(np.uint32) * np.uint32(73856093) ^ (x // 2).astype(
            np.uint32
        ) * np.uint32(19349663)
        block = (block ^ (block >> np.uint32(13))) * np.uint32(1274126177)
        pattern += np.where((block >> np.uint32(16)) % 4 == 0, -28.0, 8.0)
    ground = np.full((height, width, 3), 122.0) + pattern[..., None]
    ground[..., 0] += 32 * ((x + 0.5) / width - 0.5) * 2
    ground[..., 1] += 32 * ((y + 0.5) / height - 0.5) * 2
    ground.setflags(write=False)
    return ground.clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class _Stroke:
    """One object drawn at one place in frames first..last-1: corner (top, left), radius."""

    first: int
    last: int
    index: int
    color: str
    top: int
    left: int
    radius: float


def _strokes(scene: Scene, frames: int, height: int, width: int) -> Iterator[_Stroke]:
    scale = min(height, width) / 112
    for index, thing in enumerate(scene.objects):
        radius = round(RADII[SIZES.index(thing.size)] * scale * 4) / 4
        half = _half(radius)
        run: _Stroke | None = None
        for k in range(frames):
            state = _state(scene, index, (k + 0.5) / frames)
            if state is None:
                if run is not None:
                    yield run
                run = None
                continue
            top = math.floor(state.y * height / 3) - half
            left = math.floor(state.x * width / 3) - half
            if run is not None and (run.color, run.top, run.left) == (state.color, top, left):
                run = replace(run, last=k + 1)
                continue
            if run is not None:
                yield run
            run = _Stroke(k, k + 1, index, state.color, top, left, radius)
        if run is not None:
            yield run


def _window(stroke: _Stroke, height: int, width: int) -> tuple[tuple[slice, ...], ...]:
    """(slices of the clip [frames, y, x], slices of the sprite [y, x]), cut at the borders."""
    n = 2 * _half(stroke.radius) + 1
    y0, y1 = max(0, stroke.top), min(height, stroke.top + n)
    x0, x1 = max(0, stroke.left), min(width, stroke.left + n)
    return (
        (slice(stroke.first, stroke.last), slice(y0, y1), slice(x0, x1)),
        (slice(y0 - stroke.top, y1 - stroke.top), slice(x0 - stroke.left, x1 - stroke.left)),
    )


def render(scene: Scene, frames: int, height: int, width: int | None = None) -> NDArray[np.uint8]:
    """The pixels, uint8 [frames, height, width, 3] in RGB; a square without `width`.

    Frame k shows the time (k + 0.5) / frames of the clip. Sides are at least 56 pixels.
    """
    width = height if width is None else width
    if frames < 1 or min(height, width) < 56:
        raise ValueError(f"want frames >= 1 and sides >= 56, got {frames}, {height} x {width}")
    clip = np.empty((frames, height, width, 3), dtype=np.uint8)
    ground = _ground(scene.texture, height, width)
    clip[:] = ground
    for k in range(frames):
        tint = np.uint8(round(80 * (k + 0.5) / frames))
        clip[k, :, :, 2] = ground[..., 2] - np.uint8(40) + tint
    for stroke in _strokes(scene, frames, height, width):
        where, part = _window(stroke, height, width)
        stays, added = _paint(scene.objects[stroke.index].shape, stroke.radius, stroke.color)
        clip[where] = (clip[where] * stays[part] + added[part]).astype(np.uint8)
    return clip


def image_frame(scene: Scene, height: int, width: int | None = None) -> NDArray[np.uint8]:
    """The picture at time 0.5, uint8 [height, width, 3]: what the image tasks speak about."""
    frame: NDArray[np.uint8] = render(scene, 1, height, width)[0]
    return frame


# A token counts as background when its fullest object has less than this share of its pixels.
LEAST_SHARE = 0.06


def labels(
    scene: Scene,
    frames: int,
    height: int,
    width: int | None = None,
    *,
    cell: int = 28,
    temporal: int = 2,
) -> dict[str, NDArray[np.int64]]:
    """What each visual token shows: int64 arrays [frames/temporal, height/cell, width/cell].

    `shape`, `color`, `size`, `motion`: 0 for background, else 1 + the index in SHAPES, COLORS,
    SIZES, MOTIONS of the object with most pixels in the token. `row`, `col` (0..2) and `time`
    (quarter of the clip, 0..3) are given for every token. Rests of a side or of the frames that
    fill no token are left out; a single frame makes one step of tokens.
    """
    width = height if width is None else width
    temporal = min(temporal, frames)
    steps, rows, cols = frames // temporal, height // cell, width // cell
    ids = np.zeros((frames, height, width), dtype=np.uint8)
    for stroke in _strokes(scene, frames, height, width):
        where, part = _window(stroke, height, width)
        mask = _sprite(scene.objects[stroke.index].shape, stroke.radius).mask[part]
        ids[where][:, mask] = stroke.index + 1
    ids = ids[: steps * temporal, : rows * cell, : cols * cell]
    blocks = ids.reshape(steps, temporal, rows, cell, cols, cell)
    count = np.zeros((len(scene.objects) + 1, steps, rows, cols), dtype=np.int64)
    for index in range(1, len(scene.objects) + 1):
        count[index] = (blocks == index).sum(axis=(1, 3, 5))
    count[0] = LEAST_SHARE * temporal * cell * cell
    winner = count.argmax(axis=0)

    things = scene.objects
    tables = {
        "shape": [0, *(1 + SHAPES.index(o.shape) for o in things)],
        "size": [0, *(1 + SIZES.index(o.size) for o in things)],
        "motion": [0, *(1 + MOTIONS.index(o.motion) for o in things)],
    }
    out = {name: np.array(table, dtype=np.int64)[winner] for name, table in tables.items()}
    colors = np.zeros((steps, len(things) + 1), dtype=np.int64)
    middles = [(s * temporal + temporal / 2) / frames for s in range(steps)]
    for index, thing in enumerate(things):
        for step, middle in enumerate(middles):
            state = _state(scene, index, middle)
            now = thing.color if state is None else state.color
            colors[step, index + 1] = 1 + COLORS.index(now)
    out["color"] = colors[np.arange(steps)[:, None, None], winner]
    shape = (steps, rows, cols)
    row = np.arange(rows) * 2 + 1
    col = np.arange(cols) * 2 + 1
    out["row"] = np.broadcast_to((3 * row // (2 * rows))[None, :, None], shape).astype(np.int64)
    out["col"] = np.broadcast_to((3 * col // (2 * cols))[None, None, :], shape).astype(np.int64)
    quarter = np.array([min(3, int(4 * m)) for m in middles], dtype=np.int64)
    out["time"] = np.broadcast_to(quarter[:, None, None], shape).copy()
    return out


ChangeKind = Literal["color", "size", "shape", "place", "gone", "new"]


class Change(NamedTuple):
    """A difference of two pictures at time 0.5: the object as first seen, and its new word.

    `look` is (size, colour, shape, place) in the first picture, or in the second for "new".
    """

    kind: ChangeKind
    look: tuple[str, str, str, str]
    word: str


def _without(base: Scene, index: int) -> Scene:
    """`base` less one object and its events."""
    events = tuple(
        replace(e, index=e.index - (e.index > index)) for e in base.events if e.index != index
    )
    objects = base.objects[:index] + base.objects[index + 1 :]
    return replace(base, objects=objects, events=events)


def _with(base: Scene, thing: Object) -> Scene:
    """`base` with one more object, put into reading order."""
    at = sum(o.start < thing.start for o in base.objects)
    events = tuple(replace(e, index=e.index + (e.index >= at)) for e in base.events)
    return replace(base, objects=(*base.objects[:at], thing, *base.objects[at:]), events=events)


def changes(scene: Scene, seed: int) -> tuple[Scene, tuple[Change, ...]]:
    """`edit(scene, seed)` together with the list of what it changed (1 or 2 differences)."""
    rng = _generator(1, scene.seed, seed)

    def pick(options: list[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    edited, found = scene, []
    visible = [scene.objects[s.index] for s in seen(scene, 0.5)]
    order = [visible[int(i)] for i in rng.permutation(len(visible))]
    for thing in order[: 1 + int(rng.integers(2))]:
        index = edited.objects.index(thing)
        state = _state(edited, index, 0.5)
        assert state is not None
        look = (thing.size, state.color, thing.shape, place(state.cell))
        # The thing as it is at 0.5, without its events, so that both pictures are plain facts.
        base, now = _without(edited, index), replace(thing, color=state.color)
        used = _looks(base.objects, base.events) | {(state.color, thing.shape)}
        used |= {(thing.color, thing.shape)}
        free = [(r, c) for r in range(3) for c in range(3) if (r, c) not in _ways(edited)]
        settled = thing.start == thing.end
        kinds: list[ChangeKind] = ["color", "size", "shape", "gone"]
        if free and settled:
            kinds += ["place", "place"]
        kind: ChangeKind = pick(kinds)
        if kind == "color":
            word = pick([c for c in COLORS if (c, thing.shape) not in used])
            edited = _with(base, replace(now, color=word))
        elif kind == "size":
            word = SIZES[1 - SIZES.index(thing.size)]
            edited = _with(base, replace(now, size=word))
        elif kind == "shape":
            word = pick([s for s in SHAPES if (state.color, s) not in used])
            edited = _with(base, replace(now, shape=word))
        elif kind == "place":
            cell = pick(free)
            word = place(cell)
            edited = _with(base, replace(now, start=cell, end=cell))
        else:
            word = ""
            edited = base
        found.append(Change(kind, look, word))
    free = [(r, c) for r in range(3) for c in range(3) if (r, c) not in _ways(edited)]
    if free and (not found or (len(found) == 1 and rng.random() < 0.25)):
        used = _looks(edited.objects, edited.events) | _looks(scene.objects, scene.events)
        cell = pick(free)
        color, shape = pick([(c, s) for c in COLORS for s in SHAPES if (c, s) not in used])
        size = pick(list(SIZES))
        edited = _with(edited, Object(shape, color, size, cell, "still", cell))
        found.append(Change("new", (size, color, shape, place(cell)), ""))
    found.sort(key=lambda c: CELLS.index(c.look[3]))
    return edited, tuple(found)


def edit(scene: Scene, seed: int) -> Scene:
    """A second scene that differs from `scene` in one or two attributes at time 0.5."""
    return changes(scene, seed)[0]


def _ways(scene: Scene) -> set[Cell]:
    """Every cell that some object is ever in."""
    cells: set[Cell] = set()
    for o in scene.objects:
        (r0, c0), (r1, c1) = sorted((o.start, o.end))
        cells |= {(r, c) for r in range(r0, r1 + 1) for c in range(min(c0, c1), max(c0, c1) + 1)}
    return cells


def write_clip(
    scene: Scene,
    path: str | Path,
    frames: int,
    height: int,
    width: int | None = None,
    fps: float = 8.0,
) -> None:
    """Write the clip as an MP4 (H.264, yuv420p) of `frames` frames at `fps`; even sides only."""
    import av

    width = height if width is None else width
    if height % 2 or width % 2:
        raise ValueError(f"H.264 wants even sides, got {height} x {width}")
    rate = Fraction(fps).limit_denominator(1000)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "16", "preset": "veryfast", "threads": "1"}
        for picture in render(scene, frames, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def truth(
    scene: Scene, frames: int, height: int, width: int | None = None, *, fps: float = 8.0
) -> dict[str, Any]:
    """Everything that is true of the clip, ready for JSON; times in seconds of the clip."""
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
            {
                "size": o.size,
                "color": o.color,
                "shape": o.shape,
                "motion": o.motion,
                "start": place(o.start),
                "end": place(o.end),
            }
            for o in scene.objects
        ],
        "events": [
            {"kind": e.kind, "object": e.index, "seconds": e.time * seconds, "color": e.color}
            for e in scene.events
        ],
    }
