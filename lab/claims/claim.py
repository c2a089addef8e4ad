"""Defines a paper's claim, and the stored runs and figures by which it is judged.

The results lie under ``docs/results``. A run has answers to whole suites of questions, and a figure
has the numbers of one study. ``StoredResults`` turns them into comparisons, always over every suite
of a run and on the same items, and ``lab.claims.rule`` makes a verdict of these. A module for each
paper, such as ``lab.claims.sage``, lists its claims, and compares the figures that store no values
of single clips.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from lab.claims import outdated
from lab.claims.rule import (
    Claimed,
    Finding,
    Premise,
    Suites,
    SuitesMissing,
    Unit,
    Verdict,
    alone,
    judge,
    paired,
)
from saccade.bench import measures, records
from saccade.bench.records import Answer
from saccade.core.errors import OptionError

# A run may be stored with so many seeds: 0 is that of the run NAME, and the others are those of its
# repeats NAME-seed-1 and NAME-seed-2.
SEEDS = 3
CLIPS = "clips"  # The one suite of a figure that compares within one kind of clip.
Turns = Literal["all", "first", "later"]
Measure = Callable[[Answer], float | None]
"""What is measured on one answer; None where the answer is too short to have it."""
Pair = tuple[str, str, str]
"""(what the page calls the comparison, a method, the method that it is compared with)"""


@dataclass(frozen=True)
class AnswerUnit:
    """A unit with the function that measures it on one answer."""

    unit: Unit
    measure: Measure


def _accepted(answer: Answer) -> float:
    """Returns accepted tokens per forward; 0 for an answer without a further forward."""
    return measures.accepted_per_forward([answer]) or 0.0


ACCEPTED = AnswerUnit(Unit("accepted tokens a forward", "difference"), _accepted)
ACCEPTED_RATIO = AnswerUnit(Unit("accepted tokens a forward, ratio", "ratio"), _accepted)
ACCEPTED_UNTIL_REFUSAL = AnswerUnit(
    Unit("accepted tokens from refusal to refusal", "difference"),
    lambda answer: measures.accepted_between_rejections([answer]) or 0.0,
)
BLOCK_EFFICIENCY = AnswerUnit(
    Unit("block efficiency, ratio", "ratio"), lambda answer: measures.tau([answer]) or 0.0
)
ACCEPTANCE_RATE = AnswerUnit(
    Unit("accepted share of drafted tokens", "difference"),
    lambda answer: measures.acceptance_rate([answer]) or 0.0,
)
DECODING_SPEED = AnswerUnit(
    Unit("speed of decoding, ratio", "ratio", is_time=True),
    lambda answer: 1 / measures.seconds_per_token(answer),
)
WHOLE_SPEED = AnswerUnit(
    Unit("speed of whole answers, ratio", "ratio", is_time=True),
    lambda answer: len(answer.ids) / answer.total,
)


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, the function that judges it here, and the reason for the verdict.

    ``why`` was written for the verdict ``expected``, and no page is made where the verdict is
    another one. ``published`` is a sentence for the page's list of findings, or empty.
    """

    place: str  # Where the paper has it, such as "Fig. 6".
    text: str  # What the paper claims.
    printed: str  # The paper's number with its unit.
    command: str  # Makes the run that decides: "lab run sage-2k". Empty where no run does.
    judge: Callable[[StoredResults], Finding]
    expected: Verdict
    why: str = ""
    published: str = ""


@dataclass(frozen=True)
class StoredResults:
    """The stored runs and figures. Its methods raise OptionError for what is not stored."""

    folder: Path
    self_draft_file: str = "real.json"  # Of a language model that drafts for itself.
    draft_model_file: str = "real-drafts.json"  # Of a language model with a draft model.

    def answers(self, run: str, suite: str, method: str) -> list[Answer]:
        """Returns a method's answers to a suite, without the failed ones."""
        matching = _answers_by_suite_and_method(self.folder / run).get((suite, method))
        if not matching:
            raise OptionError(f"{self.folder / run} has no answers of {method} to {suite}")
        return matching

    def suites(self, run: str) -> list[str]:
        return list(
            dict.fromkeys(suite for suite, _ in _answers_by_suite_and_method(self.folder / run))
        )

    def environment(self, source: str) -> dict[str, Any]:
        """Returns where a run or a figure was made: its processor, threads and libraries."""
        if (self.folder / source).is_dir():
            return dict(_read_run(self.folder / source)[0]["environment"])
        return dict(self.figure(source)["environment"])

    def figure(self, name: str) -> dict[str, Any]:
        """Returns the stored numbers of a study."""
        path = self.folder / "figures" / f"{name}.json"
        if not path.is_file():
            raise OptionError(f"{path} is missing: python -m lab figure {name} makes it")
        numbers: dict[str, Any] = json.loads(path.read_text())
        return numbers

    def why_outdated(self, name: str, unit: Unit, methods: Sequence[str] = ()) -> str:
        """Returns why a run, figure or file cannot decide by this unit any more, or nothing."""
        digest = _digest(_path_of(self.folder, name))
        return outdated.reason(name, digest, unit.is_time, methods)

    def repeats(self, run: str) -> list[str]:
        """Returns the stored runs of this name: its own, and those with other seeds."""
        seeds = (f"{run}-seed-{seed}" for seed in range(1, SEEDS))
        return [run, *(each for each in seeds if (self.folder / each).is_dir())]

    def compare(
        self,
        run: str,
        measured: AnswerUnit,
        pairs: Sequence[Pair],
        claimed: Claimed,
        *,
        turns: Turns = "all",
        premise: Premise | None = None,
    ) -> Finding:
        """Judges methods of a run against each other, on the same questions of every suite.

        Each pair is compared in each suite by the values of ``measured``, question by question.
        """
        methods = [name for _, *both in pairs for name in both]
        suites = self.every_suite(run, measured.unit, methods, turns)
        comparisons = [
            paired(
                label,
                suite,
                measured.unit,
                *(self.values(run, suite, name, measured.measure, turns) for name in (own, other)),
            )
            for label, own, other in ([] if suites.outdated else pairs)
            for suite in suites.names
        ]
        return judge(suites, measured.unit, claimed, comparisons, premise)

    def measure(
        self,
        run: str,
        unit: Unit,
        measures_by_label: Mapping[str, tuple[str, Measure]],
        claimed: Claimed,
        *,
        turns: Turns = "all",
        premise: Premise | None = None,
    ) -> Finding:
        """Judges one value of each answer of a method against a number, in every suite.

        ``measures_by_label`` has a method, and what is measured on its answers, by what the page
        calls it.
        """
        methods = [method for method, _ in measures_by_label.values()]
        suites = self.every_suite(run, unit, methods, turns)
        comparisons = [
            alone(label, suite, unit, [*self.values(run, suite, method, measure, turns).values()])
            for label, (method, measure) in ({} if suites.outdated else measures_by_label).items()
            for suite in suites.names
        ]
        return judge(suites, unit, claimed, comparisons, premise)

    def every_suite(
        self, run: str, unit: Unit, methods: Sequence[str], turns: Turns = "all"
    ) -> Suites:
        """Returns every suite of a run that has such turns of conversations, as a claim's suites.

        Its ``items`` is the smallest number of answers that the first of ``methods`` gave to a
        suite. Each turn of a conversation counts as one.
        """
        answers = {
            suite: [a for a in self.answers(run, suite, methods[0]) if _is_of(a, turns)]
            for suite in self.suites(run)
        }
        names = tuple(suite for suite, own in answers.items() if own)
        sizes = {a.visual_tokens for suite in names for a in answers[suite]} - {0}
        items = {len(answers[suite]) for suite in names}
        return Suites(
            run,
            names,
            " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)})),
            min(items),
            self.why_outdated(run, unit, methods),
        )

    def figure_suites(
        self,
        name: str,
        unit: Unit,
        suites: Sequence[str],
        methods: Sequence[str] = (),
        *,
        prompt: str | None = None,
        items: int | None = None,
    ) -> Suites:
        """Returns a figure's panels as the suites of a claim, all of which have to be compared.

        Raises SuitesMissing where these are not all the panels, rows or drafts of the figure. A
        figure of one kind of clip has the one suite ``CLIPS``.

        By default the figure's answers are to prompts of one size, and its items are clips.
        ``prompt`` says how large the prompts are otherwise, and ``items`` how many items there are
        if they are something else, such as repeats of a forward.
        """
        data = self.figure(name)
        plain_names = tuple(" ".join(suite.split()) for suite in suites)
        if plain_names != (CLIPS,) and plain_names not in _dimensions(data):
            raise SuitesMissing(f"{', '.join(plain_names)} are not all that figure {name} has")
        reason = self.why_outdated(f"figure {name}", unit, methods)
        visual_tokens = f"{data['size']:,}" if prompt is None else prompt
        return Suites(name, plain_names, visual_tokens, items or data["clips"], reason)

    def compare_clips(
        self,
        figure: str,
        measured: Unit,
        pairs: Sequence[Pair],
        claimed: Claimed,
        *,
        premise: Premise | None = None,
    ) -> Finding:
        """Judges a figure's methods on the same clips, by every draft that the figure has."""
        by_draft = self.figure(figure)["clips_tau"]
        methods = [name for _, *both in pairs for name in both]
        suites = self.figure_suites(figure, measured, tuple(by_draft), methods)
        comparisons = [
            paired(
                label,
                draft,
                measured,
                *(dict[Hashable, float](enumerate(own[name])) for name in (method, other)),
            )
            for label, method, other in ([] if suites.outdated else pairs)
            for draft, own in by_draft.items()
        ]
        return judge(suites, measured, claimed, comparisons, premise)

    def values(
        self, run: str, suite: str, method: str, measure: Measure, turns: Turns
    ) -> dict[Hashable, float]:
        """Returns one value of each answer of a method to a suite, by its item and turn.

        Where a run is stored with several seeds, the value is the mean over them. An answer for
        which ``measure`` returns None has no value.
        """
        by_question: dict[Hashable, list[float]] = {}
        for each in self.repeats(run):
            for answer in self.answers(each, suite, method):
                value = measure(answer) if _is_of(answer, turns) else None
                if value is not None:
                    by_question.setdefault((answer.item, answer.turn), []).append(value)
        return {question: mean(values) for question, values in by_question.items()}

    def rows(self, file: str, kind: str, command: str) -> Any:
        """Returns the rows of one kind in a stored file on real weights, such as "measured".

        ``command`` is the command of the lab that makes the file.
        """
        path = self.folder / file
        if not path.is_file():
            raise OptionError(f"{path} is missing: python -m lab {command} makes it")
        return json.loads(path.read_text())[kind]

    def on(self, file: str) -> StoredResults:
        """Returns the same results with another file in place of the two on real weights."""
        return replace(self, self_draft_file=file, draft_model_file=file)


TAU_DIFFERENCE = Unit("accepted tokens a forward", "difference")
"""A difference of two taus is a difference of accepted tokens, because the target's own token is in
both."""


def json_suites(
    results: StoredResults, file: str, unit: Unit, items: int, methods: Sequence[str], where: str
) -> Suites:
    """Returns the only suite of a verdict on real weights.

    ``where`` is its name, the kind of document, and ``items`` the number of answers compared.
    """
    # The answers of that file are about clips, and those of all others about text.
    tokens = "512" if file == "seeing.json" else "0"
    return Suites(file, (where,), tokens, items, results.why_outdated(file, unit, methods))


def _dimensions(numbers: object) -> set[tuple[str, ...]]:
    """Returns the keys of every mapping in a figure's numbers, a tuple for each mapping.

    The panels, rows or drafts of a figure are the keys of one of its mappings.
    """
    if not isinstance(numbers, dict):
        return set()
    names = tuple(" ".join(str(name).split()) for name in numbers)
    return {names}.union(*map(_dimensions, numbers.values()))


def _is_of(answer: Answer, turns: Turns) -> bool:
    """Returns whether an answer is one of these turns: all of them, the first or the later ones."""
    is_later = answer.turn > 0
    return turns == "all" or is_later == (turns == "later")


def _path_of(folder: Path, name: str) -> Path:
    """Returns the file of a figure ("figure sage-plan"), a JSON file or a run ("sage-2k")."""
    if name.startswith("figure "):
        return folder / "figures" / f"{name.removeprefix('figure ')}.json"
    return folder / name if name.endswith(".json") else folder / name / "results.jsonl.gz"


@cache
def _digest(path: Path) -> str:
    return outdated.digest(path) if path.is_file() else ""


@cache
def _read_run(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    return records.read_run(folder)


@cache
def _answers_by_suite_and_method(folder: Path) -> dict[tuple[str, str], list[Answer]]:
    by_method: dict[tuple[str, str], list[Answer]] = {}
    for answer in _read_run(folder)[1]:
        if not answer.error:
            by_method.setdefault((answer.suite, answer.method), []).append(answer)
    return by_method
