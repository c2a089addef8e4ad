"""What it costs a self-draft to follow the answer: taking queries, looking, choosing, moving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, TypeVar

from saccade.bench.real.attention_sets import document_inputs
from saccade.bench.suites.long_documents import Document
from saccade.core.prompt import Prefill
from saccade.core.protocols import Refresh
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock
from saccade.core.tree import chain
from saccade.inputs import Loaded
from saccade.methods.std import GAMMA, PerHead
from saccade.model.prefix_cache import PrefixCache
from saccade.model.session import Session

KEPT_BYTES = 2**32
ACCEPTED = 3
KEEPING, LOOKING = "verifying, with the queries kept", "looking again, by all keys"
CHOOSING, MOVING = "choosing", "moving what changed"
STEP, VERIFYING = "a draft's step", "verifying"
PARTS = STEP, VERIFYING, KEEPING, LOOKING, CHOOSING, MOVING
MARKS = "<!-- following -->", "<!-- end of following -->"

T = TypeVar("T")


@dataclass(frozen=True)
class Following:
    """Median seconds of the parts of a round, by what they are."""

    prompt_tokens: int
    keep: float
    rounds: int
    seconds: dict[str, float]

    @property
    def round(self) -> float:
        """A chain of nine and its verification, with nothing followed."""
        return GAMMA * self.seconds[STEP] + self.seconds[VERIFYING]

    @property
    def taking(self) -> float:
        """What keeping the queries adds to a verification."""
        return self.seconds[KEEPING] - self.seconds[VERIFYING]

    @property
    def renewing(self) -> float:
        """What choosing anew takes, whenever it is done."""
        return sum(self.seconds[name] for name in (LOOKING, CHOOSING, MOVING))


def told(facts: Mapping[str, Any]) -> str:
    """What docs/results/fresh.md says of a run, as :func:`follow` and the command stored it."""
    own = {each.name: facts[each.name] for each in fields(Following)}
    found = Following(**own)
    lines = [
        f"Made by `{facts['command']}`: {facts['model']}, {found.prompt_tokens:,} tokens of "
        f"prompt, {found.keep:.0%} of the document drafted on, {found.rounds} rounds, "
        f"{facts['machine']}",
        "",
        f"| | ms | of a round of {GAMMA} steps and a verification |",
        "|-|-:|-:|",
    ]
    for name, seconds in found.seconds.items():
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {seconds / found.round:.1%} |")
    lines += [
        "",
        f"Keeping the queries costs {found.taking / found.round:.1%} of a round (the goal was "
        f"3 %). Choosing anew is another {found.renewing / found.round:.1%}, of every round or, "
        "with `refresh=2`, of every second.",
    ]
    return "\n".join(lines)


def follow(model: Loaded, document: Document, *, keep: float, rounds: int) -> Following:
    """Rounds of which three drafted tokens stand, over the document's own words; verifications
    with and without a view that follows take turns."""
    target = model.backbone.with_prefix_cache(PrefixCache(KEPT_BYTES))
    (prompt,) = target.prompts(document_inputs(model, document))
    refresh = Refresh()
    view, clock = PerHead(keep=keep, refresh=refresh), Clock(target.device)
    room = rounds * (ACCEPTED + 1)

    def begun(follow: int) -> tuple[Session, Prefill]:
        session = Session(target, [Sampling()], room=room)
        *_, first = session.prefill_in_chunks(0, prompt, record=True, follow_rows=follow)
        assert isinstance(first, Prefill)
        return session, first

    (followed, first), (plain, _) = begun(refresh.rows), begun(0)
    assert first.with_latest_attention is not None
    draft, pruned = Session(target, [Sampling()], room=room), view(first, prompt)
    draft.fork([first], [pruned], can_reselect=True)
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
        timed(STEP, lambda: draft.score({0: chain(words[:0])}))
        pair = [(VERIFYING, plain), (KEEPING, followed)]
        for name, session in pair[:: 1 if number % 2 else -1]:
            timed(name, lambda session=session, tree=tree: session.score({0: tree}))
            session.commit({0: stands})
        draft.commit({0: stands})
        newer = timed(LOOKING, first.with_latest_attention)
        assert newer.mass is not None
        newer = replace(newer, mass=newer.mass * (1 + refresh.hold * pruned.chosen_mask(prompt)))
        pruned = timed(CHOOSING, lambda newer=newer: view(newer, prompt))
        timed(MOVING, lambda pruned=pruned: draft.reselect(0, pruned))
    seconds = {name: median(spent[name]) for name in PARTS}
    return Following(len(prompt), keep, rounds, seconds)
