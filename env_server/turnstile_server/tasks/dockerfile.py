"""Facts read from a Dockerfile without building it: the images it starts from, its work folder."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass

_FROM = re.compile(r"FROM\s+(?:--platform=\S+\s+)?(?P<image>\S+)(?:\s+AS\s+(?P<name>\S+))?", re.IGNORECASE)
_ARGUMENT = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_WORKDIR = re.compile(r"WORKDIR\s+(?P<path>.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DockerfileFacts:
    """Facts of a Dockerfile, up to the stage that becomes the image."""

    bases: tuple[str, ...]
    """Images that it starts from, of all stages. Names that hold variables are left out, unless an argument of the
    build is the whole of them."""
    workdir: str | None
    """None: the base image's, or one that a variable names."""
    stages: int


def read_dockerfile(
    text: str, target: str | None = None, args: Mapping[str, str] | None = None
) -> DockerfileFacts:
    """``target``: the stage that is built; None: the last. ``args``: arguments of the build."""
    bases: list[str] = []
    workdirs: dict[str, str | None] = {}
    workdir: str | None = None
    current = ""
    stages = 0
    for line in _instructions(text):
        if (start := _FROM.match(line)) is not None:
            if target is not None and current == target.lower():
                break
            stages += 1
            image = _filled(start["image"], args or {})
            workdir = workdirs.get(image.lower())
            if image.lower() not in workdirs and image.lower() != "scratch" and "$" not in image:
                bases.append(image)
            current = (start["name"] or str(stages - 1)).lower()
        elif (moved := _WORKDIR.match(line)) is not None:
            path = moved["path"].strip().strip("\"'")
            workdir = None if "$" in path else posixpath.normpath(posixpath.join(workdir or "/", path))
        workdirs[current] = workdir
    return DockerfileFacts(tuple(dict.fromkeys(bases)), workdir, stages)


def _filled(image: str, args: Mapping[str, str]) -> str:
    name = _ARGUMENT.fullmatch(image)
    return image if name is None else args.get(name[1] or name[2], image)


def _instructions(text: str) -> list[str]:
    """Without comments, each on one line."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line.strip() for line in re.sub(r"\\\s*\n", " ", "\n".join(kept)).splitlines() if line.strip()]
