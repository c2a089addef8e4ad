"""DFlash heads (arXiv:2602.06036): a few decoder layers that draft a block by one forward.

The block is the last token of the text and masks after it. Its rows see the text and each other,
or in some layers only a part of these (:class:`BlockVisibility`). Each predicts the token at its
own place, or in some heads the token after it (``BlockSettings.first_row``). The keys of the text
are made of the target's hidden states: every layer reads the same ones, so the text needs no
forward of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from saccade.core.errors import ModelError
from saccade.model.attention import Step
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache
from saccade.model.heads import layouts
from saccade.model.heads.head import (
    Head,
    check_layers,
    check_target,
    fill_module,
    for_our_attention,
    make_rotary,
    plain_settings,
)
from saccade.model.heads.modules import Hidden, Rotation, spread_logits, target_ids_of
from saccade.model.segments import Segment
from saccade.model.window_rule import KeyWindow

DEFAULT_BLOCK_SIZE = 16  # In rows, where a config names no size.
UNKNOWN_SETTINGS = ("conv_kernel_size", "selector_rank", "markov_rank", "attention_value_scale")
"""Settings of later kinds of DFlash heads, whose additional parts are not supported."""
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class BlockVisibility:
    """The attention mask of a block's rows in one layer.

    With a ``window``, a row sees only keys within it. With ``is_causal``, a row sees the block's
    rows up to itself, otherwise all rows of the block.
    """

    window: KeyWindow | None
    is_causal: bool

    def segment(self, cache: Cache, start: int, stop: int) -> Segment:
        """Returns the rows ``start:stop`` of a forward as a block after all that is in a cache."""
        # ``committed_rows`` decides how a window measures the distance of two rows: by their places
        # in the text if they are committed, and else along the path of a tree. The rows of a block
        # follow each other in the text, so they are passed as committed. They are not kept all the
        # same, because ``draft_blocks`` never advances the cache. Without a window no distance is
        # measured, so ``committed_rows`` makes no difference.
        rows = stop - start
        at = cache.length
        if self.is_causal:
            return Segment(cache, start, stop, at, committed_rows=rows)
        if self.window is None:
            block = torch.ones(rows, rows, dtype=torch.bool)
            return Segment(cache, start, stop, at, block)
        # Each row sees the keys up to the last row of the block.
        last_visible_row = torch.full((rows,), at + rows - 1)
        return Segment(
            cache, start, stop, at, last_visible_row=last_visible_row, committed_rows=rows
        )


@dataclass(frozen=True)
class BlockSettings:
    """What the config of a DFlash head says beside its layers' sizes."""

    hidden_layers: tuple[int, ...]
    """Which of the target's hidden states it reads. The number n is the input of layer n."""
    mask_id: int  # The token that fills a block after the last token of the text.
    size: int  # Rows of a block, the last token's included.
    first_row: int
    """The row of a block that predicts the token after the text. Row 0 is the text's last token,
    and row 1 the first mask. It is row 1 where each row predicts the token at its own place, and
    row 0 where each predicts the token after it."""
    visibilities: tuple[BlockVisibility, ...]  # Of each layer.
    embedding_scale: float = 1.0  # A factor of the embeddings of a block's tokens.
    logit_scale: float = 1.0  # A factor of the logits.
    logit_cap: float = 0.0  # The logits are bent to less than this by a tanh. 0 for no bound.

    @classmethod
    def read(cls, settings: dict[str, Any], layers: Qwen3Config, name: str) -> BlockSettings:
        """Reads the entries of a head's config.json. ``layers`` is the config of its layers, and
        ``name`` the head's name for errors.

        Raises ModelError if it is no DFlash head, or one of a later kind.
        """
        entries = {**settings, **(settings.get("dflash_config") or {})}
        for unknown in UNKNOWN_SETTINGS:
            if entries.get(unknown) is not None:
                raise ModelError(
                    f"{name} is a later kind of DFlash head, with {unknown}, that Saccade does not "
                    "know: choose a DFlash head without it, or another draft"
                )
        # ``hidden_layers`` numbers a hidden state by the layer that reads it, and so does
        # speculators' aux_hidden_state_layer_ids. target_layer_ids numbers it by the layer that
        # returns it, which is one less.
        returning_layers = entries.get("target_layer_ids")
        if returning_layers is not None:
            hidden_layers = tuple(int(layer) + 1 for layer in returning_layers)
        else:
            reading_layers = entries.get("aux_hidden_state_layer_ids") or ()
            hidden_layers = tuple(int(layer) for layer in reading_layers)
        if not hidden_layers or entries.get("mask_token_id") is None:
            raise ModelError(
                f"{name} is no DFlash head: its config names no target_layer_ids or no "
                "mask_token_id"
            )
        # The anchor is the text's last token, which is row 0 of a block.
        first_row = 0 if entries.get("sample_from_anchor") else 1
        size = int(entries.get("block_size") or DEFAULT_BLOCK_SIZE)
        if size <= first_row:
            raise ModelError(f"{name} has blocks of {size} rows, which draft no token")
        return cls(
            hidden_layers,
            int(entries["mask_token_id"]),
            size,
            first_row,
            tuple(_read_visibilities(entries, layers)),
            float(entries.get("input_embedding_scale") or 1.0),
            float(entries.get("output_multiplier") or entries.get("logit_scale") or 1.0),
            float(entries.get("final_logit_softcapping") or 0.0),
        )

    @property
    def levels(self) -> int:
        """How many tokens a block drafts."""
        return self.size - self.first_row


def _read_visibilities(entries: dict[str, Any], layers: Qwen3Config) -> list[BlockVisibility]:
    """Returns what each layer's rows see.

    Layers with a window are causal and others are not, unless a config says otherwise. Configs of
    z-lab's heads say so by ``is_causal`` or ``causal``, for all layers. Configs of speculators'
    heads do by ``sliding_window_non_causal``, for layers with a window. In transformers' own class
    of such heads (``muse_glimmer_assistant``) no layer is causal.
    """
    is_causal = entries.get("is_causal", entries.get("causal"))
    if is_causal is None and entries.get("sliding_window_non_causal"):
        is_causal = False
    if is_causal is None and entries.get("model_type") == "muse_glimmer_assistant":
        is_causal = False
    kinds = entries.get("layer_types") or [None] * layers.num_hidden_layers
    if len(kinds) != layers.num_hidden_layers:
        raise ModelError(
            f"the config of a DFlash head has {len(kinds)} layer_types for "
            f"{layers.num_hidden_layers} layers"
        )
    if entries.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * layers.num_hidden_layers
    window_size = int(entries.get("swa_window_size") or entries.get("sliding_window") or 0)
    visibilities = []
    for kind in kinds:
        has_window = kind == SLIDING
        if has_window and not window_size:
            raise ModelError("a DFlash head with sliding attention has to name its sliding_window")
        window = KeyWindow(window_size) if has_window else None
        is_layer_causal = has_window if is_causal is None else bool(is_causal)
        visibilities.append(BlockVisibility(window, is_layer_causal))
    return visibilities


class BlockModule(nn.Module):
    """The weights of a DFlash head: Qwen3's decoder layers, and the projection through which they
    read the target's hidden states.

    The embeddings and the output matrix are the target's where a checkpoint has none.
    """

    def __init__(
        self,
        config: Qwen3Config,
        settings: BlockSettings,
        target_dim: int,
        target_vocab: int,
        *,
        draft_vocab: int | None,
        embedding_count: int | None,
        has_mask_embedding: bool,
    ) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        norm = modeling_qwen3.Qwen3RMSNorm
        self.hidden_layers = settings.hidden_layers
        self.target_vocab = target_vocab
        self.fc = nn.Linear(len(settings.hidden_layers) * target_dim, dim, bias=False)
        self.hidden_norm = norm(dim, eps=eps)
        self.layers = nn.ModuleList(
            modeling_qwen3.Qwen3DecoderLayer(config, number)
            for number in range(config.num_hidden_layers)
        )
        self.norm = norm(dim, eps=eps)
        self.embed_tokens = self.lm_head = self.mask_embedding = None
        if embedding_count is not None:
            self.embed_tokens = nn.Embedding(embedding_count, dim)
        if has_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.empty(dim))
        if draft_vocab is not None:
            self.lm_head = nn.Linear(dim, draft_vocab, bias=False)
            self.d2t: Tensor
            self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))

    @property
    def target_ids(self) -> Int[Tensor, " draft_vocab"]:
        """The target's id for each id of the head's own vocabulary."""
        return target_ids_of(self.d2t)

    def project(self, target_hidden: Float[Tensor, "row layers_dim"]) -> Hidden:
        """Returns the target's hidden states, projected to the head's width. Every layer computes
        the keys and values of the text from them."""
        return self.hidden_norm(self.fc(target_hidden))

    def make_keys(
        self, layer: int, projected: Hidden, rotation: Rotation
    ) -> tuple[Float[Tensor, "kv_head row head_dim"], Float[Tensor, "kv_head row head_dim"]]:
        """Returns a layer's keys and values of rows of the text. Keys are rotated."""
        attention: Any = self.layers[layer].self_attn
        shape = (1, len(projected), -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(projected).view(shape)).transpose(1, 2)
        values = attention.v_proj(projected).view(shape).transpose(1, 2)
        # The function rotates queries and keys together. There are no queries here, so it gets the
        # keys twice.
        _, keys = modeling_qwen3.apply_rotary_pos_emb(keys, keys, *rotation)
        return keys[0], values[0]

    def forward(self, embeds: Hidden, rotation: Rotation, steps: Sequence[Step]) -> Hidden:
        """Returns the last hidden states of the rows of blocks, which the output matrix reads. Each
        layer has its own step, because layers differ in what they see."""
        hidden = embeds[None]
        for layer, step in zip(self.layers, steps, strict=True):
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=rotation, saccade_step=step
            )
        return self.norm(hidden[0])


class BlockHead(Head):
    """A DFlash head over a loaded target. ``score`` and ``commit`` are those of
    :class:`saccade.model.heads.block_session.BlockSession`.

    ``axes`` is how many numbers of a row's position the rotary embedding reads: three for M-RoPE
    (time, height, width), else one.
    """

    drafts_blocks = True

    def __init__(
        self,
        target: Backbone,
        module: Any,
        config: Qwen3Config,
        settings: BlockSettings,
        rotary: Any,
        axes: int,
    ) -> None:
        super().__init__(target, module, config, rotary, axes)
        self.settings = settings
        self.levels_per_forward = settings.levels
        self.layer_count = self.key_layer_count = config.num_hidden_layers
        # From a layer's number among all layers to its number among those that have keys. Here
        # all layers have keys.
        self.key_layers = {number: number for number in range(self.layer_count)}
        # ``Head`` has filled these lists for one layer, and here all layers are alike.
        self.head_shapes = self.head_shapes * self.layer_count
        self.devices = self.devices * self.layer_count
        self.windows = [each.window for each in settings.visibilities]

    def _copy_for_target(self, target: Backbone) -> Head:
        return BlockHead(
            target, self.module, self.config, self.settings, self.text.rotary_emb, self.axes
        )

    @torch.no_grad()
    def write_text(
        self,
        caches: Sequence[Cache],
        target_hidden: Sequence[Float[Tensor, "row layers_dim"]],
        positions: Sequence[Int[Tensor, "axes row"]],
    ) -> None:
        """Appends the keys and values of rows of the text to the caches of several requests.

        Args:
            caches: of the requests.
            target_hidden: the target's hidden states in each request's rows.
            positions: of those rows, as the target counts them.
        """
        projected = self.module.project(torch.cat([*target_hidden]).to(self.device))
        rotation = self._rotation_of(projected, positions)
        counts = [len(each) for each in target_hidden]
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(cache.length + count)
        for layer in range(self.layer_count):
            keys, values = self.module.make_keys(layer, projected, rotation)
            parts = zip(caches, keys.split(counts, 1), values.split(counts, 1), strict=True)
            for cache, cache_keys, cache_values in parts:
                cache.write(layer, cache.length, cache_keys, cache_values)
        for cache, count in zip(caches, counts, strict=True):
            cache.advance(count)

    @torch.no_grad()
    def draft_blocks(
        self,
        caches: Sequence[Cache],
        last_tokens: Sequence[int],
        positions: Sequence[Int[Tensor, "axes row"]],
    ) -> Float[Tensor, "request level vocab"]:
        """Runs one block for each request, and returns the logits of the tokens that it drafts.

        The keys of the blocks are not kept.

        Args:
            caches: of the requests, with the keys of the text before its last token.
            last_tokens: the last token of each text, which is the first row of its block.
            positions: of the rows of each block.
        """
        size = self.settings.size
        ids = torch.full((len(caches), size), self.settings.mask_id, device=self.device)
        ids[:, 0] = torch.tensor(last_tokens, device=self.device)
        embeds = self._embed_block(ids)
        # Layers with the same attention mask share one step.
        visibilities = self.settings.visibilities
        step_of = {each: self._step(caches, each) for each in dict.fromkeys(visibilities)}
        steps = [step_of[each] for each in visibilities]
        rows = embeds.flatten(0, 1)
        out = self.module(rows, self._rotation_of(rows, positions), steps)
        drafted = out.view(len(caches), size, -1)[:, self.settings.first_row :]
        logits = self.logits(drafted.flatten(0, 1))
        return logits.view(len(caches), self.settings.levels, -1)

    def _rotation_of(self, rows: Hidden, positions: Sequence[Int[Tensor, "axes row"]]) -> Rotation:
        """Returns the rotation of rows of several requests, which have these positions."""
        return self.rotation(rows, torch.cat([*positions], 1)[: self.axes].to(self.device))

    def _step(self, caches: Sequence[Cache], visibility: BlockVisibility) -> Step:
        """Returns what a layer's attention needs to know of a forward over one block per cache."""
        size = self.settings.size
        segments = [
            visibility.segment(cache, number * size, (number + 1) * size)
            for number, cache in enumerate(caches)
        ]
        groups = self.heads // self.kv_heads
        windows = [visibility.window] * self.layer_count
        return Step(segments, groups, self.dtype, self.attention_choice, self.key_layers, windows)

    def _embed_block(self, ids: Int[Tensor, "request row"]) -> Float[Tensor, "request row dim"]:
        """Returns the embeddings of blocks. They have the head's own scale, and not the target's
        scale or norm, because such heads learnt to read them so."""
        table = self.module.embed_tokens or self.target.model.get_input_embeddings()
        weight = table.weight
        embeds = embedding(ids.to(weight.device), weight).to(self.device, self.dtype)
        embeds = embeds * self.settings.embedding_scale
        if self.module.mask_embedding is None:
            return embeds
        is_mask = (ids == self.settings.mask_id)[..., None]
        return torch.where(is_mask, self.module.mask_embedding, embeds)

    @torch.no_grad()
    def logits(self, hidden: Hidden) -> Float[Tensor, "rows vocab"]:
        """Returns logits over the target's vocabulary of rows of blocks."""
        module, settings = self.module, self.settings
        own_logits = self.target.logits if module.lm_head is None else module.lm_head
        logits = own_logits(hidden) * settings.logit_scale
        if settings.logit_cap:
            logits = torch.tanh(logits / settings.logit_cap) * settings.logit_cap
        if module.lm_head is None:
            return logits
        # Ids that the head does not know get their -inf after the cap, which would make it finite.
        return spread_logits(logits, module.target_ids, module.target_vocab)


def make_dflash_head(
    target: Backbone, settings: dict[str, Any], tensors: layouts.Tensors, name: str
) -> BlockHead:
    """Returns the DFlash head with this config (``settings``) and these tensors.

    Raises ModelError if they make no such head, or if it was made for another target.
    """
    # Checkpoints of speculators have the settings of the layers in an entry of their own.
    layer_settings = settings.get("transformer_layer_config") or settings
    config: Any = for_our_attention(Qwen3Config.from_dict(plain_settings(layer_settings)))
    block_settings = BlockSettings.read({**layer_settings, **settings}, config, name)
    parts = layouts.dflash_parts(tensors)
    check_target(target, settings, name)
    check_layers(target, block_settings.hidden_layers, parts.get("fc.weight"), name)
    # A head without embeddings or an output matrix uses the target's.
    embeddings = parts.get("embed_tokens.weight")
    matrix = parts.get("lm_head.weight")
    if (embeddings is None or matrix is None) and config.hidden_size != target.config.hidden_size:
        raise ModelError(
            f"{name} lacks embeddings or an output matrix, and the target's have another width"
        )
    count = target.embedding_count if embeddings is None else len(embeddings)
    if block_settings.mask_id >= count:
        raise ModelError(
            f"{name} has mask_token_id {block_settings.mask_id}, but there are only {count} "
            "embeddings"
        )
    if matrix is not None:
        layouts.add_id_map(parts, target.vocab, name)
    with torch.device("meta"):
        module = BlockModule(
            config,
            block_settings,
            target.config.hidden_size,
            target.vocab,
            draft_vocab=None if matrix is None else len(matrix),
            embedding_count=None if embeddings is None else len(embeddings),
            has_mask_embedding="mask_embedding" in parts,
        )
    fill_module(module, parts, target, name)
    rotary, axes = make_rotary(target, config)
    return BlockHead(
        target, module, config, block_settings, rotary.to(module.fc.weight.device), axes
    )
