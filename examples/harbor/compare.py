"""Plays Harbor's task folders with `harbor run` and with Turnstile, and holds the rewards against each other.

    python examples/harbor/compare.py --harbor /path/to/harbor [FOLDER...] [--record]

Three works of each task: of Harbor's agent `nop` (nothing), of its agent `oracle` (the solution), and, where there
is one, an attempt (`attempts/TASK.sh`), which earns something between. Exit code 1: a reward differs. `--record`
writes what Harbor said to `rewards.json`, which the tests hold Turnstile against on machines without Harbor.
It needs a Docker engine, Harbor 0.26 and Docker Compose 2 (`scripts/install_compose.sh`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio

from turnstile_server.commands.proof_tools import started_proof_tools
from turnstile_server.errors import TurnstileError
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.proof_works import ProofParts, put_gold
from turnstile_server.grading.protocol import Work
from turnstile_server.grading.steps_validation import played_steps
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.settings import Settings, load_settings
from turnstile_server.tasks.images import DOCKER
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.workspace import prepare_workspace

HERE = Path(__file__).parent
RECORDED = HERE / "rewards.json"
ATTEMPTS = HERE / "attempts"
HARBOR_AGENTS = {"nop": ["-a", "nop"], "oracle": ["-a", "oracle"], "attempt": ["-a", "attempt_agent:AttemptAgent"]}
AT_ONCE = 2
ATTEMPT_S = 60.0

Rewards = dict[str, float | None]
"""By work (`nop`, `oracle`, `attempt`); None: it has no reward."""


def rewards_of_harbor(harbor: str, folder: Path, compose: Path | None) -> dict[str, Rewards]:
    """What `harbor run` says of each task of ``folder``."""
    found: dict[str, Rewards] = {}
    with tempfile.TemporaryDirectory() as jobs:
        env = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "DOCKER_BUILDKIT": "0",
            "ATTEMPTS": str(ATTEMPTS.absolute()),
            "PYTHONPATH": str((HERE / "harbor_agents").absolute()),
        }
        if compose is not None:
            plugins = Path(jobs) / "docker" / "cli-plugins"
            plugins.mkdir(parents=True)
            (plugins / "docker-compose").symlink_to(compose.absolute())
            env["DOCKER_CONFIG"] = str(plugins.parent)
        for work, agent in HARBOR_AGENTS.items():
            argv = [harbor, "run", "-p", str(folder), *agent, "-n", str(AT_ONCE), "-y", "-q"]
            argv += ["--jobs-dir", jobs, "--job-name", work]
            done = subprocess.run(argv, env=env, stdout=sys.stderr, stderr=sys.stderr, check=False)
            if done.returncode != 0:
                sys.exit(f"harbor ended with {done.returncode}")
            for file in sorted((Path(jobs) / work).glob("*/result.json")):
                said = json.loads(file.read_text())
                name = said["task_name"].rpartition("/")[2]
                if work != "attempt" or (ATTEMPTS / f"{name}.sh").is_file():
                    verdict = said.get("verifier_result") or {}
                    found.setdefault(name, {})[work] = (verdict.get("rewards") or {}).get("reward")
    return found


async def rewards_of_turnstile(folder: Path, settings: Settings) -> dict[str, Rewards]:
    """What Turnstile says of the same works."""
    tasks = list(await anyio.to_thread.run_sync(load_tasks, [str(folder)], settings.tasks))
    found: dict[str, Rewards] = {task.id: {} for task in tasks}
    places = anyio.Semaphore(AT_ONCE)
    async with started_proof_tools(settings) as tools:

        async def judge(task: Task) -> None:
            async with places:
                await tools.images.ensure(task, DOCKER)
                for work, script in (await _works(task)).items():
                    try:
                        found[task.id][work] = await _reward(task, work, script, tools.parts, tools.grader)
                    except TurnstileError as error:
                        print(f"{task.id}, {work}: {error.message}", file=sys.stderr)
                        found[task.id][work] = None

        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(judge, task)
    return found


async def _works(task: Task) -> Mapping[str, bytes | None]:
    """By work, the script that an agent runs instead of doing nothing, or the solution."""
    attempt = ATTEMPTS / f"{task.id}.sh"
    tried = {"attempt": await anyio.Path(attempt).read_bytes()} if attempt.is_file() else {}
    return {"nop": None, "oracle": None, **tried}


async def _reward(
    task: Task, work: str, script: bytes | None, parts: ProofParts, grader: TaskGrader
) -> float | None:
    """Of one work; where the task has steps, of the same work in each of them."""

    async def play(sandbox: Sandbox, index: int) -> None:
        gold = task.at_step(index).gold if task.steps else task.gold
        if work == "oracle":
            await put_gold(sandbox, gold or Gold(), parts.archive_of)
        elif script is not None:
            await sandbox.exec(Command(("bash", "-s"), stdin=script, timeout_s=ATTEMPT_S))

    if task.steps:
        return (await played_steps(task, parts, grader, play)).reward
    sandbox = await parts.provider.create(parts.spec_of(task))
    try:
        await prepare_workspace(sandbox, task, parts.archive_of)
        await play(sandbox, 0)
        await sandbox.stop_all()
        archive = await sandbox.download(sandbox.workdir, parts.max_work_bytes)
    finally:
        await sandbox.destroy()
    return (await grader.grade(task, Work(archive=archive))).reward


def table(harbor: Mapping[str, Rewards], turnstile: Mapping[str, Rewards]) -> tuple[str, bool]:
    """A table in Markdown, and whether all rewards are equal."""
    lines = ["| task | work | Harbor | Turnstile |", "|---|---|---|---|"]
    equal = harbor.keys() == turnstile.keys()
    for task in sorted(harbor.keys() | turnstile.keys()):
        one, other = harbor.get(task, {}), turnstile.get(task, {})
        for work in HARBOR_AGENTS:
            if work in one or work in other:
                lines.append(f"| {task} | {work} | {_shown(one.get(work))} | {_shown(other.get(work))} |")
                equal = equal and one.get(work) == other.get(work)
    return "\n".join(lines), equal


def _shown(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[HERE / "tasks"])
    parser.add_argument("--harbor", required=True, help="the program `harbor`")
    parser.add_argument("--compose", type=Path, help="the program `docker-compose` 2, where Docker has no plugin")
    parser.add_argument("--record", action="store_true", help="write what Harbor said to rewards.json")
    given = parser.parse_args()
    settings = load_settings({"sandboxes": {"kind": "docker"}})
    harbor: dict[str, Rewards] = {}
    turnstile: dict[str, Rewards] = {}
    for folder in given.folders:
        harbor |= rewards_of_harbor(given.harbor, folder, given.compose)
    if given.record:
        RECORDED.write_text(json.dumps(harbor, indent=1, sort_keys=True) + "\n")
    for folder in given.folders:
        turnstile |= anyio.run(rewards_of_turnstile, folder, settings)
    made, equal = table(harbor, turnstile)
    print(made)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
