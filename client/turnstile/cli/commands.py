"""Groups of commands that are listed without importing what the commands run.

A table says of each command where its code is, with one sentence about it. ``--help`` of a group reads the table
alone; the code is imported when the command is called. Installed packages add commands through entry points.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeAlias

import typer
import typer.core

from turnstile.cli.output import USAGE, fail

Table: TypeAlias = "Mapping[str, CommandEntry]"


class CommandEntry(NamedTuple):
    """One line of a table.

    ``target``: ``"module:function"``, or the table of a group of commands. ``summary``: one sentence.
    """

    target: str | Table
    summary: str


class CommandGroup(typer.core.TyperGroup):
    """A group of commands: those of ``table``, then those of the entry-point group ``added``.

    A group in the table has an entry-point group too: ``turnstile.commands.agents`` for ``turnstile agents``.
    An entry point names a pair ``(target, summary)`` like a line of the table, a function with typer's
    annotations, or a ``typer.Typer``. Only the pair is listed without importing the command. An added command
    cannot replace one of the table; one that cannot be imported says what to install.
    """

    def __init__(self, *, table: Table, added: str, added_by: EntryPoint | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._table = table
        self._added = added
        self._added_by = added_by

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self._table, *sorted(self._entry_points().keys() - self._table.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self._table:
            return self._command(cmd_name, *self._table[cmd_name], added_by=self._added_by)
        entry = self._entry_points().get(cmd_name)
        return self._added_command(entry) if entry is not None else None

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self._added)}

    def _command(self, name: str, target: str | Table, summary: str, *, added_by: EntryPoint | None) -> Any:
        if isinstance(target, str):
            return _LateCommand(name, target, summary, added_by)
        return CommandGroup(
            name=name,
            table=target,
            added=f"{self._added}.{name}",
            added_by=added_by,
            help=summary,
            no_args_is_help=True,
        )

    def _added_command(self, entry: EntryPoint) -> Any:
        try:
            loaded = entry.load()
        except (Exception, SystemExit):  # noqa: BLE001 - other people's code may raise anything
            summary = "Cannot be imported; calling it says what to install."
            return _LateCommand(entry.name, entry.value, summary, entry)
        if isinstance(loaded, tuple):
            return self._command(entry.name, *loaded, added_by=entry)
        return _typer_command(entry.name, loaded)


class _LateCommand(typer.core.TyperCommand):
    """A command that is known by its name and summary. Its code is imported when it is called."""

    def __init__(self, name: str, target: str, summary: str, added_by: EntryPoint | None) -> None:
        super().__init__(name, help=summary)
        self._target = target
        self._added_by = added_by

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            command = _typer_command(self.name or "", _loaded(self._target))
        except ImportError as error:
            if self._added_by is None:
                raise
            fail(_missing(self._added_by, f"{parent.command_path} {info_name}", error), USAGE)
        return command.make_context(info_name, args, parent, **extra)


def _typer_command(name: str, loaded: Any) -> Any:
    """The command of a function with typer's annotations, or of a Typer."""
    if isinstance(loaded, typer.Typer):
        made = typer.main.get_command(loaded)
        made.name = name
        return made
    holder = typer.Typer(add_completion=False)
    holder.command(name)(loaded)
    return typer.main.get_command(holder)


def _loaded(target: str) -> Any:
    """The object that ``"module:attribute"`` names. Raises ImportError."""
    module, _, attribute = target.partition(":")
    found = vars(import_module(module))
    if attribute not in found:
        raise ImportError(f"module {module} has no {attribute}")
    return found[attribute]


def _missing(entry: EntryPoint, command: str, error: ImportError) -> str:
    package = entry.dist.name if entry.dist is not None else "turnstile-rl"
    return (
        f"`{command}` needs the server: pip install '{package}[embedded]' "
        f"(or '[server]' beside an SGLang of yours): {error}"
    )
