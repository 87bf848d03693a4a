"""The append-only continuation of a path: what a template writes after a reply, without the reply.

How. A synthetic conversation (``synthetic``) shows the close of a turn and the text of the new messages. Neither
contains anything sampled, so nothing sampled can be changed, and only the new text is tokenized. Where messages
like the new ones were seen before, the text is known and no template runs (``bridge_traces``).

What must hold: ``context_ids`` are appended behind the completion as it is. A completion that ended with the
template's own end token is followed by what the template writes behind that token. Any other completion is
followed by the template's whole close: one that was cut, and one that ended with another end token of the model
(``<|endoftext|>`` for Qwen). Where a turn ends differently when something follows it, there is no continuation and
the answer is ``CannotBridge``; nothing is spliced by guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from turnstile.models import Message, Tool
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.bridge_traces import BridgeTraces
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.encoder import TextEncoder
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd
from turnstile_server.rendering.reply_parser import TagReplyParser
from turnstile_server.rendering.synthetic import Synthetic, Unbridgeable
from turnstile_server.rendering.tags import Tags, may_hold_thinking, opened_by


class Ending(Protocol):
    """A close and a new text (``synthetic.Endings``), or the same with marks in them."""

    @property
    def close(self) -> str: ...

    @property
    def new(self) -> str: ...

    @property
    def apart(self) -> bool: ...


class Continuation:
    """Makes the continuation of a path. Immutable, safe to use from several threads."""

    def __init__(
        self,
        synthetic: Synthetic,
        encoder: TextEncoder,
        table: TokenBytes,
        tags: Tags,
        *,
        traces: BridgeTraces | None,
        stop_ids: frozenset[int],
        follow_template: bool,
    ) -> None:
        self._synthetic = synthetic
        self._encoder = encoder
        self._table = table
        self._tags = tags
        self._traces = traces
        self._stop_ids = stop_ids
        self._follow_template = follow_template

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        try:
            if (
                self._follow_template
                and may_hold_thinking(end, self._tags, self._table)
                and self._synthetic.strips_thinking(new_messages, tools)
            ):
                return CannotBridge("thinking_stripped", "the chat template drops earlier thinking here")
            return self._traced(end, new_messages, tools, most) or self._rendered(end, new_messages, tools, most)
        except (Unbridgeable, InvalidRequest) as error:
            return CannotBridge("renderer_cannot_continue", str(error))

    def _rendered(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], most: int | None
    ) -> Bridge:
        """The continuation as the template gives it. Raises Unbridgeable, InvalidRequest, TooManyTokens."""
        endings = self._synthetic.endings(end.reply, new_messages, tools)
        text, after = self._behind_completion(end, endings)
        encoded = self._encoder.encode(text, endings.shield, after=after, most=most)
        if self._traces is not None and self._may_trace(tools):
            self._traces.note(end.reply, new_messages, endings)
        return Bridge(np.array(encoded.ids, dtype=np.int32), encoded.tokenized_bytes)

    def _traced(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], most: int | None
    ) -> Bridge | None:
        """The same continuation without a run of the template, where one like it was noted."""
        found = None
        if self._traces is not None and self._may_trace(tools):
            found = self._traces.find(end.reply, new_messages)
        if found is None:
            return None
        text, after = self._behind_completion(end, found)
        encoded = found.ids(text, after=after, most=most)
        return None if encoded is None else Bridge(encoded.ids, encoded.size)

    def _may_trace(self, tools: Sequence[Tool]) -> bool:
        """Tools are no part of what is noted."""
        return not (tools and self._synthetic.needs_tools)

    def _behind_completion(self, end: PathEnd, endings: Ending) -> tuple[str, int | None]:
        """The text behind the completion, and the control token that it follows. Raises Unbridgeable."""
        last = int(end.completion_ids[-1]) if len(end.completion_ids) else -1
        text = self._behind(last, endings) if last in self._stop_ids else None
        if text is None:
            text = self._opened(end) + self._close(endings) + endings.new
        return text, last if last in self._stop_ids and last in self._table.control else self._encoder.anchor_id

    def _behind(self, stop: int, endings: Ending) -> str | None:
        """The text behind a sampled end token that the template writes here itself: it is in the close, or, where
        a turn has no close, it begins the new text. None for any other end token of the model."""
        if stop not in self._table.control:
            return None
        literal = self._table.control[stop].text
        bare = self._synthetic.close or ""
        if bare.strip() and endings.close.endswith(bare) and not endings.apart:
            return bare.partition(literal)[2] + endings.new if literal in bare else None
        if literal in endings.close:
            return endings.close.rpartition(literal)[2] + endings.new
        if not bare.strip():
            new = endings.new.lstrip()
            if new.startswith(literal):
                return new[len(literal) :]
            if stop in self._synthetic.role_openers:
                raise Unbridgeable(f"the template does not go on after {literal}")
        return None

    def _close(self, endings: Ending) -> str:
        """The close alone: without the calls, which were sampled."""
        bare = self._synthetic.close or ""
        if endings.apart:
            return endings.close
        if endings.close.endswith(bare):
            return bare
        raise Unbridgeable("the template ends a turn with calls differently")

    def _opened(self, end: PathEnd) -> str:
        """The closing thinking tag when the completion left thinking open."""
        if self._tags.think is None:
            return ""
        parser = TagReplyParser(
            self._table,
            self._tags,
            ToolSchemas(()),
            thinking=opened_by(end.prompt_tail, self._tags, self._table),
            stop=(),
            stop_ids=self._stop_ids,
            parse_calls=False,
        )
        parser.feed(end.completion_ids)
        parser.finish()
        closing = self._tags.think[1]
        if not parser.thinking:
            return ""
        derived = self._synthetic.thinking_close
        return derived if closing in derived else closing
