"""The window of episodes: a simulated worker with a least-recently-used cache, with and without it."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from turnstile_server.engines.fleet.window import CUT_ALL, NEAR, SAMPLE, EpisodeWindow

TOKENS = 500
"""Of each episode's prompt; a completion is free here, a prompt token costs one."""


class Cache:
    """Holds the prompts of ``capacity`` episodes, the latest used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, None] = OrderedDict()

    def use(self, episode: str) -> int:
        """Tokens that were still there."""
        found = TOKENS if episode in self._kept else 0
        self._kept.pop(episode, None)
        self._kept[episode] = None
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return found


def cost(episodes: int, *, capacity: int, adaptive: bool, told: bool = False, turns: int = 40) -> float:
    """Prompt tokens computed per turn, where every episode wants to call as often as the others."""
    cache, window = Cache(capacity), EpisodeWindow(floor=1, idle_s=1e9, adaptive=adaptive)
    if told:
        window.hold(capacity * TOKENS)
    left = {f"ep_{number}": turns for number in range(episodes)}
    epochs: dict[str, int] = {}
    computed = 0
    while left:
        for episode in list(left):
            if not window.admits(episode, TOKENS, 0.0):
                continue
            window.begin(episode, TOKENS, 0.0)
            epoch, cached = window.epoch, cache.use(episode)
            computed += TOKENS - cached
            if epochs.get(episode) == epoch:
                window.found(TOKENS, cached)
            epochs[episode] = epoch
            window.learn(episode, TOKENS, cached)
            window.end(episode, 0.0)
            left[episode] -= 1
            if not left[episode]:
                del left[episode]
                window.leave(episode)
    return computed / (episodes * turns)


def test_with_four_times_too_many_episodes_the_window_keeps_what_a_fixed_limit_loses() -> None:
    best = cost(8, capacity=8, adaptive=False)
    thrashing = cost(32, capacity=8, adaptive=False)
    assert best == pytest.approx(TOKENS / 40)
    assert thrashing == TOKENS, "without a window every prompt is computed anew"
    assert cost(32, capacity=8, adaptive=True) < 0.2 * thrashing
    told = cost(32, capacity=8, adaptive=True, told=True)
    assert told < 1.1 * best, "an engine that tells its size needs no search"


def test_a_cache_that_holds_all_episodes_is_never_held_back() -> None:
    window = EpisodeWindow(floor=1, idle_s=60)
    for turn in range(40):
        for number in range(100):
            assert window.admits(f"ep_{number}", TOKENS, 0.0)
            window.begin(f"ep_{number}", TOKENS, 0.0)
            if turn:
                window.found(TOKENS, TOKENS - 5)
    assert window.budget is None


def _full(episodes: int, **options: float) -> EpisodeWindow:
    """A window with so many episodes inside, none of whose tokens were found again."""
    window = EpisodeWindow(**{"floor": 1, "idle_s": 60.0, **options})  # type: ignore[arg-type]
    for number in range(episodes):
        call(window, f"ep_{number}")
    for _ in range(SAMPLE):
        window.found(TOKENS, 0)
    return window


def call(window: EpisodeWindow, episode: str, tokens: int = TOKENS, *, cached: int = 0, priority: int = 0) -> None:
    """A call from its begin to its end."""
    window.begin(episode, tokens, 0.0, priority)
    window.learn(episode, tokens, cached)
    window.end(episode, 0.0)


def test_the_episodes_that_came_first_stay_in_and_others_follow_as_they_leave() -> None:
    window = _full(SAMPLE)
    inside = int(CUT_ALL * SAMPLE)
    assert window.budget == inside * TOKENS
    admitted = [window.admits(f"ep_{number}", TOKENS, 0.0) for number in range(SAMPLE)]
    assert admitted == [number < inside for number in range(SAMPLE)]
    window.leave("ep_0")
    assert window.admits(f"ep_{inside}", TOKENS, 0.0)
    assert not window.admits("new", TOKENS, 0.0)


def test_an_episode_without_a_call_for_long_gives_its_place_up() -> None:
    window = _full(3, floor=2, idle_s=10.0)
    assert not window.admits("new", TOKENS, 9.0)
    window.end("ep_1", 9.0)
    assert window.admits("new", TOKENS, 11.0)
    assert window.episodes == 1


def test_so_many_episodes_as_the_floor_says_take_turns_however_long_they_are() -> None:
    window = EpisodeWindow(floor=2, idle_s=60)
    window.hold(TOKENS)
    for number in range(3):
        assert window.admits(f"ep_{number}", 100 * TOKENS, 0.0) == (number < 2)
        if number < 2:
            window.begin(f"ep_{number}", 100 * TOKENS, 0.0)


def test_a_conversation_that_grows_holds_the_ones_after_it_back() -> None:
    window = EpisodeWindow(floor=1, idle_s=60)
    window.hold(3 * TOKENS)
    for number in range(3):
        window.begin(f"ep_{number}", TOKENS, 0.0)
    assert window.admits("ep_2", TOKENS, 0.0)
    window.learn("ep_0", 2 * TOKENS, 0)
    assert window.admits("ep_1", TOKENS, 0.0)
    assert not window.admits("ep_2", TOKENS, 0.0)


def test_what_an_episode_shares_with_others_is_not_counted_again() -> None:
    """The first prompt of a group's second episode is found in the cache but for its last tokens."""
    window = EpisodeWindow(floor=1, idle_s=60)
    window.hold(4 * TOKENS)
    call(window, "first")
    for number in range(10):
        assert window.admits(f"ep_{number}", TOKENS, 0.0)
        call(window, f"ep_{number}", cached=TOKENS - 50)
    assert all(window.admits(f"ep_{number}", TOKENS, 0.0) for number in range(10))


def test_a_new_episode_comes_in_only_where_it_may_become_as_long_as_others_did() -> None:
    window = EpisodeWindow(floor=1, idle_s=60)
    window.hold(6 * TOKENS)
    call(window, "long")
    call(window, "long", 4 * TOKENS)
    window.leave("long")
    call(window, "a", 2 * TOKENS)
    assert window.admits("b", TOKENS, 0.0)
    call(window, "b")
    assert not window.admits("c", TOKENS, 0.0), "3 of 6 are taken, and it may need 4"
    window.leave("a")
    assert window.admits("c", TOKENS, 0.0)


def test_an_episode_of_a_higher_priority_goes_before_those_that_came_first() -> None:
    window = EpisodeWindow(floor=1, idle_s=60)
    window.hold(2 * TOKENS)
    for name in ("a", "b"):
        call(window, name)
    assert not window.admits("later", TOKENS, 0.0)
    assert window.admits("evaluation", TOKENS, 0.0, priority=5)
    call(window, "evaluation", priority=5)
    assert [window.admits(name, TOKENS, 0.0) for name in ("a", "b")] == [True, False]
    assert not window.admits("second evaluation", 2 * TOKENS, 0.0, priority=5), "2 do not fit beside the first"
    assert window.admits("second evaluation", TOKENS, 0.0, priority=5)
    window.leave("evaluation")
    assert window.admits("b", TOKENS, 0.0)


def test_a_call_that_runs_for_long_keeps_the_turn_of_its_episode() -> None:
    window = _full(2, floor=1, idle_s=10.0)
    window.begin("ep_0", TOKENS, 1.0)
    assert not window.admits("new", TOKENS, 30.0)
    window.end("ep_0", 30.0)
    assert not window.admits("new", TOKENS, 39.0)
    assert window.admits("new", TOKENS, 41.0)


def _judge(window: EpisodeWindow, share_found: float, judgements: int = 1) -> None:
    """So many judgements while an episode waits."""
    for _ in range(judgements):
        window.admits("one that waits", 100 * TOKENS, 0.0)
        for _ in range(max(SAMPLE, window.episodes) if share_found == 1.0 else SAMPLE):
            window.found(100, int(100 * share_found))


def test_after_a_loss_the_budget_comes_back_fast_to_just_below_what_was_too_much() -> None:
    """The cache was flushed, or another server filled it: all is lost once."""
    window = EpisodeWindow(floor=1, idle_s=60)
    window.hold(20 * TOKENS)
    for number in range(20):
        call(window, f"ep_{number}")
    _judge(window, 0.0)
    assert window.budget == int(CUT_ALL * 20 * TOKENS)
    _judge(window, 1.0, 3)
    assert window.budget == NEAR * 20 * TOKENS
    _judge(window, 1.0, 100)
    assert window.budget == 20 * TOKENS, "never above what the cache holds"


def test_a_size_that_failed_again_is_tried_ever_more_rarely() -> None:
    window = EpisodeWindow(floor=1, idle_s=60)
    for number in range(20):
        call(window, f"ep_{number}")
    tries = []
    for _ in range(4):
        while window.budget is not None and window.budget > 10 * TOKENS:
            _judge(window, 0.5)  # more than ten do not fit
        needed = 0
        while window.budget is None or window.budget <= 10 * TOKENS:
            _judge(window, 0.5 if window.budget is None else 1.0)
            needed += 1
        tries.append(needed)
    assert tries[-1] > tries[1], tries


def test_a_budget_does_not_grow_while_nobody_waits() -> None:
    window = _full(SAMPLE)
    before = window.budget
    for _ in range(20 * SAMPLE):
        window.found(TOKENS, TOKENS)
    assert window.budget == before


def test_a_worker_that_keeps_no_prompts_is_not_held_back() -> None:
    """As with a prefix cache that is switched off: nothing is ever found, however few take turns."""
    window = _full(8, floor=2)
    for _ in range(6 * SAMPLE):
        window.found(TOKENS, 0)
    assert window.budget is None
    assert all(window.admits(f"ep_{number}", TOKENS, 0.0) for number in range(100))
    window = EpisodeWindow(floor=2, idle_s=60)
    window.hold(TOKENS)
    window.open()
    window.hold(TOKENS)
    assert window.admits("any", 100 * TOKENS, 0.0)
