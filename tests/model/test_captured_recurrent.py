"""Claims about captured steps of models with states: the laws of ordinary forwards, from memory
that stays."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from counted import Counted
from helpers import HYBRIDS, answered, few, input_for, random_tree, truth
from torch import Tensor

from saccade.core.prompt import Turn
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add, chain
from saccade.drafting.shapes import cost_measurement
from saccade.model import captured_recurrent, cuda_graphs
from saccade.model.backbone import MAX_ROUNDING_DIFFERENCE, Backbone
from saccade.model.captured_recurrent import (
    EARLIER_SIZES,
    MAX_REQUESTS,
    RecurrentGraphs,
    StaticRows,
    StaticStates,
    solve_in_blocks,
)
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.recurrent import LayerStates, solve_by_library
from saccade.model.session import Session

ROUNDING = 1e-3  # Of logits of about 8. A wrong state moves them by more than 0.1.


@pytest.fixture(autouse=True)
def _few_keys(monkeypatch):
    """Sizes begin with few keys, which the CPU is through with sooner."""
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 128)


def _model(family: str) -> tuple[Backbone, Counted]:
    model, counted = Backbone(HYBRIDS[family]()), Counted()
    model.graphs[model.layer_count] = RecurrentGraphs(model, counted)
    return model, counted


def _both(
    family: str = "qwen3_5", requests: int = 1, **options: Any
) -> tuple[Session, Session, Counted]:
    """An ordinary session and one of captured steps over the same prompts, and the captures."""
    model, counted = _model(family)
    prompts = [model.prompts(input_for(family, seed))[0] for seed in range(requests)]
    rules = [Sampling()] * requests
    ordinary, fixed = (Session(model, rules, cuda_graphs=on, **options) for on in (False, True))
    for session in (ordinary, fixed):
        session.prefill(prompts)
    return ordinary, fixed, counted


def _score(session: Session, trees: dict[int, Tree]) -> Tensor:
    return torch.stack([row for each in session.score(trees).values() for row in each.rows])


def _difference(ordinary: Session, fixed: Session, trees: dict[int, Tree]) -> float:
    """How far logits are apart. New sizes are captured afterwards, as between rounds."""
    a, b = (_score(session, trees) for session in (ordinary, fixed))
    capture_new_sizes()
    assert a.shape == b.shape and bool(torch.isfinite(b).all())
    return float((a - b).abs().max())


def _states_of(session: Session, number: int = 0) -> LayerStates:
    states = session.requests[number].cache.states
    assert states is not None
    return states


def _tensors(states: LayerStates) -> list[Tensor]:
    """The committed states, and the updates of the tree where there are any."""
    updates = [each for each in states._updates if each is not None]
    written = [each.writes for each in updates if each.writes is not None]
    parts = [each.window for each in states.states]
    parts += [each.memory for each in states.states if each.memory is not None]
    parts += [each.inputs for each in updates]
    return parts + [part for each in written for part in (each.keys, each.values, each.total_decay)]


# -- the laws ----------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_every_step_gives_the_laws_of_an_ordinary_forward(family):
    """Claim: plain decoding, chains, trees grown node by node, refusals and catching up give the
    logits of ordinary forwards, and leave the states that these leave, over NaN in every row that
    holds nothing. Fails if a step reads a state of a refused row, or an input beside its path."""
    ordinary, fixed, counted = _both(family, room=70)
    rng = random.Random(0)
    for round in range(40):
        kind = round % 4
        tree = Tree() if kind == 0 else chain([rng.randrange(200) for _ in range(1 + round % 9)])
        if kind == 2:
            tree = random_tree(rng, 2 + round % 31, lambda: rng.randrange(200))
        assert _difference(ordinary, fixed, {0: tree}) < ROUNDING
        if kind == 3:  # a draft that grows: only the new nodes are computed
            for _ in range(2):
                tree = add(tree, rng.randrange(len(tree)), rng.randrange(200))
                assert _difference(ordinary, fixed, {0: tree}) < ROUNDING
        new = [*tree.tokens[: round % 3], 7] if kind in (1, 3) else [3, 5][: 1 + round % 2]
        for session in (ordinary, fixed):
            session.commit({0: new})
        pairs = zip(_states_of(ordinary).states, _states_of(fixed).states, strict=True)
        assert all(torch.allclose(a.window, b.window, atol=ROUNDING) for a, b in pairs)
    assert counted.replays - counted.captures > 40 > counted.captures


@pytest.mark.extra
def test_a_draft_that_grows_token_by_token_is_captured():
    """Claim: a chain that is scored one node longer each time gives the laws of ordinary forwards
    through every size of earlier nodes, and no step of it is ordinary once its size is there.
    Fails if nodes that were scored before are forgotten, or computed again."""
    ordinary, fixed, counted = _both(room=200)
    for turn in range(2):
        tokens: list[int] = []
        before = counted.replays - counted.captures
        for depth in range(EARLIER_SIZES[1] + 4):
            assert _difference(ordinary, fixed, {0: chain(tokens)}) < ROUNDING
            tokens.append((7 * depth + turn) % 200)
        for session in (ordinary, fixed):
            session.commit({0: [*tokens[:3], 9]})
    # Of the second draft only the size of its pending token is a new one.
    assert counted.replays - counted.captures - before >= EARLIER_SIZES[1] + 3


def test_a_chain_that_was_accepted_in_part_stays_scored():
    """Claim: the nodes behind an accepted part of a chain go on from the state at its end, and rows
    that are scored after them do too."""
    ordinary, fixed, _ = _both()
    rng = random.Random(3)
    for _ in range(8):
        left = fixed.requests[0].tree
        tree = chain([*left.tokens, *(rng.randrange(200) for _ in range(3))])
        assert _difference(ordinary, fixed, {0: tree}) < ROUNDING
        accepted = tree.tokens[: rng.randint(1, len(tree))]
        for session in (ordinary, fixed):
            session.commit({0: accepted})


@pytest.mark.representatives(1)
@pytest.mark.parametrize("requests", [2, MAX_REQUESTS - 1])
def test_requests_share_a_step_and_nothing_else(requests):
    """Claim: requests that score unlike trees, some with pending tokens and some with nodes scored
    before, are one captured step with the laws of ordinary forwards. Fails where a request reads
    another one's state, or the decay or the inputs of another one's rows."""
    ordinary, fixed, counted = _both(requests=requests)
    rng = random.Random(requests)
    for round in range(16):
        trees = {
            number: chain([rng.randrange(200) for _ in range(1 + (round + number) % 6)])
            for number in range(requests)
        }
        if round % 4 == 2:
            trees[1] = random_tree(rng, 2 + round % 15, lambda: rng.randrange(200))
        assert _difference(ordinary, fixed, trees) < ROUNDING
        trees[0] = add(trees[0], rng.randrange(len(trees[0])), rng.randrange(200))
        assert _difference(ordinary, fixed, trees) < ROUNDING
        emitted = {n: [3, 5, 7][: 1 + (round + n) % 3] for n in range(requests)}
        emitted[requests - 1] = [*trees[requests - 1].tokens[:1], 4]
        for session in (ordinary, fixed):
            session.commit(emitted)
    assert counted.replays - counted.captures > 16


def test_more_requests_than_there_is_room_for_take_ordinary_forwards():
    """Claim: a step of more requests than states are copied for is an ordinary one."""
    ordinary, fixed, counted = _both("lfm2", MAX_REQUESTS + 1)
    for _ in range(2):
        trees = dict.fromkeys(range(MAX_REQUESTS + 1), chain([1, 2]))
        assert _difference(ordinary, fixed, trees) < ROUNDING
    assert not counted.captures


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_conversation_is_cut_back_to_states_of_captured_steps(family):
    """Claim: a turn that takes back part of what captured steps committed goes on with the laws of
    ordinary sessions. Fails if a state that can be had again is of memory that was overwritten."""
    ordinary, fixed, _ = _both(family)
    for drop in (1, 2, 0, 5):
        for token in (1, 2, 3):
            tree = chain([token, 2, 3])
            assert _difference(ordinary, fixed, {0: tree}) < ROUNDING
            for session in (ordinary, fixed):
                session.commit({0: [token, 2, 9]})
        turn = {0: Turn(drop=drop, ids=(4, 8, 9))}
        for session in (ordinary, fixed):
            session.start_turn(turn, [Sampling()])
        assert _difference(ordinary, fixed, {0: Tree()}) < ROUNDING


# -- captures ----------------------------------------------------------------------------------


def test_a_second_answer_captures_nothing_and_memory_stays():
    """Claim: a later session of the same model finds the sizes of an earlier one, and what a step
    reads lies where it lay. Fails if graphs belong to a session, or if memory moves."""
    model, counted = _model("qwen3_5")
    graphs = model.graphs[model.layer_count]
    places = []
    for number in range(3):
        session = Session(model, [Sampling()], cuda_graphs=True, room=40)
        session.prefill(model.prompts(input_for("qwen3_5", number)))
        for round in range(4):
            for tree in (Tree(), chain([1 + round, 2]), chain([1 + round, 2, 3])):
                session.score({0: tree})
                capture_new_sizes()
            session.commit({0: [1 + round, 9]})
        addresses = {key: rows._numbers.data_ptr() for key, rows in graphs._rows.items()}
        states = {
            key: each.committed_states.window.data_ptr() for key, each in graphs._states.items()
        }
        places.append((counted.captures, addresses, states))
    assert places[0] == places[1] == places[2] and counted.captures > 0


def test_a_trial_changes_no_state():
    """Claim: sizes are captured and checked between two steps of a draft that grows, and every
    state, every update and every key of what was scored stays bit for bit. Fails if what a trial
    scored is left in the request."""
    ordinary, fixed, counted = _both(room=70)
    request = fixed.requests[0]
    for tree in (chain([5, 6]), chain([5, 6, 7, 8])):
        _score(fixed, {0: tree})
        end = request.cache.length + len(tree)
        keys = [*request.cache.keys, *request.cache.values]
        before = [each[:, :end].clone() for each in keys]
        states = [each.clone() for each in _tensors(_states_of(fixed))]
        captures = counted.captures
        capture_new_sizes()
        assert counted.captures == captures + 1
        after = [each[:, :end] for each in (*request.cache.keys, *request.cache.values)]
        assert all(torch.equal(*each) for each in zip(before, after, strict=True))
        now = _tensors(_states_of(fixed))
        assert all(torch.equal(*each) for each in zip(states, now, strict=True))
        _score(ordinary, {0: tree})
    assert _difference(ordinary, fixed, {0: chain([5, 6, 7, 8, 9])}) < ROUNDING


@pytest.mark.representatives(1)
@pytest.mark.parametrize("bug", ["state", "updates"])
def test_control_a_step_over_old_memory_is_seen(bug, monkeypatch):
    """Control: where a committed state, or the updates of earlier nodes, are not filled in, the
    comparison above fails."""
    ordinary, fixed, counted = _both()
    for token in (1, 2, 3):
        for tree in (chain([token]), chain([token, 2]), chain([token, 2, 3])):
            assert _difference(ordinary, fixed, {0: tree}) < ROUNDING
        for session in (ordinary, fixed):
            session.commit({0: [token, 9]})
    if bug == "state":
        monkeypatch.setattr(StaticStates, "fill", lambda self, request, states: None)
    else:
        monkeypatch.setattr(captured_recurrent, "_copy_updates", lambda target, source: None)
    worst = 0.0
    for tree in (chain([8]), chain([8, 6]), chain([8, 6, 4])):
        worst = max(worst, _difference(ordinary, fixed, {0: tree}))
    assert worst > 100 * ROUNDING


def test_nan_of_an_earlier_request_does_not_last():
    """Claim: NaN in the memory of earlier nodes that a step does not have changes nothing. Fails if
    a request whose numbers broke spoils those after it."""
    ordinary, fixed, _ = _both()
    for token in (1, 2, 3):
        for tree in (chain([token]), chain([token, 2])):
            assert _difference(ordinary, fixed, {0: tree}) < ROUNDING
        for session in (ordinary, fixed):
            session.commit({0: [token, 9]})
    graphs = fixed.cuda_graphs
    assert isinstance(graphs, RecurrentGraphs)
    for states in graphs._states.values():
        for updates in states._earlier.values():
            assert updates.writes is not None
            for each in (updates.inputs, updates.writes.keys, updates.writes.total_decay):
                each.fill_(float("nan"))
            updates.writes.values.fill_(float("nan"))
    for tree in (chain([8]), chain([8, 2]), chain([8, 2, 1])):
        assert _difference(ordinary, fixed, {0: tree}) < ROUNDING


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 64])
def test_a_triangular_system_is_solved_in_blocks(rows):
    """Claim: products of few matrices solve what torch's solver solves, also where each row's key
    is that of every row before it, which is where an inverse of all rows at once loses its digits.
    """
    noise = torch.Generator().manual_seed(rows)
    right = torch.randn(3, rows, 5, generator=noise)
    for overlap in (torch.ones(3, rows, rows), torch.rand(3, rows, rows, generator=noise) * 2 - 1):
        exact = solve_by_library(overlap.double(), right.double())
        mine = solve_in_blocks(overlap.double(), right.double())
        assert torch.allclose(mine, exact, rtol=1e-9, atol=1e-9 * float(exact.abs().amax()))
    alike = torch.ones(3, rows, rows)
    exact = solve_by_library(alike.double(), right.double()).float()
    assert torch.allclose(solve_in_blocks(alike, right), exact, atol=1e-4)


def test_rows_do_not_depend_on_how_many_keys_there_are():
    """Claim: a text that outgrows a size's keys goes on in the next size over the same states."""
    ordinary, fixed, _ = _both("lfm2", room=300)
    for round in range(60):
        assert _difference(ordinary, fixed, {0: chain([round, 2, 3])}) < ROUNDING
        for session in (ordinary, fixed):
            session.commit({0: [round, 2, 3, 5]})
    graphs = fixed.cuda_graphs
    assert isinstance(graphs, RecurrentGraphs)
    assert len({size.keys for _, size in graphs._captured}) > 1
    assert len(graphs._rows) == 1 and all(
        type(each) is StaticRows for each in graphs._rows.values()
    )


@pytest.mark.parametrize("spoilt", [False, True])
def test_what_rounding_hides_is_decided_after_the_first_layers(spoilt, monkeypatch, caplog):
    """Claim: in bf16 a size whose logits differ by more than is usual is used where the hidden
    states after the first layers agree, and refused where they do not. Fails if a deep model is
    never captured, or if a wrong state passes for rounding."""
    model = Backbone(copy.deepcopy(HYBRIDS["qwen3_5"]()).bfloat16())
    counted = Counted()
    graphs = model.graphs[model.layer_count] = RecurrentGraphs(model, counted)
    limits = {**MAX_ROUNDING_DIFFERENCE, torch.bfloat16: 0.0}
    monkeypatch.setattr(cuda_graphs, "MAX_ROUNDING_DIFFERENCE", limits)
    monkeypatch.setattr(cuda_graphs, "MAX_DEEP_DIFFERENCE", 1e9)
    if spoilt:
        monkeypatch.setattr(StaticStates, "fill", lambda self, request, states: None)
    session = Session(model, [Sampling()], cuda_graphs=True)
    session.prefill(model.prompts(input_for("qwen3_5")))
    session.score({0: chain([1, 2, 3])})
    capture_new_sizes()
    assert counted.captures == 1 and len(graphs._captured) == (not spoilt)
    assert ("logits differ" in caplog.text) == spoilt


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_step_that_is_timed_again_is_the_same_step(family):
    """Claim: a filled session that is set back gives the logits that it gave, captured or not, so
    that both can be timed and compared. Fails if states go on while keys are set back."""
    model, counted = _model(family)
    logits = []
    for captured in (True, False):
        session = cost_measurement.filled_session(model, 64, 1, 8, cuda_graphs=captured)
        for _ in range(3):
            cost_measurement.time_step(session, 64, 3)
            capture_new_sizes()
            logits.append(torch.stack([*session.requests[0].node_logits]))
    assert counted.replays > 1
    assert all(torch.allclose(each, logits[0], atol=ROUNDING) for each in logits)


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(
    "method", few(["sd-tree", "ar", "specvlm", "sage", "specvlm-self", "layerskip", "auto"], 1)
)
def test_answers_are_the_same(method, family, monkeypatch):
    """Claim: with every session in captured steps, target's and draft's, answers are those of
    generate."""
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))
    result = answered(family, method)
    assert result.ids == truth(family) and result.fallback_reason is None


@pytest.mark.parametrize("earlier", [0, captured_recurrent.PROBED_NODES])
def test_a_trial_has_keys_that_its_size_reads(earlier: int) -> None:
    """Claim: where a request has grown beyond a size since it was chosen, the size is tried with
    earlier keys. Fails if a right capture is refused because it cannot read the trial's own keys.
    """
    session = _both()[0]
    cache = session.requests[0].cache
    size = captured_recurrent.RecurrentSize(1, 4, 64, cache.length, earlier=bool(earlier))
    probe = captured_recurrent.RecurrentProbe([cache], cache.length, Mock(), earlier)
    (segment,) = probe.rows(size, embeddings=1000, may_branch=True).segments
    assert segment.first_key + size.rows == size.keys
    (nodes,) = probe.earlier_rows(size, embeddings=1000).segments
    assert nodes.first_key + earlier == segment.first_key
