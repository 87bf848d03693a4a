"""What is read off a Dockerfile: base images, work folder, stages; or that it cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from harbor_support import harbor_folder, loaded

from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.dockerfile import DockerfileFacts, read_dockerfile
from turnstile_server.tasks.images import DOCKER, ImageBuildFailed, TaskImages


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("FROM a:1\n", DockerfileFacts(("a:1",), None, 1)),
        ("# c\nfrom a as x\nWORKDIR /w\nworkdir sub\n", DockerfileFacts(("a",), "/w/sub", 1)),
        ("FROM a AS one\nWORKDIR /w\nFROM b\nCOPY --from=one / /\n", DockerfileFacts(("a", "b"), None, 2)),
        ("FROM a AS one\nWORKDIR /w\nFROM one\nRUN true\n", DockerfileFacts(("a",), "/w", 2)),
        ("FROM --platform=linux/arm64 a\nWORKDIR \\\n  /w\n", DockerfileFacts(("a",), "/w", 1)),
        ("ARG V\nFROM a:$V\nWORKDIR $HOME\n", DockerfileFacts((), None, 1)),
        ("FROM scratch\nWORKDIR '/w x'\n", DockerfileFacts((), "/w x", 1)),
        ("RUN true\n", DockerfileFacts((), None, 0)),
    ],
)
def test_a_dockerfile_says(text: str, facts: DockerfileFacts) -> None:
    assert read_dockerfile(text) == facts


def test_a_stage_that_is_built_ends_the_reading() -> None:
    text = "FROM a AS one\nWORKDIR /one\nFROM b AS two\nWORKDIR /two\n"
    assert read_dockerfile(text, "one").workdir == "/one"
    assert read_dockerfile(text, "two").workdir == "/two"


class _Engine:
    """Has every image, made of other bases."""

    async def image(self, name: str) -> Image:
        return Image("sha256:0", volumes=(), path="", architecture="amd64")


@pytest.mark.anyio
async def test_a_dockerfile_that_has_gone_since_the_start_is_an_error_of_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(_: TaskImages) -> _Engine:
        return _Engine()

    monkeypatch.setattr(TaskImages, "_connected", connected)
    (task,), _ = loaded(harbor_folder(tmp_path / "a"))
    (tmp_path / "a" / "environment" / "Dockerfile").unlink()
    with pytest.raises(ImageBuildFailed, match=r"the image of task a cannot be built: .*Dockerfile"):
        await TaskImages(SandboxSettings(), may_build=True).ensure(task, DOCKER)
