"""A real vLLM that the server starts: it is started again when its core is killed, and ends completely."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launch_support import Toy, below, engine_settings, left_of

from bounded import bounded
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.launch.supervisor import EngineDown, EngineProcess, EngineUp
from turnstile_server.settings import LaunchSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.thorough]
START_S = 400.0
FLAGS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--max-num-seqs",
    "16",
    "--seed",
    "42",
)


def settings_of(toy: Toy) -> LaunchSettings:
    environment = {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOY_DIR": str(toy.folder),
    }
    python = os.environ["TURNSTILE_VLLM_PYTHON"]
    return bounded(
        LaunchSettings, enabled=True, python=python, arguments=FLAGS, environment=environment, backoff_start_s=0.0
    )


async def weights_of(process: EngineProcess) -> bytes:
    """Answered in development mode alone, which the launch sets."""
    assert process.url is not None
    http = EngineHttp(process.url, engine_settings())
    await http.open()
    try:
        status, body = await http.request("GET", "/weight_info", timeout_s=60)
    finally:
        await http.close()
    assert status == 200
    return body


@pytest.mark.timeout(1200)
async def test_a_real_vllm_whose_core_is_killed_is_started_again_and_ends_with_all_its_processes(
    toy: Toy, tiny_model: Path
) -> None:
    told: list[EngineUp | EngineDown] = []

    async def note(event: EngineUp | EngineDown) -> None:
        told.append(event)

    settings = engine_settings(start_timeout_s=START_S).model_copy(update={"kind": "vllm"})
    process = EngineProcess(settings, settings_of(toy), tiny_model, on_up=note, on_down=note)
    try:
        await process.start()
        assert b"default" in await weights_of(process)
        assert process.guardian_pid is not None
        family = below(process.guardian_pid)
        core = next(pid for pid in family if b"EngineCore" in title(pid))
        os.kill(core, signal.SIGKILL)
        await wait_until(lambda: told)
        assert isinstance(told[0], EngineDown)
        await wait_until(lambda: len(told) >= 2, within_s=START_S)
        assert isinstance(told[1], EngineUp)
        assert left_of(family) == []
        assert b"default" in await weights_of(process)
        family = below(process.guardian_pid)
    finally:
        await process.stop()
    assert left_of(family) == []


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
