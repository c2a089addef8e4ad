"""A real target with its real draft: the questions, the methods, and the section of the page.

A row's document is named ``KIND: ...`` by its kind: code and prose are questions without a
document, and documents are texts of some thousand tokens that views and self-drafts prune.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.real.long_documents import Document
from saccade.bench.measures import interval

Row = Mapping[str, Any]
ROW_KINDS = "measured", "identity"
KINDS = "code", "prose", "document"
METHODS = (
    *("ar", "auto", "sd", "sd/shape=chain-3", "sd-tree", "sage", "lookup", "sd/shape=fit"),
    *("specvlm", "streaming/keep=0.25", "std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25"),
)
# Without a document these methods draft with all that the target reads, so they are left out.
DOCUMENT_METHODS = frozenset(METHODS[8:])
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
)


def pair_documents(texts: Sequence[Document], limit: int | None) -> list[Document]:
    """Returns the questions of every kind, at most ``limit`` of each."""
    tasks = {"code": CODE_TASKS, "prose": PROSE_TASKS}
    questions = [
        Document(f"{kind}: {number}", "", task, 0)
        for kind, own in tasks.items()
        for number, task in enumerate(own[:limit], start=1)
    ]
    read = [
        Document(f"document: {each.name}", each.text, each.task, each.tokens)
        for each in texts[:limit]
    ]
    return [*questions, *read]


def kind_of(name: str) -> str:
    """Returns the kind of the question with this name."""
    return name.partition(":")[0]


def methods_for(kind: str, names: Sequence[str]) -> list[str]:
    """Returns those of the methods that have something to draft with for this kind."""
    return [name for name in names if kind == "document" or name not in DOCUMENT_METHODS]


def pair_section(facts: Mapping[str, Any]) -> str:
    """Returns the page's section in Markdown about the pair's stored facts."""
    measured: Sequence[Row] = facts["measured"]
    short: Sequence[Row] = facts["identity"]
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
        *_kind_lines(measured),
    ]
    return "\n".join(lines) + "\n"


def _kind_lines(measured: Sequence[Row]) -> Iterator[str]:
    for kind in KINDS:
        rows = [row for row in measured if kind_of(row["document"]) == kind]
        plain = {row["document"]: row["decode_seconds"] for row in rows if row["method"] == "ar"}
        if not plain:
            continue
        yield from ("", f"### {kind.capitalize()}: {len(plain)} prompts", "")
        yield "Speed is of decoding, against `ar` on the same prompt: median and bootstrap."
        yield from ("", "| method | tau | accepted | same | tokens/s | speed | 95 % |")
        yield "|-|-|-|-|-|-|-|"
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method]
            yield f"| `{method}` | {_cells(own, plain)} |"


def _cells(rows: Sequence[Row], plain: Mapping[str, float]) -> str:
    timed = [row for row in rows if row["decode_seconds"] and row["document"] in plain]
    speeds = interval([plain[row["document"]] / row["decode_seconds"] for row in timed])
    middle, low, high = speeds or (0.0, 0.0, 0.0)
    accepted = [row["accepted"] for row in rows if row["accepted"] is not None]
    seconds = sum(row["decode_seconds"] for row in timed)
    rate = sum(row["tokens"] - 1 for row in timed) / seconds if seconds else 0.0
    share = f"{sum(accepted) / len(accepted):.2f}" if accepted else ""
    tau = sum(row["tau"] or 0.0 for row in rows) / len(rows)
    same = sum(row["same"] for row in rows)
    return (
        f"{tau:.2f} | {share} | {same} of {len(rows)} | {rate:.1f} | {middle:.2f} | "
        f"{low:.2f} to {high:.2f}"
    )
