"""Every family and method against ``model.generate()``, many prompts long: ``make families``.

Appends one JSON line per (family, prompt) to ``runs/families.jsonl``: what was compared, what
differed, and how much each method drafted. What is there is skipped, so it may be stopped and
started again, or split with ``--shard``. The table at the end is made of these lines alone. A line
tells the commit it was made at; after a change of the code start with another ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))  # for ``lab``

import torch
import transformers
import zoo

from lab import checkpoints
from saccade.core.errors import SaccadeError
from saccade.drafting.shapes.policies import Chain, Static
from saccade.methods import resolve

METHODS = ("ar", "sd", "specvlm", "std", "sage", "hippo")
COUNT = 64
OUT = Path("runs/families.jsonl")

Line = dict[str, Any]
HERE = Path(__file__).parent
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}


@dataclass(frozen=True)
class Job:
    """One prompt of one family: all there is to know to ask it again."""

    family: str
    prompt: int

    @property
    def kind(self) -> str:
        kinds = zoo.kinds(self.family)
        return kinds[self.prompt % len(kinds)]

    @property
    def seed(self) -> int:
        """Of the weights: another target for every twenty prompts."""
        return self.prompt // 20


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@cache
def commit() -> str:
    """Of the code at work, "-dirty" if it has changed since."""
    process = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    )
    return process.stdout.strip() or "unknown"


# -- one prompt --------------------------------------------------------------------------------


def compare(job: Job, methods: Sequence[str], count: int) -> Line:
    """Asks one prompt of every method and of ``generate``."""
    target, draft = zoo.member(job.family, job.seed), zoo.draft_of(job.family, job.seed)
    inputs = zoo.make_inputs(target, job.kind, job.prompt)
    expected = zoo.hf_greedy(target, inputs, count)
    line: Line = {
        "family": job.family,
        "prompt": job.prompt,
        "kind": job.kind,
        "seed": job.seed,
        "prompt_tokens": int(inputs["input_ids"].shape[1]),
        "tokens": len(expected),
        "different_ids": len(set(expected)),
        **VERSIONS,
        "commit": commit(),
        "methods": {},
    }
    for method in methods:
        result = zoo.run(target, draft, inputs, method, count)
        mine = list(result.ids)
        wrong = [i for i, (a, b) in enumerate(zip(mine, expected, strict=False)) if a != b]
        same = mine == expected
        # how many tokens agree with generate's up to the first that does not
        agreed = len(expected) if same else (wrong or [min(len(mine), len(expected))])[0]
        line["methods"][method] = {
            "same": same,
            "agreed": agreed,
            "rounds": len(result.rounds),
            "emitted": sum(len(round.emitted) for round in result.rounds),
            "drafted": sum(len(round.tokens) for round in result.rounds),
            **zoo.tally(result),
            "fallback": result.fallback_reason,
        }
        if not same:
            line["methods"][method] |= {"ids": mine, "expected": expected}
    return line


# -- what is done ------------------------------------------------------------------------------


def load(path: Path) -> list[Line]:
    """The lines there are; a last one cut short by an interruption is asked again."""
    lines: list[Line] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append(path: Path, line: Line) -> None:
    """One whole line in one write, so that shards may share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        cut = False  # whether the last line was, by an interruption
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            cut = file.read(1) != b"\n"
        file.write((("\n" if cut else "") + json.dumps(line) + "\n").encode())


def missing(job: Job, methods: Sequence[str], count: int, lines: Sequence[Line]) -> list[str]:
    """The methods that have not answered this prompt at this length, with these versions."""
    done: set[str] = set()
    for line in lines:
        same = (line["family"], line["prompt"]) == (job.family, job.prompt)
        now = all(line[name] == version for name, version in VERSIONS.items())
        if same and now and line["tokens"] == count:
            done |= line["methods"].keys()
    return [method for method in methods if method not in done]


def sweep(jobs: Sequence[Job], methods: Sequence[str], count: int, out: Path) -> None:
    lines = load(out)
    wanted = [(job, missing(job, methods, count, lines)) for job in jobs]
    wanted = [(job, todo) for job, todo in wanted if todo]
    say(f"{len(jobs)} prompts, {len(jobs) - len(wanted)} there already")
    start = time.monotonic()
    for number, (job, todo) in enumerate(wanted, 1):
        line = compare(job, todo, count)
        append(out, line)
        bad = [name for name, one in line["methods"].items() if not one["same"] or one["fallback"]]
        pace = (time.monotonic() - start) / number
        left = pace * (len(wanted) - number)
        state = f"DIFFERS: {', '.join(bad)}" if bad else "same"
        say(
            f"{number}/{len(wanted)} {job.family} {job.prompt} ({job.kind}): {state}; "
            f"{pace:.1f} s each, {left / 60:.0f} min left"
        )


# -- what came of it ---------------------------------------------------------------------------


def mismatches(lines: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    """Answers that differ, and those that are the target's only because drafting broke down."""
    for line in lines:
        for method, one in line["methods"].items():
            if not one["same"] or one["fallback"]:
                yield line, method


def report(lines: Sequence[Line]) -> str:
    """The table of what was run: a row per family and pair of versions."""
    if not lines:
        return "Nothing was run."
    ran = {method for line in lines for method in line["methods"]}
    methods = [*[name for name in METHODS if name in ran], *sorted(ran - set(METHODS))]
    head = ["family", "kinds of prompt", "prompts", "tokens compared", "mismatches"]
    head += [f"tau {method}" for method in methods]
    rows = [[*head, "transformers", "torch"], ["-"] * (len(head) + 2)]
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["family"], line["transformers"], line["torch"]), []).append(line)
    for (family, *versions), mine in groups.items():
        kinds = list(dict.fromkeys(line["kind"] for line in mine))
        rows.append(
            [
                family,
                ", ".join(kinds),
                str(len({line["prompt"] for line in mine})),
                str(sum(line["tokens"] * len(line["methods"]) for line in mine)),
                str(sum(1 for _ in mismatches(mine))),
                *[tau(mine, method) for method in methods],
                *versions,
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tau(lines: Sequence[Line], method: str) -> str:
    """Tokens emitted per target forward (the mean accepted length, with the target's own)."""
    ran = [line["methods"][method] for line in lines if method in line["methods"]]
    rounds = sum(one["rounds"] for one in ran)
    return f"{sum(one['emitted'] for one in ran) / rounds:.2f}" if rounds else ""


def reproduce(line: Line, method: str) -> str:
    """What to type to see one mismatch again."""
    one = line["methods"][method]
    what = one["fallback"] or f"agrees on {one['agreed']} of {line['tokens']} tokens"
    return (
        f"{line['family']}, prompt {line['prompt']} ({line['kind']}), {method}: {what}\n"
        f"  uv run python tests/families/sweep.py --families {line['family']} --methods {method} "
        f"--only {line['prompt']} --tokens {line['tokens']} --out /tmp/again.jsonl"
    )


def numbers(lines: Sequence[Line]) -> Line:
    """What was compared, in a line."""
    return {
        "families": len({line["family"] for line in lines}),
        "prompts": len({(line["family"], line["prompt"]) for line in lines}),
        "methods": len({method for line in lines for method in line["methods"]}),
        "answers": sum(len(line["methods"]) for line in lines),
        "tokens": sum(line["tokens"] * len(line["methods"]) for line in lines),
        "mismatches": sum(1 for _ in mismatches(lines)),
    }


def drafting(methods: Sequence[str], lengths: Sequence[int]) -> tuple[str, ...]:
    """The methods with chains of each of these lengths in the place of a shape of fixed form.

    What drafts nothing, and a shape that adapts by itself, stay as they are.
    """
    variants: list[str] = []
    for method in methods:
        recipe = resolve(method)
        fixed = recipe.drafts and isinstance(recipe.shape, (Chain, Static))
        given = "/shape=" in method
        several = fixed and not given and lengths
        variants += [f"{method}/shape=chain-{k}" for k in lengths] if several else [method]
    return tuple(dict.fromkeys(variants))


# -- the command -------------------------------------------------------------------------------


def names(known: Sequence[str]) -> Any:
    def split(text: str) -> tuple[str, ...]:
        choices = tuple(text.split(","))
        unknown = set(choices) - set(known)
        if known and unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return choices

    return split


def share(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError("write a shard as 1/4, ..., 4/4")
    return int(number), int(of)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    families = names(tuple(checkpoints.FAMILIES))
    parser.add_argument("--families", type=families, default=zoo.FAMILIES, help="a,b,c")
    parser.add_argument("--prompts", type=int, default=200, help="a family")
    parser.add_argument("--only", type=int, help="one prompt by its number")
    parser.add_argument("--methods", type=names(()), default=METHODS, help="a,b,c")
    parser.add_argument(
        "--gamma", type=int, nargs="+", default=(), metavar="K", help="chains of K tokens, each"
    )
    parser.add_argument("--tokens", type=int, default=COUNT, help="an answer")
    parser.add_argument("--shard", type=share, default=(1, 1), help="i/n: every n-th prompt")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="the table of what was run, alone")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for a scorecard")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if not options.report:
        torch.set_num_threads(1)
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        prompts = range(options.prompts) if options.only is None else [options.only]
        number, of = options.shard
        jobs = [Job(family, prompt) for family in options.families for prompt in prompts]
        try:
            methods = drafting(options.methods, options.gamma)
            sweep(jobs[number - 1 :: of], methods, options.tokens, options.out)
        except KeyboardInterrupt:
            say("stopped; the same command goes on from here")
            return 130
        except SaccadeError as error:
            say(str(error))
            return 2
    lines = load(options.out)
    sys.stdout.write((json.dumps(numbers(lines)) if options.json else report(lines)) + "\n")
    wrong = list(mismatches(lines))
    for line, method in wrong:
        say(reproduce(line, method))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
