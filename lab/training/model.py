"""The pair's configurations, a fused training forward over Hugging Face's own parameters, growth.

The forward computes what `Qwen2_5_VLForConditionalGeneration` computes (checked in
`tests/slow/test_training.py`) for a batch whose samples all have the same visual grid. It knows
nothing of the world, of text or of optimisers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from saccade.world.train_draft.run import make_untrained_model

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
SHORT = 512


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
    return make_untrained_model(config(layers), seed)


def _norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _vision_block(x: Tensor, cos: Tensor, sin: Tensor, block: Any) -> Tensor:
    a, m = block.attn, block.mlp
    groups, n, width = x.shape
    qkv = a.qkv(_norm(x, block.norm1.weight)).view(groups, n, 3, VISION_HEADS, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
    x = x + a.proj(mixed.transpose(1, 2).reshape(groups, n, width))
    y = _norm(x, block.norm2.weight)
    return x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = q.shape
    if n > SHORT:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # All weights at once: forward and backward take half the time, and n^2 memory.
    q = (q * d**-0.5).reshape(b, k.shape[1], -1, d)
    w = (q @ k.transpose(-1, -2)).view(b, k.shape[1], -1, n, n)
    w = w + torch.full((n, n), float("-inf")).triu(1)
    return (w.softmax(-1).flatten(2, 3) @ v).reshape(b, h, n, d)


def _text_block(x: Tensor, cos: Tensor, sin: Tensor, block: Any, eps: float) -> Tensor:
    a, m = block.self_attn, block.mlp
    batch, n, width = x.shape
    y = _norm(x, block.input_layernorm.weight, eps)
    q, k, v = (
        part(y).view(batch, n, -1, cos.shape[-1]).transpose(1, 2)
        for part in (a.q_proj, a.k_proj, a.v_proj)
    )
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    mixed = _attend(q, k, v)
    x = x + a.o_proj(mixed.transpose(1, 2).reshape(batch, n, width))
    y = _norm(x, block.post_attention_layernorm.weight, eps)
    return x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))


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


def text_rope(positions: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """cos, sin [batch, 1, length, head_dim] from M-RoPE ids [3, batch, length]."""
    rope, dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    inv = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angle = (positions[..., None].float() * inv).split(tuple(rope["mrope_section"]), -1)
    merged = torch.cat([part[i] for i, part in enumerate(angle)], -1)
    merged = torch.cat([merged, merged], -1)[:, None]
    return merged.cos(), merged.sin()


def tower(model: Any, frames: Tensor) -> Tensor:
    """What the merger reads of uint8 frame pairs [groups, 2, H, W, 3]: [groups * cells, 384]."""
    v = model.model.visual
    weight = v.patch_embed.proj.weight
    x = F.linear(patches(frames), weight.view(weight.shape[0], -1)).float()
    cos, sin = vision_rope(frames.shape[2], frames.shape[3])
    for block in v.blocks:
        x = _vision_block(x, cos, sin, block)
    return _norm(x, v.merger.ln_q.weight).reshape(-1, VISION_HIDDEN * MERGE**2)


def see(model: Any, frames: Tensor) -> Tensor:
    """Visual tokens [groups * cells, hidden] of uint8 frame pairs [groups, 2, H, W, 3]."""
    seen: Tensor = model.model.visual.merger.mlp(tower(model, frames))
    return seen


def embed(model: Any, ids: Tensor, visual: Tensor | None) -> Tensor:
    """Input embeddings [batch, length, hidden] with the visual tokens in their placeholders."""
    x: Tensor = model.model.language_model.embed_tokens(ids)
    if visual is None:
        return x
    at = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
    return x.masked_scatter(at[..., None], visual.to(x.dtype))


def read(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Final hidden states of embeddings `x` at M-RoPE `positions`; padding only on the right."""
    lm, config = model.model.language_model, model.config.text_config
    cos, sin = text_rope(positions, config)
    for block in lm.layers:
        x = _text_block(x, cos, sin, block, config.rms_norm_eps)
    return _norm(x, lm.norm.weight, config.rms_norm_eps)


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
