"""Which class reads a checkpoint, and how a checkpoint is split over processes: configs alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from saccade.core.errors import ModelError, OptionError
from saccade.model import tensor_parallel
from saccade.model.families import placeholders

THINKERS: dict[str, Any] = {"qwen2_5_omni": Qwen2_5OmniThinkerForConditionalGeneration}
"""Families of which only the part that reads and writes text is loaded."""
PACKAGES = {
    "video_SALMONN2_plus": ("qwenvl.model", "register_transformers"),
    "VideoSALMONN2PlusForConditionalGeneration": ("qwenvl.model", "register_transformers"),
}
"""Architectures whose classes come with a package of their own, and what makes them known."""
OWN: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)
"""What a checkpoint's own code may name in its ``auto_map``."""
KEYS = "layers.*.self_attn.k_proj"  # what must be split by columns for heads to be


def model_class(config: Any) -> Any:
    """The class that reads a checkpoint of this config. Raises ModelError if none writes text."""
    if config.model_type in THINKERS:
        return THINKERS[config.model_type]
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    for kind in OWN:  # code that came with the checkpoint, and was trusted
        if kind.__name__ in (config.to_dict().get("auto_map") or {}):
            return kind
    if config.to_dict().get("is_encoder_decoder"):
        raise ModelError(
            f"{config.model_type} is an encoder-decoder; Saccade needs a decoder-only model"
        )
    raise ModelError(f"a {config.model_type} model does not generate text")


def register(config: Any) -> None:
    """Makes an architecture known that comes in its own package, where that is installed."""
    for name in config.architectures or ():
        if name in PACKAGES:
            module, function = PACKAGES[name]
            if importlib.util.find_spec(module.split(".")[0]) is None:
                raise ModelError(f"{name} needs its authors' package, which provides {module}")
            getattr(importlib.import_module(module), function)()


def text_config(config: Any) -> Any:
    """The config of the decoder within a model's."""
    if config.model_type in THINKERS:
        config = config.thinker_config
    return config.get_text_config(decoder=True)


def reads_text_only(config: Any) -> bool:
    return not placeholders(config.to_dict()) and model_class(config) is AutoModelForCausalLM


def local_device(device: str | None) -> str | None:
    """This process's own GPU where there are any."""
    if device is not None or not torch.cuda.is_available():
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def split(name: str, text: Any) -> dict[str, Any]:
    """What ``from_pretrained`` takes to split a model with this text config over all processes.

    Raises OptionError or ModelError, before any weight is read, where that cannot be.
    """
    count = tensor_parallel.world()
    if count < 2:
        raise OptionError(
            "a target is split over the processes of torchrun: start it with "
            "torchrun --nproc-per-node 2 -m saccade ..., or spread it with --device-map auto"
        )
    plan, experts = text.base_model_tp_plan or {}, text.to_dict().get("num_experts_per_tok")
    if plan.get(KEYS) != "colwise" or experts:
        raise ModelError(
            f"transformers has no plan that splits the heads of {text.model_type} over processes, "
            f"so {name} cannot be loaded with --tp: use --device-map auto"
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, what)
        if heads % count:
            raise ModelError(
                f"{name} has {heads} {what.removeprefix('num_').replace('_', ' ')}, which cannot "
                f"be dealt out evenly to {count} processes: take a number that divides them"
            )
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=count, tp_plan="auto")}
    except (ImportError, TypeError):  # older versions take the plan itself
        return {"tp_plan": "auto"}
