"""Where a target on real weights looks in a document while it answers about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float

from saccade.bench.suites.texts import Document
from saccade.core.prompt import Prefill, Prompt
from saccade.core.sampling import Sampling
from saccade.core.tree import chain
from saccade.inputs import Loaded, ask
from saccade.model.kept import Kept as Prompts
from saccade.model.session import Session

STEP = 8  # tokens of the answer between two looks
SHARES = (0.05, 0.1, 0.25, 0.5)
AGREE = (0.1, 0.25)
SINKS = 4

Kept = Bool[torch.Tensor, "layer kv_head seen"]
Mass = Float[torch.Tensor, "layer kv_head seen"]


@dataclass(frozen=True)
class Looked:
    """Of the mass that a document gets while it is answered about, the share on a set of it."""

    document: str
    digest: str
    keep: float
    chosen: str
    mass: float
    agrees: float | None  # how often the target goes on alike, seeing the set; where it was asked


def question(model: Loaded, document: Document) -> Any:
    """The document's first tokens and its task, as the model's processor has it."""
    ids = model.tokenizer(document.text)["input_ids"][: document.tokens]
    text = model.tokenizer.decode(ids)
    return ask(model, document.task, documents=[text])


def looks(model: Loaded, document: Document, said: Sequence[int], kept: Prompts) -> list[Looked]:
    """How much of the mass of the moment each way of choosing holds, and how often the target goes
    on with the same token where it sees that alone: averaged over an answer that is read again
    ``STEP`` tokens at a time."""
    target = model.backbone.keeping(kept)
    (prompt,) = target.prompts(question(model, document))
    session = Session(target, [Sampling()], room=len(said))
    *_, first = session.reading(0, prompt, record=True, follow=STEP)
    assert isinstance(first, Prefill)
    assert first.mass is not None and first.again is not None

    def sets(keep: float, before: Mass, now: Mass) -> list[Kept]:
        count = max(1, round(keep * now.shape[-1]))
        assert first.mass is not None
        return [choose(first.mass, before, now, count) for choose in CHOICES.values()]

    drafts = {keep: Session(target, [Sampling()] * len(CHOICES), room=len(said)) for keep in AGREE}
    for keep, draft in drafts.items():
        seen = [_seeing(prompt, held) for held in sets(keep, first.mass, first.mass)]
        draft.fork([first] * len(seen), seen, renewed=True)
    before = first.mass
    masses: dict[tuple[float, str], list[float]] = defaultdict(list)
    same: dict[tuple[float, str], list[float]] = defaultdict(list)
    for start in range(0, len(said) - STEP, STEP):
        tokens = list(said[start : start + STEP])
        own = session.score({0: chain(tokens)})[0]
        session.commit({0: tokens})
        now = first.again().mass
        assert now is not None
        for keep in SHARES:
            for name, held in zip(CHOICES, sets(keep, before, now), strict=True):
                share = (now * held).sum(-1) / now.sum(-1)
                masses[keep, name].append(float(share.mean()))
        for keep, draft in drafts.items():
            for number, held in enumerate(sets(keep, before, now)):
                draft.reselect(number, _seeing(prompt, held))
            scored = draft.score(dict.fromkeys(range(len(CHOICES)), chain(tokens)))
            for name, scores in zip(CHOICES, scored.values(), strict=True):
                same[keep, name] += [
                    float(a.argmax() == b.argmax())
                    for a, b in zip(own.rows[1:], scores.rows[1:], strict=True)
                ]
            draft.commit(dict.fromkeys(range(len(CHOICES)), tokens))
        before = now
    return [
        Looked(document.name, document.digest, keep, name, fmean(found), _fmean(same[keep, name]))
        for (keep, name), found in masses.items()
    ]


def _seeing(prompt: Prompt, held: Kept) -> Prompt:
    """The prompt with all its text, each head seeing these rows of the document."""
    visual = prompt.index[prompt.visual][held.nonzero()[:, 2].view(*held.shape[:2], -1)]
    text = prompt.index[~prompt.visual].expand(*held.shape[:2], -1)
    return replace(prompt, heads=torch.cat([text, visual], -1).sort(-1).values)


def _fmean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _top(mass: Mass, count: int) -> Kept:
    chosen = mass.topk(count, -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, chosen, True)


def _shared(mass: Mass, count: int) -> Kept:
    return _top(mass.mean((0, 1)).expand_as(mass).contiguous(), count)


def _some(mass: Mass, rows: torch.Tensor) -> Kept:
    kept = torch.zeros_like(mass, dtype=torch.bool)
    kept[..., rows] = True
    return kept


def _streaming(mass: Mass, count: int) -> Kept:
    row = torch.arange(mass.shape[-1])
    return _some(mass, row[(row < SINKS) | (row >= len(row) - max(0, count - SINKS))])


def _random(mass: Mass, count: int) -> Kept:
    generator = torch.Generator().manual_seed(count)
    return _some(mass, torch.randperm(mass.shape[-1], generator=generator)[:count])


# (mass at prefill, at the look before, now; how many) -> which
CHOICES: dict[str, Callable[[Mass, Mass, Mass, int], Kept]] = {
    "oracle: each head's top now": lambda first, before, now, count: _top(now, count),
    "fresh: each head's top a look ago": lambda first, before, now, count: _top(before, count),
    "std: each head's top at prefill": lambda first, before, now, count: _top(first, count),
    "oracle, shared by all heads": lambda first, before, now, count: _shared(now, count),
    "shared by all heads, at prefill": lambda first, before, now, count: _shared(first, count),
    "shared by all heads, a look ago": lambda first, before, now, count: _shared(before, count),
    "streaming: sinks and the last": lambda first, before, now, count: _streaming(now, count),
    "random": lambda first, before, now, count: _random(now, count),
}
