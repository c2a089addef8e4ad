"""Claims about sampled answers in parallel: over models that are tables, the law of three tokens is
the exact product law, whatever flies. Tables, power and size are those of ``test_tables.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beside import Inside, hired
from helpers import StubDraft, TableSession, chi_square
from test_tables import ALPHA, DRAFT, RULES, SAMPLES, TARGET, TOKENS, counts, exact

from saccade import sampling, worker
from saccade import verify as verify_module
from saccade.draft import Words
from saccade.grow import Chain
from saccade.sampling import Sampling
from saccade.schedule import parallel
from saccade.tree import add, after
from saccade.types import Prefill, Prompt, State, Tree
from saccade.view import FULL
from saccade.worker import WorkerDraft

pytestmark = pytest.mark.usefixtures("unchecked")


class TableAhead(StubDraft):
    """A draft that works ahead over a table: what flies is what is left of the batch."""

    def __init__(self, rules: Sequence[Sampling], gamma: int) -> None:
        self.session = TableSession(DRAFT, rules)
        self.gamma = gamma
        self.chains = {request: Tree() for request in range(len(rules))}
        # a head start of another length each
        self.batch = {request: request % (gamma + 3) for request in self.chains}

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        return self._flown({request: self.batch[request] for request in stems})

    def ahead(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        return self._flown({request: len(flight) + 1 for request, flight in flights.items()})

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)
        for request, new in tokens.items():
            stands = self.chains[request].tokens[: len(new)] == tuple(new)
            count = len(new) if stands else len(self.chains[request])
            self.chains[request] = after(self.chains[request], count)
            self.batch[request] = self.gamma - 1 if stands else 0

    def _flown(self, sizes: Mapping[int, int]) -> dict[int, Tree]:
        flown = {}
        for request, size in sizes.items():
            chain = self.chains[request]
            while len(chain) < size:
                tip = len(chain) - 1
                token, q = self.session.score({request: chain})[request].draw(tip)
                chain = add(chain, tip, token, q)
            self.chains[request] = chain
            flown[request] = Tree(chain.tokens[:size], chain.parents[:size], chain.q[:size])
        return flown


class Misplaced(TableAhead):
    """Hands on each token with the law of the position before it."""

    def ahead(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        trees = super().ahead(flights)
        return {
            r: Tree(tree.tokens, tree.parents, (tree.q[0], *tree.q[:-1]))
            for r, tree in trees.items()
        }


def endings(found: Mapping[int, list[int]]) -> Callable[[int, Sequence[int]], tuple[int, Any]]:
    """Takes down each request's first three tokens."""

    def cut(request: int, tokens: Sequence[int]) -> tuple[int, Any]:
        room = TOKENS - len(found[request])
        found[request].extend(tokens[:room])
        return min(room, len(tokens)), "length" if len(tokens) >= room else None

    return cut


def answers(make: Callable[..., Any], rules: Sampling, gamma: int) -> list[list[int]]:
    every = [rules] * SAMPLES
    found: dict[int, list[int]] = {request: [] for request in range(SAMPLES)}
    for _ in parallel(
        TableSession(TARGET, every), make(every, gamma), range(SAMPLES), endings(found)
    ):
        pass
    return list(found.values())


CASES = [(1, "temperature 1"), (2, "temperature 0.7, top-k 2"), (5, "top-p 0.8")]
REST = [(gamma, rules) for gamma in (1, 2, 5) for rules in RULES if (gamma, rules) not in CASES]


@pytest.mark.parametrize(
    ("gamma", "rules"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_the_joint_law_of_three_tokens_in_parallel_is_the_targets(gamma, rules):
    """Claim: sampling in parallel is lossless, whatever part of a batch flies. Seeds are fixed."""
    settled = RULES[rules]()
    law = exact(settled)
    assert int((law > 0.005).sum()) >= 8, "a law of few cells proves little"
    assert chi_square(counts(answers(TableAhead, settled, gamma)), law) > ALPHA


def _misplaced(patch: pytest.MonkeyPatch) -> Any:
    return Misplaced


def _no_residual(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(verify_module, "residual", lambda p, q: p)
    return TableAhead


def _one_noise(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(sampling, "ROLES", {"draft": 1, "accept": 1, "own": 1})
    return TableAhead


BUGS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "laws of the position before": _misplaced,
    "no residual": _no_residual,
    "one noise for all roles": _one_noise,
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_control_a_planted_bug_bends_the_law(bug, monkeypatch):
    """Control: each of these must fail the very same test, or the test has no power."""
    settled = RULES["temperature 1"]()
    law = exact(settled)
    assert chi_square(counts(answers(BUGS[bug](monkeypatch), settled, 2)), law) < ALPHA


# -- the package's own draft, in this process ---------------------------------------------------


class TableReading(TableSession):
    """The draft's session, to which any prompt is the same."""

    def prefill(self, prompts: Sequence[Prompt]) -> list[Prefill]:
        return []


PROMPT = Prompt(
    context=torch.zeros(1, dtype=torch.long),
    embeds=torch.zeros(1, 1),
    positions=torch.zeros(1, 1, dtype=torch.long),
    visual=torch.zeros(1, dtype=torch.bool),
    fixed=torch.zeros(1, dtype=torch.bool),
    grid=torch.zeros(0, 4, dtype=torch.long),
    index=torch.zeros(1, dtype=torch.long),
    next_position=1,
)
READ = Prefill(PROMPT, None, torch.zeros(1))


def by_worker(
    rules: Sequence[Sampling], gamma: int, turns: Callable[[], int]
) -> dict[int, list[int]]:
    """Answers of one batch, drafted by ``WorkerDraft`` and ``Desk`` over the draft's table."""
    model: Any = SimpleNamespace(
        sees_as=lambda other: True,
        adopt=lambda prompt: prompt,
        written=lambda prompt: prompt,
        device=torch.device("cpu"),
    )
    team: Any = SimpleNamespace(
        target=model,
        drafting=lambda: model,
        common=lambda: (len(DRAFT[()]), []),
        view=FULL,
        shape=Chain(gamma),
        rules=rules,
        room=TOKENS,
        words=Words(),
    )
    found: dict[int, list[int]] = {request: [] for request in range(len(rules))}
    with pytest.MonkeyPatch.context() as patch, hired(Inside(turns)):
        patch.setattr(worker, "Session", lambda backbone, rules, **rest: TableReading(DRAFT, rules))
        draft = WorkerDraft(team)
        draft.begin({"input_ids": torch.zeros(len(rules), 1)})
        draft.look([PROMPT] * len(rules))
        draft.guide([READ] * len(rules))
        target = TableSession(TARGET, rules)
        for _ in parallel(target, draft, range(len(rules)), endings(found)):
            pass
        draft.close()
    return found


def sampled(seed: int) -> Sampling:
    return Sampling(True, (), seed)


@pytest.mark.parametrize("gamma", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_worker_hands_each_token_the_law_it_was_drawn_from(gamma):
    """Claim: the joint law again with the package's own two sides, one request a job, whoever is
    faster. Fails if a slot of shared memory is read for another token than it was written for.
    """
    chance = random.Random(gamma)
    speed = lambda: chance.choice([0, 1, 1, 4])  # noqa: E731
    found = [by_worker([sampled(seed)], gamma, speed)[0] for seed in range(SAMPLES)]
    assert chi_square(counts(found), exact(sampled(0))) > ALPHA


def test_the_worker_hands_each_request_of_a_batch_its_own_laws():
    """Claim: the same for batches of six. Fails if a slot is shared by requests."""
    found: list[list[int]] = []
    for seed in range(SAMPLES // 6):
        found += by_worker([sampled(seed)] * 6, 2, lambda: 1).values()
    assert chi_square(counts(found), exact(sampled(0))) > ALPHA
