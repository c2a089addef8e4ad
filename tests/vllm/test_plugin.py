"""Claims about the plug-in that vLLM calls in each process, with a stand-in for its modules."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from runners import config

from saccade.core.errors import OptionError
from saccade.vllm import plugin
from saccade.vllm.draft import Draft

# as in vLLM 0.32: a draft is made, with a config alone, in the middle of its runner's own making
MODULE = """
class GPUModelRunner:
    def __init__(self, make, device="cpu"):
        self.drafter = make()
        self.device = device


class CPUModelRunner(GPUModelRunner):
    def __init__(self, make):
        super().__init__(make)
        self.whole = True
"""


RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
# A hardware plug-in's runner: it makes its draft after vLLM's own constructor is through.
OTHER_MODULE = """
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class NPUModelRunner(GPUModelRunner):
    def __init__(self, make):
        super().__init__(lambda: None)
        self.drafter = make()


class AloneModelRunnerV1:
    def __init__(self, make):
        self.drafter = make()


class Scheduler:
    def __init__(self, make):
        self.drafter = make()
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the runner's module, in a process that has not imported it yet."""
    assert not _imported(), "these claims are about processes without vLLM"
    *folders, name = RUNNER_MODULE.split(".")
    file = tmp_path.joinpath(*folders, f"{name}.py")
    file.parent.mkdir(parents=True)
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    yield file
    for name in _imported():
        del sys.modules[name]


def _imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_other")]


def _draft() -> Draft:
    """As vLLM makes it on a GPU; on a CPU vLLM's own sampler is mended with it."""
    given = config(draft="lookup")
    given.device_config.device = "cuda"
    return Draft(given)


@pytest.mark.parametrize("early", [True, False])
def test_a_runner_meets_the_draft_it_made(vllm, early, monkeypatch):
    """Claim: whether the plug-in is called before the runner's module is imported or after, and
    again at any time, a runner meets the draft that it made, once; one of a subclass as well."""
    met = []
    monkeypatch.setattr(Draft, "set_runner", lambda draft, runner: met.append((draft, runner)))
    if early:
        plugin.register()
        plugin.register()
        assert not _imported()
    module = importlib.import_module(RUNNER_MODULE)
    plugin.register()
    plugin.register()
    made = [module.GPUModelRunner(_draft, device="cuda"), module.CPUModelRunner(_draft)]
    assert met == [(runner.drafter, runner) for runner in made]
    assert (made[0].device, made[1].device, made[1].whole) == ("cuda", "cpu", True)
    assert importlib.reload(module).GPUModelRunner(_draft).drafter is met[2][0]


@pytest.mark.parametrize("early", [True, False])
def test_runners_of_other_packages_meet_their_drafts(vllm, early, monkeypatch):
    """Claim: a runner of a hardware plug-in meets its draft once, by its name: one that derives
    from vLLM's and makes its draft last, and one that derives from nothing. A class of another name
    is left alone. Fails if only ``GPUModelRunner`` is hooked, or a runner meets its draft twice."""
    folder = vllm.parents[3] / "vllm_other" / "worker"
    folder.mkdir(parents=True)
    (folder / "model_runner_v1.py").write_text(OTHER_MODULE)
    met = []
    monkeypatch.setattr(Draft, "set_runner", lambda draft, runner: met.append((draft, runner)))
    if early:
        plugin.register()
    module = importlib.import_module("vllm_other.worker.model_runner_v1")
    plugin.register()
    made = [module.NPUModelRunner(_draft), module.AloneModelRunnerV1(_draft)]
    assert met == [(runner.drafter, runner) for runner in made]
    assert module.Scheduler(_draft).drafter is not None and len(met) == 2


def test_who_does_not_draft_with_us_is_left_alone(vllm):
    """Claim: a runner with another draft, or none, is made as ever; a module that has no such
    class is imported as ever; one that breaks, breaks as ever."""
    plugin.register()
    assert importlib.util.find_spec(RUNNER_MODULE).origin == str(vllm)
    vllm.write_text(MODULE + "\nraise RuntimeError('torn')\n")
    with pytest.raises(RuntimeError, match="torn"):
        importlib.import_module(RUNNER_MODULE)
    vllm.write_text(MODULE + "\n# whole again\n")
    runners = importlib.import_module(RUNNER_MODULE).GPUModelRunner
    other = SimpleNamespace(set_runner=lambda _: pytest.fail("this one asked for nothing"))
    assert runners(lambda: other).drafter is other and runners(lambda: None).drafter is None
    del sys.modules[RUNNER_MODULE]
    vllm.write_text("class AnotherRunner: ...\n# and its name is long\n")
    assert importlib.import_module(RUNNER_MODULE).AnotherRunner()


def test_without_the_plug_in_the_engine_does_not_start(vllm, monkeypatch):
    """Claim: a draft whose runner would never show itself says so while the engine starts, and
    names VLLM_PLUGINS where that is why."""
    runners = importlib.import_module(RUNNER_MODULE).GPUModelRunner
    with pytest.raises(OptionError, match="install Saccade .* beside vLLM 0.32 or newer"):
        runners(_draft)
    monkeypatch.setenv("VLLM_PLUGINS", "saccades,other")
    with pytest.raises(OptionError, match="VLLM_PLUGINS=saccades,other leaves out .* add saccade "):
        runners(_draft)
    monkeypatch.setenv("VLLM_PLUGINS", "other,saccade")
    plugin.register()
    assert runners(_draft).drafter._runner is not None


def test_the_entry_point_is_there_and_imports_next_to_nothing():
    """Claim: the installed distribution has the entry point; a process that loads and calls it
    imports five small modules of ours beside the standard library, and no torch."""
    code = """
import sys
from importlib.metadata import entry_points
before = set(sys.modules)
(found,) = entry_points(group="vllm.general_plugins", name="saccade")
found.load()()
found.load()()
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
print(*sorted(name for name in sys.modules if name.startswith("saccade")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots, ours = run.stdout.splitlines()
    assert roots == "saccade"
    assert ours.split() == [
        "saccade", "saccade.core", "saccade.core.errors", "saccade.vllm", "saccade.vllm.plugin",
    ]  # fmt: skip


def test_the_extra_asks_for_the_first_vllm_whose_runner_was_read():
    """Claim: the installed distribution's extra of that name brings vLLM 0.32 or newer."""
    requirements = importlib.metadata.requires("saccade") or []
    (requirement,) = (each for each in requirements if "extra == 'vllm'" in each)
    assert requirement.startswith("vllm>=0.32;")


def test_the_class_is_found_by_its_name():
    """Claim: what vLLM is told finds the class, and a name that is none is refused as ever."""
    import saccade.vllm

    assert saccade.vllm.Draft is Draft
    with pytest.raises(AttributeError, match="no attribute 'Drift'"):
        saccade.vllm.Drift  # noqa: B018
