"""Recognizes SGLang's router (``sglang-router``, the SGLang Model Gateway), which is no engine.

Calls pass through it, and nothing else does (0.3.2): ``/model_info``, ``/server_info``, ``/tokenize``,
``/abort_request``, pauses, weights and loads are 404 there. So it is refused at start, with the addresses of the
engines behind it, which it lists.
"""

from __future__ import annotations

from typing import Final

from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.replies import parse_json
from turnstile_server.errors import StartupError, TurnstileError

NAMED: Final = 8
"""Engines that the error names; of more it says how many."""


async def refuse_router(http: EngineHttp, timeout_s: float) -> None:
    """Raises StartupError where the server, which has no ``/model_info``, is a router."""
    urls = await _behind(http, timeout_s)
    if urls is None:
        return
    reason = (
        f"The server at {http.url} is SGLang's router, not an engine: aborts, pauses, weights and the load of "
        "each engine do not pass through it. "
    )
    if not urls:
        raise StartupError(
            reason + "It has no engines yet. Name the engines themselves, with --engine-url for each."
        )
    flags = " ".join(f"--engine-url {url}" for url in urls[:NAMED])
    more = f" … (and {len(urls) - NAMED} more)" if len(urls) > NAMED else ""
    raise StartupError(
        reason + f"Name the engines behind it instead of it, at addresses that this machine reaches: {flags}{more}"
    )


async def _behind(http: EngineHttp, timeout_s: float) -> list[str] | None:
    """The engines that the router lists at ``/workers``; None where the server is no router."""
    try:
        status, body = await http.request("GET", "/workers", timeout_s=timeout_s)
        value = parse_json(body, "/workers") if status == 200 else None
    except TurnstileError:
        return None  # the caller has a better error: what the server said to the first question
    listed = value.get("workers") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        return None
    return [worker["url"] for worker in listed if isinstance(worker, dict) and isinstance(worker.get("url"), str)]
