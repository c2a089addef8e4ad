"""Writes the report of a run of ``saccade bench`` in Markdown.

A run answers the questions of one or more suites, each a set of items (such as clips), with several
methods. For each suite the report has tables with a row for each method, in which it is compared
with plain decoding (``ar``). Peers, such as Hugging Face's ``generate``, are among the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from saccade.bench import figures, measures, records, text_scores
from saccade.bench.comparison import BASELINE
from saccade.bench.draft_only import is_draft_only
from saccade.bench.measures import Interval, format_number
from saccade.bench.records import Answer
from saccade.core.tree import common_length

REPORT_FILE = "report.md"
MAX_POSITIONS_SHOWN = 8  # Further positions of a draft are left out of the tables.
SPEED_LEGEND = """\
`n` answers; *same* is how many have exactly the token ids of plain decoding (`ar`). **tau** is
tokens emitted per target forward, the target's own included (TABED's block efficiency); *accepted*
leaves that one out (the tau of SpecVLM and SAGE); *MAT* is the mean number of accepted tokens from
one rejection to the next (HIPPO); *accept* is accepted over drafted tokens. Speed is against `ar`
of the same question in the same run, the median over answers with its 95 % bootstrap interval over
answers: *decode* from the second token on, *whole* from inputs to the last token.
"""
STAGES_LEGEND = """\
Mean seconds per answer. *Guide* is choosing what the draft sees; *draft prefill* is the draft's own
reading of it (nothing where that runs in parallel with the target); *rest* is decoding that is
neither drafting nor verifying, such as learning from the round and streaming.
"""
FORMULAS_LEGEND = """\
*Eq. 1* is TABED's expected speedup, tau / (gamma T_q/T_p + 1), from this run's own gamma, T_q and
T_p: it leaves out that verifying several tokens costs more than one. *I/O* is the estimate of
Sparse-to-Dense, Sec. 3.3: keys read per token, divided by those that plain decoding reads.
"""

DRAFT_ONLY_LEGEND = """\
The draft's own greedy answer under each view, beside the target's (`ar`), to the first question of
an item (HIPPO's Fig. 3, TABED's Table 9). *Agrees* is how much of the target's answer it repeats
token by token before the two first differ, as a share of the target's answer.
"""

Column = tuple[str, Callable[[Sequence[Answer], Sequence[Answer]], str]]
"""A heading, and a function of a method's and plain decoding's answers that returns the cell."""

ExtraLines = Callable[[Sequence[Answer]], Iterable[str]]
"""A function of a run's answers that returns lines for the end of its report."""


def write_report(folder: Path, extra_lines: ExtraLines | None = None) -> Path:
    """Writes ``report.md`` and its figures beside a run's results, and returns its path.

    Raises OptionError where there are no results.
    """
    about, answers = records.read_run(folder)
    figure_names = {
        suite: [path.name for path in figures.draw_figures(folder, suite, suite_answers)]
        for suite, suite_answers in _by_suite(answers).items()
    }
    path = folder / REPORT_FILE
    path.write_text(
        report_markdown(
            about, answers, figure_names, () if extra_lines is None else extra_lines(answers)
        )
    )
    return path


def report_markdown(
    about: Mapping[str, Any],
    answers: Sequence[Answer],
    figure_names: Mapping[str, Sequence[str]] | None = None,
    extra_lines: Iterable[str] = (),
) -> str:
    """Returns the report; ``figure_names`` are the files of each suite's figures."""
    plan = about["plan"]
    environment = about["environment"]
    lines = [
        "# Benchmark",
        "",
        f"Target `{plan['target']}`, draft `{plan['draft']}`, {plan['dtype']} on "
        f"{environment['gpu'] or environment['processor']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}."
        + (f" Sampled at temperature {plan['temperature']}." if "temperature" in plan else ""),
        "",
        SPEED_LEGEND,
    ]
    for suite, suite_answers in _by_suite(answers).items():
        lines += [f"## {suite}", "", *_suite_lines(suite_answers), ""]
        lines += [f"![{name}]({name})" for name in (figure_names or {}).get(suite, ())]
        lines.append("")
    lines += extra_lines
    return "\n".join(lines)


def _by_suite(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    by_suite: dict[str, list[Answer]] = {}
    for answer in answers:
        by_suite.setdefault(answer.suite, []).append(answer)
    return by_suite


def _suite_lines(answers: Sequence[Answer]) -> Iterable[str]:
    """Yields the section of one suite, from the answers of all methods to its questions."""
    visual_tokens = median(answer.visual_tokens for answer in answers if answer.method == BASELINE)
    items = len({answer.item for answer in answers})
    yield f"{items} items, {visual_tokens:.0f} visual tokens (median)."
    yield ""
    decoded = [answer for answer in answers if not is_draft_only(answer.method)]
    yield from _table_lines(decoded, SPEED_COLUMNS)
    failed = {
        f"- `{answer.method}`: {answer.error or answer.fallback}"
        for answer in answers
        if answer.error or answer.fallback
    }
    if failed:
        yield from ("", *sorted(failed))
    yield from ("", "### Where the time goes", "", STAGES_LEGEND)
    yield from _table_lines(decoded, TIME_COLUMNS, without_peers=True)
    yield from _caption_lines(decoded)
    yield from ("", "### What the formulas expect", "", FORMULAS_LEGEND)
    yield from _table_lines(decoded, FORMULA_COLUMNS, without_peers=True, drafting_only=True)
    if len(decoded) < len(answers):
        yield from ("", "### What the draft answers by itself", "", DRAFT_ONLY_LEGEND)
        first_turns = [answer for answer in answers if answer.turn == 0]
        yield from _table_lines(
            [a for a in first_turns if is_draft_only(a.method) or a.method == BASELINE],
            QUALITY_COLUMNS,
        )


def speed_tables(folder: Path) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Returns the headings and rows of the table of speeds, by suite, for a terminal."""
    _, answers = records.read_run(folder)
    tables = {}
    for suite, suite_answers in _by_suite(answers).items():
        decoded = [answer for answer in suite_answers if not is_draft_only(answer.method)]
        rows = [[name, *cells] for name, cells in _table_rows(decoded, SPEED_COLUMNS)]
        tables[suite] = ["method", *(name for name, _ in SPEED_COLUMNS)], rows
    return tables


def _table_lines(
    answers: Sequence[Answer], columns: Sequence[Column], **row_filters: bool
) -> Iterable[str]:
    """Yields the lines of a table with a row per method.

    ``row_filters`` are the options of :func:`_table_rows`.
    """
    yield "| method | " + " | ".join(name for name, _ in columns) + " |"
    yield "|-|" + "-:|" * len(columns)
    for name, cells in _table_rows(answers, columns, **row_filters):
        yield f"| `{name}` | " + " | ".join(cells) + " |"


def _table_rows(
    answers: Sequence[Answer],
    columns: Sequence[Column],
    *,
    without_peers: bool = False,
    drafting_only: bool = False,
) -> Iterable[tuple[str, list[str]]]:
    """Yields each method's name with the cells of its row, from its answers without an error.

    ``without_peers`` leaves out methods that have recorded no rounds. These are the peers, which
    are Hugging Face's own ways to decode, and for example a method whose answers all failed.
    ``drafting_only`` leaves out methods that never drafted, such as plain decoding.
    """
    methods = dict.fromkeys(answer.method for answer in answers)
    by_method = {name: [a for a in answers if a.method == name and not a.error] for name in methods}
    for name in methods:
        method_answers = by_method[name]
        if without_peers and not any(answer.rounds for answer in method_answers):
            continue
        if drafting_only and not any(sum(answer.drafted) for answer in method_answers):
            continue
        yield name, [cell(method_answers, by_method[BASELINE]) for _, cell in columns]


def _caption_lines(answers: Sequence[Answer]) -> Iterable[str]:
    """Yields a line for each method that reads captions, on the seconds that they took."""
    for name in dict.fromkeys(answer.method for answer in answers if answer.caption):
        captioned = [answer for answer in answers if answer.method == name and answer.caption]
        seconds = mean(answer.caption for answer in captioned)
        hidden = mean(answer.caption_hidden for answer in captioned)
        yield ""
        yield (
            f"Captions of `{name}`: {seconds:.3f} s, of which {hidden:.3f} beside the target's "
            "prefill; what was waited for is in *guide*."
        )


def _format_interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f} [{interval[1]:.2f}, {interval[2]:.2f}]"


def _identical_cell(answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns how many answers have exactly the token ids of plain decoding; empty where no answer
    was compared."""
    if answers and all(answer.identical is None for answer in answers):
        return ""  # Sampled answers are not compared.
    return f"{sum(answer.identical is True for answer in answers)}"


def _score_cell(answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns the means of the scores that fit the answers' tasks."""
    scores: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in text_scores.score(answer.task, answer.text, answer.answers).items():
            scores.setdefault(name, []).append(value)
    return ", ".join(f"{name} {mean(values):.2f}" for name, values in scores.items())


def _stage_cell(seconds: Callable[[Answer], float]) -> Callable[..., str]:
    """Returns the function of a column that shows the mean of ``seconds`` over the answers."""

    def cell(answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
        return format_number(mean(map(seconds, answers)), 3) if answers else ""

    return cell


def _peak_cell(answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
    peaks = [answer.peak for answer in answers if answer.peak is not None]
    return f"{max(peaks) / 2**20:.0f}" if peaks else ""


def _agreement_cell(answers: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns how much of plain decoding's answer, as a share, each answer repeats before the two
    first differ: the mean with its interval. All answers are to first questions."""
    plain_ids = {answer.item: answer.ids for answer in plain}
    shares = [
        common_length(plain_ids[answer.item], answer.ids) / max(1, len(plain_ids[answer.item]))
        for answer in answers
        if answer.item in plain_ids
    ]
    return _format_interval(measures.interval(shares, np.mean))


QUALITY_COLUMNS: tuple[Column, ...] = (
    ("n", lambda answers, plain: str(len(answers))),
    ("answers", _score_cell),
    ("agrees", _agreement_cell),
)
SPEED_COLUMNS: tuple[Column, ...] = (
    ("n", lambda answers, plain: str(len(answers))),
    ("same", _identical_cell),
    ("tau", lambda answers, plain: _format_interval(measures.tau_interval(answers))),
    ("accepted", lambda answers, plain: format_number(measures.accepted_per_forward(answers))),
    ("MAT", lambda answers, plain: format_number(measures.accepted_between_rejections(answers))),
    ("accept", lambda answers, plain: format_number(measures.acceptance_rate(answers))),
    ("tok/s", lambda answers, plain: format_number(measures.tokens_per_second(answers), 0)),
    (
        "decode x",
        lambda answers, plain: _format_interval(
            measures.interval(measures.speedups(answers, plain))
        ),
    ),
    (
        "whole x",
        lambda answers, plain: _format_interval(
            measures.interval(measures.speedups(answers, plain, whole=True))
        ),
    ),
    ("first token s", _stage_cell(lambda answer: answer.first)),
    ("answers", _score_cell),
)
TIME_COLUMNS: tuple[Column, ...] = (
    *((name, _stage_cell(seconds)) for name, seconds in records.STAGES.items()),
    ("peak MiB", _peak_cell),
)
FORMULA_COLUMNS: tuple[Column, ...] = (
    (
        "measured x",
        lambda answers, plain: _format_interval(
            measures.interval(measures.speedups(answers, plain))
        ),
    ),
    ("Eq. 1", lambda answers, plain: format_number(measures.predicted_speedup(answers, plain))),
    ("I/O", lambda answers, plain: format_number(measures.predicted_key_reads(answers))),
    (
        "accepted at 1, 2, 3, ...",
        lambda answers, plain: " ".join(
            f"{each:.2f}" for each in measures.acceptance_by_position(answers)[:MAX_POSITIONS_SHOWN]
        ),
    ),
    (
        "rounds with 0, 1, 2, ...",
        lambda answers, plain: " ".join(
            f"{each:.2f}"
            for each in measures.accepted_histogram(answers)[: MAX_POSITIONS_SHOWN + 1]
        ),
    ),
)
