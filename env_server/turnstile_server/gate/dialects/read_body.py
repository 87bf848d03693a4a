"""A body as its dialect reads it, be it in parts or as a whole.

Holds: a dialect runs the same code on both, so it refuses a body with the same words. What it makes of a part that
came before is what it made then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from turnstile.models import Message
from turnstile_server.gate.dialects.json import check_objects, objects, read_object
from turnstile_server.gate.dialects.json_lists import read_outline
from turnstile_server.gate.dialects.parse_cache import TOOLS, BodyParts, ParseCache

Made = TypeVar("Made")
Parse = Callable[[dict[str, Any], int], tuple[Message, ...]]
"""The messages of one item, given its index; it looks at that item alone. One item may give several messages."""


class ReadBody:
    """A body as its dialect reads it: first ``outline``, then ``messages``.

    ``parts``: the body was cut where it is new, and is remembered by ``cache``; else ``source`` is all of it.
    """

    def __init__(
        self, key: str, cache: ParseCache | None, parts: BodyParts | None, source: dict[str, Any] | None
    ) -> None:
        self._key = key
        self._cache = cache
        self._parts = parts
        self._source = source

    @property
    def source(self) -> dict[str, Any]:
        """The body's members. The history is missing in a body that was read in parts."""
        if self._source is None:
            assert self._parts is not None
            outline = self._parts.outline
            known = [] if outline.tools is None else [outline.tools]
            read = read_outline(outline.head, outline.tail, self._key, TOOLS, known)
            assert read is not None, "an outline that was read before is read again"
            self._source = read[0]
        return self._source

    def outline(self, make: Callable[[ReadBody, Mapping[str, str]], Made], params: Mapping[str, str]) -> Made:
        """The result of ``make`` for all but the history, which ``make`` does not look at. The result is
        shared."""
        if self._parts is None:
            return make(self, params)
        outline = self._parts.outline
        if outline.made is None or outline.params != params:
            outline.made, outline.params = make(self, params), dict(params)
        return cast(Made, outline.made)

    def tools(self, make: Callable[[dict[str, Any]], Made]) -> Made:
        """The result of ``make`` for the body's ``tools``, which is all that ``make`` looks at. The result is
        shared."""
        tools = None if self._parts is None else self._parts.outline.tools
        if tools is None:
            return make(self.source)
        if make not in tools.made:
            tools.made[make] = make(self.source)
        return cast(Made, tools.made[make])

    def messages(
        self, parse: Parse, items: Callable[[], Sequence[dict[str, Any]]] | None = None
    ) -> tuple[Message, ...]:
        """All messages of the history. ``items``: reads the history of a body that was read as a whole.

        Raises InvalidRequest, which names the item.
        """
        if self._parts is None:
            whole = objects(self.source, self._key) if items is None else items()
            new = [parse(item, index) for index, item in enumerate(whole)]
            if self._cache is None:
                return tuple(message for some in new for message in some)
            return self._cache.remember_messages(new)
        assert self._cache is not None
        count = self._parts.place.count
        check_objects(self._parts.values, self._key, count)
        new = [parse(item, index) for index, item in enumerate(self._parts.values, count)]
        return self._cache.remember(self._parts, new)


def read_body(body: bytes, key: str, before: ParseCache | None) -> ReadBody:
    """A body whose history is ``key``. Raises InvalidRequest for what is no JSON object.

    ``before``: the episode's earlier calls in this dialect; None: all is read, and nothing is remembered.
    """
    parts = None if before is None else before.parts(body, key)
    if parts is None:
        return ReadBody(key, before, None, read_object(body))
    return ReadBody(key, before, parts, parts.source)
