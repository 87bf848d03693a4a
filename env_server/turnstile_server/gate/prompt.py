"""The prompt of a call: the parent's tokens and what the call adds to them, or a whole render.

``input_ids = tokens(parent) ⊕ context_ids``, always (invariant 1). Where the renderer has no append-only
continuation, a new root is rendered and marked with its reason; nothing is spliced by guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import Break, BreakReason, Int32Array, Message, Tool
from turnstile_server.capture import CallMatch, Node
from turnstile_server.rendering.protocol import CannotBridge, PathEnd, Renderer

PROMPT_TAIL = 64
"""Ids before a completion that a renderer needs to see an open thinking block."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is fed. ``parent`` None: ``context_ids`` is the whole prompt."""

    parent: Node | None
    context_ids: Int32Array
    input_ids: Int32Array
    broken: Break | None
    tokenized_bytes: int

    @property
    def rerendered_tokens(self) -> int:
        """Tokens rendered again although the model had been fed them (or their like) before."""
        if self.broken is None or self.parent is not None or self.broken.reason == BreakReason.NEW_CONVERSATION:
            return 0
        return len(self.context_ids)


class Prompter:
    """Renders off the event loop what is too long to be rendered on it."""

    def __init__(self, renderer: Renderer, inline_chars: int, threads: int) -> None:
        self._renderer = renderer
        self._inline_chars = inline_chars
        self._limiter = anyio.CapacityLimiter(threads)

    async def prompt(self, match: CallMatch, tools: Sequence[Tool], identical: Node | None) -> Prompt:
        """``identical``: an earlier turn of the same request; it is fed the same context without rendering."""
        parent = match.parent
        if identical is not None and identical.parent is parent:
            return _joined(parent, identical.turn.context_ids, match.broken, 0)
        broken = match.broken
        if parent is not None:
            end = path_end(parent)
            bridge = await self._run(
                match.new_messages, lambda: self._renderer.bridge(end, match.new_messages, tools)
            )
            if not isinstance(bridge, CannotBridge):
                return _joined(parent, bridge.context_ids, broken, bridge.tokenized_bytes)
            broken = Break(reason=BreakReason(bridge.reason))
        messages = (*_stored_messages(parent), *match.new_messages)
        rendered = await self._run(messages, lambda: self._renderer.render(messages, tools))
        return _joined(None, rendered.ids, broken, rendered.tokenized_bytes)

    async def _run(self, messages: Sequence[Message], render: Callable[[], Result]) -> Result:
        chars = sum(
            len(message.content) + sum(len(call.arguments) for call in message.tool_calls) for message in messages
        )
        if chars <= self._inline_chars:
            return render()
        return await anyio.to_thread.run_sync(render, limiter=self._limiter)


def path_end(node: Node) -> PathEnd:
    """The end of the node's path, as a renderer wants it."""
    prompt = node.turn.context_ids
    above = node.parent
    while len(prompt) < PROMPT_TAIL and above is not None:
        prompt = np.concatenate([above.turn.context_ids, above.turn.completion_ids, prompt], dtype=np.int32)
        above = above.parent
    return PathEnd(
        prompt_tail=prompt[-PROMPT_TAIL:],
        completion_ids=node.turn.completion_ids,
        reply=node.turn.reply,
        finish_reason=node.turn.finish_reason,
        earlier_thinking=any(step.turn.reply.reasoning for step in node.path()[:-1]),
    )


def _stored_messages(node: Node | None) -> list[Message]:
    """A matched path as it was fed and sampled: where the agent's echo differs, stored wins."""
    if node is None:
        return []
    return [message for step in node.path() for message in (*step.turn.new_messages, step.turn.reply)]


def _joined(parent: Node | None, context_ids: Int32Array, broken: Break | None, tokenized_bytes: int) -> Prompt:
    input_ids = context_ids if parent is None else np.concatenate([parent.tokens(), context_ids], dtype=np.int32)
    return Prompt(parent, context_ids, input_ids, broken, tokenized_bytes)
