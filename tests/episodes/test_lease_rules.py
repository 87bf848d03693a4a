"""An owner that is not heard of loses its episodes, and nobody else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from episode_clock import EpisodeClock
from fake_backends import fake_backends
from gate_support import Stage, staged

from turnstile.models import Lease
from turnstile_server.episodes.leases import Leases
from turnstile_server.errors import LeaseLapsed

A = Lease(lease_id="a", lease_s=10.0)
B = Lease(lease_id="b", lease_s=10.0)


def _looked(leases: Leases, start: float, end: float) -> list[set[str]]:
    """What lapses while the server looks once a second."""
    found = []
    for second in range(int(start), int(end) + 1):
        found += [set(lapse.episodes) for lapse in leases.lapsed(float(second))]
    return found


def test_a_lease_that_is_not_renewed_lapses_once_with_its_open_episodes() -> None:
    leases = Leases(1.0, 0.0)
    for episode in ("one", "two", "ended"):
        leases.hold(A, episode, 0.0)
    leases.hold(B, "other", 0.0)
    leases.ended("ended")
    assert _looked(leases, 1, 8) == []
    leases.renew("b", 10.0, 8.0)
    assert _looked(leases, 9, 17) == [{"one", "two"}]
    assert _looked(leases, 18, 60) == [{"other"}]


def test_one_renewal_keeps_all_episodes_of_an_owner() -> None:
    leases = Leases(1.0, 0.0)
    for number in range(100):
        leases.hold(A, f"ep-{number}", 0.0)
    for second in range(1, 200):
        if second % 9 == 0:
            assert leases.renew("a", 10.0, float(second)).open_episodes == 100
        assert leases.lapsed(float(second)) == []


@pytest.mark.slow
def test_leases_without_open_episodes_take_no_memory() -> None:
    """Whoever has the control key may renew any number of names."""
    leases = Leases(1.0, 0.0)
    for number in range(100_000):
        assert leases.renew(f"lease-{number}", 86_400.0, 0.0).open_episodes == 0
    for number in range(1_000):
        leases.hold(Lease(lease_id=f"lease-{number}", lease_s=86_400.0), f"ep-{number}", 0.0)
        assert leases.renew(f"lease-{number}", 86_400.0, 0.0).open_episodes == 1
    assert len(leases) == 1_000
    for number in range(1_000):
        leases.ended(f"ep-{number}")
        assert leases.renew(f"lease-{number}", 10.0, 0.0).open_episodes == 0
    assert len(leases) == 0
    leases.hold(A, "one", 0.0)  # a lease whose episodes had all ended is taken up again by the next one
    leases.ended("one")
    leases.hold(A, "two", 5.0)
    assert _looked(leases, 1, 17) == [{"two"}]


def test_an_owner_that_comes_back_too_late_is_told_and_may_begin_again_under_another_name() -> None:
    leases = Leases(1.0, 0.0)
    leases.hold(A, "one", 0.0)
    assert _looked(leases, 1, 11) == [{"one"}]
    with pytest.raises(LeaseLapsed, match="for 10 s"):
        leases.renew("a", 10.0, 12.0)
    with pytest.raises(LeaseLapsed):
        leases.check("a")
    leases.check("b")


def test_an_owner_without_open_episodes_loses_nothing_by_silence() -> None:
    leases = Leases(1.0, 0.0)
    leases.hold(A, "one", 0.0)
    leases.ended("one")
    assert _looked(leases, 1, 100) == []
    assert leases.renew("a", 10.0, 101.0).open_episodes == 0


@pytest.mark.parametrize("stopped_s", [5.0, 60.0, 1e6])
def test_a_server_that_did_not_run_blames_nobody_for_its_own_silence(stopped_s: float) -> None:
    leases = Leases(1.0, 0.0)
    leases.hold(A, "one", 0.0)
    assert _looked(leases, 1, 9) == []
    assert leases.lapsed(9.0 + stopped_s) == []
    leases.renew("a", 10.0, 9.0 + stopped_s + 0.5)
    after = int(9 + stopped_s)
    assert _looked(leases, after + 1, after + 9) == []
    assert _looked(leases, after + 10, after + 30) == [{"one"}]


def test_lapsed_leases_are_remembered_in_bounded_memory() -> None:
    leases = Leases(1.0, 0.0)
    for number in range(2000):
        leases.hold(Lease(lease_id=f"l{number}", lease_s=1.0), f"ep-{number}", 0.0)
    assert len(_looked(leases, 1, 3)) == 2000
    assert len(leases._lapsed) <= 1000
    assert not leases._held


LEASE_S = 60.0


def _leased(lease_s: float = LEASE_S, lease_id: str = "owner") -> dict[str, Any]:
    return {"lease": {"lease_id": lease_id, "lease_s": lease_s}}


async def _until_ended(stage: Stage, created: dict[str, Any]) -> dict[str, Any]:
    with anyio.fail_after(60):
        while True:
            shown: dict[str, Any] = await stage.get(created, "?wait=1")
            if shown["timings"]["ended_s"] is not None:
                return shown


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_lapse_cancels_the_episodes_frees_their_places_and_says_why(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = fake_backends(tmp_path / "agents")
    settings = {"episodes": {"max_running": 1, "watch_interval_s": 0.001}, "sandboxes": {"kind": "local"}}
    clock = EpisodeClock(monkeypatch)
    async with staged(tiny_model, tmp_path / "data", work=fakes.backends, **settings) as stage:
        task = {"instruction": "x", "setup": ["true"]}
        first = await stage.episode(task=task, agent="fake", **_leased())
        queued = await stage.episode(task=task, agent="fake", **_leased())
        other = await stage.episode(task=task, agent="fake")
        for _ in range(round(LEASE_S)):
            await clock.pass_time(2.0)
            renewed = await stage.control.post("/leases/owner", json={"lease_s": LEASE_S})
            assert (renewed.status_code, renewed.json()["open_episodes"]) == (200, 2)
        for _ in range(round(LEASE_S / 2)):  # a greater step would be the server's own standstill
            await clock.pass_time(2.0)
        for created in (first, queued):
            shown = await _until_ended(stage, created)
            assert (shown["status"], shown["reward"]) == ("cancelled", None)
            assert (shown["error"]["type"], shown["error"]["fault"]) == ("lease_lapsed", "caller")
            assert "for 60 s" in shown["error"]["message"]
        await fakes.provider.agent(1)  # the place is free, and the episode without a lease has it
        assert fakes.provider.made[0].destroyed
        late = await stage.control.post("/leases/owner", json={"lease_s": LEASE_S})
        assert (late.status_code, late.json()["error"]["type"]) == (410, "lease_lapsed")
        refused = await stage.control.post("/episodes", json={"task": task, "agent": "fake", **_leased()})
        assert (refused.status_code, refused.json()["error"]["type"]) == (410, "lease_lapsed")
        assert (await stage.get(other))["status"] in ("preparing", "running")


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_lease_is_no_part_of_what_an_idempotency_key_stands_for(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path / "data") as stage:
        body = {"task": {"instruction": "x"}, "idempotency_key": "same"}
        answers = [
            await stage.control.post("/episodes", json={**body, **_leased(60, name)}) for name in ("one", "two")
        ]
        assert [answer.status_code for answer in answers] == [201, 200]
        assert len({answer.json()["episode_id"] for answer in answers}) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("owner", {"lease_s": 0.5}),
        ("owner", {"lease_s": 1e9}),
        ("owner", {}),
        ("owner", {"lease_s": "NaN"}),
        ("no%20id", {"lease_s": 5}),
        ("x" * 65, {"lease_s": 5}),
    ],
)
async def test_impossible_leases_are_refused(
    tiny_model: Path, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with staged(tiny_model, tmp_path / "data") as stage:
        assert (await stage.control.post(f"/leases/{path}", json=body)).status_code == 422
