"""The cell of every visual token, derived here once more from the sizes of pictures and frames."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import zoo
from helpers import dealt

from lab.checkpoints import SIDE, TILES
from saccade.core.prompt import Prefill, Prompt, Texts
from saccade.core.sampling import Sampling
from saccade.inputs import Loaded
from saccade.methods import VIEWS
from saccade.model.session import Session

Grid = tuple[int, int, int]  # times, lines, columns
BELOW = 10  # the line where a picture cut into tiles goes on, at time 1, after the whole of it

CELL = 28  # pixels a side of what becomes one token in a Qwen model
PATCHES = 4  # along a side of a LLaVA picture of 56 pixels
STREAMING = ("streaming", "streaming-still")  # views that keep what is first and last
WRITTEN = ("text", "caption")  # views that put words in the place of a picture
LEAST = 128 * CELL * CELL  # pixels Qwen2.5-Omni's processor blows a smaller frame up to

pytestmark = pytest.mark.usefixtures("unchecked")

# -- what the sizes say ------------------------------------------------------------------------


def qwen_lines(height: int, width: int, least: int = 0) -> tuple[int, int]:
    """Cells of a Qwen picture: each side rounded to whole cells, enlarged if that is too small."""
    lines, columns = round(height / CELL), round(width / CELL)
    if lines * columns * CELL**2 < least:
        grown = math.sqrt(least / (height * width))
        return math.ceil(height * grown / CELL), math.ceil(width * grown / CELL)
    return lines, columns


def tiled(height: int, width: int) -> tuple[int, int]:
    """Cells of a LLaVA-NeXT picture cut into tiles, without those that are padding alone.

    Of the tilings offered, the one that shows most of the picture, then the one that wastes least.
    """

    def merit(tiling: list[int]) -> tuple[int, int]:
        scale = min(tiling[0] / height, tiling[1] / width)
        area = min(int(height * scale) * int(width * scale), height * width)
        return area, area - tiling[0] * tiling[1]

    best = max(TILES, key=merit)
    lines, columns = (edge // SIDE * PATCHES for edge in best)
    if width / height > columns / lines:  # bars above and below
        return lines - 2 * ((lines - int(round(height * columns / width, 7))) // 2), columns
    return lines, columns - 2 * ((columns - int(round(width * lines / height, 7))) // 2)


def grids(family: str, media: zoo.Media) -> Iterator[tuple[Grid, ...]]:
    """The grid of each medium of a prompt, videos first, as ``read`` puts them.

    A picture cut into tiles has two: as a whole, and finer.
    """
    for clip in media.clips:
        frames, height, width, _ = clip.frames.shape
        if family in zoo.QWEN:
            least = LEAST if family == "qwen2.5-omni" else 0
            yield ((math.ceil(frames / 2), *qwen_lines(height, width, least)),)
        else:  # pooled two by two
            yield ((frames, PATCHES // 2, PATCHES // 2),)
    for image in media.images:
        height, width, _ = image.shape
        if family in zoo.QWEN:
            yield ((1, *qwen_lines(height, width)),)
            continue
        whole = (1, PATCHES, PATCHES)
        several = family == "llava-onevision" and len(media.images) > 1  # then it cuts no tiles
        finer = family != "llava-1.5" and not several
        yield (whole, (1, *tiled(height, width))) if finer else (whole,)


def cells(family: str, media: zoo.Media) -> list[list[int]]:
    """(medium, t, h, w) of every visual token, in order."""
    return [
        [medium, part + t, BELOW * part + h, w]
        for medium, parts in enumerate(grids(family, media))
        for part, (times, lines, columns) in enumerate(parts)
        for t in range(times)
        for h in range(lines)
        for w in range(columns)
    ]


def newlines(family: str, media: zoo.Media) -> int:
    """One after each line of a tiled picture; OneVision also ends a video or a whole picture."""
    if family not in ("llava-next", "llava-next-video", "llava-onevision"):
        return 0
    several = family == "llava-onevision" and len(media.images) > 1
    lines = [1 if several else tiled(*image.shape[:2])[0] for image in media.images]
    return sum(lines) + (len(media.clips) if family == "llava-onevision" else 0)


# -- 6: grids ----------------------------------------------------------------------------------

SHOWING = [(family, kind) for family, kind in zoo.PAIRS if kind not in ("text", "audio")]


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("family", "kind"), SHOWING)
def test_every_token_stands_where_the_sizes_say(family: str, kind: str) -> None:
    """Claim: each visual token's cell is the one its picture's or frame's size implies, for four
    prompts. Fails if media, times, lines or columns are swapped, or padding is counted."""
    loaded = zoo.member(family)
    for seed in range(4):
        media = zoo.draw(kind, seed)
        prompt = zoo.prompt_of(loaded, zoo.read(loaded, media))
        assert prompt.grid.tolist() == cells(family, media), seed
        assert int(prompt.visual.sum()) == len(prompt.grid)
        if not media.sound:
            assert int(prompt.fixed.sum()) == newlines(family, media), seed


@pytest.mark.parametrize("family", ["llava-next", "llava-next-video", "llava-onevision"])
def test_tilings_of_every_form(family: str) -> None:
    """Claim: the same for pictures that fill each tiling exactly, and for very wide and very tall
    ones. Fails if the newline that ends a line is taken for a cell, or lines for columns."""
    loaded = zoo.member(family)
    for size in [*TILES, [60, 168], [168, 60], [57, 150], [100, 100]]:
        media = zoo.Media("what?", (zoo.picture(*size),))
        prompt = zoo.prompt_of(loaded, zoo.read(loaded, media))
        assert prompt.grid.tolist() == cells(family, media), size
        assert int(prompt.fixed.sum()) == newlines(family, media), size


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", zoo.SEEING)
def test_control_a_turned_picture_has_other_cells(family: str) -> None:
    """Claim: the cells derived for a picture do not fit the same picture on its side (or, where
    all are cropped to a square, one more of it). Fails if the comparison is blind to layout."""
    loaded = zoo.member(family)
    image = zoo.picture(60, 130)
    turned = (image, image) if family == "llava-1.5" else (image.transpose(1, 0, 2).copy(),)
    prompt = zoo.prompt_of(loaded, zoo.read(loaded, zoo.Media("what?", (image,))))
    assert prompt.grid.tolist() == cells(family, zoo.Media("what?", (image,)))
    assert prompt.grid.tolist() != cells(family, zoo.Media("what?", turned))


# -- rows no view may drop ---------------------------------------------------------------------


FIXED = [
    ("llava-next", "image"),
    ("llava-next", "images"),
    ("llava-next-video", "both"),
    ("llava-onevision", "image"),
    ("llava-onevision", "images"),
    ("llava-onevision", "videos"),
    ("llava-onevision", "both"),
    ("qwen2.5-omni", "heard"),
]


def newline_rows(loaded: Loaded, prompt: Prompt) -> list[bool]:
    weight = loaded.backbone.model.base_model.image_newline
    return (prompt.embeds == weight).all(-1).tolist()


@pytest.mark.parametrize(("family", "kind"), FIXED)
def test_newlines_and_sound_are_fixed(family: str, kind: str) -> None:
    """Claim: ``fixed`` marks exactly a model's newline rows and its audio tokens, none of them
    visual. Fails if one is counted among what a view may drop, or text is marked."""
    loaded = zoo.member(family)
    prompt = zoo.prompt_of(loaded, zoo.make_inputs(loaded, kind))
    if family == "qwen2.5-omni":
        audio = loaded.backbone.model.config.audio_token_id
        expected = (prompt.full_ids == audio).tolist()
    else:
        expected = newline_rows(loaded, prompt)
    assert any(expected) and prompt.fixed.tolist() == expected
    assert not bool((prompt.fixed & prompt.visual).any())


def test_sound_alone_leaves_nothing_to_drop() -> None:
    """Claim: a prompt with sound only has no visual row. Fails if audio is taken for a picture."""
    loaded = zoo.member("qwen2.5-omni")
    prompt = zoo.prompt_of(loaded, zoo.make_inputs(loaded, "audio"))
    assert prompt.visual_tokens == 0 and bool(prompt.fixed.any())


def prefilled(loaded: Loaded, kind: str) -> Prefill:
    prompt = zoo.prompt_of(loaded, zoo.make_inputs(loaded, kind))
    session = Session(loaded.backbone, [Sampling()])
    words: Mapping[str, Texts] = {"newline": ((10,),), "caption": ((65, 66, 67),)}
    return replace(session.prefill([prompt], record=True)[0], replacement_texts=words)


def kept_rows(view: Any, prefill: Prefill) -> list[set[int]]:
    """Rows of the whole prompt a view keeps, a set per head where heads differ."""
    seen = view(prefill, prefill.prompt)
    if seen.reading.heads is None:
        return [set(seen.places.tolist())]
    return [set(rows) for rows in seen.reading.heads.flatten(0, 1).tolist()]


@pytest.mark.representatives(6)
@pytest.mark.parametrize(
    ("name", "example"),
    dealt([name for name in VIEWS if name not in (*STREAMING, *WRITTEN)], FIXED),
)
def test_fixed_rows_and_text_survive_every_view(name: str, example: tuple[str, str]) -> None:
    """Claim: with a tenth of the visual tokens (or none) a view keeps all text, newlines and sound.
    Fails if a view drops one. (Streaming views drop text by design, and say so.)"""
    family, kind = example
    prefill = prefilled(zoo.member(family), kind)
    view: Any = VIEWS[name]
    if name not in ("full", "none") and "keep" in {field.name for field in fields(view)}:
        view = replace(view, keep=0.1)
    whole = prefill.prompt
    must = set(whole.places[~whole.visual].tolist())
    for rows in kept_rows(view, prefill):
        assert must <= rows
        if name != "full":
            assert len(rows) < len(whole)  # so that something was at risk


@pytest.mark.representatives(8)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("family", "kind"), FIXED)
def test_written_views_drop_newlines_and_keep_sound(family: str, kind: str, name: str) -> None:
    """Claim: where words stand for a picture its newlines go with it; sound stays, and so does all
    text, in order. Fails if a newline is left behind without its picture."""
    loaded = zoo.member(family)
    prefill = prefilled(loaded, kind)
    whole = prefill.prompt
    seen = VIEWS[name](prefill, whole)
    assert seen.reading.ids_to_embed is not None and seen.visual_tokens == 0
    old = seen.places[seen.reading.ids_to_embed < 0]
    wanted = ~whole.visual
    if family != "qwen2.5-omni":
        wanted &= ~whole.fixed
    assert old.tolist() == whole.places[wanted].tolist()
    written = len(seen) - len(old)
    media = len(set(whole.grid[:, 0].tolist()))
    assert written == media * len(
        prefill.replacement_texts["newline" if name == "text" else "caption"][0]
    )
    assert loaded.backbone.embed_missing_rows(seen).reading.ids_to_embed is None


@pytest.mark.parametrize("name", STREAMING)
def test_control_a_view_that_drops_newlines_is_noticed(name: str) -> None:
    """Claim: a streaming view, which drops what is neither first nor last, fails the test above.
    Fails if that test would pass a view that loses rows."""
    prefill = prefilled(zoo.member("llava-next"), "images")
    view: Any = replace(VIEWS[name], keep=0.1)  # type: ignore[type-var]
    whole = prefill.prompt
    must = set(whole.places[~whole.visual].tolist())
    assert not all(must <= rows for rows in kept_rows(view, prefill))
