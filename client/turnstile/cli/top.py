"""``turnstile top``: what the servers do now: rates, engines and open episodes, again and again.

Rates are differences of the counters of ``GET /metrics``. On a terminal the picture stays in its place; elsewhere
it is printed once.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import Column, echo, echo_json, reported, show_table
from turnstile.models import EngineInfo, Episode, EpisodeStatus
from turnstile.sync import Client
from turnstile.visible import visible, visible_line

_NODE = re.compile(r'^turnstile_server_info{node="([^"]*)"', re.MULTILINE)
_SAMPLE = re.compile(r"(turnstile_\w+)(?:{(.*)})? (\S+)")
_OPEN = (EpisodeStatus.RUNNING, EpisodeStatus.GRADING, EpisodeStatus.PREPARING, EpisodeStatus.QUEUED)
_RATES = {
    "tokens/s": "turnstile_tokens_sampled_total",
    "turns/s": "turnstile_engine_seconds_count",
    "ended/s": "turnstile_episodes_ended_total",
    "failed/s": "turnstile_episodes_failed_total",
}
"""By head of a column, the counter. Every call that took time of the engine is a turn."""
_SERVERS = [
    Column("server"),
    *(
        Column(head, "number", short)
        for head, short in zip(_RATES, ("tok/s", "turn/s", "end/s", "fail/s"), strict=True)
    ),
    Column("in flight", "number", "calls"),
    *(Column(status.value, "number", status.value[:4]) for status in reversed(_OPEN)),
    Column("node", "text", optional=True),
]
_WORKERS = [
    Column("engine"),
    Column("status"),
    Column("weights"),
    Column("calls", "number"),
    Column("most", "number"),
    Column("cache", "number"),
    Column("detail", "text", optional=True),
]
_EPISODES = [
    Column("episode"),
    Column("status"),
    Column("agent"),
    Column("task", "text"),
    Column("turns", "number"),
    Column("tokens", "number"),
    Column("s", "number"),
]


def top(
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two pictures.")] = 2.0,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Open episodes that are shown.")] = 20,
    once: Annotated[bool, typer.Option("--once", help="One picture, as plain text.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Shows what the servers do now, until Ctrl-C. Not on a terminal, or with --json: once."""
    with reported(), connect(url, key, data_dir) as client:
        before = Look.take(client, limit)
        time.sleep(interval)
        now = Look.take(client, limit)
        if as_json:
            echo_json(json.dumps(now.facts(before)))
        elif once or not sys.stdout.isatty():
            for number, (columns, rows) in enumerate(now.tables(before)):
                echo("" if number else f"{time.strftime('%H:%M:%S')}\n")
                show_table(columns, rows)
        else:
            with (
                suppress(KeyboardInterrupt),
                _Interrupts() as interrupts,
                Live(_picture(now, before), screen=True, auto_refresh=False) as live,
            ):
                while not interrupts.came:
                    time.sleep(interval)
                    before, now = now, Look.take(client, limit)
                    live.update(_picture(now, before), refresh=True)


class _Interrupts:
    """Remembers Ctrl-C for the length of a block. The exception alone is not enough: it is lost where it is raised
    in what must not raise, such as a finalizer."""

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, *_: object) -> None:
        self.came = True
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Look:
    """The servers at one moment. ``metrics``: by URL, by name, the sum over the labels; the status of ``episodes``
    apart. ``nodes``: the host's name of each that tells it."""

    at: float
    metrics: Mapping[str, Mapping[str, float]]
    nodes: Mapping[str, str]
    engines: Mapping[str, EngineInfo]
    episodes: Sequence[Episode]

    @classmethod
    def take(cls, client: Client, limit: int) -> Look:
        told = client.metrics()
        metrics = {server: _sums(text) for server, text in told.items()}
        nodes = {server: found[1] for server, text in told.items() if (found := _NODE.search(text))}
        episodes = islice((each for status in _OPEN for each in client.episodes(status=status)), limit)
        return cls(time.monotonic(), metrics, nodes, client.engine(), tuple(episodes))

    def rates(self, before: Look, server: str) -> dict[str, float]:
        """A counter that is less than before began anew: its server was started again."""
        now, then = self.metrics[server], before.metrics.get(server, {})
        passed = max(self.at - before.at, 1e-9)
        return {
            head: (
                now.get(name, 0.0) - (then.get(name, 0.0) if then.get(name, 0.0) <= now.get(name, 0.0) else 0.0)
            )
            / passed
            for head, name in _RATES.items()
        }

    def tables(self, before: Look) -> Iterator[tuple[Sequence[Column], list[list[str]]]]:
        yield _SERVERS, [self._server_row(before, server) for server in self.metrics]
        yield _WORKERS, [row for server, engine in self.engines.items() for row in _worker_rows(server, engine)]
        yield _EPISODES, [_episode_row(episode) for episode in self.episodes]

    def facts(self, before: Look) -> dict[str, Any]:
        """As JSON: of each server its rates, its counts and its engine; the open episodes."""
        servers = [
            {
                "server": server,
                "node": self.nodes.get(server),
                "rates": self.rates(before, server),
                "calls_in_flight": int(metrics.get("turnstile_calls_in_flight", 0)),
                "episodes": {status.value: _open(metrics, status) for status in _OPEN},
                "engine": self.engines[server].model_dump(mode="json"),
            }
            for server, metrics in self.metrics.items()
        ]
        return {"servers": servers, "episodes": [episode.model_dump(mode="json") for episode in self.episodes]}

    def _server_row(self, before: Look, server: str) -> list[str]:
        metrics = self.metrics[server]
        rates = [f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}" for rate in self.rates(before, server).values()]
        in_flight = f"{metrics.get('turnstile_calls_in_flight', 0):.0f}"
        counts = [str(_open(metrics, status)) for status in reversed(_OPEN)]
        return [_place(server), *rates, in_flight, *counts, self.nodes.get(server, "")]


def _sums(text: str) -> dict[str, float]:
    """Every metric by name, summed over its labels; ``turnstile_episodes`` by its status, ``name/status``."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None:
            name, labels, value = sample.groups()
            status = re.search(r'status="(\w+)"', labels or "")
            found[f"{name}/{status[1]}" if name == "turnstile_episodes" and status else name] += float(value)
    return dict(found)


def _open(metrics: Mapping[str, float], status: EpisodeStatus) -> int:
    return int(metrics.get(f"turnstile_episodes/{status.value}", 0))


def _place(server: str) -> str:
    """Host and port of a server's URL."""
    return urlsplit(server).netloc.rpartition("@")[2]


def _worker_rows(server: str, engine: EngineInfo) -> Iterator[list[str]]:
    """A row for each worker; one for an engine that is no fleet."""
    held = "" if engine.paused_s is None else f"held for {engine.paused_s:.0f} s"
    waiting = f"{engine.waiting_calls} calls wait" if engine.waiting_calls else ""
    for worker in engine.workers:
        yield [
            f"{_place(server)} {worker.worker_id}",
            worker.status,
            worker.weight_version or "-",
            str(worker.running),
            "-" if worker.limit is None else str(worker.limit),
            "-" if worker.kv_used is None else f"{worker.kv_used:.0%}",
            "; ".join(filter(None, (worker.detail, held, waiting))),
        ]
    if not engine.workers:
        status = "asleep" if engine.asleep else "paused" if engine.paused else "serving" if engine.ok else "down"
        detail = "; ".join(filter(None, (engine.detail, held, waiting)))
        yield [_place(server), status, engine.weight_version or "-", str(engine.running_calls), "-", "-", detail]


def _episode_row(episode: Episode) -> list[str]:
    return [
        episode.episode_id,
        episode.status.value,
        episode.agent,
        visible_line(episode.task.id or episode.task.instruction or "inline", 40),
        str(episode.stats.turns),
        str(episode.stats.sampled_tokens),
        f"{max(0.0, time.time() - episode.timings.created_at):.0f}",
    ]


def _picture(now: Look, before: Look) -> Group:
    shown: list[Any] = [Text(f"turnstile top  {time.strftime('%H:%M:%S')}  (Ctrl-C ends it)\n")]
    for columns, rows in now.tables(before):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(
                column.head,
                justify="right" if column.kind == "number" else "left",
                overflow="ellipsis",
                no_wrap=True,
            )
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        shown += [table, Text("")]
    return Group(*shown)
