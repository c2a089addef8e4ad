"""Compares a trained EAGLE-3 head with the embedded draft model, as drafts of the embedded target.

Nothing is timed. Every method answers the same questions about clips that no training drew. What is
counted is tau, the draft's steps of a round, and the bytes of weights that a step reads. A step is
one forward of the draft. From these numbers a speedup over plain decoding is computed, for a
machine on which reading weights is all that takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from torch import nn

from lab.training.agreement import FIRST_SEED, unseen_clip
from saccade.core.result import RoundRecord, emitted_per_forward
from saccade.core.tree import height
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask, head_checkpoints, load
from saccade.model.backbone import Backbone
from saccade.model.heads.head import Head
from saccade.world import dialogues, scenes
from saccade.world.train_draft.recipes import Settings
from saccade.world.train_draft.run import train_draft
from saccade.world.train_draft.samples import CANVASES, Canvas

HEAD_METHODS = ("head", "sd-tree")
MODEL_METHODS = ("sd", "specvlm", "auto")
TASKS = {"captions": "describe", "short answers": "qa"}  # The page's words -> the dialogues' task.
SHORT_CLIPS = [Canvas("video", 8, 112, 112), Canvas("video", 16, 112, 112)]
SEED, BATCH_SIZE = 1, 4
RATE_SCALE = 20.0  # Times the recipe's learning rate.

Ids = tuple[int, ...]
MethodKey = tuple[str, str]
"""The names of a draft and of a method."""


@dataclass(frozen=True)
class Draft:
    """A draft, its methods and its size."""

    name: str
    model: Backbone
    methods: tuple[str, ...]  # Those that are measured with it.
    parameters: int
    step_bytes: int  # The bytes of weights that one step reads.


@dataclass(frozen=True)
class Row:
    """What one method did for one kind of question."""

    draft: str
    method: str
    questions: str  # One of ``TASKS``.
    tau: float  # Tokens per target forward.
    steps: float  # The draft's forwards of a round, on average.
    ratio: float  # The speedup over plain decoding if only reading weights took time.
    answers: int
    equal_answers: int  # Those that are plain decoding's.


def train_head(out: Path, steps: int, on_progress: Callable[[str], None]) -> None:
    """Trains a head, or goes on where a run in ``out`` stopped.

    It is trained on drawn clips of 64 and 128 visual tokens, and on drawn pictures. ``steps`` are
    those of the optimizer.
    """
    settings = Settings(
        recipe="eagle3", steps=steps, seed=SEED, batch_size=BATCH_SIZE, lr_scale=RATE_SCALE
    )

    def report(phase: str, done: int, total: int, loss: float | None) -> None:
        on_progress(f"training: {done} of {total} samples, loss {loss}")

    with patch.dict(CANVASES, video=SHORT_CLIPS):
        train_draft(out, settings, resume=True, on_progress=report)


def compare(
    head_folder: Path,
    *,
    clips: int = 20,
    size: int = 64,
    tokens: int = 96,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Measures each draft's own methods on unseen clips of ``size`` visual tokens.

    Answers have ``tokens`` tokens at most. The rows of the result are those of ``table``.
    """
    target = load("shapes", dtype="float32")
    head = head_checkpoints.load_head(str(head_folder), target.backbone)
    model = load("shapes-draft", dtype="float32").backbone
    drafts = (
        Draft("head", head, HEAD_METHODS, _count([head.module]), _head_step_bytes(head)),
        Draft("model", model, MODEL_METHODS, _count([model.model]), _step_bytes(model)),
    )
    target_bytes = _step_bytes(target.backbone)
    rows = []
    for questions in TASKS:
        rounds: dict[MethodKey, list[RoundRecord]] = {}
        equal: dict[MethodKey, int] = {}
        for number in range(clips):
            plain, answers = _answer(target, drafts, questions, number, size, tokens, on_progress)
            for key, (ids, own_rounds) in answers.items():
                rounds.setdefault(key, []).extend(own_rounds)
                equal[key] = equal.get(key, 0) + (ids == plain)
        for draft in drafts:
            for method in draft.methods:
                key = draft.name, method
                rows.append(
                    summarize(
                        rounds[key],
                        target_bytes,
                        draft,
                        method,
                        questions,
                        answers=clips,
                        equal_answers=equal[key],
                    )
                )
    return {
        "clips": clips,
        "visual_tokens": size,
        "tokens": tokens,
        "target_step_bytes": target_bytes,
        "drafts": {
            draft.name: {"parameters": draft.parameters, "step_bytes": draft.step_bytes}
            for draft in drafts
        },
        "rows": [asdict(row) for row in rows],
    }


def summarize(
    rounds: Sequence[RoundRecord],
    target_bytes: int,
    draft: Draft,
    method: str,
    questions: str,
    *,
    answers: int,
    equal_answers: int,
) -> Row:
    """Returns the row of a method from all its rounds."""
    tau = emitted_per_forward(rounds) or 1.0
    # Each level of a tree takes one step. The first token of an answer has no draft.
    steps = fmean([height(each.parents) for each in rounds if not each.opening] or [0])
    # Plain decoding reads the target for each token. A round reads the target and the draft for tau
    # tokens.
    ratio = tau * target_bytes / (target_bytes + steps * draft.step_bytes)
    return Row(draft.name, method, questions, tau, steps, ratio, answers, equal_answers)


def _answer(
    target: Loaded,
    drafts: Sequence[Draft],
    questions: str,
    number: int,
    size: int,
    tokens: int,
    on_progress: Callable[[str], None],
) -> tuple[Ids, Mapping[MethodKey, tuple[Ids, list[RoundRecord]]]]:
    """Returns the plain greedy answer, and every method's answer with its rounds."""
    _, clip, _ = unseen_clip(number, size)
    scene = scenes.scene(FIRST_SEED + number)
    turn = dialogues.conversation(scene, TASKS[questions], number)[0]
    inputs = ask(target, turn.question, clips=[clip])

    def answer(method: str, draft: Backbone | None) -> tuple[Ids, list[RoundRecord]]:
        on_progress(f"{questions}, clip {number + 1}: {method}")
        result = run(
            target.backbone,
            inputs,
            draft=draft,
            method=method,
            tokenizer=target.tokenizer,
            max_new_tokens=tokens,
            do_sample=False,
        )
        if result.fallback_reason is not None:
            raise RuntimeError(f"{method}: {result.fallback_reason}")
        return result.ids, list(result.rounds)

    plain, _ = answer("ar", None)
    return plain, {
        (draft.name, method): answer(method, draft.model)
        for draft in drafts
        for method in draft.methods
    }


def _count(modules: Sequence[nn.Module]) -> int:
    """Returns the number of distinct parameters."""
    parameters = {id(each): each.numel() for module in modules for each in module.parameters()}
    return sum(parameters.values())


def _step_bytes(model: Backbone) -> int:
    """Returns the bytes that a forward of one token reads: the layers and the output matrix."""
    layers = sum(each.numel() for each in model.text.layers.parameters())
    return (layers + model.vocab * model.config.hidden_size) * model.dtype.itemsize


def _head_step_bytes(head: Head) -> int:
    """Returns the bytes that a step of a head reads: all its weights, with its output matrix."""
    return _count([head.module]) * head.dtype.itemsize


def table(results: Mapping[str, object]) -> str:
    """Returns the table of docs/methods/heads.md."""
    rows = [Row(**each) for each in results["rows"]]  # type: ignore[attr-defined]
    lines = ["| draft | method | questions | tau | steps | by bytes |", "|-|-|-|-|-|-|"]
    lines += [
        f"| {row.draft} | `{row.method}` | {row.questions} | {row.tau:.2f} | {row.steps:.1f} "
        f"| {row.ratio:.2f}x |"
        for row in rows
    ]
    return "\n".join(lines)
