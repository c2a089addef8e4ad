"""How much memory a model needs, from its config alone, how much there is, what a run took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from saccade.core.errors import ModelError
from saccade.model import families

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup/memory.max")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SPARE = 0.05  # of what there is, for what is not counted: activations, the allocator's gaps
WAYS = {"--dtype bfloat16": 2.0, "--quantize bnb-8bit": 1.0, "--quantize bnb-4bit": 0.5}
"""What makes a model smaller, and the bytes a weight takes then."""


class Peak:
    """How much memory was taken at most since this was made, above what was held then.

    On GPUs what torch allocated, over all of ``devices``; else, on Linux, the resident size of this
    process: coarse, 0 where memory freed earlier was used again, and shared with whatever else the
    process does meanwhile. One at a time: a new one starts the high-water mark anew.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._before: int | None
        if self._gpus:
            for device in self._gpus:
                torch.cuda.reset_peak_memory_stats(device)
            self._before = sum(map(torch.cuda.memory_allocated, self._gpus))
            return
        try:
            CLEAR.write_text("5")  # the high-water mark starts anew
            self._before = _resident("VmRSS")
        except OSError:
            self._before = None

    def bytes(self) -> int | None:
        """None where nothing measures it."""
        if self._before is None:
            return None
        if self._gpus:
            high = sum(map(torch.cuda.max_memory_allocated, self._gpus))
        else:
            high = _resident("VmHWM")
        return max(0, high - self._before)


def _resident(name: str) -> int:
    """A size of this process, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name}")


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


def footprint(config: Any) -> Footprint:
    """Counts the weights of a model that is built without any.

    Raises ModelError for a model without a decoder of layers.
    """
    try:
        kind, text = families.model_class(config), families.text_config(config)
        with torch.device("meta"):
            if config.model_type in families.THINKERS:
                model = kind(config.thinker_config)
            else:
                model = kind.from_config(config)
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


def available(device: torch.device) -> int:
    """Bytes free on a device; on a CPU, within this container's limit."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    free = int(psutil.virtual_memory().available)
    try:
        limit = int(CGROUP.read_text())
    except (OSError, ValueError):  # no limit
        return free
    return min(free, max(0, limit - psutil.Process().memory_info().rss))


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
    folder: str | None = None,
) -> None:
    """Raises ModelError, before any weight is read, if the weights cannot fit on ``device``.

    None is any number of devices: nothing is known then. ``folder`` is where the checkpoint is, if
    not in ``name``.
    """
    if device is None:
        return
    there = available(device)
    place = Path(folder or name)
    stored = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    if stored and 4 * stored < there:
        return  # fits in any type: no need to count
    needed = footprint(config).weights(weight_size(dtype, config, bits))
    if needed > there * (1 - SPARE):
        raise ModelError(advice(name, config, dtype, device, bits=bits))


def advice(
    name: str, config: Any, dtype: Any, device: torch.device, *, bits: int | None = None
) -> str:
    """One sentence: what was needed, what there is, and what would fit."""
    found, there = footprint(config), available(device)
    size = weight_size(dtype, config, bits)
    fit = [
        f"{way} ({gib(found.weights(each))})"
        for way, each in WAYS.items()
        if each < size and found.weights(each) < there * (1 - SPARE)
    ]
    would = f"{fit[0]} would fit" if fit else "a smaller model, or --device-map auto, might fit"
    return (
        f"{name} does not fit: its weights take {gib(found.weights(size))}, "
        f"and {device.type} has {gib(there)} free; {would}"
    )


def has_room(tokens: int, each: int, device: torch.device) -> bool:
    """Whether keys and values, ``each`` bytes a token, fit beside what is there."""
    return tokens * each <= available(device) * (1 - SPARE)


def check_prompt(tokens: int, each: int, device: torch.device) -> None:
    """Raises ModelError where keys and values, ``each`` bytes a token, cannot fit."""
    if not has_room(tokens, each, device):
        raise ModelError(too_long(tokens, each, device))


def too_long(tokens: int, each: int, device: torch.device) -> str:
    """One sentence: what a prompt needs, what there is, how long one would fit."""
    there = available(device)
    return (
        f"{tokens} tokens of prompt and answer need {gib(tokens * each)} for keys and values, and "
        f"{device.type} has {gib(there)} free: about {int(there * (1 - SPARE)) // each} would fit; "
        "take fewer frames (--num-frames) or a smaller --dtype"
    )


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"
