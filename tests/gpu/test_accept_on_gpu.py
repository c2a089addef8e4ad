"""Claims about the acceptance command over a pretended GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from beside import Inside, hired
from pretended import pretend_gpus

from lab.acceptance.models import Models
from lab.acceptance.report import Report
from lab.acceptance.sections import SMALL, Acceptance

pytestmark = pytest.mark.slow

METHODS = ("ar", "sd-tree", "specvlm", "tabed", "pearl")  # every other is tried elsewhere
CPU = torch.device("cpu")
SECTIONS = [*Acceptance(Report(Path("unused"), 1, CPU), Models(CPU, True), SMALL).sections()]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_passes_on_two_pretended_gpus(section: str, tmp_path: Path) -> None:
    """Claim: each section of the acceptance finds nothing wrong, mixes no devices and captures
    steps that are replayed. Fails on what a GPU would stumble over in the command itself."""
    device = torch.device("cuda:0")
    with pretend_gpus(2) as record, hired(Inside()), torch.no_grad():
        report = Report(
            tmp_path / "a.jsonl", 3000, device, judges_time=False, start_time=time.time()
        )
        Acceptance(report, Models(device, True), SMALL, METHODS).run([section])
        assert report.failures == []
        assert record.errors == []
    lines = [json.loads(line) for line in report.path.read_text().splitlines()]
    assert lines and all(line["section"] == section for line in lines)
    if section in ("right answers", "steps", "whole answers"):
        assert record.counts["capture"] > 0 and record.counts["replay"] > 0
