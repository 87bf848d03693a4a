"""``GET /episodes`` by any condition and order, light rows, and ``GET /stats``, on a real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from test_control_api import create, error_of

from control_support import Door, OpenDoor
from turnstile import AsyncClient
from turnstile.errors import InvalidRequest, NotFound
from turnstile.models import (
    EpisodePage,
    EpisodeSummary,
    EpisodeSummaryPage,
    GroupReport,
    GroupSummaryPage,
    StatsReport,
    group_summaries,
    statistics_by,
    summary_of,
)

pytestmark = pytest.mark.anyio

RUN = "overview"
JSON = {"accept": "application/json"}


@pytest.fixture
async def recorded(http: httpx.AsyncClient, door: Door) -> AsyncIterator[list[EpisodeSummary]]:
    """Eight episodes of one run: two tasks, two steps, two groups of each; rewards 0, 0.5 and 1, two without; two
    still run. The newest last."""
    made = []
    for number in range(8):
        task = {
            "instruction": f"Task {number % 2}.\nMore.",
            "reward": {"late": True},
            "tags": [f"tag{number % 2}"],
        }
        created = await create(
            http,
            task=task,
            run_id=RUN,
            train_step=number // 4,
            group_id=f"g{number // 2 % 2}{number % 2}",
            metadata={"number": number, "split": "train" if number else "eval", "nested": {"a": [1]}},
        )
        made.append(created.episode_id)
        if number % 3 == 0:
            door.add_turn(created.episode_id)
        if number < 6:
            await http.post(f"/episodes/{created.episode_id}/finish")
        if number < 4:
            body = {"key": "k", "reward": (0.0, 1.0, 0.5, 1.0)[number]}
            response = await http.post(f"/episodes/{created.episode_id}/reward", json=body)
            assert response.status_code == 200, response.text
    pages = [(await http.get(f"/episodes/{each}")).content for each in made]
    yield [
        summary_of(EpisodePage.model_validate_json(b'{"episodes":[' + each + b"]}").episodes[0]) for each in pages
    ]
    for each in made:
        await http.delete(f"/episodes/{each}")


async def rows(http: httpx.AsyncClient, **params: Any) -> EpisodeSummaryPage:
    response = await http.get("/episodes", params={"view": "summary", "run_id": RUN, **params})
    assert response.status_code == 200, response.text
    return EpisodeSummaryPage.model_validate_json(response.content)


async def test_a_row_says_what_the_record_says(http: httpx.AsyncClient, recorded: list[EpisodeSummary]) -> None:
    assert list((await rows(http)).summaries) == recorded[::-1]
    first = recorded[0]
    assert (first.title, first.tags, first.train_step, first.reward) == ("Task 0.", ("tag0",), 0, 0.0)
    assert first.weight_version is not None
    assert first.turns == 1
    assert first.task == recorded[2].task != recorded[1].task


CONDITIONS: list[tuple[dict[str, Any], Callable[[int, EpisodeSummary], bool]]] = [
    ({"status": "running"}, lambda _, row: row.status == "running"),
    (
        {"status": "completed", "group_id": "g00"},
        lambda _, row: row.status == "completed" and row.group_id == "g00",
    ),
    ({"train_step": 1}, lambda _, row: row.train_step == 1),
    ({"tag": "tag1"}, lambda _, row: "tag1" in row.tags),
    ({"in_run": "true", "status": "running"}, lambda _, row: row.status == "running"),
    ({"in_run": "false"}, lambda *_: False),
    ({"graded": "true"}, lambda _, row: row.reward is not None),
    ({"graded": "false"}, lambda _, row: row.reward is None),
    ({"reward_min": 0.5}, lambda _, row: row.reward is not None and row.reward >= 0.5),
    ({"reward_max": 0.5, "tag": "tag0"}, lambda _, row: row.reward in (0.0, 0.5) and row.tags == ("tag0",)),
    ({"min_turns": 1}, lambda _, row: row.turns >= 1),
    ({"text": "TASK 1"}, lambda _, row: row.title == "Task 1."),
    ({"metadata": "number=3"}, lambda number, _: number == 3),
    ({"metadata": ["split=train", "number=0"]}, lambda *_: False),
    ({"metadata": 'nested={"a": [1]}', "graded": "true"}, lambda number, _: number < 4),
    ({"breaks": "any"}, lambda _, row: bool(row.breaks)),
    ({"agent": "external", "fault": "agent"}, lambda *_: False),
    ({"created_after": 0, "created_before": 1}, lambda *_: False),
]


@pytest.mark.parametrize(("asked", "holds"), CONDITIONS, ids=[json.dumps(asked) for asked, _ in CONDITIONS])
async def test_a_filter_leaves_what_fits_in_pages_and_by_offset(
    http: httpx.AsyncClient,
    recorded: list[EpisodeSummary],
    asked: dict[str, Any],
    holds: Callable[[int, EpisodeSummary], bool],
) -> None:
    expected = [row.episode_id for number, row in reversed(list(enumerate(recorded))) if holds(number, row)]
    page = await rows(http, **asked, limit=2)
    seen = [row.episode_id for row in page.summaries]
    while page.cursor is not None:
        page = await rows(http, **asked, limit=2, cursor=page.cursor)
        seen += [row.episode_id for row in page.summaries]
    assert seen == expected
    by_offset = await rows(http, **asked, offset=1)
    assert [row.episode_id for row in by_offset.summaries] == expected[1:]
    assert by_offset.total == len(expected)


@pytest.mark.slow
async def test_sorted_pages_have_those_without_a_value_last(
    http: httpx.AsyncClient, recorded: list[EpisodeSummary]
) -> None:
    down = await rows(http, sort="reward", order="desc")
    up = await rows(http, sort="reward", order="asc")
    ids = [row.episode_id for row in recorded]
    assert [ids.index(row.episode_id) for row in down.summaries] == [3, 1, 2, 0, 7, 6, 5, 4]
    assert [ids.index(row.episode_id) for row in up.summaries] == [0, 2, 3, 1, 7, 6, 5, 4]
    assert (await rows(http, sort="reward", offset=2, limit=3)).summaries == down.summaries[2:5]
    assert (await rows(http, order="asc")).summaries == (await rows(http)).summaries[::-1]
    whole = await http.get("/episodes", params={"run_id": RUN, "sort": "reward", "limit": 1})
    assert EpisodePage.model_validate_json(whole.content).total == 8
    assert whole.json()["episodes"][0]["metadata"]["number"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "sort", ["created", "ended", "status", "task", "group", "step", "version", "turns", "tokens"]
)
async def test_every_order_shows_every_episode_once(
    http: httpx.AsyncClient, recorded: list[EpisodeSummary], sort: str
) -> None:
    for order in ("asc", "desc"):
        found = await rows(http, sort=sort, order=order)
        assert sorted(row.episode_id for row in found.summaries) == sorted(row.episode_id for row in recorded)


@pytest.mark.slow
async def test_statistics_are_those_of_the_rows(http: httpx.AsyncClient, recorded: list[EpisodeSummary]) -> None:
    response = await http.get("/stats", params={"by": "task,step", "run_id": RUN, "graded": "true"})
    found = StatsReport.model_validate_json(response.content)
    assert found == statistics_by(recorded[:4], ("task", "step"))
    assert found.total.episodes == 4
    assert (found.total.reward_mean, found.total.solved) == (0.625, 2)
    assert [row.key["step"] for row in found.rows] == [0, 0]
    everything = StatsReport.model_validate_json((await http.get("/stats", params={"run_id": RUN})).content)
    assert everything.total.statuses == {"completed": 6, "running": 2}
    assert everything.rows == ()


@pytest.mark.slow
async def test_both_clients_ask_the_same(recorded: list[EpisodeSummary], door: Door) -> None:
    async with AsyncClient(door.url, key=door.key) as client:
        found = [row async for row in client.summaries(run_id=RUN, graded=True, page_size=3)]
        assert found == recorded[3::-1]
        whole = [episode async for episode in client.episodes(metadata=["number=2"], run_id=RUN)]
        assert [each.episode_id for each in whole] == [recorded[2].episode_id]
        stats = await client.stats(["tag"], run_id=RUN)
        assert [row.key for row in stats.rows] == [{"tag": "tag0"}, {"tag": "tag1"}]
        with pytest.raises(InvalidRequest, match="min_turns"):
            await client.stats(min_turns=-1)
    async with AsyncClient([door.url, door.url.replace("127.0.0.1", "localhost")], key=door.key) as twice:
        both = await twice.stats(["tag"], run_id=RUN)
        assert both.total.episodes == 2 * stats.total.episodes
        assert [row.solved for row in both.rows] == [2 * row.solved for row in stats.rows]


@pytest.mark.parametrize(
    ("path", "params", "named"),
    [
        ("/episodes", {"reward_mim": 1}, "reward_mim"),
        ("/episodes", {"status": "done"}, "status"),
        ("/episodes", {"sort": "luck"}, "sort"),
        ("/episodes", {"metadata": "no-equals"}, "KEY=VALUE"),
        ("/episodes", {"limit": 1001}, "limit"),
        ("/episodes", {"reward_min": "nan"}, "reward_min"),
        ("/stats", {"by": "task,luck"}, "luck"),
        ("/stats", {"bucket": 0.5}, "bucket"),
        ("/stats", {"bucket": "inf"}, "bucket"),
        ("/stats", {"solved_at": "inf"}, "solved_at"),
    ],
)
async def test_a_query_that_cannot_be_is_refused_by_name(
    http: httpx.AsyncClient, path: str, params: dict[str, Any], named: str
) -> None:
    assert named in error_of(await http.get(path, params=params), 422, "invalid_value")["message"]


@pytest.mark.parametrize("other", [{"offset": 2}, {"order": "asc"}, {"sort": "reward"}])
async def test_a_cursor_and_an_offset_exclude_each_other(http: httpx.AsyncClient, other: dict[str, Any]) -> None:
    response = await http.get("/episodes", params={"cursor": "1", **other})
    assert "offset" in error_of(response, 400, "invalid_request")["message"]


@pytest.mark.slow
async def test_a_group_is_shown_with_advantages_and_shared_tokens(
    http: httpx.AsyncClient, recorded: list[EpisodeSummary], door: Door
) -> None:
    episodes = [recorded[number] for number in (0, 4)]
    assert {row.group_id for row in episodes} == {"g00"}
    assert [row.turns for row in episodes] == [1, 0]
    report = GroupReport.model_validate_json((await http.get("/groups/g00")).content)
    assert [member.summary for member in report.members] == episodes
    assert [member.advantage for member in report.members] == [0.0, None]
    assert (report.mean, report.std, report.further) == (0.0, None, 0)
    sample = (await http.get(f"/episodes/{episodes[0].episode_id}/samples", headers=JSON)).json()["samples"][0]
    (node,) = report.nodes
    assert (node.start, node.end, node.members, node.ends) == (0, len(sample["input_ids"]), (0,), (0,))
    assert node.sampled == episodes[0].sampled_tokens
    assert node.turn_id == sample["turn_spans"][-1]["turn_id"] == report.members[0].rows[0]
    door.add_turn(recorded[6].episode_id)  # another task's group, and the same call
    async with AsyncClient(door.url, key=door.key) as client:
        again = (await client.group("g01"))[door.url]
        assert [member.summary.episode_id for member in again.members] == [recorded[n].episode_id for n in (1, 5)]
        with pytest.raises(NotFound, match="no-such"):
            await client.group("no-such")


async def test_the_rollouts_of_a_group_share_their_prompt_once(http: httpx.AsyncClient, door: Door) -> None:
    made = [(await create(http, group_id="shares")).episode_id for _ in range(3)]
    for episode_id in made:
        door.add_turn(episode_id)
        door.add_turn(episode_id)
    report = GroupReport.model_validate_json((await http.get("/groups/shares")).content)
    roots = [node for node in report.nodes if node.parent == -1]
    texts = {}
    for index, episode_id in enumerate(made):
        found = (await http.get(f"/episodes/{episode_id}/samples", headers=JSON)).json()["samples"]
        assert [sample["turn_spans"][-1]["turn_id"] for sample in found] == list(report.members[index].rows)
        texts[index] = {tuple(sample["input_ids"]) for sample in found}
    for node in roots:  # the first prompt, and that of the second call
        assert node.members == (0, 1, 2)
        assert node.start == 0
        assert len({row[: node.end] for rows_ in texts.values() for row in rows_}) <= len(roots)
    for index, rows_ in texts.items():
        assert {node.end for node in report.nodes if index in node.ends} == {len(row) for row in rows_}
    for episode_id in made:
        await http.delete(f"/episodes/{episode_id}")


async def test_only_the_newest_episodes_of_a_large_group_are_shown(open_door: OpenDoor) -> None:
    with open_door(control={"max_group_episodes": 2}) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            made = [(await create(http, group_id="large")).episode_id for _ in range(3)]
            report = GroupReport.model_validate_json((await http.get("/groups/large")).content)
            assert [member.summary.episode_id for member in report.members] == made[1:]
            assert report.further == 1


@pytest.mark.slow
async def test_groups_are_those_of_the_rows_in_the_order_that_is_asked_for(
    http: httpx.AsyncClient, recorded: list[EpisodeSummary]
) -> None:
    of_rows = {each.group_id: each for each in group_summaries(recorded)}
    assert list(of_rows) == ["g00", "g01", "g10", "g11"]
    page = await groups(http)
    assert {each.group_id: each for each in page.groups} == of_rows
    assert [each.group_id for each in page.groups] == ["g11", "g10", "g01", "g00"]  # the newest first
    first = of_rows["g00"]
    assert (first.rollouts, first.ended, first.graded, first.reward_mean, first.title) == (2, 2, 1, 0.0, "Task 0.")
    assert (first.reward_std, first.signal, first.train_step) == (None, None, 1)
    by_reward = await groups(http, sort="reward", order="asc", limit=3)
    assert [each.reward_mean for each in by_reward.groups] == [0.0, 0.5, 1.0]
    assert by_reward.total == 4
    last = await groups(http, sort="reward", order="asc", limit=3, offset=3)
    assert [each.reward_mean for each in last.groups] == [1.0]
    assert (await groups(http, train_step=1, graded="true")).total == 0


async def test_groups_without_signal_can_be_asked_for_and_come_first(http: httpx.AsyncClient) -> None:
    made = []
    for number, reward in enumerate((1.0, 1.0, 0.0, 1.0, None)):
        task = {"instruction": "x", "reward": {"late": True}}
        created = await create(http, task=task, run_id=RUN, group_id=("same", "apart", "bare")[number // 2])
        made.append(created.episode_id)
        await http.post(f"/episodes/{created.episode_id}/finish")
        if reward is not None:
            given = {"key": "k", "reward": reward}
            assert (await http.post(f"/episodes/{created.episode_id}/reward", json=given)).status_code == 200
    assert [each.group_id for each in (await groups(http, sort="signal", order="asc")).groups] == [
        "same",
        "apart",
        "bare",
    ]
    assert [each.group_id for each in (await groups(http, signal="false")).groups] == ["same"]
    (apart,) = (await groups(http, signal="true")).groups
    assert apart.reward_std == pytest.approx(0.5**0.5)
    assert (apart.reward_min, apart.reward_max, apart.signal) == (0.0, 1.0, True)
    assert (await http.get("/groups/apart", headers=JSON)).json()["std"] == apart.reward_std
    refused = await http.get("/groups", params={"sort": "size"})
    assert "sort" in json.dumps(error_of(refused, 422, "invalid_value"))
    for each in made:
        await http.delete(f"/episodes/{each}")


async def groups(http: httpx.AsyncClient, **params: Any) -> GroupSummaryPage:
    response = await http.get("/groups", params={"run_id": RUN, **params})
    assert response.status_code == 200, response.text
    return GroupSummaryPage.model_validate_json(response.content)
