"""The page of the language model that learnt to see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from lab.studies.lab import interval
from lab.studies.seeing import DRAFTED, FORCED, KEEPS, LEAST, RANDOM, SELF, SIZE, TOKENS
from saccade.bench.measures import RESAMPLES, Interval
from saccade.bench.real.attention_sets import RANDOM_DRAWS

Row = Mapping[str, Any]


def crossed(table: np.ndarray) -> Interval:
    """The mean of [clip, draw] with its 95 % bootstrap over both: a draw at random is one of many,
    as a clip is."""
    rng, (clips, draws) = np.random.default_rng(0), table.shape
    some = rng.integers(clips, size=(RESAMPLES, clips, 1))
    mine = rng.integers(draws, size=(RESAMPLES, 1, draws))
    low, high = np.quantile(table[some, mine].mean((1, 2)), (0.025, 0.975))
    return float(table.mean()), float(low), float(high)


def page(found: Mapping[str, Any]) -> str:
    """Markdown from what :class:`~saccade.bench.real.answers.Results` keeps."""
    measured, raced = found["measured"], found["raced"]
    clips = len({row["document"] for row in measured})
    lines = [
        "# A language model that sees",
        "",
        f"{found['model']} behind the embedded pair's vision tower, with a merger and terms of low "
        "rank that learnt the drawn world (`lab/training/seeing.py`); adapter "
        f"`{found['settings']['adapter']}`. {clips} clips of {SIZE} visual tokens that no training "
        f"drew, descriptions of {LEAST} tokens or more in truth, {TOKENS} at most; greedy. "
        f"{found['machine']}.",
        "",
        "Made by `python -m lab seeing train`, `... draft` and "
        f"`{found['command']}`. Of {len(measured)} answers {_same(measured)} are `generate()`'s of "
        f"transformers, token for token; {_timed(raced)}. Intervals are 95 % bootstraps over "
        "clips.",
        "",
        *_training(found["training"]),
        *_said(found["told"], found["forced"]),
        *_sets(found["looked"]),
        *_alone(measured),
        *_drafted(measured),
        *_raced(raced, found["costs"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _timed(raced: Sequence[Row]) -> str:
    if not raced:
        return "none was timed"
    return f"of {len(raced)} timed ones {_same(raced)} are plain decoding's"


def _same(rows: Sequence[Row]) -> int:
    return sum(row["same"] for row in rows)


def _told(values: Sequence[float]) -> str:
    return _words(interval(values)) if values else ""


def _words(found: Sequence[float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found)


def _training(stages: Sequence[Row]) -> Iterator[str]:
    yield from ("## Training", "")
    yield "By one thread. Content words are those of the batches, the truth read, in sixths of it."
    yield from ("", "| | stage | steps | conversations | CPU seconds | loss | content words |")
    yield "|-|-|-|-|-|-|-|"
    for row in stages:
        curve = row["curve"]
        loss = f"{curve[0]['loss']:.2f} to {curve[-1]['loss']:.2f}"
        content = " ".join(f"{at['content']:.2f}" for at in curve if "content" in at)
        yield (
            f"| {row['of']} | {row['stage']} | {row['steps']:,} | {row['samples']:,} | "
            f"{row['cpu_s']:,.0f} | {loss} | {content} |"
        )
    yield ""


def _said(told: Sequence[Row], forced: Sequence[Row]) -> Iterator[str]:
    yield from ("## What it says", "")
    yield (
        f"{len(told)} greedy descriptions, F1 of their content words and the truth's: "
        f"{_told([row['own'] for row in told])} with the clip, "
        f"{_told([row['other'] for row in told])} with another."
    )
    yield ""
    if not forced:
        return
    yield f"Content words right where the truth before them is read, over {FORCED} clips each:"
    yield from ("", "| visual tokens | | with the clip | with another | with none |", "|-|-|-|-|-|")
    shares = {(row["size"], row["task"], row["view"]): row["content"] for row in forced}
    for size, task in dict.fromkeys((row["size"], row["task"]) for row in forced):
        cells = [f"{shares[size, task, view]:.2f}" for view in ("own", "other", "none")]
        yield f"| {size} | {task} | " + " | ".join(cells) + " |"
    yield ""


def _sets(looked: Sequence[Row]) -> Iterator[str]:
    yield from ("## Where it looks while it answers", "")
    yield (
        f"{len({row['document'] for row in looked})} clips. Of the attention that a clip gets at "
        "a moment of the answer, the share on a set of its "
        "tokens; how often the next token is the same where the model sees that set alone; and "
        f"that less the same at random, where the interval is over clips and {RANDOM_DRAWS} draws."
    )
    at = [f"{keep:g}" for keep in KEEPS]
    head = [f"{what} {keep}" for what in ("on it at", "same at", "less random at") for keep in at]
    yield from ("", "| set | " + " | ".join(head) + " |", "|-|" + "-|" * len(head))
    by: dict[tuple[str, float], dict[str, Row]] = {}
    for row in looked:
        by.setdefault((row["chosen"], row["keep"]), {})[row["document"]] = row
    draws = {RANDOM.format(draw) for draw in range(RANDOM_DRAWS)}
    for name in dict.fromkeys(row["chosen"] for row in looked if row["agrees"] is not None):
        if name in draws:
            continue
        cells = [f"{fmean(r['mass'] for r in by[name, keep].values()):.2f}" for keep in KEEPS]
        cells += [_told([r["agrees"] for r in by[name, keep].values()]) for keep in KEEPS]
        cells += [_words(crossed(less_random(by, name, keep))) for keep in KEEPS]
        yield f"| {name} | " + " | ".join(cells) + " |"
    if not looked:
        return
    chance = {keep: random(by, keep) for keep in KEEPS}
    cells = [f"{keep:.2f}" for keep in KEEPS]
    cells += [_words(crossed(chance[keep])) for keep in KEEPS]
    yield "| random | " + " | ".join(cells) + " | | |"
    yield ""


def random(by: Mapping[tuple[str, float], Mapping[str, Row]], keep: float) -> np.ndarray:
    """How often the next token is the same over a set at random: [clip, draw]."""
    each = [by[RANDOM.format(draw), keep] for draw in range(RANDOM_DRAWS)]
    return np.array([[own[clip]["agrees"] for own in each] for clip in each[0]])


def less_random(
    by: Mapping[tuple[str, float], Mapping[str, Row]], name: str, keep: float
) -> np.ndarray:
    """The same over a set that was chosen, less that: [clip, draw]."""
    own = by[name, keep]
    clips = [own[clip]["agrees"] for clip in by[RANDOM.format(0), keep]]
    return np.array(clips)[:, None] - random(by, keep)


def _by(measured: Sequence[Row], method: str, what: str) -> dict[str, float]:
    return {row["document"]: row[what] for row in measured if row["method"] == method}


def _count(measured: Sequence[Row], methods: Sequence[str]) -> int:
    """How many clips all of these answered."""
    return min(len(_by(measured, method, "tau")) for method in methods)


def _over(own: Mapping[str, float], than: Mapping[str, float]) -> list[float]:
    return [own[clip] / than[clip] for clip in own if clip in than]


def _alone(measured: Sequence[Row]) -> Iterator[str]:
    yield from ("## Drafting for itself", "")
    yield (
        f"{_count(measured, SELF)} clips. Tau is tokens a forward of the target, its own "
        "included, of a chain of 9 (`specvlm-self`: "
        "its tree); *over* is of the same clip and share kept, `std`'s and `streaming`'s."
    )
    yield from ("", "| method | tau | over `std` | over `streaming` | accepted |", "|-|-|-|-|-|")
    for method in SELF:
        own, rest = _by(measured, method, "tau"), method.rpartition("/")[2]
        if not own:
            continue
        over = [
            "" if method == f"{other}/{rest}" else
            _told(_over(own, _by(measured, f"{other}/{rest}", "tau")))
            for other in ("std", "streaming")
        ]  # fmt: skip
        accepted = fmean(_by(measured, method, "accepted").values())
        yield f"| `{method}` | {_told([*own.values()])} | {' | '.join(over)} | {accepted:.2f} |"
    yield ""


def _drafted(measured: Sequence[Row]) -> Iterator[str]:
    yield from ("## With a draft of 11.5 million weights", "")
    yield (
        f"{_count(measured, DRAFTED)} clips. Four layers of 192, the pair's draft in the language "
        "model's words. Tau as above; "
        "*less* is of the same clip, `specvlm/keep=0.1`'s; nodes are of a round."
    )
    base = "specvlm/keep=0.1"
    yield from ("", f"| method | tau | less `{base}` | nodes |", "|-|-|-|-|")
    than = _by(measured, base, "tau")
    for method in DRAFTED:
        own = _by(measured, method, "tau")
        if not own:
            continue
        less = "" if method == base else _told([own[c] - than[c] for c in own if c in than])
        nodes = fmean(_by(measured, method, "drafted").values())
        yield f"| `{method}` | {_told([*own.values()])} | {less} | {nodes:.1f} |"
    yield ""


def _raced(raced: Sequence[Row], costs: Sequence[Row]) -> Iterator[str]:
    if not raced:
        return
    (cost,) = costs
    one = cost["seconds"][0]
    each = zip(cost["rows"], cost["seconds"], strict=True)
    times = ", ".join(f"{took / one:.2f} ({rows})" for rows, took in each)
    clips = len({row["document"] for row in raced})
    yield from ("## Seconds", "")
    yield (
        f"{clips} of the clips by every method in turn, {cost['threads']} threads, one model in "
        f"memory; before them the machine had {cost['load']:.1f} processes at work on average. "
        "Speed is over `ar` on the same clip: of decoding, and of whole answers. T(n)/T(1) of the "
        f"target over {cost['context']:,} keys, by n: {times}; T(1) is {1e3 * one:.0f} ms."
    )
    yield from ("", "| method | tau | decoding | whole answers | same ids |", "|-|-|-|-|-|")
    plain = {row["document"]: row for row in raced if row["method"] == "ar"}
    for method in dict.fromkeys(row["method"] for row in raced):
        own = [row for row in raced if row["method"] == method]
        tau = fmean(row["tau"] for row in own)
        speeds = [
            _told([plain[row["document"]][what] / row[what] for row in own])
            for what in ("decode_seconds", "seconds")
        ]
        yield f"| `{method}` | {tau:.2f} | {' | '.join(speeds)} | {_same(own)} of {len(own)} |"
    yield ""
