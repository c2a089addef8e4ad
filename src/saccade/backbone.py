"""The only file that knows Hugging Face models: what they read, and how to run their decoder.

A multimodal model embeds its prompt (vision towers, placeholders, positions) and hands that to its
language model. ``prompts`` lets it do exactly that and stops it there, so no family needs code
of its own; ``forward`` then drives the language model, token lists in, hidden states out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from saccade.attention import Step
from saccade.errors import ModelError
from saccade.lean import LeanDecoder
from saccade.types import Inputs, Prompt

ATTENTION = "saccade"
REMEMBERED = "_saccade_backbone"
PLACEHOLDERS = (
    "image_token_id", "video_token_id", "audio_token_id",
    "image_token_index", "video_token_index", "audio_token_index",
)  # fmt: skip
GRIDS = {"image_token_id": "image_grid_thw", "video_token_id": "video_grid_thw"}
RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


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
        self.text = cast(Any, self.model.get_decoder())
        config = cast(Any, self.text.config)
        _refuse(self.model.config, config)
        self.config = config
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or self.heads
        self.head_dim: int = (
            config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        )
        rope = config.to_dict().get("rope_parameters") or {}
        self.axes = 3 if "mrope_section" in rope else 1
        head = self.model.get_output_embeddings()
        self.vocab: int = head.weight.shape[0]
        self.device: torch.device = head.weight.device
        self.dtype: torch.dtype = head.weight.dtype
        self._head: Any = head
        self._embed: Any = self.model.get_input_embeddings()
        top = self.model.config.to_dict()
        self.placeholders = {
            top[name]: GRIDS.get(name) for name in PLACEHOLDERS if isinstance(top.get(name), int)
        }
        known = LeanDecoder.knows(self.text)
        if lean and not known:
            raise ModelError(
                f"the lean decoder does not know {config.model_type}: leave it to choose by itself"
            )
        self.lean = LeanDecoder(self.text) if known and lean is not False else None

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
    def prompts(self, inputs: Inputs) -> list[Prompt]:
        """Every request of a processor's output, as the language model would read it.

        Padding is dropped: prompts differ in length, and none pays for another.
        """
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
        grids = self._grids(ids, real, inputs)
        visual = self._visual(ids)
        found, taken = [], 0
        for row in range(batch):
            rows = real[row]
            seen = int(visual[row][rows].sum())
            found.append(
                Prompt(
                    context=ids[row, rows],
                    embeds=embeds[row, rows],
                    positions=positions[:, row, rows],
                    visual=visual[row, rows],
                    grid=grids[row],
                    index=torch.arange(int(rows.sum()), device=self.device),
                    next_position=int(positions[:, row, rows][:, -1].max()) + 1,  # as generate does
                    deepstack=tuple(layer[taken : taken + seen] for layer in layers),
                )
            )
            taken += seen
        return found

    def _capture(self, inputs: Inputs) -> dict[str, Any]:
        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Captured(kwargs)

        inner = self.model.base_model
        handle = self.text.register_forward_pre_hook(stop, with_kwargs=True)
        moved = {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in inputs.items()
        }
        try:
            inner(**moved, use_cache=False)
        except _Captured as caught:
            return {"inputs_embeds": None, **caught.kwargs}
        finally:
            handle.remove()
        raise ModelError(f"{type(self.model).__name__} never reached its language model")

    def _positions(self, given: Tensor | None, real: Tensor) -> Int[Tensor, "axes batch len"]:
        if given is None:
            given = (real.long().cumsum(-1) - 1).clamp(min=0)
        if given.ndim == 2:
            given = given[None]
        if given.shape[0] == self.axes + 1:  # some models put plain text positions first
            given = given[1:]
        return given.expand(self.axes, *real.shape)

    def _visual(self, ids: Tensor) -> Tensor:
        wanted = torch.tensor(sorted(self.placeholders), device=ids.device, dtype=ids.dtype)
        return torch.isin(ids, wanted)

    def _grids(self, ids: Tensor, real: Tensor, inputs: Inputs) -> list[Int[Tensor, "seen 4"]]:
        """(medium, t, h, w) of every visual token; media are numbered within a request.

        Where a processor gives no grid, a run of placeholders counts as one row of tokens.
        """
        queues: dict[int, Iterator[Tensor]] = {}
        for token, name in self.placeholders.items():
            sizes = inputs.get(name) if name else None
            if sizes is not None:
                merge = int(self.model.config.to_dict()["vision_config"]["spatial_merge_size"])
                shrink = torch.tensor([1, merge, merge])
                queues[token] = iter([_lattice(size) for size in (sizes.cpu() // shrink).tolist()])
        found = []
        for row in range(ids.shape[0]):
            kept = ids[row, real[row]].tolist()
            cells: list[Tensor] = []
            medium, at = 0, 0
            visual = [(i, token) for i, token in enumerate(kept) if token in self.placeholders]
            while at < len(visual):
                token = visual[at][1]
                if token in queues:
                    lattice = next(queues[token])
                else:
                    end = at
                    while end < len(visual) and visual[end] == (visual[at][0] + end - at, token):
                        end += 1
                    lattice = _lattice([1, 1, end - at])
                cells.append(torch.cat([torch.full((len(lattice), 1), medium), lattice], 1))
                at += len(lattice)
                medium += 1
            grid = torch.cat(cells) if cells else torch.zeros(0, 4, dtype=torch.long)
            found.append(grid[: len(visual)].to(self.device))
        return found

    # -- decoding ------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int] | Tensor) -> Float[Tensor, "... dim"]:
        return self._embed(torch.as_tensor(ids, device=self.device))

    def forward(
        self,
        embeds: Float[Tensor, "all dim"],
        positions: Int[Tensor, "axes all"],
        step: Step,
        deepstack: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "all dim"]:
        """Hidden states (after the last norm) of a flat list of tokens; ``step`` is the attention.

        ``deepstack`` is (mask of visual rows, [layer, seen, dim] to add to the first layers).
        """
        if self.lean is not None and deepstack is None:
            return self.lean(embeds, positions, step)
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
        return self._head(hidden)

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
        short.layers = layers
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
        if not mine or mine.keys() != theirs.keys():
            return False
        if self.config.to_dict().get("rope_parameters") != other.config.to_dict().get(
            "rope_parameters"
        ):
            return False
        return all(
            mine[name].shape == theirs[name].shape
            and mine[name].dtype == theirs[name].dtype
            and torch.equal(mine[name], theirs[name].to(mine[name].device))
            for name in mine
        )

    @torch.no_grad()
    def adopt(self, prompt: Prompt) -> Prompt:
        """Another model's prompt with its visual rows kept and its text embedded by this one."""
        embeds = self.embed(prompt.context)
        embeds[prompt.visual] = prompt.embeds[prompt.visual].to(embeds)
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


def _lattice(size: Sequence[int]) -> Int[Tensor, "cell 3"]:
    return torch.cartesian_prod(*(torch.arange(n) for n in size)).view(-1, 3)


def _tower(backbone: Backbone) -> dict[str, Tensor]:
    """Every weight between pixels and the language model."""
    text = {id(p) for p in backbone.text.parameters()} | {id(backbone._head.weight)}
    return {n: p for n, p in backbone.model.named_parameters() if id(p) not in text}


def _refuse(whole: Any, text: Any) -> None:
    """Refuses, before any work, a model whose cache cannot be rolled back token by token."""
    described = text.to_dict()
    kinds = set(described.get("layer_types") or ())
    name = described.get("model_type", "this model")
    if whole.to_dict().get("is_encoder_decoder"):
        raise ModelError(f"{name} is an encoder-decoder; Saccade needs a decoder-only model")
    sliding = any("sliding" in kind or "chunked" in kind for kind in kinds)
    if sliding or described.get("use_sliding_window"):
        raise ModelError(f"{name} uses sliding-window attention, which Saccade does not handle yet")
    if any(kind.startswith(RECURRENT) for kind in kinds):
        raise ModelError(f"{name} has recurrent layers, whose state cannot be rolled back")
