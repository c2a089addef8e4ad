"""The claim that annotations are true, over tests that between them run every method."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGES = ("core", "model", "drafting", "methods", "engine")
RUN = (
    "engine/wrong_shapes.py",
    "core",
    "drafting/views",
    "model/test_session.py",
    "model/test_attention.py",
    "engine/test_greedy.py::test_a_method_answers_like_plain_greedy_decoding",
    "methods/test_fresh.py::test_the_answer_is_the_targets",
)


def test_shapes_and_types_are_those_that_are_annotated() -> None:
    """Claim: every call from ``core/`` to ``engine/`` gets and gives what it says it does.

    In a process of its own: checked calls take two to five times as long, and functions that could
    be checked half as long again also while they are not. ``make typed`` checks all tests.
    """
    hook = ",".join([*(f"saccade.{name}" for name in PACKAGES), "typecheck.check"])
    options = "-q --strict-markers --import-mode=importlib -m 'not slow and not vllm'"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("-o", f"addopts={options}", f"--jaxtyping-packages={hook}"),
            *(str(TESTS / name) for name in RUN),
        ],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 200, done.stdout[-200:]
