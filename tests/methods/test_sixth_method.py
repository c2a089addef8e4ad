"""Claims about a file of methods that is anyone's own: found, chosen, refused, and lossless."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import sixth_method
from beside import Inside, hired
from helpers import noisy, qwen25, video_input

import saccade
from saccade.core.errors import MethodError
from saccade.core.protocols import Shape
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.shapes.policies import Chain
from saccade.methods import choices, names, registry, resolve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sixth_method.py"
PAGE = ROOT / "docs" / "methods" / "a-sixth-method.md"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's method, view and shapes among those that names are looked up in."""
    brought = sixth_method.PROVIDES
    for recipe in brought.recipes:
        monkeypatch.setitem(names.METHODS, recipe.name, recipe)
    for view in brought.views:
        monkeypatch.setitem(names.VIEWS, view.name, view)
    for family in brought.shape_families:
        monkeypatch.setitem(names.SHAPE_FAMILIES, family.family, family)


@pytest.mark.usefixtures("known")
def test_its_parts_are_chosen_by_their_names() -> None:
    """Claim: the method, its view and its shape's parameter are overrides like all others."""
    recipe = resolve("motion-sure/shape=sure-0.7/keep=0.2")
    assert recipe.shape == sixth_method.Sure(threshold=0.7)
    assert choices(recipe) == {
        "drafter": "model",
        "view": "motion",
        "keep": "0.2",
        "shape": "sure-0.7",
        "schedule": "serial",
    }
    assert resolve("sd/view=motion").view == sixth_method.MOTION
    with pytest.raises(MethodError, match="write sure-T with a threshold T from 0 to 1"):
        resolve("sd/shape=sure-2")
    with pytest.raises(MethodError, match="lookup needs a shape that drafts a chain"):
        resolve("lookup/shape=sure-0.5")  # it has no laws to be sure by


@pytest.mark.representatives(3)
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("override", ["", "/shape=sure-0.9", "/schedule=parallel"])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 3}, {"exact": True}])
def test_it_answers_as_the_target_alone(override: str, settings: dict[str, Any]) -> None:
    """Claim: greedy and exact it writes plain decoding's tokens, serially and beside the target;
    sampled, a seed gives one answer. Some of its drafts are cut short by the threshold."""
    target, draft, inputs = qwen25(), noisy(qwen25, 0, 0.02), video_input(0)
    options = dict(draft=draft, method="motion-sure" + override, max_new_tokens=24, **settings)
    results = []
    for _ in range(2 if settings.get("do_sample") else 1):
        with hired(Inside()):  # in this process: another may not draft in time
            results.append(saccade.run(target, inputs, **options))
    plain = saccade.run(target, inputs, method="ar", max_new_tokens=24, **settings)
    result = results[0]
    assert result.fallback_reason is None
    assert result.ids == (results[1] if settings.get("do_sample") else plain).ids
    drafted = [len(round.tokens) for round in result.forwards]
    assert 0 < max(drafted) and min(drafted[1:]) < 12


def test_a_file_and_a_package_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a file named in the variable and a module named as an entry point bring their methods,
    after ours. Control: without them there are ours alone."""
    ours = [name for name, _ in registry.load_method_files()]
    point = EntryPoint("mine", "sixth_method", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setenv(registry.FILES_VARIABLE, str(EXAMPLE))
    assert [name for name, _ in registry.load_method_files()] == [
        *ours,
        "sixth_method",
        str(EXAMPLE),
    ]
    assert list(registry.load_method_files())[-1][1] is sixth_method.PROVIDES


@pytest.mark.usefixtures("unchecked")
def test_a_broken_package_is_left_out_and_a_broken_file_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Claim: an installed module that cannot be read takes nothing else with it; of the user's own
    file the reason is told in one sentence."""
    point = EntryPoint("mine", "there_is_no_such_module", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert (
        list(registry.load_method_files()) and "there_is_no_such_module are left out" in caplog.text
    )
    for text, says in {
        "": "defines no PROVIDES",
        "PROVIDES = []": "defines no PROVIDES",
        "1 / 0": "division by zero",
        "from saccade.drafting.provides import Provides\nPROVIDES = Provides(views=1)": "a tuple",
    }.items():
        path = tmp_path / f"brought_{len(text)}.py"
        path.write_text(text)
        monkeypatch.setenv(registry.FILES_VARIABLE, str(path))
        with pytest.raises(MethodError, match=says):
            list(registry.load_method_files())
    monkeypatch.setenv(registry.FILES_VARIABLE, str(tmp_path / "nowhere.py"))
    with pytest.raises(MethodError, match="there is no such file"):
        list(registry.load_method_files())


@pytest.mark.usefixtures("unchecked")
def test_a_file_with_the_name_of_another_module_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Claim: a file that Python would not import under its name is refused, and the message says
    so: the name is a library's, or that of another file. Fails if the other module is read."""
    text = "from saccade.drafting.provides import Provides\nPROVIDES = Provides()"
    files = [tmp_path / name for name in ("statistics.py", "one/brought.py", "two/brought.py")]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for paths in (files[:1], files[1:]):
        monkeypatch.setenv(registry.FILES_VARIABLE, os.pathsep.join(map(str, paths)))
        with pytest.raises(MethodError, match=f"another module of the name {paths[0].stem} "):
            list(registry.load_method_files())
    monkeypatch.setenv(registry.FILES_VARIABLE, str(files[1]))
    assert list(registry.load_method_files())[-1][0] == str(files[1])


class Inherited(Chain):
    """A family that says nothing of itself."""


class Unlike(sixth_method.Sure):
    """Writes itself otherwise than it is read."""

    family, usage, examples = "sure", "sure-T", ("0.5",)
    spelling = "sure"

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(threshold=float(text))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("brought", "says"),
    [
        ({"recipes": [resolve("sd")]}, "recipes= is a tuple of Recipes"),
        ({"views": (resolve("sd"),)}, "views= is a tuple of Views"),
        ({"shape_families": (Chain(3),)}, "a tuple of subclasses of Shape"),
        ({"shape_families": (Inherited,)}, "Inherited needs family of its own"),
        ({"shape_families": (Unlike,)}, "reads sure-0.5 and writes it as sure"),
        ({"recipes": (resolve("sd/keep=0.5/view=uniform"),)}, "must not be empty or contain"),
    ],
)
def test_what_could_not_be_chosen_is_refused(brought: dict, says: str) -> None:
    """Claim: what a table could not hold is refused as it is brought, in a sentence."""
    with pytest.raises(MethodError, match=re.escape(says)):
        Provides(**brought)


def test_two_files_may_not_bring_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a name that is there already is refused, and both files are named."""
    monkeypatch.setattr(
        registry, "PROVIDED", [*registry.PROVIDED, ("mine", registry.PROVIDED[0][1])]
    )
    with pytest.raises(MethodError, match="both saccade.methods.baselines and mine provide 'ar'"):
        registry._collect(lambda file: ((each.name, each) for each in file.recipes))


def blocks() -> Iterator[str]:
    return iter(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))


def test_the_pages_method_works_as_it_is_written(tmp_path: Path) -> None:
    """Claim: the page's file, copied out of it, brings what the page says."""
    path = tmp_path / "of_the_page.py"
    path.write_text(next(blocks()))
    brought = registry.read_provides("the page", registry._load_file(path))
    assert [recipe.name for recipe in brought.recipes] == ["ours"]
    assert brought.shape_families[0].parse("8").spelling == "doubling-8"


def test_a_registered_drafter_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a drafter of one's own that runs a draft model is the one that drafts. Fails if it is
    taken for one of the three kinds that the view and the schedule choose among."""

    class Mine(ModelDrafter):
        name = "mine"

    monkeypatch.setitem(registry.DRAFTERS, "mine", Mine)
    recipe = resolve("specvlm/drafter=mine")
    assert recipe.drafter is Mine and choices(recipe)["drafter"] == "mine"
    assert resolve("sd/schedule=parallel").drafter is WorkerDrafter
