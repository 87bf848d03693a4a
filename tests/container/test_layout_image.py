"""``openenv build`` of the layout for ``openenv push``: the image serves as the user that a Space gives it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import httpx
import pytest
from container_support import started
from image_builds import BUILD_S, OPENENV, ROOT, base_image, run

from turnstile_server.commands.openenv_layout import write_layout

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.thorough,
    pytest.mark.timeout(1500),
    pytest.mark.anyio,
]


@pytest.fixture(scope="module")
def space_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, tag = tmp_path_factory.mktemp("layout") / "space", f"turnstile-test:space-{secrets.token_hex(4)}"
    write_layout(folder, ROOT, "space")
    base = f"BASE_IMAGE={base_image()}"
    run(OPENENV, "build", folder, "-t", tag, "--build-arg", base, timeout_s=BUILD_S)
    yield tag
    run("docker", "rmi", tag)


async def test_the_layout_is_built_and_serves_as_uid_1000(space_image: str) -> None:
    with started(space_image, hardened=()) as container:
        await container.ready()
        assert container.run("id", "-u") == "1000"
        async with httpx.AsyncClient(base_url=f"{container.control_url}/k/{container.key}", timeout=30) as http:
            assert (await http.get("/metadata")).json()["name"] == "turnstile"
            assert {"action", "observation", "state"} <= (await http.get("/schema")).json().keys()
            refused = await http.post("/reset", json={})
            assert refused.json()["error"]["type"] == "engine_unavailable"
