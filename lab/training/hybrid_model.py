"""Defines the hybrid pair: small Qwen3.5 models, made from the weights of the embedded pair.

The embedded pair is the small Qwen2.5-VL target and draft that come with this package. Two of three
layers of the hybrid target, and one of two of the hybrid draft, are Gated DeltaNet; the rest have
full attention. Embeddings, MLPs and norms of the language model and all matrices of the vision
tower but its MLPs are copied from the embedded pair. Gated DeltaNet begins as linear attention with
the queries, keys and values of the attention layer in whose place it stands.

`HYBRID` is the training forward over these models. It computes what
`Qwen3_5ForConditionalGeneration` computes; `tests/slow/test_hybrid_training.py` checks it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from lab.training.batch import PromptForm, visual_tokens
from lab.training.build import CHAT_TEMPLATE, IMAGES
from lab.training.model import (
    EPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MERGE,
    MLP,
    PATCH,
    SPECIAL_ID,
    TEMPORAL,
    VISION_DEPTH,
    VISION_HEADS,
    VISION_HIDDEN,
    VOCAB,
    Forward,
    attend,
    norm,
    pixel_rows,
    rotate,
    vision_rope,
)
from saccade.world.train_draft.samples import Canvas

HEAD_WIDTH = HIDDEN // HEADS
TOWER_MLP = 384  # Wider than the embedded tower's, whose MLPs have a gate.
TARGET_PATTERN = ("linear_attention", "linear_attention", "full_attention") * 2
DRAFT_PATTERN = ("linear_attention", "full_attention")
# For each layer of the hybrid, the layer of the embedded draft whose weights it begins with. Of the
# layers with the same source only the last one works at first. Those before it pass their input on
# as it is until they are trained.
TARGET_SOURCES = (0, 0, 0, 1, 1, 1)
DRAFT_SOURCES = (0, 1)
# Tokens after which the state of a head of a new Gated DeltaNet layer has decayed to about 1 / e.
MEMORIES = (8.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
VIDEO_PIXELS = dict(shortest_edge=2 * 28 * 28, longest_edge=2**26)  # Of all frames together.
QUERY_SIZE, KEY_SIZE = 0.9, 1.5  # Root mean squares of the embedded drafts' queries and keys.
CHUNK = 64  # Tokens whose changes of a Gated DeltaNet's state are computed at once.
VISUAL = "model.visual."  # How the names of the tower's weights begin.
# How the embedded pair's chat template writes a video.
VIDEO_IN_CHAT = "<|vision_start|><|video_pad|><|vision_end|>"


def hybrid_config(pattern: tuple[str, ...]) -> Qwen3_5Config:
    """Returns the config of a hybrid whose layers are of these kinds, from first to last."""
    return Qwen3_5Config(
        text_config=dict(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=len(pattern),
            layer_types=list(pattern),
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_WIDTH,
            attention_bias=True,
            linear_num_key_heads=HEADS,
            linear_num_value_heads=HEADS,
            linear_key_head_dim=HEAD_WIDTH,
            linear_value_head_dim=HEAD_WIDTH,
            max_position_embeddings=32768,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10000.0,
                mrope_section=[6, 5, 5],
                mrope_interleaved=True,
                partial_rotary_factor=1.0,
            ),
            tie_word_embeddings=True,
            rms_norm_eps=EPS,
            bos_token_id=None,
            eos_token_id=SPECIAL_ID["<|im_end|>"],
            pad_token_id=SPECIAL_ID["<|endoftext|>"],
        ),
        vision_config=dict(
            depth=VISION_DEPTH,
            hidden_size=VISION_HIDDEN,
            intermediate_size=TOWER_MLP,
            num_heads=VISION_HEADS,
            out_hidden_size=HIDDEN,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=TEMPORAL,
            num_position_embeddings=64,
        ),
        image_token_id=SPECIAL_ID["<|image_pad|>"],
        video_token_id=SPECIAL_ID["<|video_pad|>"],
        vision_start_token_id=SPECIAL_ID["<|vision_start|>"],
        vision_end_token_id=SPECIAL_ID["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def create_hybrid(pattern: tuple[str, ...], seed: int = 0) -> Any:
    """Makes an untrained hybrid in float32 with layers of these kinds.

    The learned positions of the tower's patches are zero and stay so.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(hybrid_config(pattern)).float().train()
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[SPECIAL_ID["<|im_end|>"], SPECIAL_ID["<|endoftext|>"]],
        pad_token_id=SPECIAL_ID["<|endoftext|>"],
    )
    # The embedded tower, whose weights this one gets, knows places of patches by rotation alone.
    nn.init.zeros_(model.model.visual.pos_embed.weight).requires_grad_(False)
    return model


def load_hybrid(folder: Path) -> Any:
    """Loads a saved hybrid in float32."""
    return Qwen3_5ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )


def convert(pair: Any, pattern: tuple[str, ...], sources: tuple[int, ...]) -> Any:
    """Returns a hybrid that begins with the weights of ``pair``, a model of the embedded pair.

    ``sources`` has for each layer of the hybrid the number of the layer of ``pair`` whose weights
    it begins with.
    """
    model = create_hybrid(pattern)
    old = pair.state_dict()
    text = model.model.language_model
    with torch.no_grad():
        model.load_state_dict(_tower_weights(old), strict=False)
        text.embed_tokens.weight.copy_(old["model.language_model.embed_tokens.weight"])
        # Qwen3.5's norms multiply by 1 + weight, and those of the pair by weight.
        text.norm.weight.copy_(old["model.language_model.norm.weight"] - 1)
        for number, (layer, source) in enumerate(zip(text.layers, sources, strict=True)):
            head = f"model.language_model.layers.{source}."
            weights = {n.removeprefix(head): v for n, v in old.items() if n.startswith(head)}
            for name in ("input_layernorm", "post_attention_layernorm"):
                layer.get_submodule(name).weight.copy_(weights[f"{name}.weight"] - 1)
            for name, weight in layer.mlp.named_parameters():
                weight.copy_(weights[f"mlp.{name}"])
            output_matrix = INITIALISERS[layer.block_type](layer, weights)
            has_later_copy = source in sources[number + 1 :]
            if has_later_copy:  # Both its outputs are 0, so the layer passes its input on.
                output_matrix.zero_()
                layer.mlp.down_proj.weight.zero_()
    return model


def _tower_weights(old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the embedded tower but the MLPs of its blocks, by the hybrid's names.

    ``old`` has all weights of a model of the embedded pair by their names there.
    """
    names = {"merger.ln_q.weight": "merger.norm.weight"}
    names |= {
        f"merger.mlp.{place}.{part}": f"merger.linear_fc{number}.{part}"
        for number, place in ((1, 0), (2, 2))
        for part in ("weight", "bias")
    }
    out = {}
    for name, value in old.items():
        rest = name.removeprefix(VISUAL)
        if rest != name and ".mlp." not in rest.replace("merger.mlp", ""):
            out[VISUAL + names.get(rest, rest)] = value
    return out


def _begin_attention(layer: Any, old: Mapping[str, Tensor]) -> Tensor:
    """Begins a hybrid's attention with that of an embedded layer, and returns its output matrix.

    ``old`` has the embedded layer's weights. Qwen3.5 has a gate that the embedded pair lacks. The
    gate's weights are 0, so it multiplies by sigmoid(0) = 0.5, and the output matrix is doubled.
    The embedded pair also lacks norms of queries and keys. Those of the hybrid bring queries and
    keys to the sizes that they have in the embedded pair.
    """
    new = layer.self_attn
    for part in ("weight", "bias"):
        gated = new.q_proj.get_parameter(part).view(HEADS, 2, HEAD_WIDTH, -1)
        gated[:, 0] = old[f"self_attn.q_proj.{part}"].view(HEADS, HEAD_WIDTH, -1)
        gated[:, 1] = 0
        for name in ("k_proj", "v_proj"):
            new.get_submodule(name).get_parameter(part).copy_(old[f"self_attn.{name}.{part}"])
    new.o_proj.weight.copy_(2 * old["self_attn.o_proj.weight"])
    new.o_proj.bias.zero_()
    nn.init.constant_(new.q_norm.weight, QUERY_SIZE - 1)
    nn.init.constant_(new.k_norm.weight, KEY_SIZE - 1)
    return cast(Tensor, new.o_proj.weight)


def _begin_delta_net(layer: Any, old: Mapping[str, Tensor]) -> Tensor:
    """Begins Gated DeltaNet with the projections of an embedded attention layer.

    ``old`` has the embedded layer's weights. The heads begin with ``MEMORIES``. Returns the output
    matrix.
    """
    new = layer.linear_attn
    key, value = (
        old[f"self_attn.{name}_proj.weight"]
        .view(KV_HEADS, HEAD_WIDTH, HIDDEN)
        .repeat_interleave(HEADS // KV_HEADS, 0)
        .view(HIDDEN, HIDDEN)
        for name in "kv"
    )
    new.in_proj_qkv.weight.copy_(torch.cat([old["self_attn.q_proj.weight"], key, value]))
    new.out_proj.weight.copy_(old["self_attn.o_proj.weight"])
    nn.init.normal_(new.conv1d.weight, std=0.1)
    new.conv1d.weight[..., -1] += 1.0  # So it nearly passes a token on as it is.
    nn.init.zeros_(new.A_log)
    # The state decays by exp(-softplus(bias)) a token, and softplus(log(expm1(x))) is x. So after
    # as many tokens as a head's memory, its state has decayed to 1 / e.
    new.dt_bias.copy_(torch.tensor([math.log(math.expm1(1 / tokens)) for tokens in MEMORIES]))
    nn.init.normal_(new.in_proj_a.weight, std=0.02)
    return cast(Tensor, new.out_proj.weight)


# By the kind of layer, what gives it its first weights: (the layer, the embedded layer's weights by
# name) -> the matrix that makes its mixer's output.
INITIALISERS = {"full_attention": _begin_attention, "linear_attention": _begin_delta_net}


# -- the training forward ----------------------------------------------------------------------


def run_tower(model: Any, frames: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns visual tokens [groups * cells, hidden] of frame pairs, and each block's output.

    ``frames`` are uint8 [groups, 2, H, W, 3]; a block's output is [groups, patches, width].
    """
    visual = model.model.visual
    x = F.linear(
        pixel_rows(frames),
        visual.patch_embed.proj.weight.flatten(1),
        visual.patch_embed.proj.bias,
    ).float()
    cos, sin = vision_rope(frames.shape[2], frames.shape[3])
    outputs = []
    for block in visual.blocks:
        groups, n, width = x.shape
        qkv = block.attn.qkv(block.norm1(x)).view(groups, n, 3, VISION_HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(groups, n, width))
        x = x + block.mlp(block.norm2(x))
        outputs.append(x)
    return visual.merger(x), outputs


def encode_frames(model: Any, frames: Tensor) -> Tensor:
    """Returns visual tokens [groups * cells, hidden] of uint8 frame pairs [groups, 2, H, W, 3]."""
    return run_tower(model, frames)[0]


def run_decoder(model: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Returns the final hidden states [batch, n, hidden] of embeddings `x` of the same shape.

    `positions` are M-RoPE's [3, batch, n]. Padding may only be on the right, because it is not
    masked, and tokens after it would read it.
    """
    text = model.model.language_model
    cos, sin = (each[:, None] for each in text.rotary_emb(x, positions))
    for layer in text.layers:
        y = norm(x, 1 + layer.input_layernorm.weight)
        x = x + MIXES[layer.block_type](layer, y, cos, sin)
        x = x + layer.mlp(norm(x, 1 + layer.post_attention_layernorm.weight))
    return norm(x, 1 + text.norm.weight)


def _mix_by_attention(layer: Any, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a = layer.self_attn
    batch, n, width = y.shape
    q, gate = a.q_proj(y).view(batch, n, HEADS, 2 * HEAD_WIDTH).chunk(2, -1)
    k, v = (part(y).view(batch, n, KV_HEADS, HEAD_WIDTH) for part in (a.k_proj, a.v_proj))
    q, k = (
        rotate(norm(part.float(), 1 + own.weight).transpose(1, 2), cos, sin)
        for part, own in ((q, a.q_norm), (k, a.k_norm))
    )
    mixed = attend(q, k, v.transpose(1, 2)).transpose(1, 2)
    out: Tensor = a.o_proj((mixed * gate.sigmoid()).reshape(batch, n, width))
    return out


def _mix_by_delta_net(layer: Any, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a = layer.linear_attn
    batch, n, width = y.shape
    convolved = a.conv1d(a.in_proj_qkv(y).transpose(1, 2))[..., :n].transpose(1, 2)
    q, k, v = F.silu(convolved).view(batch, n, 3, HEADS, HEAD_WIDTH).float().unbind(2)
    beta = a.in_proj_b(y).float().sigmoid()
    log_decay = -a.A_log.exp() * F.softplus(a.in_proj_a(y).float() + a.dt_bias)
    with torch.autocast("cpu", enabled=False):
        mixed = gated_delta_rule(q, k, v, log_decay, beta)
    gate = F.silu(a.in_proj_z(y).view(batch, n, HEADS, HEAD_WIDTH))
    out: Tensor = a.out_proj((norm(mixed, a.norm.weight) * gate).reshape(batch, n, width))
    return out


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Returns what queries read from a state that keys and values write.

    ``q``, ``k``, ``v`` and the result are [batch, n, heads, width]. Queries and keys are scaled to
    length 1 first, and the queries then by 1 / sqrt(width). The state S of a head begins as 0. It
    changes by S <- d (I - b k k^T) S + b k v^T at each token, with decay d and step b (Yang et al.
    2024, "Gated Delta Networks"). ``log_decay`` is log d and ``beta`` is b, both
    [batch, n, heads]. Within a chunk of ``CHUNK`` tokens all changes are found at once, as the
    solution of a triangular system. Only the state goes from chunk to chunk.
    """
    batch, n, heads, width = q.shape

    def chunks(x: Tensor) -> Tensor:
        """Returns [batch * heads, chunks, CHUNK, ...]."""
        x = F.pad(x if x.ndim == 4 else x[..., None], (0, 0, 0, 0, 0, -n % CHUNK))
        return x.transpose(1, 2).reshape(batch * heads, -1, CHUNK, x.shape[-1])

    q = chunks(q * torch.rsqrt(q.square().sum(-1, keepdim=True) + EPS) * width**-0.5)
    k = chunks(k * torch.rsqrt(k.square().sum(-1, keepdim=True) + EPS))
    v = chunks(v)
    beta = chunks(beta)
    decay = chunks(log_decay).cumsum(2)  # The log of the decay since the chunk began.
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    # How much of what token j writes is left at token i of the same chunk.
    between = (decay - decay.transpose(2, 3)).masked_fill(~causal, -math.inf).exp()
    # What a token writes depends on what the tokens before it wrote. The solution has the values
    # that would be written if the state were 0 at the chunk's start, and the keys by which that
    # state is read to correct these values.
    weighted = k * beta
    system = weighted @ k.transpose(2, 3) * between
    wanted = torch.cat([v * beta, weighted * decay.exp()], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new_values, old_reads = solved.split(width, -1)
    within = (q @ k.transpose(2, 3)) * between  # What queries read of the same chunk's tokens.
    last = decay[:, :, -1:]
    parts = (new_values, old_reads, within, q * decay.exp(), k * (last - decay).exp(), last.exp())
    state = q.new_zeros(batch * heads, width, width)  # S after the chunks so far.
    outputs = []
    for values, reads, weights, queries, keys, fade in zip(
        *(part.unbind(1) for part in parts), strict=True
    ):
        corrected = torch.baddbmm(values, reads, state, alpha=-1)
        outputs.append(torch.baddbmm(weights @ corrected, queries, state))
        state = torch.baddbmm(state * fade, keys.transpose(1, 2), corrected)
    out = torch.cat(outputs, 1).view(batch, heads, -1, width)
    return out[:, :, :n].transpose(1, 2)


# By the kind of layer, how it mixes tokens: (the layer, its normed input [batch, n, hidden], cos
# and sin of the positions) -> what is added to the hidden states. Gated DeltaNet ignores cos and
# sin.
MIXES = {"full_attention": _mix_by_attention, "linear_attention": _mix_by_delta_net}


# Hugging Face computes positions in a method of the model, ``get_rope_index``, which needs no
# weights. In calls of that method, this object stands for the model.
_ROPE = cast(Any, SimpleNamespace(config=hybrid_config(DRAFT_PATTERN)))
_ROPE.get_vision_position_ids = lambda *a, **k: Qwen3_5Model.get_vision_position_ids(_ROPE, *a, **k)


HYBRID = Forward(encode_frames, run_decoder)


class TimestampForm(PromptForm):
    """Qwen3.5's prompts: each frame pair of a video has its time as text before it."""

    def video_ids(self, tokenizer: Any, canvas: Canvas, seconds: float) -> list[int]:
        rate = canvas.frames / seconds
        tokens = visual_tokens(canvas) // (canvas.frames // TEMPORAL)
        text = "".join(
            f"<{(first + 0.5) / rate:.1f} seconds><|vision_start|>"
            + "<|video_pad|>" * tokens
            + "<|vision_end|>"
            for first in range(0, canvas.frames, TEMPORAL)
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def positions(
        self, ids: Tensor, media: Tensor, grids: Tensor, is_video: bool, rates: Tensor
    ) -> Tensor:
        positions: Tensor = Qwen3_5Model.get_rope_index(
            _ROPE,
            ids,
            mm_token_type_ids=media.int(),
            image_grid_thw=None if is_video else grids,
            video_grid_thw=grids if is_video else None,
        )[0]
        return positions


def make_hybrid_processor(tokenizer: Any) -> Qwen3VLProcessor:
    """Makes the processor of the hybrid target and draft, with the embedded pair's tokenizer."""
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**IMAGES),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            **IMAGES | dict(size=VIDEO_PIXELS), do_sample_frames=False, cap_pixels_per_frame=False
        ),
        # The processor itself writes the tokens around each frame pair.
        chat_template=CHAT_TEMPLATE.replace(VIDEO_IN_CHAT, "<|video_pad|>"),
    )
