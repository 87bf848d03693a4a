"""The images of tasks: there and of this machine's architecture, or built from the folder that the task brings.

A build is a step of its own, trusted and with a network: of the operator's command, of a task's proof, and, with
``tasks.build_images``, before the first episode that needs it; never of a grading. What must hold: the same
content is built once, however many ask for it at once, and fails once; an image has the name of the content that
it was built of, also where its folder has changed since the tasks were loaded; an image is built again when one
that it starts from is another than it was; only Docker is asked, and only where sandboxes are Docker's. Sandboxes
of images without an engine fetch theirs themselves, and cannot build.
"""

from __future__ import annotations

import logging
import tarfile
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import anyio
import docker
from docker.errors import APIError

from turnstile_server.errors import TaskFailed, TurnstileError
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.dockerfile import read_dockerfile
from turnstile_server.tasks.image_build import ContextProblem, ImageBuild
from turnstile_server.tasks.model import Task

_LOG = logging.getLogger(__name__)


class ImageUnusable(TaskFailed):
    """The image of a task is missing, or made for another processor."""

    type = "image_unusable"


class ImageBuildFailed(ImageUnusable):
    """The image of a task cannot be built."""

    type = "image_build_failed"


BASES_LABEL = "turnstile.bases"
"""Ids of the images that an image was built from."""
DOCKER, LOCAL, OCI = "docker", "local", "oci"
"""Names of backends: of the one that is asked here, of the one without images, of the one that fetches its own."""
_SHOWN = 500
"""Characters of what an image was to be made of, in its error."""
_DOCKERFILE = ".turnstile.Dockerfile"
"""Its name in what goes to the engine, so that a Dockerfile may lie outside the folder that it copies from."""
_TAIL = 20
_GRACE_S = 30.0
_NAMED = 5
"""Tasks that a warning names."""

Report = Callable[[Task, str], None]


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image that is there."""

    name: str
    image_id: str
    size: int
    built: bool
    """Now; False: it was there."""


class TaskImages:
    """Owns a connection to the engine, from the first image that is asked for until ``close``.

    ``may_build``: build what is missing. ``report``: called with each line of a build's progress, from a thread.
    """

    def __init__(self, settings: SandboxSettings, *, may_build: bool, report: Report | None = None) -> None:
        self._settings = settings
        self._may_build = may_build
        self._report = report or _log
        self._engine: DockerEngine | None = None
        self._builder: DockerEngine | None = None
        """An engine for builds alone: they last for minutes, and would hold the places of look-ups."""
        self._building = anyio.CapacityLimiter(settings.docker_parallel)
        self._architecture = ""
        self._opening = anyio.Lock()
        self._builds: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._failures: dict[str, TurnstileError] = {}
        """The error of an image's last failed build, by image name."""

    async def ensure(self, task: Task, backend: str, *, again: bool = False) -> ReadyImage | None:
        """The task's image, once that in which its script judges is there, too; None where it names none, or
        ``backend``, the kind of the sandboxes, is not Docker. ``again``: build also what is there. Raises
        ImageUnusable, ImageBuildFailed, SandboxUnavailable."""
        builds = (task.build, None if task.script is None else task.script.build)
        if backend == OCI and builds != (None, None):
            raise ImageUnusable(
                f"the image of task {task.id} is built from a Dockerfile, which needs Docker (turnstile tasks "
                "build): copy it to a registry, and name it in the task"
            )
        if task.image is None or backend != DOCKER:
            return None
        engine = await self._connected()
        ready = await self._ready(engine, task, task.image, task.build, again=again)
        script = task.script
        if script is not None and script.image is not None:  # which may start from the task's
            await self._ready(engine, task, script.image, script.build, again=again)
        return ready

    async def close(self) -> None:
        for engine in (self._engine, self._builder):
            if engine is not None:
                engine.close()
        self._engine = self._builder = None

    async def _ready(
        self, engine: DockerEngine, task: Task, name: str, build: ImageBuild | None, *, again: bool
    ) -> ReadyImage:
        built = False
        if build is not None:
            before = self._failures.get(name)
            async with self._builds[name]:
                failed = self._failures.get(name)
                if failed is not None and failed is not before:  # that of the build that this one has waited for
                    raise failed
                if again or not await self._is_fresh(engine, task, name, build):
                    try:
                        await self._build(engine, task, name, build, again=again)
                    except TurnstileError as error:
                        self._failures[name] = error
                        raise
                    built = True
        image = await engine.image(name)
        if image is None:
            raise ImageUnusable(f"Docker has no image {name}, which task {task.id} names: docker pull {name}")
        if image.architecture != self._architecture:
            raise ImageUnusable(
                f"the image {name} of task {task.id} is for {image.architecture}; this engine runs "
                f"{self._architecture}"
            )
        return ReadyImage(name, image.image_id, image.size, built)

    async def _connected(self) -> DockerEngine:
        async with self._opening:
            if self._engine is None:
                engine = DockerEngine(self._settings)
                await engine.open()
                self._architecture = await engine.call(lambda api: str(api.version()["Arch"]), "describe itself")
                self._engine, self._builder = engine, DockerEngine(self._settings)
                await self._builder.open()
            return self._engine

    async def _is_fresh(self, engine: DockerEngine, task: Task, name: str, build: ImageBuild) -> bool:
        """True if the image is there and was made from the base images that are there now."""
        image = await engine.image(name)
        return image is not None and dict(image.labels).get(BASES_LABEL) == await self._bases(engine, task, build)

    async def _bases(self, engine: DockerEngine, task: Task, build: ImageBuild) -> str:
        try:
            text = await anyio.to_thread.run_sync(build.dockerfile.read_text)
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(task, error) from error
        found = [await engine.image(name) for name in read_dockerfile(text, build.target, dict(build.args)).bases]
        return ",".join("" if image is None else image.image_id for image in found)

    async def _build(self, engine: DockerEngine, task: Task, name: str, build: ImageBuild, *, again: bool) -> None:
        if not self._may_build:
            raise ImageUnusable(
                f"the image of task {task.id} is not built: turnstile tasks build SOURCE (or tasks.build_images)"
            )
        bases = await self._bases(engine, task, build)
        await self._run(task, name, build, bases, cached=not again)
        if not bases.strip(","):  # the engine may have fetched them
            bases = await self._bases(engine, task, build)
            if bases.strip(","):  # once more, from its cache, with the ids that are known now
                await self._run(task, name, build, bases, cached=True)

    async def _run(self, task: Task, name: str, build: ImageBuild, bases: str, *, cached: bool) -> None:
        builder = self._builder
        assert builder is not None  # opened with the other engine
        try:
            context = await anyio.to_thread.run_sync(_packed, build, name)
        except (ContextProblem, OSError) as error:
            raise _unreadable(task, error) from error
        run = _Build(task, name, build, {BASES_LABEL: bases}, self._report, cached=cached)
        try:
            async with self._building:
                with anyio.fail_after(build.timeout_s):
                    await builder.call(
                        lambda api: run.run(api, context), "build an image", timeout_s=build.timeout_s + _GRACE_S
                    )
        except TimeoutError:
            raise run.failed(f"it took longer than {build.timeout_s:g} s ({build.timeout_field})") from None
        finally:
            run.gone = True


class _Build:
    """One build, as it goes on in a thread. ``gone``: its caller is, so it stops at the next line, or after the
    time of a whole build without one. A server that stops does not wait for it: the engine drops the build with
    the connection, which ends with the process at the latest."""

    def __init__(
        self, task: Task, name: str, build: ImageBuild, labels: dict[str, str], report: Report, *, cached: bool
    ) -> None:
        self._task, self._name, self._build, self._labels, self._report = task, name, build, labels, report
        self._cached = cached
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self.gone = False

    def run(self, api: docker.APIClient, context: IO[bytes]) -> None:
        """Closes ``context``. Raises ImageBuildFailed."""
        try:
            with context:
                events = api.build(
                    fileobj=context,
                    custom_context=True,
                    dockerfile=_DOCKERFILE,
                    tag=self._name,
                    buildargs=dict(self._build.args),
                    target=self._build.target or "",
                    labels=self._labels,
                    nocache=not self._cached,
                    rm=True,
                    forcerm=True,
                    decode=True,
                    timeout=max(1, round(self._build.timeout_s)),
                )
            for event in events:
                if self.gone:
                    events.close()
                    return
                self._take(event)
        except APIError as error:
            raise self.failed(str(error.explanation or error)) from error

    def _take(self, event: dict[str, object]) -> None:
        for line in str(event.get("stream", event.get("status", ""))).splitlines():
            if line.strip():
                self._lines.append(line.rstrip())
                self._report(self._task, line.strip())
        if "error" in event:
            raise self.failed(str(event["error"]))

    def failed(self, why: str) -> ImageBuildFailed:
        said = "".join(f"\n  {line}" for line in self._lines)
        return ImageBuildFailed(
            f"the image of task {self._task.id} cannot be built: {str(self._build)[:_SHOWN]}: {why.strip()}{said}"
        )


def image_warning(tasks: TaskCatalog, backend: str) -> str | None:
    """What to tell at start where ``backend`` has no images, and tasks are in some."""
    lost = tasks.with_images if backend == LOCAL else ()
    if not lost:
        return None
    named = ", ".join(lost[:_NAMED]) + (", …" if len(lost) > _NAMED else "")
    return (
        f"local sandboxes have no images (sandboxes.kind: docker, or oci): episodes of {len(lost)} tasks will "
        f"fail, because these name one or are set up as root: {named}"
    )


def _unreadable(task: Task, error: Exception) -> ImageBuildFailed:
    return ImageBuildFailed(f"the image of task {task.id} cannot be built: {error}")


def _packed(build: ImageBuild, image: str) -> IO[bytes]:
    """The folder as a tar, in a file without a name. Raises ContextProblem, OSError; also where the folder has not
    the content any more that ``image`` is named after."""
    out = tempfile.TemporaryFile()  # noqa: SIM115 - who sends it closes it
    try:
        _pack(build, out)
        if build.tag() != image:
            raise ContextProblem(
                f"{build.context} has changed since its task was loaded, and {image} is the name of what it had: "
                "start the server again"
            )
    except BaseException:
        out.close()
        raise
    out.seek(0)
    return out


def _pack(build: ImageBuild, out: IO[bytes]) -> None:
    """Sorted, without owners and times, so that the engine's cache knows it again."""
    total = 0
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _members(build):
            info = archive.gettarinfo(path, name)
            if name != _DOCKERFILE:
                total += info.size
                build.check_size(total)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = 0
            info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
            if info.isreg():
                with path.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)


def _members(build: ImageBuild) -> Iterator[tuple[str, Path]]:
    for name in build.files():
        yield name, build.context / name
    yield _DOCKERFILE, build.dockerfile


def _log(task: Task, line: str) -> None:
    _LOG.info("image of %s: %s", task.id, line)
