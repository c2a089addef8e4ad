"""Runs SAGE and SpecVLM on a language model that others trained, with a draft model beside it.

SAGE's text-only pair is Llama-3 8B with 1B, on GSM8K and HumanEval (Table 4). This study has only
the one size of its language model, so we make the draft: it is the target with its weights rounded
to a few bits, and has its own cache. Because it costs what the target costs, acceptance is measured
and not speed. In place of GSM8K and HumanEval there are sums and functions to write of our own;
further questions are about long documents.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lab.real.attention_sets import document_inputs
from lab.real.long_documents import Document
from lab.studies.experiment import interval_over_clips
from lab.studies.sage import draft_entropies
from lab.training import agreement
from saccade.drafting.views.basic import FULL
from saccade.inputs import Loaded
from saccade.model.backbone import Backbone

Row = Mapping[str, Any]
BITS = 4  # Of a weight of the draft.
GROUP = 64  # How many weights, one after the other in a row, are rounded to the same levels.
SUMS, CODE = "sums", "functions"  # The two tasks without a document.
SHARES = (0.5, 0.1)  # Of the document's tokens, which the draft reads.
# Our methods, with their words in the page's tables.
METHODS_OVER_DOCUMENTS = {
    "sd": "chain of 5",
    "sd-tree": "SpecVLM's static tree",
    **{f"sd-tree/view=random/keep={keep:g}": f"a random {keep:.0%}" for keep in SHARES},
    "sd-tree/view=none": "none of the document",
    **{f"specvlm/keep={keep:g}": f"SpecVLM's {keep:.0%}" for keep in SHARES},
    "specvlm/keep=0.1/shape=chain-5": "SpecVLM's 10%, a chain of 5",
    "specvlm/keep=0.1/view=uniform": "an even 10%: none of stage I",
    "specvlm/keep=0.1/view=attention": "the most attended 10%: none of stage II",
    "sage": "SAGE over SpecVLM's 10%",
    "sage/rule=formal": "by the formal rule",
    "sage/shape=sage-ahead/rule=formal": "planned whole, formal",
    "sage/shape=sage-live/rule=formal": "from live laws, formal",
    "sage/keep=1": "SAGE over all of it",
    "specvlm-self": "the target itself over SpecVLM's 10%, static tree",
    "specvlm-self/shape=sage": "the same, SAGE's tree",
    "layerskip": "the target's first half, a chain of 9",
}
METHODS_WITHOUT_DOCUMENT = {
    "sd": "native SD: a chain of 5",
    "sd-tree": "a static tree",
    "sd/shape=sage": "SAGE",
    "sd/shape=sage/rule=formal": "SAGE, the formal rule",
    "layerskip": "the first half of the layers, a chain of 9",
    "lookup": "prompt lookup",
}
STEP_BY_STEP = " Think step by step."
_SUMS = (
    "A baker makes 24 rolls and sells them in bags of 4 for 3 euros a bag. What does she earn?",
    "Tom reads 15 pages a day. After how many days has he read a book of 240 pages?",
    "A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive?",
    "Three friends share a bill of 57 euros and leave a tip of 6 euros. What does each one pay?",
    "A garden is 12 metres long and 7 metres wide. How long is a fence around it?",
    "Anna has twice as many stamps as Ben, and together they have 96. How many has Anna?",
    "A shirt of 40 euros costs a quarter less in the sale. What does it cost now?",
    "A tank of 180 litres is filled by 12 litres a minute. How long does it take to fill it?",
    "A class of 28 pupils goes to the museum. Each pays 5 euros, the bus costs 90. What is left?",
    "A farmer has 9 hens that lay 5 eggs a week each. How many eggs are that in 4 weeks?",
    "A cyclist rides 18 kilometres an hour. How far does she get in 2 hours and 30 minutes?",
    "A box holds 6 cups and weighs 2 kilos. What do 42 cups weigh in their boxes?",
)
# Each of these continues the sentence "Write a Python function `".
_CODE = (
    "second_largest(numbers)` that returns the second largest number of a list",
    "is_palindrome(text)` that ignores case and everything that is not a letter",
    "word_counts(text)` that returns how often each word occurs, as a dictionary",
    "flatten(nested)` that turns a list of lists of any depth into one list",
    "primes_below(limit)` that returns all primes below a limit by the sieve",
    "roman(number)` that writes a number from 1 to 3999 in Roman numerals",
    "merge(first, second)` that merges two sorted lists into one sorted list",
    "rotate(matrix)` that turns a square matrix clockwise by 90 degrees",
    "longest_run(values)` that returns the length of the longest run of equal values",
    "balanced(text)` that says whether the brackets of a text are balanced",
    "binary_search(values, wanted)` that returns the place of a value in a sorted list, or -1",
    "transpose(rows)` that turns the rows of a table into its columns",
)
# The questions without a document, as documents of no text.
TASKS: Mapping[str, Sequence[Document]] = {
    SUMS: [
        Document(f"{SUMS} {i}", "", each + STEP_BY_STEP, tokens=0) for i, each in enumerate(_SUMS)
    ],
    CODE: [
        Document(f"{CODE} {i}", "", f"Write a Python function `{each}, with a docstring.", tokens=0)
        for i, each in enumerate(_CODE)
    ],
}


# -- The draft -----------------------------------------------------------------------------------


def rounded_draft(model: Loaded, bits: int = BITS, group: int = GROUP) -> Loaded:
    """Returns a copy of a model with the weights of its layers rounded.

    Embeddings and the head stay as they are.
    """
    copied: Any = copy.deepcopy(model.backbone.model)
    head = copied.get_output_embeddings()
    with torch.no_grad():
        for module in copied.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.weight.copy_(_rounded_weights(module.weight, bits, group))
    return replace(model, name=f"{model.name} in {bits} bits", backbone=Backbone(copied))


def _rounded_weights(weight: Tensor, bits: int, group: int) -> Tensor:
    """Rounds each group of a row to 2**bits even levels from its smallest to its largest weight.

    ``weight`` is [out, in], where "in" has to be a multiple of ``group``.
    """
    rows = weight.reshape(-1, group)
    low, high = rows.aminmax(dim=1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(rows.dtype).tiny)
    return (((rows - low) / step).round() * step + low).view_as(weight)


@dataclass(frozen=True)
class DraftEntropies:
    """SAGE's entropy H (Eq. 8) of the draft's distribution at each token of the target's answer."""

    document: str  # The document's name.
    digest: str  # Of the document's text and task.
    entropies: list[float]  # One for each token of the answer.


def measure_entropies(
    model: Loaded, draft: Loaded, document: Document, answer: Sequence[int]
) -> DraftEntropies:
    """Returns the draft's entropy at each token of the target's ``answer`` to the document's task.

    The draft reads all that the target reads.
    """
    prefill = agreement.prefill_with_attention(model.backbone, document_inputs(model, document))
    logits = agreement.draft_logits(draft, model, prefill, FULL, answer)
    return DraftEntropies(document.name, document.digest, draft_entropies(logits))


# -- The page ------------------------------------------------------------------------------------


def rows_by_task(measured: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows by what they are about: ``SUMS``, ``CODE`` or "documents"."""
    rows: dict[str, list[Row]] = {SUMS: [], CODE: [], "documents": []}
    for row in measured:
        # The task's name is the first part of a name such as "sums 3".
        kind = row["document"].rpartition(" ")[0]
        rows[kind if kind in TASKS else "documents"].append(row)
    return rows


def accepted_by_document(
    rows: Sequence[Row], method: str, first: int | None = None
) -> dict[str, float]:
    """Returns a method's accepted tokens per forward, by document.

    If ``first`` is given, only the rounds count that begin within ``first`` tokens of the answer.
    The answer's first token, which comes with the prefill, is not counted in these.
    """
    accepted = {}
    for row in rows:
        if row["method"] == method:
            lengths, answer_length = [], 0
            for length in row["taken"]:
                if first is None or answer_length < first:
                    lengths.append(length)
                    answer_length += length + 1  # The target adds a token of its own.
            accepted[row["document"]] = fmean(lengths)
    return dict(sorted(accepted.items()))


def page(stored: Mapping[str, Any]) -> str:
    """Returns the page in Markdown, from what :class:`~lab.real.answers.Results` has."""
    measured: Sequence[Row] = stored["measured"]
    settings_text = ", ".join(f"{name}={value}" for name, value in stored["settings"].items())
    by_task = rows_by_task(measured)
    count = {name: len({row["document"] for row in rows}) for name, rows in by_task.items()}
    lines = [
        "# A draft model on real weights",
        "",
        f"This page measures {stored['model']} with a draft that is the same network, with its "
        f"layers' weights rounded to {BITS} bits in groups of {GROUP}. There are {count[SUMS]} "
        f"sums and {count[CODE]} functions to write without a document, and {count['documents']} "
        f"documents; {settings_text}. The draft costs what its target costs, so tokens are counted "
        "and no seconds.",
        "",
        f"Made by `{stored['command']}`. Of {len(measured)} answers "
        f"{sum(row['same'] for row in measured)} are `generate()`'s, token for token.",
        "",
        "*Accepted* is accepted draft tokens per forward of the target, without the target's own "
        "(SAGE's and SpecVLM's tau): the mean with its 95 % bootstrap interval over questions. "
        "*Less* is the difference on the same question. Nodes are those of a round's draft.",
        "",
        "## Without a document (SAGE, Table 4)",
        "",
    ]
    for name in (SUMS, CODE):
        lines += [*_table(name, by_task[name], METHODS_WITHOUT_DOCUMENT, "sd"), ""]
    lines += ["## Over documents", ""]
    lines += _table("documents", by_task["documents"], METHODS_OVER_DOCUMENTS, "specvlm/keep=0.1")
    return "\n".join(lines) + "\n"


def _table(name: str, rows: Sequence[Row], methods: Mapping[str, str], base: str) -> Iterator[str]:
    """Yields the lines of a task's table, in which methods are compared with ``base``."""
    yield f"| {name} | | accepted | less `{base}` | nodes |"
    yield "|-|-|-|-|-|"
    base_accepted = accepted_by_document(rows, base)
    for method, about in methods.items():
        own = accepted_by_document(rows, method)
        if not own:
            continue
        nodes = fmean(row["drafted"] for row in rows if row["method"] == method)
        less = [own[each] - base_accepted[each] for each in own if each in base_accepted]
        gain = _interval_text(less) if less and method != base else ""
        accepted = _interval_text(list(own.values()))
        yield f"| `{method}` | {about} | {accepted} | {gain} | {nodes:.1f} |"


def _interval_text(values: Sequence[float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval_over_clips(values))
