"""Claims about sessions: equal to Hugging Face's forward, and to the cache-free oracle, always."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    TEXT,
    VIDEO,
    VOCAB,
    backbone,
    input_for,
    left_padded,
    llama,
    qwen25,
    random_tree,
    text_input,
    video_input,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from zoo import CACHE

from lab.reference import Oracle
from saccade.core.prompt import Turn
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, add, chain, path
from saccade.model import session as session_module
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache
from saccade.model.session import Session, chunk_ends, forward_rows

BOTH = pytest.mark.parametrize("fused", [None, False], ids=["fused", "modules"])
BATCH = left_padded(
    [video_input(0), video_input(1, (2, 4, 4), before=2), video_input(2, (4, 4, 6), after=11)]
)


def _session(model: Backbone, inputs: Any, **options: Any) -> tuple[Session, Oracle]:
    prompts = model.prompts(inputs)
    rules = [Sampling()] * len(prompts)
    session = Session(model, rules, **options)
    session.prefill(prompts)
    return session, Oracle(model.model, prompts, rules)


def _rows(scores: Any) -> torch.Tensor:
    return torch.stack(list(scores.rows))


def _assert_equal_laws(session: Session, oracle: Oracle, trees: dict[int, Tree]) -> None:
    ours, truth = session.score(trees), oracle.score(trees)
    for request in trees:
        assert ours[request].answer_length == truth[request].answer_length
        assert list(ours[request].context) == list(truth[request].context)
        mine, exact = _rows(ours[request]).softmax(-1), _rows(truth[request]).softmax(-1)
        assert mine.shape == exact.shape == (len(trees[request]) + 1, VOCAB)
        assert (mine - exact).abs().max() < 1e-4


def _assert_fresh_cache(session: Session, oracle: Oracle) -> None:
    """The cache holds what Hugging Face's own cache would after prompt and text, less pending."""
    for number, request in session.requests.items():
        prompt, text = oracle.prompts[number], oracle.committed[number]
        cached_count = len(text) - len(request.pending)
        assert request.cache.length == len(prompt) + cached_count
        new = torch.tensor(text[:cached_count], dtype=torch.long)
        later = prompt.next_position + torch.arange(cached_count)
        positions = torch.cat([prompt.positions, later.expand(len(prompt.positions), -1)], 1)
        fresh = DynamicCache()
        with torch.no_grad():
            oracle.text(
                inputs_embeds=torch.cat([prompt.embeds, session.backbone.embed(new)])[None],
                position_ids=positions[:, None] if len(positions) > 1 else positions,
                use_cache=True,
                **{CACHE: fresh},
            )
        for layer, kept in enumerate(fresh.layers):
            keys, values = request.cache.read(layer, request.cache.length)
            assert torch.allclose(keys, kept.keys[0], atol=1e-5, rtol=1e-5)
            assert torch.allclose(values, kept.values[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@BOTH
def test_a_session_starts_where_hugging_faces_forward_ends(family, fused):
    """Claim: captured embeddings and positions give the model's own logits, for every family.

    Fails if a vision feature, a position or a row of the prompt is not what the model would read;
    the control reads the prompt one position further along the video and must differ.
    """
    model = backbone(FAMILIES[family](), fused)
    inputs = input_for(family)
    with torch.no_grad():
        exact = model.model(**inputs).logits[0, -1]
    (prompt,) = model.prompts(inputs)
    assert len(prompt) == inputs["input_ids"].shape[1]
    rows = (inputs["input_ids"][0] == VIDEO).nonzero().flatten().tolist()
    cells = rows[:-1] if family == "llava_onevision" else rows  # its last is a newline
    assert prompt.visual.nonzero().flatten().tolist() == cells
    assert prompt.fixed.nonzero().flatten().tolist() == rows[len(cells) :]
    session = Session(model, [Sampling()])
    (prefill,) = session.prefill([prompt])
    assert (prefill.logits - exact).abs().max() < 1e-4
    if prompt.visual_tokens:
        wrong = prompt.select(torch.arange(prompt.visual_tokens - 1))
        assert (Session(model, [Sampling()]).prefill([wrong])[0].logits - exact).abs().max() > 1e-2


def test_a_padded_batch_reads_as_its_prompts_alone():
    """Claim: padding is dropped; each row's prompt is the one it has alone, positions too."""
    model = backbone(qwen25())
    alone = [
        video_input(0),
        video_input(1, (2, 4, 4), before=2),
        video_input(2, (4, 4, 6), after=11),
    ]
    for prompt, inputs in zip(model.prompts(BATCH), alone, strict=True):
        (single,) = model.prompts(inputs)
        assert torch.equal(prompt.full_ids, single.full_ids)
        assert torch.equal(prompt.positions, single.positions)
        assert torch.equal(prompt.grid, single.grid)
        assert prompt.next_position == single.next_position
        assert torch.allclose(prompt.embeds, single.embeds, atol=1e-5)


def test_the_grid_names_every_cell_of_every_medium():
    """Claim: (medium, t, h, w) of two videos in one prompt, in prompt order (after merging 2x2)."""
    one, two = video_input(0, (2, 4, 4)), video_input(1, (1, 2, 6))
    both = {name: torch.cat([one[name], two[name]], -1 if one[name].ndim == 2 else 0)
            for name in ("input_ids", "attention_mask", "mm_token_type_ids")}  # fmt: skip
    for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        both[name] = torch.cat([one[name], two[name]])
    (prompt,) = backbone(qwen25()).prompts(both)
    cells = [[0, t, h, w] for t in range(2) for h in range(2) for w in range(2)]
    assert prompt.grid.tolist() == cells + [[1, 0, 0, w] for w in range(3)]


def _emitted(rng: random.Random, tree: Tree) -> list[int]:
    """Part of a branch of the tree, then perhaps tokens that are not in it."""
    tokens: list[int] = []
    if len(tree) and rng.random() < 0.75:
        branch = path(tree, rng.randrange(len(tree)))
        tokens = [tree.tokens[n] for n in branch[: rng.randint(1, len(branch))]]
    return tokens + [rng.randrange(TEXT) for _ in range(rng.randint(0 if tokens else 1, 2))]


def _history(kind: str, fused: bool | None, seed: int) -> None:
    """Four rounds of random trees over three requests, checked against the oracle throughout."""
    rng = random.Random(seed)
    if kind == "video":
        model, inputs = backbone(qwen25(), fused), BATCH
    else:
        model = backbone(llama(), fused)
        inputs = left_padded([text_input(i, 4 + 5 * i) for i in range(3)])
    session, oracle = _session(model, inputs)
    for _ in range(4):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        trees = {r: random_tree(rng, rng.randint(0, 7), lambda: rng.randrange(9)) for r in chosen}
        _assert_equal_laws(session, oracle, trees)
        emitted = {r: _emitted(rng, trees[r]) for r in chosen}
        session.commit(emitted)
        oracle.commit(emitted)
        _assert_fresh_cache(session, oracle)
    _assert_equal_laws(session, oracle, {r: Tree() for r in range(3)})


@pytest.mark.representatives(1)
@BOTH
@pytest.mark.parametrize("kind", ["video", "text"])
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000))
def test_any_history_of_trees_and_commits_equals_the_oracle(kind, fused, seed):
    """Claim: over rounds of random trees and mixed acceptance, three requests of different
    lengths keep the laws of a model that recomputes everything (1e-4), and their caches hold what
    a fresh prefill holds (1e-5).

    A rejected key left behind, a wrong rollback, mask, offset or position moves laws by > 1e-2.
    """
    _history(kind, fused, seed)


@BOTH
def test_a_commit_of_drafted_tokens_alone_ends_with_the_law_of_the_last(fused):
    """Claim: where everything that was emitted was drafted, the law at the root is that of the last
    accepted node, without another forward. Fails where it is another node's."""
    session, oracle = _session(backbone(llama(), fused), text_input(0, 6))
    tree = chain([3, 5, 7])
    _assert_equal_laws(session, oracle, {0: tree})
    for each in (session, oracle):
        each.commit({0: [3, 5]})
    _assert_equal_laws(session, oracle, {0: Tree()})


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("kind", ["video", "text"])
def test_many_histories_equal_the_oracle(kind, fused):
    """The claim above over 300 more histories each."""
    for seed in range(20_000, 20_300):
        _history(kind, fused, seed)


@pytest.mark.parametrize("bug", ["rollback", "position", "mask"])
def test_control_planted_session_bugs_are_seen(bug, monkeypatch):
    """Control: a wrong rollback, position or tree mask must fail the comparison above."""
    if bug == "rollback":
        keep = Cache.commit_path
        monkeypatch.setattr(Cache, "commit_path", lambda self, nodes: keep(self, range(len(nodes))))
    elif bug == "position":
        monkeypatch.setattr(session_module.trees_, "depths", lambda tree: [1] * len(tree))
    else:
        monkeypatch.setattr(session_module.trees_, "is_chain", lambda tree: True)
    with pytest.raises(AssertionError):
        for seed in range(8):
            _history("video", None, seed)


@pytest.mark.representatives(1)
@BOTH
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_growing_a_tree_equals_scoring_it_at_once(fused, seed):
    """Claim: score is a function of (prompt, text, tree), not of how the tree came about.

    Nodes arrive one to three at a time, on a fresh root or behind pending tokens. Fails if a new
    node sees a sibling scored before it, or a known node is moved.
    """
    rng = random.Random(seed)
    model = backbone(qwen25(), fused)
    grown, _ = _session(model, video_input(3))
    once, _ = _session(model, video_input(3))
    if rng.random() < 0.5:
        for session in (grown, once):
            session.commit({0: [5, 6]})
    whole = random_tree(rng, rng.randint(2, 9), lambda: rng.randrange(9))
    count = 0
    while count < len(whole):
        count = min(len(whole), count + rng.randint(1, 3))
        part = Tree(whole.tokens[:count], whole.parents[:count], whole.q[:count])
        scores = grown.score({0: part})[0]
    assert torch.allclose(_rows(scores), _rows(once.score({0: whole})[0]), atol=1e-4)


@BOTH
def test_a_changed_mind_is_scored_anew(fused):
    """Claim: a tree that shares its first nodes with the last one is right from there on."""
    session, oracle = _session(backbone(qwen25(), fused), video_input(4))
    first = random_tree(random.Random(1), 8, lambda: 3)
    second = add(add(Tree(first.tokens[:4], first.parents[:4], first.q[:4]), ROOT, 7), 4, 8)
    for tree in (first, second, Tree(), first, chain([1, 2, 3])):
        _assert_equal_laws(session, oracle, {0: tree})


def test_scoring_again_costs_no_forward():
    """Claim: known nodes are not computed again. Fails if the same tree runs the model twice."""
    model = backbone(qwen25())
    session, _ = _session(model, video_input(5))
    tree = chain([1, 2, 3])
    session.score({0: tree})
    rows: list[int] = []
    forward = model.forward

    def counted(embeds, *rest, **named: Any):
        rows.append(len(embeds))
        return forward(embeds, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", counted)
        session.score({0: tree})
        session.score({0: add(tree, 2, 9)})
        session.commit({0: [1, 2, 3, 9]})
        session.score({0: Tree()})
        session.commit({0: [4]})
        session.score({0: chain([5])})
    assert rows == [1, 2]


@BOTH
def test_tokens_from_outside_the_tree_are_caught_up_with(fused):
    """Claim: committing what no tree held, twice in a row, equals the oracle at the next score."""
    session, oracle = _session(backbone(qwen25(), fused), BATCH)
    _assert_equal_laws(session, oracle, {0: chain([1, 2]), 2: Tree()})
    for emitted in ({0: [1, 9, 8], 1: [4]}, {0: [7], 2: [1, 2, 3, 4, 5]}):
        session.commit(emitted)
        oracle.commit(emitted)
    _assert_equal_laws(session, oracle, {0: chain([3]), 1: Tree((1, 2), (-1, -1), (None, None))})
    _assert_equal_laws(session, oracle, {2: chain([1, 2])})
    _assert_fresh_cache(session, oracle)


@BOTH
def test_prefill_in_chunks_equals_prefill_at_once(fused):
    """Claim: chunk borders anywhere, inside the video too, change neither laws nor keys."""
    model = backbone(qwen25(), fused)
    whole, oracle = _session(model, BATCH)
    for chunk in (1, 7, 20):
        parts, _ = _session(model, BATCH, chunk=chunk)
        for request in range(3):
            apart = parts.requests[request].root_logits - whole.requests[request].root_logits
            assert apart.abs().max() < 1e-4
        _assert_fresh_cache(parts, oracle)


@pytest.mark.parametrize("chunk", [1, 4, 2048])
def test_no_piece_of_a_prompt_is_tiny(chunk):
    """Claim: pieces follow each other to the end, none over a chunk and a quarter; where there are
    several, each is more than a quarter: a forward of few rows costs nearly as much as of many."""
    for start, stop in ((0, 1), (0, 2064), (0, 2561), (300, 5000), (7, 7 + 3 * chunk)):
        ends = chunk_ends(start, stop, chunk)
        rows = [after - before for before, after in pairwise(ends)]
        assert (ends[0], ends[-1]) == (start, stop)
        assert max(rows) <= chunk + chunk // 4
        assert len(rows) == 1 or min(rows) > chunk // 4


def test_laws_are_clipped_and_placeholders_banned():
    """Claim: a draft's laws have the common vocabulary, and visual placeholders none at all.

    Fails if a banned id keeps any probability, at the root, at a node or after a fork.
    """
    model = backbone(qwen25())
    banned = sorted(model.placeholders)
    session, _ = _session(model, video_input(6), vocab=252, banned=banned)
    rows = _rows(session.score({0: chain([3, 4])})[0])
    assert rows.shape == (3, 252)
    assert bool((rows[:, banned] == float("-inf")).all())
    assert int(torch.isinf(rows).sum()) == 3 * len(banned)
    target = Session(model, [Sampling()])
    prompts = model.prompts(video_input(6))
    prefills = target.prefill(prompts)
    forked = Session(model, [Sampling()], vocab=252, banned=banned)
    forked.fork(prefills, prompts)
    assert torch.equal(_rows(forked.score({0: Tree()})[0]), rows[:1])


@BOTH
def test_a_fork_over_everything_is_the_target_itself(fused):
    """Claim: a fork that keeps all rows has the target's laws; one that prunes has others.

    And it owns its keys: what it commits does not touch the target's cache.
    """
    model = backbone(qwen25(), fused)
    prompts = model.prompts(BATCH)
    rules = [Sampling()] * 3
    target, fork, pruned = (Session(model, rules) for _ in range(3))
    prefills = target.prefill(prompts)
    fork.fork(prefills, prompts)
    pruned.fork(prefills, [prompt.select(torch.tensor([0])) for prompt in prompts])
    trees = {r: chain([r, 5]) for r in range(3)}
    theirs = fork.score(trees)
    fork.commit({0: [0, 5]})
    ours = target.score(trees)
    for request in trees:
        assert torch.allclose(_rows(ours[request]), _rows(theirs[request]), atol=1e-4)
    less = pruned.score(trees)
    assert (_rows(less[0])[1:] - _rows(ours[0])[1:]).abs().max() > 1e-2


@pytest.mark.representatives(1)
@BOTH
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_a_fork_keeps_up_with_its_source(fused, seed):
    """Claim: a fork over everything equals the oracle after any commits, its source's first.

    What was emitted may be all in the tree, so that the source holds every key of it and the fork
    has nothing left to compute; the law at the end is still the one after the new text.
    """
    rng = random.Random(seed)
    model = backbone(qwen25(), fused)
    prompts = model.prompts(BATCH)
    rules = [Sampling()] * 3
    target, fork = Session(model, rules), Session(model, rules)
    oracle = Oracle(model.model, prompts, rules)
    fork.fork(target.prefill(prompts), prompts)
    for _ in range(4):
        trees = {r: random_tree(rng, rng.randint(0, 6), lambda: rng.randrange(9)) for r in range(3)}
        target.score(trees)
        _assert_equal_laws(fork, oracle, {r: chain([rng.randrange(9)]) for r in range(3)})
        emitted = {r: _emitted(rng, trees[r]) for r in range(3)}
        for session in (target, fork, oracle):
            session.commit(emitted)
    _assert_equal_laws(fork, oracle, {r: Tree() for r in range(3)})


@BOTH
def test_a_pruned_fork_reads_the_kept_rows_of_its_sources_keys(fused):
    """Claim: its laws are those of Hugging Face's own cache with the pruned rows cut out: keys of
    prompt and text as the whole prompt made them, and nothing recomputed over fewer.
    """
    model = backbone(qwen25(), fused)
    (prompt,) = model.prompts(video_input(7))
    kept = prompt.select(torch.tensor([1, 4, 5, 16]))
    target, fork = (Session(model, [Sampling()]) for _ in range(2))
    fork.fork(target.prefill([prompt]), [kept])
    text = [3, 1, 4, 1, 5]
    target.score({0: chain(text[:-1])})
    for session in (target, fork):
        session.commit({0: text})
    scores = fork.score({0: Tree()})[0]

    whole = DynamicCache()
    embeds = torch.cat([prompt.embeds, model.embed(text)])
    later = prompt.next_position + torch.arange(len(text))
    positions = torch.cat([prompt.positions, later.expand(3, -1)], 1)
    with torch.no_grad():
        decoder = model.model.get_decoder()
        decoder(
            inputs_embeds=embeds[None, :-1], position_ids=positions[:, None, :-1],
            use_cache=True, **{CACHE: whole},
        )  # fmt: skip
        rows = torch.cat([kept.places, torch.arange(len(prompt), len(embeds) - 1)])
        for layer in whole.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        out = decoder(
            inputs_embeds=embeds[None, -1:], position_ids=positions[:, None, -1:],
            use_cache=True, **{CACHE: whole},
        )  # fmt: skip
        exact = model.logits(out.last_hidden_state[0])[0]
    assert (scores.rows[0] - exact).abs().max() < 1e-4
    blind = Oracle(model.model, [kept], [Sampling()])
    assert (blind.logits(0, text)[-1] - exact).abs().max() > 1e-2, "pruning before is another law"


def test_a_request_that_ends_frees_its_cache():
    """Claim: end drops the request and leaves the others as they were."""
    session, oracle = _session(backbone(qwen25()), BATCH)
    session.end(1)
    session.end(1)
    assert set(session.requests) == {0, 2}
    _assert_equal_laws(session, oracle, {0: chain([1]), 2: chain([2])})


@BOTH
def test_a_turn_forgets_what_was_scored_before_it(fused):
    """Claim: the same tree scored right before a turn and right after it gets the laws of the new
    text (1e-4). Fails if rows of the old one are taken for known.
    """
    session, oracle = _session(backbone(qwen25(), fused), video_input(0))
    tree = chain([5, 6])
    session.commit({0: [1, 2, 3]})
    before = _rows(session.score({0: tree})[0])
    session.start_turn({0: Turn(1, (7, 8))}, [Sampling()])
    oracle.commit({0: [1, 2, 7, 8]})
    mine, exact = _rows(session.score({0: tree})[0]), _rows(oracle.score({0: tree})[0])
    assert (mine.softmax(-1) - exact.softmax(-1)).abs().max() < 1e-4
    assert (mine.softmax(-1) - before.softmax(-1)).abs().max() > 1e-2


@BOTH
@pytest.mark.parametrize("drop", [0, 2, 9])
def test_a_long_turn_is_read_in_chunks(fused, drop, monkeypatch):
    """Claim: a turn of many tokens ends with the law that one forward over it has, and so do the
    rounds after it, and a request has no more rows of a forward than of one over a prompt."""
    model = backbone(qwen25(), fused)
    at_once, _ = _session(model, BATCH)
    chunked, _ = _session(model, BATCH, chunk=8)
    forward_sizes: list[int] = []
    forward = Session._forward

    def record_size(session: Session, rows: Any) -> Any:
        if session is chunked:
            forward_sizes.append(len(rows.ids))
        return forward(session, rows)

    monkeypatch.setattr(Session, "_forward", record_size)
    turns = {0: Turn(drop, tuple(range(3, 40))), 1: Turn(drop, (5, 6)), 2: Turn(drop, (7,) * 10)}
    for session in (at_once, chunked):
        session.score({number: chain([1, 2]) for number in range(3)})
        session.commit({number: [1, 2, 9, 4] for number in range(3)})
        session.start_turn(turns, [Sampling()] * 3)
    after = {number: chain([4, 5]) for number in range(3)}
    for _ in range(2):
        for expected, actual in zip(
            at_once.score(after).values(), chunked.score(after).values(), strict=True
        ):
            assert actual.answer_length == expected.answer_length
            assert (_rows(actual).softmax(-1) - _rows(expected).softmax(-1)).abs().max() < 1e-4
        for session in (at_once, chunked):
            session.commit({number: [4, 5, 1] for number in range(3)})
    for number in range(3):
        one, other = (each.requests[number] for each in (at_once, chunked))
        assert (one.context, one.pending) == (other.context, other.pending)
        assert one.cache.length == other.cache.length
    assert len(forward_sizes) > 4
    assert max(forward_sizes) <= 3 * (forward_rows(8) + 2)
