"""The lines of the server's log: one for each record, whatever an agent, a task or a tool put into its message.

Tracebacks are indented, so that none of their lines can be taken for a record of its own.
"""

from __future__ import annotations

import logging
from typing import Any

from turnstile.visible import visible

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_INDENT = "    "
_LOOKED = (200, 503)
"""Statuses of a server's answer to a look: its load, or that it starts."""


class LogFormatter(logging.Formatter):
    """Shows what a terminal would act on as its escape, line breaks in messages included. ``label``: which of
    several processes writes."""

    def __init__(self, label: str = "") -> None:
        super().__init__(FORMAT.replace("%(name)s", f"{label} %(name)s") if label else FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


class WithoutLooks(logging.Filter):
    """Leaves the looks of clients (``GET /load``, once a second from each) out of the access log, but those that
    were refused for their key."""

    def filter(self, record: logging.LogRecord) -> bool:
        match record.args:
            case (_, "GET", str(path), _, int(status)):
                return path.partition("?")[0] != "/load" or status not in _LOOKED
            case _:
                return True


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in visible(text, lines=True).split("\n"))
