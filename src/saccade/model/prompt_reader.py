"""Reads a processor's output into prompts, by running the model's own code.

A multimodal model embeds its prompt (vision towers, placeholders, positions) and calls its language
model with the result. Here the model is run up to that call and stopped, and the call's arguments
become the prompt. So no family needs code of its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.utils.hooks import RemovableHandle

from saccade.core.errors import ModelError, OptionError, first_line
from saccade.core.prompt import DOCUMENT_MASK, Inputs, Media, Prompt, with_documents
from saccade.model import families, memory
from saccade.model.cache import send_to_device
from saccade.model.visual_grid import Cells, arrange_cells, processor_cells
from saccade.model.windowed_attention import last_visible_rows, window_of_kind

KNOWN_ARGUMENTS = (  # arguments of language models that Saccade handles
    *families.ROW_ARGUMENTS,
    "attention_mask", "position_ids", "past_key_values", "cache", "inputs_embeds", "input_ids",
    "cache_position", "visual_pos_masks", "deepstack_visual_embeds",
)  # fmt: skip


class _LanguageModelCalled(Exception):
    """Carries the arguments that a model was about to call its language model with."""


class PromptReader:
    """Runs a model up to the call of its language model, to read prompts.

    ``text`` is the language model, and ``axes`` how many numbers a position has: three for M-RoPE
    (time, height, width), else one. ``uses_trained_positions`` says whether the text after a medium
    gets the positions that :func:`move_text_past_media` returns. ``Backbone`` sets it where its
    ``positions`` are "trained".
    """

    def __init__(
        self,
        model: Any,
        text: Any,
        axes: int,
        device: torch.device,
        uses_trained_positions: bool = False,
    ) -> None:
        self.model, self.text, self.axes, self.device = model, text, axes, device
        self.uses_trained_positions = uses_trained_positions
        self.config = model.config.to_dict()
        self.placeholders = families.placeholders(self.config)
        layout = families.PICTURE_LAYOUTS.get(self.config["model_type"])
        self.layout = None if layout is None else layout(self.config)
        self._is_bidirectional = _is_bidirectional(text)

    def read(self, inputs: Inputs) -> list[Prompt]:
        """Returns the prompt of every request of a processor's output, without its padding.

        Raises ModelError for a model that Saccade cannot drive, OptionError for inputs that do not
        belong together.
        """
        # The arguments of the language model, for all requests at once, with padding.
        arguments = self._language_model_arguments(inputs)
        ids: Tensor = inputs["input_ids"].to(self.device)
        embeds = arguments["inputs_embeds"]
        if embeds is None:
            embeds = self.model.get_input_embeddings()(ids)
        kinds = self.placeholders.items()
        image_ids = ids.new_tensor([id_ for id_, kind in kinds if kind == "image"])
        mask = inputs.get("attention_mask")
        documents = inputs.get(DOCUMENT_MASK)
        is_real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        is_real = is_real.to(self.device)
        positions = self._positions(arguments.get("position_ids"), is_real)
        deepstack = arguments.get("deepstack_visual_embeds") or ()
        masks = self._masks_by_kind(arguments.get("attention_mask"), ids)
        row_arguments = {
            name: arguments[name]
            for name in families.ROW_ARGUMENTS
            if isinstance(arguments.get(name), Tensor)
        }
        # Each request's own rows of these arguments, without padding, become its prompt. Deepstack
        # has no axis of requests: its rows for one prompt follow those for the prompt before.
        prompts: list[Prompt] = []
        deepstack_start = 0  # where those of the next prompt begin
        cell_reader = _CellReader(self, inputs)
        for number in range(len(ids)):
            rows = is_real[number]
            own_ids = ids[number, rows]
            own_embeds = embeds[number, rows]
            visual, fixed, grid = cell_reader.next(own_ids, own_embeds)
            deepstack_stop = deepstack_start + int(visual.sum())
            own_positions = library_positions = positions[:, number, rows]
            if self.uses_trained_positions and self.axes > 1:
                own_positions = move_text_past_media(library_positions, visual | fixed)
            last_visible_row = self._last_visible_rows(masks, number, rows)
            # Layers of full attention are causal if they have no mask here. If rows see later ones
            # nevertheless, they do so in layers with a sliding window only.
            in_windows_only = last_visible_row is not None and "full_attention" not in masks
            prompt = Prompt(
                full_ids=own_ids,
                embeds=own_embeds,
                positions=own_positions,
                visual=visual,
                fixed=fixed,
                grid=grid,
                places=torch.arange(len(own_ids), device=self.device),
                # ``generate`` too goes on from the largest position of the last token.
                next_position=int(own_positions[:, -1].max()) + 1,
                media=Media(
                    last_visible_row=last_visible_row,
                    sees_ahead_in_windows_only=in_windows_only,
                    row_arguments={
                        name: each[number, rows] for name, each in row_arguments.items()
                    },
                    deepstack=tuple(layer[deepstack_start:deepstack_stop] for layer in deepstack),
                    image_rows=int((visual & torch.isin(own_ids, image_ids)).sum()),
                    has_trained_positions=not torch.equal(own_positions, library_positions),
                ),
            )
            deepstack_start = deepstack_stop
            if documents is not None:
                prompt = with_documents(prompt, documents[number].to(self.device)[rows].bool())
            prompts.append(prompt)
        return prompts

    def assemble(self, inputs: Inputs, rows: Float[Tensor, "visual dim"]) -> Prompt:
        """Returns one request's prompt from its visual rows, without running a vision tower.

        ``rows`` has a row for each placeholder of a medium, also for those that every view keeps.
        The prompt's positions count the tokens from 0. A caller that knows the right positions
        replaces them.
        """
        ids: Tensor = inputs["input_ids"][0].to(self.device)
        embeds = self.model.get_input_embeddings()(ids)
        is_placeholder = torch.isin(ids, torch.tensor([*self.placeholders], device=self.device))
        embeds[is_placeholder] = rows.to(embeds)
        visual, fixed, grid = _CellReader(self, inputs).next(ids, embeds)
        index = torch.arange(len(ids), device=self.device)
        positions = index.expand(self.axes, -1)
        return Prompt(
            full_ids=ids,
            embeds=embeds,
            positions=positions,
            visual=visual,
            fixed=fixed,
            grid=grid,
            places=index,
            next_position=len(ids),
        )

    def average_pictures(self) -> RemovableHandle:
        """Makes the projector read pictures averaged in blocks of 2x2 (:func:`average_blocks`).

        Prompts that are read until the returned handle is removed have averaged visual tokens. This
        is for families in ``families.TOKENWISE_PROJECTORS`` only: their projectors map each visual
        token by itself, while others merge several.
        """
        assert self.layout is not None, "these families have square pictures"
        sides = self.layout.image_side, self.layout.frame_side
        projector = self.model.base_model.multi_modal_projector
        return projector.register_forward_pre_hook(
            lambda module, args: (average_blocks(args[0], sides), *args[1:])
        )

    def _language_model_arguments(self, inputs: Inputs) -> dict[str, Any]:
        """Returns the arguments that the model calls its language model with, by name."""

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _LanguageModelCalled(kwargs)

        # This hook comes first, so other hooks do not run here. They run when the decoder reads the
        # prompt.
        handle = self.text.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        moved = {
            key: send_to_device(value, self.device) if isinstance(value, Tensor) else value
            for key, value in inputs.items()
            if key != DOCUMENT_MASK
        }
        try:
            self.model(**moved, use_cache=False)
        except _LanguageModelCalled as call:
            arguments: dict[str, Any] = call.args[0]
            self._check_arguments(arguments)
            return {"inputs_embeds": None, **arguments}
        except Exception as error:  # A model raises almost anything over the inputs of another.
            if memory.is_out_of_memory(error):
                raise
            raise OptionError(
                f"these inputs do not belong together: {first_line(error)}"
            ) from error
        finally:
            handle.remove()
        raise ModelError(f"{type(self.model).__name__} never reached its language model")

    def _masks_by_kind(
        self, masks: Any, ids: Int[Tensor, "batch len"]
    ) -> dict[str, Bool[Tensor, "batch len len"]]:
        """Returns the attention masks that a model made, by the kind of layer that they are for.

        Models hand their language model a mask for each kind, or one for all. A mask of two
        dimensions only says which tokens are padding, so it is left out. A kind without a mask is
        left out too where attention is causal. Where it is not (PaliGemma), every row sees the
        whole prompt.
        """
        by_kind = masks if isinstance(masks, Mapping) else {"full_attention": masks}
        # A mask that is no bool is added to the attention logits, so its zeros mark what is seen.
        bool_masks = {
            kind: (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
            for kind, mask in by_kind.items()
            if isinstance(mask, Tensor) and mask.ndim == 4
        }
        if self._is_bidirectional:
            full_mask = torch.ones((*ids.shape, ids.shape[1]), dtype=torch.bool, device=self.device)
            bool_masks |= {kind: full_mask for kind, mask in by_kind.items() if mask is None}
        return bool_masks

    def _last_visible_rows(
        self, masks: Mapping[str, Tensor], number: int, rows: Bool[Tensor, " len"]
    ) -> Int[Tensor, " own"] | None:
        """Returns the last row that each row of a prompt sees, or None if no row sees a later one.

        ``masks`` are those of all prompts by kind of layer, ``number`` is the prompt's place among
        them, and ``rows`` marks those that are no padding. A mask may be causal except for groups
        of rows that all see each other, such as a picture's. The last row that these see is the
        last of their group. In layers with a sliding window, rows see only as far as the window.
        Raises ModelError for any other mask, or if the groups are not the same for all kinds.
        """
        found_rows = []
        try:
            for kind, mask in masks.items():
                prompt_mask = mask[number][rows][:, rows]
                found_rows.append(
                    last_visible_rows(prompt_mask, window_of_kind(self.text.config, kind))
                )
        except ValueError as error:
            raise ModelError(
                f"{type(self.model).__name__} reads its prompt by a mask that Saccade does not "
                f"know: {error}"
            ) from error
        not_causal = [each for each in found_rows if each is not None]
        if not not_causal:
            return None
        first = not_causal[0]
        are_all_equal = len(not_causal) == len(found_rows) and all(
            torch.equal(first, each) for each in not_causal
        )
        if not are_all_equal:
            raise ModelError(
                f"{type(self.model).__name__} reads its pictures in several ways, which Saccade "
                "does not know"
            )
        return first

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raises ModelError if the language model reads arguments that Saccade does not handle.

        Such a model computes more than attention over the embedded prompt.
        """
        name = type(self.model).__name__
        # The language model does not read arguments that are no parameters of its own.
        parameters = inspect.signature(self.text.forward).parameters
        for key, value in arguments.items():
            is_unknown = key in parameters and key not in KNOWN_ARGUMENTS
            if is_unknown and isinstance(value, Tensor | dict | list | tuple):
                raise ModelError(f"{name} also reads {key}, which Saccade does not know")

    def _positions(
        self, positions: Tensor | None, is_real: Bool[Tensor, "batch len"]
    ) -> Int[Tensor, "axes batch len"]:
        """Returns the positions on every axis: the model's own, or those of plain text."""
        if positions is None:
            positions = (is_real.long().cumsum(-1) - 1).clamp(min=0)
        if positions.ndim == 2:
            positions = positions[None]
        if positions.shape[0] == self.axes + 1:  # Some models put plain text positions first.
            positions = positions[1:]
        try:
            return positions.expand(self.axes, *is_real.shape)
        except RuntimeError as error:
            raise OptionError(
                f"positions of {list(positions.shape)} do not belong to {list(is_real.shape)} "
                f"tokens on {self.axes} axes: leave position_ids out, or see rope_parameters in "
                "config.json"
            ) from error


def _is_bidirectional(text: nn.Module) -> bool:
    """Returns whether every row sees the whole prompt where a language model gets no mask.

    That is so if its attention modules say that they are not causal.
    """
    flags = [vars(module).get("is_causal") for module in text.modules()]
    return False in flags and True not in flags


def move_text_past_media(
    positions: Int[Tensor, "axes len"], visual: Bool[Tensor, " len"]
) -> Int[Tensor, "axes len"]:
    """Returns positions with the text after each picture or video moved, so that it begins one past
    the largest position before it on any axis.

    ``visual`` marks all rows of media, including the rows that every view has to keep.

    This is how Qwen2-VL and Qwen2.5-VL were trained. Transformers 5.3 and later go on from the
    larger of height and width, though the time of a video may be larger still
    (docs/upstream-transformers-positions.md). For example, if the largest time of a video is 20 and
    its largest height and width are 12, they put the next text at 13, and this moves it to 21.
    """
    moved = positions.clone()
    for end in (visual[:-1] & ~visual[1:]).nonzero().squeeze(-1).tolist():
        text_start = moved[:, : end + 1].max() + 1
        moved[:, end + 1 :] += text_start - moved[:, end + 1].max()
    return moved


def average_blocks(
    rows: Float[Tensor, "picture row dim"], sides: Sequence[int]
) -> Float[Tensor, "picture row dim"]:
    """Returns square pictures with each row replaced by the mean of its 2x2 block.

    Blocks at an edge may be smaller. A class token before the square stays as it is. So do rows
    that are no square of one of these ``sides``, since some towers return pictures of any size.
    """
    side = math.isqrt(rows.shape[1])
    lead_rows = rows.shape[1] - side**2
    if side not in sides or lead_rows > 1:
        return rows
    square = rows[:, lead_rows:].transpose(1, 2).unflatten(2, (side, side))  # [picture, dim, h, w]
    block_means = avg_pool2d(square, 2, ceil_mode=True)
    # Each mean is written to the four rows of its block. If the side is odd, the last line and
    # column of what this gives lie outside the square.
    means = block_means.repeat_interleave(2, 2).repeat_interleave(2, 3)[..., :side, :side]
    return torch.cat([rows[:, :lead_rows], means.flatten(2).transpose(1, 2)], 1)


class _CellReader:
    """Finds the cells of the visual rows of each prompt of a batch, one prompt after another.

    A row's cell is its place in a picture or video: (number of the medium, t, h, w). A processor
    returns the grids of all prompts in one sequence. Each call of :meth:`next` takes the grids of
    one prompt's media from that sequence, so prompts have to be read in order.
    """

    def __init__(self, reader: PromptReader, inputs: Inputs) -> None:
        self._kinds, self._layout, self._device = reader.placeholders, reader.layout, reader.device
        # The weight that newline rows are copies of; None for models without newlines.
        self._newline = vars(reader.model.base_model)["_parameters"].get("image_newline")
        self._grids: dict[str, Iterator[Cells]] = {
            kind: processor_cells(kind, inputs, reader.config)
            for kind in set(self._kinds.values())
            if inputs.get(f"{kind}_grid_thw") is not None
        }
        pixels = inputs.get("pixel_values_videos")
        # Pixels of five dimensions are [video, frame, channel, height, width].
        self._frames_per_video: int | None = None
        if isinstance(pixels, Tensor) and pixels.ndim == 5:
            self._frames_per_video = pixels.shape[1]

    def next(
        self, ids: Int[Tensor, " len"], embeds: Float[Tensor, "len dim"]
    ) -> tuple[Bool[Tensor, " len"], Bool[Tensor, " len"], Int[Tensor, "visual 4"]]:
        """Reads the next prompt, and returns (visual, fixed, cells).

        ``visual`` marks the rows that a view may drop: those with a cell in a picture or video.
        ``fixed`` marks the media's other rows, such as sound and newlines, which every view keeps.
        ``cells`` has the cell of each visual row.
        """
        kinds = [self._kinds.get(token) for token in ids.tolist()]
        places = torch.tensor([i for i, kind in enumerate(kinds) if kind], dtype=torch.long)
        rows = places.to(self._device)
        is_newline = torch.zeros(len(places), dtype=torch.bool)
        if self._newline is not None:
            # A newline row is an exact copy of one of the model's weights, so exact equality finds
            # it.
            is_newline = (embeds[rows] == self._newline.to(embeds)).all(-1).cpu()
        cells = arrange_cells(
            [kind for kind in kinds if kind],
            is_newline,
            places,
            self._grids,
            self._layout,
            self._frames_per_video,
        ).to(self._device)
        has_cell = cells[:, 0] >= 0
        visual = torch.zeros(len(kinds), dtype=torch.bool, device=self._device)
        visual[rows[has_cell]] = True
        fixed = torch.zeros_like(visual)
        fixed[rows[~has_cell]] = True
        return visual, fixed, cells[has_cell]
