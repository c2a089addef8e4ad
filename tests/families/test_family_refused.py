"""Models that only show at run time that Saccade cannot follow them, and those of no known form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
import zoo

import saccade
from saccade.core.errors import ModelError
from saccade.model.backbone import Backbone

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]

IMAGE = 319
TEXT: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)


def inputs(*shape: int, **more: Any) -> dict[str, Any]:
    ids = torch.tensor([[IMAGE] * 4 + [5, 6, 7]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(*shape),
        **more,
    }


def mllama() -> Any:
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_global_layers=1,
        attention_heads=2,
        image_size=28,
        patch_size=14,
        vision_output_dim=64,
        intermediate_layers_indices=[0],
        max_num_tiles=1,
        supported_aspect_ratios=[[1, 1]],
    )
    rope = dict(rope_type="default", rope_theta=1e4)
    text = dict(cross_attention_layers=[1], rope_parameters=rope, **TEXT)
    return hf.MllamaForConditionalGeneration(
        hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    )


MLLAMA = inputs(
    1, 1, 1, 3, 28, 28,
    aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long),
    aspect_ratio_mask=torch.ones(1, 1, 1, dtype=torch.long),
    cross_attention_mask=torch.ones(1, 7, 1, 1, dtype=torch.long),
)  # fmt: skip
UNFOLLOWED = [
    (mllama, MLLAMA, "cross.attention"),
]


@pytest.mark.parametrize(("build", "prompt", "reason"), UNFOLLOWED)
@pytest.mark.parametrize("method", ["ar", "std"])
def test_what_reads_otherwise_is_refused_at_the_first_prompt(
    build: Callable[[], Any], prompt: dict[str, Any], reason: str, method: str
) -> None:
    """Claim: a model whose prompt is no list of tokens each seeing those before it is refused in
    one sentence, before its layers read the prompt. Fails if it answers, wrongly and in silence."""
    model = build().eval()
    lengths: set[int] = set()
    model.get_decoder().layers[0].register_forward_hook(
        lambda layer, args, out: lengths.add(args[0].shape[1])
    )
    with pytest.raises(ModelError, match=reason) as caught:
        saccade.run(model, prompt, method=method, max_new_tokens=4, do_sample=False)
    assert "\n" not in str(caught.value) and type(model).__name__ in str(caught.value)
    assert prompt["input_ids"].shape[1] not in lengths  # Shorter texts of our own may be read.


@pytest.mark.parametrize(("build", "prompt", "reason"), UNFOLLOWED)
def test_control_transformers_runs_them_on_these_inputs(
    build: Callable[[], Any], prompt: dict[str, Any], reason: str
) -> None:
    """Claim: transformers itself answers with these models and inputs.
    Fails if they were refused for being malformed."""
    torch.manual_seed(0)
    out = build().eval()(**prompt, use_cache=False)
    assert out.logits.shape[:2] == (1, 7) and bool(out.logits.isfinite().all()), reason


def test_as_a_draft_it_costs_speed_alone() -> None:
    """Claim: such a model as a draft ends drafting with its reason, and the answer is the target's.
    Fails if a draft's form can stop an answer."""
    target = zoo.member("llava-1.5")
    target_inputs = zoo.make_inputs(target, "image")
    result = saccade.run(
        target.backbone,
        target_inputs,
        draft=mllama().eval(),
        draft_inputs=MLLAMA,
        method="sd",
        max_new_tokens=8,
        do_sample=False,
    )
    assert re.search("cross.attention", str(result.fallback_reason))
    assert list(result.ids) == zoo.hf_greedy(target, target_inputs, 8)


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2))


def opt() -> Any:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=320,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        )
    )


def blip() -> Any:
    return hf.BlipForConditionalGeneration(
        hf.BlipConfig(text_config=TEXT | dict(is_decoder=True), vision_config=VISION)
    )


@pytest.mark.parametrize("build", [gpt2, opt, blip])
def test_decoders_of_another_form_are_refused(build: Callable[[], Any]) -> None:
    """Claim: a model without decoder layers of the known form is refused as it is wrapped, in one
    sentence that names its class. Fails if an AttributeError comes through."""
    model = build().eval()
    with pytest.raises(ModelError, match="no decoder of layers") as caught:
        Backbone(model)
    assert "\n" not in str(caught.value) and type(model).__name__ in str(caught.value)
