"""What a chat template writes for a reply, and what its call format reads there.

A reply's text is what the template writes behind the opening of its turn, in a history of one user message and it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from turnstile.models import Message, Tool
from turnstile_server.errors import ModelCannotServe
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.encoder import Shield, TextEncoder
from turnstile_server.rendering.protocol import ParsedReply
from turnstile_server.rendering.reply_parser import TagReplyParser
from turnstile_server.rendering.synthetic import Template
from turnstile_server.rendering.tags import THINKING_TAGS, find_tags
from turnstile_server.rendering.vocabulary import Vocabulary

HELLO = Message("user", "Hello")
_OPENING_CHARS = 100
"""Of the opening of a reply, in which a template may open or close thinking."""


class WritesOwnIds(Template, Protocol):
    """A template that can write calls with the ids of a format."""

    def writing(self, call_format: CallFormat | None) -> Template: ...


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """The ``text`` of a reply, with stand-ins of ``shield`` for control text in its strings; ``whole``: the
    history as the template writes it, and ``opened``: the prompt before the reply."""

    text: str
    whole: str
    opened: str
    shield: Shield


def written_reply(template: Template, message: Message, tools: Sequence[Tool]) -> WrittenReply:
    """The reply ``message`` as ``template`` writes it. Raises ModelCannotServe where the template refuses it, or
    does not show where it begins."""
    prepared = template.prepare(template.stock([HELLO, message]), tools)
    whole, opened, before = (
        prepared.shield.unescape(template.text(prepared.messages[:end], prepared.tools, prompt=prompt))
        for end, prompt in ((2, False), (1, True), (1, False))
    )
    return WrittenReply(_behind(whole, opened, before), whole, opened, prepared.shield)


def _behind(whole: str, opened: str, before: str) -> str:
    """What ``whole`` has behind the opening of a reply. The prompt may have opened thinking, or have closed it at
    once, where a reply without thinking does not."""
    places = [opened.rfind(tag, max(0, len(opened) - _OPENING_CHARS)) for pair in THINKING_TAGS for tag in pair]
    for end in sorted((len(opened), *(place for place in places if place >= 0)), reverse=True):
        if whole.startswith(opened[:end]):
            return whole[end:]
    if whole.startswith(before):
        return whole[len(before) :]
    raise ModelCannotServe("the chat template does not show where a reply begins")


class ProbeReader:
    """Reads back what a template writes: the ``Reader`` of ``recognition``."""

    def __init__(
        self, vocabulary: Vocabulary, template: WritesOwnIds, encoder: TextEncoder, table: TokenBytes
    ) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._encoder = encoder
        self._table = table

    def writes_calls(self, message: Message, tools: Sequence[Tool]) -> bool:
        specs = [dict(tool.spec) for tool in tools]
        with_calls, without = (
            self._template.text(self._template.stock([HELLO, each]), specs, prompt=False)
            for each in (message, replace(message, tool_calls=()))
        )
        return with_calls != without

    def has_token(self, literal: str) -> bool:
        return literal in self._encoder.control.by_text

    def prompt_text(self, tools: Sequence[Tool]) -> str:
        user = self._template.stock([HELLO])
        return self._template.text(user, [dict(tool.spec) for tool in tools], prompt=True)

    def shows_tools(self, tools: Sequence[Tool]) -> bool:
        return self.prompt_text(tools) != self.prompt_text(())

    def read_back(self, message: Message, tools: Sequence[Tool], call_format: CallFormat) -> ParsedReply:
        reply = written_reply(self._template.writing(call_format), message, tools)
        tags = find_tags(self._vocabulary, call_format, reply.opened + reply.whole)
        stop_ids = frozenset(self._vocabulary.stop_ids)
        ids = self._encoder.encode(reply.text, reply.shield, after=self._encoder.anchor_id).ids
        end = next((place + 1 for place, index in enumerate(ids) if index in stop_ids), len(ids))
        parser = TagReplyParser(
            self._table,
            tags,
            ToolSchemas(tools),
            thinking=tags.think is not None and reply.text.lstrip().startswith(tags.think[1]),
            stop=(),
            stop_ids=stop_ids,
            parse_calls=True,
        )
        parser.feed(ids[:end])
        return parser.finish()[1]
