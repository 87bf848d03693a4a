"""A dialect: plain text in, plain text out, at POST /v1/plain."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.models import Message
from turnstile_server.gate.dialects.base import NO_PARAMS, FinishedReply, ModelRequest, Purpose, endpoint
from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.media import REFUSED, Media
from turnstile_server.gate.dialects.parse_cache import ParseCache


class PlainDialect(ChatDialect):
    name = "plain"
    endpoints = (endpoint("/v1/plain", Purpose.TURN),)

    def parse(
        self,
        body: bytes,
        before: ParseCache | None = None,
        params: Mapping[str, str] = NO_PARAMS,
        media: Media = REFUSED,
    ) -> ModelRequest:
        return ModelRequest(messages=(Message(role="user", content=body.decode()),))

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        return reply.message.content.encode()
