"""Agents for ``external_agents``, as commands to run: ``bash_agent`` and the real mini-swe-agent.

An agent gets a working folder, the URL of its model and a key. Neither agent knows of Turnstile.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local import ROOT
from turnstile_server.demo.local_server import stopped_at_exit


class AgentError(Exception):
    """The agent cannot be run, or exited with an error."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one agent. ``turns``: how many calls it makes with a model whose answers are nonsense."""

    task: str
    repo: Path
    model_url: str
    key: str
    turns: int
    stream: bool = False


def make_repository(folder: Path) -> Path:
    """A git repository with one commit, from examples/demo_repo."""
    shutil.copytree(ROOT / "examples" / "demo_repo", folder, ignore=shutil.ignore_patterns("__pycache__"))
    identity = ["-c", "user.name=demo", "-c", "user.email=demo@example.invalid"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "A shelf"]):
        subprocess.run(["git", *command], cwd=folder, check=True, stdin=subprocess.DEVNULL)
    return folder


def bash_agent(job: Job) -> list[str]:
    """examples/bash_agent.py. The random model calls no tool, so options keep the agent going for ``turns``."""
    options = ["--repo", str(job.repo), "--min-turns", str(job.turns), "--max-turns", str(job.turns)]
    program = str(ROOT / "examples" / "bash_agent.py")
    return [sys.executable, program, job.task, *options, *(["--stream"] if job.stream else [])]


def mini_swe_agent(job: Job) -> list[str]:
    """mini-swe-agent. It never streams, and by default it stops after three answers without a tool call.

    Raises AgentError unless TURNSTILE_MINI_SWE_PYTHON names the interpreter it is installed in.
    """
    python = os.environ.get("TURNSTILE_MINI_SWE_PYTHON")
    if python is None:
        raise AgentError(
            "mini-swe-agent: install it with scripts/install_pinned.sh scripts/mini-swe-agent.txt DIR and set "
            "TURNSTILE_MINI_SWE_PYTHON=DIR/bin/python"
        )
    settings = [
        "mini.yaml",
        f"model.model_kwargs.api_base={job.model_url}/v1",
        f"agent.step_limit={job.turns}",
        "agent.max_consecutive_format_errors=0",
    ]
    options = [part for setting in settings for part in ("-c", setting)]
    mini = [python, "-m", "minisweagent", "-y", "--exit-immediately", "-m", "openai/tiny", "-t", job.task]
    return [*mini, *options, "-o", str(trajectory(job))]


AGENTS = {"bash": bash_agent, "mini-swe": mini_swe_agent}


def trajectory(job: Job) -> Path:
    """Where mini-swe-agent writes what it did, as JSON."""
    return job.repo.with_name(f"{job.repo.name}.trajectory.json")


def environment(job: Job) -> Mapping[str, str]:
    """The agent's whole environment: the URL of its model and its key, and nothing of the trainer's."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(job.repo.parent),
        "OPENAI_BASE_URL": f"{job.model_url}/v1",
        "OPENAI_API_KEY": job.key,
        # mini-swe-agent: no questions, no price list, nothing fetched from elsewhere.
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


async def run_agent(name: str, job: Job) -> None:
    """Run an agent until it ends. Its processes are gone when this returns, also if it is cancelled.

    Raises AgentError when it exits with an error. Its output is kept beside the repository.
    """
    command = AGENTS[name](job)
    log = job.repo.with_name(f"{job.repo.name}.log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=job.repo,
            env=environment(job),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        async with stopped_at_exit(process):
            code = await process.wait()
    if code != 0:
        raise AgentError(f"the agent {name} exited with {code}:\n{log.read_text(errors='replace')[-2000:]}")
