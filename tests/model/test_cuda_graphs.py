"""Claims about steps of fixed shape: the same laws as ordinary forwards, from memory that stays."""

from __future__ import annotations

import random
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from counted import Counted
from helpers import (
    FAMILIES,
    answered,
    backbone,
    input_for,
    random_tree,
    truth,
    video_input,
)

import saccade
from saccade.core.errors import ModelError
from saccade.core.prompt import Turn
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add, chain
from saccade.drafting.shapes import cost_measurement
from saccade.model import cache_pool, cuda_graphs, memory
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import ROW_SIZES, CudaGraphs, capture_new_sizes
from saccade.model.session import Session

LEAN = ["qwen2_5_vl", "qwen2_vl", "llama"]


def _model(family: str = "qwen2_5_vl", capture: Any = None) -> tuple[Backbone, Any]:
    """A model of its own, and its captures."""
    model = Backbone(FAMILIES[family]())
    counted = Counted() if capture is None else capture
    model.graphs[model.key_layer_count] = CudaGraphs(model, counted)
    return model, counted


def _both(
    family: str = "qwen2_5_vl", capture: Any = None, **options: Any
) -> tuple[Session, Session, Any]:
    """An ordinary session and one of captured steps over one prompt, and the latter's captures."""
    model, counted = _model(family, capture)
    prompts = model.prompts(input_for(family))
    sessions = [Session(model, [Sampling()], cuda_graphs=on, **options) for on in (False, True)]
    for session in sessions:
        session.prefill(prompts)
    return sessions[0], sessions[1], counted


def _score(session: Session, trees: Any) -> torch.Tensor:
    rows = [row for each in session.score(trees).values() for row in each.rows]
    return torch.stack(rows)


def _same(ordinary: Session, fixed: Session, tree: Tree, requests: int = 1) -> float:
    """How far laws are apart, between which new sizes are captured as between rounds."""
    trees = dict.fromkeys(range(requests), tree)
    a, b = (_score(session, trees) for session in (ordinary, fixed))
    capture_new_sizes()
    assert a.shape == b.shape and bool(torch.isfinite(b).all())
    return float((a - b).abs().max())


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", LEAN)
def test_every_step_gives_the_laws_of_an_ordinary_forward(family):
    """Claim: plain decoding, chains, trees grown node by node, refusals and catching up all give
    the logits of ordinary forwards to 1e-4 (of about 4), over NaN in every row that holds nothing.

    The tail passes several sizes, the cache grows and the tail settles anew on the way.
    """
    ordinary, fixed, counted = _both(family, room=70)
    rng = random.Random(0)
    for round in range(60):
        kind = round % 4
        tree = Tree() if kind == 0 else chain([rng.randrange(200) for _ in range(1 + round % 9)])
        if kind == 2:
            tree = random_tree(rng, 2 + round % 31, lambda: rng.randrange(200))
        assert _same(ordinary, fixed, tree) < 1e-4
        if kind == 3:  # a draft that grows: only the new nodes are computed
            tree = add(tree, rng.randrange(len(tree)), rng.randrange(200))
            assert _same(ordinary, fixed, tree) < 1e-4
        new = [*tree.tokens[: round % 3], 7] if kind in (1, 3) else [3, 5][: 1 + round % 2]
        for session in (ordinary, fixed):
            session.commit({0: new})
    assert counted.replays - counted.captures > 60 > counted.captures
    assert fixed.requests[0].cache.capacity > 70 + len(fixed.requests[0].context) - 60


@pytest.mark.representatives(1)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_several_requests_are_one_step(count):
    """Claim: requests of unlike prompts that score trees of unlike sizes are one captured step a
    size, with the laws of ordinary forwards to 1e-4: chains, trees, refusals, a turn that takes
    text back, caches that grow each in its own time. Fails where a request reads another's keys or
    another's numbers, or where requests that fill a size up are seen."""
    model, counted = _model()
    prompts = [model.prompts(video_input(n, (2, 4, 4 + 4 * n)))[0] for n in range(count)]
    rules = [Sampling()] * count
    sessions = [Session(model, rules, cuda_graphs=on, room=40) for on in (False, True)]
    ordinary, fixed = sessions
    for session in sessions:
        session.prefill(prompts)
    assert len({request.cache.length for request in fixed.requests.values()}) == count
    rng, steps = random.Random(count), 0
    for round in range(40):
        trees = {}
        for number in range(count):
            trees[number] = chain([rng.randrange(200) for _ in range(1 + (round + number) % 6)])
            if round % 4 == 2 and number % 2:
                trees[number] = random_tree(rng, 2 + round % 15, lambda: rng.randrange(200))
        a, b = (_score(session, trees) for session in sessions)
        assert torch.allclose(a, b, atol=1e-4)
        trees[0] = add(trees[0], rng.randrange(len(trees[0])), rng.randrange(200))
        a, b = (_score(session, trees) for session in sessions)
        assert torch.allclose(a, b, atol=1e-4)
        capture_new_sizes()
        steps += 2
        for session in sessions:
            session.commit({n: [3, 5, 7][: 1 + (round + n) % 3] for n in range(count)})
        if round == 20:
            turn = dict.fromkeys(range(count), Turn(drop=4, ids=(4, 8, 9)))
            for session in sessions:
                session.start_turn(turn, rules)
    # each is replayed once where it is checked, in the place of the step that was its first
    assert counted.captures < 30 and counted.replays == steps


def test_a_request_that_ends_leaves_the_others_theirs():
    """Claim: when one of several requests ends, and when another comes, nothing that was captured
    is captured again, and the memory of the one is the other's. Fails if ending forgets graphs, or
    if memory moves that graphs point to."""
    model, counted = _model()
    prompts = [model.prompts(video_input(n))[0] for n in range(3)]
    sessions = [Session(model, [Sampling()] * 5, cuda_graphs=on) for on in (False, True)]

    def work(requests: list[int], rounds: int) -> None:
        for round in range(rounds):
            trees = {number: chain([5, 6 + round]) for number in requests}
            a, b = (_score(session, trees) for session in sessions)
            assert torch.allclose(a, b, atol=1e-4)
            capture_new_sizes()
            for session in sessions:
                session.commit({number: [5, 9] for number in requests})

    for session in sessions:
        session.prefill(prompts)
    work([0, 1, 2], 4)
    work([0, 2], 4)
    captures, rows = counted.captures, sessions[1].cuda_graphs.pool.rows
    for session in sessions:
        session.end(1)
    work([0, 2], 3)
    for session in sessions:
        list(session.prefill_in_chunks(3, prompts[1]))
    work([0, 2, 3], 3)
    assert counted.captures == captures and sessions[1].cuda_graphs.pool.rows == rows


def test_a_second_answer_captures_nothing():
    """Claim: a later session of the same model finds the sizes of an earlier one, also for a prompt
    of another length in another memory. Fails if graphs belong to a session or to its cache."""
    model, counted = _model()
    for number, frames in enumerate(((2, 4, 4), (2, 4, 4), (2, 4, 8))):
        prompts = model.prompts(video_input(number, frames))
        sessions = [Session(model, [Sampling()], cuda_graphs=on, room=300) for on in (False, True)]
        for session in sessions:
            session.prefill(prompts)
        for round in range(4):
            assert _same(*sessions, chain([1 + round, 2, 3])) < 1e-4
            for session in sessions:
                session.commit({0: [1 + round, 9]})
        if number == 0:
            first = counted.captures
    assert first > 0 and counted.captures == first


def test_an_ensembles_draft_runs_in_fixed_shapes(monkeypatch):
    """Claim: where sessions use fixed sizes a draft of several views is one step, however many
    tokens are pending, and the answer is the target's."""
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))
    steps: list[tuple[int, bool]] = []
    plain = CudaGraphs._fill_captured_size

    def noted(self: CudaGraphs, rows: Any, *rest: Any) -> Any:
        size = plain(self, rows, *rest)
        steps.append((len(rows.segments), size is not None))
        return size

    monkeypatch.setattr(CudaGraphs, "_fill_captured_size", noted)
    result = answered("qwen2_5_vl", "tabed-mtcp")
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    drafted = [fixed for views, fixed in steps if views == 4]
    assert sum(drafted) >= len(drafted) - 8
    assert len(drafted) >= sum(len(round.tokens) for round in result.rounds)


def test_keys_beyond_a_size_take_the_next_one(monkeypatch):
    """Claim: a text that outgrows a size's keys goes on in the next size, and the laws stay."""
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 16)
    ordinary, fixed, counted = _both()
    rng = random.Random(1)
    for _ in range(50):
        assert _same(ordinary, fixed, chain([rng.randrange(200) for _ in range(3)])) < 1e-4
        new = [rng.randrange(200)]
        for session in (ordinary, fixed):
            session.commit({0: new})
    assert len({size.keys for _, size in fixed.cuda_graphs._captured}) > 1


def test_a_conversation_that_takes_text_back_goes_on():
    """Claim: a turn that forgets into the prompt, past the border, leaves the laws right."""
    ordinary, fixed, _ = _both()
    for session in (ordinary, fixed):
        session.score({0: chain([1, 2, 3])})
        session.commit({0: [1, 2, 9]})
        session.start_turn({0: Turn(drop=5, ids=(4, 4, 8, 9, 11, 3))}, [Sampling()])
    assert _same(ordinary, fixed, Tree()) < 1e-4
    assert _same(ordinary, fixed, random_tree(random.Random(2), 9, lambda: 6)) < 1e-4


def test_a_size_is_captured_once_and_its_memory_stays():
    """Claim: steps of one size share one capture, and their numbers change in place.

    Fails if a position, an id, a length or the mask were captured as a constant, or memory moved.
    """
    ordinary, fixed, counted = _both()
    graphs = fixed.cuda_graphs
    for round in range(10):
        assert _same(ordinary, fixed, chain([5, 6, 7 + round])) < 1e-4
        for session in (ordinary, fixed):
            session.commit({0: [5, 9]})
        places = {size: each._memory.data_ptr() for size, each in graphs._inputs.items()}
        if round == 0:
            first = places
    # a round's 3 rows, then 4 with the token before: both are of 4
    assert counted.captures == len(graphs._captured) == 1 and places == first
    assert counted.replays == 1 + 9


@pytest.mark.parametrize("shift", [-1, 1])
def test_control_a_mask_off_by_one_is_seen(shift, monkeypatch):
    """Control: keys read one too far or too short must show, or nothing above does."""
    ordinary, fixed, counted = _both()
    for token in (1, 2):
        assert _same(ordinary, fixed, chain([token, 2, 3])) < 1e-4
        for session in (ordinary, fixed):
            session.commit({0: [token]})
    fill = cuda_graphs.StaticInputs.fill

    def shifted(self: Any, *rest: Any) -> None:
        fill(self, *rest)
        self.caches[2] += shift

    monkeypatch.setattr(cuda_graphs.StaticInputs, "fill", shifted)
    replays = counted.replays
    a, b = (_score(session, {0: chain([1, 2, 3])}) for session in (ordinary, fixed))
    assert counted.replays == replays + 1 and not torch.allclose(a, b, atol=1e-2)


def test_other_steps_are_ordinary_forwards():
    """Claim: more rows than the largest size, and caches that are not in the model's pool, take the
    ordinary path."""
    ordinary, fixed, counted = _both()
    for _ in range(2):
        assert _same(ordinary, fixed, chain([4] * (ROW_SIZES[-1] + 3))) < 1e-4
    assert not counted.captures
    for session in (ordinary, fixed):
        session.commit({0: [7]})
    cache = fixed.requests[0].cache
    fixed.requests[0].cache = cache.select(torch.arange(cache.length), 100, pooled=False)
    for _ in range(2):
        assert _same(ordinary, fixed, chain([4, 5])) < 1e-4
        assert _same(ordinary, fixed, chain([4])) < 1e-4
    assert not counted.captures


def test_a_capture_that_fails_costs_nothing_but_speed(caplog):
    """Claim: a GPU that refuses a capture is told of once, and the laws are ordinary ones."""

    def refused(work: cuda_graphs.Forward) -> cuda_graphs.Forward:
        raise RuntimeError("operation not permitted when stream is capturing")

    ordinary, fixed, _ = _both(capture=refused)
    for _ in range(3):
        assert _same(ordinary, fixed, chain([1, 2, 3, 4])) < 1e-5
        for session in (ordinary, fixed):
            session.commit({0: [1]})
    assert caplog.text.count("cannot be captured") == 1


def test_a_session_chooses_by_device(monkeypatch):
    """Claim: by itself a session uses fixed sizes only on GPUs, and with the fused decoder."""
    model = backbone(FAMILIES["qwen2_5_vl"]())
    assert Session(model, [Sampling()]).cuda_graphs is None
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))
    assert Session(model, [Sampling()]).cuda_graphs is not None
    modules = backbone(FAMILIES["qwen2_5_vl"](), False)
    assert Session(modules, [Sampling()]).cuda_graphs is None
    with pytest.raises(ModelError, match="fused decoder"):
        Session(modules, [Sampling()], cuda_graphs=True)


def test_what_forwards_cost_is_measured_on_replays(monkeypatch):
    """Claim: of what is timed nothing is captured: every length and number of rows is captured
    before. Fails if lengths that alternate make each other's captures void, or if a first use is
    timed."""
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))
    model, counted = _model()
    timed: list[tuple[int, int]] = []
    plain = cost_measurement.time_step

    def step(session: Session, context: int, rows: int) -> float:
        before = counted.captures, counted.replays
        seconds = plain(session, context, rows)
        timed.append((counted.captures - before[0], counted.replays - before[1]))
        return seconds

    monkeypatch.setattr(cost_measurement, "time_step", step)
    cost_measurement._time_forwards(model, [(64, 1), (2048, 1), (2048, 8)])
    warm, rest = timed[:3], timed[3:]
    assert all(captured == 0 for captured, _ in timed) and counted.captures == 3
    assert len(rest) >= 6 and rest == [(0, 1)] * len(rest), (warm, rest)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["ar", "sd-tree", "specvlm", "specvlm-self", "std", "sage"])
def test_answers_are_the_same(method, monkeypatch):
    """Claim: with every session in fixed sizes, target's and draft's, answers stay the target's.

    Caches hold NaN wherever they hold nothing. (Everything else that tests sessions can be run
    so: set ``cuda_graphs.DEVICE_TYPES``; only tests that count calls of ``Backbone.forward`` fail.)
    """
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))
    result = answered("qwen2_5_vl", method)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None


@pytest.mark.parametrize("wrong", [(), (4,), (8,), (4, 8)])
def test_each_size_is_compared_with_an_ordinary_forward(wrong, caplog):
    """Claim: a size whose logits are off is found out when it is captured and never used, and laws
    stay those of ordinary forwards; the other sizes are. Fails if one size's check stands for all.
    """

    class Spoilt(Counted):
        def __call__(self, work: cuda_graphs.Forward) -> cuda_graphs.Forward:
            replay = super().__call__(work)

            def spoilt() -> torch.Tensor:
                out = replay()
                return out.roll(1, -1) if len(out) in wrong else out

            return spoilt

    ordinary, fixed, counted = _both(capture=Spoilt())
    for token in (5, 6, 7):
        for rows in (3, 7):
            assert _same(ordinary, fixed, chain([token] * rows)) < 1e-4
            for session in (ordinary, fixed):
                session.commit({0: [token]})
    assert {size.rows for _, size in fixed.cuda_graphs._captured} == {4, 8} - {*wrong}
    assert counted.captures == 2 and caplog.text.count("logits differ") == len(wrong)


def test_a_trial_changes_no_keys():
    """Claim: a size is captured and checked between two steps of a draft that grows, over the
    caches of its request, and every key and value of what was scored stays bit for bit. Fails if
    what the trial wrote is left there."""
    ordinary, fixed, counted = _both(room=70)
    cache = fixed.requests[0].cache
    tree = chain([5, 6, 7])
    _score(fixed, {0: tree})
    end = cache.length + len(tree)
    before = [tensor[:, :end].clone() for tensor in (*cache.keys, *cache.values)]
    capture_new_sizes()
    assert counted.captures == 1
    after = [tensor[:, :end] for tensor in (*cache.keys, *cache.values)]
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))
    _score(ordinary, {0: tree})
    assert _same(ordinary, fixed, add(tree, 2, 9)) < 1e-4


def test_what_was_captured_over_memory_that_moved_is_captured_anew(monkeypatch):
    """Claim: when another request's cache makes the pool move, a request goes on with the laws of
    ordinary forwards, by captures of the new memory. Fails if a graph points to the old one."""
    monkeypatch.setattr(cache_pool, "INITIAL_TOKENS", 0)
    ordinary, fixed, counted = _both(room=20)
    for round in range(6):
        assert _same(ordinary, fixed, chain([5, 6, round])) < 1e-4
        for session in (ordinary, fixed):
            session.commit({0: [5, 9]})
        if round == 2:
            captures = counted.captures
            crowd = [fixed.new_cache(500 * (1 + n)) for n in range(2)]
    assert counted.captures == captures + 1 and len(crowd) == 2


def test_memory_that_runs_out_costs_speed_only(monkeypatch):
    """Claim: where the pool finds no memory to grow, a request's cache is its own, and its forwards
    are ordinary ones with the same laws."""
    monkeypatch.setattr(cache_pool, "INITIAL_TOKENS", 0)
    ordinary, fixed, counted = _both(room=4)
    assert _same(ordinary, fixed, chain([1, 2, 3])) < 1e-4
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    for round in range(40):
        assert _same(ordinary, fixed, chain([round, 2, 3])) < 1e-4
        for session in (ordinary, fixed):
            session.commit({0: [round, 2, 9, 4]})
    assert fixed.requests[0].cache.lease is None and counted.captures > 0
    replays = counted.replays
    assert _same(ordinary, fixed, chain([1, 2, 3])) < 1e-4 and counted.replays == replays


def test_captures_are_in_no_rounds_seconds(monkeypatch):
    """Claim: what captures take is in ``Timings.captures`` and ``total``, and in no round. Fails if
    a clock goes on while something is captured."""
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))

    class Slow(Counted):
        def __call__(self, work: cuda_graphs.Forward) -> cuda_graphs.Forward:
            time.sleep(1.0)
            return super().__call__(work)

    model, counted = _model(capture=Slow())
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "method": "ar"}
    began = time.perf_counter()
    first = saccade.run(model, input_for("qwen2_5_vl"), **settings)
    waited = time.perf_counter() - began
    second = saccade.run(model, input_for("qwen2_5_vl"), **settings)
    assert counted.captures == 1 and first.ids == second.ids
    assert first.timings.captures >= 1.0 and second.timings.captures == 0
    assert first.timings.decode + first.timings.captures <= first.timings.total <= waited
    assert sum(each.verify_seconds + each.draft_seconds for each in first.rounds) <= (
        first.timings.decode + 1e-6
    )


@pytest.mark.parametrize(
    ("noise_of_logits", "noise_of_layers", "is_used"),
    [(0.2, 0.0, True), (0.2, 0.2, False), (2.0, 0.0, False)],
)
def test_rounding_that_adds_up_over_layers_is_no_error(
    noise_of_logits, noise_of_layers, is_used, monkeypatch, caplog
):
    """Claim: in bfloat16 a captured forward whose logits are further from an ordinary one's than is
    usual is used if the first layers agree. Where they do not, or where the logits are nothing
    like, it is not. Fails where deep models run no captured step, or where wrong ones do."""
    model = Backbone(deepcopy(FAMILIES["llama"]()).to(torch.bfloat16))
    counted = Counted()
    graphs = model.graphs[model.key_layer_count] = CudaGraphs(model, counted)
    forward, decode = graphs._forward, graphs._decode

    def with_noise(x: torch.Tensor, share: float) -> torch.Tensor:
        return x + share * x.abs().amax() * torch.linspace(-1, 1, x.shape[-1]).to(x.dtype)

    def noisy_decode(fused: Any, kind: Any, inputs: Any) -> torch.Tensor:
        hidden = decode(fused, kind, inputs)
        for states in inputs.hidden.values():
            states.copy_(with_noise(states, noise_of_layers))
        return hidden

    monkeypatch.setattr(
        graphs, "_forward", lambda kind, inputs: with_noise(forward(kind, inputs), noise_of_logits)
    )
    monkeypatch.setattr(graphs, "_decode", noisy_decode)
    session = Session(model, [Sampling()], cuda_graphs=True)
    session.prefill(model.prompts(input_for("llama")))
    hidden_before = session.requests[0].cache.hidden
    session.score({0: chain([5, 6])})
    capture_new_sizes()
    assert bool(graphs._captured) == is_used
    assert ("is not used" in caplog.text) != is_used
    assert session.requests[0].cache.hidden is hidden_before
