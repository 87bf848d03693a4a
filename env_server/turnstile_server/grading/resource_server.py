"""Has a server that speaks NeMo-Gym's protocol verify the work: its resource server gives the reward.

A session is opened (``POST /seed_session``) and the work verified in it (``POST /verify``); a cookie says which
session it is. The work is the submitted answer, as the one message of a Responses API object. What must hold: only
a number is a reward. A server that cannot be reached, fails, or answers anything else leaves the work without one,
never with 0.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any
from uuid import uuid4

import anyio
import anyio.to_thread
import httpx

from turnstile_server.grading.errors import GraderFailed, GraderUnavailable
from turnstile_server.grading.protocol import Component, GradingTools, Work
from turnstile_server.grading.verdict import printable
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.resource_server_options import ResourceServerOptions

MORE_REPLY_BYTES = 4 << 20
"""A reply repeats what was sent, in its own encoding: twice that, and so much more, is the bound."""
MAX_REPORTED = 50
MAX_NAME_CHARS = 100
_MAX_SHOWN = 300
_PASSING = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)
"""Refusals that another try may not meet."""


class ResourceServerGrader:
    """The component is the resource server's ``reward``."""

    def __init__(self, tools: GradingTools, name: str, options: ResourceServerOptions) -> None:
        self._timeout_s = tools.settings.resource_server_timeout_s
        self._name = name
        self._url = options.url
        self._row = options.row

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``. A reward out of the task's bounds is refused where the reward is made."""
        with anyio.move_on_after(self._timeout_s):
            return self._component(*await self._verified(work.answer or ""))
        raise GraderUnavailable(
            f"the resource server {self._url} gave no reward within {self._timeout_s:g} s "
            "(grading.resource_server_timeout_s)"
        )

    async def _verified(self, answer: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was sent to ``/verify``, and its reply."""
        sent = {**self._row, "response": response_of(answer, self._row["responses_create_params"])}
        tls = await anyio.to_thread.run_sync(httpx.create_ssl_context)
        async with httpx.AsyncClient(timeout=self._timeout_s, verify=tls) as client:
            seeded = await self._post(client, "/seed_session", self._row)
            if seeded.get("mcp") is not None:
                raise GraderFailed(
                    f"the resource server {self._url} offers tools over MCP, which the agent did not have: the "
                    "task cannot be played here"
                )
            return sent, await self._post(client, "/verify", sent)

    async def _post(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises GraderUnavailable, GraderFailed."""
        content = json.dumps(body).encode()
        most = 2 * len(content) + MORE_REPLY_BYTES
        data = bytearray()
        try:
            async with client.stream(
                "POST", f"{self._url}{path}", content=content, headers={"content-type": "application/json"}
            ) as response:
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > most:
                        raise self._unavailable(path, f"its reply has more than {most} bytes")
        except httpx.HTTPError as error:
            raise self._unavailable(path, f"{type(error).__name__}: {error}") from error
        self._check_status(path, response, bytes(data[:_MAX_SHOWN]))
        try:
            found = await anyio.to_thread.run_sync(json.loads, data)  # up to megabytes, which would hold the loop
        except (ValueError, RecursionError) as error:
            raise self._unavailable(path, f"its reply is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise self._unavailable(path, "its reply is JSON, but no object")
        return found

    def _check_status(self, path: str, response: httpx.Response, shown: bytes) -> None:
        if response.is_success:
            return
        said = f"it answered {response.status_code}: {printable(shown.decode(errors='replace'))}"
        if response.is_server_error or response.status_code in _PASSING:
            raise self._unavailable(path, said)
        raise GraderFailed(f"the resource server {self._url} refuses what is sent to {path}: {said}")

    def _unavailable(self, path: str, why: str) -> GraderUnavailable:
        return GraderUnavailable(f"the resource server {self._url} gave no reward ({path}): {why}")

    def _component(self, sent: dict[str, Any], reply: dict[str, Any]) -> Component:
        """Raises GraderFailed."""
        value = _number(reply.get("reward"))
        if value is None:
            said = f"is {reply['reward']!r:.100}, not a finite number" if "reward" in reply else "is not there"
            raise GraderFailed(f"the resource server {self._url} gave no reward: `reward` {said}")
        detail = {self._name: {"server": self._url, "reported": _reported(sent, reply)}}
        said = f"{self._name}: the resource server gives {value:g}"
        return Component(value, detail, () if value == 1.0 else (said,))


def response_of(answer: str, params: dict[str, Any]) -> dict[str, Any]:
    """The Responses API object of a model that said ``answer`` and nothing else."""
    # Not every reader of JSON takes half a character, and an agent must not choose to have no reward.
    text = answer.encode("utf-8", "replace").decode()
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "status": "completed",
        "model": str(params.get("model") or "turnstile"),
        "output": [
            {
                "id": f"msg_{uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }
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
