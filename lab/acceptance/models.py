"""Random models of real shapes, made on the device, and prompts for them.

No weight and no tokenizer is read from anywhere: a bare machine needs this folder alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig

from lab.hardware.gpu import build, config
from saccade.bench.hardware.published import CONFIGS
from saccade.core.prompt import Inputs
from saccade.model.backbone import Backbone

SHAPE = "Qwen2.5-VL-7B"
TEXT_IDS = 1000  # ids below are text
NOISE = 0.05  # in the small draft's weights, as a share of their spread
SHARPNESS = 4.0  # of logits: with less, random text repeats itself

HALF_A_BILLION = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The shape of Qwen2.5-0.5B, which has no published model with eyes."""


@dataclass
class Models:
    """The models of one acceptance, made when first asked for.

    ``small`` shapes try the command itself; they say nothing about speed.
    """

    device: torch.device
    small: bool = False
    _correct: dict[torch.dtype, tuple[Backbone, Backbone]] = field(default_factory=dict)

    @property
    def fast_type(self) -> torch.dtype:
        """The type of the large pair: bfloat16, which small shapes on a CPU do not need."""
        return torch.float32 if self.small else torch.bfloat16

    def correct(self, dtype: torch.dtype) -> tuple[Backbone, Backbone]:
        """A small target whose text varies and a noisy copy of it as the draft."""
        if dtype not in self._correct:
            made = small_config(self.small)
            with torch.device(self.device):
                target = build(made, self.device, torch.float32).model
            randomize(target)
            draft = copy.deepcopy(target)
            disturb(draft)
            self._correct[dtype] = Backbone(target.to(dtype)), Backbone(draft.to(dtype))
        return self._correct[dtype]

    def target_config(self) -> Any:
        if self.small:
            return small_config(True)
        return CONFIGS[SHAPE]()

    def draft_config(self) -> Any:
        """About half a billion weights; its vision tower is cut to one layer."""
        if self.small:
            made = small_config(True)
            made.text_config.num_hidden_layers = 1
            made.text_config.layer_types = made.text_config.layer_types[:1]
            return made
        made = config(SHAPE)
        text = made.text_config
        for name, value in HALF_A_BILLION.items():
            setattr(text, name, value)
        text.layer_types = text.layer_types[: text.num_hidden_layers]
        # A head has 64 numbers, half of what a 7B's has, and its positions turn 32 pairs of them.
        turned = [8, 12, 12]
        text.rope_parameters = {**text.rope_parameters, "mrope_section": turned}
        made.vision_config.out_hidden_size = text.hidden_size
        return made

    @cached_property
    def target(self) -> Backbone:
        return build(self.target_config(), self.device, self.fast_type)

    @cached_property
    def draft(self) -> Backbone:
        return build(self.draft_config(), self.device, self.fast_type)


def small_config(tiny: bool) -> Any:
    """A 7B's kind, shrunken; ``tiny`` is for a CPU."""
    made = config(SHAPE, tiny=True)
    if not tiny:
        text = made.text_config
        text.hidden_size, text.intermediate_size = 1024, 2048
        text.num_attention_heads, text.num_key_value_heads = 8, 2
        text.num_hidden_layers = 4
        text.layer_types = ["full_attention"] * 4
        made.vision_config.out_hidden_size = 1024
    return made


@torch.no_grad()
def randomize(model: Any, seed: int = 0) -> None:
    """Weights that mix well and logits that are far apart, so that no answer hangs on a tie."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: torch.Tensor, mean: float, spread: float) -> None:
        # They are drawn on the CPU, where a seed means the same on every machine.
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_((mean + spread * noise).to(device))

    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            draw(weight, 1.0 if "norm" in name or ".ln" in name else 0.0, 0.2)
        elif weight is embeddings:
            draw(weight, 0.0, 1.0)
        else:
            fan = weight[0].numel()
            draw(weight, 0.0, (SHARPNESS if weight is head else 1.0) / fan**0.5)
    head[TEXT_IDS:] = 0
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)


@torch.no_grad()
def disturb(model: Any, seed: int = 1) -> None:
    """Adds noise to the decoder, so that its text is right now and then."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.get_decoder().parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.device)
        weight.add_(NOISE * weight.std() * noise)


class Letters:
    """A tokenizer of one character a token, for methods that read words."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) % TEXT_IDS for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(number % 0x110000 or 1) for number in ids)


def caption(inputs: Inputs) -> list[str]:
    """The same words for every request."""
    return ["a red box"] * len(inputs["input_ids"])


def prepared(prompt: Inputs, model: Backbone) -> Inputs:
    """The prompt with its pixels in the model's number type."""
    return {**prompt, "pixel_values_videos": prompt["pixel_values_videos"].to(model.dtype)}
