"""Judges the papers' claims from stored runs, and makes the page of what holds here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from lab.claims import hippo, real, sage, seeing, sparse_to_dense, specvlm, tabed
from lab.claims.claim import Claim, Finding, StoredResults, Verdict
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

This page judges the claims of five papers by the runs and figures that are stored beside it. It is
for readers who ask which of the papers' results hold for a small model on a CPU. The command
`python -m lab claims docs/results` makes it, and a test fails where the page and the runs disagree.

Target and drafts are the embedded pair. It is genuinely trained but tiny, it sees a synthetic
world, and it runs in fp32 on two cores of a CPU. A claim that *does not hold* here is not refuted
for a 72B model on real video, and a claim that holds here is not proven for it.

- Intervals are 95 % bootstraps over items.
- An ordering holds where the whole interval of the difference on the same item lies on the claimed
  side. It has to hold for the draft that never saw pruned video (named first) and for the one that
  was trained on it. *Partly* means that it holds for some of what is compared.
- *Printed* is the paper's number in its own unit. Our numbers are in the same unit.
- For SpecVLM and SAGE tau is accepted tokens. For TABED it is tokens per block, the target's own
  included. A difference of two taus is the same in both.
- Seconds are of November 24, 2026, with two threads on a machine without other work. Captions are
  measured in processor seconds of one thread. Figures and runs of acceptance alone are of the same
  day, with one thread beside other work.
- `papers-2k` has 12 items and one random draw for each. `papers-256` has 10 items a suite, so its
  intervals are wide. Figures have five draws.

The last column judges claims again that need a language model alone, on SmolLM2-135M-Instruct
(Q4_1, dequantised). Over [documents](real.md) the target drafts for itself, and where a claim is
about a draft model there is [one of ours](real-drafts.md). Where there is no verdict, the column
says what one would need. *On clips* means sixteen clips of 512 visual tokens, read by the same
model after it was [trained to see](seeing.md) the drawn world. The counts leave this column out.
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
    lines = [INTRODUCTION, *_summary_table(findings)]
    for paper, own in findings.items():
        head = f"| where | claim | printed | here | numbers | why | run | {real.NAME} |"
        lines += ["", f"## {paper}", "", head, "|-|-|-|-|-|-|-|-|"]
        lines += [
            _row(claim, finding, _real_weights_cell(claim, results)) for claim, finding in own
        ]
    return "\n".join(lines) + "\n"


def _summary_table(findings: Mapping[str, list[tuple[Claim, Finding]]]) -> Iterable[str]:
    yield "| paper | claims | hold | partly | do not hold | not measured |"
    yield "|-|-:|-:|-:|-:|-:|"
    for paper, own in findings.items():
        count = Counter(finding.verdict for _, finding in own)
        numbers = " | ".join(str(count[verdict]) for verdict in get_args(Verdict))
        yield f"| {paper} | {len(own)} | {numbers} |"


def _real_weights_cell(claim: Claim, results: StoredResults) -> str:
    """Returns the verdicts on real weights, over documents and over clips."""
    return " ".join(filter(None, (each.cell(claim, results) for each in (real, seeing))))


def _row(claim: Claim, finding: Finding, real_weights: str) -> str:
    cells = (
        claim.place,
        claim.text,
        claim.printed,
        f"**{finding.verdict}**",
        finding.number,
        claim.why,
        f"`{claim.source}`" if claim.source else "",
        real_weights,
    )
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
