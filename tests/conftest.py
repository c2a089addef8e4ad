"""Every test runs over poisoned caches: a row that holds nothing is NaN, so that reading it shows,
and every commit of every session is followed by ``check_integrity``.

Nothing slow to import stands at the top: the process that only hands out tests needs none of it.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxtyping
import pytest
from hypothesis import settings
from packaging.version import Version

if TYPE_CHECKING:
    from saccade.model.cache import Cache
    from saccade.model.session import Session

HAS_EVERY_FAMILY = Version("5.23")
"""The first transformers that has a class for each family of ``lab.checkpoints``."""

# The same examples in every run: a failure is a change of the code, not of the luck.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")

# Modules are compiled once, not in each process that a test starts (torch and transformers: five
# seconds of a processor each), also where Python is told to leave nothing beside the sources.
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# Triton decides when it is imported whether its kernels run on a CPU, as in tests they do.
os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # what is imported stays: nobody looks through it for garbage, now or later
atexit.register(gc.unfreeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run every case of the tests that run a few representatives of them by default",
    )


@pytest.hookimpl(tryfirst=True)  # Before `-m` chooses by the marks that are set here.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what ``make cases`` runs and the default run does not as slow: tests and cases that are
    ``extra``, and all but a few cases of each test with ``representatives(count)``.

    The few are spread evenly over the cases, and begin at another one in each test. So the tests of
    a file that has a case for every family, say, run every family between them. A case that is
    named on the command line always runs.
    """
    if config.getoption("--all-cases"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("extra"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("representatives") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, group in cases.items():
        mark = group[0].get_closest_marker("representatives")
        assert mark is not None
        first = zlib.crc32(name.encode())
        chosen = {
            (first + n * len(group) // mark.args[0]) % len(group) for n in range(mark.args[0])
        }
        for place, item in enumerate(group):
            if place not in chosen:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _skips_families_of_newer_releases():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _skips_families_of_newer_releases():
        return (yield)


@contextmanager
def _skips_families_of_newer_releases() -> Iterator[None]:
    """Skips a test where the oldest transformers that we support cannot make its checkpoint.

    With the release of the lock file, or a newer one, a class that is missing is a failure.
    """
    try:
        yield
    except Exception as error:
        classes = sys.modules.get("lab.checkpoints.available_classes")
        if classes is None or not isinstance(error, classes.MissingClassError):
            raise
        if Version(version("transformers")) >= HAS_EVERY_FAMILY:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def _quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, measured costs remembered for the length of the run only, and every kernel in use
    by the number of rows, whatever is quickest here."""
    import torch

    from saccade.model import kernels
    from saccade.model.kernels import AttentionChoice, Choice, compiled

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        library = _compiled_library(patch)
        patch.setenv("SACCADE_CACHE", str(tmp_path_factory.mktemp("costs")))
        if library is not None:  # Processes that a test starts look for it where costs are.
            copy = compiled._library_path()
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, copy)
        ours, own = ("compiled", "compiled") if compiled.is_available() else ("fused", "plain")
        every = Choice((1, 5, 64, 65), (own, "plain", "packed", "transposed"))

        def every_kernel(matrix: kernels.Matrix) -> Choice:
            if matrix.rounding is not None:
                return Choice((16, 17), (matrix.candidates[-1], "plain"))
            if matrix.weight.dtype == torch.float32:
                return every
            return Choice((16, 64, 65), (matrix.candidates[-1], "plain", "packed"))

        patch.setattr(kernels, "choose_products", lambda all_: [*map(every_kernel, all_)])
        few = AttentionChoice((1, 2), ((ours, "unfused"), ("fused", "unfused")), (1024, 1024))
        many = AttentionChoice((768,), (("fused", ours),), (1024,))
        patch.setattr(kernels, "choose_attention", lambda facts, calls, *of: many if of else few)
        patch.setattr(kernels, "time_calls", lambda calls: {name: name != "ours" for name in calls})
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def _compiled_library(patch: pytest.MonkeyPatch) -> Path | None:
    """Loads the compiled kernels from a folder of all test runs, where the first compiles them.

    Returns the library's file, or None where there is no compiler.
    """
    from filelock import FileLock

    from saccade.model.kernels import compiled

    folder = Path(__file__).parents[1] / ".cache" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    patch.setenv("SACCADE_CACHE", str(folder))
    with FileLock(folder / "lock"):
        compiled.is_available()
    library = compiled._library_path()
    return library if library.is_file() else None


@pytest.fixture(scope="session", autouse=True)
def _poison() -> Iterator[None]:
    import integrity
    from integrity import check_integrity, poison

    from saccade.model.cache import Cache
    from saccade.model.session import Session

    create, reserve, commit = Cache.__init__, Cache.reserve, Session.commit

    def poisoned_create(self: Cache, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        with integrity.around():
            poison(self)

    def poisoned_reserve(self: Cache, length: int) -> None:
        before = [tensor.shape[1] for tensor in (*self.keys, *self.values)]
        reserve(self, length)
        with integrity.around():
            for rows, tensor in zip(before, (*self.keys, *self.values), strict=True):
                tensor[:, rows:] = float("nan")

    def checked_commit(self: Session, tokens: Mapping[int, Sequence[int]]) -> None:
        commit(self, tokens)
        for number in tokens:
            request = self.requests[number]
            with integrity.around():
                check_integrity(request.cache)
                poison(request.cache, spare=len(request.tree))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "__init__", poisoned_create)
        patch.setattr(Cache, "reserve", poisoned_reserve)
        patch.setattr(Session, "commit", checked_commit)
        yield


@pytest.fixture(scope="module", autouse=True)
def _forks() -> Iterator[None]:
    """Drafts in processes of their own start at once, and none outlives a module. A busy machine
    makes no test give one up: those that are about it set a patience of their own."""
    from beside import forked

    from saccade.drafting.parallel import worker_drafter

    with forked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_drafter, "TOKEN_PATIENCE_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def _shared_models_stay_as_they_are() -> Iterator[None]:
    """A test that changes a model which other tests share would change what those tests see."""
    yield
    helpers = sys.modules.get("helpers")
    shared = [] if helpers is None else helpers.SHARED
    changed = [each for each in shared if each.current() is not each]
    for each in changed:
        shared.remove(each)
    assert not changed, "a test of this module changed a shared model: use backbone_of_copy there"


@pytest.fixture(scope="module")
def unlimited_drafts() -> Iterator[None]:
    """Drafts are as long as if answers had no length limit. Drafts of the papers know of none, and
    a test that compares every round with a paper meets the limit in the last rounds."""
    from saccade.core import generation_settings
    from saccade.core.sampling import Sampling

    def without_limit(*, max_tokens: int, **fields: Any) -> Sampling:
        return Sampling(**fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation_settings, "Sampling", without_limit)
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Shapes and types unchecked also in ``make typed``: for tests that run thousands of rounds."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def pair() -> Path:
    """The folder of the trained pair that comes with the package."""
    import saccade

    folder = Path(saccade.__file__).parent / "world" / "pair"
    if not (folder / "target" / "config.json").exists():
        pytest.skip(f"no trained pair at {folder}")
    return folder
