"""What sets model families apart, as data: how their visual tokens are laid out.

Most families need no entry: a processor that gives a grid of patches says it all. A new family with
square pictures needs one line in ``SIDES``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from transformers.models.auto.modeling_auto import MODEL_MAPPING

from saccade.core.errors import ModelError
from saccade.model.grid import Side

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
Described = Mapping[str, Any]
"""A config as a plain dict."""

# Saved by a transformers before this one, they were trained with text after a video where their
# authors put it (docs/upstream-transformers-positions.md).
AUTHORS, MOVED = ("qwen2_vl", "qwen2_5_vl"), (5, 3)

RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


def _patches(config: Described) -> int:
    vision = config["vision_config"]
    return int(vision["image_size"]) // int(vision["patch_size"])


def _lead(config: Described) -> int:
    """CLIP's class token, where a config keeps it."""
    full = config.get("vision_feature_select_strategy") == "full"
    return int(full and config["vision_config"].get("model_type") == "clip_vision_model")


def _llava(config: Described) -> Side:
    return Side(_patches(config), _patches(config), _lead(config))


def _llava_next_video(config: Described) -> Side:
    side = _patches(config)
    return Side(side, side // int(config.get("spatial_pool_stride") or 2), _lead(config))


def _square(config: Described) -> Side:
    side = math.isqrt(int(config["image_seq_length"]))
    return Side(side, side, joined=True)


def _scaled(config: Described) -> Side:
    side = _patches(config) // int(config["scale_factor"])
    return Side(side, side)


# How families with square pictures lay them out.
SIDES: dict[str, Callable[[Described], Side]] = {
    "llava": _llava,
    "llava_next": _llava,
    "llava_next_video": _llava_next_video,
    "llava_onevision": lambda config: Side(_patches(config), math.ceil(_patches(config) / 2)),
    "internvl": _square,
    "smolvlm": _scaled,
    "idefics3": _scaled,
    # its frames keep the class token their tower puts first
    "video_llava": lambda config: Side(_patches(config), _patches(config), frame_lead=1),
}


# Families whose ``multi_modal_projector`` takes every row of a square by itself, so that rows may
# be averaged before it; others merge patches there themselves (Qwen's merger).
PROJECTS_ROWS = {"llava", "llava_next", "llava_next_video", "llava_onevision", "internvl"}


def placeholders(config: Described) -> dict[int, Kind]:
    """The ids that stand for pixels or sound in a prompt."""
    found: dict[int, Kind] = {}
    for kind in KINDS:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(config.get(name), int):
                found[config[name]] = kind
    return found


def positions(config: Any) -> Literal["library", "trained"]:
    """Where a checkpoint saw text after a video while it was trained; see ``Backbone``."""
    saved = re.match(r"(\d+)\.(\d+)", str(config.transformers_version))
    older = saved is not None and (int(saved[1]), int(saved[2])) < MOVED
    return "trained" if older and config.model_type in AUTHORS else "library"


def refuse(whole: Any, text: Any) -> None:
    """Raises ModelError, before any work, for a model that cannot be rolled back token by token."""
    described = text.to_dict()
    kinds = set(described.get("layer_types") or ())
    name = described.get("model_type", "this model")
    if whole.to_dict().get("is_encoder_decoder"):
        raise ModelError(f"{name} is an encoder-decoder; Saccade needs a decoder-only model")
    sliding = any("sliding" in kind or "chunked" in kind for kind in kinds)
    everywhere = not kinds and described.get("sliding_window")  # Mistral's way of saying so
    if sliding or everywhere or described.get("use_sliding_window"):
        raise ModelError(f"{name} uses sliding-window attention, which Saccade does not handle yet")
    stateful = getattr(MODEL_MAPPING.get(type(text), None), "_is_stateful", False)
    if stateful or any(kind.startswith(RECURRENT) for kind in kinds):
        raise ModelError(f"{name} has recurrent layers, whose state cannot be rolled back")
