"""The real mini-swe-agent, launched by Turnstile in a Docker sandbox, from the task to its reward."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scripted.gold import SUBMIT_COMMAND, gold_script
from scripted.script import Play, Script, Step
from scripted_policy import scripted_policy
from turnstile import AsyncClient
from turnstile.models import Episode, EpisodeStatus, SampleSet
from turnstile_server.demo.local_server import serve
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

WAIT_S = 600.0
"""The first episode waits for the agent's installation."""

HOSTILE = "Look around in a folder that would like to configure you."
LOOK = "echo key=$OPENAI_API_KEY; python3 -c 'import litellm' 2>&1 | tail -n 1; id -u; pwd"
LOOK += "; env | grep -E '^(PYTHON|LD_)'; python3 -c 'import sys; print(sys.prefix)'"
LOOKS = Play(
    instruction=HOSTILE,
    steps=(
        Step(text="I look.", tool="bash", arguments={"command": LOOK}),
        Step(tool="bash", arguments={"command": SUBMIT_COMMAND}),
    ),
)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Shipped tasks that are solved by changing files."""
    return [task for task in load_tasks(()) if task.tests is not None and task.answer is None]


@pytest.fixture(scope="module")
async def client(
    tiny_model: Path, docker_image: str, tasks: list[Task], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncClient]:
    """Of a server with Docker sandboxes, whose model solves the first task and talks nonsense about the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNSTILE_SANDBOXES__KIND", "docker")
        patch.setenv("TURNSTILE_SANDBOXES__DOCKER_IMAGE", docker_image)
        async with (
            scripted_policy(tiny_model, Script((LOOKS, *gold_script(tasks[:1]).plays))) as url,
            serve(tiny_model, tmp_path_factory.mktemp("server") / "data", engine_url=url) as server,
            AsyncClient(server.control_url, key=server.control_key) as client,
        ):
            yield client


async def run_agent(
    client: AsyncClient, task: dict[str, Any], completion_tokens: int = 4096
) -> tuple[Episode, SampleSet]:
    limits = {"max_completion_tokens": completion_tokens, "max_turns": 20}
    async with await client.create_episode(task, agent="mini-swe-agent", limits=limits) as episode:
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
    ended, samples = await run_agent(client, {"id": tasks[0].id})
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
    ended, samples = await run_agent(client, {"id": tasks[1].id}, 64)
    assert (ended.status, ended.reward, ended.agent_exit_code) == (EpisodeStatus.COMPLETED, 0.0, 0)
    assert (samples.stats.turns, samples.stats.roots) == (3, 3)
    assert samples.stats.breaks == {"reply_edited": 2}


async def test_the_work_folder_does_not_configure_it_and_its_own_packages_and_key_stay_with_it(
    client: AsyncClient,
) -> None:
    inline = {
        "mini.yaml": "broken: [",
        "turnstile.yaml": "broken: [",
        ".env": "OPENAI_API_KEY=wrong\nMSWEA_CONFIGURED=false\n",
        "litellm.py": "raise RuntimeError('the work folder is on the path')\n",
    }
    ended, _ = await run_agent(client, {"instruction": HOSTILE, "base": {"inline": inline}})
    assert (ended.status, ended.error, ended.reward) == (EpisodeStatus.COMPLETED, None, None)
    turns = await client.episode(ended.episode_id).turns()
    assert len(turns) == 2
    (result,) = turns[1].new_messages
    seen = json.loads(result.content)["output"].splitlines()
    uid = seen.pop(2)
    assert seen == ["key=", "RuntimeError: the work folder is on the path", "/workspace", "/usr"]
    assert int(uid) >= SandboxSettings().uid_range
