"""Models that are Markov chains over three ids, and the package's own drafts over them.

Every kind of draft runs at four qualities against one target: equal to it (``same``), close to it
(``near``), far from it (``far``), and sure of what the target says least (``wrong``). Two ways to
judge what comes out:

**Exactly.** Noise decides finitely many things: which id is drawn, whether one is accepted. So all
that can happen in the next three tokens is run through, each way with its probability, *given* all
that happened before, draws that nobody judged included. What comes out must be the target's joint
law to rounding. That is more than a law on average, and it is what keeps any later choice honest.

**By sampling**, with the noise there is: a law of triples of tokens that is a total variation of d
away has a non-centrality of at least 4 n d^2 over n triples. Found with probability .9 at alpha
1e-4 is 59 at the 26 degrees of freedom of a joint law and 50 at the 18 of third tokens after pairs:
n = 37,000 for d = .02, and 590,000 for d = .005.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import sixth_method
import torch
from beside import Inside, hired
from helpers import chi_square, drafter_of
from torch import Tensor

from saccade.core import noise, sampling
from saccade.core import verify as verify_module
from saccade.core.capabilities import Capability
from saccade.core.costs import Costs
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import Learner
from saccade.core.sampling import Sampling, Scores, prob
from saccade.core.tree import Tree
from saccade.core.verify import residual
from saccade.drafting import drafters
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.fallback import Fallback
from saccade.drafting.parallel import child
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import NO_MEMORY_REASON, MemoryGuard, parallel
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views.basic import Fixed, Several, uniform, views_to_read
from saccade.methods import (
    DRAFTERS,
    METHODS,
    SCHEDULES,
    SHAPE_FAMILIES,
    SHAPES,
    WEIGHTINGS,
    resolve,
)
from saccade.model.likeliest import Vocabulary

V, IDS, START, LATE, LONG = 3, 12, 0, 12, 48  # of the ids all but V have no probability
SAMPLED = 37_000  # triples of tokens that find 0.02
LAWS = torch.tensor([[0.55, 0.33, 0.12], [0.15, 0.45, 0.40], [0.28, 0.12, 0.60]])
CHEAP = Costs((1, 64), (1.0, 1.1), 0.02)
# A row costs about what a second token is worth, so what was drawn would decide whether it stays.
FAIR = Costs((1, 2, 4, 8, 16), (1.0, 1.1, 1.3, 1.7, 2.5), 0.02)
DEAR = Costs((1, 2, 4, 8, 16), (1.0, 1.4, 2.2, 4.0, 8.0), 0.15)
PRICES = {" cheap": CHEAP, " fair": FAIR, " dear": DEAR}

Table = list[Tensor]
"""Logits after each id."""


def _near(law: Tensor) -> Tensor:
    return law.sqrt() / law.sqrt().sum()


def _wrong(law: Tensor) -> Tensor:
    return torch.full((V,), 0.02).index_fill(0, law.argmin(), 0.96)


REGIMES: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda law: law,
    "near": _near,
    "far": lambda law: law.roll(1),
    "wrong": _wrong,
}


def _table(laws: Tensor) -> Table:
    rows = torch.cat([laws, laws[:1].expand(IDS - V, -1)])
    return list(torch.nn.functional.pad(rows.log(), (0, IDS - V), value=float("-inf")))


TARGET: Table = _table(LAWS)
VIEWS = 4
# each view of an ensemble sees the target through a blur of its own
DRAFTS: list[list[Table]] = [
    [
        _table(torch.stack([make(law) * (1 - blur) + blur / V for law in LAWS]))
        for blur in (0.0, 0.3, 0.6, 0.9)[:VIEWS]
    ]
    for make in REGIMES.values()
]


SOFTMAX = {
    id(table): [row.softmax(-1) for row in table]
    for table in (TARGET, *(t for v in DRAFTS for t in v))
}


@dataclass(frozen=True)
class Known(Scores):
    """Scores whose laws are looked up: one a row of a table."""

    laws: Sequence[Tensor] = ()

    def law(self, node: int) -> Any:
        return self.laws[node + 1] if node + 1 < len(self.laws) else None


Spoil = Callable[[dict[int, Scores]], dict[int, Scores]]
"""What a session does with its scores before it returns them: it may raise."""


class Tables:
    """A session over Markov chains, one a request; ``before`` is the text so far."""

    def __init__(
        self,
        rules: Sequence[Sampling],
        tables: Sequence[Table],
        before: Sequence[int],
        watch: Callable[[Mapping[int, Tree]], None] = lambda trees: None,
        spoil: Spoil | None = None,
    ) -> None:
        self._watch, self._spoil = watch, spoil or (lambda scored: scored)
        self.rules, self.backbone = rules, MODEL
        self.last = [before[-1]] * len(rules)
        self.count = [len(before) - 1] * len(rules)
        self.requests = [SimpleNamespace(context=[*before]) for _ in rules]
        self.vocabulary = Vocabulary()
        self._tables = tables

    def prefill(self, prompts: Sequence[Prompt]) -> list[Prefill]:
        return []

    def prefill_in_chunks(
        self,
        number: int,
        prompt: Prompt,
        *,
        noise_number: int = 0,
        keeps_all_keys: bool = True,
    ) -> Iterator[None]:
        yield None

    def fork(
        self, prefills: Sequence[Prefill], prompts: Sequence[Prompt], *, can_reselect: bool = False
    ) -> None: ...

    def read(self, number: int, prefill: Prefill, prompt: Prompt) -> None:
        """A head's session reads a prompt so."""

    def end(self, request: int) -> None: ...

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        self._watch(trees)
        scores: dict[int, Scores] = {}
        for number, tree in trees.items():
            table = self._tables[number]
            laws, ids = SOFTMAX[id(table)], (self.last[number], *tree.tokens)
            scores[number] = Known(
                tree,
                [table[token] for token in ids],
                self.rules[number],
                (),
                self.count[number],
                number,
                laws=[laws[token] for token in ids],
            )
        return self._spoil(scores)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for number, new in tokens.items():
            if len(new):
                self.last[number] = new[-1]
                self.count[number] += len(new)
                self.requests[number].context += new


PROMPT = Prompt(
    full_ids=torch.tensor([0, 1, 2, 0, 1, 1, 2, 2, 0]),
    embeds=torch.zeros(1, 1),
    positions=torch.zeros(1, 1, dtype=torch.long),
    visual=torch.zeros(1, dtype=torch.bool),
    fixed=torch.zeros(1, dtype=torch.bool),
    grid=torch.zeros(0, 4, dtype=torch.long),
    places=torch.zeros(1, dtype=torch.long),
    next_position=1,
)
READ = Prefill(PROMPT, None, torch.zeros(1))
MODEL: Any = SimpleNamespace(
    drafts_blocks=False,
    shares_rows_with=lambda other: True,
    can_average_rows=False,
    shares_vision_with=lambda other: False,
    is_rounded_copy_of=lambda other: False,
    adopt=lambda prompt: prompt,
    embed_missing_rows=lambda prompt: prompt,
    first_layers=lambda count: MODEL,
    device=torch.device("cpu"),
    vocab=IDS,
    key_layer_count=2,
    layer_count=2,
    placeholders={},
    prepare=lambda threads: None,
)


def quick_uniform(
    seed: int, request: int, role: str, position: int, sibling: int, began: int = 0
) -> float:
    """``noise.uniform`` by a quicker generator, of the same keys."""
    mask = 2**64 - 1
    key = hash((seed, request, noise.ROLES[role], position, sibling, began)) & mask
    for _ in range(2):
        key = ((key ^ (key >> 32)) * 0xD6E8FEB86659FD93) & mask
    return (key ^ (key >> 32)) / 2**64


class Remembered:
    """The package's ``residual``, ``prob`` and ``draw``, each asked once for what tables repeat."""

    def __init__(self) -> None:
        self._kept: list[Any] = []  # so that no id is used again
        self._left: dict[tuple[int, int | str], Any] = {}
        self._chances: dict[int, list[float]] = {}
        self._sums: dict[int, list[float]] = {}

    def residual(self, p: Any, q: Any) -> Any:
        key = id(p), f"token {q}" if isinstance(q, int) else id(q)
        if key not in self._left:
            self._kept += [p, q]
            self._left[key] = residual(p, q)
        return self._left[key]

    def prob(self, law: Any, token: int) -> float:
        if id(law) not in self._chances:
            self._kept.append(law)
            self._chances[id(law)] = [prob(law, each) for each in range(IDS)]
        return self._chances[id(law)][token]

    def sums(self, law: Tensor) -> list[float]:
        """Probabilities added up."""
        if id(law) not in self._sums:
            self._kept.append(law)
            self._sums[id(law)] = law.double().cumsum(0).tolist()
        return self._sums[id(law)]

    def draw(self, law: Any, u: float) -> int:
        sums = self.sums(law)
        return bisect_right(sums, u * sums[-1])

    def patched(self, patch: pytest.MonkeyPatch, draw: Callable[[Any, Any], int]) -> None:
        patch.setattr(sampling, "draw", draw)
        patch.setattr(verify_module, "draw", draw)
        patch.setattr(verify_module, "prob", self.prob)
        if verify_module.residual is residual:  # unless a control has bent it
            patch.setattr(verify_module, "residual", self.residual)


# -- what is registered ------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole(Fixed):
    """The full view, at once: there is nothing to look for in a prompt without pixels."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        return prompt


WHOLE = Whole("full", uniform, keep=1.0)


def plain(recipe: Recipe, costs: Costs | None) -> Recipe:
    """The recipe over prompts without pixels, its costs settled."""
    view = recipe.view
    count = len(views_to_read(view))
    full = Several((WHOLE,) * count) if count > 1 else WHOLE
    shape = recipe.shape
    if isinstance(recipe.drafter, Ensemble):  # mixing takes long; longer chains are met elsewhere
        shape = Chain(2)
    if Capability.COSTS in shape.needs and costs is not None:
        shape = shape.prepare(lambda: costs)
    return replace(recipe, name="", about="", view=full, shape=shape)


def beside(recipe: Recipe) -> Recipe:
    """The recipe on the parallel schedule."""
    return replace(recipe, drafter=WorkerDrafter, schedule=parallel)


def registered() -> dict[str, Recipe]:
    """Every entry of every table, as a recipe; those of families by their examples. The documents'
    sixth method is one more file of methods."""
    recipes = dict(METHODS)
    for recipe in sixth_method.PROVIDES.recipes:
        recipes |= {recipe.name: recipe, f"{recipe.name} beside": beside(recipe)}
    for family in sixth_method.PROVIDES.shape_families:
        for example in family.examples:
            shape = family.parse(example)
            recipes[f"shape={shape.spelling}"] = replace(resolve("sd"), shape=shape)
    for name in SHAPES:
        recipes[f"shape={name}"] = resolve(f"sd/shape={name}")
    for kind, family in SHAPE_FAMILIES.items():
        for example in family.examples:
            recipes[f"shape={kind}-{example}"] = resolve(f"sd/shape={kind}-{example}")
    for name in DRAFTERS:
        base = {"ensemble": "tabed", "lookup": "lookup", "copies": "auto/view=full"}.get(name, "sd")
        recipes[f"drafter={name}"] = resolve(f"{base}/drafter={name}")
    for name in WEIGHTINGS:
        for last in ("", "-2") if name != "equal" else ("",):
            recipes[f"weights={name}{last}"] = resolve(f"tabed/weights={name}{last}")
    for name in SCHEDULES:
        recipes[f"schedule={name}"] = resolve(f"sd/schedule={name}")
    return recipes


def cases() -> dict[str, Recipe]:
    """What is registered, each kind of draft once: over tables views mean nothing, and a shape that
    weighs costs is met where rows are cheap, fair and dear. Named by all it stands for."""
    names: dict[Recipe, list[str]] = {}
    for name, recipe in registered().items():
        weighs = Capability.COSTS in recipe.shape.needs
        for word, costs in PRICES.items() if weighs else (("", None),):
            names.setdefault(plain(recipe, costs), []).append(name + word)
    return {", ".join(own): recipe for recipe, own in names.items()}


# -- answers -----------------------------------------------------------------------------------


@dataclass
class Remembering(Learner):
    """A learner that may begin in the middle of an answer, and whose last state is remembered."""

    play: Play
    learner: Learner

    def start(self) -> Any:
        return self.learner.start() if self.play.state is None else self.play.state

    def fold(self, state: Any, round: Any) -> Any:
        self.play.learnt = self.learner.fold(state, round)
        return self.play.learnt


@dataclass
class Play:
    """One batch of answers under way: a recipe's own draft and schedule over tables."""

    recipe: Recipe
    length: int  # of each answer
    regimes: Sequence[int]  # one a request
    turns: Callable[[], int] = lambda: 1  # of the draft's process, whenever the target listens
    state: Any = None  # what the shape has adapted, where an answer begins in its middle
    before: Sequence[int] = (START,)  # the text so far
    past: Mapping[Any, float] = field(default_factory=dict)  # noise that was used for it
    tables: Remembered = field(default_factory=Remembered)
    learnt: Any = None  # what has adapted by the end
    knows_length: bool = False  # whether drafts end where the answer does
    whole: bool = False  # whether an answer ends with its round, however long that gets
    spoil_draft: Spoil | None = None  # what goes wrong with the draft's scores
    spoil_target: Spoil | None = None  # what goes wrong with the target's

    def __call__(
        self,
        seed: int = 0,
        random: Callable[..., Any] = quick_uniform,
        draw: Callable[[Any, Any], int] | None = None,
        watch: Callable[[Mapping[int, Tree]], None] = lambda trees: None,
    ) -> list[list[int]]:
        """The answers; ``random`` and ``draw`` stand in for the package's own. ``watch`` is told
        the trees of each of the target's forwards."""
        with self.staged():
            return self.again(seed, random, draw or self.tables.draw, watch)

    @contextmanager
    def staged(self) -> Iterator[None]:
        """The package's functions and sessions are those of tables in this block."""
        views = len(views_to_read(self.recipe.view))

        def tables(backbone: Any, rules: Sequence[Sampling], **rest: Any) -> Tables:
            of = [DRAFTS[self.regimes[n // views]][n % views] for n in range(len(rules))]
            return Tables(rules, of, self.before, spoil=self.spoil_draft)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafters, "Session", tables)
            patch.setattr(drafters, "HeadSession", tables)
            patch.setattr(Setup, "head", lambda setup: setup.draft)
            patch.setattr(child, "Session", tables)
            patch.setattr(sampling, "uniform", lambda *key: self._random(*key))
            self.tables.patched(patch, lambda law, u: self._draw(law, u))
            yield

    def again(
        self,
        seed: int,
        random: Callable[..., Any],
        draw: Callable[[Any, Any], int],
        watch: Callable[[Mapping[int, Tree]], None] = lambda trees: None,
    ) -> list[list[int]]:
        """The answers once more, in a block that is ``staged``."""
        self._random, self._draw = random, draw
        recipe, count = self.recipe, len(self.regimes)
        max_tokens = self.length if self.knows_length else None
        rules = [Sampling(True, (), seed, max_tokens=max_tokens)] * count
        self.answers: list[list[int]] = [[] for _ in rules]
        with ExitStack() as stack:
            if recipe.drafter is WorkerDrafter:
                stack.enter_context(hired(Inside(self.turns)))
            drafting = drafter_of(recipe, MODEL, MODEL, rules, self.length)
            drafting.parallel_work.encode({"input_ids": torch.zeros(count, 1)})
            drafting.parallel_work.prefill([PROMPT] * count)
            drafting.read_prompts([READ] * count)
            own = {"learner": Remembering(self, drafting.learner)}
            drafting.__class__ = type("Remembered", (type(drafting),), own)
            target: Any = Tables(rules, [TARGET] * count, self.before, watch, self.spoil_target)
            if self.spoil_draft or self.spoil_target:
                drafting = safe = Fallback(drafting, IDS)
                target = MemoryGuard(target, lambda _, error: safe.give_up(NO_MEMORY_REASON, error))
            for _ in recipe.schedule(target, drafting, range(count), self._cut):
                pass
            self.failed = drafting.reason if isinstance(drafting, Fallback) else None
            drafting.close()
        return self.answers

    def _cut(self, request: int, tokens: Sequence[int]) -> tuple[int, Any]:
        answer = self.answers[request]
        room = self.length - len(answer)
        count = len(tokens) if self.whole else min(room, len(tokens))
        answer += tokens[:count]
        return count, "length" if len(tokens) >= room else None

    def after(self, count: int, regime: int, seed: int) -> Play:
        """What follows the round of that token in an answer, all noise so far known."""
        used: dict[Any, float] = {}

        def random(*key: Any) -> float:
            return used.setdefault(key[2:], quick_uniform(*key))

        first = replace(self, length=count, regimes=[regime], whole=True)
        (text,) = first(seed, random)
        return replace(
            self,
            regimes=[regime],
            state=first.learnt,
            before=[*self.before, *text],
            past=used,
        )


# -- judged exactly ----------------------------------------------------------------------------


class Fate:
    """One way that everything can happen: the first choices follow a script, the rest is the first
    that is possible. ``weight`` is its probability."""

    def __init__(self, script: Sequence[int], play: Play) -> None:
        self.script = script
        self.taken: list[int] = []
        self.ways: list[int] = []
        self.weight = 1.0
        self._tables, self._past = play.tables, play.past
        self._beyond = len(play.before) - 1 + play.length
        self._known: dict[tuple[Any, ...], Luck] = {}

    def choose(self, weights: Sequence[float]) -> int:
        """Which of these happens."""
        possible = [way for way, weight in enumerate(weights) if weight > 0]
        at = len(self.taken)
        way = self.script[at] if at < len(self.script) else 0
        self.taken.append(way)
        self.ways.append(len(possible))
        self.weight *= weights[possible[way]] / sum(weights)
        return possible[way]

    def noise(self, seed: int, request: int, *key: Any) -> Any:
        """Undecided noise, by the same keys the same again; of earlier tokens what it was, and
        beyond those asked for, something."""
        if key in self._past:
            return self._past[key]
        if key[1] >= self._beyond:
            return quick_uniform(seed, request, *key)
        by_role = noise.ROLES[key[0]], *key[1:]
        return self._known.setdefault(by_role, Luck(self))

    def draw(self, law: Any, u: Any) -> int:
        if not isinstance(u, Luck):
            return self._tables.draw(law, u)
        sums = self._tables.sums(law)
        assert sums[V - 1] == sums[-1], "ids beyond the chain's have no probability"
        return u.among([each / sums[-1] for each in sums[:V]])


@dataclass
class Luck:
    """A number in [0, 1) of which no more is known than was asked."""

    fate: Fate
    low: float = 0.0
    high: float = 1.0

    def among(self, ends: Sequence[float]) -> int:
        """Which of the intervals that end there it is in."""
        edges = [min(max(end, self.low), self.high) for end in (0.0, *ends)]
        way = self.fate.choose([b - a for a, b in pairwise(edges)])
        self.low, self.high = edges[way], edges[way + 1]
        return way

    def __lt__(self, chance: float) -> bool:
        return self.among([chance, 1.0]) == 0


def distance(play: Play, together: int = 1) -> float:
    """The total variation between the law of all that is left of one answer and the target's.

    So many of the ways that the answer can go are requests of one batch, which takes less time than
    a batch for each.
    """
    (regime,) = play.regimes
    waiting: list[list[int]] = [[]]
    law = torch.zeros((V,) * play.length, dtype=torch.double)
    with play.staged():
        while waiting:
            fates = [Fate(script, play) for script in waiting[-together:]]
            del waiting[-together:]
            play.regimes = [regime] * len(fates)
            answers = play.again(0, _noise_of(fates), fates[0].draw)
            for fate, answer in zip(fates, answers, strict=True):
                law[tuple(answer)] += fate.weight
                for at in range(len(fate.script), len(fate.taken)):
                    waiting += [[*fate.taken[:at], way] for way in range(1, fate.ways[at])]
    play.regimes = [regime]
    assert abs(float(law.sum()) - 1) < 1e-6
    return float((law - joint(play.before[-1], play.length)).abs().sum()) / 2


def _noise_of(fates: Sequence[Fate]) -> Callable[..., Any]:
    """Returns the noise of a batch, in which each request has a fate of its own."""
    return lambda seed, request, *key: fates[request].noise(seed, request, *key)


def joint(last: int, length: int) -> Tensor:
    """The target's law of so many tokens, an axis each."""
    law = LAWS.double()[last]
    for _ in range(length - 1):
        law = law[..., None] * LAWS.double()
    return law


# -- judged by samples -------------------------------------------------------------------------


def at_the_start(recipe: Recipe, count: int, seed: int = 0) -> float:
    """The p-value of the joint law of the first three tokens of ``count`` answers."""
    answers = _sampled(recipe, 3, count, seed)
    cells = (answers[:, 0] * V + answers[:, 1]) * V + answers[:, 2]
    return chi_square(torch.bincount(cells, minlength=V**3), joint(START, 3).flatten())


def later(recipe: Recipe, count: int, seed: int = 0) -> float:
    """The p-value of the third token after each pair, from token twelve on, over ``count`` triples.

    In a Markov chain the counts after each pair are a multinomial's, so the sum over pairs of their
    chi-squares is one with V^2 (V - 1) degrees of freedom (Billingsley 1961, Thm 2.1).
    """
    answers = _sampled(recipe, LONG, -(-3 * count // (LONG - LATE)), seed)
    pairs = answers[:, LATE - 2 : -2] * V + answers[:, LATE - 1 : -1]
    cells = (pairs * V + answers[:, LATE:]).flatten()
    counts = torch.bincount(cells, minlength=V**3).view(V, V, V).double()
    expected = counts.sum(-1, keepdim=True) * LAWS.double()[None]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(V * V * (V - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def _sampled(recipe: Recipe, length: int, count: int, seed: int) -> Tensor:
    """That many answers, a hundred at a time, the regimes in turn."""
    batch = Play(recipe, length, [request % len(DRAFTS) for request in range(100)])
    batches = [batch(10_000 * seed + part) for part in range(-(-count // 100))]
    return torch.tensor([answer for part in batches for answer in part][:count])
