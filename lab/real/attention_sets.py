"""Measures where a target on real weights attends in a document while it answers about it.

A set is some of the document's tokens, the same share for each head, chosen in one of the ways of
``CHOICES``: by the attention of the prompt's text or of recent answer tokens, evenly, at random, or
otherwise. For each set two things are measured: how much of the target's attention to the document
falls on it, and how often the target's next token stays the same if it sees that set alone. Views
choose such sets for a draft, so this says how good a draft could be.

The mass of a document's token is the attention that it gets: softmax weights, averaged over the
rows that attend and over the query heads of a KV head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float

from lab.real.long_documents import Document
from saccade.core.prompt import Inputs, Prefill, Prompt, Reading
from saccade.core.sampling import Sampling
from saccade.core.tree import chain
from saccade.drafting.views import saliency
from saccade.inputs import Loaded, ask
from saccade.model.backbone import Backbone
from saccade.model.prefix_cache import PrefixCache
from saccade.model.session import Session

STEP_TOKENS = 8  # Tokens of the answer between two measurements.
SHARES = (0.05, 0.1, 0.25, 0.5)  # Of the document's tokens that a set has.
SINKS = 4  # The first tokens of a document, which models attend to whatever they say.
RANDOM_DRAWS = 5  # Random sets, whose results are averaged.
# At most so many sets are tried in one batch, because each has a cache of its own.
SETS_PER_FORWARD = 4

# The axis "seen" has the document's tokens. A mask is true where a head sees the token.
KeptMask = Bool[torch.Tensor, "layer kv_head seen"]
Mass = Float[torch.Tensor, "layer kv_head seen"]
ChooseRows = Callable[[Mass, Mass, Mass, int], KeptMask]
"""Chooses a set at a step of the answer.

It takes the mass at prefill, at the step before and at this step, and how many of the document's
tokens each head should see. It returns the mask of the set.
"""
ChoicesOf = Callable[[Prefill], Mapping[str, Sequence[ChooseRows]]]
"""From the target's prefill to the ways of choosing, by name.

Where a name has several functions, their results are averaged. There must be one of the name
``SHARED_ORACLE``, with a single function.
"""
MakeInputs = Callable[[Loaded, Document], Inputs]
"""Returns a model's inputs for a document and the task about it."""


@dataclass(frozen=True)
class AnswerStep:
    """``STEP_TOKENS`` tokens of an answer, and where the target attends while it reads them."""

    tokens: list[int]
    next: list[int]  # The target's arg-max after each of the tokens.
    before: Mass  # The mass at the step before this one, or at the prefill for the first step.
    now: Mass  # The mass by the attention of this step's tokens.


@dataclass(frozen=True)
class AttentionShare:
    """What was measured for one way of choosing a set, over one answer about a document.

    The field names are those of the stored rows.
    """

    document: str  # The document's name.
    digest: str  # Of the document's text and task.
    keep: float  # The share of the document's tokens that the set has.
    chosen: str  # How the set was chosen: a name of ``CHOICES``.
    mass: float  # The share of the attention to the document that falls on the set.
    # How often the target's next token is the same when it sees the set alone, if measured.
    agrees: float | None


def document_inputs(model: Loaded, document: Document) -> Any:
    """Returns the processor's output for the document's first tokens, if any, and its task."""
    ids = model.tokenizer(document.text)["input_ids"][: document.tokens]
    text = model.tokenizer.decode(ids)
    return ask(model, document.task, documents=[text] if text else [])


def measure_attention_sets(
    model: Loaded,
    document: Document,
    answer_ids: Sequence[int],
    prompt_cache: PrefixCache,
    ask: MakeInputs = document_inputs,
    shares: Sequence[float] = SHARES,
    chosen: ChoicesOf = lambda first: CHOICES,
) -> list[AttentionShare]:
    """Measures the sets of ``CHOICES`` (or ``chosen``) along an answer.

    Returns a row for each name of a set and each of ``shares``, and one more for each share: that
    of ``SHARED_ORACLE_WITHOUT_SINKS``. The target reads the answer again, ``STEP_TOKENS`` tokens at
    a time, and both measurements are means over these steps. The last tokens of the answer, one to
    ``STEP_TOKENS`` of them, are not read. So an answer that is no longer than one step has no rows.

    ``ask`` makes the model's inputs, and ``prompt_cache`` has the prompts that were prefilled.
    """
    # First the whole document is read, and then each step with the attention of its tokens.
    target = model.backbone.with_prefix_cache(prompt_cache)
    (prompt,) = target.prompts(ask(model, document))
    session = Session(target, [Sampling()], room=len(answer_ids))
    *_, first = session.prefill_in_chunks(0, prompt, record=True, follow_rows=STEP_TOKENS)
    assert isinstance(first, Prefill)
    assert first.mass is not None and first.with_latest_attention is not None
    steps = list[AnswerStep]()
    before = first.mass
    for start in range(0, len(answer_ids) - STEP_TOKENS, STEP_TOKENS):
        tokens = list(answer_ids[start : start + STEP_TOKENS])
        scores = session.score({0: chain(tokens)})[0]
        session.commit({0: tokens})
        now = first.with_latest_attention().mass
        assert now is not None
        steps.append(
            AnswerStep(tokens, [int(row.argmax()) for row in scores.rows[1:]], before, now)
        )
        before = now
    if not steps:
        return []
    # Then every way of choosing is tried, with each share.
    results = []
    choices = chosen(first)
    sets = [(name, choose) for name, choosers in choices.items() for choose in choosers]
    for keep in shares:
        agreement: dict[str, list[float]] = defaultdict(list)
        for i in range(0, len(sets), SETS_PER_FORWARD):
            group = sets[i : i + SETS_PER_FORWARD]
            for name, agreed in _agreement(target, first, group, keep, steps):
                agreement[name] += agreed
        for name, choosers in choices.items():
            mass = fmean(
                _share(chooser, first.mass, step, keep) for step in steps for chooser in choosers
            )
            results.append(
                AttentionShare(
                    document.name, document.digest, keep, name, mass, fmean(agreement[name])
                )
            )
        # Sinks get much attention whatever they say, so one set is measured without them.
        without_sinks = [replace(step, now=step.now[..., SINKS:]) for step in steps]
        (chooser,) = choices[SHARED_ORACLE]
        mass = fmean(_share(chooser, first.mass, step, keep) for step in without_sinks)
        results.append(
            AttentionShare(
                document.name, document.digest, keep, SHARED_ORACLE_WITHOUT_SINKS, mass, agrees=None
            )
        )
    return results


def _agreement(
    target: Backbone,
    first: Prefill,
    ways: Sequence[tuple[str, ChooseRows]],
    keep: float,
    steps: Sequence[AnswerStep],
) -> Iterator[tuple[str, list[float]]]:
    """Yields for each step and set its name, and whether the target's next tokens stay the same.

    The latter is a list with a 1.0 or 0.0 for each token of the step: whether the arg-max after it
    is that of the target which saw everything.

    ``first`` is the prefill with the keys of prompt and answer. Each of ``ways``, (name of a set,
    function that chooses it), gets a fork: a request that begins with copies of the prompt's keys.
    A fork sees all text, but of the document only the chosen rows. At each step its rows are chosen
    anew, and it reads the step's tokens to predict those that follow. Then it gets the step's keys
    as the target made them that saw everything.
    """
    assert first.mass is not None
    prompt, first_mass = first.prompt, first.mass
    forks = Session(target, [Sampling()] * len(ways), room=STEP_TOKENS * (len(steps) + 1))

    def visible_prompt(choose: ChooseRows, before: Mass, now: Mass) -> Prompt:
        return _select_visible(prompt, choose(first_mass, before, now, kept_count(keep, now)))

    chosen = [visible_prompt(choose, first_mass, first_mass) for _, choose in ways]
    assert first.cache is not None
    # The forks begin at the prompt's end, so the answer's keys are hidden while forks are made.
    answered = first.cache.length - len(prompt)
    first.cache.truncate(len(prompt))
    forks.fork([first] * len(ways), chosen, can_reselect=True)
    first.cache.advance(answered)
    for step in steps:
        for number, (_, choose) in enumerate(ways):
            forks.reselect(number, visible_prompt(choose, step.before, step.now))
        scored = forks.score(dict.fromkeys(range(len(ways)), chain(step.tokens)))
        for (name, _), scores in zip(ways, scored.values(), strict=True):
            continued = [int(row.argmax()) for row in scores.rows[1:]]
            yield name, [float(a == b) for a, b in zip(step.next, continued, strict=True)]
        forks.commit(dict.fromkeys(range(len(ways)), step.tokens))


def _share(choose: ChooseRows, first: Mass, step: AnswerStep, keep: float) -> float:
    """Returns the share of a step's mass that falls on a set, on average over layers and heads."""
    mask = choose(first, step.before, step.now, kept_count(keep, step.now))
    return float(((step.now * mask).sum(-1) / step.now.sum(-1)).mean())


def kept_count(keep: float, mass: Mass) -> int:
    """Returns how many of a document's tokens are the share ``keep`` of them, at least one."""
    return max(1, round(keep * mass.shape[-1]))


def _select_visible(prompt: Prompt, mask: KeptMask) -> Prompt:
    """Returns the prompt with all its text, where each head sees these rows of the document."""
    # For each layer and head, the places in the prompt of the chosen rows and of the text. Every
    # head has the same number of chosen rows.
    visual = prompt.places[prompt.visual][mask.nonzero()[:, 2].view(*mask.shape[:2], -1)]
    text = prompt.places[~prompt.visual].expand(*mask.shape[:2], -1)
    return replace(prompt, reading=Reading(heads=torch.cat([text, visual], -1).sort(-1).values))


def _top_rows(mass: Mass, count: int) -> KeptMask:
    """Chooses for each head the rows with most mass."""
    chosen = mass.topk(count, -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, chosen, True)


def _shared_top_rows(mass: Mass, count: int) -> KeptMask:
    """Chooses for all heads the rows with most mass on average over layers and heads."""
    return _top_rows(mass.mean((0, 1)).expand_as(mass).contiguous(), count)


def mask_of_rows(mass: Mass, rows: torch.Tensor) -> KeptMask:
    """Chooses the same rows for all heads: these numbers, or where a mask of rows is true."""
    mask = torch.zeros_like(mass, dtype=torch.bool)
    mask[..., rows] = True
    return mask


def _sinks_and_last(mass: Mass, count: int) -> KeptMask:
    """Chooses the first ``SINKS`` rows and as many of the last ones as ``count`` has left."""
    row = torch.arange(mass.shape[-1])
    is_sink = row < SINKS
    is_last = row >= len(row) - max(0, count - SINKS)
    return mask_of_rows(mass, row[is_sink | is_last])


def _uniform(mass: Mass, count: int) -> KeptMask:
    return mask_of_rows(mass, saliency.sample_evenly(torch.arange(mass.shape[-1]), count))


def _random(draw: int) -> ChooseRows:
    def choose(first: Mass, before: Mass, now: Mass, count: int) -> KeptMask:
        generator = torch.Generator().manual_seed(RANDOM_DRAWS * count + draw)
        return mask_of_rows(now, torch.randperm(now.shape[-1], generator=generator)[:count])

    return choose


SHARED_ORACLE = "oracle, shared by all heads"
SHARED_ORACLE_WITHOUT_SINKS = f"{SHARED_ORACLE}, the document's first {SINKS} left out"
# In these names "now" is the step that is measured, and "a look ago" is the step before it.
CHOICES: Mapping[str, Sequence[ChooseRows]] = {
    "oracle: each head's top now": [lambda first, before, now, count: _top_rows(now, count)],
    "fresh: each head's top a look ago": [
        lambda first, before, now, count: _top_rows(before, count)
    ],
    "std: each head's top at prefill": [lambda first, before, now, count: _top_rows(first, count)],
    SHARED_ORACLE: [lambda first, before, now, count: _shared_top_rows(now, count)],
    "shared by all heads, at prefill": [
        lambda first, before, now, count: _shared_top_rows(first, count)
    ],
    "shared by all heads, a look ago": [
        lambda first, before, now, count: _shared_top_rows(before, count)
    ],
    "streaming: sinks and the last": [
        lambda first, before, now, count: _sinks_and_last(now, count)
    ],
    "uniform": [lambda first, before, now, count: _uniform(now, count)],
    "random": [_random(draw) for draw in range(RANDOM_DRAWS)],
}
