"""Grading in images without Python: our programs run on the carried one, tests in Python need the image's own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from bare_images import BUSYBOX, busybox, image_of, import_image
from docker_support import docker_provider, engine
from grading_support import NO_AGENTS, SANDBOXES, grader, tar, the_task

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Work
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.tasks.model import Task

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

OLD = "turnstile-test:any-old-python"
OWN_FILES = "turnstile-test:any-own-files"
OLD_PYTHON = b"#!/bin/sh\necho 3.6\nexit 1\n"
CHECK = 'test "$("$AS_WORK" sh say.sh)" = right\n'


@asynccontextmanager
async def started(image: str) -> AsyncIterator[DockerProvider]:
    run_dir = Path(tempfile.mkdtemp(prefix="tg-"))
    provider = docker_provider(SANDBOXES, run_dir, image, carried=True)
    try:
        async with BackgroundTasks() as tasks:
            try:
                await provider.start(NO_AGENTS, tasks)
                yield provider
            finally:
                await provider.close()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def shell_task(trust: str) -> Task:
    tests = {
        "files": {"inline": {"check.sh": CHECK if trust == "boundary" else CHECK.replace('"$AS_WORK" ', "")}},
        "runner": "command",
        "command": ["sh", "{tests}/check.sh"],
        "trust": trust,
    }
    base = {"inline": {"say.sh": "echo wrong\n"}}
    return Task.model_validate({"id": "say", "instruction": "Say right.", "base": base, "tests": tests})


async def test_a_command_judges_right_and_wrong_work_in_an_image_without_python() -> None:
    async with started(image_of(BUSYBOX)) as provider:
        grading = grader(provider)
        for trust in ("boundary", "in_process"):
            task = shell_task(trust)
            right = await grading.grade(task, Work(archive=tar({"say.sh": "echo right\n"})))
            empty = await grading.grade(task, Work(archive=tar({"say.sh": "echo wrong\n"})))
            assert (right.reward, empty.reward) == (1.0, 0.0)


async def test_tests_in_python_are_refused_by_name_in_an_image_without_one_and_never_scored() -> None:
    async with started(image_of(BUSYBOX)) as provider:
        with pytest.raises(TaskFailed, match=r"`runner: unittest` needs python3 in the image, 3\.9.*has none"):
            await grader(provider).grade(the_task(), Work(archive=tar({"a": "b"})))


async def test_tests_in_python_are_refused_by_its_version_where_it_is_too_old() -> None:
    if not engine().images.list(OLD):
        import_image(OLD, {**busybox(), "bin/python3": OLD_PYTHON}, ["ENV PATH=/bin"])
    async with started(OLD) as provider:
        with pytest.raises(TaskFailed, match=r"in the image, 3\.9 or later, which has 3\.6; use another"):
            await grader(provider).grade(the_task(), Work(archive=tar({"a": "b"})))


async def test_a_work_is_compared_with_files_that_only_the_image_has() -> None:
    """The image has no Python either."""
    if not engine().images.list(OWN_FILES):
        own: dict[str, bytes | str] = {"data/own.txt": b"image\n", "data/kept.txt": b"kept\n"}
        import_image(OWN_FILES, busybox() | own, ["ENV PATH=/bin"])
    fields = {"id": "own", "instruction": "x", "image": OWN_FILES, "workdir": "/data", "image_files": True}
    async with started(OWN_FILES) as provider:
        archive = tar({"own.txt": "work\n", "kept.txt": "kept\n"})
        found = await grader(provider).diff("ep_1", Task.model_validate(fields), archive, ())
    changes = {one.path: (one.change, one.diff) for one in found.files}
    assert changes["own.txt"] == ("modified", "--- a/own.txt\n+++ b/own.txt\n@@ -1 +1 @@\n-image\n+work\n")
    assert changes["kept.txt"] == ("mode", None)  # the image's are programs
