"""A trainer broadcasts its weights to two real SGLangs through the control API, by the client and the command.

The judge is an independent forward pass of the very folder that each token's span names.
"""

from __future__ import annotations

import itertools
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from judged import Judged
from safetensors.torch import load_file
from test_engines_at_work import retrained
from test_sglang_weights import free_port, wrong_shape

from sglang_server import sglang_processes
from turnstile import AsyncClient, errors, weights
from turnstile.models import new_id
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import LEVELS, errands
from turnstile_server.demo.local_server import TURNSTILE, LocalServer, serve

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.thorough, pytest.mark.timeout(600)]

RANKS = 2
LIMITS = {"max_turns": 4, "max_completion_tokens": 64, "wall_s": 300.0}
GROUP_S = 5.0
ANSWER_S = 60.0
"""Until the error of a group that did not form must be there: its time-out, and a loaded machine."""


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, ...]]:
    with sglang_processes(TINY, RANKS) as processes:
        yield tuple(process.url for process in processes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every set of weights of this module by its name."""
    folder = tmp_path_factory.mktemp("weights")
    return {"default": TINY} | {f"step-{step}": retrained(folder / f"step-{step}", step) for step in (1, 2)}


@asynccontextmanager
async def served(urls: tuple[str, ...], folder: Path) -> AsyncIterator[tuple[LocalServer, AsyncClient]]:
    options = ["--sandbox", "local"]
    async with (
        serve(TINY, folder / "data", engine_url=urls, options=options) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        yield server, client


async def play(client: AsyncClient, folders: dict[str, Path], version: str) -> None:
    """New episodes are sampled by ``version`` alone, with its logprobs, and on every worker."""
    tasks = [errand.task() for errand in itertools.islice(errands(47, LEVELS), 4)]
    judged = Judged()
    options = {"agent": "tool-loop", "n": 2, "max_concurrent": 4, "limits": LIMITS, "retries": 0}
    async for rollout in client.rollouts(tasks, **options):
        assert rollout.episode is not None, rollout.error
        judged.add(await client.episode(rollout.episode.episode_id).turns(), folders)
    assert set(judged.tokens) == {version}, judged
    assert judged.tokens[version] > 50
    assert judged.stale == 0
    judged.check()
    (info,) = (await client.engine()).values()
    assert (info.weight_version, info.paused) == (version, False)
    assert [(each.status, each.weight_version) for each in info.workers] == [("serving", version)] * RANKS


async def joined(client: AsyncClient, name: str) -> Any:
    """The trainer's side of a group in which all workers are."""
    port, opened = free_port(), []

    def open_group() -> None:
        opened.append(weights.trainer_group(name, "127.0.0.1", port, 1 + RANKS, backend="gloo"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, open_group)
        await client.join_weight_group(name, "127.0.0.1", port, 1 + RANKS, backend="gloo")
    return opened[0]


def named(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


async def test_a_group_that_never_forms_is_an_error_in_time_and_the_old_weights_serve_on(
    urls: tuple[str, ...], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is there, and the trainer itself never comes."""
    monkeypatch.setenv("TURNSTILE_ENGINE__GROUP_TIMEOUT_S", str(GROUP_S))
    port, size = free_port(), 1 + RANKS
    store = torch.distributed.TCPStore("127.0.0.1", port, size, True, wait_for_workers=False)
    async with served(urls, tmp_path) as (_, client):
        asked = time.monotonic()
        with pytest.raises(errors.EngineError, match=r"did not form.*serves on"):
            await client.join_weight_group("lonely", "127.0.0.1", port, size, backend="gloo")
        assert GROUP_S <= time.monotonic() - asked < ANSWER_S
        with pytest.raises(errors.EngineError, match="Nothing listens"):
            await client.join_weight_group("nobody", "127.0.0.1", free_port(), size, backend="gloo")
        with pytest.raises(errors.TurnstileError, match="world_size 2"):
            await client.join_weight_group("small", "127.0.0.1", port, 2, backend="gloo")
        await play(client, folders, "default")
    del store


async def test_broadcast_weights_sample_the_turns_after_them_on_every_worker(
    urls: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    async with served(urls, tmp_path) as (_, client):
        name = new_id("group")
        group = await joined(client, name)
        wrong = named(folders["step-1"])
        wrong_shape(wrong)
        with pytest.raises(errors.TurnstileError, match="do not fit"):
            await client.broadcast_weights(wrong.items(), "never", group=name, process_group=group)
        await client.leave_weight_group(name)
        torch.distributed.destroy_process_group(group)
        await play(client, folders, "default")

        name = new_id("group")
        group = await joined(client, name)
        await client.broadcast_weights(
            named(folders["step-1"]).items(), "step-1", group=name, process_group=group, bucket_bytes=200_000
        )
        await client.leave_weight_group(name)
        torch.distributed.destroy_process_group(group)
        await play(client, folders, "step-1")


async def test_the_workers_of_two_servers_join_one_group(
    urls: tuple[str, ...], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = secrets.token_urlsafe(24)  # a client has one key for all servers
    monkeypatch.setattr("turnstile_server.demo.local_server.secrets.token_urlsafe", lambda _: key)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with (
        served(urls[:1], tmp_path / "one") as (one, _),
        served(urls[1:], tmp_path / "two") as (two, _),
        AsyncClient([one.control_url, two.control_url], key=key) as client,
    ):
        name, version = new_id("group"), new_id("both")
        group = await joined(client, name)
        await client.broadcast_weights(named(folders["step-1"]).items(), version, group=name, process_group=group)
        await client.leave_weight_group(name)
        torch.distributed.destroy_process_group(group)
        infos = list((await client.engine()).values())
    assert [(info.weight_version, info.paused) for info in infos] == [(version, False)] * RANKS


@pytest.mark.thorough
async def test_the_command_broadcasts_a_folder(
    urls: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    async with served(urls, tmp_path) as (server, client):
        arguments = [*TURNSTILE, "engine", "weights", str(folders["step-2"]), "step-2", "--backend", "gloo"]
        arguments += ["--url", server.control_url, "--key", server.control_key]
        store = ["--broadcast", f"127.0.0.1:{free_port()}"]
        done = await anyio.to_thread.run_sync(run, [*arguments, *store])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "step-2" in done.stdout
        await play(client, folders, "step-2")


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=300)
