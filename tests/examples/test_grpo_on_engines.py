"""The GRPO example plays to its end on a real SGLang and on a real vLLM, as a process.

It has three witnesses: its log, the engine itself, which is asked all along what it serves, and the records of its
server.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch
from judged import MEAN, WORST, Judged
from safetensors.torch import load_file

from local import ROOT
from sglang_server import sglang_server
from turnstile.models import Turn
from turnstile_server.demo import TINY
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS
from turnstile_server.journal import FileJournal, RecordType, turn_of
from turnstile_server.settings import JournalSettings
from vllm_server import TIMEOUT_S, vllm_server

GRPO = (sys.executable, "-m", "grpo.grpo", "--sandbox", "local")
STEPS = 3
SMALL = {"steps": STEPS, "groups": 1, "group-size": 4, "max-concurrent": 4, "staleness": 0}
"""No step takes a token that the weights before it did not sample."""
HELD_OUT = {"monitor-episodes": 4, "final-episodes": 8}
POLL_S = 0.1
PLAYED_S = 400.0
"""It takes half a minute on a quiet machine."""


@dataclass
class Served:
    """Weights that the engine named as its own: their version, and the folder that it loaded last."""

    version: str
    folder: str
    first: float
    """Unix time: it served them from here on at the latest, …"""
    last: float
    """… and to here at least."""


class Engine:
    """What a running engine says of itself, at its own address. ``kind``: sglang or vllm."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        # The server ends connections that idle, which a request may meet on its way.
        unkept = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=60.0, limits=unkept)

    def version(self) -> str:
        path = "/model_info" if self.kind == "sglang" else "/weight_info"
        version: str = self._read(self._http.get(path))["weight_version"]
        return version

    def folder(self) -> str:
        if self.kind == "sglang":
            return str(self._read(self._http.get("/model_info"))["model_path"])
        asked = {"method": "turnstile_status", "timeout": 60.0}
        (status,) = self._read(self._http.post("/collective_rpc", json=asked))["results"]
        return str(status["path"])

    def _read(self, response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def watched(engine: Engine) -> Iterator[Callable[[], list[Served]]]:
    """Asks the engine until the block ends. Yields what gives all that it served, in order."""
    served: list[Served] = []
    ended = Event()

    def watch() -> list[Served]:
        while True:
            over, asked = ended.is_set(), time.time()
            version = engine.version()
            if version == UNKNOWN_WEIGHTS:
                pass  # in the middle of an update by tensors
            elif served and served[-1].version == version:
                served[-1].last = asked
            else:
                served.append(Served(version, engine.folder(), time.time(), asked))
            if over:
                return served
            ended.wait(POLL_S)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)

        def end() -> list[Served]:
            ended.set()
            return watching.result()

        try:
            yield end
        finally:
            ended.set()


def play(engine: Engine, url: str, out: Path) -> list[Served]:
    """Runs the example as its user does; gives what the engine served meanwhile."""
    options = [word for name, value in (SMALL | HELD_OUT).items() for word in (f"--{name}", str(value))]
    with watched(engine) as served:
        done = subprocess.run(
            [*GRPO, out, "--engine", engine.kind, "--engine-url", url, "--keep", *options],
            cwd=ROOT / "examples",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PLAYED_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return served()


def check_log(out: Path) -> None:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries] == ["held out", "monitor", *["step"] * STEPS, "held out"]
    steps = [entry for entry in entries if entry["kind"] == "step"]
    assert [step["version"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["trained_share"] == 1.0
        assert step["tokens"] > 0
        assert step["gradient_norm"] > 0
        assert step["lag"] == 0.0
        assert step["fresh_gap"] < WORST
        assert abs(step["drift"]) < MEAN


def check_weights(out: Path) -> dict[str, Path]:
    """The folder of each version. Every step changed the weights, and the first are those that ship."""
    folders = {str(version): out / f"v{version}" for version in range(STEPS + 1)}
    assert {folder.name for folder in out.glob("v*")} == {folder.name for folder in folders.values()}
    saved = [load_file(folder / "model.safetensors") for folder in (TINY, *folders.values())]
    same = [all(torch.equal(old[name].float(), new[name]) for name in new) for old, new in pairwise(saved)]
    assert same == [True, *[False] * STEPS]
    return folders


async def _turns(out: Path) -> list[list[Turn]]:
    journal = await FileJournal.open(out / "data" / "journal", JournalSettings())
    try:
        names = [record.episode_id async for record in journal.episodes()]
        read = [await journal.read(name) for name in names]
    finally:
        await journal.close()
    return [[turn_of(record) for record in records if record.type is RecordType.TURN] for records in read]


def check_turns(episodes: list[list[Turn]], served: list[Served]) -> None:
    """Every turn carries what the engine served then, and no weights come back within an episode."""
    seen = set()
    for turns in episodes:
        versions = [span.version for turn in turns for span in turn.weight_spans]
        assert versions == sorted(versions), versions  # of one digit each
        seen.update(versions)
        for turn in turns:
            start, end = turn.timings.started_at, turn.timings.started_at + turn.timings.total_s
            sampled = [int(span.version) for span in turn.weight_spans]
            oldest = [int(weights.version) for weights in served if weights.first <= start]
            newest = [int(weights.version) for weights in served if end <= weights.last]
            assert sampled[0] >= max(oldest, default=0), (turn.weight_spans, served)
            assert sampled[-1] <= min(newest, default=STEPS), (turn.weight_spans, served)
    assert seen >= set(map(str, range(STEPS))), seen


def judge(episodes: list[list[Turn]], folders: dict[str, Path]) -> None:
    """Every recorded logprob is that of its version. That of the weights at the start it is not in the end."""
    judged, mistaken = Judged(), Judged()
    for turns in episodes:
        judged.add(turns, folders)
    judged.check()
    assert judged.stale == 0
    for turns in episodes:
        if turns and turns[-1].weight_spans[-1].version == max(judged.tokens):
            mistaken.add(turns, dict.fromkeys(folders, folders["0"]))
    assert max(mistaken.largest.values()) > 10 * WORST, mistaken


def check_run(engine: Engine, url: str, out: Path) -> list[Served]:
    """Plays and checks all that is the same on every engine. Gives the weights of the run that were served."""
    first, *served = play(engine, url, out)
    assert (first.version, first.folder) == ("default", str(TINY))
    assert [weights.version for weights in served] == [str(version) for version in range(STEPS + 1)]
    check_log(out)
    folders = check_weights(out)
    episodes = asyncio.run(_turns(out))
    check_turns(episodes, served)
    judge(episodes, folders)
    return served


@pytest.mark.sglang
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_on_sglang_every_step_is_served_from_tensors_and_sampled_from(tmp_path: Path) -> None:
    with sglang_server(TINY) as url:
        served = check_run(Engine("sglang", url), url, tmp_path / "run")
    assert {weights.folder for weights in served} == {str(TINY)}, "it was given a folder"


@pytest.mark.vllm
@pytest.mark.thorough
@pytest.mark.timeout(TIMEOUT_S + PLAYED_S)
def test_on_vllm_every_step_is_served_from_its_folder_and_sampled_from(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with vllm_server(TINY) as url:
        served = check_run(Engine("vllm", url), url, out)
    assert [weights.folder for weights in served] == [str(out / f"v{version}") for version in range(STEPS + 1)]
