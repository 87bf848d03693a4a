"""A real SGLang that the server starts: its children end with it, its numbers are exact, its restarts are seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from launch_support import Toy, below, engine_settings, left_of
from server_process import TIMEOUT_S, environment, serve_command

from bounded import bounded
from sglang_server import FLAGS, SHIM, VARIABLE
from turnstile_server.engines.launch.launched import LaunchedEngine
from turnstile_server.engines.protocol import CallOrigin, EngineChunk, EngineSampling
from turnstile_server.engines.registry import create_engine
from turnstile_server.errors import EngineUnavailable
from turnstile_server.settings import LaunchSettings
from waiting import wait_until, wait_until_sync

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.thorough]
PROMPT = np.arange(5, 45, dtype=np.int32)
START_S = 300.0


def variables(toy: Toy) -> dict[str, str]:
    """``TOY_DIR`` marks the processes that are looked for."""
    return {
        "PYTHONPATH": str(SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOY_DIR": str(toy.folder),
    }


@pytest.fixture
async def engine(toy: Toy, tiny_model: Path) -> AsyncIterator[LaunchedEngine]:
    launch = bounded(
        LaunchSettings,
        enabled=True,
        python=os.environ[VARIABLE],
        arguments=FLAGS,
        environment=variables(toy),
        metrics=False,
        backoff_start_s=0.0,
    )
    engine = create_engine(engine_settings(start_timeout_s=START_S), tiny_model, None, launch)
    assert isinstance(engine, LaunchedEngine)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def call(engine: LaunchedEngine, tokens: int = 8) -> EngineChunk:
    sampling = EngineSampling(max_new_tokens=tokens, temperature=0.0)
    chunks = engine.generate(PROMPT, sampling, rid=os.urandom(8).hex(), origin=CallOrigin("e"), stream=False)
    [chunk] = [chunk async for chunk in chunks]
    return chunk


@pytest.mark.timeout(900)
async def test_a_real_engine_is_restarted_fenced_and_ended_with_its_children(
    toy: Toy, engine: LaunchedEngine, other_tiny_model: Path
) -> None:
    first = await call(engine)
    children = family(engine)
    assert len(children) >= 3  # the server, its scheduler and its detokenizer
    await engine.update_weights(str(other_tiny_model), "v2")
    second = await call(engine)
    assert second.weight_version == "v2"
    assert not np.array_equal(first.logprobs, second.logprobs)
    scheduler = next(pid for pid in children if b"scheduler" in title(pid))
    os.kill(scheduler, signal.SIGKILL)
    await wait_until(lambda: engine.process.down is not None)
    with pytest.raises(EngineUnavailable):
        await call(engine)

    async def reached() -> bool:
        return (await engine.state()).weight_version is not None

    await wait_until(reached, within_s=START_S)
    assert left_of(children) == []
    with pytest.raises(EngineUnavailable, match="not v2: load weights"):
        await call(engine)
    await engine.update_weights(str(other_tiny_model), "v2")
    again = await call(engine)
    assert again.ids.tolist() == second.ids.tolist()
    np.testing.assert_allclose(again.logprobs, second.logprobs, atol=1e-4)
    children = family(engine)
    await engine.close()
    assert left_of(children) == []


@pytest.mark.timeout(900)
def test_a_server_on_a_real_engine_that_is_killed_leaves_no_process(
    toy: Toy, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", tiny_model, "--data-dir", tmp_path / "data")
    command = serve_command(*arguments, "--engine", "sglang", "--launch")
    settings = {
        "TURNSTILE_LAUNCH__PYTHON": os.environ[VARIABLE],
        "TURNSTILE_LAUNCH__ENVIRONMENT": json.dumps(variables(toy)),
        "TURNSTILE_LAUNCH__METRICS": "false",
    }
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--", *FLAGS], env=environment(**settings), stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["event"] == "ready", (tmp_path / "log").read_text()[-4000:]
        started = below(server.pid)
        assert len(started) >= 4  # with the guardian
        server.kill()
        server.wait(TIMEOUT_S)
        wait_until_sync(lambda: not left_of(started))
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def family(engine: LaunchedEngine) -> list[int]:
    assert engine.process.guardian_pid is not None
    return below(engine.process.guardian_pid)


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
