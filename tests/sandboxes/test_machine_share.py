"""What a process may use of its machine is read off its control groups, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turnstile_server import machine_share
from turnstile_server.machine_share import ControlGroups, core_count, usable_cores, usable_memory_bytes
from turnstile_server.settings import GradingSettings, Settings
from turnstile_server.settings.machine import machine_resources
from turnstile_server.workers.serve import worker_count


def groups(tmp_path: Path, own: str, files: dict[str, str]) -> ControlGroups:
    root, named = tmp_path / "mounted", tmp_path / "own"
    root.mkdir()
    named.write_text(own)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return ControlGroups(root, named)


V2, V1 = "0::/pod/box\n", "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, id="a container's own group is the root"),
        pytest.param(V2, {"pod/box/cpu.max": "200000 100000\n"}, 2.0, id="a group of its own"),
        pytest.param(
            V2,
            {"pod/cpu.max": "100000 100000\n", "pod/box/cpu.max": "max 100000\n"},
            1.0,
            id="the bound of a group above it holds",
        ),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, id="no bound"),
        pytest.param("0::/\n", {"cpu.max": "nonsense"}, None, id="nothing that can be read"),
        pytest.param("", {}, None, id="no control groups"),
        pytest.param(V1, {f"cpu/box/{QUOTA}": "50000\n", f"cpu/box/{PERIOD}": "100000\n"}, 0.5, id="version 1"),
        pytest.param(V1, {f"cpu/box/{QUOTA}": "-1\n", f"cpu/box/{PERIOD}": "100000\n"}, None, id="1, no bound"),
        pytest.param(
            "1:cpu:/docker/on/the/host\n",
            {f"cpu/{QUOTA}": "300000\n", f"cpu/{PERIOD}": "100000\n"},
            3.0,
            id="version 1 in a container: the host's path is not mounted",
        ),
    ],
)
def test_the_bound_of_cpu_time(tmp_path: Path, own: str, files: dict[str, str], cpus: float | None) -> None:
    assert groups(tmp_path, own, files).cpus() == cpus


@pytest.mark.parametrize(
    ("own", "files", "most"),
    [
        ("0::/\n", {"memory.max": "1073741824\n"}, 1 << 30),
        (V2, {"pod/memory.max": "1024\n", "pod/box/memory.max": "4096\n"}, 1024),
        ("0::/\n", {"memory.max": "max\n"}, None),
        (V1, {"memory/box/memory.limit_in_bytes": "4096\n"}, 4096),
    ],
)
def test_the_bound_of_memory(tmp_path: Path, own: str, files: dict[str, str], most: int | None) -> None:
    assert groups(tmp_path, own, files).memory_bytes() == most


def test_defaults_go_by_the_cores_that_the_group_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"cpu.max": "250000 100000\n", "memory.max": f"{64 << 20}\n"}
    fake = groups(tmp_path, "0::/\n", bounds)
    monkeypatch.setattr(machine_share, "ControlGroups", lambda: fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    machine_resources.cache_clear()
    try:
        assert (usable_cores(), core_count(), usable_memory_bytes()) == (2.5, 2, 64 << 20)
        assert (machine_resources()["cpus"], machine_resources()["memory_mb"]) == (2.5, 64)
        assert GradingSettings().places == 4
        assert worker_count(Settings.model_validate({"workers": {"count": "auto"}})) == 2
        (tmp_path / "mounted" / "cpu.max").write_text("10000 100000\n")
        assert (usable_cores(), core_count()) == (0.1, 1)
    finally:
        machine_resources.cache_clear()


def test_without_a_bound_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = groups(tmp_path, "0::/\n", {"cpu.max": "max 100000\n"})
    monkeypatch.setattr(machine_share, "ControlGroups", lambda: fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    assert (usable_cores(), core_count()) == (3.0, 3)
