"""``generate``: one call of the model door from inside the process, as an agent would make it over the network."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.types import ASGIApp

from turnstile_server.control.body import json_bytes, parse_json
from turnstile_server.errors import error_of_type


class ModelDoor:
    """Chat Completions over ``gate``. Cancelling a call is what hanging up is for an agent: the engine stops."""

    def __init__(self, gate: ASGIApp) -> None:
        self._transport = httpx.ASGITransport(app=gate)

    async def chat(self, episode_id: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's body. Raises the error that the door answered with."""
        request = httpx.Request(
            "POST",
            f"http://gate/e/{episode_id}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            content=json_bytes(body),
        )
        response = await self._transport.handle_async_request(request)
        answer: dict[str, Any] = parse_json(await response.aread())
        if response.status_code != 200:
            said = answer["error"]
            raise error_of_type(said["code"], said["message"])
        return answer
