"""Ended episodes: what a server keeps of each is told from noise, and is little."""

from __future__ import annotations

from pathlib import Path

import pytest

from ended_episodes import MOST_RISE, Play, Point, rise

pytestmark = pytest.mark.anyio


def test_the_rise_is_that_behind_the_warm_up() -> None:
    warming = [Point(ended, 0.0, 100 + ended / 10) for ended in range(0, 1000, 100)]
    flat = [Point(ended, 0.0, 200.0) for ended in range(1000, 3000, 100)]
    growing = [Point(ended, 0.0, 200 + (ended - 1000) / 64) for ended in range(1000, 3000, 100)]
    assert rise([*warming, *flat], 999) == pytest.approx(0.0, abs=1e-6)
    assert rise([*warming, *growing], 999) == pytest.approx(16384.0)
    assert rise([*warming, *growing], 999) > MOST_RISE > rise([*warming, *flat], 999)


@pytest.mark.slow
@pytest.mark.thorough
async def test_memory_grows_by_little_for_each_ended_episode(tmp_path: Path) -> None:
    """Of 2,400 episodes the first 1,200 fill every cache; then each may leave so many bytes of resident memory."""
    async with Play(tmp_path, at_once=64) as played:
        await played.run(2400, every=100)
    assert played.ended == 2400, played.log()[-2000:]
    assert rise(played.points, 1200) < MOST_RISE, played.points
