"""What lies in a runtime, how it comes to be there, and which machines have none."""

from __future__ import annotations

import importlib.util
import os
import platform
import struct
import sys
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from turnstile_server.errors import StartupError
from turnstile_server.runtimes import elf, source
from turnstile_server.runtimes.adapt import adapt
from turnstile_server.runtimes.install_folder import InstallFolder
from turnstile_server.runtimes.layout import HOST_LOADER, LOADER, TARGET
from turnstile_server.runtimes.source import RuntimeNotMade, Source
from turnstile_server.runtimes.store import CarriedRuntime, RuntimeStore
from turnstile_server.sandboxes.choose_python import choose_python

pytestmark = pytest.mark.anyio
HASHED, CHECKED = 1, 2


def elf_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and elf.is_elf(path)]


def compiled_of(module: Path) -> bytes:
    return Path(importlib.util.cache_from_source(str(module))).read_bytes()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_its_programs_name_its_own_loader_and_no_file_names_a_folder_of_this_machine(
    runtime: CarriedRuntime, tmp_path: Path
) -> None:
    files = elf_files(runtime.folder)
    assert elf.loader_of(runtime.folder / "bin/python3") == LOADER
    assert {elf.loader_of(path) for path in files} <= {None, LOADER}
    for path in files:
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        elf.drop_search_paths(copy)
        assert copy.read_bytes() == path.read_bytes(), path
    loader = (runtime.folder / "lib/ld.so").read_bytes()
    assert b"/etc/ld.so.cache\0" not in loader
    assert b"/lib/x86_64-linux-gnu/\0" not in loader


async def test_every_library_that_it_needs_is_in_it(runtime: CarriedRuntime) -> None:
    names = {path.name for path in (runtime.folder / "lib").iterdir()}
    for path in elf_files(runtime.folder):
        needed = source.libraries_of(path) if path.name != "ld.so" and path.parent.name != "bin" else {}
        assert {name for name in needed if "/" not in name} <= names, path


async def test_its_modules_are_compiled_are_never_compared_with_their_sources_and_can_be_read_by_all(
    runtime: CarriedRuntime,
) -> None:
    stdlib = runtime.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    modules = [path for path in stdlib.rglob("*.py") if "lib2to3" not in path.parts]
    assert len(modules) > 300
    for path in modules:
        compiled = compiled_of(path)
        assert struct.unpack_from("<I", compiled, 4)[0] & (HASHED | CHECKED) == HASHED, path
    assert f"{TARGET}/lib/{stdlib.name}/json/decoder.py".encode() in compiled_of(stdlib / "json/decoder.py")
    assert not [
        path for path in runtime.folder.rglob("*") if not path.is_symlink() and not path.stat().st_mode & 4
    ]
    assert not [name for name in ("test", "idlelib", "tkinter", "site-packages") if (stdlib / name).exists()]


@pytest.mark.slow
async def test_one_is_made_for_all_who_ask_at_once_and_is_found_again(tmp_path: Path) -> None:
    store = RuntimeStore(InstallFolder(tmp_path), 600)
    assert not await store.installed()
    got: list[CarriedRuntime] = []

    async def get() -> None:
        got.append(await store.get())

    async with anyio.create_task_group() as asking:
        asking.start_soon(get)
        asking.start_soon(get)
    assert got[0] == got[1] == await RuntimeStore(InstallFolder(tmp_path), 600).get()
    assert await store.installed()
    assert names_in(tmp_path) == [got[0].folder.name]
    assert got[0].folder.name.startswith(f"runtime-{platform.python_version()}-x86_64-")


async def test_one_that_takes_too_long_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeNotMade, match="install_timeout_s"):
        await RuntimeStore(InstallFolder(tmp_path), 0.001).get()
    assert names_in(tmp_path) == []


async def test_what_a_kill_left_is_removed_and_what_another_server_fills_is_not(tmp_path: Path) -> None:
    for name in ("left", "fresh", "locked"):
        (tmp_path / f".partial-{name}" / "bin").mkdir(parents=True)
        (tmp_path / f".partial-{name}" / "bin" / "python3").write_text("")
    for name in ("left", "locked"):
        os.utime(tmp_path / f".partial-{name}", (0, 0))
    hold = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / ".partial-locked")]
    async with await anyio.open_process(command, stderr=None) as other:
        assert other.stdout is not None
        await other.stdout.receive()

        async def nothing(partial: Path) -> None:
            pass

        async def fill(partial: Path) -> None:
            os.utime(partial, (0, 0))  # as if it took long
            await InstallFolder(tmp_path).fill_once("second", nothing)
            assert partial.name in names_in(tmp_path)

        await InstallFolder(tmp_path).fill_once("first", fill)
        other.kill()
    assert sorted(names_in(tmp_path)) == [".partial-fresh", ".partial-locked", "first", "second"]


async def test_the_machine_is_looked_at_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    check = Source.check

    def noted(source: Source) -> None:
        threads.add(threading.get_ident())
        check(source)

    monkeypatch.setattr(Source, "check", noted)
    await RuntimeStore(InstallFolder(tmp_path), 600).name()
    assert threads
    assert threading.get_ident() not in threads


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeNotMade, match=r"agents\.install_dir"):
        await RuntimeStore(InstallFolder(tmp_path / "file" / "agents"), 600).get()


def test_another_machine_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RuntimeNotMade, match=r"linux on aarch64; only Linux on x86-64.*sandboxes\.docker_python"):
        Source.own().check()


def test_a_loader_with_other_folders_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "ld.so"
    foreign.write_bytes(b"\0/lib64/\0/usr/lib64/\0")
    monkeypatch.setattr(source, "HOST_LOADER", str(foreign))
    own = Source.own()
    python = tmp_path / "python"
    python.write_bytes(own.executable.read_bytes())
    with pytest.raises(RuntimeNotMade, match="its loader is /lib64/ld-linux-x86-64"):
        replace(own, executable=python).check()
    monkeypatch.setattr(elf, "loader_of", lambda path: str(foreign))
    with pytest.raises(RuntimeNotMade, match="does not look into /lib/x86_64-linux-gnu/, as Debian's"):
        replace(own, executable=python).check()


def test_half_a_python_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeNotMade, match="is not a whole standard library"):
        replace(Source.own(), stdlib=tmp_path).check()


async def test_a_server_without_a_runtime_uses_the_images_python_unless_it_must_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RuntimeStore(InstallFolder(tmp_path), 600, replace(Source.own(), stdlib=tmp_path))
    assert (await choose_python("auto", store)).runtime is None
    assert "sandboxes run on the Python of their images: no runtime" in caplog.text
    with pytest.raises(StartupError, match="docker_python = carried cannot work"):
        await choose_python("carried", store)
    assert (await choose_python("image", store)).runtime is None


def test_programs_of_agents_are_copied_and_changed_and_all_else_is_shared(tmp_path: Path) -> None:
    installed, target = tmp_path / "agent", tmp_path / "carried"
    (installed / "bin").mkdir(parents=True)
    target.mkdir()
    program = installed / "bin" / "program"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o755)
    (installed / "data").write_text("data")
    (installed / "broken").write_bytes(b"\x7fELF\x02\x01")
    (installed / "link").symlink_to("data")
    before = program.read_bytes()
    adapt(installed, target)
    assert (program.read_bytes(), elf.loader_of(program)) == (before, HOST_LOADER)
    assert elf.loader_of(target / "bin/program") == LOADER
    assert (target / "bin/program").stat().st_mode & 0o777 == 0o755
    assert (target / "data").stat().st_ino == (installed / "data").stat().st_ino
    assert os.readlink(target / "link") == "data"
    assert sorted(path.name for path in target.rglob("*")) == ["bin", "broken", "data", "link", "program"]
