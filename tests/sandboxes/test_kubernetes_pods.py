"""Pods as sandboxes, over a fake API server: what is asked of the cluster, and what each end of a pod means."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from cluster_support import LIMITS, cluster, namespace_of, pod_provider
from echo_app import EchoApp, agents_of
from fake_cluster import TOKEN, FakeImage
from light import SOLVE
from test_whole_episodes import played, server

from bounded import rebounded
from turnstile_server.errors import SandboxDeath, SandboxFailed, SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.kubernetes.backend import RIGHTS, PodBackend
from turnstile_server.sandboxes.kubernetes.cluster_access import find_access
from turnstile_server.sandboxes.kubernetes.namespace_policy import POLICY, policy
from turnstile_server.sandboxes.kubernetes.pods import name_of
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR, Command, Mount, ProviderSetup, SandboxSpec, User
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

SPEC = SandboxSpec(LIMITS)
SECRET = b"assert answer == 'only the hidden tests know'"


@asynccontextmanager
async def started(
    run_dir: Path, settings: SandboxSettings | None = None, **options: Any
) -> AsyncIterator[StreamProvider]:
    provider = pod_provider(settings or SandboxSettings(), run_dir, **options)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


async def sh(sandbox: HelperSandbox, script: str, user: User = User.AGENT) -> str:
    done = await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=60))
    assert done.exit_code == 0, done
    return done.stdout.decode()


# What is asked of the cluster.


async def test_only_rights_that_are_checked_at_start_are_used_and_all_of_them(run_dir: Path) -> None:
    async with started(run_dir, tries_policy=True) as provider:
        await provider.create(SPEC)
    assert namespace_of(run_dir).used == set(RIGHTS)
    assert namespace_of(run_dir).pods == {}


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
    said = json.dumps(namespace_of(run_dir).created)
    assert SECRET.decode() not in said
    assert "echo ran" not in said
    assert TOKEN not in said


async def test_the_work_folder_variables_and_path_of_an_image_are_those_that_its_helper_found(
    run_dir: Path, tmp_path: Path
) -> None:
    content = tmp_path / "testbed"
    content.mkdir()
    (content / "setup.py").write_text("")
    env = (("PATH", "/opt/conda/bin:/usr/bin:/bin"), ("CONDA", "yes"))
    namespace_of(run_dir).images["swe"] = FakeImage(env, "/testbed", content)
    spec = replace(SPEC, image="swe", workdir=IMAGE_WORKDIR, image_files=True)
    async with started(run_dir) as provider:
        sandbox = await provider.create(spec)
        assert sandbox.workdir == "/testbed"
        assert await sh(sandbox, "pwd; ls; echo $PATH $CONDA; env | grep -c KUBERNETES || true; touch new") == (
            "/testbed\nsetup.py\n/opt/conda/bin:/usr/bin:/bin yes\n0\n"
        )
        namespace_of(run_dir).images["root"] = FakeImage()
        with pytest.raises(TaskFailed, match="root has no work folder of its own"):
            await provider.create(replace(spec, image="root"))


async def test_a_template_adds_to_pods_and_cannot_open_them(run_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    settings = SandboxSettings(kubernetes_pod=template)
    template.write_text(
        "metadata: {labels: {team: rl}}\nspec: {runtimeClassName: gvisor, nodeSelector: {gpu: none}}"
    )
    async with started(run_dir, settings) as provider:
        await provider.create(SPEC)
    [pod] = namespace_of(run_dir).created
    assert pod["metadata"]["labels"]["team"] == "rl"
    assert pod["spec"]["runtimeClassName"] == "gvisor"
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "gpu": "none"}
    template.write_text("spec: {hostNetwork: true, containers: []}")
    with pytest.raises(StartupError, match=r"may not set spec\.containers, spec\.hostNetwork"):
        async with started(run_dir, settings):
            pass


# Refused at start.


async def test_a_network_that_nothing_shuts_is_refused_at_start(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile_server.sandboxes.kubernetes.namespace_policy._IN_FORCE_S", 2.0)
    namespace_of(run_dir).enforced = False
    with pytest.raises(StartupError, match=rf"nothing enforces .*{POLICY}: a sandbox reached 127\.0\.0\.1:\d+"):
        async with started(run_dir, tries_policy=True):
            pass
    assert namespace_of(run_dir).pods == {}


async def test_another_policy_of_the_name_is_refused_at_start(run_dir: Path) -> None:
    other = policy(run_dir.name)
    other["spec"]["egress"] = [{}]
    namespace_of(run_dir).policies[POLICY] = other
    with pytest.raises(StartupError, match=f"{POLICY} .*is not the one that sandboxes need"):
        async with started(run_dir):
            pass


async def test_missing_rights_are_told_at_start_with_verb_and_resource(run_dir: Path) -> None:
    namespace_of(run_dir).denied = {("watch", "", "pods", ""), ("create", "", "pods", "attach")}
    with pytest.raises(StartupError, match="may not watch pods, create pods/attach in the namespace ts-"):
        async with started(run_dir):
            pass


async def test_no_cluster_and_a_wrong_token_are_told_at_start(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(StartupError, match=r"finds no cluster.*KUBECONFIG"):
        find_access(None)
    config = cluster().kubeconfig(tmp_path / "config", run_dir.name)
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert find_access(None).namespace == run_dir.name
    assert find_access("other").namespace == "other"
    config.write_text(config.read_text().replace(TOKEN, "stale"))
    settings = SandboxSettings(kind="kubernetes", kubernetes_namespace=run_dir.name)
    setup = ProviderSetup(settings, run_dir, "owner")
    provider = StreamProvider(PodBackend(setup), setup)
    async with BackgroundTasks() as tasks:
        with pytest.raises(StartupError, match=r"are not possible: Unauthorized \(401\)"):
            await provider.start(agents_of(EchoApp()), tasks)
        await provider.close()


# Pods that do not start.


async def test_pods_that_cannot_be_made_say_why_and_are_the_infrastructures(run_dir: Path) -> None:
    namespace = namespace_of(run_dir)
    namespace.images["broken"] = FakeImage(command_missing=True)
    async with started(run_dir, rebounded(SandboxSettings(), schedule_s=0.2)) as provider:
        with pytest.raises(SandboxUnavailable, match=r"cannot pull the image: ErrImagePull: .*nowhere/none:1"):
            await provider.create(replace(SPEC, image="nowhere/none:1"))
        with pytest.raises(TaskFailed, match=r"cannot run the helper .*python3.*not found"):
            await provider.create(replace(SPEC, image="broken"))
        namespace.quota = 0
        with pytest.raises(SandboxUnavailable, match=r"refused to make a pod: .*exceeded quota: sandboxes"):
            await provider.create(SPEC)
        namespace.quota, namespace.full = None, True
        with pytest.raises(SandboxUnavailable, match=r"within 0\.2 s: Unschedulable: 0/3 nodes"):
            await provider.create(SPEC)
        namespace.full = False
        await provider.create(SPEC)
        assert len(namespace.pods) == 1


# Pods that end.

EVICTED = "The node was low on resource: memory."
FILLED = "Pod ephemeral local storage usage exceeds the total limit of containers 16Mi."


@pytest.mark.parametrize(
    ("ending", "death", "said"),
    [
        ("evict", SandboxDeath.OUTSIDE, f"its pod was taken away: TerminationByKubelet: {EVICTED}"),
        ("fill", SandboxDeath.INSIDE, f"it filled its disk: {FILLED}"),
        ("oom", SandboxDeath.MEMORY, "OOMKilled"),
        ("kill", SandboxDeath.OUTSIDE, "exit code 137"),
        ("cut", SandboxDeath.OUTSIDE, "the connection to its pod was cut"),
        ("remove", SandboxDeath.OUTSIDE, "its pod was "),
    ],
)
async def test_the_end_of_a_pod_is_told_with_its_cause(
    run_dir: Path, ending: str, death: SandboxDeath, said: str
) -> None:
    namespace = namespace_of(run_dir)
    async with started(run_dir) as provider:
        sandbox = await provider.create(SPEC)
        name = name_of(sandbox.sandbox_id)
        process = await sandbox.start(Command(("sleep", "5471")))
        match ending:
            case "evict" | "fill":
                cluster().evict(namespace, name, EVICTED if ending == "evict" else FILLED)
            case "oom" | "kill":
                cluster().kill(namespace, name, "OOMKilled" if ending == "oom" else "Error")
            case "cut":
                cluster().cut_attach(namespace, name)
            case _:
                cluster().remove(namespace, name)
        with pytest.raises(SandboxFailed, match=said) as caught:
            await process.wait()
        assert caught.value.death is death
        await sandbox.destroy()
        assert namespace.pods == {}


@pytest.mark.parametrize("forget", [False, True], ids=["cut", "410 Gone"])
async def test_a_watch_that_is_cut_goes_on_and_one_that_is_too_old_lists_again(
    run_dir: Path, forget: bool
) -> None:
    namespace = namespace_of(run_dir)
    async with started(run_dir) as provider:
        first = await provider.create(SPEC)
        await wait_until(lambda: bool(namespace.watches))
        lists = namespace.lists
        cluster().cut_watches(namespace, forget=forget)
        second = await provider.create(SPEC)
        assert await sh(second, "echo well") == "well\n"
        cluster().remove(namespace, name_of(first.sandbox_id))
        async with asyncio.timeout(60):
            assert await first.died() is SandboxDeath.OUTSIDE
        assert (namespace.lists > lists) is forget


async def test_a_server_that_was_killed_leaves_pods_that_end_and_the_next_start_removes_them(
    run_dir: Path, tmp_path: Path
) -> None:
    namespace = namespace_of(run_dir)
    config = cluster().kubeconfig(tmp_path / "config", run_dir.name)
    environment = {**os.environ, "KUBECONFIG": str(config), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = Path(__file__).with_name("cluster_child.py")
    argv = [sys.executable, str(child), str(run_dir / "child"), run_dir.name]
    async with await anyio.open_process(argv, env=environment, stderr=None) as process:
        try:
            assert process.stdout is not None
            assert (await process.stdout.receive()).startswith(b"ready")
            left = set(namespace.pods)
        finally:
            process.send_signal(signal.SIGKILL)
    assert len(left) == 2
    await wait_until(lambda: {pod["status"]["phase"] for pod in namespace.pods.values()} == {"Failed"})
    namespace.pods["somebody-elses"] = {
        "metadata": {"name": "somebody-elses", "labels": {}},
        "status": {"phase": ""},
    }
    async with started(run_dir):
        assert set(namespace.pods) == {"somebody-elses"}
    del namespace.pods["somebody-elses"]


async def test_work_in_pods_is_rewarded_by_hidden_tests(
    run_dir: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster().kubeconfig(tmp_path / "config", run_dir.name)))
    sandboxes = {"kind": "kubernetes", "docker_python": "image", "run_dir": run_dir / "r", "memory_mb": 256}
    async with server(tiny_model, tmp_path, sandboxes=sandboxes) as stage:
        solved = await played(stage, env={"WORK": SOLVE, "TURNS": "3"})
        assert (solved["status"], solved["reward"], solved["error"]) == ("completed", 1.0, None), solved
        assert solved["stats"]["turns"] == 3
        idle = await played(stage)
        assert (idle["status"], idle["reward"]) == ("completed", 0.0), idle
    namespace = namespace_of(run_dir)
    assert namespace.pods == {}
    assert "answer.py" not in json.dumps(namespace.created)
