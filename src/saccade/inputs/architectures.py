"""Reads from a checkpoint's config which class loads it, and how to split it over processes."""

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
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from saccade.core.errors import ModelError, OptionError
from saccade.model import tensor_parallel
from saccade.model.families import placeholders

TEXT_PARTS: dict[str, Any] = {
    "qwen2_5_omni": Qwen2_5OmniThinkerForConditionalGeneration,
    "qwen3_omni_moe": Qwen3OmniMoeThinkerForConditionalGeneration,
}
"""Families of which only the thinker, the part that reads and writes text, is loaded."""
PACKAGES = {
    "video_SALMONN2_plus": ("qwenvl.model", "register_transformers"),
    "VideoSALMONN2PlusForConditionalGeneration": ("qwenvl.model", "register_transformers"),
}
"""Architectures that only their authors' package has, by name.

A value is a module of that package, and the function in it that registers the architectures with
transformers."""
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)
"""The classes that a checkpoint's own code may name in its ``auto_map``."""
# Transformers' plan of tensor parallelism names how each projection is split. If it splits this one
# by columns, every process gets some of the attention heads.
KEY_PROJECTION = "layers.*.self_attn.k_proj"


def model_class(config: Any) -> Any:
    """Returns the class that loads a checkpoint.

    Raises ModelError for a model that neither transformers nor its own code loads as one that
    writes text. An encoder-decoder such as T5 is among these.
    """
    if config.model_type in TEXT_PARTS:
        return TEXT_PARTS[config.model_type]
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    for auto_class in AUTO_CLASSES:  # For code that came with the checkpoint and is trusted.
        if auto_class.__name__ in (config.to_dict().get("auto_map") or {}):
            return auto_class
    if config.to_dict().get("is_encoder_decoder"):
        raise ModelError(
            f"{config.model_type} is an encoder-decoder; Saccade needs a decoder-only model"
        )
    raise ModelError(f"a {config.model_type} model does not generate text")


def concrete_class(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Returns the class of the model itself. :func:`model_class` may return an auto class, which
    only chooses that class."""
    loader = model_class(config)
    if config.model_type in TEXT_PARTS:
        return loader
    with torch.device("meta"):
        return type(loader.from_config(config, trust_remote_code=trust_remote_code))


def register(config: Any) -> None:
    """Registers those architectures of a config that are in their authors' package only.

    Raises ModelError where that package is not installed.
    """
    for name in config.architectures or ():
        if name in PACKAGES:
            module, function = PACKAGES[name]
            if importlib.util.find_spec(module.split(".")[0]) is None:
                raise ModelError(f"{name} needs its authors' package, which provides {module}")
            getattr(importlib.import_module(module), function)()


def text_config(config: Any) -> Any:
    """Returns the config of a model's decoder."""
    if config.model_type in TEXT_PARTS:
        config = config.thinker_config
    return config.get_text_config(decoder=True)


def reads_text_only(config: Any) -> bool:
    """Whether a model reads neither images nor videos."""
    return not placeholders(config.to_dict()) and model_class(config) is AutoModelForCausalLM


def local_device(device: str | None) -> str | None:
    """Returns the device, or this process's own GPU where no device is given and there are GPUs.

    The number of the GPU is that of torchrun's ``LOCAL_RANK``. Returns None where there is no GPU.
    """
    if device is not None or not torch.cuda.is_available():
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def tensor_parallel_arguments(name: str, text: Any) -> dict[str, Any]:
    """Returns the arguments of ``from_pretrained`` that split a model over all processes.

    ``text`` is the config of its decoder. Raises OptionError or ModelError, before any weight is
    read, where the model cannot be split.
    """
    count = tensor_parallel.world_size()
    if count < 2:
        raise OptionError(
            "a target is split over the processes of torchrun: start it with "
            "torchrun --nproc-per-node 2 -m saccade ..., or spread it with --device-map auto"
        )
    if text.to_dict().get("num_experts_per_tok"):
        raise ModelError(
            f"{name} is a mixture of experts, which --tp does not split over processes: use "
            "--device-map auto"
        )
    plan = text.base_model_tp_plan or {}
    if plan.get(KEY_PROJECTION) != "colwise":
        raise ModelError(
            f"transformers has no plan that splits the heads of {text.model_type} over processes, "
            f"so {name} cannot be loaded with --tp: use --device-map auto"
        )
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field)
        if heads % count:
            raise ModelError(
                f"{name} has {heads} {field.removeprefix('num_').replace('_', ' ')}, which cannot "
                f"be dealt out evenly to {count} processes: start a number that divides {heads}"
            )
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=count, tp_plan="auto")}
    except (ImportError, TypeError):  # Older versions of transformers take the plan itself.
        return {"tp_plan": "auto"}
