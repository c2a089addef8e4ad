"""What each choice of ``fresh`` is worth: documents on real weights, clips on the embedded pair.

One choice is changed at a time, and tau compared with ``fresh``'s own on the same document or clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.studies.lab import Lab
from lab.training import agreement
from saccade.bench.measures import interval
from saccade.bench.real.answers import MethodResult, Results
from saccade.bench.suites.long_documents import Document
from saccade.core.capabilities import Capabilities
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import Following, Refresh, View
from saccade.drafting.recipe import Recipe
from saccade.methods import resolve
from saccade.methods.fresh import FRESH
from saccade.methods.pages import PAGE_KEYS
from saccade.methods.std import PerHead, visual_budget

KEEP, SINKS, WINDOW = 0.1, 4, 0.25
LEAST = 16  # tokens of an answer: a shorter one has too few rounds to tell anything
OURS, PAGED, CLIP = f"fresh/keep={KEEP}", f"pages/keep={KEEP}", "clip"
MEDIA = "documents", "clips"
MARKS = "<!-- ablations -->", "<!-- end of ablations -->"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Anchored(View):
    """``PerHead`` with the medium's first few tokens always in, and of its budget a share of its
    last ones."""

    name: str = "anchored"
    keep: float | None = KEEP
    refresh: Refresh | None = Refresh()
    window: float = 0.0

    @property
    def needs(self) -> Capabilities:
        return PerHead().needs

    @property
    def following(self) -> Following:
        return Following(refresh=self.refresh)

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        assert prefill.mass is not None
        mass, last = prefill.mass.clone(), round(self.window * visual_budget(prompt, self.keep))
        mass[..., :SINKS] = float("inf")
        mass[..., mass.shape[-1] - last :] = float("inf")
        return PerHead(keep=self.keep)(replace(prefill, mass=mass), prompt)


def _anchored(name: str, window: float) -> Recipe:
    return replace(FRESH, name=f"{OURS} with {name}", view=Anchored(window=window))


# what is chosen -> each choice in words, and its method
GROUPS: Mapping[str, Mapping[str, Recipe]] = {
    "rows remembered R": {
        f"{rows}": resolve(OURS if rows == 8 else f"{OURS}/refresh=1-{rows}")
        for rows in (1, 4, 8, 16, 32)
    },
    "rounds between choices n": {
        "1": resolve(OURS),
        **{f"{every}": resolve(f"{OURS}/refresh={every}") for every in (2, 4, 8)},
        "never again (`std`)": resolve(f"std/keep={KEEP}"),
    },
    "instead at every step, by pages": {
        "every round": resolve(OURS),
        **{
            f"pages of {page}": resolve(PAGED if page == PAGE_KEYS else f"{PAGED}/page={page}")
            for page in (1, 2, 4, 8, 16)
        },
    },
    "what is held counts more by eta": {
        "0": resolve(f"{OURS}/refresh=1-8-0"),
        "0.25": resolve(OURS),
        "1": resolve(f"{OURS}/refresh=1-8-1"),
    },
    "share kept K": {
        f"{keep:g}": resolve(f"fresh/keep={keep:g}") for keep in (0.05, 0.1, 0.25, 0.5)
    },
    "whose choice": {
        "each head's": resolve(OURS),
        "all heads' together": resolve(f"{OURS}/view=attention/refresh=1"),
    },
    "always in beside the text": {
        "nothing": resolve(OURS),
        f"{SINKS} first tokens": _anchored("sinks", 0.0),
        f"{SINKS} first tokens, a quarter of K the last": _anchored("sinks and a window", WINDOW),
    },
}
BESIDE = [  # at a share, over what follows less: on clips
    (f"{own}/keep={keep:g}", f"{other}/keep={keep:g}")
    for own, others in (("fresh", ("std", "streaming")), ("pages", ("std", "streaming", "fresh")))
    for keep in (KEEP, 0.25)
    for other in others
]
_ALL = [recipe for own in GROUPS.values() for recipe in own.values()]
CHOICES = {recipe.name: recipe for recipe in _ALL}
OVER_CLIPS = CHOICES | {name: resolve(name) for pair in BESIDE for name in pair}


def shown(number: int) -> Document:
    """A clip under a document's name."""
    return Document(f"{CLIP} {number}", "", f"seed {agreement.FIRST_SEED + number}", 0)


def over_clips(lab: Lab, results: Results, tell: Callable[[str], None]) -> None:
    """What ``results`` lack of the lab's clips by these methods."""
    for number in range(lab.clips):
        document = shown(number)
        missing = results.missing(document, list(OVER_CLIPS))
        if not missing:
            continue
        clip, inputs = lab.inputs(number)
        truth = results.reference(document, lambda c=clip, i=inputs: lab.answer("ar", c, i).ids)
        for name in missing:
            tell(f"clip {number + 1} of {lab.clips}, {name}")
            found = lab.answer(OVER_CLIPS[name], clip, inputs)
            results.add([MethodResult.of(document, name, found, truth)], "measured")


def table(measured: Sequence[Row]) -> str:
    """Markdown: tau of each choice, and over ``fresh``'s own; then ``fresh`` over others."""
    told = [row for row in measured if row["tokens"] >= LEAST]
    rows = {medium: [row for row in told if _medium(row) == medium] for medium in MEDIA}
    count = {medium: len({row["document"] for row in own}) for medium, own in rows.items()}
    head = [f"{count[medium]} {medium}: tau | over `{OURS}`" for medium in MEDIA]
    first = [f"| | {' | '.join(head)} |", "|-|" + "-|-|" * len(MEDIA), *_rows(rows)]
    second = ["| clips: tau of | over | ratio |", "|-|-|-|"]
    for own, other in BESIDE:
        second.append(f"| `{own}` | `{other}` | {_said(_ratios(rows[MEDIA[1]], own, other))} |")
    return "\n".join([*first, "", *second])


def _rows(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    for group, own in GROUPS.items():
        yield f"| **{group}** |" + " | |" * len(MEDIA)
        for words, recipe in own.items():
            cells = [cell for medium in MEDIA for cell in _cells(rows[medium], recipe.name)]
            yield f"| {words} | {' | '.join(cells)} |"


def _cells(rows: Sequence[Row], method: str) -> tuple[str, str]:
    own = list(_tau(rows, method).values())
    return _said(own), "" if method == OURS else _said(_ratios(rows, method, OURS))


def _ratios(rows: Sequence[Row], method: str, other: str) -> list[float]:
    """Of the same document or clip."""
    than = _tau(rows, other)
    return [tau / than[each] for each, tau in _tau(rows, method).items() if each in than]


def _tau(rows: Sequence[Row], method: str) -> dict[str, float]:
    found = {row["document"]: row["tau"] for row in rows if row["method"] == method and row["tau"]}
    return dict(sorted(found.items()))


def _said(values: Sequence[float]) -> str:
    found = interval(values, np.median)
    return "" if found is None else "{:.2f} [{:.2f}, {:.2f}]".format(*found)


def _medium(row: Row) -> str:
    return MEDIA[row["document"].startswith(f"{CLIP} ")]


def put(page: str, text: str, marks: tuple[str, str] = MARKS) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(marks[0])
    after = rest.split(marks[1])[1]
    return f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}"
