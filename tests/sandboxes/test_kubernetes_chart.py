"""The Helm chart in deploy/, by real Helm, and all objects that are sent to a cluster, by Kubernetes' own schemas.

scripts/install_pinned.sh scripts/chart-tools.txt DIR; TURNSTILE_CHART_PYTHON=DIR/bin/python
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_support import LIMITS, pool_of

from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes.kubernetes.backend import RIGHTS
from turnstile_server.sandboxes.kubernetes.claims import CLAIM_RIGHTS, POOL_LABEL, claim_of
from turnstile_server.sandboxes.kubernetes.namespace_policy import policy
from turnstile_server.sandboxes.kubernetes.pods import OWNER_LABEL, SANDBOX_LABEL, read_template, sandbox_pod
from turnstile_server.sandboxes.kubernetes.warm_pods import differences, waiting_pod
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, IMAGE_WORKDIR, SandboxSpec
from turnstile_server.sandboxes.users import uids_of
from turnstile_server.settings import SandboxSettings, Settings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import sandbox_spec

pytestmark = pytest.mark.cluster

SCHEMAS = Path(__file__).with_name("agent_sandbox_schemas.json")
ROOT = Path(__file__).resolve().parents[2]
PART = {
    "metadata": {"labels": {"team": "rl"}},
    "spec": {"runtimeClassName": "gvisor", "nodeSelector": {"pool": "rl"}},
}
PLAIN: dict[str, Any] = {}
APART = {
    "replicas": 3,
    "sandboxes": {"namespace": "boxes", "pod": PART},
    "model": {"claim": "models"},
    "env": {"TURNSTILE_EPISODES__MAX_RUNNING": "64"},
    "imagePullSecrets": [{"name": "pull"}],
    "nodeSelector": {"pool": "servers"},
    "tolerations": [{"key": "rl", "operator": "Exists"}],
    "storage": {"className": "fast"},
    "clients": [{"namespaceSelector": {"matchLabels": {"team": "rl"}}}],
}
POOLS = {
    "sandboxes": {
        "pod": PART,
        "pools": [
            {"name": "python", "image": "python:3.11-slim", "replicas": 8},
            {
                "name": "swe",
                "image": "swe:1",
                "replicas": 2,
                "memoryMb": 4096,
                "cpus": 2.5,
                "diskMb": 700,
                "imageFiles": True,
                "folders": ["/logs/verifier"],
            },
        ],
    }
}
PULLED = {"engine": {"kind": "trainer", "url": ""}, "shutdownGraceSeconds": 20}
WRONG = {"engine": {"url": ""}}


def sent_pods() -> list[dict[str, Any]]:
    """Of both kinds of root and Python, with a template and without."""
    uids, labels = uids_of(SandboxSettings()), {OWNER_LABEL: "owner", SANDBOX_LABEL: "sb-1"}
    specs = [
        (SandboxSpec(LIMITS), IMAGE_PYTHON, {}),
        (replace(SandboxSpec(LIMITS), image_files=True), PYTHON, PART),
    ]
    return [
        sandbox_pod("sb-1", spec, "swe", "python:3.11-slim", uids, python, ["/a", "/b"], labels, template)
        for spec, python, template in specs
    ]


@cache
def answer() -> Any:
    asked = {
        "chart": str(ROOT / "deploy" / "helm" / "turnstile"),
        "values": [PLAIN, APART, PULLED, WRONG, POOLS],
        "objects": [
            *sent_pods(),
            policy("ns"),
            claim_of("sb-1", {OWNER_LABEL: "o"}, "python", 0),
            *pool_of("own"),
        ],
        "schemas": json.loads(SCHEMAS.read_text())["schemas"],
    }
    command = [os.environ["TURNSTILE_CHART_PYTHON"], str(ROOT / "scripts" / "check_chart.py")]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def objects(number: int) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in answer()["rendered"][number]}


def test_the_chart_and_all_that_is_sent_to_a_cluster_fit_its_schemas() -> None:
    assert answer()["invalid"] == []
    assert all("engine.url is not set" in finding for finding in answer()["lint"])
    assert "engine.url is not set" in answer()["rendered"][3]["error"]


@pytest.mark.parametrize(
    ("number", "used"), [(0, {*RIGHTS}), (4, {*RIGHTS, *CLAIM_RIGHTS})], ids=["pods", "claims"]
)
def test_the_role_allows_exactly_what_the_server_uses(number: int, used: set[tuple[str, ...]]) -> None:
    """``test_only_rights_that_are_checked_at_start_are_used_and_all_of_them``, and that of claims, have what it
    uses."""
    rules = objects(number)["Role", "t-sandboxes"]["rules"]
    given = {
        (verb, group, *resource.partition("/")[::2])
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert given == used


@pytest.mark.parametrize("python", [PYTHON, IMAGE_PYTHON], ids=["carried", "image"])
def test_the_pods_of_the_charts_pools_are_those_that_sandboxes_need(python: str) -> None:
    found = objects(4)
    part = yaml.safe_load(yaml.safe_dump(PART))
    plain = sandbox_spec(Task(id="t", instruction="Do it."), SandboxSettings())
    limits = replace(plain.limits, memory_bytes=4096 << 20, cpus=2.5, disk_bytes=700 << 20)
    swe = replace(plain, limits=limits, workdir=IMAGE_WORKDIR, image_files=True, folders=("/logs/verifier",))
    for name, image, spec in (("t-python", "python:3.11-slim", plain), ("t-swe", "swe:1", swe)):
        template = found["SandboxTemplate", name]["spec"]
        pod = template["podTemplate"]
        assert differences(waiting_pod(spec, image, "python:3.11-slim", python, part), pod["spec"]) == []
        assert pod["metadata"]["labels"] == {SANDBOX_LABEL: "pool", "team": "rl"}
        assert template["networkPolicyManagement"] == "Unmanaged"
        pool = found["SandboxWarmPool", name]
        assert POOL_LABEL in pool["metadata"]["labels"]
        assert pool["spec"]["sandboxTemplateRef"] == {"name": name}


def test_the_policy_of_the_chart_is_the_one_that_the_server_wants() -> None:
    assert objects(0)["NetworkPolicy", "turnstile-sandboxes"]["spec"] == policy("ns")["spec"]


def test_rights_and_policy_are_in_the_namespace_of_the_sandboxes_and_servers_in_the_releases() -> None:
    places = {kind_name: each["metadata"]["namespace"] for kind_name, each in objects(1).items()}
    apart = [name for (_, name), place in places.items() if place == "boxes"]
    assert sorted(apart) == ["t-sandboxes", "t-sandboxes", "turnstile-sandboxes"]
    assert set(places.values()) == {"boxes", "ns"}


@pytest.mark.parametrize(("number", "values"), [(0, PLAIN), (1, APART), (2, PULLED)])
def test_a_server_has_a_volume_a_key_from_a_secret_time_to_end_and_settings_that_it_knows(
    number: int, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects(number)
    servers, service = found["StatefulSet", "t"]["spec"], found["Service", "t"]["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert service["clusterIP"] == "None"
    assert [each["metadata"]["name"] for each in servers["volumeClaimTemplates"]] == ["data"]
    pod = servers["template"]["spec"]
    grace = values.get("shutdownGraceSeconds", 600)
    assert pod["terminationGracePeriodSeconds"] == grace + 30
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert env.pop("TURNSTILE_CONTROL_KEY")["valueFrom"]["secretKeyRef"] == {
        "name": "turnstile",
        "key": "control-key",
    }
    for name, each in env.items():
        monkeypatch.setenv(name, each["value"])
    settings = Settings()
    assert settings.shutdown_grace_s == grace
    assert settings.sandboxes.kind == "kubernetes"
    if settings.sandboxes.kubernetes_pod is not None:
        path = tmp_path / "pod.yaml"
        path.write_text(found["ConfigMap", "t-pod"]["data"]["pod.yaml"])
        assert read_template(path) == PART == yaml.safe_load(path.read_text())
