"""Makes draft heads of random weights for tiny random checkpoints, in the layouts of real heads.

Tests and ``python -m lab accept`` draft with them. ``add_own_head`` writes a multi-token prediction
head (MTP) into a target's checkpoint, as in models that are published with a head of their own.
``make_eagle3`` writes an EAGLE-3 head as AngelSlim, SpecForge or speculators save it, and
``make_dflash`` a DFlash head as z-lab, speculators or transformers do.
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
DFlashStyle = Literal["z-lab", "speculators", "transformers"]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32  # The attention heads of EAGLE-3 and DFlash heads.
DFLASH_LAYERS = 2
DFLASH_WINDOW = 24  # Tokens that a layer with a sliding window sees.
DFLASH_MASK = 3  # The id of the token that stands for a token to be drafted.
# The tokens of a block, which a DFlash head drafts in one forward, by the head's style.
DFLASH_BLOCKS: Mapping[DFlashStyle, int] = {"z-lab": 8, "speculators": 4, "transformers": 6}
# How a checkpoint's own head names its tensors, by the layout: what a tensor is -> its name within
# the head. "layer" is the beginning of the names of its decoder layer. Qwen3.5 has the layout
# "mtp", DeepSeek-V3 and GLM-4.5 have "nextn".
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
    """Returns the tensors of a checkpoint's own head, by their names within the head.

    The head has one decoder layer, of the same shapes as the target's last layer with attention.
    """
    draw = _random_weights(seed)
    names = OWN_NAMES[layout]
    dim = target.config.hidden_size
    layer = target.text.layers[max(target.key_layers)]
    tensors = {names["layer"] + key: draw(each.shape) for key, each in layer.state_dict().items()}
    tensors[names["fc"]] = draw((dim, 2 * dim))
    for norm in ("embedding", "hidden", "norm"):
        tensors[names[norm]] = draw((dim,))
    return tensors


def add_own_head(folder: Path, target: Backbone, layout: OwnLayoutName, seed: int = 0) -> None:
    """Writes a random head into a checkpoint of one file, beside the target's own tensors.

    "mtp" names the tensors ``mtp.*``. "nextn" names them as one more layer of the language model.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "mtp."
    if layout == "nextn":
        # For a target of 2 layers with "model.layers.0.mlp.up_proj.weight" it is "model.layers.2.".
        first_layer_key = next(
            key for key in tensors if re.search(r"layers\.0\.", key) and "vis" not in key
        )
        path = first_layer_key.partition("layers.0.")[0]
        prefix = f"{path}layers.{target.layer_count}."
    own = random_own_head(target, layout, seed)
    tensors |= {prefix + key: each.contiguous() for key, each in own.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def eagle3_settings(target: Backbone, style: Eagle3Style, draft_vocab: int) -> dict[str, Any]:
    """Returns the config.json of an EAGLE-3 head for a target.

    The head has ``draft_vocab`` tokens of its own and reads three of the target's hidden states,
    which the styles name differently:

    - speculators: by the layer whose input is read, here 0, 1 and the number after the last
      layer's, which stands for the last layer's output.
    - specforge: by the layer whose output is read, here -1, 0 and 1, which are the inputs of layers
      0, 1 and 2.
    - angelslim: not at all, so that the head reads those that are the default.
    """
    layer = _layer_settings(target) | {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
    }
    if style == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": _speculators_settings(target, "eagle3"),
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, target.layer_count],
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
    """Returns the tensors of an EAGLE-3 head, by the names of its style."""
    draw = _random_weights(seed)
    dim = target.config.hidden_size
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
    tensors |= _known_ids(target.vocab, draft_vocab, seed)
    if style == "speculators":
        tensors["embed_tokens.weight"] = draw((target.vocab, dim)) * dim**0.5
    return tensors


def make_eagle3(
    folder: Path, target: Backbone, style: Eagle3Style, *, draft_vocab: int = 100, seed: int = 0
) -> Path:
    """Writes an EAGLE-3 head of random weights for a target, and returns its folder."""
    settings = eagle3_settings(target, style, draft_vocab)
    tensors = random_eagle3(target, style, draft_vocab, seed)
    return _write_head(folder, settings, tensors, pickled=style == "angelslim")


def dflash_layers(target: Backbone) -> list[int]:
    """Returns the layers of a target whose outputs a random DFlash head reads, counted from 0."""
    return [0, max(0, target.layer_count - 2)]


def dflash_settings(
    target: Backbone, style: DFlashStyle, draft_vocab: int | None = None
) -> dict[str, Any]:
    """Returns the config.json of a DFlash head for a target.

    The styles differ so that every kind is tested:

    - z-lab: one of the two layers has a sliding window, and that layer is causal.
    - transformers: both layers have a sliding window, and none is causal.
    - speculators: no layer has one. The head has a vocabulary of ``draft_vocab`` tokens, and the
      row of the last committed token drafts the first token (in other styles, the first mask does).

    The other styles have the target's vocabulary and ignore ``draft_vocab``.
    """
    kinds = {
        "z-lab": ["full_attention", "sliding_attention"],
        "speculators": ["full_attention", "full_attention"],
        "transformers": ["sliding_attention", "sliding_attention"],
    }[style]
    layer = _layer_settings(target) | {
        "model_type": "qwen3",
        "num_hidden_layers": DFLASH_LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": kinds,
    }
    if "sliding_attention" in kinds:
        layer |= {"sliding_window": DFLASH_WINDOW, "use_sliding_window": True}
    size = DFLASH_BLOCKS[style]
    ids = dflash_layers(target)
    if style == "speculators":
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "speculators_config": _speculators_settings(target, "dflash"),
            "transformer_layer_config": layer,
            "draft_vocab_size": draft_vocab,
            "block_size": size,
            "mask_token_id": DFLASH_MASK,
            "aux_hidden_state_layer_ids": [each + 1 for each in ids],
            "sample_from_anchor": True,
        }
    own = {"mask_token_id": DFLASH_MASK, "target_layer_ids": ids}
    if style == "transformers":
        return (
            layer
            | own
            | {
                "model_type": "muse_glimmer_assistant",
                "architectures": ["MuseGlimmerAssistantModel"],
                "block_size": size,
            }
        )
    return layer | {
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": target.layer_count,
        "block_size": size,
        "dflash_config": own,
    }


def random_dflash(
    target: Backbone, style: DFlashStyle, draft_vocab: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Returns the tensors of a DFlash head, by the names of its style.

    The style "speculators" needs ``draft_vocab``, and the others ignore it.
    """
    draw = _random_weights(seed)
    dim = target.config.hidden_size
    tensors = {}
    for number in range(DFLASH_LAYERS):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, dim),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, dim),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, dim),
            "self_attn.o_proj": (dim, HEADS * HEAD_DIM),
            "mlp.gate_proj": (2 * dim, dim),
            "mlp.up_proj": (2 * dim, dim),
            "mlp.down_proj": (dim, 2 * dim),
        }
        norms = {
            "self_attn.q_norm": HEAD_DIM,
            "self_attn.k_norm": HEAD_DIM,
            "input_layernorm": dim,
            "post_attention_layernorm": dim,
        }
        for name, shape in shapes.items():
            # With a large output of attention, a draft depends on its place and on the text.
            scale = 8 if name.startswith("self_attn.o") else 1
            tensors[f"layers.{number}.{name}.weight"] = scale * draw(shape)
        for name, width in norms.items():
            tensors[f"layers.{number}.{name}.weight"] = 1 + draw((width,))
    names = ("fc", "hidden_norm")
    if style == "transformers":
        names = ("encoder.fc", "encoder.output_norm_enc")
    tensors[f"{names[0]}.weight"] = draw((dim, len(dflash_layers(target)) * dim))
    tensors[f"{names[1]}.weight"] = 1 + draw((dim,))
    tensors["norm.weight"] = 1 + draw((dim,))
    if style == "speculators":
        assert draft_vocab is not None
        tensors["lm_head.weight"] = 4 * draw((draft_vocab, dim))
        tensors["embed_tokens.weight"] = draw((target.vocab, dim)) * dim**0.5
        tensors |= _known_ids(target.vocab, draft_vocab, seed)
    return tensors


def make_dflash(
    folder: Path, target: Backbone, style: DFlashStyle, *, draft_vocab: int = 100, seed: int = 0
) -> Path:
    """Writes a DFlash head of random weights for a target, and returns its folder.

    ``draft_vocab`` counts for the style "speculators" alone.
    """
    settings = dflash_settings(target, style, draft_vocab)
    return _write_head(folder, settings, random_dflash(target, style, draft_vocab, seed))


def _write_head(
    folder: Path,
    settings: Mapping[str, Any],
    tensors: dict[str, Tensor],
    *,
    pickled: bool = False,
) -> Path:
    """Writes a head's config and tensors, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer_settings(target: Backbone) -> dict[str, Any]:
    """Returns the sizes of the layers of an EAGLE-3 or DFlash head, as configs name them."""
    dim = target.config.hidden_size
    return {
        "hidden_size": dim,
        "intermediate_size": 2 * dim,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab,
        "max_position_embeddings": 4096,
    }


def _speculators_settings(target: Backbone, algorithm: str) -> dict[str, Any]:
    """Returns what a config of speculators says of the target."""
    verifier = {"architectures": [type(target.model).__name__]}
    return {"algorithm": algorithm, "verifier": verifier}


def _known_ids(vocab: int, draft_vocab: int, seed: int) -> dict[str, Tensor]:
    """Returns which of the target's ids a head knows, in the two tensors of real checkpoints.

    "d2t" has for each id of the head how much larger the target's id is, and "t2d" for each id of
    the target whether the head knows it. A head that knows the ids 2 and 5 of 6 has the "d2t"
    [2, 4] and the "t2d" [False, False, True, False, False, True].
    """
    generator = torch.Generator().manual_seed(seed)
    known = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    is_known = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    return {"d2t": known - torch.arange(draft_vocab), "t2d": is_known}


def _random_weights(seed: int) -> Callable[[tuple[int, ...] | torch.Size], Tensor]:
    """Returns a function that draws random weights of a shape.

    A matrix is scaled so that its product with a vector has entries as large as the vector's. A
    vector has entries of standard deviation 0.2.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...] | torch.Size) -> Tensor:
        scale = 0.2 if len(shape) < 2 else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

    return draw
