"""The recipe for Slurm of docs/cluster.md, word for word: real Slurm, three nodes of one site on this machine.

A reader puts other values in the places of ``/shared/model``, the engine, the image, four nodes and ``JOB``; the
rest is taken as it stands. The job is root's, because a checkout may be root's alone; how sandboxes of a plain
user hold is played by ``tests/sandboxes/test_oci_sandboxes.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from aiohttp import web
from engines_support import probe_of
from scripted_engine import scripted_engine
from sglang_faults import answer_by_name

from local import ROOT, TURNSTILE
from waiting import wait_until, wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.anyio]

SITE = Path(__file__).with_name("slurm_site.sh")
PAGE = ROOT / "docs" / "cluster.md"
NODES = 3
HEAD = "10.0.0.254"
CLONE_NEWNET = 0x40000000


class Site:
    """``folder``: with the homes, the same on every node. ``pid``: of its first process."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.pid = pid
        self.home.mkdir()

    def command(self, *words: str) -> list[str]:
        """Runs a command on the head, as one who has logged in there."""
        own = {"HOME": str(self.home), "SLURM_CONF": str(self.folder / "slurm.conf")}
        own["PATH"] = f"{Path(TURNSTILE).parent}:{os.environ['PATH']}"
        kept = [f"{name}={os.environ[name]}" for name in ("LANG", "TURNSTILE_CI_RUN") if name in os.environ]
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid"]
        return [
            *enter,
            "env",
            f"--chdir={self.home}",
            "-i",
            *kept,
            *(f"{name}={value}" for name, value in own.items()),
            *words,
        ]

    def sh(self, script: str) -> str:
        done = subprocess.run(self.command("bash", "-euc", script), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def processes(self) -> list[str]:
        """The commands of all processes of the site."""
        shown = self.sh("exec ps -eo args=").splitlines()
        return sorted(line for line in shown if not line.startswith("ps "))

    def logs(self) -> str:
        """The end of each, for a test that fails."""
        logs = [*self.folder.glob("*.log"), *self.home.glob("slurm-*.out")]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in logs)

    def listener(self) -> socket.socket:
        """Of this process, at the head's address."""
        made: list[socket.socket] = []

        def listen() -> None:  # in a thread: it moves to another network for good
            with open(f"/proc/{self.pid}/ns/net") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server((HEAD, 0)))

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        return made[0]


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as name:
        folder = Path(name)
        apart = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen([*apart, SITE, folder], stdin=subprocess.DEVNULL)
        try:
            wait_until_sync(lambda: (folder / "up").exists() or process.poll() is not None)
            assert process.poll() is None, "the site does not start"
            [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            found = Site(folder, int(first))
            wait_until_sync(lambda: found.sh("sinfo --noheader --format=%t").split() == ["idle"])
            yield found
            sys.stderr.write(found.logs())
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def bridged(listener: socket.socket, url: str) -> AsyncIterator[str]:
    """The address at which connections to the listener reach a server of another network."""
    target = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            other_reader, other_writer = await asyncio.open_connection(target.hostname, target.port)
            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(1 << 16):
                writer.write(part)
        finally:
            writer.close()

    host, port = listener.getsockname()
    async with await asyncio.start_server(serve, sock=listener):
        yield f"http://{host}:{port}"


def blocks_of_the_page() -> tuple[str, list[str]]:
    """The batch script, and the lines that the reader types."""
    section = PAGE.read_text("utf-8").partition("\n## Slurm\n")[2].partition("\n## ")[0]
    [script] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    [typed] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return script, typed.splitlines()


def with_values(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        assert name in text, name
        text = text.replace(name, value)
    return text


@pytest.mark.parametrize(
    "limit", ["", pytest.param("--time=12 ", marks=pytest.mark.thorough)], ids=["scancel", "time limit"]
)
async def test_the_recipe_of_the_page_plays_rollouts_on_three_nodes_and_drains_before_the_limit(
    site: Site, tiny_model: Path, docker_image: str, limit: str
) -> None:
    """``limit``: ten minutes before it Slurm itself sends the signal; else the test has it sent."""
    daemons = site.processes()
    image, held = site.folder / "python.tar", anyio.Event()
    await anyio.run_process(["docker", "image", "save", "--output", str(image), docker_image])

    async def generate(request: web.Request) -> web.StreamResponse:
        await held.wait()
        return await answer_by_name(request)

    async with scripted_engine() as engine, bridged(site.listener(), engine.url) as url:
        engine.generate = generate
        engine.tokens = [list(ids) for ids in probe_of(tiny_model).ids]
        script, (key, submit, run) = blocks_of_the_page()
        values = {"/shared/model": str(tiny_model), "http://gpu-1:30000": url}
        values |= {"/shared/python.tar": str(image), "--nodes=4": f"--nodes={NODES}"}
        (site.home / "servers.sbatch").write_text(with_values(script, values))
        site.sh(key)
        job = site.sh(with_values(submit, {"sbatch ": f"sbatch {limit}"})).split()[-1]
        servers = site.home / "turnstile" / f"servers-{job}"
        await wait_until(lambda: len([*servers.glob("[0-9]")]) == NODES, "three files of addresses")
        ask = 'curl -fsS -H "Authorization: Bearer $(cat ~/turnstile/key)" $(cat {})/load || echo {{}}'

        def loads() -> list[dict[str, Any]]:
            return [json.loads(site.sh(ask.format(servers / str(rank)))) for rank in range(NODES)]

        await wait_until(lambda: all(loads()), "all serve: one that is late may find nothing left to do")
        typed = site.command("bash", "-euc", with_values(run, {"JOB": job}))
        running = await anyio.open_process(typed, stderr=subprocess.STDOUT)
        await wait_until(lambda: all(load["running"] for load in loads()), "episodes on every server")
        if not limit:
            site.sh(f"scancel --batch --signal=TERM {job}")
        await wait_until(lambda: all(load["draining"] for load in loads()), "the signal", within_s=240)
        held.set()
        assert running.stdout is not None
        said = b"".join([part async for part in running.stdout]).decode()
        assert await running.wait() == 0, said
    assert "failed: none" in said
    await wait_until(lambda: site.sh("squeue --noheader") == "")
    assert "JobState=COMPLETED" in site.sh(f"scontrol show job {job}")
    assert [*servers.iterdir()] == []
    await wait_until(lambda: site.processes() == daemons)
