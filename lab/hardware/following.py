"""Measures what it costs a self-draft to choose its keys again while the answer grows.

A self-draft is the target that drafts over a part of its own keys. The method ``fresh`` chooses
this part again every round, by the attention of the tokens that were verified last. The costs are
those of keeping these tokens' queries in a verification, of attending to all keys with them, of
choosing keys by that attention, and of moving the keys that changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, TypeVar

from lab.real.attention_sets import document_inputs
from lab.real.long_documents import Document
from saccade.core.prompt import Prefill
from saccade.core.protocols import Refresh
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock
from saccade.core.tree import chain
from saccade.inputs import Loaded
from saccade.methods.std import GAMMA, PerHead
from saccade.model.prefix_cache import PrefixCache
from saccade.model.session import Session

PREFIX_CACHE_BYTES = 2**32
ACCEPTED_TOKENS = 3  # Drafted tokens that are accepted in every timed round.
KEEPING, LOOKING = "verifying, with the queries kept", "looking again, by all keys"
CHOOSING, MOVING = "choosing", "moving what changed"
STEP, VERIFYING = "a draft's step", "verifying"
PARTS = STEP, VERIFYING, KEEPING, LOOKING, CHOOSING, MOVING
MARKS = "<!-- following -->", "<!-- end of following -->"  # Around the section in fresh.md.

T = TypeVar("T")


@dataclass(frozen=True)
class Following:
    """The stored result of ``measure_following``."""

    prompt_tokens: int
    keep: float  # The share of the document that the draft reads.
    rounds: int  # How many rounds were timed.
    seconds: dict[str, float]  # The median of each part of a round, by its name in ``PARTS``.

    @property
    def round(self) -> float:
        """Seconds to draft a chain and to verify it when no keys are chosen again."""
        return GAMMA * self.seconds[STEP] + self.seconds[VERIFYING]

    @property
    def query_seconds(self) -> float:
        """Seconds that keeping the queries adds to a verification."""
        return self.seconds[KEEPING] - self.seconds[VERIFYING]

    @property
    def renewal_seconds(self) -> float:
        """Seconds to choose the keys again once."""
        return sum(self.seconds[name] for name in (LOOKING, CHOOSING, MOVING))


def page_section(facts: Mapping[str, Any]) -> str:
    """Returns the section of docs/results/fresh.md about a run of ``python -m lab following``.

    ``facts`` has the fields of ``Following``, and "command", "model" and "machine" in words.
    """
    stored = {each.name: facts[each.name] for each in fields(Following)}
    following = Following(**stored)
    queries = following.query_seconds / following.round
    renewal = following.renewal_seconds / following.round
    lines = [
        f"Made by `{facts['command']}`: {facts['model']}, {following.prompt_tokens:,} tokens of "
        f"prompt, {following.keep:.0%} of the document drafted on, {following.rounds} rounds, "
        f"{facts['machine']}",
        "",
        f"| | ms | of a round of {GAMMA} steps and a verification |",
        "|-|-:|-:|",
    ]
    for name, seconds in following.seconds.items():
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {seconds / following.round:.1%} |")
    lines += [
        "",
        f"Keeping the queries costs {queries:.1%} of a round (the goal was 3 %). Choosing anew is "
        f"another {renewal:.1%}, of every round or, with `refresh=2`, of every second.",
    ]
    return "\n".join(lines)


def measure_following(model: Loaded, document: Document, *, keep: float, rounds: int) -> Following:
    """Times rounds whose drafts are a document's own words, ``ACCEPTED_TOKENS`` accepted in each.

    Two sessions of the target verify the same chains, and which of them is first alternates. One
    keeps the queries of its last rows, so that keys can be chosen again, and the other does not. A
    third session is the self-draft, of whose chain only one step is timed.
    """
    target = model.backbone.with_prefix_cache(PrefixCache(PREFIX_CACHE_BYTES))
    (prompt,) = target.prompts(document_inputs(model, document))
    refresh = Refresh()
    view = PerHead(keep=keep, refresh=refresh)
    clock = Clock(target.device)
    room = rounds * (ACCEPTED_TOKENS + 1)

    def start_session(follow: int) -> tuple[Session, Prefill]:
        """Prefills a session that keeps the queries of its last ``follow`` rows; 0 keeps none."""
        session = Session(target, [Sampling()], room=room)
        *_, first = session.prefill_in_chunks(0, prompt, record=True, follow_rows=follow)
        assert isinstance(first, Prefill)
        return session, first

    (followed, first) = start_session(refresh.rows)
    (plain, _) = start_session(0)
    assert first.with_latest_attention is not None
    draft = Session(target, [Sampling()], room=room)
    pruned = view(first, prompt)
    draft.fork([first], [pruned], can_reselect=True)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed_call(name: str, act: Callable[[], T]) -> T:
        clock.lap()
        result = act()
        spent[name].append(clock.lap())
        return result

    words: Sequence[int] = prompt.full_ids.tolist()
    for number in range(rounds):
        at = number * (ACCEPTED_TOKENS + 1)
        tree = chain(words[at : at + GAMMA])
        emitted = list(words[at : at + ACCEPTED_TOKENS + 1])
        emitted[-1] += 1  # The target's own token differs from the drafted one at this place.
        # A tree without nodes makes the draft score one row, as in each step of a chain.
        timed_call(STEP, lambda: draft.score({0: chain([])}))
        both = [(VERIFYING, plain), (KEEPING, followed)]
        order = both if number % 2 else both[::-1]
        for name, session in order:
            timed_call(name, lambda session=session, tree=tree: session.score({0: tree}))
            session.commit({0: emitted})
        draft.commit({0: emitted})
        # The keys are chosen again as ``fresh`` does it: by the attention of the rows just
        # verified, which counts more on keys that the draft reads already.
        newer = timed_call(LOOKING, first.with_latest_attention)
        assert newer.mass is not None
        newer = replace(newer, mass=newer.mass * (1 + refresh.hold * pruned.chosen_mask(prompt)))
        pruned = timed_call(CHOOSING, lambda newer=newer: view(newer, prompt))
        timed_call(MOVING, lambda pruned=pruned: draft.reselect(0, pruned))
    seconds = {name: median(spent[name]) for name in PARTS}
    return Following(len(prompt), keep, rounds, seconds)
