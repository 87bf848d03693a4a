"""The real mini-swe-agent, launched by Turnstile in a Docker sandbox, from the task to its reward."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from local import ROOT, serve
from scripted.gold import gold_script
from scripted_policy import scripted_policy
from turnstile import AsyncClient
from turnstile.models import Episode, EpisodeStatus, SampleSet
from turnstile_server.tasks.loader import load_tasks
from turnstile_server.tasks.model import Task

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

IMAGE = "turnstile-test:py"
WAIT_S = 600.0
"""The first episode waits for the agent's installation."""


@pytest.fixture(scope="module")
def image() -> str:
    subprocess.run([ROOT / "scripts" / "sandbox_image.sh", IMAGE], check=True, stdout=subprocess.DEVNULL)
    return IMAGE


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Shipped tasks that are solved by changing files."""
    return [task for task in load_tasks(()) if task.tests is not None and task.answer is None]


@pytest.fixture(scope="module")
async def client(
    tiny_model: Path, image: str, tasks: list[Task], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncClient]:
    """Of a server with Docker sandboxes, whose model solves the first task and talks nonsense about the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNSTILE_SANDBOXES__KIND", "docker")
        patch.setenv("TURNSTILE_SANDBOXES__DOCKER_IMAGE", image)
        async with (
            scripted_policy(tiny_model, gold_script(tasks[:1])) as url,
            serve(tiny_model, tmp_path_factory.mktemp("server") / "data", engine_url=url) as server,
            AsyncClient(server.control_url, key=server.control_key) as client,
        ):
            yield client


async def run(client: AsyncClient, task: Task, completion_tokens: int) -> tuple[Episode, SampleSet]:
    limits = {"max_completion_tokens": completion_tokens, "max_turns": 20}
    async with await client.create_episode({"id": task.id}, agent="mini-swe-agent", limits=limits) as episode:
        ended = await episode.wait(WAIT_S)
        report = await episode.audit()
        assert report.passed
        assert report.max_abs_delta is not None
        samples = await episode.samples()
    stats = samples.stats
    masked = sum(int(sample.loss_mask.sum()) for sample in samples.samples)
    assert masked + sum(entry.tokens for entry in samples.untrained) == stats.sampled_tokens
    return ended, samples


async def test_it_solves_a_task_and_earns_its_reward(client: AsyncClient, tasks: list[Task]) -> None:
    ended, samples = await run(client, tasks[0], 4096)
    assert (ended.status, ended.error, ended.agent_exit_code) == (EpisodeStatus.COMPLETED, None, 0)
    assert ended.reward == 1.0
    (sample,) = samples.samples
    assert sample.reward == 1.0
    assert samples.stats.breaks == {}
    assert samples.stats.cosmetic == {}
    assert samples.stats.trained_tokens == samples.stats.sampled_tokens > 0


async def test_a_model_that_never_calls_its_tool_earns_nothing_and_breaks_as_documented(
    client: AsyncClient, tasks: list[Task]
) -> None:
    ended, samples = await run(client, tasks[1], 64)
    assert (ended.status, ended.reward, ended.agent_exit_code) == (EpisodeStatus.COMPLETED, 0.0, 0)
    assert (samples.stats.turns, samples.stats.roots) == (3, 3)
    assert samples.stats.breaks == {"reply_edited": 2}
