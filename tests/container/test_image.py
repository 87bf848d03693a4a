"""The images are small, start soon, and lack nothing that a server needs although much was left out of them."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import httpx
import pytest
from container_support import Container, started
from image_builds import run
from openenv.core import GenericEnvClient, MCPToolClient

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.timeout(1500),
    pytest.mark.anyio,
]

MB = 1_000_000
SERVER_MB, EMBEDDED_MB = 350, 900
SERVER_HEALTHY_S, EMBEDDED_HEALTHY_S = 5.0, 15.0
TWO_CORES = ("--cpus", "2")
TRAINER = {"MODEL": "tiny", "ENGINE__KIND": "trainer"}
TASK = {"instruction": "Say hello.", "answer": {"kind": "exact", "value": "hello"}}

NO_OPENENV = "import importlib.util as u; print([n for n in ('openenv', 'fastmcp') if u.find_spec(n)])"
# Only modules with Python's own loader: beartype keeps the bytecode of what it decorates under another name.
WITHOUT_BYTECODE = """
import sys, pathlib, types
from importlib.machinery import SourceFileLoader
import turnstile_server.app, turnstile_server.commands.serve, turnstile_server.rendering.factory
import turnstile_server.control.openenv.server
modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
modules = [module for module in modules if type(module.__loader__) is SourceFileLoader and module.__spec__]
print(len(modules), [m.__name__ for m in modules if not pathlib.Path(m.__spec__.cached).exists()])
"""
# Its tokenizers are those of transformers, of which the image has no models.
FAMILY_RENDERER = """
from turnstile.models import Message
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings
from turnstile_server.testing.server import TOKENIZER_FOLDER
renderer = create_renderer(TOKENIZER_FOLDER, RenderingSettings())
print(len(renderer.render([Message(role="user", content="hello")], []).ids))
"""


def size_mb(image: str) -> float:
    return int(run("docker", "image", "inspect", "-f", "{{.Size}}", image)) / MB


async def processor_s_until_healthy(container: Container) -> float:
    """Processor seconds that the server has used when ``/health`` answers.

    A start does one thing after the other, so on free cores these are the seconds that pass; on a machine that
    does other work too, more pass.
    """
    async with httpx.AsyncClient(base_url=container.control_url, timeout=60) as http:
        while True:
            try:
                assert (await http.get("/health")).json() == {"status": "healthy"}
                break
            except httpx.TransportError:
                assert container.state["Running"], container.log
                await anyio.sleep(0.05)
    return processor_s(container.state["Pid"])


def processor_s(pid: object) -> float:
    """proc(5): utime and stime, the 14th and 15th field. The second, a name in brackets, may have spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif("TURNSTILE_CONTAINER_IMAGE" in os.environ, reason="the image is not one that was built here")
def test_the_images_are_small(server_image: str, embedded_image: str) -> None:
    assert size_mb(server_image) <= SERVER_MB
    assert size_mb(embedded_image) <= EMBEDDED_MB


async def test_a_server_is_healthy_soon(server_image: str) -> None:
    with started(server_image, *TWO_CORES) as container:
        assert await processor_s_until_healthy(container) <= SERVER_HEALTHY_S


async def test_a_server_with_the_engine_inside_is_healthy_while_that_loads(embedded_image: str) -> None:
    with started(embedded_image, *TWO_CORES, MODEL="tiny", ENGINE__KIND="embedded") as container:
        assert await processor_s_until_healthy(container) <= EMBEDDED_HEALTHY_S
        await container.ready()
        async with httpx.AsyncClient(base_url=container.control_url, timeout=60) as http:
            assert (await http.get("/ready")).json() == {"status": "ready"}


async def test_openenvs_clients_play_from_the_moment_that_health_answers(server_image: str) -> None:
    settings = {**TRAINER, "START_WAIT_S": "60"}
    with started(server_image, **settings) as container:
        await processor_s_until_healthy(container)
        url = f"{container.control_url}/k/{container.key}"
        async with GenericEnvClient(base_url=url, connect_timeout_s=60) as env:
            begun = await env.reset(task=TASK)
            assert begun.observation["instruction"] == TASK["instruction"]
            await env.step({"type": "call_tool", "tool_name": "submit", "arguments": {"answer": "hello"}})
            assert (await env.step({"type": "finish"})).reward == 1.0
        async with MCPToolClient(base_url=url) as env:
            await env.reset(task=TASK)
            assert [tool.name for tool in await env.list_tools()] == ["submit"]


async def test_the_server_needs_neither_package_of_openenv(server_image: str) -> None:
    with started(server_image) as container:
        assert container.run("python3", "-c", NO_OPENENV).strip() == "[]"


async def test_a_model_familys_renderer_works_without_the_models_of_transformers(server_image: str) -> None:
    with started(server_image) as container:
        assert int(container.run("python3", "-c", FAMILY_RENDERER).splitlines()[-1]) > 0


async def test_what_a_start_imports_has_its_bytecode_in_the_image(server_image: str) -> None:
    """The root is read-only in use: a module without it would be compiled at every start."""
    with started(server_image) as container:
        count, _, without = container.run("python3", "-c", WITHOUT_BYTECODE).splitlines()[-1].partition(" ")
        assert int(count) > 500
        assert without == "[]"
