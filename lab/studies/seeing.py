"""Measures the language model that was trained to see (``lab/training/seeing.py``) on unseen clips.

It measures what the model says with the right clip and with another one, where it looks while it
answers, and how well a set of a clip's tokens stands for all of them. It also measures how many
tokens are accepted of the model's own drafts over a view, and of a small draft, with its speed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from lab.machine import describe_machine
from lab.real import answers, attention_sets
from lab.real.long_documents import Document
from lab.studies.experiment import Experiment
from lab.training import agreement, evaluate
from lab.training.labels import content_words
from lab.training.stages import SEEING, SEEING_DRAFT
from saccade.bench import measures
from saccade.core.prompt import Inputs, Prefill
from saccade.inputs import Loaded, ask
from saccade.inputs.media import Clip
from saccade.methods import hippo, resolve, specvlm
from saccade.world import dialogues, scenes
from saccade.world.train_draft.samples import Canvas

Row = Mapping[str, Any]
SIZE = 512  # Visual tokens of a clip.
TOKENS = 128  # The largest number of tokens of an answer.
MIN_TRUE_TOKENS = 64  # Clips with a shorter true description are left out.
KEEPS = 0.1, 0.25  # The shares of a clip's tokens in the sets that are measured.
# The lists of rows in ``seeing.json``, in this order: answers by every method; attention on sets of
# a clip's tokens; scores of descriptions; scores where the true text is read; timed answers; and
# seconds of forwards.
KINDS = "measured", "looked", "told", "forced", "raced", "costs"
SELF_METHODS = (
    *("std/keep=0.1", "fresh/keep=0.1", "pages/keep=0.1", "streaming/keep=0.1"),
    "std/view=attention/keep=0.1",
    *("std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25", "streaming/keep=0.25"),
    "std/view=attention/keep=0.25",
    "specvlm-self/keep=0.1",
)
DRAFT_METHODS = (
    *("sd", "sd-tree", "sd-tree/view=none", "specvlm/keep=0.1", "specvlm/keep=0.5"),
    *("sd-tree/view=random/keep=0.1", "sd-tree/view=random/keep=0.5"),
    *("specvlm/keep=0.1/view=uniform", "specvlm/keep=0.1/view=holistic"),
    *("specvlm/keep=0.1/shape=chain-5", "sage"),
)
TIMED_METHODS = "ar", "sd", "specvlm", "sage", "auto"
# Visual tokens -> (frames, pixels a side) of the clips that are read with the true text.
CANVASES = {64: (8, 112), SIZE: agreement.EXTRA_FRAMES[SIZE]}
FORCED_CLIPS = 8  # Clips of each size and task that are read with the true text.
RANDOM_SET = "random, draw {}"
CURVE_POINTS = 6  # Points of the learning curve of a training stage.


# -- The clips -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DescribedClip:
    """A held-out clip with the question about it and its true description."""

    number: int
    question: str
    truth: str

    @property
    def document(self) -> Document:
        """The clip in the form of a document, so that what measures documents measures clips."""
        seed = agreement.FIRST_SEED + self.number
        return Document(f"clip {self.number}", f"seed {seed}", self.question, SIZE)


def described_clips(tokenizer: Any) -> Iterator[DescribedClip]:
    """Yields the clips whose true description has ``MIN_TRUE_TOKENS`` tokens or more."""
    for number in count():
        scene = scenes.scene(agreement.FIRST_SEED + number)
        turn = dialogues.conversation(scene, "describe", number)[0]
        if len(tokenizer(turn.answer)["input_ids"]) >= MIN_TRUE_TOKENS:
            yield DescribedClip(number, turn.question, turn.answer)


def inputs_about(model: Loaded, document: Document, later: int = 0) -> Inputs:
    """Returns a clip's question with its pixels, or with those of the clip ``later`` numbers on."""
    number = int(document.name.split()[1])
    return ask(model, document.task, clips=[agreement.unseen_clip(number + later, SIZE)[1]])


@dataclass
class ExperimentOnClips(Experiment):
    """An experiment on the clips of ``only``, whose clip 0 is the first of these."""

    only: Sequence[DescribedClip] = ()

    def inputs(self, number: int, size: int | None = None) -> tuple[Clip, Inputs]:
        return super().inputs(self.only[number].number, size)


# -- Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DescriptionScore:
    """How well an answer's content words are the true ones, with the right clip and with another.

    Content words are those that depend on the pixels. Both answers are compared with the right
    clip's true description. F1 is 1 if the answer has exactly the content words of that, in any
    order.
    """

    document: str  # The clip's name.
    digest: str  # Of the question and the clip's seed.
    own: float  # F1 of the answer about the right clip.
    other: float  # F1 of the answer to the same question with another clip's pixels.


@dataclass(frozen=True)
class TeacherForcedScore:
    """The share of content words that are right where the text before them is the true one."""

    size: int  # Visual tokens of the clips.
    task: str
    view: str  # Whose pixels the model saw: its "own" clip's, an "other" clip's, or "none".
    content: float  # The share of tokens of content words that are right.
    tokens: int  # How many tokens all answers have together, those of other words included.


@dataclass(frozen=True)
class TimedAnswer:
    """The seconds of one answer."""

    document: str
    method: str
    same: bool  # Whether its tokens are plain decoding's.
    tokens: int
    tau: float | None
    decode_seconds: float
    seconds: float  # Of the whole answer, prefill included.


@dataclass(frozen=True)
class ForwardCosts:
    """Seconds of the target's forwards by their rows, and the load of the machine.

    The answers are timed first and then these forwards. The load was read before both.
    """

    threads: int
    load: float  # The mean number of processes that wanted a core in the minute before.
    context: int  # Cached tokens.
    rows: Sequence[int]  # Tokens that a forward scores.
    seconds: Sequence[float]  # Of the forward with so many rows.


def content_word_counts(text: str) -> Counter[str]:
    """Returns the content words of a text, counted."""
    return Counter(text[start:end].lower() for start, end, _ in content_words(text))


def content_word_f1(text: str, true_text: str) -> float:
    """Returns the F1 of two texts' content words; 0 if neither has any."""
    counts = content_word_counts(text)
    true_counts = content_word_counts(true_text)
    return 2 * (counts & true_counts).total() / max(1, counts.total() + true_counts.total())


def choices_by_set(first: Prefill) -> Mapping[str, Sequence[attention_sets.ChooseRows]]:
    """Returns the sets of a clip's tokens that are measured, each by the functions that choose it.

    These are the sets that are measured on documents too, with a name for every random draw, and
    beside them HIPPO's and SpecVLM's choice and the empty set. ``first`` is the target's prefill.
    """

    def choice_of(view: Any) -> attention_sets.ChooseRows:
        # A view chooses by ``first``, so of these arguments it needs only how many tokens to keep.
        def choose(
            prefill: attention_sets.Mass,
            before: attention_sets.Mass,
            current: attention_sets.Mass,
            budget: int,
        ) -> attention_sets.KeptMask:
            share = budget / current.shape[-1]
            return attention_sets.mask_of_rows(
                current, replace(view, keep=share).choose(first, first.prompt)
            )

        return choose

    choices = dict(attention_sets.CHOICES)
    random_choices = choices.pop("random")
    draws = {RANDOM_SET.format(draw): [choose] for draw, choose in enumerate(random_choices)}
    nothing = torch.zeros(0, dtype=torch.long)
    return {
        **choices,
        "HIPPO's holistic choice": [choice_of(hippo.VIEW)],
        "SpecVLM's choice": [choice_of(specvlm.VIEW)],
        **draws,
        "none": [
            lambda prefill, before, current, budget: attention_sets.mask_of_rows(current, nothing)
        ],
    }


def measure_answers(
    model: Loaded,
    draft: Loaded,
    folder: Path,
    clips: int,
    results: answers.Results,
    *,
    together: int = 4,
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Measures everything but seconds on ``clips`` clips, and adds it to ``results``.

    What ``results`` have already is not measured again. True texts are read about ``FORCED_CLIPS``
    other clips of each size and task, whatever ``clips`` is. ``folder`` is the checkpoint of
    ``model``, which is loaded in another form for that. ``together`` is the number of clips that
    share forwards.
    """
    chosen_clips = list(islice(described_clips(model.tokenizer), clips))
    documents = [each.document for each in chosen_clips]
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    look = partial(
        attention_sets.measure_attention_sets, ask=inputs_about, shares=KEEPS, chosen=choices_by_set
    )
    recipes = [resolve(name) for name in ("ar", *SELF_METHODS, *DRAFT_METHODS)]
    answers.run_methods(
        model, documents, recipes, settings, results,
        together=together, look=look, draft=draft.backbone,
        ask=inputs_about, on_progress=on_progress,
    )  # fmt: skip
    # The description of each clip is compared with the one that another clip's pixels lead to.
    done = {row["document"] for row in results.facts["told"]}
    experiment = Experiment(clips, SIZE, TOKENS, target=model)
    for each in chosen_clips:
        document = each.document
        if document.name not in done:
            on_progress(f"{document.name}, another clip's pixels")
            own = model.decode(results.reference(document, lambda: ()))
            _, clip = agreement.unseen_clip(each.number + 1, SIZE)[:2]
            answer = (
                experiment.answer("ar", clip, inputs_about(model, document, 1), draft=draft).text
                or ""
            )
            row = DescriptionScore(
                document.name,
                document.digest,
                content_word_f1(own, each.truth),
                content_word_f1(answer, each.truth),
            )
            results.add([row], "told")
    # The model reads true texts, and each next content word that it would say is right or wrong.
    forced = {(row["size"], row["task"]) for row in results.facts["forced"]}
    for size, (frames, side) in CANVASES.items():
        for task in ("qa", "describe"):
            if (size, task) not in forced:
                on_progress(f"{task} of {size} tokens, reading the true text")
                scores = evaluate.teacher_forced(
                    folder, Canvas("video", frames, side, side), FORCED_CLIPS, task
                )
                rows = [
                    TeacherForcedScore(size, task, view, own["content"], int(own["tokens"]))
                    for view, own in scores.items()
                ]
                results.add(rows, "forced")


def time_methods(
    model: Loaded,
    draft: Loaded,
    clips: int,
    results: answers.Results,
    on_progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Times answers of ``TIMED_METHODS`` in turn on the same clips, and then forwards by rows.

    Adds both to ``results``, and does nothing if these have timed answers already.
    """
    if results.facts["raced"]:
        return
    chosen_clips = list(islice(described_clips(model.tokenizer), clips))
    load = os.getloadavg()[0]
    answers_by_method = ExperimentOnClips(
        clips, SIZE, TOKENS, on_progress, target=model, only=chosen_clips
    ).run_interleaved(*TIMED_METHODS, draft=draft)
    on_progress("forwards by rows")
    cost = answers.forward_costs(model, SIZE + TOKENS)
    results.add([ForwardCosts(torch.get_num_threads(), load, **cost)], "costs")
    rows = [
        TimedAnswer(
            chosen_clips[int(each.item)].document.name,
            method,
            each.ids == plain.ids,
            len(each.ids),
            measures.tau([each]),
            each.decode,
            each.total,
        )
        for method, own in answers_by_method.items()
        for each, plain in zip(own, answers_by_method["ar"], strict=True)
    ]
    results.add(rows, "raced")


def training_stages(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the CPU time of each training stage and what it read, with the curve of its scores.

    Stages without a log in ``run_dir`` are left out.
    """
    stage_facts = []
    for whose, stages in (("the model", SEEING), ("its draft", SEEING_DRAFT)):
        for stage in stages:
            log = run_dir / f"{stage.name}.jsonl"
            if not log.exists() or not log.stat().st_size:
                continue
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            # The steps are divided into CURVE_POINTS parts. A point has the means over one part.
            parts = np.array_split(np.arange(len(lines)), CURVE_POINTS)
            curve = [
                {
                    name: round(fmean(lines[at][name] for at in part), 3)
                    for name in ("cpu_s", "loss", "content", "agree")
                    if name in lines[0]
                }
                for part in parts
            ]
            last = lines[-1]
            stage_facts.append(
                {"of": whose, "stage": stage.name, "steps": len(lines), "curve": curve}
                | {name: last[name] for name in ("cpu_s", "samples", "tokens")}
            )
    return stage_facts


def run_facts(
    model: str, digest: str, together: int, run_dir: Path, command: str
) -> dict[str, Any]:
    """Returns what the page says about a run: model, settings, machine, command and training.

    ``digest`` is that of the adapter's file.
    """
    return {
        "model": model,
        "settings": {"max_new_tokens": TOKENS, "visual_tokens": SIZE, "adapter": digest},
        "together": together,
        "machine": describe_machine(),
        "command": command,
        "training": training_stages(run_dir),
    }
