"""Turns made by hand for the tests of capture: what the gate would commit, without a renderer or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnstile.models import BreakReason, Message, SamplingUsed, Thread, Tool, Turn, TurnTimings, WeightSpan
from turnstile_server.capture.keys import request_key
from turnstile_server.capture.match import CallMatch


def make_tool(name: str, properties: dict[str, Any] | None = None, description: str = "") -> Tool:
    function: dict[str, Any] = {"name": name, "parameters": {"type": "object", "properties": properties or {}}}
    if description:
        function["description"] = description
    return Tool(name, {"type": "function", "function": function})


def make_turn(
    match: CallMatch,
    reply: Message,
    *,
    seq: int,
    tools_key: str,
    completion_ids: Sequence[int],
    context_ids: Sequence[int] = (0,),
    logprobs: Sequence[float] | None = None,
    versions: Sequence[str] = ("v0",),
    asked: dict[str, object] | None = None,
    finish_reason: str = "stop",
    temperature: float = 1.0,
    constrained: bool = False,
    given: bool = False,
    turn_id: str | None = None,
    started_at: float = 0.0,
    template_hash: str = "template",
    max_new_tokens: int = 64,
    thread: Thread | None = None,
    step: int = 0,
    without_token: Sequence[int] = (),
) -> Turn:
    """A turn in the place that ``match`` found. ``versions``: one weight version per equal part of the reply."""
    count = len(completion_ids)
    bounds = [count * i // len(versions) for i in range(len(versions) + 1)]
    parent = match.parent.turn.turn_id if match.parent is not None else None
    fresh = match.broken is not None and match.broken.reason != BreakReason.NEW_CONVERSATION
    return Turn.model_validate(
        {
            "turn_id": turn_id or f"turn_{seq}",
            "episode_id": "ep_1",
            "parent_id": parent,
            "seq": seq,
            "dialect": "chat",
            "context_ids": list(context_ids),
            "completion_ids": list(completion_ids),
            "without_token": tuple(without_token),
            "logprobs": list(logprobs) if logprobs is not None else [-0.5 - i for i in range(count)],
            "weight_spans": [
                WeightSpan(start=start, end=end, version=version)
                for version, start, end in zip(versions, bounds, bounds[1:], strict=False)
                if end > start
            ],
            "finish_reason": finish_reason,
            "sampling": SamplingUsed(
                max_new_tokens=max_new_tokens, temperature=temperature, constrained=constrained, given=given
            ),
            "asked_sampling": asked or {},
            "template_hash": template_hash,
            "tools_key": tools_key,
            "request_key": request_key(
                parent or (f"step {step}" if step else None), match.request_messages, tools_key, asked or {}
            ),
            "step": step,
            "new_messages": match.new_messages,
            "reply": reply,
            "break": match.broken,
            "thread": thread,
            "echo": match.echo,
            "rerendered_tokens": len(context_ids) if fresh and match.parent is None else 0,
            "timings": TurnTimings(started_at=started_at),
        }
    )
