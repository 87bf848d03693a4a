"""Pods out of warm pools, over the fake API server and its controllers of agent-sandbox."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_support import IMAGE, LIMITS, cluster, install, killed_server, namespace_of, pool_of, sh, started
from fake_cluster import FakeImage

from bounded import rebounded
from turnstile_server.errors import SandboxDeath, SandboxFailed, SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes.kubernetes.backend import RIGHTS
from turnstile_server.sandboxes.kubernetes.claims import CLAIM_RIGHTS
from turnstile_server.sandboxes.kubernetes.pods import SANDBOX_LABEL, name_of
from turnstile_server.sandboxes.kubernetes.warm_pods import differences, helper_line, waiting_pod
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, IMAGE_WORKDIR, Command, Mount, SandboxSpec
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

SPEC = SandboxSpec(LIMITS)
QUICK = rebounded(SandboxSettings(), lease_s=1.0)


def kinds(run_dir: Path) -> list[str]:
    """Of what the server has asked the cluster for."""
    return [each["kind"] for each in namespace_of(run_dir).created]


# How a sandbox gets its pod.


async def test_a_claim_is_warm_renewed_and_uses_the_rights_that_are_checked_and_no_others(run_dir: Path) -> None:
    agent_sandbox = install(run_dir)
    agent_sandbox.apply(*pool_of("python"))
    await wait_until(lambda: agent_sandbox.ready("python") == 2)
    async with started(run_dir, rebounded(SandboxSettings(), lease_s=3.0), tries_policy=True) as provider:
        pooled = SandboxPool(provider, SandboxSettings())
        lent = await pooled.create(SPEC)
        assert lent.origin.warm
        [name] = agent_sandbox.claims
        lifecycle = agent_sandbox.claims[name]["spec"]["lifecycle"]
        assert lifecycle["shutdownPolicy"] == "Delete"
        until = lifecycle["shutdownTime"]
        await wait_until(lambda: agent_sandbox.claims[name]["spec"]["lifecycle"]["shutdownTime"] > until)
        assert (await lent.exec(Command(("true",)))).exit_code == 0
    assert agent_sandbox.claims == {}
    assert namespace_of(run_dir).used == {*RIGHTS, *CLAIM_RIGHTS}


async def test_an_empty_pool_gives_a_cold_pod_and_a_pool_that_comes_later_is_found(run_dir: Path) -> None:
    agent_sandbox = install(run_dir)
    agent_sandbox.apply(*pool_of("empty", replicas=0))
    namespace_of(run_dir).images["swe"] = FakeImage()
    async with started(run_dir, rebounded(SandboxSettings(), pools_s=0.05)) as provider:
        cold = await provider.create(SPEC)
        assert not cold.origin.warm
        assert await sh(cold, "echo well") == "well\n"
        assert kinds(run_dir) == ["SandboxClaim"]
        agent_sandbox.apply(*pool_of("later", "swe"))
        await wait_until(lambda: "later" in provider.description and agent_sandbox.ready("later") == 2)
        assert (await provider.create(replace(SPEC, image="swe"))).origin.warm


async def test_files_of_an_image_in_a_pool_are_the_agents(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("")
    namespace_of(run_dir).images["swe"] = FakeImage(folder=tmp_path, workdir="/testbed")
    spec = replace(SPEC, workdir=IMAGE_WORKDIR, image_files=True, image="swe", folders=("/logs/verifier",))
    install(run_dir).apply(*pool_of("swe", "swe", spec))
    async with started(run_dir) as provider:
        sandbox = await provider.create(spec)
        said = "touch new /logs/verifier/x; pwd; ls; env | grep -E '^(SHLVL|OLDPWD)=' || true"
        assert await sh(sandbox, said) == "/testbed\nnew\nsetup.py\n"
    assert kinds(run_dir) == ["SandboxClaim"]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, image="other"),
        replace(SPEC, limits=replace(LIMITS, memory_bytes=128 << 20)),
        replace(SPEC, folders=("/data",)),
        replace(SPEC, mounts=(Mount(Path(__file__).parent / "data", "/srv/mine"),)),
    ],
    ids=["image", "limits", "folders", "mounts"],
)
async def test_a_sandbox_that_no_pool_has_is_a_pod_of_its_own_and_the_log_says_why(
    run_dir: Path, tmp_path: Path, other: SandboxSpec, caplog: pytest.LogCaptureFixture
) -> None:
    install(run_dir).apply(*pool_of("python"))
    namespace_of(run_dir).images["other"] = FakeImage()
    mounts = tuple(replace(each, source=tmp_path) for each in other.mounts)
    async with started(run_dir) as provider:
        for _ in range(2):
            sandbox = await provider.create(replace(other, mounts=mounts))
        assert not sandbox.origin.warm
    assert kinds(run_dir) == ["Pod", "Pod"]
    said = [each.getMessage() for each in caplog.records if "pool" in each.getMessage()]
    assert len(said) == (0 if other.image else 1), said


def test_a_carried_python_is_named_in_the_line_that_starts_the_helper() -> None:
    assert helper_line(IMAGE_PYTHON) == b"exec python3 -I -S -B /turnstile/helper\n"
    assert helper_line(PYTHON).startswith(b"export GLIBC_TUNABLES=; export LD_AUDIT=; ")
    assert f"exec {PYTHON} -I".encode() in helper_line(PYTHON)
    carried = waiting_pod(SPEC, IMAGE, IMAGE, PYTHON, {})
    assert carried["nodeSelector"]["kubernetes.io/arch"] == "amd64"


# Refused at start.


def change(template: dict[str, Any], path: str, value: Any) -> None:
    """``value`` None: take it away."""
    *above, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    at: Any = template
    for key in above:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value


POD = "spec/podTemplate/spec"


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec/networkPolicyManagement", "Managed", "networkPolicyManagement is not Unmanaged"),
        (f"spec/podTemplate/metadata/labels/{SANDBOX_LABEL}", None, r"labels\.turnstile\.sandbox is missing"),
        (f"{POD}/containers/0/stdinOnce", None, r"containers\.sandbox\.stdinOnce is missing: true"),
        (f"{POD}/containers/1/name", "other", r"containers\.files is missing: .*containers\.other may not be set"),
        (f"{POD}/containers/0/envFrom", [{"secretRef": {"name": "s"}}], r"sandbox\.envFrom may not be set"),
        (f"{POD}/hostNetwork", True, r"spec\.hostNetwork may not be set"),
        (f"{POD}/automountServiceAccountToken", True, "automountServiceAccountToken is true instead of false"),
        (
            f"{POD}/volumes/0",
            {"name": "files", "hostPath": {"path": "/"}},
            r"volumes\.files\.hostPath may not be set",
        ),
        (f"{POD}/containers/0/command", ["sleep"], r"containers\.sandbox\.command is \[\"sleep\"\] instead of"),
    ],
)
async def test_a_template_that_lacks_something_is_refused_with_what_it_lacks(
    run_dir: Path, path: str, value: Any, said: str
) -> None:
    template, pool = copy.deepcopy(pool_of("python", replicas=0))
    change(template, path, value)
    install(run_dir).apply(template, pool)
    with pytest.raises(StartupError, match=f"pool python, template python: .*{said}"):
        async with started(run_dir):
            pass


async def test_what_an_operator_adds_to_a_template_and_how_quantities_are_written_is_no_difference() -> None:
    wanted = waiting_pod(SPEC, IMAGE, IMAGE, IMAGE_PYTHON, {})
    found = copy.deepcopy(wanted)
    found.update(tolerations=[{"operator": "Exists"}], runtimeClassName="gvisor", hostPID=False)
    found["nodeSelector"]["pool"] = "rl"
    found["containers"][0]["imagePullPolicy"] = "Always"
    bounds = {"cpu": "1", "memory": "256Mi"}
    found["containers"][0]["resources"] = {"requests": bounds, "limits": bounds}
    found["containers"].reverse()
    assert differences(wanted, found) == []
    found["containers"][1]["resources"]["limits"] = {"cpu": "1", "memory": "255Mi"}
    assert differences(wanted, found) == [
        'spec.containers.sandbox.resources.limits.memory is "255Mi" instead of "268435456"'
    ]


async def test_a_cluster_without_agent_sandbox_has_pods_alone_and_says_so(run_dir: Path) -> None:
    async with started(run_dir) as provider:
        assert "warm pools: none (agent-sandbox 0.5 or newer is not installed)" in provider.description
        await provider.create(SPEC)
    assert kinds(run_dir) == ["Pod"]


async def test_missing_rights_to_claims_are_told_at_start_with_verb_and_resource(run_dir: Path) -> None:
    install(run_dir)
    namespace_of(run_dir).denied = {each for each in CLAIM_RIGHTS if each[0] == "patch"}
    with pytest.raises(StartupError, match="may not patch sandboxclaims in the namespace ts-"):
        async with started(run_dir):
            pass


async def test_a_pool_whose_pods_another_policy_opens_is_found_by_the_trial(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile_server.sandboxes.kubernetes.namespace_policy._IN_FORCE_S", 1.0)
    install(run_dir).apply(*pool_of("python"))
    namespace_of(run_dir).opened = (SANDBOX_LABEL, "pool")
    with pytest.raises(StartupError, match="nothing enforces the NetworkPolicy"):
        async with started(run_dir, tries_policy=True):
            pass


# Claims that get no pod.


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("no controller", "python gave none: its controller says nothing; is it running"),
        ("quota", r"python gave none: ReconcilerError: .*exceeded quota: sandboxes"),
        ("no node", r"python gave none: Unschedulable: 0/3 nodes"),
        ("no template", "agent-sandbox refused the claim: TemplateNotFound"),
        ("no right", r"refused to make a claim: sandboxclaims is forbidden: .*cannot create"),
        ("image", "cannot pull the image: ErrImagePull"),
    ],
)
async def test_a_claim_without_a_pod_is_told_in_time_and_is_the_infrastructures(
    run_dir: Path, trouble: str, said: str
) -> None:
    namespace = namespace_of(run_dir)
    agent_sandbox = install(run_dir, runs=trouble != "no controller")
    spec = replace(SPEC, limits=replace(LIMITS, cpus=1000.0)) if trouble == "no node" else SPEC
    spec = replace(spec, image="none:1") if trouble == "image" else spec
    agent_sandbox.apply(*pool_of("python", spec.image or IMAGE, spec, replicas=0))
    async with started(run_dir, rebounded(SandboxSettings(), schedule_s=0.6, gone_s=0.1)) as provider:
        match trouble:
            case "quota":
                namespace.quota = 0
            case "no template":
                namespace.custom["sandboxtemplates"].clear()
            case "no right":
                namespace.denied.add(next(each for each in CLAIM_RIGHTS if each[0] == "create"))
        with pytest.raises(SandboxUnavailable, match=said):
            await provider.create(spec)
        asked = kinds(run_dir)
    assert asked.count("SandboxClaim") == (0 if trouble == "no right" else 1)
    assert trouble == "no controller" or (agent_sandbox.claims, namespace.pods) == ({}, {})


async def test_an_image_of_a_pool_that_cannot_run_the_helper_is_the_tasks_fault(run_dir: Path) -> None:
    namespace_of(run_dir).images["broken"] = FakeImage(command_missing=True)
    install(run_dir).apply(*pool_of("broken", "broken", replicas=0))
    async with started(run_dir) as provider:
        with pytest.raises(TaskFailed, match=r"cannot run the helper.*python3.*not found"):
            await provider.create(replace(SPEC, image="broken"))


# Claims that end.


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("ending", "death", "said"),
    [
        ("memory", SandboxDeath.MEMORY, "OOMKilled"),
        ("remove", SandboxDeath.OUTSIDE, "its pod was removed|exit code 137"),
        ("claim", SandboxDeath.OUTSIDE, "its claim was removed"),
        ("evict", SandboxDeath.OUTSIDE, "TerminationByKubelet: The node was low"),
        ("cut", SandboxDeath.OUTSIDE, "the connection to its pod was cut"),
    ],
)
async def test_the_end_of_a_claimed_pod_is_told_with_its_cause(
    run_dir: Path, ending: str, death: SandboxDeath, said: str
) -> None:
    namespace, agent_sandbox = namespace_of(run_dir), install(run_dir)
    agent_sandbox.apply(*pool_of("python"))
    async with started(run_dir) as provider:
        sandbox = await provider.create(SPEC)
        name = name_of(sandbox.sandbox_id)
        pod = agent_sandbox.claims[name]["status"]["sandbox"]["name"]
        process = await sandbox.start(Command(("sleep", "5471")))
        match ending:
            case "memory":
                cluster().kill(namespace, pod, "OOMKilled")
            case "evict":
                cluster().evict(namespace, pod, "The node was low on resource: memory.")
            case "remove":  # and its controller makes another one of the name
                cluster().remove(namespace, pod)
            case "claim":
                agent_sandbox.delete(name)
            case _:
                cluster().cut_attach(namespace, pod)
        with pytest.raises(SandboxFailed, match=said) as caught:
            await process.wait()
        assert caught.value.death is death
        await sandbox.destroy()
        assert agent_sandbox.claims == {}
        assert pod not in namespace.pods


async def test_a_claim_that_cannot_be_renewed_is_told_and_expires_and_the_fault_is_the_infrastructures(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, agent_sandbox = namespace_of(run_dir), install(run_dir)
    agent_sandbox.apply(*pool_of("python"))
    async with started(run_dir, QUICK) as provider:
        sandbox = await provider.create(SPEC)
        process = await sandbox.start(Command(("sleep", "5471")))
        namespace.denied.add(next(each for each in CLAIM_RIGHTS if each[0] == "patch"))
        with pytest.raises(SandboxFailed, match=r"its claim was not renewed until 20\S+ and expired") as caught:
            await process.wait()
        assert caught.value.death is SandboxDeath.OUTSIDE
        assert agent_sandbox.claims == {}
        told = [each for each in caplog.records if "could not be renewed" in each.getMessage()]
        assert [each.levelno for each in told if each.levelno > logging.DEBUG] == [logging.WARNING]
        assert "cannot patch" in told[0].getMessage()


async def test_pods_of_a_server_that_was_killed_end_and_claims_expire_or_are_removed_by_its_next_start(
    run_dir: Path, tmp_path: Path
) -> None:
    namespace, agent_sandbox = namespace_of(run_dir), install(run_dir)
    agent_sandbox.apply(*pool_of("python", replicas=0))
    async with killed_server(run_dir, tmp_path):
        first, second = copy.deepcopy(list(agent_sandbox.claims.values()))
    await wait_until(lambda: {pod["status"]["phase"] for pod in namespace.pods.values()} == {"Failed"})
    first["spec"]["lifecycle"]["shutdownTime"] = "2026-01-01T00:00:00Z"
    agent_sandbox.apply(first)
    await wait_until(lambda: list(agent_sandbox.claims) == list(namespace.pods) == [second["metadata"]["name"]])
    async with started(run_dir):
        assert (agent_sandbox.claims, namespace.pods) == ({}, {})


async def test_a_claim_that_cannot_be_deleted_is_not_renewed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile_server.sandboxes.kubernetes.backend._REMOVE_AGAIN_S", (0.01, None))
    namespace, agent_sandbox = namespace_of(run_dir), install(run_dir)
    agent_sandbox.apply(*pool_of("python", replicas=0))
    async with started(run_dir, QUICK) as provider:
        sandbox = await provider.create(SPEC)
        namespace.denied.add(next(each for each in CLAIM_RIGHTS if each[0] == "delete"))
        await sandbox.destroy()
        await wait_until(lambda: agent_sandbox.claims == {})
