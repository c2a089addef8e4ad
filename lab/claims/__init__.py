"""Judges the papers' claims from stored runs, and makes the page of what holds here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from lab.claims import hippo, sage, sparse_to_dense, specvlm, tabed
from lab.claims.claim import Claim, StoredResults
from lab.claims.rule import Finding, Verdict
from saccade.core.errors import SaccadeError

CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "SpecVLM": specvlm.CLAIMS,
    "Sparse-to-Dense": sparse_to_dense.CLAIMS,
    "TABED": tabed.CLAIMS,
    "SAGE": sage.CLAIMS,
    "HIPPO": hippo.CLAIMS,
}
INTRODUCTION = ""


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
