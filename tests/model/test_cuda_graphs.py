"""Claims about steps of fixed shape: the same laws as ordinary forwards, from memory that stays."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    answered,
    backbone,
    input_for,
    left_padded,
    random_tree,
    truth,
    video_input,
)

from saccade.core.errors import ModelError
from saccade.core.prompt import Turn
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add, chain
from saccade.drafting.shapes import costs
from saccade.model import cuda_graphs
from saccade.model.cuda_graphs import ROWS, CudaGraphs
from saccade.model.session import Session

LEAN = ["qwen2_5_vl", "qwen2_vl", "llama"]


class Counted:
    """A capture as CUDA graphs are: made once a size, then repeated on the memory seen then."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: cuda_graphs.Work) -> cuda_graphs.Work:
        self.captures += 1
        work()  # the warm-up runs for real

        def replay() -> torch.Tensor:
            self.replays += 1
            return work()

        return replay


def _both(family: str = "qwen2_5_vl", **options: Any) -> tuple[Session, Session, Counted]:
    """An ordinary session and one of captured steps over one prompt, and the latter's captures."""
    model = backbone(FAMILIES[family]())
    cuda_graphs._trusted.add(model)  # else the first step is an ordinary one
    prompts = model.prompts(input_for(family))
    counted = Counted()
    ordinary = Session(model, [Sampling()], cuda_graphs=False, **options)
    fixed = Session(model, [Sampling()], cuda_graphs=True, **options)
    fixed.cuda_graphs = CudaGraphs(model, counted)
    for session in (ordinary, fixed):
        session.prefill(prompts)
    return ordinary, fixed, counted


def _same(ordinary: Session, fixed: Session, tree: Tree, views: int = 1) -> float:
    a, b = (
        torch.stack([row for each in s.score(dict.fromkeys(range(views), tree)).values()
                     for row in each.rows])
        for s in (ordinary, fixed)
    )  # fmt: skip
    assert a.shape == b.shape and bool(torch.isfinite(b).all())
    return float((a - b).abs().max())


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
    assert counted.replays > 60 > counted.captures
    assert fixed.requests[0].cache.capacity > 70 + len(fixed.requests[0].context) - 60


@pytest.mark.parametrize("count", [2, 4])
def test_views_of_one_request_are_one_step(count):
    """Claim: several prompts of unlike lengths that score the same trees are one captured step a
    size, with the laws of ordinary forwards to 1e-4: chains, trees, refusals, a turn that takes
    text back, caches that grow each in its own time. Where one asks for other rows than another the
    forward is an ordinary one. Fails where a view reads another's cache or another's numbers."""
    model = backbone(FAMILIES["qwen2_5_vl"]())
    cuda_graphs._trusted.add(model)
    prompts = [model.prompts(video_input(n, (2, 4, 4 + 4 * n)))[0] for n in range(count)]
    counted, rules = Counted(), [Sampling()] * count
    ordinary = Session(model, rules, cuda_graphs=False, room=40, views=count)
    fixed = Session(model, rules, cuda_graphs=True, room=40, views=count)
    fixed.cuda_graphs = CudaGraphs(model, counted)
    for session in (ordinary, fixed):
        session.prefill(prompts)
    lengths = {request.cache.length for request in fixed.requests.values()}
    assert len(lengths) == count
    rng = random.Random(count)
    for round in range(40):
        tree = chain([rng.randrange(200) for _ in range(1 + round % 6)])
        if round % 4 == 2:
            tree = random_tree(rng, 2 + round % 15, lambda: rng.randrange(200))
        assert _same(ordinary, fixed, tree, count) < 1e-4
        longer = add(tree, rng.randrange(len(tree)), rng.randrange(200))
        assert _same(ordinary, fixed, longer, count) < 1e-4
        for session in (ordinary, fixed):
            session.commit(dict.fromkeys(range(count), [3, 5, 7][: 1 + round % 3]))
        if round == 20:
            turn = dict.fromkeys(range(count), Turn(drop=4, ids=(4, 8, 9)))
            for session in (ordinary, fixed):
                session.turn(turn, rules)
    assert counted.replays == 80 and counted.captures < 30
    one = {view: chain([5] * (1 + (view == 1))) for view in range(count)}
    laws = [session.score(one)[1].logits(1) for session in (ordinary, fixed)]
    assert torch.allclose(*laws, atol=1e-4) and counted.replays == 80


def test_an_ensembles_draft_runs_in_fixed_shapes(monkeypatch):
    """Claim: where sessions use fixed shapes every step of a draft of several views is one, however
    many tokens are pending, and the answer is the target's."""
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    steps: list[tuple[int, bool]] = []
    plain = CudaGraphs._run

    def noted(self: CudaGraphs, segments: Any, *rest: Any) -> Any:
        found = plain(self, segments, *rest)
        steps.append((len(segments), found is not None))
        return found

    monkeypatch.setattr(CudaGraphs, "_run", noted)
    result = answered("qwen2_5_vl", "tabed-mtcp")
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    drafted = [fixed for views, fixed in steps if views == 4]
    assert all(drafted) and len(drafted) >= sum(len(round.tokens) for round in result.rounds)


def test_the_tail_settles_anew_when_it_is_long(monkeypatch):
    """Claim: a text longer than the longest tail moves the border, and the laws stay."""
    monkeypatch.setattr(cuda_graphs, "LONGEST", 16)
    monkeypatch.setattr(cuda_graphs, "SHORTEST", 4)
    ordinary, fixed, counted = _both()
    rng = random.Random(1)
    for _ in range(30):
        assert _same(ordinary, fixed, chain([rng.randrange(200) for _ in range(3)])) < 1e-4
        new = [rng.randrange(200)]
        for session in (ordinary, fixed):
            session.commit({0: new})
    memory = fixed.cuda_graphs._memory
    assert memory is not None and memory.settled[0] > fixed.requests[0].prompt_rows[0]


def test_a_conversation_that_takes_text_back_goes_on():
    """Claim: a turn that forgets into the prompt, past the border, leaves the laws right."""
    ordinary, fixed, _ = _both()
    for session in (ordinary, fixed):
        session.score({0: chain([1, 2, 3])})
        session.commit({0: [1, 2, 9]})
        session.turn({0: Turn(drop=5, ids=(4, 4, 8, 9, 11, 3))}, [Sampling()])
    assert _same(ordinary, fixed, Tree()) < 1e-4
    assert _same(ordinary, fixed, random_tree(random.Random(2), 9, lambda: 6)) < 1e-4


def test_a_size_is_captured_once_and_its_memory_stays():
    """Claim: steps of one size share one capture, and their numbers change in place.

    Fails if a position, an id or the mask were captured as a constant, or the memory moved.
    """
    ordinary, fixed, counted = _both()
    steps = fixed.cuda_graphs
    assert steps is not None
    for _ in range(6):
        assert _same(ordinary, fixed, chain([5, 6, 7])) < 1e-4
        for session in (ordinary, fixed):
            session.commit({0: [5, 9]})
    places = {k: (s.numbers.data_ptr(), s.visible[0].data_ptr()) for k, s in steps._slots.items()}
    before, replays = counted.captures, counted.replays
    assert before == len(steps._runs) == 1  # a round's 3 rows, then 4 with the token before: 4 both
    for _ in range(4):
        assert _same(ordinary, fixed, chain([8, 6, 1])) < 1e-4
        for session in (ordinary, fixed):
            session.commit({0: [8, 2]})
    assert counted.captures == before and counted.replays == replays + 4
    for size, slots in steps._slots.items():
        assert places[size] == (slots.numbers.data_ptr(), slots.visible[0].data_ptr())


@pytest.mark.parametrize("shift", [-1, 1])
def test_control_a_mask_off_by_one_is_seen(shift, monkeypatch):
    """Control: a tail read one key too far or too short must show, or nothing above does."""
    stage = cuda_graphs._stage

    def shifted(staged: Any, *rest: Any) -> None:
        stage(staged, *rest)
        for visible in staged.visible:
            visible.copy_(visible.roll(shift, 1))

    monkeypatch.setattr(cuda_graphs, "_stage", shifted)
    ordinary, fixed, _ = _both()
    a, b = (torch.stack(list(s.score({0: chain([1, 2, 3])})[0].rows)) for s in (ordinary, fixed))
    assert not torch.allclose(a, b, atol=1e-2)


def test_other_steps_are_ordinary_forwards():
    """Claim: several requests, and more rows than the largest size, take the ordinary path."""
    model = backbone(FAMILIES["qwen2_5_vl"]())
    prompts = model.prompts(left_padded([video_input(0), video_input(1, (2, 4, 4), before=2)]))
    counted = Counted()
    pair = Session(model, [Sampling()] * 2, cuda_graphs=True)
    pair.cuda_graphs = CudaGraphs(model, counted)
    pair.prefill(prompts)
    pair.score({0: chain([1, 2]), 1: Tree((3,), (-1,), (None,))})
    pair.score({0: chain([1, 2, 4])})  # alone, but not the only one: the next may be the other
    assert not counted.captures
    pair.end(1)
    pair.score({0: chain([1, 2, 4, 5])})
    assert counted.captures == 1
    pair.end(0)
    assert pair.cuda_graphs._memory is None and not pair.cuda_graphs._runs, (
        "the cache is held for nothing"
    )
    ordinary, fixed, counted = _both()
    assert _same(ordinary, fixed, chain([4] * (ROWS[-1] + 3))) < 1e-4
    assert not counted.captures


def test_a_capture_that_fails_costs_nothing_but_speed(caplog):
    """Claim: a GPU that refuses a capture is told of once, and the laws are ordinary ones."""
    ordinary, fixed, _ = _both()

    def refused(work: cuda_graphs.Work) -> cuda_graphs.Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    fixed.cuda_graphs = CudaGraphs(fixed.backbone, refused)
    for _ in range(3):
        assert _same(ordinary, fixed, chain([1, 2, 3, 4])) < 1e-5
        for session in (ordinary, fixed):
            session.commit({0: [1]})
    assert caplog.text.count("no steps of fixed shape") == 1


def test_a_session_chooses_by_device(monkeypatch):
    """Claim: by itself a session uses fixed shapes only on GPUs, and with the fused decoder."""
    model = backbone(FAMILIES["qwen2_5_vl"]())
    assert Session(model, [Sampling()]).cuda_graphs is None
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    assert Session(model, [Sampling()]).cuda_graphs is not None
    modules = backbone(FAMILIES["qwen2_5_vl"](), False)
    assert Session(modules, [Sampling()]).cuda_graphs is None
    with pytest.raises(ModelError, match="fused decoder"):
        Session(modules, [Sampling()], cuda_graphs=True)


def test_bare_forwards_over_filled_caches_run_in_fixed_shapes(monkeypatch):
    """Claim: what `cost` times is the captured step where sessions use it."""
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    session = costs.filled(backbone(FAMILIES["qwen2_5_vl"]()), 64, 1, 32)
    assert costs.step(session, 64, 5) > 0
    assert session.cuda_graphs is not None and len(session.cuda_graphs._runs) == 1


@pytest.mark.parametrize("method", ["ar", "sd-tree", "specvlm", "specvlm-self", "std", "sage"])
def test_answers_are_the_same(method, monkeypatch):
    """Claim: with every session in fixed shapes, target's and draft's, answers stay the target's.

    Caches hold NaN wherever they hold nothing. (Everything else that tests sessions can be run
    so: set ``cuda_graphs.DEVICES``; only tests that count calls of ``Backbone.forward`` then fail.)
    """
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    result = answered("qwen2_5_vl", method)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None


@pytest.mark.parametrize("wrong", [False, True])
def test_the_first_step_on_a_machine_is_held_against_an_ordinary_one(wrong, caplog):
    """Claim: a capture whose logits are off is found out at its first step and never used: laws
    stay those of ordinary forwards. Control: a right one is trusted from then on."""
    ordinary, fixed, _ = _both()
    cuda_graphs._trusted.discard(fixed.backbone)

    def capture(work: cuda_graphs.Work) -> cuda_graphs.Work:
        return (lambda: work().roll(1, -1)) if wrong else work

    fixed.cuda_graphs = CudaGraphs(fixed.backbone, capture)
    for token in (5, 6, 7):
        found = [session.score({0: chain([token])})[0] for session in (ordinary, fixed)]
        assert torch.allclose(found[0].logits(0), found[1].logits(0), atol=1e-3)
        for session in (ordinary, fixed):
            session.commit({0: [token]})
    assert (fixed.cuda_graphs._capture is None) is wrong
    assert (fixed.backbone in cuda_graphs._trusted) is not wrong
    assert ("apart" in caplog.text) is wrong
