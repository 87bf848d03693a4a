"""Regrades with real sandboxes and a real server: work survives `kill -9` between its grading and its end, and the
command compares grades."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from light import SOLVE, TASK
from test_killed_server import KEY, SERVER_S, Servers

from local import TURNSTILE
from turnstile import AsyncClient
from turnstile.models import EpisodeStatus, Fault
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


def judged_by(test: str) -> dict[str, Any]:
    """The task, with another body of its hidden test."""
    task = copy.deepcopy(TASK)
    files = task["tests"]["files"]["inline"]
    files["test_answer.py"] = files["test_answer.py"].replace("self.assertEqual(answer.ANSWER, 42)", test)
    return task


FOR_EVER = judged_by("import time; time.sleep(50)")
OTHER = judged_by("self.assertEqual(answer.ANSWER, 43)")


async def turnstile(*arguments: str, url: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines, and what went to stderr."""
    command = [TURNSTILE, "episodes", "regrade", *arguments, "--json", "--url", url, "--key", KEY]
    done = await anyio.run_process(command, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr.decode()


@pytest.mark.thorough
async def test_work_survives_a_kill_while_it_is_graded_and_is_judged_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    servers = Servers(tiny_model, tmp_path, "local", "unused")
    url = f"http://127.0.0.1:{servers.port}"
    fixed, other = tmp_path / "fixed.json", tmp_path / "other.json"
    fixed.write_text(json.dumps(TASK))
    other.write_text(json.dumps(OTHER))
    async with AsyncClient(url, key=KEY) as client:
        async with servers.one() as server:
            env = {"WORK": SOLVE, "TURNS": "1", "STAY": "0"}
            limits = {"max_completion_tokens": 4}
            episode = await client.create_episode(FOR_EVER, agent="light", env=env, limits=limits)

            async def graded() -> bool:
                return (await episode.status()).status is EpisodeStatus.GRADING

            await wait_until(graded, within_s=SERVER_S)
            kept = tmp_path / "data" / "work" / f"{episode.episode_id}.work"
            await wait_until(kept.exists)
            server.kill()
        async with servers.one():
            lost = await episode.status()
            assert lost.error is not None
            assert (lost.error.type, lost.error.fault) == ("server_restarted", Fault.INFRASTRUCTURE)
            assert (lost.reward, lost.work is not None) == (None, True)
            code, [made], _ = await turnstile("--ungraded", "--task-file", str(fixed), "--apply", url=url)
            assert (code, made["changes"]["reward"]) == (0, [None, 1.0]), made
            found = await episode.status()
            assert (found.status, found.reward) == (EpisodeStatus.COMPLETED, 1.0)
            assert {row.reward for row in (await episode.samples(include_untrained=True)).samples} == {1.0}
            arguments = (episode.episode_id, "--task-file", str(other), "--check")
            code, [made], said = await turnstile(*arguments, url=url)
            assert (code, made["changes"]["reward"], made["differs"]) == (1, [1.0, 0.0], True)
            assert made["changes"]["newly_failed"] == ["test_answer.T.test_answer"]
            assert "1 of 1 episodes judged again, 1 differ" in said
            assert (await episode.status()).reward == 1.0, "compared, and not applied"
            code, [made], _ = await turnstile(episode.episode_id, "--task-file", str(fixed), "--check", url=url)
            assert (code, made["differs"]) == (0, False)
