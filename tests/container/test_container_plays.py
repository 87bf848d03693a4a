"""The image that `openenv build` makes plays, hardened: sandboxes inside, the thin client outside."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from container_support import Container, processes_of_container, sandbox_flags, serving, started
from image_builds import run
from play import NPM_AGENT, OWN_AGENT, SHIPPED_TASK, play_all

from sglang_server import sglang_server
from turnstile.models import EpisodeStatus
from turnstile_server.demo import TINY

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.anyio,
    pytest.mark.timeout(1500),
]

EMBEDDED = {"MODEL": "tiny", "ENGINE__KIND": "embedded"}


@pytest.fixture(scope="module")
async def playing(embedded_image: str) -> AsyncIterator[Container]:
    async with serving(embedded_image, **EMBEDDED) as container:
        container.install_agents(OWN_AGENT, NPM_AGENT)
        yield container


async def test_it_is_hardened_and_finds_its_sandboxes(playing: Container) -> None:
    status = playing.run("cat", "/proc/self/status")
    for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert line in status
    assert playing.run("id", "-u") == "10001"
    assert "sandboxes: local: bubblewrap, one uid, users kept apart by name spaces; limits: " in playing.log
    async with httpx.AsyncClient(timeout=60) as http:
        found = (await http.get(f"{playing.control_url}/k/{playing.key}/sandboxes")).json()
    assert (found["kind"], found["isolated"], found["missing"]) == ("local", True, None)


async def test_the_thin_client_outside_plays_groups_that_are_graded_and_audited(playing: Container) -> None:
    before = playing.processes()
    await play_all(playing)
    after = playing.processes()
    assert not [process for process, state in after.items() if "Z" in state], after
    assert len(after) == len(before), after  # nothing of any sandbox is left


async def test_what_it_played_can_be_looked_at(playing: Container) -> None:
    """The viewer's files and all that its pages ask for, tokens with their texts included."""
    async with httpx.AsyncClient(base_url=playing.control_url, timeout=60) as http:
        page = await http.get("/ui/episodes")
        script = re.search(r'src="([^"]+app\.js)"', page.text)
        assert script is not None, page.text
        assert (await http.get(str(page.url.join(script[1])))).headers["content-encoding"] == "gzip"
        assert (await http.get("/episodes")).status_code == 401

        async def look(path: str) -> Any:
            answer = await http.get(f"/k/{playing.key}{path}")
            assert answer.status_code == 200, answer.text
            return answer.json()

        listed = await look("/episodes?view=summary&status=completed&offset=0")
        assert listed["total"] == len(listed["summaries"]) > 0
        assert all(summary["why"] for summary in listed["summaries"])
        stats = await look("/stats?by=task&status=completed")
        assert sum(row["episodes"] for row in stats["rows"]) == listed["total"]
        episode_id = listed["summaries"][0]["episode_id"]
        spans = (await look(f"/episodes/{episode_id}/spans"))["spans"]
        assert {"queue", "setup", "agent", "model"} <= {span["kind"] for span in spans}
        turn = (await look(f"/episodes/{episode_id}/turns?arrays=false"))["turns"][-1]
        window = await look(f"/turns/{turn['turn_id']}/tokens?count=50")
        assert window["tokenizer"]
        assert all(bytes.fromhex(data) for data in window["bytes"])


@pytest.mark.thorough
@pytest.mark.sglang
async def test_it_plays_on_a_real_sglang_outside_the_container(server_image: str) -> None:
    host = "host.docker.internal"
    with sglang_server(TINY, ("--host", "0.0.0.0")) as url:
        settings = {"MODEL": "tiny", "ENGINE__KIND": "sglang", "ENGINE__URL": url.replace("127.0.0.1", host)}
        async with serving(server_image, "--add-host", f"{host}:host-gateway", **settings) as container:
            container.install_agents(OWN_AGENT, NPM_AGENT)
            await play_all(container)


@pytest.mark.thorough
async def test_asked_to_stop_while_it_plays_it_ends_within_its_grace_and_leaves_nothing(
    embedded_image: str,
) -> None:
    async with serving(embedded_image, **EMBEDDED) as container:
        identity = run("docker", "inspect", "-f", "{{.Id}}", container.name)
        await _begin_long(container)
    assert processes_of_container(identity) == []


@pytest.mark.thorough
async def test_killed_while_it_plays_it_leaves_nothing_and_starts_again_on_its_data(embedded_image: str) -> None:
    with started(embedded_image, *sandbox_flags(), **EMBEDDED) as container:
        await container.ready()
        identity = run("docker", "inspect", "-f", "{{.Id}}", container.name)
        episode = await _begin_long(container)
        assert any("bwrap" in process for process in container.processes())
        run("docker", "kill", container.name)  # SIGKILL to the server, which is the container's first process
        assert processes_of_container(identity) == []
        run("docker", "start", container.name)
        await container.ready()
        async with container.client() as client:
            found = await client.episode(episode).status()
        assert found.error is not None
        assert found.error.type == "server_restarted"
        assert not any("bwrap" in process for process in container.processes())


async def _begin_long(container: Container) -> str:
    """An episode with an open sandbox, whose agent (outside) does nothing. Returns its id."""
    async with httpx.AsyncClient(base_url=f"{container.control_url}/k/{container.key}", timeout=90) as http:
        created = (await http.post("/episodes", json={"task": {"id": SHIPPED_TASK}, "agent": "external"})).json()
        shown = await http.get(f"/episodes/{created['episode_id']}", params={"wait": 60})
        while shown.json()["status"] != EpisodeStatus.RUNNING:
            shown = await http.get(f"/episodes/{created['episode_id']}", params={"wait": 60})
    episode_id: str = created["episode_id"]
    return episode_id
