"""A dialect: plain text in, plain text out, at POST /v1/plain."""

from __future__ import annotations

from turnstile.models import Message
from turnstile_server.gate.dialects.base import (
    NO_CONTEXT,
    BodyContext,
    FinishedReply,
    ModelRequest,
    Purpose,
    endpoint,
)
from turnstile_server.gate.dialects.chat import ChatDialect


class PlainDialect(ChatDialect):
    name = "plain"
    endpoints = (endpoint("/v1/plain", Purpose.TURN),)

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        return ModelRequest(messages=(Message(role="user", content=body.decode()),))

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        return reply.message.content.encode()
