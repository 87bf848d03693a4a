"""The training step that took an episode: what its record says, and what statistics by step count then."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversation import END
from gate_support import Stage, says, staged
from test_staleness import serve, think

from turnstile.models import Episode, EpisodeStats, StatsReport, TrainedRequest, summary_of
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.episodes.trained import with_step
from turnstile_server.errors import Unprocessable

pytestmark = pytest.mark.anyio


def versions(*names: str) -> WeightVersions:
    found = WeightVersions()
    for name in names:
        found.serve(name)
    return found


def episode(**sampled: int) -> Episode:
    stats = EpisodeStats(weight_versions=sampled, sampled_tokens=sum(sampled.values()))
    return Episode.model_construct(episode_id="ep", stats=stats, train_step=3, trained=None)


def test_the_lag_is_the_mean_age_of_the_tokens_when_the_step_takes_them() -> None:
    found = with_step(episode(v1=1, v3=3), TrainedRequest(step=7), versions("v1", "v2", "v3"), now=5.0)
    assert found.train_step == 7
    assert found.trained is not None
    assert found.trained.model_dump() == {
        "step": 7,
        "used": True,
        "at": 5.0,
        "version": "v3",
        "lag": 0.5,
        "oldest": 2,
    }


def test_weights_that_were_pushed_since_do_not_count_where_the_trained_ones_are_named() -> None:
    served = versions("v1", "v2", "v3", "v4")
    found = with_step(episode(v1=1, v2=1), TrainedRequest(step=2, version="v2"), served, now=0.0).trained
    assert found is not None
    assert (found.version, found.lag, found.oldest) == ("v2", 0.5, 1)
    with pytest.raises(Unprocessable, match="'v9' were never served here; the newest are 'v4'"):
        with_step(episode(v1=1), TrainedRequest(step=2, version="v9"), served, now=0.0)


def test_ages_that_nobody_knows_are_no_zero() -> None:
    for sampled in ({}, {"elsewhere": 2}, {"v1": 1, "elsewhere": 1}):
        found = with_step(episode(**sampled), TrainedRequest(step=1), versions("v1"), now=0.0).trained
        assert found is not None
        assert (found.lag, found.oldest) == (None, None)


def test_the_same_step_changes_nothing_and_the_last_one_told_holds() -> None:
    served = versions("v1")
    once = with_step(episode(v1=1), TrainedRequest(step=1), served, now=0.0)
    served.serve("v2")
    assert with_step(once, TrainedRequest(step=1), served, now=9.0) is once, "its age was that of then"
    other = with_step(once, TrainedRequest(step=2, used=False), served, now=9.0).trained
    assert other is not None
    assert (other.step, other.used, other.lag) == (2, False, 1.0)


@pytest.mark.slow
async def test_a_step_has_the_episodes_that_it_took_and_not_those_that_began_at_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path / "data") as stage:
        stage.engine.answers = [says(stage.encode(f"4{END}"))]
        made = [await stage.episode(train_step=0, run_id="r") for _ in range(3)]
        running = made[0]
        await think(stage, running)
        early = await stage.control.post(f"/episodes/{running['episode_id']}/trained", json={"step": 1})
        assert (early.status_code, early.json()["error"]["message"].endswith("has not ended")) == (409, True)
        await stage.post(running, "finish")
        await serve(stage, "v2")
        for each in made[1:]:
            await think(stage, each)
            await stage.post(each, "finish")
        for each, told in zip(made, ({"step": 1}, {"step": 1}, {"step": 1, "used": False}), strict=True):
            await _told(stage, each["episode_id"], told)
        await _told(stage, made[0]["episode_id"], {"step": 1})
        shown = await stage.control.get("/stats", params={"by": "step", "run_id": "r"})
        (row,) = StatsReport.model_validate_json(shown.content).rows
        assert row.key == {"step": 1}
        assert (row.episodes, row.used, row.left_out, row.lag_mean, row.lag_max) == (3, 2, 1, 0.5, 1)
        listed = (await stage.control.get("/episodes", params={"train_step": 0})).json()["episodes"]
        assert listed == []
        unknown = await stage.control.post(
            f"/episodes/{made[0]['episode_id']}/trained", json={"step": 1, "version": "v9"}
        )
        assert unknown.status_code == 422
        assert (await stage.control.post("/episodes/nobody/trained", json={"step": 1})).status_code == 404
    async with staged(tiny_model, tmp_path / "data") as stage:  # a restart forgets nothing of it
        found = Episode.model_validate(await stage.get(made[0]))
        assert (found.train_step, summary_of(found).lag, summary_of(found).used) == (1, 1.0, True)


async def _told(stage: Stage, episode_id: str, told: dict[str, object]) -> None:
    response = await stage.control.post(f"/episodes/{episode_id}/trained", json=told)
    assert response.status_code == 200, response.text
    assert response.json()["train_step"] == 1
