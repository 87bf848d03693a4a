"""The witness sees every attempt: without that, a table of agents that contact nobody would prove nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import docker
import pytest
from anyio import to_thread
from network_witness import witnessed

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

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
            async with asyncio.timeout(60):
                while len(witness.contacts) < 2 or not witness.names:  # noqa: ASYNC110 - lines come when they come
                    await asyncio.sleep(0.02)
        assert witness.names == {"registry.example.org"}
        assert witness.contacts == {"tcp 192.0.2.1:443", "udp 198.51.100.7:123"}
    finally:
        await to_thread.run_sync(lambda: (container.remove(force=True), client.close()))
