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
    row: dict[str, Any] = {"engine": options.engine, "way": options.way, "tensors": options.dtype}
    missing = [name for name in NEEDS[options.way] if name not in dir(Client)]
    if missing:
        return {**row, "skipped": f"this client has no {', '.join(missing)}"}
    key = os.environ["TURNSTILE_CONTROL_KEY"]
    with Client(f"http://127.0.0.1:{options.control_port}", key=key) as client:
        if options.way == "disk":
            times = _timed(options, lambda n: client.update_weights(str(options.models[n % 2]), f"disk-{n}"))
            return {**row, **times}
        return {**row, **_from_memory(client, options)}


def _from_memory(client: Any, options: argparse.Namespace) -> dict[str, Any]:
    torch = import_module("torch")
    transformers = import_module("transformers")
    if options.way == "nccl" and torch.cuda.device_count() < 2:
        return {"skipped": "NCCL needs a second GPU for the trainer's rank"}
    device = "cuda:1" if options.way == "nccl" else options.device
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.models[1], dtype=dtype).to(device)
    # The names of the folder: a state_dict has a tied output layer besides.
    tensors = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    if options.way == "tensors":
        size = sum(tensor.nbytes for _, tensor in tensors)
        send = client.update_weights_from_tensors
        return {"bytes": size, **_timed(options, lambda n: send(tensors, f"{options.dtype}-{n}"))}
    weights = import_module("turnstile.weights")
    joined = threading.Thread(target=client.join_weight_group, args=(GROUP, "127.0.0.1", options.group_port, 2))
    joined.start()
    group = weights.trainer_group(GROUP, "127.0.0.1", options.group_port, 2, backend="nccl")
    joined.join()
    try:
        return _timed(
            options, lambda n: client.broadcast_weights(tensors, f"nccl-{n}", group=GROUP, process_group=group)
        )
    finally:
        client.leave_weight_group(GROUP)


def _timed(options: argparse.Namespace, update: Callable[[int], Any]) -> dict[str, Any]:
    """Median and slowest of the updates, in seconds; the first, which also opens connections, apart."""
    times = []
    for number in range(options.updates + 1):
        began = time.perf_counter()
        update(number)
        times.append(time.perf_counter() - began)
    first, *rest = times
    return {"first_s": first, "median_s": sorted(rest)[len(rest) // 2], "slowest_s": max(rest)}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm", "embedded"))
    parser.add_argument("way", choices=tuple(NEEDS))
    parser.add_argument("models", type=Path, nargs=2)
    parser.add_argument("--engine-port", type=int, default=0)
    parser.add_argument("--control-port", type=int, required=True)
    parser.add_argument("--group-port", type=int, default=0)
    parser.add_argument("--updates", type=int, default=UPDATES, help="timed ones, after a first")
    parser.add_argument("--device", default="cuda:0", help="of the trainer's tensors")
    parser.add_argument("--dtype", default="bfloat16", help="of the trainer's tensors")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(measured(arguments())))
