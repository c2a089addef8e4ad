"""``pages``: steps of its draft computed by Hugging Face's own modules, over the keys they should
read; how much it reads; and that nothing of it reaches the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import CASES, case
from helpers import (
    backbone,
    hf_greedy,
    left_padded,
    qwen25,
    text_input,
    video_input,
)
from torch import Tensor
from transformers import AttentionInterface

import saccade
from saccade.core.errors import MethodError
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, chain
from saccade.methods import resolve
from saccade.methods.names import choices
from saccade.methods.pages import ByPage
from saccade.model.cache import Cache, HeadShape, Pages
from saccade.model.session import Session
from saccade.ui.kept_visual_tokens import kept_share

BY_FAMILY = pytest.mark.parametrize("family", CASES)


def read_by_hand(
    q: Tensor, k: Tensor, v: Tensor, scale: float, begins: int, seen: Tensor, view: ByPage
) -> Tensor:
    """One sequence's attention: rows from ``begins`` on read, of the visual keys, the pages whose
    mean key they attend to the most among pages, summed over the heads of a group."""
    groups, pages = len(q) // len(k), seen[: len(seen) // view.page * view.page]
    pages = pages.view(-1, view.page)
    assert view.keep is not None
    count = max(1, round((round(view.keep * len(seen)) - len(seen) % view.page) / view.page))
    out = torch.empty_like(q)
    for row in range(q.shape[1]):
        for head in range(len(k)):
            own = slice(head * groups, (head + 1) * groups)
            asks = q[own, row] * scale
            reads = torch.ones(row + 1, dtype=torch.bool)
            if row >= begins:
                shares = (asks @ k[head, pages].mean(1).T).softmax(-1).sum(0)
                reads[pages[shares.sort().indices[:-count]]] = False
            mixed = (asks @ k[head, : row + 1][reads].T).softmax(-1)
            out[own, row] = mixed @ v[head, : row + 1][reads]
    return out


@pytest.mark.parametrize(("page", "keep"), [(4, 0.3), (1, 0.2), (3, 0.5)])
@BY_FAMILY
def test_a_step_reads_the_pages_it_asks_for(
    family: str, page: int, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the laws along a draft of three are those of Hugging Face's modules where every row of
    the draft reads, in each layer, the text, what fills no page and the pages it asks for.

    Fails if a page is chosen by another row, head or layer, at prefill, or by other than its mean.
    """
    model, inputs = case(family)
    view, target = ByPage(keep=keep, page=page), backbone(model)
    (prompt,) = target.prompts(inputs)
    session = Session(target, [Sampling()])
    (prefill,) = session.prefill([prompt])
    draft = Session(target, [Sampling()])
    draft.fork([prefill], [view(prefill, prompt)])
    tokens = [11, 12, 13]
    draft.commit({0: tokens[:1]})
    draft_logits = [
        draft.score({0: chain(tokens[1:stop])})[0].rows[-1].clone() for stop in range(1, 1 + 3)
    ]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Any:
        seen = prompt.visual.nonzero().squeeze(-1)
        out = read_by_hand(q[0], k[0], v[0], options["scaling"], len(prompt), seen, view)
        return out.transpose(0, 1)[None], None

    theirs = case(family)[0]
    decoder = theirs.get_decoder()
    AttentionInterface.register("by_hand", attend)
    monkeypatch.setattr(decoder.config, "_attn_implementation", "by_hand")
    embeds = torch.cat([prompt.embeds, target.embed(tokens)])
    positions = torch.arange(prompt.next_position, prompt.next_position + len(tokens))
    positions = torch.cat([prompt.positions, positions.expand(len(prompt.positions), -1)], 1)
    with torch.no_grad():
        hidden = decoder(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            use_cache=False,
        )[0][0, len(prompt) :]
        right = theirs.lm_head(hidden)
    for own, law in zip(draft_logits, right, strict=True):
        known = own.isfinite()  # placeholders are never drafted
        assert torch.allclose(own[known], law[known], atol=2e-4)


def test_how_much_is_read() -> None:
    """Claim: a step reads K visual keys to within half a page (to within a page where what fills
    none is nearly K); what fills no page is always among them. Where pages are larger than K one of
    K is read, and they are no larger than what is left out: no page is so large that all is read.
    """
    target = backbone(qwen25())
    (prompt,) = target.prompts(video_input(1, grid=(2, 8, 10)))
    (prefill,) = Session(target, [Sampling()]).prefill([prompt])
    every = prompt.places[prompt.visual].tolist()
    for page, keep in ((1, 0.1), (3, 0.3), (4, 0.5), (7, 0.5), (50, 0.2), (50, 0.6), (9, 0.9)):
        pruned = ByPage(keep=keep, page=page)(prefill, prompt)
        wanted, paged = max(1, round(keep * len(every))), pruned.reading.paged
        assert paged is not None
        size = min(page, wanted, len(every) - wanted)
        assert paged.rows.shape[1] == size and abs(pruned.visual_tokens - wanted) <= max(
            size / 2, 0.5
        )
        alone = pruned.places[pruned.visual].tolist()
        assert len(alone) == len(every) % size
        assert sorted([*paged.rows.flatten().tolist(), *alone]) == every
        assert len(pruned) == int((~prompt.visual).sum()) + len(alone)
    assert ByPage(keep=1.0)(prefill, prompt) is prompt


def test_what_is_read_is_the_sources() -> None:
    """Claim: a cache's first rows are the keys and values of the chosen pages, each head's own,
    also once the source has grown. Fails if a head reads another's."""
    generator = torch.Generator().manual_seed(3)
    source = Cache([HeadShape(3, 4, 4)] * 2, 30)
    for tensors in (source.keys, source.values):
        for layer in tensors:
            layer.normal_(generator=generator)
    source.advance(30)
    view = ByPage(keep=0.5, page=2)
    target = backbone(qwen25())
    (prompt,) = target.prompts(video_input(1, grid=(2, 4, 6)))
    paged = view(Session(target, [Sampling()]).prefill([prompt])[0], prompt).reading.paged
    assert paged is not None
    pages, into = Pages(source, paged, 2), Cache([HeadShape(3, 4, 4)] * 2, paged.slots + 5)
    before = [keys.clone() for keys in source.keys]
    source.reserve(60)
    for layer in range(2):
        q = torch.randn(6, 1, 4, generator=generator)
        pages.copy_best_pages(into, layer, q)
        for head, chosen in enumerate(pages.best_pages(layer, q)):
            rows = paged.rows[chosen].flatten()
            assert torch.equal(into.keys[layer][head, : paged.slots], before[layer][head, rows])
            values = source.values[layer][head, rows]
            assert torch.equal(into.values[layer][head, : paged.slots], values)


# -- the answer --------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["pages/page=2/keep=0.5", "specvlm-self/view=pages/page=2"])
@BY_FAMILY
def test_the_answer_is_the_targets(family: str, method: str) -> None:
    """Claim: greedy answers equal generate()'s, of chains and of trees, and drafts are accepted."""
    model, inputs = case(family)
    result = saccade.run(backbone(model), inputs, method=method, max_new_tokens=40)
    assert list(result.ids) == hf_greedy(model, inputs, 40)
    assert result.fallback_reason is None and any(each.accepted for each in result.forwards)


def test_a_batch_reads_each_its_own() -> None:
    """Claim: in a batch every request's answer, and its drafts, are those it has alone."""
    model = qwen25()
    many = [video_input(seed, grid=(2, 8, 10)) for seed in (1, 2)]
    settings = {"method": "pages/keep=0.3", "max_new_tokens": 20}
    alone = [saccade.run(model, one, **settings) for one in many]
    together = saccade.stream(model, left_padded(many), **settings).finish()
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert [each.tokens for each in one.rounds] == [each.tokens for each in other.rounds]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("pages/page=0", "not a whole number above 0"),
        ("pages/page=few", "not a whole number above 0"),
        ("std/page=4", "view=pages"),
        ("pages/refresh=1", "needs a view by attention"),
        ("specvlm/view=pages", "drafter=self"),
        ("pages/keep=0.1/keys=300", "give one of them"),
    ],
)
def test_what_cannot_be_is_reported(method: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        resolve(method)


def test_a_page_is_named_where_it_is_not_the_usual() -> None:
    """Claim: the axis is read and told back."""
    assert choices(resolve("pages/page=8"))["page"] == "8"
    assert "page" not in choices(resolve("pages/page=4"))
    assert resolve("pages/keys=300").view == ByPage(keys=300)


def test_text_alone_has_no_pages() -> None:
    """Claim: with no video and no document it answers, and says that nothing is pruned."""
    result = saccade.run(qwen25(), text_input(), method="pages", max_new_tokens=12)
    assert list(result.ids) == hf_greedy(qwen25(), text_input(), 12)
    assert result.fallback_reason is None
    assert "context=" in " ".join(result.warnings)


def test_a_law_is_of_its_path() -> None:
    """Claim: what follows a path has the same law alone, in one forward with what stands before it,
    beside siblings in a tree, and after others were scored. Fails if rows share what they read."""
    target = backbone(qwen25())
    (prompt,) = target.prompts(video_input(1, grid=(2, 8, 10)))
    (prefill,) = Session(target, [Sampling()]).prefill([prompt])

    def law(node: int, *trees: Tree) -> Tensor:
        draft = Session(target, [Sampling()])
        draft.fork([prefill], [ByPage(keep=0.3)(prefill, prompt)])
        draft.commit({0: [11]})
        for tree in trees:
            scores = draft.score({0: tree})[0]
        return scores.rows[1 + node]

    tree = Tree((40, 12, 41, 13), (ROOT, ROOT, 0, 1), (None,) * 4)
    right = law(1, chain([12]), chain([12, 13]))
    other = chain([40, 41, 42])
    laws = law(1, chain([12, 13])), law(3, tree), law(1, other, chain([12, 13]))
    assert all(torch.allclose(own, right, atol=1e-4) for own in laws)
    assert not torch.allclose(law(1, chain([40, 13])), right, atol=1e-2)


def test_a_picture_of_it_shows_what_a_step_reads() -> None:
    """Claim: on the page's pictures the visible shares of all tokens add up to a step's reading."""
    target = backbone(qwen25())
    (prompt,) = target.prompts(video_input(1, grid=(2, 8, 10)))
    (prefill,) = Session(target, [Sampling()]).prefill([prompt])
    pruned = ByPage(keep=0.3, page=3)(prefill, prompt)
    shares = kept_share(prompt, pruned)
    assert len(shares) == prompt.visual_tokens and float(shares.sum()) == pytest.approx(
        pruned.visual_tokens
    )
