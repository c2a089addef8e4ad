"""Renders the exact pixels of a scene: frames, one picture, or an MP4.

A scene (``scenes.Scene``) is a few coloured shapes that move over a textured background. The
places in it are the cells of a 3 x 3 grid. A scene can be rendered with any number of frames and in
any size from 56 pixels a side on, and its pixels are the same on every machine. The background has
a soft tint: red grows with x, green with y and blue with time. From this tint the vision-language
model can tell the place and the time, which its own positions, being relative, do not say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.inputs.media import Clip, FrameSampling, read
from saccade.world.scenes import COLORS, SIZES, Scene, state_at

# RGB of each of COLORS, near the corners of the colour cube.
PALETTE: NDArray[np.uint8] = np.array(
    [
        (225, 25, 25),
        (20, 165, 40),
        (30, 50, 230),
        (250, 225, 30),
        (40, 220, 230),
        (195, 40, 215),
        (255, 255, 255),
        (10, 10, 10),
    ],
    dtype=np.uint8,
)

# The radius of each of SIZES, in pixels of a frame of 112 x 112. There a cell of the scene's 3 x 3
# grid has about 37 x 37 pixels.
RADII = (10.5, 16.5)


class Sprite(NamedTuple):
    """The pixels [n, n] of a shape.

    Some shapes have a cue, a part in a contrasting colour: squares a bar, and stars a dot.
    """

    cover: NDArray[np.float32]  # The share of each pixel that the shape covers, its cue included.
    cue: NDArray[np.float32]  # The share of each pixel that the cue covers.
    mask: NDArray[np.bool_]  # The pixels at least half of which the shape covers.


def _half_side(radius: float) -> int:
    """Returns how many pixels a sprite has on each side of its middle pixel.

    The tips of a star reach farthest: they are 1.1 radii from the centre.
    """
    return math.ceil(1.1 * radius) + 1


@lru_cache(maxsize=256)
def sprite(shape: str, radius: float) -> Sprite:
    """Returns the sprite of a shape with a radius in pixels."""
    half = _half_side(radius)
    # Each pixel is sampled at 4 x 4 points. (y, x) are the coordinates of these points from the
    # centre. Their unit is the radius, and so is the unit of the lengths below.
    subpixels = 4
    axis = (np.arange((2 * half + 1) * subpixels) + 0.5) / subpixels - half - 0.5
    y, x = np.meshgrid(axis / radius, axis / radius, indexing="ij")
    distance = np.hypot(y, x)
    cue = np.zeros_like(distance, dtype=bool)
    if shape == "circle":
        inside = distance <= 1
    elif shape == "square":
        inside = np.maximum(abs(y), abs(x)) <= 0.88
        cue = inside & (abs(y) <= 0.22)
    elif shape == "triangle":
        inside = (y <= 0.85) & (abs(x) <= (y + 1) / 1.85)
    elif shape == "cross":
        inside = (np.minimum(abs(y), abs(x)) <= 0.34) & (np.maximum(abs(y), abs(x)) <= 1)
    elif shape == "ring":
        inside = (distance <= 1) & (distance >= 0.55)
    elif shape == "star":
        # The star has five arms. All sampled points are folded onto one half of one arm: from its
        # tip (angle 0, radius 1.1) to the next notch (angle pi / 5, radius 0.48).
        fold = np.pi / 5
        angle = abs((np.arctan2(x, -y) + fold) % (2 * fold) - fold)
        u = distance * np.cos(angle)
        v = distance * np.sin(angle)
        notch_u = 0.48 * np.cos(fold)
        notch_v = 0.48 * np.sin(fold)
        # A point is inside if it lies on the centre's side of the line from the tip to the notch.
        inside = (u - 1.1) * notch_v - v * (notch_u - 1.1) <= 0
        cue = inside & (distance <= 0.26)
    else:
        raise ValueError(f"no such shape: {shape!r}")

    def shrink(points: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Returns for each pixel the share of its points that are true."""
        n = 2 * half + 1
        return points.reshape(n, subpixels, n, subpixels).mean(axis=(1, 3), dtype=np.float32)

    cover = shrink(inside)
    return Sprite(cover, shrink(cue), cover >= 0.5)


@lru_cache(maxsize=512)
def _paint_layers(shape: str, radius: float, color: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns what a sprite's pixels are painted with: the share of the background that remains
    visible [n, n, 1], and the colour that is added to it [n, n, 3]."""
    shape_sprite = sprite(shape, radius)
    contrast = 245.0 if color in ("black", "blue") else 15.0
    rgb = PALETTE[COLORS.index(color)].astype(np.float32)
    cue = shape_sprite.cue[..., None]
    # Half a step is added, so that the conversion to uint8, which truncates, rounds to the nearest.
    ink_layer = (shape_sprite.cover[..., None] - cue) * rgb + cue * contrast + np.float32(0.5)
    return 1 - shape_sprite.cover[..., None], ink_layer.astype(np.float32)


@lru_cache(maxsize=32)
def _background(texture: str, height: int, width: int) -> NDArray[np.uint8]:
    """Returns the background without the tint of time, [height, width, 3]. The patterns of textures
    have the same size in pixels in every picture."""
    y = np.arange(height)[:, None]
    x = np.arange(width)[None, :]
    pattern = np.zeros((height, width))
    if texture == "striped":
        pattern += np.where(y % 8 < 4, 14.0, -14.0)
    elif texture == "checkered":
        pattern += np.where((y // 7 + x // 7) % 2 == 0, 14.0, -14.0)
    elif texture == "speckled":
        # Each block of 2 x 2 pixels is dark or light by a hash of its place. A random generator
        # would give other blocks at another size.
        block_y = (y // 2).astype(np.uint32)
        block_x = (x // 2).astype(np.uint32)
        block = block_y * np.uint32(73856093) ^ block_x * np.uint32(19349663)
        block = (block ^ (block >> np.uint32(13))) * np.uint32(1274126177)
        pattern += np.where((block >> np.uint32(16)) % 4 == 0, -28.0, 8.0)
    ground = np.full((height, width, 3), 122.0) + pattern[..., None]
    ground[..., 0] += 32 * ((x + 0.5) / width - 0.5) * 2
    ground[..., 1] += 32 * ((y + 0.5) / height - 0.5) * 2
    background = ground.clip(0, 255).astype(np.uint8)
    background.setflags(write=False)
    return background


@dataclass(frozen=True)
class Stroke:
    """An object in a run of frames in which it looks the same and stays at the same place."""

    first: int  # The run's first frame.
    stop: int  # The frame after its last one.
    index: int  # The object's number in the scene.
    color: str  # One of COLORS.
    # The upper left corner of the object's sprite, in pixels. It may lie outside the picture.
    top: int
    left: int
    radius: float  # In pixels.


def strokes(scene: Scene, frames: int, height: int, width: int) -> Iterator[Stroke]:
    """Yields the strokes of every object: one for each run of frames in which it looks the same.

    An object that does not move and changes its colour once has two.
    """
    scale = min(height, width) / 112  # RADII are for frames of 112 x 112.
    for index, thing in enumerate(scene.objects):
        radius = round(RADII[SIZES.index(thing.size)] * scale * 4) / 4  # In quarters of a pixel.
        half = _half_side(radius)
        looks: list[tuple[str, int, int] | None] = []  # Colour, top and left in each frame.
        for k in range(frames):  # Frame k shows the middle of its part of the clip.
            state = state_at(scene, index, (k + 0.5) / frames)
            if state is None:
                looks.append(None)
                continue
            top = math.floor(state.y * height / 3) - half
            left = math.floor(state.x * width / 3) - half
            looks.append((state.color, top, left))
        for look, run in groupby(range(frames), key=looks.__getitem__):
            if look is not None:  # The object is visible in this run of frames.
                run_frames = [*run]
                color, top, left = look
                yield Stroke(run_frames[0], run_frames[-1] + 1, index, color, top, left, radius)


def clip_and_sprite_slices(
    stroke: Stroke, height: int, width: int
) -> tuple[tuple[slice, ...], ...]:
    """Returns where a stroke paints: the slices of the clip [frames, y, x] and the slices of the
    sprite [y, x] that go there. The sprite is cut at the borders of the picture."""
    n = 2 * _half_side(stroke.radius) + 1
    y0 = max(0, stroke.top)
    y1 = min(height, stroke.top + n)
    x0 = max(0, stroke.left)
    x1 = min(width, stroke.left + n)
    return (
        (slice(stroke.first, stroke.stop), slice(y0, y1), slice(x0, x1)),
        (slice(y0 - stroke.top, y1 - stroke.top), slice(x0 - stroke.left, x1 - stroke.left)),
    )


def render(scene: Scene, frames: int, height: int, width: int | None = None) -> NDArray[np.uint8]:
    """Returns the pixels, uint8 [frames, height, width, 3] in RGB; a square without `width`.

    Frame k shows the time (k + 0.5) / frames of the clip. Raises ValueError for a side below 56
    pixels, or without frames.
    """
    width = height if width is None else width
    if frames < 1 or min(height, width) < 56:
        raise ValueError(f"want frames >= 1 and sides >= 56, got {frames}, {height} x {width}")
    pixels = np.empty((frames, height, width, 3), dtype=np.uint8)
    ground = _background(scene.texture, height, width)
    pixels[:] = ground
    for k in range(frames):
        # Over the clip the tint of time goes from -40 to 40 in the blue channel. It is added in two
        # steps, because uint8 has no negative numbers.
        tint_above_lowest = np.uint8(round(80 * (k + 0.5) / frames))
        pixels[k, :, :, 2] = ground[..., 2] - np.uint8(40) + tint_above_lowest
    for stroke in strokes(scene, frames, height, width):
        clip_slices, sprite_slices = clip_and_sprite_slices(stroke, height, width)
        ground_share, ink_layer = _paint_layers(
            scene.objects[stroke.index].shape, stroke.radius, stroke.color
        )
        pixels[clip_slices] = (
            pixels[clip_slices] * ground_share[sprite_slices] + ink_layer[sprite_slices]
        ).astype(np.uint8)
    return pixels


def image_frame(scene: Scene, height: int, width: int | None = None) -> NDArray[np.uint8]:
    """Returns the picture at time 0.5, uint8 [height, width, 3], for tasks about pictures."""
    frame: NDArray[np.uint8] = render(scene, frames=1, height=height, width=width)[0]
    return frame


def render_through_mp4(scene: Scene, frames: int, size: int) -> Clip:
    """Returns the clip as a file would give it: written as an MP4 and read back, every frame."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_clip(scene, path, frames, size)
        return read(path, FrameSampling(every=True))


def write_clip(
    scene: Scene,
    path: str | Path,
    frames: int,
    height: int,
    width: int | None = None,
    fps: float = 8.0,
) -> None:
    """Writes the clip as an MP4 (H.264, yuv420p) of `frames` frames, `fps` of them a second. Raises
    ValueError for odd sides."""
    import av

    width = height if width is None else width
    if height % 2 or width % 2:
        raise ValueError(f"H.264 wants even sides, got {height} x {width}")
    rate = Fraction(fps).limit_denominator(1000)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # Without the last option the file's bytes depend on where memory happens to lie.
        stream.options = {
            "crf": "16", "preset": "veryfast", "threads": "1", "x264-params": "cpu-independent=1"
        }  # fmt: skip
        for picture in render(scene, frames, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
