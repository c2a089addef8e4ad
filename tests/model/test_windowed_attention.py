"""Claims about layers with a window, and about pictures that are read in both directions."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

import saccade
from saccade.core.prompt import Media, Prompt
from saccade.core.tree import Tree, depths, path, tree_mask
from saccade.model.cache import Cache, HeadShape
from saccade.model.segments import Segment
from saccade.model.window_rule import KeyWindow
from saccade.model.windowed_attention import (
    LogitExtras,
    attend_visible,
    last_visible_rows,
    visible_keys,
)

WINDOWS = (None, KeyWindow(1), KeyWindow(3), KeyWindow(7), KeyWindow(4, chunked=True))


def sees(row: int, key: int, window: KeyWindow | None, reach: int) -> bool:
    """Returns whether a row of a text sees a key, both counted from the text's start."""
    if key > max(row, reach):
        return False
    if window is None:
        return True
    if window.chunked:
        return key // window.size == row // window.size
    return row - key < window.size


@st.composite
def trees(draw: Any) -> Tree:
    count = draw(st.integers(0, 7))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    return Tree(tuple(range(count)), parents)


@given(
    tree=trees(),
    committed=st.integers(1, 9),
    waiting=st.integers(0, 3),
    scored=st.integers(0, 7),
    window=st.sampled_from(WINDOWS),
)
def test_a_node_sees_what_the_text_that_ends_with_it_would_see(
    tree, committed, waiting, scored, window
):
    """Claim: a node of a tree sees the keys that a plain text of its path would see: windows count
    along the path, whatever stands between in the cache. Fails if siblings make a window shorter,
    or if it is one key too wide."""
    scored = 0 if waiting else min(scored, len(tree))
    new = waiting + len(tree) - scored
    if not new:
        return
    block = tree_mask(tree, scored, waiting)
    cache = Cache([HeadShape(1, 1, 1)] * 1, committed + waiting + len(tree))
    segment = Segment(
        cache, 0, new, committed + scored, block, committed_rows=waiting, scored_nodes=scored
    )
    visible, first = visible_keys(segment, window)
    text = committed + waiting
    for row in range(new):
        node = row - waiting + scored
        keys = [*range(committed + row + 1)]
        if row >= waiting:
            keys = [*range(text), *(text + above for above in path(tree, node))]
        place = len(keys) - 1
        expected = {key for at, key in enumerate(keys) if sees(place, at, window, -1)}
        row_keys = {first + column for column in visible[row].nonzero().squeeze(-1).tolist()}
        assert row_keys == expected, (row, tree.parents, depths(tree.parents))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_each_row_sees_what_its_own_text_would_see(window):
    """Claim: rows of a prompt see the keys in their window, and all of a picture that is read in
    both directions. Fails if a picture is read from left to right, or a window is off by one."""
    reach = torch.tensor([0, 3, 3, 3, 4, 5, 8, 8, 8, 9])
    for start, stop in ((0, 10), (0, 4), (4, 10), (9, 10)):
        cache = Cache([HeadShape(1, 1, 1)] * 1, 10)
        segment = Segment(
            cache,
            0,
            stop - start,
            start,
            committed_rows=stop - start,
            last_visible_row=reach[start:stop].clamp(max=stop - 1),
        )
        visible, first = visible_keys(segment, window)
        for row in range(start, stop):
            expected = [sees(row, key, window, int(reach[row])) for key in range(stop)]
            assert visible[row - start].tolist() == expected[first:]
            assert not any(expected[:first])


def test_what_a_model_lets_rows_see_is_read_from_its_mask():
    """Claim: a causal mask has no reach, a picture's rows reach its end, also where text stands
    among them, and a mask of another form is refused. Fails if a mask is taken for one that it is
    not."""
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    assert last_visible_rows(causal) is None
    picture = causal.clone()
    picture[2:5, 2:5] = True
    assert last_visible_rows(picture) is not None
    assert last_visible_rows(picture).tolist() == [0, 1, 4, 4, 4, 5, 6, 7]
    windowed = picture & (torch.arange(8)[:, None] - torch.arange(8) < 3)
    assert last_visible_rows(windowed, KeyWindow(3)).tolist() == [0, 1, 4, 4, 4, 5, 6, 7]
    frames = causal.clone()
    members = torch.tensor([1, 2, 5, 6])
    frames[members[:, None], members] = True
    assert last_visible_rows(frames).tolist() == [0, 6, 6, 3, 4, 6, 6, 7]
    one_way = frames.clone()
    one_way[1, 5] = False
    with pytest.raises(ValueError, match="do not all see each other"):
        last_visible_rows(one_way)
    with pytest.raises(ValueError, match="do not all see each other"):
        last_visible_rows(windowed)


def test_a_pruned_prompt_keeps_which_rows_see_each_other():
    """Claim: where a view drops rows, those that are left see each other as before, text among them
    is seen by none of them, and the last of them may be gone. Fails where the last row that a frame
    sees is taken for the text before it."""
    reach = torch.tensor([0, 7, 7, 3, 7, 7, 6, 7, 8])
    visual = reach == 7
    width = int(visual.sum())
    prompt = Prompt(
        full_ids=torch.arange(9),
        embeds=torch.zeros(9, 2),
        positions=torch.arange(9)[None],
        visual=visual,
        fixed=torch.zeros(9, dtype=torch.bool),
        grid=torch.zeros(width, 4, dtype=torch.long),
        places=torch.arange(9),
        next_position=9,
        media=Media(last_visible_row=reach),
    )
    pruned = prompt.select(torch.tensor([0, 2]))  # Rows 1 and 4 of the prompt.
    assert pruned.places.tolist() == [0, 1, 3, 4, 6, 8]
    assert pruned.media.last_visible_row.tolist() == [0, 3, 2, 3, 4, 5]
    assert not pruned.changes_with_more_text
    assert prompt.keep_first(8).changes_with_more_text


def test_soft_caps_and_sinks_are_those_of_the_formula():
    """Claim: a cap bounds each logit, and a sink takes its share of the softmax and reads nothing.
    Control: without both the output is another."""
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    visible = torch.ones(3, 5, dtype=torch.bool).tril(2)
    sinks = torch.randn(4)
    out = attend_visible(q, k, v, visible, 0.7, LogitExtras(2.0, sinks))
    for head in range(4):
        logits = torch.tanh(q[head] @ k[head // 2].T * 0.7 / 2.0) * 2.0
        logits = logits.masked_fill(~visible, float("-inf"))
        weights = torch.cat([logits, sinks[head].expand(3, 1)], 1).softmax(-1)[:, :-1]
        assert torch.allclose(out[head], weights @ v[head // 2], atol=1e-6)
    assert not torch.allclose(out, attend_visible(q, k, v, visible, 0.7, LogitExtras()), atol=1e-3)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of PaliGemma's processor
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "paligemma", "aya-vision", "llama4"])
@pytest.mark.representatives(1)
def test_a_prefill_in_chunks_gives_the_models_own_logits(family):
    """Claim: whatever the chunks of a prefill, the logits at the prompt's end are those of the
    model's own forward. Fails if a chunk cuts a picture that is read in both directions."""
    from saccade.core.sampling import Sampling
    from saccade.model.session import Session

    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, "image")
    with torch.no_grad():
        expected = loaded.backbone.model(**inputs, use_cache=False).logits[0, -1]
    (prompt,) = loaded.backbone.prompts(inputs)
    for chunk in (5, 16, 2048):
        session = Session(loaded.backbone, [Sampling()], chunk=chunk)
        (prefill,) = session.prefill([prompt])
        assert torch.allclose(prefill.logits, expected, atol=1e-3), chunk


def test_prompts_share_no_part_of_a_picture_whose_later_rows_differ():
    """Claim: where pictures are read in both directions, a prefix that two prompts share ends
    before a picture of which only the first rows are equal, and a prompt that reuses it gets the
    logits of one that does not. Control: read from left to right, those rows would be shared."""
    from saccade.core.sampling import Sampling
    from saccade.model.prefix_cache import PrefixCache, common_rows
    from saccade.model.session import Session

    loaded = zoo.member("gemma3")
    (first,) = loaded.backbone.prompts(zoo.make_inputs(loaded, "images"))
    pictures = first.visual.nonzero().squeeze(-1)
    embeds = first.embeds.clone()
    embeds[pictures[-1]] += 1
    second = replace(first, embeds=embeds)
    assert first.media.last_visible_row is not None
    begin = int(
        first.media.last_visible_row.eq(first.media.last_visible_row[pictures[-1]]).nonzero()[0]
    )
    assert begin < int(pictures[-1])
    assert common_rows(first, second) == begin == common_rows(second, first)
    causal = [
        replace(each, media=replace(each.media, last_visible_row=None)) for each in (first, second)
    ]
    assert common_rows(*causal) == int(pictures[-1])

    model = loaded.backbone.with_prefix_cache(PrefixCache(2**30))
    prefills = [Session(model, [Sampling()]).prefill([each])[0] for each in (first, second)]
    (fresh,) = Session(loaded.backbone, [Sampling()]).prefill([second])
    assert torch.allclose(prefills[1].logits, fresh.logits, atol=1e-4)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of PaliGemma's processor
@pytest.mark.parametrize("method", ["ar", "sd", "specvlm"])
def test_a_prompt_that_is_read_in_both_directions_is_read_again_when_it_goes_on(method):
    """Claim: PaliGemma's words see those after them, so a further turn reads all of the text again
    and answers as ``generate`` on the whole of it; two prompts share nothing but a whole prompt.
    Fails where earlier keys are reused, which had not seen the new words."""
    from saccade.model.prefix_cache import common_rows

    target, draft = zoo.member("paligemma"), zoo.draft_of("paligemma")
    inputs = zoo.make_inputs(target, "image")
    with saccade.Conversation(
        target.backbone, draft=draft.backbone, method=method, max_new_tokens=8, do_sample=False
    ) as conversation:
        for turn in range(3):
            result = conversation.run(inputs)
            assert list(result.ids) == zoo.hf_greedy(target, inputs, 8), turn
            assert result.fallback_reason is None and not result.reused_tokens
            new_ids = torch.tensor([[*result.ids, 5, 6, 7]])
            longer = {"input_ids": new_ids, "attention_mask": torch.ones_like(new_ids)}
            longer["token_type_ids"] = torch.zeros_like(new_ids)
            extended = {name: torch.cat([inputs[name], each], 1) for name, each in longer.items()}
            (first,), (second,) = map(target.backbone.prompts, (inputs, inputs | extended))
            assert common_rows(first, second) == 0
            inputs = inputs | extended


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of PaliGemma's processor
@pytest.mark.parametrize("family", ["paligemma", "gemma3"])
def test_recorded_attention_is_that_of_rows_that_see_ahead(family):
    """Claim: what a prefill records of the text's attention is what the model's own matrices say,
    also where a row sees the rows after it. Fails if such a row's weights are computed as if it saw
    only the rows before it: they would be shares of too small a whole."""
    from saccade.core.sampling import Sampling
    from saccade.model.session import Session

    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, "image")
    model = copy.deepcopy(loaded.backbone.model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**inputs, use_cache=False, output_attentions=True).attentions
    (prompt,) = loaded.backbone.prompts(inputs)
    (prefill,) = Session(loaded.backbone, [Sampling()]).prefill([prompt], record=True)
    assert prefill.mass is not None
    full_layers = [
        layer
        for layer, window in enumerate(loaded.backbone.windows or [None] * len(attentions))
        if window is None
    ]
    assert full_layers
    last_visual = int(prompt.visual.nonzero().max())
    for layer in full_layers:
        weights = attentions[layer][0][:, last_visual + 1 :][..., prompt.visual]
        expected = weights.view(loaded.backbone.kv_heads, -1, weights.shape[-1]).mean(1)
        assert torch.allclose(prefill.mass[layer], expected, atol=1e-5), layer
