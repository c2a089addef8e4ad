"""Claims about the views other papers compare with: oracles in plain loops, and variants that must
differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import FAMILIES, answered, input_for, prompt_of, qwen25, truth, video_input
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.core.capabilities import Capability
from saccade.core.prompt import Media, Prefill, Prompt
from saccade.core.protocols import View
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views import baseline_pruning, basic
from saccade.drafting.views.baseline_pruning import Merged
from saccade.drafting.views.basic import Pruned

# -- prompts -----------------------------------------------------------------------------------

SIZES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3
)
KINDS = st.sampled_from(["any", "steady", "cells"])
HOLES = st.sampled_from([0.0, 0.3])
SEEDS = st.integers(0, 999)
DIM = 4


def make(sizes: Any, kind: str = "any", seed: int = 0, holes: float = 0.0) -> Prompt:
    """Text, a medium, text, a medium, ..., text; ``holes`` is the share of cells that are missing.

    "steady" frames show one of four things everywhere, "cells" show one each: cosines are then 0 or
    1 to the last bit, and ties are everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    visual, grid, embeds = [False] * 2, [], [torch.randn(2, DIM, generator=generator)]
    for medium, (t, h, w) in enumerate(sizes):
        grid += [[medium, a, b, c] for a in range(t) for b in range(h) for c in range(w)]
        visual += [True] * (t * h * w) + [False]
        if kind == "any":
            rows = torch.randn(t * h * w, DIM, generator=generator)
        else:
            several = (t, 1) if kind == "steady" else (t, h * w)
            thing = torch.randint(0, DIM, several, generator=generator).expand(t, h * w)
            scale = 2.0 ** torch.randint(0, 3, several, generator=generator).expand(t, h * w)
            rows = (torch.eye(DIM)[thing] * scale[..., None]).flatten(0, 1)
        embeds += [rows, torch.randn(1, DIM, generator=generator)]
    seen, length = len(grid), len(visual)
    whole = Prompt(
        full_ids=torch.arange(length),
        embeds=torch.cat(embeds),
        positions=torch.randint(0, 99, (3, length), generator=generator).cumsum(1),
        visual=torch.tensor(visual),
        fixed=torch.zeros(len(visual), dtype=torch.bool),
        grid=torch.tensor(grid),
        places=torch.arange(length),
        next_position=9999,
        media=Media(tuple(torch.randn(seen, DIM, generator=generator) for _ in range(2))),
    )
    if not holes:
        return whole
    return whole.select((torch.rand(seen, generator=generator) >= holes).nonzero().squeeze(-1))


def chosen(selector: Any, prompt: Prompt, budget: int) -> list[int]:
    return selector(prompt, None, budget).tolist()


def budgets(prompt: Prompt) -> list[int]:
    seen = prompt.visual_tokens
    return sorted({0, 1, seen // 10, seen // 4, seen // 2, max(0, seen - 1), seen, seen + 3})


def frames_of(prompt: Prompt) -> list[list[int]]:
    frames: dict[tuple[int, int], list[int]] = {}
    for index, (medium, t, _, _) in enumerate(prompt.grid.tolist()):
        frames.setdefault((medium, t), []).append(index)
    return [frames[key] for key in sorted(frames)]


def visual_rows(prompt: Prompt) -> list[list[float]]:
    return prompt.embeds[prompt.visual].tolist()


# -- oracles -----------------------------------------------------------------------------------


def cosine(a: list[float], b: list[float]) -> float:
    length = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length


def average(rows: list[list[float]]) -> list[float]:
    """A running mean."""
    mean = [0.0] * len(rows[0])
    for count, row in enumerate(rows, start=1):
        mean = [m + (x - m) / count for m, x in zip(mean, row, strict=True)]
    return mean


def evenly(items: list[Any], count: int) -> list[Any]:
    """The middle of each of ``count`` equal stretches."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def filled(parts: list[list[int]], budget: int) -> list[int]:
    kept: list[int] = []
    for part in parts:
        if len(kept) + len(part) <= budget:
            kept += part
        else:
            kept += evenly(part, budget - len(kept))
            break
    return sorted(kept)


def slow_frames(prompt: Prompt, budget: int) -> list[int]:
    parts = frames_of(prompt)
    for count in range(len(parts) + 1):
        some = evenly(parts, count)
        if sum(len(part) for part in some) >= budget:
            return filled(some, budget)
    return list(range(prompt.visual_tokens))


def slow_window(where: str) -> Callable[[Prompt, int], list[int]]:
    def keep(prompt: Prompt, budget: int) -> list[int]:
        left = list(range(prompt.visual_tokens))
        while len(left) > budget:  # from the far end, or from both in turn
            odd = (prompt.visual_tokens - len(left)) % 2 == 1
            left.pop(0 if where == "end" or (where == "middle" and odd) else -1)
        return left

    return keep


def slow_fastvid(prompt: Prompt, budget: int, most: bool = False) -> list[int]:
    """``most``: the wrong way round, the frames most like the one before first."""
    rows, parts = visual_rows(prompt), frames_of(prompt)
    change: list[float] = []
    for number, part in enumerate(parts):
        before = parts[number - 1] if number else []
        if not before or prompt.grid[before[0], 0] != prompt.grid[part[0], 0]:
            change.append(math.inf)
        else:
            now, then = average([rows[i] for i in part]), average([rows[i] for i in before])
            change.append(1 - cosine(now, then))
    order, left = [], list(range(len(parts)))
    while left:
        pick = (min if most else max)(left, key=lambda i: change[i])  # the first of equals
        left.remove(pick)
        order.append(parts[pick])
    return filled(order, budget)


def slow_dycoke(prompt: Prompt, budget: int, least: bool = False) -> list[int]:
    """``least``: the wrong way round, the least similar tokens merge first."""
    rows, grid = visual_rows(prompt), [tuple(cell) for cell in prompt.grid.tolist()]
    at = {cell: index for index, cell in enumerate(grid)}
    kept, stride = set(range(prompt.visual_tokens)), 1
    last = max(t for _, t, _, _ in grid)
    while len(kept) > budget and stride <= last:
        pairs = []
        for start in range(0, last + 1, 4 * stride):
            one, two, three, four = (start + i * stride for i in range(4))
            for later, sooner in ((two, one), (four, three), (three, one)):
                for index, (medium, t, h, w) in enumerate(grid):
                    if t == later:
                        other = at.get((medium, sooner, h, w))
                        like = -math.inf if other is None else cosine(rows[index], rows[other])
                        pairs.append((-like if least else like, index))
        while pairs and len(kept) > budget:
            pairs.remove(best := max(pairs))  # of equals the later token
            kept.remove(best[1])
        stride *= 4
    return evenly(sorted(kept), budget)


def slow_rest(prompt: Prompt, budget: int) -> list[int]:
    return evenly(list(range(prompt.visual_tokens)), budget)


SELECTORS: dict[str, tuple[Any, Callable[[Prompt, int], list[int]]]] = {
    "frames": (baseline_pruning.frames, slow_frames),
    "front": (baseline_pruning.Window(0), slow_window("front")),
    "middle": (baseline_pruning.Window(1), slow_window("middle")),
    "end": (baseline_pruning.Window(2), slow_window("end")),
    "fastvid": (baseline_pruning.fastvid, slow_fastvid),
    "dycoke": (baseline_pruning.dycoke, slow_dycoke),
    "rest": (basic.uniform, slow_rest),
}
ALL: list[View] = [
    *baseline_pruning.VIEWS,
    baseline_pruning.POOLED,
]

each_selector = pytest.mark.parametrize("name", SELECTORS)
each_view = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)


def seeing(prompt: Prompt) -> Prefill:
    return Prefill(prompt, None, torch.zeros(3))


# -- selectors ---------------------------------------------------------------------------------


@pytest.mark.representatives(2)
@each_selector
@settings(max_examples=60)
@given(SIZES, KINDS, HOLES, SEEDS)
def test_a_selector_is_its_definition(name, sizes, kind, holes, seed):
    """Claim: at every budget the tokens are those of a plain loop over the definition.

    Ragged media, missing cells and ties included. Fails on any other order, tie or rounding.
    """
    if name == "fastvid" and kind == "cells":
        kind = "steady"  # means of cells round differently in a loop: no exact ties to compare
    selector, slow = SELECTORS[name]
    prompt = make(sizes, kind, seed, holes)
    if prompt.visual_tokens:
        for budget in budgets(prompt):
            assert chosen(selector, prompt, budget) == slow(prompt, budget)


@pytest.mark.representatives(2)
@each_selector
@settings(max_examples=40)
@given(SIZES, KINDS, HOLES, SEEDS)
def test_a_selector_keeps_exactly_its_budget(name, sizes, kind, holes, seed):
    """Claim: min(budget, seen) different tokens, increasing, of a prompt that is left alone.

    Fails if two methods compared at one share would see different amounts.
    """
    prompt = make(sizes, kind, seed, holes)
    before = prompt.embeds.clone(), prompt.grid.clone()
    for budget in budgets(prompt):
        kept = chosen(SELECTORS[name][0], prompt, budget)
        assert len(kept) == min(budget, prompt.visual_tokens) and kept == sorted(set(kept))
        assert all(0 <= index < prompt.visual_tokens for index in kept)
    assert torch.equal(prompt.embeds, before[0]) and torch.equal(prompt.grid, before[1])


@each_selector
def test_a_selector_reads_embeddings_of_any_precision(name):
    """Claim: bf16 rows are chosen among as their fp32 copies are. Fails if means or cosines are
    taken in bf16, where many more of them tie."""
    prompt = make([(9, 3, 3), (4, 2, 3)])
    slow = 1 + prompt.embeds / 20  # a video in which little changes
    half = replace(prompt, embeds=slow.bfloat16())
    full = replace(prompt, embeds=half.embeds.float())
    for budget in budgets(prompt):
        selector = SELECTORS[name][0]
        assert chosen(selector, half, budget) == chosen(selector, full, budget)


@pytest.mark.parametrize("whole", [1, 2, 3, 5])
def test_frames_are_whole_and_far_apart(whole):
    """Claim: frames are kept whole, and gaps between them differ by one at most.

    Fails if the first frames are kept, or a few tokens of each.
    """
    prompt = make([(16, 2, 3)])
    kept = chosen(baseline_pruning.frames, prompt, 6 * whole)
    times = sorted({int(prompt.grid[index, 1]) for index in kept})
    assert kept == [index for t in times for index in range(6 * t, 6 * t + 6)]
    gaps = {b - a for a, b in zip(times, times[1:], strict=False)}
    assert len(times) == whole and (not gaps or max(gaps) - min(gaps) <= 1)
    assert len(gaps) == 0 or min(gaps) > 1


def test_the_frame_that_does_not_fit_is_sampled_evenly():
    """Claim: what is left of the budget is spread over one frame. Fails if its top is kept."""
    prompt = make([(8, 1, 9)])
    kept = chosen(baseline_pruning.frames, prompt, 9 + 3)
    assert kept == [*range(2 * 9, 3 * 9), 6 * 9 + 1, 6 * 9 + 4, 6 * 9 + 7]


def test_windows_stand_at_the_front_in_the_middle_and_at_the_end():
    """Claim: three runs of neighbours. Fails if one is spread out or two are the same."""
    prompt = make([(5, 2, 1), (1, 1, 2)])
    assert chosen(baseline_pruning.Window(0), prompt, 3) == [0, 1, 2]
    assert chosen(baseline_pruning.Window(1), prompt, 3) == [4, 5, 6]
    assert chosen(baseline_pruning.Window(2), prompt, 3) == [9, 10, 11]


def scene(*looks: int) -> Prompt:
    """One-cell frames; equal numbers look alike, others do not."""
    prompt = make([(len(looks), 1, 1)])
    embeds = prompt.embeds.clone()
    embeds[prompt.visual] = torch.eye(DIM)[list(looks)]
    return replace(prompt, embeds=embeds)


def test_fastvid_keeps_the_cuts():
    """Claim: the frames kept first are those after a change, the first of the video among them.

    Fails if similarity is kept instead of change, or measured to the next frame.
    """
    prompt = scene(0, 0, 0, 1, 1, 2, 2, 2)
    assert chosen(baseline_pruning.fastvid, prompt, 3) == [0, 3, 5]
    assert chosen(baseline_pruning.fastvid, prompt, 4) == [0, 1, 3, 5], "of equals the first"
    assert slow_fastvid(prompt, 3, most=True) != [0, 3, 5]


def test_fastvid_begins_each_medium_anew():
    """Claim: a second video's first frame counts as a change however it looks.

    Fails if it is compared with the first video's last frame.
    """
    prompt = make([(3, 1, 1), (3, 1, 1)])
    embeds = prompt.embeds.clone()
    embeds[prompt.visual] = torch.eye(DIM)[[0, 0, 0, 0, 0, 0]]
    assert chosen(baseline_pruning.fastvid, replace(prompt, embeds=embeds), 2) == [0, 3]


def test_dycoke_drops_the_most_similar_first():
    """Claim: within groups of four, second merges into first, fourth into third, third into first.

    Fails if the least similar go first, or if a frame is compared with another than that.
    """
    prompt = scene(0, 0, 1, 1, 2, 3, 2, 0)
    # alike: 1 to 0, 3 to 2, and 6 to 4; the others show something new
    assert chosen(baseline_pruning.dycoke, prompt, 5) == [0, 2, 4, 5, 7]
    assert chosen(baseline_pruning.dycoke, prompt, 7) == [0, 1, 2, 3, 4, 5, 7]
    assert slow_dycoke(prompt, 5, least=True) != [0, 2, 4, 5, 7]


def test_dycoke_below_a_quarter_merges_the_first_frames_of_groups():
    """Claim: a budget of two frames of sixteen leaves the first, and of the heads of groups the
    one least like its own. Fails if a group's later frames outlive another group's head."""
    looks = [0, 1, 2, 3] + [0, 3, 2, 1] + [1, 2, 3, 0] + [1, 0, 2, 3]
    # heads 0, 4, 8, 12: 4 is like 0, 12 is like 8, 8 is like neither
    assert chosen(baseline_pruning.dycoke, scene(*looks), 4) == [0, 4, 8, 12]
    assert chosen(baseline_pruning.dycoke, scene(*looks), 2) == [0, 8]
    assert chosen(baseline_pruning.dycoke, scene(*looks), 1) == [0]


@pytest.mark.parametrize("slow", [slow_fastvid, slow_dycoke])
def test_the_wrong_way_round_is_another_view(slow):
    """Claim: keeping what is most alike is not what the oracles accept.

    Fails if the comparison with them could not tell the two apart.
    """
    prompt = make([(9, 3, 3), (6, 2, 2)], seed=3)
    name = "fastvid" if slow is slow_fastvid else "dycoke"
    for budget in (prompt.visual_tokens // 4, prompt.visual_tokens // 2):
        assert chosen(SELECTORS[name][0], prompt, budget) != slow(prompt, budget, True)


def test_no_two_selectors_are_one_but_rest_is_uniform():
    """Claim: at a tenth each compares something else, save the stage-II ablation, which the paper
    does without attention: that is an even sample of everything. Fails if two were mixed up."""
    prompt = make([(16, 4, 4)])
    kept = {name: tuple(chosen(s, prompt, 26)) for name, (s, _) in SELECTORS.items()}
    assert len(set(kept.values())) == len(kept)
    assert kept["rest"] == tuple(chosen(basic.uniform, prompt, 26))


# -- merging -----------------------------------------------------------------------------------


def slow_merge(prompt: Prompt, kept: list[int], rows: list[list[float]]) -> list[list[float]]:
    grid = prompt.grid.tolist()
    joined: dict[int, list[list[float]]] = {index: [] for index in kept}
    for index, (medium, t, h, w) in enumerate(grid):
        sooner = [
            other
            for other in kept
            if grid[other][0] == medium and grid[other][2:] == [h, w] and grid[other][1] <= t
        ]
        if sooner:
            joined[max(sooner, key=lambda other: grid[other][1])].append(rows[index])
    return [average(joined[index]) for index in kept]


def some(prompt: Prompt, target_attention: Any, budget: int) -> Tensor:
    """A selector with no plan in it, so that tokens are dropped before and after kept ones."""
    return basic.RANDOM.select(prompt, target_attention, budget)


@settings(max_examples=60)
@given(SIZES, HOLES, SEEDS, st.sampled_from([0.1, 0.3, 0.6, 1.0]))
def test_merged_rows_are_means_of_what_was_dropped(sizes, holes, seed, keep):
    """Claim: each kept row is the running mean of itself and the dropped rows of its cell after it
    and before the next kept one; the rest of the prompt is as if it had been pruned.

    Fails if tokens are dropped, merged forwards, across media or into another cell.
    """
    prompt = make(sizes, "any", seed, holes)
    pruned = Pruned("some", some, keep)(seeing(prompt), prompt)
    merged = Merged("some", some, keep)(seeing(prompt), prompt)
    kept = [prompt.places[prompt.visual].tolist().index(i) for i in pruned.places[pruned.visual]]
    for name in ("full_ids", "positions", "visual", "grid", "places"):
        assert torch.equal(getattr(merged, name), getattr(pruned, name))
    assert merged.next_position == pruned.next_position
    assert torch.equal(merged.embeds[~merged.visual], prompt.embeds[~prompt.visual])
    pairs = [(prompt.embeds[prompt.visual], merged.embeds[merged.visual])]
    for before, after in [
        *pairs,
        *zip(prompt.media.deepstack, merged.media.deepstack, strict=True),
    ]:
        expected = torch.tensor(slow_merge(prompt, kept, before.tolist())).view(-1, DIM)
        torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def test_merging_is_not_dropping():
    """Claim: the view called dycoke averages; its selector alone does not. Fails if they agree."""
    prompt = make([(8, 2, 2)])
    merged = replace(baseline_pruning.DYCOKE, keep=0.25)(seeing(prompt), prompt)
    pruned = Pruned("dycoke", baseline_pruning.dycoke, 0.25)(seeing(prompt), prompt)
    assert merged.visual_tokens == pruned.visual_tokens == 8 and torch.equal(
        merged.grid, pruned.grid
    )
    every = prompt.embeds[prompt.visual].view(2, 4, 4, DIM)
    torch.testing.assert_close(merged.embeds[merged.visual], every.mean(1).flatten(0, 1))
    assert not torch.allclose(merged.embeds, pruned.embeds)


def test_bf16_rows_are_averaged_in_fp32():
    """Claim: a bf16 mean is the fp32 mean rounded once, and a lone row keeps its bits.

    Fails if sums are rounded as they grow.
    """
    prompt = make([(9, 2, 2)])
    prompt = replace(prompt, embeds=prompt.embeds.bfloat16())
    merged = Merged("front", baseline_pruning.Window(0), 1 / 9)(seeing(prompt), prompt)
    mean = sum(prompt.embeds[prompt.visual].float().view(9, 4, DIM)) / 9
    assert torch.equal(merged.embeds[merged.visual], mean.bfloat16())
    prompt = make([(2, 2, 2)])
    prompt = replace(prompt, embeds=prompt.embeds.bfloat16())
    merged = Merged("end", baseline_pruning.Window(2), 0.5)(seeing(prompt), prompt)
    assert merged.embeds.dtype == torch.bfloat16
    assert torch.equal(merged.embeds[merged.visual], prompt.embeds[prompt.visual][4:])


# -- pooling -----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(SIZES, HOLES, SEEDS)
def test_pooled_rows_are_means_of_blocks(sizes, holes, seed):
    """Claim: one row per 2x2 block of each frame, the mean of the members present, with the index
    and position of the first of them; text stays. Fails at ragged edges, across frames or media.
    """
    prompt = make(sizes, "any", seed, holes)
    if not prompt.visual_tokens:
        return
    blocks: dict[tuple[int, ...], list[int]] = {}
    for index, (medium, t, h, w) in enumerate(prompt.grid.tolist()):
        blocks.setdefault((medium, t, h // 2, w // 2), []).append(index)
    order = sorted(blocks, key=lambda block: blocks[block][0])
    first = torch.tensor([blocks[block][0] for block in order])
    pooled = baseline_pruning.POOLED(seeing(prompt), prompt)
    corner = prompt.select(first)
    assert pooled.grid.tolist() == [list(block) for block in order]
    for name in ("full_ids", "positions", "visual", "places"):
        assert torch.equal(getattr(pooled, name), getattr(corner, name))
    assert pooled.next_position == prompt.next_position
    assert torch.equal(pooled.embeds[~pooled.visual], prompt.embeds[~prompt.visual])
    pairs = [(prompt.embeds[prompt.visual], pooled.embeds[pooled.visual])]
    for before, after in [
        *pairs,
        *zip(prompt.media.deepstack, pooled.media.deepstack, strict=True),
    ]:
        rows = before.tolist()
        expected = torch.tensor([average([rows[i] for i in blocks[block]]) for block in order])
        torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def test_pooled_stands_at_the_top_left():
    """Claim: 3x5 cells pool to 2x3, at rows and columns 0, 2, 4. Fails if edges are cut off."""
    prompt = make([(2, 3, 5)])
    pooled = baseline_pruning.POOLED(seeing(prompt), prompt)
    assert pooled.visual_tokens == 2 * 2 * 3
    stood = prompt.grid[pooled.places[pooled.visual] - 2]  # two rows of text come first
    assert torch.equal(stood[:, :2], pooled.grid[:, :2])
    assert torch.equal(stood[:, 2:], pooled.grid[:, 2:] * 2)


# -- views -------------------------------------------------------------------------------------


@each_view
def test_a_view_of_no_video_changes_nothing(kind):
    """Claim: a prompt of text goes through unchanged, to the last field. Fails on an empty grid."""
    for family in ("llama", "qwen2_5_vl"):
        prompt = prompt_of(FAMILIES[family](0), input_for(family, 0))
        prompt = prompt.select(torch.arange(0))
        view = kind(seeing(prompt), prompt)
        for name in ("full_ids", "embeds", "positions", "visual", "grid", "places"):
            assert torch.equal(getattr(view, name), getattr(prompt, name))
        assert view.next_position == prompt.next_position and view.reading.heads is None


@each_view
def test_a_view_keeps_a_share_of_a_real_prompt(kind):
    """Claim: the protocol is met, and a tenth (pooled: a quarter) of the video is left, all text
    with it and every row where it stood. Fails if a position moves or text is lost."""
    assert isinstance(kind, View) and kind.needs <= {Capability.AVERAGES_BEFORE_PROJECTOR}
    prompt = prompt_of(qwen25(), video_input(grid=(8, 8, 12)))
    view = kind(seeing(prompt), prompt)
    assert (
        view.visual_tokens == (48 if kind.name == "pooled" else 19) and prompt.visual_tokens == 192
    )
    assert len(view) == len(prompt) - prompt.visual_tokens + view.visual_tokens
    assert torch.equal(view.positions, prompt.positions[:, view.places])
    assert torch.equal(view.visual, prompt.visual[view.places])


@pytest.mark.parametrize(
    "kind", [baseline_pruning.DYCOKE, baseline_pruning.POOLED], ids=lambda kind: kind.name
)
def test_a_draft_can_read_averaged_rows(kind):
    """Claim: drafting on them changes nothing in the answer and is accepted now and then.

    Fails if a session cannot prefill such a prompt: then the answer falls back to plain decoding.
    """
    recipe = Recipe(kind.name, "", ModelDrafter, Chain(4), serial, view=kind)
    result = answered("qwen2_5_vl", recipe)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    assert result.tau is not None and result.tau > 1
