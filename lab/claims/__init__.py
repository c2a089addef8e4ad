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

Made by `python -m lab claims docs/results` from the runs and figures stored beside it; a test
fails where this page and they disagree. Target and drafts are the embedded pair, genuinely trained
but tiny, on a synthetic world, in fp32 on two cores of a CPU: a claim that *does not hold here* is
not refuted for a 72B model on video from the wild, and one that holds is not proven for it.
Intervals are 95 % bootstraps over items; an ordering holds where the whole interval of the
difference on the same item lies on the claimed side, for the draft that never saw pruned video
(first) and for the one trained on it. *Partly*: for some of what is compared. *Printed* is the
paper's number in its own unit; ours are in the same. Tau of SpecVLM and SAGE is accepted tokens,
of TABED tokens a block, the target's own included; a difference of two taus is the same in both.
Where a verdict rests on seconds they are of November 24, 2026, and two threads of a machine with
nothing else to do; captions' are processor seconds of one thread. `papers-2k` has 12 items and one
random draw each, `papers-256` 10 a suite (wide intervals); figures have five draws. Figures and
runs of acceptance alone are of the same day, by one thread beside others.
The last column judges again what a language model alone can settle, on SmolLM2-135M-Instruct (Q4_1,
dequantised): over [documents](real.md), where the target drafts for itself, and with [a draft model
of ours](real-drafts.md) where a claim is about one, or says what it would take; and *on clips* of
512 visual tokens (sixteen), by the same model once it has [learnt to see](seeing.md)
the drawn world. The counts leave it out.
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
        raise StaleClaim("write anew why: " + "; ".join(stale))
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
