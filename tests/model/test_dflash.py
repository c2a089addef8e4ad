"""Claims about DFlash heads alone. ``test_heads.py`` has those that hold for every head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from heads import head_of, tensors_of
from helpers import WORDS, input_for, llama, qwen25, text_input
from torch import Tensor

import saccade
from lab.checkpoints import heads, make
from saccade.inputs import head_checkpoints, loading
from saccade.model.heads.dflash import BlockSettings

ANSWER: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def _make_assistant(settings: dict[str, Any], tensors: Any) -> Any:
    """The same head as a model of transformers' own class."""
    names = ("architectures", "model_type", "use_sliding_window", "vocab_size")
    own = {name: each for name, each in settings.items() if name not in names}
    # In its class a row sees a key that is a whole window away; the authors' see one less.
    config = transformers.MuseGlimmerAssistantConfig(
        **own | {"sliding_window": settings["sliding_window"] - 1}
    )
    assistant = transformers.MuseGlimmerAssistantModel(config).eval()
    assistant.load_state_dict(tensors)
    return assistant


@torch.no_grad()
def _drafts_of_transformers(model: Any, assistant: Any, ids: Tensor) -> Tensor:
    """Logits of what transformers' own class drafts after a text, computed from its start."""
    from transformers.cache_utils import DFlashCache

    config = assistant.config
    out = model(input_ids=ids[:, :-1], output_hidden_states=True)
    hidden = torch.cat([out.hidden_states[n + 1] for n in config.target_layer_ids], -1)
    block = [int(ids[0, -1]), *[config.mask_token_id] * (config.block_size - 1)]
    cache = DFlashCache(config=config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(hidden.shape[1])
    length = hidden.shape[1] + config.block_size
    drafted = assistant(
        noise_embeds=model.get_input_embeddings()(torch.tensor([block])),
        context_hidden_states=hidden,
        position_ids=torch.arange(length)[None],
        attention_mask=torch.ones(1, length, dtype=torch.long),
        past_key_values=cache,
    ).last_hidden_state
    logits: Tensor = model.get_output_embeddings()(drafted[0, 1:])
    return logits


@pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"),
    reason="this transformers has no class of such heads",
)
def test_blocks_are_those_of_transformers_own_class():
    """Claim: after any text, longer than the layers' windows too, a block drafts the ids that
    transformers' own class drafts from the start of the text. Fails for a hidden state of another
    layer, a position that is off by one, or another window."""
    head, inputs = head_of(llama(0, layers=4), "dflash of transformers"), text_input(1, 30)
    settings = heads.dflash_settings(head.target, "transformers")
    assistant = _make_assistant(settings, tensors_of(head.target, "dflash of transformers"))
    size = heads.DFLASH_BLOCKS["transformers"]
    result = saccade.run(
        head.target, inputs, draft=head, method=f"head/shape=chain-{size - 1}", **ANSWER
    )
    text, answer = inputs["input_ids"], torch.tensor([result.ids])
    emitted = drafted = 0
    for round in result.rounds:
        if round.tokens:
            ids = torch.cat([text, answer[:, :emitted]], 1)
            theirs = _drafts_of_transformers(head.target.model, assistant, ids)
            expected = theirs.argmax(-1)[: len(round.tokens)]
            assert list(round.tokens) == expected.tolist()
            drafted += len(round.tokens)
        emitted += len(round.emitted)
    assert emitted == 24 and drafted > 20
    assert text.shape[1] + emitted > 2 * heads.DFLASH_WINDOW


@pytest.mark.parametrize(
    ("entries", "causal"),
    [
        ({}, [False, True]),
        ({"sliding_window_non_causal": False}, [False, True]),
        ({"sliding_window_non_causal": True}, [False, False]),
        ({"is_causal": True}, [True, True]),
        ({"dflash_config": {"causal": False}}, [False, False]),
    ],
)
def test_which_layers_are_causal(entries: dict[str, Any], causal: list[bool]):
    """Claim: as in the training code of the package speculators, its setting is about layers with a
    window alone, and a layer without one is never causal; z-lab's setting is about all layers."""
    kinds = ["full_attention", "sliding_attention"]
    settings = {**entries, "layer_types": kinds, "sliding_window": 24, "mask_token_id": 1}
    layers = transformers.Qwen3Config(num_hidden_layers=2, layer_types=kinds)
    read = BlockSettings.read({**settings, "target_layer_ids": [0]}, layers, "a head")
    assert [each.is_causal for each in read.visibilities] == causal


@pytest.mark.representatives(1)
@pytest.mark.parametrize("shape", ["chain-7", "best-12", "sage"])
def test_a_block_is_drafted_by_one_forward_a_round(shape, monkeypatch):
    """Claim: however many tokens a round drafts, and in however many steps, the head runs once.
    Control: the round's draft is longer than a token somewhere."""
    head, inputs = head_of(llama(0), "dflash"), text_input(2, 20)
    calls: list[int] = []
    draft_blocks = type(head).draft_blocks

    def counting(self: Any, *arguments: Any) -> Tensor:
        calls.append(1)
        return draft_blocks(self, *arguments)

    monkeypatch.setattr(type(head), "draft_blocks", counting)
    result = saccade.run(head.target, inputs, draft=head, method=f"head/shape={shape}", **ANSWER)
    assert result.fallback_reason is None
    assert len(calls) <= len(result.rounds)
    assert max(len(round.tokens) for round in result.rounds) > 1


def test_nodes_beyond_a_block_are_drafted_evenly_and_change_nothing():
    """Claim: a chain that is longer than a block goes on with a uniform law over ids that are not
    banned, and a sampled answer's q says so."""
    head, inputs = head_of(qwen25(0), "dflash of speculators"), input_for("qwen2_5_vl")
    size = heads.DFLASH_BLOCKS["speculators"]
    result = saccade.stream(
        head.target,
        inputs,
        draft=head,
        method=f"head/shape=chain-{size + 2}",
        max_new_tokens=8,
        do_sample=True,
        seed=1,
        **WORDS,
    )
    longest = max((round.tree for round in result), key=len)
    assert len(longest) > size
    beyond = longest.q[size]
    assert beyond is not None
    allowed = beyond > 0
    assert not allowed[[*head.target.placeholders]].any()
    torch.testing.assert_close(beyond[allowed], torch.full_like(beyond[allowed], 1 / allowed.sum()))


def test_an_embedding_for_the_mask_alone_is_read(tmp_path):
    """Claim: where a folder has an embedding of the mask in a file of its own, that is what masks
    are embedded as, and nothing else."""
    folder = make("llama", tmp_path / "target")
    target = loading.load(str(folder), device="cpu").backbone
    draft = heads.make_dflash(tmp_path / "head", target, "z-lab")
    own = torch.randn(target.config.hidden_size)
    torch.save({"embedding": own, "mask_token_id": heads.DFLASH_MASK}, draft / "mask_embedding.pt")
    head: Any = head_checkpoints.load_head(str(draft), target)
    rows = head._embed_block(torch.tensor([[7, heads.DFLASH_MASK]]))[0]
    assert torch.equal(rows[1], own) and torch.equal(rows[0], target.embed([7])[0])


def test_a_cap_bends_only_logits_of_ids_that_the_head_knows():
    """Claim: a head that bounds its logits, and has a vocabulary of its own, gives no probability
    to ids that it does not know. Fails if their -inf is bent too."""
    head = head_of(llama(0), "dflash of speculators")
    head.settings = replace(head.settings, logit_cap=2.0)
    logits = head.logits(10 * torch.randn(3, head.target.config.hidden_size))
    known = torch.zeros(logits.shape[1], dtype=torch.bool)
    known[head.module.target_ids] = True
    assert not known.all() and (logits[:, ~known] == float("-inf")).all()
    assert logits[:, known].abs().max() <= 2 and logits[:, known].abs().max() > 1
