"""One episode in memory, token for token as through the gate: the gate's renderer, the tools of ``world``.

Invariants: ``ids`` is the prompt of the next model call and only grows; ``mask`` is 1 where the policy sampled.
A test plays the same completions through a real server and compares every id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from tiny_policy.world import World
from turnstile.models import Message, Tool
from turnstile_server.rendering.protocol import CannotBridge, PathEnd, Renderer

MAX_TURNS = 10
"""An errand of level 4 takes six."""
_TAIL = 64


class Task(Protocol):
    """An errand, or another task that is played in memory. ``done``: the verdict on the files at the end."""

    @property
    def instruction(self) -> str: ...
    @property
    def files(self) -> dict[str, str]: ...
    def done(self, files: dict[str, str]) -> bool: ...


TaskT = TypeVar("TaskT", bound=Task)


class Conversation(Generic[TaskT]):
    def __init__(
        self, renderer: Renderer, tools: Sequence[Tool], errand: TaskT, world: World | None = None
    ) -> None:
        self.errand = errand
        self.turns = 0
        self._renderer = renderer
        self._tools = tuple(tools)
        self._world = world or World(errand.files)
        start = renderer.render([Message("user", errand.instruction)], self._tools)
        self.ids: list[int] = start.ids.tolist()
        self.mask: list[int] = [0] * len(self.ids)

    @property
    def reward(self) -> float:
        return float(self.errand.done(self._world.files))

    @property
    def exact(self) -> bool:
        """Whether every tool result so far has the text that the real endpoint gives."""
        return self._world.refused == 0

    def reply(self, completion: Sequence[int], finish: Literal["stop", "length"] = "stop") -> bool:
        """Append the reply, run its tool calls and append their results. Whether the episode continues."""
        prompt_tail = np.asarray(self.ids[-_TAIL:], np.int32)
        ids = np.asarray(completion, np.int32)
        parser = self._renderer.parser(self._tools, prompt_tail=prompt_tail)
        parser.feed(ids)
        message = parser.finish()[1].message
        self.ids += completion
        self.mask += [1] * len(completion)
        self.turns += 1
        if not message.tool_calls or self.turns == MAX_TURNS:
            return False
        calls = tuple(replace(call, id=f"call_{index}") for index, call in enumerate(message.tool_calls))
        results = [Message("tool", self._world.call(call), tool_call_id=call.id) for call in calls]
        end = PathEnd(prompt_tail, ids, replace(message, tool_calls=calls), finish)
        bridge = self._renderer.bridge(end, results, self._tools)
        if isinstance(bridge, CannotBridge):
            raise RuntimeError(f"the template cannot be continued: {bridge.detail}")
        self.ids += bridge.context_ids.tolist()
        self.mask += [0] * len(bridge.context_ids)
        return True

    def follow(self, replies: Iterable[Sequence[int]]) -> None:
        """Take all replies of a demonstrator."""
        for completion in replies:
            self.reply(completion)
