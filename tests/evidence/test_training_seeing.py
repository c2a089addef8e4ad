"""Claims about a language model that learns to see, on a tiny Llama of random weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from evidence.training import build, shell
from evidence.training.model import embed, read
from saccade.inputs.checkpoints import EMBEDDED


@pytest.fixture
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def behind(llama):
    proc = build.saved_processor(EMBEDDED / "target")
    return shell.shell(llama, build.load(EMBEDDED / "target"), proc.tokenizer)


def test_on_text_the_shell_is_the_language_model(llama, behind):
    """Claim: without a picture the shell's logits are the Llama's, bit for bit."""
    ids = torch.randint(0, 1000, (1, 20))
    with torch.no_grad():
        assert torch.equal(behind(input_ids=ids).logits, llama(ids).logits)


def test_a_folded_adapter_says_what_it_said_beside_the_matrices(llama, behind):
    """Claim: the weights with the terms in them compute what matrices with terms beside them do,
    which is not what they computed before."""
    proc = build.saved_processor(EMBEDDED / "target")
    folded = shell.shell(llama, build.load(EMBEDDED / "target"), proc.tokenizer)
    ids, positions = torch.randint(0, 1000, (1, 20)), torch.arange(20).expand(3, 1, -1)

    def said(model):
        return F.linear(read(model, embed(model, ids, None), positions), model.lm_head.weight)

    with torch.no_grad():
        before = said(behind)
        adapter = shell.Adapter(behind)
        for name, value in adapter.lora.items():
            if name.endswith("/up"):
                torch.nn.init.normal_(value, std=0.1)
        beside = said(behind)
        shell.fold(folded, adapter.state_dict())
        torch.testing.assert_close(said(folded), beside, atol=1e-5, rtol=1e-4)
    assert (beside - before).abs().max() > 0.01
