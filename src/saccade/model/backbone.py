"""The only file that knows Hugging Face models: what they read, and how to run their decoder.

A multimodal model embeds its prompt (vision towers, placeholders, positions) and hands that to its
language model. ``prompts`` lets it do exactly that and stops it there, so no family needs code
of its own; ``forward`` then drives the language model, token lists in, hidden states out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from saccade.core.errors import ModelError
from saccade.core.prompt import Inputs, Prompt
from saccade.model import families, tensor_parallel
from saccade.model.attention import Step
from saccade.model.cache import Cache
from saccade.model.decoder import LeanDecoder
from saccade.model.grid import Cells, arrange, lattice

ATTENTION = "saccade"
READ = (  # what language models are given and we understand
    "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "input_ids",
    "cache_position", "visual_pos_masks", "deepstack_visual_embeds",
)  # fmt: skip
REMEMBERED = "_saccade_backbone"


class _Captured(Exception):
    """Carries what a model was about to give its language model."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs


class Backbone:
    """A loaded model seen as: inputs -> prompts, ids -> embeddings, embeddings -> logits.

    ``lean`` picks the decoder: ours beside the modules where the architecture is known (None or
    True), or the modules themselves (False), which are the fallback and the oracle.
    """

    def __init__(self, model: nn.Module, *, lean: bool | None = None) -> None:
        self.model = cast(Any, model)
        families.refuse(self.model.config, families.text_config(self.model.config))
        try:
            self.text = cast(Any, self.model.get_decoder())
            config, layers = cast(Any, self.text.config), self.text.layers
            self.heads: int = config.num_attention_heads
            self.kv_heads: int = config.num_key_value_heads or self.heads
        except AttributeError as error:
            raise ModelError(
                f"{type(model).__name__} has no decoder of layers that Saccade knows how to drive"
            ) from error
        self.shares = tensor_parallel.shares(layers[0])
        if self.shares is not None:  # heads are those of this process from here on
            self.heads //= self.shares.count
            self.kv_heads //= self.shares.count
        self.config = config
        self.layers: int = config.num_hidden_layers
        self.head_dim: int = (
            config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        )
        rope = config.to_dict().get("rope_parameters") or {}
        self.axes = 3 if "mrope_section" in rope else 1
        head = self.model.get_output_embeddings()
        self.vocab: int = head.weight.shape[0]
        self._head: Any = head
        self._embed: Any = self.model.get_input_embeddings()
        self.device = _place(self._embed)
        self.devices = [_place(layer) for layer in layers]
        self.dtype: torch.dtype = head.weight.dtype
        top = self.model.config.to_dict()
        self.placeholders = families.placeholders(top)
        self._side = families.side(top)
        known = self.shares is None and LeanDecoder.knows(self.text)
        if lean and not known:
            raise ModelError(
                f"the lean decoder does not know {config.model_type}: leave it to choose by itself"
            )
        self.lean = LeanDecoder(self.text, head, self.axes) if known and lean is not False else None

    @classmethod
    def of(cls, model: nn.Module) -> Backbone:
        """The backbone of a model, made once for as long as the model keeps its weights."""
        # kept on the model itself, so that both are freed together
        found: Backbone | None = vars(model).get(REMEMBERED)
        if found is None or found.model is not model or (found.lean and found.lean.stale()):
            found = vars(model)[REMEMBERED] = cls(model)
        return found

    # -- prompts -------------------------------------------------------------------------------

    @torch.no_grad()
    def prompts(self, inputs: Inputs, looked: Sequence[Any] | None = None) -> list[Prompt]:
        """Every request of a processor's output, as the language model would read it.

        Padding is dropped: prompts differ in length, and none pays for another. ``looked`` is what
        another model's equal vision tower gave for these inputs (:meth:`overhear`).
        """
        with self._shown(looked):
            captured = self._capture(inputs)
        ids: Tensor = inputs["input_ids"].to(self.device)
        embeds = captured["inputs_embeds"]
        if embeds is None:
            embeds = self.embed(ids)
        batch, length = ids.shape
        mask = inputs.get("attention_mask")
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
            found.append(
                Prompt(
                    context=mine,
                    embeds=read,
                    positions=positions[:, row, rows],
                    visual=visual,
                    fixed=fixed,
                    grid=grid,
                    index=torch.arange(len(mine), device=self.device),
                    next_position=int(positions[:, row, rows][:, -1].max()) + 1,  # as generate does
                    deepstack=tuple(layer[taken : taken + seen] for layer in layers),
                )
            )
            taken += seen
        return found

    def _capture(self, inputs: Inputs) -> dict[str, Any]:
        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Captured(kwargs)

        handle = self.text.register_forward_pre_hook(stop, with_kwargs=True)
        moved = {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in inputs.items()
        }
        try:
            self.model(**moved, use_cache=False)
        except _Captured as caught:
            return {"inputs_embeds": None, **self._understood(caught.kwargs)}
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
        return given.expand(self.axes, *real.shape)

    # -- decoding ------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int] | Tensor) -> Float[Tensor, "... dim"]:
        return self._embed(torch.as_tensor(ids, device=self.device))

    def forward(
        self,
        embeds: Float[Tensor, "all dim"],
        positions: Int[Tensor, "axes all"] | Sequence[int],
        step: Step,
        deepstack: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "all dim"]:
        """Hidden states (after the last norm) of a flat list of tokens; ``step`` is the attention.

        Text stands at one position on every axis: a list of them will do.
        ``deepstack`` is (mask of visual rows, [layer, seen, dim] to add to the first layers).
        """
        if self.lean is not None:
            return self.lean(embeds, positions, step, deepstack)
        if not isinstance(positions, Tensor):
            positions = torch.tensor(positions, device=self.device).expand(self.axes, -1)
        extra: dict[str, Any] = {}
        if deepstack is not None:
            mask, layers = deepstack
            extra = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(layers)}
        with self._attention():
            out = self.text(
                inputs_embeds=embeds[None],
                position_ids=positions[:, None] if self.axes > 1 else positions,
                use_cache=False,
                saccade_step=step,
                **extra,
            )
        return out.last_hidden_state[0]

    def logits(self, hidden: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        head = self._head if self.lean is None or self.lean.head is None else self.lean.head
        return head(hidden).to(self.device)

    @property
    def token_bytes(self) -> int:
        """Bytes a token's keys and values take."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def cache(self, capacity: int) -> Cache:
        """Room for the keys and values of a request, where each layer is."""
        return Cache(
            self.layers,
            self.kv_heads,
            self.head_dim,
            capacity,
            dtype=self.dtype,
            devices=self.devices,
        )

    def every_head(
        self, noted: Float[Tensor, "layer own seen"]
    ) -> Float[Tensor, "layer kv_head seen"]:
        """What this process noted per key head, with what others did where heads are split."""
        return noted if self.shares is None else self.shares.every_head(noted)

    def own_heads(self, chosen: Int[Tensor, "layer kv_head kept"]) -> Int[Tensor, "layer own kept"]:
        """Of a choice per key head, the part for the keys that are here."""
        return chosen if self.shares is None else self.shares.own_heads(chosen)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Our attention in the language model for the length of one call."""
        before = self.text.config._attn_implementation
        self.text.config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            self.text.config._attn_implementation = before

    def first(self, layers: int) -> Backbone:
        """The same model stopped after its first ``layers``, then its norm and head; no copies."""
        short = copy(self)
        short.layers, short.devices = layers, self.devices[:layers]
        short.lean = None if self.lean is None else self.lean.first(layers)
        short.text = copy(self.text)
        short.text._modules = {**self.text._modules, "layers": self.text.layers[:layers]}
        return short

    @torch.no_grad()
    def written(self, prompt: Prompt) -> Prompt:
        """The prompt with the rows a view left blank embedded as the ids they are to say."""
        if prompt.blank is None:
            return prompt
        rows = prompt.blank >= 0
        embeds = prompt.embeds.clone()
        embeds[rows] = self.embed(prompt.blank[rows])
        return replace(prompt, embeds=embeds, blank=None)

    # -- sharing -------------------------------------------------------------------------------

    def sees_as(self, other: Backbone) -> bool:
        """Whether both models turn pixels into the very same rows at the same positions."""
        mine, theirs = _tower(self), _tower(other)
        if not mine:
            return False
        if self.config.to_dict().get("rope_parameters") != other.config.to_dict().get(
            "rope_parameters"
        ):
            return False
        return _equal(mine, theirs)

    def looks_as(self, other: Backbone) -> bool:
        """Whether both have the very same vision tower, whatever projects what it gives."""
        mine, theirs = self._eyes, other._eyes
        if mine is None or theirs is None or self.device != other.device:
            return False
        return _equal(_weights(mine), _weights(theirs))

    def overhear(self, seen: list[Any]) -> RemovableHandle:
        """From now on ``seen`` takes (pixels, what the vision tower gives), until removed."""
        assert self._eyes is not None, "looks_as says whether there is a tower"
        return self._eyes.register_forward_hook(
            lambda module, args, given: seen.append((args[0] if args else None, given))
        )

    @contextmanager
    def _shown(self, seen: Sequence[Any] | None) -> Iterator[None]:
        """The vision tower gives what was ``seen`` of these very pixels instead of looking."""
        if seen is None or self._eyes is None:
            yield
            return
        before, look = vars(self._eyes).get("forward"), self._eyes.forward

        def glance(*args: Any, **kwargs: Any) -> Any:
            for pixels, given in seen:
                if args and pixels is not None and _same(pixels, args[0]):
                    return given
            return look(*args, **kwargs)

        self._eyes.forward = glance
        try:
            yield
        finally:
            del self._eyes.forward
            if before is not None:
                self._eyes.forward = before

    @property
    def _eyes(self) -> Any:
        return self.model.base_model._modules.get("vision_tower")

    @torch.no_grad()
    def adopt(self, prompt: Prompt) -> Prompt:
        """Another model's prompt with its visual rows kept and its text embedded by this one."""
        embeds = self.embed(prompt.context)
        seen = prompt.visual | prompt.fixed
        embeds[seen] = prompt.embeds[seen].to(embeds)
        return replace(prompt, embeds=embeds)


def _step_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers' layers call: our attention when a step came along, else plain SDPA."""
    step: Step | None = kwargs.pop("saccade_step", None)
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    out = step(module.layer_idx, query[0], key[0], value[0], float(kwargs["scaling"]))
    return out.view(1, out.shape[0], query.shape[1], query.shape[3]), None


AttentionInterface.register(ATTENTION, _step_attention)


class _Layout:
    """What stands where in the prompts of one batch, in order: grids are handed out as met."""

    def __init__(self, backbone: Backbone, inputs: Inputs) -> None:
        self._kinds = backbone.placeholders
        self._device = backbone.device
        self._side = backbone._side
        self._newline = vars(backbone.model.base_model)["_parameters"].get("image_newline")
        self._grids: dict[str, Iterator[Cells]] = {
            kind: _cells(kind, inputs, backbone.model.config.to_dict())
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


def _cells(kind: str, inputs: Inputs, config: Mapping[str, Any]) -> Iterator[Cells]:
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


def _place(module: nn.Module) -> torch.device:
    """Where a module computes; of one that is kept elsewhere and fetched, where accelerate says."""
    hook = vars(module).get("_hf_hook")
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    return next(module.parameters()).device


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def _equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether these are the very same weights; quantised ones never count as such."""
    return mine.keys() == theirs.keys() and all(
        type(mine[name].data) is type(theirs[name].data) is Tensor
        and mine[name].shape == theirs[name].shape
        and mine[name].dtype == theirs[name].dtype
        and torch.equal(mine[name], theirs[name].to(mine[name].device))
        for name in mine
    )


def _tower(backbone: Backbone) -> dict[str, Tensor]:
    """Every weight between pixels and the language model."""
    text = {id(p) for p in backbone.text.parameters()} | {id(backbone._head.weight)}
    return {n: p for n, p in backbone.model.named_parameters() if id(p) not in text}
