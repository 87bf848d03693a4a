"""Proves the embedded engine on a GPU: speed, updates by tensors, distances at bfloat16, and a learning run.

    python benchmarks/gpu_proof.py --model FOLDER --device cuda --out OUT      (scripts/gpu_proof.sh calls it)
    python benchmarks/gpu_proof.py --model FOLDER --device cpu --small --out OUT
    python benchmarks/gpu_proof.py --dry-run

For each dtype a server with an engine of its own: the distances of recorded logprobs from the engine's own score
and from a plain float32 forward; updates by tensors, and the distances again with the weights that came so; tokens
per second with 64 and 256 calls in flight, of the engine called directly and through the gate. Then GRPO on the
tiny policy (docs/grpo.md), sampled by the engine on the device in bfloat16. A part that fails is written down, and
the others go on. ``gpu_proof.json`` in OUT has the rows, ``gpu_proof.md`` the tables.

Where a command may take ten minutes, play it as two: with ``--no-learn``, and without ``--model``.

``--dry-run`` starts nothing: it prints every command, imports every part and parses the parts' own commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from gate_parts import report  # noqa: E402
from gate_parts.server import KEY  # noqa: E402
from gate_parts.servers import free_port  # noqa: E402
from gpu_engines import running  # noqa: E402
from gpu_engines_parts import load, update  # noqa: E402
from gpu_proof_parts import commands, distances, other_weights  # noqa: E402
from gpu_proof_parts.commands import DTYPES, SMALL, WHOLE, Place, Size  # noqa: E402
from gpu_proof_parts.tables import tables  # noqa: E402

LEARN_BATCH: Final = 32
MOST_OUTPUT: Final = 2000
"""Characters of a failed command's output that are kept."""
ARGUMENTS: Final[dict[str, Callable[[list[str]], argparse.Namespace]]] = {
    "gpu_engines_parts.load": load.arguments,
    "gpu_engines_parts.update": update.arguments,
    "gpu_proof_parts.distances": distances.arguments,
    "gpu_proof_parts.other_weights": other_weights.arguments,
}
"""Parsers of the parts' own commands, by module."""


class Proof:
    """Plays the parts until ``deadline`` (monotonic seconds), and keeps the rows in ``out`` as they come."""

    def __init__(self, out: Path, device: str, size: Size, deadline: float) -> None:
        self._out = out
        self._device = device
        self._size = size
        self._deadline = deadline
        self.rows: list[dict[str, Any]] = []

    def measure(self, model: Path, dtypes: Sequence[str], work: Path) -> None:
        """All that is measured of servers of ``model``."""
        models = model, work / "other"
        self._run("other weights", commands.other_weights(*models), {})
        for dtype in dtypes:
            place = Place(free_port(), free_port(), "")
            # A folder of its own, in which the engine makes that of its socket: so its socket is found.
            sockets = work / dtype[0]
            sockets.mkdir()
            batch = max(self._size.concurrent)
            environ = {**environment(), **commands.environment(self._device, dtype, batch), "TMPDIR": str(sockets)}
            command = commands.server(model, work / f"data-{dtype}", self._device, dtype, place)
            ready = f"http://127.0.0.1:{place.control}/ready"
            try:
                with running(command, environ, ready, self._out / f"server-{dtype}.log"):
                    (socket,) = sockets.glob("turnstile-engine-*/engine.sock")
                    place = Place(place.control, place.agent, str(socket))
                    for part, asked in commands.measuring(models, self._device, dtype, self._size, place):
                        self._run(part, asked, {"dtype": dtype})
            except SystemExit as error:  # it did not become ready
                self._add({"part": "server", "dtype": dtype, "failed": str(error)[-MOST_OUTPUT:]})

    def learn(self, dtype: str, work: Path) -> None:
        """The learning run, for as long as time is left; what it logged until then counts."""
        began = time.monotonic()
        out = work / "learn"
        settings = commands.environment(self._device, dtype, LEARN_BATCH)
        settings |= {"TURNSTILE_EPISODES__MAX_RUNNING": str(LEARN_BATCH)}
        log = self._out / "learn.log"
        with log.open("wb") as said:
            try:
                done = subprocess.run(
                    commands.learn(out, self._size),
                    cwd=EXAMPLES,
                    env={**environment(), **settings},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    check=False,
                    timeout=self._left_s(),
                )
                ended: int | None = done.returncode
            except subprocess.TimeoutExpired:
                ended = None
        try:
            entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        except OSError:
            self._add({"part": "learn", "dtype": dtype, "failed": log.read_text()[-MOST_OUTPUT:]})
            return
        (self._out / "learn.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        self._add({"part": "learn", "dtype": dtype, "exit": ended, **learned(entries, time.monotonic() - began)})

    def _run(self, part: str, command: list[str], facts: dict[str, Any]) -> None:
        """One command that prints a row as JSON on its last line."""
        left_s = self._left_s()
        try:
            done = subprocess.run(
                command, cwd=HERE, env=environment(), capture_output=True, text=True, check=True, timeout=left_s
            )
        except subprocess.TimeoutExpired:
            self._add({"part": part, **facts, "failed": "no time was left"})
        except subprocess.CalledProcessError as error:
            self._add({"part": part, **facts, "failed": (error.stdout + error.stderr)[-MOST_OUTPUT:]})
        else:
            if done.stdout.strip():
                self._add({"part": part, **facts, **json.loads(done.stdout.splitlines()[-1])})

    def _left_s(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """The rows and their tables, so far."""
        text = f"{machine()}; {time.strftime('%Y-%m-%d', time.gmtime())}.\n\n{tables(self.rows)}"
        report.write_results(self._out, "gpu_proof", {"machine": machine(), "rows": self.rows}, text)


def learned(entries: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The figures of a learning run, of the lines of its ``log.jsonl``."""
    held = [entry["rate"] for entry in entries if entry["kind"] == "held out"]
    steps = [entry for entry in entries if entry["kind"] == "step"]
    gaps = [step["fresh_gap"] for step in steps if step["fresh_gap"] is not None]
    return {
        "before": held[0] if held else None,
        "after": held[1] if len(held) > 1 else None,
        "monitor": [entry["rate"] for entry in entries if entry["kind"] == "monitor"],
        "rewards": [step["reward"] for step in steps],
        "largest_fresh_gap": max(gaps, default=None),
        "drift": [step["drift"] for step in steps],
        "trained_share": min((step["trained_share"] for step in steps), default=None),
        "seconds": seconds,
    }


def machine() -> str:
    """The machine, its card and torch."""
    torch: Any = import_module("torch")
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    transformers: Any = import_module("transformers")
    return f"{card}; {report.machine()}; torch {torch.__version__}, transformers {transformers.__version__}"


def environment() -> dict[str, str]:
    """Of every process: our parts and the key."""
    path = os.pathsep.join([str(HERE), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "TURNSTILE_CONTROL_KEY": KEY}


def all_commands(size: Size) -> Iterator[list[str]]:
    models = Path("MODEL"), Path("OTHER")
    place = Place(8000, 8001, "engine.sock")
    yield commands.other_weights(*models)
    for dtype in DTYPES:
        yield commands.server(models[0], Path("DATA"), "cuda", dtype, place)
        yield from (command for _, command in commands.measuring(models, "cuda", dtype, size, place))
    yield commands.learn(Path("RUN"), size)


def dry_run() -> None:
    """Prints every command. Raises what a part that cannot be imported or parsed raises."""
    for command in all_commands(WHOLE):
        parse = ARGUMENTS.get(command[2])
        if parse is not None:
            parse(command[3:])
        print(shlex.join(command))
    import_module("grpo.grpo")


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder with a short name: the path of a socket in it must be short."""
    with tempfile.TemporaryDirectory(prefix="gp-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (scripts/real_model.py makes one)")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; both, if none is given")
    parser.add_argument("--small", action="store_true", help="a few tokens of everything, to try it on a CPU")
    parser.add_argument("--no-learn", action="store_true", help="leave the learning run out")
    parser.add_argument("--minutes", type=float, default=9.0, help="no command runs longer than until then")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--dry-run", action="store_true", help="print every command, check that its parts load")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
        return
    if options.model is None and options.no_learn:
        parser.error("give --model, or leave --no-learn out: there is nothing to do")
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    proof = Proof(options.out.resolve(), options.device, SMALL if options.small else WHOLE, deadline)
    dtypes = options.dtype or DTYPES
    with work_folder() as work:
        if options.model is not None:
            proof.measure(options.model.resolve(), dtypes, work)
        if not options.no_learn:
            proof.learn(dtypes[0], work)
    proof.write()
    print((options.out / "gpu_proof.md").read_text())
    if any("failed" in row for row in proof.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
