"""A policy that follows a script, as an engine for `turnstile serve --engine sglang`.

    python examples/scripted_policy.py --model DIR --script FILE [--port N]

For demonstrations and tests that need a model which solves its task. It speaks SGLang's `/generate` in front of
the model in DIR. If a play of the script fits the prompt (see scripted/script.py), the tokens are the script's.
Their log-probabilities are those that the model gives them, so recorded turns can be audited like any others.
They are true values of unlikely tokens: the tokens were not sampled, so training on them means nothing. The
model answers all other calls itself. The first line of output is JSON with the `url`; SIGTERM and SIGINT end
the program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from scripted.script import Policy, ScriptError, load_script
from scripted.server import ScriptedModelServer
from turnstile_server.engines.embedded.process import WorkerProcess
from turnstile_server.engines.model_config import read_vocab_size
from turnstile_server.errors import StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.settings import EngineSettings, RenderingSettings
from turnstile_server.testing.chat_format import ChatFormat

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def scripted_policy(
    model: Path,
    policy: Policy,
    *,
    port: int = 0,
    settings: EngineSettings | None = None,
    chunk_tokens: int = 8,
    chunk_pause_s: float = 0.0,
) -> AsyncIterator[str]:
    """Run a scripted policy in front of the model in the folder ``model``, for the length of the block; its URL.

    ``policy`` is usually a ``Script``. Raises StartupError when the model cannot be served, or when its chat
    template shows or calls tools in another form than Hermes'.
    """
    vocab_size = read_vocab_size(model)
    if vocab_size is None:
        raise StartupError(f"{model} is not a model folder: it has no config.json with a vocab_size")
    chat = await asyncio.to_thread(_chat_format, model)
    worker = WorkerProcess(model, settings or EngineSettings(), incremental=False)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.close)
        await worker.start()
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                "http://model",
                connector=aiohttp.UnixConnector(str(worker.socket), limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        )
        async with session.get("/server_info") as answer:
            window = (await answer.json())["context_length"]
        server = ScriptedModelServer(
            session,
            chat,
            policy,
            window=window,
            vocab_size=vocab_size,
            chunk_tokens=chunk_tokens,
            chunk_pause_s=chunk_pause_s,
        )
        runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        yield f"http://{HOST}:{runner.addresses[0][1]}"


def _chat_format(model: Path) -> ChatFormat:
    return ChatFormat(load_vocabulary(model), create_renderer(model, RenderingSettings()))


async def run(arguments: argparse.Namespace) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with scripted_policy(arguments.model, load_script(arguments.script), port=arguments.port) as url:
        print(json.dumps({"url": url}), flush=True)
        await ended.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--script", type=Path, required=True, help="YAML or JSON")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    try:
        asyncio.run(run(parser.parse_args()))
    except (ScriptError, StartupError, OSError) as error:
        print(f"Failed: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
