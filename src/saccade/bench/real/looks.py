"""Where a target on real weights looks in a document while it answers about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float

from saccade.bench.suites.texts import Document
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.core.sampling import Sampling
from saccade.core.tree import chain
from saccade.drafting.views import saliency
from saccade.inputs import Loaded, ask
from saccade.model.backbone import Backbone
from saccade.model.kept import Kept as Prompts
from saccade.model.session import Session

STEP = 8  # tokens of the answer between two looks
SHARES = (0.05, 0.1, 0.25, 0.5)
SINKS = 4
DRAWS = 5  # at random
TOGETHER = 4  # sets that share a forward, each in a cache of its own

Kept = Bool[torch.Tensor, "layer kv_head seen"]
Mass = Float[torch.Tensor, "layer kv_head seen"]
Choose = Callable[[Mass, Mass, Mass, int], Kept]
"""(mass at prefill, at the look before, now; how many) -> which."""
Choices = Callable[[Prefill], Mapping[str, Sequence[Choose]]]
Asking = Callable[[Loaded, Document], Inputs]
"""What a model reads of a document and of what is asked about it."""


@dataclass(frozen=True)
class Look:
    """Some tokens of an answer, what the target says after each, and the mass before and now."""

    tokens: list[int]
    next: list[int]
    before: Mass
    now: Mass


@dataclass(frozen=True)
class Looked:
    """Of the mass that a document gets while it is answered about, the share on a set of it."""

    document: str
    digest: str
    keep: float
    chosen: str
    mass: float
    agrees: float | None  # how often the target goes on alike, seeing the set


def question(model: Loaded, document: Document) -> Any:
    """The document's first tokens, if it has any, and its task, as the model's processor has it."""
    ids = model.tokenizer(document.text)["input_ids"][: document.tokens]
    text = model.tokenizer.decode(ids)
    return ask(model, document.task, documents=[text] if text else [])


def looks(
    model: Loaded,
    document: Document,
    said: Sequence[int],
    kept: Prompts,
    ask: Asking = question,
    shares: Sequence[float] = SHARES,
    chosen: Choices = lambda first: CHOICES,
) -> list[Looked]:
    """How much of the mass of the moment each way of choosing holds, and how often the target goes
    on with the same token where it sees that alone: averaged over an answer that is read again
    ``STEP`` tokens at a time."""
    target = model.backbone.keeping(kept)
    (prompt,) = target.prompts(ask(model, document))
    session = Session(target, [Sampling()], room=len(said))
    *_, first = session.reading(0, prompt, record=True, follow=STEP)
    assert isinstance(first, Prefill)
    assert first.mass is not None and first.with_latest_attention is not None
    found, before = list[Look](), first.mass
    for start in range(0, len(said) - STEP, STEP):
        tokens = list(said[start : start + STEP])
        own = session.score({0: chain(tokens)})[0]
        session.commit({0: tokens})
        now = first.with_latest_attention().mass
        assert now is not None
        found.append(Look(tokens, [int(row.argmax()) for row in own.rows[1:]], before, now))
        before = now
    if not found:
        return []
    told, choices = [], chosen(first)
    every = [(name, choose) for name, own in choices.items() for choose in own]
    for keep in shares:
        same: dict[str, list[float]] = defaultdict(list)
        for place in range(0, len(every), TOGETHER):
            some = every[place : place + TOGETHER]
            for name, agrees in _agreeing(target, first, some, keep, found):
                same[name] += agrees
        for name, ways in choices.items():
            mass = fmean(_share(way, first.mass, look, keep) for look in found for way in ways)
            told.append(Looked(document.name, document.digest, keep, name, mass, fmean(same[name])))
        bare = [replace(look, now=look.now[..., SINKS:]) for look in found]
        (way,) = choices[TAIL]
        mass = fmean(_share(way, first.mass, look, keep) for look in bare)
        told.append(Looked(document.name, document.digest, keep, BARE, mass, None))
    return told


def _agreeing(
    target: Backbone,
    first: Prefill,
    ways: Sequence[tuple[str, Choose]],
    keep: float,
    found: Sequence[Look],
) -> Iterator[tuple[str, list[float]]]:
    """Look by look whether the target goes on alike over these sets, by what they are called."""
    assert first.mass is not None
    prompt, whole = first.prompt, first.mass
    draft = Session(target, [Sampling()] * len(ways), room=STEP * (len(found) + 1))

    def seen(choose: Choose, before: Mass, now: Mass) -> Prompt:
        return _seeing(prompt, choose(whole, before, now, count_of(keep, now)))

    chosen = [seen(choose, whole, whole) for _, choose in ways]
    assert first.cache is not None
    answered = first.cache.length - len(prompt)
    first.cache.truncate(len(prompt))  # they begin at its end
    draft.fork([first] * len(ways), chosen, renewed=True)
    first.cache.advance(answered)
    for look in found:
        for number, (_, choose) in enumerate(ways):
            draft.reselect(number, seen(choose, look.before, look.now))
        scored = draft.score(dict.fromkeys(range(len(ways)), chain(look.tokens)))
        for (name, _), scores in zip(ways, scored.values(), strict=True):
            goes = [int(row.argmax()) for row in scores.rows[1:]]
            yield name, [float(a == b) for a, b in zip(look.next, goes, strict=True)]
        draft.commit(dict.fromkeys(range(len(ways)), look.tokens))


def _share(choose: Choose, first: Mass, look: Look, keep: float) -> float:
    held = choose(first, look.before, look.now, count_of(keep, look.now))
    return float(((look.now * held).sum(-1) / look.now.sum(-1)).mean())


def count_of(keep: float, mass: Mass) -> int:
    return max(1, round(keep * mass.shape[-1]))


def _seeing(prompt: Prompt, held: Kept) -> Prompt:
    """The prompt with all its text, each head seeing these rows of the document."""
    visual = prompt.index[prompt.visual][held.nonzero()[:, 2].view(*held.shape[:2], -1)]
    text = prompt.index[~prompt.visual].expand(*held.shape[:2], -1)
    return replace(prompt, heads=torch.cat([text, visual], -1).sort(-1).values)


def _top(mass: Mass, count: int) -> Kept:
    chosen = mass.topk(count, -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, chosen, True)


def _shared(mass: Mass, count: int) -> Kept:
    return _top(mass.mean((0, 1)).expand_as(mass).contiguous(), count)


def these(mass: Mass, rows: torch.Tensor) -> Kept:
    kept = torch.zeros_like(mass, dtype=torch.bool)
    kept[..., rows] = True
    return kept


def _streaming(mass: Mass, count: int) -> Kept:
    row = torch.arange(mass.shape[-1])
    return these(mass, row[(row < SINKS) | (row >= len(row) - max(0, count - SINKS))])


def _uniform(mass: Mass, count: int) -> Kept:
    return these(mass, saliency.sample_evenly(torch.arange(mass.shape[-1]), count))


def _random(draw: int) -> Choose:
    def choose(first: Mass, before: Mass, now: Mass, count: int) -> Kept:
        generator = torch.Generator().manual_seed(DRAWS * count + draw)
        return these(now, torch.randperm(now.shape[-1], generator=generator)[:count])

    return choose


TAIL = "oracle, shared by all heads"
BARE = f"{TAIL}, the document's first {SINKS} left out"
CHOICES: Mapping[str, Sequence[Choose]] = {
    "oracle: each head's top now": [lambda first, before, now, count: _top(now, count)],
    "fresh: each head's top a look ago": [lambda first, before, now, count: _top(before, count)],
    "std: each head's top at prefill": [lambda first, before, now, count: _top(first, count)],
    TAIL: [lambda first, before, now, count: _shared(now, count)],
    "shared by all heads, at prefill": [lambda first, before, now, count: _shared(first, count)],
    "shared by all heads, a look ago": [lambda first, before, now, count: _shared(before, count)],
    "streaming: sinks and the last": [lambda first, before, now, count: _streaming(now, count)],
    "uniform": [lambda first, before, now, count: _uniform(now, count)],
    "random": [_random(draw) for draw in range(DRAWS)],
}
