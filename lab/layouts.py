"""The papers' tables, as data: which rows, which figures, under which of our names.

A run fills what it has: a table needs two of its rows or more. Where a run has a method both bare
and at the setting found for this pair (``SETTLED``), its row is of the second, and says so. Columns
are the run's suites, in the place of the paper's benchmarks. Block efficiency is tau, with the
target's own token; SpecVLM (by its published code) and SAGE (by its text) count accepted draft
tokens alone, and so does HIPPO for its baselines (it prints SpecVLM's own figures); HIPPO's own MAT
runs on over full acceptances. HIPPO's speedups are of whole answers, as its Table 2's totals are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from lab.studies.specvlm import LAMBDA
from saccade.bench import measures
from saccade.bench.compare import BASELINE
from saccade.bench.records import Answer
from saccade.methods import resolve

Cell = Callable[[Sequence[Answer], Sequence[Answer]], str]
"""(a method's answers to a suite, plain decoding's) -> what the table says."""
By = Mapping[str, Mapping[str, Sequence[Answer]]]
"""suite -> method -> its answers, without those that failed."""


@dataclass(frozen=True)
class Layout:
    """One table: methods down, suites across, a few figures each."""

    place: str
    about: str
    rows: Mapping[str, str]  # the paper's name -> ours
    figures: Mapping[str, Cell]
    turns: bool = False  # first and further turns of conversations are columns of their own
    average: Cell | None = None  # over all the columns


def _tau(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _said(measures.tau(own) if _drafted(own) else None)


def _accepted(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _said(measures.accepted_per_forward(own) if _drafted(own) else None)


def _mat(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Across rounds for a draft that goes on while it is judged, by the round for any other."""
    ahead = bool(own) and resolve(own[0].method).drafts_beside_target
    count = measures.accepted_between_refusals if ahead else measures.accepted_per_forward
    return _said(count(own) if _drafted(own) else None)


def _share(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    found = measures.acceptance_rate(own)
    return _said(None if found is None else 100 * found, 1)


def _rate(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _said(measures.tokens_per_second(own), 0)


def _speedup(own: Sequence[Answer], plain: Sequence[Answer], whole: bool = False) -> str:
    ratios = measures.speedups(own, plain, whole=whole) if own is not plain else []
    found = measures.interval(ratios)
    return "-" if found is None else f"{found[0]:.2f}x [{found[1]:.2f}, {found[2]:.2f}]"


def _drafted(own: Sequence[Answer]) -> bool:
    return any(sum(answer.drafted) for answer in own)


def _said(found: float | None, digits: int = 2) -> str:
    return "-" if found is None else f"{found:.{digits}f}"


ACCEPTED = "Tau counts accepted draft tokens alone: one less than tokens a target forward."
SPEED = {"tau": _accepted, "tokens/s": _rate, "speedup": _speedup}
WHOLE = {"speedup": partial(_speedup, whole=True)}
SETTLED = {
    "specvlm": f"lambda={LAMBDA}",
    "specvlm-self": f"lambda={LAMBDA}",
    "sage": f"lambda={LAMBDA}",
    "hippo": "early=wait",
}
OFFICIAL = "view=specvlm-official"
LAYOUTS = (
    Layout(
        "SpecVLM, Tables 1-2",
        "Std.-SD drafts with the run's draft model (in `papers-self` that is the target's own "
        f"checkpoint: self-SD as the published code does it), Self-SD over the target's own keys. "
        f"*Its code*: the choices of the published code. {ACCEPTED}",
        {
            "Vanilla": "ar",
            "Std.-SD: SD-Tree": "sd-tree",
            "Std.-SD: SD-Rand": "sd-tree/view=random/keep=0.1",
            "Std.-SD: SpecVLM": "specvlm",
            "Std.-SD: SpecVLM, its code": f"specvlm/{OFFICIAL}/positions=repacked",
            "Self-SD: SD-Tree": "sd-tree/drafter=self",
            "Self-SD: SD-Rand": "specvlm-self/view=random/keep=0.1",
            "Self-SD: SpecVLM": "specvlm-self",
            "Self-SD: SpecVLM, its code": f"specvlm-self/{OFFICIAL}",
        },
        SPEED,
    ),
    Layout(
        "SpecVLM, Table 4",
        f"Chains against trees. {ACCEPTED}",
        {
            "SD-Chain": "sd",
            "SD-Tree": "sd-tree",
            "SpecVLM-Chain": "specvlm/shape=chain-5",
            "SpecVLM": "specvlm",
        },
        {"tau": _accepted},
    ),
    Layout(
        "Sparse-to-Dense, Table 1",
        "Drafts by the target itself; *Acc.* is accepted over drafted tokens, in per cent.",
        {"LayerSkip": "layerskip", "Streaming": "streaming", "STD": "std"},
        {"Acc.": _share, "speedup": _speedup},
    ),
    Layout(
        "TABED, Tables 1-2",
        "Block efficiency: tokens a target forward, its own included. MTCP is MTCP* with equal "
        "weights.",
        {
            "M": "sd",
            "T": "sd/view=text",
            "C": "sd/view=caption",
            "P": "sd/view=pooled",
            "MT": "tabed-mt",
            "MT*": "tabed",
            "MTCP": "tabed-mtcp/weights=equal",
            "MTCP*": "tabed-mtcp",
        },
        {"tau": _tau},
        turns=True,
        average=_tau,
    ),
    Layout(
        "SAGE, Tables 1-3",
        ACCEPTED,
        {
            "Vanilla AR": "ar",
            "SD-Chain": "sd",
            "SD-Tree": "sd-tree",
            "SpecVLM": "specvlm",
            "SAGE": "sage",
        },
        SPEED,
    ),
    Layout(
        "HIPPO, Table 1",
        "MAT counts accepted tokens: HIPPO's from one refusal to the next, others' by the round. "
        "Speedups are of whole answers.",
        {"Vanilla SD": "sd", "SD-tree": "sd-tree", "SpecVLM": "specvlm", "HIPPO": "hippo"},
        {"MAT": _mat, **WHOLE},
    ),
    Layout(
        "HIPPO, Table 3",
        "Drafts in a process of their own, beside the target. Speedups are of whole answers.",
        {
            "PEARL-video": "pearl",
            "PEARL w/ Syn-Prefill": "pearl-syn",
            "PEARL-SpecVLM": "pearl-specvlm",
            "HIPPO": "hippo",
            "HIPPO w/o vpsd": "hippo/schedule=serial",
        },
        WHOLE,
    ),
)


ABOUT = """\
The same figures in each paper's own tables, suites in the place of its benchmarks; speedups are of
decoding, in HIPPO's tables of whole answers, medians with intervals. A row of ours in brackets is
the setting that this run has: lambda calibrated for the pair, HIPPO's draft waiting for attention.
"""


def section(answers: Sequence[Answer]) -> Iterable[str]:
    """The tables under their heading, as lines for the end of a run's report."""
    yield from ("## In the papers' layouts", "", ABOUT, *tables(answers), "")


def tables(answers: Sequence[Answer]) -> Iterable[str]:
    """Every table this run can fill, as Markdown lines."""
    by: dict[str, dict[str, list[Answer]]] = {}
    for answer in answers:
        if not answer.error:
            by.setdefault(answer.suite, {}).setdefault(answer.method, []).append(answer)
    for layout in LAYOUTS:
        rows = dict(run for label, own in layout.rows.items() if (run := _row(label, own, by)))
        if len(rows) > 1:
            yield from ("", f"### {layout.place}", "", layout.about, "")
            yield from _table(layout, rows, by)
    yield from steps(by)
    yield from breakdowns(by)


def settled(method: str) -> str:
    """A method at the setting found for this pair; itself where none was looked for."""
    name, *axes = method.split("/")
    return "/".join([name, SETTLED[name], *axes]) if name in SETTLED else method


def _row(label: str, method: str, by: By) -> tuple[str, str] | None:
    """A row's label and the method of this run that fills it."""
    for own in (settled(method), method):
        if any(own in methods for methods in by.values()):
            return (label if own == method else f"{label} (`{own}`)"), own
    return None


def _columns(layout: Layout, by: By) -> dict[str, Mapping[str, Sequence[Answer]]]:
    found: dict[str, Mapping[str, Sequence[Answer]]] = {}
    for suite, methods in by.items():
        later = any(answer.turn for own in methods.values() for answer in own)
        if not (layout.turns and later):
            found[suite] = methods
            continue
        for name, turns in ((f"{suite}, first turn", (0,)), (f"{suite}, later", range(1, 99))):
            found[name] = {
                method: [answer for answer in own if answer.turn in turns]
                for method, own in methods.items()
            }
    return found


def _table(layout: Layout, rows: Mapping[str, str], by: By) -> Iterable[str]:
    columns = _columns(layout, by)
    heads = [f"{suite}: {figure}" for suite in columns for figure in layout.figures]
    if layout.average is not None:
        heads.append("all")
    yield "| method | " + " | ".join(heads) + " |"
    yield "|-|" + "-:|" * len(heads)
    for label, method in rows.items():
        cells = [
            figure(own, methods.get(BASELINE, ())) if (own := methods.get(method, ())) else ""
            for methods in columns.values()
            for figure in layout.figures.values()
        ]
        if layout.average is not None:
            every = [answer for methods in columns.values() for answer in methods.get(method, ())]
            cells.append(layout.average(every, every))
        yield f"| {label} | " + " | ".join(cells) + " |"


STEPS = 10


def steps(by: By) -> Iterable[str]:
    """SpecVLM's Table 3: accepted tokens of the first ten rounds of an answer, and of all."""
    if (run := _row("", "specvlm", by)) is None:
        return
    _, method = run
    rows = {suite: methods[method] for suite, methods in by.items() if method in methods}
    yield from ("", "### SpecVLM, Table 3", "", "Accepted tokens by the number of the round.", "")
    heads = [*map(str, range(STEPS)), "first ten", "all"]
    yield f"| {method} | " + " | ".join(heads) + " |"
    yield "|-|" + "-:|" * len(heads)
    for suite, own in rows.items():
        taken = [answer.accepted for answer in own]
        at = [[run[step] for run in taken if len(run) > step] for step in range(STEPS)]
        cells = [_said(mean(each) if each else None) for each in at]
        early = [tokens for run in taken for tokens in run[:STEPS]]
        every = [tokens for run in taken for tokens in run]
        cells += [_said(mean(early)), _said(mean(every))]
        yield f"| {suite} | " + " | ".join(cells) + " |"


OPERATIONS: Mapping[str, Callable[[Answer], float]] = {
    "vision": lambda answer: answer.vision,
    "target prefill": lambda answer: answer.prefill,
    "target decoding (verify)": lambda answer: answer.verify,
    "draft prefill": lambda answer: answer.draft_prefill,
    "draft decoding": lambda answer: answer.draft,
    "draft prefill, overlapped": lambda answer: answer.beside_prefill,
    "draft decoding, overlapped": lambda answer: answer.beside_draft,
    "token pruning": lambda answer: answer.guide,
    "others (committing, tree update, ...)": lambda answer: answer.rest,
    "in all": lambda answer: answer.total,
}
BROKEN_DOWN = ("ar", "specvlm", "sage", "hippo")


def breakdowns(by: By) -> Iterable[str]:
    """SpecVLM's Table 5, SAGE's Table 6 and HIPPO's Table 2: seconds an answer by operation."""
    for suite, methods in by.items():
        runs = [_row("", name, {suite: methods}) for name in BROKEN_DOWN]
        shown = [run[1] for run in runs if run is not None]
        if len(shown) < 2:
            continue
        place = "SpecVLM, Table 5 - SAGE, Table 6 - HIPPO, Table 2"
        yield from ("", f"### {place}: {suite}", "")
        yield (
            "Seconds an answer (its share). What a parallel draft (hippo) does beside the target, "
            "choosing included, is overlapped: it holds nobody up and is in no other row. Its "
            "draft decoding is what the target waited."
        )
        yield ""
        yield "| operation | " + " | ".join(shown) + " |"
        yield "|-|" + "-:|" * len(shown)
        totals = {name: mean(answer.total for answer in methods[name]) for name in shown}
        for what, seconds in OPERATIONS.items():
            found = {name: mean(map(seconds, methods[name])) for name in shown}
            cells = [f"{found[name]:.3f} ({found[name] / totals[name]:.1%})" for name in shown]
            yield f"| {what} | " + " | ".join(cells) + " |"
