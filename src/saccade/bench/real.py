"""What holds on real weights: answers beside ``generate()``, and where the target looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float

from saccade.bench.measures import interval
from saccade.bench.suites.texts import Document
from saccade.core.prompt import CONTEXT, Prefill
from saccade.core.sampling import Sampling
from saccade.core.tree import chain
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask
from saccade.model.session import Session

STEP = 8  # tokens of the answer between two looks
SHARES = (0.05, 0.1, 0.25, 0.5)
SINKS = 4
METHODS = ("ar", "std", "fresh", "fresh/refresh=4", "streaming", "std/view=random", "lookup")

Kept = Bool[torch.Tensor, "layer kv_head seen"]
Mass = Float[torch.Tensor, "layer kv_head seen"]


@dataclass(frozen=True)
class Measured:
    """One document by one method."""

    document: str
    task: str
    prompt_tokens: int
    method: str
    same: bool  # as generate()
    tokens: int
    tau: float | None  # tokens a forward of the target, its own included
    accepted: float | None
    kept: int | None
    decode_seconds: float


@dataclass(frozen=True)
class Looked:
    """Of the mass that a document gets while it is answered about, the share on a set of it."""

    document: str
    keep: float
    chosen: str
    mass: float


def question(model: Loaded, document: Document) -> Any:
    """The document's first tokens and its task, as the model's processor has it."""
    ids = model.tokenizer(document.text)["input_ids"][: document.tokens]
    text = model.tokenizer.decode(ids)
    return ask(model, document.task, documents=[text])


def answers(
    model: Loaded, document: Document, methods: Sequence[str], count: int
) -> tuple[tuple[int, ...], list[Measured]]:
    """What ``generate()`` says of the document, and how each method said it."""
    inputs = question(model, document)
    own = {name: value for name, value in inputs.items() if name != CONTEXT}
    length = inputs["input_ids"].shape[1]
    settings: dict[str, Any] = {"max_new_tokens": count, "do_sample": False}
    truth = tuple(model.backbone.model.generate(**own, **settings)[0, length:].tolist())
    found = []
    for method in methods:
        result = run(model.backbone, inputs, method=method, **settings)
        found.append(
            Measured(
                document.name,
                document.task,
                length,
                method,
                result.ids == truth,
                len(result.ids),
                result.tau,
                result.acceptance_rate,
                result.draft_visual_tokens,
                result.timings.decode,
            )
        )
    return truth, found


def looks(model: Loaded, document: Document, answer: Sequence[int]) -> list[Looked]:
    """How much of the mass of the moment each way of choosing holds, averaged over an answer that
    is read again ``STEP`` tokens at a time."""
    target = model.backbone
    (prompt,) = target.prompts(question(model, document))
    session = Session(target, [Sampling()], room=len(answer))
    *_, first = session.reading(0, prompt, record=True, follow=STEP)
    assert isinstance(first, Prefill)
    assert first.mass is not None and first.again is not None
    before, sums = first.mass, dict[tuple[float, str], list[float]]()
    for start in range(0, len(answer) - STEP, STEP):
        tokens = list(answer[start : start + STEP])
        session.score({0: chain(tokens)})
        session.commit({0: tokens})
        now = first.again().mass
        assert now is not None
        for keep in SHARES:
            for name, choose in CHOICES.items():
                kept = choose(first.mass, before, now, max(1, round(keep * now.shape[-1])))
                share = (now * kept).sum(-1) / now.sum(-1)
                sums.setdefault((keep, name), []).append(float(share.mean()))
        before = now
    return [
        Looked(document.name, keep, name, sum(found) / len(found))
        for (keep, name), found in sums.items()
    ]


def _top(mass: Mass, count: int) -> Kept:
    chosen = mass.topk(count, -1).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, chosen, True)


def _shared(mass: Mass, count: int) -> Kept:
    return _top(mass.mean((0, 1)).expand_as(mass).contiguous(), count)


def _some(mass: Mass, rows: torch.Tensor) -> Kept:
    kept = torch.zeros_like(mass, dtype=torch.bool)
    kept[..., rows] = True
    return kept


def _streaming(mass: Mass, count: int) -> Kept:
    row = torch.arange(mass.shape[-1])
    return _some(mass, row[(row < SINKS) | (row >= len(row) - max(0, count - SINKS))])


def _random(mass: Mass, count: int) -> Kept:
    generator = torch.Generator().manual_seed(count)
    return _some(mass, torch.randperm(mass.shape[-1], generator=generator)[:count])


# (mass at prefill, at the look before, now; how many) -> which
CHOICES: dict[str, Callable[[Mass, Mass, Mass, int], Kept]] = {
    "oracle: each head's top now": lambda first, before, now, count: _top(now, count),
    "fresh: each head's top a look ago": lambda first, before, now, count: _top(before, count),
    "std: each head's top at prefill": lambda first, before, now, count: _top(first, count),
    "shared by all heads, at prefill": lambda first, before, now, count: _shared(first, count),
    "shared by all heads, a look ago": lambda first, before, now, count: _shared(before, count),
    "streaming: sinks and the last": lambda first, before, now, count: _streaming(now, count),
    "random": lambda first, before, now, count: _random(now, count),
}


def recorded(measured: Sequence[Measured], looked: Sequence[Looked], **facts: Any) -> dict:
    """What a page is made of."""
    return {
        **facts,
        "measured": [asdict(each) for each in measured],
        "looked": [asdict(each) for each in looked],
    }


# -- the page -----------------------------------------------------------------------------------

Row = Mapping[str, Any]


def page(found: Mapping[str, Any]) -> str:
    """Markdown from what ``measure.recorded`` keeps."""
    measured: Sequence[Row] = found["measured"]
    plain = {row["document"]: row for row in measured if row["method"] == "ar"}
    same = sum(row["same"] for row in measured)
    lines = [
        "# Real weights",
        "",
        f"{found['model']}: {len(plain)} documents of {_range(measured)} prompt tokens, answers of "
        f"{found['max_new_tokens']} tokens at most. {found['machine']}",
        "",
        f"Made by `{found['command']}`. Of {len(measured)} answers {same} are `generate()`'s, "
        "token for token.",
        "",
        "## Drafting",
        "",
        "tau is tokens emitted a forward of the target, its own included; the interval is a "
        "bootstrap over documents. Speed is of decoding, against `ar` in the same run.",
        "",
        "| method | tau | 95 % | accepted | document kept | speed |",
        "|-|-|-|-|-|-|",
    ]
    for method in dict.fromkeys(row["method"] for row in measured):
        own = [row for row in measured if row["method"] == method]
        middle, low, high = interval([row["tau"] for row in own]) or (0.0, 0.0, 0.0)
        accepted = [row["accepted"] for row in own if row["accepted"] is not None]
        speeds = [
            plain[row["document"]]["decode_seconds"] / row["decode_seconds"]
            for row in own
            if row["document"] in plain and row["decode_seconds"]
        ]
        speed = interval(speeds)
        lines.append(
            f"| `{method}` | {middle:.2f} | {low:.2f} to {high:.2f} | {_mean(accepted)} | "
            f"{_kept(own)} | {'' if speed is None else f'{speed[0]:.2f}'} |"
        )
    lines += [
        "",
        "## Where the target looks while it answers",
        "",
        "Of the attention that the document gets at a moment of the answer, the share on a set of "
        "its tokens, by how the set is chosen and how much of the document it holds; mean over "
        "heads, layers, moments and documents.",
        "",
        "| set | " + " | ".join(f"{share:g}" for share in SHARES) + " |",
        "|-|" + "-|" * len(SHARES),
    ]
    looked: Sequence[Row] = found["looked"]
    for chosen in dict.fromkeys(row["chosen"] for row in looked):
        means = [
            _mean([r["mass"] for r in looked if (r["chosen"], r["keep"]) == (chosen, share)])
            for share in SHARES
        ]
        lines.append(f"| {chosen} | " + " | ".join(means) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else ""


def _kept(rows: Sequence[Row]) -> str:
    kept = [row["kept"] / row["prompt_tokens"] for row in rows if row["kept"] is not None]
    return f"{sum(kept) / len(kept):.0%}" if kept else ""


def _range(rows: Sequence[Row]) -> str:
    lengths = [row["prompt_tokens"] for row in rows]
    return f"{min(lengths):,} to {max(lengths):,}"
