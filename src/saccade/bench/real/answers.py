"""Methods on real weights: answers beside ``generate()``'s, and what has been measured so far."""

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

from saccade.bench.real.looks import Asking, Looked, question
from saccade.bench.suites.texts import Document, repeated
from saccade.core.errors import MethodError
from saccade.core.prompt import CONTEXT
from saccade.core.result import Result
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.costs import bucket, measure
from saccade.engine.generate import stream
from saccade.inputs import Loaded
from saccade.inputs.questions import joined
from saccade.model.backbone import Backbone
from saccade.model.kept import Kept as Prompts

KINDS = "measured", "looked"
KEPT_BYTES = 2**32  # of prompts: what is asked about a document is read once
METHODS = (
    "ar",
    *("std/keep=0.1", "fresh/keep=0.1", "pages/keep=0.1"),
    *("streaming/keep=0.1", "std/view=random/keep=0.1"),
    *("std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25"),
    *("streaming/keep=0.25", "std/view=random/keep=0.25"),
)
HEADER = "<|im_start|>assistant\n"  # what an answer follows in the model's template
# Under it a greedy answer of this model hardly ever repeats itself; without it two fifths of the
# answer do, and any draft guesses a loop (notebook/LOG.md).
PENALTY = 1.1
Settings = Mapping[str, Any]
"""What ``generate()`` and every method are told alike."""
Look = Callable[[Loaded, Document, Sequence[int], Prompts], list[Looked]]


class AnswerPenalty(LogitsProcessor):
    """Keskar et al.'s penalty (2019, CTRL) on tokens that stand in the answer already.

    Hugging Face's counts the prompt's tokens too, so that an answer shuns its document's words.
    """

    def __init__(self, penalty: float, header: Sequence[int]) -> None:
        """``header``: the ids that an answer follows; the first of them begins nothing else."""
        self.penalty = penalty
        self.header = tuple(header)

    def __call__(
        self, ids: Int[Tensor, "batch seen"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        found = scores.clone()
        for text, own in zip(ids, found, strict=True):
            begun = (text == self.header[0]).nonzero()
            said = text[int(begun[-1]) + len(self.header) :].unique() if len(begun) else text[:0]
            said = said[said < len(own)]
            own[said] = torch.where(
                own[said] < 0, own[said] * self.penalty, own[said] / self.penalty
            )
        return found


def settings(model: Loaded, count: int, penalty: float) -> dict[str, Any]:
    """Greedy answers of so many tokens at most that are kept from going round in circles."""
    rule = AnswerPenalty(penalty, model.tokenizer(HEADER)["input_ids"])
    return {
        "max_new_tokens": count,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([rule]),
    }


@dataclass(frozen=True)
class Measured:
    """One document by one method."""

    document: str
    digest: str
    task: str
    prompt_tokens: int
    method: str
    same: bool  # as generate()
    tokens: int
    repeated: float  # the share of the answer's four-grams that stood in it before
    tau: float | None  # tokens a forward of the target, its own included
    accepted: float | None
    drafted: float  # tokens a round
    kept: int | None
    decode_seconds: float
    taken: Sequence[int] = ()  # accepted tokens, forward by forward

    @classmethod
    def of(cls, document: Document, method: str, result: Result, truth: Sequence[int]) -> Measured:
        return cls(
            document.name,
            document.digest,
            document.task,
            result.prompt_tokens,
            method,
            result.ids == tuple(truth),
            len(result.ids),
            repeated(result.ids),
            result.tau,
            result.acceptance_rate,
            sum(len(each.tokens) for each in result.rounds) / max(1, len(result.forwards)),
            result.draft_visual_tokens,
            result.timings.decode,
            tuple(len(each.accepted) for each in result.forwards),
        )


def truth(
    model: Loaded, document: Document, settings: Settings, ask: Asking = question
) -> tuple[int, ...]:
    """What ``generate()`` says of the document."""
    inputs = ask(model, document)
    own = {name: value for name, value in inputs.items() if name != CONTEXT}
    length = inputs["input_ids"].shape[1]
    return tuple(model.backbone.model.generate(**own, **settings)[0, length:].tolist())


def answers(
    model: Loaded,
    documents: Sequence[Document],
    recipe: Recipe,
    settings: Settings,
    truths: Sequence[tuple[int, ...]],
    kept: Prompts,
    draft: Backbone | None = None,
    ask: Asking = question,
) -> list[Measured]:
    """How one method said it, of several documents in shared forwards; ``kept`` holds the prompts
    that were read before. Raises MethodError where a draft gave up: a wrong number."""
    target = model.backbone.keeping(kept)
    inputs = joined(model, [ask(model, document) for document in documents])
    results = stream(target, inputs, method=recipe, draft=draft, **settings).finish()
    if why := next((each.fallback_reason for each in results if each.fallback_reason), None):
        raise MethodError(f"{recipe.name}: {why}")
    return [
        Measured.of(document, recipe.name, result, truth)
        for document, result, truth in zip(documents, results, truths, strict=True)
    ]


class Results:
    """What has been measured so far, in a file where one is named: a run that was cut short goes on
    from there, as long as the settings and a document's text are the same."""

    def __init__(
        self, path: Path | None, facts: Mapping[str, Any], kinds: Sequence[str] = KINDS
    ) -> None:
        """``kinds``: of rows."""
        self._path = path
        self.facts: dict[str, Any] = {**facts, "truths": {}, **{kind: [] for kind in kinds}}
        if path is None or not path.is_file():
            return
        found = json.loads(path.read_text())
        same = all(found.get(name) == facts[name] for name in ("model", "settings"))
        if same and found.get("together") == facts["together"]:
            self.facts.update({name: found[name] for name in ("truths", *kinds)})

    def missing(self, document: Document, methods: Sequence[str]) -> list[str]:
        """The methods that have not answered about a document."""
        done = {row["method"] for row in self.facts["measured"] if _of(row, document)}
        return [method for method in methods if method not in done]

    def looked(self, document: Document) -> bool:
        return any(_of(row, document) for row in self.facts["looked"])

    def truth(self, document: Document, say: Callable[[], Sequence[int]]) -> tuple[int, ...]:
        """What ``generate()`` said of a document, asked once."""
        if document.digest not in self.facts["truths"]:
            self.facts["truths"][document.digest] = list(say())
            self._write()
        return tuple(self.facts["truths"][document.digest])

    def add(self, rows: Sequence[Any], kind: str) -> None:
        self.facts[kind] += [asdict(row) for row in rows]
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            fresh = self._path.with_suffix(".part")
            fresh.write_text(_lines(self.facts) + "\n")
            fresh.replace(self._path)

    def only(self, documents: Sequence[Document], methods: Sequence[str]) -> dict[str, Any]:
        """The facts with the rows of these alone, in their order."""
        measured, looked = self.facts["measured"], self.facts["looked"]
        return {
            **self.facts,
            "measured": [
                row
                for document in documents
                for method in methods
                for row in measured
                if _of(row, document) and row["method"] == method
            ],
            "looked": [row for each in documents for row in looked if _of(row, each)],
        }


def costs(model: Loaded, tokens: int) -> dict[str, Any]:
    """Seconds of the target's forwards by rows, over about so many keys."""
    target, context = model.backbone, bucket(tokens)
    found = measure(target, target, context=context, draft_context=context)
    return {"context": context, "rows": found.rows, "seconds": found.target}


def over(
    model: Loaded,
    documents: Sequence[Document],
    recipes: Sequence[Recipe],
    settings: Settings,
    results: Results,
    *,
    together: int,
    look: Look | None = None,
    draft: Backbone | None = None,
    ask: Asking = question,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """What ``results`` lack of these documents by these methods, and where the target looks."""
    kept = Prompts(KEPT_BYTES)
    for start in range(0, len(documents), together):
        group = documents[start : start + together]
        wanted = [r for r in recipes if any(results.missing(each, [r.name]) for each in group)]
        unseen = [each for each in group if look and not results.looked(each)]
        if not wanted and not unseen:
            continue
        where = f"{group[0].name}, {start + 1} of {len(documents)}"
        tell(where)
        truths = [results.truth(each, partial(truth, model, each, settings, ask)) for each in group]
        for recipe in wanted:
            tell(f"{where}, {recipe.name}")
            results.add(
                answers(model, group, recipe, settings, truths, kept, draft, ask), "measured"
            )
        for each, said in zip(group, truths, strict=True):
            if look and each in unseen:
                tell(f"{each.name}: where the target looks")
                results.add(look(model, each, said, kept), "looked")
        kept.clear()


def _lines(facts: Mapping[str, Any]) -> str:
    """JSON with a row a line, so that a file of them can be read and compared."""
    told = {
        name: "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        if isinstance(value, list) and value
        else json.dumps(value)
        for name, value in facts.items()
    }
    return "{\n " + ",\n ".join(f"{json.dumps(k)}: {v}" for k, v in told.items()) + "\n}"


def _of(row: Mapping[str, Any], document: Document) -> bool:
    return (row["document"], row["digest"]) == (document.name, document.digest)
