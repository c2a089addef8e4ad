"""Claims about where visual tokens stand: (medium, t, h, w) of every row of placeholders.

Expected cells are written out by loops over pictures, lines and frames, as processors lay them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.model.visual_grid import (
    PictureLayout,
    arrange_cells,
    grid_cells,
    image_cells,
    video_cells,
)

Cell = tuple[int, int, int, int]
NONE: Cell = (-1, -1, -1, -1)
SIDE = PictureLayout(image_side=3, frame_side=2)


def marks(text: str) -> Tensor:
    """Which rows are newlines: n is one, anything else is not."""
    return torch.tensor([letter == "n" for letter in text], dtype=torch.bool)


def list_cells(parts: Sequence[Tensor]) -> list[list[Cell]]:
    """What a run was cut into, as plain tuples."""
    return [[(m, t, h, w) for m, t, h, w in part.tolist()] for part in parts]


def box(medium: int, t: int, h: int, w: int, start: int = 0) -> list[Cell]:
    return [(medium, start + a, b, c) for a in range(t) for b in range(h) for c in range(w)]


def base(lead: int = 0, side: int = 3) -> list[Cell]:
    """A whole square picture, rows that are no cells before it."""
    return [NONE] * lead + box(0, 1, side, side)


def lines(high: int, wide: int) -> list[Cell]:
    """A picture's finer grid, its time 1 from row 10 on: a newline, no cell, after every line."""
    cells: list[Cell] = []
    for h in range(high):
        cells += [(0, 1, 10 + h, w) for w in range(wide)] + [NONE]
    return cells


def row(length: int) -> list[Cell]:
    return box(0, 1, 1, length)


def written(cells: Sequence[Cell], newlines: bool = True) -> str:
    """Such rows as letters; rows that are no cells are newlines, save those at the start."""
    text = "".join("n" if cell == NONE and newlines else "." for cell in cells)
    stripped = text.lstrip("n")
    return "." * (len(text) - len(stripped)) + stripped


# -- one kind at a time ------------------------------------------------------------------------


def test_a_lattice_is_every_cell_in_order() -> None:
    """Claim: time outermost, then lines, then columns; times count on from ``start``.

    Fails if two axes are exchanged, or if a start shifts anything but time.
    """
    assert list_cells([grid_cells(4, (2, 3, 2), start=5)]) == [box(4, 2, 3, 2, start=5)]
    assert len(grid_cells(0, (2, 0, 3))) == 0


PICTURES: dict[str, list[list[Cell]]] = {
    "one whole": [base()],
    "three whole": [base()] * 3,
    "tiles": [base() + lines(4, 5)],
    "two with tiles": [base() + lines(4, 5), base() + lines(2, 6)],
    "three of one width": [base() + lines(2, 4), base() + lines(3, 4), base() + lines(1, 4)],
    "a single line": [base() + lines(1, 6), base() + lines(3, 2)],
    "a newline and no tiles": [[*base(), NONE]],
    "three newlines and no tiles": [[*base(), NONE]] * 3,
    "no tiles, then tiles": [[*base(), NONE], base() + lines(2, 5)],
    "tiles, then no tiles": [base() + lines(2, 5), [*base(), NONE]],
    "tiles, then whole": [base() + lines(2, 5), base()],
}


@pytest.mark.parametrize("case", list(PICTURES))
def test_pictures_that_touch_are_distinguished(case: str) -> None:
    """Claim: a run of pictures falls into base squares, each with the lines that follow it.

    Fails if two pictures are one, if a newline is a cell, or if a line is another picture's.
    """
    expected = PICTURES[case]
    text = "".join(written(cells) for cells in expected)
    assert list_cells(image_cells(marks(text), SIDE)) == expected


def test_control_newlines_say_where_the_lines_are() -> None:
    """Control: the same number of rows with newlines elsewhere has other cells; without any it is
    no picture with tiles.
    """
    here, there = base() + lines(2, 5), base() + lines(3, 3)
    assert len(here) == len(there)
    assert list_cells(image_cells(marks(written(here)), SIDE)) == [here]
    assert list_cells(image_cells(marks(written(there)), SIDE)) == [there]
    plain = list_cells(image_cells(marks("." * len(here)), SIDE))
    assert plain == [base(), base(), row(3)]


@pytest.mark.parametrize("many", [1, 2, 3])
def test_a_class_token_is_no_cell(many: int) -> None:
    """Claim: ``image_lead_rows`` rows before each picture and ``frame_lead_rows`` rows before each
    frame have no cell and shift none.

    Fails if a class token is the first cell, is looked for only before the first picture, or if
    pictures and frames are given each other's.
    """
    side = PictureLayout(image_side=3, frame_side=3, image_lead_rows=1, frame_lead_rows=1)
    assert list_cells(image_cells(marks("." * (10 * many)), side)) == [base(lead=1)] * many
    tiled = base(lead=1) + lines(2, 4)
    assert list_cells(image_cells(marks(written(tiled) * many), side)) == [tiled] * many
    film = [cell for t in range(2) for cell in [NONE, *box(0, 1, 3, 3, start=t)]]
    assert list_cells(video_cells(marks("." * (20 * many)), side, 2)) == [film] * many
    # Frames lose their class token where they are pooled.
    pooled = PictureLayout(image_side=3, frame_side=3, image_lead_rows=1)
    assert list_cells(video_cells(marks("." * (18 * many)), pooled, 2)) == [box(0, 2, 3, 3)] * many
    assert list_cells(image_cells(marks("." * (10 * many)), pooled)) == [base(lead=1)] * many


@pytest.mark.parametrize("frames", [[3], [2, 2], [1, 4, 2]])
@pytest.mark.parametrize("known", [True, False])
def test_videos_that_end_in_a_newline_are_distinguished(frames: list[int], known: bool) -> None:
    """Claim: OneVision's newline ends a video and is no cell; frames are counted or known.

    Fails if touching videos are one, or if the next one's times go on from the last's.
    """
    if known:  # as many in each, as pixels in one tensor are
        frames = [frames[0]] * len(frames)
    expected = [[*box(0, count, 2, 2), NONE] for count in frames]
    text = "".join("." * (4 * count) + "n" for count in frames)
    assert list_cells(video_cells(marks(text), SIDE, frames[0] if known else None)) == expected


def test_videos_without_newlines_need_their_number_of_frames() -> None:
    """Claim: NeXT-Video's videos that touch are told apart by the frames each has; where nobody
    knows how many, they are one video, whose cells still are whole frames.
    """
    text = marks("." * 24)
    assert list_cells(video_cells(text, SIDE, 2)) == [box(0, 2, 2, 2)] * 3
    assert list_cells(video_cells(text, SIDE, 3)) == [box(0, 3, 2, 2)] * 2
    assert list_cells(video_cells(text, SIDE, None)) == [box(0, 6, 2, 2)]


ODD: dict[str, tuple[str, str, int | None, list[list[Cell]]]] = {
    "half a picture": ("image", "." * 5, None, [row(5)]),
    "a picture and a half": ("image", "." * 13, None, [base(), row(4)]),
    "a newline within the square": ("image", "....n....", None, [row(9)]),
    "a newline at first": ("image", "n" + "." * 9, None, [row(10)]),
    "two newlines": ("image", "." * 9 + "nn", None, [[*base(), NONE], row(1)]),
    "half a frame": ("video", "...", None, [row(3)]),
    "frames and a half": ("video", "." * 10, None, [row(10)]),
    "frames and a half, known": ("video", "." * 10, 2, [box(0, 2, 2, 2), row(2)]),
    "newlines alone": ("video", "nn", None, [row(2)]),
    "newlines alone, known": ("video", "nn", 2, [row(2)]),
    "no frames": ("video", "....", 0, [row(4)]),
}


@pytest.mark.parametrize("case", list(ODD))
def test_an_unexpected_length_is_one_row(case: str) -> None:
    """Claim: what is not laid out as expected counts as one row of cells, from there to its end.

    Fails if it raises, if a row goes missing, or if a picture that was whole is lost with it.
    """
    kind, text, frames, expected = ODD[case]
    parts = (
        image_cells(marks(text), SIDE)
        if kind == "image"
        else video_cells(marks(text), SIDE, frames)
    )
    assert list_cells(parts) == expected


# -- whole prompts -----------------------------------------------------------------------------

KINDS = {"i": "image", "j": "image", "v": "video", "u": "video", "a": "audio"}
"""j and u are newline rows; anything else is text."""


def queue(*sizes: tuple[int, int, int]) -> Iterator[Tensor]:
    """The cells of media to come, written out here."""
    return iter([torch.tensor(box(0, *size)) for size in sizes])


def placed(
    prompt: str,
    side: PictureLayout | None = None,
    frames: int | None = None,
    **grids: Sequence[tuple[int, int, int]],
) -> list[Cell]:
    """The cells of a prompt's placeholders, the prompt written as letters."""
    at = [i for i, letter in enumerate(prompt) if letter in KINDS]
    queues = {kind: queue(*sizes) for kind, sizes in grids.items()}
    cell_rows = arrange_cells(
        [KINDS[prompt[i]] for i in at],
        torch.tensor([prompt[i] in "ju" for i in at], dtype=torch.bool),
        torch.tensor(at, dtype=torch.long),
        queues,
        side,
        frames,
    )
    (cells,) = list_cells([cell_rows])
    return cells


def test_media_are_counted_as_they_are_met() -> None:
    """Claim: images and videos share one count, in the order of their first tokens, though each
    kind has grids of its own. Fails if a kind is counted first, or each by itself.
    """
    image, video = [(1, 1, 2), (1, 2, 1)], [(2, 1, 2), (1, 1, 3)]
    cells = placed("..vvvv.ii.vvvii", image=image, video=video)
    expected = [*box(0, 2, 1, 2), *box(1, 1, 1, 2), *box(2, 1, 1, 3), *box(3, 1, 2, 1)]
    assert cells == expected
    cells = placed("iivvvv.vvv.ii", image=image, video=video)
    expected = [*box(0, 1, 1, 2), *box(1, 2, 1, 2), *box(2, 1, 1, 3), *box(3, 1, 2, 1)]
    assert cells == expected


def test_text_between_frames_parts_no_video() -> None:
    """Claim: where a grid says how large a video is, times written between its frames leave it one
    medium. The control: without a grid they are media of their own.
    """
    prompt = "t1vvvvvv.t2vvvvvv.ii"
    cells = placed(prompt, image=[(1, 2, 1)], video=[(2, 2, 3)])
    assert cells == [*box(0, 2, 2, 3), *box(1, 1, 2, 1)]
    loose = placed(prompt, image=[(1, 2, 1)])
    assert loose == [*box(0, 1, 1, 6), *box(1, 1, 1, 6), *box(2, 1, 2, 1)]


def test_sound_has_no_cell() -> None:
    """Claim: audio rows have -1 and count as no medium, beside a video or interleaved with it.

    Fails if sound between frames moves a frame's cells or parts a video.
    """
    assert placed("aaa.a") == [NONE] * 4
    cells = placed("avvaavv.aii", video=[(2, 1, 2)], image=[(1, 1, 2)])
    one, two = box(0, 1, 1, 2), box(0, 1, 1, 2, start=1)
    assert cells == [NONE, *one, NONE, NONE, *two, NONE, *box(1, 1, 1, 2)]
    assert [cell for cell in cells if cell != NONE] == placed(
        "vvvv.ii", video=[(2, 1, 2)], image=[(1, 1, 2)]
    )


def test_grids_are_handed_on_from_request_to_request() -> None:
    """Claim: a batch's grids are taken in order, as many as a prompt shows and no more.

    Fails if one request eats the next one's grid.
    """
    grids = {"video": queue((1, 1, 2), (1, 3, 1), (2, 2, 1))}
    sizes = []
    for length in (5, 4, 0):
        at = torch.arange(length)
        cells = arrange_cells(["video"] * length, torch.zeros(length).bool(), at, grids, None, None)
        sizes.append([tuple(cell) for cell in cells.tolist()])
    assert sizes == [[*box(0, 1, 1, 2), *box(1, 1, 3, 1)], box(0, 2, 2, 1), []]
    assert next(grids["video"], None) is None


def test_square_pictures_and_videos_in_one_prompt() -> None:
    """Claim: runs are cut by kind and by text; a picture with tiles is one medium, its newlines
    none. Fails if a run crosses text, or if the numbers of what follows do not go on.
    """
    tiled = "i" * 9 + "iiij" * 2
    cells = placed(f"x{tiled}{'v' * 8}u.{'i' * 9}j{'v' * 4}ux", SIDE)
    expected = [
        *base(),
        *lines(2, 3),
        *box(1, 2, 2, 2),
        NONE,
        *box(2, 1, 3, 3),
        NONE,
        *box(3, 1, 2, 2),
        NONE,
    ]
    assert cells == expected


def test_without_knowledge_a_run_is_one_row() -> None:
    """Claim: a family nobody described has a medium a run. Fails if runs of two kinds melt."""
    cells = placed("iii.iivv.v")
    expected = [*box(0, 1, 1, 3), *box(1, 1, 1, 2), *box(2, 1, 1, 2), *box(3, 1, 1, 1)]
    assert cells == expected


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.text("ijvua.", max_size=40),
    side=st.none() | st.builds(PictureLayout, *map(st.integers, (1, 1, 0, 0), (3, 2, 1, 1))),
    frames=st.none() | st.integers(0, 3),
)
def test_every_row_is_one_cell_or_none_and_media_are_whole(
    prompt: str, side: PictureLayout | None, frames: int | None
) -> None:
    """Claim: whatever a prompt holds, nothing raises; every placeholder is a cell once or has -1
    in full, sound always; frames and finer grids are full lattices; media are numbered without
    gaps, in order of their first cells.

    Fails if a row is forgotten, if two rows share a cell, or if a medium has holes.
    """
    all_cells = placed(prompt, side, frames)
    letters = [letter for letter in prompt if letter in KINDS]
    assert len(all_cells) == len(letters)
    for letter, cell in zip(letters, all_cells, strict=True):
        assert cell == NONE or min(cell) >= 0
        assert cell == NONE or letter != "a"
        assert cell != NONE or side is not None or letter == "a"
    media: dict[int, list[Cell]] = {}
    for cell in all_cells:
        if cell != NONE:
            media.setdefault(cell[0], []).append(cell)
    assert list(media) == list(range(len(media)))
    for medium, cells in media.items():
        finer = [cell for cell in cells if cell[2] >= 10 and side is not None]
        for part, above in (([c for c in cells if c not in finer], 0), (finer, 10)):
            if part:
                t, h, w = (max(axis) + 1 for axis in list(zip(*part, strict=True))[1:])
                first = min(cell[1] for cell in part)
                lattice = box(medium, t - first, h - above, w, first)
                assert part == [(m, t, h + above, w) for m, t, h, w in lattice]
