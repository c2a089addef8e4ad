"""Plants each bug of ``planted.py`` in a copy of the package and sees that a test notices it.

``make mutants``. The working tree is never touched: the package is copied to a temporary folder,
one change is made there, and the tests named for it run over that copy, which is checked to be the
one that was imported. A mutant is *killed* by a test that fails or does not end; one that no test
notices *survives*, and that, a change that does not fit the code any more or breaks it outright,
makes this command end with 1. One control changes nothing and must survive.

Each mutant is a process forked from one that has imported torch already, so it takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

from planted import MUTANTS, Mutant

# As in tests/conftest.py, and before anything that is imported below imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "saccade"
LIMIT = 90.0  # seconds a mutant's tests may take
PRELOADED = [  # what is slow to import
    *("pytest", "hypothesis", "jaxtyping", "torch", "torch.multiprocessing"),
    *("transformers.generation.utils", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"),
]

Fate = Literal["killed", "survived", "broken", "no anchor"]


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant, and the line that says how."""

    name: str
    fate: Fate
    seconds: float
    why: str
    expected: Fate = "killed"

    @property
    def right(self) -> bool:
        return self.fate == self.expected


def found(mutant: Mutant) -> int:
    """How often a mutant's anchor stands in its file."""
    return (PACKAGE / mutant.file).read_text().count(mutant.old)


def plant(mutant: Mutant, folder: Path) -> None:
    """A copy of the package below ``folder``, with the bug in it."""
    copy = folder / "saccade"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in PACKAGE.rglob("*.safetensors"):  # tests of the pair must not fail for want of it
        (copy / weights.relative_to(PACKAGE)).symlink_to(weights)
    file = copy / mutant.file
    for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        stale.unlink()
    file.write_text(file.read_text().replace(mutant.old, mutant.new))


class Witness:
    """A pytest plugin: the first test that failed, by its own assertions or its code's errors."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: str | None = None

    def pytest_sessionstart(self) -> None:
        """No failing example is made smaller: nobody reads it."""
        from hypothesis import Phase, settings

        hasty = (Phase.explicit, Phase.generate)
        settings.register_profile("hasty", settings.get_profile("fixed"), phases=hasty)
        settings.load_profile("hasty")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call" and self.failed is None:
            said = str(report.longrepr).splitlines()
            first = next((line[2:] for line in said if line.startswith("E ")), said[-1])
            self.failed = f"{report.nodeid.split('::')[-1]}: {first.strip()}"
        self.passed += report.passed and report.when == "call"


def judge(folder: str, tests: Sequence[str], log: str, line: Any) -> None:
    """In a process of its own: runs the tests over the copy and sends what came of it."""
    os.setsid()  # so that what the tests start can be ended with it
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, folder)
    sys.pycache_prefix = folder  # what is compiled of the copy goes with it
    import pytest

    witness = Witness()
    code = pytest.main(
        [
            # without types checked: a mutant is to be noticed by what it does, and it is faster
            *("-o", "addopts=", "-m", "not slow", "-x", "--tb=short", "--no-header"),
            *("-p", "no:cacheprovider", "-p", "pytest_timeout"),
            *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # some are preloaded
            *(str(ROOT / "tests" / name) for name in tests),
        ],
        plugins=[witness],
    )
    import saccade

    own = Path(saccade.__file__).is_relative_to(folder)
    line.send((int(code), own, witness.passed, witness.failed))
    line.close()


def fate_of(code: int, own: bool, passed: int, failed: str | None) -> tuple[Fate, str]:
    """Killed is what a test noticed. Tests that could not be collected or imported prove nothing,
    nor do tests that ran over another copy of the package."""
    if not own:
        return "broken", "another copy of the package was imported"
    if failed is not None:
        return "killed", failed
    if code == 0 and passed:
        return "survived", f"{passed} tests passed"
    return "broken", f"pytest ended with {code}"


def last_words(log: Path) -> str:
    """What a process wrote last."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def tried(mutant: Mutant, context: Any) -> Outcome:
    """Plants one mutant and runs its tests."""
    expected: Fate = "survived" if mutant.survives else "killed"
    count = found(mutant)
    if count != 1:
        why = f"{mutant.file} holds its line {count} times"
        return Outcome(mutant.name, "no anchor", 0.0, why, expected)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plant(mutant, Path(folder))
        log = Path(folder) / "log"
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=judge, args=(folder, mutant.tests, str(log), there))
        process.start()
        there.close()
        fate: Fate = "killed"
        why = "did not end"
        try:
            if here.poll(LIMIT):
                fate, why = fate_of(*here.recv())
        except EOFError:  # it died before it could say
            fate, why = "broken", "its process died"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        if fate == "broken":
            why = f"{why}: {last_words(log)}"
    return Outcome(mutant.name, fate, time.monotonic() - began, why, expected)


def sweep(mutants: Sequence[Mutant], jobs: int, say: Any) -> list[Outcome]:
    """All of them, several at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)  # the imports are no mutant's time
    first.start()
    first.join()

    def one(mutant: Mutant) -> Outcome:
        outcome = tried(mutant, context)
        say(outcome)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="names with this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one line of JSON, for a scorecard")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = str(ROOT / "tests")  # the server forks from a process of its own
    chosen = [m for m in MUTANTS if not asked.only or any(text in m.name for text in asked.only)]

    def say(outcome: Outcome) -> None:
        mark = "  " if outcome.right else "!!"
        line = f"{mark} {outcome.fate:9} {outcome.seconds:5.1f} s  {outcome.name}: {outcome.why}"
        sys.stderr.write(line + "\n")

    began = time.monotonic()
    outcomes = sweep(chosen, asked.jobs, say)
    planted = [outcome for outcome in outcomes if outcome.expected == "killed"]
    numbers = {
        "mutants": len(planted),
        "killed": sum(outcome.fate == "killed" for outcome in planted),
        "controls": len(outcomes) - len(planted),
        "controls_survived": sum(o.right for o in outcomes if o.expected == "survived"),
        "seconds": round(time.monotonic() - began, 1),
    }
    if asked.json:
        wrong = [asdict(outcome) for outcome in outcomes if not outcome.right]
        sys.stdout.write(json.dumps({**numbers, "wrong": wrong}) + "\n")
    else:
        sys.stdout.write(
            "R6: {killed} of {mutants} planted bugs killed, {controls_survived} of {controls} "
            "controls survived, {seconds} s\n".format(**numbers)
        )
    return 0 if outcomes and all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
