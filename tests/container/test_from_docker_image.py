"""``from_docker_image`` of OpenEnv's clients with examples/openenv_docker.py: hardened, with the key on."""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Iterator

import anyio
import httpx
import pytest
from container_support import READY_S, started
from image_builds import ROOT, run
from openenv.core import GenericEnvClient, MCPToolClient

from openenv_docker import TurnstileProvider, main

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.thorough,
    pytest.mark.anyio,
    pytest.mark.timeout(900),
]

TRAINER = {"TURNSTILE_ENGINE__KIND": "trainer", "TURNSTILE_MODEL": "tiny"}


@pytest.fixture(scope="module")
def own_image(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that only this module uses: it tells the module's containers from others on the engine."""
    folder, name = tmp_path_factory.mktemp("image"), f"turnstile-test:own-{secrets.token_hex(4)}"
    (folder / "Dockerfile").write_text(f"FROM {server_image}\nLABEL turnstile.test={name}\n")
    run("docker", "build", "--quiet", "--tag", name, folder)
    yield name
    run("docker", "rmi", name)


def containers(image: str) -> list[str]:
    return run("docker", "ps", "--all", "--quiet", "--filter", f"ancestor={image}").splitlines()


async def test_the_example_plays_an_episode_and_leaves_no_container(own_image: str) -> None:
    assert await main(own_image) == 1.0
    assert not containers(own_image)


async def test_the_key_is_needed_and_in_no_process_list_and_the_sandbox_works(own_image: str) -> None:
    provider = TurnstileProvider()
    env = await GenericEnvClient.from_docker_image(own_image, provider=provider, env_vars=TRAINER)
    try:
        begun = await env.reset(seed=3)  # a shipped task, in a sandbox of the container
        bash = {"type": "call_tool", "tool_name": "bash", "arguments": {"command": "echo from-the-sandbox"}}
        assert "from-the-sandbox" in (await env.step(bash)).observation["result"]
        url = env._ws_url.removesuffix("/ws").replace("ws://", "http://")
        bare, _, key = url.partition("/k/")
        assert len(key) > 16
        async with httpx.AsyncClient(timeout=60) as http:
            assert (await http.get(f"{bare}/episodes")).status_code == 401
            assert (await http.get(f"{bare}/k/{key[:-1]}x/episodes")).status_code == 401
            shown = await http.get(f"{url}/episodes/{begun.observation['episode_id']}")
            assert shown.json()["status"] == "running"
            bearer = {"authorization": f"Bearer {begun.observation['episode_key']}"}
            models = await http.get(f"{begun.observation['model_url']}/v1/models", headers=bearer)
            assert models.status_code == 200
        [container] = containers(own_image)
        assert key not in run("ps", "-eo", "args")
        assert run("docker", "exec", container, "id", "-u") == "10001"
    finally:
        await env.close()
    assert not containers(own_image)


async def test_without_a_public_url_addresses_are_in_the_caller_s_terms(own_image: str) -> None:
    settings = {name.removeprefix("TURNSTILE_"): value for name, value in TRAINER.items()}
    with started(own_image, **settings) as container:
        await container.ready()
        async with httpx.AsyncClient(base_url=f"{container.control_url}/k/{container.key}", timeout=60) as http:
            with anyio.fail_after(READY_S):
                while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await anyio.sleep(0.2)
            for route in ("/episodes", "/reset"):
                body = {"task": {"instruction": "x"}}
                answer = (await http.post(route, json=body, headers={"host": "trainer.example:9000"})).json()
                told = answer.get("observation", answer)
                assert told["model_url"] == f"http://trainer.example:8001/e/{told['episode_id']}"
                assert told["tool_url"] == f"{told['model_url']}/mcp"
        assert "http://0.0.0.0" not in container.log


async def test_the_tool_client_s_production_mode_too(own_image: str) -> None:
    env = await MCPToolClient.from_docker_image(own_image, provider=TurnstileProvider(), env_vars=TRAINER)
    try:
        env.use_production_mode = True
        assert await env.has_tool("bash")
        assert "hello" in await env.call_tool("bash", command="echo hello")
    finally:
        await env.close()


async def test_a_container_that_ends_is_reported_with_its_log(own_image: str) -> None:
    wrong = {"TURNSTILE_ENGINE__KIND": "trainer", "TURNSTILE_MODEL": "/nowhere"}
    with pytest.raises(RuntimeError, match="/nowhere"):
        await GenericEnvClient.from_docker_image(own_image, provider=TurnstileProvider(), env_vars=wrong)
    assert not containers(own_image)


async def test_the_example_of_the_docs_runs_as_printed(own_image: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "openenv.md").read_text(encoding="utf-8")
    [code] = [
        code for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "from_docker_image" in code
    ]
    await eval(compile(code, "openenv.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {"IMAGE": own_image})
    assert len(capsys.readouterr().out) > 20
    assert not containers(own_image)
