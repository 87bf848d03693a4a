"""The listing against a plain list, and what a page costs: nothing is read but what it returns."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import (
    Episode,
    EpisodeStatus,
    EpisodeTimings,
    ForkOrigin,
    Limits,
    Sampling,
    TaskRef,
    summary_of,
)
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.episode_table import EpisodeTable
from turnstile_server.episodes.store import Stored

STATUSES = (EpisodeStatus.QUEUED, EpisodeStatus.RUNNING, EpisodeStatus.COMPLETED, EpisodeStatus.FAILED)
GROUPS = (None, "a", "b")

changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(STATUSES), st.sampled_from(GROUPS)),
        st.tuples(st.just("move"), st.sampled_from(STATUSES), st.integers(0, 30)),
        st.tuples(st.just("remove"), st.none(), st.integers(0, 30)),
    ),
    max_size=40,
)


@given(changes, st.integers(1, 4))
def test_pages_are_those_of_a_plain_list(steps: list[tuple[str, Any, Any]], limit: int) -> None:
    table, plain, made = EpisodeTable(), dict[str, tuple[EpisodeStatus, str | None]](), 0
    for what, status, argument in steps:
        if what == "add":
            table.add(f"ep_{made}", status, argument)
            plain[f"ep_{made}"] = (status, argument)
            made += 1
        elif plain:
            episode_id = list(plain)[argument % len(plain)]
            if what == "move":
                table.move(episode_id, status)
                plain[episode_id] = (status, plain[episode_id][1])
            else:
                table.remove(episode_id)
                del plain[episode_id]
    assert len(table) == len(plain)
    for status in (None, *STATUSES):
        for group in GROUPS:
            wanted = [
                episode_id
                for episode_id, (its_status, its_group) in reversed(plain.items())
                if status in (None, its_status) and group in (None, its_group)
            ]
            assert walked(table, (status, group), limit) == wanted


def walked(table: EpisodeTable, found_by: tuple[EpisodeStatus | None, str | None], limit: int) -> list[str]:
    """All pages, of which only the last may be short."""
    found: list[str] = []
    before: int | None = None
    while True:
        page, before = table.page(found_by, before, limit)
        found += page
        if before is None:
            return found
        assert len(page) == limit


def test_a_page_goes_on_where_it_was_although_episodes_came_and_went() -> None:
    table = EpisodeTable()
    for number in range(6):
        table.add(f"ep_{number}", EpisodeStatus.RUNNING, None)
    first, before = table.page((None, None), None, 2)
    table.add("ep_6", EpisodeStatus.RUNNING, None)
    table.remove("ep_4")
    table.remove("ep_3")
    assert (first, table.page((None, None), before, 2)) == (["ep_5", "ep_4"], (["ep_2", "ep_1"], 1))


@pytest.mark.parametrize(
    ("before", "found"), [(10**30, ["ep_1", "ep_0"]), (-(10**30), []), (0, []), (1, ["ep_0"])]
)
def test_any_number_is_a_place_to_go_on_from(before: int, found: list[str]) -> None:
    table = EpisodeTable()
    for number in range(2):
        table.add(f"ep_{number}", EpisodeStatus.RUNNING, None)
    assert table.page((None, None), before, 5) == (found, None)


def test_an_episode_that_two_folders_hold_is_listed_once_as_the_later_one_has_it() -> None:
    table = EpisodeTable()
    for group, text in (("a", b"first"), ("b", b"second")):
        table.add("ep_0", EpisodeStatus.RUNNING, group)
        table.set_creation("ep_0", "key", "nonce", "digest")
        assert table.record("ep_0") is None
        table.end(summary_of(episode(0)), text)
    assert (len(table), table.record("ep_0")) == (1, b"second")
    assert (table.page((None, "a"), None, 5)[0], table.page((None, "b"), None, 5)[0]) == ([], ["ep_0"])


def episode(number: int, **fields: Any) -> Episode:
    return Episode(
        episode_id=f"ep_{number}",
        status=EpisodeStatus.COMPLETED,
        agent="external",
        task=TaskRef(instruction="t"),
        rollout_id=f"ep_{number}",
        sampling=Sampling(),
        limits=Limits(),
        timings=EpisodeTimings(created_at=0.0),
        **fields,
    )


def filled(count: int) -> Archive:
    archive = Archive(None, 1, None)  # type: ignore[arg-type] - no episode is read from the journal here
    for number in range(count):
        made = episode(number, group_id=f"g{number // 4}")
        archive.created(Stored(made, "nonce", None, "digest"))
        archive.add_ended(made)
    return archive


@pytest.mark.slow
def test_a_filter_reads_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = filled(2_000)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a record was read")

    monkeypatch.setattr(Episode, "model_validate_json", never)
    assert archive.page(EpisodeStatus.FAILED, None, None, 100) == ([], None)
    assert archive.page(None, "g3", None, 100) == (["ep_15", "ep_14", "ep_13", "ep_12"], None)
    assert archive.page(EpisodeStatus.COMPLETED, "g3", 14, 1) == (["ep_13"], 13)
    assert archive.page(EpisodeStatus.COMPLETED, "nobody's", None, 1) == ([], None)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_record_that_went_wrong_in_memory_is_shown_as_unreadable_too() -> None:
    archive = filled(1)
    archive.add_ended(episode(0).model_copy(update={"attempt": "many"}))
    shown = archive.get("ep_0")
    assert shown is not None
    assert (shown.status, shown.error and shown.error.type) == (EpisodeStatus.FAILED, "record_unreadable")
    row = archive.summary("ep_0")
    assert row is not None
    assert (row.status, row.error_type) == (EpisodeStatus.FAILED, "record_unreadable")
    archive.forget("ep_0")
    assert "ep_0" not in archive


def test_records_come_back_as_they_were_whatever_came_first() -> None:
    table = EpisodeTable()
    given = {f"ep_{number}": (b"{%d}" % number) * size for number, size in enumerate([0, 1, 40_000, 3, 500])}
    for number, (episode_id, text) in enumerate(given.items()):
        table.add(episode_id, EpisodeStatus.RUNNING, None)
        assert not table.has_ended(episode_id)
        table.end(summary_of(episode(number)), text)
    assert {episode_id: table.record(episode_id) for episode_id in given} == given
    table.end(summary_of(episode(1)), b"another")
    assert table.record("ep_1") == b"another"
    table.remove("ep_1")
    assert (table.record("ep_1"), table.has_ended("ep_1"), table.has_ended("ep_2")) == (None, False, True)
    table.add("ep_1", EpisodeStatus.RUNNING, None)
    assert table.record("ep_1") is None, "what is left of the one that had this name"


ORIGIN = ForkOrigin(episode_id="ep_9", turn_id="t")


def test_a_repeated_request_is_known_by_little_and_forgotten_with_its_episode() -> None:
    archive = Archive(None, 1, None)  # type: ignore[arg-type] - no episode is read from the journal here
    archive.created(Stored(episode(1, forked_from=ORIGIN), "nonce", "key", "digest"))
    assert archive.creation("key") == ("ep_1", "nonce", "digest", ORIGIN)
    assert (archive.creation(None), archive.creation("another")) == (None, None)
    archive.forget("ep_1")
    assert archive.creation("key") is None


MOST_BYTES = 1024
"""Of one ended episode, whose record is much longer, in the memory of the process."""


@pytest.mark.slow
def test_an_ended_episode_costs_little_memory() -> None:
    instruction = "".join(f"Do step {number} of the task. " for number in range(200))
    plain, page = episode(0, instruction=instruction), resource.getpagesize()
    archive = Archive(None, 1, None)  # type: ignore[arg-type] - no episode is read from the journal here

    def resident_after(numbers: range) -> int:
        for number in numbers:
            names = {
                "episode_id": f"ep_{number:032x}",
                "rollout_id": f"ro_{number:032x}",
                "group_id": f"g{number // 8}",
            }
            made = plain.model_copy(update=names)
            archive.created(Stored(made, f"nonce {number:032x}", f"key {number:032x}", f"digest {number:064x}"))
            archive.add_ended(made)
            archive.fetched(made.episode_id)
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before = resident_after(range(2000))
    grown = resident_after(range(2000, 8000)) - before
    archive.close()
    assert len(instruction) > MOST_BYTES
    assert grown / 6000 < MOST_BYTES


def test_rows_come_back_as_they_were_and_are_found_by_their_time() -> None:
    table = EpisodeTable()
    made = [
        summary_of(episode(number, tags=("a", "b"), metadata={"x": 1}, reward=0.5)).model_copy(
            update={"created_at": 10.0 * number, "ended_s": 15.0}
        )
        for number in range(8)
    ]
    for row in made:
        table.add(row.episode_id, EpisodeStatus.RUNNING, None)
        table.end(row, b"{}")
    assert [table.summary(row.episode_id) for row in made] == made
    assert table.alive_between(12.0, 12.0) == ["ep_1", "ep_0"]
    assert table.alive_between(200.0, 300.0) == []
    changed = made[0].model_copy(update={"reward": 1.0})
    table.end(changed, b"{}")
    assert table.summary("ep_0") == changed
    for gone in ("ep_0", "ep_1", "ep_7"):
        table.remove(gone)
        assert table.summary(gone) is None
    assert table.alive_between(0.0, 1e9) == ["ep_6", "ep_5", "ep_4", "ep_3", "ep_2"]


def test_forks_are_known_from_both_sides_until_they_go() -> None:
    table = EpisodeTable()
    for number in range(3):
        table.add(f"ep_{number}", EpisodeStatus.RUNNING, None)
    for fork in ("ep_2", "ep_1"):
        table.set_origin(fork, ORIGIN)
    assert (table.continued(), table.forks_of("ep_9"), table.forks_of("ep_1")) == ({"ep_9"}, ["ep_1", "ep_2"], [])
    assert (table.origin("ep_1"), table.origin("ep_0"), table.origin("ep_7")) == (ORIGIN, None, None)
    for fork in ("ep_1", "ep_2"):
        table.remove(fork)
    assert (table.continued(), table.forks_of("ep_9")) == (set(), [])
