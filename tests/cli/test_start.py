"""What needs no model waits for none: listings, misspelt names, files that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab import checkpoints
from lab.commands.checkpoint import FAMILIES
from saccade.bench import peers
from saccade.cli import run_setup
from saccade.cli.compare import PEERS
from saccade.core.errors import MethodError, ModelError, suggest
from saccade.inputs import checkpoints as places
from saccade.methods import listing, names

ROOT = Path(__file__).parents[2]
EXTRAS = ("uvicorn", "fastapi", "gradio", "ray", "llguidance", "httpx")  # not always installed
HEAVY = ("torch", "transformers", "matplotlib", "huggingface_hub", *EXTRAS)
CHILD = f"""
import importlib.util, json, os, sys, tempfile
from pathlib import Path
import av, numpy, pydantic, typer  # light, and the same for all
if importlib.util.find_spec("typer._adapters"):  # which newer releases import late
    import typer._adapters
from lab.__main__ import main as lab
from saccade.cli import main as saccade
from saccade.methods import listing
listing.LISTED = Path(sys.argv[1])
for command, *words in json.loads(sys.argv[2]):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not os.fork():
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv[1:] = words
            try:
                {{"saccade": saccade, "lab": lab}}[command]()
            finally:
                print("heavy:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
        code = os.waitstatus_to_exitcode(os.wait()[1])
        outputs = (file.seek(0) or file.read().decode() for file in (out, err))
        print(json.dumps([code, *outputs]))
"""
Outcome = tuple[int, str, list[str], str]
"""Exit code, standard output, the lines of standard error, and what heavy was imported."""
OutcomesByWords = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The listing as ``make listed`` would write it now."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("listing") / "listed.json"
        patch.setattr(listing, "LISTED", path)
        listing.save_listing(names.listing())
    return path


def run_commands(listed: Path, *commands: Sequence[str], **more: str) -> list[Outcome]:
    """What each of these says, a fork each of a process that has imported the commands alone and
    reads this listing."""
    kept = {key: value for key, value in os.environ.items() if key != listing.FILES_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(listed), json.dumps(commands)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**kept, "HF_HUB_OFFLINE": "1", **more},
    )
    runs = []
    for code, out, err in map(json.loads, done.stdout.splitlines()):
        *lines, heavy = err.splitlines()
        runs.append((code, out, lines, heavy.removeprefix("heavy:").strip()))
    return runs


def test_the_listing_is_the_registrys() -> None:
    """Claim: what the data beside the methods say of a method or an axis, the registry says.

    Fails after a change of methods or axes until ``make listed``. A method that is not listed yet
    is read from its file.
    """
    record, live = json.loads(listing.LISTED.read_text()), names.listing()
    assert record["methods"].items() <= live.methods.items(), "run `make listed`"
    assert list(record["axes"]) == [axis for axis in live.axes if axis in record["axes"]]
    assert all(set(values) <= set(live.axes[axis]) for axis, values in record["axes"].items())
    assert run_setup.list_methods() == live


def test_a_listing_of_other_files_is_not_believed(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a listing just written is the registry's, in its order; with a file of the user's own,
    or with one file of methods more than it was written from, there is no listing to read."""
    monkeypatch.setattr(listing, "LISTED", fresh)
    assert (record := listing.load_listing()) == names.listing()
    assert list(record.methods) == list(names.listing().methods)
    monkeypatch.setenv(listing.FILES_VARIABLE, "mine.py")
    assert listing.load_listing() is None
    monkeypatch.delenv(listing.FILES_VARIABLE)
    more = [*listing.method_files(), "more.py"]
    monkeypatch.setattr(listing, "method_files", lambda: more)
    assert listing.load_listing() is None


def test_families_and_peers_are_named_as_they_are() -> None:
    """Claim: names told without importing anything are those of the families and of the
    implementations of others that there are."""
    assert list(FAMILIES) == list(checkpoints.FAMILIES)
    assert list(PEERS) == list(peers.PEERS)


CASES: dict[tuple[str, ...], tuple[int, str]] = {
    ("saccade", "--help"): (0, "describe"),
    ("saccade", "describe", "--help"): (0, "--num-frames"),
    ("saccade", "methods"): (0, "specvlm-self"),
    ("saccade", "methods", "--json"): (0, "pearl-syn"),
    ("lab", "make-checkpoint", "list"): (0, "qwen2.5-vl"),
    ("lab", "make-checkpoint", "qwen2.5vl", "x"): (2, "did you mean qwen2.5-vl?"),
    ("saccade", "describe", "nope.mp4"): (2, "nope.mp4 does not exist"),
    ("saccade", "describe", "README.md"): (2, "README.md is not a video"),
    ("saccade", "chat", "nope.mp4"): (2, "nope.mp4 does not exist"),
    ("saccade", "compare", "nope.mp4"): (2, "nope.mp4 does not exist"),
    ("saccade", "describe", "x.mp4", "--method", "specvml"): (2, "did you mean specvlm?"),
    ("saccade", "compare", "x.mp4", "--methods", "sd,saeg"): (2, "did you mean sage?"),
    ("saccade", "describe", "x.mp4", "--method", "sd/shap=tree"): (2, "did you mean shape?"),
    ("saccade", "describe", "x.mp4", "--target", "./nowhere"): (2, "no checkpoint folder"),
    ("saccade", "serve", "--method", "hipo"): (2, "did you mean hippo?"),
    ("saccade", "calibrate", "nope.mp4"): (2, "nope.mp4 does not exist"),
    ("saccade", "doctor", "nope.mp4", "--target", "Qwen2.5-VL-7B"): (2, "nope.mp4 does not exist"),
}


@pytest.fixture(scope="module")
def outcomes(fresh: Path, request: pytest.FixtureRequest) -> OutcomesByWords:
    """What each command says that a test of this run asks about."""
    tests = (
        item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())
    )
    chosen = [item.callspec.params["words"] for item in tests]  # type: ignore[attr-defined]
    return dict(zip(chosen, run_commands(fresh, *chosen), strict=True))


@pytest.mark.representatives(3)
@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_nothing_heavy_is_imported(outcomes: OutcomesByWords, words: tuple[str, ...]) -> None:
    """Claim: a listing, help, and a refusal of what can be known by name are said without torch,
    Transformers, the hub's library, or what only an extra brings; a refusal is one line.

    Fails as soon as anything on the way imports one of them.
    """
    code, says = CASES[words]
    exit_code, printed, messages, heavy = outcomes[words]
    assert heavy == ""
    assert exit_code == code, messages
    assert says in (printed if code == 0 else messages[-1])
    assert code == 0 or len(messages) == 1


@pytest.mark.representatives(1)
@pytest.mark.parametrize("command", [("describe", "x.mp4"), ("doctor",)], ids=" ".join)
def test_a_hub_out_of_reach_is_one_sentence(fresh: Path, command: tuple[str, ...]) -> None:
    """Claim: where nothing answers at the hub's address, and the model is not in the cache, that
    is said once, without torch and without another attempt."""
    words = ("saccade", *command, "--target", "someone/something")
    (outcome,) = run_commands(fresh, words, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    code, printed, messages, heavy = outcome
    assert (code, printed, len(messages)) == (2, "", 1), messages
    assert "cannot be reached" in messages[0] and "someone/something" in messages[0]
    assert "torch" not in heavy and "transformers" not in heavy


def test_what_is_cached_is_read_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Claim: out of reach, a cached model is read from the cache alone and another is refused; a
    folder, and whoever wants the hub left alone, ask nobody."""
    monkeypatch.setattr(places, "_reachable", lambda address: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path))
    assert places.must_use_cache("a/b", "a/b")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ModelError, match="cannot be reached"):
        places.must_use_cache("a/b", "a/b")
    assert not places.must_use_cache("shapes", places.source_of("shapes"))
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not places.must_use_cache("a/b", "a/b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "false")
    with pytest.raises(ModelError, match="cannot be reached"):
        places.must_use_cache("a/b", "a/b")


@pytest.mark.parametrize(
    ("given", "known", "added"),
    [
        ("specvml", ("ar", "specvlm"), " (did you mean specvlm?)"),
        ("nothing", ("ar", "specvlm"), ""),
        ("ar", ("ar",), ""),
    ],
)
def test_a_near_miss_of_a_name_is_suggested(given: str, known: tuple[str, ...], added: str) -> None:
    """Claim: a misspelt name suggests the known one; an unlike or correct one suggests nothing."""
    assert suggest(given, known) == added


def test_check_reads_no_values() -> None:
    """Claim: the listing refuses a base, an axis, an axis given twice; values are read later."""
    known = listing.Listing({"sd": {}}, {"shape": []})
    known.check("sd/shape=whatever")
    for wrong in ("sdd", "sd/view=full", "sd/shape", "sd/shape=a/shape=b"):
        with pytest.raises(MethodError):
            known.check(wrong)
    assert json.loads(listing.LISTED.read_text())["methods"]
