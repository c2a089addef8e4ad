"""Claims about the planted bugs: they still fit the code, and the quickest are noticed here too.

They run beside the default tests, for the code may change without them: ``make mutants`` plants all
of them, and ``make slow`` runs this file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted import MUTANTS
from run import PACKAGE, ROOT, Witness, fate_of, found

pytestmark = pytest.mark.slow

ADAPTING = ("auto", "costs", "schedule", "saliency", "sage", "hippo")
QUICK = ("|p - q|", "one noise for drafting", "an older job", "sees the one before", "control")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant):
    """Claim: its line stands exactly once, it changes it, and the tests it names are there."""
    assert found(mutant) == 1 and mutant.old != mutant.new
    source = (PACKAGE / mutant.file).read_text().replace(mutant.old, mutant.new)
    if mutant.file.endswith(".c"):
        if shutil.which("cc") is not None:
            subprocess.run(["cc", "-fsyntax-only", "-xc", "-"], input=source, text=True, check=True)
    else:
        compile(source, mutant.file, "exec")
    for name in mutant.tests:
        file, _, test = name.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text


def test_there_are_enough_and_no_two_are_alike():
    """Claim: at least 70 bugs, ten of them in what adapts, and one control that must survive, by
    different names."""
    planted = [mutant for mutant in MUTANTS if not mutant.survives]
    assert 70 <= len(planted) < len(MUTANTS)
    assert sum(Path(mutant.file).stem in ADAPTING for mutant in planted) >= 10
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_quickest_are_killed_and_the_control_survives():
    """Claim: the command plants, runs and reports: four bugs killed, a renamed variable not.

    Fails if a copy is not what was imported, or if anything at all counts as killed.
    """
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--json", "--only", *QUICK]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr
    numbers = json.loads(told.stdout)
    assert numbers.pop("seconds") > 0 and numbers == {
        "mutants": 4,
        "killed": 4,
        "controls": 1,
        "controls_survived": 1,
        "wrong": [],
    }


def test_only_a_failed_test_kills():
    """Claim: nothing collected, a crash while importing and the wrong copy are no kills."""
    assert fate_of(1, True, 3, "it differs")[0] == "killed"
    assert fate_of(0, True, 3, None)[0] == "survived"
    assert fate_of(0, True, 0, None)[0] == "broken"  # all were skipped
    assert fate_of(1, False, 3, "it differs")[0] == "broken"
    for code in (1, 2, 3, 4, 5):
        assert fate_of(code, True, 0, None)[0] == "broken"
    assert Witness().failed is None
