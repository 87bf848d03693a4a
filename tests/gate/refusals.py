"""The shape of a refusal in Chat Completions, what the official SDK sends, and that nothing is left of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from conversation import body, raw, reply_ids, turns, url
from gate_support import Stage, says

from waiting import PATIENCE_S


def refused(response: httpx.Response, status: int, code: str, *, retry: bool, type_: str | None = None) -> str:
    """Asserts the whole shape of a refusal; the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["code"] == code
    assert error["type"] == (type_ or ("server_error" if status >= 500 else "invalid_request_error"))
    assert error["param"] is None
    assert response.headers["x-should-retry"] == ("true" if retry else "false")
    assert error["message"]
    return str(error["message"])


async def still_works(stage: Stage, episode: dict[str, Any]) -> None:
    """The episode goes on, and nothing was recorded of what was refused."""
    assert await turns(stage, episode) == []
    calls = len(stage.engine.calls)
    stage.engine.answers = [says(reply_ids(stage, "fine"))]
    async with raw(episode) as client:
        reply = await client.post(url(episode), json=body())
    assert reply.json()["choices"][0]["message"]["content"] == "fine"
    assert len(stage.engine.calls) == calls + 1
    assert len(await turns(stage, episode)) == 1


@asynccontextmanager
async def counted(
    episode: dict[str, Any], *answered: Callable[[httpx.Response], Awaitable[None]]
) -> AsyncIterator[tuple[openai.AsyncOpenAI, list[httpx.Request]]]:
    """The SDK as agents have it (two retries), the requests it sends; ``answered`` hears of each answer."""
    sent: list[httpx.Request] = []

    async def note(request: httpx.Request) -> None:
        sent.append(request)

    http = httpx.AsyncClient(event_hooks={"request": [note], "response": [*answered]}, timeout=PATIENCE_S)
    given = {"base_url": f"{episode['model_url']}/v1", "api_key": episode["episode_key"]}
    async with openai.AsyncOpenAI(max_retries=2, http_client=http, **given) as agent:  # type: ignore[arg-type]
        yield agent, sent
