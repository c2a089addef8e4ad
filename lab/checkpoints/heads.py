"""Gives tiny random checkpoints heads of random weights, in the layouts that are published.

``add_own_head`` writes MTP tensors into a target's checkpoint. ``make_eagle3`` writes an EAGLE-3
head as AngelSlim, SpecForge or speculators save it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saccade.model.backbone import Backbone

OwnLayoutName = Literal["mtp", "nextn"]
Eagle3Style = Literal["angelslim", "specforge", "speculators"]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32  # of an EAGLE-3 head's layer
OWN_NAMES: Mapping[OwnLayoutName, Mapping[str, str]] = {
    "mtp": {
        "fc": "fc.weight",
        "embedding": "pre_fc_norm_embedding.weight",
        "hidden": "pre_fc_norm_hidden.weight",
        "norm": "norm.weight",
        "layer": "layers.0.",
    },
    "nextn": {
        "fc": "eh_proj.weight",
        "embedding": "enorm.weight",
        "hidden": "hnorm.weight",
        "norm": "shared_head.norm.weight",
        "layer": "",
    },
}


def random_own_head(target: Backbone, layout: OwnLayoutName, seed: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of a head like the target's last layer with keys, by their names within
    the head."""
    draw = _drawing(seed)
    names, dim = OWN_NAMES[layout], target.config.hidden_size
    layer = target.text.layers[max(target.key_layers)]
    tensors = {names["layer"] + key: draw(each.shape) for key, each in layer.state_dict().items()}
    tensors[names["fc"]] = draw((dim, 2 * dim))
    for norm in ("embedding", "hidden", "norm"):
        tensors[names[norm]] = draw((dim,))
    return tensors


def add_own_head(folder: Path, target: Backbone, layout: OwnLayoutName, seed: int = 0) -> None:
    """Writes a random head into a checkpoint of one file, beside the target's own tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "mtp."
    if layout == "nextn":
        layers = next(key for key in tensors if re.search(r"layers\.0\.", key) and "vis" not in key)
        prefix = f"{layers.partition('layers.0.')[0]}layers.{target.depth}."
    own = random_own_head(target, layout, seed)
    tensors |= {prefix + key: each.contiguous() for key, each in own.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def eagle3_settings(target: Backbone, style: Eagle3Style, draft_vocab: int) -> dict[str, Any]:
    """Returns the config.json of a head for a target."""
    config = target.config
    layer = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    }
    if style == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "verifier": {"architectures": [type(target.model).__name__]},
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, target.depth],
        }
    settings = layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
    }
    if style == "specforge":
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
        settings["target_model_type"] = target.model.config.model_type
    return settings


def random_eagle3(
    target: Backbone, style: Eagle3Style, draft_vocab: int, seed: int = 0
) -> dict[str, Tensor]:
    """Returns the tensors of a head, by the names of its style."""
    draw, dim = _drawing(seed), target.config.hidden_size
    prefix = "layers.0." if style == "speculators" else "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * dim),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * dim),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * dim),
        "self_attn.o_proj.weight": (dim, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (2 * dim, dim),
        "mlp.up_proj.weight": (2 * dim, dim),
        "mlp.down_proj.weight": (dim, 2 * dim),
    }
    tensors = {prefix + key: draw(shape) for key, shape in shapes.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = 1 + draw((dim,))
    tensors["norm.weight"] = 1 + draw((dim,))
    tensors["fc.weight"] = draw((dim, 3 * dim))
    tensors["lm_head.weight"] = 4 * draw((draft_vocab, dim))
    generator = torch.Generator().manual_seed(seed)
    known = torch.randperm(target.vocab, generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = known - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(target.vocab, dtype=torch.bool).index_fill_(0, known, True)
    if style == "speculators":
        tensors["embed_tokens.weight"] = draw((target.vocab, dim)) * dim**0.5
    return tensors


def make_eagle3(
    folder: Path, target: Backbone, style: Eagle3Style, *, draft_vocab: int = 100, seed: int = 0
) -> Path:
    """Writes an EAGLE-3 head of random weights for a target, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = eagle3_settings(target, style, draft_vocab)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    tensors = random_eagle3(target, style, draft_vocab, seed)
    if style == "angelslim":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _drawing(seed: int) -> Callable[[tuple[int, ...] | torch.Size], Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...] | torch.Size) -> Tensor:
        scale = 0.2 if len(shape) < 2 else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

    return draw
