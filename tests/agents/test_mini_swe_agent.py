"""The real mini-swe-agent as an external agent, through the real gate."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agents import Job, make_repository, run_agent, trajectory
from scripted.script import PolicyInput, Step
from scripted_policy import scripted_policy
from turnstile import AsyncClient
from turnstile.models import Episode, EpisodeStatus, SampleSet, Turn
from turnstile_server.demo.local_server import serve

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(300)]

TASK = "One test of this repository fails. Find out why and mend the code."
FIX = """python3 - <<'END'
from pathlib import Path
path = Path("shelf/inventory.py")
before = "        self._counts[item] = self.count(item) - count"
check = "        if count > self.count(item):\\n            raise OutOfStock(item)\\n"
path.write_text(path.read_text().replace(before, check + before))
END"""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str, text: str = "") -> Step:
    return Step(text=text, tool="bash", arguments={"command": command})


class Run:
    """One finished episode of mini-swe-agent and what each side says about it."""

    def __init__(self, job: Job, episode: Episode, turns: tuple[Turn, ...], samples: SampleSet) -> None:
        self.job, self.episode, self.turns, self.samples = job, episode, turns, samples
        self.told: dict[str, Any] = json.loads(trajectory(job).read_text())


@asynccontextmanager
async def mini_swe_run(
    model: Path, folder: Path, turns: int, engine_url: str | None = None, completion_tokens: int = 64
) -> AsyncIterator[tuple[Run, AsyncClient]]:
    async with (
        serve(model, folder / "data", engine_url=engine_url) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        limits = {"max_completion_tokens": completion_tokens}
        async with await client.create_episode(TASK, limits=limits) as episode:
            assert episode.episode_key is not None
            repo = make_repository(folder / "repo")
            job = Job(TASK, repo, episode.model_url, episode.episode_key, turns)
            await run_agent("mini-swe", job)
            ended = await episode.finish()
            yield Run(job, ended, await episode.turns(), await episode.samples()), client


def assert_accounted(run: Run) -> None:
    """Every sampled token of every turn is trained in exactly one sample or listed as untrained."""
    trained = [span.turn_id for sample in run.samples.samples for span in sample.turn_spans if span.trained]
    padding = {turn.turn_id: len(turn.without_token) for turn in run.turns if turn.without_token}
    of_padding = [entry for entry in run.samples.untrained if entry.reason == "id_without_token"]
    assert {entry.turn_id: entry.tokens for entry in of_padding} == padding
    untrained = [entry.turn_id for entry in run.samples.untrained if entry.reason != "id_without_token"]
    assert sorted(trained + untrained) == sorted(turn.turn_id for turn in run.turns)
    sampled = sum(len(turn.completion_ids) for turn in run.turns)
    masked = sum(int(sample.loss_mask.sum()) for sample in run.samples.samples)
    assert run.samples.stats.sampled_tokens == sampled
    assert masked + sum(entry.tokens for entry in run.samples.untrained) == sampled


async def test_its_whole_run_is_recorded_although_it_drops_the_replies_it_cannot_use(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with mini_swe_run(tiny_model, tmp_path, turns=5) as (run, client):
        assert run.told["info"]["exit_status"] == "LimitsExceeded"
        assert run.told["info"]["model_stats"]["api_calls"] == len(run.turns) == 5
        assert run.episode.status is EpisodeStatus.COMPLETED
        assert_accounted(run)
        # The model never calls the tool, so mini leaves its answer out of the next call and complains
        # instead: each call after the first has a user message where the sampled reply belongs.
        assert run.samples.stats.breaks == {"reply_edited": 4}
        assert run.samples.stats.roots == 5
        assert len(run.samples.samples) == 5
        audit = await client.audit(run.episode.episode_id)
        assert audit.passed
        assert audit.max_abs_delta is not None
        assert audit.max_abs_delta < audit.tolerance


async def test_it_mends_the_repository_when_the_model_calls_its_tool(tiny_model: Path, tmp_path: Path) -> None:
    answers = [
        bash("git ls-files && cat shelf/inventory.py", "Let me look."),
        bash(FIX, "`take` never checks."),
        Step(text="I forgot to call the tool."),
        bash(f"{sys.executable} -m unittest 2>&1 | tail -n 3", "Now the tests."),
        bash(SUBMIT),
    ]
    scenes: list[PolicyInput] = []

    def policy(scene: PolicyInput) -> Step:
        scenes.append(scene)
        return answers[len(scenes) - 1]

    async with (
        scripted_policy(tiny_model, policy) as url,
        mini_swe_run(tiny_model, tmp_path, 20, url, completion_tokens=2048) as (run, client),
    ):
        assert run.told["info"]["exit_status"] == "Submitted"
        tests = await asyncio.create_subprocess_exec(sys.executable, "-m", "unittest", "-q", cwd=run.job.repo)
        assert await tests.wait() == 0
        assert len(run.turns) == len(scenes) == len(answers)
        assert_accounted(run)
        assert run.samples.stats.untrained == {}
        # mini leaves out the one answer without a call, so what follows is a branch beside it; no reply was
        # changed, so nothing broke.
        assert run.samples.stats.breaks == {}
        assert [turn.parent_id for turn in run.turns] == [None, *(run.turns[i].turn_id for i in (0, 1, 1, 3))]
        main = max(run.samples.samples, key=lambda sample: len(sample.turn_spans))
        assert [span.turn_id for span in main.turn_spans] == [run.turns[i].turn_id for i in (0, 1, 3, 4)]
        tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
        last = tokenizer.decode(run.turns[-1].completion_ids.tolist())
        assert tokenizer.decode(main.input_ids.tolist()) == scenes[-1].prompt + last
        audit = await client.audit(run.episode.episode_id)
        assert audit.passed
        assert audit.max_abs_delta is not None
