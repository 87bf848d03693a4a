"""The images of tasks in a real engine: built once for a content, again for another base, or told why not."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import docker
import pytest
from harbor_support import harbor_folder, loaded
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile_server.errors import TaskFailed
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.images import DOCKER, OCI, ImageBuildFailed, ImageUnusable, TaskImages
from turnstile_server.tasks.model import Task

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    made = docker.from_env(timeout=60)
    yield made
    made.close()


@pytest.fixture
def base(engine: docker.DockerClient) -> Iterator[str]:
    """A name of the test image that no other test has."""
    name = f"turnstile-harbor-test:{uuid.uuid4().hex}"
    engine.images.get(os.environ["TURNSTILE_TEST_IMAGE"]).tag(name)
    yield name
    engine.images.remove(name, force=True)


@pytest.fixture
async def images() -> AsyncIterator[TaskImages]:
    lines: list[str] = []
    made = TaskImages(SandboxSettings(), may_build=True, report=lambda task, line: lines.append(line))
    made.lines = lines  # type: ignore[attr-defined]
    yield made
    await made.close()


@pytest.fixture
def remove(engine: docker.DockerClient) -> Iterator[list[str]]:
    """Images that the test made."""
    names: list[str] = []
    yield names
    for name in names:
        engine.images.remove(name, force=True)


def a_task(folder: Path, dockerfile: str, config: str | None = None) -> Task:
    changes = {"environment/Dockerfile": dockerfile}
    if config is not None:
        changes["task.toml"] = config
    (task,), problems = loaded(harbor_folder(folder, changes))
    assert problems == []
    return task


def an_image(name: str, architecture: str) -> bytes:
    """What `docker save` gives of an image with one empty layer."""
    layer = tar({})
    digest = hashlib.sha256(layer).hexdigest()
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    config = {"architecture": architecture, "os": "linux", "config": {}, "rootfs": rootfs}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return tar(
        {
            "layer.tar": layer,
            "config.json": json.dumps(config).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }
    )


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def test_an_image_is_built_once_however_many_ask_and_again_when_its_base_is_another(
    tmp_path: Path, base: str, images: TaskImages, engine: docker.DockerClient, remove: list[str]
) -> None:
    task = a_task(tmp_path, f"FROM {base}\nWORKDIR /app\nCOPY Dockerfile /app/\n")
    assert task.image is not None
    assert task.build is not None
    size = sum((task.build.context / name).stat().st_size for name in task.build.files())
    task = task.model_copy(update={"build": replace(task.build, max_bytes=size)})  # as much as it may have
    assert task.image is not None
    remove.append(task.image)
    built: list[bool] = []

    async def ask() -> None:
        found = await images.ensure(task, DOCKER)
        assert found is not None
        built.append(found.built)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
    await ask()
    assert sorted(built) == [False, False, False, True]
    assert any("COPY Dockerfile" in line for line in images.lines)  # type: ignore[attr-defined]
    changed = engine.containers.create(base, "true")
    changed.commit(*base.split(":"))
    changed.remove()
    await ask()
    await ask()
    assert built[4:] == [True, False]


@pytest.mark.parametrize(
    ("more", "config", "said"),
    [
        ("RUN echo before && exit 7\n", None, "returned a non-zero code: 7"),
        ("COPY missing /app/\n", None, "missing"),
        ("RUN sleep 30\n", "[environment]\nbuild_timeout_sec = 1.0\n", "it took longer than 1 s"),
    ],
    ids=["a command fails", "a file is missing", "out of time"],
)
async def test_a_build_that_fails_is_told_with_its_file_and_its_last_lines(
    tmp_path: Path, base: str, images: TaskImages, more: str, config: str | None, said: str
) -> None:
    task = a_task(tmp_path, f"FROM {base}\nWORKDIR /app\n{more}", config)
    with pytest.raises(ImageBuildFailed) as told:
        await images.ensure(task, DOCKER)
    assert said in told.value.message
    assert f"{tmp_path}/environment/Dockerfile" in told.value.message
    if "echo" in more:
        assert "\n  before" in told.value.message


async def test_a_folder_that_has_changed_since_the_start_is_not_built_under_the_old_name(
    tmp_path: Path, base: str, images: TaskImages, engine: docker.DockerClient
) -> None:
    task = a_task(tmp_path, f"FROM {base}\nCOPY . /app/\n")
    assert task.image is not None
    assert task.build is not None
    (task.build.context / "later").write_text("x" * 2000)
    with pytest.raises(ImageBuildFailed, match="has changed since its task was loaded"):
        await images.ensure(task, DOCKER)
    narrow = task.model_copy(update={"build": replace(task.build, max_bytes=1500)})
    with pytest.raises(ImageBuildFailed, match=r"larger than 1500 bytes \(tasks\.max_context_bytes\)"):
        await images.ensure(narrow, DOCKER)
    assert not engine.images.list(task.image)


async def test_a_build_that_fails_fails_for_all_who_wait_for_it(
    tmp_path: Path, base: str, images: TaskImages
) -> None:
    task = a_task(tmp_path, f"FROM {base}\nWORKDIR /app\nRUN echo tried && sleep 1 && exit 3\n")
    failed: list[str] = []

    async def ask() -> None:
        with pytest.raises(ImageBuildFailed) as told:
            await images.ensure(task, DOCKER)
        failed.append(told.value.message)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
    assert len(failed) == 3
    assert images.lines.count("tried") == 1  # type: ignore[attr-defined]
    await ask()
    assert images.lines.count("tried") == 2, "who comes later tries again"  # type: ignore[attr-defined]


async def test_a_build_again_takes_nothing_from_the_cache(
    tmp_path: Path, base: str, images: TaskImages, remove: list[str]
) -> None:
    ran = uuid.uuid4().hex  # of no earlier run of this test
    task = a_task(tmp_path, f"FROM {base}\nWORKDIR /app\nRUN echo {ran}\n")
    assert task.image is not None
    remove.append(task.image)
    for again in (False, True):
        await images.ensure(task, DOCKER, again=again)
    assert images.lines.count(ran) == 2  # type: ignore[attr-defined]


async def test_look_ups_have_places_while_images_are_built(tmp_path: Path, base: str, remove: list[str]) -> None:
    slow = a_task(
        tmp_path / "slow", f"FROM {base}\nWORKDIR /app\nRUN echo slow && sleep 3 && echo {uuid.uuid4()}\n"
    )
    there = a_task(tmp_path / "there", "", f'[environment]\ndocker_image = "{base}"\n')
    assert slow.image is not None
    remove.append(slow.image)
    began = threading.Event()
    made = TaskImages(
        SandboxSettings(docker_parallel=1),
        may_build=True,
        report=lambda task, line: began.set() if line == "slow" else None,
    )
    ended: list[str] = []

    async def ask(task: Task) -> None:
        assert await made.ensure(task, DOCKER) is not None
        ended.append(task.id)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, slow)
            await anyio.to_thread.run_sync(began.wait)
            await ask(there)
    finally:
        await made.close()
    assert ended == ["there", "slow"]


async def test_an_image_that_is_missing_or_foreign_is_told(
    tmp_path: Path, images: TaskImages, engine: docker.DockerClient, remove: list[str]
) -> None:
    gone = a_task(tmp_path / "gone", "", '[environment]\ndocker_image = "turnstile-harbor-test:gone"\n')
    with pytest.raises(ImageUnusable, match="Docker has no image turnstile-harbor-test:gone"):
        await images.ensure(gone, DOCKER)
    assert await images.ensure(gone, OCI) is None  # fetched with its first sandbox
    with pytest.raises(ImageUnusable, match="built from a Dockerfile, which needs Docker"):
        await images.ensure(a_task(tmp_path / "built", "FROM scratch\n", ""), OCI)
    foreign = f"turnstile-harbor-test:{uuid.uuid4().hex}"
    remove.append(foreign)
    other = "s390x" if engine.version()["Arch"] != "s390x" else "amd64"
    engine.images.load(an_image(foreign, other))
    task = a_task(tmp_path / "foreign", "", f'[environment]\ndocker_image = "{foreign}"\n')
    with pytest.raises(ImageUnusable, match=f"is for {other}; this engine runs"):
        await images.ensure(task, DOCKER)


async def test_nothing_is_built_where_it_may_not_be_and_nothing_asked_where_sandboxes_are_not_dockers(
    tmp_path: Path,
) -> None:
    task = a_task(tmp_path, "FROM turnstile-harbor-test:none\nWORKDIR /app\n")
    images = TaskImages(SandboxSettings(), may_build=False)
    try:
        assert await images.ensure(task, "local") is None
        with pytest.raises(ImageUnusable, match="turnstile tasks build"):
            await images.ensure(task, DOCKER)
    finally:
        await images.close()
    assert issubclass(ImageUnusable, TaskFailed)


async def test_the_command_shows_what_it_built_and_fails_for_what_it_could_not(
    tmp_path: Path, base: str, remove: list[str]
) -> None:
    good = a_task(tmp_path / "set" / "good", f"FROM {base}\nWORKDIR /app\nCOPY Dockerfile /app/\n")
    a_task(tmp_path / "set" / "bad", f"FROM {base}\nRUN exit 4\nWORKDIR /app\n")
    assert good.image is not None
    remove.append(good.image)
    done = await anyio.to_thread.run_sync(CliRunner().invoke, app, ["tasks", "build", str(tmp_path / "set")])
    assert done.exit_code == 1
    assert "good: Step 3/" in done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if line.strip().startswith("good")] == ["built"]
    assert "the image of task bad cannot be built" in done.stderr
