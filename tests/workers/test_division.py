"""The workers' shares of a limit add up to the limit; one that cannot be shared is told by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from turnstile_server.data_dir import JOURNAL_LOCK, journal_folder, whole_data_dir, worker_folder, worker_folders
from turnstile_server.errors import StartupError
from turnstile_server.settings import Settings
from turnstile_server.workers.division import (
    OF_THE_MACHINE,
    PLACES,
    SHARES,
    agent_ports,
    share_of,
    told_shares,
    worker_settings,
)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_shares_add_up_and_differ_by_one_at_most(total: int, count: int) -> None:
    shares = [share_of(total, number, count) for number in range(count)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_every_limit_that_is_shared_adds_up_over_the_workers() -> None:
    whole = Settings(
        grading={"parallel": 5, "judges": {"j": {"url": "http://j/v1", "model": "m", "parallel": 7}}},
        sandboxes={"warm": 3},
        journal={"retention_bytes": 1 << 30},
    )
    parts = [worker_settings(whole, number, 3, key="k" * 16) for number in range(3)]
    for section, field in PLACES:
        of_machine = (section, field) in OF_THE_MACHINE
        total = vars(whole)[section].places if of_machine else vars(vars(whole)[section])[field]
        assert sum(vars(vars(part)[section])[field] or 0 for part in parts) == (total or 0), (section, field)
    for section, field in SHARES:
        total = vars(vars(whole)[section])[field]
        assert sum(vars(vars(part)[section])[field] for part in parts) == pytest.approx(total)
    assert [part.grading.judges["j"].parallel for part in parts] == [3, 2, 2]
    assert [part.data_dir for part in parts] == [worker_folder(whole.data_dir, number) for number in range(3)]
    assert {part.control.key for part in parts} == {"k" * 16}


def test_each_worker_is_dialled_at_a_port_of_its_own() -> None:
    whole = Settings(sandboxes={"link_address": "[2001:db8::7]:4800"})
    parts = [worker_settings(whole, number, 3, key=None).sandboxes.link_address for number in range(3)]
    assert parts == ["[2001:db8::7]:4800", "[2001:db8::7]:4801", "[2001:db8::7]:4802"]


def test_a_limit_that_was_set_to_less_than_the_workers_is_refused_and_a_default_is_raised() -> None:
    with pytest.raises(StartupError, match=r"grading\.parallel is 1, and there are 2 worker processes"):
        worker_settings(Settings(grading={"parallel": 1}), 0, 2, key=None)
    places = Settings().grading.places
    parts = [worker_settings(Settings(), number, places, key=None) for number in range(places)]
    assert [part.grading.parallel for part in parts] == [1] * places
    assert worker_settings(Settings(), 0, places + 1, key=None).grading.parallel == 1
    told = told_shares(Settings(), places + 1)
    assert told is not None
    assert f"grading.parallel is {places}" in told
    assert told_shares(Settings(), 2) is None


def test_each_worker_has_a_port_of_its_own_unless_agents_have_one() -> None:
    assert agent_ports(8001, 3, one=False) == [8001, 8002, 8003]
    assert agent_ports(0, 2, one=False) == agent_ports(8001, 2, one=True) == [0, 0]
    with pytest.raises(StartupError, match="leaves no ports"):
        agent_ports(65_535, 2, one=False)


def test_the_first_worker_has_the_whole_servers_directory_and_earlier_ones_are_found(tmp_path: Path) -> None:
    assert worker_folder(tmp_path, 0) == tmp_path
    assert worker_folders(tmp_path) == {}
    for number in (1, 10, 2, 4):
        journal_folder(worker_folder(tmp_path, number)).mkdir(parents=True)
        if number != 4:  # that one had no episode
            (journal_folder(worker_folder(tmp_path, number)) / "00000001.tsj").touch()
    (tmp_path / "workers" / "3").mkdir()  # a worker that never began
    (tmp_path / "workers" / "lock").touch()
    assert list(worker_folders(tmp_path)) == [1, 2, 10]


def test_sandboxes_of_every_worker_are_shown_nothing_of_the_whole_server(tmp_path: Path) -> None:
    """``whole_data_dir`` is what the backends hide."""
    further = worker_folder(tmp_path, 2)
    further.mkdir(parents=True)
    assert whole_data_dir(further) == further, "a server of its own may have a folder of this name"
    (further.parent / JOURNAL_LOCK).touch()
    assert [whole_data_dir(worker_folder(tmp_path, number)) for number in (0, 2)] == [tmp_path, tmp_path]


@pytest.mark.parametrize("count", ["0", "-1", "abc", "257", 0, None])
def test_a_count_of_processes_that_is_none_is_refused_in_one_sentence(count: object) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(workers={"count": count})
    [error] = refused.value.errors()
    assert error["loc"] == ("workers", "count")
    assert error["msg"].endswith("it must be a number from 1 to 256, or auto")


@pytest.mark.parametrize(("count", "found"), [("auto", "auto"), ("2", 2), (256, 256)])
def test_a_count_of_processes_is_a_number_or_auto(count: object, found: object) -> None:
    assert Settings(workers={"count": count}).workers.count == found
