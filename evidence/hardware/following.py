"""What it costs a self-draft to follow the answer: taking queries, looking, choosing, moving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from saccade.bench.real.looks import question
from saccade.bench.suites.texts import Document
from saccade.core.prompt import Prefill
from saccade.core.protocols import Refresh
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock
from saccade.core.tree import chain
from saccade.inputs import Loaded
from saccade.methods.std import GAMMA, PerHead
from saccade.model.kept import Kept
from saccade.model.session import Session

KEPT_BYTES = 2**32
ACCEPTED = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Following:
    """Median seconds of the parts of a round, by what they are."""

    prompt_tokens: int
    rounds: int
    seconds: dict[str, float]

    @property
    def round(self) -> float:
        """A chain of nine and its verification, with nothing followed."""
        return GAMMA * self.seconds["a draft's step"] + self.seconds["verifying"]


def follow(model: Loaded, document: Document, *, keep: float, rounds: int) -> Following:
    """Rounds of which three drafted tokens stand, over the document's own words; verifications
    with and without a view that follows take turns."""
    target = model.backbone.keeping(Kept(KEPT_BYTES))
    (prompt,) = target.prompts(question(model, document))
    refresh = Refresh()
    view, clock = PerHead(keep=keep, refresh=refresh), Clock(target.device)
    room = rounds * (ACCEPTED + 1)

    def begun(follow: int) -> tuple[Session, Prefill]:
        session = Session(target, [Sampling()], room=room)
        *_, first = session.reading(0, prompt, record=True, follow=follow)
        assert isinstance(first, Prefill)
        return session, first

    (followed, first), (plain, _) = begun(refresh.rows), begun(0)
    assert first.again is not None
    draft, pruned = Session(target, [Sampling()], room=room), view(first, prompt)
    draft.fork([first], [pruned], renewed=True)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, act: Callable[[], T]) -> T:
        clock.lap()
        found = act()
        spent[name].append(clock.lap())
        return found

    words: Sequence[int] = prompt.context.tolist()
    for number in range(rounds):
        at = number * (ACCEPTED + 1)
        tree, stands = chain(words[at : at + GAMMA]), list(words[at : at + ACCEPTED + 1])
        stands[-1] += 1  # refused there
        timed("a draft's step", lambda: draft.score({0: chain(words[:0])}))
        pair = [("verifying", plain), ("verifying, followed", followed)]
        for name, session in pair[:: 1 if number % 2 else -1]:
            timed(name, lambda session=session, tree=tree: session.score({0: tree}))
            session.commit({0: stands})
        draft.commit({0: stands})
        newer = timed("looking again", first.again)
        assert newer.mass is not None
        newer = replace(newer, mass=newer.mass * (1 + refresh.hold * pruned.held(prompt)))
        pruned = timed("choosing", lambda newer=newer: view(newer, prompt))
        timed("moving", lambda pruned=pruned: draft.reselect(0, pruned))
    seconds = {name: median(values) for name, values in spent.items()}
    return Following(len(prompt), rounds, seconds)
