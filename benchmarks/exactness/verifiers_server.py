"""``verifiers``' interception server and its training client, as a process; run in the Python that has it.

    PYTHON -I verifiers_server.py ENGINE_URL MODEL PORT

The server is a library that runs in the trainer's process. This starts it as its ``Rollout`` does, with a session
for each episode. Its sessions are reached from Python only, so a second port has two routes of the benchmark:
``POST /bench/sessions`` opens one, ``GET /bench/sessions/ID`` ends it and gives its trainable branches. The
renderer is ``qwen3``: it can go on from sampled ids, and its calls are written as those of the tiny model.
"""

# It runs where these packages are, and is checked where they are not.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import sys
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

HOST = "127.0.0.1"


async def serve(engine_url: str, model: str, port: int) -> None:
    client = TrainClientConfig(
        base_url=f"{engine_url}/v1",
        api_key_var="NO_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=model,
    )
    open_sessions: dict[str, tuple[RolloutSession, str, str]] = {}
    async with InterceptionServer() as server:

        async def begin(_: web.Request) -> web.Response:
            task = TraceTask(type="Task", data=TaskData())
            trace: Any = Trace(task=task, agent=AgentInfo(config=vf.AgentConfig()))
            session = RolloutSession(ctx=ModelContext(model="tiny", client=client), trace=trace)
            secrets = server.register(session)
            open_sessions[trace.id] = (session, *secrets)
            return web.json_response({"id": trace.id, "url": server.base_url, "key": secrets[0]})

        async def end(request: web.Request) -> web.Response:
            found = open_sessions.pop(request.match_info["id"], None)
            if found is None:
                return web.json_response({"error": "no such session"}, status=404)
            session, *secrets = found
            server.unregister(*secrets)
            branches = [branch for branch in session.trace.branches if branch.trainable]
            names = ("token_ids", "sampled_mask", "logprobs")
            return web.json_response([{name: getattr(branch, name) for name in names} for branch in branches])

        app = web.Application()
        app.router.add_post("/bench/sessions", begin)
        app.router.add_get("/bench/sessions/{id}", end)
        app.router.add_get("/health", lambda _: asyncio.sleep(0, web.json_response({})))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
