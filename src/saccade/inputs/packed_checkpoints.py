"""Unpacks checkpoints whose weights are stored in few bits: AWQ, GPTQ, FP8, compressed-tensors.

transformers reads them with packages whose kernels are made for GPUs. A draft on a CPU does without
these packages: its weights are unpacked to plain ones when they are read. It then runs like any
other draft, by the fused decoder and, with ``draft_quantize``, by our own low-bit matrix products.

A format stores a matrix as several tensors whose names share a stem. The layouts are those that
AutoAWQ ("gemm"), AutoGPTQ and GPTQModel ("gptq", "gptq_v2"), DeepSeek-V3's FP8 with its blocks,
FBGEMM's FP8 with a scale for each output, and compressed-tensors document.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int32, Shaped, UInt8
from safetensors import safe_open
from torch import Tensor

from saccade.core.errors import ModelError, first_line

Parts = Mapping[str, Shaped[Tensor, "..."]]
Settings = Mapping[str, Any]

WORD_BITS = 32
BYTE_BITS = 8
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # The column of each of the eight codes of a word.
AWQ_VERSIONS = ("gemm",)
GPTQ_BITS = (2, 3, 4, 8)
GPTQ_FORMATS = ("gptq", "gptq_v2")
WHOLE_BITS = (2, 4, 8)  # Codes of these widths never cross a byte boundary.
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
# Scales of activations and of keys and values, which plain weights do not need.
UNUSED = re.compile(r"\.(?:input|output|activation|[qkv])_(?:scale|zero_point|global_scale)$")


@dataclass(frozen=True)
class Layout:
    """How one matrix is stored: as several tensors named by a common stem and a suffix each."""

    parts: Mapping[str, str]
    """Maps each part, such as "scales", to the suffix of its tensor's name. A checkpoint uses this
    layout for a matrix if it has a tensor with the first suffix."""
    optional: tuple[str, ...]
    """The parts that a matrix may lack."""
    unpack: Callable[[Parts, Settings], Float[Tensor, "*experts out into"]]
    result: str = "weight"
    """The suffix of the plain weight."""

    @property
    def marker(self) -> str:
        """The suffix by which the layout is recognised."""
        return next(iter(self.parts.values()))


@dataclass(frozen=True)
class Packing:
    """How the weights of one checkpoint are packed."""

    method: str
    layouts: tuple[Layout, ...]
    packages: tuple[str, ...]
    """Those by which transformers reads such a checkpoint itself."""
    settings: Settings

    @property
    def is_read_by_transformers(self) -> bool:
        """Whether the packages are installed by which transformers reads it."""
        return all(importlib.util.find_spec(each) is not None for each in self.packages)


# -- codes -----------------------------------------------------------------------------------------


def unpack_codes(words: Int32[Tensor, "rows words"], bits: int) -> UInt8[Tensor, "rows codes"]:
    """Returns the codes that lie in each row of words, the lowest bits first.

    With 3 bits a code may begin in one word and end in the next.
    """
    if bits in WHOLE_BITS:
        word_bytes = words.contiguous().view(torch.uint8)
        shifts = range(0, BYTE_BITS, bits)
        mask = (1 << bits) - 1
        return torch.stack([(word_bytes >> shift) & mask for shift in shifts], -1).flatten(1)
    starts = torch.arange(0, words.shape[1] * WORD_BITS - bits + 1, bits)
    first = starts // WORD_BITS
    second = (first + 1).clamp(max=words.shape[1] - 1)
    unsigned = words.long() & 0xFFFFFFFF
    both = unsigned[:, first] | (unsigned[:, second] << WORD_BITS)
    return ((both >> (starts % WORD_BITS)) & ((1 << bits) - 1)).to(torch.uint8)


def _unpack_awq(parts: Parts, settings: Settings) -> Tensor:
    """Unpacks codes stored as [in, out], where each word has eight columns in AWQ's own order."""
    bits, scales = int(settings["bits"]), parts["scales"].float()
    order = torch.tensor(AWQ_COLUMNS).argsort()

    def columns(words: Tensor) -> Tensor:
        codes = unpack_codes(words, bits)
        return codes.view(len(codes), -1, len(order))[:, :, order].flatten(1)

    codes, zeros = columns(parts["codes"]), columns(parts["zeros"])
    group = len(codes) // len(scales)
    shifted = codes.view(len(scales), group, -1).float() - zeros.float()[:, None]
    return (shifted * scales[:, None]).flatten(0, 1).t()


def _gptq_format(settings: Settings) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or GPTQ_FORMATS[0])


def _unpack_gptq(parts: Parts, settings: Settings) -> Tensor:
    """Unpacks codes stored as [in, out], where each word has consecutive inputs of one output.

    "groups" has the group of each input. The "gptq" format stores each zero point minus one.
    """
    scales, words = parts["scales"].float(), parts["codes"]
    groups = parts.get("groups")
    bits = int(settings["bits"])
    if groups is None:
        into = len(words) * WORD_BITS // bits
        size = int(settings.get("group_size") or -1)
        groups = torch.arange(into) // (size if size > 0 else into)
    bits = len(words) * WORD_BITS // len(groups)  # A layer may have bits of its own.
    codes = unpack_codes(words.t(), bits)[:, : len(groups)]
    zeros = unpack_codes(parts["zeros"], bits)[:, : scales.shape[1]]
    if _gptq_format(settings) == GPTQ_FORMATS[0]:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    zeros_of_inputs, scales_of_inputs = zeros.t()[:, groups], scales.t()[:, groups]
    return (codes.float() - zeros_of_inputs.float()) * scales_of_inputs


def _spread(scales: Tensor, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """Returns scales that broadcast over [out, in], each repeated over the weights that share it.

    ``block`` is how many outputs and inputs share a scale; the last block may be smaller. Without
    it the number of scales divides the size. Raises ValueError where shape and scales disagree.
    """
    if scales.dim() < 2:
        return scales if scales.numel() == 1 else scales[:, None]
    for place in (-2, -1):
        count, size = scales.shape[place], shape[place]
        if count in (1, size):
            continue
        each = size // count if block is None else int(block[place])
        if -(-size // each) != count:
            raise ValueError(f"{count} scales for {size} numbers in blocks of {each}")
        scales = scales.repeat_interleave(each, place).narrow(place, 0, size)
    return scales


def _as_numbers(scales: Tensor) -> Tensor:
    """Returns scales in fp32. Bytes are exponents of two with a bias of 127 (E8M0)."""
    if scales.dtype == torch.uint8:
        return (scales.float() - 127).exp2()
    return scales.float()


def _unpack_fp8(parts: Parts, settings: Settings) -> Tensor:
    codes = parts["codes"].float()
    scales = _as_numbers(parts["scales"])
    return codes * _spread(scales, codes.shape, settings.get("weight_block_size"))


def _block_of(settings: Settings, scales: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """Returns which part of a compressed matrix shares a scale, by the scheme that fits its shape.

    None stands for whole outputs, or the whole matrix. Raises ValueError where no scheme fits.
    """
    if scales.dim() < 2 or scales.shape[-1] == 1:
        return None
    for group in (settings.get("config_groups") or {}).values():
        scheme = group.get("weights") or {}
        block = scheme.get("block_structure") or (1, scheme.get("group_size") or 0)
        high, wide = (int(each) for each in (block.split("x") if isinstance(block, str) else block))
        counts = (-(-shape[-2] // high), -(-shape[-1] // wide)) if high > 0 and wide > 0 else ()
        if tuple(scales.shape[-2:]) == counts:
            return high, wide
    raise ValueError("no scheme of its config has as many scales")


def _spread_groups(
    scales: Tensor, groups: Tensor | None, settings: Settings, shape: Sequence[int]
) -> Tensor:
    """Returns scales or zero points that broadcast over [out, into]; inputs may name their
    groups."""
    if groups is not None:
        return scales[:, groups.long()]
    return _spread(scales, shape, _block_of(settings, scales, shape))


def _unpack_compressed_words(parts: Parts, settings: Settings) -> Tensor:
    """Codes are [out, into] in words along the input, shifted to be positive."""
    words = parts["codes"]
    out, into = (int(each) for each in parts["shape"])
    bits = words.shape[1] * WORD_BITS // into
    zero = 1 << (bits - 1)
    codes = unpack_codes(words, bits)[:, :into].float() - zero
    groups = parts.get("groups")
    if "zeros" in parts:
        zeros = unpack_codes(parts["zeros"].t(), bits)[:, :out].t().float() - zero
        codes -= _spread_groups(zeros, groups, settings, codes.shape)
    return codes * _spread_groups(parts["scales"].float(), groups, settings, codes.shape)


def _unpack_compressed_numbers(parts: Parts, settings: Settings) -> Tensor:
    """Codes are [out, into], one number each: bytes, or FP8."""
    codes, scales = parts["codes"].float(), _as_numbers(parts["scales"])
    if "zeros" in parts:
        codes -= _spread_groups(parts["zeros"].float(), None, settings, codes.shape)
    return codes * _spread_groups(scales, None, settings, codes.shape)


# -- formats ---------------------------------------------------------------------------------------

AWQ = Layout({"codes": "qweight", "zeros": "qzeros", "scales": "scales"}, (), _unpack_awq)
GPTQ = Layout(
    {"codes": "qweight", "zeros": "qzeros", "scales": "scales", "groups": "g_idx"},
    ("groups",),
    _unpack_gptq,
)
# The stems of these end in the name of the weight, since experts' are not called "weight".
FP8_BLOCKS = Layout({"scales": "_scale_inv", "codes": ""}, (), _unpack_fp8, result="")
FP8_OUTPUTS = Layout({"scales": "_scale", "codes": ""}, (), _unpack_fp8, result="")
COMPRESSED_WORDS = Layout(
    {
        "codes": "weight_packed",
        "scales": "weight_scale",
        "shape": "weight_shape",
        "zeros": "weight_zero_point",
        "groups": "weight_g_idx",
    },
    ("zeros", "groups"),
    _unpack_compressed_words,
)
COMPRESSED_NUMBERS = Layout(
    {"scales": "weight_scale", "codes": "weight", "zeros": "weight_zero_point"},
    ("zeros",),
    _unpack_compressed_numbers,
)


@dataclass(frozen=True)
class Method:
    """A method by which checkpoints are packed, as ``quant_method`` of config.json names it."""

    layouts: tuple[Layout, ...]
    packages: tuple[str, ...]
    find_problem: Callable[[Settings], str | None]
    """Returns what of its settings cannot be unpacked, or None."""


def _awq_problem(settings: Settings) -> str | None:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version not in AWQ_VERSIONS:
        return f"version {version}"
    return None if settings.get("bits") == 4 else f"{settings.get('bits')} bits"


def _gptq_problem(settings: Settings) -> str | None:
    stored_as = _gptq_format(settings)
    if stored_as not in GPTQ_FORMATS:
        return f"checkpoint_format {stored_as}"
    return None if settings.get("bits") in GPTQ_BITS else f"{settings.get('bits')} bits"


def _compressed_tensors_problem(settings: Settings) -> str | None:
    for group in (settings.get("config_groups") or {}).values():
        stored_as = group.get("format") or settings.get("format")
        if stored_as not in COMPRESSED_FORMATS:
            return f"format {stored_as}"
        bits = (group.get("weights") or {}).get("num_bits")
        if bits not in WHOLE_BITS:
            return f"{bits} bits"
    return None


def _no_problem(settings: Settings) -> str | None:
    return None


METHODS: Mapping[str, Method] = {
    "awq": Method((AWQ,), ("gptqmodel",), _awq_problem),
    "gptq": Method((GPTQ,), ("gptqmodel", "optimum"), _gptq_problem),
    "fp8": Method((FP8_BLOCKS,), ("accelerate",), _no_problem),
    "fbgemm_fp8": Method((FP8_OUTPUTS,), ("fbgemm_gpu",), _no_problem),
    "compressed-tensors": Method(
        (COMPRESSED_WORDS, COMPRESSED_NUMBERS), ("compressed_tensors",), _compressed_tensors_problem
    ),
}
"""By ``quant_method``."""


def settings_of(config: Any) -> dict[str, Any]:
    """Returns how a checkpoint is quantised, by its config; {} where it is not."""
    return dict(config.to_dict().get("quantization_config") or {})


def find_packing(settings: Settings) -> Packing | None:
    """Returns how a checkpoint is packed, from its ``quantization_config``.

    Returns None if it is not packed, or packed in a way that cannot be unpacked here.
    """
    method = METHODS.get(str(settings.get("quant_method")))
    if method is None or method.find_problem(settings) is not None:
        return None
    return Packing(str(settings["quant_method"]), method.layouts, method.packages, settings)


def packing_to_unpack(
    config: Any, place: torch.device | None, *, is_draft: bool = False
) -> Packing | None:
    """Returns how a checkpoint is packed if it is unpacked when it is loaded, else None.

    A draft is unpacked on a CPU. A target is unpacked there only where transformers lacks the
    packages to read it, since a target should compute what transformers computes. ``place`` is
    None for several devices.
    """
    if place is None or place.type != "cpu":
        return None
    packing = find_packing(settings_of(config))
    if packing is None or (packing.is_read_by_transformers and not is_draft):
        return None
    return packing


def explain(config: Any) -> str:
    """Returns text to append to the error of a packed checkpoint; "" for one that is not packed."""
    settings = settings_of(config)
    name = str(settings.get("quant_method"))
    method = METHODS.get(name)
    if not settings:
        return ""
    if method is None:
        return f"; it is packed as {name}, and without other packages {', '.join(METHODS)} are read"
    problem = method.find_problem(settings)
    what = name if problem is None else f"{name} with {problem}"
    if problem is None:
        return f"; it is packed as {what}, which Saccade itself unpacks on a CPU only"
    return f"; it is packed as {what}, which only transformers' packages for it can read"


def plain_config(config: Any) -> Any:
    """Returns a copy of a config as that of a checkpoint with plain weights."""
    plain = deepcopy(config)
    for each in (plain, plain.get_text_config(decoder=True)):
        if "quantization_config" in vars(each):
            del each.quantization_config
    return plain


def config_as_loaded(config: Any, place: torch.device | None, *, is_draft: bool = False) -> Any:
    """Returns the config that says how much memory a checkpoint takes once it is loaded."""
    packing = packing_to_unpack(config, place, is_draft=is_draft)
    return config if packing is None else plain_config(config)


# -- files -----------------------------------------------------------------------------------------


def unpack_folder(folder: Path, packing: Packing, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors with its packed matrices as plain ones of a type.

    Other tensors stay as they are. Raises ModelError where a part of a matrix is missing or has a
    shape that does not belong to the others.
    """
    with ExitStack() as stack:
        files = {
            key: opened
            for file in sorted(folder.glob("*.safetensors"))
            for opened in [stack.enter_context(safe_open(file, framework="pt"))]
            for key in opened.keys()
        }
        read = {key: opened.get_tensor for key, opened in files.items()}
        return dict(
            unpack_tensors(read.keys(), lambda key: read[key](key), packing, dtype, str(folder))
        )


def unpack_tensors(
    names: Collection[str],
    read: Callable[[str], Tensor],
    packing: Packing,
    dtype: torch.dtype,
    checkpoint: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors with their names, packed matrices as plain ones of a type; see
    :func:`unpack_folder`."""
    used: set[str] = set()
    for layout in packing.layouts:
        for marker in sorted(names):
            if not marker.endswith(layout.marker) or marker in used or UNUSED.search(marker):
                continue
            stem = marker.removesuffix(layout.marker)
            keys = {part: stem + suffix for part, suffix in layout.parts.items()}
            present = {part: key for part, key in keys.items() if key in names}
            for part in keys.keys() - present.keys() - {*layout.optional}:
                raise ModelError(
                    f"{checkpoint} lacks {keys[part]}, a part of a matrix that is packed as "
                    f"{packing.method}: a file is missing or spoilt"
                )
            used |= {*present.values()}
            parts = {part: read(key) for part, key in present.items()}
            try:
                plain = layout.unpack(parts, packing.settings).to(dtype).contiguous()
            except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
                shapes = ", ".join(f"{keys[part]} {[*each.shape]}" for part, each in parts.items())
                raise ModelError(
                    f"{checkpoint} cannot be unpacked: these do not make one matrix by its "
                    f"config.json: {shapes} ({first_line(error)})"
                ) from error
            yield stem + layout.result, plain
    for name in names:
        if name not in used and not UNUSED.search(name):
            yield name, read(name)
