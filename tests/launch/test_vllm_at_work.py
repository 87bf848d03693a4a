"""``turnstile serve --engine vllm --launch`` with a real vLLM: episodes, new weights, deaths.

One server for all of it, because vLLM takes a minute to start. The judge is an independent forward pass.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from judged import Judged
from launch_support import Toy, below, left_of
from safetensors.torch import load_file
from server_process import TIMEOUT_S, environment, serve_command
from test_engines_at_work import retrained
from test_real_vllm import FLAGS, START_S, settings_of, title
from test_sglang_weights import free_port

from turnstile import AsyncClient
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import LEVELS, errands
from waiting import wait_until, wait_until_sync

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.thorough]

KEY = "control-key-of-a-test"
LIMITS = {"max_turns": 3, "max_completion_tokens": 48, "wall_s": START_S}
"""An episode may wait for the engine to be started again."""


@contextmanager
def served(toy: Toy, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server's process, which is killed at the end, and its control URL, at once."""
    port = free_port()
    arguments = ["--model", TINY, "--data-dir", folder / "data", "--sandbox", "local", "--control-port", port]
    launch = settings_of(toy)
    settings = {
        "TURNSTILE_CONTROL_KEY": KEY,
        "TURNSTILE_LAUNCH__PYTHON": str(launch.python),
        "TURNSTILE_LAUNCH__ENVIRONMENT": json.dumps(dict(launch.environment)),
        "TURNSTILE_ENGINE__START_TIMEOUT_S": str(START_S),
        "TURNSTILE_FLEET__NO_WORKER_S": str(START_S),
    }
    command = [*serve_command(*arguments, "--engine", "vllm", "--launch"), "--", *FLAGS]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment(**settings), stdout=log, stderr=log, text=True)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(TIMEOUT_S)


async def ready(server: subprocess.Popen[str], url: str, log: Path) -> set[str]:
    """What ``/ready`` said until it was 200."""
    said: set[str] = set()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def is_ready() -> bool:
            assert server.poll() is None, await anyio.Path(log).read_text()
            try:
                answer = await http.get("/ready")
            except httpx.TransportError:
                return False
            if answer.status_code != 200:
                said.add(answer.text)
            return answer.status_code == 200

        await wait_until(is_ready, within_s=START_S)
    return said


async def play(client: AsyncClient, folders: dict[str, Path], version: str) -> None:
    """New episodes are sampled by ``version`` alone, with its logprobs."""
    tasks = [errand.task() for errand in itertools.islice(errands(53, LEVELS), 2)]
    judged = Judged()
    options = {"agent": "tool-loop", "n": 2, "max_concurrent": 4, "limits": LIMITS, "retries": 0}
    async for rollout in client.rollouts(tasks, **options):
        assert rollout.episode is not None, rollout.error
        judged.add(await client.episode(rollout.episode.episode_id).turns(), folders)
    assert set(judged.tokens) == {version}, judged
    assert judged.tokens[version] > 20
    judged.check()
    (info,) = (await client.engine()).values()
    assert (info.ok, info.weight_version, info.paused) == (True, version, False)


async def status(client: AsyncClient) -> str:
    (info,) = (await client.engine()).values()
    return info.workers[0].status


@pytest.mark.timeout(1200)
async def test_a_launched_vllm_plays_learns_dies_and_is_replaced_with_its_weights(
    toy: Toy, tmp_path: Path
) -> None:
    folders = {"default": TINY} | {f"step-{n}": retrained(tmp_path / f"step-{n}", n) for n in (1, 2)}
    with served(toy, tmp_path) as (server, url):
        async with AsyncClient(url, key=KEY) as client:
            said = await ready(server, url, tmp_path / "log")
            assert any("vllm" in each and " s" in each for each in said), said
            await play(client, folders, "default")

            (before,) = (await client.engine()).values()
            assert (before.tensor_format, before.sleeps) == ("safetensors", False)
            named = load_file(folders["step-1"] / "model.safetensors")
            await client.update_weights_from_tensors(named.items(), "step-1", bucket_bytes=200_000)
            await play(client, folders, "step-1")
            await client.update_weights(str(folders["step-2"]), "step-2")
            await play(client, folders, "step-2")

            family = below(server.pid)
            main = next(pid for pid in family if b"api_server" in title(pid) and b"guardian" not in title(pid))
            os.kill(main, signal.SIGKILL)

            async def noticed() -> bool:
                return await status(client) != "serving"

            await wait_until(noticed)
            await play(client, folders, "step-2")  # agents wait for the new process and its weights
            assert left_of([main]) == []

            family = below(server.pid)
            server.kill()
            server.wait(TIMEOUT_S)
            wait_until_sync(lambda: not left_of(family))
