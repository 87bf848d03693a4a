"""Servers for which Ray's own autoscaler brings the nodes (``autoscaler_program``)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
from other_network import bridged
from test_ray import engine_of, ray_environment

from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.thorough, pytest.mark.anyio, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("autoscaler_program.py")
APART = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
ENGINE = ("127.0.0.1", 30000)


def network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


async def test_the_autoscaler_brings_a_node_for_each_server_and_is_told_when_it_is_not_needed(
    tiny_model: Path,
) -> None:
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        async with engine_of(tiny_model) as engine:
            command = [os.environ["TURNSTILE_RAY_PYTHON"], str(PROGRAM), "http://{}:{}".format(*ENGINE)]
            script = 'ip link set lo up; exec "$@"'
            process = await anyio.open_process(
                [*APART, "sh", "-c", script, "sh", *command, str(tiny_model), sys.executable, folder],
                env=ray_environment(Path(folder)),
                stderr=None,
            )
            try:
                await wait_until(lambda: network(process.pid) != network(os.getpid()))
                async with bridged(engine.url, process.pid, *ENGINE):
                    assert process.stdout is not None
                    said = b"".join([part async for part in process.stdout]).decode()
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    seen = json.loads(said.splitlines()[-1])
    assert (seen["before"], seen["nodes"], seen["servers"]) == (1, 3, 2)
    assert seen["one"] == "{'CPU': 2.0}: 1 from request_resources()"
    assert seen["none"] == "(none)"
