"""Unpacks checkpoints whose weights are stored in few bits: AWQ, GPTQ, FP8, compressed-tensors.

transformers reads them with packages whose kernels are made for GPUs. On a CPU, ``loading`` does
without these packages for every draft, and for a target where they are not installed: the weights
are unpacked to plain ones when they are read. The model then runs like any other, by the fused
decoder and, as a draft with ``draft_quantize``, by our own low-bit matrix products.

A code is what is stored for a weight: a small whole number, or an FP8 number. The weight is (code -
zero point) x scale, where many weights share a scale and, in formats that have one, a zero point.

A format stores a matrix as several tensors whose names share a stem. The layouts are those that
AutoAWQ ("gemm"), AutoGPTQ and GPTQModel ("gptq", "gptq_v2"), DeepSeek-V3's FP8 with its blocks,
FBGEMM's FP8 with a scale for each output, and compressed-tensors document.
"""

from __future__ import annotations

import importlib.util
import math
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
# The column of each of the eight codes of a word: its second code belongs to column 2.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_VERSIONS = ("gemm",)
GPTQ_BITS = (2, 3, 4, 8)
GPTQ_FORMATS = ("gptq", "gptq_v2")
BYTE_ALIGNED_BITS = (2, 4, 8)  # Codes of these widths never cross a byte boundary.
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
    """Computes the plain weight from the parts and the checkpoint's ``quantization_config``."""
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
    """The key in ``PACKING_METHODS``."""
    layouts: tuple[Layout, ...]
    """How its matrices may be stored."""
    packages: tuple[str, ...]
    """The packages with which transformers reads such a checkpoint itself."""
    settings: Settings
    """The ``quantization_config``."""

    @property
    def is_read_by_transformers(self) -> bool:
        """Whether ``packages`` are installed, so that transformers can read the checkpoint."""
        return all(importlib.util.find_spec(each) is not None for each in self.packages)


# -- codes -----------------------------------------------------------------------------------------


def unpack_codes(words: Int32[Tensor, "rows words"], bits: int) -> UInt8[Tensor, "rows codes"]:
    """Returns the codes that lie in each row of words, the lowest bits first.

    A word has 32 bits. With 3 bits a code, the code number 10 has the bits 30 to 32: it begins in
    one word and ends in the next.
    """
    if bits in BYTE_ALIGNED_BITS:
        word_bytes = words.contiguous().view(torch.uint8)
        shifts = range(0, BYTE_BITS, bits)
        mask = (1 << bits) - 1
        return torch.stack([(word_bytes >> shift) & mask for shift in shifts], -1).flatten(1)
    # The bit at which each code starts, the word with that bit, and the word after it.
    starts = torch.arange(0, words.shape[1] * WORD_BITS - bits + 1, bits)
    first = starts // WORD_BITS
    second = (first + 1).clamp(max=words.shape[1] - 1)
    unsigned = words.long() & 0xFFFFFFFF
    both = unsigned[:, first] | (unsigned[:, second] << WORD_BITS)
    return ((both >> (starts % WORD_BITS)) & ((1 << bits) - 1)).to(torch.uint8)


def _unpack_awq(parts: Parts, settings: Settings) -> Tensor:
    """Unpacks codes stored as [in, out], where each word has eight columns in AWQ's own order.

    For each output, a group of consecutive inputs shares a scale and a zero point.
    """
    bits = int(settings["bits"])
    scales = parts["scales"].float()
    order = torch.tensor(AWQ_COLUMNS).argsort()

    def columns(words: Tensor) -> Tensor:
        codes = unpack_codes(words, bits)
        return codes.view(len(codes), -1, len(order))[:, :, order].flatten(1)

    codes = columns(parts["codes"])
    zeros = columns(parts["zeros"])
    group_size = len(codes) // len(scales)
    shifted = codes.view(len(scales), group_size, -1).float() - zeros.float()[:, None]
    return (shifted * scales[:, None]).flatten(0, 1).t()


def _gptq_format(settings: Settings) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or GPTQ_FORMATS[0])


def _unpack_gptq(parts: Parts, settings: Settings) -> Tensor:
    """Unpacks codes stored as [in, out], where each word has consecutive inputs of one output.

    The part "groups" has the number of each input's group; without it, groups are consecutive
    inputs. The "gptq" format stores each zero point minus one.
    """
    scales = parts["scales"].float()
    words = parts["codes"]
    groups = parts.get("groups")
    if groups is None:
        into = len(words) * WORD_BITS // int(settings["bits"])
        size = int(settings.get("group_size") or -1)
        group_size = size if size > 0 else into  # -1 stands for one group of all inputs.
        groups = torch.arange(into) // group_size
    # A layer may have another number of bits than the config says.
    bits = len(words) * WORD_BITS // len(groups)
    codes = unpack_codes(words.t(), bits)[:, : len(groups)]
    zeros = unpack_codes(parts["zeros"], bits)[:, : scales.shape[1]]
    if _gptq_format(settings) == GPTQ_FORMATS[0]:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    zeros_of_inputs = zeros.t()[:, groups]
    scales_of_inputs = scales.t()[:, groups]
    return (codes.float() - zeros_of_inputs.float()) * scales_of_inputs


def _spread(scales: Tensor, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """Returns scales that broadcast over ``shape``, which is [out, in]: each is repeated over the
    weights that share it.

    ``block`` is how many outputs and how many inputs share a scale; the last block may be smaller.
    Without ``block``, the number of scales must divide the number of outputs or inputs. Raises
    ValueError where shape and scales disagree.
    """
    if scales.dim() < 2:
        return scales if scales.numel() == 1 else scales[:, None]
    for axis in (-2, -1):
        count = scales.shape[axis]
        size = shape[axis]
        if count in (1, size):
            continue
        block_size = size // count if block is None else int(block[axis])
        if math.ceil(size / block_size) != count:
            raise ValueError(f"{count} scales for {size} numbers in blocks of {block_size}")
        scales = scales.repeat_interleave(block_size, axis).narrow(axis, 0, size)
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


def _block_size(settings: Settings, scales: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """Returns how many outputs and how many inputs of a compressed matrix share a scale.

    Returns None for one scale per output, and for one scale for the whole matrix. Otherwise the
    block size is that of one of the config's schemes. A scheme fits if its blocks divide the
    outputs and the inputs into as many parts as there are scales along each. The first scheme that
    fits is taken. Raises ValueError where none fits.
    """
    if scales.dim() < 2:
        return None
    is_one_per_output_or_matrix = scales.shape[-1] == 1 and scales.shape[-2] in (1, shape[-2])
    if is_one_per_output_or_matrix:
        return None
    for group in (settings.get("config_groups") or {}).values():
        scheme = group.get("weights") or {}
        block = scheme.get("block_structure") or (1, scheme.get("group_size") or 0)
        if isinstance(block, str):  # It may be written as "128x128".
            block = block.split("x")
        outputs, inputs = (int(each) for each in block)
        if outputs <= 0 or inputs <= 0:
            continue
        blocks = math.ceil(shape[-2] / outputs), math.ceil(shape[-1] / inputs)
        if tuple(scales.shape[-2:]) == blocks:
            return outputs, inputs
    raise ValueError("no scheme of its config has as many scales")


def _spread_groups(
    scales: Tensor, groups: Tensor | None, settings: Settings, shape: Sequence[int]
) -> Tensor:
    """Returns scales or zero points that broadcast over [out, into].

    ``groups`` is the number of each input's group, or None where groups are consecutive inputs.
    """
    if groups is not None:
        return scales[:, groups.long()]
    return _spread(scales, shape, _block_size(settings, scales, shape))


def _unpack_compressed_words(parts: Parts, settings: Settings) -> Tensor:
    """Unpacks codes [out, into], several inputs a word.

    Codes and zero points are signed. They are stored with half their range added, so that they are
    positive: with 4 bits, -8 is stored as 0.
    """
    words = parts["codes"]
    out, into = (int(each) for each in parts["shape"])
    bits = words.shape[1] * WORD_BITS // into
    offset = 1 << (bits - 1)
    codes = unpack_codes(words, bits)[:, :into].float() - offset
    groups = parts.get("groups")
    if "zeros" in parts:
        # A word of zero points has those of several outputs for one group of inputs.
        zeros = unpack_codes(parts["zeros"].t(), bits)[:, :out].t().float() - offset
        codes -= _spread_groups(zeros, groups, settings, codes.shape)
    return codes * _spread_groups(parts["scales"].float(), groups, settings, codes.shape)


def _unpack_compressed_numbers(parts: Parts, settings: Settings) -> Tensor:
    """Unpacks codes [out, into] that are stored as one number each: a byte, or FP8."""
    codes = parts["codes"].float()
    scales = _as_numbers(parts["scales"])
    if "zeros" in parts:
        codes -= _spread_groups(
            parts["zeros"].float(), groups=None, settings=settings, shape=codes.shape
        )
    return codes * _spread_groups(scales, groups=None, settings=settings, shape=codes.shape)


# -- formats ---------------------------------------------------------------------------------------

AWQ = Layout({"codes": "qweight", "zeros": "qzeros", "scales": "scales"}, (), _unpack_awq)
GPTQ = Layout(
    {"codes": "qweight", "zeros": "qzeros", "scales": "scales", "groups": "g_idx"},
    ("groups",),
    _unpack_gptq,
)
# In these two layouts the stem is the whole name of a weight, and the codes have an empty suffix.
# The suffix cannot be "weight", because the name of a stack of experts does not end in that.
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
class PackingMethod:
    """A method by which checkpoints are packed, as ``quant_method`` of config.json names it."""

    layouts: tuple[Layout, ...]
    packages: tuple[str, ...]
    find_problem: Callable[[Settings], str | None]
    """(``quantization_config``) -> what cannot be unpacked, in words such as "3 bits"; None if all
    can be."""


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
        if bits not in BYTE_ALIGNED_BITS:
            return f"{bits} bits"
    return None


def _no_problem(settings: Settings) -> str | None:
    return None


PACKING_METHODS: Mapping[str, PackingMethod] = {
    "awq": PackingMethod((AWQ,), ("gptqmodel",), _awq_problem),
    "gptq": PackingMethod((GPTQ,), ("gptqmodel", "optimum"), _gptq_problem),
    "fp8": PackingMethod((FP8_BLOCKS,), ("accelerate",), _no_problem),
    "fbgemm_fp8": PackingMethod((FP8_OUTPUTS,), ("fbgemm_gpu",), _no_problem),
    "compressed-tensors": PackingMethod(
        (COMPRESSED_WORDS, COMPRESSED_NUMBERS), ("compressed_tensors",), _compressed_tensors_problem
    ),
}
"""By ``quant_method``."""


def settings_of(config: Any) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a checkpoint's config; {} where there is none."""
    return dict(config.to_dict().get("quantization_config") or {})


def find_packing(settings: Settings) -> Packing | None:
    """Returns how a checkpoint is packed, from its ``quantization_config``.

    Returns None if it is not packed, or packed in a way that cannot be unpacked here.
    """
    method = PACKING_METHODS.get(str(settings.get("quant_method")))
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
    method = PACKING_METHODS.get(name)
    if not settings:
        return ""
    if method is None:
        known = ", ".join(PACKING_METHODS)
        return f"; it is packed as {name}, and Saccade itself unpacks only {known}"
    problem = method.find_problem(settings)
    if problem is None:
        return f"; it is packed as {name}, which Saccade itself unpacks on a CPU only"
    return (
        f"; it is packed as {name} with {problem}, which only transformers' packages for it can "
        "read"
    )


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
    """Returns the tensors of a checkpoint by name, with packed matrices as plain ones of ``dtype``.

    Those that match ``UNUSED`` are left out, and all others stay as they are. Raises ModelError
    where a part of a matrix is missing or has a shape that does not belong to the others.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        return dict(
            unpack_tensors(
                files.keys(), lambda name: files[name].get_tensor(name), packing, dtype, str(folder)
            )
        )


def unpack_tensors(
    names: Collection[str],
    read: Callable[[str], Tensor],
    packing: Packing,
    dtype: torch.dtype,
    checkpoint: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor with its name, as :func:`unpack_folder` returns them.

    ``names`` are those of the stored tensors, ``read`` returns the tensor of a name, and
    ``checkpoint`` is what errors call the checkpoint.
    """
    used: set[str] = set()  # The tensors that are parts of a matrix.
    for layout in packing.layouts:
        for name in sorted(names):
            if not name.endswith(layout.marker) or name in used or UNUSED.search(name):
                continue
            # This tensor is the first part of a matrix, and the stem of its name leads to the rest.
            stem = name.removesuffix(layout.marker)
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
