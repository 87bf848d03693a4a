"""``openenv build`` makes an image of this project, and its container serves, without a model too."""

from __future__ import annotations

import httpx
import pytest
from container_support import STOP_S, started
from image_builds import run

pytestmark = [pytest.mark.docker, pytest.mark.container, pytest.mark.timeout(1500), pytest.mark.anyio]


async def test_the_built_container_serves_as_nobody_special_and_stops_when_asked(server_image: str) -> None:
    with started(server_image) as container:
        await container.ready()
        async with httpx.AsyncClient(base_url=container.control_url, timeout=5) as http:
            assert (await http.get("/health")).json() == {"status": "healthy"}
            assert (await http.get("/ready")).status_code == 503
            refused = await http.post(f"/k/{container.key}/episodes", json={"task": {"instruction": "x"}})
            assert refused.json()["error"]["type"] == "engine_unavailable"
        assert container.run("id", "-u") == "10001"
        # What the image holds is complete: the module that needs openenv-core can be imported.
        container.run("python3", "-c", "import turnstile_server.control.openenv.server")
        run("docker", "stop", "--time", str(STOP_S), container.name, timeout_s=STOP_S + 30)
        assert container.state["ExitCode"] == 0, container.log
