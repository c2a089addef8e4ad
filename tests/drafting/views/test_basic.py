"""Claims about views: what the draft reads, and where it thinks it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import backbone, qwen25, video_input

from saccade.core.prompt import Media, Prefill, Prompt, with_documents
from saccade.core.sampling import Sampling
from saccade.drafting.views import basic
from saccade.drafting.views.basic import Pruned
from saccade.model.session import Session

VIEWS = [basic.RANDOM, basic.UNIFORM, basic.SCATTERED, basic.ATTENTION]


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    target = backbone(qwen25())
    prompts = target.prompts(video_input(grid=(4, 6, 8)))
    return Session(target, [Sampling()]).prefill(prompts, record=True)[0]


def _kept(prefill: Prefill, pruned: Prompt) -> list[int]:
    """Which visual tokens of the whole prompt a pruned one still has."""
    visual = prefill.prompt.places[prefill.prompt.visual].tolist()
    return [visual.index(row) for row in pruned.places[pruned.visual].tolist()]


@pytest.mark.parametrize("kind", VIEWS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("keep", [0.05, 0.1, 0.5, 1.0])
def test_a_view_keeps_its_budget_and_all_text_where_it_stood(prefill, kind, keep):
    """Claim: rows, positions and grid are those of the whole prompt at the kept places.

    Fails if text is lost, order changes, a position moves, or the budget is missed.
    """
    whole = prefill.prompt
    pruned = Pruned(kind.name, kind.select, keep, kind.attention)(prefill, whole)
    assert pruned.visual_tokens == max(1, int(whole.visual_tokens * keep + 0.5))
    rows = pruned.places
    assert bool((rows[1:] > rows[:-1]).all())
    assert torch.equal(pruned.embeds, whole.embeds[rows])
    assert torch.equal(pruned.positions, whole.positions[:, rows])
    assert torch.equal(pruned.visual, whole.visual[rows])
    assert torch.equal(pruned.grid, whole.grid[_kept(prefill, pruned)])
    assert int((~pruned.visual).sum()) == int((~whole.visual).sum())
    assert pruned.next_position == whole.next_position
    assert torch.equal(pruned.full_ids, whole.full_ids), "penalties must see the whole prompt"


def test_full_and_none_are_the_two_ends(prefill):
    """Claim: full is the prompt itself, none its text. Fails if either leaves a row too many."""
    whole = prefill.prompt
    full = basic.FULL(prefill, whole)
    assert (
        torch.equal(full.embeds, whole.embeds) and full.visual_tokens == whole.visual_tokens == 48
    )
    none = basic.NONE(prefill, whole)
    assert none.visual_tokens == 0 and len(none) == len(whole) - whole.visual_tokens


def test_repacked_counts_from_zero_on_every_axis(prefill):
    """Claim: positions 0, 1, 2, ... and the answer right behind. Fails if a gap is left."""
    packed = Pruned("uniform", basic.uniform, 0.1, positions="repacked")(prefill, prefill.prompt)
    assert packed.positions.tolist() == [list(range(len(packed)))] * 3
    assert packed.next_position == len(packed)
    original = Pruned("uniform", basic.uniform, 0.1)(prefill, prefill.prompt)
    assert torch.equal(packed.embeds, original.embeds)
    assert not torch.equal(packed.positions, original.positions)


@pytest.mark.parametrize("keep", [0.5, 0.25, 0.1])
def test_what_is_affordable_of_a_text_has_no_holes(prefill, keep):
    """Claim: of each document ``auto`` keeps the first rows, and of the video those of an even
    sample, all of the same share. Fails where a document is sampled like a video: a draft that
    reads every fourth token of a text drafts as if it had none."""
    video = prefill.prompt
    text = (~video.visual & ~video.fixed).nonzero().squeeze(-1)
    marked = torch.zeros(len(video), dtype=torch.bool)
    marked[text[: len(text) // 2]] = marked[text[-(len(text) // 3) :]] = True
    whole = with_documents(video, marked)
    view = basic.AFFORDABLE.with_share(keep)
    chosen = torch.zeros(whole.visual_tokens, dtype=torch.bool)
    chosen[view.choose(prefill, whole)] = True
    assert whole.document_rows.any() and not whole.document_rows.all()
    media = whole.grid[:, 0]
    for number in media[whole.document_rows].unique():
        own = chosen[media == number]
        count = int(own.sum())
        assert own[:count].all() and abs(count - keep * len(own)) <= 1
    alone = view.choose(prefill, video)
    assert torch.equal(alone, basic.scattered(video, None, len(alone)))
    assert abs(int(chosen[~whole.document_rows].sum()) - len(alone)) <= 1


def test_of_many_short_documents_as_many_tokens_are_kept_as_the_budget_says():
    """Claim: the parts of several short documents add up to the budget. Fails if the part of each
    is rounded by itself, which keeps none or too many."""
    (text,) = backbone(qwen25()).prompts({"input_ids": torch.arange(5, 29)[None]})
    # Six documents of three tokens, each after a token of text.
    whole = with_documents(text, torch.arange(24) % 4 > 0)
    assert whole.visual_tokens == 18
    for budget in range(1, 19):
        assert len(basic.scattered_or_first(whole, None, budget)) == budget


@pytest.mark.parametrize("keep", [0.5, 0.25, 0.1])
def test_scattered_is_even_and_in_step_with_no_grid(keep):
    """Claim: whatever the width of the grid, every column keeps about its share, and so does every
    stretch of 64 tokens. Control: evenly spaced tokens leave whole columns out."""
    missed = {}
    for kind in (basic.SCATTERED, basic.UNIFORM):
        shares, stretches = [], []
        for width in (4, 7, 8, 14, 16, 20, 28):
            count = width * 64
            kept = torch.zeros(count)
            kept[kind.select(_visual(count), None, int(keep * count))] = 1
            shares += kept.view(-1, width).mean(0).tolist()
            stretches += kept.view(-1, 64).mean(1).tolist()
        assert max(abs(share - keep) for share in stretches) < 0.05
        missed[kind.name] = max(abs(share - keep) for share in shares)
    assert missed["scattered"] < 0.1 and missed["uniform"] > keep - 0.02


def _visual(count: int) -> Prompt:
    """A prompt of nothing but visual tokens."""
    rows, every = torch.arange(count), torch.ones(count, dtype=torch.bool)
    return Prompt(
        full_ids=rows,
        embeds=torch.zeros(count, 1),
        positions=rows[None],
        visual=every,
        fixed=~every,
        grid=torch.zeros(count, 4, dtype=torch.long),
        places=rows,
        next_position=count,
    )


def test_random_reproduces_and_is_not_uniform(prefill):
    """Claim: the random view is a function of the prompt. Fails if it draws global randomness."""
    torch.manual_seed(1)
    first = _kept(prefill, basic.RANDOM(prefill, prefill.prompt))
    torch.manual_seed(2)
    assert _kept(prefill, basic.RANDOM(prefill, prefill.prompt)) == first
    assert first != _kept(prefill, basic.UNIFORM(prefill, prefill.prompt))


def test_random_is_another_draw_for_another_video(prefill):
    """Claim: two videos of one length are pruned by different draws, the same video always by the
    same, also where its embeddings are off by rounding; each number of ``draw`` is another. Fails
    for a seed of the length alone, our old one, by which an interval over clips has one draw."""
    prompt = prefill.prompt

    def drawn(factor: float, number: int = 0) -> list[int]:
        embeds = prompt.embeds * factor + (factor - 1) * torch.arange(len(prompt))[:, None]
        other = replace(prompt, embeds=embeds)
        return basic.Random(number)(other, None, 12).tolist()

    assert drawn(1.0) == drawn(1 + 1e-7)
    assert len({tuple(drawn(factor)) for factor in (1.0, 1.5, 2.0, 3.0)}) == 4
    assert len({tuple(drawn(1.0, number)) for number in range(4)}) == 4


def test_attention_keeps_the_most_attended(prefill):
    """Claim: no dropped token was attended more than a kept one. Fails on any other ranking."""
    mass = prefill.mass.mean((0, 1))
    kept = _kept(prefill, basic.ATTENTION(prefill, prefill.prompt))
    dropped = [i for i in range(48) if i not in kept]
    assert len(kept) == 5
    assert mass[kept].min() >= mass[dropped].max()


def test_a_view_that_needs_attention_says_so(prefill):
    """Claim: without recorded mass such a view fails by name. Fails if it prunes by nothing."""
    blind = Prefill(prefill.prompt, prefill.cache, prefill.logits, None)
    with pytest.raises(AssertionError, match="view attention needs recorded attention"):
        basic.ATTENTION(blind, prefill.prompt)


def test_select_keeps_deepstack_rows_with_their_tokens(prefill):
    """Claim: rows added to early layers are pruned with their visual tokens (Qwen3-VL)."""
    whole = prefill.prompt
    stamps = torch.arange(whole.visual_tokens, dtype=torch.float32)[:, None].expand(-1, 128)

    deep = replace(whole, media=Media(deepstack=(stamps, stamps + 100)))
    pruned = deep.select(torch.tensor([40, 3, 7]))
    assert [layer[:, 0].tolist() for layer in pruned.media.deepstack] == [
        [3, 7, 40],
        [103, 107, 140],
    ]
    assert _kept(prefill, pruned) == [3, 7, 40]
