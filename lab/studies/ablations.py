"""Measures what each choice of ``fresh`` is worth, over documents and over clips.

In ``fresh`` the target drafts for itself over a share of its keys, which each head chooses again
every round by the attention that they get now. Documents are read by real weights and clips by the
embedded pair. One choice is changed at a time, and tau is compared with ``fresh``'s own on the same
document or clip. ``python -m lab ablations`` runs this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.real.answers import MethodResult, Results
from lab.real.long_documents import Document
from lab.studies.experiment import Experiment
from lab.training import agreement
from saccade.bench.measures import interval
from saccade.core.capabilities import Capabilities
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import KeyUpdates, Refresh, View
from saccade.drafting.recipe import Recipe
from saccade.methods import resolve
from saccade.methods.fresh import FRESH
from saccade.methods.pages import PAGE_KEYS
from saccade.methods.std import PerHead, visual_budget

KEEP = 0.1  # The share of keys that is kept where nothing else is said.
SINKS = 4  # First tokens that ``Anchored`` keeps.
WINDOW_SHARE = 0.25  # Of the kept keys, how many are the last ones where there is a window.
MIN_TOKENS = 16  # Shorter answers are left out, because they have too few rounds for a tau.
FRESH_METHOD = f"fresh/keep={KEEP}"
PAGES_METHOD = f"pages/keep={KEEP}"
CLIP = "clip"
MEDIA = "documents", "clips"
MARKS = "<!-- ablations -->", "<!-- end of ablations -->"  # Before and after the table on its page.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Anchored(View):
    """A view that keeps the most attended keys, as ``PerHead`` does, and some others in any case.

    The others are the first ``SINKS`` keys of the document or clip, and its last ones, which take
    the share ``window`` of the budget.
    """

    name: str = "anchored"
    keep: float | None = KEEP  # The share of the document's or clip's keys that are kept.
    refresh: Refresh | None = Refresh()
    window: float = 0.0

    @property
    def needs(self) -> Capabilities:
        return PerHead().needs

    @property
    def key_updates(self) -> KeyUpdates:
        return KeyUpdates(refresh=self.refresh)

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        assert prefill.mass is not None
        mass = prefill.mass.clone()  # The attention that each key got, by which PerHead chooses.
        last_count = round(self.window * visual_budget(prompt, self.keep))
        # ``PerHead`` takes keys of infinite attention first.
        mass[..., :SINKS] = float("inf")
        mass[..., mass.shape[-1] - last_count :] = float("inf")
        return PerHead(keep=self.keep)(replace(prefill, mass=mass), prompt)


def _anchored_recipe(name: str, window: float) -> Recipe:
    return replace(FRESH, name=f"{FRESH_METHOD} with {name}", view=Anchored(window=window))


# What is chosen -> the words for each choice -> its method. ``refresh=n-R-eta`` chooses keys again
# every n rounds, by the attention of the last R verified rows, where a key that is held already
# counts 1 + eta times (eta is ``Refresh.hold``). ``fresh`` itself has 1-8-0.25.
GROUPS: Mapping[str, Mapping[str, Recipe]] = {
    "rows remembered R": {
        f"{rows}": resolve(FRESH_METHOD if rows == 8 else f"{FRESH_METHOD}/refresh=1-{rows}")
        for rows in (1, 4, 8, 16, 32)
    },
    "rounds between choices n": {
        "1": resolve(FRESH_METHOD),
        **{f"{every}": resolve(f"{FRESH_METHOD}/refresh={every}") for every in (2, 4, 8)},
        "never again (`std`)": resolve(f"std/keep={KEEP}"),
    },
    "instead at every step, by pages": {
        "every round": resolve(FRESH_METHOD),
        **{
            f"pages of {page}": resolve(
                PAGES_METHOD if page == PAGE_KEYS else f"{PAGES_METHOD}/page={page}"
            )
            for page in (1, 2, 4, 8, 16)
        },
    },
    "what is held counts more by eta": {
        "0": resolve(f"{FRESH_METHOD}/refresh=1-8-0"),
        "0.25": resolve(FRESH_METHOD),
        "1": resolve(f"{FRESH_METHOD}/refresh=1-8-1"),
    },
    "share kept K": {
        f"{keep:g}": resolve(f"fresh/keep={keep:g}") for keep in (0.05, 0.1, 0.25, 0.5)
    },
    "whose choice": {
        "each head's": resolve(FRESH_METHOD),
        "all heads' together": resolve(f"{FRESH_METHOD}/view=attention/refresh=1"),
    },
    "always in beside the text": {
        "nothing": resolve(FRESH_METHOD),
        f"{SINKS} first tokens": _anchored_recipe("sinks", 0.0),
        f"{SINKS} first tokens, a quarter of K the last": _anchored_recipe(
            "sinks and a window", WINDOW_SHARE
        ),
    },
}
# Methods that choose anew, each beside one that does so less often; they are compared on clips.
COMPARED_PAIRS = [
    (f"{own}/keep={keep:g}", f"{other}/keep={keep:g}")
    for own, others in (("fresh", ("std", "streaming")), ("pages", ("std", "streaming", "fresh")))
    for keep in (KEEP, 0.25)
    for other in others
]
_ALL = [recipe for own in GROUPS.values() for recipe in own.values()]
# By name, the recipes that are run on documents, and those that are run on clips.
CHOICES = {recipe.name: recipe for recipe in _ALL}
OVER_CLIPS = CHOICES | {name: resolve(name) for pair in COMPARED_PAIRS for name in pair}


def clip_document(number: int) -> Document:
    """Returns a clip as a document without text, so that its rows are stored like a document's.

    Its task is the seed of the clip, by which the rows of this clip are found again.
    """
    return Document(f"{CLIP} {number}", "", f"seed {agreement.FIRST_SEED + number}", tokens=0)


def measure_clips(
    experiment: Experiment, results: Results, on_progress: Callable[[str], None]
) -> None:
    """Runs the methods that ``results`` lack on the experiment's clips, and stores their rows."""
    for number in range(experiment.clips):
        document = clip_document(number)
        missing = results.missing(document, list(OVER_CLIPS))
        if not missing:
            continue
        clip, inputs = experiment.inputs(number)
        truth = results.reference(
            document, lambda c=clip, i=inputs: experiment.answer("ar", c, i).ids
        )
        for name in missing:
            on_progress(f"clip {number + 1} of {experiment.clips}, {name}")
            result = experiment.answer(OVER_CLIPS[name], clip, inputs)
            results.add([MethodResult.of(document, name, result, truth)], "measured")


def results_table(measured: Sequence[Row]) -> str:
    """Returns two tables in Markdown, whose cells are medians with 95 % bootstrap intervals.

    The first has each choice's tau and its ratio to ``fresh``'s, over documents and over clips. The
    second has the ratios of ``COMPARED_PAIRS`` over clips. A ratio is of two taus on one document
    or clip. All stored rows count, but those of answers shorter than ``MIN_TOKENS``.
    """
    long_answers = [row for row in measured if row["tokens"] >= MIN_TOKENS]
    rows = {medium: [row for row in long_answers if _medium(row) == medium] for medium in MEDIA}
    count = {medium: len({row["document"] for row in own}) for medium, own in rows.items()}
    head = [f"{count[medium]} {medium}: tau | over `{FRESH_METHOD}`" for medium in MEDIA]
    first = [f"| | {' | '.join(head)} |", "|-|" + "-|-|" * len(MEDIA), *_table_rows(rows)]
    second = ["| clips: tau of | over | ratio |", "|-|-|-|"]
    for own, other in COMPARED_PAIRS:
        second.append(
            f"| `{own}` | `{other}` | {_interval_text(_ratios(rows[MEDIA[1]], own, other))} |"
        )
    return "\n".join([*first, "", *second])


def _table_rows(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    for group, own in GROUPS.items():
        yield f"| **{group}** |" + " | |" * len(MEDIA)
        for words, recipe in own.items():
            cells = [cell for medium in MEDIA for cell in _cells(rows[medium], recipe.name)]
            yield f"| {words} | {' | '.join(cells)} |"


def _cells(rows: Sequence[Row], method: str) -> tuple[str, str]:
    own = list(_tau_by_document(rows, method).values())
    if method == FRESH_METHOD:
        return _interval_text(own), ""
    return _interval_text(own), _interval_text(_ratios(rows, method, FRESH_METHOD))


def _ratios(rows: Sequence[Row], method: str, other: str) -> list[float]:
    """Returns the ratios of two methods' taus on the same documents or clips."""
    other_taus = _tau_by_document(rows, other)
    return [
        tau / other_taus[each]
        for each, tau in _tau_by_document(rows, method).items()
        if each in other_taus
    ]


def _tau_by_document(rows: Sequence[Row], method: str) -> dict[str, float]:
    """Returns a method's taus by the name of the document or clip, where it has one."""
    tau_by_document = {
        row["document"]: row["tau"] for row in rows if row["method"] == method and row["tau"]
    }
    return dict(sorted(tau_by_document.items()))


def _interval_text(values: Sequence[float]) -> str:
    result = interval(values, np.median)
    return "" if result is None else "{:.2f} [{:.2f}, {:.2f}]".format(*result)


def _medium(row: Row) -> str:
    documents, clips = MEDIA
    is_clip = row["document"].startswith(f"{CLIP} ")
    return clips if is_clip else documents


def page_with_table(page: str, text: str, marks: tuple[str, str] = MARKS) -> str:
    """Returns the page with ``text`` in place of what stands between its two marks."""
    before, rest = page.split(marks[0])
    after = rest.split(marks[1])[1]
    return f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}"
