"""What must be given back: processes, containers, volumes, control groups, sockets, folders, places."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from campaign.crew import descriptors_of_all, server_processes
from campaign.proc import PROC, descendants, open_files, processes, send_signal

if TYPE_CHECKING:
    from campaign.arena import Arena

SPARE_DESCRIPTORS = {"local": 16, "docker": 48}
"""The Docker SDK keeps its connections to the engine, as many as were used at once."""
CGROUPS = Path("/sys/fs/cgroup")
PLACES = ("turnstile_episodes", "turnstile_calls_in_flight", "turnstile_journal_queued_bytes")
SANDBOXES = "sb-" + "?" * 12
"""Folders of sandboxes in ``run_dir``; there is one more, which all share."""


def kill(pid: int) -> None:
    send_signal(pid, signal.SIGKILL)


async def while_serving(arena: Arena) -> list[str]:
    """What a server without episodes must not hold."""
    metrics = await arena.metrics()
    found = [f"{name} is {metrics[name]:g}" for name in PLACES if metrics.get(name)]
    pid = arena.server.pid
    if pid is not None:
        workers = arena.crew.workers()
        if arena.crew.several and len(workers) != arena.crew.count:
            found.append(f"{len(workers)} of {arena.crew.count} workers are there")
        others = [each for each in descendants(pid) if each.pid not in workers]
        found += [f"process {each.pid}: {each.command[:120]}" for each in others]
        now, before = descriptors_of_all(pid), arena.server.descriptors_when_ready
        if now > before + SPARE_DESCRIPTORS[arena.backend] * (1 + len(workers)):
            kinds = ", ".join(f"{count} {what}" for what, count in _open_files(pid).most_common(12))
            found.append(f"{now} descriptors, {before} when it was ready: {kinds}")
    return found + await _sandboxes(arena)


def _open_files(pid: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in server_processes(pid):
        with contextlib.suppress(OSError):
            total += open_files(each)
    return total


async def after_the_end(arena: Arena) -> list[str]:
    """What nobody may hold once the server has ended."""
    found = [f"process {pid}: {command}" for pid, command in of_folder(arena.folder)]
    found += await _sandboxes(arena)
    found += [f"in the temporary folder: {name}" for name in os.listdir(arena.folder / "tmp")]
    if arena.settings.run_dir.exists():
        found += [f"in run_dir: {path.name}" for path in arena.settings.run_dir.rglob("*") if not _of_worker(path)]
    if arena.docker is not None:
        found += [f"container {name[:12]}" for name in await arena.docker.containers(running=False)]
        found += _stale_volumes(await arena.docker.volumes())
    return found


def _of_worker(path: Path) -> bool:
    """The folder below ``run_dir`` that holds a further worker's sandboxes; it stays, as ``run_dir`` does."""
    return re.fullmatch(r"w\d+", path.name) is not None and path.is_dir()


def _stale_volumes(sources: dict[str, str]) -> list[str]:
    """All but one of each folder that is there: that stays when the server ends, because filling it costs time."""
    folders = list(sources.values())
    return [
        f"volume {name} of {folder}"
        for name, folder in sources.items()
        if not Path(folder).is_dir() or folders.count(folder) > 1
    ]


async def _sandboxes(arena: Arena) -> list[str]:
    run_dir = arena.settings.run_dir
    found = [f"folder {path.name} in run_dir" for path in run_dir.rglob(SANDBOXES)]
    for each in [run_dir, *(run_dir / f"w{number}" for number in range(1, arena.crew.count))]:
        prefix = f"turnstile-{hashlib.sha256(bytes(each.resolve())).hexdigest()[:12]}-"
        found += [f"control group {path}" for path in control_groups(prefix)]
    if arena.docker is not None:
        found += [f"container {name[:12]}" for name in await arena.docker.containers()]
    return found


def control_groups(prefix: str) -> list[Path]:
    return [Path(at) / name for at, names, _ in os.walk(CGROUPS) for name in names if name.startswith(prefix)]


def of_folder(folder: Path) -> list[tuple[int, str]]:
    """Processes other than ours that name the folder in their command, or have it mounted or open as their own."""
    mark, found = str(folder), []
    for each in processes().values():
        if each.pid == os.getpid():
            continue
        places = [each.command]
        for name in ("cwd", "root"):
            try:
                places.append(os.readlink(PROC / str(each.pid) / name))
            except OSError:
                continue
        try:
            if "/newroot" not in places[-1]:
                places += [
                    line.split()[3] for line in (PROC / str(each.pid) / "mountinfo").read_text().splitlines()
                ]
        except (OSError, IndexError):
            pass
        if any(mark in place for place in places):
            found.append((each.pid, each.command[:120]))
    return found
