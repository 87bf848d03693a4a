"""Set-up as root, ``setup: {user: root, run: […]}``: commands that run once, while an image of the task is built.

No command in a sandbox is root's, and nothing but its work folder and homes can be written there. An image is also
what agent and grader have in common, so both find what the commands made, and it is made once for all episodes.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.tasks.image_build import ImageBuild
from turnstile_server.tasks.part import TaskPart

_FOLDER = Path(__file__).with_name("root_image")
_MOST_BYTES = 100_000
"""The kernel takes 128 KiB in one variable."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_LONGEST_S = 86_400.0
"""A build's time, however long each of its commands may take."""
SETUP_TIMEOUT_S = 120.0
"""Time for one command, where the task says none."""


class SetupCommands(TaskPart):
    """Commands of a set-up that are one user's."""

    user: Literal["agent", "root"] = "agent"
    run: tuple[str, ...] | str = Field(description="Shell commands, one after another.")

    @property
    def commands(self) -> tuple[str, ...]:
        return (self.run,) if isinstance(self.run, str) else self.run


def build_root_setup(fields: dict[str, Any]) -> dict[str, Any]:
    """A task's fields with the agent's commands alone under ``setup``; root's are a ``build`` of its ``image``.

    Raises ValueError: no image to start from, root's commands behind the agent's, commands that are too long.
    """
    setup = fields.get("setup")
    parts = setup if isinstance(setup, list) else [setup]
    if not any(isinstance(part, dict) for part in parts):
        return fields  # the agent's alone, or no set-up at all
    root: list[str] = []
    agent: list[str] = []
    for part in map(_read, parts):
        if part.user == "root":
            if agent:
                raise ValueError("setup: root's commands make the image, so they come before all of the agent's")
            root += part.commands
        else:
            agent += part.commands
    own = {**fields, "setup": agent}
    return own if not root else {**own, **_image(fields, root)}


def _read(part: object) -> SetupCommands:
    try:
        return SetupCommands.model_validate({"run": part} if isinstance(part, str) else part)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, ("setup", *fault["loc"][:1])))
        raise ValueError(f"{place}: {fault_text(fault)} (commands, or {{user: root, run: [commands]}})") from None


def _image(fields: dict[str, Any], commands: list[str]) -> dict[str, Any]:
    image, timeout_s = fields.get("image"), fields.get("setup_timeout_s")
    if not isinstance(timeout_s, int | float):
        timeout_s = SETUP_TIMEOUT_S  # another value is refused where the field itself is read
    if not isinstance(image, str):
        raise ValueError("setup: set-up as root makes an image of the task's `image`: name one")
    if fields.get("build") is not None:
        raise ValueError("setup: the task brings a Dockerfile: set-up as root belongs there")
    script = " && ".join(f"/bin/sh -c {shlex.quote(command)}" for command in commands)
    if len(script.encode(errors="surrogatepass")) > _MOST_BYTES or _NO_TEXT.search(script):
        raise ValueError(
            f"setup: root's commands are no text of at most {_MOST_BYTES:,} bytes; put them into the image"
        )
    build = ImageBuild(
        _FOLDER,
        _FOLDER / "Dockerfile",
        (("TASK_IMAGE", image), ("TASK_SETUP", script)),
        timeout_s=min(timeout_s * len(commands), _LONGEST_S),
    )
    return {"image": build.tag(), "build": build}
