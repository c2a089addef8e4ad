"""Claims about the planted bugs: they fit the code, and the quickest are noticed here too.

``make mutants`` plants all of them. This file belongs to the slow tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bugs import BUGS
from run import ROOT, Witness, fate_of

pytestmark = pytest.mark.slow

QUICK = (
    "the residual is |p - q|",
    "drafting, accepting and drawing share one noise",
    "messages of an older job",
    "its neighbour's path",
    "control",
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_fits_the_code(bug):
    """Claim: its pattern matches exactly once, the change is code, and its tests exist.

    Fails if the code that it changes was rewritten: then the bug has to be rewritten as well.
    """
    source = bug.changed_source()
    if bug.file.endswith(".c"):
        if shutil.which("cc") is not None:
            subprocess.run(["cc", "-fsyntax-only", "-xc", "-"], input=source, text=True, check=True)
    else:
        compile(source, bug.file, "exec")
    for name in bug.tests:
        file, _, test = name.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text


def test_no_two_bugs_share_a_name_and_one_is_a_control():
    """Claim: a name chooses one bug, and at least one harmless change shows what survives."""
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert any(bug.survives for bug in BUGS)


def test_the_quickest_are_killed_and_the_control_survives():
    """Claim: the command plants, runs and reports: bugs are killed, a renamed variable is not.

    Fails if the copy is not what was imported, or if any change at all counts as killed.
    """
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--json", "--only", *QUICK]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    numbers = json.loads(run.stdout)
    assert numbers["killed"] == numbers["planted"] >= len(QUICK) - 1
    assert numbers["controls_survived"] == numbers["controls"] == 1
    assert numbers["wrong"] == [] and numbers["seconds"] > 0


def test_only_a_failed_test_kills():
    """Claim: nothing collected, a crash while importing and the wrong copy are no kills."""
    assert fate_of(1, True, 3, "it differs")[0] == "killed"
    assert fate_of(0, True, 3, None)[0] == "survived"
    assert fate_of(0, True, 0, None)[0] == "broken"  # All were skipped.
    assert fate_of(1, False, 3, "it differs")[0] == "broken"
    for code in (1, 2, 3, 4, 5):
        assert fate_of(code, True, 0, None)[0] == "broken"
    assert Witness().failed is None
