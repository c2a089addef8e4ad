"""Claims about EAGLE-3 heads against vLLM's own. Run by ``make vllm``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import saccade
from lab.checkpoints import Size, make
from lab.checkpoints import heads as random_heads
from saccade.inputs import loading

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS, ANSWER_TOKENS, DRAFT_TOKENS = 20, 12, 3


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(5, 40, (PROMPTS,), generator=generator).tolist()
    return [torch.randint(0, 200, (length,), generator=generator).tolist() for length in lengths]


def _ours(target: Path, head: Path) -> list[tuple[list[int], list[list[int]]]]:
    """Each prompt's answer, and what was drafted in each round."""
    loaded, draft = loading.load_pair(str(target), str(head), device="cpu")
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


def test_a_head_drafts_the_ids_that_vllm_drafts(tmp_path, monkeypatch):
    """Claim: over 20 prompts an EAGLE-3 head of random weights drafts the very ids that vLLM drafts
    with it, round by round, and both answers are the same.

    Fails if vLLM reads other layers' hidden states, other positions or another output.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = pytest.importorskip("vllm")
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    target = make("llama", tmp_path / "target", size=Size(layers=8))
    loaded = loading.load(str(target), device="cpu")
    head = random_heads.make_eagle3(tmp_path / "head", loaded.backbone, "angelslim")
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
        speculative_config={
            "method": "eagle3",
            "model": os.fspath(head),
            "num_speculative_tokens": DRAFT_TOKENS,
        },
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
