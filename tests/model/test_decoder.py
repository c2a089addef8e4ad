"""Claims about the fused decoder, and about the backbone that picks it."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from functools import partial

import pytest
import torch
from helpers import FAMILIES, backbone, input_for, llama, qwen2, qwen25, random_tree, text_input

from saccade.core.errors import ModelError
from saccade.core.sampling import Sampling
from saccade.core.tree import ancestors
from saccade.model.attention import Step
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache
from saccade.model.decoder import INITIAL_TABLE_ROWS, FusedDecoder
from saccade.model.segments import Segment
from saccade.model.session import Session


def _forward(
    model: Backbone, positions: torch.Tensor | list[int], block=None, seed: int = 0
) -> torch.Tensor:
    """Logits of random embeddings at these positions, through whichever decoder the model has."""
    generator = torch.Generator().manual_seed(seed)
    count = positions.shape[1] if isinstance(positions, torch.Tensor) else len(positions)
    embeds = torch.randn(count, 128, generator=generator)
    cache = Cache(model.head_shapes, count)
    segment = Segment(cache, 0, count, 0, block)
    step = Step([segment], model.heads // model.kv_heads, model.dtype)
    with torch.no_grad():
        return model.logits(model.forward(embeds, positions, step))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 5, 64, 65, 130])
def test_lean_logits_equal_the_modules(family, count):
    """Claim: our decoder computes the modules' function: logits within 1e-5 of their size.

    Positions differ per axis, as in a video. Fails on any wrong norm, bias, rotation or residual.
    """
    ours, theirs = backbone(FAMILIES[family]()), backbone(FAMILIES[family](), False)
    assert ours.fused is not None and theirs.fused is None
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(0, 50, (ours.axes, count), generator=generator)
    mine, exact = _forward(ours, positions), _forward(theirs, positions)
    assert (mine - exact).abs().max() < 1e-5 * exact.abs().max()


def _counted(counts, onto, to, x):
    counts.append(len(x))
    return onto(to, x)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("follow", [0, 5, 70])
def test_a_prompts_last_layer_computes_what_is_wanted_alone(family, follow, monkeypatch):
    """Claim: the law after a prompt, all keys, the attention written down and the rows followed are
    the modules', though our last layer goes on with the last row. Fails if it takes another, or
    all."""
    inputs, counts = input_for(family), []
    tensors = []
    for fused in (True, False):
        model = backbone(FAMILIES[family](), fused)
        if model.fused is not None:
            down = model.fused.layers[-1].down
            monkeypatch.setattr(down, "add_to", partial(_counted, counts, down.add_to))
        session, (prompt,) = Session(model, [Sampling()]), model.prompts(inputs)
        (prefill,) = session.prefill_in_chunks(0, prompt, record=True, follow_rows=follow)
        cache = prefill.cache
        tensors.append([prefill.logits, prefill.mass, prefill.relevance])
        tensors[-1] += [r for i in range(model.key_layer_count) for r in cache.read(i, len(prompt))]
        if follow:
            seen = prompt.visual.nonzero()[:, 0]
            layers = range(model.key_layer_count)
            recent = session.requests[0].recent_rows
            tensors[-1].append(recent.attention_mass(cache, seen, layers, model.kv_heads))
    assert counts == [1]
    for mine, exact in zip(*tensors, strict=True):
        assert mine.shape == exact.shape
        assert not mine.numel() or (mine - exact).abs().max() < 2e-5 * exact.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_logits_of_a_tree_equal_the_modules(family):
    """Claim: both decoders pass masks and depths on alike. Fails if either drops the tree mask."""
    ours, theirs = backbone(FAMILIES[family]()), backbone(FAMILIES[family](), False)
    tree = random_tree(random.Random(2), 12, lambda: 0)
    block = ancestors(tree.parents)
    positions = block.sum(1).expand(ours.axes, -1)
    mine, exact = _forward(ours, positions, block), _forward(theirs, positions, block)
    assert (mine - exact).abs().max() < 1e-5 * exact.abs().max()
    causal = _forward(ours, positions)
    assert (causal - exact).abs().max() > 1e-2


@pytest.mark.parametrize("make", [qwen25, llama])
@pytest.mark.parametrize(
    "last", [INITIAL_TABLE_ROWS - 1, INITIAL_TABLE_ROWS, 5 * INITIAL_TABLE_ROWS]
)
def test_rotation_tables_reach_any_position(make, last):
    """Claim: text positions at and beyond the table's end are turned like the modules turn them.

    The table is cut to its first size before, so growing it is part of the claim.
    """
    ours, theirs = backbone(make()), backbone(make(), False)
    ours.fused._table = None
    for top in (10, last):
        positions = list(range(top - 5, top + 1))
        mine, exact = _forward(ours, positions), _forward(theirs, positions)
        assert (mine - exact).abs().max() < 1e-5 * exact.abs().max()


def test_fused_weights_are_the_modules_own_memory():
    """Claim: no second copy, and a weight changed in place changes the fused decoder too."""
    model = copy.deepcopy(qwen25())
    ours = Backbone(model)
    fused = ours.fused.layers[0].qkv.weight
    projections = model.get_decoder().layers[0].self_attn
    assert projections.q_proj.weight.data_ptr() == fused.data_ptr()
    assert projections.v_proj.weight.untyped_storage().data_ptr() == fused.data_ptr()
    positions = torch.arange(6).expand(3, -1)
    before = _forward(ours, positions)
    with torch.no_grad():
        projections.v_proj.weight.mul_(2)
    ours.fused.refresh()
    after = _forward(ours, positions)
    theirs = Backbone(copy.deepcopy(model), fused=False)
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.allclose(after, _forward(theirs, positions), atol=1e-4)


def test_a_backbone_is_made_once_and_again_when_weights_were_replaced():
    """Claim: of() remembers, and notices a cast. Fails if stale weights go on answering."""
    model = copy.deepcopy(llama())
    first = Backbone.of(model)
    assert Backbone.of(model) is first
    model.double()
    second = Backbone.of(model)
    assert second is not first and second.dtype == torch.float64
    (prompt,) = second.prompts(text_input(1))
    (prefill,) = Session(second, [Sampling()]).prefill([prompt])
    with torch.no_grad():
        exact = model(**text_input(1)).logits[0, -1]
    assert (prefill.logits - exact).abs().max() < 1e-4  # Hugging Face's norms round to fp32


def test_a_remembered_backbone_does_not_keep_its_model_alive():
    """Claim: "as long as the model keeps its weights" ends with the model. Fails on a leak."""
    model = copy.deepcopy(llama())
    Backbone.of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_lean_is_refused_by_name_where_it_is_not_known(monkeypatch):
    """Claim: fused=True on an unknown architecture is an error; None falls back to the modules."""
    model = copy.deepcopy(qwen2())
    model.get_decoder().config.hidden_act = "gelu"
    assert not FusedDecoder.supports(model.get_decoder())
    assert Backbone(model).fused is None
    with pytest.raises(ModelError, match="fused decoder does not know qwen2_vl_text"):
        Backbone(model, fused=True)


def test_modules_are_left_as_they_were():
    """Claim: our attention is in the modules for the length of a call only.

    Fails if the attention implementation stays swapped, so that the caller's model changes.
    """
    model = copy.deepcopy(qwen25())
    before = model.get_decoder().config._attn_implementation
    inputs = input_for("qwen2_5_vl")
    with torch.no_grad():
        expected = model(**inputs).logits
    ours = Backbone(model, fused=False)
    Session(ours, [Sampling()]).prefill(ours.prompts(inputs))
    assert model.get_decoder().config._attn_implementation == before != "saccade"
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)
