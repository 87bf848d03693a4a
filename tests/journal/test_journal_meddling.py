"""Somebody meddles with the directory while a server runs: what is gone is told, what comes is kept."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from journal_support import numbers, segment_files, small, state, turn

from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal import FileJournal
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way")]


async def test_turns_after_the_open_segment_was_removed_go_into_a_new_one(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("e", 0))
    (path,) = segment_files(tmp_path)
    path.unlink()
    await journal.append(turn("e", 1))
    assert numbers(await journal.read("e")) == [1]
    assert journal.stats.corrupt_records == 1
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == [1]
    await journal.close()


async def test_turns_after_the_whole_directory_was_removed_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    journal = await FileJournal.open(directory, small())
    await journal.append(turn("e", 0))
    shutil.rmtree(directory)
    with pytest.raises(JournalUnavailable):
        await journal.append(turn("e", 1))
    await journal.close()


async def test_a_segment_that_was_moved_away_is_told_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(state("e", "running"))
    for number in range(20):
        await journal.append(turn("e", number, items=3000))
    first = segment_files(tmp_path)[0]
    first.rename(tmp_path / "elsewhere")
    assert 0 < len([record for record in await journal.read("e") if record.arrays]) < 20
    assert f"{first} is gone" in caplog.text
    (record,) = [record async for record in journal.episodes()]
    assert record.damage is not None
    (tmp_path / "elsewhere").rename(first)
    assert numbers([record for record in await journal.read("e") if record.arrays]) == list(range(20))
    await journal.close()


@pytest.mark.parametrize("what", ["folder", "link", "dangling link"])
async def test_something_else_in_the_place_of_the_reserve_stops_no_turn_and_is_not_written_to(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, other = tmp_path / "data", tmp_path / "other"
    directory.mkdir()
    other.write_bytes(b"precious")
    reserve = directory / "reserve"
    if what == "folder":
        reserve.mkdir()
    else:
        reserve.symlink_to(other if what == "link" else tmp_path / "nothing")
    journal = await FileJournal.open(directory, small(check_interval_s=0.01))
    for number in range(10):
        await journal.append(turn("e", number))
        await asyncio.sleep(0.01)
    assert journal.refusal is None
    assert caplog.text.count("There is no reserve for deletions on a full disk") == 1
    await journal.delete("e")
    await journal.close()
    assert other.read_bytes() == b"precious"
    assert not (tmp_path / "nothing").exists()


async def test_files_that_are_no_part_of_the_journal_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segment-1.tsj").write_text("not ten digits")
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("e", 0))
    await journal.delete("e")
    await journal.close()
    assert {"notes.txt", "segment-1.tsj"} <= set(os.listdir(tmp_path))


async def test_a_directory_that_is_gone_stops_nothing_else_and_serves_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    directory, away = tmp_path / "data", tmp_path / "away"
    journal = await FileJournal.open(directory, small(check_interval_s=0.01))
    await journal.append(turn("e", 0))
    directory.rename(away)

    async def refuses() -> bool:
        return journal.refusal is not None and "removed or replaced" in journal.refusal

    await wait_until(refuses)
    with pytest.raises(JournalUnavailable):
        await journal.apply_retention(0.0)
    with pytest.raises(JournalUnavailable, match="removed or replaced"):
        await journal.append(turn("e", 1))
    away.rename(directory)

    async def takes_turns() -> bool:
        return journal.refusal is None

    await wait_until(takes_turns)
    await journal.append(turn("e", 2))
    assert numbers(await journal.read("e")) == [0, 2]
    await journal.close()


async def test_a_server_whose_directory_became_anothers_changes_nothing_there(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    old = await FileJournal.open(directory, small())
    await old.append(state("old", "running"))
    shutil.rmtree(directory)
    new = await FileJournal.open(directory, small())
    await new.append(state("new", "running"))
    for number in range(20):
        await new.append(turn("new", number, items=500))
    with pytest.raises(JournalUnavailable):
        await old.append(turn("old", 0))
    with pytest.raises(JournalUnavailable):
        await old.delete("old")
    with pytest.raises(JournalUnavailable):
        await old.apply_retention(0.0)
    await old.close()
    await new.close()
    new = await FileJournal.open(directory, small())
    assert [record.meta.get("n") for record in await new.read("new")] == [None, *range(20)]
    await new.close()
