"""The file that `saccade calibrate` writes and `--config` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from saccade.bench.calibration import CONFIRM_STAGE, Calibration, Trial
from saccade.bench.comparison import Summary
from saccade.cli import run_setup
from saccade.cli.application import run_application
from saccade.cli.command_options import LoadOptions, ModelOptions
from saccade.cli.config_file import read_config, write_config
from saccade.core.errors import OptionError
from saccade.methods import resolve


def calibration(method: str, *speedups: float, **more: Any) -> Calibration:
    """What a search found, made up."""
    rows = [Summary(speedup_decode=x, tau=3.5, identical_to_ar=True) for x in speedups]
    best = Trial(CONFIRM_STAGE, method, tuple(rows))
    given: dict[str, Any] = {
        "best": best,
        "table": (Trial(CONFIRM_STAGE, "auto", tuple(rows)), best),
        "skipped": (),
        "target": "shapes",
        "draft": "shapes-draft",
        "visual_tokens": (512, 2048),
        "held_out": 1,
        "max_new_tokens": 48,
        "threads": 2,
        "seconds": 12.34,
        "environment": {"processor": "one", "gpu": None},
    }
    return Calibration(**{**given, **more})


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def make(text: str) -> Path:
        path = tmp_path / "saccade.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Claim: method, names and threads come back; what was measured stands below; the environment
    may hold torch's own kind of string. Fails on anything YAML or JSON cannot hold."""
    from saccade.engine.trace import environment

    path = tmp_path / "saccade.yaml"
    method = "specvlm/lambda=0.35/keep=0.2/shape=chain-9"
    report = calibration(method, 1.25, 2.5, environment=environment())
    write_config(path, report)
    config = read_config(path)
    measured = config.pop("measured")
    assert config == {
        "method": method,
        "target": "shapes",
        "draft": "shapes-draft",
        "threads": 2,
    }
    assert measured["speedup"] == 1.875 and measured["worth_it"] is True
    assert measured["trials"][1:] == [
        {
            "stage": "confirm",
            "method": method,
            "runs": 2,
            "speedup": 1.875,
            "whole": 0.0,
            "tau": 3.5,
        }
    ]
    assert measured["environment"] == {
        key: value if value is None else type(value).__mro__[-2](value)
        for key, value in environment().items()
    }


def test_a_rounding_in_the_file_is_that_of_its_models(tmp_path: Path) -> None:
    """Claim: the rounding of a draft comes back from the file, unless the command line has another
    or names another target."""
    path = tmp_path / "saccade.yaml"
    write_config(path, calibration("sd", 1.25, 2.5, draft_quantize="int4"))
    models = ModelOptions(config=path)
    roundings = [
        dict(run_setup.resolve_settings(chosen, loading).load)["draft_quantize"]
        for chosen, loading in (
            (models, LoadOptions()),
            (models, LoadOptions(draft_quantize="int8")),
            (replace(models, target="shapes-draft"), LoadOptions()),
        )
    ]
    assert roundings == ["int4", "int8", None]


@pytest.mark.parametrize(
    ("entries", "method"),
    [
        ({}, "specvlm"),
        ({"target": "org/model"}, "std"),
        ({"target": "org/model", "draft": "org/small"}, "specvlm"),
        ({"target": "org/model", "method": "sd"}, "sd"),
    ],
)
def test_a_split_target_s_method_fits_the_models_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str], method: str
) -> None:
    """Claim: without a method on the command line a target split over processes is answered by the
    file's, and without one there by a method that the file's models can run and that times
    nothing. Fails where the method is chosen before the file is read."""
    monkeypatch.setattr(run_setup, "check_checkpoints", lambda *names: None)
    path = tmp_path / "saccade.yaml"
    path.write_text(json.dumps(entries))
    models = ModelOptions(config=path)
    settings = run_setup.resolve_settings(models, LoadOptions(), tp=True)
    assert settings.method == method


def test_the_file_says_what_it_is_for_a_person(tmp_path: Path) -> None:
    """Claim: it begins with comments that hold the advice, and leaves out what there is none of; a
    line a trial."""
    path = tmp_path / "saccade.yaml"
    report = calibration("specvlm-self", 0.66, draft=None)
    write_config(path, report)
    text = path.read_text()
    assert text.startswith("# Made by `saccade calibrate`") and f"# {report.advice}." in text
    assert "draft:" not in text and "draft" not in read_config(path)
    assert yaml.safe_load(text)["measured"]["worth_it"] is False
    assert sum("method: specvlm-self" in line for line in text.splitlines()) == 2
    write_config(path, calibration("auto", 2.0))
    assert "keep auto" in path.read_text() and read_config(path)["method"] == "auto"


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("", None),
        ("# nothing but a comment\n", None),
        ("target: somewhere/else\n", None),
        ("method:\n", None),
        ("method: sd", "sd"),
        ("keep: 0.2\nlambda: 0.3", "specvlm/keep=0.2/lambda=0.3"),
        ("lambda: 0.3\nkeep: 0.2\nmethod: sage", "sage/lambda=0.3/keep=0.2"),
        ("method: specvlm/keep=0.2\nshape: chain-9", "specvlm/keep=0.2/shape=chain-9"),
        ("view: uniform\nkeep: .05\npositions: repacked",
         "specvlm/view=uniform/keep=0.05/positions=repacked"),
        ("method: sd\nview: none", "sd/view=none"),
        ("shape: [[0], [1], [0, 0]]", "specvlm/shape=paths-0,1,0.0"),
        ("method: sd\nshape:\n- [0]\n- [0, 2]\n", "sd/shape=paths-0,0.2"),
        ("keep: 1", "specvlm/keep=1"),
        ("method: std\nkeys: 512", "std/keys=512"),
        ("method: specvlm\nimages: 0.5", "specvlm/images=0.5"),
    ],
)  # fmt: skip
def test_axes_may_be_keys(file: Callable[[str], Path], text: str, method: str | None) -> None:
    """Claim: a key named as an axis is an override, in the file's order; the method resolves, and
    a list of paths is that tree."""
    path = file(text)
    assert read_config(path).get("method") == method
    if method is not None and "paths" in method:
        shape: Any = resolve(method).shape
        paths = yaml.safe_load(text)["shape"]
        assert sorted(shape.paths) == sorted(map(tuple, paths))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methd: sd", ["'methd'", "known keys", "method", "threads", "keep"]),
        ("1: sd", ["unknown key 1"]),
        ("method: [sd]", ["method must be a name", "sd"]),
        ("method: 5", ["method must be a name"]),
        ("method: ''", ["method must be a name"]),
        ("target: 2026-01-01", ["target must be a name"]),
        ("draft: {a: b}", ["draft must be a name"]),
        ("threads: two", ["threads must be a whole number"]),
        ("threads: true", ["threads must be a whole number", "True"]),
        ("threads: 0", ["threads must be a whole number from 1"]),
        ("threads: 1.5", ["threads must be a whole number"]),
        ("keep: much", ["keep must be a number", "much"]),
        ("lambda: yes", ["lambda must be a number"]),
        ("keep: 1.5", ["1.5", "between 0 and 1"]),
        ("keep: .nan", ["nan", "between 0 and 1"]),
        ("keep: 0", ["keep"]),
        ("measured: 3", ["measured must be"]),
        ("shape: {a: 1}", ["shape must be", "[[0], [1], [0, 0]]"]),
        ("shape: [0, 1]", ["shape must be"]),
        ("shape: [[0.5]]", ["shape must be"]),
        ("shape: [[true]]", ["shape must be"]),
        ("shape: []", ["paths"]),
        ("shape: [[]]", ["paths"]),
        ("shape: [[0, 0]]", ["no parent [0]"]),
        ("shape: [[-1]]", ["ranks from 0"]),
        ("shape: blob", ["blob", "chain-N"]),
        ("view: blob", ["blob", "uniform"]),
        ("method: magic", ["magic", "specvlm"]),
        ("method: sd\nlambda: 0.3", ["lambda", "specvlm"]),
        ("method: ar\nkeep: 0.3", ["drafts nothing"]),
        ("method: sd/shape=fit\nshape: tree", ["'shape' is given twice"]),
        ("keep: 0.1\nkeep: 0.2", ["'keep' is given twice"]),
        ("just a sentence", ["known keys"]),
        ("- method: sd", ["known keys"]),
        ("method: sd: fit", ["YAML", "line 1"]),
        ("method: sd\n  keep: [", ["YAML", "line 2"]),
        ("method: sd\n---\nmethod: sd", ["YAML"]),
        ("method: !!python/name:os.system", ["YAML"]),
        ("method: !!timestamp soon", ["YAML"]),
        ("? [a]\n: b", ["YAML"]),
        ("shape: " + "[" * 500, ["YAML"]),
        ("# " + "x" * 200_000, ["too large"]),
        ("\0\1\2", ["YAML"]),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(
    file: Callable[[str], Path], text: str, words: list[str]
) -> None:
    """Claim: unknown keys, wrong types, impossible methods and no YAML are an OptionError of one
    line that names the file and what is wrong."""
    path = file(text)
    with pytest.raises(OptionError) as refused:
        read_config(path)
    message = str(refused.value)
    assert str(path) in message and len(message.splitlines()) == 1 and len(message) < 700
    for word in words:
        assert word in message


def test_a_file_that_cannot_be_read_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: no file, a folder, bytes that are no text, and a place that cannot be written are
    one sentence and exit code 2."""
    (tmp_path / "video.mp4").write_bytes(b"\xff\xd8\xfe\x00" * 8)
    new = tmp_path / "no" / "such.yaml"
    acts = {tmp_path / name: read_config for name in ("nowhere.yaml", ".", "video.mp4")}
    for path, act in {**acts, new: lambda path: write_config(path, calibration("sd", 2.0))}.items():
        with pytest.raises(SystemExit) as ended:
            run_application(lambda standalone_mode, path=path, act=act: act(path))
        message = capsys.readouterr().err
        assert ended.value.code == 2 and str(path) in message and len(message.splitlines()) == 1
    with pytest.raises(OSError, match="no one"):  # of no file: a bug, and told as one
        run_application(Mock(side_effect=OSError("no one's")))
