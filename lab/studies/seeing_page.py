"""Makes the page of the language model that was trained to see, from the rows of ``seeing.py``.

A pretrained language model got the embedded pair's vision tower and an adapter that was trained on
the drawn world. The numbers come as lists of rows by kind. The kinds are "measured" (a method's
answer to a clip), "raced" (a timed answer), "told" (how true a description is), "forced" (the share
of right words where the true text before them is read), "looked" (one set of a clip's tokens, see
``lab/real/attention_sets.py``) and "costs" (seconds of forwards). A row's "document" is the name of
its clip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from lab.real.attention_sets import RANDOM_DRAWS
from lab.studies.experiment import interval_over_clips
from lab.studies.seeing import (
    DRAFT_METHODS,
    FORCED_CLIPS,
    KEEPS,
    MIN_TRUE_TOKENS,
    RANDOM_SET,
    SELF_METHODS,
    SIZE,
    TOKENS,
)
from saccade.bench.measures import RESAMPLES, Interval

Row = Mapping[str, Any]


def crossed_interval(table: np.ndarray) -> Interval:
    """Returns the mean of a table [clip, draw] with its 95 % bootstrap interval over both.

    A draw is one random set of a clip's tokens. Draws are resampled as well as clips, because the
    clips and the sets are both a few of many that could have been measured.
    """
    rng = np.random.default_rng(0)
    (clips, draws) = table.shape
    clip_samples = rng.integers(clips, size=(RESAMPLES, clips, 1))
    draw_samples = rng.integers(draws, size=(RESAMPLES, 1, draws))
    means = table[clip_samples, draw_samples].mean((1, 2))
    low, high = np.quantile(means, (0.025, 0.975))
    return float(table.mean()), float(low), float(high)


def page(stored: Mapping[str, Any]) -> str:
    """Returns the page in Markdown, from what :class:`~lab.real.answers.Results` has."""
    measured = stored["measured"]
    timed = stored["raced"]
    clips = len({row["document"] for row in measured})
    lines = [
        "# A language model that sees",
        "",
        f"This page measures {stored['model']} behind the embedded pair's vision tower. A merger "
        "and low-rank terms were trained on the drawn world (`lab/training/seeing.py`, adapter "
        f"`{stored['settings']['adapter']}`). There are {clips} clips of {SIZE} visual tokens that "
        f"no training used, whose true descriptions have {MIN_TRUE_TOKENS} tokens or more. Answers "
        f"are greedy, of {TOKENS} tokens at most. {stored['machine']}.",
        "",
        f"Made by `python -m lab seeing train`, `... draft` and `{stored['command']}`. Of "
        f"{len(measured)} answers {_count_same(measured)} are those of transformers' `generate()`, "
        f"token for token; {_timed_sentence(timed)}. Intervals are 95 % bootstraps over clips.",
        "",
        *_training_section(stored["training"]),
        *_descriptions_section(stored["told"], stored["forced"]),
        *_sets_section(stored["looked"]),
        *_self_draft_section(measured),
        *_draft_section(measured),
        *_seconds_section(timed, stored["costs"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _timed_sentence(timed: Sequence[Row]) -> str:
    if not timed:
        return "none was timed"
    return f"of {len(timed)} timed ones {_count_same(timed)} are plain decoding's"


def _count_same(rows: Sequence[Row]) -> int:
    """Returns how many answers have the ids of the reference.

    It is ``generate()`` for rows of "measured", and plain decoding for rows of "raced".
    """
    return sum(row["same"] for row in rows)


def _interval_text(values: Sequence[float]) -> str:
    """Returns the mean of values with its interval as text, or "" without values."""
    return _interval_words(interval_over_clips(values)) if values else ""


def _interval_words(interval: Sequence[float]) -> str:
    """Returns (mean, low, high) as text."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval)


def _training_section(stages: Sequence[Row]) -> Iterator[str]:
    yield from ("## Training", "")
    yield (
        "Training used one thread. *Content words* is the share of them that was right in the "
        "batches when the true text was read, in six parts of each stage."
    )
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


def _descriptions_section(descriptions: Sequence[Row], forced: Sequence[Row]) -> Iterator[str]:
    yield from ("## What it says", "")
    yield (
        f"The content words of {len(descriptions)} greedy descriptions and the true ones have an "
        f"F1 of {_interval_text([row['own'] for row in descriptions])} with the right clip and of "
        f"{_interval_text([row['other'] for row in descriptions])} with another one."
    )
    yield ""
    if not forced:
        return
    yield (
        "This is the share of content words that are right when the true text before them is read, "
        f"over {FORCED_CLIPS} clips each:"
    )
    yield from ("", "| visual tokens | | with the clip | with another | with none |", "|-|-|-|-|-|")
    shares = {(row["size"], row["task"], row["view"]): row["content"] for row in forced}
    for size, task in dict.fromkeys((row["size"], row["task"]) for row in forced):
        cells = [f"{shares[size, task, view]:.2f}" for view in ("own", "other", "none")]
        yield f"| {size} | {task} | " + " | ".join(cells) + " |"
    yield ""


def _sets_section(looked: Sequence[Row]) -> Iterator[str]:
    yield from ("## Where it looks while it answers", "")
    yield (
        f"There are {len({row['document'] for row in looked})} clips. *On it* is the share of a "
        "clip's attention that a set of its tokens gets while the model answers. *Same* is how "
        "often the next token stays the same when the model sees that set alone. *Less random* is "
        "how much more often that is than with a random set, with an interval over "
        f"clips and {RANDOM_DRAWS} draws."
    )
    shares = [f"{keep:g}" for keep in KEEPS]
    whats = ("on it at", "same at", "less random at")
    head = [f"{what} {share}" for what in whats for share in shares]
    yield from ("", "| set | " + " | ".join(head) + " |", "|-|" + "-|" * len(head))
    # By (name of the set, share of tokens in it), and then by clip.
    row_by_set: dict[tuple[str, float], dict[str, Row]] = {}
    for row in looked:
        row_by_set.setdefault((row["chosen"], row["keep"]), {})[row["document"]] = row
    draws = {RANDOM_SET.format(draw) for draw in range(RANDOM_DRAWS)}
    for name in dict.fromkeys(row["chosen"] for row in looked if row["agrees"] is not None):
        if name in draws:
            continue
        cells = [
            f"{fmean(r['mass'] for r in row_by_set[name, keep].values()):.2f}" for keep in KEEPS
        ]
        cells += [
            _interval_text([r["agrees"] for r in row_by_set[name, keep].values()]) for keep in KEEPS
        ]
        cells += [
            _interval_words(crossed_interval(gain_over_random(row_by_set, name, keep)))
            for keep in KEEPS
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"
    if not looked:
        return
    chance = {keep: random_agreement(row_by_set, keep) for keep in KEEPS}
    # The first cells are not measured: a random set of a tenth of the tokens gets a tenth of the
    # attention on average.
    cells = [f"{keep:.2f}" for keep in KEEPS]
    cells += [_interval_words(crossed_interval(chance[keep])) for keep in KEEPS]
    yield "| random | " + " | ".join(cells) + " | | |"
    yield ""


def random_agreement(
    row_by_set: Mapping[tuple[str, float], Mapping[str, Row]], keep: float
) -> np.ndarray:
    """Returns how often the next token is the same with a random set, as [clip, draw].

    ``row_by_set`` has rows by (name of the set, share of tokens in it) and then by clip.
    """
    rows_by_draw = [row_by_set[RANDOM_SET.format(draw), keep] for draw in range(RANDOM_DRAWS)]
    return np.array(
        [[row_by_clip[clip]["agrees"] for row_by_clip in rows_by_draw] for clip in rows_by_draw[0]]
    )


def gain_over_random(
    row_by_set: Mapping[tuple[str, float], Mapping[str, Row]], name: str, keep: float
) -> np.ndarray:
    """Returns how much more often the next token is the same with a set than with a random one.

    The result is [clip, draw]: a difference for each clip and each random set.
    """
    own = row_by_set[name, keep]
    # The clips are in the order of ``random_agreement``.
    agreement = [own[clip]["agrees"] for clip in row_by_set[RANDOM_SET.format(0), keep]]
    return np.array(agreement)[:, None] - random_agreement(row_by_set, keep)


def _value_by_clip(measured: Sequence[Row], method: str, what: str) -> dict[str, float]:
    """Returns the field ``what`` of a method's rows, by clip."""
    return {row["document"]: row[what] for row in measured if row["method"] == method}


def _count_clips(measured: Sequence[Row], methods: Sequence[str]) -> int:
    """Returns how many clips the method answered that answered fewest of them."""
    return min(len(_value_by_clip(measured, method, "tau")) for method in methods)


def _ratios(values: Mapping[str, float], others: Mapping[str, float]) -> list[float]:
    """Returns the value over the other one, for each clip that has both."""
    return [values[clip] / others[clip] for clip in values if clip in others]


def _self_draft_section(measured: Sequence[Row]) -> Iterator[str]:
    yield from ("## Drafting for itself", "")
    yield (
        f"There are {_count_clips(measured, SELF_METHODS)} clips. Tau is tokens per forward of the "
        "target, its own included, of a chain of 9 (for `specvlm-self` of its tree). *Over* is the "
        "ratio to `std` or `streaming` on the same clip, with the same share kept."
    )
    yield from ("", "| method | tau | over `std` | over `streaming` | accepted |", "|-|-|-|-|-|")
    for method in SELF_METHODS:
        own = _value_by_clip(measured, method, "tau")
        if not own:
            continue
        keep = method.rpartition("/")[2]  # Such as "keep=0.1".
        ratios = []
        for name in ("std", "streaming"):
            other = f"{name}/{keep}"
            taus = _value_by_clip(measured, other, "tau")
            ratios.append("" if method == other else _interval_text(_ratios(own, taus)))
        accepted = fmean(_value_by_clip(measured, method, "accepted").values())
        cells = [_interval_text([*own.values()]), *ratios, f"{accepted:.2f}"]
        yield f"| `{method}` | {' | '.join(cells)} |"
    yield ""


def _draft_section(measured: Sequence[Row]) -> Iterator[str]:
    yield from ("## With a draft of 11.5 million weights", "")
    yield (
        f"There are {_count_clips(measured, DRAFT_METHODS)} clips. The draft has four layers of "
        "width 192: it is the pair's draft with the language model's vocabulary. Tau is as above. "
        "*Less* is the difference from `specvlm/keep=0.1` on the same clip. Nodes are those of a "
        "round."
    )
    base = "specvlm/keep=0.1"
    yield from ("", f"| method | tau | less `{base}` | nodes |", "|-|-|-|-|")
    base_tau = _value_by_clip(measured, base, "tau")
    for method in DRAFT_METHODS:
        own = _value_by_clip(measured, method, "tau")
        if not own:
            continue
        gains = [own[clip] - base_tau[clip] for clip in own if clip in base_tau]
        less = "" if method == base else _interval_text(gains)
        nodes = fmean(_value_by_clip(measured, method, "drafted").values())
        yield f"| `{method}` | {_interval_text([*own.values()])} | {less} | {nodes:.1f} |"
    yield ""


def _seconds_section(timed: Sequence[Row], costs: Sequence[Row]) -> Iterator[str]:
    if not timed:
        return
    (cost,) = costs
    single_row = cost["seconds"][0]
    seconds_by_rows = zip(cost["rows"], cost["seconds"], strict=True)
    times = ", ".join(f"{took / single_row:.2f} ({rows})" for rows, took in seconds_by_rows)
    clips = len({row["document"] for row in timed})
    yield from ("## Seconds", "")
    yield (
        f"{clips} of the clips were answered by every method in turn, with {cost['threads']} "
        "threads and one model in memory. Before that the machine had "
        f"{cost['load']:.1f} running processes on average. Speeds are ratios to `ar` on the same "
        f"clip, of decoding and of whole answers. Over {cost['context']:,} keys the target's "
        f"T(n)/T(1) is {times}, with n in brackets, and T(1) is {1e3 * single_row:.0f} ms."
    )
    yield from ("", "| method | tau | decoding | whole answers | same ids |", "|-|-|-|-|-|")
    plain = {row["document"]: row for row in timed if row["method"] == "ar"}
    for method in dict.fromkeys(row["method"] for row in timed):
        own = [row for row in timed if row["method"] == method]
        tau = fmean(row["tau"] for row in own)
        speeds = [
            _interval_text([plain[row["document"]][what] / row[what] for row in own])
            for what in ("decode_seconds", "seconds")
        ]
        cells = [f"{tau:.2f}", *speeds, f"{_count_same(own)} of {len(own)}"]
        yield f"| `{method}` | {' | '.join(cells)} |"
    yield ""
