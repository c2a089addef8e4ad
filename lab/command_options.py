"""The table of docs/options.md: every option of every command, as its help has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from saccade.cli.application import OTHER_OPTIONS, SECTIONS, app

BEGIN = "<!-- `make listed` writes from here -->"


def table() -> str:
    """A table a section of the help, a row an option, with the commands that take it."""
    commands_by_option: dict[tuple[str, str, str], list[str]] = {}
    for command, section, option, text in _options():
        commands_by_option.setdefault((section, option, text), []).append(command)
    lines = []
    for title in (*SECTIONS, OTHER_OPTIONS):
        rows = [(key, names) for key, names in commands_by_option.items() if key[0] == title]
        if rows:
            lines += ["", f"## {title}", "", "| option | what it does | commands |", "|-|-|-|"]
        for (_, option, text), names in rows:
            lines.append(f"| `{option}` | {text} | {', '.join(names)} |")
    return "\n".join(lines[1:]) + "\n"


def _options() -> Iterator[tuple[str, str, str, str]]:
    """(command, section of its help, option as it is written, what it does) of all of them."""
    places = {name: title for title, names in SECTIONS.items() for name in names}
    for command, context in _commands(typer.main.get_command(app), None, ()):
        for parameter in context.command.params:
            record = parameter.get_help_record(context)
            if record is None or parameter.name == "help":
                continue
            option, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            yield command, places.get(str(parameter.name), OTHER_OPTIONS), option, text


def _commands(command: Any, parent: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every command with its context, those within others by all of their names."""
    context = typer.Context(command, parent=parent, info_name=names[-1] if names else "saccade")
    if names:
        yield f"`{' '.join(names)}`", context
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), context, (*names, name))
