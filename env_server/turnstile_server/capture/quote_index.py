"""Finds which turns a text quotes: their replies, or text arguments of their calls.

What must hold: a search takes time in the length of the text and in what it finds, not in the number of turns.
What a quotation means is decided in ``provenance``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnstile.models import Turn

QUOTED_CHARS = 24
"""Characters that a text inside another message must have to count as a quotation. A shorter text may stand there
by chance, and so may a single word of any length (a path, a name). A text that is the whole message always
counts."""

SUMMARY_SHARE = 0.25
"""Part of a reply that must be quoted, counted by whole lines: agents leave out the model's thoughts before a
summary."""


class QuoteIndex:
    """An index over the turns of one episode. It caches what it found in each content."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._by_end: defaultdict[str, set[str]] = defaultdict(set)
        """Texts by their last ``QUOTED_CHARS`` characters."""
        self._found: dict[str, frozenset[str]] = {}
        self._lengths: dict[str, int] = {}
        self._wholes: defaultdict[str, list[str]] = defaultdict(list)
        self._lines: defaultdict[str, list[str]] = defaultdict(list)
        self._arguments: defaultdict[str, list[str]] = defaultdict(list)
        for turn in turns:
            self._add(turn)

    def replies(self, contents: Sequence[str]) -> dict[str, int]:
        """Turn id to the number of characters of its reply that the contents quote, whole or by lines. Turns of
        which too little is quoted are left out."""
        held = self._held(contents)
        quoted: defaultdict[str, int] = defaultdict(int)
        for text in held:
            for turn_id in self._lines.get(text, ()):
                quoted[turn_id] += len(text)
        enough = {
            turn_id: chars for turn_id, chars in quoted.items() if chars >= SUMMARY_SHARE * self._lengths[turn_id]
        }
        return enough | {turn_id: len(text) for text in held for turn_id in self._wholes.get(text, ())}

    def arguments(self, contents: Sequence[str]) -> dict[str, int]:
        """Turn id to the length of the longest text argument of its calls that the contents quote."""
        longest: dict[str, int] = {}
        inside = (text for text in self._held(contents) if not _is_word(text))
        for text in {*inside, *(content.strip() for content in contents)}:
            for turn_id in self._arguments.get(text, ()):
                longest[turn_id] = max(len(text), longest.get(turn_id, 0))
        return longest

    def _add(self, turn: Turn) -> None:
        reply = turn.reply.content.strip()
        self._lengths[turn.turn_id] = len(reply)
        if self._indexed(reply):
            self._wholes[reply].append(turn.turn_id)
        for line in map(str.strip, reply.splitlines()):
            if self._indexed(line):
                self._lines[line].append(turn.turn_id)
        for text in {text for call in turn.reply.tool_calls for text in _texts(call.arguments) if text}:
            self._arguments[text].append(turn.turn_id)
            if not _is_word(text):
                self._indexed(text)

    def _indexed(self, text: str) -> bool:
        if len(text) < QUOTED_CHARS:
            return False
        self._by_end[text[-QUOTED_CHARS:]].add(text)
        return True

    def _held(self, contents: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*(self._in(content) for content in contents))

    def _in(self, content: str) -> frozenset[str]:
        """The indexed texts that the content holds."""
        found = self._found.get(content)
        if found is None:
            by_end = self._by_end
            found = self._found[content] = frozenset(
                text
                for start in range(len(content) - QUOTED_CHARS + 1)
                if (end := content[start : start + QUOTED_CHARS]) in by_end
                for text in by_end[end]
                if content.endswith(text, 0, start + QUOTED_CHARS)
            )
        return found


def _is_word(text: str) -> bool:
    """One word, such as a path, a name or a flag. ASCII only: some scripts write whole sentences without
    spaces."""
    return text.isascii() and len(text.split(maxsplit=1)) == 1


def _texts(arguments: str) -> Iterator[str]:
    """Every string value in a call's arguments."""
    try:
        pending: list[Any] = [json.loads(arguments)]
    except (ValueError, RecursionError):
        return
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
