"""HIPPO's scores of visual tokens and what its views keep, again by plain loops over Eq. 2-7."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from by_hand import causal, queries, ranked, share_of, visual_rows
from helpers import (
    backbone,
)
from hippo_by_hand import (
    CASES,
    CROP,
    KEEP,
    Reading,
    holistic_by_hand,
    normalised,
    prefill_target,
    spatial_by_hand,
    temporal_by_hand,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.core.capabilities import Capability
from saccade.core.prompt import Prompt
from saccade.core.sampling import Sampling
from saccade.drafting.views import saliency
from saccade.methods import resolve
from saccade.model.session import Session

FAMILIES = pytest.mark.parametrize("family", list(CASES))


# -- s_attn (Eq. 2) ----------------------------------------------------------------------------


@torch.no_grad()
def queries_and_keys(model: Any, prompt: Prompt) -> list[tuple[Tensor, Tensor]]:
    """Each layer's q and k, ``[head, row, width]``, as the modules hand them to attention."""
    attend, pairs = torch.nn.functional.scaled_dot_product_attention, []

    def tap(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pairs.append((q[0], k[0]))
        return attend(q, k, v, *args, **kwargs)

    positions = prompt.positions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", tap)
        model.get_decoder()(
            inputs_embeds=prompt.embeds[None],
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            attention_mask=torch.zeros(len(prompt), len(prompt)).masked_fill(
                ~causal(len(prompt)), float("-inf")
            )[None, None],
            use_cache=False,
        )
    assert len(pairs) == model.get_decoder().config.num_hidden_layers
    return pairs


def attention_by_hand(model: Any, prompt: Prompt, everything: bool = False) -> list[float]:
    """Eq. 2: over layers, heads and the text after the video, the mean softmax over the video.

    ``everything`` is the other reading: the softmax over all keys a query sees.
    """
    video, asking = visual_rows(prompt), queries(prompt)
    total, terms = [0.0] * len(video), 0
    for q, k in queries_and_keys(model, prompt):
        width, group = q.shape[-1], len(q) // len(k)
        for head in range(len(q)):
            keys = k[head // group].double()
            for query in asking:
                logits = (keys @ q[head, query].double() / math.sqrt(width)).tolist()
                among = range(query + 1) if everything else video
                most = max(logits[key] for key in among)
                whole = sum(math.exp(logits[key] - most) for key in among)
                for i, key in enumerate(video):
                    total[i] += math.exp(logits[key] - most) / whole
                terms += 1
    return [each / terms for each in total]


@FAMILIES
def test_relevance_is_eq_2_from_the_modules_own_queries_and_keys(family):
    """Claim: s_attn is the softmax over the video keys only, averaged over layers, heads and the
    text after the video. Fails on another set of keys or queries, a scale or a group of heads.
    """
    model, prefill = prefill_target(family)
    expected = attention_by_hand(model, prefill.prompt)
    assert sum(expected) == pytest.approx(1)
    assert saliency.attention_over_visual_keys(prefill).tolist() == pytest.approx(
        expected, abs=1e-6, rel=1e-4
    )


@FAMILIES
def test_control_a_softmax_over_all_keys_is_another_score(family):
    """Control: the other reading is SpecVLM's and differs; by it the same comparison fails."""
    model, prefill = prefill_target(family)
    other = attention_by_hand(model, prefill.prompt, everything=True)
    assert saliency.attention_over_visual_keys(prefill).tolist() != pytest.approx(
        other, abs=1e-6, rel=1e-4
    )
    assert saliency.attention_over_all_keys(prefill).tolist() == pytest.approx(
        other, abs=1e-6, rel=1e-4
    )


def test_relevance_does_not_depend_on_how_the_prompt_is_cut():
    """Claim: a prefill in pieces of 7 records the same. Fails if a softmax is taken per piece."""
    model, prefill = prefill_target("qwen2_5_vl")
    pieces = Session(backbone(model), [Sampling()], chunk=7)
    (again,) = pieces.prefill([prefill.prompt], record=True)
    assert torch.allclose(
        saliency.attention_over_visual_keys(again),
        saliency.attention_over_visual_keys(prefill),
        atol=1e-6,
    )


def stub(sizes: Sequence[tuple[int, int, int]], seed: int, still: bool = False) -> Prompt:
    """Media of these grids with a row of text between; rows of one video drift with time.

    ``still``: some cells never change, as a background does not.
    """
    chance = torch.Generator().manual_seed(seed)
    cells, rows = [], []
    for medium, (t, h, w) in enumerate(sizes):
        base = torch.randn(h * w, 6, generator=chance)
        moving = torch.rand(h * w, generator=chance) > (0.5 if still else -1.0)
        for frame in range(t):
            cells += [[medium, frame, y, x] for y in range(h) for x in range(w)]
            drift = torch.randn(h * w, 6, generator=chance) * moving[:, None]
            rows.append(base + 0.7 * drift)
    video = torch.cat(rows)
    length = len(video) + 2
    visual = torch.ones(length, dtype=torch.bool)
    visual[0] = visual[-1] = False
    embeds = torch.zeros(length, 6)
    embeds[visual] = video
    return Prompt(
        full_ids=torch.zeros(length, dtype=torch.long),
        embeds=embeds,
        positions=torch.arange(length)[None],
        visual=visual,
        fixed=torch.zeros_like(visual),
        grid=torch.tensor(cells),
        places=torch.arange(length),
        next_position=length,
    )


SIZES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3
)


@pytest.mark.usefixtures("unchecked")
@settings(max_examples=40)
@given(sizes=SIZES, seed=st.integers(0, 99), shuffle=st.booleans())
def test_temporal_and_spatial_are_eq_3_to_6(sizes, seed, shuffle):
    """Claim: over ragged grids, several media, single frames and rows in any order, s_temp and
    s_spa are those of loops over cells. Fails on a neighbour of another medium, a crop across an
    edge, a variance over members that are not there.
    """
    prompt = stub(sizes, seed)
    embeds, grid = prompt.embeds[prompt.visual], prompt.grid
    if shuffle:
        order = torch.randperm(len(grid), generator=torch.Generator().manual_seed(seed))
        embeds, grid = embeds[order], grid[order]
    rows, cells = embeds.double().tolist(), [tuple(cell) for cell in grid.tolist()]
    temp, spa = temporal_by_hand(rows, cells), spatial_by_hand(rows, cells)
    assert saliency.temporal(saliency.normalise(embeds), grid).tolist() == pytest.approx(
        temp, abs=2e-6
    )
    assert saliency.spatial(saliency.normalise(embeds), grid, CROP).tolist() == pytest.approx(
        spa, abs=2e-6
    )


@pytest.mark.usefixtures("unchecked")
@settings(max_examples=60)
@given(
    sizes=SIZES,
    values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 3.0]), min_size=12, max_size=12),
)
def test_scores_are_z_scored_within_their_frame(sizes, values):
    """Claim: mean 0 and population deviation 1 in each frame of each medium, 0 where it does not
    vary. Fails across frames, across media, or on a division by zero.
    """
    grid = stub(sizes, 0).grid
    raw = [values[i % 12] if cell[2] else 1.0 for i, cell in enumerate(grid.tolist())]
    cells = [tuple(cell) for cell in grid.tolist()]
    z_scores = saliency.per_frame(torch.tensor(raw), grid)
    assert z_scores.tolist() == pytest.approx(normalised(raw, cells), abs=1e-9)


MISREADINGS = {
    "z-score over the video": Reading(whole=True),
    "sample variance": Reading(unbiased=True),
    "crops of 4": Reading(side=4),
    "temporal not inverted": Reading(inverted=False),
}


def fused(view: Any, prompt: Prompt, target_attention: Sequence[float]) -> list[float]:
    return view.select.saliency_with_target(prompt, torch.tensor(target_attention)).tolist()


def draws(seed: int, count: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.random() for _ in range(count)]


@pytest.mark.usefixtures("unchecked")
@settings(max_examples=25)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_the_holistic_score_is_eq_7(sizes, seed):
    """Claim: the plain sum of the three z-scores; the view keeps the highest tenth of the whole.

    Up to rounding: where two scores tie, either may stay.
    """
    prompt = stub(sizes, seed)
    target_attention = draws(seed, prompt.visual_tokens)
    expected = holistic_by_hand(prompt, target_attention)
    view = resolve("hippo").view
    # a frame of nearly equal scores magnifies their rounding
    assert fused(view, prompt, target_attention) == pytest.approx(expected, abs=2e-2)
    count = share_of(prompt.visual_tokens, KEEP)
    kept = view.select(prompt, torch.tensor(target_attention), count).tolist()
    assert len(kept) == count and kept == sorted(set(kept))
    lowest = min(expected[i] for i in kept)
    left = [expected[i] for i in range(prompt.visual_tokens) if i not in kept]
    assert not left or max(left) <= lowest + 2e-2


@pytest.mark.representatives(2)
@pytest.mark.parametrize("misreading", list(MISREADINGS))
def test_control_a_misread_equation_gives_another_score(misreading):
    """Control: the very comparison above fails for each misreading."""
    prompt = stub([(3, 6, 7), (2, 4, 9)], 1)
    target_attention = draws(1, prompt.visual_tokens)
    scores = fused(resolve("hippo").view, prompt, target_attention)
    assert scores == pytest.approx(holistic_by_hand(prompt, target_attention), abs=2e-2)
    wrong = holistic_by_hand(prompt, target_attention, MISREADINGS[misreading])
    assert scores != pytest.approx(wrong, abs=2e-2)


def test_a_background_that_never_changes_scores_nothing():
    """Claim: sigma 0 gives score 0: in a still video no token is preferred for its motion.

    Fails if cosines of 1 - 1e-7 and 1 + 1e-7 are taken for a spread and scaled to 1.
    """
    rows = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    grid = torch.cartesian_prod(*(torch.arange(n) for n in (1, 4, 6, 8)))
    still = saliency.per_frame(saliency.temporal(saliency.normalise(rows.repeat(4, 1)), grid), grid)
    assert float(still.abs().max()) == 0


# -- what the views keep -----------------------------------------------------------------------

VIEWS = {
    "holistic": Reading(),
    "holistic-no-attn": Reading(attn=False),
    "holistic-no-temp": Reading(temp=False),
    "holistic-no-spa": Reading(spa=False),
}


@pytest.mark.representatives(6)
@pytest.mark.parametrize("name", list(VIEWS))
@FAMILIES
def test_a_view_keeps_the_tokens_the_loops_keep(family, name):
    """Claim: on real prompts the kept ids are the top tenth of the sum without the part left out.

    Text stays. Fails if an ablation leaves out another part or none, or if z-scores are mixed.
    """
    model, prefill = prefill_target(family)
    prompt = prefill.prompt
    scores = holistic_by_hand(prompt, attention_by_hand(model, prompt), VIEWS[name])
    count = share_of(prompt.visual_tokens, KEEP)
    expected = sorted(ranked(scores, count))
    view = resolve(f"hippo/view={name}").view
    assert view.choose(prefill, prompt).tolist() == expected
    pruned = view(prefill, prompt)
    video = visual_rows(prompt)
    stays = [row for row in range(len(prompt)) if row not in video]
    assert pruned.places.tolist() == sorted(stays + [video[i] for i in expected])


def test_the_ablations_keep_different_tokens():
    """Control: each part matters on the prompt above, or its ablation would prove nothing."""
    _, prefill = prefill_target("qwen2_5_vl")
    kept = {
        tuple(resolve(f"hippo/view={name}").view.choose(prefill, prefill.prompt).tolist())
        for name in VIEWS
    }
    assert len(kept) == len(VIEWS)


# -- the paper's own method --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "gamma"),
    [("qwen2_5_vl", 5), ("llava_onevision", 7), ("qwen3_vl", 3), ("of_nobody", 5)],
)
def test_the_papers_gamma_is_the_targets_familys(family, gamma):
    """Claim (App. B): gamma is 5, 7 and 3 by family, and costs are not measured for it. Fails where
    every family has the same length."""
    shape = resolve("hippo-paper").shape.prepare(
        lambda: pytest.fail("measured"), target_family=family
    )
    assert shape.spelling == f"chain-{gamma}"


def test_the_papers_method_reads_everything_early_and_hippo_does_not():
    """Claim: in the paper both prefills begin together; ours waits for the attention. Fails where
    the preset is the default under another name."""
    prompt = stub([(2, 6, 7)], 0)
    early = resolve("hippo-paper").view.choose_early(prompt)
    assert len(early.tokens) == prompt.visual_tokens
    assert Capability.BESIDE_TARGET not in resolve("hippo").view.needs


def test_a_superset_scores_once(monkeypatch):
    """Claim: what needs no target is computed once, early, and the later choice uses it. Fails
    where a cosine is computed after the target's attention has come."""
    prompt = stub([(3, 6, 7)], 2)
    view = resolve("hippo/early=superset").view
    target_attention = draws(3, prompt.visual_tokens)
    early = view.choose_early(prompt)
    once = view.select.saliency_with_target(
        prompt, torch.tensor(target_attention), early.without_target
    )
    again = view.select.saliency_with_target(prompt, torch.tensor(target_attention))
    assert torch.equal(once, again)
    monkeypatch.setattr(saliency, "normalise", lambda rows: pytest.fail("computed again"))
    view.select.saliency_with_target(prompt, torch.tensor(target_attention), early.without_target)
