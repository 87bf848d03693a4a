"""Tests that fetch something when they judge: rehearsed once with a network, they judge without one."""

from __future__ import annotations

import io
import os
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from harbor_support import harbor_folder, loaded, told
from typer.testing import CliRunner, Result

from engine_gateway import FileServer
from turnstile.cli.app import app
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task

REHEARSE = TaskSettings(rehearse_tests=True)
FETCHES = 'curl "{origin}/checker" -o "$HOME/checker"\nsh "$HOME/checker"\n'
CHECKER = 'if [ -e done.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\necho "judged in $PWD"\n'
DOCKERFILE = r"""FROM {base}
WORKDIR /app
COPY curl /usr/bin/curl
RUN mkdir deep && echo a > deep/.hidden && ln -s deep/.hidden link && chown -R 12:34 deep && chmod 700 deep
"""
CURL = """#!/usr/bin/env python3
import sys, urllib.request
_, url, _, file = sys.argv
body = urllib.request.urlopen(url, timeout=5).read()
open(file, "wb").write(body)
"""


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    made = docker.from_env(timeout=60)
    yield made
    made.close()


def folder_of(path: Path, origin: str, base: str) -> Path:
    changes = {
        "environment/Dockerfile": DOCKERFILE.format(base=base),
        "environment/curl": CURL,
        "tests/test.sh": f"#!/bin/bash\n{FETCHES.format(origin=origin)}",
    }
    made = harbor_folder(path, changes)
    (made / "environment" / "curl").chmod(0o755)
    return made


def turnstile(*arguments: str) -> Result:
    return CliRunner(env={"TURNSTILE_TASKS__REHEARSE_TESTS": "true"}).invoke(app, ["tasks", *arguments])


def work_folder(engine: docker.DockerClient, image: str) -> list[tuple[object, ...]]:
    """All that a diff of works looks at, of each file."""
    container = engine.containers.create(image, "true")
    try:
        parts, _ = container.get_archive("/app")
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as packed:
            return sorted(
                (m.name, m.type, m.mode, m.uid, m.gid, m.size, m.linkname, 0 if m.issym() else m.mtime)
                for m in packed
            )
    finally:
        container.remove()


@pytest.mark.docker
def test_tests_that_fetched_once_judge_without_a_network_and_leave_the_agents_image_as_it_is(
    tmp_path: Path, engine: docker.DockerClient
) -> None:
    place = tmp_path / "served"
    place.mkdir()
    (place / "checker").write_text(CHECKER)
    base = f"turnstile-harbor-test:{uuid.uuid4().hex}"
    engine.images.get(os.environ["TURNSTILE_TEST_IMAGE"]).tag(base)
    made = [base]
    try:
        with FileServer(place).serving() as server:
            folder = folder_of(tmp_path / "fetches", server.origin, base)
            (task,), problems = loaded(folder, REHEARSE)
            assert problems == []
            assert task.image is not None
            assert task.script is not None
            assert task.script.image is not None
            made += [task.image, task.script.image]
            built = turnstile("build", str(folder))
            assert built.exit_code == 0, built.output
            assert server.asked == ["/checker"]
            assert "judged in /app" in built.stderr
            assert turnstile("build", str(folder)).exit_code == 0
            assert server.asked == ["/checker"]
        proof = turnstile("validate", str(folder), "--sandbox", "docker")
        assert proof.exit_code == 0, proof.output
        assert work_folder(engine, task.image) == work_folder(engine, task.script.image)
        seen = engine.containers.run(task.image, ["sh", "-c", "ls /opt /tests || true"], remove=True)
        assert b"turnstile" not in seen
    finally:
        for name in reversed(made):
            engine.images.remove(name, force=True)


def rehearsed(tmp_path: Path, changes: dict[str, str | None], **settings: object) -> Task:
    folder = harbor_folder(tmp_path, changes)
    (task,), problems = loaded(folder, TaskSettings(rehearse_tests=True, **settings))  # type: ignore[arg-type]
    assert problems == []
    return task


def test_only_tests_that_fetch_have_an_image_of_their_own_named_by_their_content(tmp_path: Path) -> None:
    plain = rehearsed(tmp_path / "plain", {}).script
    assert plain is not None
    assert plain.image is None
    fetches = {"tests/test.sh": "uvx pytest\n"}
    one = rehearsed(tmp_path / "one", fetches).script
    same = rehearsed(tmp_path / "same", fetches).script
    other = rehearsed(tmp_path / "other", {**fetches, "tests/a.py": ""}).script
    assert one is not None
    assert same is not None
    assert other is not None
    assert one.image == same.image != other.image
    assert one.env["UV_OFFLINE"] == "1"
    based = rehearsed(tmp_path / "based", {**fetches, "environment/Dockerfile": "FROM b\nWORKDIR /app\n"}).script
    assert based is not None
    assert based.image != one.image


def test_variables_of_the_task_win_over_those_of_the_rehearsal(tmp_path: Path) -> None:
    config = '[verifier]\n[verifier.env]\nPIP_NO_INDEX = "0"\n'
    script = rehearsed(tmp_path, {"task.toml": config, "tests/test.sh": "pip install x\n"}).script
    assert script is not None
    assert script.env["PIP_NO_INDEX"] == "0"


def test_a_rehearsal_helps_with_nothing_but_a_network(tmp_path: Path) -> None:
    folder = harbor_folder(tmp_path, {"tests/test.sh": "uvx pytest\ncat /etc/passwd\n"})
    assert [line.split(" ")[0] for line in told(folder, REHEARSE)] == ["tests/test.sh:2:"]
    assert len(told(folder)) == 2
    large = harbor_folder(tmp_path / "large", {"tests/test.sh": "uvx pytest\n" + "#" * 3000})
    assert "tasks.max_context_bytes" in "".join(
        told(large, TaskSettings(rehearse_tests=True, max_context_bytes=2048))
    )
