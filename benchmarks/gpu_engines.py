"""Measures SGLang and vLLM with CUDA: tokens per second with and without the gate, and what weight updates take.

    python benchmarks/gpu_engines.py --sglang-python PY --vllm-python PY [--out DIR]
    python benchmarks/gpu_engines.py --dry-run

Needs a machine with a GPU and, for each engine, the Python of an environment that has it. The model has 0.6
billion random parameters and is made on the spot. Each engine runs alone: 64 and 256 calls in flight, called
directly and through the gate in turns, then updates from a folder, from tensors and by NCCL (which needs a second
GPU).

``--dry-run`` starts nothing: it prints every command, imports every part and parses every command of its own. No
figure of this benchmark has been measured yet.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples"))

from gate_parts import report  # noqa: E402
from gate_parts.server import KEY  # noqa: E402
from gate_parts.servers import free_port  # noqa: E402
from gpu_engines_parts import commands, load, update  # noqa: E402
from gpu_engines_parts.commands import CONCURRENT, ENGINES, Ports  # noqa: E402

TOKENS = 256
START_S = 900.0
STOP_S = 30.0
PARTS = ("commands", "load", "model", "update")


def model_commands(models: tuple[Path, Path]) -> list[list[str]]:
    return [commands.make_model(model, seed) for seed, model in enumerate(models, 1)]


def measuring_commands(kind: str, models: tuple[Path, Path], ports: Ports) -> list[list[str]]:
    """What is measured of one engine, in order."""
    found = [
        commands.load(kind, through, concurrent, ports, TOKENS)
        for concurrent in CONCURRENT
        for through in ("engine", "gate", "engine", "gate")
    ]
    return found + [commands.update(kind, way, models, ports) for way in update.NEEDS]


def environment(kind: str | None = None) -> dict[str, str]:
    """Of every process: our parts and the key; of an engine what it needs besides."""
    path = os.pathsep.join([str(HERE), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "TURNSTILE_CONTROL_KEY": KEY}
    return {**os.environ, **(own if kind is None else commands.engine_environment(kind))}


def dry_run() -> None:
    """Prints every command. Raises what a part that cannot be imported or parsed raises."""
    models = Path("MODEL"), Path("OTHER")
    ports = Ports(engine=30000, control=8000, agent=8001, group=29500)
    for name in PARTS:
        ast.parse((HERE / "gpu_engines_parts" / f"{name}.py").read_text())
        import_module(f"gpu_engines_parts.{name}")
    lines = model_commands(models)
    for kind in ENGINES:
        lines.append(commands.engine(kind, "PYTHON", models[0], ports.engine))
        lines.append(commands.server(kind, models[0], Path("DATA"), ports))
        for command in measuring_commands(kind, models, ports):
            part, own = command[2], command[3:]
            (load if part.endswith(".load") else update).arguments(own)
            lines.append(command)
    for line in lines:
        print(shlex.join(line))


@contextmanager
def running(command: list[str], environ: dict[str, str], ready_url: str, log: Path) -> Iterator[None]:
    """A process that answers at ``ready_url``; ended with its group at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=HERE, env=environ, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(ready_url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-4000:]
                raise SystemExit(f"{shlex.join(command)} did not become ready:\n{tail}")
            time.sleep(1)
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measured(pythons: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    models = folder / "model", folder / "other"
    for command in model_commands(models):
        subprocess.run(command, cwd=HERE, env=environment(), check=True)
    rows = []
    for kind, python in pythons.items():
        ports = Ports(*(free_port() for _ in range(4)))
        engine = commands.engine(kind, python, models[0], ports.engine)
        server = commands.server(kind, models[0], folder / f"data-{kind}", ports)
        health = f"http://127.0.0.1:{ports.engine}/health"
        ready = f"http://127.0.0.1:{ports.control}/ready"
        with (
            running(engine, environment(kind), health, folder / f"{kind}.log"),
            running(server, environment(), ready, folder / f"{kind}-turnstile.log"),
        ):
            for command in measuring_commands(kind, models, ports):
                done = subprocess.run(
                    command, cwd=HERE, env=environment(), stdout=subprocess.PIPE, text=True, check=True
                )
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: tokens per second, then updates."""
    out = ["| engine | calls in flight | through | tokens/s |", "|---|---:|---|---:|"]
    out += [
        f"| {row['engine']} | {row['concurrent']} | {row['through']} | {row['tokens_per_s']:,.0f} |"
        for row in rows
        if "through" in row
    ]
    out += ["", "| engine | weights by | median | slowest |", "|---|---|---:|---:|"]
    for row in rows:
        if "skipped" in row:
            out.append(f"| {row['engine']} | {row['way']} | {row['skipped']} | |")
        elif "way" in row:
            median, slowest = f"{row['median_s']:.2f} s", f"{row['slowest_s']:.2f} s"
            out.append(f"| {row['engine']} | {row['way']} | {median} | {slowest} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", help="Python of an environment with SGLang and CUDA")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM and CUDA")
    parser.add_argument("--dry-run", action="store_true", help="print every command, check that its parts load")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for gpu_engines.json and .md")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    named = {"sglang": options.sglang_python, "vllm": options.vllm_python}
    pythons = {kind: python for kind, python in named.items() if python is not None}
    if not pythons:
        parser.error("name at least one of --sglang-python and --vllm-python, or give --dry-run")
    with tempfile.TemporaryDirectory(prefix="gpu-engines-") as folder:
        rows = measured(pythons, Path(folder))
    text = f"{report.machine()}; {time.strftime('%Y-%m-%d', time.gmtime())}.\n\n{tables(rows)}"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_engines.json").write_text(json.dumps({"rows": rows}, indent=1))
    (options.out / "gpu_engines.md").write_text(text)


if __name__ == "__main__":
    main()
