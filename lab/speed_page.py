"""Makes docs/results/speed.md, which shows every ratio of ``lab.speed`` and its goal if it has one.

The page is made from stored runs of ``python -m lab speed`` and of ``saccade compare``. A run of
the former consists of parts: some clips of a suite, with the methods that answered them. The page
ends with the comparisons of the latter, clip by clip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from lab.numbers import PROCESSORS

HEAD = """\
# Speed: every ratio with a goal

For whoever checks a ratio of [the results](../numbers.md) or measures a change.
`python -m lab numbers` writes this page from the stored runs. What was tried on the way is in the
[notebook](../../notebook/speed.md).

All runs are of the embedded pair in fp32 on two cores, greedy. `ar` is plain decoding and `hf` is
transformers' `generate`. *Best* is one method for all clips of a part. Intervals are bootstraps
over few clips, so they are wide.

```
SACCADE_CACHE=$(mktemp -d) python -m lab speed --threads 2 --json --out docs/results/speed.json
saccade compare CLIP --every-frame --threads 2 --json
```
"""
# The best fixed method of a clip is sought among all others. ``auto`` stops drafting where that
# does not pay, and the last two never draft. (In `lab.ratios` and `lab.numbers` the best fixed
# method may be plain decoding, ``ar``.)
METHODS_NOT_FIXED = ("auto", "ar", "hf")
COMPARISONS = {
    "compare.json": "with a C compiler",
    "compare-torch.json": "where no C compiler is found",
}


def page(results: Path) -> str:
    """Returns the whole page."""
    sections = [HEAD]
    for processor in PROCESSORS:
        stored = json.loads((results / f"speed{processor.suffix}.json").read_text())
        sections.append("\n".join(_processor_section(processor.name, stored)))
    sections.append("## Clip by clip, by `saccade compare`\n")
    for name, where in COMPARISONS.items():
        stored = json.loads((results / name).read_text())
        sections.append("\n".join(_comparison_section(where, stored)))
    return "\n".join(sections)


def _processor_section(name: str, stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of one processor: what ran, every ratio, and how long each method took."""
    about = stored["environment"]
    yield f"## {name}\n"
    yield (
        f"torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['threads']} threads, {stored['repeat']} turns a method on each clip.\n"
    )
    yield "| part | ratio | measured | 95 % | goal | | best |\n|-|-|-|-|-|-|-|"
    for ratio in stored["ratios"]:
        yield _ratio_row(ratio)
    yield "\n| part, clips | method | tau | ms a token | before decoding, s | whole, s |"
    yield "|-|-|-|-|-|-|"
    for part in stored["parts"]:
        for method, row in part["methods"].items():
            tau = "" if row["tau"] is None else f"{row['tau']:.2f}"
            cells = [f"{part['part']}, {len(part['clips'])} of {part['suite']}", f"`{method}`", tau]
            cells.append(f"{row['ms a token']:.2f}")
            cells += [f"{row[when]:.3f}" for when in ("before seconds", "total seconds")]
            yield f"| {' | '.join(cells)} |"
    same = all(part["identical"] for part in stored["parts"])
    yield "\nEvery answer is plain decoding's, token for token.\n" if same else ""


def _ratio_row(ratio: Mapping[str, Any]) -> str:
    outcome = {True: "met", False: "**missed**", None: ""}[ratio["met"]]
    goal = "" if ratio["goal"] is None else str(ratio["goal"])
    interval = "" if ratio["interval"] is None else "{:.2f} to {:.2f}".format(*ratio["interval"])
    best = f"`{ratio['detail']['best']}`" if "best" in ratio["detail"] else ""
    measured = "" if ratio["value"] is None else f"**{ratio['value']:.2f}**"
    return (
        f"| {ratio['part']} | {ratio['name']} | {measured} | {interval} | {goal} | {outcome} | "
        f"{best} |"
    )


def _comparison_section(where: str, stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row for each clip: `auto`'s speedups over `ar`, `hf` and the fastest fixed method.

    The fastest fixed method is that of the clip alone. A row of medians comes last. ``where`` says
    in words on what kind of machine ``stored`` was run.
    """
    yield f"### {len(stored)} clips of 2,048 visual tokens, {where}\n"
    yield (
        "| clip | tokens | `auto` / `ar`, decoding | whole | `auto` / `hf`, decoding | "
        "`auto` / best fixed | which |\n|-|-|-|-|-|-|-|"
    )
    ratios_by_clip: list[tuple[float, ...]] = []
    for clip, run in stored.items():
        methods = run["methods"]
        auto = methods["auto"]
        fixed = {
            method: row["decode_seconds"]
            for method, row in methods.items()
            if method not in METHODS_NOT_FIXED
        }
        best = min(fixed, key=lambda method: fixed[method])
        ratios = (
            auto["speedup_decode"],
            auto["speedup_end_to_end"],
            methods["hf"]["decode_seconds"] / auto["decode_seconds"],
            fixed[best] / auto["decode_seconds"],
        )
        ratios_by_clip.append(ratios)
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        yield f"| {clip} | {auto['tokens']} | {cells} | `{best}` |"
    columns = zip(*ratios_by_clip, strict=True)
    medians = " | ".join(f"{median(column):.2f}" for column in columns)
    yield f"| median | | {medians} | |\n"
