"""Played by ``test_ray_autoscaler`` in a Python that has Ray and Turnstile's client: a head without a CPU, and
Ray's autoscaler, whose provider starts nodes as processes of this machine.

    autoscaler_program.py ENGINE_URL MODEL SERVER_PYTHON FOLDER

Runs in name spaces of its own, of processes and of networks: nothing outlives it. Prints what it saw as one object
of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray

from turnstile.ray import Cluster

ENGINE, MODEL, PYTHON, FOLDER = sys.argv[1:]
PATIENCE_S = 120.0
ADDRESS = "127.0.0.1:6379"  # the only one that the provider's nodes look for
HEAD, NODE = "ray.head.default", "node"  # the provider knows the head by this name
FILLED_IN = {  # by Ray's launcher, not by the head
    "mappings": ("auth", "docker", "file_mounts"),
    "lists": (
        *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands"),
        *("setup_commands", "head_setup_commands", "worker_setup_commands"),
        *("head_start_ray_commands", "worker_start_ray_commands"),
    ),
}
CONFIG: dict[str, object] = {
    "cluster_name": "autoscaled",
    "max_workers": 2,
    "upscaling_speed": 100.0,
    "idle_timeout_minutes": 5,
    "provider": {
        "type": "fake_multinode",
        **dict.fromkeys(("disable_node_updaters", "disable_launch_config_check", "foreground_node_launch"), True),
    },
    "head_node_type": HEAD,
    "available_node_types": {
        HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        NODE: {"resources": {"CPU": 2, "object_store_memory": 80 << 20}, "node_config": {}, "max_workers": 2},
    },
    "file_mounts_sync_continuously": False,
    **{name: {} for name in FILLED_IN["mappings"]},
    **{name: [] for name in FILLED_IN["lists"]},
}


def ray_command(*words: str) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def requested() -> str:
    """What Ray's own command says that is asked for."""
    words = ray_command("status", f"--address={ADDRESS}").partition("From request_resources:")[2]
    return words.strip().splitlines()[0].strip()


def main() -> None:
    config = Path(FOLDER, "autoscaler.json")
    config.write_text(json.dumps(CONFIG))
    options = ("--num-cpus=0", "--object-store-memory=80000000", "--include-dashboard=false")
    sys.stderr.write(ray_command("start", "--head", *options, f"--autoscaling-config={config}"))
    os.environ["RAY_ADDRESS"] = ADDRESS
    ray.init(address=ADDRESS, log_to_driver=False)
    seen: dict[str, object] = {"before": alive()}
    resources = {"CPU": 2.0}
    with Cluster.start(
        "auto",
        model=MODEL,
        engine="sglang",
        engines=[ENGINE],
        servers=2,
        python=PYTHON,
        data_dir=FOLDER,
        resources=resources,
        flags=["--sandbox", "none"],
        autoscale=True,
        start_s=PATIENCE_S,
    ) as cluster:
        seen["nodes"] = alive()
        seen["servers"] = len({report.node_id for report in cluster.servers()})
        cluster.scale(1)
        seen["one"] = wait_for("{'CPU': 2.0}: 1 from request_resources()")
    seen["none"] = wait_for("(none)")
    sys.stdout.write(json.dumps(seen))


def wait_for(wanted: str) -> str:
    ends = time.monotonic() + PATIENCE_S
    while (found := requested()) != wanted and time.monotonic() < ends:
        time.sleep(0.5)
    return found


if __name__ == "__main__":
    main()
