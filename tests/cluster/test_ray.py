"""Servers in a Ray cluster (``turnstile.ray``): a real one, of a head and three nodes on this machine.

Ray has a Python of its own (``TURNSTILE_RAY_PYTHON``, made of ``scripts/ray.txt``), with Turnstile's client and no
server, as a trainer's has; the servers run in this one's. ``ray_program`` plays all of it, in one Ray cluster.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines_support import probe_of
from scripted_engine import ScriptedEngine, scripted_engine
from sglang_faults import answer_by_name

from local import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.anyio, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("ray_program.py")
PAGE = ROOT / "docs" / "cluster.md"


def ray_environment(folder: Path) -> dict[str, str]:
    """A process with Ray and the client alone: its PYTHONPATH has that, and what says that it is installed.
    ``folder``: short, Ray's sockets lie below it."""
    [info] = Path(str(distribution("turnstile-rl").locate_file(""))).glob("turnstile_rl-*.dist-info")
    places = folder / "places"
    places.mkdir()
    (places / info.name).symlink_to(info)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(places)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": f"{folder}/ray",
    }


@asynccontextmanager
async def engine_of(model: Path) -> AsyncIterator[ScriptedEngine]:
    """One for all servers: what several real ones cost is not the subject."""
    async with scripted_engine() as engine:
        engine.generate = answer_by_name
        engine.tokens = [list(ids) for ids in probe_of(model).ids]
        yield engine


def example_of_the_page(folder: Path) -> Path:
    section = PAGE.read_text("utf-8").partition("\n## Ray\n")[2].partition("\n## ")[0]
    path = folder / "example.py"
    path.write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], "utf-8")
    return path


@pytest.fixture(scope="module")
async def seen(tiny_model: Path) -> AsyncIterator[dict[str, Any]]:
    """What the program saw, and ``loaded``: the folders that the engine was told to load."""
    python = os.environ["TURNSTILE_RAY_PYTHON"]
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        example, environment = example_of_the_page(Path(folder)), ray_environment(Path(folder))
        async with engine_of(tiny_model) as engine:
            command = [python, str(PROGRAM), engine.url, str(tiny_model), sys.executable, folder, str(example)]
            done = await anyio.run_process(command, env=environment, check=False)
            assert done.returncode == 0, done.stdout.decode()[-3000:] + done.stderr.decode()[-6000:]
            found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
            sys.stderr.write(f"seconds: {found['times']}; after the loss: {found['loss']['done_s']}\n")
            found["loaded"] = [body for path, body in engine.controls if path == "/update_weights_from_disk"]
        yield found


async def test_a_node_that_dies_costs_its_rollouts_another_attempt_and_no_more(seen: dict[str, Any]) -> None:
    """No wait ends it but that the source leaves the server out: silence and outages have an hour."""
    loss = seen["loss"]
    assert len(loss["open"]) == 3
    assert loss["lost"]["open"] >= 4
    ids = [rollout_id for rollout_id, *_ in loss["given"]]
    assert len(set(ids)) == len(ids) == 24
    assert {status for _, status, *_ in loss["given"]} == {"completed"}
    again = [attempts for *_, attempts, lost in loss["given"] if lost]
    assert again == [2] * loss["lost"]["open"]
    assert loss["turns"] == [2] * 24
    assert len(loss["node"]) == 1, "the host's name of this machine"


async def test_a_node_with_a_notice_of_preemption_ends_its_rollouts_and_takes_no_more(
    seen: dict[str, Any],
) -> None:
    preempted = seen["preempted"]
    assert preempted["states"] == ["draining"]
    ids = [rollout_id for rollout_id, *_ in preempted["given"]]
    assert len(set(ids)) == len(ids) == 24
    assert {tuple(rest) for _, *rest in preempted["given"]} == {("completed", 1, False)}
    assert preempted["after"].startswith("Ray drains its node"), "its server has ended, and is not started again"


async def test_its_server_comes_back_on_another_node(seen: dict[str, Any]) -> None:
    loss = seen["loss"]
    assert sorted(loss["back"]) == ["fleet/0", "fleet/1", "fleet/2"]
    assert loss["back"][loss["lost"]["name"]] != loss["lost"]["address"]


async def test_a_killed_worker_leaves_no_server_and_is_replaced(seen: dict[str, Any]) -> None:
    worker = seen["worker"]
    assert "ray::" in worker["worker"]
    assert worker["before"] == worker["after"] == 2, "a server, and its supervisor"


async def test_new_weights_come_to_the_nodes_through_rays_store_and_replace_those_of_before(
    seen: dict[str, Any],
) -> None:
    (first, *one), (second, *other) = seen["weights"]["seen"]
    assert one == other == [True, True]
    assert first != second
    loaded = [body["model_path"] for body in seen["loaded"]]
    assert loaded == [first] * 3 + [second] * 3, "each server has the engine"
    assert "there are no weights in" in seen["weights"]["missing"]
    assert "cannot be copied to /proc/nowhere" in seen["weights"]["disk"]


async def test_other_processes_find_the_same_servers_by_their_name(seen: dict[str, Any]) -> None:
    code, shown, said = seen["up"]
    assert code == 0, said
    for name in ("fleet/0", "fleet/1", "fleet/2"):
        assert re.search(rf"{name} +127\.0\.1\.\d +http://127\.0\.1\.\d:\d+", shown)
    assert "--url ray:fleet" in said
    served = {"fleet/0", "fleet/1"} - {seen["preempted"]["name"]}
    assert seen["scaled"] == [["fleet/0", "fleet/1"], 2 * len(served)]
    code, shown, said = seen["other"]
    assert code == 0, said
    assert len(set(re.findall(r"http://127\.0\.1\.\d:\d+", shown))) == len(served)


async def test_the_example_of_the_page_runs(seen: dict[str, Any]) -> None:
    assert seen["example"] == [4, {}]


async def test_nothing_is_left_at_the_end(seen: dict[str, Any]) -> None:
    assert seen["down"][0] == 0, seen["down"][1]
    assert seen["left"] == {}
    assert "Finished server process" in seen["log"], "it was told to end, not killed"


async def test_verls_rollout_servers_are_found_by_their_names(seen: dict[str, Any]) -> None:
    assert seen["verl"] == ["http://10.0.0.7:40123"]


async def test_the_healthy_engines_of_a_real_router_are_found(seen: dict[str, Any]) -> None:
    """The program waits for them."""
    assert seen["router"]
    for said in seen["router"]:
        assert "does not answer" in said or "has no healthy engine yet" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("room", "SetupFault: the Ray cluster has room for 9 servers, and 10 are asked for"),
        ("start", "SetupFault: server bad/0 on 127.0.1.* does not start: *nothing*"),
        ("engines", "SetupFault: no actor of this Ray cluster is named"),
        ("router", "SetupFault: the router of the engines does not answer: *workers"),
        ("unknown", "NotFound: this Ray cluster has no servers of the name 'bad'"),
        ("name", "InvalidRequest: the name 'a/b'"),
    ],
)
async def test_a_set_up_that_cannot_work_is_told_at_its_start(seen: dict[str, Any], name: str, said: str) -> None:
    pattern = re.escape(said).replace(r"\*", ".*")
    assert re.match(pattern, seen["bad"][name]), seen["bad"][name]


async def test_a_name_that_is_taken_and_a_cluster_that_is_not_there_are_told(seen: dict[str, Any]) -> None:
    assert seen["taken"].startswith("Conflict: this Ray cluster has servers of the name 'fleet' already")
    assert seen["unreachable"].startswith("SetupFault: no Ray cluster is reachable")
