"""mini-swe-agent on a row, in an image that has git and bash but no Python: from the row to the reward that
SWE-bench's own package gives."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from swe_support import make

from turnstile.models import EpisodeStatus, Limits
from turnstile_server.settings import Settings, TaskSettings
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.testing.policy import Policy, PolicyInput, Step
from turnstile_server.testing.server import PlayedEpisode, scripted_server
from turnstile_server.testing.shell_policy import ShellPolicy, solution_commands

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

BASE = "turnstile-test:swe-without-python"
ROW = "quillworks__pathlib-sh-3"
IMAGE = "turnstile-test:swe-shell-without-python"
LOOKS_BACK = (
    "! command -v python3 && git log --all --format=%s && git show v-next; git reflog; git fsck --lost-found",
    "git cat-file --batch-all-objects --batch | grep -a -c 'extensio[n] of a'; grep -ra 'without a do[t]' .",
)
"""What an agent does that looks for the solution instead of writing one."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swe")
    make.build_base(make.BASE_IMAGE)
    without = f"FROM {make.BASE_IMAGE}\nRUN rm -rf /usr/bin/python3* /usr/lib/python3*\n"
    subprocess.run(["docker", "build", "-q", "-t", BASE, "-"], input=without, text=True, check=True)
    repository = folder / "repository"
    repository.mkdir()
    made = make.make_row(make.INSTANCES / "shell.yaml", repository)
    named = make.MadeRow({**made.row, "image": IMAGE}, repository, IMAGE)
    make.build_image(named, BASE)
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(named.row) + "\n")
    return file


async def play_episode(rows: Path, policy: Policy, model: Path) -> PlayedEpisode:
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        sandboxes = {"kind": "docker", "docker_python": "carried", "run_dir": Path(run_dir)}
        pythons = {"swebench": Path(os.environ["TURNSTILE_SWEBENCH_PYTHON"])}
        tasks = {"sources": [f"rows:{rows}"], "package_pythons": pythons}
        async with scripted_server(Settings(model=model, sandboxes=sandboxes, tasks=tasks), policy) as server:
            return await server.play("mini-swe-agent", ROW, limits=Limits(wall_s=600.0, max_turns=20))


async def test_the_solution_of_the_row_is_worth_1(rows: Path, tiny_model: Path) -> None:
    task = load_tasks([f"rows:{rows}"]).get(ROW)
    told = await play_episode(rows, ShellPolicy(solution_commands(task, TaskSettings())), tiny_model)
    shown = (told.episode.status, told.episode.error, told.episode.reward)
    assert shown == (EpisodeStatus.COMPLETED, None, 1.0), told.episode.agent_output
    assert told.accounted
    assert told.audit.passed


async def test_an_agent_that_looks_for_the_solution_finds_none(rows: Path, tiny_model: Path) -> None:
    seen: list[str] = []
    looks = ShellPolicy(LOOKS_BACK)

    def watched(call: PolicyInput) -> Step:
        seen.extend(message.text for message in call.messages if message.role != call.own_role)
        return looks(call)

    told = await play_episode(rows, watched, tiny_model)
    assert (told.episode.status, told.episode.error, told.episode.reward) == (EpisodeStatus.COMPLETED, None, 0.0)
    assert told.episode.grading is not None
    assert {failed["message"] for failed in told.episode.grading["swe"]["failed"]} == {"FAIL_TO_PASS"}
    text = "\n".join(seen)
    assert "unknown revision" in text, "the commands ran, and were answered"
    assert [told for told in ("nothing where it has none", "no extension without a dot") if told in text] == []
