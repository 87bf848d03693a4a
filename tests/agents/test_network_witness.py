"""The witness sees every attempt: without that, a table of agents that contact nobody would prove nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import docker
import pytest
from anyio import to_thread
from network_witness import Witness, process_in, witnessed

from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import Command, SandboxLimits, SandboxSpec
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

LIMITS = SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20)
ATTEMPTS = """
import socket
def attempt(what):
    try:
        what()
    except OSError as error:
        print(error)
attempt(lambda: socket.getaddrinfo("registry.example.org", 443))
attempt(lambda: socket.create_connection(("192.0.2.1", 443), 5))
attempt(lambda: socket.create_connection(("127.0.0.1", 9), 5))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("198.51.100.7", 123)))
attempt(lambda: socket.create_connection(("2001:db8::1", 80), 5))
"""


@pytest.mark.docker
async def test_names_and_addresses_that_a_container_tries_are_told_and_its_own_loopback_is_not(
    docker_image: str,
) -> None:
    def started() -> tuple[Any, Any]:
        client = docker.from_env()
        options: Any = {"network_mode": "none", "detach": True, "labels": {"turnstile.test": "witness"}}
        container = client.containers.run(docker_image, ["sleep", "60"], **options)
        container.reload()
        return client, container

    client, container = await to_thread.run_sync(started)
    try:
        async with witnessed(int(container.attrs["State"]["Pid"])) as witness:
            said = await to_thread.run_sync(lambda: container.exec_run(["python3", "-c", ATTEMPTS]))
            assert said.exit_code == 0
            assert len(said.output.splitlines()) == 4
            await lines_come(witness, 2, 1)
        assert witness.names == {"registry.example.org"}
        assert witness.contacts == {"tcp 192.0.2.1:443", "udp 198.51.100.7:123"}
    finally:
        await to_thread.run_sync(lambda: (container.remove(force=True), client.close()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root enters a network name space")
async def test_addresses_that_a_local_sandbox_tries_are_told_and_it_asks_no_name_server(tmp_path: Path) -> None:
    provider = LocalProvider(SandboxSettings(), tmp_path)
    async with BackgroundTasks() as tasks:
        await provider.start(HttpAgentEndpoint(None, idle_connection_s=5, max_connections=16), tasks)
        try:
            sandbox = await provider.create(SandboxSpec(LIMITS))
            async with witnessed(process_in(tmp_path, sandbox.sandbox_id)) as witness:
                said = await sandbox.exec(Command(("python3", "-c", ATTEMPTS)))
                assert len(said.stdout.splitlines()) == 4, said
                await lines_come(witness, 3, 0)
        finally:
            await provider.close()
    assert witness.names == set()  # its nsswitch.conf has files alone
    assert witness.contacts == {"tcp 192.0.2.1:443", "udp 198.51.100.7:123", "tcp 2001:db8::1:80"}


async def lines_come(witness: Witness, contacts: int, names: int) -> None:
    await wait_until(lambda: len(witness.contacts) >= contacts and len(witness.names) >= names)
