"""Output and exit codes of commands.

Everything goes through ``echo`` and ``echo_json``: much of it was written by agents and models, and a terminal
obeys what it is sent.

Results go to stdout, messages about the run to stderr. A terminal (or ``COLUMNS``) gives the width; a pipe without
``COLUMNS`` has none, and nothing is cut or wrapped there. Ids, numbers and heads are whole at every width.

Exit codes: 0 done; 1 the request failed (an audit that does not pass, an unknown episode); 2 the command or the
configuration is wrong; 3 no Turnstile server answered.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn

import typer
from rich.cells import cell_len

from turnstile import errors
from turnstile.visible import visible, visible_json

FAILED = 1
USAGE = 2
UNREACHABLE = 3

_EXIT_CODES: tuple[tuple[type[errors.TurnstileError], int], ...] = (
    (errors.ServerUnavailable, UNREACHABLE),
    (errors.Timeout, UNREACHABLE),
    (errors.ProtocolError, UNREACHABLE),
    (errors.AuthError, USAGE),
    (errors.InvalidRequest, USAGE),
)
_NO_SERVER = "; `turnstile serve` starts a server, --url or TURNSTILE_URL names one that is elsewhere"
_GAP = "  "
_LEAST_TEXT = 16
"""Columns that a column of text has at least; with fewer, each row becomes a block of lines."""


def echo(text: str, *, err: bool = False) -> None:
    """Prints lines; what a terminal would act on is shown as its escape."""
    typer.echo(visible(text, lines=True), err=err)


def echo_json(text: str) -> None:
    """Prints JSON, exact for every reader of JSON."""
    typer.echo(visible_json(text))


def fail(sentence: str, code: int) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    echo(f"turnstile: {sentence}", err=True)
    raise typer.Exit(code)


@contextmanager
def reported() -> Iterator[None]:
    """Turns the client's errors, and files that cannot be written, into a sentence and an exit code."""
    try:
        yield
    except errors.TurnstileError as error:
        code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), FAILED)
        fail(error.message + (_NO_SERVER if _is_not_there(error) else ""), code)
    except BrokenPipeError:
        raise  # the reader of a pipe has enough; typer ends quietly
    except OSError as error:
        fail(f"{error.filename or 'file'}: {error.strerror or error}", FAILED)


def _is_not_there(error: errors.TurnstileError) -> bool:
    """True if no connection came about. False for a server that answered 503, and for a connection lost on the
    way."""
    return isinstance(error, errors.ServerUnavailable) and error.status is None and not error.may_have_happened


def width() -> int | None:
    """Columns of the output; None where nothing bounds a line."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


class Cell(NamedTuple):
    """A cell that may be shortened where the whole does not fit."""

    whole: str
    short: str


@dataclass(frozen=True, slots=True)
class Column:
    """``number``: to the right. ``text``: may wrap between words. A column without content is left out where it
    is ``optional``. ``spare``: left out where there is no room, the highest first; 0: never."""

    head: str
    kind: Literal["word", "number", "text"] = "word"
    short: str = ""
    optional: bool = False
    spare: int = 0


def show_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> None:
    """Prints a table. What does not fit is first shortened, then wrapped, then shown as one block per row. Where
    columns to spare are left out, a line says which."""
    found = [[_cell(cell) for cell in row] for row in rows]
    kept = [at for at, column in enumerate(columns) if not column.optional or any(row[at].whole for row in found)]
    columns, found = [columns[at] for at in kept], [[row[at] for at in kept] for row in found]
    most = width()
    for short in (False, True):
        heads = [column.short if short and column.short else column.head for column in columns]
        cells = [[cell.short if short else cell.whole for cell in row] for row in found]
        widths = [max(map(cell_len, line)) for line in zip(heads, *cells, strict=True)]
        if most is None or _total(widths) <= most:
            break
    if most is not None and (spared := _spared(columns, widths, most)):
        kept = [at for at in range(len(columns)) if at not in spared]
        left_out = ", ".join(columns[at].head for at in sorted(spared))
        show_table([replace(columns[at], spare=0) for at in kept], [[row[at] for at in kept] for row in found])
        show_text(f"no room for: {left_out}; a wider terminal and a pipe have them")
        return
    if most is not None and _total(widths) > most:
        narrowed = _narrowed(columns, cells, widths, most)
        if narrowed is None:
            _show_blocks([column.head for column in columns], [[cell.whole for cell in row] for row in found])
            return
        widths = narrowed
    echo(_line(columns, heads, widths))
    echo("─" * _total(widths))
    for row in cells:
        wrapped = [_wrapped(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            line = [lines[number] if number < len(lines) else "" for lines in wrapped]
            echo(_line(columns, line, widths))


def _spared(columns: Sequence[Column], widths: Sequence[int], most: int) -> set[int]:
    """The columns that are left out so that the others fit; none where they fit, or would not fit either."""
    left = dict(enumerate(widths))
    by_need = sorted((at for at, column in enumerate(columns) if column.spare), key=lambda at: -columns[at].spare)
    for at in by_need:
        if _total(list(left.values())) <= most:
            break
        del left[at]
    fits = _total(list(left.values())) <= most
    return set(range(len(columns))) - left.keys() if fits else set()


def _cell(cell: str | Cell) -> Cell:
    """The cell with its escapes, as it is shown: widths are counted after that."""
    whole, short = cell if isinstance(cell, Cell) else (cell, cell)
    return Cell(visible(whole), visible(short))


def show_facts(facts: Mapping[str, Any]) -> None:
    """Prints a line for each fact, nested mappings by dotted names. Text wraps between words."""
    flat = {visible(name): value for name, value in _flat(facts)}
    names = max(map(len, flat), default=0)
    for name, value in flat.items():
        show_text(_text(value), first=f"{name:{names}}{_GAP}", rest=" " * (names + len(_GAP)))


def show_text(text: str, first: str = "", rest: str | None = None) -> None:
    """Prints text behind ``first``, its further lines behind ``rest``, wrapped between words."""
    most = width()
    rest = " " * len(first) if rest is None else rest
    room = (most or 0) - cell_len(first)
    lines = [part for line in visible(text, lines=True).split("\n") for part in _wrapped(line, room)]
    for number, line in enumerate(lines):
        echo(f"{rest if number else first}{line}".rstrip())


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _narrowed(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int], most: int
) -> list[int] | None:
    """The widths with the columns of text narrowed; None where a word would have to be broken."""
    texts = [at for at, column in enumerate(columns) if column.kind == "text"]
    over = _total(widths) - most
    narrowed = list(widths)
    for at in sorted(texts, key=lambda at: -widths[at]):
        words = (cell_len(word) for row in cells for word in row[at].split())
        least = max(_LEAST_TEXT, cell_len(columns[at].head), *words, 0)
        cut = min(over, max(0, narrowed[at] - least))
        narrowed[at] -= cut
        over -= cut
    return narrowed if over <= 0 else None


def _show_blocks(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A line with the first cell, then a line for each other cell that has content."""
    names = max(map(cell_len, heads[1:]), default=0)
    for row in rows:
        echo(row[0])
        for head, cell in zip(heads[1:], row[1:], strict=True):
            if cell:
                show_text(cell, first=f"{_GAP}{head:{names}}{_GAP}")


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, wide in zip(columns, cells, widths, strict=True):
        room = " " * (wide - cell_len(cell))
        padded.append(room + cell if column.kind == "number" else cell + room)
    return _GAP.join(padded).rstrip()


def _wrapped(line: str, most: int) -> list[str]:
    if most <= 0 or cell_len(line) <= most:
        return [line]
    return textwrap.wrap(
        line, most, break_long_words=False, break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True
    ) or [""]


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    """A value for a person: nothing as ``-``, a list one entry a line."""
    if value is None or (not value and isinstance(value, str | Mapping | Sequence)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(entry)}" for name, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(_text(entry) for entry in value)
    return str(value)
