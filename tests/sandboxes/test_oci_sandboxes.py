"""Images without a container engine: fetched from a real registry, archives and Apptainer's files, run in
bubblewrap, kept and removed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from docker_support import engine, python_image
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from local import TURNSTILE
from turnstile_server.backends import runtimes_of
from turnstile_server.errors import Fault, SandboxUnavailable, StartupError, TaskFailed, TurnstileError
from turnstile_server.runtimes.install_folder import default_install_dir
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.oci import store as image_store
from turnstile_server.sandboxes.oci.provider import OciProvider
from turnstile_server.sandboxes.oci.store import ImageStore
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR, Command, ProviderSetup, Sandbox, User
from turnstile_server.settings import SandboxSettings, Settings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

OWNER = 777
"""Whose the image's files are; no user of a sandbox's."""
GET = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1] + "/e/one/mcp").read().decode())
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The test image of Docker's with a work folder, as an archive of `docker save`."""
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as packed:
        for name, kind in (("testbed", tarfile.DIRTYPE), ("testbed/sub", tarfile.DIRTYPE), ("testbed/sub/a", b"")):
            member = tarfile.TarInfo(name)
            member.uid = member.gid = OWNER
            if kind == tarfile.DIRTYPE:
                member.type, member.mode = kind, 0o700
                packed.addfile(member)
            else:
                member.size = 4
                packed.addfile(member, io.BytesIO(b"old\n"))
    container = engine().containers.create(python_image())
    try:
        container.put_archive("/", files.getvalue())
        image = container.commit("turnstile-test", "oci", changes=["WORKDIR /testbed", "ENV OF_IMAGE=yes"])
    finally:
        container.remove()
    path = tmp_path_factory.mktemp("oci") / "image.tar"
    try:
        with path.open("wb") as file:
            file.writelines(image.save(named=True))
    finally:
        engine().images.remove("turnstile-test:oci")
    return f"docker-archive:{path}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that were unpacked by the tests before."""
    return tmp_path_factory.mktemp("cache") / "turnstile" / "images"


@asynccontextmanager
async def started(
    run_dir: Path, image: str, cache: Path, *, as_root: bool | None = None
) -> AsyncIterator[OciProvider]:
    settings = SandboxSettings(kind="oci", docker_image=image)
    setup = ProviderSetup(settings, run_dir, "nobody", runtimes=runtimes_of(Settings()))
    provider = OciProvider(setup, ImageStore(cache), as_root=as_root)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


async def sh(sandbox: Sandbox, script: str, user: User = User.AGENT) -> str:
    done = await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=60))
    return (done.stdout + done.stderr).decode() + ("" if done.exit_code == 0 else f"[{done.exit_code}]")


WORK = replace(SPEC, workdir=IMAGE_WORKDIR, image_files=True)


@pytest.mark.parametrize("as_root", [True, False], ids=["a uid each", "one uid"])
async def test_a_sandbox_has_the_images_files_and_keeps_users_apart(
    run_dir: Path, archive: str, cache: Path, as_root: bool
) -> None:
    async with started(run_dir, archive, cache, as_root=as_root) as provider:
        assert "oci: bubblewrap" in provider.description
        sandbox = await provider.create(replace(SPEC, folders=("/logs",)))
        assert sandbox.users_apart
        assert sandbox.filtered
        assert await sh(sandbox, "cd /; ls -d testbed root; pwd") == "root\ntestbed\n/\n"
        for closed in ("/x", "/usr/bin/x", "/run/x", "/turnstile/x", "/etc/passwd"):
            assert "[1]" in await sh(sandbox, f"touch {closed} || exit 1")
        assert await sh(
            sandbox, "pwd; echo well > x; cat x; echo log > /logs/y; cat /logs/y; touch /tmp/z ~/z"
        ) == ("/workspace\nwell\nlog\n")
        assert await sh(sandbox, "cat /logs/y", User.HARNESS) == "log\n"
        assert "[1]" in await sh(sandbox, f"ls /home/{User.AGENT} && exit 0; exit 1", User.HARNESS) or not as_root
        assert await sh(sandbox, "ls /run/image; echo $OF_IMAGE") != "yes\n"
        sandbox.admit("one")
        assert sandbox.agent_url is not None
        reached = await sandbox.exec(Command((sandbox.python, "-c", GET, sandbox.agent_url), timeout_s=60))
        assert reached.stdout == b"GET /e/one/mcp 0\n", reached
        facts = await provider.image_facts(None)
        assert facts is not None
        assert facts.size > 10 << 20
    assert list_of(run_dir) == []


@pytest.mark.parametrize("as_root", [True, False], ids=["a uid each", "one uid"])
async def test_a_work_folder_of_the_images_own_is_changed_in_one_sandbox_alone(
    run_dir: Path, archive: str, cache: Path, as_root: bool
) -> None:
    async with started(run_dir, archive, cache, as_root=as_root) as provider:
        first, second = await provider.create(WORK), await provider.create(WORK)
        assert await sh(first, "pwd; echo $OF_IMAGE; cat sub/a") == "/testbed\nyes\nold\n"
        assert await sh(first, "echo new > sub/a; echo b > sub/b; mv sub moved; mkdir sub; ls . sub moved") == (
            ".:\nmoved\nsub\n\nmoved:\na\nb\n\nsub:\n"
        )
        assert await sh(first, "cat moved/a; rm -r moved; ls -a") == "new\n.\n..\nsub\n"
        assert await sh(second, "cat sub/a; ls") == "old\nsub\n"
        assert "[1]" in await sh(second, "ls /run/image/etc && exit 0; exit 1")
        assert await sh(second, "head -c 1g /dev/zero > big; echo; rm big; echo well") != ""
    async with started(run_dir, archive, cache, as_root=as_root) as provider:
        assert await sh(await provider.create(WORK), "cat sub/a") == "old\n"


def unpacked_in(cache: Path) -> Path:
    """An image with the owners that it names."""
    return next(path for path in cache.glob("sha256-*/rootfs") if not path.parent.name.endswith("-own"))


def mounted(*command: str) -> None:
    subprocess.run(command, check=True)


def list_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_an_image_is_unpacked_once_kept_while_it_is_used_and_then_makes_room(
    run_dir: Path, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> list[str]:
        return [path.name for path in (tmp_path / "images").glob("sha256-*")]

    path = tmp_path / "images"
    async with started(run_dir, archive, path) as provider:
        await provider.create(SPEC)
        (name,) = kept()
        made = (path / name).stat().st_ino
        monkeypatch.setattr(image_store, "_FREE_SHARE", 1.0)
        ImageStore(path)._make_room()
        assert kept() == [name]
    async with started(run_dir, archive, path) as provider:
        await provider.create(SPEC)
        assert (path / name).stat().st_ino == made
    ImageStore(path)._make_room()
    assert list_of(path) == ["names"]


async def test_a_file_of_apptainers_is_an_image(run_dir: Path, archive: str, cache: Path, tmp_path: Path) -> None:
    async with started(run_dir, archive, cache) as provider:
        await provider.create(SPEC)
    root = unpacked_in(cache)
    script = root / ".singularity.d/env/10-docker2singularity.sh"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\nexport PATH="/usr/bin:/bin"\nexport KEPT="${KEPT:-"of apptainer"}"\n')
    try:
        image = sif(tmp_path / "image.sif", root)
    finally:
        shutil.rmtree(root / ".singularity.d")
    async with started(run_dir, str(image), cache) as provider:
        sandbox = await provider.create(replace(SPEC, workdir="/testbed", image_files=True))
        assert await sh(sandbox, "cat sub/a; echo $KEPT; command -v python3") == (
            "old\nof apptainer\n/usr/bin/python3\n"
        )
        with pytest.raises(TaskFailed, match=r"no work folder of its own \(WORKDIR\)"):
            await provider.create(WORK)
        for wrong, said in (
            (sif(tmp_path / "arm.sif", root, machine=b"04"), "is for arm64"),
            (sif(tmp_path / "sealed.sif", None, system=5), "encrypted"),
            (sif(tmp_path / "data.sif", None, part=3), "has no system partition"),
        ):
            with pytest.raises(TaskFailed, match=said):
                await provider.create(replace(SPEC, image=str(wrong)))
        (tmp_path / "no.sif").write_bytes(b"#!/bin/sh\n")
        with pytest.raises(TaskFailed, match="it is no SIF file"):
            await provider.create(replace(SPEC, image=f"{tmp_path}/no.sif"))


def sif(path: Path, root: Path | None, *, system: int = 1, part: int = 2, machine: bytes = b"02") -> Path:
    """A file as https://github.com/apptainer/sif lays it out: a definition, then a partition."""
    data = b""
    if root is not None:
        packed = path.with_suffix(".squashfs")
        command = ["mksquashfs", str(root), str(packed), "-comp", "lzo", "-Xalgorithm", "lzo1x_1", "-no-progress"]
        subprocess.run(command, check=True, capture_output=True)
        data = packed.read_bytes()
    start, offset = 4096, 32768

    def descriptor(kind: int, where: int, size: int, extra: bytes) -> bytes:
        numbers = struct.pack("<i?III3q4q", kind, True, 1, 1, 0, where, size, size, 0, 0, 0, 0)
        return numbers + b"x".ljust(128, b"\0") + extra.ljust(384, b"\0")

    launch = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x0002\0" + bytes(16)
    header = launch + struct.pack("<8q", 0, 0, 46, 48, start, 48 * 585, offset, len(data))
    partition = descriptor(0x4004, offset, len(data), struct.pack("<ii3s", system, part, machine))
    both = descriptor(0x4001, offset, 0, b"") + partition
    path.write_bytes(header.ljust(start, b"\0") + both.ljust(offset - start, b"\0") + data)
    return path


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Debian's docker-registry on the loopback; what it has lies in ``folder``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder.with_suffix(".yml")
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with config.with_suffix(".log").open("wb") as log:
        child = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


async def test_an_image_of_a_registry_is_fetched_once_by_its_digest_and_needs_no_registry_afterwards(
    run_dir: Path, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cache, blobs = tmp_path / "images", tmp_path / "registry"
    with registry(blobs) as address:
        insecure = tmp_path / ".config" / "containers" / "registries.conf"
        insecure.parent.mkdir(parents=True)
        insecure.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        name = f"{address}/team/image:one"
        copy = ["skopeo", "copy", "--quiet", archive, f"docker://{name}"]

        def copied() -> bool:
            return subprocess.run(copy, capture_output=True, check=False).returncode == 0

        await wait_until(copied)
        async with started(run_dir, name, cache) as provider:
            assert await sh(await provider.create(WORK), "cat sub/a") == "old\n"
            with pytest.raises(TaskFailed, match="there is no image") as missing:
                await provider.create(replace(SPEC, image=f"{address}/team/other"))
            assert missing.value.fault is not Fault.AGENT
        largest = max(blobs.glob("**/data"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1] + b"\0")
        async with started(run_dir, name, tmp_path / "elsewhere") as provider:
            with pytest.raises(SandboxUnavailable, match=r"cannot be fetched and unpacked \(skopeo\)") as broken:
                await provider.create(SPEC)
            assert broken.value.fault is Fault.INFRASTRUCTURE
            assert list_of(tmp_path / "elsewhere") == ["names"]
    async with started(run_dir, name, cache) as provider:
        assert await sh(await provider.create(WORK), "cat sub/a") == "old\n"
        with pytest.raises(SandboxUnavailable, match="connection refused"):
            await provider.create(replace(SPEC, image=f"{address}/team/other"))


async def test_what_is_lacking_is_told_where_it_is_needed(
    run_dir: Path, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted("mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small))
    try:
        async with started(run_dir, archive, small / "images") as provider:
            with pytest.raises(SandboxUnavailable, match="no room for the image"):
                await provider.create(SPEC)
            for name in ("docker-archive:/nowhere.tar", "/nowhere.sif", "-x.sif", "No such/Image"):
                with pytest.raises(TaskFailed, match="there is no image"):
                    await provider.create(replace(SPEC, image=name))
        async with started(run_dir, "docker-archive:/nowhere.tar", small / "images") as provider:
            with pytest.raises(SandboxUnavailable, match=r"there is no image .*sandboxes\.docker_image"):
                await provider.create(SPEC)
    finally:
        mounted("umount", str(small))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="need skopeo and umoci: apt-get install skopeo umoci"):
        async with started(run_dir, archive, tmp_path / "images"):
            pass


async def test_an_image_leads_nothing_out_of_itself(run_dir: Path, cache: Path, tmp_path: Path) -> None:
    """Its files, its links, and the paths in its configuration."""
    victim = tmp_path / "victim"
    victim.mkdir()
    up = "../" * 12
    files: list[tuple[str, bytes, str]] = [
        (f"{up}{victim}/by-dots", tarfile.REGTYPE, ""),
        ("link", tarfile.SYMTYPE, str(victim)),
        ("link/by-link", tarfile.REGTYPE, ""),
        ("hard", tarfile.LNKTYPE, f"{up}etc/shadow"),
        ("etc", tarfile.DIRTYPE, ""),
        ("disk", tarfile.BLKTYPE, ""),
    ]
    config = {"WorkingDir": f"/{up}{victim}/workdir", "Volumes": {f"/{up}{victim}/volume": {}}}
    for number, kept in enumerate((files, files[1:2])):
        name = f"docker-archive:{docker_archive(tmp_path / f'{number}.tar', kept, config)}"
        async with started(run_dir, name, cache) as provider:
            for spec in (SPEC, WORK, replace(SPEC, folders=("/link/logs",))):
                with pytest.raises(TurnstileError) as refused:
                    await provider.create(spec)
                assert refused.value.fault is not Fault.AGENT
                assert isinstance(refused.value, TaskFailed) or kept is files
        assert list_of(victim) == []


def docker_archive(path: Path, files: list[tuple[str, bytes, str]], config: dict[str, object]) -> Path:
    """An image of one layer as `docker save` writes it. ``files``: name, type and target of each."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as packed:
        for name, kind, target in files:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o755
            packed.addfile(member)
    digest = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    described = {"architecture": "amd64", "os": "linux", "config": config}
    described["rootfs"] = {"type": "layers", "diff_ids": [digest]}
    manifest = [{"Config": "config.json", "RepoTags": None, "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as packed:
        for name, content in (
            ("config.json", json.dumps(described).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


def test_a_task_that_ships_validates_in_an_image_without_an_engine(archive: str, cache: Path) -> None:
    own = {"XDG_CACHE_HOME": str(cache.parents[1]), "TURNSTILE_AGENTS__INSTALL_DIR": str(default_install_dir())}
    environment = {**os.environ, **own, "DOCKER_HOST": "unix:///nowhere"}
    words = ("tasks", "validate", "--only", "fix-calculator", "--sandbox", "oci", "--image", archive)
    done = subprocess.run([TURNSTILE, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 tasks are sound" in done.stdout
