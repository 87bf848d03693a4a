"""The image of a task folder, from ``docker_image``, a Dockerfile, or a ``docker-compose.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turnstile_server.kinds.harbor.compose import ComposeService, read_compose
from turnstile_server.kinds.harbor.config import HarborConfig
from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.dockerfile import read_dockerfile
from turnstile_server.tasks.image_build import ContextProblem, ImageBuild

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml")


@dataclass(frozen=True, slots=True)
class HarborImage:
    """The image of a task."""

    name: str | None = None
    build: ImageBuild | None = None
    place: str | None = None
    """The work folder that the task names; None: the image's own."""
    workdir: str | None = None
    """The same where a Dockerfile says it; None: not known before the image is there."""
    environment: Mapping[str, str] = field(default_factory=dict)


def find_image(folder: Path, config: HarborConfig, settings: TaskSettings, found: FolderFindings) -> HarborImage:
    """Find the image of a task folder. Errors and refusals go to ``found``."""
    place = folder / "environment"
    composes = [place / name for name in COMPOSE_FILES if (place / name).is_file()]
    service = read_compose(composes[0], found) if composes else ComposeService()
    workdir = config.environment.workdir or service.working_dir
    if service.working_dir is not None and not service.working_dir.strip("/"):
        found.wrong(
            "the whole file system is no work folder", ("services", "main", "working_dir"), file=composes[0]
        )
    image = config.environment.docker_image or service.image
    context = place / (service.context or ".")
    dockerfile = context / service.dockerfile
    if image is not None and not (settings.prefer_builds and dockerfile.is_file()):
        return HarborImage(image, None, workdir, workdir, service.environment)
    if not dockerfile.is_file():
        found.wrong(
            "there is no Dockerfile, and no `docker_image` in task.toml", ("environment",), file=dockerfile
        )
        return HarborImage(place=workdir, workdir=workdir)
    if not dockerfile.resolve().is_relative_to(place.resolve()) or not context.resolve().is_relative_to(
        place.resolve()
    ):
        found.refuse("an image is built of the folder environment/ alone", file=composes[0] if composes else None)
        return HarborImage(place=workdir, workdir=workdir)
    build = ImageBuild(
        context.absolute(),
        dockerfile.absolute(),
        tuple(sorted(service.args.items())),
        service.target,
        config.environment.build_timeout_sec,
        settings.max_context_bytes,
    )
    try:
        facts = read_dockerfile(dockerfile.read_text(encoding="utf-8"), service.target)
        if facts.stages == 0:
            found.wrong("it has no FROM", file=dockerfile, line=1)
        name = build.tag()
    except (ContextProblem, OSError, UnicodeDecodeError) as error:
        found.wrong(str(error), file=dockerfile)
        return HarborImage(place=workdir, workdir=workdir)
    return HarborImage(name, build, workdir, workdir or facts.workdir, service.environment)
