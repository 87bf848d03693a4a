"""Set-up as root, ``setup: {user: root, run: […]}``: commands that run once, while an image of the task is built.

No command in a sandbox is root's, and nothing but its work folder and homes can be written there. An image is also
what agent and grader have in common, so both find what the commands made, and it is made once for all episodes.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.tasks.image_build import ImageBuild
from turnstile_server.tasks.part import TaskPart

SetupSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
DEFAULT_S: Final = 120.0
"""Time of one command."""

_SECONDS: TypeAdapter[float] = TypeAdapter(SetupSeconds)
_FOLDER = Path(__file__).with_name("root_image")
_MOST_BYTES = 100_000
"""The kernel takes 128 KiB in one variable."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_RUN = """\
run() {
  /bin/sh -c "$1" && return
  status=$?
  printf 'this command of root ended with exit status %s: %s\\n' "$status" "$1" >&2
  exit "$status"
}
"""
"""A shell's function: a build's error names the whole step alone."""


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
    image = fields.get("image")
    if not isinstance(image, str):
        raise ValueError("setup: set-up as root makes an image of the task's `image`: name one")
    if fields.get("build") is not None:
        raise ValueError("setup: the task brings a Dockerfile: set-up as root belongs there")
    script = _RUN + "\n".join(f"run {shlex.quote(command)}" for command in commands)
    if len(script.encode(errors="surrogatepass")) > _MOST_BYTES or _NO_TEXT.search(script):
        raise ValueError(
            f"setup: root's commands are no text of at most {_MOST_BYTES:,} bytes; put them into the image"
        )
    build = ImageBuild(
        _FOLDER,
        _FOLDER / "Dockerfile",
        (("TASK_IMAGE", image), ("TASK_SETUP", script)),
        timeout_s=_seconds(fields) * len(commands),
        origin=f"set-up as root of {image}: {' && '.join(commands)}",
        timeout_field="setup_timeout_s for each of root's commands",
    )
    return {"image": build.tag(), "build": build}


def _seconds(fields: dict[str, Any]) -> float:
    """The time of one command. What is no time is told by the task's field, so it makes no error here."""
    try:
        return _SECONDS.validate_python(fields.get("setup_timeout_s", DEFAULT_S))
    except ValidationError:
        return DEFAULT_S
