"""The positions of the lists of a JSON body, found in its bytes.

A body is its *head*, up to and with the ``[`` of a list, the list's items, and its *tail*, from the ``]`` on. What
the functions ``find_…`` find is a proposal, for which they look at strings and brackets alone. A parser proves it,
in ``continued`` that a text is items and nothing else, in ``read_outline`` that a list is the value of its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from turnstile_server.gate.dialects.tool_lists import ToolList
from turnstile_server.http.json_values import unescaped_quotes

_TO_BRACKET = re.compile(
    rb'[^"{}\[\]]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}\[\]]*+)*+[{}\[\]]',
    re.DOTALL,
)
"""Everything up to the next bracket that is in no string, and that bracket."""

_OPEN, _OPEN_LIST, _END_LIST = frozenset(b"{["), ord("["), ord("]")
_BLANK = b" \t\n\r"
MANY_BYTES = 1 << 14
"""Text of which all brackets are found at once; less is read bracket by bracket."""

_KEY_BLANKS = 64
"""Most blanks around the colon in front of a list that is found."""


def find_list(text: bytes, key: str, start: int = 0, depth: int = 0) -> int | None:
    """Offset behind the ``[`` of the first list that the outermost object holds as ``key``, spelled plainly.

    ``start``: where to begin, ``depth``: brackets open there. None: not found.
    """
    name = f'"{key}"'.encode()
    while (found := _TO_BRACKET.match(text, start)) is not None:
        end = found.end()
        if text[end - 1] in _OPEN:
            if depth == 1 and text[end - 1] == _OPEN_LIST:
                before = text[max(start, end - 1 - len(name) - _KEY_BLANKS) : end - 1].rstrip(_BLANK)
                if before.endswith(b":") and before[:-1].rstrip(_BLANK).endswith(name):
                    return end
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return None
        start = end
    return None


def find_items(text: bytes, start: int, likely_end: int | None = None) -> tuple[list[int], int] | None:
    """The end of each object or list in the list around ``start``, and the offset of that list's ``]``.

    ``start``: behind the list's ``[`` or behind one of its items. ``likely_end``: of the list; only time depends
    on it. None: the list does not end.
    """
    size = (len(text) if likely_end is None else likely_end) - start
    return find_few_items(text, start) if size < MANY_BYTES else find_many_items(text, start)


def find_few_items(text: bytes, start: int) -> tuple[list[int], int] | None:
    """As ``find_items``, bracket by bracket."""
    ends: list[int] = []
    depth = 0
    match = _TO_BRACKET.match
    while (found := match(text, start)) is not None:
        start = found.end()
        bracket = text[start - 1]
        if bracket in _OPEN:
            depth += 1
        elif depth == 0:
            return (ends, start - 1) if bracket == _END_LIST else None
        else:
            depth -= 1
            if depth == 0:
                ends.append(start)
    return None


def find_many_items(text: bytes, start: int) -> tuple[list[int], int] | None:
    """As ``find_items``, all brackets at once: it takes some time for any text, and little for each byte."""
    data = np.frombuffer(text, np.uint8, offset=start)
    quotes, _ = unescaped_quotes(data)
    folded = data & 0xDF  # braces are as brackets
    brackets = np.flatnonzero((folded == _OPEN_LIST) | (folded == _END_LIST))
    brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
    depths = np.cumsum(np.where(folded[brackets] == _OPEN_LIST, 1, -1))
    over = np.flatnonzero(depths < 0)
    if not len(over) or data[brackets[over[0]]] != _END_LIST:
        return None
    ends = brackets[: over[0]][depths[: over[0]] == 0] + (start + 1)
    return ends.tolist(), start + int(brackets[over[0]])


def continued(text: bytes, *, begun: bool) -> list[Any] | None:
    """The items in ``text``, which surely stands for that and nothing else between a list's ``[`` or, where it is
    ``begun``, one of its items, and its ``]``. None where it does not."""
    try:
        # As deep as in a body, for the parser's limit. A second list would have been begun by the text.
        lists = orjson.loads(b"[[%b%b]]" % (b"{}" if begun else b"", text))
    except orjson.JSONDecodeError:
        return None
    return lists[0][1 if begun else 0 :] if len(lists) == 1 else None


def read_outline(
    head: bytes, tail: bytes, key: str, inner: str, known: Iterable[ToolList]
) -> tuple[dict[str, Any], ToolList | None] | None:
    """The object whose text is ``head``, the items of its list ``key``, and ``tail``; without that list.

    None where what is between is not surely the value of ``key``. The object's list ``inner``, which may be long,
    is not read where its text is one of ``known``. It is the second of the pair; None where it was not found.
    """
    text, at = head[:-1] + tail[1:], len(head) - 1
    mark = b"m" * (len(text) + 1)  # longer than any other string can be in the text
    found = _find_inner(text, at, inner, known)
    if found is not None:
        start, one = found
        inner_mark = b"i" * len(mark)
        marks = sorted([(at, at, mark), (start, start + len(one.text), inner_mark)])
        source = _marked(text, *marks)
        if source is not None and source.get(key) == mark.decode() and source.get(inner) == inner_mark.decode():
            del source[key]
            source[inner] = one.value
            return source, one
    source = _marked(text, (at, at, mark))
    if source is None or source.get(key) != mark.decode():
        return None
    del source[key]
    return source, None


def _marked(text: bytes, *marks: tuple[int, int, bytes]) -> dict[str, Any] | None:
    """The object ``text``, each of whose pieces from start to end is a string instead. None: it is no object."""
    pieces: list[bytes] = []
    done = 0
    for start, end, mark in marks:
        pieces += (text[done:start], b'"', mark, b'"')
        done = end
    try:
        value = orjson.loads(b"".join((*pieces, text[done:])))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _find_inner(text: bytes, at: int, key: str, known: Iterable[ToolList]) -> tuple[int, ToolList] | None:
    """The offset of the first list ``key`` in ``text``, an object that lacks a value at ``at``; and that list."""
    found = re.search(rb'"%b"[ \t\n\r]*+:[ \t\n\r]*+\[' % re.escape(key).encode(), text)
    if found is None:
        return None
    start = found.end() - 1
    # A list around the missing value is none.
    one = next((one for one in known if text.startswith(one.text, start)), None)
    if one is None and (items := find_items(text, start + 1)) is not None:
        inside = text[start + 1 : items[1]]
        value = continued(inside, begun=False)
        one = None if value is None else ToolList(b"[%b]" % inside, value)
    return None if one is None or start < at < start + len(one.text) else (start, one)
