"""What commands print and how they end.

Results go to stdout, everything said to a person about the run to stderr. Exit codes: 0 done; 1 what was asked
failed (an audit that does not pass, an unknown episode); 2 the command or the configuration is wrong; 3 no
Turnstile server answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from turnstile import errors

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


def fail(sentence: str, code: int) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    typer.echo(f"turnstile: {sentence}", err=True)
    raise typer.Exit(code)


@contextmanager
def reported() -> Iterator[None]:
    """Turns the client's errors, and files that cannot be written, into a sentence and an exit code."""
    try:
        yield
    except errors.TurnstileError as error:
        code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), FAILED)
        fail(error.message + (_NO_SERVER if _nobody_there(error) else ""), code)
    except BrokenPipeError:
        raise  # the reader of a pipe has enough; typer ends quietly
    except OSError as error:
        fail(f"{error.filename or 'file'}: {error.strerror or error}", FAILED)


def _nobody_there(error: errors.TurnstileError) -> bool:
    """Not even a connection: neither a server that answers 503 nor one that was lost on the way."""
    return isinstance(error, errors.ServerUnavailable) and error.status is None and not error.may_have_happened


def show_table(table: Table) -> None:
    Console().print(table)


def table(*columns: str, title: str | None = None) -> Table:
    """A table whose cells fold rather than vanish; numbers and the first column stay whole, so that an id can be
    copied."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        numeric = column.startswith("#")
        made.add_column(
            column.removeprefix("#"),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=index == 0 or numeric,
        )
    return made
