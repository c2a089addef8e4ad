"""Checkpoints in few bits load as drafts on a CPU, unpacked.

The packing here is written from the descriptions of the formats, and not by what unpacks it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import saccade
from lab.checkpoints import Size, make
from saccade.core.errors import ModelError, OptionError
from saccade.inputs import footprint, loading, packed_checkpoints
from saccade.inputs.packed_checkpoints import Packing, find_packing, unpack_codes, unpack_tensors
from saccade.model import memory
from saccade.model.kernels.few_bits import ROUNDINGS

SIZE = Size(2, 256, 320)
GROUP = 64
CPU = torch.device("cpu")


def _random(*shape: int, low: int = 0, high: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator)


def _as_word(number: int) -> int:
    """A word of 32 bits as the signed number that a tensor has."""
    return number - (1 << 32) if number >= 1 << 31 else number


def _pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Packs each row as one long number, the first code in its lowest bits, cut into words."""
    rows = []
    for row in codes.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([_as_word((whole >> (32 * n)) & 0xFFFFFFFF) for n in range(count)])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_are_unpacked_from_their_words(bits):
    """Claim: codes packed as one long number a row come out in order, at every number of bits, with
    those of 3 bits that cross words. Fails if the bytes of a word are read in another order."""
    codes = _random(5, 96, high=1 << bits)
    assert torch.equal(unpack_codes(_pack_stream(codes, bits), bits).long(), codes)


# -- packing, by the formats' descriptions ---------------------------------------------------------

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors that a matrix is stored as, by their suffixes, and the weight that they stand for."""


def _grid(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales of groups of inputs, so that weight = (code - zero) * scale."""
    out, into = weight.shape
    groups = weight.float().view(out, -1, group)
    low, high = groups.aminmax(dim=-1)
    most = (1 << bits) - 1
    scales = ((high.clamp(min=0) - low.clamp(max=0)) / most).half().float()
    zeros = (-low / scales).round().clamp(1, most)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.view(out, into).long(), zeros.long(), scales


def _dense(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).float() * scales[:, groups]


def _even_groups(into: int, group: int) -> Tensor:
    return torch.arange(into) // group


def _pack_awq(weight: Tensor) -> Packed:
    """AutoAWQ's "gemm": [into, out / 8]; place i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]
    of its eight."""
    codes, zeros, scales = _grid(weight, 4, GROUP)

    def words(columns: Tensor) -> Tensor:
        eights = columns.view(len(columns), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return _pack_stream(eights.flatten(1), 4)

    stored = {
        "qweight": words(codes.t()),
        "qzeros": words(zeros.t()),
        "scales": scales.t().half().contiguous(),
    }
    return stored, _dense(codes, zeros, scales, _even_groups(weight.shape[1], GROUP))


def _pack_gptq(
    weight: Tensor, bits: int = 4, shift: int = 1, ordered: bool = False, named: bool = True
) -> Packed:
    """AutoGPTQ: words along the input, zero points less ``shift`` in words along the output."""
    codes, zeros, scales = _grid(weight, bits, GROUP)
    groups = _even_groups(weight.shape[1], GROUP)
    if ordered:  # Inputs were quantised by their size, so each names its group.
        mixed = torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))
        codes, groups = codes[:, mixed], groups[mixed]
    stored = {
        "qweight": _pack_stream(codes, bits).t().contiguous(),
        "qzeros": _pack_stream(zeros.t() - shift, bits),
        "scales": scales.t().half().contiguous(),
    }
    if named:
        stored["g_idx"] = groups.int()
    return stored, _dense(codes, zeros, scales, groups)


def _pack_fp8(weight: Tensor, suffix: str = "weight_scale_inv") -> Packed:
    """DeepSeek-V3: blocks of 128 by 128, the last of a side cut, share the scale they are
    multiplied by."""
    out, into = weight.shape
    scales = torch.zeros(-(-out // 128), -(-into // 128))
    codes = torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    dense = torch.zeros(out, into)
    for row in range(0, out, 128):
        for column in range(0, into, 128):
            part = (slice(row, row + 128), slice(column, column + 128))
            scale = weight[part].abs().max().float() / 448
            scales[row // 128, column // 128] = scale
            codes[part] = (weight[part].float() / scale).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float() * scale
    return {"weight": codes, suffix: scales}, dense


def _pack_fp8_outputs(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True).float() / 448
    codes = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def _pack_fp8_whole(weight: Tensor) -> Packed:
    scale = weight.abs().max().float().view(1) / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
    return stored, codes.float() * scale


def _pack_compressed(weight: Tensor, bits: int = 4, symmetric: bool = True) -> Packed:
    """compressed-tensors "pack-quantized": [out, into] along the input, codes and zero points
    shifted to be positive, zero points in words along the output."""
    codes, zeros, scales = _grid(weight, bits, GROUP)
    middle = 1 << (bits - 1)
    zeros = torch.full_like(zeros, middle) if symmetric else zeros
    stored = {
        "weight_packed": _pack_stream(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = _pack_stream(zeros.t(), bits).t().contiguous()
    groups = _even_groups(weight.shape[1], GROUP)
    return stored, _dense(codes, zeros, scales.bfloat16().float(), groups)


def _pack_bytes(weight: Tensor) -> Packed:
    scales = (weight.abs().amax(1, keepdim=True).float() / 127).bfloat16()
    codes = (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def _scheme(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **more}}


def _compressed(stored_as: str, *schemes: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{n}": scheme for n, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": groups}


@dataclass(frozen=True)
class Kind:
    """A published layout: its ``quantization_config``, and how a matrix is packed in it."""

    settings: Mapping[str, Any]
    pack: Callable[[Tensor], Packed]


GPTQ_SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
BY_GROUP = {"strategy": "group", "group_size": GROUP}

KINDS: dict[str, Kind] = {
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _pack_awq
    ),
    "gptq": Kind(GPTQ_SETTINGS, _pack_gptq),
    "gptq in order of size": Kind(
        {**GPTQ_SETTINGS, "desc_act": True, "checkpoint_format": "gptq"},
        lambda weight: _pack_gptq(weight, ordered=True),
    ),
    "gptq, second format": Kind(
        {**GPTQ_SETTINGS, "checkpoint_format": "gptq_v2"},
        lambda weight: _pack_gptq(weight, shift=0, named=False),
    ),
    "gptq, 3 bits": Kind({**GPTQ_SETTINGS, "bits": 3}, lambda weight: _pack_gptq(weight, 3)),
    "gptq, 8 bits": Kind({**GPTQ_SETTINGS, "bits": 8}, lambda weight: _pack_gptq(weight, 8)),
    "fp8": Kind({"quant_method": "fp8", "weight_block_size": [128, 128]}, _pack_fp8),
    "fbgemm_fp8": Kind({"quant_method": "fbgemm_fp8"}, _pack_fp8_outputs),
    "compressed, 4 bits": Kind(
        _compressed("pack-quantized", _scheme("int", 4, **BY_GROUP)), _pack_compressed
    ),
    "compressed, 4 bits with zero points": Kind(
        _compressed("pack-quantized", _scheme("int", 4, symmetric=False, **BY_GROUP)),
        lambda weight: _pack_compressed(weight, symmetric=False),
    ),
    "compressed, bytes": Kind(
        _compressed("int-quantized", _scheme("int", 8, strategy="channel")), _pack_bytes
    ),
    "compressed, FP8": Kind(
        _compressed("float-quantized", _scheme("float", 8, strategy="tensor")), _pack_fp8_whole
    ),
    "compressed, FP8 in blocks": Kind(
        _compressed(
            "float-quantized",
            _scheme("float", 8, strategy="block", block_structure=[128, 128]),
        ),
        lambda weight: _pack_fp8(weight, "weight_scale"),
    ),
}


def _packing(kind: Kind) -> Packing:
    packing = find_packing(kind.settings)
    assert packing is not None
    return packing


@pytest.mark.parametrize("name", KINDS)
def test_a_packed_matrix_is_unpacked_to_what_it_stands_for(name):
    """Claim: in each published layout every number of a matrix that is no square comes out as the
    one that was stored, and other tensors as they are. Fails for columns in another order, a zero
    point off by one, or scales of another group."""
    kind = KINDS[name]
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(192, 320, generator=generator) * torch.logspace(-1, 1, 192)[:, None]
    stored, dense = kind.pack(weight)
    tensors = {f"layer.proj.{suffix}": each for suffix, each in stored.items()}
    tensors["layer.norm.weight"] = torch.ones(4)
    tensors["layer.attn.k_scale"] = torch.ones(1)
    unpacked = dict(
        unpack_tensors(tensors.keys(), tensors.__getitem__, _packing(kind), torch.float32, "x")
    )
    assert unpacked.keys() == {"layer.proj.weight", "layer.norm.weight"}
    torch.testing.assert_close(unpacked["layer.proj.weight"], dense, atol=0, rtol=1e-6)


@pytest.mark.parametrize("name", ["fp8", "compressed, FP8 in blocks"])
@pytest.mark.parametrize("shape", [(200, 128), (260, 128), (100, 64), (128, 200)])
def test_a_matrix_with_one_column_of_blocks_is_unpacked_by_its_blocks(name, shape):
    """Claim: the last block of outputs is shorter where their number is no multiple of its size,
    also where a matrix is one block wide. Fails if its blocks are taken to be of equal size."""
    kind = KINDS[name]
    stored, dense = kind.pack(torch.randn(shape, generator=torch.Generator().manual_seed(5)))
    tensors = {f"layer.proj.{suffix}": each for suffix, each in stored.items()}
    unpacked = dict(
        unpack_tensors(tensors.keys(), tensors.__getitem__, _packing(kind), torch.float32, "x")
    )
    torch.testing.assert_close(unpacked["layer.proj.weight"], dense, atol=0, rtol=1e-6)


def test_matrices_of_experts_in_fp8_are_unpacked_by_their_own_names():
    """Claim: a stack of experts, whose name does not end in "weight", is unpacked too."""
    stored = [_pack_fp8(torch.randn(192, 256)) for _ in range(3)]
    tensors = {
        "experts.down_proj": torch.stack([each["weight"] for each, _ in stored]),
        "experts.down_proj_scale_inv": torch.stack(
            [each["weight_scale_inv"] for each, _ in stored]
        ),
    }
    packing = _packing(KINDS["fp8"])
    unpacked = dict(
        unpack_tensors(tensors.keys(), tensors.__getitem__, packing, torch.float32, "x")
    )
    dense = torch.stack([dense for _, dense in stored])
    assert unpacked.keys() == {"experts.down_proj"}
    torch.testing.assert_close(unpacked["experts.down_proj"], dense, atol=0, rtol=1e-6)


# -- whole checkpoints -----------------------------------------------------------------------------


@cache
def _plain_folder(family: str, base: Path) -> Path:
    return make(family, base / f"plain-{family}", size=SIZE)


def _write_packed(plain: Path, folder: Path, kind: Kind, dtype: torch.dtype) -> Path:
    """Writes a folder in few bits, and beside it one with the weights that it stands for."""
    dense_folder = folder.with_name(folder.name + "-dense")
    for copy in (folder, dense_folder):
        shutil.copytree(plain, copy)
    packed, dense = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_packed = ".layers." in name and tensor.dim() == 2
        if not is_packed:
            packed[name] = dense[name] = tensor
            continue
        stored, weight = kind.pack(tensor.float())
        stem = name.removesuffix("weight")
        packed |= {stem + suffix: each.contiguous() for suffix, each in stored.items()}
        dense[name] = weight.to(dtype)
    half = len(packed) // 2  # Parts of a matrix may lie in two files.
    names = [*packed]
    random.Random(0).shuffle(names)
    shards = {"model-00001-of-00002": names[:half], "model-00002-of-00002": names[half:]}
    (folder / "model.safetensors").unlink()
    for file, own in shards.items():
        save_file({name: packed[name] for name in own}, folder / f"{file}.safetensors")
    index = {name: f"{file}.safetensors" for file, own in shards.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    save_file(dense, dense_folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": kind.settings})
    )
    return folder


@cache
def _packed_folder(name: str, family: str, base: Path) -> Path:
    plain = _plain_folder(family, base)
    folder = base / f"{family}-{name}".replace(" ", "-").replace(",", "")
    return _write_packed(plain, folder, KINDS[name], torch.float32)


@pytest.fixture
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder in a layout, once for the module."""
    base = tmp_path_factory.getbasetemp() / "packed"
    base.mkdir(exist_ok=True)
    return lambda name, family="llama": _packed_folder(name, family, base)


def _dense_beside(folder: Path) -> str:
    return str(folder.with_name(folder.name + "-dense"))


CHECKPOINTS = [
    pytest.param(name, family, marks=() if is_cheap else pytest.mark.slow)
    for family, cheap in (
        ("llama", ("awq", "gptq", "fp8")),
        ("qwen2.5-vl", ("compressed, 4 bits",)),
    )
    for name in KINDS
    for is_cheap in [name in cheap]
]


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("name", "family"), CHECKPOINTS)
def test_a_packed_folder_drafts_as_its_weights_do(name, family, packed):
    """Claim: a folder in a published layout loads as a draft on a CPU with the weights that it
    stands for, by the fused decoder; the answer is the target's, and what is drafted is what the
    unpacked folder drafts. Fails if one matrix is left packed or unpacked wrongly."""
    folder = packed(name, family)
    plain = str(folder.parent / f"plain-{family}")
    target, draft = loading.load_pair(plain, str(folder), device="cpu")
    dense = loading.load(_dense_beside(folder), device="cpu")
    assert draft is not None and draft.backbone.fused is not None
    expected = dict(dense.backbone.model.named_parameters())
    for key, weight in draft.backbone.model.named_parameters():
        torch.testing.assert_close(weight, expected[key], atol=0, rtol=1e-6, msg=key)
    assert "quantization_config" not in vars(draft.backbone.model.config)
    inputs = {"input_ids": _random(1, 12, high=200), "attention_mask": torch.ones(1, 12).long()}
    answers = {
        each: saccade.run(
            target.backbone, inputs, draft=each, method="sd", max_new_tokens=16, do_sample=False
        )
        for each in (draft.backbone, dense.backbone)
    }
    plain_answer = saccade.run(
        target.backbone, inputs, method="ar", max_new_tokens=16, do_sample=False
    )
    ours, theirs = answers.values()
    assert ours.ids == theirs.ids == plain_answer.ids and ours.fallback_reason is None
    assert [each.tokens for each in ours.rounds] == [each.tokens for each in theirs.rounds]


def test_a_packed_draft_may_be_rounded_and_in_half_precision(packed):
    """Claim: an unpacked draft takes the type that is asked for, and ``draft_quantize`` rounds it
    on a CPU as any other."""
    folder = packed("awq")
    plain = str(folder.parent / "plain-llama")
    _, draft = loading.load_pair(
        plain, str(folder), device="cpu", dtype="bfloat16", draft_quantize="int8"
    )
    assert draft is not None and draft.backbone.dtype == torch.bfloat16
    assert draft.backbone.rounding == ROUNDINGS["int8"]


def test_a_target_is_unpacked_where_transformers_cannot_read_it(packed, monkeypatch):
    """Claim: a target in few bits answers on a CPU without the package that transformers needs for
    it, and with the package it is left to transformers. Fails if a target is unpacked although
    transformers would compute something else."""
    folder = packed("awq")
    monkeypatch.setattr(Packing, "is_read_by_transformers", property(lambda self: False))
    target = loading.load(str(folder), device="cpu")
    dense = loading.load(_dense_beside(folder), device="cpu")
    expected = dict(dense.backbone.model.named_parameters())
    for key, weight in target.backbone.model.named_parameters():
        torch.testing.assert_close(weight, expected[key], atol=0, rtol=1e-6)
    ours, theirs = (each.backbone.model.generation_config for each in (target, dense))
    assert ours.to_diff_dict() == theirs.to_diff_dict()
    monkeypatch.setattr(Packing, "is_read_by_transformers", property(lambda self: True))
    config = loading.read_config(str(folder))
    assert packed_checkpoints.packing_to_unpack(config, CPU) is None
    assert packed_checkpoints.packing_to_unpack(config, CPU, is_draft=True) is not None
    cuda = torch.device("cuda")
    assert packed_checkpoints.packing_to_unpack(config, cuda, is_draft=True) is None


# -- refusals --------------------------------------------------------------------------------------


def _sentence(error: Exception) -> str:
    text = str(error)
    assert "\n" not in text and "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version gemv"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        (_compressed("nvfp4-pack-quantized", _scheme("float", 4)), "nvfp4-pack-quantized"),
        ({"quant_method": "aqlm"}, "awq, gptq, fp8, fbgemm_fp8, compressed-tensors"),
    ],
)
def test_a_layout_that_is_not_unpacked_is_named(settings, part, packed, tmp_path):
    """Claim: a draft in another layout, for which transformers' package is missing, is refused in
    one sentence that names the layout. Fails if it loads as noise."""
    folder = packed("awq")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ModelError) as caught:
        loading.load(str(copy), device="cpu", is_draft=True)
    assert part in _sentence(caught.value)


def test_parts_that_do_not_make_a_matrix_are_named(packed, tmp_path):
    """Claim: a missing part, and parts of shapes that do not belong together, are refused in one
    sentence that names them."""
    copy = tmp_path / "copy"
    shutil.copytree(packed("awq"), copy)
    file = copy / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    scales = next(name for name in tensors if name.endswith(".scales"))
    cut = tensors[scales][:, :5].contiguous()
    for changed, part in (
        ({name: each for name, each in tensors.items() if name != scales}, "lacks"),
        ({**tensors, scales: cut}, "do not make one matrix"),
    ):
        save_file(changed, file)
        with pytest.raises(ModelError) as caught:
            loading.load(str(copy), device="cpu", is_draft=True)
        assert part in _sentence(caught.value) and scales in str(caught.value)


def test_a_checkpoint_in_few_bits_is_not_quantised_again(packed):
    """Claim: a quantizer for a checkpoint that is in few bits is refused in a sentence, since
    transformers would leave it out silently."""
    with pytest.raises(OptionError, match="in few bits already") as caught:
        loading.load(str(packed("awq")), device="cpu", quantize=_any_quantizer())
    _sentence(caught.value)


def _any_quantizer() -> str:
    """A quantizer whose package is installed, or a test is left out."""
    for name, (package, *_) in loading.QUANTIZERS.items():
        if loading.importlib.util.find_spec(package) is not None:
            return name
    pytest.skip("no quantizer is installed")


# -- memory ----------------------------------------------------------------------------------------


def test_a_packed_draft_counts_what_it_takes_once_unpacked(packed, monkeypatch):
    """Claim: where a checkpoint is unpacked its memory is that of plain weights, and where it is
    not, that of its own bits. Fails if a draft is let in by the size of its files."""
    config = loading.read_config(str(packed("gptq")))
    as_draft = packed_checkpoints.config_as_loaded(config, CPU, is_draft=True)
    on_gpu = packed_checkpoints.config_as_loaded(config, torch.device("cuda"), is_draft=True)
    assert footprint.weight_size(torch.float32, as_draft) == 4
    assert footprint.weight_size(torch.float32, on_gpu) == 0.5
    weights = footprint.footprint(as_draft).weight_bytes(4)
    room = 0.5 * weights
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(room))
    with pytest.raises(ModelError, match="does not fit"):
        loading.load(str(packed("gptq")), device="cpu", is_draft=True)


@pytest.mark.parametrize("own", [True, False])
def test_a_rounded_copy_is_counted_before_anything_is_loaded(own, packed, monkeypatch):
    """Claim: where a model fits and its rounded copy beside it does not, the pair is refused before
    the weights are read, with what would fit. Fails if the copy is left out of the count."""
    plain = str(packed("awq").parent / "plain-llama")
    size = footprint.footprint(loading.read_config(plain))
    copied = size.rounded_copy_bytes(ROUNDINGS["int8"].bytes_per_weight)
    room = (size.weight_bytes(4) + copied // 2) / (1 - memory.SPARE_SHARE)
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(room))
    reads: list[str] = []
    read = loading._from_pretrained
    monkeypatch.setattr(
        loading,
        "_from_pretrained",
        lambda loader, name, *rest, **more: (
            reads.append(loader.__name__),
            read(loader, name, *rest, **more),
        )[1],
    )
    with pytest.raises(ModelError, match="copy of its weights in int8") as caught:
        loading.load_pair(plain, None if own else plain, device="cpu", draft_quantize="int8")
    assert "without draft_quantize" in _sentence(caught.value)
    models = [name for name in reads if "ForCausalLM" in name]
    assert len(models) == (0 if own else 1), "weights were read in vain"
    assert loading.load_pair(plain, plain, device="cpu")[1] is not None
