"""The pair's configurations, a fused training forward over Hugging Face's own parameters, growth.

The forward computes what `Qwen2_5_VLForConditionalGeneration` computes (checked in
`tests/slow/test_training.py`) for a batch whose samples all have the same visual grid. It knows
nothing of the world, of text or of optimisers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from saccade.world.train_draft.run import untrained

VOCAB = 1024
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_ID = {name: VOCAB - len(SPECIAL) + i for i, name in enumerate(SPECIAL)}
HIDDEN, MLP, HEADS, KV_HEADS = 192, 448, 6, 2
MROPE_SECTION = (4, 6, 6)
VISION_HIDDEN, VISION_DEPTH, VISION_MLP, VISION_HEADS = 96, 3, 256, 3
PATCH, MERGE, TEMPORAL = 14, 2, 2
CELL = PATCH * MERGE
EPS = 1e-6


def config(layers: int) -> Qwen2_5_VLConfig:
    """The configuration of a member of the pair with this many decoder layers."""
    return Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=32768,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, mrope_section=list(MROPE_SECTION)
            ),
            tie_word_embeddings=True,
            rms_norm_eps=EPS,
            use_sliding_window=False,
            bos_token_id=None,
            eos_token_id=SPECIAL_ID["<|im_end|>"],
            pad_token_id=SPECIAL_ID["<|endoftext|>"],
        ),
        vision_config=dict(
            depth=VISION_DEPTH,
            hidden_size=VISION_HIDDEN,
            intermediate_size=VISION_MLP,
            num_heads=VISION_HEADS,
            out_hidden_size=HIDDEN,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=TEMPORAL,
            tokens_per_second=2,
            window_size=112,
            fullatt_block_indexes=list(range(VISION_DEPTH)),
        ),
        image_token_id=SPECIAL_ID["<|image_pad|>"],
        video_token_id=SPECIAL_ID["<|video_pad|>"],
        vision_start_token_id=SPECIAL_ID["<|vision_start|>"],
        vision_end_token_id=SPECIAL_ID["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def create(layers: int, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly initialised fp32 model."""
    return untrained(config(layers), seed)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _vision_block(x: Tensor, cos: Tensor, sin: Tensor, p: Sequence[Tensor]) -> Tensor:
    n1, qkv_w, qkv_b, o_w, o_b, n2, g_w, g_b, u_w, u_b, d_w, d_b = p
    groups, n, width = x.shape
    qkv = F.linear(_norm(x, n1), qkv_w, qkv_b).view(groups, n, 3, VISION_HEADS, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
    x = x + F.linear(mixed.transpose(1, 2).reshape(groups, n, width), o_w, o_b)
    y = _norm(x, n2)
    return x + F.linear(F.silu(F.linear(y, g_w, g_b)) * F.linear(y, u_w, u_b), d_w, d_b)


def _text_block(x: Tensor, cos: Tensor, sin: Tensor, p: Sequence[Tensor]) -> Tensor:
    n1, q_w, q_b, k_w, k_b, v_w, v_b, o_w, n2, g_w, u_w, d_w = p
    batch, n, width = x.shape
    qkv = F.linear(_norm(x, n1), torch.cat([q_w, k_w, v_w]), torch.cat([q_b, k_b, v_b]))
    heads = qkv.view(batch, n, HEADS + 2 * KV_HEADS, -1).transpose(1, 2)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, n, width), o_w)
    gate, up = F.linear(_norm(x, n2), torch.cat([g_w, u_w])).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, d_w)


def patches(frames: Tensor) -> Tensor:
    """uint8 [groups, 2, H, W, 3] -> the processor's pixel rows [groups, patches, 1176]."""
    g, t, height, width, c = frames.shape
    x = (frames.float() / 255 - 0.5) / 0.5
    x = x.view(g, t, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH, c)
    return x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(g, -1, c * t * PATCH * PATCH)


def vision_rope(height: int, width: int) -> tuple[Tensor, Tensor]:
    """cos, sin [patches, head_dim] of one frame pair, patches in merge-block order."""
    dim = VISION_HIDDEN // VISION_HEADS // 2
    inv = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    h, w = height // PATCH, width // PATCH
    rows, cols = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    shape = (h // MERGE, MERGE, w // MERGE, MERGE)
    rows, cols = (a.reshape(shape).transpose(1, 2).flatten() for a in (rows, cols))
    angle = torch.cat([rows[:, None] * inv, cols[:, None] * inv] * 2, -1)
    return angle.cos(), angle.sin()


def text_rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [batch, 1, length, head_dim] from M-RoPE ids [3, batch, length]."""
    dim = HIDDEN // HEADS
    inv = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angle = (positions[..., None].float() * inv).split(MROPE_SECTION, -1)
    merged = torch.cat([part[i] for i, part in enumerate(angle)], -1)
    merged = torch.cat([merged, merged], -1)[:, None]
    return merged.cos(), merged.sin()


def see(model: Any, frames: Tensor) -> Tensor:
    """Visual tokens [groups * cells, hidden] of uint8 frame pairs [groups, 2, H, W, 3]."""
    v = model.model.visual
    weight = v.patch_embed.proj.weight
    x = F.linear(patches(frames), weight.view(weight.shape[0], -1)).float()
    cos, sin = vision_rope(frames.shape[2], frames.shape[3])
    for b in v.blocks:
        a, m = b.attn, b.mlp
        p = [b.norm1.weight, a.qkv.weight, a.qkv.bias, a.proj.weight, a.proj.bias, b.norm2.weight]
        p += [m.gate_proj.weight, m.gate_proj.bias, m.up_proj.weight, m.up_proj.bias]
        x = _vision_block(x, cos, sin, [*p, m.down_proj.weight, m.down_proj.bias])
    x = _norm(x, v.merger.ln_q.weight).reshape(-1, VISION_HIDDEN * MERGE**2)
    return v.merger.mlp(x)


def embed(model: Any, ids: Tensor, visual: Tensor | None) -> Tensor:
    """Input embeddings [batch, length, hidden] with the visual tokens in their placeholders."""
    x = model.model.language_model.embed_tokens(ids)
    if visual is None:
        return x
    at = (ids == SPECIAL_ID["<|image_pad|>"]) | (ids == SPECIAL_ID["<|video_pad|>"])
    return x.masked_scatter(at[..., None], visual)


def read(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Final hidden states of embeddings `x` at M-RoPE `positions`; padding only on the right."""
    lm = model.model.language_model
    cos, sin = text_rope(positions)
    for b in lm.layers:
        a, m = b.self_attn, b.mlp
        p = [b.input_layernorm.weight, a.q_proj.weight, a.q_proj.bias, a.k_proj.weight]
        p += [a.k_proj.bias, a.v_proj.weight, a.v_proj.bias, a.o_proj.weight]
        p += [b.post_attention_layernorm.weight, m.gate_proj.weight, m.up_proj.weight]
        x = _text_block(x, cos, sin, [*p, m.down_proj.weight])
    return _norm(x, lm.norm.weight)


def grow(
    model: Qwen2_5_VLForConditionalGeneration, layers: int, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """A deeper model that computes the same function.

    The old layers are spread evenly; each new one follows the old layer it copies, with zero
    `o_proj` and `down_proj`, so that it adds nothing until it is trained.
    """
    old = model.config.text_config.num_hidden_layers
    source = [i * old // layers for i in range(layers)]
    grown = create(layers, seed)
    state, new = model.state_dict(), {}
    for name in grown.state_dict():
        if ".layers." not in name:
            new[name] = state[name]
            continue
        head, rest = name.split(".layers.")
        index, tail = rest.split(".", 1)
        i = int(index)
        value = state[f"{head}.layers.{source[i]}.{tail}"].clone()
        inserted = i > 0 and source[i] == source[i - 1]
        if inserted and tail in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            value.zero_()
        new[name] = value
    grown.load_state_dict(new)
    return grown


def shrink(
    model: Qwen2_5_VLForConditionalGeneration, layers: int
) -> Qwen2_5_VLForConditionalGeneration:
    """The layers that `grow` began from, without those that it added and what they learnt since."""
    grown = model.config.text_config.num_hidden_layers
    first = {-(-i * grown // layers): i for i in range(layers)}  # where grown: where it came from
    state, shrunk = model.state_dict(), create(layers)
    new = {}
    for name, value in state.items():
        head, dot, rest = name.partition(".layers.")
        index, _, tail = rest.partition(".")
        if not dot:
            new[name] = value
        elif int(index) in first:
            new[f"{head}.layers.{first[int(index)]}.{tail}"] = value
    shrunk.load_state_dict(new)
    return shrunk
