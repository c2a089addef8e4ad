"""Measures a real target with its real draft, and writes the section of the page about them.

``python -m lab real-pair`` asks the pair two kinds of questions without a document, about code and
prose, and questions about documents of some thousand tokens. A ``Document`` here is any of these,
and its name begins with its kind, such as ``code: 3``. A row is the stored result of one method on
one of them (``MethodResult``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

from lab.real.answers import (
    PROMPT_CACHE_BYTES,
    MethodResult,
    Results,
    answer_documents,
    model_inputs,
)
from lab.real.long_documents import Document, repeated_share, shortest_documents
from saccade.bench import peers
from saccade.bench.measures import interval
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.model.prefix_cache import PrefixCache

Row = Mapping[str, Any]
# "measured" are the rows that are timed. "identity" are rows of short answers in float32, which
# show whether a method's answer is that of ``generate()``.
ROW_KINDS = "measured", "identity"
# Kinds of questions.
KINDS = "code", "prose", "document"
GENERATE, PLAIN, AUTO = "hf", "ar", "auto"
METHODS = (
    *("ar", "auto", "sd", "sd/shape=chain-3", "sd-tree", "sage", "lookup"),
    *("specvlm", "streaming/keep=0.25", "std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25"),
)
# These methods draft from a part of a document. Where there is none, they would draft from all that
# the target reads, so they are left out.
DOCUMENT_METHODS = frozenset(
    ("specvlm", "streaming/keep=0.25", "std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25")
)
# Documents beyond the shortest few are answered by these alone, since each answer takes long.
FURTHER_DOCUMENT_METHODS = frozenset({"ar", "auto", "sd", "sd/shape=chain-3", "lookup"})
PARTLY_ANSWERED = (
    " The shortest documents are answered by every method, and the others by a few, so ratios of "
    "different methods there are over different documents."
)
WARM_UP = Document("warm-up", "", "Say hello, and count to ten.", tokens=0)
CODE_TASKS = (
    "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    "Write a Python class for a least-recently-used cache with get and put, and explain it.",
    "Write a SQL query for the three customers with the highest total of orders in each country.",
    "Write a Python function that parses an ISO 8601 date without a library, and raises errors.",
    "Write a C function that reverses a linked list in place, and a small main that tests it.",
    "Write a JavaScript function that debounces another function, with an example of its use.",
    "Write pytest tests for a function slugify(text) that makes URL slugs.",
    "Refactor this into a comprehension: result = []\nfor x in xs:\n    if x > 0:\n        "
    "result.append(x * x)",
    "Write a bash script that moves files older than thirty days into an archive folder.",
    "Write a Go function that counts the words of a file and returns the ten most frequent.",
    "Write a Rust enum for shapes, with a method that returns the area.",
    "Write a Java class for a bank account that refuses to go below zero.",
    "Write a CSS grid of three columns that becomes one column on a phone.",
    "Write a Python context manager that measures the time of its block and logs it.",
    "Write a TypeScript type for a tree of comments, and a function that counts them.",
    "Write a Python script with argparse that converts a CSV file to JSON.",
    "Write a regular expression for dates such as 2024-05-31, and a Python function that uses it.",
    "Explain what this does and mend it: def f(x, acc=[]): acc.append(x); return acc",
    "Write a Makefile for a C program of three source files.",
    "Implement Dijkstra's shortest paths in Python with a heap.",
)
PROSE_TASKS = (
    "Explain to a child why the sky is blue.",
    "Describe a walk through an old harbour town in winter.",
    "What should somebody consider before adopting a dog?",
    "Write a short letter in which a tenant asks for a repair of the heating.",
    "Compare travelling by train and by plane within Europe.",
    "Tell the story of a lighthouse keeper who finds a message in a bottle.",
    "What made the printing press so important?",
    "Give advice to somebody who has a job interview tomorrow.",
    "Why do the tides follow the moon?",
    "Describe the kitchen of a grandmother who bakes bread.",
    "What are the arguments for and against homework?",
    "Write a toast for the wedding of two friends who met at a chess club.",
    "How does a vaccine protect somebody?",
    "Tell a fable about a fox and a clock.",
    "What can a town do for people who ride bicycles?",
    "Summarise what happened in the French Revolution.",
    "Explain compound interest to somebody who has never saved money.",
    "Describe the sounds of a forest at night.",
    "Which qualities does a good teacher have?",
    "Write a postcard from a mountain hut.",
)


def pair_documents(
    texts: Sequence[Document], limit: int | None, document_limit: int | None
) -> list[Document]:
    """Returns the questions about code and prose in turn, then those about documents.

    There are at most ``limit`` of code and as many of prose, and the ``document_limit`` shortest of
    ``texts``. None means all.
    """
    tasks = zip(CODE_TASKS, PROSE_TASKS, strict=True)
    questions = [
        Document(f"{kind}: {number}", "", task, tokens=0)
        for number, pair in enumerate(islice(tasks, limit), start=1)
        for kind, task in zip(("code", "prose"), pair, strict=True)
    ]
    read = [
        Document(f"document: {each.name}", each.text, each.task, each.tokens)
        for each in shortest_documents(texts, document_limit)
    ]
    return [*questions, *read]


def measure_pair(
    target: Loaded,
    draft: Loaded | None,
    documents: Sequence[Document],
    names: Sequence[str],
    settings: Mapping[str, Any],
    results: Results,
    kind: str,
    on_progress: Callable[[str], None],
    few: int | None = None,
    runs: int = 1,
) -> None:
    """Adds the rows of this kind of ``ROW_KINDS`` that ``results`` lack.

    They are those of ``generate()`` and of the methods in ``names``. Methods that draft from a part
    of a document answer no other questions. The ``few`` shortest documents (all of them if it is
    None) are answered by every method, and longer ones by ``FURTHER_DOCUMENT_METHODS``. The methods
    take turns in going first. Without a document every method reads the prompt anew, so that whole
    answers can be timed. A document is read once for all methods, and once more by ``generate()``.
    Every method answers ``runs`` times, and the last answer counts. ``generate()`` answers once.
    """
    backbone = None if draft is None else draft.backbone
    is_warm = False
    texts = [document for document in documents if document.text]
    further = {each.name for each in texts} - {each.name for each in shortest_documents(texts, few)}
    for number, document in enumerate(documents):
        own_names = methods_for(kind_of(document.name), names)
        if document.name in further:
            own_names = [name for name in own_names if name in FURTHER_DOCUMENT_METHODS]
        missing = results.missing(document, [GENERATE, *own_names], kind)
        if not missing:
            continue
        # Before anything is timed, `generate()` and the methods of the first question that lacks
        # rows answer a short question.
        if not is_warm:
            _generate(target, WARM_UP, settings)
            for name in own_names:
                _answer(target, backbone, WARM_UP, name, settings, (), None)
            is_warm = True
        on_progress(f"{document.name}, {number + 1} of {len(documents)}")
        if GENERATE in missing:
            run = _generate(target, document, settings)
            results.reference(document, lambda ids=run.ids: ids, kind)
            results.add([_generate_row(document, run)], kind)
        # Its ids were stored when ``generate()`` answered, so the empty tuple is never used.
        reference = results.reference(document, tuple, kind)
        cache = PrefixCache(PROMPT_CACHE_BYTES) if document.text else None
        start = number % max(1, len(own_names))
        for name in (*own_names[start:], *own_names[:start]):
            if name in missing:
                on_progress(f"{document.name}, {number + 1} of {len(documents)}, {name}")
                rows = [
                    _answer(target, backbone, document, name, settings, reference, cache)
                    for _ in range(runs)
                ]
                results.add(rows[-1:], kind)


def _answer(
    target: Loaded,
    draft: Any,
    document: Document,
    name: str,
    settings: Mapping[str, Any],
    reference: tuple[int, ...],
    cache: PrefixCache | None,
) -> MethodResult:
    (row,) = answer_documents(
        target, [document], resolve(name), settings, [reference], cache, draft
    )
    return row


def _generate(target: Loaded, document: Document, settings: Mapping[str, Any]) -> peers.TimedRun:
    return peers.hf(
        target, draft=None, inputs=model_inputs(target, document), settings={**settings}
    )


def _generate_row(document: Document, run: peers.TimedRun) -> MethodResult:
    """Returns the row of ``generate()``, which drafts nothing.

    The length of its prompt is not measured and stands as 0.
    """
    return MethodResult(
        document=document.name,
        digest=document.digest,
        task=document.task,
        prompt_tokens=0,
        method=GENERATE,
        same=True,
        tokens=len(run.ids),
        repeated=repeated_share(run.ids),
        tau=None,
        accepted=None,
        drafted=0.0,
        kept=None,
        decode_seconds=run.decode_seconds,
        seconds=run.total_seconds,
    )


def kind_of(name: str) -> str:
    """Returns the kind of the question with this name."""
    return name.partition(":")[0]


def methods_for(kind: str, names: Sequence[str]) -> list[str]:
    """Returns those of the methods that answer questions of this kind.

    They are all methods for documents, and else those that are not in ``DOCUMENT_METHODS``.
    """
    return [name for name in names if kind == "document" or name not in DOCUMENT_METHODS]


def pair_section(facts: Mapping[str, Any]) -> str:
    """Returns the page's section in Markdown about the pair's stored facts."""
    measured: Sequence[Row] = facts["measured"]
    short: Sequence[Row] = [row for row in facts["identity"] if row["method"] != GENERATE]
    same = sum(row["same"] for row in short)
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    lines = [
        "## A target with its draft",
        "",
        f"{facts['model']}; {settings}. {facts['machine']} Made by `{facts['command']}`.",
        "",
        f"In float32, of {len(short)} answers of {facts['identity_tokens']} tokens {same} are "
        "`generate()`'s, token for token. In the precision of the tables below, another order of "
        "additions may decide between two tokens that are as likely; the share of answers that are "
        "the same is in the tables.",
        "",
        "Ratios are of seconds a token on the same prompt: the median over the prompts that a "
        "method answered, and for decoding against `ar` the bootstrap of 95 %. A document's prompt "
        "is read once for all methods, so there is no ratio of whole answers."
        + (PARTLY_ANSWERED if _some_answer_fewer_documents(measured) else ""),
        *_kind_lines(measured),
    ]
    return "\n".join(lines) + "\n"


def _some_answer_fewer_documents(measured: Sequence[Row]) -> bool:
    return len(set(map(len, _rows_by_method(measured, "document").values()))) > 1


def summary_table(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields a short table in Markdown: ``auto`` and the best fixed method on each kind.

    A kind of questions that ``auto`` did not answer has no lines.
    """
    yield (
        "| questions | method | tau | decoding, × plain | decoding, × `generate` | "
        "whole answer, × plain | whole answer, × `generate` |"
    )
    yield "|-|-|-:|-|-:|-:|-:|"
    for kind in KINDS:
        by_method = _rows_by_method(facts["measured"], kind)
        if AUTO not in by_method:
            continue
        plain = by_method[PLAIN]
        generate = by_method[GENERATE]
        best = _best_fixed(by_method)
        for method in (AUTO, best):
            # The names with an underscore are cells that this table leaves out.
            _, tau, _accepted, _same, middle, spread, by_generate, *whole, _rate = _cells(
                method, by_method[method], plain, generate, has_whole=kind != "document"
            )
            low, _, high = spread.partition(" to ")
            name = "`auto`" if method == AUTO else f"`{method}`, the best fixed one"
            cells = [kind, name, tau, f"{middle} [{low}, {high}]", by_generate, *whole]
            yield f"| {' | '.join(cells)} |"


def _rows_by_method(measured: Sequence[Row], kind: str) -> dict[str, dict[str, Row]]:
    """Returns the rows of this kind by method and document."""
    by_method: dict[str, dict[str, Row]] = {}
    for row in measured:
        if kind_of(row["document"]) == kind:
            by_method.setdefault(row["method"], {})[row["document"]] = row
    return by_method


def _kind_lines(measured: Sequence[Row]) -> Iterator[str]:
    for kind in KINDS:
        by_method = _rows_by_method(measured, kind)
        plain = by_method.get(PLAIN)
        generate = by_method.get(GENERATE)
        if not plain or not generate:
            continue
        count = f"{len(plain)} prompt{'s' if len(plain) > 1 else ''}"
        yield from ("", f"### {kind.capitalize()}: {count}", "")
        yield (
            "| method | tau | accepted | same | decoding × `ar` | 95 % | decoding × `generate` | "
            "whole × `ar` | whole × `generate` | tokens/s |"
        )
        yield "|-|-|-|-|-|-|-|-|-|-|"
        for method in sorted(by_method, key=_order):
            cells = _cells(method, by_method[method], plain, generate, has_whole=kind != "document")
            yield f"| {' | '.join(cells)} |"
        if AUTO in by_method:
            yield from ("", _auto_line(by_method))


def _order(name: str) -> int:
    order = (GENERATE, *METHODS)
    return order.index(name) if name in order else len(order)


def _seconds(row: Row, measure: str) -> float:
    """Returns a row's seconds a token by ``measure``, which names a field of the row.

    It is "decode_seconds", for the tokens after the first one, or "seconds", for the whole answer.
    """
    if measure == "decode_seconds":
        return row[measure] / max(1, row["tokens"] - 1)
    return row[measure] / row["tokens"]


def _ratios(own: Mapping[str, Row], other: Mapping[str, Row], measure: str) -> list[float]:
    """Returns how many times as fast as ``other`` the method is, for each prompt of both."""
    return [
        _seconds(other[name], measure) / _seconds(row, measure)
        for name, row in own.items()
        if name in other
    ]


def _cells(
    method: str,
    own: Mapping[str, Row],
    plain: Mapping[str, Row],
    generate: Mapping[str, Row],
    has_whole: bool,
) -> list[str]:
    """Returns the cells of a method's line in the table of one kind.

    ``own``, ``plain`` and ``generate`` are the rows of the method, of `ar` and of ``generate()``,
    by document. Tau and the acceptance rate are means over documents, and ratios are medians.
    """
    rows = own.values()
    middle, low, high = interval(_ratios(own, plain, "decode_seconds")) or (0.0, 0.0, 0.0)
    accepted = [row["accepted"] for row in rows if row["accepted"] is not None]
    seconds = sum(row["decode_seconds"] for row in rows)
    rate = sum(row["tokens"] - 1 for row in rows) / seconds
    taus = [row["tau"] for row in rows if row["tau"] is not None]
    same = sum(row["same"] for row in rows)
    whole = [""] * 2
    if has_whole:
        whole = [f"{median(_ratios(own, base, 'seconds')):.2f}" for base in (plain, generate)]
    return [
        f"`{method}`",
        f"{sum(taus) / len(taus):.2f}" if taus else "",
        f"{sum(accepted) / len(accepted):.2f}" if accepted else "",
        f"{same} of {len(own)}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{median(_ratios(own, generate, 'decode_seconds')):.2f}",
        *whole,
        f"{rate:.1f}",
    ]


def _best_fixed(by_method: Mapping[str, Mapping[str, Row]]) -> str:
    """Returns the method, other than ``auto``, with the fewest seconds a token.

    They are summed over prompts, so that each prompt weighs the same. Only methods count that
    answered every prompt that ``auto`` did.
    """
    prompts = by_method[AUTO].keys()
    names = [
        name
        for name, rows in by_method.items()
        if name not in (AUTO, GENERATE) and rows.keys() >= prompts
    ]
    return min(names, key=lambda name: _summed_seconds_per_token(by_method[name]))


def _summed_seconds_per_token(rows: Mapping[str, Row]) -> float:
    """Returns the sum over prompts of the seconds of decoding per token."""
    return sum(_seconds(row, "decode_seconds") for row in rows.values())


def _auto_line(by_method: Mapping[str, Mapping[str, Row]]) -> str:
    """Returns the sentence that compares ``auto`` with plain decoding and the best fixed method.

    It compares their seconds per token, summed over the prompts.
    """
    best = _best_fixed(by_method)
    own = _summed_seconds_per_token(by_method[AUTO])
    by_plain, by_best = (_summed_seconds_per_token(by_method[name]) / own for name in (PLAIN, best))
    return (
        f"Over all of these prompts `auto` decodes {by_plain:.2f} times as fast as `ar`, and "
        f"{by_best:.2f} times as fast as the best fixed method, `{best}`."
    )
