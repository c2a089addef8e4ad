"""How much memory a model's weights take, from its config alone, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from saccade.core.errors import ModelError, SaccadeError, kind_and_line
from saccade.inputs import architectures
from saccade.model import memory

WAYS = {"--dtype bfloat16": 2.0, "--quantize bnb-8bit": 1.0, "--quantize bnb-4bit": 0.5}
"""What makes a model smaller, and the bytes a weight takes then."""


@dataclass(frozen=True)
class Footprint:
    """A model in numbers (not bytes)."""

    parameters: int  # all weights
    decoder: int  # weights a token passes through: layers and head, of experts those chosen
    kv: int  # keys and values a token leaves
    layers: int
    vocab: int

    def weights(self, size: float) -> int:
        """Bytes of all weights at ``size`` bytes a number."""
        return int(self.parameters * size)

    def step(self, size: float, tokens: int, cache_size: float) -> float:
        """Bytes a forward of one token reads over ``tokens`` cached ones."""
        return self.decoder * size + self.kv * tokens * cache_size


def footprint(config: Any, *, trust_remote_code: bool = False) -> Footprint:
    """Counts the weights of a model that is built without any.

    Raises ModelError for a model without a decoder of layers.
    """
    try:
        kind, text = architectures.model_class(config), architectures.text_config(config)
        with torch.device("meta"):
            if config.model_type in architectures.THINKERS:
                model = kind(config.thinker_config)
            else:
                model = kind.from_config(config, trust_remote_code=trust_remote_code)
        known = text.to_dict()
        chosen = known.get("num_experts_per_tok") or 1
        share = chosen / (known.get("num_experts") or known.get("num_local_experts") or chosen)
        decoder = sum(
            int(weight.numel() * (share if ".experts." in name else 1))
            for name, weight in model.get_decoder().layers.named_parameters()
        )
        heads = known.get("num_key_value_heads") or text.num_attention_heads
        width = known.get("head_dim") or text.hidden_size // text.num_attention_heads
        return Footprint(
            parameters=sum(weight.numel() for weight in model.parameters()),
            decoder=decoder + model.get_output_embeddings().weight.numel(),
            kv=2 * text.num_hidden_layers * heads * width,
            layers=text.num_hidden_layers,
            vocab=text.vocab_size,
        )
    except AttributeError as error:
        raise ModelError(
            f"{config.model_type} has no decoder of layers that Saccade knows how to drive"
        ) from error
    except SaccadeError:
        raise
    except Exception as error:  # numbers that no model can have
        said = f"config.json describes no model that can be built ({kind_and_line(error)})"
        raise ModelError(said) from error


def number_size(dtype: Any, config: Any) -> int:
    """Bytes a number takes; "auto" is the checkpoint's own type."""
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    own = getattr(config, "dtype", None)
    return own.itemsize if isinstance(own, torch.dtype) else 4


def stored_bits(config: Any) -> int | None:
    """Bits a weight takes in a checkpoint that is quantised itself; None where it is not."""
    settings = config.to_dict().get("quantization_config")
    if not settings:
        return None
    if settings.get("load_in_4bit") or settings.get("bits") == 4:
        return 4
    return int(settings.get("bits") or 8)


def weight_size(dtype: Any, config: Any, bits: int | None = None) -> float:
    """Bytes a weight takes: of ``bits``, as stored in a quantised checkpoint, or a number's."""
    packed = bits or stored_bits(config)
    return number_size(dtype, config) if packed is None else packed / 8


def check(
    name: str,
    config: Any,
    dtype: Any,
    device: torch.device | None,
    *,
    bits: int | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Raises ModelError, before any weight is read, if the weights cannot fit on ``device``.

    They are those of the config: what its files lack would be made. None is any number of devices:
    nothing is known then.
    """
    if device is None:
        return
    there = memory.available(device)
    found = footprint(config, trust_remote_code=trust_remote_code)
    if found.weights(weight_size(dtype, config, bits)) > there * (1 - memory.SPARE):
        raise ModelError(advice(name, config, found, dtype, device, bits=bits))


def advice(
    name: str,
    config: Any,
    found: Footprint,
    dtype: Any,
    device: torch.device,
    *,
    bits: int | None = None,
) -> str:
    """One sentence: what was needed, what there is, and what would fit."""
    there = memory.available(device)
    size = weight_size(dtype, config, bits)
    fit = [
        f"{way} ({memory.gib(found.weights(each))})"
        for way, each in WAYS.items()
        if each < size and found.weights(each) < there * (1 - memory.SPARE)
    ]
    would = f"{fit[0]} would fit" if fit else "a smaller model, or --device-map auto, might fit"
    return (
        f"{name} does not fit: its weights take {memory.gib(found.weights(size))}, "
        f"and {device.type} has {memory.gib(there)} free; {would}"
    )
