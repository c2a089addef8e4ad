"""Where each visual token of a prompt stands: (medium, t, h, w), from grids or from what is known.

Pure functions on rows of placeholders. A row that stands for no cell (the newline after a line of a
picture, a class token) has -1 for its medium.
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
BLOCK = 10  # pooling by 2 and crops of 5 cut rows from a multiple of this as from 0


@dataclass(frozen=True)
class Side:
    """Cells along a side of a square picture, and rows before each picture that are no cells."""

    image: int
    frame: int
    lead: int = 0
    frame_lead: int = 0
    joined: bool = False  # squares that touch are tiles of one picture, at times 0, 1, ...


def lattice(medium: int, size: Sequence[int], start: int = 0) -> Cells:
    """Every cell of a (t, h, w) grid, in order; times count from ``start``."""
    cells = torch.cartesian_prod(*(torch.arange(n) for n in size)).view(-1, 3)
    cells[:, 0] += start
    return torch.cat([torch.full((len(cells), 1), medium), cells], 1)


def counted(kind: str, inputs: Inputs, config: Mapping[str, Any]) -> Iterator[Cells]:
    """The cells of one medium after the other, from the patches its processor counts."""
    sizes = inputs[f"{kind}_grid_thw"].tolist()
    merged = inputs.get(f"{kind}_merge_sizes")
    same = int(config["vision_config"].get("spatial_merge_size", 1))
    merges = [same] * len(sizes) if merged is None else merged.tolist()
    mask = inputs.get(f"{kind}_compression_mask")  # VideoLLaMA 3 drops what hardly changes
    start = 0
    for (t, h, w), merge in zip(sizes, merges, strict=True):
        cells = lattice(0, (t, h // merge, w // merge))
        if mask is not None:
            start, kept = start + len(cells), mask[start : start + len(cells)]
            cells = cells[kept.cpu()]
        yield cells


def arrange(
    kinds: Sequence[str],
    newline: Bool[Tensor, " row"],
    at: Int[Tensor, " row"],
    grids: Mapping[str, Iterator[Cells]],
    side: Side | None,
    frames: int | None,
) -> Cells:
    """The cell of each placeholder of one prompt.

    Args:
        kinds: "image", "video" or "audio", per placeholder.
        newline: which of them are a model's newline row.
        at: where each stands in the prompt.
        grids: cells of the media to come, per kind, where the processor gives them.
        side: how pictures are laid out where it does not; None if that is unknown.
        frames: how many frames a video has, where that is known.
    """
    found = torch.full((len(kinds), 4), -1)
    pieces: list[tuple[Tensor, Cells]] = []  # (which placeholders, their cells), one a medium
    for kind in ("image", "video"):
        mine = torch.tensor([i for i, name in enumerate(kinds) if name == kind], dtype=torch.long)
        if kind in grids:
            done = 0
            while done < len(mine):
                # more placeholders than the processor counted are one row
                cells = next(grids[kind], lattice(0, (1, 1, len(mine) - done)))
                rows = mine[done : done + len(cells)]
                pieces.append((rows, cells[: len(rows)]))
                done += len(cells)
            continue
        for run in _runs(mine, at[mine]):
            marks = newline[run]
            if side is None:
                parts = [lattice(0, (1, 1, len(run)))]
            elif kind == "image" and side.joined:
                parts = videos(marks, replace(side, frame=side.image), None)
            elif kind == "image":
                parts = images(marks, side)
            else:
                parts = videos(marks, side, frames)
            pieces += zip(run.split([len(part) for part in parts]), parts, strict=True)
    medium = 0
    for rows, cells in sorted(pieces, key=lambda piece: int(piece[0][0])):
        numbered = cells.clone()
        numbered[cells[:, 0] >= 0, 0] += medium
        found[rows] = numbered
        medium += 1
    return found


def images(newline: Bool[Tensor, " run"], side: Side) -> list[Cells]:
    """The pictures of a run of tokens.

    A picture is a square of cells. One cut into tiles goes on with the whole at a finer grid, each
    line of which ends in a newline: that is its time 1, on rows below the square's, so that no cell
    of it passes for one of the square's.
    """
    ends = newline.nonzero().squeeze(-1).tolist()
    found: list[Cells] = []
    start, size = 0, side.lead + side.image**2
    while start < len(newline):
        if start + size > len(newline) or any(start <= end < start + size for end in ends):
            return [*found, lattice(0, (1, 1, len(newline) - start))]  # not what was expected
        stop, lines = start + size, 0
        wide: int | None = None
        for end in (end for end in ends if end >= stop):
            if wide is not None and (end - stop != wide or not wide):
                break  # the next picture's
            wide, stop, lines = end - stop, end + 1, lines + 1
        cells = torch.full((stop - start, 4), -1)
        cells[side.lead : size] = lattice(0, (1, side.image, side.image))
        if wide:
            finer = lattice(0, (1, lines, wide), 1).view(lines, wide, 4)
            finer[..., 2] += -(-side.image // BLOCK) * BLOCK
            cells[size:].view(lines, wide + 1, 4)[:, :wide] = finer
        found.append(cells)
        start = stop
    return found


def videos(newline: Bool[Tensor, " run"], side: Side, frames: int | None) -> list[Cells]:
    """The videos of a run of tokens, of ``frames`` frames each where that is known."""
    ends = newline.nonzero().squeeze(-1).tolist()
    found: list[Cells] = []
    start, size = 0, side.frame_lead + side.frame**2
    while start < len(newline):
        end = next((end for end in ends if end >= start), None)  # a newline ends a video
        room = (len(newline) if end is None else end) - start
        count = room // size if frames is None else min(frames, room // size)
        if not count or (frames is None and room % size):
            return [*found, lattice(0, (1, 1, len(newline) - start))]
        stop = start + count * size
        closed = end == stop
        cells = torch.full((stop - start + closed, 4), -1)
        for t in range(count):
            first = t * size + side.frame_lead
            cells[first : first + side.frame**2] = lattice(0, (1, side.frame, side.frame), t)
        found.append(cells)
        start = stop + closed
    return found


def _runs(rows: Int[Tensor, " row"], at: Int[Tensor, " row"]) -> list[Tensor]:
    """The rows in pieces that stand side by side in the prompt."""
    if not len(rows):
        return []
    breaks = ((at[1:] - at[:-1]) != 1).nonzero().squeeze(-1) + 1
    return list(rows.tensor_split(breaks.cpu()))
