"""Claims about groups of options: a command's help and its call know nothing of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from saccade.cli import command_options
from saccade.cli.command_options import LoadOptions, SamplingOptions, with_option_groups
from saccade.core.errors import OptionError
from saccade.corpus.manifest import CaptionSettings
from saccade.model.backbone import Backbone


@dataclass(frozen=True)
class Size:
    wide: Annotated[int, typer.Option(min=1, help="Across.")] = 3
    tall: Annotated[bool, typer.Option("--tall", help="Upright.")] = False


@with_option_groups
def draw(name: Annotated[str, typer.Argument()], size: Size, times: int = 1) -> None:
    """Says what it was given."""
    typer.echo(f"{name} {size} {times}")


def test_a_group_is_an_option_a_field() -> None:
    """Claim: each field is an option with its help, limits and default, where the group stood."""
    app = typer.Typer()
    app.command()(draw)
    assert list(inspect.signature(draw).parameters) == ["name", "wide", "tall", "times"]
    outcome = CliRunner().invoke(app, ["x", "--tall", "--times", "2"])
    assert outcome.output == f"x {Size(tall=True)} 2\n"
    assert CliRunner().invoke(app, ["x", "--wide", "0"]).exit_code == 2
    usage = CliRunner().invoke(app, ["--help"]).output
    assert all(word in usage for word in ("--wide", "Across.", "--tall", "Upright.", "Says what"))


def test_called_from_python_a_group_has_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: what is left out is as the group declares it."""
    draw(name="x", wide=5)
    assert capsys.readouterr().out == f"x {Size(wide=5)} 1\n"


def test_options_become_settings() -> None:
    """Claim: nothing of sampling is set without a temperature, and then it is refused by name;
    ``threads`` are none of a checkpoint's."""
    assert SamplingOptions().generation_settings() == {"do_sample": False}
    drawn = SamplingOptions(temperature=0.5, top_k=3, stop=["x"]).generation_settings()
    assert drawn == {
        **dict(do_sample=True, temperature=0.5, top_p=None, top_k=3), "stop_strings": ["x"]
    }  # fmt: skip
    with pytest.raises(OptionError, match="--temperature above 0"):
        SamplingOptions(top_p=0.5).generation_settings()
    assert "threads" not in LoadOptions(threads=2).load_arguments


@pytest.mark.representatives(1)
@pytest.mark.parametrize("given", [(), ("--positions", "trained")])
def test_positions_reach_both_models(
    call: Callable[..., tuple[int, str, str]],
    clip: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
) -> None:
    """Claim: ``--positions`` is what target and draft are loaded with; without it the library's, as
    the embedded pair was trained."""
    choices: list[str] = []

    def noted(*args: Any, positions: str, **more: Any) -> Backbone:
        choices.append(positions)
        return Backbone(*args, **more)

    monkeypatch.setattr("saccade.inputs.loading.Backbone", noted)
    code, _, _ = call("describe", clip, "--method", "sd", "--max-new-tokens", 2, *given)
    assert code == 0 and choices == [given[-1] if given else "library"] * 2


def test_positions_nobody_knows_are_refused(
    call: Callable[..., tuple[int, str, str]], clip: Path
) -> None:
    """Claim: another word ends with code 2 and those that would do."""
    code, printed, messages = call("describe", clip, "--positions", "authors")
    assert code == 2 and not printed
    assert "'auto', 'library', 'trained'" in messages


def test_positions_are_part_of_what_decides_an_answer() -> None:
    """Claim: rows of a corpus made at other positions are not taken for this run's; what a
    checkpoint decides is the same said or not."""
    keys = [
        CaptionSettings(load=(("positions", place),)).key
        for place in ("auto", "library", "trained")
    ]
    assert len(set(keys)) == 3 and CaptionSettings().key == keys[0]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (("Sum it up.", None, True), (None, "Sum it up.")),
        (("What is 1.5 in it?", None, True), (None, "What is 1.5 in it?")),
        (("Does it use node.js", None, True), (None, "Does it use node.js")),
        (("Is https://example.com in it?", None, True), (None, "Is https://example.com in it?")),
        (("x" * 5000, None, True), (None, "x" * 5000)),
        ((__file__, None, True), (__file__, None)),
        (("missing.mp4", None, True), ("missing.mp4", None)),
        (("https://example.com/a", None, True), ("https://example.com/a", None)),
        (("-", None, True), ("-", None)),
        (("Sum it up.", "why?", True), ("Sum it up.", "why?")),
        (("Sum it up.", None, False), ("Sum it up.", None)),
        ((None, None, True), (None, None)),
    ],
)
def test_beside_a_document_a_single_argument_may_be_the_question(words, arguments):
    """Claim: what names no file is asked about the document; files, addresses and names of files
    that are missing are the video, and without a document everything is."""
    assert command_options.split_arguments(*words) == arguments
