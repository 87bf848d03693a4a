"""From the body of a model call to its request, whatever an agent puts into it.

A body that continues an earlier one of its episode costs what is new in it (``dialects/parse_cache``). Where that
is little, it is read on the event loop, one body between two turns of it. Others are read in a worker thread, and
none of them can hold up other calls: reading keeps the interpreter lock, so what would keep it for long is refused
before it is read.

- A body of more than ``gate.max_prompt_bytes`` cannot be a prompt that fits. It is refused unread, as a prompt
  that is too long: agents then shorten their history.
- A body of more than ``max_messages`` messages or ``gate.max_body_values`` JSON values is refused in the same
  way. The values in the arguments of calls count too where a body is large: they are JSON inside a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from turnstile_server.errors import ContextOverflow, InvalidRequest
from turnstile_server.gate.bounds import GateBounds
from turnstile_server.gate.dialects.base import PROMPT, BodyContext, Dialect, ModelRequest
from turnstile_server.gate.dialects.media import Media
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.tool_lists import ToolLists
from turnstile_server.http.json_values import Weight, count_values, weigh
from turnstile_server.rendering.media_words import OMITTED
from turnstile_server.settings import GateSettings

LEAST_PROMPT_BYTES = 4 << 20
BYTES_PER_TOKEN = 16
"""The default of ``gate.max_prompt_bytes``: JSON bytes for each token of the context, and no fewer than the other.
Text has 3 to 5 bytes per token, and at most three times as many where a client escapes what is not ASCII."""

TINY_BYTES = 1 << 15
"""New bytes of a body that is read at once when it has come; larger ones, which take some milliseconds, wait for
each other."""

INLINE_OBJECTS = 5_000
"""New braces in a body that is read on the event loop: each message is an object, and takes 3 µs to read."""

MAX_MODEL_CHARS = 1_024
"""The longest ``model``: a stream repeats it in every chunk."""

LEAST_VALUE_BYTES = 1 << 20
VALUE_BYTES_PER_TOKEN = 4
"""The default of ``max_value_bytes``: bytes for each token of the context, and no fewer than the other. A
template writes a tool, and a call's arguments, as JSON in one step, which keeps the interpreter lock."""


class BodyParser:
    """Parses the bodies of model calls."""

    def __init__(
        self, settings: GateSettings, context_length: int, media_words: Mapping[str, str] = OMITTED
    ) -> None:
        """``media_words``: the text in the place of a part that the model is not shown, by its kind."""
        self._settings = settings
        self._media = Media(media_words if settings.images == "omit" else None)
        self._bounds = settings.bounds_of(GateBounds)
        self._context_length = context_length
        default = max(LEAST_PROMPT_BYTES, BYTES_PER_TOKEN * context_length)
        self._most_bytes = settings.max_prompt_bytes or default
        least = max(LEAST_VALUE_BYTES, VALUE_BYTES_PER_TOKEN * context_length)
        self._most_value_bytes = self._bounds.max_value_bytes or least
        self._threads = anyio.CapacityLimiter(self._bounds.huge_prompt_threads)
        self._tool_lists = ToolLists()
        self._one_by_one = anyio.Lock()
        """Held while one of the larger bodies is read on the event loop."""

    def check_size(self, size: int) -> None:
        """Raises ContextOverflow for a body of ``size`` bytes, which need not have been received."""
        if size > self._most_bytes:
            # An estimate, because dialects have a place for the tokens: prose in JSON has about four bytes each.
            tokens = max(size // 4, self._context_length + 1)
            raise ContextOverflow(
                f"the body has {size} bytes, more than the server reads as one prompt ({self._most_bytes}, "
                f"gate.max_prompt_bytes; the model's context is {self._context_length} tokens): shorten the "
                "history",
                detail={"prompt_tokens": tokens, "context_length": self._context_length},
            )

    async def parse(
        self, dialect: Dialect, body: bytes, before: ParseCache | None, params: Mapping[str, str]
    ) -> ModelRequest:
        """Raises ContextOverflow, and InvalidRequest, which names the field.

        ``before``: the episode's earlier calls in this dialect; a body that continues one costs what is new in it.
        It is used on the event loop only: two calls of an episode may be read in threads at once.
        """
        self.check_size(len(body))
        if dialect.history == PROMPT:
            before = None  # a prompt is read whole, so nothing of it is remembered
        new, whole = self._weigh(dialect, body, before)
        if not self._is_small(new, whole, self._most_values(dialect)):
            fresh = ParseCache()
            try:
                request = await anyio.to_thread.run_sync(
                    self._parse_large,
                    dialect,
                    body,
                    None if before is None else fresh,
                    params,
                    limiter=self._threads,
                )
            finally:
                if before is not None:
                    before.adopt(fresh)
        elif new.size <= TINY_BYTES:
            request = self._parse_small(dialect, body, before, params)
        else:
            async with self._one_by_one:  # the event loop serves others between two of them
                request = self._parse_small(dialect, body, before, params)
        if len(request.model) > MAX_MODEL_CHARS:
            raise InvalidRequest(
                f"model has {len(request.model)} characters; at most {MAX_MODEL_CHARS} are accepted"
            )
        if len(request.messages) > self._bounds.max_messages:
            raise self._too_many(f"{len(request.messages)} messages", self._bounds.max_messages)
        return request

    def _parse_small(
        self, dialect: Dialect, body: bytes, before: ParseCache | None, params: Mapping[str, str]
    ) -> ModelRequest:
        request = dialect.parse(body, BodyContext(before, params, self._media))
        self._check_values(request, body)
        return request

    def _weigh(self, dialect: Dialect, body: bytes, before: ParseCache | None) -> tuple[Weight, Weight]:
        """The weight of the new part of the body, and of the whole body."""
        if before is None:
            whole = weigh(body)
            return whole, whole
        before.share(self._tool_lists)
        return before.weigh(body, dialect.history)

    def _most_values(self, dialect: Dialect) -> int:
        """The most JSON values of a body: the ids of a prompt that fits come on top."""
        ids = self._context_length if dialect.history == PROMPT else 0
        return self._settings.max_body_values + ids

    def _is_small(self, new: Weight, whole: Weight, most: int) -> bool:
        """True if the body may be read on the event loop. It then surely has no more values than are allowed."""
        inline = self._bounds.inline_body_bytes
        if whole.size <= inline and whole.objects <= INLINE_OBJECTS and whole.marks < most:
            return True
        # A body that is long for its known part. Read in a thread, it would pass there: values in the arguments of
        # calls are counted twice, because a dialect may write them anew.
        values = 2 * (whole.marks + whole.objects + whole.escapes)
        return new.size < whole.size and new.size <= inline and new.objects <= INLINE_OBJECTS and values < most

    def _parse_large(
        self, dialect: Dialect, body: bytes, fresh: ParseCache | None, params: Mapping[str, str]
    ) -> ModelRequest:
        most = self._most_values(dialect)
        values = count_values(body, most)
        request = None if values > most else dialect.parse(body, BodyContext(fresh, params, self._media))
        for message in () if request is None else request.messages:
            for call in message.tool_calls:
                values += count_values(call.arguments.encode("utf-8", "surrogatepass"), most)
        if request is None or values > most:
            raise self._too_many(f"more than {most} JSON values (gate.max_body_values)", most)
        self._check_values(request, body)
        return request

    def _check_values(self, request: ModelRequest, body: bytes) -> None:
        """Refuses tools, and calls' arguments, that are large as one value."""
        most = self._most_value_bytes
        if len(body) <= most:
            return
        sizes = [len(call.arguments) for message in request.messages for call in message.tool_calls]
        sizes += [written_chars(tool.spec) for tool in request.tools]
        if max(sizes, default=0) > most:
            raise self._too_many("a tool or a call's arguments of more than the bytes allowed", most)

    def _too_many(self, what: str, most: int) -> ContextOverflow:
        return ContextOverflow(f"the body has {what}; the most is {most}: shorten the history")


def written_chars(value: Any) -> int:
    """Characters of the strings in a JSON value, keys included, without writing it."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, Mapping):
            left += (*one.keys(), *one.values())
        elif isinstance(one, list | tuple):
            left += one
    return count
