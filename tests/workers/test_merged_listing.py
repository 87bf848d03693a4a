"""Pages over several workers are the pages of one sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.errors import InvalidRequest
from turnstile_server.workers.listing import ListedRow, WorkerPage, merge_pages, read_cursor

Episodes = list[tuple[float, int]]
"""Time of creation and worker of each, in the order in which they were made."""


class Worker:
    """Lists its episodes as a server does, by ordinals."""

    def __init__(self) -> None:
        self.rows: list[ListedRow] = []
        self.head = 0

    def make(self, created_at: float, name: str) -> None:
        self.rows.insert(0, ListedRow(name, created_at, self.head))
        self.head += 1

    def page(self, before: int | None, limit: int) -> WorkerPage:
        rows = [row for row in self.rows if before is None or row.ordinal < before]
        return WorkerPage(rows[:limit], len(rows) > limit, self.head)


def page(workers: list[Worker], cursor: str | None, limit: int) -> tuple[list[str], str | None]:
    before = read_cursor(cursor, range(len(workers)))
    pages = {number: worker.page(before[number], limit) for number, worker in enumerate(workers)}
    merged = merge_pages(pages, before, limit)
    assert len(merged.owners) == len(merged.ids)
    return merged.ids, merged.cursor


made = st.lists(st.tuples(st.integers(0, 50).map(float), st.integers(0, 3)), max_size=40)


@given(made, st.integers(1, 7), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 3)), max_size=6))
def test_merged_pages_are_one_sorted_list_whatever_comes_meanwhile(
    episodes: Episodes, limit: int, later: list[tuple[int, int]]
) -> None:
    workers = [Worker() for _ in range(4)]
    for place, (created_at, number) in enumerate(sorted(episodes)):
        workers[number].make(created_at, f"ep_{place:03}")
    expected = [row.episode_id for worker in workers for row in worker.rows]
    order = {f"ep_{place:03}": (at, f"ep_{place:03}") for place, (at, _) in enumerate(sorted(episodes))}
    expected.sort(key=order.__getitem__, reverse=True)
    seen: list[str] = []
    cursor: str | None = None
    for turn in range(100):
        ids, cursor = page(workers, cursor, limit)
        assert len(ids) == limit or cursor is None
        seen += ids
        for when, number in later:
            if when == turn:
                workers[number].make(1000.0 + turn, f"late_{turn}_{number}_{workers[number].head}")
        if cursor is None:
            break
    assert seen == expected


@given(made, st.integers(1, 7), st.data())
def test_a_deletion_between_two_pages_takes_nothing_else_away(
    episodes: Episodes, limit: int, data: st.DataObject
) -> None:
    workers = [Worker() for _ in range(4)]
    for place, (created_at, number) in enumerate(sorted(episodes)):
        workers[number].make(created_at, f"ep_{place:03}")
    before = {row.episode_id for worker in workers for row in worker.rows}
    seen, cursor = page(workers, None, limit)
    gone = data.draw(st.sets(st.sampled_from(sorted(before)))) if before else set()
    for worker in workers:
        worker.rows = [row for row in worker.rows if row.episode_id not in gone]
    while cursor is not None:
        ids, cursor = page(workers, cursor, limit)
        seen += ids
    assert len(seen) == len(set(seen))
    assert before - gone <= set(seen)


@pytest.mark.parametrize("cursor", ["", "7", "0-1.x", "0-1..1-2", "0-1 ", "-1-2", "٠-1"])
def test_a_cursor_that_no_page_gave_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        read_cursor(cursor, [0, 1])


def test_a_worker_that_was_not_there_for_the_first_page_has_nothing_behind_it() -> None:
    assert read_cursor("0-12", [0, 1]) == {0: 12, 1: 0}
    assert read_cursor(None, [0, 1]) == {0: None, 1: None}
