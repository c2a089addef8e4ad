"""SpecVLM (Ji et al., 2025) on real runs: what guides the pruning, what stays, what is drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import (
    Run,
    attention,
    everywhere,
    queries,
    ranked,
    real,
    share_of,
    sparse_logits,
    text_rows,
    two_stages,
    visual_rows,
)
from helpers import (
    IMAGE,
    VIDEO,
    backbone,
    frames_input,
    no_seconds,
    noisy,
    onevision,
    prompt_of,
    qwen2,
    qwen25,
    video_input,
)
from torch import Tensor

from lab.reference import Oracle, attention_mass
from saccade.core.prompt import Prompt
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.methods import resolve
from saccade.methods.specvlm import TwoStage

pytestmark = pytest.mark.usefixtures("unlimited_drafts")

FIG9 = [
    tuple(map(int, ranks))
    for ranks in (
        "0,1,2,3,00,01,02,10,11,20,21,30,000,001,002,010,011,020,021,100,0000,0001,0002,00000,00001"
    ).split(",")
]
BANNED = (IMAGE, VIDEO)

PAIRS: dict[str, Any] = {
    "one tower": lambda: (qwen25(), noisy(qwen25), video_input(grid=(4, 6, 8))),
    "two towers": lambda: (qwen25(), qwen25(1), video_input(grid=(4, 6, 8))),
    "qwen2_vl": lambda: (qwen2(), noisy(qwen2), no_seconds(video_input(2, grid=(3, 8, 8)))),
    "llava_onevision": lambda: (onevision(), noisy(onevision), frames_input(frames=9)),
}
EACH = pytest.mark.parametrize("pair", list(PAIRS))


def run_of(pair: str, method: str = "specvlm", count: int = 2, **stages: Any) -> Run:
    target, draft, inputs = PAIRS[pair]()
    recipe = resolve(method)
    if stages:
        recipe = replace(recipe, view=replace(recipe.view, select=TwoStage(**stages)))
    return real(recipe, target, inputs, draft, count)


def kept(run: Run) -> list[int]:
    """Which visual tokens the draft was given, counted among the visual."""
    visual = visual_rows(run.whole)
    return [visual.index(row) for row in run.pruned.places[run.pruned.visual].tolist()]


def guidance(model: Any, prompt: Prompt) -> list[float]:
    """Eq. 4-5: the text's attention on each visual token, mean over queries, layers and heads."""
    asking, visual = queries(prompt), visual_rows(prompt)
    total = [0.0] * len(visual)
    matrices = attention(model, prompt)
    for weights in matrices:
        for head in weights.double().tolist():
            for query in asking:
                for j, key in enumerate(visual):
                    total[j] += head[query][key]
    parts = len(matrices) * len(matrices[0]) * len(asking)
    return [a / parts for a in total]


# -- the guidance ------------------------------------------------------------------------------


@EACH
def test_the_guidance_is_the_texts_attention_on_the_video(pair):
    """Claim: what the view was shown is Eq. 4-5 by the modules' full matrices, and the package's
    own reference says the same. Fails on another softmax, other queries, other weights of heads.
    """
    run = run_of(pair)
    assert run.prefill.mass is not None
    mean_mass = run.prefill.mass.mean((0, 1))
    expected = torch.tensor(guidance(run.target, run.prefill.prompt))
    assert torch.allclose(mean_mass, expected.float(), atol=1e-6)
    naive = attention_mass(run.target, run.prefill)
    assert torch.allclose(run.prefill.mass, naive, atol=1e-6)
    assert float(expected.sum()) < 1, "text keys take part in the softmax"


# -- the kept set ------------------------------------------------------------------------------

STAGES = [
    (0.1, 0.5, False),
    (0.5, 0.5, False),
    (0.5, 0.2, False),
    (0.3, 0.2, True),
    (1.0, 0.5, False),
]


@pytest.mark.representatives(6)
@EACH
@pytest.mark.parametrize(("keep", "share", "literal"), STAGES)
def test_the_kept_tokens_are_stage_one_and_stage_two(pair, keep, share, literal):
    """Claim: Eq. 6-7 over the guidance by hand: the smallest top set with lambda of the visual
    mass, at most the budget, then the rest of the budget evenly over the others, text always.

    ``literal`` spreads the whole budget again, as Eq. 7 is printed. Fails on a token more or less.
    """
    run = run_of(pair, f"specvlm/keep={keep}", share=share, follows_printed_equations=literal)
    scores = guidance(run.target, run.prefill.prompt)
    budget = share_of(len(scores), keep)
    assert kept(run) == two_stages(scores, share, budget, literal)
    assert run.pruned.places[~run.pruned.visual].tolist() == text_rows(run.whole)
    assert torch.equal(run.pruned.positions, run.whole.positions[:, run.pruned.places])
    if literal:
        assert len(kept(run)) > budget
    else:
        assert len(kept(run)) == budget == run.result.draft_visual_tokens


@EACH
def test_control_every_other_guidance_or_stage_keeps_other_tokens(pair):
    """Control: on the same runs, another reading of the guidance or of the stages keeps others."""
    share, keep = 0.3, 0.5
    run = run_of(pair, f"specvlm/keep={keep}", share=share)
    prompt = run.prefill.prompt
    right = guidance(run.target, prompt)
    budget = share_of(len(right), keep)
    first = two_stages(right, share, budget, True)
    assert kept(run) == two_stages(right, share, budget, False)

    full = torch.stack(attention(run.target, prompt)).double()  # [layer, head, query, key]
    visual = visual_rows(prompt)
    weights = full[:, :, queries(prompt)][..., visual]

    def by(scores: Tensor) -> list[int]:
        return two_stages(scores.tolist(), share, budget, False)

    drafts = torch.stack(attention(run.draft, run.whole)).double()
    wrong = {
        "stage II off": sorted(ranked(right)[:budget]),
        "stage I off": two_stages([1.0] * len(right), 0.0, budget, False),
        "Eq. 7 as printed": first,
        "another lambda": two_stages(right, 0.5, budget, False),
        "softmax over the video": by((weights / weights.sum(-1, keepdim=True)).mean((0, 1, 2))),
        "the draft's attention for the target's": by(
            drafts[:, :, queries(run.whole)][..., visual].mean((0, 1, 2))
        ),
        "the video asks the text": by(full[:, :, visual][..., text_rows(prompt)].sum((0, 1, 3))),
        "the video asks too": by(full[..., visual].mean((0, 1, 2))),
        "the last layer": by(weights[-1].mean((0, 1))),
        "the strongest query": by(weights.amax((0, 1, 2))),
    }
    for name, other in wrong.items():
        assert kept(run) != other, name


# -- the tree ----------------------------------------------------------------------------------


def token_paths(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def drawn_by_hand(after: Any) -> set[tuple[int, ...]]:
    """Fig. 9's paths with the tokens of those ranks; ``after(tokens)`` are the draft's logits."""
    tokens_by_path: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    best: dict[tuple[int, ...], list[int]] = {}
    for path in FIG9:
        above = path[:-1]
        if above not in best:
            logits = after(tokens_by_path[above]).clone()
            logits[list(BANNED)] = float("-inf")
            best[above] = ranked(logits.tolist(), 4)
        tokens_by_path[path] = (*tokens_by_path[above], best[above][path[-1]])
    del tokens_by_path[()]
    return set(tokens_by_path.values())


def by_oracle(model: Any, prompt: Prompt, text: list[int]) -> Any:
    oracle = Oracle(model, [prompt], [Sampling()])
    return lambda tokens: oracle.logits(0, [*text, *tokens])[-1]


@pytest.mark.representatives(1)
@EACH
@pytest.mark.parametrize("positions", ["original", "repacked"])
def test_every_round_drafts_fig_9_over_the_pruned_prompt(pair, positions):
    """Claim: 25 nodes; each holds the token of its rank in the draft's law over its pruned prompt,
    the committed text and the path above it.

    Naive: one uncached forward of the draft a node. Fails on a stale key, a wrong position, a mask
    that lets a sibling through, or a rank out of place. Over the whole video the trees differ.
    """
    run = run_of(pair, f"specvlm/positions={positions}", count=14)
    prompt = run.whole.select(torch.tensor(kept(run)))
    if positions == "repacked":
        rows = torch.arange(len(prompt))
        prompt = replace(
            prompt, positions=rows.expand(len(prompt.positions), -1), next_position=len(rows)
        )
    differs = 0
    for i, (round, text) in enumerate(run.texts()):
        drafted = token_paths(round.tree)
        assert len(drafted) == len(set(drafted)) == 25
        assert set(drafted) == drawn_by_hand(by_oracle(run.draft, prompt, text))
        if i == 1:
            differs += set(drafted) != drawn_by_hand(by_oracle(run.draft, run.whole, text))
    assert differs, "pruning must matter"


@pytest.mark.representatives(2)
@EACH
def test_a_self_draft_drafts_fig_9_over_its_own_kept_keys(pair):
    """Claim: without a second model, the target's own keys of the kept tokens, and no second
    prefill: those keys have seen the whole video, what is drafted sees a tenth of it.

    Naive: the modules with a mask. Fails if the pruned prompt were prefilled anew (the control).
    """
    run = run_of(pair, "specvlm-self", count=8)
    model, rows = run.target, run.pruned.places.tolist()
    scores = guidance(model, run.prefill.prompt)
    assert kept(run) == two_stages(scores, 0.5, share_of(len(scores), 0.1), False)
    anew = 0
    for round, text in list(run.texts())[:4]:
        waiting = [len(text) - 1] if text else []

        def after(tokens: tuple[int, ...], text=text, waiting=waiting) -> Tensor:
            sparse = [*waiting, *range(len(text), len(text) + len(tokens))]
            kept_rows = everywhere(model, rows)
            return sparse_logits(model, run.whole, [*text, *tokens], kept_rows, sparse)[-1]

        drafted = set(token_paths(round.tree))
        assert drafted == drawn_by_hand(after)
        anew += drafted != drawn_by_hand(by_oracle(model, run.pruned, text))
    assert anew


def test_the_draft_prunes_its_own_prompt_where_towers_differ():
    """Claim: a draft with a vision tower of its own keeps its own rows at the places the target's
    attention chose. Fails if it were given the target's embeddings or the target's positions.
    """
    run = run_of("two towers")
    own = prompt_of(run.draft, video_input(grid=(4, 6, 8)))
    assert torch.allclose(run.pruned.embeds, own.embeds[run.pruned.places], atol=1e-5)
    assert not torch.allclose(run.whole.embeds, run.prefill.prompt.embeds, atol=1e-2)
    shared = run_of("one tower")
    assert backbone(shared.draft).shares_rows_with(backbone(shared.target))
    visual = shared.whole.visual
    assert torch.equal(shared.whole.embeds[visual], shared.prefill.prompt.embeds[visual])
