"""The lines on which the keys of a TOML file stand. ``tomllib`` reads values and tells no lines.

Made for messages: it reads table headers and the first key of a line, and skips texts of several lines. A key that
it does not find (of an inline table) has the line of the table around it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnstile_server.tasks.parse import Loc

_KEY = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_PATH = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"\s*\[\s*({_PATH})\s*\]\s*(?:#.*)?$")
_LISTED = re.compile(rf"\s*\[\[\s*({_PATH})\s*\]\]\s*(?:#.*)?$")
_VALUE = re.compile(rf"\s*({_PATH})\s*=\s*(.*)$")
_LONG = ('"""', "'''")


def key_lines(text: str) -> Mapping[Loc, int]:
    """Line (1-based) by path. Of a list of tables, the index is part of the path."""
    lines: dict[Loc, int] = {}
    counts: dict[Loc, int] = {}
    table: Loc = ()
    closing: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if closing is not None:
            if closing in line:
                closing = None
            continue
        if (listed := _LISTED.match(line)) is not None:
            path = _resolved(_parts(listed[1]), counts)
            counts[path] = counts.get(path, -1) + 1
            table = (*path, counts[path])
            lines.setdefault(path, number)
            lines[table] = number
        elif (header := _TABLE.match(line)) is not None:
            table = _resolved(_parts(header[1]), counts)
            lines.setdefault(table, number)
        elif (pair := _VALUE.match(line)) is not None:
            lines.setdefault((*table, *_parts(pair[1])), number)
            for quotes in _LONG:
                if pair[2].startswith(quotes) and quotes not in pair[2][3:]:
                    closing = quotes
    return lines


def line_at(lines: Mapping[Loc, int], loc: Loc) -> int | None:
    """The line of ``loc``, else of the longest part of its path that is known."""
    for length in range(len(loc), 0, -1):
        if loc[:length] in lines:
            return lines[loc[:length]]
    return None


def _parts(path: str) -> Loc:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, path))


def _resolved(path: Loc, counts: Mapping[Loc, int]) -> Loc:
    """``[steps.agent]`` after the second ``[[steps]]`` is ``steps.1.agent``."""
    found: Loc = ()
    for position, part in enumerate(path):
        found = (*found, part)
        if found in counts and position < len(path) - 1:
            found = (*found, counts[found])
    return found
