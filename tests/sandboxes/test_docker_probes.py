"""An image is probed once, by whoever asks first; what was learned is kept, what failed is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from docker_support import bare_image, containers_of, python_image

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.docker.probes import ImageProbes
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


class WatchedEngine(DockerEngine):
    """Counts the containers made, and refuses the first ``refusals``."""

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self.made = 0
        self.refusals = 0

    async def create(self, name: str, body: Mapping[str, Any], *, image_name: str) -> str:
        self.made += 1
        if self.made <= self.refusals:
            raise SandboxUnavailable("busy")
        return await super().create(name, body, image_name=image_name)


@pytest.fixture
async def watched(sandbox_settings: SandboxSettings) -> AsyncIterator[WatchedEngine]:
    made = WatchedEngine(sandbox_settings)
    await made.open()
    yield made
    made.close()


def probes(watched: WatchedEngine, owner: Path, known: dict[str, bool]) -> ImageProbes:
    return ImageProbes(watched, {OWNER_LABEL: owner.name}, watched.remove, known)


async def image(watched: WatchedEngine, name: str) -> Image:
    found = await watched.image(name)
    assert found is not None
    return found


async def test_all_who_ask_wait_for_one_probe_and_others_know_its_result(
    watched: WatchedEngine, run_dir: Path, caplog: pytest.LogCaptureFixture, tasks: BackgroundTasks
) -> None:
    known: dict[str, bool] = {}
    able, unable = await image(watched, python_image()), await image(watched, bare_image())
    asked = probes(watched, run_dir, known)
    answers = await asyncio.gather(
        *(asked.runs_helper(each, "an image", tasks) for each in (able, unable, able, unable, able))
    )
    assert answers == [True, False, True, False, True]
    assert watched.made == 2
    assert caplog.text.count("an image has no Python 3.8") == 1
    assert known == {able.image_id: True, unable.image_id: False}
    assert containers_of(run_dir.name) == []
    assert await probes(watched, run_dir, known).runs_helper(able, "an image", tasks)
    assert watched.made == 2


async def test_a_probe_that_failed_is_made_again(
    watched: WatchedEngine, run_dir: Path, tasks: BackgroundTasks
) -> None:
    watched.refusals = 1
    able = await image(watched, python_image())
    asked = probes(watched, run_dir, {})
    with pytest.raises(SandboxUnavailable, match="busy"):
        await asked.runs_helper(able, "an image", tasks)
    assert await asked.runs_helper(able, "an image", tasks)
    assert watched.made == 2


async def test_a_probe_outlives_who_asked_and_not_its_provider(
    watched: WatchedEngine, run_dir: Path, tasks: BackgroundTasks
) -> None:
    able = await image(watched, python_image())
    asked = probes(watched, run_dir, {})
    first = asyncio.create_task(asked.runs_helper(able, "an image", tasks))
    await asyncio.sleep(0)
    first.cancel()
    assert await asked.runs_helper(able, "an image", tasks)
    assert watched.made == 1
    stopped = probes(watched, run_dir, {})
    waiting = asyncio.create_task(stopped.runs_helper(able, "an image", tasks))
    await wait_until(lambda: containers_of(run_dir.name) != [])
    stopped.cancel()
    with pytest.raises(SandboxUnavailable, match="closing"):
        await waiting
    await wait_until(lambda: containers_of(run_dir.name) == [])
