"""Claims about models changed in memory: the answer is their own ``generate``'s, or a refusal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from helpers import (
    hf_greedy,
    input_for,
    llama,
    noisy,
    onevision,
    qwen25,
    text_input,
)
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import saccade
from saccade.core.errors import ModelError
from saccade.engine.request import Request, current_backbone
from saccade.engine.scheduler import Scheduler
from saccade.methods import resolve
from saccade.model.backbone import Backbone

TOKENS = 24

METHODS = ("ar", "sd", "sd-tree", "early-exit")

METHODS_ARGS: dict[str, str] = {"early-exit": "sd/drafter=early-exit"}


# -- what is done to a model -------------------------------------------------------------------


def _layers(model: Any) -> Any:
    return model.get_decoder().layers


def _noise(weight: torch.Tensor, seed: int = 7, amount: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(weight.shape, generator=generator) * weight.std() * amount


class LowRank(nn.Module):
    """A linear module with a low-rank update beside it, as adapters are."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(3)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=generator) * 0.2)

    @property
    def weight(self) -> nn.Parameter:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


class Doubled(nn.Linear):
    """A subclass that multiplies with something else than its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.linspace(0.5, 2, x.shape[-1]))


class RoundsActivations(nn.Linear):
    """Int8 activations, a scale for each row, as torchao's dynamic quantisation rounds them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / scale).round() * scale)


def _swap(model: Any, path: str, make: Callable[[Any], Any]) -> None:
    parent, _, name = path.rpartition(".")
    owner = model.get_decoder().get_submodule(parent) if parent else model
    setattr(owner, name, make(getattr(owner, name)))


def _as(kind: type[nn.Linear], old: nn.Linear) -> nn.Linear:
    new = kind(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict(old.state_dict())
    return new


def _new_head(model: Any) -> None:
    old = model.get_output_embeddings()
    new = _as(nn.Linear, old)
    new.weight.data.copy_(old.weight + _noise(old.weight))
    model.set_output_embeddings(new)


def _new_embeddings(model: Any) -> None:
    old = model.get_input_embeddings()
    new = nn.Embedding(*old.weight.shape)
    new.weight.data.copy_(old.weight + _noise(old.weight))
    model.set_input_embeddings(new)


def _assign(weight: Any, factor: float = 1.0) -> None:
    weight.data = weight.data * factor + _noise(weight.data)


def _in_place(weight: Any) -> None:
    with torch.no_grad():
        weight[:, 3] = 2.0


def _by_data(weight: Any) -> None:
    weight.data[:, 3] = 2.0


def _row_by_data(weight: Any) -> None:
    weight.data[5] = 1.0


def _delete_layer(model: Any, which: int) -> None:
    del _layers(model)[which]


def _repeat_first_layer(model: Any) -> None:
    _layers(model).append(_layers(model)[0])
    model.config.num_hidden_layers = 3


def _keep_first_layer(model: Any) -> None:
    model.get_decoder().layers = _layers(model)[:1]


def _hook(module: Any, hook: Callable[..., Any], pre: bool = False, kwargs: bool = False) -> None:
    if pre:
        module.register_forward_pre_hook(hook, with_kwargs=kwargs)
    else:
        module.register_forward_hook(hook)


def _scaled(module: Any, args: Any, out: Any) -> Any:
    return (out[0] * 1.25, *out[1:]) if isinstance(out, tuple) else out * 1.25


def _scaled_in(module: Any, args: Any) -> Any:
    return (args[0] * 1.25, *args[1:])


def _scaled_logits(module: Any, args: Any, out: Any) -> Any:
    out.logits = torch.tanh(out.logits) * torch.linspace(0.2, 3, out.logits.shape[-1])
    return out


def _last_row(module: Any, args: Any, out: Any) -> Any:
    changed = out.clone()
    changed[:, -1] *= 1.5
    return changed


def _prompt_only(module: Any, args: Any, out: Any) -> Any:
    return out * 1.5 if out.shape[1] > 1 else out


def _other_ids(module: Any, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 200}


def _look(module: Any, args: Any, out: Any) -> None:
    """A hook that only looks."""


def _patch(module: Any, change: Callable[[Any], Any]) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: change(own(*args, **kwargs))


def _patch_method(module: Any) -> None:
    own = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs).roll(1, -1)

    module.forward = MethodType(forward, module)


def _patch_class(kind: type, monkeypatch: Any) -> None:
    own = kind.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs) * 1.1

    monkeypatch.setattr(kind, "forward", forward)


def _patch_function(model: Any, monkeypatch: Any) -> None:
    place = type(_layers(model)[0]).__module__

    def no_rotation(q: Any, k: Any, *more: Any, **others: Any) -> Any:
        return q, k

    monkeypatch.setattr(f"{place}.apply_rotary_pos_emb", no_rotation)


def _weak_attention(module: Any, *states: Any, **named: Any) -> Any:
    return sdpa_attention_forward(module, *states, **{**named, "scaling": 0.01})


def _attend_by_name(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "weak", _weak_attention)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "weak", sdpa_mask)
    model.config._attn_implementation = "weak"


def _rolled(module: Any, args: Any, out: Any) -> Any:
    return out.roll(1, -1)


def _rolled_in(module: Any, args: Any) -> Any:
    return (args[0].roll(1, -1),)


def _double(layer: Any) -> Any:
    return (layer[0] * 1.25, *layer[1:]) if isinstance(layer, tuple) else layer * 1.25


def _quantize(model: Any, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.get_decoder(), getattr(quantization, name)())


def _quantize_head(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(
        model,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: name == "lm_head",
    )


def _lora(targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)


def _add_adapter(model: Any, targets: list[str]) -> None:
    torch.manual_seed(5)
    model.add_adapter(_lora(targets))
    model.eval()


def _load_adapter(model: Any, folder: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    other = peft.get_peft_model(copy.deepcopy(llama()), _lora(["k_proj", "down_proj"]))
    other.save_pretrained(str(folder))
    model.load_adapter(str(folder))
    model.eval()


def _get_peft_model(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    return peft.get_peft_model(model, _lora(["v_proj", "up_proj"])).eval()


def _merged(model: Any) -> Any:
    return _get_peft_model(model).merge_and_unload().eval()


def _setting(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


@contextmanager
def _everywhere() -> Iterator[None]:
    """A hook on every module of every model."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        return out * 1.1 if type(module) is nn.Linear else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Tools:
    """What a change may need beside the model."""

    monkeypatch: Any
    folder: Any
    request: Any

    def enter(self, manager: Any) -> None:
        """Enters a context that ends with the test."""
        manager.__enter__()
        self.request.addfinalizer(lambda: manager.__exit__(None, None, None))


@dataclass(frozen=True)
class Change:
    """``apply`` changes a model in place, or returns the one that takes its place."""

    apply: Callable[[Any, Tools], Any]
    refusal: str | None = None  # what the sentence of a refusal says of the target
    seen: bool = True  # whether generate() answers otherwise afterwards


def _of(path: str) -> Callable[[Any], Any]:
    return lambda model: model.get_decoder().get_submodule(path)


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


W = "layers.1.mlp.down_proj"

CHANGES: dict[str, Change] = {
    # weights
    "head weight replaced": Change(lambda m, t: _assign(_head(m).weight)),
    "norm weight replaced": Change(lambda m, t: _assign(m.get_decoder().norm.weight, 0.5)),
    "layer norm replaced": Change(
        lambda m, t: _assign(_of("layers.1.input_layernorm")(m).weight, 0.5)
    ),
    "v_proj weight replaced": Change(
        lambda m, t: _assign(_of("layers.1.self_attn.v_proj")(m).weight)
    ),
    "column edited in place": Change(lambda m, t: _in_place(_of(W)(m).weight)),
    "column edited by data": Change(lambda m, t: _by_data(_of(W)(m).weight)),
    "row edited by data": Change(lambda m, t: _row_by_data(_of(W)(m).weight)),
    "head column by data": Change(lambda m, t: _by_data(_head(m).weight)),
    "gate column by data": Change(lambda m, t: _by_data(_of("layers.0.mlp.gate_proj")(m).weight)),
    "a new parameter": Change(
        lambda m, t: setattr(_of(W)(m), "weight", nn.Parameter(_of(W)(m).weight * -1))
    ),
    "all weights loaded": Change(lambda m, t: m.load_state_dict(llama(3).state_dict())),
    "in double": Change(lambda m, t: m.double(), seen=False),
    # modules
    "a new head": Change(lambda m, t: _new_head(m)),
    "new input embeddings": Change(lambda m, t: _new_embeddings(m)),
    "fewer ids": Change(lambda m, t: m.resize_token_embeddings(250), seen=False),
    "more ids": Change(lambda m, t: m.resize_token_embeddings(300), seen=False),
    "a subclass of Linear": Change(lambda m, t: _swap(m, W, lambda old: _as(Doubled, old))),
    "a head of a subclass": Change(lambda m, t: _swap(m, "lm_head", lambda old: _as(Doubled, old))),
    "an adapter in the last layer": Change(
        lambda m, t: _swap(m, "layers.1.self_attn.o_proj", LowRank)
    ),
    "an adapter on the head": Change(lambda m, t: _swap(m, "lm_head", LowRank)),
    "last layer deleted": Change(lambda m, t: _delete_layer(m, 1)),
    "first layer deleted": Change(lambda m, t: _delete_layer(m, 0), refusal="layer_idx"),
    "a slice of the layers": Change(lambda m, t: _keep_first_layer(m)),
    "a layer twice": Change(lambda m, t: _repeat_first_layer(m), refusal="layer_idx"),
    "another activation": Change(
        lambda m, t: _setting(_of("layers.0.mlp")(m), "act_fn", nn.GELU())
    ),
    # hooks
    **{
        f"hook on {name}": Change(lambda m, t, path=path: _hook(_of(path)(m), _scaled))
        for name, path in {
            "a layer": "layers.0", "an MLP": "layers.1.mlp", "attention": "layers.0.self_attn",
            "a projection": "layers.1.self_attn.k_proj", "a layer norm": "layers.1.input_layernorm",
            "an activation": "layers.0.mlp.act_fn",
        }.items()
    },
    **{
        f"pre-hook on {name}": Change(
            lambda m, t, path=path: _hook(_of(path)(m), _scaled_in, pre=True)
        )
        for name, path in {
            "a layer": "layers.1", "an MLP": "layers.0.mlp", "a projection": "layers.0.mlp.up_proj",
        }.items()
    },
    "hook on the last norm": Change(lambda m, t: _hook(m.get_decoder().norm, _rolled)),
    "pre-hook on the last norm": Change(
        lambda m, t: _hook(m.get_decoder().norm, _rolled_in, pre=True)
    ),
    "hook on the embeddings": Change(lambda m, t: _hook(m.get_input_embeddings(), _scaled)),
    "hook on the head": Change(lambda m, t: _hook(_head(m), _rolled)),
    "pre-hook on the head": Change(
        lambda m, t: _hook(_head(m), _rolled_in, pre=True)
    ),
    "hook on the model": Change(lambda m, t: _hook(m, _scaled_logits)),
    "pre-hook on the model": Change(
        lambda m, t: _hook(m, _other_ids, pre=True, kwargs=True), refusal="pre-hook on Llama"
    ),
    "hook on every module": Change(lambda m, t: t.enter(_everywhere())),
    "hook on the last row": Change(
        lambda m, t: _hook(_of("layers.0.mlp")(m), _last_row), refusal=r"a hook on .*\(_last_row\)"
    ),
    "hook on prompts": Change(
        lambda m, t: _hook(_of("layers.0.mlp")(m), _prompt_only), refusal="_prompt_only"
    ),
    "hook that looks": Change(lambda m, t: _hook(_of("layers.0")(m), _look), seen=False),
    # forwards
    "patched layer": Change(lambda m, t: _patch(_of("layers.0")(m), _double)),
    "patched MLP": Change(lambda m, t: _patch(_of("layers.1.mlp")(m), _double)),
    "patched projection": Change(lambda m, t: _patch(_of("layers.1.self_attn.q_proj")(m), _double)),
    "patched norm, a method": Change(lambda m, t: _patch_method(m.get_decoder().norm)),
    "patched head": Change(lambda m, t: _patch(_head(m), lambda out: out.roll(1, -1))),
    "patched model": Change(lambda m, t: _patch(m, lambda out: _scaled_logits(None, (), out))),
    "patched class of MLPs": Change(
        lambda m, t: _patch_class(type(_of("layers.0.mlp")(m)), t.monkeypatch)
    ),
    "patched Linear": Change(lambda m, t: _patch_class(nn.Linear, t.monkeypatch)),
    "patched rotation": Change(lambda m, t: _patch_function(m, t.monkeypatch)),
    "another attention by name": Change(
        lambda m, t: _attend_by_name(m, t.monkeypatch), refusal="_weak_attention"
    ),
    "another attention for sdpa": Change(
        lambda m, t: t.monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", _weak_attention),
        refusal="_weak_attention",
    ),
    # settings
    "scaled rotations": Change(
        lambda m, t: _setting(m.get_decoder().rotary_emb, "attention_scaling", 3.0)
    ),
    "attention's scale": Change(
        lambda m, t: _setting(_of("layers.1.self_attn")(m), "scaling", 0.5)
    ),
    "the last norm's epsilon": Change(
        lambda m, t: _setting(m.get_decoder().norm, "variance_epsilon", 30.0), seen=False
    ),
    "a layer norm's epsilon": Change(
        lambda m, t: _setting(_of("layers.1.input_layernorm")(m), "variance_epsilon", 30.0)
    ),
    "training and back": Change(lambda m, t: m.train().eval(), seen=False),
    "rotary frequencies": Change(lambda m, t: m.get_decoder().rotary_emb.inv_freq.mul_(0.5)),
    # precision
    "autocast": Change(
        lambda m, t: t.enter(torch.autocast("cpu", torch.bfloat16)),
        refusal="torch.autocast is on for cpu",
        seen=False,
    ),
    "int8 activations": Change(
        lambda m, t: _swap(m, W, lambda old: _as(RoundsActivations, old)),
        refusal="rounds its activations",
        seen=False,
    ),
    "torchao int8 weights": Change(lambda m, t: _quantize(m, "Int8WeightOnlyConfig"), seen=False),
    "torchao int8 head": Change(lambda m, t: _quantize_head(m), seen=False),
    "torchao int8 activations": Change(
        lambda m, t: _quantize(m, "Int8DynamicActivationInt8WeightConfig"),
        refusal="rounds its activations",
        seen=False,
    ),
    # adapters of peft
    "add_adapter, q and v": Change(lambda m, t: _add_adapter(m, ["q_proj", "v_proj"])),
    "add_adapter, MLP": Change(lambda m, t: _add_adapter(m, ["down_proj"])),
    "load_adapter": Change(lambda m, t: _load_adapter(m, t.folder)),
    "get_peft_model": Change(lambda m, t: _get_peft_model(m)),
    "merged adapter": Change(lambda m, t: _merged(m)),
}  # fmt: skip


@pytest.fixture
def tools(monkeypatch: Any, tmp_path: Any, request: Any) -> Tools:
    return Tools(monkeypatch, tmp_path, request)


def _answer(model: Any, inputs: Any, method: str, draft: Any = None) -> list[int]:
    method = METHODS_ARGS.get(method, method)
    return list(saccade.run(model, inputs, draft=draft, method=method, max_new_tokens=TOKENS).ids)


def _changed(model: Any, change: Change, tools: Tools) -> Any:
    outcome = change.apply(model, tools)
    return outcome if "generate" in dir(outcome) else model


@pytest.mark.representatives(3)
@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_target_answers_as_its_own_generate(name, used, tools):
    """Claim: whatever of the table is done to a target, before its first answer or after it, plain
    and drafted greedy answers are those of its own generate(), or a refusal names the cause.
    Control: generate() itself answers otherwise than before. Fails where weights that were fused,
    laid out or remembered go on answering, or where a hook or a patch is passed by."""
    change, inputs = CHANGES[name], text_input(2)
    model, draft = copy.deepcopy(llama()), copy.deepcopy(noisy(llama))
    before = hf_greedy(model, inputs, TOKENS)
    if used:
        assert all(_answer(model, inputs, method, draft) == before for method in METHODS)
    model = _changed(model, change, tools)
    after = hf_greedy(model, inputs, TOKENS)
    assert not change.seen or after != before, "nothing to see"
    for method in METHODS:
        if change.refusal is None:
            assert _answer(model, inputs, method, draft) == after, method
        else:
            with pytest.raises(ModelError, match=change.refusal):
                _answer(model, inputs, method, draft)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_draft_changes_no_answer(name, used, tools):
    """Claim: whatever is done to a draft, the answers stay the target's, without an error. Fails if
    a draft's change reaches the target, or if drafting with it raises."""
    change, inputs = CHANGES[name], text_input(2)
    model, draft = copy.deepcopy(llama()), copy.deepcopy(noisy(llama))
    truth = hf_greedy(model, inputs, TOKENS)
    if used:
        assert _answer(model, inputs, "sd", draft) == truth
    if name in GLOBAL:
        pytest.skip("changes the target as well")
    draft = _changed(draft, change, tools)
    for method in ("sd", "sd-tree"):
        assert _answer(model, inputs, method, draft) == truth


GLOBAL = {
    "hook on every module", "patched class of MLPs", "patched Linear", "patched rotation",
    "autocast", "another attention for sdpa",
}  # fmt: skip


def test_an_attention_function_of_the_caller_stays_registered(monkeypatch):
    """Claim: after an answer, or a refusal, transformers finds the caller's function as before,
    also where our kernels take the tower's attention over. Fails if the caller's is removed."""
    model, inputs = copy.deepcopy(qwen25()), input_for("qwen2_5_vl", 1)
    _answer(model, inputs, "ar")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", _weak_attention)
    with pytest.raises(ModelError, match="_weak_attention"):
        _answer(model, inputs, "ar")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is _weak_attention
    model.get_decoder().config._attn_implementation = "eager"
    assert _answer(model, inputs, "ar") == hf_greedy(model, inputs, TOKENS)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is _weak_attention


def test_a_changed_draft_drafts_as_it_is_now():
    """Claim: a draft is fused again after a change: one that becomes the target's equal is always
    right from then on. Fails if the old weights go on drafting."""
    model, draft, inputs = copy.deepcopy(llama()), copy.deepcopy(llama(5)), text_input(2)
    truth = hf_greedy(model, inputs, TOKENS)

    def tau() -> float:
        result = saccade.run(model, inputs, draft=draft, method="sd", max_new_tokens=TOKENS)
        assert list(result.ids) == truth
        return result.tau

    bad = tau()
    draft.load_state_dict(model.state_dict())
    assert tau() > 4 > 2 * bad


VISION: dict[str, Callable[[Any], Any]] = {
    "a tower's weight": lambda eyes: eyes.weight.data.mul_(-1),
    "a tower's column": lambda eyes: _by_data(eyes.weight),
    "a tower's hook": lambda eyes: eyes.register_forward_hook(_scaled),
    "a tower's forward": lambda eyes: _patch(eyes, lambda out: out * -1),
    "a tower's class": lambda eyes: setattr(eyes, "__class__", Doubled),
}


def _last_linear_of_eyes(model: Any) -> Any:
    inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
    linears = [each for each in model.modules() if type(each) is nn.Linear and each not in inside]
    return linears[-1]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("used", [False, True], ids=["before first use", "after first use"])
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_onevision"])
def test_a_changed_vision_tower_is_followed(family, name, used):
    """Claim: what is done to a module between pixels and the decoder shows in the answer, and a
    patched forward stays patched. Control: generate() answers otherwise than before."""
    make = {"qwen2_5_vl": qwen25, "llava_onevision": onevision}[family]
    model, draft, inputs = copy.deepcopy(make()), copy.deepcopy(noisy(make)), input_for(family, 1)
    before = hf_greedy(model, inputs, TOKENS)
    if used:
        assert _answer(model, inputs, "sd", draft) == before
    VISION[name](_last_linear_of_eyes(model))
    after = hf_greedy(model, inputs, TOKENS)
    assert after != before
    for method in ("ar", "sd"):
        assert _answer(model, inputs, method, draft) == after
    assert hf_greedy(model, inputs, TOKENS) == after


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", ["hook on a layer", "a new head", "column edited by data"])
def test_a_backbone_is_followed_as_its_model_is(name, tools):
    """Claim: whoever passes a Backbone instead of a model gets the changed model's answer too, in
    a conversation and from a scheduler as well. Fails where a cache of the old model answers."""
    change, inputs, model = CHANGES[name], text_input(2), copy.deepcopy(llama())
    target = Backbone(model)
    talk, scheduler = saccade.Conversation(target, method="ar"), Scheduler(target, resolve("ar"))

    def answers() -> list[list[int]]:
        scheduler.join(Request.of(target, inputs, max_new_tokens=TOKENS))
        events = [event for _ in range(TOKENS + 1) for event in scheduler.step()]
        (scheduled,) = [event.result.ids for event in events if event.result is not None]
        return [
            _answer(target, inputs, "ar"),
            [*talk.run(inputs, max_new_tokens=TOKENS).ids],
            [*scheduled],
        ]

    assert answers() == [hf_greedy(model, inputs, TOKENS)] * 3
    _changed(model, change, tools)
    assert answers() == [hf_greedy(model, inputs, TOKENS)] * 3


def test_a_target_changed_while_others_answer_is_refused():
    """Claim: a scheduler that is half way with an answer takes no request for the changed model,
    and does when it is done."""
    model, inputs = copy.deepcopy(llama()), text_input(2)
    scheduler = Scheduler(Backbone(model), resolve("ar"))
    request = Request.of(current_backbone(model), inputs, max_new_tokens=TOKENS)
    number = scheduler.join(request)
    [*scheduler.step()]
    _new_head(model)
    with pytest.raises(ModelError, match="changed while answers"):
        scheduler.join(request)
    scheduler.leave(number)
    scheduler.join(request)


def test_an_unchanged_model_keeps_its_backbone():
    """Claim: answers, generate(), training mode and hidden states recorded in between are no
    changes: nothing is fused twice. Control: a weight written in place is one."""
    model, inputs = copy.deepcopy(qwen25()), input_for("qwen2_5_vl", 1)
    first = current_backbone(model)
    _answer(model, inputs, "ar")
    hf_greedy(model, inputs, 4)
    model.train().eval()
    with torch.no_grad():
        model(**inputs, output_hidden_states=True)
    _answer(model, inputs, "sd", copy.deepcopy(noisy(qwen25)))
    assert current_backbone(model) is first
    with torch.no_grad():
        _of(W)(model).weight.mul_(1.0)
    assert current_backbone(model) is not first


def test_weights_trained_in_place_are_not_stacked_twice():
    """Claim: when only numbers were changed, projections stay where they were stacked."""
    model = copy.deepcopy(llama())
    first = current_backbone(model)
    with torch.no_grad():
        _of("layers.0.self_attn.q_proj")(model).weight.mul_(1.1)
    second = current_backbone(model)
    places = [each.fused.layers[0].qkv.weight.data_ptr() for each in (first, second)]
    assert second is not first and places[0] == places[1]
