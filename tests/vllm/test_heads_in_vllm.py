"""Claims about heads, EAGLE-3's and those of checkpoints, against vLLM's. Run by ``make vllm``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

import saccade
from lab.checkpoints import Size, heads, make
from saccade.inputs import loading

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS, ANSWER_TOKENS, DRAFT_TOKENS = 20, 12, 3


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(5, 40, (PROMPTS,), generator=generator).tolist()
    return [torch.randint(0, 200, (length,), generator=generator).tolist() for length in lengths]


def _ours(target: Path, head: Path | None) -> list[tuple[list[int], list[list[int]]]]:
    """Each prompt's answer, and what was drafted in each round."""
    loaded, draft = loading.load_pair(
        str(target), None if head is None else str(head), device="cpu"
    )
    assert draft is not None
    answers = []
    for ids in _prompts():
        inputs = {"input_ids": torch.tensor([ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        result = saccade.run(
            loaded.backbone,
            inputs,
            draft=draft.backbone,
            method=f"head/shape=chain-{DRAFT_TOKENS}",
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
        )
        drafts = [list(round.tokens) for round in result.rounds if round.tokens]
        answers.append((list(result.ids), drafts))
    return answers


def _assert_vllm_drafts_the_same(
    monkeypatch: pytest.MonkeyPatch, target: Path, head: Path | None, speculative: dict[str, Any]
) -> None:
    """Compares answers and drafted ids, round by round. Without ``head`` it is the target's own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = pytest.importorskip("vllm")
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    ours = _ours(target, head)
    drafted: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = propose(self, *args, **kwargs)
        drafted.append(tokens.tolist()[0])
        return tokens

    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", note)
    engine = vllm.LLM(
        str(target),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={**speculative, "num_speculative_tokens": DRAFT_TOKENS},
    )
    greedy = vllm.SamplingParams(
        max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, detokenize=False
    )
    for ids, (answer, drafts) in zip(_prompts(), ours, strict=True):
        drafted.clear()
        (output,) = engine.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == answer
        # vLLM also drafts after the last round, which nobody judges.
        assert drafted[: len(drafts)] == drafts


def test_a_head_drafts_the_ids_that_vllm_drafts(tmp_path, monkeypatch):
    """Claim: over 20 prompts an EAGLE-3 head of random weights drafts the very ids that vLLM drafts
    with it, round by round, and both answers are the same.

    Fails if vLLM reads other layers' hidden states, other positions or another output.
    """
    pytest.importorskip("vllm")
    target = make("llama", tmp_path / "target", size=Size(layers=8))
    loaded = loading.load(str(target), device="cpu")
    head = heads.make_eagle3(tmp_path / "head", loaded.backbone, "angelslim")
    speculative = {"method": "eagle3", "model": os.fspath(head)}
    _assert_vllm_drafts_the_same(monkeypatch, target, head, speculative)


def _make_glm(folder: Path, tokenizer: Path) -> Path:
    """Writes a random GLM-4.5 with a head, as it is published: the layer after the last one, its
    experts one by one, with copies of the embedding and of the output matrix."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        max_position_embeddings=512,
    )
    model = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 1.5 if "layers" in name else 3.0
                weight.normal_().mul_(scale * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, folder / file)
    heads.add_own_head(folder, loading.load(str(folder), device="cpu").backbone, "nextn")
    tensors = load_file(folder / "model.safetensors")
    layer = f"model.layers.{config.num_hidden_layers}."
    gates_and_ups = tensors.pop(f"{layer}mlp.experts.gate_up_proj")
    downs = tensors.pop(f"{layer}mlp.experts.down_proj")
    for number, (both, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
        gate, up = both.chunk(2)
        for part, matrix in (("gate", gate), ("up", up), ("down", down)):
            key = f"{layer}mlp.experts.{number}.{part}_proj.weight"
            tensors[key] = matrix.contiguous()
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_head_of_a_checkpoint_drafts_the_ids_that_vllm_drafts(tmp_path, monkeypatch):
    """Claim: over 20 prompts the multi-token head in a GLM-4.5 of random weights drafts the very
    ids that vLLM drafts with it, round by round, and both answers are the same.

    Fails if the first row's embedding is not left out, or the next step reads what the last norm
    returns.
    """
    pytest.importorskip("vllm")
    target = _make_glm(tmp_path / "target", make("llama", tmp_path / "llama"))
    _assert_vllm_drafts_the_same(monkeypatch, target, None, {"method": "mtp"})
