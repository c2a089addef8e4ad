"""Claims about a language model that learns to see, on a tiny Llama of random weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import saccade
from lab.training import adapted_llama, agreement, build, seeing_draft
from lab.training.batch import collate, draw_example
from lab.training.model import embed, run_decoder
from lab.training.stages import SEEING_DRAFT
from saccade.inputs import ask, load
from saccade.inputs.checkpoints import EMBEDDED
from saccade.world.train_draft.samples import Canvas


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
    proc = build.load_processor(EMBEDDED / "target")
    return adapted_llama.put_behind_tower(llama, build.load(EMBEDDED / "target"), proc.tokenizer)


def test_on_text_the_shell_is_the_language_model(llama, behind):
    """Claim: without a picture the shell's logits are the Llama's, bit for bit."""
    ids = torch.randint(0, 1000, (1, 20))
    with torch.no_grad():
        assert torch.equal(behind(input_ids=ids).logits, llama(ids).logits)


@pytest.mark.extra
def test_a_folded_adapter_says_what_it_said_beside_the_matrices(llama, behind):
    """Claim: the weights with the terms in them compute what matrices with terms beside them do,
    which is not what they computed before."""
    proc = build.load_processor(EMBEDDED / "target")
    folded = adapted_llama.put_behind_tower(llama, build.load(EMBEDDED / "target"), proc.tokenizer)
    ids, positions = torch.randint(0, 1000, (1, 20)), torch.arange(20).expand(3, 1, -1)

    def compute_logits(model):
        return F.linear(
            run_decoder(model, embed(model, ids, None), positions), model.lm_head.weight
        )

    with torch.no_grad():
        before = compute_logits(behind)
        adapter = adapted_llama.Adapter(behind)
        for name, value in adapter.lora.items():
            if name.endswith("/up"):
                torch.nn.init.normal_(value, std=0.1)
        beside = compute_logits(behind)
        adapted_llama.fold_adapter(folded, adapter.state_dict())
        torch.testing.assert_close(compute_logits(folded), beside, atol=1e-5, rtol=1e-4)
    assert (beside - before).abs().max() > 0.01


def test_a_saved_folder_answers_as_generate_does(behind, tmp_path):
    """Claim: the folder is an ordinary checkpoint: `load` reads it, with its processor, and what
    `generate` drafts about a clip is transformers' answer, token for token."""
    adapted_llama.save_checkpoint(
        behind, build.load_processor(EMBEDDED / "target").tokenizer, tmp_path
    )
    model = load(str(tmp_path), device="cpu")
    _, clip, question = agreement.unseen_clip(0, 64)
    inputs = ask(model, question, clips=[clip])
    own = {"max_new_tokens": 12, "do_sample": False}
    expected_ids = model.backbone.model.generate(**inputs, **own)
    for method in ("ar", "std/keep=0.25"):
        assert torch.equal(
            saccade.generate(model.backbone.model, inputs, method=method, **own), expected_ids
        )


@pytest.mark.extra
def test_the_draft_begins_with_the_words_that_both_know(behind):
    """Claim: in a vocabulary where every word has another number, and some are new, the draft says
    of a clip what the pair's says; new words have no row."""
    pair = build.load(EMBEDDED / "draft")
    known = build.load_processor(EMBEDDED / "draft").tokenizer.get_vocab()
    moved = {word: 1023 - place for word, place in known.items() if place < 1000}
    tok = SimpleNamespace(get_vocab=lambda: moved | {"never heard": 3})
    draft = seeing_draft.make_draft(behind, tok, 4)
    assert draft.config.text_config.num_hidden_layers == 4
    assert draft.lm_head.weight is draft.model.language_model.embed_tokens.weight
    ids, positions = torch.randint(0, 1000, (1, 20)), torch.arange(20).expand(3, 1, -1)

    def compute_logits(model, ids):
        return F.linear(
            run_decoder(model, embed(model, ids, None), positions), model.lm_head.weight
        )

    with torch.no_grad():
        own, others = compute_logits(draft, 1023 - ids), compute_logits(pair, ids)
    torch.testing.assert_close(own.flip(-1)[..., :1000], others[..., :1000])
    assert not own[..., 3].any()


@pytest.mark.extra
def test_a_teacher_sees_by_its_own_merger(behind):
    """Claim: the draft's stage asks the model that teaches, which has a merger of its own size: a
    draft that is the teacher agrees with it everywhere, and another one does not."""
    tok = build.load_processor(EMBEDDED / "target").tokenizer
    batch = collate(
        [draw_example(tok, Canvas("video", 8, 112, 112), 1)], Canvas("video", 8, 112, 112)
    )
    stage = SEEING_DRAFT[0]
    pair = build.load(EMBEDDED / "draft")
    alike = seeing_draft.DistillationRun(stage, pair, pair, tok).loss(batch)[1]
    other = seeing_draft.DistillationRun(stage, pair, behind, tok).loss(batch)[1]
    assert alike["agree"] == 1 and abs(alike["kl"]) < 1e-3
    assert other["agree"] < 0.5 and other["kl"] > 1
