"""Differences between model families, as data: how each lays out its visual tokens.

Most families need no entry, because their processor returns a grid of patches. A new family with
square pictures needs one line in ``PICTURE_LAYOUTS``.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from torch import nn

from saccade.core.errors import ModelError
from saccade.model.recurrent import refuse_unknown_state
from saccade.model.visual_grid import PictureLayout

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
ConfigDict = Mapping[str, Any]
"""A model's config as a plain dict."""

# From ``TEXT_MOVED_IN_VERSION`` on, transformers gives text after a video other positions than Qwen
# trained these families with (docs/upstream-transformers-positions.md).
FAMILIES_WITH_MOVED_TEXT = ("qwen2_vl", "qwen2_5_vl")
TEXT_MOVED_IN_VERSION = (5, 3)


def _patches_per_side(config: ConfigDict) -> int:
    vision = config["vision_config"]
    return int(vision["image_size"]) // int(vision["patch_size"])


def _class_tokens(config: ConfigDict) -> int:
    """Returns 1 where the model keeps CLIP's class token before each picture, else 0."""
    keeps_all = config.get("vision_feature_select_strategy") == "full"
    return int(keeps_all and config["vision_config"].get("model_type") == "clip_vision_model")


def _llava(config: ConfigDict) -> PictureLayout:
    side = _patches_per_side(config)
    return PictureLayout(image_side=side, frame_side=side, image_lead_rows=_class_tokens(config))


def _llava_next_video(config: ConfigDict) -> PictureLayout:
    side = _patches_per_side(config)
    stride = int(config.get("spatial_pool_stride") or 2)
    return PictureLayout(
        image_side=side, frame_side=side // stride, image_lead_rows=_class_tokens(config)
    )


def _llava_onevision(config: ConfigDict) -> PictureLayout:
    side = _patches_per_side(config)
    return PictureLayout(image_side=side, frame_side=math.ceil(side / 2))


def _video_llava(config: ConfigDict) -> PictureLayout:
    """Returns the layout of Video-LLaVA, whose frames keep the class token of their tower."""
    side = _patches_per_side(config)
    return PictureLayout(image_side=side, frame_side=side, frame_lead_rows=1)


def _internvl(config: ConfigDict) -> PictureLayout:
    side = math.isqrt(int(config["image_seq_length"]))
    return PictureLayout(image_side=side, frame_side=side, has_tiles=True)


def _idefics(config: ConfigDict) -> PictureLayout:
    """Returns the layout of Idefics 3 and SmolVLM, which merge squares of patches into one token.

    Such a square is ``scale_factor`` patches high and wide.
    """
    side = _patches_per_side(config) // int(config["scale_factor"])
    return PictureLayout(image_side=side, frame_side=side)


PICTURE_LAYOUTS: dict[str, Callable[[ConfigDict], PictureLayout]] = {
    "llava": _llava,
    "llava_next": _llava,
    "llava_next_video": _llava_next_video,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "smolvlm": _idefics,
    "idefics3": _idefics,
    "video_llava": _video_llava,
}
"""How families with square pictures lay them out, by model type."""


TOKENWISE_PROJECTORS = {"llava", "llava_next", "llava_next_video", "llava_onevision", "internvl"}
"""Families whose ``multi_modal_projector`` maps each visual token on its own, so that tokens may be
averaged before it. The projectors of other families merge patches (Qwen's merger)."""


def _per_layer_inputs(text: Any, ids: Any, embeds: Any) -> Any:
    """Returns Gemma 3n's and 4's extra embeddings of text tokens, one for each layer."""
    model_class: Any = type(text)
    if _per_layer_inputs_take_embeddings(model_class):
        return text.get_per_layer_inputs(ids, embeds)
    return text.get_per_layer_inputs(ids)


@cache
def _per_layer_inputs_take_embeddings(model_class: Any) -> bool:
    """Returns whether ``get_per_layer_inputs`` of a class of language models takes the input
    embeddings too (Gemma 4), and not ids alone."""
    return "inputs_embeds" in inspect.signature(model_class.get_per_layer_inputs).parameters


ROW_ARGUMENTS: dict[str, Callable[[Any, Any, Any], Any] | None] = {
    "per_layer_inputs": _per_layer_inputs,
    "moe_mm_token_type_ids": None,  # whether a row goes to the experts for pictures or for text
}
"""Arguments that language models read for each row besides its embedding, and a function that
computes the argument for text from (the language model, ids, embeddings), where ids and embeddings
begin with the shape [1, len]. None means that rows of text need no such argument."""


def language_model(model: Any) -> Any:
    """Returns the part of a model that has the decoder's layers."""
    decoder = model.get_decoder()
    if "layers" not in decoder._modules and "model" in decoder._modules:
        return decoder.model  # Llama 4's decoder is its language model together with its head.
    return decoder


def placeholders(config: ConfigDict) -> dict[int, Kind]:
    """Returns the token ids that stand for pixels or sound in a prompt, with their kind."""
    kind_by_id: dict[int, Kind] = {}
    for kind in KINDS:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(config.get(name), int):
                kind_by_id[config[name]] = kind
    return kind_by_id


def position_rule(config: Any) -> Literal["library", "trained"]:
    """Returns which positions a checkpoint was trained with for text after a video.

    "library" stands for the positions that transformers gives such text now. "trained" stands for
    those that Qwen trained ``FAMILIES_WITH_MOVED_TEXT`` with. The latter are assumed for a
    checkpoint of these families that transformers saved before ``TEXT_MOVED_IN_VERSION``.
    """
    version = re.match(r"(\d+)\.(\d+)", str(config.transformers_version))
    is_older = version is not None and (int(version[1]), int(version[2])) < TEXT_MOVED_IN_VERSION
    is_moved = is_older and config.model_type in FAMILIES_WITH_MOVED_TEXT
    return "trained" if is_moved else "library"


def refuse_unsupported(config: Any, text_config: Any) -> None:
    """Raises ModelError for an encoder-decoder, and for a model whose recurrent state Saccade does
    not know how to keep. It reads the configs alone, so it can be called before any work.

    ``config`` is the whole model's, ``text_config`` its language model's.
    """
    text = text_config.to_dict()
    name = text.get("model_type", "this model")
    if config.to_dict().get("is_encoder_decoder"):
        raise ModelError(f"{name} is an encoder-decoder; Saccade needs a decoder-only model")
    refuse_unknown_state(text_config)


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # Names in configs.


def weights_per_token(layers: nn.Module, config: Any) -> int:
    """Returns how many weights of a decoder's layers a token is multiplied with. Of a mixture of
    experts only those of the selected experts count."""
    settings = config.to_dict()
    selected = settings.get("num_experts_per_tok") or settings.get("top_k_experts") or 1
    experts = next((settings[name] for name in EXPERT_COUNTS if settings.get(name)), selected)
    count = 0
    for name, weight in layers.named_parameters():
        share = selected / experts if ".experts." in name else 1
        count += int(weight.numel() * share)
    return count
