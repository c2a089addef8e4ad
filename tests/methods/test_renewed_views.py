"""``fresh``: what its judged rows attended to, recomputed from full attention matrices; which keys
the draft holds; and that nothing of it reaches the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import CASES, attention, case, visual_rows
from conversations import further, question
from helpers import (
    backbone,
    gemma3,
    hf_greedy,
    left_padded,
    qwen25,
    text_input,
    video_input,
)
from torch import Tensor

import saccade
from saccade.core.errors import MethodError
from saccade.core.prompt import Prompt
from saccade.core.protocols import Refresh
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, chain
from saccade.methods import resolve
from saccade.methods.fresh import PROVIDES
from saccade.methods.names import choices
from saccade.methods.std import PerHead
from saccade.model.batch_invariant import BatchInvariantSession
from saccade.model.cache import Cache, HeadShape
from saccade.model.session import Session

ROWS = 4


FAMILIES = pytest.mark.parametrize("family", CASES)


def by_hand(model: Any, prompt: Any, tokens: list[int], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Mass and relevance of these rows of prompt and text, from the modules' own matrices."""
    groups = model.get_decoder().config.num_key_value_heads
    seen = visual_rows(prompt)
    mass, relevance = [], []
    for matrices in attention(model, prompt, tokens):
        own = matrices[:, rows][..., seen].double()
        among = own / own.sum(-1, keepdim=True)
        mass.append(own.reshape(groups, -1, len(seen)).mean(1))
        relevance.append(among.reshape(groups, -1, len(seen)).mean(1))
    return torch.stack(mass), torch.stack(relevance)


@pytest.mark.parametrize("kind", [Session, BatchInvariantSession])
@FAMILIES
def test_it_tells_what_the_last_judged_rows_attended_to(family, kind):
    """Claim: after a prefill, a draft accepted in part and one that was refused, ``again`` gives
    the attention of the last four rows that were committed and read, as the modules compute it.

    Fails if a refused row counts, a committed one is left out, or a row sees too many keys.
    """
    model, inputs = case(family)
    target = backbone(model)
    (prompt,) = target.prompts(inputs)
    session = kind(target, [Sampling()])
    prefill = _all(session.prefill_in_chunks(0, prompt, record=True, follow_rows=ROWS))
    text: list[int] = []

    def check() -> None:
        read = len(prompt) + len(text) - (1 if text else 0)  # the last one's row is yet to come
        rows = list(range(read - ROWS, read))
        newer = prefill.with_latest_attention()
        for scores, right in zip(
            (newer.mass, newer.relevance), by_hand(model, prompt, text, rows), strict=True
        ):
            assert torch.allclose(scores.double(), right, atol=2e-5)

    check()
    for drafted, emitted in (([11, 12, 13], [11, 12, 40]), ([50, 51], [60]), ([7], [7, 8])):
        session.score({0: chain(drafted)})
        session.commit({0: emitted})
        text += emitted
        check()


def test_layers_with_a_window_are_left_out_as_in_the_prefill():
    """Claim: the mass of layers with a window is 0, in a prefill and after later rows alike. Fails
    if their rows are taken to see keys that their window has passed."""
    target = backbone(gemma3())
    (prompt,) = target.prompts(text_input(0, 40))
    visual = torch.arange(40) < 20
    grid = torch.zeros(20, 4, dtype=torch.long)
    prompt = replace(prompt, visual=visual, grid=grid)
    session = Session(target, [Sampling()])
    prefill = _all(session.prefill_in_chunks(0, prompt, record=True, follow_rows=ROWS))
    session.score({0: chain([11, 12])})
    session.commit({0: [11, 12]})
    newer = prefill.with_latest_attention()
    for mass in (prefill.mass, newer.mass, prefill.relevance, newer.relevance):
        assert mass.flatten(1).any(1).tolist() == [window is None for window in target.windows]


def test_a_branch_that_was_taken_counts_and_its_sibling_does_not():
    """Claim: of a tree, the rows on the accepted path are those that count."""
    model, inputs = case("qwen2_5_vl")
    target = backbone(model)
    (prompt,) = target.prompts(inputs)
    session = Session(target, [Sampling()])
    prefill = _all(session.prefill_in_chunks(0, prompt, record=True, follow_rows=2))
    tree = Tree((5, 6, 9), (ROOT, ROOT, 1), (None,) * 3)
    session.score({0: tree})
    session.commit({0: [6, 9, 30]})
    rows = [len(prompt), len(prompt) + 1]
    right, _ = by_hand(model, prompt, [6, 9, 30], rows)
    assert torch.allclose(prefill.with_latest_attention().mass.double(), right, atol=2e-5)


def _all(pieces: Any) -> Any:
    *_, prefill = pieces
    return prefill


# -- which keys are held -----------------------------------------------------------------------


def test_an_exchanged_cache_holds_what_one_made_anew_would():
    """Claim: after ``exchange`` each head's places hold exactly the wanted rows, keys and values,
    and those that stay have not moved. Fails if a head gets another head's rows."""
    generator = torch.Generator().manual_seed(3)
    source = Cache([HeadShape(2, 4, 4)] * 3, 40)
    for tensors in (source.keys, source.values):
        for layer in tensors:
            layer.normal_(generator=generator)
    source.advance(40)

    def choose() -> Tensor:
        rows = [torch.randperm(40, generator=generator)[:9] for _ in range(3 * 2)]
        return torch.stack(rows).view(3, 2, 9)

    cached_rows = choose().sort(-1).values
    cache = source.select(cached_rows, 5)
    for _ in range(4):
        wanted = choose()
        before, cached_rows = cached_rows, cache.exchange(source, cached_rows, wanted)
        assert torch.equal(cached_rows.sort(-1).values, wanted.sort(-1).values)
        stayed = cached_rows == before
        expected = (before[..., :, None] == wanted[..., None, :]).any(-1)
        assert torch.equal(stayed, expected)
        for layer in range(3):
            for head in range(2):
                at = cached_rows[layer, head]
                assert torch.equal(cache.keys[layer][head, :9], source.keys[layer][head, at])
                assert torch.equal(cache.values[layer][head, :9], source.values[layer][head, at])


def test_each_round_drafts_on_the_keys_looked_at_last(monkeypatch):
    """Claim: after every round the kept set of a head is the top K by the mass of the last judged
    rows, what is held counting a quarter more. Recomputed from full matrices for every round.

    Fails if a set is stale, of another head, or of rows that were refused.
    """
    model, inputs = case("qwen2_5_vl")
    view = PerHead(keep=0.2, refresh=Refresh(rows=ROWS))
    kept: list[Tensor] = []
    reselect = Session.reselect

    def watched(session: Session, number: int, prompt: Prompt) -> None:
        assert prompt.reading.heads is not None
        kept.append(prompt.reading.heads)
        reselect(session, number, prompt)
        rows = session.requests[number].source_rows
        assert rows is not None and torch.equal(rows.sort(-1).values, prompt.reading.heads)

    monkeypatch.setattr(Session, "reselect", watched)
    recipe = replace(resolve("fresh/shape=chain-3"), view=view)
    rounds = saccade.stream(model, inputs, method=recipe, max_new_tokens=24)
    text = [*next(rounds).emitted]
    (prompt,) = backbone(model).prompts(inputs)
    (first,) = Session(backbone(model), [Sampling()]).prefill([prompt], record=True)
    before = view(first, prompt)
    changed = 0
    for number, round in enumerate(rounds):
        text += round.emitted
        read = len(prompt) + len(text) - (round.verdict.own is not None)
        mass, _ = by_hand(model, prompt, text, list(range(read - ROWS, read)))
        mass = (mass * (1 + 0.25 * before.chosen_mask(prompt))).float()
        right = view(replace(first, mass=mass), prompt)
        assert right.reading.heads is not None and torch.equal(kept[number], right.reading.heads)
        assert before.reading.heads is not None
        changed += not torch.equal(right.reading.heads, before.reading.heads)
        before = right
    assert len(kept) > 4 and changed > 2


def test_a_turn_of_a_conversation_counts_its_own_rounds(monkeypatch):
    """Claim: the view chooses again after each round with a draft, in every turn; the token of a
    turn's prefill is no round. Fails if a later turn chooses once more than it has rounds."""
    model, inputs = case("qwen2_5_vl")
    chosen: list[int] = []
    reselect = Session.reselect

    def counted(session: Session, number: int, prompt: Prompt) -> None:
        chosen.append(number)
        reselect(session, number, prompt)

    monkeypatch.setattr(Session, "reselect", counted)
    with saccade.Conversation(backbone(model), method="fresh", max_new_tokens=24) as talk:
        for turn in range(3):
            chosen.clear()
            result = talk.run(inputs)
            assert (result.reused_tokens > 0) == (turn > 0)
            # The last round ends the answer before the view can choose again, or after.
            assert len(chosen) in (len(result.forwards) - 1, len(result.forwards))
            inputs = further(inputs, [*result.ids, *question(turn)])


# -- the answer --------------------------------------------------------------------------------


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["fresh", "fresh/refresh=3", "specvlm-self/refresh=1"])
@FAMILIES
def test_the_answer_is_the_targets(family, method):
    """Claim: greedy answers equal generate()'s, and the draft is renewed on the way."""
    model, inputs = case(family)
    result = saccade.run(backbone(model), inputs, method=method, max_new_tokens=40)
    assert list(result.ids) == hf_greedy(model, inputs, 40)
    assert result.fallback_reason is None


def test_a_batch_is_renewed_each_on_its_own():
    """Claim: in a batch every request's answer is the one it gets alone."""
    model = qwen25()
    many = [video_input(seed, grid=(2, 8, 10)) for seed in (1, 2)]
    alone = [saccade.run(model, one, method="fresh", max_new_tokens=20).ids for one in many]
    together = saccade.generate(model, left_padded(many), method="fresh", max_new_tokens=20)
    assert [tuple(row[-20:].tolist()) for row in together] == alone


def test_without_a_refresh_it_is_std():
    """Claim: fresh/refresh=0 drafts round by round what std drafts."""
    model, inputs = case("qwen2_5_vl")
    runs = [
        saccade.run(model, inputs, method=method, max_new_tokens=30)
        for method in ("fresh/refresh=0", "std")
    ]
    assert [r.tokens for r in runs[0].rounds] == [r.tokens for r in runs[1].rounds]


@pytest.mark.parametrize("value", ["2", "1-4", "1-8-0.5", "3-8-0.00001", "1-8-1000000000"])
def test_a_refresh_is_spelled_as_it_is_parsed(value):
    """Claim: what an axis's value is spelled as is parsed to the same value. Fails for numbers that
    Python writes with an exponent, whose sign would be taken for the next part."""
    axis = PROVIDES.axes["refresh"]
    refresh = axis.parse("refresh", value)
    assert axis.to_text(refresh) == value
    assert axis.parse("refresh", axis.to_text(refresh)) == refresh


@pytest.mark.parametrize(
    "method, message",
    [
        ("fresh/refresh=often", "not a number of rounds"),
        ("fresh/refresh=-1", "not a number of rounds"),
        ("fresh/refresh=1-0", "N-ROWS-HOLD"),
        ("fresh/refresh=1-8-.2-3", "N-ROWS-HOLD"),
        ("fresh/refresh=1-8-more", "N-ROWS-HOLD"),
        ("fresh/refresh=1-8-nan", "N-ROWS-HOLD"),
        ("fresh/refresh=1-1_0-0.2", "N-ROWS-HOLD"),
        ("fresh/refresh=1- 8", "N-ROWS-HOLD"),
        ("std/view=random/refresh=2", "needs a view by attention"),
        ("streaming/refresh=2", "needs a view by attention"),
        ("specvlm/refresh=2", "drafter=self"),
        ("sd/refresh=1", "needs a view by attention"),
    ],
)
def test_what_cannot_be_refreshed_is_reported(method, message):
    """Claim: in one sentence, before any work."""
    with pytest.raises(MethodError, match=message):
        resolve(method)


@pytest.mark.parametrize(
    "name, view",
    [
        ("fresh/refresh=2", Refresh(2)),
        ("fresh/refresh=2-16", Refresh(2, 16)),
        ("fresh/refresh=1-8-0.5", Refresh(1, 8, 0.5)),
    ],
)
def test_rows_and_hold_have_names_too(name, view):
    """Claim: a name says how often, over how many rows and how stubbornly, and is told back."""
    recipe = resolve(name)
    assert recipe.view.refresh == view
    assert choices(recipe)["refresh"] == name.partition("=")[2]


def test_text_alone_has_nothing_to_renew():
    """Claim: with no video and no document it answers, says that nothing is pruned, and never
    fails over an empty choice."""
    result = saccade.run(qwen25(), text_input(), method="fresh", max_new_tokens=12)
    assert list(result.ids) == hf_greedy(qwen25(), text_input(), 12)
    assert result.fallback_reason is None
    assert "context=" in " ".join(result.warnings)
