"""The lines of the server's log: one for each record, whatever an agent, a task or a tool put into its message.

Tracebacks are indented, so that none of their lines can be taken for a record of its own.
"""

from __future__ import annotations

import logging
from typing import Any

from turnstile.visible import visible

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_INDENT = "    "


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


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in visible(text, lines=True).split("\n"))
