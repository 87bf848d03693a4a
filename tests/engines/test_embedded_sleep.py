"""The embedded engine sleeps: through a whole server with the client, and on the child's own wire."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from engines_support import CONTEXT, TOLERANCE, Progress, collect, prompt_of, reference_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from turnstile import AsyncClient, AsyncEpisodeHandle, errors
from turnstile.models import EngineInfo
from turnstile_server.demo.local_server import LocalServer, descendants, serve
from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.errors import EngineRefused
from turnstile_server.settings import EngineSettings
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

MIB = 1 << 20
WIDE = 32_768
"""Inner width of the two layers: the weights are 50 MiB, so that their coming and going is seen."""
LEAST_FREED = 40 * MIB
MANY, FEW = 200, 20
"""Tokens of a call that runs while sleep is asked for, and of the others."""
SHORT = EngineSampling(max_new_tokens=3, temperature=0.0)


def wide(folder: Path, tiny: Path, seed: int) -> Path:
    """A model of random weights that is large beside its cache."""
    shutil.copytree(tiny, folder)
    config = AutoConfig.from_pretrained(tiny)
    config.intermediate_size, config.initializer_range = WIDE, 0.02
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first weights and those of the next step."""
    folder = tmp_path_factory.mktemp("wide")
    return wide(folder / "first", tiny_model, 1), wide(folder / "next", tiny_model, 2)


@asynccontextmanager
async def served(model: Path, folder: Path) -> AsyncIterator[tuple[LocalServer, AsyncClient]]:
    async with (
        serve(model, folder / "data", options=["--sandbox", "local"]) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        yield server, client


@pytest.fixture
async def own_engine(folders: tuple[Path, Path]) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(folders[0], EngineSettings(context_length=CONTEXT))
    await engine.start()
    yield engine
    await engine.close()


def worker_of(server: LocalServer) -> int:
    """The pid of the server's embedded engine."""
    for pid, _ in descendants(server.pid):
        if b"turnstile_server.engines.embedded.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError("the server has no embedded engine")


def resident(pid: int | None) -> int:
    """Resident memory in bytes (proc(5): statm counts pages)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def info_of(client: AsyncClient) -> EngineInfo:
    (info,) = (await client.engine()).values()
    return info


async def wait_for_info(client: AsyncClient, seen: Callable[[EngineInfo], bool]) -> EngineInfo:
    async def wanted() -> EngineInfo | None:
        info = await info_of(client)
        return info if seen(info) else None

    found = await wait_until(wanted)
    assert found is not None
    return found


async def ask(episode: Any, tokens: int, begun: asyncio.Event | None = None) -> None:
    """One model call of an agent, that is never sent again."""
    options: dict[str, Any] = {"model": "m", "max_tokens": tokens, "stream": True}
    messages: Any = [{"role": "user", "content": "Say something."}]
    async with openai.AsyncOpenAI(
        base_url=f"{episode.model_url}/v1", api_key=episode.episode_key, max_retries=0
    ) as agent:
        async for _ in await agent.chat.completions.create(messages=messages, **options):
            if begun is not None:
                begun.set()


async def check_turn(episode: AsyncEpisodeHandle, folder: Path) -> str:
    """The episode's only call ended by itself, with the logprobs of ``folder``. Gives the name of its weights."""
    (turn,) = await episode.turns()
    assert turn.finish_reason in ("length", "stop")
    ids = np.concatenate([turn.context_ids, turn.completion_ids])
    expected = reference_logprobs(folder, ids, len(turn.context_ids), turn.sampling.temperature)
    np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE, rtol=0)
    (span,) = turn.weight_spans
    return span.version


async def test_it_sleeps_when_idle_and_calls_wait_until_it_woke_with_new_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    async with served(folders[0], tmp_path) as (server, client):
        assert (await info_of(client)).sleeps
        with pytest.raises(errors.Conflict, match="not asleep"):
            await client.wake()
        pid, ended, begun = worker_of(server), [], asyncio.Event()
        first, second = await client.create_episode("Talk."), await client.create_episode("Talk.")

        async def slow() -> None:
            await ask(first, MANY, begun)
            ended.append("call")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(slow())
            await begun.wait()
            awake = resident(pid)
            assert (await info_of(client)).running_calls == 1
            await client.sleep()
            ended.append("slept")
        assert ended == ["call", "slept"]
        before = await check_turn(first, folders[0])
        asleep = resident(pid)
        assert awake - asleep > LEAST_FREED

        waits = asyncio.create_task(ask(second, FEW))
        info = await wait_for_info(client, lambda info: info.waiting_calls == 1)
        assert (info.ok, info.asleep, info.workers[0].status) == (True, True, "asleep")
        with pytest.raises(errors.TurnstileError, match="asleep"):
            await client.update_weights(str(folders[1]), "step-1")
        await client.wake()
        assert resident(pid) - asleep > LEAST_FREED
        await client.update_weights(str(folders[1]), "step-1")
        info = await info_of(client)
        assert (info.asleep, info.paused, info.waiting_calls, waits.done()) == (False, True, 1, False)
        await client.resume()
        await waits
        assert await check_turn(second, folders[1]) == "step-1" != before


@pytest.mark.thorough
async def test_an_engine_that_dies_in_its_sleep_is_reported_and_calls_hear_of_it(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    async with served(folders[0], tmp_path) as (server, client):
        episode = await client.create_episode("Talk.")
        await client.sleep()
        waits = asyncio.create_task(ask(episode, FEW))
        await wait_for_info(client, lambda info: info.waiting_calls == 1)
        os.kill(worker_of(server), signal.SIGKILL)
        info = await wait_for_info(client, lambda info: not info.ok)
        assert (info.asleep, info.workers[0].status) == (False, "down")
        assert "ended with code -9" in info.detail
        with pytest.raises(openai.APIStatusError, match="ended with code -9"):
            await waits
        with pytest.raises(errors.TurnstileError, match="ended with code -9"):
            await client.wake()


@asynccontextmanager
async def wire(engine: EmbeddedEngine) -> AsyncIterator[Callable[..., Any]]:
    """Posts to the child past its client. Gives status and text."""
    connector = aiohttp.UnixConnector(str(engine.socket))
    async with aiohttp.ClientSession("http://child", connector=connector) as session:

        async def post(path: str, **body: Any) -> tuple[int, str]:
            async with session.post(path, json=body) as answer:
                return answer.status, await answer.text()

        yield post


async def test_what_needs_weights_is_refused_while_asleep(
    own_engine: EmbeddedEngine, folders: tuple[Path, Path]
) -> None:
    async with wire(own_engine) as post:
        assert (await post("/resume_memory_occupation"))[0] == 400
        await own_engine.sleep()
        await own_engine.sleep()
        for path, body in (
            ("/generate", {"input_ids": [1, 2]}),
            ("/update_weights_from_disk", {"model_path": str(folders[1])}),
        ):
            status, text = await post(path, **body)
            assert (status, "asleep" in text) == (400, True), text
        with pytest.raises(EngineRefused, match="wake it"):
            await own_engine.resume()
        await own_engine.wake()
        assert (await own_engine.state()).weight_version is None, "a folder may have been written anew meanwhile"
        await own_engine.update_weights(str(folders[1]), "step-1")
        await own_engine.resume()
        assert (await collect(own_engine, prompt_of(1, 5), SHORT, rid="a")).finish.weight_spans[
            0
        ].version == "step-1"


async def test_it_sleeps_on_where_its_folder_is_gone_and_wakes_when_it_is_back(
    own_engine: EmbeddedEngine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[1], tmp_path / "step-1")
    await own_engine.update_weights(str(folder), "step-1")
    await own_engine.sleep()
    away = folder.rename(tmp_path / "away")
    with pytest.raises(EngineRefused, match=r"step-1.*no such folder"):
        await own_engine.wake()
    asleep = resident(own_engine.pid)
    away.rename(folder)
    await own_engine.wake()
    assert resident(own_engine.pid) - asleep > LEAST_FREED


@pytest.mark.thorough
async def test_a_child_with_calls_refuses_to_sleep_and_goes_on(own_engine: EmbeddedEngine) -> None:
    """Its fleet waits until it is idle; alone it is asked at once."""
    progress = Progress()
    sampling = EngineSampling(max_new_tokens=MANY, temperature=0.0)
    call = asyncio.create_task(collect(own_engine, prompt_of(2, 5), sampling, rid="a", progress=progress))
    await progress.more(1)
    with pytest.raises(EngineRefused, match="calls run"):
        await own_engine.sleep()
    assert (await own_engine.state()).paused is False
    assert len((await call).ids) > 3
