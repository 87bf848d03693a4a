"""Played by ``test_ray`` in a Python that has Ray and Turnstile's client, and no server: a Ray cluster of a head
and three nodes, each at a loopback address of its own, and what becomes of the servers in it.

    ray_program.py ENGINE_URL MODEL SERVER_PYTHON FOLDER EXAMPLE

Prints what it saw as one object of JSON, which the test looks at.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import ray
import ray.cluster_utils
import ray.util

from turnstile import AsyncClient, AsyncNewEpisodeHandle, ClientSettings, Rollout, errors
from turnstile.ray import Cluster, Router, VerlServers
from turnstile.ray.server_source import actor_names

ENGINE, MODEL, PYTHON, FOLDER, EXAMPLE = sys.argv[1:]
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 2,
}
NODES = 3
ROLLOUTS = 24
AT_ONCE = 12
PATIENCE_S = 120.0
# Neither silence nor an outage ends the wait for a server: only that the source leaves it out.
SETTINGS = ClientSettings(silent_s=3600.0, outage_s=3600.0, poll_s=1.0, backoff_s=0.1, backoff_max_s=0.5)


class Ray:
    """The nodes. ``kill`` is a loss of power: the raylet is killed, and what it started with it."""

    def __init__(self) -> None:
        args: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
        self._cluster = ray.cluster_utils.Cluster(
            initialize_head=True, head_node_args={**args, "num_cpus": 0, "_system_config": HEALTH}
        )
        self._nodes = {
            address: self._cluster.add_node(wait=False, num_cpus=3, node_ip_address=address, **args)
            for address in (f"127.0.1.{number}" for number in range(1, NODES + 1))
        }
        os.environ["RAY_ADDRESS"] = self._cluster.address  # as in a job

    def kill(self, address: str) -> None:
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def shutdown(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def wait_until(condition: Callable[[], Any]) -> Any:
    ends = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(condition)
        time.sleep(0.1)
    return found


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


def processes(folder: str) -> dict[int, str]:
    """The command lines of servers and their supervisors with a data directory below ``folder``."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"--data-dir {folder}/" in words:
            found[int(path.parent.name)] = words
    return found


def turnstile(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnstile", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except errors.TurnstileError as error:
        return f"{type(error).__name__}: {error.message}"
    raise AssertionError("it was not refused")


def small(name: str, **changes: Any) -> Cluster:
    options: dict[str, Any] = {"model": MODEL, "engine": "sglang", "engines": [ENGINE], "python": PYTHON}
    options |= {"data_dir": FOLDER, "servers": 1, "flags": ["--sandbox", "none"]}
    return Cluster.start(name, **(options | changes))


def bad_inputs() -> dict[str, str]:
    return {
        "room": refusal(lambda: small("bad", servers=10)),
        "start": refusal(lambda: small("bad", model=f"{FOLDER}/nothing")),
        "engines": refusal(lambda: small("bad", engines=VerlServers())),
        "router": refusal(lambda: small("bad", engines=Router(ENGINE))),
        "unknown": refusal(lambda: Cluster.connect("bad")),
        "name": refusal(lambda: small("a/b")),
    }


class StandIn:
    """An actor with the method of verl's servers that is asked."""

    def get_server_address(self) -> tuple[str, int]:
        return "10.0.0.7", 40123


def verl() -> list[str]:
    """verl's rollout server of a replica on two nodes, and servers that are none of it."""
    names = ("vllm_server_0_0", "vllm_server_0_1", "vllm_server_reward_0_0", "other")
    kept = [ray.remote(StandIn).options(name=name, namespace="verl", num_cpus=0).remote() for name in names]
    found = list(VerlServers().urls())
    for actor in kept:
        ray.kill(actor)
    return found


class Healthy(BaseHTTPRequestHandler):
    """An engine as far as a router looks at it."""

    def do_GET(self) -> None:
        body = b'{"model_path": "m", "served_model_name": "m"}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def router() -> list[str]:
    """What is said of a real sglang-router until its two engines are found."""
    engines = [ThreadingHTTPServer(("127.0.0.1", 0), Healthy) for _ in range(2)]
    for engine in engines:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{engine.server_port}" for engine in engines]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--log-level", "error"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    refused = set[str]()

    def found() -> list[str]:
        try:
            return sorted(Router(f"http://127.0.0.1:{port}/").urls())
        except errors.SetupFault as error:
            refused.add(error.message)
            return []

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: found() == sorted(urls))
    finally:
        process.terminate()
        process.wait()
        for engine in engines:
            engine.shutdown()
            engine.server_close()
    return sorted(refused)


class HeldRollouts:
    """Rollouts of an agent in this process, of which each asks the model twice; ``held`` is between the two."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.held = asyncio.Event()
        self.begun: list[str] = []
        self.given: list[Rollout] = []

    async def begin(self) -> asyncio.Task[None]:
        """The task that collects them, once as many as may be at once have asked."""
        collecting = asyncio.create_task(self._collect())
        await until(lambda: len(self.begun) >= AT_ONCE or collecting.done())
        return collecting

    def told(self) -> list[list[Any]]:
        return [[one.rollout_id, one.status, one.attempts, bool(one.lost)] for one in self.given]

    async def _collect(self) -> None:
        tasks = ["Say hello."] * (ROLLOUTS // 4)
        async for rollout in self._client.rollouts(
            tasks, agent=self._agent, n=4, max_concurrent=AT_ONCE, samples="if_any"
        ):
            self.given.append(rollout)

    async def _agent(self, handle: AsyncNewEpisodeHandle) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": handle.episode_key or ""}, timeout=60) as http:
            await self._ask(http, handle, "first")
            self.begun.append(handle.episode_id)
            await self.held.wait()
            await self._ask(http, handle, "second")

    async def _ask(self, http: httpx.AsyncClient, handle: AsyncNewEpisodeHandle, text: str) -> None:
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        answer = await http.post(f"{handle.model_url}/v1/chat/completions", json=body)
        answer.raise_for_status()


async def lose_a_node(cluster: Cluster, nodes: Ray) -> dict[str, Any]:
    async with cluster.async_client(SETTINGS) as client:
        rollouts = HeldRollouts(client)
        collecting = await rollouts.begin()
        before = {row.url: row for row in await client.servers()}
        reports = {report.url: report for report in await asyncio.to_thread(cluster.servers)}
        victim = max(before.values(), key=lambda row: row.open)
        lost = reports[victim.url]
        killed = asyncio.create_task(asyncio.to_thread(nodes.kill, lost.address))
        at = time.monotonic()
        await until(lambda: len(rollouts.begun) >= AT_ONCE + victim.open or collecting.done())
        again_s = time.monotonic() - at
        rollouts.held.set()
        await collecting
        done_s = time.monotonic() - at
        await killed
    return {
        "open": {row.url: row.open for row in before.values()},
        "node": sorted({row.load.node for row in before.values() if row.load is not None}),
        "lost": {"name": lost.name, "address": lost.address, "open": victim.open},
        "given": rollouts.told(),
        "turns": [one.episode.stats.turns for one in rollouts.given if one.episode is not None],
        "again_s": round(again_s, 1),
        "done_s": round(done_s, 1),
    }


async def preempt(cluster: Cluster) -> dict[str, Any]:
    """A node with one of the three servers is to be taken away in ten minutes."""
    every = await asyncio.to_thread(cluster.servers)
    [victim] = [one for one in every if [other.address for other in every].count(one.address) == 1]
    async with cluster.async_client(SETTINGS) as client:
        rollouts = HeldRollouts(client)
        collecting = await rollouts.begin()
        drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", victim.node_id]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        drain += ["--deadline-remaining-seconds", "600"]
        noticed = await asyncio.to_thread(subprocess.run, drain, capture_output=True, text=True, check=False)
        assert noticed.returncode == 0, noticed.stderr
        states: set[str] = set()
        while "draining" not in states and not collecting.done():
            states = {row.state for row in await client.servers() if row.url == victim.url}
            await asyncio.sleep(0.1)
        rollouts.held.set()
        await collecting
    await until(lambda: not processes(f"{FOLDER}/{victim.name}"))
    after = {one.name: one for one in await asyncio.to_thread(cluster.servers)}
    return {
        "states": sorted(states),
        "given": rollouts.told(),
        "after": after[victim.name].why,
        "name": victim.name,
    }


def back(cluster: Cluster, count: int, without: str = "") -> list[Any]:
    """The servers, once ``count`` are ready, none of them at the address ``without``."""

    def ready() -> list[Any]:
        found = [report for report in cluster.servers() if report.state == "ready"]
        return found if len(found) == count and without not in {one.address for one in found} else []

    found: list[Any] = wait_until(ready)
    return found


def kill_worker(cluster: Cluster, folder: str) -> dict[str, Any]:
    """SIGKILL to the worker of server 0, as when memory runs out."""
    own = f"{folder}/0"
    [supervisor] = [pid for pid, words in processes(own).items() if "turnstile._supervise" in words]
    worker = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    name = Path(f"/proc/{worker}/cmdline").read_bytes().decode(errors="replace")
    before = set(processes(own))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not before & processes(own).keys())
    back(cluster, NODES)
    return {"worker": name, "before": len(before), "after": len(processes(own))}


def weights(cluster: Cluster) -> dict[str, Any]:
    """Two updates from a folder here; what lies on the nodes' disk (they share one) after each."""
    folder = Path(FOLDER, "new")
    (folder / "part").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (folder / "part" / "empty").touch()
    seen = []
    for version in ("v2", "v3"):
        cluster.update_weights(folder, version)
        [there] = Path(FOLDER, "fleet", "weights").iterdir()
        same = (there / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        seen.append([str(there), same, (there / "part" / "empty").is_file()])
    return {
        "seen": seen,
        "missing": refusal(lambda: cluster.put_weights(f"{FOLDER}/nowhere", "v4")),
        "disk": refusal(lambda: cluster.put_weights(folder, "v4", into="/proc/nowhere")),
    }


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    at = time.monotonic()
    yield
    times[name] = round(time.monotonic() - at, 1)
    sys.stderr.write(f"{name}: {times[name]} s\n")


def main() -> None:
    seen: dict[str, Any] = {}
    times: dict[str, float] = {}
    seen["unreachable"] = refusal(lambda: Cluster.connect("bad"))
    with timed(times, "nodes"):
        nodes = Ray()
    try:
        folder = f"{FOLDER}/fleet"
        with timed(times, "up"):
            up = turnstile(
                *("up", "--ray", "--name", "fleet", "--model", MODEL, "--engine", "sglang"),
                *("--engine-url", ENGINE, "--python", PYTHON, "--data-dir", FOLDER, "--", "--sandbox", "none"),
            )
        seen["up"] = [up.returncode, up.stdout, up.stderr]
        cluster = Cluster.connect("fleet")
        seen["taken"] = refusal(lambda: small("fleet"))
        with timed(times, "bad"):
            seen["bad"] = bad_inputs()
        seen["verl"] = verl()
        with timed(times, "router"):
            seen["router"] = router()
        with timed(times, "loss"):
            seen["loss"] = asyncio.run(lose_a_node(cluster, nodes))
            lost = seen["loss"]["lost"]
            found = back(cluster, NODES, lost["address"])
            seen["loss"]["back"] = {report.name: report.address for report in found}
            gone = f"--control-host {lost['address']}"
            wait_until(lambda: not any(gone in words for words in processes(folder).values()))
        with timed(times, "worker"):
            seen["worker"] = kill_worker(cluster, folder)
        with timed(times, "weights"):
            seen["weights"] = weights(cluster)
        with timed(times, "preempted"):
            seen["preempted"] = asyncio.run(preempt(cluster))
        with timed(times, "scale"):
            cluster.scale(2, drain_s=60.0)
            seen["scaled"] = [actor_names("fleet"), len(processes(folder))]
            cluster.sync_engines()
        with timed(times, "second"):
            other = turnstile("top", "--once", "--json", "--url", "ray:fleet")
        seen["other"] = [other.returncode, other.stdout, other.stderr]
        with timed(times, "example"):
            scope = {"MODEL": MODEL, "ENGINES": [ENGINE], "PYTHON": PYTHON, "SERVERS": 1}
            scope["FOLDER"] = FOLDER
            exec(compile(Path(EXAMPLE).read_text(), EXAMPLE, "exec"), scope)
            seen["example"] = [len(scope["rewards"]), processes(f"{FOLDER}/example")]
        with timed(times, "down"):
            down = turnstile("down", "--ray", "--name", "fleet")
        seen["down"] = [down.returncode, down.stderr]
        wait_until(lambda: not actor_names("fleet"))
        seen["left"] = processes(FOLDER)
        seen["log"] = Path(folder, "0", "server.log").read_text()
    finally:
        nodes.shutdown()
    seen["times"] = times
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
