"""Claims about the shape of the package: what it exports and who imports whom."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import saccade
from saccade.methods import listing

PACKAGE = Path(saccade.__file__).parent
ROOT = Path(__file__).parents[1]

API = [
    "Chat",
    "Conversation",
    "Live",
    "MethodError",
    "Model",
    "ModelError",
    "OptionError",
    "Recipe",
    "Result",
    "Round",
    "SaccadeError",
    "Stateless",
    "Stream",
    "VideoInputError",
    "generate",
    "load",
    "run",
    "stream",
]

# A package imports from itself and from those that stand before it in its line. Imports for type
# checkers and those inside functions count like any other. Inputs need the model to load one.
ENGINE = ("core", "model", "drafting", "methods", "engine")
APPLICATIONS = ("answering", "corpus", "bench", "world", "ui", "serve", "vllm", "cli")
MAY = {
    **{name: ENGINE[: place + 1] for place, name in enumerate(ENGINE)},
    "inputs": ("core", "model", "inputs"),
    **{
        name: (*ENGINE, "inputs", *APPLICATIONS[: place + 1])
        for place, name in enumerate(APPLICATIONS)
    },
    "__main__": ("cli",),
}
THE_MODELS = {
    "model.cache",
    "model.session",
    "model.attention",
    "model.backbone",
    "model.prompt_reader",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def _name(path: Path, root: Path = PACKAGE) -> str:
    """A module's dotted name below the package: ``core.types``, ``engine``; its own is empty."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in FILES}


@cache
def _tree(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests read."""
    return ast.parse(path.read_text())


def _imported_names(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    """Every dotted name that these statements of a file import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports by dots"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _all_imported_names(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, wherever in the file."""
    return _imported_names(ast.walk(_tree(path)), path)


@cache
def _imports(path: Path) -> frozenset[str]:
    """The modules of the package that a file imports, as dotted names below ``saccade``."""
    return _modules(_all_imported_names(path))


def _modules(names: Iterable[str]) -> frozenset[str]:
    """The modules of the package among dotted names, or in which such a name is."""
    modules = set()
    for name in names:
        if name.startswith("saccade."):
            module = name.removeprefix("saccade.")
            while module not in MODULES:
                module = module.rpartition(".")[0]
            modules.add(module)
    return frozenset(modules - {""})


def _upward(own: str, names: frozenset[str]) -> set[tuple[str, str]]:
    """Those of a module's imports that its line does not allow."""
    may = MAY[own.split(".")[0]]
    return {(own, name) for name in names if name.split(".")[0] not in may}


def _circles() -> set[frozenset[str]]:
    """Groups of modules each of which imports every other, at once or through others."""

    @cache
    def below(name: str) -> frozenset[str]:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            more = _imports(MODULES[ahead.pop()]) - seen
            seen |= more
            ahead += more
        return frozenset(seen)

    groups = {
        name: frozenset(other for other in below(name) if name in below(other)) for name in MODULES
    }
    return {group for name, group in groups.items() if name in group and len(group) > 1}


def test_the_public_names_are_these():
    """Claim: __all__ is sorted, pinned here, and every name can be had. Fails on any change."""
    assert saccade.__all__ == sorted(saccade.__all__) == API
    assert all(getattr(saccade, name) is not None for name in API)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        saccade.nothing  # noqa: B018


def test_every_module_has_a_place_in_a_line():
    """Claim: the lines name every package there is and nothing else."""
    assert {name.split(".")[0] for name in MODULES} - {""} == set(MAY)


def test_imports_go_one_way():
    """Claim: no module imports from a package after its own. Fails on the first upward import."""
    violations = {pair for own in MODULES if own for pair in _upward(own, _imports(MODULES[own]))}
    assert not violations


# Nothing outside ``world/`` needs the drawn clips: a command that shows one imports this, late.
DOOR = "world.demo_clips"
# What a user's own target may be given: a draft is trained for it, on the user's data or the clips.
TRAINING = {"cli.train_draft": {"world.train_draft.recipes", "world.train_draft.run"}}


def _drawn_imports(own: str, path: Path) -> set[str]:
    """The modules of the drawn world that a file should not import as it does: any but the door,
    and the door itself before it is needed."""
    early = _modules(_imported_names(_tree(path).body, path))
    drawn = {name for name in _imports(path) if name.split(".")[0] == "world"}
    return (drawn - {DOOR} | drawn & early) - TRAINING.get(own, set())


def test_the_drawn_world_is_reached_through_the_demo_alone():
    """Claim: outside its own package nothing imports the drawn world except through the one module
    that the demo owns, and that inside a function. Fails where a user's own path, as ``serve`` and
    ``corpus`` are, draws. Control: a module that does so is seen."""
    violations = {
        own: drawn
        for own, path in MODULES.items()
        if own.split(".")[0] != "world" and (drawn := _drawn_imports(own, path))
    }
    assert not violations


def test_control_a_drawn_import_is_seen(tmp_path):
    """Control: another module of the drawn world, and an early import of the door."""
    file = tmp_path / "routes.py"
    file.write_text("def late():\n    from saccade.world import demo_clips, scenes\n")
    assert _drawn_imports("serve.routes", file) == {"world.scenes"}
    early = tmp_path / "queue.py"
    early.write_text("from saccade.world import demo_clips\n")
    assert _drawn_imports("serve.queue", early) == {"world.demo_clips"}


def test_no_modules_import_each_other():
    """Claim: inside a package too there are no circles."""
    assert not _circles()


def test_control_an_upward_import_is_seen(tmp_path):
    """Control: imports of methods/ from the session must be found by the reader above, also where
    only a type checker or a function reads them."""
    file = tmp_path / "session.py"
    file.write_text(
        "from saccade.drafting import drafters\n"
        "if TYPE_CHECKING:\n    from saccade.methods.specvlm import TREE\n"
        "def late():\n    import saccade.engine.scheduler\n"
    )
    named = {"drafting.drafters", "methods.specvlm", "engine.scheduler"}
    assert _imports(file) == named
    assert _upward("model.session", _imports(file)) == {("model.session", name) for name in named}


def _classes(path: Path) -> list[str]:
    """The public classes that a module defines."""
    names = (each.name for each in _tree(path).body if isinstance(each, ast.ClassDef))
    return [name for name in names if not name.startswith("_")]


def test_a_class_of_the_engine_part_has_its_name_alone():
    """Claim: no two public classes of the packages that make an answer share a name. Control: of
    the whole wheel some do."""
    engine = [path for name, path in MODULES.items() if name.split(".")[0] in ENGINE]
    names = [name for path in engine for name in _classes(path)]
    assert sorted(names) == sorted({*names})
    every = [name for path in FILES for name in _classes(path)]
    assert len(every) > len({*every})


def test_the_wheel_knows_nothing_of_the_evidence():
    """Claim: nothing in the package imports ``lab``, which is not installed with it.
    Control: a module of lab is seen to import another."""
    assert not any(
        name.split(".")[0] == "lab" for path in FILES for name in _all_imported_names(path)
    )
    own = _all_imported_names(ROOT / "lab" / "studies" / "__init__.py")
    assert any(name.startswith("lab.") for name in own)


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").glob("*.py")), ids=lambda p: p.name)
def test_a_method_touches_no_cache(path):
    """Claim: a paper's file imports neither cache nor session."""
    assert not _imports(path) & THE_MODELS


def test_the_library_does_not_print():
    """Claim: output goes through logging or the command line's console, never print()."""
    prints = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
    ]
    assert not prints


def test_every_module_says_what_it_is():
    """Claim: each file begins with a docstring. Fails where a reader would have to guess."""
    silent = [
        str(path.relative_to(ROOT))
        for path in [*FILES, *(ROOT / "lab").rglob("*.py")]
        if not ast.get_docstring(_tree(path))
    ]
    assert not silent


def test_the_listing_that_starts_fast_is_of_these_methods():
    """Claim: `saccade methods` and misspelt names need no model library: ``listed.json`` is of the
    files that there are. Fails where a file went until ``make listed``; a file that it does not
    list is read when asked for."""
    written = json.loads(listing.LISTED.read_text())["files"]
    assert set(written) <= set(listing.method_files()), "run `make listed`"
