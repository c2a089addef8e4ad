"""Claims about help, short names, the question's place, and that what is printed stands."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import saccade
from saccade.cli.application import OTHER_OPTIONS, SECTIONS, app
from saccade.cli.chat import REPLIES
from saccade.cli.command_options import QUESTION, resolve_question
from saccade.cli.terminal import console, status
from saccade.core.errors import OptionError

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", ["describe", "chat", "compare", "caption", "serve"])
def test_help_is_in_sections(call: Call, command: str) -> None:
    """Claim: a command's options stand in sections, each once, the target first of the models."""
    code, printed, _ = call(command, "--help")
    assert code == 0
    titles = [line[:-1] for line in printed.splitlines() if line.endswith(":") and line[0] != " "]
    known = [title for title in (*SECTIONS, OTHER_OPTIONS) if title in titles]
    assert [title for title in titles if title in known] == known
    assert {"Models", "Decoding", "Hardware", "Output"} <= set(known)
    assert printed.count("--target") == 1
    assert printed.index("--target") < printed.index("--draft") < printed.index("--captioner")


def test_nothing_common_is_left_to_the_others(call: Call) -> None:
    """Claim: of `describe`, only --help is in no section."""
    printed = call("describe", "--help")[1]
    assert printed.split(f"{OTHER_OPTIONS}:")[1].count("--") == 1


def test_short_names_are_the_same_everywhere() -> None:
    """Claim: a common option has its letter in every command, and no other option has it. Fails
    where `-t` works in one command and not in the next."""
    short = {"--target": "-t", "--draft": "-d", "--method": "-m", "--methods": "-m"}
    short |= {"--max-new-tokens": "-n", "--prompt": "-p", "--quiet": "-q", "--verbose": "-v"}
    options = [
        (command.name, parameter.opts)
        for command in typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        if command.name != "train-draft"  # whose draft is what comes of it
    ]
    assert len(options) > 50
    for name, written in options:
        assert all(short[each] in written for each in written if each in short), (name, written)
        letters = [each for each in written if len(each) == 2]
        assert not letters or written[0] in short, (name, written)


@pytest.mark.extra
def test_the_question_may_stand_after_the_video(call: Call, clip: Path) -> None:
    """Claim: a question after the video and by --prompt ask the same; short names are the long
    ones; both at once are refused."""
    words = ["describe", clip, "-m", "ar", "-n", 8, "--json"]
    first = json.loads(call(*words, "Name only the colours, in order.")[1])
    second = json.loads(call(*words, "-p", "Name only the colours, in order.")[1])
    assert first["token_ids"] == second["token_ids"] and first["tokens"] <= 8
    assert resolve_question(None, "why?") == resolve_question("why?", QUESTION) == "why?"
    with pytest.raises(OptionError, match="not both"):
        resolve_question("why?", "what?")


@pytest.mark.extra
def test_chat_knows_its_words(call: Call, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: /help, /document alone and /reset are answered, not asked of the model; after /reset
    the first question gets its first answer again, and exit ends it before the end of input."""
    colours = "Name only the colours, in order."
    lines = ["/help", "/document", colours, QUESTION, "/reset", colours, "exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code, printed, messages = call("chat", clip, "-n", 12, "-m", "sd", "--json")
    answers = [json.loads(line) for line in printed.splitlines()]
    assert code == 0, messages
    assert [each["question"] for each in answers] == [colours, QUESTION, colours]
    assert answers[0]["token_ids"] == answers[2]["token_ids"]
    assert answers[2]["reused_tokens"] == 0 < answers[1]["reused_tokens"]
    assert all(words in messages for words in REPLIES.values())


def test_completion_can_be_installed(call: Call) -> None:
    """Claim: the command line offers completion for the shell."""
    assert "--install-completion" in call("--help")[1]


def test_nothing_printed_is_rewritten(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: names of emoji and brackets in file names, answers and lines of progress come out as
    they went in. Control: a console of Rich's own turns them into something else."""
    from rich.console import Console

    from saccade.cli import terminal

    odd = "a :x: [red]b"
    pages = {made: io.StringIO() for made in (console, Console)}
    for made, page in pages.items():
        made(file=page, width=100).print(":x:")
    assert pages[console].getvalue() == ":x:\n" != pages[Console].getvalue()
    assert f"{odd}.mp4" in call("describe", f"{odd}.mp4")[2]
    page = io.StringIO()
    monkeypatch.setattr(terminal, "err", console(file=page, force_terminal=True, width=100))
    with status(odd, quiet=False) as tell:
        tell(odd)
    assert odd in page.getvalue()


def test_consoles_are_made_in_one_place() -> None:
    """Claim: no module but the terminal's makes a console of its own, which would rewrite."""
    made = {
        path.name
        for path in Path(saccade.__file__).parent.rglob("*.py")
        if "Console(" in path.read_text()  # Only these are parsed, which takes a second for all.
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Console"
    }
    assert made == {"terminal.py"}


def test_a_list_of_commands_is_not_cut(call: Call) -> None:
    """Claim: what a command does is told whole, in as many lines as it needs."""
    code, printed, _ = call("--help")
    assert code == 0 and "..." not in printed.split("Commands:")[1]
    assert "Answer a question about a video or document" in " ".join(printed.split())


def test_one_method_is_listed_alone(call: Call) -> None:
    """Claim: `methods NAME` lists that method, with or without overrides in the name, and a name
    that is none is a sentence with the nearest one."""
    for name in ("specvlm", "specvlm/keep=0.2"):
        code, printed, _ = call("methods", name, "--json")
        assert code == 0 and list(json.loads(printed)["methods"]) == ["specvlm"]
    code, printed, messages = call("methods", "specvlmm")
    assert code == 2 and printed == "" and "did you mean specvlm?" in messages
