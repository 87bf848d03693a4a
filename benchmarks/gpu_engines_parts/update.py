"""How long a weight update takes through Turnstile: from a folder, from tensors, or broadcast by NCCL.

    python -m gpu_engines_parts.update sglang nccl MODEL OTHER --engine-port N --control-port N --group-port N

Uses the client's own calls. NCCL needs a second GPU, because two of its ranks cannot share one. Prints one JSON
line; what cannot be done here has a ``skipped`` in it, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from turnstile import Client

GROUP: Final = "gpu-benchmark"
UPDATES: Final = 5
NEEDS: Final = {
    "disk": ("update_weights",),
    "tensors": ("update_weights_from_tensors",),
    "nccl": ("join_weight_group", "broadcast_weights", "leave_weight_group"),
}
"""Calls of the client by way."""


def measured(options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": options.engine, "way": options.way}
    missing = [name for name in NEEDS[options.way] if name not in dir(Client)]
    if missing:
        return {**row, "skipped": f"this client has no {', '.join(missing)}"}
    key = os.environ["TURNSTILE_CONTROL_KEY"]
    with Client(f"http://127.0.0.1:{options.control_port}", key=key) as client:
        if options.way == "disk":
            return {**row, **_timed(lambda n: client.update_weights(str(options.models[n % 2]), f"disk-{n}"))}
        return {**row, **_from_memory(client, options)}


def _from_memory(client: Any, options: argparse.Namespace) -> dict[str, Any]:
    torch = import_module("torch")
    transformers = import_module("transformers")
    if options.way == "nccl" and torch.cuda.device_count() < 2:
        return {"skipped": "NCCL needs a second GPU for the trainer's rank"}
    device = "cuda:1" if options.way == "nccl" else "cuda:0"
    model = transformers.AutoModelForCausalLM.from_pretrained(options.models[1], dtype=torch.bfloat16).to(device)
    tensors = list(model.state_dict().items())
    if options.way == "tensors":
        return _timed(lambda n: client.update_weights_from_tensors(tensors, f"tensors-{n}"))
    weights = import_module("turnstile.weights")
    joined = threading.Thread(target=client.join_weight_group, args=(GROUP, "127.0.0.1", options.group_port, 2))
    joined.start()
    group = weights.trainer_group(GROUP, "127.0.0.1", options.group_port, 2, backend="nccl")
    joined.join()
    try:
        return _timed(lambda n: client.broadcast_weights(tensors, f"nccl-{n}", group=GROUP, process_group=group))
    finally:
        client.leave_weight_group(GROUP)


def _timed(update: Callable[[int], Any]) -> dict[str, Any]:
    """Median and slowest of ``UPDATES`` updates, in seconds; the first, which also opens connections, apart."""
    times = []
    for number in range(UPDATES + 1):
        began = time.perf_counter()
        update(number)
        times.append(time.perf_counter() - began)
    first, *rest = times
    return {"first_s": first, "median_s": sorted(rest)[len(rest) // 2], "slowest_s": max(rest)}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("way", choices=tuple(NEEDS))
    parser.add_argument("models", type=Path, nargs=2)
    parser.add_argument("--engine-port", type=int, required=True)
    parser.add_argument("--control-port", type=int, required=True)
    parser.add_argument("--group-port", type=int, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(measured(arguments())))
