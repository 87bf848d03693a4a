"""Refusals of a sound ``task.toml`` that asks for what Turnstile does not do: each by its name, with the reason.

Harbor judges in the container in which the agent worked. Turnstile judges the work folder in a fresh one. A task
that needs the first may not be played as the second: it would score 0, or 1, for the wrong reason.
"""

from __future__ import annotations

from turnstile_server.kinds.harbor.config import HarborConfig, HarborEnvironment, HarborStep, HarborVerifier
from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.tasks.parse import Loc

_HEALTH = "a health check waits for a service of the image, and no service runs in a sandbox"


def refuse_unsupported(config: HarborConfig, workdir: str | None, found: FolderFindings) -> None:
    """``workdir``: where it is known before the image is there."""
    _refuse_environment(config.environment, found)
    _refuse_verifier(config.verifier, ("verifier",), found)
    if not config.steps:
        _refuse_separate(config, None, workdir, ("verifier",), found)
    for index, step in enumerate(config.steps):
        loc: Loc = ("steps", index)
        if step.healthcheck is not None:
            found.refuse(_HEALTH, (*loc, "healthcheck"))
        _refuse_verifier(step.verifier, (*loc, "verifier"), found)
        own = step.verifier.environment_mode is not None
        _refuse_separate(config, step, workdir, (*loc, "verifier") if own else ("verifier",), found)


def _refuse_verifier(verifier: HarborVerifier, loc: Loc, found: FolderFindings) -> None:
    if verifier.collect:
        found.refuse(
            "commands that collect the state of the agent's container: only its work folder is judged",
            (*loc, "collect"),
        )
    if verifier.environment is not None:
        found.refuse("tests in an image of their own: they run in the task's", (*loc, "environment"))


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
        found.refuse(_HEALTH, (*where, "healthcheck"))


def _refuse_separate(
    config: HarborConfig, step: HarborStep | None, workdir: str | None, table: Loc, found: FolderFindings
) -> None:
    """There the declared artifacts are the work. Here it is the work folder: the same where they are that.
    ``table``: that of the verifier that says so."""
    verifier = config.verifier if step is None or step.verifier.environment_mode is None else step.verifier
    if verifier.environment_mode != "separate" or verifier.environment is not None:
        return
    loc: Loc = (*table, "environment_mode")
    places = ("tests",) if step is None else ("tests", f"steps/{step.name}/tests")
    images = [place for place in places if (found.folder / place / "Dockerfile").exists()]
    sources = config.artifact_sources(step)
    if images:
        found.refuse(f"tests in an image of their own ({images[0]}/Dockerfile): they run in the task's", loc)
    elif workdir is None or set(sources) != {workdir}:
        declared = ", ".join(sources) or "none"
        found.refuse(
            f"`separate` judges the declared artifacts ({declared}), Turnstile the work folder "
            f"({workdir or 'of the image'}): declare that alone",
            loc,
        )
