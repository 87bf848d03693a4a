"""Pods as sandboxes, over a fake API server: what is asked of the cluster, and what each end of a pod means."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_support import LIMITS, cluster, namespace_of, sh, started
from echo_app import EchoApp, agents_of
from fake_cluster import TOKEN, FakeImage

from turnstile_server.errors import SandboxDeath, SandboxFailed, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.kubernetes.backend import RIGHTS, PodBackend
from turnstile_server.sandboxes.kubernetes.claims import CLAIM_RIGHTS
from turnstile_server.sandboxes.kubernetes.cluster_access import find_access
from turnstile_server.sandboxes.kubernetes.namespace_policy import POLICY, policy
from turnstile_server.sandboxes.kubernetes.pods import name_of
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR, Command, ProviderSetup, SandboxSpec
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

SPEC = SandboxSpec(LIMITS)


# What is asked of the cluster.


async def test_only_rights_that_are_checked_at_start_are_used_and_all_of_them(run_dir: Path) -> None:
    namespace_of(run_dir).denied = set(CLAIM_RIGHTS)
    async with started(run_dir, tries_policy=True) as provider:
        assert "warm pools: none (the account may not list sandboxwarmpools)" in provider.description
        await provider.create(SPEC)
    assert namespace_of(run_dir).used == set(RIGHTS)
    assert namespace_of(run_dir).pods == {}


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


async def test_a_trial_in_which_nobody_listens_shows_nothing_and_is_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile_server.sandboxes.kubernetes.namespace_policy._IN_FORCE_S", 2.0)
    monkeypatch.setattr(
        "turnstile_server.sandboxes.kubernetes.namespace_policy._LISTEN", "import time; time.sleep(60)"
    )
    with pytest.raises(StartupError, match="does not reach itself"):
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


async def test_an_image_that_cannot_run_the_helper_is_the_tasks_fault(run_dir: Path) -> None:
    namespace_of(run_dir).images["broken"] = FakeImage(command_missing=True)
    async with started(run_dir) as provider:
        with pytest.raises(TaskFailed, match=r"cannot run the helper .*python3.*not found"):
            await provider.create(replace(SPEC, image="broken"))
    assert namespace_of(run_dir).pods == {}


# Pods that end.

EVICTED = "The node was low on resource: memory."
PREEMPTED = "default-scheduler: preempting to accommodate a higher priority pod"
LOST = "Taint manager: deleting due to NoExecute taint"
FILLED = "Pod ephemeral local storage usage exceeds the total limit of containers 16Mi."


@pytest.mark.parametrize(
    ("ending", "death", "said"),
    [
        ("evict", SandboxDeath.OUTSIDE, f"its pod was taken away: TerminationByKubelet: {EVICTED}"),
        ("preempt", SandboxDeath.OUTSIDE, f"its pod was taken away: PreemptionByScheduler: {PREEMPTED}"),
        ("lose", SandboxDeath.OUTSIDE, f"its pod was taken away: DeletionByTaintManager: {LOST}"),
        ("fill", SandboxDeath.INSIDE, f"it filled its disk: {FILLED}"),
        ("kill", SandboxDeath.OUTSIDE, "exit code 137"),
        ("cut", SandboxDeath.OUTSIDE, "the connection to its pod was cut"),
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
            case "preempt":
                cluster().disrupt(namespace, name, "PreemptionByScheduler", PREEMPTED)
            case "lose":
                cluster().disrupt(namespace, name, "DeletionByTaintManager", LOST, reason="NodeLost")
            case "kill":
                cluster().kill(namespace, name)
            case _:
                cluster().cut_attach(namespace, name)
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
