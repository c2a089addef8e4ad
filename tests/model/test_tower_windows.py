"""Claims about towers that attend to all their windows at once: what they give is what Hugging
Face's eager attention gives, window by window. No GPU is needed: torch's kernel has a stand-in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.siglip import modeling_siglip as siglip
from transformers.models.video_llama_3 import modeling_video_llama_3 as llama3

from saccade.model.kernels import tower_windows
from saccade.model.kernels.tower import OutsideKernels

DEPTH = 2
GRIDS = torch.tensor([[3, 8, 12], [1, 4, 4]])  # a video of three frames and a picture
FRAMES = torch.tensor([[1, 8, 12]] * 3 + [[1, 4, 4]])  # the same, as GLM's model hands them on
PATCHES = int(GRIDS.prod(-1).sum())
"""Patches of all of them together."""

COMMON = dict(depth=DEPTH, hidden_size=64, num_heads=4, patch_size=4, intermediate_size=48)
QWEN = COMMON | dict(out_hidden_size=32)


LLAMA3 = dict(num_hidden_layers=DEPTH, num_attention_heads=4, patch_size=4)
LLAMA3 |= dict(hidden_size=64, intermediate_size=48)
QWEN2 = dict(depth=DEPTH, embed_dim=64, hidden_size=32, num_heads=4, patch_size=4, mlp_ratio=2)

TOWERS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "qwen2_vl": (
        qwen2,
        lambda: qwen2.Qwen2VisionTransformerPretrainedModel(qwen2.Qwen2VLVisionConfig(**QWEN2)),
    ),
    "qwen2_5_vl": (
        qwen25,
        lambda: qwen25.Qwen2_5_VisionTransformerPretrainedModel(
            qwen25.Qwen2_5_VLVisionConfig(**QWEN, window_size=16, fullatt_block_indexes=[1])
        ),
    ),
    "qwen3_vl": (
        qwen3,
        lambda: qwen3.Qwen3VLVisionModel(
            qwen3.Qwen3VLVisionConfig(
                **QWEN, deepstack_visual_indexes=[0], num_position_embeddings=64
            )
        ),
    ),
    "video_llama_3": (
        llama3,
        lambda: llama3.VideoLlama3VisionModel(llama3.VideoLlama3VisionConfig(**LLAMA3)),
    ),
    "glm4v": (
        glm4v,
        lambda: glm4v.Glm4vVisionModel(glm4v.Glm4vVisionConfig(**QWEN, image_size=32)),
    ),
}
"""A tower of each family with windows: the module that its code is in, and how to make it."""


def _tower(family: str) -> nn.Module:
    torch.manual_seed(0)
    tower = TOWERS[family][1]().eval()
    with torch.no_grad():
        for weight in tower.parameters():
            scale = 0.2 if weight.ndim < 2 else weight[0].numel() ** -0.5
            weight.normal_(0, scale)
    tower.config._attn_implementation = "eager"
    return tower


def _see(family: str, tower: nn.Module) -> torch.Tensor:
    pixels = torch.randn(PATCHES, _width(tower), generator=torch.Generator().manual_seed(1))
    more = {"merge_sizes": torch.tensor([2, 1])} if family == "video_llama_3" else {}
    with torch.no_grad():
        seen = tower(pixels, grid_thw=FRAMES if family == "glm4v" else GRIDS, **more)
    states: torch.Tensor = seen.last_hidden_state
    return states


def _width(tower: nn.Module) -> int:
    """Numbers of a patch: of two frames, where a tower merges them."""
    first = next(module for module in tower.modules() if isinstance(module, nn.Conv3d | nn.Conv2d))
    return first.weight[0].numel()


class Kernel:
    """The stand-in for torch's kernel, with its arguments; computed key by key in fp64."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.scales: list[float] = []

    def __call__(
        self, q: Any, k: Any, v: Any, borders: Any, longest: int, scale: float, is_causal: bool
    ) -> torch.Tensor:
        assert borders.dtype == torch.int32 and not is_causal
        assert longest == int((borders[1:] - borders[:-1]).max())
        assert q.shape[0] == k.shape[0] == v.shape[0] == int(borders[-1])
        self.calls.append(borders.tolist())
        self.scales.append(scale)
        window = torch.zeros(len(q), dtype=torch.long)
        window[borders[1:-1].long()] = 1
        window = window.cumsum(0)
        logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
        logits.masked_fill_(window[:, None] != window, float("-inf"))
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v.double()).to(q.dtype)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Ours serves on this CPU in fp32, over the stand-in."""
    stand_in = Kernel()
    monkeypatch.setattr(tower_windows, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(tower_windows, "DTYPES", (torch.float32,))
    monkeypatch.setattr(tower_windows, "attend_by_flash", stand_in)
    monkeypatch.setattr(tower_windows, "is_flash_correct", lambda *given: True)
    return stand_in


def _quick(tower: nn.Module) -> OutsideKernels:
    return OutsideKernels(tower, nn.Module(), nn.Module())


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_with_windows_sees_in_one_call_a_layer_what_it_saw(family, kernel, monkeypatch):
    """Claim: by the kernel a tower gives what it gives in eager attention, to 1e-5, in one call a
    layer, with the scale of its heads; afterwards its config is as it was. Control: before,
    attention is called once a window."""
    tower = _tower(family)
    code, calls = TOWERS[family][0], []
    eager = code.eager_attention_forward
    monkeypatch.setattr(
        code, "eager_attention_forward", lambda *a, **b: calls.append(1) or eager(*a, **b)
    )
    expected = _see(family, tower)
    assert len(calls) > 2 * DEPTH
    calls.clear()
    with _quick(tower).use_quickest_kernels():
        assert tower.config._attn_implementation == tower_windows.ATTENTION
        states = _see(family, tower)
    assert tower.config._attn_implementation == "eager"
    assert torch.allclose(states, expected, atol=1e-5 * float(expected.abs().max()))
    assert not calls and len(kernel.calls) == DEPTH
    assert all(len(borders) > 2 for borders in kernel.calls)
    assert {round(scale, 6) for scale in kernel.scales} == {16**-0.5}


def test_control_other_borders_or_another_scale_are_seen(kernel, monkeypatch):
    """Control: a kernel that is told other borders, or another scale, gives something else."""
    tower = _tower("qwen2_5_vl")
    expected = _see("qwen2_5_vl", tower)
    for wrong in ("borders", "scale"):

        def call(q, k, v, borders, longest, scale, is_causal, wrong=wrong):
            if wrong == "scale":
                return kernel(q, k, v, borders, longest, scale * 1.5, is_causal)
            whole = borders[[0, -1]]
            return kernel(q, k, v, whole, int(whole[-1]), scale, is_causal)

        monkeypatch.setattr(tower_windows, "attend_by_flash", call)
        with _quick(tower).use_quickest_kernels():
            states = _see("qwen2_5_vl", tower)
        assert (states - expected).abs().max() > 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
def test_where_the_kernel_is_wrong_windows_are_taken_one_by_one(family, kernel, monkeypatch):
    """Claim: where the trial fails, the tower sees the same, without the kernel."""
    tower = _tower(family)
    expected = _see(family, tower)
    monkeypatch.setattr(tower_windows, "is_flash_correct", lambda *given: False)
    with _quick(tower).use_quickest_kernels():
        states = _see(family, tower)
    assert torch.allclose(states, expected, atol=1e-5 * float(expected.abs().max()))
    assert not kernel.calls


def test_on_a_cpu_and_in_fp32_nothing_changes():
    """Claim: where torch has no such kernel a tower keeps its attention, and so does one that an
    error stopped. Control: its modules are recognised."""
    tower = _tower("qwen2_5_vl")
    quick = _quick(tower)
    assert [each.config for each in quick._windowed_towers] == [tower.config]
    with pytest.raises(ZeroDivisionError), quick.use_quickest_kernels():
        assert tower.config._attn_implementation == "eager"
        raise ZeroDivisionError
    assert tower.config._attn_implementation == "eager"


def test_an_error_while_a_tower_looks_leaves_its_attention_as_it_was(kernel):
    """Claim: the function's name is put back whatever happens."""
    tower = _tower("qwen2_5_vl")
    with pytest.raises(ZeroDivisionError), _quick(tower).use_quickest_kernels():
        assert tower.config._attn_implementation == tower_windows.ATTENTION
        raise ZeroDivisionError
    assert tower.config._attn_implementation == "eager"


def test_towers_without_windows_keep_their_attention(kernel):
    """Claim: a tower that looks at each picture as a whole is left alone: it may need masks."""
    config = siglip.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    assert not tower_windows.windowed_towers([*siglip.SiglipVisionModel(config).modules()])


def test_the_trial_of_torchs_kernel(kernel, monkeypatch, caplog):
    """Claim: a kernel is used where it gives what attention window by window gives; where it gives
    something else or raises, it is not, and one warning says so. Heads of a size that torch's has
    not are not tried."""
    monkeypatch.undo()
    arguments = torch.device("cpu"), torch.float32, 4, 2
    right = Kernel()

    def grouped(q, k, v, *given, **named):
        return right(q, *(each.repeat_interleave(2, 1) for each in (k, v)), *given, **named)

    def of_nan(q, *given, **named):
        return q * float("nan")

    def raising(*given, **named):
        raise RuntimeError("no kernel image")

    for kernel, good in ((grouped, True), (of_nan, False), (raising, False)):
        tower_windows.is_flash_correct.cache_clear()
        caplog.clear()
        monkeypatch.setattr(tower_windows, "attend_by_flash", kernel)
        with caplog.at_level(logging.WARNING):
            assert [tower_windows.is_flash_correct(*arguments, 72) for _ in range(2)] == [good] * 2
        assert len(caplog.messages) == (not good)
    assert not tower_windows.is_flash_correct(*arguments, 20)
    tower_windows.is_flash_correct.cache_clear()


def test_torchs_kernel_takes_what_it_is_given():
    """Claim: the arguments of the call are those of torch's operator, by its schema."""
    names = [
        each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments
    ]
    assert names[:10] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask"),
    ]
    assert "scale" in names[10:]
    q = torch.randn(6, 2, 8, dtype=torch.bfloat16, device="meta")
    borders = torch.zeros(3, dtype=torch.int32, device="meta")
    assert tower_windows.attend_by_flash(q, q, q, borders, 4, 0.5, False).shape == q.shape
