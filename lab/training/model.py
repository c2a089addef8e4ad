"""Defines the embedded pair's configs, a fast forward to train it, and how its depth changes.

The pair is two small Qwen2.5-VL models, which `train.py` trains. The forward here takes a model's
parameters and computes what `Qwen2_5_VLForConditionalGeneration` computes, for a batch whose
samples all have the same visual grid; `tests/slow/test_training.py` checks it.

In the shapes below, a group is a pair of frames, which the tower reads together. A visual token
covers a cell: 2 x 2 patches of a group. H and W are the height and width of a frame in pixels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
PATCH, MERGE, TEMPORAL = 14, 2, 2  # Pixels a side; patches a side of a cell; frames of a group.
CELL = PATCH * MERGE  # Pixels a side.
EPS = 1e-6  # Of RMS norms.
MAX_PLAIN_ATTENTION = 512  # Tokens; `attend` builds no whole matrix of weights for more.


def pair_config(layers: int) -> Qwen2_5_VLConfig:
    """Returns the config of a model of the pair with this many decoder layers."""
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
    """Makes an untrained model of the pair, of this many decoder layers, in float32."""
    return make_untrained_model(pair_config(layers), seed)


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """Returns `x` divided by the RMS of its last dimension, times `weight`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns queries or keys [..., length, head width] rotated by the angles of cos and sin."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _vision_block(x: Tensor, cos: Tensor, sin: Tensor, block: Any) -> Tensor:
    """Returns the output of a block of the tower for hidden states [groups, patches, width]."""
    a, m = block.attn, block.mlp
    groups, n, width = x.shape
    qkv = a.qkv(norm(x, block.norm1.weight)).view(groups, n, 3, VISION_HEADS, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + a.proj(mixed.transpose(1, 2).reshape(groups, n, width))
    y = norm(x, block.norm2.weight)
    return x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the output of causal attention [batch, heads, length, head width].

    `q` is [batch, heads, length, head width]. `k` and `v` have KV heads in place of heads, each of
    which several query heads share.
    """
    b, h, n, d = q.shape
    if n > MAX_PLAIN_ATTENTION:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # Computing all weights at once halves the time of forward and backward, but takes n^2 memory.
    # All query heads that share a KV head are rows of one product with its keys.
    kv_heads = k.shape[1]
    q = (q * d**-0.5).reshape(b, kv_heads, -1, d)
    w = (q @ k.transpose(-1, -2)).view(b, kv_heads, -1, n, n)
    w = w + torch.full((n, n), float("-inf")).triu(1)
    return (w.softmax(-1).flatten(2, 3) @ v).reshape(b, h, n, d)


def _text_block(x: Tensor, cos: Tensor, sin: Tensor, block: Any, eps: float) -> Tensor:
    """Returns the output of a decoder layer for hidden states [batch, length, width]."""
    a, m = block.self_attn, block.mlp
    batch, n, width = x.shape
    y = norm(x, block.input_layernorm.weight, eps)
    q, k, v = (
        part(y).view(batch, n, -1, cos.shape[-1]).transpose(1, 2)
        for part in (a.q_proj, a.k_proj, a.v_proj)
    )
    q = rotate(q, cos, sin)
    k = rotate(k, cos, sin)
    mixed = attend(q, k, v)
    x = x + a.o_proj(mixed.transpose(1, 2).reshape(batch, n, width))
    y = norm(x, block.post_attention_layernorm.weight, eps)
    return x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))


def pixel_rows(frames: Tensor) -> Tensor:
    """Returns the processor's pixel rows [groups, patches, 1176] of uint8 [groups, 2, H, W, 3].

    A row has a patch's 3 colours x 2 frames x 14 x 14 pixels, from -1 to 1. The four patches of a
    cell follow each other.
    """
    g, t, height, width, c = frames.shape
    x = (frames.float() / 255 - 0.5) / 0.5
    # From [groups, frame, cell row, patch row, y, cell column, patch column, x, colour] to
    # [groups, cell row, cell column, patch row, patch column, colour, frame, y, x].
    x = x.view(g, t, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH, c)
    return x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(g, -1, c * t * PATCH * PATCH)


def vision_rope(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [patches, head_dim] of a group of `height` x `width` pixels.

    Half of the angles turn with a patch's row, and half with its column. The four patches of a cell
    follow each other, as in `pixel_rows`.
    """
    dim = VISION_HIDDEN // VISION_HEADS // 2
    inv = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    h = height // PATCH
    w = width // PATCH
    rows, cols = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    shape = (h // MERGE, MERGE, w // MERGE, MERGE)
    rows, cols = (a.reshape(shape).transpose(1, 2).flatten() for a in (rows, cols))
    angle = torch.cat([rows[:, None] * inv, cols[:, None] * inv] * 2, -1)
    return angle.cos(), angle.sin()


def text_rope(positions: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [batch, 1, length, head_dim] of M-RoPE positions [3, batch, length].

    The first angles turn with the time, the next with the height, and the last with the width.
    """
    rope = config.rope_parameters
    dim = config.hidden_size // config.num_attention_heads
    inv = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angle = (positions[..., None].float() * inv).split(tuple(rope["mrope_section"]), -1)
    # Part 0 of the angles is taken of axis 0, part 1 of axis 1, and part 2 of axis 2.
    merged = torch.cat([part[i] for i, part in enumerate(angle)], -1)
    merged = torch.cat([merged, merged], -1)[:, None]
    return merged.cos(), merged.sin()


def vision_block_outputs(model: Any, frames: Tensor) -> list[Tensor]:
    """Returns the outputs [groups, patches, width] of all vision blocks, the first block's first.

    `frames` are [groups, 2, H, W, 3].
    """
    v = model.model.visual
    weight = v.patch_embed.proj.weight
    x = F.linear(pixel_rows(frames), weight.view(weight.shape[0], -1)).float()
    cos, sin = vision_rope(frames.shape[2], frames.shape[3])
    outputs = []
    for block in v.blocks:
        x = _vision_block(x, cos, sin, block)
        outputs.append(x)
    return outputs


def vision_features(model: Any, frames: Tensor) -> Tensor:
    """Returns the input of the merger's MLP [groups * cells, 384] of frames [groups, 2, H, W, 3].

    It is the tower's output after the merger's norm. The MLP makes a visual token of a cell's 4
    patches, which have 96 features each.
    """
    last = vision_block_outputs(model, frames)[-1]
    weight = model.model.visual.merger.ln_q.weight
    return norm(last, weight).reshape(-1, VISION_HIDDEN * MERGE**2)


def encode_frames(model: Any, frames: Tensor) -> Tensor:
    """Returns visual tokens [groups * cells, hidden] of uint8 frame pairs [groups, 2, H, W, 3]."""
    visual: Tensor = model.model.visual.merger.mlp(vision_features(model, frames))
    return visual


def embed(model: Any, ids: Tensor, visual: Tensor | None) -> Tensor:
    """Returns input embeddings [batch, length, hidden], with visual tokens at their places."""
    x: Tensor = model.model.language_model.embed_tokens(ids)
    if visual is None:
        return x
    at = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
    return x.masked_scatter(at[..., None], visual.to(x.dtype))


def run_decoder(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Returns the final hidden states of embeddings `x`, both [batch, length, hidden].

    `positions` are those of M-RoPE, [3, batch, length]. Padding may only be on the right, because
    attention is causal and has no other mask.
    """
    lm, config = model.model.language_model, model.config.text_config
    cos, sin = text_rope(positions, config)
    for block in lm.layers:
        x = _text_block(x, cos, sin, block, config.rms_norm_eps)
    return norm(x, lm.norm.weight, config.rms_norm_eps)


class Forward(NamedTuple):
    """How models of one family encode frames and decode embeddings in training."""

    encode: Callable[[Any, Tensor], Tensor]
    """Returns visual tokens [groups * cells, hidden] of a model and frames [groups, 2, H, W, 3]."""
    decode: Callable[[Any, Tensor, Tensor], Tensor]
    """Returns final hidden states of a model, embeddings and positions [3, batch, length]."""


PAIR = Forward(encode_frames, run_decoder)


def grow(
    model: Qwen2_5_VLForConditionalGeneration, layers: int, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """Returns a deeper model that computes the same function.

    The old layers are spread evenly. Each new layer follows the old layer that it copies, with zero
    `o_proj` and `down_proj`, so that it adds nothing before it is trained.
    """
    old = model.config.text_config.num_hidden_layers
    # For each layer of the deeper model, the old layer that its weights come from: 2 layers that
    # grow to 4 give [0, 0, 1, 1].
    source = [i * old // layers for i in range(layers)]
    deeper = create(layers, seed)
    state = model.state_dict()
    new_state = {}
    for name in deeper.state_dict():
        if ".layers." not in name:
            new_state[name] = state[name]
            continue
        # "model.layers.3.mlp.up_proj.weight" has the layer 3 and the tail "mlp.up_proj.weight".
        head, rest = name.split(".layers.")
        index, tail = rest.split(".", 1)
        i = int(index)
        value = state[f"{head}.layers.{source[i]}.{tail}"].clone()
        inserted = i > 0 and source[i] == source[i - 1]
        if inserted and tail in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            value.zero_()
        new_state[name] = value
    deeper.load_state_dict(new_state)
    return deeper


def shrink(
    model: Qwen2_5_VLForConditionalGeneration, layers: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Returns the model that `grow` began with, of `layers` layers, by leaving out those it added.

    If the deep model was trained, the weights of the layers that are left are the trained ones.
    """
    depth = model.config.text_config.num_hidden_layers
    # Maps the place of an original layer in the deep model to its place before it was grown. Of 4
    # layers that were 2, it is {0: 0, 2: 1}. (-(-a // b) is a / b rounded up.)
    original_place = {-(-i * depth // layers): i for i in range(layers)}
    state = model.state_dict()
    shallower = create(layers)
    new_state = {}
    for name, value in state.items():
        head, dot, rest = name.partition(".layers.")
        index, _, tail = rest.partition(".")
        if not dot:
            new_state[name] = value
        elif int(index) in original_place:
            new_state[f"{head}.layers.{original_place[int(index)]}.{tail}"] = value
    shallower.load_state_dict(new_state)
    return shallower
