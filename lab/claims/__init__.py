"""Judges the papers' claims from stored runs, and makes the page of what holds here.

A module for each paper lists its claims, each with the function that judges it. ``lab.claims.rule``
has the rule by which all of them do. A finding is a verdict with the numbers that it rests on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import get_args

from lab.claims import hippo, pretrained_pair, real, sage, seeing, sparse_to_dense, specvlm, tabed
from lab.claims.claim import Claim, StoredResults
from lab.claims.outdated import OUTDATED
from lab.claims.rule import ARITHMETIC, NO_RUN, Finding, Verdict
from saccade.core.errors import SaccadeError

CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "SpecVLM": specvlm.CLAIMS,
    "Sparse-to-Dense": sparse_to_dense.CLAIMS,
    "TABED": tabed.CLAIMS,
    "SAGE": sage.CLAIMS,
    "HIPPO": hippo.CLAIMS,
}
INTRODUCTION = """\
# What the papers claim, and what holds here

For readers who ask which results of five papers hold for a small model on a CPU.
`python -m lab claims` makes this page from stored runs, and a test fails where the two disagree.

Target and drafts are the embedded pair, which is trained but tiny, in fp32 on two cores of a CPU.
A claim that does not hold here is not refuted for a 72B model on real video. A claim that holds
here is not proven for it.

## The rule

One function judges every claim. It compares two values of the same item, in one unit, over every
suite of the run. The mean over items has a 95 % bootstrap interval. The claimed range is above 0
for a difference, above 1 for a ratio, within 5 % for what is called the same or negligible, above
a half for most, and otherwise the paper's own number.

| verdict | when |
|-|-|
| holds | every interval lies within the claimed range |
| partly | some do, and more than one in forty |
| does not hold | every interval lies outside |
| not shown | anything else, and fewer than 6 items |
| not testable here | the premise is missing |
| to be run again | the run is outdated, so no number is shown |

Where a figure stores means without items, the interval is as wide as the two means allow. Where
more than four intervals are compared, the lowest and the highest are shown. A theorem is judged by
its worst case, and has no interval, because nothing is sampled. *Printed* is the paper's number:
*A of B* is the better of the two first.

The cell *run* has the command that makes the deciding run again: `lab X` stands for `python -m lab
X`. `lab run` with `--show` prints the benchmark's arguments.

The last column judges again on weights that others trained. Without a word before it, a verdict is
on SmolLM2-135M-Instruct (Q4_1, dequantised), over [documents](real.md) and with [one draft of
ours](real-drafts.md). *Clips* are of 512 visual tokens, after it was [trained to see](seeing.md).
*Pair* is Qwen2.5-Coder 1.5B with its 0.5B in bf16 [on an H100](real-pair-h100.md): 20 questions
about code, 20 of prose and nine documents of 2,000 to 8,000 tokens. The column is empty where a
claim needs video or a proof.
"""


class StaleClaim(SaccadeError):
    """A verdict differs from the one that its explanation was written for."""


def page(results: StoredResults) -> str:
    """Returns the whole page in Markdown.

    Raises StaleClaim where an explanation no longer fits its verdict.
    """
    findings = {
        paper: [(claim, claim.judge(results)) for claim in claims]
        for paper, claims in CLAIMS.items()
    }
    stale = [
        f"{paper}, {claim.place}: {finding.verdict}, not {claim.expected} ({finding.number})"
        for paper, own in findings.items()
        for claim, finding in own
        if finding.verdict != claim.expected
    ]
    if stale:
        raise StaleClaim("these verdicts changed and need a new explanation: " + "; ".join(stale))
    lines = [
        *(INTRODUCTION, *_summary_table(findings), *_findings()),
        *_machines_table(findings, results),
        *_outdated_table(),
    ]
    for paper, own in findings.items():
        head = (
            "| where | claim | printed | here | unit: mean [interval] | visual tokens; suites x "
            "items | run | why | real weights |"
        )
        lines += ["", f"## {paper}", "", head, "|-|-|-|-|-|-|-|-|-|"]
        lines += [
            _row(claim, finding, _real_weights_cell(claim, results)) for claim, finding in own
        ]
    return "\n".join(lines) + "\n"


def _summary_table(findings: Mapping[str, list[tuple[Claim, Finding]]]) -> Iterable[str]:
    verdicts = get_args(Verdict)
    yield f"| paper | claims | {' | '.join(verdicts)} |"
    yield "|-|" + "-:|" * (1 + len(verdicts))
    for paper, own in findings.items():
        count = Counter(finding.verdict for _, finding in own)
        numbers = " | ".join(str(count[verdict]) for verdict in verdicts)
        yield f"| {paper} | {len(own)} | {numbers} |"


def _findings() -> Iterable[str]:
    """Yields what the claims show beyond their verdicts, one sentence or two a claim."""
    yield from ("", "## Findings", "")
    for paper, claims in CLAIMS.items():
        for claim in claims:
            if claim.published:
                yield f"- {claim.published} ({paper}, {claim.place})"


def _machines_table(
    findings: Mapping[str, list[tuple[Claim, Finding]]], results: StoredResults
) -> Iterable[str]:
    """Yields the table of the machines on which the runs and figures were made that decide claims.

    A row is a machine with its runs and figures. Where claims are judged by seconds, which depend
    on the machine, the row is apart from that where counts of tokens decide. A run of both kinds of
    claims is in two rows.
    """
    deciding = {
        (finding.source, any(each.unit.is_time for each in finding.comparisons))
        for own in findings.values()
        for _, finding in own
        if finding.source not in (ARITHMETIC.source, NO_RUN.source)
    }
    by_machine: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for source, is_time in sorted(deciding):
        made = results.environment(source)
        unit = "seconds" if is_time else "counts"
        by_machine[made["processor"], str(made["threads"]), made["torch"], unit].append(source)
    yield from ("", "## Where the runs were made", "")
    yield "| processor | threads | torch | deciding by | runs and figures |"
    yield "|-|-:|-|-|-|"
    for made_on, sources in sorted(by_machine.items()):
        yield f"| {' | '.join(made_on)} | {', '.join(sources)} |"


def _outdated_table() -> Iterable[str]:
    """Yields the table of the outdated stored runs and of the reasons; nothing if none is."""
    if not OUTDATED:
        return
    yield from ("", "## Runs that are outdated", "")
    yield from ("| outdated | for | because |", "|-|-|-|")
    for each in OUTDATED:
        concerned = ", ".join(f"`{method}`" for method in each.methods) or "all methods"
        if each.only_seconds:
            concerned = "seconds"
        names = ", ".join(name for name, digest in each.digests.items() if digest)
        yield f"| {names} | {concerned} | {each.reason} |"


def _real_weights_cell(claim: Claim, results: StoredResults) -> str:
    """Returns the verdicts on real weights: over documents, over clips and of the pair."""
    judges = (real, seeing, pretrained_pair)
    return " ".join(filter(None, (each.cell(claim, results) for each in judges)))


def _extent(finding: Finding) -> str:
    """Returns the visual tokens, and suites x items, that a verdict is over.

    Where there are no items, the name of what decided stands in the place of suites x items.
    """
    count = f"{finding.suites} x {finding.items}" if finding.items else finding.source
    return f"{finding.visual_tokens or 'none'}; {count}"


def _row(claim: Claim, finding: Finding, real_weights: str) -> str:
    numbers = f"{finding.unit}: {finding.number}" if finding.unit else finding.number
    extent = _extent(finding)
    cells = (
        claim.place,
        claim.text,
        claim.printed,
        f"**{finding.verdict}**",
        numbers,
        extent,
        f"`{claim.command}`" if claim.command else "",
        claim.why,
        real_weights,
    )
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
