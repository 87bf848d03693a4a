"""Settings of episodes that no other suite changes: each does what its description says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest
from conversation import GO, reply_ids
from gate_support import Stage, says, staged

from bounded import bounded
from turnstile.models import Float32Array, Int32Array, Message, Tool
from turnstile_server.capture import CallMatch
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.gate.turn_builder import Prompter
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Rendered, Renderer
from turnstile_server.settings import GateSettings, RenderingSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def one_turn(stage: Stage, **fields: object) -> dict[str, object]:
    """A finished episode of one turn."""
    stage.engine.answers = [says(reply_ids(stage, "hello"))]
    episode = await stage.episode(**fields)
    async with stage.agent(episode) as agent:
        await agent.chat.completions.create(model="m", messages=GO)  # type: ignore[arg-type]
    await stage.post(episode, "finish")
    return episode


async def test_a_reader_of_changes_that_lags_behind_its_queue_is_cut_off(stage: Stage) -> None:
    changes = Broadcast(readers=1, queue=2, kept=1)
    reader = changes.subscribe()
    episode = await stage.episode()
    shown = await stage.control.get(f"/episodes/{episode['episode_id']}")
    for _ in range(4):
        changes.publish(shown.json())
    assert len([change async for change in reader if change.episode is not None]) == 2


async def test_retention_is_applied_again_and_again(tiny_model: Path, tmp_path: Path) -> None:
    often = {"retention_interval_s": 0.05, "watch_interval_s": 0.02}
    async with staged(tiny_model, tmp_path, episodes=often, journal={"retention_days": 1e-9}) as stage:
        episode = await one_turn(stage)
        path = f"/episodes/{episode['episode_id']}"

        async def gone() -> bool:
            return (await stage.control.get(path)).status_code == 404

        await wait_until(gone)


@pytest.mark.parametrize(("tolerance", "passed"), [(0.05, False), (0.2, True)])
async def test_an_audit_tolerates_what_is_set(
    tiny_model: Path, tmp_path: Path, tolerance: float, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tiny_model, tmp_path, episodes={"audit_tolerance": tolerance}) as stage:
        episode = await one_turn(stage)

        async def score(input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
            return np.full(len(input_ids) - start, -0.6, np.float32)  # recorded were -0.5

        monkeypatch.setattr(stage.engine, "score", score)
        report = await stage.post(episode, "audit")
    assert (report["passed"], report["tolerance"]) == (passed, tolerance)


@pytest.mark.parametrize(("bound", "alerts"), [(0.9, 1.0), (0.0, 0.0)])
async def test_an_episode_that_trains_too_little_is_logged_and_counted(
    tiny_model: Path, tmp_path: Path, bound: float, alerts: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tiny_model, tmp_path, episodes={"trained_share_alert": bound}) as stage:
        with caplog.at_level(logging.WARNING):
            await one_turn(stage, sampling={"temperature": 0.0})  # greedy turns are untrained
        metrics = (await stage.control.get("/metrics")).text
    assert f"turnstile_low_trained_share_episodes_total {alerts}" in metrics
    assert ("trains only" in caplog.text) == bool(alerts)


async def test_exports_of_ended_episodes_wait_for_a_thread(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, episodes={"export_threads": 1}) as stage:
        episode = await one_turn(stage)
        rows: list[int] = []

        async def export() -> None:
            rows.append(len((await stage.get(episode, "/samples"))["samples"]))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(export)
    assert rows == [1] * 5


class Watched:
    """A renderer that notes in which threads, and how many at once, it renders."""

    def __init__(self, renderer: Renderer, at_once: int) -> None:
        """Each render goes on when ``at_once`` others have come to it, too."""
        self._renderer = renderer
        self._lock = threading.Lock()
        self._all_at_work = threading.Barrier(at_once)
        self.threads: set[str] = set()
        self.most = self.now = 0

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None) -> Rendered:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.threads.add(threading.current_thread().name)
        self._all_at_work.wait(60)
        with self._lock:
            self.now -= 1
        return self._renderer.render(messages, tools, most=most)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inline_chars", "threads", "huge", "leaves_the_loop"),
    [(100, 2, False, False), (1, 2, False, True), (1, 1, False, True), (1, 2, True, True)],
)
async def test_long_renders_leave_the_loop_for_a_bounded_number_of_threads(
    tiny_model: Path, inline_chars: int, threads: int, *, huge: bool, leaves_the_loop: bool
) -> None:
    """``huge``: the threads are those of huge prompts."""
    at_once = threads if leaves_the_loop else 1
    watched = Watched(create_renderer(tiny_model, RenderingSettings()), at_once)
    settings = bounded(
        GateSettings,
        inline_render_chars=inline_chars,
        render_threads=4 if huge else threads,
        huge_prompt_chars=1 if huge else 100,
        huge_prompt_threads=threads if huge else 4,
    )
    prompter = Prompter(watched, settings, 1_000)  # type: ignore[arg-type]
    match = CallMatch(None, (Message("user", "hello"),), (), None, (Message("user", "hello"),))
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(prompter.prompt, match, match.new_messages, (), None, anyio.CapacityLimiter(1))
    assert (threading.current_thread().name not in watched.threads) == leaves_the_loop
    assert watched.most == at_once
