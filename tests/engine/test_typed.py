"""The claim that annotations are true, over tests that between them run every method."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from beside import fork

TESTS = Path(__file__).parents[1]
OURS = tuple(str(TESTS.parent / name) for name in ("src", "tests", "lab", "examples"))
PACKAGES = ("core", "model", "drafting", "methods", "engine")
METHODS = ("engine/where_checked.py",)
EVERYTHING = (
    *METHODS,
    "core",
    "drafting/views",
    "model/test_attention.py",
    "model/test_session.py::test_a_session_starts_where_hugging_faces_forward_ends",
    "model/test_session.py::test_a_turn_forgets_what_was_scored_before_it",
)
LONG = (  # Left out: shorter tests make the same calls.
    *("read_in_odd_chunks", "a_selector_is_its_definition", "a_selector_keeps_exactly"),
    *("noise_is_uniform", "can_read_averaged_rows"),
)


def run_checked(log: Path, tests: tuple[str, ...], *options: str) -> None:
    """Runs tests over a package that is imported anew, checked in every call; ends the process."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(OURS):
            del sys.modules[name]
    hook = ",".join([*(f"saccade.{name}" for name in PACKAGES), "typecheck.check"])
    addopts = "-q --strict-markers --import-mode=importlib -m 'not slow and not vllm'"
    with log.open("w") as sys.stdout:
        code = pytest.main(
            [
                *("-p", "no:xdist", "-p", "no:cacheprovider", *options),
                *("-k", " and ".join(f"not {each}" for each in LONG)),
                *("-o", f"addopts={addopts}", f"--jaxtyping-packages={hook}"),
                *(str(TESTS / name) for name in tests),
            ]
        )
    raise SystemExit(int(code))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((METHODS,), id="some methods", marks=pytest.mark.extra),
        pytest.param((EVERYTHING, "--all-cases"), id="everything", marks=pytest.mark.slow),
    ],
)
def test_shapes_and_types_are_those_that_are_annotated(tmp_path: Path, arguments: Any) -> None:
    """Claim: every call from ``core/`` to ``engine/`` gets and returns what its annotations say.

    In a process of its own: checked calls take two to five times as long, and functions that could
    be checked half as long again also while they are not. ``make typed`` checks all tests.
    """
    process = fork(run_checked, tmp_path / "log", *arguments, daemon=False)
    process.join()
    printed = (tmp_path / "log").read_text()
    assert process.exitcode == 0 and " passed" in printed, printed[-4000:]
