"""Pods as sandboxes on any cluster: the fake one, or a real one by ``scripts/prove_on_cluster.sh``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_support import LIMITS, REAL, SIDE, killed_server, pool_of, sh, started
from light import SOLVE
from test_whole_episodes import played, server

from bounded import rebounded
from turnstile_server.errors import SandboxDeath, SandboxFailed, SandboxUnavailable
from turnstile_server.sandboxes.kubernetes.pods import name_of
from turnstile_server.sandboxes.protocol import Command, Mount, SandboxSpec, User
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

SPEC = SandboxSpec(LIMITS)
SECRET = b"assert answer == 'only the hidden tests know'"


async def test_a_server_starts_where_the_network_of_sandboxes_is_shut_and_leaves_no_pod(run_dir: Path) -> None:
    async with started(run_dir, tries_policy=True) as provider:
        assert "pods in the namespace" in provider.description
        sandbox = await provider.create(SPEC)
        assert await sh(sandbox, "id -u; cat /proc/self/status") != ""
        said = await sh(sandbox, "grep -h ^Cap /proc/self/status | grep -vc 0000000000000000 || true")
        assert said == "0\n"
        assert (await sandbox.exec(Command(("touch", "/etc/new"), user=User.AGENT))).exit_code != 0
    assert SIDE.pods(run_dir) == {}


async def test_files_of_the_server_get_in_read_only_and_no_object_of_the_cluster_has_them(
    run_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "run").chmod(0o700)
    async with started(run_dir) as provider:
        sandbox = await provider.create(replace(SPEC, mounts=(Mount(folder, "/opt/agent"),)))
        await sandbox.write(f"{sandbox.workdir}/hidden.py", SECRET, user=User.AGENT)
        assert await sh(sandbox, "/opt/agent/run; stat -c %u:%a /opt/agent/run") == "ran\n0:755\n"
        assert (await sandbox.exec(Command(("touch", "/opt/agent/new")))).exit_code != 0
        assert SECRET.decode() in await sh(sandbox, "cat hidden.py")
        said = json.dumps(dict(SIDE.pods(run_dir)))
    assert SECRET.decode() not in said
    assert "echo ran" not in said


async def test_pods_that_cannot_be_made_say_why_and_are_the_infrastructures(run_dir: Path) -> None:
    async with started(run_dir, rebounded(SandboxSettings(), schedule_s=5.0 if REAL else 0.2)) as provider:
        with pytest.raises(SandboxUnavailable, match=r"cannot pull the image: \w+: .*nowhere.invalid/none:1"):
            await provider.create(replace(SPEC, image="nowhere.invalid/none:1"))
        vast = replace(SPEC, limits=replace(LIMITS, cpus=100_000.0))
        with pytest.raises(SandboxUnavailable, match=r"within [\d.]+ s: Unschedulable: 0/\d+ nodes"):
            await provider.create(vast)
        SIDE.set_quota(run_dir, 0)
        with pytest.raises(SandboxUnavailable, match=r"refused to make a pod: .*exceeded quota"):
            await provider.create(SPEC)
        SIDE.set_quota(run_dir, None)
        await provider.create(SPEC)
        assert len(SIDE.pods(run_dir)) == 1


async def test_memory_that_runs_out_is_the_agents_and_a_pod_that_is_removed_the_infrastructures(
    run_dir: Path,
) -> None:
    async with started(run_dir) as provider:
        full, removed = [await provider.create(SPEC) for _ in range(2)]
        waiting = [await each.start(Command(("sleep", "5471"))) for each in (full, removed)]
        await SIDE.run_out_of_memory(run_dir, full)
        SIDE.remove(run_dir, name_of(removed.sandbox_id))
        for process, death, said in zip(
            waiting,
            (SandboxDeath.MEMORY, SandboxDeath.OUTSIDE),
            ("OOMKilled", "its pod was|exit code"),
            strict=True,
        ):
            with pytest.raises(SandboxFailed, match=said) as caught:
                await process.wait()
            assert caught.value.death is death
        await full.destroy()
        await removed.destroy()
        assert SIDE.pods(run_dir) == {}


async def test_a_server_that_was_killed_leaves_pods_that_end_and_the_next_start_removes_them(
    run_dir: Path, tmp_path: Path
) -> None:
    async with killed_server(run_dir, tmp_path):
        left = set(SIDE.pods(run_dir))
    assert len(left) == 2
    await wait_until(lambda: {pod["status"]["phase"] for pod in SIDE.pods(run_dir).values()} == {"Failed"})
    async with started(run_dir):
        assert SIDE.pods(run_dir) == {}


async def test_a_sandbox_out_of_a_warm_pool_is_as_any_other_and_its_claim_goes_with_it(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run").chmod(0o700)
    mount = Mount(tmp_path, "/opt/turnstile/agents/mine")
    pool = pool_of(run_dir.name.replace("_", "-").lower())
    SIDE.make_pool(run_dir, *pool)
    try:
        async with started(run_dir, tries_policy=True) as provider:
            assert f"warm pools: {pool[0]['metadata']['name']}" in provider.description
            sandbox = await provider.create(replace(SPEC, mounts=(mount,)))
            assert sandbox.own_uids
            assert sandbox.filtered
            assert await sh(sandbox, f"{mount.target}/run; stat -c %u:%a {mount.target}/run; pwd") == (
                "ran\n0:755\n/workspace\n"
            )
            assert await sh(sandbox, "echo x > file; stat -c %U:%a $HOME") != ""
            assert (await sandbox.exec(Command(("touch", f"{mount.target}/new")))).exit_code != 0
            assert (await sandbox.exec(Command(("touch", "/etc/new")))).exit_code != 0
            assert (await sandbox.exec(Command(("ls", "/home/tests")))).exit_code != 0
            [claim] = SIDE.claims(run_dir).values()
            assert "env" not in claim["spec"]
            await sandbox.destroy()
            assert SIDE.claims(run_dir) == {}
    finally:
        SIDE.remove_pool(run_dir, *pool)


async def test_work_in_pods_is_rewarded_by_hidden_tests(
    run_dir: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SIDE.environment(run_dir, tmp_path).items():
        monkeypatch.setenv(name, value)
    sandboxes = {"kind": "kubernetes", "docker_python": "image", "run_dir": run_dir / "r", "memory_mb": 256}
    async with server(tiny_model, tmp_path, sandboxes=sandboxes) as stage:
        solved = await played(stage, env={"WORK": SOLVE, "TURNS": "3"})
        assert (solved["status"], solved["reward"], solved["error"]) == ("completed", 1.0, None), solved
        assert solved["stats"]["turns"] == 3
        idle = await played(stage)
        assert (idle["status"], idle["reward"]) == ("completed", 0.0), idle
