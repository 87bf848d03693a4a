"""Programs that a task brings: a script that judges its work, and a solution that is one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnstile_server.tasks.files import Files, FilesOptions
from turnstile_server.tasks.image_build import FolderBuild
from turnstile_server.tasks.inner_path import InnerPath
from turnstile_server.tasks.part import TaskPart

EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an environment variable."""


class ScriptTests(FilesOptions):
    """A hidden script that judges the work and writes its reward into a file, as Harbor's. Reward component
    ``script``: the number in ``/logs/verifier/reward.json`` or ``reward.txt``. What it runs cannot be seen, so it
    counts as in process."""

    in_field = True
    once = True
    unit = False
    runs_tests = True
    in_process = True

    grader: Literal["script"] = "script"
    files: Files = Field(description="Put into `/tests` when the work is in place.")
    program: InnerPath = Field("test.sh", description="The one of them that is run, in the work folder.")
    env: dict[EnvName, str] = Field(default_factory=dict, description="Its variables, over those of the task.")
    timeout_s: float = Field(600.0, gt=0, description="Time for it; then there is no reward.")
    image: str | None = Field(None, description="Docker image in which it judges; None: the task's.")
    build: FolderBuild = Field(None, description="How that image is made. Not in files and requests.")
    reward_key: str = Field("reward", min_length=1, description="Key of `reward.json` that is the reward.")


class GoldScript(TaskPart):
    """A solution that is a program: run in the agent's sandbox, in the work folder, as the agent."""

    files: Files = Field(description="Put into `/solution`.")
    program: InnerPath = Field("solve.sh", description="The one of them that is run.")
    env: dict[EnvName, str] = Field(default_factory=dict, description="Its variables, over those of the task.")
    timeout_s: float = Field(600.0, gt=0, description="Time for it.")
