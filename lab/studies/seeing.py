"""The language model that learnt to see (``lab/training/seeing.py``), on clips it never saw.

What it says with the clip before it and with another; where it looks while it answers, and how well
a set of a clip's tokens stands for all of them; how far it drafts for itself over a view, and how
far and how fast a small draft does.
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

from lab.studies.lab import Lab
from lab.training import agreement, evaluate
from lab.training.labels import content_words
from lab.training.stages import SEEING, SEEING_DRAFT
from saccade.bench import measures
from saccade.bench.real import answers, attention_sets
from saccade.bench.suites.long_documents import Document
from saccade.core.prompt import Inputs, Prefill
from saccade.engine.trace import environment
from saccade.inputs import Loaded, ask
from saccade.inputs.media import Clip
from saccade.methods import hippo, resolve, specvlm
from saccade.world import dialogues, scenes
from saccade.world.train_draft.samples import Canvas

Row = Mapping[str, Any]
SIZE, TOKENS, LEAST = 512, 128, 64
KEEPS = 0.1, 0.25
KINDS = "measured", "looked", "told", "forced", "raced", "costs"
SELF = (
    *("std/keep=0.1", "fresh/keep=0.1", "pages/keep=0.1", "streaming/keep=0.1"),
    "std/view=attention/keep=0.1",
    *("std/keep=0.25", "fresh/keep=0.25", "pages/keep=0.25", "streaming/keep=0.25"),
    "std/view=attention/keep=0.25",
    "specvlm-self/keep=0.1",
)
DRAFTED = (
    *("sd", "sd-tree", "sd-tree/view=none", "specvlm/keep=0.1", "specvlm/keep=0.5"),
    *("sd-tree/view=random/keep=0.1", "sd-tree/view=random/keep=0.5"),
    *("specvlm/keep=0.1/view=uniform", "specvlm/keep=0.1/view=holistic"),
    *("specvlm/keep=0.1/shape=chain-5", "sage"),
)
RACED = "ar", "sd", "specvlm", "sage", "auto"
CANVASES = {64: (8, 112), SIZE: agreement.EXTRA_FRAMES[SIZE]}
FORCED = 8  # clips
RANDOM = "random, draw {}"
POINTS = 6  # of a stage's curve


# -- the clips ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A held-out clip, what is asked about it, and what is true of it."""

    number: int
    question: str
    truth: str

    @property
    def document(self) -> Document:
        seed = agreement.FIRST_SEED + self.number
        return Document(f"clip {self.number}", f"seed {seed}", self.question, SIZE)


def shown(tokenizer: Any) -> Iterator[Shown]:
    """Those whose true description has ``LEAST`` tokens or more."""
    for number in count():
        scene = scenes.scene(agreement.FIRST_SEED + number)
        turn = dialogues.conversation(scene, "describe", number)[0]
        if len(tokenizer(turn.answer)["input_ids"]) >= LEAST:
            yield Shown(number, turn.question, turn.answer)


def about(model: Loaded, document: Document, later: int = 0) -> Inputs:
    """What is asked about a clip, and its pixels, or those of the clip so many numbers later."""
    number = int(document.name.split()[1])
    return ask(model, document.task, clips=[agreement.unseen_clip(number + later, SIZE)[1]])


@dataclass
class Some(Lab):
    """A lab of these clips alone."""

    only: Sequence[Shown] = ()

    def inputs(self, number: int, size: int | None = None) -> tuple[Clip, Inputs]:
        return super().inputs(self.only[number].number, size)


# -- what is measured --------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """F1 of the content words of an answer and of what is true: with the clip, with another."""

    document: str
    digest: str
    own: float
    other: float


@dataclass(frozen=True)
class Forced:
    """Right content words where all before is the truth."""

    size: int
    task: str
    view: str
    content: float
    tokens: int


@dataclass(frozen=True)
class Raced:
    """One answer, timed."""

    document: str
    method: str
    same: bool  # as plain decoding
    tokens: int
    tau: float | None
    decode_seconds: float
    seconds: float


@dataclass(frozen=True)
class Costs:
    """Seconds of forwards by rows, and how busy the machine was before them."""

    threads: int
    load: float
    context: int
    rows: Sequence[int]
    seconds: Sequence[float]


def words(said: str) -> Counter[str]:
    """The content words of a text."""
    return Counter(said[start:end].lower() for start, end, _ in content_words(said))


def alike(said: str, true: str) -> float:
    """F1 of two texts' content words."""
    one, other = words(said), words(true)
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def ways(first: Prefill) -> Mapping[str, Sequence[attention_sets.ChooseRows]]:
    """Those of ``looks``, every draw at random by a name of its own; HIPPO's and SpecVLM's choice;
    nothing."""

    def chosen(view: Any) -> attention_sets.ChooseRows:
        def choose(
            whole: attention_sets.Mass,
            before: attention_sets.Mass,
            now: attention_sets.Mass,
            held: int,
        ) -> attention_sets.KeptMask:
            share = held / now.shape[-1]
            return attention_sets.mask_of_rows(
                now, replace(view, keep=share).choose(first, first.prompt)
            )

        return choose

    known = dict(attention_sets.CHOICES)
    draws = {RANDOM.format(draw): [way] for draw, way in enumerate(known.pop("random"))}
    nothing = torch.zeros(0, dtype=torch.long)
    return {
        **known,
        "HIPPO's holistic choice": [chosen(hippo.VIEW)],
        "SpecVLM's choice": [chosen(specvlm.VIEW)],
        **draws,
        "none": [lambda whole, before, now, held: attention_sets.mask_of_rows(now, nothing)],
    }


def judge(
    model: Loaded,
    draft: Loaded,
    folder: Path,
    clips: int,
    results: answers.Results,
    *,
    together: int = 4,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """What ``results`` lack of so many clips, and of the truth read by the model in ``folder``."""
    chosen = list(islice(shown(model.tokenizer), clips))
    documents = [each.document for each in chosen]
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    look = partial(attention_sets.measure_attention_sets, ask=about, shares=KEEPS, chosen=ways)
    recipes = [resolve(name) for name in ("ar", *SELF, *DRAFTED)]
    answers.run_methods(
        model, documents, recipes, settings, results,
        together=together, look=look, draft=draft.backbone, ask=about, on_progress=tell,
    )  # fmt: skip
    done = {row["document"] for row in results.facts["told"]}
    lab = Lab(clips, SIZE, TOKENS, target=model)
    for each in chosen:
        document = each.document
        if document.name not in done:
            tell(f"{document.name}, another clip's pixels")
            own = model.decode(results.reference(document, lambda: ()))
            _, clip = agreement.unseen_clip(each.number + 1, SIZE)[:2]
            said = lab.answer("ar", clip, about(model, document, 1), draft=draft).text or ""
            row = Told(
                document.name, document.digest, alike(own, each.truth), alike(said, each.truth)
            )
            results.add([row], "told")
    forced = {(row["size"], row["task"]) for row in results.facts["forced"]}
    for size, (frames, side) in CANVASES.items():
        for task in ("qa", "describe"):
            if (size, task) not in forced:
                tell(f"{task} of {size} tokens, the truth read")
                found = evaluate.teacher_forced(
                    folder, Canvas("video", frames, side, side), FORCED, task
                )
                rows = [
                    Forced(size, task, view, own["content"], int(own["tokens"]))
                    for view, own in found.items()
                ]
                results.add(rows, "forced")


def race(
    model: Loaded,
    draft: Loaded,
    clips: int,
    results: answers.Results,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """The same clips by every method in turn, for their seconds; nothing where that was done."""
    if results.facts["raced"]:
        return
    chosen = list(islice(shown(model.tokenizer), clips))
    load = os.getloadavg()[0]
    found = Some(clips, SIZE, TOKENS, tell, target=model, only=chosen).race(*RACED, draft=draft)
    tell("forwards by rows")
    cost = answers.forward_costs(model, SIZE + TOKENS)
    results.add([Costs(torch.get_num_threads(), load, **cost)], "costs")
    rows = [
        Raced(
            chosen[int(each.item)].document.name,
            method,
            each.ids == plain.ids,
            len(each.ids),
            measures.tau([each]),
            each.decode,
            each.total,
        )
        for method, own in found.items()
        for each, plain in zip(own, found["ar"], strict=True)
    ]
    results.add(rows, "raced")


def training(run_dir: Path) -> list[dict[str, Any]]:
    """What the run's stages took, and how their loss and content words went."""
    found = []
    for whose, stages in (("the model", SEEING), ("its draft", SEEING_DRAFT)):
        for stage in stages:
            log = run_dir / f"{stage.name}.jsonl"
            if not log.exists() or not log.stat().st_size:
                continue
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            parts = np.array_split(np.arange(len(lines)), POINTS)
            curve = [
                {
                    name: round(fmean(lines[at][name] for at in part), 3)
                    for name in ("cpu_s", "loss", "content", "agree")
                    if name in lines[0]
                }
                for part in parts
            ]
            last = lines[-1]
            found.append(
                {"of": whose, "stage": stage.name, "steps": len(lines), "curve": curve}
                | {name: last[name] for name in ("cpu_s", "samples", "tokens")}
            )
    return found


def facts(model: str, digest: str, together: int, run_dir: Path, command: str) -> dict[str, Any]:
    """What the page says of a run."""
    return {
        "model": model,
        "settings": {"max_new_tokens": TOKENS, "visual_tokens": SIZE, "adapter": digest},
        "together": together,
        "machine": "{processor}, {threads} threads, torch {torch}".format(**environment()),
        "command": command,
        "training": training(run_dir),
    }
