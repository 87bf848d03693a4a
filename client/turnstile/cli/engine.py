"""``turnstile engine …``: the engine's state, pauses, new weights, adapters, sleep and workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from turnstile import weights
from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import USAGE, Column, echo_json, fail, reported, show_facts, show_table
from turnstile.models import EngineInfo, WorkerInfo
from turnstile.sync import Client

ModeOption = Annotated[
    Literal["retract", "in_place", "abort"],
    typer.Option(
        help="What happens to running calls: queued again; held, with their old cache; cut, and continued later."
    ),
]

GROUP = "turnstile-weights"
"""Name of the process group of ``--broadcast``."""

LAST_PORT = 65535


def status(
    as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None, data_dir: DataDirOption = None
) -> None:
    """The engine of the server, or of each of several, and its workers."""
    _act(lambda client: client.engine(), as_json, url, key, data_dir)


def pause(
    mode: ModeOption = "retract",
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Hold all generation until `turnstile engine resume`."""
    _act(lambda client: client.pause(mode), as_json, url, key, data_dir)


def resume(
    as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None, data_dir: DataDirOption = None
) -> None:
    """Undo any number of pauses."""
    _act(lambda client: client.resume(), as_json, url, key, data_dir)


def load_weights(
    path: Annotated[str, typer.Argument(help="Folder of the weights, on the engine's machine.")],
    version: Annotated[str, typer.Argument(help="Name of these weights; each its own.")],
    mode: ModeOption = "retract",
    send: Annotated[
        bool,
        typer.Option("--send", help="PATH is here: send its tensors themselves (needs torch and safetensors)."),
    ] = False,
    broadcast: Annotated[
        str | None,
        typer.Option(help="PATH is here: broadcast its tensors in a process group with its store at HOST:PORT."),
    ] = None,
    backend: Annotated[Literal["nccl", "gloo"], typer.Option(help="Of --broadcast.")] = "nccl",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of --broadcast: ranks of all engines together. Unless given, one of each worker."
        ),
    ] = None,
    group_timeout: Annotated[
        float, typer.Option(min=1.0, help="Of --broadcast: seconds that all ranks have to come.")
    ] = 60.0,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Load new weights: from a folder that the engine reads, or sent or broadcast from here."""
    if send and broadcast is not None:
        fail("take --send or --broadcast, not both", USAGE)
    if ranks is not None and broadcast is None:
        fail("--ranks is of --broadcast", USAGE)
    if not send and broadcast is None:
        path = _engine_folder(path)

    def load(client: Client) -> dict[str, EngineInfo]:
        if broadcast is not None:
            return _broadcast(client, Path(path), version, mode, broadcast, backend, ranks, group_timeout)
        if send:
            return client.update_weights_from_tensors(_tensors(Path(path)), version, mode=mode)
        return client.update_weights(path, version, mode=mode)

    _act(load, as_json, url, key, data_dir)


def _broadcast(
    client: Client,
    folder: Path,
    version: str,
    mode: Literal["retract", "in_place", "abort"],
    store: str,
    backend: Literal["nccl", "gloo"],
    ranks: int | None,
    timeout_s: float,
) -> dict[str, EngineInfo]:
    host, _, port = store.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= LAST_PORT:
        fail(f"--broadcast {store!r} is not HOST:PORT, with a port from 1 to {LAST_PORT}", USAGE)
    tensors = _tensors(folder)  # before engines wait in a group
    engines = client.engine()
    for server, info in engines.items():
        if "distributed" not in info.updates:  # else our own rank would wait for it until the time-out
            ways = ", ".join(info.updates) or "none"
            fail(f"the engine of {server} joins no process group; it takes new weights by: {ways}", USAGE)
    workers = sum(len(info.workers) for info in engines.values())
    ranks = ranks or workers
    if not workers or ranks % workers:
        fail(f"--ranks {ranks} cannot be shared equally by {workers} workers", USAGE)
    size = 1 + ranks
    opened = _in_background(
        partial(
            weights.trainer_group,
            *(GROUP, host, int(port), size),
            backend=backend,
            timeout_s=timeout_s,
            store=weights.open_store(host, int(port), size),
        )
    )
    client.join_weight_group(GROUP, host, int(port), size, backend=backend, ranks_per_worker=ranks // workers)
    try:
        group = opened.result()
        return client.broadcast_weights(tensors, version, group=GROUP, process_group=group, mode=mode)
    finally:
        client.leave_weight_group(GROUP)


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """In a thread. No daemon: one that still waits for ranks when Python ends aborts the process."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits gets it
            done.set_exception(error)

    threading.Thread(target=run).start()
    return done


def _engine_folder(path: str) -> str:
    """The path as the engine can read it: a relative one would be looked for in the folder where the engine was
    started. An empty one is left to the server, which refuses it."""
    if not path or Path(path).is_absolute():
        return path
    here = Path(path).absolute()
    if not here.exists():
        fail(f"{here} is not there; for a folder on the engine's machine give the absolute path", USAGE)
    return str(here)


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of all files. What cannot be read ends the command now, before an engine is asked."""
    if not folder.is_dir():
        fail(f"{folder} is {'a file, not a folder' if folder.exists() else 'not there'}", USAGE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        fail(f"{folder} has no *.safetensors files", USAGE)
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional
    except ImportError:
        fail("sending weights needs safetensors and torch: pip install safetensors torch", USAGE)
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            fail(f"{file} is no safetensors file, or is cut short: {error}", USAGE)

    def read() -> Iterator[tuple[str, Any]]:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    yield name, opened.get_tensor(name)

    return read()


def sleep(
    as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None, data_dir: DataDirOption = None
) -> None:
    """Free the engine's memory, once no call runs."""
    _act(lambda client: client.sleep(), as_json, url, key, data_dir)


def wake(
    as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None, data_dir: DataDirOption = None
) -> None:
    """Take the engine's memory back; then load weights and resume."""
    _act(lambda client: client.wake(), as_json, url, key, data_dir)


def add_worker(
    worker_url: Annotated[str, typer.Argument(help="Base URL of an engine of the same kind and model.")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """An engine joins those that the server spreads its calls over."""
    _act(lambda client: client.add_worker(worker_url), as_json, url, key, data_dir)


def remove_worker(
    worker_id: Annotated[str, typer.Argument(help="As `turnstile engine status` names it.")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """A worker gets no more calls, and goes when those that it has have ended."""
    _act(lambda client: client.remove_worker(worker_id), as_json, url, key, data_dir)


def load_adapter(
    name: Annotated[str, typer.Argument(help="The name that episodes will use.")],
    path: Annotated[str, typer.Argument(help="Folder of the adapter, on the engine's machine.")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Load a LoRA adapter beside the weights."""
    folder = _engine_folder(path)
    _act(lambda client: client.load_adapter(name, folder), as_json, url, key, data_dir)


def unload_adapter(
    name: Annotated[str, typer.Argument(help="Its name.")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Forget a LoRA adapter."""
    _act(lambda client: client.unload_adapter(name), as_json, url, key, data_dir)


def _act(
    action: Callable[[Client], dict[str, EngineInfo]],
    as_json: bool,
    url: list[str] | None,
    key: str | None,
    data_dir: Path | None,
) -> None:
    """Runs the action on every server and shows its engine afterwards."""
    with reported(), connect(url, key, data_dir) as client:
        found = action(client)
    for server, info in found.items():
        if as_json:
            echo_json(info.model_dump_json())
        else:
            _show(server, info)


def _show(server: str, info: EngineInfo) -> None:
    facts: dict[str, Any] = {
        "server": server,
        "engine": "ok" if info.ok else "not reachable",
        "model": info.model_name,
        "weights": info.weight_version or "unknown",
        "paused": "asleep" if info.asleep else info.paused,
        "calls": f"{info.running_calls} running, {info.waiting_calls} waiting",
    }
    if info.detail:
        facts["detail"] = info.detail
    show_facts(facts)
    if info.workers:
        columns = [
            *(Column("worker"), Column("status"), Column("weights"), Column("calls", "number")),
            *(Column("limit", "number", optional=True), Column("cache", "number", optional=True)),
            *(Column("url", optional=True), Column("detail", "text", optional=True)),
        ]
        show_table(columns, [_row(worker) for worker in info.workers])


def _row(worker: WorkerInfo) -> list[str]:
    return [
        worker.worker_id,
        worker.status,
        worker.weight_version or "unknown",
        str(worker.running),
        "" if worker.limit is None else str(worker.limit),
        "" if worker.kv_used is None else f"{worker.kv_used:.0%}",
        worker.url or "",
        worker.detail,
    ]
