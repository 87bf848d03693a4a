"""The rules of staleness, without a server: what is decided, for whom, from which version it counts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import StalenessBound, StalenessPolicy, StalenessScope
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.episodes.groups import EpisodeGroup, EpisodeGroups
from turnstile_server.episodes.staleness import (
    EpisodeStaleness,
    StaleAction,
    StaleGroup,
    StalenessWatcher,
    decide,
    oldest,
)


def bound(
    versions: int = 1, policy: StalenessPolicy = "cancel", scope: StalenessScope = "episode"
) -> StalenessBound:
    return StalenessBound(max_versions=versions, policy=policy, scope=scope)


@dataclass(eq=False)
class Played:
    """An open episode; ``sampled``: the versions of its tokens."""

    staleness: EpisodeStaleness
    sampled: list[str]
    stopped: list[StaleAction] = field(default_factory=list)

    @property
    def stopping(self) -> bool:
        return bool(self.stopped)

    def stop_stale(self, action: StaleAction) -> None:
        self.stopped.append(action)


class World:
    """Versions, and the open episodes that are watched."""

    def __init__(self, first: str | None = "v0") -> None:
        self.versions = WeightVersions()
        if first is not None:
            self.versions.serve(first)
        self.open: list[Played] = []
        self.watcher = StalenessWatcher(self.versions, lambda: list(self.open))

    def episode(self, bound_: StalenessBound | None, group: EpisodeGroup | None = None, *sampled: str) -> Played:
        names = list(sampled)
        group = group or EpisodeGroup(None, 0.0)
        played = Played(EpisodeStaleness(bound_, group, self.versions, lambda: names), names)
        self.open.append(played)
        self.watcher.sampled(played)
        return played

    def sample(self, played: Played, version: str) -> None:
        played.sampled.append(version)
        self.watcher.sampled(played)

    def serve(self, *names: str) -> None:
        for name in names:
            self.versions.serve(name)


@pytest.mark.parametrize(
    ("policy", "behind", "sampled", "action"),
    [
        ("cancel", 1, True, None),
        ("cancel", 2, True, StaleAction.CANCEL),
        ("cancel", 2, False, None),
        ("cancel", None, True, None),
        ("finish", 99, True, None),
        ("stop_admitting", 1, True, None),
        ("stop_admitting", 2, True, StaleAction.TRUNCATE),
        ("stop_admitting", 2, False, StaleAction.CANCEL),
    ],
)
def test_the_table_of_policies(
    policy: StalenessPolicy, behind: int | None, sampled: bool, action: StaleAction | None
) -> None:
    assert decide(bound(1, policy), behind, sampled=sampled) == action


def test_without_a_bound_nothing_is_decided() -> None:
    assert decide(None, 1000, sampled=True) is None


def test_the_oldest_version_is_the_one_served_first_whatever_its_name() -> None:
    versions = WeightVersions()
    for name in ("z", "b", "a"):
        versions.serve(name)
    assert oldest(["a", "b"], versions.lag) == "b"
    assert oldest(["never served", "a"], versions.lag) == "a"
    assert oldest(["never served"], versions.lag) is None


def test_an_episode_is_stopped_by_the_first_version_beyond_its_bound_and_only_once() -> None:
    world = World()
    played = world.episode(bound(1), None, "v0")
    world.serve("v1")
    assert played.stopped == []
    world.serve("v2", "v3")
    assert played.stopped == [StaleAction.CANCEL]


def test_a_stopped_episode_stays_as_old_as_it_was_when_its_weights_are_served_afterwards() -> None:
    world = World()
    played = world.episode(bound(0), None, "early")  # nobody told of them yet
    world.serve("v1")
    assert played.stopped == [StaleAction.CANCEL]
    world.serve("early")
    now = played.staleness.measured()
    assert now is not None
    assert (now.first_version, now.versions, now.exceeded) == ("early", 1, True)


def test_nothing_counts_before_the_first_token() -> None:
    world = World()
    played = world.episode(bound(0))
    world.serve("v1", "v2")
    assert played.stopped == []
    now = played.staleness.measured()
    assert now is not None
    assert (now.first_version, now.versions, now.exceeded) == (None, None, False)


def test_a_token_of_old_weights_that_comes_late_is_judged_when_it_comes() -> None:
    """A call that is not streamed shows its weights only when it ends."""
    world = World()
    played = world.episode(bound(1))
    world.serve("v1", "v2")
    world.sample(played, "v0")
    assert played.stopped == [StaleAction.CANCEL]


def test_weights_that_nobody_told_of_are_as_old_as_the_current_ones() -> None:
    """Somebody loaded them past this server: what is served after them counts."""
    world = World()
    world.serve("v1")
    played = world.episode(bound(1), None, "not told")
    world.serve("v2")
    assert played.stopped == []
    world.serve("v3")
    assert played.stopped == [StaleAction.CANCEL]
    now = played.staleness.measured()
    assert now is not None
    assert (now.first_version, now.newest_version, now.versions) == ("not told", "v3", 2)


def test_weights_that_sampled_before_they_were_served_count_from_then() -> None:
    """An update in place: a chunk names the new weights before the last worker has them."""
    world = World()
    played = world.episode(bound(0), None, "v1")
    world.serve("v1")
    assert played.stopped == []
    assert world.versions.lag("v1") == 0
    world.serve("v2")
    assert played.stopped == [StaleAction.CANCEL]


def test_where_the_engine_names_no_weights_none_are_counted() -> None:
    """The training loop samples: the order of its names is not known here."""
    world = World(first=None)
    played = world.episode(bound(0), None, "of the trainer")
    world.sample(played, "of the trainer, later")
    now = played.staleness.measured()
    assert now is not None
    assert (now.first_version, now.versions, now.exceeded, played.stopped) == ("of the trainer", None, False, [])


def test_finish_marks_and_does_not_stop() -> None:
    world = World()
    played = world.episode(bound(1, "finish"), None, "v0")
    world.serve("v1", "v2", "v3")
    now = played.staleness.measured()
    assert now is not None
    assert played.stopped == []
    assert (now.first_version, now.newest_version, now.versions, now.exceeded) == ("v0", "v3", 3, True)


def test_a_group_counts_from_the_first_token_of_any_of_its_episodes_and_is_judged_together() -> None:
    world, group = World(), EpisodeGroup("g", 0.0)
    early = world.episode(bound(1, scope="group"), group, "v0")
    world.serve("v1")
    late = world.episode(bound(1, scope="group"), group, "v1")
    waiting = world.episode(bound(1, scope="group"), group)
    other = world.episode(bound(1, scope="group"), EpisodeGroup("h", 0.0), "v1")
    world.serve("v2")
    assert (early.stopped, late.stopped) == ([StaleAction.CANCEL], [StaleAction.CANCEL])
    assert (waiting.stopped, other.stopped) == ([], []), "what has no token yet is not stale"
    now = late.staleness.measured()
    assert now is not None
    assert (now.first_version, now.versions, now.exceeded) == ("v0", 2, True)


def test_an_episode_that_ended_counts_for_its_group() -> None:
    world, group = World(), EpisodeGroup("g", 0.0)
    world.episode(bound(1, scope="group"), group, "v0")
    world.open.clear()
    world.serve("v1")
    late = world.episode(bound(1, scope="group"), group, "v1")
    world.serve("v2")
    assert late.stopped == [StaleAction.CANCEL]


def test_a_cancelled_group_begins_again_with_its_next_token() -> None:
    world, group = World(), EpisodeGroup("g", 0.0)
    world.episode(bound(1, scope="group"), group, "v0")
    world.serve("v1", "v2")
    world.watcher.admit(bound(1, scope="group"), group)
    again = world.episode(bound(1, scope="group"), group, "v2")
    world.serve("v3")
    assert again.stopped == []
    world.serve("v4")
    assert again.stopped == [StaleAction.CANCEL]


def test_a_group_that_stops_admitting_gets_no_further_episode() -> None:
    world, group = World(), EpisodeGroup("g", 0.0)
    policy = bound(1, "stop_admitting", "group")
    working, waiting = world.episode(policy, group, "v0"), world.episode(policy, group)
    world.serve("v1")
    world.watcher.admit(policy, group)
    world.serve("v2")
    assert (working.stopped, waiting.stopped) == ([StaleAction.TRUNCATE], [StaleAction.CANCEL])
    with pytest.raises(StaleGroup, match="group g gets no further episode: more than 1 weight versions"):
        world.watcher.admit(None, group)


def test_a_group_whose_episodes_all_ended_is_judged_when_the_next_one_comes() -> None:
    world, group = World(), EpisodeGroup("g", 0.0)
    policy = bound(1, "stop_admitting", "group")
    world.episode(policy, group, "v0")
    world.open.clear()
    world.serve("v1", "v2")
    with pytest.raises(StaleGroup):
        world.watcher.admit(policy, group)


def test_groups_with_open_episodes_are_never_forgotten_and_of_the_others_the_latest_are_kept() -> None:
    groups = EpisodeGroups(2)
    kept = groups.of("open", 1.0)
    groups.opened(kept)
    for number in range(5):
        group = groups.of(f"g{number}", 2.0 + number)
        groups.opened(group)
        groups.ended(group)
    assert len(groups) == 3
    assert groups.of("open", 9.0) is kept
    assert groups.of("g4", 9.0).since == 6.0
    assert groups.of("g0", 9.0).since == 9.0, "it was forgotten"
    assert groups.of(None, 1.0) is not groups.of(None, 1.0)


@given(data=st.data())
def test_whatever_is_sampled_and_served_in_whichever_order_no_open_episode_is_beyond_its_bound(
    data: st.DataObject,
) -> None:
    """Events come one at a time: an episode begins, samples, or new weights are served."""
    world = World()
    groups = [EpisodeGroup(name, 0.0) for name in "gh"]
    bounds = st.builds(
        bound,
        st.integers(0, 3),
        st.sampled_from(["cancel", "finish", "stop_admitting"]),
        st.sampled_from(["episode", "group"]),
    )
    for number in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["begin", "sample", "serve", "late sample", "new sample"]))
        running = [each for each in world.open if not each.stopping]
        if event == "begin":
            asked, group = data.draw(bounds), data.draw(st.sampled_from(groups))
            with suppress(StaleGroup):
                world.watcher.admit(asked, group)
                world.episode(asked, group)
        elif event == "serve":
            world.serve(f"w{number}")
        elif running:
            played = data.draw(st.sampled_from(running))
            current = world.versions.current
            assert current is not None
            names = {"sample": current.name, "late sample": "v0"}
            world.sample(played, names.get(event, f"w{data.draw(st.integers(0, 30))}"))
        for each in world.open:
            now = each.staleness.measured()
            assert now is not None
            assert now.bound is not None
            assert len(each.stopped) <= 1
            if each.stopped:
                assert now.exceeded
                assert now.versions is not None
                assert now.versions > now.bound.max_versions
                assert now.bound.policy != "finish"
            elif now.bound.policy != "finish" and each.sampled:
                assert not now.exceeded, "an open episode with a token is within its bound"
