"""The recipe for Slurm of docs/cluster.md, word for word: real Slurm, three nodes of one site on this machine.

A reader puts other values in the places of ``/shared/model``, the engine, the image, four nodes and ``JOB``; the
rest is taken as it stands. The job is root's, because a checkout may be root's alone; how sandboxes of a plain
user hold is played by ``tests/sandboxes/test_oci_sandboxes.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from aiohttp import web
from engines_support import probe_of
from other_network import bridged
from scripted_engine import scripted_engine
from sglang_faults import answer_by_name

from local import ROOT, TURNSTILE
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.anyio]

SITE = Path(__file__).with_name("slurm_site.sh")
PAGE = ROOT / "docs" / "cluster.md"
NODES = 3
HEAD = "10.0.0.254"


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

    async def sh(self, script: str) -> str:
        done = await anyio.run_process(self.command("bash", "-euc", script), check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout.decode()}{done.stderr.decode()}"
        return done.stdout.decode()

    async def until(self, script: str, within_s: float = 240.0) -> None:
        """Waits on the head: a look is a few processes."""
        with anyio.fail_after(within_s):
            await self.sh(f"until {script}; do sleep 0.3; done")

    async def processes(self) -> list[str]:
        """The commands of all processes of the site."""
        shown = (await self.sh("exec ps -eo args=")).splitlines()
        return sorted(line for line in shown if not line.startswith("ps "))

    def logs(self) -> str:
        """The end of each, for a test that fails."""
        logs = [*self.folder.glob("*.log"), *self.home.glob("slurm-*.out")]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in logs)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as name:
        folder = Path(name)
        apart = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = await anyio.open_process(
            [*apart, SITE, folder], stdin=subprocess.DEVNULL, stdout=None, stderr=None
        )
        try:
            await wait_until(lambda: (folder / "up").exists() or process.returncode is not None)
            assert process.returncode is None, "the site does not start"
            children = anyio.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            [first] = (await children.read_text()).split()
            found = Site(folder, int(first))
            await found.until('[ "$(sinfo --noheader --format=%t)" = idle ]')
            yield found
            sys.stderr.write(found.logs())
        finally:
            process.kill()
            await process.wait()


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
    daemons, said = await site.processes(), list[str]()
    image, held = site.folder / "python.tar", anyio.Event()
    await anyio.run_process(["docker", "image", "save", "--output", str(image), docker_image])

    async def generate(request: web.Request) -> web.StreamResponse:
        await held.wait()
        return await answer_by_name(request)

    async with scripted_engine() as engine, bridged(engine.url, site.pid, HEAD) as url:
        engine.generate = generate
        engine.tokens = [list(ids) for ids in probe_of(tiny_model).ids]
        script, (key, submit, run) = blocks_of_the_page()
        values = {"/shared/model": str(tiny_model), "http://gpu-1:30000": url}
        values |= {"/shared/python.tar": str(image), "--nodes=4": f"--nodes={NODES}"}
        (site.home / "servers.sbatch").write_text(with_values(script, values))
        await site.sh(key)
        job = (await site.sh(with_values(submit, {"sbatch ": f"sbatch {limit}"}))).split()[-1]
        servers = site.home / "turnstile" / f"servers-{job}"
        load = 'curl -fs -H "Authorization: Bearer $(cat ~/turnstile/key)" $(cat {})/load | grep -q {}'

        async def until_all_say(what: str) -> None:
            await site.until(
                " && ".join(load.format(servers / str(rank), shlex.quote(what)) for rank in range(NODES))
            )

        # All serve: one that is late may find nothing left to do.
        await until_all_say("server_id")
        typed = site.command("bash", "-euc", with_values(run, {"JOB": job}))
        async with anyio.create_task_group() as tasks:

            async def play() -> None:
                done = await anyio.run_process(typed, check=False)
                said.append((done.stdout + done.stderr).decode())
                assert done.returncode == 0, said

            tasks.start_soon(play)
            await until_all_say('"running":[1-9]')
            if not limit:
                await site.sh(f"scancel --batch --signal=TERM {job}")
            await until_all_say('"draining":true')
            held.set()
    assert "failed: none" in said[0]
    await site.until('[ -z "$(squeue --noheader)" ]')
    assert "JobState=COMPLETED" in await site.sh(f"scontrol show job {job}")
    assert [*servers.iterdir()] == []
    await wait_until(lambda: gone(site, daemons))


async def gone(site: Site, daemons: list[str]) -> bool:
    return await site.processes() == daemons
