"""Lays out a benchmark run in the papers' own tables, as a section of the run's report.

``LAYOUTS`` has the tables as data: their rows, their figures and our methods' names. A table is
written where a run has two of its rows or more. Its columns are the run's suites, in place of the
paper's benchmarks. A run may have a method both with its default setting and with the setting
calibrated for this pair (``CALIBRATED_AXES``). Then the row is of the second and says so.

The papers count tokens in different ways. TABED's block efficiency is tau, which includes the
target's own token. SpecVLM (by its published code) and SAGE (by its text) count accepted draft
tokens alone. So does HIPPO for its baselines, because it prints SpecVLM's own figures. For itself
HIPPO prints the MAT, the accepted tokens from one rejection to the next, even over several rounds.
Here the table of HIPPO has both counts for every row. Its speedups are of whole answers, as the
totals of its Table 2 are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from lab.studies.specvlm import LAMBDA
from saccade.bench import measures
from saccade.bench.comparison import BASELINE
from saccade.bench.records import Answer

Cell = Callable[[Sequence[Answer], Sequence[Answer]], str]
"""(a method's answers to a suite, plain decoding's answers) -> the text of a cell."""
AnswersBySuite = Mapping[str, Mapping[str, Sequence[Answer]]]
"""suite -> method -> its answers, without the failed ones."""


@dataclass(frozen=True)
class Layout:
    """One table of a paper: a row for each method, and a few figures of each suite."""

    place: str  # Where the paper has it.
    about: str  # The sentences above the table.
    rows: Mapping[str, str]  # The paper's name of a method -> ours.
    figures: Mapping[str, Cell]  # A column's head -> what its cells show.
    # Whether a suite of conversations has one column for first turns and one for later turns.
    turns: bool = False
    # A figure of the answers of all columns together, for a last column.
    average: Cell | None = None


def _tau_cell(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _number_text(measures.tau(own) if _has_drafts(own) else None)


def _accepted_cell(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _number_text(measures.accepted_per_forward(own) if _has_drafts(own) else None)


def _between_rejections_cell(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _number_text(measures.accepted_between_rejections(own) if _has_drafts(own) else None)


def _acceptance_cell(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    rate = measures.acceptance_rate(own)
    return _number_text(None if rate is None else 100 * rate, 1)


def _tokens_per_second_cell(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    return _number_text(measures.tokens_per_second(own), 0)


def _speedup_cell(own: Sequence[Answer], plain: Sequence[Answer], whole: bool = False) -> str:
    """Returns the median speedup over plain decoding with its interval.

    With ``whole`` it is that of whole answers, otherwise that of decoding.
    """
    ratios = measures.speedups(own, plain, whole=whole) if own is not plain else []
    interval = measures.interval(ratios)
    return "-" if interval is None else f"{interval[0]:.2f}x [{interval[1]:.2f}, {interval[2]:.2f}]"


def _has_drafts(own: Sequence[Answer]) -> bool:
    """Says whether anything was drafted for these answers."""
    return any(sum(answer.drafted) for answer in own)


def _number_text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


ACCEPTED_NOTE = "Tau counts accepted draft tokens alone: one less than tokens a target forward."
SPEED_FIGURES = {
    "tau": _accepted_cell,
    "tokens/s": _tokens_per_second_cell,
    "speedup": _speedup_cell,
}
WHOLE_FIGURES = {"speedup": partial(_speedup_cell, whole=True)}
# By method the setting that its row prefers, in the syntax of methods. The lambda is calibrated for
# the embedded pair. HIPPO's is its default, which stored runs name in full.
CALIBRATED_AXES = {
    "specvlm": f"lambda={LAMBDA}",
    "specvlm-self": f"lambda={LAMBDA}",
    "sage": f"lambda={LAMBDA}",
    "pearl-specvlm": f"lambda={LAMBDA}",
    "hippo": "early=wait",
}
OFFICIAL_VIEW = "view=specvlm-official"
LAYOUTS = (
    Layout(
        "SpecVLM, Tables 1-2",
        "Std.-SD drafts with the run's draft model (with the target's own checkpoint as the draft "
        f"it is self-SD as the published code does it), Self-SD over the target's own keys. "
        f"*Its code*: the choices of the published code. {ACCEPTED_NOTE}",
        {
            "Vanilla": "ar",
            "Std.-SD: SD-Tree": "sd-tree",
            "Std.-SD: SD-Rand": "sd-tree/view=random/keep=0.1",
            "Std.-SD: SpecVLM": "specvlm",
            "Std.-SD: SpecVLM, its code": f"specvlm/{OFFICIAL_VIEW}/positions=repacked",
            "Self-SD: SD-Tree": "sd-tree/drafter=self",
            "Self-SD: SD-Rand": "specvlm-self/view=random/keep=0.1",
            "Self-SD: SpecVLM": "specvlm-self",
            "Self-SD: SpecVLM, its code": f"specvlm-self/{OFFICIAL_VIEW}",
        },
        SPEED_FIGURES,
    ),
    Layout(
        "SpecVLM, Table 4",
        f"Chains against trees. {ACCEPTED_NOTE}",
        {
            "SD-Chain": "sd",
            "SD-Tree": "sd-tree",
            "SpecVLM-Chain": "specvlm/shape=chain-5",
            "SpecVLM": "specvlm",
        },
        {"tau": _accepted_cell},
    ),
    Layout(
        "Sparse-to-Dense, Table 1",
        "Drafts by the target itself; *Acc.* is accepted over drafted tokens, in per cent.",
        {"LayerSkip": "layerskip", "Streaming": "streaming", "STD": "std"},
        {"Acc.": _acceptance_cell, "speedup": _speedup_cell},
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
        {"tau": _tau_cell},
        turns=True,
        average=_tau_cell,
    ),
    Layout(
        "SAGE, Tables 1-3",
        ACCEPTED_NOTE,
        {
            "Vanilla AR": "ar",
            "SD-Chain": "sd",
            "SD-Tree": "sd-tree",
            "SpecVLM": "specvlm",
            "SAGE": "sage",
        },
        SPEED_FIGURES,
    ),
    Layout(
        "HIPPO, Table 1",
        "Accepted tokens by the round, and from one refusal to the next (MAT). The paper prints "
        "the first for its rivals and the second for HIPPO. Speedups are of whole answers.",
        {"Vanilla SD": "sd", "SD-tree": "sd-tree", "SpecVLM": "specvlm", "HIPPO": "hippo"},
        {"accepted": _accepted_cell, "MAT": _between_rejections_cell, **WHOLE_FIGURES},
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
        WHOLE_FIGURES,
    ),
)


ABOUT = """\
These are the same figures in each paper's own tables, with our suites in place of its benchmarks.
Speedups are medians with intervals, of whole answers in HIPPO's tables and of decoding elsewhere.
Brackets after a name have the setting that this run used: a lambda calibrated for the pair, or a
HIPPO draft that waits for the target's attention.
"""


def papers_section(answers: Sequence[Answer]) -> Iterable[str]:
    """Yields the tables under their heading, as lines for the end of a run's report."""
    yield from ("## In the papers' layouts", "", ABOUT, *all_tables(answers), "")


def all_tables(answers: Sequence[Answer]) -> Iterable[str]:
    """Yields the Markdown lines of every table that this run can fill."""
    by_suite: dict[str, dict[str, list[Answer]]] = {}
    for answer in answers:
        if not answer.error:
            by_suite.setdefault(answer.suite, {}).setdefault(answer.method, []).append(answer)
    for layout in LAYOUTS:
        rows = dict(
            run
            for label, own in layout.rows.items()
            if (run := _matching_row(label, own, by_suite))
        )
        if len(rows) > 1:
            yield from ("", f"### {layout.place}", "", layout.about, "")
            yield from _table_lines(layout, rows, by_suite)
    yield from acceptance_by_round(by_suite)
    yield from seconds_by_operation(by_suite)


def calibrated_method(method: str) -> str:
    """Returns a method at the setting calibrated for this pair, or itself where there is none."""
    name, *axes = method.split("/")
    return "/".join([name, CALIBRATED_AXES[name], *axes]) if name in CALIBRATED_AXES else method


def _matching_row(label: str, method: str, by_suite: AnswersBySuite) -> tuple[str, str] | None:
    """Returns a row's label and the method that fills it: the calibrated one if this run has it.

    Otherwise that is the method itself, or the result is None where the run does not have it.
    """
    for own in (calibrated_method(method), method):
        if any(own in methods for methods in by_suite.values()):
            return (label if own == method else f"{label} (`{own}`)"), own
    return None


def _answers_by_column(
    layout: Layout, by_suite: AnswersBySuite
) -> dict[str, Mapping[str, Sequence[Answer]]]:
    """Returns the answers of each column by method.

    A column is a suite, or the first or the later turns of its conversations.
    """
    columns: dict[str, Mapping[str, Sequence[Answer]]] = {}
    for suite, methods in by_suite.items():
        has_later_turns = any(answer.turn for own in methods.values() for answer in own)
        if not (layout.turns and has_later_turns):
            columns[suite] = methods
            continue
        # No conversation has as many as 99 turns.
        for name, turns in ((f"{suite}, first turn", (0,)), (f"{suite}, later", range(1, 99))):
            columns[name] = {
                method: [answer for answer in own if answer.turn in turns]
                for method, own in methods.items()
            }
    return columns


def _table_lines(
    layout: Layout, rows: Mapping[str, str], by_suite: AnswersBySuite
) -> Iterable[str]:
    """Yields a table's lines. ``rows`` maps a row's label to the method that fills it."""
    columns = _answers_by_column(layout, by_suite)
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
            all_answers = [
                answer for methods in columns.values() for answer in methods.get(method, ())
            ]
            # An average is compared with nothing, so it needs no answers of plain decoding.
            cells.append(layout.average(all_answers, ()))
        yield f"| {label} | " + " | ".join(cells) + " |"


FIRST_ROUNDS = 10  # Rounds of an answer that have columns in SpecVLM's Table 3.


def acceptance_by_round(by_suite: AnswersBySuite) -> Iterable[str]:
    """Yields SpecVLM's Table 3: mean accepted tokens of each of the first ten rounds, and of all.

    Rounds are counted from 0. A round's mean is over the answers that have so many rounds.
    """
    if (run := _matching_row("", "specvlm", by_suite)) is None:
        return
    _, method = run
    rows = {suite: methods[method] for suite, methods in by_suite.items() if method in methods}
    yield from ("", "### SpecVLM, Table 3", "", "Accepted tokens by the number of the round.", "")
    heads = [*map(str, range(FIRST_ROUNDS)), "first ten", "all"]
    yield f"| {method} | " + " | ".join(heads) + " |"
    yield "|-|" + "-:|" * len(heads)
    for suite, own in rows.items():
        accepted_by_answer = [answer.accepted for answer in own]
        accepted_at = [
            [run[step] for run in accepted_by_answer if len(run) > step]
            for step in range(FIRST_ROUNDS)
        ]
        first_rounds = [tokens for run in accepted_by_answer for tokens in run[:FIRST_ROUNDS]]
        all_rounds = [tokens for run in accepted_by_answer for tokens in run]
        columns = [*accepted_at, first_rounds, all_rounds]
        cells = [_number_text(mean(each) if each else None) for each in columns]
        yield f"| {suite} | " + " | ".join(cells) + " |"


# What the seconds of a row are in one answer. The rows need not add up to the last one: overlapped
# work delays nothing, and captions have no row.
OPERATION_SECONDS: Mapping[str, Callable[[Answer], float]] = {
    "vision": lambda answer: answer.vision,
    "target prefill": lambda answer: answer.prefill,
    "target decoding (verify)": lambda answer: answer.verify,
    "draft prefill": lambda answer: answer.draft_prefill,
    "draft decoding": lambda answer: answer.draft,
    "draft prefill, overlapped": lambda answer: answer.beside_prefill,
    "draft decoding, overlapped": lambda answer: answer.beside_draft,
    "token pruning": lambda answer: answer.guide + answer.beside_guide,
    "others (committing, tree update, ...)": lambda answer: answer.rest,
    "in all": lambda answer: answer.total,
}
METHODS_BY_OPERATION = ("ar", "specvlm", "sage", "hippo")


def seconds_by_operation(by_suite: AnswersBySuite) -> Iterable[str]:
    """Yields SpecVLM's Table 5, SAGE's Table 6 and HIPPO's Table 2: seconds by operation.

    Seconds are means over answers.
    """
    for suite, methods in by_suite.items():
        runs = [_matching_row("", name, {suite: methods}) for name in METHODS_BY_OPERATION]
        names = [run[1] for run in runs if run is not None]
        if len(names) < 2:
            continue
        place = "SpecVLM, Table 5 - SAGE, Table 6 - HIPPO, Table 2"
        yield from ("", f"### {place}: {suite}", "")
        yield (
            "Seconds per answer, with their share. What a parallel draft (hippo) does beside the "
            "target is overlapped and delays nothing. Choosing that is overlapped counts as token "
            "pruning too. "
            "Its draft decoding is the time that the target waited for it."
        )
        yield ""
        yield "| operation | " + " | ".join(names) + " |"
        yield "|-|" + "-:|" * len(names)
        totals = {name: mean(answer.total for answer in methods[name]) for name in names}
        for what, seconds in OPERATION_SECONDS.items():
            seconds_by_method = {name: mean(map(seconds, methods[name])) for name in names}
            cells = [
                f"{seconds_by_method[name]:.3f} ({seconds_by_method[name] / totals[name]:.1%})"
                for name in names
            ]
            yield f"| {what} | " + " | ".join(cells) + " |"
