"""A processor's output to prompts, by the model's own code.

A multimodal model embeds its prompt (vision towers, placeholders, positions) and hands that to its
language model. Here it does exactly that and is stopped there, so no family needs code of its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torch.utils.hooks import RemovableHandle

from saccade.core.errors import ModelError, OptionError, first_line
from saccade.core.prompt import CONTEXT, Inputs, Media, Prompt, with_context
from saccade.model import families, memory
from saccade.model.grid import Cells, arrange, counted

READ = (  # what language models are given and we understand
    "attention_mask", "position_ids", "past_key_values", "cache", "inputs_embeds", "input_ids",
    "cache_position", "visual_pos_masks", "deepstack_visual_embeds",
)  # fmt: skip


class _Captured(Exception):
    """Carries what a model was about to give its language model, by name."""


class Reader:
    """A model up to the door of its language model. ``trained``: see ``Backbone``'s positions."""

    def __init__(
        self, model: Any, text: Any, axes: int, device: torch.device, trained: bool = False
    ) -> None:
        self.model, self.text, self.axes, self.device = model, text, axes, device
        self.trained = trained
        self.config = model.config.to_dict()
        self.placeholders = families.placeholders(self.config)
        square = families.SIDES.get(self.config["model_type"])
        self.side = None if square is None else square(self.config)

    def read(self, inputs: Inputs) -> list[Prompt]:
        """Every request of a processor's output, without its padding."""
        captured = self._capture(inputs)
        ids: Tensor = inputs["input_ids"].to(self.device)
        embeds = captured["inputs_embeds"]
        if embeds is None:
            embeds = self.model.get_input_embeddings()(ids)
        kinds = self.placeholders.items()
        images = ids.new_tensor([id_ for id_, kind in kinds if kind == "image"])
        batch, length = ids.shape
        mask, documents = inputs.get("attention_mask"), inputs.get(CONTEXT)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        real = real.to(self.device)
        positions = self._positions(captured.get("position_ids"), real)
        layers = captured.get("deepstack_visual_embeds") or ()
        found, taken = [], 0
        layout = _Layout(self, inputs)
        for row in range(batch):
            rows = real[row]
            mine, read = ids[row, rows], embeds[row, rows]
            visual, fixed, grid = layout.next(mine, read)
            seen = int(visual.sum())
            places = theirs = positions[:, row, rows]
            if self.trained and self.axes > 1:
                places = after_all_axes(theirs, visual | fixed)
            prompt = Prompt(
                context=mine,
                embeds=read,
                positions=places,
                visual=visual,
                fixed=fixed,
                grid=grid,
                index=torch.arange(len(mine), device=self.device),
                next_position=int(places[:, -1].max()) + 1,  # as generate does
                media=Media(
                    deepstack=tuple(layer[taken : taken + seen] for layer in layers),
                    stills=int((visual & torch.isin(mine, images)).sum()),
                    has_trained_positions=not torch.equal(places, theirs),
                ),
            )
            taken += seen
            if documents is not None:
                prompt = with_context(prompt, documents[row].to(self.device)[rows].bool())
            found.append(prompt)
        return found

    def assemble(self, inputs: Inputs, rows: Float[Tensor, "seen dim"]) -> Prompt:
        """One request whose visual rows are there already: no tower looks.

        Positions count from 0; whoever has others puts them in.
        """
        ids: Tensor = inputs["input_ids"][0].to(self.device)
        embeds = self.model.get_input_embeddings()(ids)
        named = torch.isin(ids, torch.tensor([*self.placeholders], device=self.device))
        embeds[named] = rows.to(embeds)
        visual, fixed, grid = _Layout(self, inputs).next(ids, embeds)
        index = torch.arange(len(ids), device=self.device)
        positions = index.expand(self.axes, -1)
        return Prompt(ids, embeds, positions, visual, fixed, grid, index, len(ids))

    def averaging(self) -> RemovableHandle:
        """From now on the projector reads pictures averaged in blocks, until removed; of a family
        in ``families.PROJECTS_ROWS``."""
        assert self.side is not None, "these families have square pictures"
        sides = self.side.image, self.side.frame
        projector = self.model.base_model.multi_modal_projector
        return projector.register_forward_pre_hook(
            lambda module, args: (averaged(args[0], sides), *args[1:])
        )

    def _capture(self, inputs: Inputs) -> dict[str, Any]:
        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Captured(kwargs)

        # It comes before others' hooks: what they change, they change when the decoder reads it.
        handle = self.text.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        moved = {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in inputs.items()
            if key != CONTEXT
        }
        try:
            self.model(**moved, use_cache=False)
        except _Captured as caught:
            return {"inputs_embeds": None, **self._understood(caught.args[0])}
        except Exception as error:  # models raise almost anything over others' inputs
            if memory.ran_out(error):
                raise
            raise OptionError(
                f"these inputs do not belong together: {first_line(error)}"
            ) from error
        finally:
            handle.remove()
        raise ModelError(f"{type(self.model).__name__} never reached its language model")

    def _understood(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refuses a model that reads more than tokens at positions, each seeing those before it."""
        name = type(self.model).__name__
        mask = kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise ModelError(f"{name} does not read its prompt from left to right alone")
        named = inspect.signature(self.text.forward).parameters  # the rest is passed by unread
        for key, value in kwargs.items():
            if key in named and key not in READ and isinstance(value, Tensor | dict | list | tuple):
                raise ModelError(f"{name} also reads {key}, which Saccade does not know")
        return kwargs

    def _positions(self, given: Tensor | None, real: Tensor) -> Int[Tensor, "axes batch len"]:
        if given is None:
            given = (real.long().cumsum(-1) - 1).clamp(min=0)
        if given.ndim == 2:
            given = given[None]
        if given.shape[0] == self.axes + 1:  # some models put plain text positions first
            given = given[1:]
        try:
            return given.expand(self.axes, *real.shape)
        except RuntimeError as error:
            raise OptionError(
                f"positions of {list(given.shape)} do not belong to {list(real.shape)} tokens on "
                f"{self.axes} axes: leave position_ids out, or see rope_parameters in config.json"
            ) from error


def after_all_axes(
    positions: Int[Tensor, "axes len"], visual: Bool[Tensor, " len"]
) -> Int[Tensor, "axes len"]:
    """Positions with text after a picture or video one past the largest position on any axis.

    This is how Qwen2-VL and Qwen2.5-VL were trained; transformers 5.3 and later go on from the
    larger of height and width, though a video's time may have come further
    (docs/upstream-transformers-positions.md). Where both agree nothing changes.
    """
    moved = positions.clone()
    for end in (visual[:-1] & ~visual[1:]).nonzero().squeeze(-1).tolist():
        moved[:, end + 1 :] += moved[:, : end + 1].max() + 1 - moved[:, end + 1].max()
    return moved


def averaged(
    rows: Float[Tensor, "picture row dim"], sides: Sequence[int]
) -> Float[Tensor, "picture row dim"]:
    """Each row of a square picture as the mean of its 2x2 block; edges average what they have.

    A class token before the square stays. Rows that are no square of one of these ``sides`` (a
    tower that gives pictures of any size in one row) are left as they are.
    """
    side = math.isqrt(rows.shape[1])
    lead = rows.shape[1] - side**2
    if side not in sides or lead > 1:
        return rows
    square = rows[:, lead:].transpose(1, 2).unflatten(2, (side, side))
    means = avg_pool2d(square, 2, ceil_mode=True).repeat_interleave(2, 2).repeat_interleave(2, 3)
    return torch.cat([rows[:, :lead], means[..., :side, :side].flatten(2).transpose(1, 2)], 1)


class _Layout:
    """What stands where in the prompts of one batch, in order: grids are handed out as met."""

    def __init__(self, reader: Reader, inputs: Inputs) -> None:
        self._kinds, self._side, self._device = reader.placeholders, reader.side, reader.device
        self._newline = vars(reader.model.base_model)["_parameters"].get("image_newline")
        self._grids: dict[str, Iterator[Cells]] = {
            kind: counted(kind, inputs, reader.config)
            for kind in set(self._kinds.values())
            if inputs.get(f"{kind}_grid_thw") is not None
        }
        pixels = inputs.get("pixel_values_videos")
        self._frames = pixels.shape[1] if isinstance(pixels, Tensor) and pixels.ndim == 5 else None

    def next(
        self, ids: Int[Tensor, " len"], embeds: Float[Tensor, "len dim"]
    ) -> tuple[Bool[Tensor, " len"], Bool[Tensor, " len"], Int[Tensor, "seen 4"]]:
        """Of the next request: rows a view may drop, rows it may not, the cells of the former."""
        kinds = [self._kinds.get(token) for token in ids.tolist()]
        at = torch.tensor([i for i, kind in enumerate(kinds) if kind], dtype=torch.long)
        rows = at.to(self._device)
        newline = torch.zeros(len(at), dtype=torch.bool)
        if self._newline is not None:  # a copy of one row of weights, so equal to the last bit
            newline = (embeds[rows] == self._newline.to(embeds)).all(-1).cpu()
        cells = arrange(
            [kind for kind in kinds if kind], newline, at, self._grids, self._side, self._frames
        ).to(self._device)
        real = cells[:, 0] >= 0
        visual = torch.zeros(len(kinds), dtype=torch.bool, device=self._device)
        visual[rows[real]] = True
        fixed = torch.zeros_like(visual)
        fixed[rows[~real]] = True
        return visual, fixed, cells[real]
