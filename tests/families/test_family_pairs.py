"""Targets and drafts that differ, text-only pairs, and models that are refused before any work."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from helpers import dealt, noisy, randomize
from transformers import AutoTokenizer

import saccade
from lab import checkpoints
from lab.checkpoints import Size
from saccade import inputs as models
from saccade.core.errors import ModelError
from saccade.inputs import Loaded, pair_check
from saccade.model.backbone import Backbone

COUNT = 12
METHODS = ("sd", "sd-tree", "specvlm", "sage")
FEW = ("sd", "specvlm")

pytestmark = pytest.mark.usefixtures("unchecked")


def lossless(target: Loaded, draft: Loaded, kinds: tuple[str, ...], methods: Any) -> Counter[str]:
    """Every answer is ``generate``'s, and drafts were judged; how many were accepted or not."""
    pair_check.check_pair(target, draft)
    counted: Counter[str] = Counter()
    for seed, kind in enumerate(kinds):
        inputs, theirs = zoo.case(target, kind, seed)
        theirs = theirs[:COUNT]
        assert zoo.varied(theirs)
        for method in methods:
            result = zoo.run(target, draft, inputs, method, COUNT)
            assert list(result.ids) == theirs, (kind, method)
            assert result.fallback_reason is None, (kind, method)
            assert any(round.tokens for round in result.rounds), (kind, method)
            counted.update(zoo.tally(result))
    return counted


# -- 7: sizes ----------------------------------------------------------------------------------

TEMPTING = 3.0  # times the spread of a row that is likely: such ids would win if they were let in


@cache
def padded(family: str, noise: float, rows: int) -> Loaded:
    """A model with another number of rows; new ones stand for no token but look likely."""
    loaded = zoo.member(family, noise=noise)
    model = copy.deepcopy(loaded.backbone.model)
    before = loaded.backbone.vocab
    model.resize_token_embeddings(rows, mean_resizing=False)
    if rows > before:
        generator = torch.Generator().manual_seed(rows)
        head = model.get_output_embeddings().weight.data
        spread = TEMPTING * float(head[:200].std())
        head[before:] = spread * torch.randn(rows - before, head.shape[1], generator=generator)
    return Loaded(f"{family}, {rows} rows", Backbone(model), loaded.processor)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("family", "rows"), dealt(zoo.FAMILIES, [300, 384]))
def test_vocabularies_padded_differently(family: str, rows: int) -> None:
    """Claim: a draft with fewer rows than the target, or with more that it would rather say, is
    right now and then and changes no token.
    Fails if ids one of them lacks are proposed, or laws of different lengths are compared."""
    target, draft = zoo.member(family), padded(family, zoo.NOISE, rows)
    assert target.backbone.vocab == 320 and draft.backbone.vocab == rows
    counted = lossless(target, draft, zoo.kinds(family)[:1], FEW)
    assert counted["accepted"] and counted["refused"]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "llava-onevision"])
def test_control_the_padded_draft_would_say_ids_the_target_lacks(family: str) -> None:
    """Claim: alone, the padded draft answers with ids past the target's last row.
    Fails if nothing had to be kept out above."""
    draft = padded(family, zoo.NOISE, 384)
    inputs = zoo.make_inputs(draft, "image")
    result = saccade.run(draft.backbone, inputs, method="ar", max_new_tokens=8, do_sample=False)
    assert max(result.ids) >= 320


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("family", "size"), dealt(zoo.FAMILIES, [Size(1, 128, 320), Size(2, 192, 320)])
)
def test_drafts_of_another_width_and_depth(family: str, size: Size) -> None:
    """Claim: a draft of a third of the depth, or half as wide again, drafts and changes no token.
    Fails if one model's embeddings, keys or positions reach the other."""
    target = zoo.member(family, size=Size(3, 128, 320))
    draft = zoo.member(family, seed=1, size=size)
    assert lossless(target, draft, zoo.kinds(family)[:1], ("specvlm",))["refused"]


def families_with(tokens: str) -> list[tuple[str, str]]:
    """Pairs of different families with the same special tokens."""
    alike = [
        name
        for name in zoo.FAMILIES
        if dict(checkpoints.FAMILIES[name].tokens) == dict(checkpoints.FAMILIES[tokens].tokens)
    ]
    return [(one, two) for one in alike for two in alike if one != two]


MIXED = [
    *families_with("qwen2-vl"),
    *families_with("llava-onevision"),
    *families_with("llava-1.5"),
]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("target", "draft"), MIXED)
def test_pairs_of_different_families(target: str, draft: str) -> None:
    """Claim: a draft of another family with the same tokenizer is harmless: either it works on the
    target's inputs, or drafting ends with a reason; the answer is the target's.
    Fails if an input made for one family breaks the answer."""
    mine, theirs = zoo.member(target), zoo.member(draft, seed=1)
    pair_check.check_pair(mine, theirs)
    inputs, expected = zoo.case(mine, "image")
    result = zoo.run(mine, theirs, inputs, "specvlm", COUNT)
    assert list(result.ids) == expected[:COUNT]
    worked = any(round.tokens for round in result.rounds)
    assert worked == (result.fallback_reason is None), result.fallback_reason


@pytest.mark.representatives(1)
@pytest.mark.parametrize("kind", ["image", "images", "video", "videos", "both"])
def test_a_qwen2_draft_for_a_qwen25_target(kind: str) -> None:
    """Claim: this pair drafts to the end on every kind of prompt. Fails if inputs one family knows
    and the other does not (seconds per grid) stop the draft."""
    target, draft = zoo.member("qwen2.5-vl"), zoo.member("qwen2-vl", seed=1)
    assert lossless(target, draft, (kind,), METHODS)["refused"]


def test_a_different_tokenizer_is_refused() -> None:
    """Claim: a pair with different tokens is refused, naming the first id that differs, both its
    tokens and both models. Fails if such a pair is let through or the message does not help."""
    target, draft = zoo.member("qwen2-vl"), zoo.member("llava-1.5")
    theirs = {i: t for t, i in draft.tokenizer.get_vocab().items()}
    mine = {i: t for t, i in target.tokenizer.get_vocab().items()}
    first = min(i for i in mine | theirs if mine.get(i) != theirs.get(i))
    with pytest.raises(ModelError) as caught:
        pair_check.check_pair(target, draft)
    reason = str(caught.value)
    assert f"id {first}" in reason and repr(theirs[first]) in reason and repr(mine[first]) in reason
    assert target.name in reason and draft.name in reason


def retold(tokenizer: Any, old: str, new: str) -> Any:
    """A copy of a tokenizer that writes one of its special tokens otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in Path(folder).iterdir():
            file.write_text(file.read_text().replace(old, new))
        return AutoTokenizer.from_pretrained(folder)


def test_one_token_is_enough_to_refuse() -> None:
    """Claim: two tokenizers that agree but for one token are told apart, either way round; two
    copies of one are not. Fails if only sizes, or only letters, are compared."""
    one, other = zoo.member("llama"), zoo.member("llama", noise=zoo.NOISE)
    pair_check.check_pair(one, other)
    number = one.tokenizer.get_vocab()["<|im_start|>"]
    changed = Loaded("changed", other.backbone, retold(one.tokenizer, "im_start", "im_begin"))
    for pair in ((one, changed), (changed, one)):
        with pytest.raises(ModelError, match=rf"id {number} .*im_"):
            pair_check.check_pair(*pair)


# -- 8: text only ------------------------------------------------------------------------------


@pytest.mark.extra
def test_a_text_only_pair() -> None:
    """Claim: a Llama pair answers as ``generate`` does with sd, sage and lookup, and a draft that
    is nearly the target has tokens accepted and refused. Fails if a method needs a video."""
    target, draft = zoo.member("llama"), zoo.draft_of("llama")
    counted = lossless(target, draft, ("text",) * 4, ("sd", "sage"))
    assert counted["accepted"] and counted["refused"]


def test_lookup_finds_its_drafts_in_the_text() -> None:
    """Claim: lookup, which needs no draft model, answers as ``generate`` does, and finds something
    to draft in a prompt that repeats itself. Fails if the answer changes or nothing is drafted."""
    target = zoo.member("llama")
    inputs = models.ask(target, "red box, blue box. " * 8)
    expected = zoo.hf_greedy(target, inputs, 96)
    result = saccade.run(
        target.backbone, inputs, method="lookup", max_new_tokens=96, do_sample=False
    )
    assert list(result.ids) == expected and result.fallback_reason is None
    assert any(round.tokens for round in result.rounds)


# -- 9: windows and states, and what is refused ------------------------------------------------


def tiny(**more: Any) -> dict[str, Any]:
    return dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        **more,
    )


def gemma3() -> Any:
    return hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**tiny(sliding_window=8, tie_word_embeddings=False))
    )


def mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**tiny(sliding_window=8)))


def qwen2() -> Any:
    config = hf.Qwen2Config(**tiny(use_sliding_window=True, sliding_window=8, max_window_layers=0))
    return hf.Qwen2ForCausalLM(config)


def llama4() -> Any:
    config = hf.Llama4TextConfig(
        **tiny(
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=8,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return hf.Llama4ForCausalLM(config)


def qwen3_next() -> Any:
    linear = dict(
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    config = hf.Qwen3NextConfig(
        **tiny(
            **linear,
            **experts,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        )
    )
    return hf.Qwen3NextForCausalLM(config)


def mamba() -> Any:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=320, hidden_size=32, state_size=4, num_hidden_layers=2)
    )


def lfm2() -> Any:
    config = hf.Lfm2Config(
        **tiny(layer_types=["conv", "full_attention"], tie_word_embeddings=False)
    )
    return hf.Lfm2ForCausalLM(config)


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=320, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    )


def jamba() -> Any:
    config = hf.JambaConfig(
        **tiny(pad_token_id=None), attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    )
    return hf.JambaForCausalLM(config)


def recurrent_gemma() -> Any:
    more = dict(lru_width=32, attention_window_size=8)
    return hf.RecurrentGemmaForCausalLM(
        hf.RecurrentGemmaConfig(**tiny() | more | dict(num_hidden_layers=3))
    )


def mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**tiny(sliding_window=8, num_local_experts=2)))


def phi3() -> Any:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**tiny(sliding_window=8, pad_token_id=None)))


LONGEST_MEMORY = 8  # tokens that layers with a window see
BUILT_BY_HAND = (gemma3, mistral, qwen2, mixtral, phi3, llama4, qwen3_next, lfm2)
REFUSED: dict[Callable[[], Any], str] = {
    mamba: "recurrent layers whose state",
    jamba: "recurrent layers whose state",
    recurrent_gemma: "recurrent layers whose state",
    t5: "encoder-decoder",
}


def from_folder(model: Any, folder: Path) -> Loaded:
    """A model that was saved beside the tokenizer of a llama, and loaded from there."""
    model.generation_config = hf.GenerationConfig(do_sample=False, pad_token_id=0)
    model.save_pretrained(folder)
    zoo.member("llama").tokenizer.save_pretrained(folder)
    return models.load(str(folder), device="cpu")


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["sd", "sd-tree", "lookup"])
@pytest.mark.parametrize("build", BUILT_BY_HAND)
def test_windows_and_states_answer_as_generate_does(
    build: Callable[[], Any], method: str, tmp_path: Path
) -> None:
    """Claim: models of text with a window, chunks or a state answer from their folder with
    ``generate``'s ids, far past the window, and a draft that is nearly the target has tokens
    accepted. Fails if a layer sees a key too many, or keeps the state of a rejected token."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return randomize(build(), seed).eval()

    target = from_folder(make(0), tmp_path / "target")
    draft = from_folder(noisy(make, 0, zoo.NOISE), tmp_path / "draft")
    inputs = zoo.make_inputs(target, "text")
    assert inputs["input_ids"].shape[1] > 2 * LONGEST_MEMORY
    expected = zoo.hf_greedy(target, inputs, 24)
    assert zoo.varied(expected)
    result = zoo.run(target, draft, inputs, method, 24)
    assert list(result.ids) == expected and result.fallback_reason is None
    assert method == "lookup" or zoo.tally(result)["accepted"]


@pytest.mark.parametrize(
    ("build", "reason"), REFUSED.items(), ids=[build.__name__ for build in REFUSED]
)
def test_models_that_cannot_work_are_refused_with_the_reason(
    build: Callable[[], Any], reason: str
) -> None:
    """Claim: a model that Saccade cannot drive is refused as it is wrapped, in one sentence with
    the reason. Fails if it is accepted, or fails otherwise."""
    model = build().eval()
    with pytest.raises(ModelError, match=reason) as caught:
        Backbone(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("build", REFUSED)
def test_they_are_refused_from_a_folder_too(build: Callable[[], Any], tmp_path: Path) -> None:
    """Claim: ``models.load`` refuses such a checkpoint with a ModelError. Fails if a user's folder
    ends in a traceback of something else, or in wrong answers."""
    with pytest.raises(ModelError):
        from_folder(build(), tmp_path)


@pytest.mark.parametrize("build", [mamba, jamba])
def test_refused_before_any_work(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: no forward of such a model runs, as a target or as a draft.
    Fails if the refusal comes after a prefill."""
    good, bad = zoo.member("llama"), build().eval()

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a forward ran")

    monkeypatch.setattr(type(bad.base_model), "forward", never)
    monkeypatch.setattr(Backbone, "forward", never)
    inputs = zoo.make_inputs(good, "text")
    for target, draft in ((bad, good.backbone), (good.backbone, bad)):
        with pytest.raises(ModelError, match=REFUSED[build]):
            saccade.run(target, inputs, draft=draft, method="sd", max_new_tokens=4)


def test_the_same_models_without_a_window(tmp_path: Path) -> None:
    """Claim: Mistral and Qwen2 without a window answer as ``generate`` does.
    Fails if a window goes by the name of a model and not by its config."""
    windowless = {
        "mistral": hf.MistralForCausalLM(hf.MistralConfig(**tiny(sliding_window=None))),
        "qwen2": hf.Qwen2ForCausalLM(hf.Qwen2Config(**tiny(use_sliding_window=False))),
    }
    for name, model in windowless.items():
        folder = tmp_path / name
        loaded = from_folder(model, folder)
        inputs = zoo.make_inputs(loaded, "text")
        result = saccade.run(
            loaded.backbone, inputs, method="lookup", max_new_tokens=12, do_sample=False
        )
        assert list(result.ids) == zoo.hf_greedy(loaded, inputs, 12)
        shutil.rmtree(folder)
