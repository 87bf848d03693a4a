"""compose.yaml: what it demands, what each container gets, and both profiles up and playing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest
from compose_support import KEY, ROOT, UP_S, compose, project

from sglang_server import FLAGS, SHIM, VARIABLE
from turnstile import Client
from turnstile_server.demo import TINY

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.timeout(900),
]
URL = "http://127.0.0.1:8000"
LIMITS = {"max_turns": 4, "max_completion_tokens": 96}


@pytest.fixture
def folder(tmp_path: Path, host_ports: None) -> Iterator[Path]:
    with project(tmp_path) as made:
        yield made


def configuration(folder: Path, profile: str, **environment: str) -> dict[str, Any]:
    given = {"TURNSTILE_CONTROL_KEY": KEY, **environment}
    said = compose(folder, "--profile", profile, "config", "--format", "json", **given).stdout
    services: dict[str, Any] = json.loads(said)["services"]
    return services


@pytest.mark.parametrize("profile", ["tiny", "gpu"])
def test_without_a_key_it_does_not_start_and_says_what_to_run(folder: Path, profile: str) -> None:
    done = compose(folder, "--profile", profile, "up", ok=False)
    assert done.returncode != 0
    assert "TURNSTILE_CONTROL_KEY" in done.stderr
    assert "openssl rand -hex 24" in done.stderr


def test_each_profile_has_its_services_and_nothing_is_open_to_the_network(folder: Path) -> None:
    tiny, gpu = configuration(folder, "tiny"), configuration(folder, "gpu")
    assert set(tiny) == {"turnstile-tiny"}
    assert set(gpu) == {"turnstile", "sglang"}
    for service in (tiny["turnstile-tiny"], gpu["turnstile"]):
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert {"no-new-privileges:true", "seccomp=server/seccomp.json", "systempaths=unconfined"} <= set(
            service["security_opt"]
        )
        assert service["tmpfs"] == ["/tmp"]
        assert service["environment"]["TURNSTILE_CONTROL_KEY"] == KEY
    sglang = gpu["sglang"]
    assert "ports" not in sglang
    assert set(sglang["networks"]) == {"engine"}
    [device] = sglang["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert sglang["image"].startswith("lmsysorg/sglang:v")
    assert gpu["turnstile"]["depends_on"]["sglang"]["condition"] == "service_healthy"
    assert gpu["turnstile"]["environment"]["TURNSTILE_ENGINE__URL"] == "http://sglang:30000"


def test_the_build_takes_another_base_and_torch_for_the_cpu(folder: Path) -> None:
    tiny = configuration(folder, "tiny", BASE_IMAGE="mine:1", TORCH_INDEX="https://index.example/cpu")
    tiny = tiny["turnstile-tiny"]["build"]["args"]
    assert (tiny["BASE_IMAGE"], tiny["EXTRAS"]) == ("mine:1", "server,embedded,otel")
    assert tiny["TORCH_INDEX"] == "https://index.example/cpu"


def test_several_projects_have_ports_and_names_of_their_own(folder: Path) -> None:
    given = {"TURNSTILE_CONTROL_KEY": KEY, "COMPOSE_PROJECT_NAME": "second"}
    ports = {"CONTROL_PORT": "9000", "AGENT_PORT": "9001"}
    shutil.copy(ROOT / "compose.yaml", folder)  # with the names that users have
    found = {}
    for name, environment in {"turnstile": {"TURNSTILE_CONTROL_KEY": KEY}, "second": {**given, **ports}}.items():
        said = compose(folder, "--profile", "*", "config", "--format", "json", **environment).stdout
        found[name] = json.loads(said)
    assert {each["name"] for each in found.values()} == {"turnstile", "second"}
    for name, made in found.items():
        assert {each["name"] for each in made["volumes"].values()} == {f"{name}-data", f"{name}-tiny-data"}
        assert all(each["name"].startswith(f"{name}_") for each in made["networks"].values())
    tiny = {name: made["services"]["turnstile-tiny"] for name, made in found.items()}
    assert {
        name: [(port["host_ip"], port["published"], port["target"]) for port in each["ports"]]
        for name, each in tiny.items()
    } == {
        "turnstile": [("127.0.0.1", "8000", 8000), ("127.0.0.1", "8001", 8001)],
        "second": [("127.0.0.1", "9000", 8000), ("127.0.0.1", "9001", 9001)],
    }
    assert tiny["second"]["environment"]["TURNSTILE_GATE__PORT"] == "9001"


def test_a_slow_start_is_not_given_up(folder: Path) -> None:
    """Compose gives up a container that is unhealthy, which it cannot be before ``start_period`` is over."""
    for profile in ("tiny", "gpu"):
        for service in configuration(folder, profile).values():
            assert service["healthcheck"]["start_period"] == "20m0s"


def test_the_profile_and_further_settings_may_stand_in_files(folder: Path) -> None:
    (folder / ".env").write_text(f"TURNSTILE_CONTROL_KEY={KEY}\nCOMPOSE_PROFILES=tiny\nMEMORY=3g\n")
    (folder / "turnstile.env").write_text("TURNSTILE_EPISODES__MAX_RUNNING=3\n")
    services = json.loads(compose(folder, "config", "--format", "json").stdout)["services"]
    assert services["turnstile-tiny"]["environment"]["TURNSTILE_EPISODES__MAX_RUNNING"] == "3"
    assert int(services["turnstile-tiny"]["mem_limit"]) == 3 << 30


@pytest.mark.thorough
def test_a_model_that_is_not_there_is_named(folder: Path, server_image: str) -> None:
    done = compose(
        folder,
        *("--profile", "gpu", "up", "--no-build", "--detach"),
        ok=False,
        TURNSTILE_CONTROL_KEY=KEY,
        TURNSTILE_IMAGE=server_image,
        SGLANG_IMAGE=server_image,
    )
    assert done.returncode != 0
    assert f"bind source path does not exist: {folder}/model" in done.stderr


def play(agent: str) -> None:
    """A group of two of an errand that the tiny policy knows: graded, and audited on the engine."""
    asked = [sys.executable, "-m", "turnstile_server.demo.errands", "1"]
    task = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    with Client(URL, key=KEY) as client:
        rollouts = list(client.rollouts([task], agent=agent, n=2, limits=LIMITS))
        assert [rollout.error for rollout in rollouts] == [None, None]
        assert all(rollout.reward is not None for rollout in rollouts)
        for rollout in rollouts:
            assert rollout.samples is not None
            assert sum(int(sample.loss_mask.sum()) for sample in rollout.samples.samples) > 0
            assert rollout.episode is not None
            report = client.audit(rollout.episode.episode_id)
            assert report.passed, report


@pytest.mark.thorough
@pytest.mark.slow
def test_the_tiny_profile_plays_and_keeps_its_records_over_a_restart(folder: Path, embedded_image: str) -> None:
    environment = {"TURNSTILE_CONTROL_KEY": KEY, "TURNSTILE_EMBEDDED_IMAGE": embedded_image}
    up = ("--profile", "tiny", "up", "--wait", "--no-build")
    compose(folder, *up, timeout_s=UP_S, **environment)
    assert httpx.get(f"{URL}/ready").status_code == 200
    play("plain-loop")
    compose(folder, "--profile", "tiny", "down", "--timeout", "30", **environment)
    compose(folder, *up, timeout_s=UP_S, **environment)
    with Client(URL, key=KEY) as client:
        kept = list(client.episodes())
    assert [episode.status for episode in kept] == ["completed", "completed"]


STAND_IN = Template("""
services:
  sglang:
    image: $image
    user: "0"
    command: !override [$python, -m, sglang.launch_server, --model-path, /model, --host, 0.0.0.0, --port, "30000", $flags]
    volumes: [$folders]
    environment: {PYTHONPATH: $shim, SGLANG_USE_CPU_ENGINE: "1", OMP_NUM_THREADS: "1", HOME: /tmp}
    deploy: !reset null
""")  # noqa: E501
"""SGLang's container without a GPU: this machine's CPU installation in place of the official image."""


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.slow
def test_the_gpu_profile_plays_with_a_real_sglang_in_the_other_container(folder: Path, server_image: str) -> None:
    python = Path(os.environ[VARIABLE])
    # The interpreter with everything it loads, at the paths that it has here.
    folders = {
        "/usr",
        "/lib",
        "/lib64",
        "/etc/ssl",
        str(SHIM),
        str(python.parents[1]),
        str(python.resolve().parents[1]),
    }
    text = STAND_IN.substitute(
        image=server_image,
        python=python,
        folders=", ".join(f'"{path}:{path}:ro"' for path in sorted(folders) if Path(path).exists()),
        shim=SHIM,
        flags=", ".join(json.dumps(flag) for flag in FLAGS),
    )
    (folder / "compose.override.yaml").write_text(text)
    environment = {"TURNSTILE_CONTROL_KEY": KEY, "TURNSTILE_IMAGE": server_image, "MODEL_DIR": str(TINY)}
    compose(folder, "--profile", "gpu", "up", "--wait", "--no-build", timeout_s=UP_S, **environment)
    play("plain-loop")
    with pytest.raises(httpx.TransportError):
        httpx.get("http://127.0.0.1:30000/health")


def test_the_file_is_the_one_that_the_page_names() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for name in ("compose.yaml", "--profile tiny", "--profile gpu", "MODEL_DIR", "WEIGHTS_DIR"):
        assert name in page
