"""Plants each bug of ``bugs/`` in a copy of the package and sees that a test notices it.

``make mutants``. The working tree is never touched: the package is copied to a temporary folder,
one change is made there, and the tests that the bug names run over that copy. A bug is *killed* by
a test that fails or does not end; a bug that no test notices *survives*. The command ends with 1 if
a bug survives, does not fit the code any more, or breaks it so that no test can run. The control
changes nothing that matters and must survive.

Each bug runs in a process forked from one that has imported torch already, so it takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
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

from bugs import BUGS
from bugs.bug import PACKAGE, PlantedBug
from patterns import PatternError

# As in tests/conftest.py, and before anything that is imported below imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parents[2]
CPU_LIMIT = 90  # Seconds of a processor that the tests of a bug may take, on a busy machine too.
TIME_LIMIT = 600.0  # Seconds until tests that wait for something are ended.
PRELOADED = [  # What is slow to import.
    *("pytest", "hypothesis", "jaxtyping", "torch", "torch.multiprocessing"),
    *("transformers.generation.utils", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"),
]

Fate = Literal["killed", "survived", "broken", "no match"]


@dataclass(frozen=True)
class Outcome:
    """What became of one bug, and the line that says how."""

    name: str
    fate: Fate
    seconds: float
    why: str
    expected: Fate = "killed"

    @property
    def is_expected(self) -> bool:
        return self.fate == self.expected


def plant(bug: PlantedBug, source: str, folder: Path) -> None:
    """Copies the package into ``folder``, with ``source`` in place of the file with the bug."""
    copy = folder / "saccade"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in PACKAGE.rglob("*.safetensors"):  # tests of the pair must not fail for want of it
        (copy / weights.relative_to(PACKAGE)).symlink_to(weights)
    file = copy / bug.file
    for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        stale.unlink()
    file.write_text(source)


class Witness:
    """A pytest plugin: the first test that failed, by its own assertions or its code's errors."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: str | None = None

    def pytest_sessionstart(self) -> None:
        """Leaves failing examples as they are: nobody reads them."""
        from hypothesis import Phase, settings

        hasty = (Phase.explicit, Phase.generate)
        settings.register_profile("hasty", settings.get_profile("fixed"), phases=hasty)
        settings.load_profile("hasty")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call" and self.failed is None:
            lines = str(report.longrepr).splitlines()
            first = next((line[2:] for line in lines if line.startswith("E ")), lines[-1])
            self.failed = f"{report.nodeid.split('::')[-1]}: {first.strip()}"
        self.passed += report.passed and report.when == "call"


def judge(folder: str, tests: Sequence[str], log: str, line: Any) -> None:
    """Runs the tests over the copy, in a process of its own, and sends the result."""
    os.setsid()  # So that what the tests start can be ended together with it.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, resource.RLIM_INFINITY))
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, folder)
    sys.pycache_prefix = folder  # Compiled code of the copy is deleted with it.
    import pytest

    witness = Witness()
    code = pytest.main(
        [
            # Types are not checked: a bug is to be noticed by what it does, and this is faster.
            *("-o", "addopts=", "-m", "not slow", "--all-cases"),
            *("-x", "--tb=short", "--no-header"),
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
    """A bug is killed by a test that failed. Tests that could not be collected or imported prove
    nothing, nor do tests that ran over another copy of the package."""
    if not own:
        return "broken", "another copy of the package was imported"
    if failed is not None:
        return "killed", failed
    if code == 0 and passed:
        return "survived", f"{passed} tests passed"
    return "broken", f"pytest ended with {code}"


def last_words(log: Path) -> str:
    """The last line that a process wrote."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def try_bug(bug: PlantedBug, context: Any) -> Outcome:
    """Plants one bug and runs its tests."""
    expected: Fate = "survived" if bug.survives else "killed"
    try:
        source = bug.changed_source()
    except PatternError as error:
        return Outcome(bug.name, "no match", 0.0, f"{bug.file}: {error}", expected)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plant(bug, source, Path(folder))
        log = Path(folder) / "log"
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=judge, args=(folder, bug.tests, str(log), there))
        process.start()
        there.close()
        fate: Fate = "killed"
        why = "did not end"
        died = False
        try:
            if here.poll(TIME_LIMIT):
                fate, why = fate_of(*here.recv())
        except EOFError:  # It died before it could send anything.
            died = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        if died and process.exitcode != -signal.SIGXCPU:
            fate, why = "broken", "its process died"
        if fate == "broken":
            why = f"{why}: {last_words(log)}"
    return Outcome(bug.name, fate, time.monotonic() - began, why, expected)


def try_all(bugs: Sequence[PlantedBug], jobs: int, report: Any) -> list[Outcome]:
    """Tries all of them, ``jobs`` at a time, and reports each as it ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)  # So that the imports count in no bug's time.
    first.start()
    first.join()

    def try_one(bug: PlantedBug) -> Outcome:
        outcome = try_bug(bug, context)
        report(outcome)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(try_one, bugs))


def processor_flags() -> set[str]:
    """What this processor can do, by ``/proc/cpuinfo``."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()[2:]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="TEXT", help="bugs with this in their names"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = str(ROOT / "tests")  # The server forks from a process of its own.
    named = [b for b in BUGS if not options.only or any(t in b.name for t in options.only)]
    flags = processor_flags()
    chosen = [bug for bug in named if not bug.needs or bug.needs in flags]
    for bug in named:
        if bug not in chosen:
            sys.stderr.write(f"   not run here, without {bug.needs}: {bug.name}\n")

    def report(outcome: Outcome) -> None:
        mark = "  " if outcome.is_expected else "!!"
        line = f"{mark} {outcome.fate:9} {outcome.seconds:5.1f} s  {outcome.name}: {outcome.why}"
        sys.stderr.write(line + "\n")

    began = time.monotonic()
    outcomes = try_all(chosen, options.jobs, report)
    planted = [outcome for outcome in outcomes if outcome.expected == "killed"]
    numbers = {
        "planted": len(planted),
        "killed": sum(outcome.fate == "killed" for outcome in planted),
        "not_run": len(named) - len(chosen),
        "controls": len(outcomes) - len(planted),
        "controls_survived": sum(o.is_expected for o in outcomes if o.expected == "survived"),
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.json:
        wrong = [asdict(outcome) for outcome in outcomes if not outcome.is_expected]
        sys.stdout.write(json.dumps({**numbers, "wrong": wrong}) + "\n")
    else:
        sys.stdout.write(
            "{killed} of {planted} planted bugs killed, {not_run} not run on this processor, "
            "{controls_survived} of {controls} controls survived, {seconds} s\n".format(**numbers)
        )
    return 0 if outcomes and all(outcome.is_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
