"""The uids that sandboxes take: a set of its own for each, from a range, or those of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from sandbox_providers import SPEC, Backend

from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import Command, User
from turnstile_server.sandboxes.users import UidSets, range_is_mapped, uids_of
from turnstile_server.settings import SandboxSettings

FIXED = {User.HARNESS: 61003, User.AGENT: 61001, User.TESTS: 61002, User.WORK: 61004}
WHOLE = "         0          0 4294967295\n"


def test_no_two_sandboxes_have_a_uid_in_common_while_both_live() -> None:
    sets = UidSets(SandboxSettings())
    taken = [sets.take() for _ in range(1000)]
    every = [uid for uids in taken for uid in uids.values()]
    assert len(set(every)) == 4000
    assert min(every) >= SandboxSettings().uid_range
    assert max(every) < SandboxSettings().uid_range + (1 << 26)


def test_servers_of_one_machine_hardly_ever_choose_the_same() -> None:
    mine, others = UidSets(SandboxSettings()), UidSets(SandboxSettings())
    first = {uids[User.AGENT] for uids in (mine.take() for _ in range(256))}
    assert len(first & {uids[User.AGENT] for uids in (others.take() for _ in range(256))}) < 3


def test_what_is_given_back_can_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([7, 7, 8, 7])
    monkeypatch.setattr("secrets.randbelow", lambda most: next(numbers))
    sets = UidSets(SandboxSettings())
    seventh, eighth = sets.take(), sets.take()
    assert eighth[User.AGENT] - seventh[User.AGENT] == 16
    sets.give_back(seventh)
    assert sets.take() == seventh


def test_without_a_range_all_have_those_of_the_settings() -> None:
    for sets in (UidSets(SandboxSettings(uid_range=0)), UidSets(SandboxSettings(), from_range=False)):
        assert not sets.own
        assert sets.take() == sets.take() == FIXED
        sets.give_back(FIXED)


def test_a_range_that_the_name_space_lacks_is_not_used() -> None:
    settings = SandboxSettings()
    assert range_is_mapped(settings, WHOLE, WHOLE)
    assert not range_is_mapped(settings, WHOLE, "0 100000 65536\n")
    assert not range_is_mapped(settings, "0 0 1900000000\n1900000000 5 10\n", WHOLE)
    assert range_is_mapped(settings, "0 0 1\n1900000000 5 100000000\n", WHOLE)


def test_two_users_with_one_uid_are_refused() -> None:
    with pytest.raises(StartupError, match=r"sandboxes\.work_uid = 61001"):
        uids_of(SandboxSettings(work_uid=61001))


@pytest.mark.anyio
async def test_without_a_range_commands_run_under_the_uids_of_the_settings(
    backend: Backend,
    sandbox_settings: SandboxSettings,
    run_dir: Path,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
) -> None:
    if not backend.own_uids:
        pytest.skip("one uid for all users")
    named = {"uid_range": 0, "harness_uid": 62001, "agent_uid": 62002, "tests_uid": 62003, "work_uid": 62004}
    provider = backend.make(sandbox_settings.model_copy(update=named), run_dir)
    try:
        await provider.start(agents, tasks)
        sandbox = await provider.create(SPEC)
        found = [(await sandbox.exec(Command(("id", "-u"), user=user))).stdout for user in User]
    finally:
        await provider.close()
    assert found == [b"62001\n", b"62002\n", b"62003\n", b"62004\n"]
