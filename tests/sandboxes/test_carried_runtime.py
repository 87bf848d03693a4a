"""Sandboxes with the carried runtime in images that have no Python, no glibc, another user: everything works."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bare_images import BUSYBOX, MUSL, busybox, image_of, import_image
from docker_support import container_of, docker_provider, engine, python_image
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.containers import can_carry
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, Sandbox, User
from turnstile_server.settings import SandboxSettings

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

SEEN_FROM_INSIDE = """
import ctypes, os, ssl, sqlite3, subprocess, sys
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(sorted(path for path in maps if not path.startswith("/turnstile/python/lib/")))
print(sys.executable, os.readlink("/proc/self/exe"), os.getuid() != 0, bool(ctypes.CDLL(None).getpid()))
print(subprocess.run([sys.executable, "-Ic", "print(1)"], capture_output=True).stdout)
"""
GET = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1] + '/e/one/mcp').read().decode())"


@asynccontextmanager
async def provider_of(run_dir: Path, image: str, transport: str = "bind") -> AsyncIterator[DockerProvider]:
    settings = SandboxSettings(docker_transport=transport, docker_python="carried")
    provider = docker_provider(settings, run_dir, image, carried=True)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


async def ran(sandbox: Sandbox, *argv: str, user: User = User.AGENT) -> str:
    done = await sandbox.exec(Command(argv, user=user, timeout_s=60))
    assert done.exit_code == 0, done
    return done.stdout.decode()


@pytest.mark.parametrize(("name", "transport"), [(BUSYBOX, "stream"), (MUSL, "bind")])
async def test_a_sandbox_opens_works_and_reaches_the_model_whatever_its_image_is(
    run_dir: Path, name: str, transport: str
) -> None:
    async with provider_of(run_dir, image_of(name), transport) as provider:
        assert provider.carries_runtime
        assert "on a carried Python" in provider.description
        sandbox = await provider.create(SPEC)
        assert isinstance(sandbox, HelperSandbox)
        assert (sandbox.python, sandbox.own_uids, sandbox.filtered, sandbox.can_launch) == (
            PYTHON,
            True,
            True,
            True,
        )
        outside, itself, child = (await ran(sandbox, PYTHON, "-I", "-c", SEEN_FROM_INSIDE)).splitlines()
        assert (outside, itself, child) == ("[]", f"{PYTHON} {PYTHON} True True", "b'1\\n'")
        await sandbox.write("/workspace/folder/file", b"text")
        assert await sandbox.read("/workspace/folder/file", 10) == b"text"
        await sandbox.upload(packed("other", b"more"), "/workspace/folder")
        assert await ran(sandbox, "sh", "-c", "cat folder/*") == "textmore"
        with tarfile.open(fileobj=io.BytesIO(await sandbox.download("/workspace/folder", 1 << 20))) as archive:
            assert {member.name.removeprefix("./") for member in archive if member.isreg()} == {"file", "other"}
        assert sandbox.agent_url is not None
        sandbox.admit("one")
        said = await ran(sandbox, PYTHON, "-I", "-c", GET, sandbox.agent_url, user=User.HARNESS)
        assert said.strip() == "GET /e/one/mcp 0"


async def test_commands_get_nothing_of_it_and_cannot_change_it(run_dir: Path) -> None:
    async with provider_of(run_dir, image_of(BUSYBOX)) as provider:
        sandbox = await provider.create(SPEC)
        variables = [line.partition("=")[0] for line in (await ran(sandbox, "env")).splitlines()]
        assert not [name for name in variables if name.startswith(("PYTHON", "LD_", "SSL_"))]
        assert (await sandbox.exec(Command(("python3", "-c", "1")))).exit_code == 127
        for path in ("/turnstile/python/bin/python3", "/turnstile/python/lib"):
            denied = await sandbox.exec(Command(("rm", "-r", path)))
            assert b"Read-only file system" in denied.stderr


async def test_an_images_own_python_stays_its_own(run_dir: Path) -> None:
    async with provider_of(run_dir, python_image()) as provider:
        sandbox = await provider.create(SPEC)
        said = await ran(sandbox, "python3", "-c", "import sys, ssl; print(sys.prefix, sys.executable, sys.path)")
        assert "/turnstile" not in said


async def test_a_tree_of_the_image_is_given_to_the_agent(run_dir: Path) -> None:
    name = "turnstile-test:any-tree"
    if not engine().images.list(name):
        import_image(name, {**busybox(), "srv/work/own.txt": b"own\n"}, ["ENV PATH=/bin"])
    async with provider_of(run_dir, name) as provider:
        sandbox = await provider.create(replace(SPEC, workdir="/srv/work", image_files=True))
        assert await ran(sandbox, "sh", "-c", "touch new && cat own.txt") == "own\n"


async def test_its_folder_is_mounted_read_only_and_an_images_libraries_are_not_named_to_it(run_dir: Path) -> None:
    async with provider_of(run_dir, image_of(MUSL)) as provider:
        container = container_of((await provider.create(SPEC)).sandbox_id)
        assert container.attrs["Config"]["Entrypoint"][0] == PYTHON
        read_only = {mount["Destination"] for mount in container.attrs["Mounts"] if not mount["RW"]}
        assert {"/turnstile/python", "/turnstile/helper"} <= read_only
        assert "LD_LIBRARY_PATH=/usr/lib:/lib" not in container.attrs["Config"]["Env"]


@pytest.mark.parametrize(("architecture", "carried"), [("amd64", True), ("arm64", False)])
def test_only_images_for_its_machine_get_it(architecture: str, carried: bool) -> None:
    assert can_carry(Image("sha256:1", (), "/bin", architecture)) is carried


def packed(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return made.getvalue()
