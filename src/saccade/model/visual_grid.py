"""Finds the cell of each visual token of a prompt: (medium, t, h, w).

A prompt has a placeholder for each visual token, and the cell says where in the picture or video
the token lies: the number of the medium in the prompt, the time, the line and the column. Cells
come from the grid that the processor gives, or else from the layout of the model's family. Views
choose and group visual tokens by their cells. A placeholder that stands for no cell (the newline
after a line of a picture, a class token, sound) has -1 for its medium. These are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from saccade.core.prompt import Inputs

Cells = Int[Tensor, "row 4"]
FINE_LINE_MULTIPLE = 10
"""A picture's finer grid (:func:`image_cells`) begins at an h that is a multiple of this.

Views group cells by dividing h and w, by 2 (pooling) or by 5 (the crops of HIPPO). This is a
multiple of both, so a block begins at the finer grid's first line, as it would at h = 0."""


@dataclass(frozen=True)
class PictureLayout:
    """How a family with square pictures lays them out in a prompt."""

    image_side: int  # cells along a side of an image
    frame_side: int  # cells along a side of a video's frame
    image_lead_rows: int = 0  # rows before each image that are no cells (a class token)
    frame_lead_rows: int = 0  # rows before each frame that are no cells
    has_tiles: bool = False  # Adjacent squares are tiles of one picture; the i-th has time i.


def grid_cells(medium: int, size: Sequence[int], start: int = 0) -> Cells:
    """Returns every cell of a (t, h, w) grid, in order; times count from ``start``."""
    cells = torch.cartesian_prod(*(torch.arange(n) for n in size)).view(-1, 3)
    cells[:, 0] += start
    return torch.cat([torch.full((len(cells), 1), medium), cells], 1)


def _one_line_of_cells(length: int) -> Cells:
    """Returns the cells of a medium whose layout is unknown: one line of ``length`` cells."""
    return grid_cells(0, (1, 1, length))


def processor_cells(kind: str, inputs: Inputs, config: Mapping[str, Any]) -> Iterator[Cells]:
    """Yields the cells of each medium of one kind in turn, from the grids of patches that the
    processor gave for them (``inputs``).

    A cell is a square of patches that the model merges into one visual token. All cells have 0 as
    the number of their medium, because :func:`arrange_cells` numbers the media of a prompt.
    """
    sizes = inputs[f"{kind}_grid_thw"].tolist()
    merge_sizes = inputs.get(f"{kind}_merge_sizes")
    default_merge = int(config["vision_config"].get("spatial_merge_size", 1))
    merges = [default_merge] * len(sizes) if merge_sizes is None else merge_sizes.tolist()
    mask = inputs.get(f"{kind}_compression_mask")  # VideoLLaMA 3 drops patches that hardly change.
    start = 0
    for (t, h, w), merge in zip(sizes, merges, strict=True):
        cells = grid_cells(0, (t, h // merge, w // merge))
        if mask is not None:
            stop = start + len(cells)
            cells = cells[mask[start:stop].cpu()]
            start = stop
        yield cells


def arrange_cells(
    kinds: Sequence[str],
    is_newline: Bool[Tensor, " row"],
    places: Int[Tensor, " row"],
    grids: Mapping[str, Iterator[Cells]],
    layout: PictureLayout | None,
    frames: int | None,
) -> Cells:
    """Returns the cell of each placeholder of one prompt.

    Args:
        kinds: "image", "video" or "audio", per placeholder. Audio has no cells.
        is_newline: which of them are a model's newline row.
        places: where each stands in the prompt.
        grids: for each kind whose grids the processor gives, the cells of its media in turn.
        layout: how pictures are laid out, for kinds without grids; None if that is unknown.
        frames: how many frames a video has; None if that is unknown.
    """
    media: list[tuple[Tensor, Cells]] = []  # each medium's placeholders and their cells
    for kind in ("image", "video"):
        rows = torch.tensor([i for i, name in enumerate(kinds) if name == kind], dtype=torch.long)
        if kind in grids:
            media += _grid_media(rows, grids[kind])
            continue
        for run in _adjacent_runs(rows, places[rows]):
            parts = _run_media(kind, is_newline[run], layout, frames)
            media += zip(run.split([len(part) for part in parts]), parts, strict=True)
    cells = torch.full((len(kinds), 4), -1)
    # Media are numbered in the order in which they begin in the prompt. -1 stays for no cell.
    media.sort(key=lambda medium: int(medium[0][0]))
    for number, (rows, medium_cells) in enumerate(media):
        numbered = medium_cells.clone()
        numbered[medium_cells[:, 0] >= 0, 0] += number
        cells[rows] = numbered
    return cells


def _grid_media(rows: Int[Tensor, " row"], grid: Iterator[Cells]) -> list[tuple[Tensor, Cells]]:
    """Returns, for each medium of one kind, its rows of placeholders and their cells, which come
    from the processor's grids."""
    media: list[tuple[Tensor, Cells]] = []
    done = 0
    while done < len(rows):
        # Placeholders beyond the processor's grids count as one more medium, of a single line.
        cells = next(grid, _one_line_of_cells(len(rows) - done))
        medium_rows = rows[done : done + len(cells)]
        media.append((medium_rows, cells[: len(medium_rows)]))
        done += len(cells)
    return media


def _run_media(
    kind: str, is_newline: Bool[Tensor, " run"], layout: PictureLayout | None, frames: int | None
) -> list[Cells]:
    """Returns the cells of each medium in a run of adjacent placeholders of one kind."""
    if layout is None:
        return [_one_line_of_cells(len(is_newline))]
    if kind == "video":
        return video_cells(is_newline, layout, frames)
    if layout.has_tiles:
        # The tiles of a picture follow one another as the frames of a video do.
        return video_cells(is_newline, replace(layout, frame_side=layout.image_side), frames=None)
    return image_cells(is_newline, layout)


def image_cells(is_newline: Bool[Tensor, " run"], layout: PictureLayout) -> list[Cells]:
    """Returns the cells of each picture in a run of tokens.

    A picture is a square of cells. A picture that was cut into tiles has a second part after it:
    the whole picture as a finer grid, each line of which ends in a newline. The finer grid has
    t = 1, and its h begins beyond the last h of the square, so that no cell of one is mistaken for
    a cell of the other. After a square of 24 x 24 cells, h = 0 ... 23, the finer grid has h = 30,
    31, ...
    """
    length = len(is_newline)
    newlines = is_newline.nonzero().squeeze(-1).tolist()
    pictures: list[Cells] = []
    start = 0
    square_size = layout.image_lead_rows + layout.image_side**2
    while start < length:
        square_end = start + square_size
        if square_end > length or any(start <= newline < square_end for newline in newlines):
            # The rows do not follow the layout, so what is left counts as a single line of cells.
            return [*pictures, _one_line_of_cells(length - start)]
        stop = square_end  # The end of the picture, as far as its lines were found.
        line_count = 0
        width: int | None = None  # Cells in a line, once the first line was found.
        for newline in newlines:
            if newline < square_end:
                continue
            # All lines have the width of the first. If that is 0, so that the newline stands right
            # after the square, the picture has no finer grid, and the newline ends it.
            line_width = newline - stop
            is_next_line = width is None or (width > 0 and line_width == width)
            if not is_next_line:
                break  # This newline belongs to the next picture.
            width = line_width
            stop = newline + 1
            line_count += 1
        cells = torch.full((stop - start, 4), -1)
        square = grid_cells(0, (1, layout.image_side, layout.image_side))
        cells[layout.image_lead_rows : square_size] = square
        if width:
            finer = grid_cells(medium=0, size=(1, line_count, width), start=1).view(
                line_count, width, 4
            )
            first_fine_line = math.ceil(layout.image_side / FINE_LINE_MULTIPLE) * FINE_LINE_MULTIPLE
            finer[..., 2] += first_fine_line
            cells[square_size:].view(line_count, width + 1, 4)[:, :width] = finer
        pictures.append(cells)
        start = stop
    return pictures


def video_cells(
    is_newline: Bool[Tensor, " run"], layout: PictureLayout, frames: int | None
) -> list[Cells]:
    """Returns the cells of each video in a run of tokens.

    A video has ``frames`` frames. If that is None, it goes on to the next newline, or to the end of
    the run.
    """
    length = len(is_newline)
    newlines = is_newline.nonzero().squeeze(-1).tolist()
    videos: list[Cells] = []
    start = 0
    frame_size = layout.frame_lead_rows + layout.frame_side**2
    while start < length:
        newline = next((place for place in newlines if place >= start), None)
        row_count = (length if newline is None else newline) - start  # A newline ends a video.
        count = row_count // frame_size
        if frames is not None:
            count = min(frames, count)
        # Rows beyond the whole frames do not follow the layout if the video is to go on to the
        # newline. With a known number of frames they may belong to the next video.
        has_partial_frame = frames is None and row_count % frame_size > 0
        if count == 0 or has_partial_frame:
            # The rows do not follow the layout, so what is left counts as a single line of cells.
            return [*videos, _one_line_of_cells(length - start)]
        stop = start + count * frame_size
        ends_in_newline = newline == stop
        cells = torch.full((stop - start + ends_in_newline, 4), -1)
        for t in range(count):
            first = t * frame_size + layout.frame_lead_rows
            frame = grid_cells(0, (1, layout.frame_side, layout.frame_side), t)
            cells[first : first + layout.frame_side**2] = frame
        videos.append(cells)
        start = stop + ends_in_newline
    return videos


def _adjacent_runs(rows: Int[Tensor, " row"], places: Int[Tensor, " row"]) -> list[Tensor]:
    """Splits rows into runs that are adjacent in the prompt, where they stand at ``places``."""
    if not len(rows):
        return []
    breaks = ((places[1:] - places[:-1]) != 1).nonzero().squeeze(-1) + 1
    return list(rows.tensor_split(breaks.cpu()))
