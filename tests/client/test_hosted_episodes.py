"""Episodes that a hosted model played, as the client and the command show them: nothing counts what they lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path

import anyio
import httpx
import pytest

from hosted_model import KEY, MODEL, HostedModel, Reply, serving
from turnstile import AsyncClient, Conflict
from turnstile._handles import AsyncEpisodeHandle
from turnstile.errors import NOT_TRAINABLE
from turnstile.rollout import Rollout

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CONTROL_KEY = "k" * 32
COUNTED = f"{MODEL}-2026, 20 + 7 tokens by its server's count"


def _environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return {**inherited, "TURNSTILE_CONTROL_KEY": CONTROL_KEY, "COLUMNS": "200", **more}


@asynccontextmanager
async def server_of(model: HostedModel, data_dir: Path) -> AsyncIterator[str]:
    """The URL of a ``turnstile serve`` whose engine is ``model``."""
    engine = ("--engine", "upstream", "--engine-url", model.url, "--model", MODEL, "--sandbox", "none")
    ports = ("--control-port", "0", "--agent-port", "0", "--data-dir", str(data_dir))
    process = await anyio.open_process(
        [sys.executable, "-m", "turnstile", "serve", *engine, *ports],
        env=_environment(TURNSTILE_ENGINE__API_KEY=KEY),
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        with anyio.fail_after(60):
            yield json.loads(await process.stdout.receive())["control_url"]
    finally:
        process.terminate()
        await process.aclose()


async def one_call(handle: AsyncEpisodeHandle) -> None:
    """An agent that asks once."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {handle.episode_key}"}, timeout=60) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        (await http.post(f"{handle.model_url}/v1/chat/completions", json=body)).raise_for_status()


async def test_what_is_shown_of_a_hosted_models_episodes(tmp_path: Path) -> None:
    async with (
        serving(HostedModel("chat", [Reply("hello", finish="stop")])) as model,
        server_of(model, tmp_path / "data") as url,
        AsyncClient(url, key=CONTROL_KEY) as client,
    ):
        played = [
            each async for each in client.rollouts(["do it"], agent=one_call, n=2, run_id="r", samples="if_any")
        ]
        first, second = await _ids(client, played)
        [group] = (await client.group(played[0].group_id)).values()
        assert [(member.summary.episode_id in (first, second), member.rows) for member in group.members] == [
            (True, ()),
            (True, ()),
        ]
        assert group.nodes == ()

        async def shown(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
            command = [sys.executable, "-m", "turnstile", *map(str, arguments)]
            done = await anyio.run_process(command, env=_environment(TURNSTILE_URL=url), check=False)
            assert done.returncode == code, done.stderr.decode()
            return done.stdout.decode(), done.stderr.decode()

        left_out = "2 of hosted models left out: they have no tokens"
        assert left_out in (await shown("audit", "--all"))[0]
        assert left_out in (await shown("audit", "--all", "--require-rescored", code=1))[0]
        assert MODEL in (await shown("audit", first, code=1))[1]
        out = tmp_path / "folder"
        for where in (("--format", "jsonl"), ("--format", "safetensors", "--out", out)):
            said = (await shown("episodes", "export", *where))[1]
            assert said.splitlines() == [
                "0 samples exported",
                "2 episodes of hosted models left out: they have no tokens",
            ]
        assert list(out.iterdir()) == []
        assert MODEL in (await shown("episodes", "export", first, code=1))[1]
        assert COUNTED in (await shown("episodes", "tail", first))[0]
        assert "100%" not in (await shown("episodes", "diff", first, second))[0]
        await shown("report", "r", "--out", tmp_path / "report.html")
        page = unescape((tmp_path / "report.html").read_text())
        assert COUNTED in page
        assert "hosted model" in page
        assert "0 sampled" not in page


async def _ids(client: AsyncClient, played: list[Rollout]) -> list[str]:
    """The episodes' ids, once their turns are looked at."""
    found = []
    for each in played:
        assert (each.error, each.samples) == (None, None)
        assert each.episode is not None
        handle = client.episode(each.episode.episode_id)
        [turn] = await handle.turn_outlines()
        assert (turn.untrained_reason, turn.completion_tokens) == ("upstream", 0)
        window = await handle.tokens(turn.turn_id)
        assert (window.total, [one.untrained_reason for one in window.turns]) == (0, ["upstream"])
        with pytest.raises(Conflict) as refused:
            await handle.samples()
        assert refused.value.type == NOT_TRAINABLE
        found.append(each.episode.episode_id)
    return found
