"""What a sound ``task.toml`` can ask for that Turnstile does not do: each is refused by its name, with the reason.

Harbor judges in the container in which the agent worked. Turnstile judges the work folder in a fresh one. A task
that needs the first may not be played as the second: it would score 0, or 1, for the wrong reason.
"""

from __future__ import annotations

from turnstile_server.tasks.harbor.config import HarborConfig, HarborEnvironment
from turnstile_server.tasks.harbor.findings import FolderFindings
from turnstile_server.tasks.parse import Loc


def refuse_unsupported(config: HarborConfig, workdir: str | None, found: FolderFindings) -> None:
    """``workdir``: where it is known before the image is there."""
    environment = config.environment
    _refuse_environment(environment, found)
    if config.steps:
        found.refuse(
            f"a task of {len(config.steps)} steps: an episode has one instruction and is judged once, at its end",
            ("steps",),
        )
    verifier = config.verifier
    if verifier.collect:
        found.refuse(
            "commands that collect the state of the agent's container: only its work folder is judged",
            ("verifier", "collect"),
        )
    if verifier.environment is not None:
        found.refuse("tests in an image of their own: they run in the task's", ("verifier", "environment"))
    elif verifier.separate:
        _refuse_separate(config, workdir, found)


def _refuse_environment(environment: HarborEnvironment, found: FolderFindings) -> None:
    where: Loc = ("environment",)
    if environment.os.lower() != "linux":
        found.refuse("tasks for Windows: sandboxes run Linux", (*where, "os"))
    if environment.gpus or environment.tpu is not None:
        found.refuse("sandboxes have no GPUs and TPUs", (*where, "gpus" if environment.gpus else "tpu"))
    if environment.mcp_servers:
        found.refuse("MCP servers of the task: give them to the server (tools.servers)", (*where, "mcp_servers"))
    if environment.skills_dir is not None:
        found.refuse("skills are for agents that Harbor installs", (*where, "skills_dir"))
    if environment.healthcheck is not None:
        found.refuse(
            "a health check waits for a service of the image, and no service runs in a sandbox",
            (*where, "healthcheck"),
        )


def _refuse_separate(config: HarborConfig, workdir: str | None, found: FolderFindings) -> None:
    """There the declared artifacts are the work. Here it is the work folder: the same where they are that."""
    loc: Loc = ("verifier", "environment_mode")
    if (found.folder / "tests" / "Dockerfile").exists():
        found.refuse("tests in an image of their own (tests/Dockerfile): they run in the task's", loc)
    elif workdir is None or config.artifact_sources != (workdir,):
        declared = ", ".join(config.artifact_sources) or "none"
        found.refuse(
            f"`separate` judges the declared artifacts ({declared}), Turnstile the work folder "
            f"({workdir or 'of the image'}): declare that alone",
            loc,
        )
