"""Has a server that speaks NeMo-Gym's protocol verify the work: its resource server gives the reward.

The work is verified (``POST /verify``) in the session in which the agent called the server's tools, or in one of
its own. It is the calls of these tools and the submitted answer, as a Responses API object. What must hold: only a
number is a reward. A server that cannot be reached, fails, or answers anything else leaves the work without one,
never with 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import anyio

from turnstile_server.grading.errors import GraderFailed, GraderUnavailable
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.verdict import printable
from turnstile_server.kinds.resource_server.options import PARAMS, ResourceServerOptions
from turnstile_server.kinds.resource_server.session import ResourceServerProblem, ResourceSession, open_session
from turnstile_server.tasks.model import Task

MAX_REPORTED = 50
MAX_NAME_CHARS = 100


class ResourceServerGrader(ComponentGrader):
    """The component is the resource server's ``reward``."""

    Options = ResourceServerOptions

    def __init__(self, tools: GradingTools, name: str, options: ResourceServerOptions) -> None:
        self._timeout_s = tools.settings.resource_server_timeout_s
        self._name = name
        self._url = options.url
        self._row = options.row
        self._has_tools = bool(options.tools)

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``. A reward out of the task's bounds is refused where the reward is made."""
        try:
            with anyio.move_on_after(self._timeout_s):
                return self._component(*await self._verified(work))
        except ResourceServerProblem as error:
            why = printable(f"there is no reward: {error}")
            raise (GraderUnavailable(why) if error.passing else GraderFailed(why)) from error
        raise GraderUnavailable(
            f"the resource server {self._url} gave no reward within {self._timeout_s:g} s "
            "(grading.resource_server_timeout_s)"
        )

    async def _verified(self, work: Work) -> tuple[dict[str, Any], dict[str, Any]]:
        """The request to ``/verify``, and its reply: in the session of the agent's tool calls, or in a new one."""
        session = work.session
        if isinstance(session, ResourceSession):
            if session.lost is not None:
                raise GraderUnavailable(printable(f"a call of a tool was not answered: {session.lost}"))
            return await self._verify(session, work.answer)
        if self._has_tools:
            raise GraderFailed(
                f"the session with the resource server {self._url} in which the agent called tools has ended"
            )
        async with open_session(self._url, self._row, self._timeout_s) as session:
            return await self._verify(session, work.answer)

    async def _verify(self, session: ResourceSession, answer: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        sent = {**self._row, "response": response_of(answer or "", self._row[PARAMS], session.calls)}
        return sent, await session.ask("/verify", sent)

    def _component(self, sent: dict[str, Any], reply: dict[str, Any]) -> Component:
        """Raises GraderFailed."""
        value = _number(reply.get("reward"))
        if value is None:
            said = f"is {reply['reward']!r:.100}, not a finite number" if "reward" in reply else "is not there"
            raise GraderFailed(f"the resource server {self._url} gave no reward: `reward` {said}")
        detail = {self._name: {"server": self._url, "reported": _reported(sent, reply)}}
        said = f"{self._name}: the resource server gives {value:g}"
        return Component(value, detail, () if value == 1.0 else (said,))


def response_of(answer: str, params: Mapping[str, Any], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The Responses API object of a model that made ``calls``, its output items, and then said ``answer``."""
    # Not every reader of JSON takes half a character, and an agent must not choose to have no reward.
    text = answer.encode("utf-8", "replace").decode()
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "status": "completed",
        "model": str(params.get("model") or "turnstile"),
        "output": [
            *calls,
            {
                "id": f"msg_{uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            },
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _number(value: object) -> float | None:
    """A finite number of JSON; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _reported(sent: dict[str, Any], reply: dict[str, Any]) -> dict[str, float | bool]:
    """Numbers and truths that the server found beside the reward: fields that were not sent to it."""
    found: dict[str, float | bool] = {}
    for name, value in reply.items():
        if name in sent or name == "reward" or len(name) > MAX_NAME_CHARS or len(found) == MAX_REPORTED:
            continue
        number = value if isinstance(value, bool) else _number(value)
        if number is not None:
            found[name] = number
    return found
