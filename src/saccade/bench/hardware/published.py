"""Configs of well-known checkpoints by their published shapes, for planning without a hub.

Only what decides memory and time is here: tokenizers and processors come with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

Made = Callable[[], Any]


def _text(
    hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=mlp,
        vocab_size=vocab,
        **more,
    )


def _sections(*parts: int) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*parts]}
    }


def _family(
    kind: Any, vision: Callable[[int], dict[str, Any]] | None, dtype: torch.dtype, **text: Any
) -> Callable[..., Made]:
    """Configs of one kind: (whether its embeddings are tied, its shape) -> one. ``vision`` is of
    the text's width."""

    def shaped(tie: bool, *shape: int) -> Made:
        parts = {"text_config": _text(*shape, **text)}
        if vision is not None:
            parts["vision_config"] = vision(shape[0])
        return lambda: kind(**parts, tie_word_embeddings=tie, dtype=dtype)

    return shaped


def _qwen25_vision(hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": 1280,
        "intermediate_size": 3456 if hidden == 5120 else 3420,
        "out_hidden_size": hidden,
        "tokens_per_second": 2,
    }


def _qwen3_vision(hidden: int) -> dict[str, Any]:
    small = hidden < 4096
    return {
        "depth": 24 if small else 27,
        "hidden_size": 1024 if small else 1152,
        "intermediate_size": 4096 if small else 4304,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": [5, 11, 17] if small else [8, 16, 24],
    }


BF16, FP16 = torch.bfloat16, torch.float16
_qwen2 = _family(
    hf.Qwen2VLConfig, lambda hidden: {"hidden_size": hidden}, BF16, **_sections(16, 24, 24)
)
_qwen25 = _family(hf.Qwen2_5_VLConfig, _qwen25_vision, BF16, **_sections(16, 24, 24))
_qwen3 = _family(hf.Qwen3VLConfig, _qwen3_vision, BF16, head_dim=128, **_sections(24, 20, 20))
_onevision = _family(hf.LlavaOnevisionConfig, None, FP16, model_type="qwen2")
_llava = _family(hf.LlavaConfig, None, FP16, model_type="llama")
_llava_next = _family(hf.LlavaNextConfig, None, FP16, model_type="llama")

# hidden, layers, heads, KV heads, MLP, vocabulary
CONFIGS: dict[str, Made] = {
    "Qwen2-VL-2B": _qwen2(True, 1536, 28, 12, 2, 8960, 151936),
    "Qwen2-VL-7B": _qwen2(False, 3584, 28, 28, 4, 18944, 152064),
    "Qwen2-VL-72B": _qwen2(False, 8192, 80, 64, 8, 29568, 152064),
    "Qwen2.5-VL-3B": _qwen25(True, 2048, 36, 16, 2, 11008, 151936),
    "Qwen2.5-VL-7B": _qwen25(False, 3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-VL-32B": _qwen25(False, 5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-VL-72B": _qwen25(False, 8192, 80, 64, 8, 29568, 152064),
    "Qwen3-VL-2B": _qwen3(True, 2048, 28, 16, 8, 6144, 151936),
    "Qwen3-VL-4B": _qwen3(True, 2560, 36, 32, 8, 9728, 151936),
    "Qwen3-VL-8B": _qwen3(False, 4096, 36, 32, 8, 12288, 151936),
    "Qwen3-VL-32B": _qwen3(False, 5120, 64, 64, 8, 25600, 151936),
    "LLaVA-OneVision-0.5B": _onevision(True, 896, 24, 14, 2, 4864, 152000),
    "LLaVA-OneVision-7B": _onevision(False, 3584, 28, 28, 4, 18944, 152128),
    "LLaVA-OneVision-72B": _onevision(False, 8192, 80, 64, 8, 29568, 152128),
    "LLaVA-1.5-7B": _llava(False, 4096, 32, 32, 32, 11008, 32064),
    "LLaVA-1.5-13B": _llava(False, 5120, 40, 40, 40, 13824, 32064),
    "LLaVA-NeXT-7B": _llava_next(False, 4096, 32, 32, 32, 11008, 32064),
    "LLaVA-NeXT-13B": _llava_next(False, 5120, 40, 40, 40, 13824, 32064),
}
