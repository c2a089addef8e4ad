"""Multiplies with weights that are rounded to few bits, so that a draft's step reads fewer bytes.

The rounded weights are copies beside the original ones. Few rows are multiplied with the copies,
and the many rows of a prompt with the originals. For each rounding and kind of device there are one
or more products, ours or torch's:

    int8, int4  on a CPU. Each output has one scale for every ``CODE_BLOCK`` inputs. In torch's int8
                product alone it has one scale for all inputs. Our products also round the rows
                (the activations) to bytes.
    fp8         on a GPU that multiplies FP8 (e4m3). Each output has one scale. The rows are rounded
                to FP8 too, with one scale for each row.

So the products of one rounding give somewhat different numbers. They may, because what a draft
computes never changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from saccade.core.errors import OptionError, suggest
from saccade.model.kernels import compiled
from saccade.model.kernels.compiled import CODE_BLOCK, OUTPUTS_PER_CODED_PANEL

ROWS_AT_ONCE = 4096  # Rows of a weight that are rounded at once, which bounds the memory for it.
TORCH_OUTPUTS = 64  # Torch's 4-bit product takes multiples of so many outputs.
MAX_DIFFERENCE = 0.05  # The largest error of a trial product, as a share of its largest number.
FP8 = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(FP8).max
FP8_MULTIPLE = 16  # Torch's product in FP8 takes multiples of so many inputs and outputs.
FP8_CAPABILITY = (8, 9)  # CUDA's compute capability from which on a GPU multiplies FP8.
MAX_FP8_ROWS = 64  # More rows are a prompt's, which are multiplied with the original weights.
SMALLEST_SCALE = 1e-12  # No row has a smaller scale, so a row of zeros is not divided by 0.


@dataclass(frozen=True)
class Rounding:
    """How the weights of a draft are rounded. Its name is a value of ``draft_quantize``."""

    name: str
    bits: int
    device_type: str = "cpu"
    """The type of the devices that have products with weights rounded in this way."""
    scale_bits: float = 8 * torch.float16.itemsize / CODE_BLOCK
    """How many bits of scales there are for each weight: a block of ``CODE_BLOCK`` weights has one
    scale in fp16. It is 0 for FP8, where a whole output has one."""

    def is_available_on(self, device: torch.device) -> bool:
        """Returns whether weights on this device can be rounded so."""
        if device.type != self.device_type:
            return False
        # ``few_bit_products`` asks the current GPU, and a machine may have GPUs of several kinds.
        if device.type == "cuda" and not _multiplies_fp8(device):
            return False
        return bool(few_bit_products(self))

    @property
    def zero(self) -> int:
        """The code of a weight of 0."""
        return 1 << (self.bits - 1)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a rounded weight with its share of the scales."""
        return (self.bits + self.scale_bits) / 8


ROUNDINGS = {
    each.name: each
    for each in (
        Rounding("int8", 8),
        Rounding("int4", 4),
        Rounding("fp8", 8, device_type="cuda", scale_bits=0.0),
    )
}


def rounding_named(name: str) -> Rounding:
    """Returns a rounding by its name. Raises OptionError for an unknown one."""
    if name not in ROUNDINGS:
        hint = suggest(name, ROUNDINGS)
        raise OptionError(
            f"unknown draft_quantize {name!r}{hint}; known: {', '.join(ROUNDINGS)} (fp8 on a GPU)"
        )
    return ROUNDINGS[name]


def roundings_on(place: torch.device) -> list[Rounding]:
    """Returns the roundings for which a device has products."""
    return [rounding for rounding in ROUNDINGS.values() if rounding.is_available_on(place)]


def why_unavailable(rounding: Rounding, place: torch.device) -> str:
    """Returns a clause for an error: why weights on a device cannot be rounded so, and what to do
    instead."""
    others = ", ".join(each.name for each in roundings_on(place))
    instead = f"use {others}" if others else "name a checkpoint in few bits as the draft"
    if place.type != rounding.device_type:
        where = {"cpu": "a CPU", "cuda": "a GPU"}[rounding.device_type]
        return f"Saccade rounds weights to {rounding.name} on {where} only; {instead}"
    if place.type == "cuda":
        needed = ".".join(map(str, FP8_CAPABILITY))
        return f"this GPU does not multiply FP8 (compute capability {needed} does); {instead}"
    return f"this machine has no products with weights in {rounding.name}; {instead}"


class Codes(NamedTuple):
    """A rounded weight. An entry is its code minus ``rounding.zero``, times its block's scale."""

    codes: UInt8[Tensor, "out into"]
    scales: Float[Tensor, "out blocks"]  # In fp16.
    rounding: Rounding

    @classmethod
    def of(cls, weight: Float[Tensor, "out into"], rounding: Rounding) -> Codes:
        """Rounds a weight whose number of inputs is a multiple of ``CODE_BLOCK``.

        With 4 bits, the entry of the largest magnitude in a block gets code 0, whatever its sign,
        because there is one more code below zero than above. So the scale may be negative.
        """
        parts = [_round(part, rounding) for part in weight.split(ROWS_AT_ONCE)]
        codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(codes, scales, rounding)

    def weights(self) -> Float[Tensor, "out into"]:
        """Returns the rounded weights in fp32."""
        centred_codes = (
            self.codes.float().sub_(self.rounding.zero).view(*self.scales.shape, CODE_BLOCK)
        )
        return centred_codes.mul_(self.scales.float()[..., None]).flatten(1)


def _round(weight: Float[Tensor, "out into"], rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Returns the codes of a weight's entries, and the scales of its blocks."""
    blocks = weight.float().view(len(weight), -1, CODE_BLOCK)
    lowest, highest = blocks.aminmax(dim=-1)
    if rounding.bits == 4:
        # A code minus ``zero`` is -8 to 7. The entry of the largest magnitude becomes -8.
        extreme = torch.where(highest > -lowest, highest, lowest)
        scales = (extreme / -rounding.zero).half()
    else:
        scales = (torch.maximum(highest, -lowest) / (rounding.zero - 1)).half()
    inverse = torch.where(scales == 0, 0, 1 / scales.float())
    codes = (blocks * inverse[..., None]).round_().add_(rounding.zero)
    codes.clamp_(0, 2 * rounding.zero - 1)
    return codes.to(torch.uint8).flatten(1), scales


# -- our products ----------------------------------------------------------------------------------


class CodedPanels(NamedTuple):
    """A rounded weight in the layout that :func:`compiled.multiply_coded` reads.

    A panel has ``OUTPUTS_PER_CODED_PANEL`` outputs, and a block has ``CODE_BLOCK`` inputs of each.
    The bytes of a block are the scales of the outputs in fp16, and then the codes: four inputs of
    the first output, the same four of the second, and so on, then the next four inputs of each.
    With 4 bits a byte has two codes: of an input in the block's first half, and of the input at the
    same place in its second half.
    """

    numbers: UInt8[Tensor, "panel block byte"]
    out: int  # How many results a row has; for a gated weight, half of its outputs.
    bits: int
    gated: bool

    @classmethod
    def of(cls, weight: Float[Tensor, "all into"], rounding: Rounding, gated: bool) -> CodedPanels:
        """Rounds a weight and lays it out.

        ``gated`` says that the weight is an MLP's: silu of the first half of its outputs (the gate)
        multiplies the second half. A panel then has some outputs of the first half, and those at
        the same places in the second half.
        """
        rounded = Codes.of(weight, rounding)
        part_count = 2 if gated else 1
        outputs_per_part = OUTPUTS_PER_CODED_PANEL // part_count

        def cut(rows: Tensor) -> Tensor:
            """Returns rows [output, width], one for each output, as [panel, output, width]."""
            parts = [_in_panels(part, outputs_per_part) for part in rows.chunk(part_count)]
            return torch.cat(parts, 1)

        code_panels = cut(rounded.codes)
        scales = cut(rounded.scales)  # [panel, output, block]
        count = len(code_panels)
        blocks = scales.shape[2]
        # From [panel, output, block, quad, input of the quad] to [panel, block, quad, output, input
        # of the quad].
        quads = code_panels.view(count, OUTPUTS_PER_CODED_PANEL, blocks, CODE_BLOCK // 4, 4)
        quads = quads.permute(0, 2, 3, 1, 4)
        if rounding.bits == 4:
            # A byte has a code of the block's first half of inputs in its low bits, and one of the
            # second half in its high bits.
            low, high = quads.chunk(2, 2)
            quads = low | (high << 4)
        scale_bytes = scales.transpose(1, 2).contiguous().view(torch.uint8)
        numbers = torch.cat([scale_bytes, quads.reshape(count, blocks, -1)], 2)
        return cls(numbers, len(weight) // part_count, rounding.bits, gated)


def _in_panels(numbers: Tensor, panel_outputs: int) -> Tensor:
    """Returns rows cut into panels of so many outputs, the last one padded with zeros."""
    out, width = numbers.shape
    padded = numbers.new_zeros(-(-out // panel_outputs) * panel_outputs, width)
    padded[:out] = numbers
    return padded.view(-1, panel_outputs, width)


def _multiply_coded(x: Tensor, panels: CodedPanels, base: Tensor | None) -> Tensor:
    """Returns base + x W^T, or silu(gate) times the other half where the panels are gated."""
    return compiled.multiply_coded(
        x, panels.numbers, base, out=panels.out, bits=panels.bits, gated=panels.gated
    )


# -- torch's products ------------------------------------------------------------------------------


def _pack_4_bits(weight: Float[Tensor, "out into"]) -> tuple[Tensor, Tensor]:
    codes = Codes.of(weight, ROUNDINGS["int4"])
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.int(), 1)
    scales = codes.scales.t().float()
    # Torch takes a scale and an offset for each block. Our blocks have no offset.
    scales_and_offsets = torch.stack([scales, torch.zeros_like(scales)], -1)
    return packed, scales_and_offsets.to(weight.dtype)


def _multiply_4_bits(x: Tensor, prepared: tuple[Tensor, Tensor], base: Tensor | None) -> Tensor:
    packed, scales_and_offsets = prepared
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, CODE_BLOCK, scales_and_offsets)
    return product if base is None else product.add_(base)


def _pack_8_bits(weight: Float[Tensor, "out into"]) -> tuple[Tensor, Tensor]:
    scales = weight.float().abs().amax(1) / 127
    inverse = torch.where(scales == 0, 0, 1 / scales)
    parts = zip(weight.split(ROWS_AT_ONCE), inverse.split(ROWS_AT_ONCE), strict=True)
    codes = [(part.float() * each[:, None]).round_().to(torch.int8) for part, each in parts]
    return torch.cat(codes), scales.to(weight.dtype)


def _multiply_8_bits(x: Tensor, packed: tuple[Tensor, Tensor], base: Tensor | None) -> Tensor:
    product = torch.ops.aten._weight_int8pack_mm(x, *packed)
    return product if base is None else product.add_(base)


# -- FP8, on GPUs ----------------------------------------------------------------------------------


class Fp8Weight(NamedTuple):
    """A weight in FP8: codes * scales of their outputs."""

    codes: Float[Tensor, "out into"]
    scales: Float[Tensor, "1 out"]  # In fp32.

    @classmethod
    def of(cls, weight: Float[Tensor, "out into"]) -> Fp8Weight:
        parts = [_in_fp8(part) for part in weight.split(ROWS_AT_ONCE)]
        codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(codes, scales.t().contiguous())

    def weights(self) -> Float[Tensor, "out into"]:
        """Returns the rounded weights in fp32."""
        return self.codes.float() * self.scales.t()


def _in_fp8(rows: Float[Tensor, "row into"]) -> tuple[Tensor, Tensor]:
    """Returns rows in FP8 and the scale of each, [row, 1]."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    scales = largest.div_(FP8_LARGEST).clamp_(min=SMALLEST_SCALE)
    return (rows / scales).to(FP8), scales


def _multiply_fp8(x: Tensor, weight: Fp8Weight, base: Tensor | None) -> Tensor:
    codes, scales = _in_fp8(x)
    product = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=scales, scale_b=weight.scales, out_dtype=torch.bfloat16
    )
    product = product.to(x.dtype)
    return product if base is None else product.add_(base)


def _multiplies_fp8(device: torch.device | None = None) -> bool:
    """Returns whether a GPU has units that multiply FP8; the current one if none is given."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


# -- all products ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewBitProduct:
    """A product with rounded weights, of which a :class:`saccade.model.kernels.Product` is made."""

    rounding: Rounding
    prepare: Callable[[Tensor, bool], Any]
    """(weight, whether its first half gates the second) -> prepared weights."""
    multiply: Callable[[Tensor, Any, Tensor | None], Tensor]
    """(x, prepared weights, base) -> base + x W^T. If the weights were prepared as gated and the
    product ``gates``, it returns silu(gate) times the other half. A base of None adds nothing."""
    gates: bool = False
    """Whether ``multiply`` applies the silu gate itself. Otherwise its caller does."""
    output_multiple: int = 1
    """The number of a weight's outputs must be a multiple of this."""
    input_multiple: int = CODE_BLOCK
    """The number of a weight's inputs must be a multiple of this."""
    has_units: Callable[[], bool] = lambda: True
    """Whether this machine has the instructions or the tensor cores that it needs."""
    rounded_numbers: Callable[[Tensor], Tensor] | None = None
    """weight -> the numbers that it is rounded to, in fp32; None for those of ``Codes``."""

    def rounded(self, weight: Tensor) -> Tensor:
        """Returns the numbers that a weight is rounded to, in fp32."""
        if self.rounded_numbers is not None:
            return self.rounded_numbers(weight)
        return Codes.of(weight, self.rounding).weights()

    def supports(self, weight: Tensor) -> bool:
        """Returns whether a weight of this shape can be rounded and multiplied in this way."""
        out, into = weight.shape
        return into % self.input_multiple == 0 and out % self.output_multiple == 0

    @property
    def is_available(self) -> bool:
        """Whether this machine has the instructions or the tensor cores for it, and a trial product
        was right."""
        return self.has_units() and _is_correct(self)


@cache
def _is_correct(product: FewBitProduct) -> bool:
    """Returns whether a trial product is close to torch's product of the rounded weights in fp32.

    Torch raises RuntimeError, AttributeError or NotImplementedError where it lacks an operator.
    """
    place = product.rounding.device_type
    # A weight of 64 x 64 and three rows, filled with values of a sine so that every trial is alike.
    numbers = torch.linspace(-9.0, 9.0, 64 * 64 + 3 * 64, device=place).sin().add(0.1)
    weight = numbers[: 64 * 64].view(64, 64)
    x = numbers[64 * 64 :].view(3, 64)
    exact = x @ product.rounded(weight).t()
    gated = False
    try:
        computed = product.multiply(x, product.prepare(weight, gated), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((computed - exact).abs().max() < MAX_DIFFERENCE * exact.abs().max())


def _compiled_product(rounding: Rounding) -> FewBitProduct:
    """Returns the product of our own compiled kernels (``kernels.c``)."""
    return FewBitProduct(
        rounding,
        lambda weight, gated: CodedPanels.of(weight, rounding, gated),
        _multiply_coded,
        gates=True,
        has_units=compiled.supports_int8_products,
    )


FEW_BIT_PRODUCTS: dict[str, FewBitProduct] = {
    "int8-torch": FewBitProduct(
        ROUNDINGS["int8"], lambda weight, gated: _pack_8_bits(weight), _multiply_8_bits
    ),
    "int8-bytes": _compiled_product(ROUNDINGS["int8"]),
    "int4-torch": FewBitProduct(
        ROUNDINGS["int4"],
        lambda weight, gated: _pack_4_bits(weight),
        _multiply_4_bits,
        output_multiple=TORCH_OUTPUTS,
    ),
    "int4-bytes": _compiled_product(ROUNDINGS["int4"]),
    "fp8-scaled": FewBitProduct(
        ROUNDINGS["fp8"],
        lambda weight, gated: Fp8Weight.of(weight),
        _multiply_fp8,
        output_multiple=FP8_MULTIPLE,
        input_multiple=FP8_MULTIPLE,
        has_units=_multiplies_fp8,
        rounded_numbers=lambda weight: Fp8Weight.of(weight).weights(),
    ),
}
"""The products by name. The names are part of the keys of stored measurements."""


def few_bit_products(rounding: Rounding) -> dict[str, FewBitProduct]:
    """Returns the products of this rounding that this machine has."""
    return {
        name: each
        for name, each in FEW_BIT_PRODUCTS.items()
        if each.rounding == rounding and each.is_available
    }


def weight_preparer(product: FewBitProduct, gated: bool) -> Callable[[Tensor], Any]:
    """Returns the function that prepares a weight for a product."""
    return partial(_prepare, product, gated)


def _prepare(product: FewBitProduct, gated: bool, weight: Tensor) -> Any:
    return product.prepare(weight, gated)
