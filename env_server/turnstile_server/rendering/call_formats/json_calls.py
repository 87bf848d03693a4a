"""Formats whose calls are JSON objects: one or a list of them between two marks, or as the whole reply.

The JSON decides where a call ends, never a mark: a mark inside a string is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turnstile.models import ParseNote, ParseStatus
from turnstile_server.rendering.call_formats.base import BaseFormat, read_attempts
from turnstile_server.rendering.call_formats.checked_calls import call_of, called
from turnstile_server.rendering.call_formats.json_text import NotJson, NotMembers, Value, members_at, skip
from turnstile_server.rendering.call_formats.protocol import Called, Opening, Segment, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """The form of such calls.

    ``opening``, ``closing``: the marks; an empty ``closing`` is the end of the reply. ``form``: ``object`` is one
    call between two marks, ``list`` a JSON list of them, ``lines`` objects one after another. ``names``,
    ``arguments``, ``ids``: keys, first the format's own, then those that are read too. ``named``: the object is
    ``{NAME: ARGUMENTS}``.
    """

    opening: str
    closing: str
    form: Literal["object", "list", "lines"] = "object"
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ()
    named: bool = False


class JsonCalls(BaseFormat):
    """A ``CallFormat`` of a ``JsonGrammar``."""

    def __init__(self, grammar: JsonGrammar) -> None:
        self._grammar = grammar
        self.openings = (Opening(grammar.opening),)
        self.marks = tuple(mark for mark in (grammar.opening, grammar.closing) if mark)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        return read_attempts(
            text,
            lambda position: text.find(self._grammar.opening, position),
            lambda start: self._attempt(text, start, offered, ended),
        )

    def _attempt(self, text: str, start: int, offered: ToolSchemas, ended: bool) -> tuple[list[Segment], int]:
        """What begins at ``start`` with the opening, and where it ends."""
        inside = start + len(self._grammar.opening)
        try:
            objects, end = self._objects(text, inside)
        except NotJson as error:
            return self._unread(text, start, inside, error.status, ended)
        after = skip(text, end)
        notes: tuple[str, ...] = ()
        if self._grammar.closing and text.startswith(self._grammar.closing, after):
            after += len(self._grammar.closing)
        elif self._grammar.closing and (
            (after == len(text) and ended) or text.startswith(self._grammar.opening, after)
        ):
            notes = (ParseNote.END_MISSING,)
        elif self._grammar.closing:
            status = ParseStatus.UNCLOSED if after == len(text) else ParseStatus.MALFORMED
            return self._unread(text, start, end, status, ended)
        else:
            after = end
        calls: list[Segment] = []
        for members in objects:
            call = self._call(members, offered, notes)
            if isinstance(call, ParseStatus):
                return [Unread(text[start:after], call)], after
            calls.append(call)
        return calls, after

    def _objects(self, text: str, position: int) -> tuple[list[dict[str, Value]], int]:
        """The objects at ``position``, and where the last ends. Raises NotJson."""
        objects: list[dict[str, Value]] = []
        if self._grammar.form == "object":
            members, position = members_at(text, position)
            return [members], position
        position = skip(text, position)
        if self._grammar.form == "lines":
            while text.startswith("{", position):
                members, end = members_at(text, position)
                objects.append(members)
                position = skip(text, end)
            if not objects:
                raise NotJson("no object")
            return objects, end
        if not text.startswith("[", position):
            raise NotMembers("not a list")
        position = skip(text, position + 1)
        while not text.startswith("]", position):
            members, end = members_at(text, position)
            objects.append(members)
            position = skip(text, end)
            if text.startswith(",", position):
                position = skip(text, position + 1)
            elif not text.startswith("]", position):
                raise NotJson("the list does not go on")
        return objects, position + 1

    def _call(
        self, members: dict[str, Value], offered: ToolSchemas, notes: tuple[str, ...]
    ) -> Called | ParseStatus:
        grammar = self._grammar
        if grammar.named:
            if len(members) != 1:
                return ParseStatus.MALFORMED
            ((name, value),) = members.items()
            return called(name, value, offered, notes)
        return call_of(
            members, offered, names=grammar.names, arguments=grammar.arguments, ids=grammar.ids, notes=notes
        )

    def _unread(
        self, text: str, start: int, inside: int, status: ParseStatus, ended: bool
    ) -> tuple[list[Segment], int]:
        """The attempt as text: up to its closing mark, the next attempt, or the end."""
        closing = text.find(self._grammar.closing, inside) if self._grammar.closing else -1
        opening = text.find(self._grammar.opening, inside)
        if closing >= 0 and (opening < 0 or closing < opening):
            end = closing + len(self._grammar.closing)
            return [Unread(text[start:end], status)], end
        end = opening if opening >= 0 else len(text)
        return [Unread(text[start:end], ParseStatus.UNCLOSED if not ended or opening >= 0 else status)], end
