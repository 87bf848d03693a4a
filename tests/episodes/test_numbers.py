"""Numbers of every size at the control API: exact in every answer and after a restart, or refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gate_support import Stage, staged
from pydantic import ValidationError

from turnstile_server.settings import load_settings

pytestmark = pytest.mark.anyio

SEED = 2**128 - 1
"""The largest ``SeedSequence().entropy`` of NumPy."""
DOUBLES_END = 2**1024
"""The first integer beyond every double."""


@pytest.fixture(scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with staged(tiny_model, tmp_path_factory.mktemp("data")) as stage:
        yield stage


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def shown_everywhere(stage: Stage, episode: dict[str, Any]) -> list[dict[str, Any]]:
    """The episode as its own route and the listings give it."""
    alone = await stage.get(episode)
    pages = [
        (await stage.control.get("/episodes", params=params)).json()["episodes"]
        for params in ({}, {"status": alone["status"]}, {"group_id": "wide"})
    ]
    return [alone, *(next(e for e in page if e["episode_id"] == episode["episode_id"]) for page in pages)]


async def test_wide_integers_are_exact_before_and_after_the_end_and_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    metadata = {"entropy": SEED, "deep": [{"n": -(2**200)}], "near": 2**63, "float": 1e300, "below": 2**53 + 1}
    fields = {"seed": SEED, "attempt": 2**31 - 1, "metadata": metadata, "group_id": "wide"}
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode(**fields)
        async with stage.agent(episode) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
        running = await shown_everywhere(stage, episode)
        await stage.post(episode, "finish")
        ended = await shown_everywhere(stage, episode)
        samples = (await stage.get(episode, "/samples"))["samples"]
        forest = await stage.get(episode, "/tree")
    async with staged(tiny_model, tmp_path) as stage:
        restarted = await shown_everywhere(stage, episode)
    for shown in (*running, *ended, *restarted):
        assert {name: shown[name] for name in fields} == fields
        assert {type(value) for value in shown["metadata"].values()} == {int, list, float}
    assert [sample["metadata"] for sample in samples] == [metadata]
    assert forest["metadata"] == metadata


REFUSED: list[tuple[str, str, object]] = [
    ("seed", '{"seed": N}', 2**128),
    ("seed", '{"seed": N}', -(2**128)),
    ("seed", '{"seed": N}', "1e999"),
    ("seed", '{"seed": N}', 1.5),
    ("attempt", '{"attempt": N}', 2**31),
    ("attempt", '{"attempt": N}', 2**128),
    ("attempt", '{"attempt": N}', -1),
    ("sampling.top_k", '{"sampling": {"top_k": N}}', 2**31),
    ("sampling.top_k", '{"sampling": {"top_k": N}}', 2**128),
    ("sampling.temperature", '{"sampling": {"temperature": N}}', "1e999"),
    ("sampling.top_p", '{"sampling": {"top_p": N}}', "1e999"),
    ("sampling.min_p", '{"sampling": {"min_p": N}}', 2**2000),
    ("limits.max_turns", '{"limits": {"max_turns": N}}', 2**128),
    ("limits.max_completion_tokens", '{"limits": {"max_completion_tokens": N}}', 2**64),
    ("limits.max_sampled_tokens", '{"limits": {"max_sampled_tokens": N}}', 2**63),
    ("limits.wall_s", '{"limits": {"wall_s": N}}', "1e999"),
    ("limits.wall_s", '{"limits": {"wall_s": N}}', 2**2000),
    ("limits.idle_s", '{"limits": {"idle_s": N}}', "1e999"),
    ("metadata", '{"metadata": {"n": N}}', DOUBLES_END),
    ("metadata", '{"metadata": {"n": [{"m": N}]}}', -DOUBLES_END),
    ("metadata", '{"metadata": {"n": N}}', "1e999"),
    ("metadata", '{"metadata": {"n": {"m": [N]}}}', "-1e999"),
    ("metadata", '{"metadata": {"n": N}}', "[" * 120 + "1" + "]" * 120),
    ("task", '{"task": {"instruction": "t", "metadata": {"n": N}}}', DOUBLES_END),
    ("task", '{"task": {"instruction": "t", "metadata": {"n": N}}}', "1e999"),
    ("task", '{"task": {"instruction": "t", "answer": {"kind": "numeric", "value": N}}}', "1e999"),
    ("env", '{"agent": "external", "env": {"n": N}}', 2**128),
]


@pytest.mark.parametrize(("field", "template", "number"), REFUSED)
async def test_a_number_beyond_its_range_is_422_with_the_field_and_leaves_nothing(
    shared: Stage, field: str, template: str, number: object
) -> None:
    before = (await shared.control.get("/episodes")).json()["episodes"]
    body = template.replace("N", str(number))
    text = body if '"task"' in body else body.replace("{", '{"task": {"instruction": "t"}, ', 1)
    response = await shared.control.post("/episodes", content=text)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_value"
    assert field in error["message"]
    assert len(error["message"]) < 500
    assert (await shared.control.get("/episodes")).json()["episodes"] == before


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000, "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("template", ['{"seed": N}', '{"metadata": {"n": N}}', '{"limits": {"wall_s": N}}'])
async def test_what_no_json_reader_must_take_is_400(shared: Stage, number: str, template: str) -> None:
    response = await shared.control.post("/episodes", content=template.replace("N", number))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request"
    assert len(response.json()["error"]["message"]) < 500


@pytest.mark.parametrize("path", ["/episodes", "/tasks"])
@pytest.mark.parametrize("cursor", ["²", "٣", "9" * 5000, "-1", "+1", " 1", "1_0", "1.0", "x", ""])
async def test_a_cursor_that_no_page_gave_is_400(shared: Stage, path: str, cursor: str) -> None:
    response = await shared.control.get(path, params={"cursor": cursor})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request"
    assert len(response.json()["error"]["message"]) < 500


@pytest.mark.parametrize(
    ("path", "query"),
    [
        *(("/episodes", {"limit": limit}) for limit in ("²", "9" * 5000, "1e3", "0", "1001", str(2**64))),
        *(("/tasks", {"limit": limit}) for limit in ("²", "9" * 5000, str(2**64))),
        *(("/episodes/{id}", {"wait": wait}) for wait in ("²", "nan", "inf", "-1", "1e999", "9" * 5000)),
    ],
)
async def test_a_query_number_beyond_its_range_is_422(shared: Stage, path: str, query: dict[str, str]) -> None:
    episode = await shared.episode()
    response = await shared.control.get(path.format(id=episode["episode_id"]), params=query)
    assert response.status_code == 422, response.text
    (name,) = query
    assert name in response.json()["error"]["message"]


async def test_a_content_length_of_no_number_is_not_500(shared: Stage) -> None:
    base = str(shared.control.base_url)
    for declared in ("²".encode("latin-1"), b"9" * 5000):
        request = httpx.Request("POST", f"{base}/episodes", headers={b"content-length": declared}, content=b"{}")
        try:
            response = await shared.control.send(request)
        except httpx.HTTPError:
            continue  # the listener refused the request itself
        assert response.status_code in (400, 413)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("wall_s", "idle_s") for value in ("inf", "nan", "1e10")),
        *((name, str(2**63)) for name in ("max_turns", "max_completion_tokens", "max_sampled_tokens")),
    ],
)
def test_a_ceiling_that_no_record_could_hold_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TURNSTILE_EPISODES__{name.upper()}", value)
    with pytest.raises(ValidationError, match=name):
        load_settings({})
