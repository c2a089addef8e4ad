"""Makes random models of published shapes on the device, and what methods need beside them.

They are for ``python -m lab accept``, which checks whether Saccade is right and fast on a GPU. No
weights and no tokenizer are read, so a machine without a network needs only this repository.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig

from lab.checkpoints.heads import eagle3_settings, random_eagle3
from lab.hardware.gpu import build_model, published_config
from saccade.bench.hardware.published import CONFIGS
from saccade.core.prompt import Inputs
from saccade.model.backbone import Backbone
from saccade.model.heads.head import Head, make_eagle3_head

SHAPE = "Qwen2.5-VL-7B"
TEXT_IDS = 1000  # Ids below this are text; all others get the logit 0 from the small pair.
HEAD_IDS = 500  # How many ids a random draft head knows.
CONFIDENCE_TOKENS = 32  # The confidence of the large draft is measured on so many hidden states.
MAX_SHARPNESS = 4096.0  # The largest factor of the large draft's logits.
# The noise of the small draft's weights, as a share of each weight's standard deviation.
NOISE = 0.05
SHARPNESS = 4.0  # Scale of the small pair's logits; with less, random text repeats itself.

HALF_A_BILLION = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The shape of Qwen2.5-0.5B, of which no vision-language model is published."""


@dataclass
class Models:
    """The models of one run of ``python -m lab accept``, each made when it is first used.

    There are two pairs. The small pair (:meth:`small_pair`) has few layers and shows whether
    answers are right. The large pair (``target`` and ``draft``) has published sizes and shows how
    fast they are.
    """

    device: torch.device
    # Makes both pairs tiny, for trying the command itself on a CPU. Their speed means nothing.
    small: bool = False
    _small_pairs: dict[torch.dtype, tuple[Backbone, Backbone]] = field(default_factory=dict)

    @property
    def fast_type(self) -> torch.dtype:
        """The number type of the large pair: bfloat16, or float32 for small shapes."""
        return torch.float32 if self.small else torch.bfloat16

    def small_pair(self, dtype: torch.dtype) -> tuple[Backbone, Backbone]:
        """Returns the small pair: a target whose text varies, and a noisy copy as its draft.

        Its weights are the same for every number type, up to rounding.
        """
        if dtype not in self._small_pairs:
            config = small_config(self.small)
            with torch.device(self.device):
                target = build_model(config, self.device, torch.float32).model
            randomize(target)
            draft = copy.deepcopy(target)
            add_noise(draft)
            self._small_pairs[dtype] = Backbone(target.to(dtype)), Backbone(draft.to(dtype))
        return self._small_pairs[dtype]

    def target_config(self) -> Any:
        """Returns the config of the large pair's target."""
        if self.small:
            return small_config(tiny=True)
        return CONFIGS[SHAPE]()

    def draft_config(self) -> Any:
        """Returns the config of the large pair's draft, with about half a billion weights.

        Its vision tower is cut to one layer.
        """
        if self.small:
            config = small_config(tiny=True)
            config.text_config.num_hidden_layers = 1
            config.text_config.layer_types = config.text_config.layer_types[:1]
            return config
        config = published_config(SHAPE)
        text = config.text_config
        for name, value in HALF_A_BILLION.items():
            setattr(text, name, value)
        text.layer_types = text.layer_types[: text.num_hidden_layers]
        # A head has 64 numbers, half as many as a 7B's, so positions rotate 32 pairs of them.
        sections = [8, 12, 12]
        text.rope_parameters = {**text.rope_parameters, "mrope_section": sections}
        config.vision_config.out_hidden_size = text.hidden_size
        return config

    @cached_property
    def target(self) -> Backbone:
        return build_model(self.target_config(), self.device, self.fast_type)

    @cached_property
    def draft(self) -> Backbone:
        return build_model(self.draft_config(), self.device, self.fast_type)

    def head(self, target: Backbone) -> Head:
        """Returns an EAGLE-3 head of random weights for a target."""
        settings = eagle3_settings(target, "specforge", HEAD_IDS)
        tensors = random_eagle3(target, "specforge", HEAD_IDS)
        return make_eagle3_head(target, settings, tensors, "a random head")


def small_config(tiny: bool) -> Any:
    """Returns the config of a shrunken 7B; ``tiny`` makes it small enough for a CPU."""
    config = published_config(SHAPE, tiny=True)
    if not tiny:
        text = config.text_config
        text.hidden_size, text.intermediate_size = 1024, 2048
        text.num_attention_heads, text.num_key_value_heads = 8, 2
        text.num_hidden_layers = 4
        text.layer_types = ["full_attention"] * 4
        config.vision_config.out_hidden_size = 1024
    return config


@torch.no_grad()
def randomize(model: Any, seed: int = 0) -> None:
    """Sets random weights whose logits are far apart, so that no answer depends on a near-tie.

    Ids from ``TEXT_IDS`` on get the logit 0, and ``generate`` becomes greedy.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: torch.Tensor, mean: float, spread: float) -> None:
        # Noise is drawn on the CPU, where a seed gives the same numbers on every machine.
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_((mean + spread * noise).to(device))

    head = model.get_output_embeddings().weight
    embeddings = model.get_input_embeddings().weight
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
def add_noise(model: Any, seed: int = 1) -> None:
    """Adds noise to the decoder, so that a draft made from the target is only sometimes right."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.get_decoder().parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.device)
        weight.add_(NOISE * weight.std() * noise)


@torch.no_grad()
def set_confidence(draft: Backbone, confidence: float) -> float:
    """Scales a random draft's last norm, so that its likeliest next token has this probability.

    That is a mean over random hidden states. The next tokens of a random model are almost equally
    likely, and ``auto`` expects nothing of a draft that is so unsure. Returns the mean probability
    that was reached. It is less than ``confidence`` where ``MAX_SHARPNESS`` is not enough, and more
    where the draft was surer before.
    """
    norm = draft.text.norm.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(CONFIDENCE_TOKENS, norm.numel(), generator=generator)
    logits = draft.logits((hidden.to(norm.device) * norm.float()).to(norm.dtype)).float()

    def reached(sharpness: float) -> float:
        return float((sharpness * logits).softmax(-1).amax(-1).mean())

    # The probability grows with the sharpness, so bisection finds the sharpness.
    low, high = 1.0, MAX_SHARPNESS
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if reached(middle) < confidence else (low, middle)
    norm.mul_(high)
    return reached(high)


class LetterTokenizer:
    """A tokenizer with one token a character, for methods that read words."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) % TEXT_IDS for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(number % 0x110000 or 1) for number in ids)


def caption(inputs: Inputs) -> list[str]:
    """Returns the same caption for every request."""
    return ["a red box"] * len(inputs["input_ids"])


def with_model_dtype(prompt: Inputs, model: Backbone) -> Inputs:
    """Returns the prompt with its pixels in the model's number type."""
    return {**prompt, "pixel_values_videos": prompt["pixel_values_videos"].to(model.dtype)}
