"""What one huge call does to the small calls of other episodes, and to the control API.

    python benchmarks/beside.py [--quick] [--only TEXT …] [--write-docs] [--out DIR]

A real server with a mock engine that answers at once. One client makes small calls in one episode, one after the
other, and asks for ``/health`` and for the episode's status; meanwhile another sends one huge call in another
episode. The table has, for each huge call, what became of it, and the small requests' latency while it was there:
the median, the 99th percentile and the worst. *Alone* is the same client with nothing beside it, measured in turns
with the huge calls. A *delay* is a latency less the median alone. The run fails if a small call fails.

Server and client have one core each; the huge call's client shares the latter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples"))

from gate_parts import report  # noqa: E402
from gate_parts.huge import HugeCall, Sent, huge_calls, send  # noqa: E402
from gate_parts.server import KEY, Server  # noqa: E402
from gate_parts.servers import Servers  # noqa: E402
from gate_parts.wire import Connection  # noqa: E402
from local import tiny_model  # noqa: E402

ALONE_S = 1.0
LEAST_S = 0.3
"""A huge call is measured with what follows it up to this time: its memory is released then."""
BEGIN, END = "<!-- benchmarks/beside.py writes from here -->", "<!-- to here, beside -->"
QUICK = ("28 MB of text", "2 MB of text")
HOST = "127.0.0.1"


@dataclass
class Latencies:
    """Seconds of the small requests, by kind."""

    model: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    status: list[float] = field(default_factory=list)


class SmallClient:
    """Makes small requests, one after the other, over two connections that stay open."""

    def __init__(self, server: Server, model: Connection, control: Connection) -> None:
        self._model, self._control = model, control
        self._head = server.head(0, 1)
        episode = server.paths[0][0].split("/")[2]
        self._gets = {
            "health": self._get("/health"),
            "status": self._get(f"/episodes/{episode}"),
        }
        self._calls = 0

    def _get(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {KEY}\r\n".encode()

    async def round(self, into: Latencies) -> None:
        """A model call, a look at /health, a status poll. Raises SystemExit for one that fails."""
        self._calls += 1
        message = {"role": "user", "content": f"small call {self._calls}"}
        answer = await self._model.request(self._head, [json.dumps({"messages": [message]}).encode()])
        into.model.append(_ok(answer.status, answer.body, answer.total_s))
        for kind, head in self._gets.items():
            answer = await self._control.request(head, [])
            getattr(into, kind).append(_ok(answer.status, answer.body, answer.total_s))


def _ok(status: int, body: bytes, seconds: float) -> float:
    if status != 200:
        raise SystemExit(f"a small request was answered {status}: {body[:300]!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One huge call, or none (``sent`` None), and the small requests beside it.

    ``peak_mb``: the server's memory."""

    name: str
    sent: Sent | None
    beside: Latencies
    peak_mb: int

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"name": self.name, "peak_mb": self.peak_mb}
        if self.sent is not None:
            figures |= {"status": self.sent.status, "seconds": self.sent.seconds, "words": self.sent.words}
        for kind in ("model", "health", "status"):
            times = sorted(getattr(self.beside, kind))
            figures[f"{kind}_calls"] = len(times)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                figures[f"{kind}_{name}_ms"] = 1e3 * times[min(int(share * len(times)), len(times) - 1)]
        return figures


async def measured(folder: Path, calls: Sequence[HugeCall]) -> list[Row]:
    model = tiny_model()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    rows: list[Row] = []
    async with Servers(folder, model, (cores[0], cores[-1]), 2) as servers:
        server = await servers.turnstile("process")
        assert server.control_url is not None
        model_port, control_port = server.port, int(server.control_url.rpartition(":")[2])
        connections = [await Connection.open(model_port), await Connection.open(control_port)]
        small = SmallClient(server, connections[0], connections[1])
        for _ in range(30):
            await small.round(Latencies())
        alone = Latencies()
        for call in calls:
            until = time.monotonic() + ALONE_S
            while time.monotonic() < until:
                await small.round(alone)
            _reset_peak(server)
            body = call.body()
            beside = Latencies()
            least = time.monotonic() + LEAST_S
            path, headers = await server.new_episode()  # five refusals in a row would end an old one
            sending = asyncio.create_task(asyncio.to_thread(send, HOST, model_port, path, headers, body))
            while not sending.done() or time.monotonic() < least:
                await small.round(beside)
            rows.append(Row(call.name, await sending, beside, _peak_mb(server)))
            print(json.dumps(rows[-1].figures()), flush=True)
        for connection in connections:
            connection.close()
    return [Row("alone", None, alone, 0), *rows]


def _reset_peak(server: Server) -> None:
    Path(f"/proc/{server.process.popen.pid}/clear_refs").write_text("5")


def _peak_mb(server: Server) -> int:
    status = Path(f"/proc/{server.process.popen.pid}/status").read_text()
    return next(int(line.split()[1]) // 1000 for line in status.splitlines() if line.startswith("VmHWM"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown. The first row is the small calls alone."""
    alone = rows[0]
    out = [
        "| beside the small calls | its answer | after s | p50 ms | p99 ms | worst ms | worst delay ms "
        "| `/health` worst ms | status worst ms | server's peak MB |",
        "|---|---|" + "---:|" * 8,
    ]
    for row in rows:
        answer = "-" if row is alone else str(row["status"])
        took = "-" if row is alone else f"{row['seconds']:.2f}"
        peak = "-" if row is alone else str(row["peak_mb"])
        cells = [f"{row[f'model_{name}_ms']:.1f}" for name in ("p50", "p99", "max")]
        cells.append(f"{row['model_max_ms'] - alone['model_p50_ms']:.1f}")
        cells += [f"{row['health_max_ms']:.1f}", f"{row['status_max_ms']:.1f}"]
        out.append(f"| {' | '.join([row['name'], answer, took, *cells, peak])} |")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", help="only the huge calls whose name has one of these texts")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for beside.json and beside.md")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    options = parser.parse_args()
    wanted = QUICK if options.quick else options.only or ("",)
    calls = [call for call in huge_calls() if any(text in call.name for text in wanted)]
    began, load = time.time(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="beside-benchmark-") as folder:
        rows = uvloop.run(measured(Path(folder), calls))
    figures = [row.figures() for row in rows]
    date = time.strftime("%Y-%m-%d", time.gmtime(began))
    text = f"{report.machine()}; load average before the run {load:.1f}; {date}.\n\n{table(figures)}"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "beside.json").write_text(json.dumps(figures, indent=1))
    (options.out / "beside.md").write_text(text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text, BEGIN, END)


if __name__ == "__main__":
    main()
