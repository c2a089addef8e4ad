"""`saccade calibrate` on the embedded pair, for real: a few tokens, a file that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from saccade.bench import calibration
from saccade.cli import calibrate as command
from saccade.cli.config_file import read_config
from saccade.cli.terminal import err, out
from saccade.core.errors import MethodError, OptionError, SaccadeError, VideoInputError
from saccade.inputs import ask, load
from saccade.world import demo_clips

Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """The command alone, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(command.calibrate)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from saccade.world import drawing, scenes

    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / f"{number}.mp4" for number in range(2)]
    for number, path in enumerate(paths):
        drawing.write_clip(scenes.scene(20_000_001 + number), path, 8, 112)
    return paths


@pytest.mark.slow
def test_a_small_run_leaves_a_file_that_runs(
    call: Call, clips: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unchecked: None
) -> None:
    """Claim: on two real clips every stage runs, the file holds what was printed, and its method,
    models and threads give plain decoding's answer. Fails if any of that is not usable as is."""
    few = {"view": ("specvlm/lambda=0.05",), "keep": ("0.1", "0.3"), "shape": ("chain-3", "fit")}
    search = calibration.search
    monkeypatch.setattr(
        calibration, "search", lambda *a, **more: search(*a, **{**more, "candidates": few})
    )
    path = tmp_path / "made.yaml"
    words = (*clips, "--every-frame", "--max-new-tokens", 16, "--seconds", 300, "--out", path)
    ran = call(*words, "--json")
    assert ran.exit_code == 0, ran.exception
    printed = json.loads(ran.stdout)
    config = read_config(path)
    measured = config["measured"]
    assert printed["method"] == config["method"] and printed["measured"] == measured
    stages = [trial["stage"] for trial in measured["trials"]]
    assert list(dict.fromkeys(stages))[:5] == ["start", "view", "keep", "shape", "confirm"]
    assert [t["method"] for t in measured["trials"] if t["stage"] == "confirm"][:2] == [
        "ar",
        "auto",
    ]
    assert measured["skipped"] == [] and len(measured["visual_tokens"]) == 2
    assert measured["held_out"] == 1
    assert measured["worth_it"] == (measured["speedup"] > 1)

    assert config["threads"] == 1
    target, draft = load(config["target"]), load(config["draft"])
    from saccade.engine import generate
    from saccade.inputs import media

    clip = media.read(clips[0], media.FrameSampling(every=True))
    inputs = ask(target, "Describe the video in detail.", clips=[clip])

    def ids(method: str) -> tuple[int, ...]:
        result = generate.run(
            target.backbone,
            inputs,
            draft=draft.backbone,
            method=method,
            tokenizer=target.tokenizer,
            max_new_tokens=16,
        )
        assert result.fallback_reason is None
        return result.ids

    assert ids(config["method"]) == ids("ar")


@pytest.mark.extra
def test_without_a_video_it_draws_its_own(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unchecked: None
) -> None:
    """Claim: the embedded pair needs no video; out of time, what needs no confirming is the answer,
    the table is shown, and what there was no time for is said. The default file is saccade.yaml."""
    monkeypatch.setattr(demo_clips, "CLIP_FRAMES", 4)
    monkeypatch.setattr(demo_clips, "CLIP_SIDE", 112)
    search = calibration.search
    monkeypatch.setattr(
        calibration, "search", lambda *a, **more: search(*a, **{**more, "seconds": 1e-3})
    )
    with out.capture() as printed, err.capture() as warned:
        ran = call("--max-new-tokens", 8, "--method", "sd")
    assert ran.exit_code == 0, ran.exception
    assert read_config(tmp_path / "saccade.yaml")["method"] in ("auto", "ar")
    assert "auto" in printed.get() and "decode x" in printed.get() and "--config" in printed.get()
    assert "no time for: lambda" not in warned.get() and "shape, confirm" in warned.get()
    assert demo_clips.CALIBRATION_SEED >= 10_000_000  # training draws below


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        (["nowhere.mp4"], VideoInputError, "nowhere.mp4"),
        (["--method", "ar"], OptionError, "drafts nothing"),
        (["--method", "magic"], MethodError, "magic"),
        (["--target", "some/model"], OptionError, "give a video"),
        (["--out", "no/such/folder.yaml"], OptionError, "cannot write no/such/folder.yaml"),
        (["--out", "."], OptionError, "cannot write"),
        (["{clip}", "--fps", "2", "--num-frames", "3"], VideoInputError, "fps"),
        (["{clip}", "--dtype", "int3"], OptionError, "int3"),
    ],
)
def test_bad_input_is_one_sentence(
    call: Call, clips: list[Path], words: list[str], kind: type[SaccadeError], reason: str
) -> None:
    """Claim: what cannot work is refused before anything is measured or written."""
    ran = call(*(word.format(clip=clips[0]) for word in words))
    assert isinstance(ran.exception, kind), ran.exception
    assert reason in str(ran.exception) and len(str(ran.exception).splitlines()) == 1
    assert not Path("saccade.yaml").exists()
