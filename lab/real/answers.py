"""Runs methods on real weights beside ``generate()``, and stores what has been measured so far.

The studies of real weights (``python -m lab real``, ``text``, ``seeing``) share this. A method's
answer about a document is compared with that of transformers' ``generate()``, the reference. Two
kinds of rows are stored: "measured" rows have a method's answer, and "looked" rows what else was
measured along ``generate()``'s answer: where in the document the target attends
(``attention_sets.py``), or in the study ``text`` the draft's entropies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from lab.real.attention_sets import AttentionShare, MakeInputs, document_inputs
from lab.real.long_documents import Document, repeated_share
from saccade.core.errors import MethodError
from saccade.core.prompt import DOCUMENT_MASK
from saccade.core.result import Result
from saccade.core.sampling import Stateless
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.cost_measurement import context_bucket, measure_costs
from saccade.engine.generate import stream
from saccade.inputs import Loaded
from saccade.inputs.questions import batch_inputs
from saccade.model.backbone import Backbone
from saccade.model.prefix_cache import PrefixCache

ROW_KINDS = "measured", "looked"
PROMPT_CACHE_BYTES = 2**32  # So that every document's prompt is prefilled once.
METHODS = (
    "ar",
    *("std/keep=0.1", "fresh/keep=0.1", "pages/keep=0.1"),
    *("streaming/keep=0.1", "std/view=random/keep=0.1"),
    *("std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25"),
    *("streaming/keep=0.25", "std/view=random/keep=0.25"),
)
ANSWER_HEADER = "<|im_start|>assistant\n"  # The text before an answer in the model's template.
# With this penalty a greedy answer of SmolLM2, the model of these studies, hardly ever repeats
# itself. Without it two fifths of an answer repeat what was said before, and any draft predicts a
# repetition.
REPETITION_PENALTY = 1.1
Settings = Mapping[str, Any]
"""The arguments that ``generate()`` and every method share."""
MeasureAttention = Callable[[Loaded, Document, Sequence[int], PrefixCache], list[AttentionShare]]
"""From a model, a document, the ids of its answer and the prompt cache to the "looked" rows."""


class AnswerPenalty(LogitsProcessor):
    """Keskar et al.'s repetition penalty (2019, CTRL), for tokens of the answer alone.

    Hugging Face's processor penalizes the prompt's tokens too, so that an answer would avoid the
    words of its document.
    """

    def __init__(self, penalty: float, header: Sequence[int]) -> None:
        """``header`` has the ids directly before an answer.

        The answer is found behind the last place of the header's first id, so no answer may contain
        that id.
        """
        self.penalty = penalty
        self.header = tuple(header)

    def __call__(
        self, ids: Int[Tensor, "batch seen"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        penalized = scores.clone()
        for text, row in zip(ids, penalized, strict=True):
            header_places = (text == self.header[0]).nonzero()
            answer_tokens = text[:0]
            if len(header_places):
                answer_tokens = text[int(header_places[-1]) + len(self.header) :].unique()
            # Ids for which there is no score are left out.
            answer_tokens = answer_tokens[answer_tokens < len(row)]
            row[answer_tokens] = torch.where(
                row[answer_tokens] < 0,
                row[answer_tokens] * self.penalty,
                row[answer_tokens] / self.penalty,
            )
        return penalized


def answer_settings(model: Loaded, count: int, penalty: float) -> dict[str, Any]:
    """Returns the settings of greedy answers of at most ``count`` tokens that do not loop."""
    rule = AnswerPenalty(penalty, model.tokenizer(ANSWER_HEADER)["input_ids"])
    return {
        "max_new_tokens": count,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([Stateless(rule)]),
    }


@dataclass(frozen=True)
class MethodResult:
    """One method's answer about one document. The field names are those of the stored rows."""

    document: str  # The document's name.
    digest: str  # Of the document's text and task.
    task: str
    prompt_tokens: int
    method: str
    same: bool  # Whether the answer is ``generate()``'s.
    tokens: int  # Of the answer.
    repeated: float  # The share of the answer's four-grams that occurred in it before.
    tau: float | None  # Tokens per target forward.
    accepted: float | None  # The acceptance rate.
    drafted: float  # Drafted tokens per target forward.
    kept: int | None  # How many of the document's tokens the draft reads.
    decode_seconds: float
    taken: Sequence[int] = ()  # The number of accepted tokens of each target forward.
    seconds: float = 0.0  # Of the whole answer, without the prefill of a prompt from the cache.

    @classmethod
    def of(
        cls, document: Document, method: str, result: Result, reference: Sequence[int]
    ) -> MethodResult:
        return cls(
            document.name,
            document.digest,
            document.task,
            result.prompt_tokens,
            method,
            result.ids == tuple(reference),
            len(result.ids),
            repeated_share(result.ids),
            result.tau,
            result.acceptance_rate,
            sum(len(each.tokens) for each in result.rounds) / max(1, len(result.forwards)),
            result.draft_visual_tokens,
            result.timings.decode,
            tuple(len(each.accepted) for each in result.forwards),
            result.timings.total,
        )


def model_inputs(
    model: Loaded, document: Document, ask: MakeInputs = document_inputs
) -> dict[str, Any]:
    """Returns the inputs about a document as ``generate()`` takes them.

    ``DOCUMENT_MASK`` is left out: it marks the document's tokens for our views alone.
    """
    return {name: value for name, value in ask(model, document).items() if name != DOCUMENT_MASK}


def generate_reference(
    model: Loaded, document: Document, settings: Settings, ask: MakeInputs = document_inputs
) -> tuple[int, ...]:
    """Returns the ids of ``generate()``'s answer about the document."""
    inputs = model_inputs(model, document, ask)
    length = inputs["input_ids"].shape[1]
    return tuple(model.backbone.model.generate(**inputs, **settings)[0, length:].tolist())


def answer_documents(
    model: Loaded,
    documents: Sequence[Document],
    recipe: Recipe,
    settings: Settings,
    references: Sequence[tuple[int, ...]],
    prompt_cache: PrefixCache | None,
    draft: Backbone | None = None,
    ask: MakeInputs = document_inputs,
) -> list[MethodResult]:
    """Returns one method's answers about several documents, decoded in one batch.

    ``references`` are ``generate()``'s answers, in the order of the documents. ``prompt_cache`` has
    the prompts that were prefilled before; if it is None, every prompt is prefilled. Raises
    MethodError where drafting fell back to plain decoding, because the numbers would be wrong.
    """
    target = model.backbone
    if prompt_cache is not None:
        target = target.with_prefix_cache(prompt_cache)
    inputs = batch_inputs(model, [ask(model, document) for document in documents])
    results = stream(target, inputs, method=recipe, draft=draft, **settings).finish()
    if reason := next((each.fallback_reason for each in results if each.fallback_reason), None):
        raise MethodError(f"{recipe.name}: {reason}")
    return [
        MethodResult.of(document, recipe.name, result, reference)
        for document, result, reference in zip(documents, results, references, strict=True)
    ]


class Results:
    """The results of a run so far, which are written to a file after each step if one is named.

    An interrupted run continues from its file if the model, the settings and the size of a batch
    are the same. A stored row counts as long as its document's text and task are the same.
    """

    def __init__(
        self, path: Path | None, facts: Mapping[str, Any], kinds: Sequence[str] = ROW_KINDS
    ) -> None:
        """``facts`` say what is run, and ``kinds`` which kinds of rows there are.

        ``facts`` must have "model", "settings" and "together", the number of documents in a batch.
        """
        self._path = path
        self.facts: dict[str, Any] = {**facts, "truths": {}, **{kind: [] for kind in kinds}}
        if path is None or not path.is_file():
            return
        earlier = json.loads(path.read_text())
        if all(earlier.get(name) == facts[name] for name in ("model", "settings", "together")):
            self.facts.update({name: earlier[name] for name in ("truths", *kinds)})

    def missing(
        self, document: Document, methods: Sequence[str], kind: str = "measured"
    ) -> list[str]:
        """Returns the methods that have no row of this kind about a document."""
        done = {row["method"] for row in self.facts[kind] if _is_row_of(row, document)}
        return [method for method in methods if method not in done]

    def has_attention(self, document: Document) -> bool:
        """Returns whether there is a "looked" row about a document."""
        return any(_is_row_of(row, document) for row in self.facts["looked"])

    def reference(
        self,
        document: Document,
        generate: Callable[[], Sequence[int]],
        kind: str = "measured",
    ) -> tuple[int, ...]:
        """Returns ``generate()``'s answer about a document for rows of this kind.

        ``generate`` is called only if that answer is not stored.
        """
        key = document.digest if kind == "measured" else f"{document.digest} {kind}"
        if key not in self.facts["truths"]:
            self.facts["truths"][key] = list(generate())
            self._write()
        return tuple(self.facts["truths"][key])

    def add(self, rows: Sequence[Any], kind: str) -> None:
        self.facts[kind] += [asdict(row) for row in rows]
        self._write()

    def replace_answers(self, answers: Sequence[MethodResult]) -> None:
        """Adds "measured" rows, each in place of an earlier one of its document and method."""
        replaced = {(each.document, each.digest, each.method) for each in answers}
        self.facts["measured"] = [
            row
            for row in self.facts["measured"]
            if (row["document"], row["digest"], row["method"]) not in replaced
        ]
        self.add(answers, "measured")

    def _write(self) -> None:
        if self._path is not None:
            new_path = self._path.with_suffix(".part")
            new_path.write_text(format_facts(self.facts) + "\n")
            new_path.replace(self._path)

    def only(self, documents: Sequence[Document], methods: Sequence[str]) -> dict[str, Any]:
        """Returns the facts with the rows of these documents and methods alone.

        They are in the order of ``documents``, and for each document in that of ``methods``.
        "looked" rows have no method and are chosen by document.
        """
        measured = self.facts["measured"]
        attention_rows = self.facts["looked"]
        return {
            **self.facts,
            "measured": [
                row
                for document in documents
                for method in methods
                for row in measured
                if _is_row_of(row, document) and row["method"] == method
            ],
            "looked": [
                row for each in documents for row in attention_rows if _is_row_of(row, each)
            ],
        }


def forward_costs(model: Loaded, tokens: int) -> dict[str, Any]:
    """Returns the seconds of the target's forwards over about ``tokens`` cached keys.

    "context" is the exact number of keys, "rows" the numbers of tokens in a forward, and "seconds"
    has the seconds of a forward for each of them.
    """
    target = model.backbone
    context = context_bucket(tokens)
    measured = measure_costs(target, target, context=context, draft_context=context)
    return {"context": context, "rows": measured.rows, "seconds": measured.target}


def run_methods(
    model: Loaded,
    documents: Sequence[Document],
    recipes: Sequence[Recipe],
    settings: Settings,
    results: Results,
    *,
    together: int,
    look: MeasureAttention | None = None,
    draft: Backbone | None = None,
    ask: MakeInputs = document_inputs,
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Measures every method and document that ``results`` do not have yet, and adds the rows.

    If a method's row about one document of a batch is missing, that method answers the whole batch.

    Args:
        model: the target.
        documents: what is answered about; ``together`` of them are one batch.
        recipes: the methods.
        settings: as ``generate()`` takes them.
        results: gets the rows.
        together: the number of documents in a batch.
        look: measures the target's attention along the reference, if that is wanted.
        draft: the draft model, for methods with one.
        ask: makes the inputs about a document.
        on_progress: is called with a line about what is measured next.
    """
    prompt_cache = PrefixCache(PROMPT_CACHE_BYTES)
    for start in range(0, len(documents), together):
        group = documents[start : start + together]
        needed = [r for r in recipes if any(results.missing(each, [r.name]) for each in group)]
        unwatched = [each for each in group if look and not results.has_attention(each)]
        if not needed and not unwatched:
            continue
        progress = f"{group[0].name}, {start + 1} of {len(documents)}"
        on_progress(progress)
        references = [
            results.reference(each, partial(generate_reference, model, each, settings, ask))
            for each in group
        ]
        for recipe in needed:
            on_progress(f"{progress}, {recipe.name}")
            results.replace_answers(
                answer_documents(
                    model, group, recipe, settings, references, prompt_cache, draft, ask
                )
            )
        for each, answer_ids in zip(group, references, strict=True):
            if look and each in unwatched:
                on_progress(f"{each.name}: where the target looks")
                results.add(look(model, each, answer_ids, prompt_cache), "looked")
        prompt_cache.clear()


def format_facts(facts: Mapping[str, Any]) -> str:
    """Returns JSON with one row of a list on each line, so that versions can be compared."""
    lines = {
        name: "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        if isinstance(value, list) and value
        else json.dumps(value)
        for name, value in facts.items()
    }
    return "{\n " + ",\n ".join(f"{json.dumps(k)}: {v}" for k, v in lines.items()) + "\n}"


def _is_row_of(row: Mapping[str, Any], document: Document) -> bool:
    return (row["document"], row["digest"]) == (document.name, document.digest)
