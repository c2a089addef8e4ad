"""Computes from a model's config how much memory the model takes, before any weight is read.

``loading`` refuses a model whose weights do not fit on its device (:func:`refuse_if_too_large`).
The report on a pair of models (``bench/hardware/pair_fit``) also adds up caches, and the bytes that
a step reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from saccade.core.errors import ModelError, SaccadeError, kind_and_line
from saccade.inputs import architectures
from saccade.model import families, memory, recurrent, windowed_attention
from saccade.model.cache import max_window_rows
from saccade.model.decoder import FusedDecoder
from saccade.model.heads.head import EAGLE3_HIDDEN_STATES
from saccade.model.kernels.few_bits import Rounding
from saccade.model.session import forward_rows
from saccade.model.window_rule import KeyWindow

BYTES_PER_WEIGHT = {"--dtype bfloat16": 2.0, "--quantize bnb-8bit": 1.0, "--quantize bnb-4bit": 0.5}
"""The options that make a model smaller, and how many bytes a weight takes with each."""


MALFORMED_ENTRIES = (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError)
"""What reading an entry of a config raises that is missing or of another type."""

BITS_BY_FORMAT = {"mxfp4": 4}
"""The bits of a weight in each quantised format whose configs never say how many there are."""


@dataclass(frozen=True)
class Footprint:
    """The size of a model, counted in numbers rather than bytes.

    The methods return bytes. Where they take a ``size``, it is the bytes of one number.
    """

    parameters: int  # All weights.
    # The weights that one token passes through: the layers and the output matrix. Of a mixture of
    # experts, only the selected experts count.
    weights_per_token: int
    kv_numbers_per_token: int  # Keys and values that a token adds to the cache, over all layers.
    layers: int
    vocab: int
    stateful_layers: int = 0  # How many layers have a recurrent state instead of keys.
    # Numbers of a request's recurrent state, over all layers: the last inputs of convolutions,
    # which are in the model's dtype, and all others, which are always in fp32.
    conv_state_numbers: int = 0
    fp32_state_numbers: int = 0
    # The windows of the layers that evict the keys behind them.
    key_windows: tuple[KeyWindow, ...] = ()
    can_be_rounded: bool = True  # Whether ``draft_quantize`` can round a copy of its weights.

    def state_bytes(self, size: float) -> int:
        """Returns the bytes of one recurrent state of a request, over all layers. ``size`` is that
        of a number in the model's dtype."""
        return int(
            self.conv_state_numbers * size + self.fp32_state_numbers * torch.float32.itemsize
        )

    def cache_bytes(self, tokens: int, size: float) -> int:
        """Returns the bytes that a request of ``tokens`` tokens takes in the cache: their keys and
        values, and the request's recurrent states.

        Layers with a window are counted as evicting the keys behind it, which most methods allow.
        """
        # A request keeps not only its current recurrent states but also earlier ones, to return to.
        states = self.state_bytes(size) * recurrent.STATES_PER_REQUEST
        # First every layer is counted with the keys of all tokens. Then the rows that the layers
        # with a window do not hold are subtracted. How many those hold depends on the most rows
        # that a forward over a prompt has (``forward_rows``).
        stored_rows = [
            max_window_rows(window, tokens, forward_rows()) for window in self.key_windows
        ]
        missing_rows = sum(tokens - rows for rows in stored_rows)
        key_layers = max(1, self.layers - self.stateful_layers)
        numbers_per_layer_row = self.kv_numbers_per_token // key_layers
        numbers = self.kv_numbers_per_token * tokens - numbers_per_layer_row * missing_rows
        return int(numbers * size) + states

    def weight_bytes(self, size: float) -> int:
        """Returns the bytes of all weights."""
        return int(self.parameters * size)

    def rounded_copy_bytes(self, bytes_per_weight: float) -> int:
        """Returns the bytes of a copy, rounded to fewer bits, of the weights that a token passes
        through (``draft_quantize``)."""
        return int(self.weights_per_token * bytes_per_weight)

    def bytes_read_per_token(self, size: float, tokens: int, cache_size: float) -> float:
        """Returns the bytes that a forward of one token reads while ``tokens`` others are cached.

        ``size`` is that of a weight, and ``cache_size`` that of a number in the cache.
        """
        cached = self.kv_numbers_per_token * tokens * cache_size + self.state_bytes(cache_size)
        return self.weights_per_token * size + cached


def footprint(config: Any, *, trust_remote_code: bool = False) -> Footprint:
    """Counts the weights of a model by building it without allocating them.

    Raises ModelError for a model without a decoder of layers.
    """
    try:
        model_class = architectures.model_class(config)
        text = architectures.text_config(config)
        with torch.device("meta"):
            if config.model_type in architectures.TEXT_PARTS:
                # Of a model that also speaks (Qwen's Omni), only the part that writes text runs.
                model = model_class(config.thinker_config)
            else:
                model = model_class.from_config(config, trust_remote_code=trust_remote_code)
        settings = text.to_dict()
        decoder = families.language_model(model)
        decoder_weights = families.weights_per_token(decoder.layers, text)
        kv_heads = settings.get("num_key_value_heads") or text.num_attention_heads
        head_dim = settings.get("head_dim") or text.hidden_size // text.num_attention_heads
        layers = [*decoder.layers]
        # The parts of layers that have a recurrent state, by the layer's number.
        mixers = recurrent.mixers_of(layers, text)
        conv_state_numbers = sum(mixer.conv_state_numbers for mixer in mixers.values())
        fp32_state_numbers = sum(mixer.fp32_state_numbers for mixer in mixers.values())
        key_layers = [n for n in range(text.num_hidden_layers) if n not in mixers]
        windows = windowed_attention.windows_of(text, key_layers)
        key_windows = tuple(window for window in windows if window is not None)
        # Only decoders that Saccade runs itself are rounded, and none whose weights are packed.
        is_packed = bool(config.to_dict().get("quantization_config"))
        runs_fused = not key_windows and FusedDecoder.computes_the_same(decoder)
        return Footprint(
            parameters=sum(weight.numel() for weight in model.parameters()),
            weights_per_token=decoder_weights + model.get_output_embeddings().weight.numel(),
            kv_numbers_per_token=2 * len(key_layers) * kv_heads * head_dim,  # Keys and values.
            layers=text.num_hidden_layers,
            vocab=text.vocab_size,
            stateful_layers=len(mixers),
            conv_state_numbers=conv_state_numbers,
            fp32_state_numbers=fp32_state_numbers,
            key_windows=key_windows,
            can_be_rounded=runs_fused and not is_packed,
        )
    except AttributeError as error:
        raise ModelError(
            f"{config.model_type} has no decoder of layers that Saccade knows how to drive"
        ) from error
    except SaccadeError:
        raise
    except Exception as error:  # The config has numbers that no model can have.
        reason = kind_and_line(error)
        message = f"config.json describes no model that can be built ({reason})"
        raise ModelError(message) from error


def eagle3_footprint(settings: Mapping[str, Any], target: Any) -> Footprint:
    """Counts the weights of an EAGLE-3 head.

    ``settings`` are the entries of its config.json, and ``target`` is its target's config.
    """
    layer = settings.get("transformer_layer_config") or settings
    try:
        dim = int(layer["hidden_size"])
        inner = int(layer["intermediate_size"])
        heads = int(layer["num_attention_heads"])
        kv_heads = int(layer.get("num_key_value_heads") or heads)
        width = int(layer.get("head_dim") or dim // heads)
        text = architectures.text_config(target)
        vocab = int(settings.get("draft_vocab_size") or text.vocab_size)
    except MALFORMED_ENTRIES as error:
        raise ModelError("its config.json describes no EAGLE-3 head") from error
    # Attention reads a token's embedding and its hidden state side by side, so 2 * dim numbers.
    layer_weights = _layer_weights(dim, inner, heads, kv_heads, width, 2 * dim)
    weights_per_token = layer_weights + vocab * dim
    # The matrix "fc" makes one hidden state of several of the target's. Drafted tokens do not pass
    # through it, because their rows read the head's own output.
    fc_weights = EAGLE3_HIDDEN_STATES * text.hidden_size * dim
    return Footprint(
        parameters=weights_per_token + fc_weights,
        weights_per_token=weights_per_token,
        kv_numbers_per_token=2 * kv_heads * width,
        layers=1,
        vocab=vocab,
    )


def _layer_weights(
    dim: int, inner: int, heads: int, kv_heads: int, width: int, read_dim: int
) -> int:
    """Counts the weights in the matrices of a decoder layer.

    Its attention reads rows of ``read_dim`` numbers, and each of its heads has ``width`` numbers.
    """
    query_key_value = read_dim * (heads + 2 * kv_heads) * width
    attention_output = heads * width * dim
    gate_up_down = 3 * dim * inner
    return query_key_value + attention_output + gate_up_down


def dflash_footprint(settings: Mapping[str, Any], target: Any) -> Footprint:
    """Counts the weights of a DFlash head.

    ``settings`` are the entries of its config.json, and ``target`` is its target's config.
    """
    layer = settings.get("transformer_layer_config") or settings
    try:
        entries = {**settings, **(settings.get("dflash_config") or {})}
        dim, inner, layers = (
            int(layer[name]) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        heads = int(layer["num_attention_heads"])
        width = int(layer["head_dim"])
        kv_heads = int(layer.get("num_key_value_heads") or heads)
        target_layers = list(
            entries.get("target_layer_ids") or entries["aux_hidden_state_layer_ids"] or ()
        )
        text = architectures.text_config(target)
        vocab = int(settings.get("draft_vocab_size") or 0)
    except MALFORMED_ENTRIES as error:
        raise ModelError("its config.json describes no DFlash head") from error
    layer_weights = layers * _layer_weights(dim, inner, heads, kv_heads, width, dim)
    # The matrix "fc" makes one hidden state of several of the target's. Drafted tokens do not pass
    # through it.
    fc_weights = len(target_layers) * text.hidden_size * dim
    # A head without a vocabulary of its own uses the target's output matrix, and stores none.
    used_output_matrix = (vocab or text.vocab_size) * dim
    stored_output_matrix = vocab * dim
    return Footprint(
        parameters=layer_weights + fc_weights + stored_output_matrix,
        weights_per_token=layer_weights + used_output_matrix,
        kv_numbers_per_token=2 * layers * kv_heads * width,
        layers=layers,
        vocab=vocab or text.vocab_size,
    )


def number_size(dtype: Any, config: Any) -> int:
    """Returns the bytes of a number of this dtype.

    A dtype of "auto" is the checkpoint's own, and fp32 where the config names none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    checkpoint_dtype = getattr(config, "dtype", None)
    if isinstance(checkpoint_dtype, torch.dtype):
        return checkpoint_dtype.itemsize
    return torch.float32.itemsize


def stored_bits(config: Any) -> int | None:
    """Returns the bits of a weight in a quantised checkpoint; None for one that is not quantised.

    Some formats name the bits once, others in several schemes, of which the largest counts. For a
    format of ``BITS_BY_FORMAT`` they are those of that table. Where nothing names them, they are 8.
    """
    settings = config.to_dict().get("quantization_config")
    if not settings:
        return None
    if settings.get("load_in_4bit"):  # bitsandbytes names its 4 bits in this way.
        return 4
    if settings.get("quant_method") in BITS_BY_FORMAT:
        return BITS_BY_FORMAT[settings["quant_method"]]
    schemes = [each.get("weights") or {} for each in (settings.get("config_groups") or {}).values()]
    by_scheme = [int(each["num_bits"]) for each in schemes if each.get("num_bits")]
    return int(settings.get("bits") or max(by_scheme, default=8))


def weight_size(dtype: Any, config: Any, bits: int | None = None) -> float:
    """Returns the bytes of a weight in memory.

    With ``bits`` it is quantised to so many bits while it is loaded. Without, a weight of a
    quantised checkpoint keeps its stored bits, and any other weight is a number of this dtype.
    """
    packed_bits = bits or stored_bits(config)
    return number_size(dtype, config) if packed_bits is None else packed_bits / 8


def refuse_if_too_large(
    name: str,
    config: Any,
    dtype: Any,
    device: torch.device | None,
    *,
    bits: int | None = None,
    rounding: Rounding | None = None,
    is_draft: bool = False,
    is_packed: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Raises ModelError, before any weight is read, if the weights cannot fit on ``device``.

    The weights are counted from the config and not from the files, because transformers would also
    create weights that the files lack.

    Args:
        name: the model's, for the message.
        config: the model's.
        dtype: of its weights; "auto" is the checkpoint's own.
        device: where the weights go. None stands for several devices, for which nothing is checked.
        bits: to which the weights are quantised while they are loaded; None where they are not.
        rounding: how the caller makes a rounded copy of the weights, which is counted as well.
        is_draft: whether the model is loaded as a draft, for which there are fewer options.
        is_packed: whether the checkpoint is in few bits, so that no quantizer takes it.
        trust_remote_code: whether code that comes with the checkpoint may run.
    """
    if device is None:
        return
    room = memory.available_bytes(device) * (1 - memory.SPARE_SHARE)
    model = footprint(config, trust_remote_code=trust_remote_code)
    needed = model.weight_bytes(weight_size(dtype, config, bits)) + copied_bytes(model, rounding)
    if needed > room:
        message = too_large_message(
            name,
            config,
            model,
            dtype,
            device,
            bits=bits,
            rounding=rounding,
            is_draft=is_draft,
            is_packed=is_packed,
        )
        raise ModelError(message)


def copied_bytes(model: Footprint, rounding: Rounding | None) -> int:
    """Returns the bytes of a rounded copy of a model's weights, 0 without one."""
    return 0 if rounding is None else model.rounded_copy_bytes(rounding.bytes_per_weight)


def too_large_message(
    name: str,
    config: Any,
    model: Footprint,
    dtype: Any,
    device: torch.device,
    *,
    bits: int | None = None,
    rounding: Rounding | None = None,
    is_draft: bool = False,
    is_packed: bool = False,
) -> str:
    """Returns the message for a model that does not fit: the memory needed, the memory available,
    and what would fit.

    The arguments are those of :func:`refuse_if_too_large`, and ``model`` is the model's footprint.
    """
    available_bytes = memory.available_bytes(device)
    room = available_bytes * (1 - memory.SPARE_SHARE)
    bytes_per_weight = weight_size(dtype, config, bits)
    needed = model.weight_bytes(bytes_per_weight)
    copied = copied_bytes(model, rounding)
    availability = f"{device.type} has {memory.format_bytes(available_bytes)} free"
    if rounding is not None and needed <= room:
        return (
            f"{name} does not fit with a copy of its weights in {rounding.name}: together they "
            f"take {memory.format_bytes(needed + copied)}, and {availability}; without "
            f"draft_quantize (--draft-quantize) it would fit ({memory.format_bytes(needed)})"
        )
    fitting = [
        f"{option} ({memory.format_bytes(model.weight_bytes(smaller_size))})"
        for option, smaller_size in BYTES_PER_WEIGHT.items()
        if smaller_size < bytes_per_weight and model.weight_bytes(smaller_size) + copied < room
        # No quantizer takes a draft by this option, or a checkpoint that is in few bits already.
        if not (option.startswith("--quantize") and (is_draft or is_packed))
    ]
    suggestion = "a smaller model, or --device-map auto, might fit"
    if is_draft:
        suggestion = "a smaller draft, or another --draft-device, might fit"
    if fitting:
        suggestion = f"{fitting[0]} would fit"
    return (
        f"{name} does not fit: its weights take {memory.format_bytes(needed)}, "
        f"and {availability}; {suggestion}"
    )
