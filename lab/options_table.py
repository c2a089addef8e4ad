"""Makes the tables of docs/options.md: every option of every command, in the words of its help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from saccade.cli.application import OTHER_OPTIONS, SECTIONS, app

BEGIN = "<!-- `make listed` writes from here -->"
# The commands that answer with a user's models; docs/options.md says so in its head.
ANSWERING = ("describe", "chat", "watch", "caption", "compare", "serve", "ui", "bench")


def options_table() -> str:
    """Returns Markdown: a table for each section of the help, with a row for each option.

    A row also names the commands that take the option. An option that commands explain in different
    words has a row for each explanation.
    """
    commands_by_option: dict[tuple[str, str, str], list[str]] = {}
    for command, section, option, text in _documented_options():
        commands_by_option.setdefault((section, option, text), []).append(command)
    lines = []
    for title in (*SECTIONS, OTHER_OPTIONS):
        rows = [(key, names) for key, names in commands_by_option.items() if key[0] == title]
        if rows:
            lines += ["", f"## {title}", "", "| option | what it does | commands |", "|-|-|-|"]
        for (_, option, text), names in rows:
            lines.append(f"| `{option}` | {text} | {', '.join(_shorten(names))} |")
    without_first_blank = lines[1:]
    return "\n".join(without_first_blank) + "\n"


def _shorten(commands: list[str]) -> list[str]:
    """Returns the commands, where "all" stands for those in ``ANSWERING`` if none is missing."""
    answering = [f"`{name}`" for name in ANSWERING]
    if not {*answering} <= {*commands}:
        return commands
    return ["*all*", *(name for name in commands if name not in answering)]


def _documented_options() -> Iterator[tuple[str, str, str, str]]:
    """Yields (command, section of its help, option as it is written, what it does).

    The command is in backticks, as the table has it.
    """
    section_by_parameter = {name: title for title, names in SECTIONS.items() for name in names}
    for command, context in _all_commands(typer.main.get_command(app), parent=None, names=()):
        for parameter in context.command.params:
            record = parameter.get_help_record(context)
            if record is None or parameter.name == "help":
                continue
            option, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            # Two brackets side by side would be a link to a heading that does not exist.
            text = text.replace("[", "\\[")
            # "<integer range>" becomes "<integer>", because ``text`` says what the range is.
            option = option.replace(" range>", ">")
            yield (
                command,
                section_by_parameter.get(str(parameter.name), OTHER_OPTIONS),
                option,
                text,
            )


def _all_commands(command: Any, parent: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yields every command's full name in backticks, its groups' names included, and its context.

    ``names`` are the names that lead to ``command``; they are empty for the program itself.
    """
    context = typer.Context(command, parent=parent, info_name=names[-1] if names else "saccade")
    if names:
        yield f"`{' '.join(names)}`", context
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            yield from _all_commands(command.get_command(context, name), context, (*names, name))
