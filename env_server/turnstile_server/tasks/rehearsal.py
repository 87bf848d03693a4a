"""Tests that fetch something when they judge, as many of Terminal-Bench 2 do: they judge without a network.

They run once while an image is built, as root and with the network of a build, in the task as it begins; what they
fetched stays in the image, in which only they run. The agent's image has nothing of it. What must hold: the work
folder of the image is that of the task's own, file by file, because works are taken over as their changes.
"""

from __future__ import annotations

from pathlib import Path

from turnstile_server.tasks.image_build import ImageBuild
from turnstile_server.tasks.script import ScriptTests

_DOCKERFILE = Path(__file__).with_name("rehearsal.Dockerfile")
_HOME = "/opt/turnstile/tests"
"""As in the Dockerfile."""
_OFFLINE = {"HOME": _HOME, "UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
"""So that installers take what is there, and do not wait for a network."""


def rehearsed(
    script: ScriptTests, folder: Path, image: str, workdir: str | None, build_timeout_s: float, max_bytes: int
) -> ScriptTests:
    """``script`` with an image of its own, of ``image``, the task's. ``folder``: its files; ``workdir`` None: the
    image's own; ``max_bytes``: of the folder. Raises ContextProblem, OSError."""
    build = ImageBuild(
        folder.absolute(),
        _DOCKERFILE,
        (("TASK_IMAGE", image), ("TASK_PROGRAM", script.program), ("TASK_WORKDIR", workdir or "")),
        timeout_s=build_timeout_s + script.timeout_s,
        max_bytes=max_bytes,
    )
    env = {**_OFFLINE, **script.env}
    return script.model_copy(update={"image": build.tag(), "build": build, "env": env})
