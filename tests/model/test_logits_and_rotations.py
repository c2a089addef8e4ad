"""Claims about what models do to logits and positions: it is done here too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers import (
    hf_greedy,
    left_padded,
    text_input,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import saccade
from saccade.core.errors import ModelError
from saccade.core.tree import ROOT
from saccade.engine.request import Request, current_backbone
from saccade.engine.scheduler import Scheduler
from saccade.methods import resolve
from saccade.model import generate_check
from saccade.model.backbone import Backbone
from saccade.model.generate_check import check_against_generate

TOKENS = 24

METHODS = ("ar", "sd", "sd-tree", "early-exit")

METHODS_ARGS: dict[str, str] = {"early-exit": "sd/drafter=early-exit"}


def _answer(model: Any, inputs: Any, method: str, draft: Any = None) -> list[int]:
    method = METHODS_ARGS.get(method, method)
    return list(saccade.run(model, inputs, draft=draft, method=method, max_new_tokens=TOKENS).ids)


# -- logits ------------------------------------------------------------------------------------


BASE: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)

SCALED: dict[str, dict[str, Any]] = {
    "granite": dict(
        logits_scaling=8.0,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
    ),
    "cohere": dict(logit_scale=0.0625),
    "hyperclovax": dict(logits_scaling=0.125),
    "nanochat": {},
    "llama": {},
}


def _random_model(kind: str, std: float = 0.3, **more: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        kind, **{**BASE, "max_position_embeddings": 512, **more}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=std)
    return model


@pytest.mark.representatives(1)
@pytest.mark.parametrize("kind", ["gpt_neox", "opt", "biogpt", "jetmoe", "persimmon"])
def test_the_cache_has_the_heads_of_the_layers_and_not_those_of_the_config(kind):
    """Claim: a config may name a number of key heads that its model does not read. Answers are
    generate()'s all the same, and the cache has the heads that the layers really have."""
    model, inputs = _random_model(kind), text_input(3)
    assert model.config.num_key_value_heads == 2
    greedy = hf_greedy(model, inputs, TOKENS)
    assert _answer(model, inputs, "ar") == greedy
    assert _answer(model, inputs, "sd", model) == greedy
    assert Backbone.of(model).kv_heads == BASE["num_attention_heads"]


def test_a_draft_whose_layers_always_fail_costs_speed_only():
    """Claim: a draft whose modules raise at every forward is no reason to refuse the answer, which
    goes on by plain decoding and says why."""
    target, draft = _random_model("gpt_neox"), _random_model("gpt_neox")
    draft.gpt_neox.layers[0].register_forward_hook(lambda *_: 1 / 0)
    draft.gpt_neox.layers[1].forward = lambda *_, **__: 1 / 0
    inputs = text_input(3)
    result = saccade.run(target, inputs, draft=draft, method="sd", max_new_tokens=TOKENS)
    assert list(result.ids) == hf_greedy(target, inputs, TOKENS)
    assert result.fallback_reason is not None and "division" in result.fallback_reason


class ScalingDecoder(transformers.LlamaModel):
    """Returns how much the head must scale its output, beside the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out["scale"] = torch.tensor(0.5)
        return out


class ScaledByItsDecoder(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = ScalingDecoder(config)

    def forward(self, **kwargs: Any) -> Any:  # type: ignore[override]
        kwargs.pop("logits_to_keep", None)
        out = self.model(**kwargs)
        logits = self.lm_head(out.last_hidden_state) * out["scale"]
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


def test_a_model_whose_head_reads_more_than_hidden_states_is_refused():
    """Claim: a model that cannot be run token by token, whatever it raises, is refused in one
    sentence that quotes it."""
    torch.manual_seed(0)
    model = ScaledByItsDecoder(transformers.LlamaConfig(**BASE, max_position_embeddings=512)).eval()
    with pytest.raises(ModelError, match=r"cannot be run token by token .*scale"):
        saccade.run(model, text_input(3), method="ar", max_new_tokens=4)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("kind", SCALED)
def test_laws_are_those_of_the_models_own_logits(kind):
    """Claim: the law of the first token and of one inside a drafted chain is the softmax of the
    model's own logits, to a total variation of 1e-4, where it scales or caps what its head gives.
    Control: what the head gives is another law (but for llama). Greedy answers are generate()'s."""
    model, inputs = _random_model(kind, **SCALED[kind]), text_input(3)
    heads: list[Any] = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: heads.append(out[0, -1])
    )
    with torch.no_grad():
        law = model(**inputs).logits[0, -1].softmax(-1)
    handle.remove()
    bare = heads[-1].softmax(-1)
    assert (float((bare - law).abs().sum()) / 2 > 0.01) is (kind != "llama")
    rounds = saccade.stream(model, inputs, method="ar", max_new_tokens=4)
    mine = next(rounds).p.logits(ROOT).softmax(-1)
    rounds.close()
    assert float((mine - law).abs().sum()) / 2 < 1e-4
    truth = hf_greedy(model, inputs, TOKENS)
    for method in METHODS:
        assert _answer(model, inputs, method, model) == truth
    rounds = saccade.stream(model, inputs, draft=model, method="sd", max_new_tokens=TOKENS)
    drafted = [round for round in rounds if len(round.tree)]
    rounds.close()
    path = drafted[0]
    text = torch.tensor([[*inputs["input_ids"][0].tolist(), truth[0], path.tree.tokens[0]]])
    with torch.no_grad():
        inner = model(text).logits[0, -1].softmax(-1)
    path_law = path.p.logits(0).softmax(-1)
    assert float((path_law - inner).abs().sum()) / 2 < 1e-4


def test_a_cap_that_a_prompt_does_not_reach_is_seen():
    """Claim: logits that are capped far above what a few tokens give are still the model's own: the
    head is tried with hidden states far too large."""
    model = _random_model("nanochat", std=0.02)
    target = current_backbone(model)
    check_against_generate(target)
    assert target.needs_model_for_logits


# -- rotary rules ------------------------------------------------------------------------------

SAME, FARTHER = [1.0] * 8, [4.0] * 8

LONG = dict(original_max_position_embeddings=64)

ROTARY: dict[str, tuple[int, dict[str, Any]]] = {
    "dynamic": (64, dict(rope_type="dynamic", factor=4.0)),
    "longrope": (
        256,
        dict(rope_type="longrope", factor=4.0, short_factor=SAME, long_factor=FARTHER, **LONG),
    ),
    "yarn": (256, dict(rope_type="yarn", factor=4.0, **LONG)),
    "linear": (256, dict(rope_type="linear", factor=4.0)),
}  # fmt: skip


def _rotary(name: str) -> Any:
    most, rule = ROTARY[name]
    parameters = dict(rope_theta=1e4, **rule)
    return _random_model("llama", max_position_embeddings=most, rope_parameters=parameters)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", ROTARY)
def test_answers_do_not_part_where_rotations_depend_on_length(name):
    """Claim: an answer that grows past the length where a rotary rule changes is generate()'s,
    plain and drafted by chains and trees. Fails if drafted tokens are rotated by the length of the
    longest of them."""
    inputs = text_input(4, length=50)
    truth = hf_greedy(_rotary(name), inputs, 40)
    for method in METHODS:
        result = saccade.run(
            _rotary(name),
            inputs,
            draft=_rotary(name),
            method=METHODS_ARGS.get(method, method),
            max_new_tokens=40,
        )
        assert [*result.ids] == truth, method


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_short_request_does_not_change_beside_or_after_a_long_one(name):
    """Claim: rotated by its own length alone: in a batch, in a scheduler, after a longer request
    over the same model, and as a later turn of a conversation."""
    most = ROTARY[name][0]
    short, long = text_input(5, length=40), text_input(6, length=min(most, 100))
    alone = [hf_greedy(_rotary(name), each, 20) for each in (short, long)]
    ids = saccade.generate(
        _rotary(name), left_padded([short, long]), method="ar", max_new_tokens=20
    )
    assert [row[-20:].tolist() for row in ids] == alone
    model = _rotary(name)
    scheduler = Scheduler(current_backbone(model), resolve("ar"))
    for each in (long, short):
        scheduler.join(Request.of(current_backbone(model), each, max_new_tokens=20))
    events = [event for _ in range(100) for event in scheduler.step()]
    answers = {event.number: [*event.result.ids] for event in events if event.result is not None}
    assert answers == {0: alone[1], 1: alone[0]}
    assert [*saccade.run(model, short, method="ar", max_new_tokens=20).ids] == alone[0]
    talk = saccade.Conversation(_rotary(name), method="ar")
    first = talk.run(short, max_new_tokens=20)
    ids = torch.cat([short["input_ids"], torch.tensor([first.ids]), long["input_ids"][:, :3]], 1)
    longer = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    second = talk.run(longer, max_new_tokens=10)
    assert [*second.ids] == hf_greedy(_rotary(name), longer, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_of_a_deep_model_is_no_other_answer(dtype):
    """Claim: in half precision logits that are a tenth of the largest one apart, at random, are
    taken for rounded ones, and in fp32 they are not. Logits that are shifted by one id, or that are
    halved, are other logits in both. Fails where a deep model is refused for its depth."""
    theirs = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    rounded = theirs + 0.1 * theirs.abs().amax(1, keepdim=True) * noise / noise.abs().amax()
    assert bool(generate_check._agree(rounded, theirs, dtype).all()) == (dtype == torch.bfloat16)
    for other in (theirs.roll(1, 1), theirs / 2):
        assert not generate_check._agree(other, theirs, dtype).any()
    assert generate_check._agree(theirs, theirs, dtype).all()
