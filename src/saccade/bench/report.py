"""A run as Markdown: per suite, every method beside plain decoding, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from saccade.bench import figures, measures, records, words
from saccade.bench.compare import BASELINE
from saccade.bench.draft_only import is_draft_only
from saccade.bench.measures import Interval, number
from saccade.bench.records import Answer
from saccade.core.tree import common_length

REPORT = "report.md"
LEGEND = """\
`n` answers; *same* is how many of them are plain decoding's, token for token. **tau** is tokens
emitted per target forward, the target's own included (TABED's block efficiency); *accepted* leaves
that one out (the tau of SpecVLM and SAGE); *MAT* counts accepted tokens from one refusal to the
next (HIPPO); *accept* is accepted over drafted tokens. Speed is against `ar` of the same
question in the same run, the median over answers with its 95 % bootstrap interval over answers:
*decode* from the second token on, *whole* from inputs to the last token.
"""
STAGES = """\
Seconds an answer, means. *Guide* is choosing what the draft sees; *draft prefill* its own reading
of it (nothing where that runs beside the target); *rest* is what decoding spends beside drafting
and verifying (committing, learning from the round, stopping, streaming).
"""
FORMULAS = """\
*Eq. 1* is TABED's expected speedup, tau / (gamma T_q/T_p + 1), from this run's own gamma, T_q and
T_p: it leaves out that verifying several tokens costs more than one. *I/O* is Sparse-to-Dense's
Sec. 3.3: keys read a token as a share of plain decoding's.
"""

DRAFT_ONLY = """\
The draft's own greedy answer under each view, beside the target's (`ar`), to the first question of
an item (HIPPO's Fig. 3, TABED's Table 9). *Agrees* is how far it writes the target's very tokens
before the first other one, as a share of the answer.
"""

Column = tuple[str, Callable[[Sequence[Answer], Sequence[Answer]], str]]
After = Callable[[Sequence[Answer]], Iterable[str]]


def write(folder: Path, after: After | None = None) -> Path:
    """Writes ``report.md`` and its figures beside a run's results.

    ``after`` are further lines made of the answers, for the end of the page. Raises OptionError
    where there are no results.
    """
    about, answers = records.stored(folder)
    drawn = {
        suite: [path.name for path in figures.write(folder, suite, own)]
        for suite, own in _by_suite(answers).items()
    }
    path = folder / REPORT
    path.write_text(markdown(about, answers, drawn, () if after is None else after(answers)))
    return path


def markdown(
    about: Mapping[str, Any],
    answers: Sequence[Answer],
    drawn: Mapping[str, Sequence[str]] | None = None,
    after: Iterable[str] = (),
) -> str:
    """The report; ``drawn`` are the files of each suite's figures, ``after`` further lines."""
    plan, machine = about["plan"], about["environment"]
    lines = [
        "# Benchmark",
        "",
        f"Target `{plan['target']}`, draft `{plan['draft']}`, {plan['dtype']} on "
        f"{machine['gpu'] or machine['processor']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, transformers {machine['transformers']}."
        + (f" Sampled at temperature {plan['temperature']}." if "temperature" in plan else ""),
        "",
        LEGEND,
    ]
    for suite, own in _by_suite(answers).items():
        lines += [f"## {suite}", "", *_suite(own), ""]
        lines += [f"![{name}]({name})" for name in (drawn or {}).get(suite, ())]
        lines.append("")
    lines += after
    return "\n".join(lines)


def _by_suite(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.suite, []).append(answer)
    return found


def _suite(answers: Sequence[Answer]) -> Iterable[str]:
    visual = median(answer.visual_tokens for answer in answers if answer.method == BASELINE)
    items = len({answer.item for answer in answers})
    yield f"{items} items, {visual:.0f} visual tokens (median)."
    yield ""
    both = [answer for answer in answers if not is_draft_only(answer.method)]
    yield from _table(both, SPEED)
    failed = {
        f"- `{answer.method}`: {answer.error or answer.fallback}"
        for answer in answers
        if answer.error or answer.fallback
    }
    if failed:
        yield from ("", *sorted(failed))
    yield from ("", "### Where the time goes", "", STAGES)
    yield from _table(both, TIME, ours=True)
    yield from _captions(both)
    yield from ("", "### What the formulas expect", "", FORMULAS)
    yield from _table(both, FORMULA, ours=True, drafting=True)
    if len(both) < len(answers):
        yield from ("", "### What the draft answers by itself", "", DRAFT_ONLY)
        own = [answer for answer in answers if answer.turn == 0]
        yield from _table(
            [a for a in own if is_draft_only(a.method) or a.method == BASELINE], QUALITY
        )


def _table(
    answers: Sequence[Answer],
    columns: Sequence[Column],
    *,
    ours: bool = False,
    drafting: bool = False,
) -> Iterable[str]:
    """A row a method; ``ours`` leaves out the peers, ``drafting`` also those that draft nothing."""
    methods = dict.fromkeys(answer.method for answer in answers)
    by = {name: [a for a in answers if a.method == name and not a.error] for name in methods}
    yield "| method | " + " | ".join(name for name, _ in columns) + " |"
    yield "|-|" + "-:|" * len(columns)
    for name in methods:
        own = by[name]
        if ours and not any(answer.rounds for answer in own):
            continue
        if drafting and not any(sum(answer.drafted) for answer in own):
            continue
        yield f"| `{name}` | " + " | ".join(cell(own, by[BASELINE]) for _, cell in columns) + " |"


def _captions(answers: Sequence[Answer]) -> Iterable[str]:
    """What captions took, of the methods that read any."""
    for name in dict.fromkeys(answer.method for answer in answers if answer.caption):
        own = [answer for answer in answers if answer.method == name and answer.caption]
        taken = mean(answer.caption for answer in own)
        hidden = mean(answer.caption_hidden for answer in own)
        yield ""
        yield (
            f"Captions of `{name}`: {taken:.3f} s, of which {hidden:.3f} beside the target's "
            "prefill; what was waited for is in *guide*."
        )


def _between(found: Interval | None) -> str:
    return "" if found is None else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"


def _same(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    if own and all(answer.identical is None for answer in own):
        return ""  # sampled
    return f"{sum(answer.identical is True for answer in own)}"


def _score(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """The means of whatever measures fit the answers' tasks."""
    found: dict[str, list[float]] = {}
    for answer in own:
        for name, value in words.score(answer.task, answer.text, answer.answers).items():
            found.setdefault(name, []).append(value)
    return ", ".join(f"{name} {mean(values):.2f}" for name, values in found.items())


def _stage(seconds: Callable[[Answer], float]) -> Callable[..., str]:
    def cell(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
        return number(mean(map(seconds, own)), 3) if own else ""

    return cell


def _peak(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    known = [answer.peak for answer in own if answer.peak is not None]
    return f"{max(known) / 2**20:.0f}" if known else ""


def _agreement(own: Sequence[Answer], plain: Sequence[Answer]) -> str:
    said = {answer.item: answer.ids for answer in plain}
    shares = []
    for answer in own:
        theirs = said.get(answer.item, ())
        shares.append(common_length(theirs, answer.ids) / max(1, len(theirs)))
    return _between(measures.interval(shares, np.mean))


QUALITY: tuple[Column, ...] = (
    ("n", lambda own, plain: str(len(own))),
    ("answers", _score),
    ("agrees", _agreement),
)
SPEED: tuple[Column, ...] = (
    ("n", lambda own, plain: str(len(own))),
    ("same", _same),
    ("tau", lambda own, plain: _between(measures.tau_interval(own))),
    ("accepted", lambda own, plain: number(measures.accepted(own))),
    ("MAT", lambda own, plain: number(measures.mean_accepted(own))),
    ("accept", lambda own, plain: number(measures.acceptance(own))),
    ("tok/s", lambda own, plain: number(measures.rate(own), 0)),
    (
        "decode x",
        lambda own, plain: _between(measures.interval(measures.speedups(own, plain))),
    ),
    (
        "whole x",
        lambda own, plain: _between(measures.interval(measures.speedups(own, plain, whole=True))),
    ),
    ("first token s", _stage(lambda answer: answer.first)),
    ("answers", _score),
)
TIME: tuple[Column, ...] = (
    *((name, _stage(seconds)) for name, seconds in records.STAGES.items()),
    ("peak MiB", _peak),
)
FORMULA: tuple[Column, ...] = (
    (
        "measured x",
        lambda own, plain: _between(measures.interval(measures.speedups(own, plain))),
    ),
    ("Eq. 1", lambda own, plain: number(measures.predicted_speedup(own, plain))),
    ("I/O", lambda own, plain: number(measures.predicted_io(own))),
    (
        "accepted at 1, 2, 3, ...",
        lambda own, plain: " ".join(f"{each:.2f}" for each in measures.by_position(own)[:8]),
    ),
    (
        "rounds with 0, 1, 2, ...",
        lambda own, plain: " ".join(f"{each:.2f}" for each in measures.histogram(own)[:9]),
    ),
)
