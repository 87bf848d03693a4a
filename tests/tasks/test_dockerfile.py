"""What is read off a Dockerfile: base images, work folder, stages."""

from __future__ import annotations

import pytest

from turnstile_server.tasks.dockerfile import DockerfileFacts, read_dockerfile


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
