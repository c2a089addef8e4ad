"""Makes the tables of docs/numbers.md, the page of main results, from stored runs alone.

``auto`` is the default method. It is compared with plain decoding, with transformers' ``generate``
and with the best fixed method: the one that decodes a suite in the fewest seconds of all our other
methods, plain decoding included. A fixed method never decides whether to draft, as ``auto`` does,
but one with the shape ``fit`` decides how deep.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lab.peers import rows as peers
from lab.real.pair import summary_table
from saccade.bench import measures, records
from saccade.bench.comparison import BASELINE
from saccade.bench.records import Answer

AUTO, GENERATE = "auto", "hf"
# A row of a run with one of these prefixes is no method that decodes for the target: "hf" are
# transformers' ways to decode, and "draft" is the draft that answers alone.
NOT_OUR_METHODS = ("hf", "draft")
BEGIN = "<!-- `python -m lab numbers` writes {name} from here -->"
END = "<!-- to here -->"
QUESTIONS = {
    "shapes-caption": "descriptions",
    "shapes-events": "what happened, in order",
    "shapes-chat": "two turns of a conversation",
    "shapes-ood": "descriptions of unheard wording",
    "shapes-diff": "what differs between two pictures",
    "shapes-qa": "answers of a few words",
    "shapes-caption-2k": "descriptions of a longer clip",
}
# A reader's words for ratios with a goal, by their part and name. The ratios that compare `auto`
# with a suite's best fixed method are not here, because `_in_words` makes their words.
RATIOS = {
    ("whole-256", "best / ar, end to end"): "answers of exactly 256 tokens: whole, × plain",
    ("useless", "auto / ar, decoding, random weights"): "a draft of noise: decoding, × plain",
    ("useless", "auto / ar, end to end, random weights"): "a draft of noise: whole, × plain",
}
VISUAL_TOKENS = {"shapes-caption-2k": 2048}  # 256 in every other suite.


@dataclass(frozen=True)
class Processor:
    """A processor and the stored runs on two of its cores."""

    name: str
    suffix: str  # Of its files: speed-intel.json, pool-intel.json, speed-intel.svg.
    runs: tuple[str, ...]


PROCESSORS = (
    Processor("AMD EPYC, Zen 5", "", ("bench-256", "bench-2k")),
    Processor("Intel Xeon", "-intel", ("bench-intel",)),
    Processor("AMD EPYC, Zen 3", "-zen3", ("bench-zen3",)),
)


def tables_by_name(results: Path) -> dict[str, str]:
    """Returns every table of the page by its name."""
    tables = {f"suites{each.suffix}": "\n".join(suites(results, each.runs)) for each in PROCESSORS}
    tables["missed"] = "\n".join(missed_goals(results))
    tables["requests"] = "\n".join(requests_at_once(results))
    tables["peers"] = "\n".join(beside_peers(_stored_json(results / "peers.json")))
    for machine in ("", "-intel", "-h100"):
        facts = _stored_json(results / f"real-pair{machine}.json")
        tables[f"pair{machine}"] = "\n".join(summary_table(facts))
    tables["real"] = "\n".join(real_weights(_stored_json(results / "real.json")))
    return tables


def page_with(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with each table between its marks.

    Raises ValueError where the marks of a table are missing.
    """
    for name, table in tables.items():
        before, begin, rest = page.partition(BEGIN.format(name=name))
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"the page has no place for the table {name!r}")
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def suites(results: Path, runs: Sequence[str]) -> Iterator[str]:
    """Yields how ``auto`` compares with others over each suite of these runs, a row for each."""
    yield (
        "| questions | visual tokens | decoding, × plain | whole answer, × plain | "
        "decoding, × `generate` | decoding, × best fixed method |"
    )
    yield "|-|-:|-|-|-|-|"
    answers = [answer for run in runs for answer in records.read_run(results / run)[1]]
    for suite, words in QUESTIONS.items():
        by_method: dict[str, list[Answer]] = {}
        for answer in answers:
            if answer.suite == suite:
                by_method.setdefault(answer.method, []).append(answer)
        if not by_method:
            continue
        auto = by_method[AUTO]
        plain = by_method[BASELINE]
        cells = [
            words,
            f"{VISUAL_TOKENS.get(suite, 256):,}",
            _speedup_text(auto, plain),
            _speedup_text(auto, plain, whole=True),
            _speedup_text(auto, by_method[GENERATE]),
            _beside_best(by_method),
        ]
        yield f"| {' | '.join(cells)} |"


def _beside_best(by_method: Mapping[str, Sequence[Answer]]) -> str:
    """Returns how many times as fast as the best fixed method ``auto`` decodes a suite.

    Seconds are summed over all answers. The text has the name of that method too.
    """
    seconds = {
        method: sum(answer.decode for answer in answers)
        for method, answers in by_method.items()
        if not method.startswith(NOT_OUR_METHODS)
    }
    own = seconds.pop(AUTO)
    best = min(seconds, key=lambda method: seconds[method])
    return f"{seconds[best] / own:.2f} (`{best}`)"


def _speedup_text(own: Sequence[Answer], other: Sequence[Answer], whole: bool = False) -> str:
    """Returns the median speedup of ``own`` over ``other``, question by question, as text.

    Its 95 % interval follows. The speedup is of decoding, or of whole answers with ``whole``.
    """
    interval = measures.interval(measures.speedups(own, other, whole=whole))
    assert interval is not None
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval)


def missed_goals(results: Path) -> Iterator[str]:
    """Yields the ratios with a goal that were not reached, of all processors."""
    yield from ("| processor | ratio | measured | goal |", "|-|-|-|-|")
    for processor in PROCESSORS:
        for ratio in _stored_json(results / f"speed{processor.suffix}.json")["ratios"]:
            if ratio["met"] is not False:
                continue
            measured = f"{ratio['value']:.3f}"
            if ratio["interval"] is not None:  # With fewer than three clips there is none.
                low, high = ratio["interval"]
                measured += f" [{low:.2f}, {high:.2f}]"
            yield f"| {processor.name} | {_in_words(ratio)} | {measured} | {ratio['goal']} |"


def _in_words(ratio: Mapping[str, Any]) -> str:
    """Returns what a ratio with a goal compares, in a reader's words.

    The name of most ratios ends in a suite, as in "auto / best fixed method, decoding, shapes-qa".
    """
    suite = ratio["name"].rpartition(", ")[2]
    if suite in QUESTIONS:
        return f"{QUESTIONS[suite]}: decoding, × the best fixed method"
    # A ratio that was missed for the first time has no words yet, so it is given by its name.
    return RATIOS.get((ratio["part"], ratio["name"]), f"{ratio['part']}: {ratio['name']}")


def requests_at_once(results: Path) -> Iterator[str]:
    """Yields ``auto``'s figures over plain decoding's where requests share the target's forwards.

    A first token's ratio is one of seconds, so it is above 1 where ``auto`` is the slower one.
    """
    names = [processor.name for processor in PROCESSORS]
    heads = [f"{name}: {what}" for name in names for what in ("tokens a second", "first token")]
    yield f"| requests at once | {' | '.join(heads)} |"
    yield "|-:|" + "-|" * len(heads)
    runs = [
        _runs_by_requests(_stored_json(results / f"pool{each.suffix}.json")) for each in PROCESSORS
    ]
    for requests in runs[0]:
        cells = []
        for run in runs:
            auto = run[requests][AUTO]
            plain = run[requests][BASELINE]
            cells += [
                f"{auto[measure] / plain[measure]:.2f}"
                for measure in ("tokens_per_second", "first_token")
            ]
        yield f"| {requests} | {' | '.join(cells)} |"


def _runs_by_requests(pool: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Returns the stored runs by the number of requests at once, then by method."""
    runs: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in pool:
        runs.setdefault(run["rows"], {})[run["method"]] = run
    return runs


def beside_peers(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields the medians of every engine on one clip, without those that could not run."""
    yield "| engine | first token, s | decoding, tokens/s | whole, tokens/s | × `generate`, whole |"
    yield "|-|-:|-:|-:|-:|"
    measured = {row.name: _medians(stored, row.name) for row in peers.ROWS}
    base = measured[peers.GENERATE]
    assert base is not None
    for name, row in measured.items():
        if row is not None:
            ratio = row["whole"] / base["whole"]
            cells = f"{row['first']:.2f} | {row['decode']:.0f} | {row['whole']:.0f} | {ratio:.2f}"
            yield f"| {name} | {cells} |"


def _medians(stored: Mapping[str, Any], name: str) -> dict[str, float] | None:
    """Returns the median figures of the engine in this row; None if it could not run."""
    turns = [
        peers.figures(peers.Turn(tuple(run["ids"]), run["first"], run["total"], run["early"]))
        for run in stored["runs"]
        if run["row"] == name
    ]
    if not turns:
        return None
    return {measure: median(turn[measure] for turn in turns) for measure in turns[0]}


def real_weights(stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields each method's tau and speedup on weights that others trained: medians over documents.

    Only a draft on a tenth of a document is here; docs/results/real.md has the other shares.
    """
    yield "| method | tau, 95 % | decoding, × plain |"
    yield "|-|-|-:|"
    rows: Sequence[Mapping[str, Any]] = stored["measured"]
    plain = {row["document"]: row for row in rows if row["method"] == BASELINE}
    methods = dict.fromkeys(row["method"] for row in rows)
    for method in (each for each in methods if each == BASELINE or each.endswith("keep=0.1")):
        own = [row for row in rows if row["method"] == method]
        interval = measures.interval([row["tau"] for row in own])
        assert interval is not None
        speed = median(
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"] for row in own
        )
        yield f"| `{method}` | {'{:.2f} [{:.2f}, {:.2f}]'.format(*interval)} | {speed:.2f} |"


def _stored_json(path: Path) -> Any:
    return json.loads(path.read_text())
