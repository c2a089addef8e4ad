"""The place of each visual token of a prompt: (medium, t, h, w), from a processor's grid or from
the family's layout.

These are pure functions on rows of placeholders. A row that stands for no cell (the newline after
a line of a picture, a class token) has -1 for its medium.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from saccade.core.prompt import Inputs

Cells = Int[Tensor, "row 4"]
FINE_ROW_MULTIPLE = 10
"""The h of a finer grid's first line is a multiple of this. It is a multiple of 2 and of 5, so that
blocks of 2 (pooling) and of 5 (crops) cut that grid as if its h began at 0."""


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


def _row_cells(length: int) -> Cells:
    """Returns the cells of a medium whose layout is unknown: one row of ``length`` cells."""
    return grid_cells(0, (1, 1, length))


def processor_cells(kind: str, inputs: Inputs, config: Mapping[str, Any]) -> Iterator[Cells]:
    """Yields the cells of each medium in turn, from the patches that its processor counts."""
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
        kinds: "image", "video" or "audio", per placeholder.
        is_newline: which of them are a model's newline row.
        places: where each stands in the prompt.
        grids: cells of the media to come, per kind, where the processor gives them.
        layout: how pictures are laid out where it does not; None if that is unknown.
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
    media.sort(key=lambda medium: int(medium[0][0]))
    for number, (rows, medium_cells) in enumerate(media):
        numbered = medium_cells.clone()
        numbered[medium_cells[:, 0] >= 0, 0] += number
        cells[rows] = numbered
    return cells


def _grid_media(rows: Int[Tensor, " row"], grid: Iterator[Cells]) -> list[tuple[Tensor, Cells]]:
    """Returns the media of one kind, each with its placeholders, from its processor's grids."""
    media: list[tuple[Tensor, Cells]] = []
    done = 0
    while done < len(rows):
        # Placeholders beyond those that the processor counted are one row.
        cells = next(grid, _row_cells(len(rows) - done))
        medium_rows = rows[done : done + len(cells)]
        media.append((medium_rows, cells[: len(medium_rows)]))
        done += len(cells)
    return media


def _run_media(
    kind: str, is_newline: Bool[Tensor, " run"], layout: PictureLayout | None, frames: int | None
) -> list[Cells]:
    """Returns the cells of each medium in a run of adjacent placeholders of one kind."""
    if layout is None:
        return [_row_cells(len(is_newline))]
    if kind == "video":
        return video_cells(is_newline, layout, frames)
    if layout.has_tiles:
        return video_cells(is_newline, replace(layout, frame_side=layout.image_side), None)
    return image_cells(is_newline, layout)


def image_cells(is_newline: Bool[Tensor, " run"], layout: PictureLayout) -> list[Cells]:
    """Returns the cells of each picture in a run of tokens.

    A picture is a square of cells. A picture that was cut into tiles has a second part: the whole
    picture at a finer grid, each line of which ends in a newline. The finer grid has time 1 and
    rows below those of the square, so that none of its cells passes for one of the square's.
    """
    length = len(is_newline)
    newlines = is_newline.nonzero().squeeze(-1).tolist()
    pictures: list[Cells] = []
    start = 0
    square_size = layout.image_lead_rows + layout.image_side**2
    while start < length:
        square_end = start + square_size
        if square_end > length or any(start <= newline < square_end for newline in newlines):
            return [*pictures, _row_cells(length - start)]  # This is not the expected layout.
        stop = square_end
        line_count = 0
        width: int | None = None
        for newline in newlines:
            if newline < square_end:
                continue
            if width is not None and (newline - stop != width or not width):
                break  # This newline belongs to the next picture.
            width = newline - stop
            stop = newline + 1
            line_count += 1
        cells = torch.full((stop - start, 4), -1)
        square = grid_cells(0, (1, layout.image_side, layout.image_side))
        cells[layout.image_lead_rows : square_size] = square
        if width:
            finer = grid_cells(0, (1, line_count, width), 1).view(line_count, width, 4)
            finer[..., 2] += -(-layout.image_side // FINE_ROW_MULTIPLE) * FINE_ROW_MULTIPLE
            cells[square_size:].view(line_count, width + 1, 4)[:, :width] = finer
        pictures.append(cells)
        start = stop
    return pictures


def video_cells(
    is_newline: Bool[Tensor, " run"], layout: PictureLayout, frames: int | None
) -> list[Cells]:
    """Returns the cells of each video in a run of tokens, of ``frames`` frames each if not None."""
    length = len(is_newline)
    newlines = is_newline.nonzero().squeeze(-1).tolist()
    videos: list[Cells] = []
    start = 0
    frame_size = layout.frame_lead_rows + layout.frame_side**2
    while start < length:
        newline = next((place for place in newlines if place >= start), None)
        room = (length if newline is None else newline) - start  # A newline ends a video.
        count = room // frame_size if frames is None else min(frames, room // frame_size)
        if not count or (frames is None and room % frame_size):
            return [*videos, _row_cells(length - start)]
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
    """Splits rows into runs that stand side by side in the prompt; ``places`` says where."""
    if not len(rows):
        return []
    breaks = ((places[1:] - places[:-1]) != 1).nonzero().squeeze(-1) + 1
    return list(rows.tensor_split(breaks.cpu()))
