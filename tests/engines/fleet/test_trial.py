"""Whether all episodes at once are tried, and stay where they are faster: a simulated worker that computes one
prompt after the other, keeps those used last, and runs tools in between."""

from __future__ import annotations

import heapq
import itertools

import pytest
from test_window import TOKENS, Cache

from turnstile_server.engines.fleet.trial import BUSY, OpenTrial
from turnstile_server.engines.fleet.window import EpisodeWindow

CAPACITY, EPISODES = 8, 32
"""Episodes that the cache holds, and those that there are."""
SAMPLED = 10
"""Tokens of each call."""


def rate(*, token_s: float, call_s: float, tool_s: float, adaptive: bool, turns: int = 60) -> tuple[float, bool]:
    """Sampled tokens per second; whether all were let in at once at some time. A prompt token that is not in the
    cache costs ``token_s``, a call ``call_s`` besides; the worker computes one after the other."""
    cache, window = Cache(CAPACITY), EpisodeWindow(floor=1, idle_s=1e9, adaptive=adaptive)
    window.hold(CAPACITY * TOKENS)
    left = {f"ep_{number}": turns for number in range(EPISODES)}
    waiting, events, order = list(left), [], itertools.count()
    epochs: dict[str, int] = {}
    now = free_at = 0.0
    opened = False
    while left:
        for episode in list(waiting):
            if not window.admits(episode, TOKENS, now):
                continue
            waiting.remove(episode)
            window.begin(episode, TOKENS, now)
            epoch, cached = window.epoch, cache.use(episode)
            expected = TOKENS if epochs.get(episode) == epoch else 0
            epochs[episode] = epoch
            free_at = max(free_at, now) + call_s + token_s * (TOKENS - cached)
            heapq.heappush(events, (free_at, next(order), episode, (expected, cached)))
        now, _, episode, call = heapq.heappop(events)
        if call is None:
            waiting.append(episode)
            continue
        window.found(*call)
        window.learn(episode, TOKENS, call[1], SAMPLED)
        window.end(episode, now)
        opened = opened or (adaptive and window.budget is None)
        left[episode] -= 1
        if left[episode]:
            heapq.heappush(events, (now + tool_s, next(order), episode, None))
        else:
            del left[episode]
            window.leave(episode)
    return EPISODES * turns * SAMPLED / now, opened


@pytest.mark.parametrize(
    ("token_s", "call_s", "tool_s", "tried"),
    [
        pytest.param(1e-5, 0.02, 2.0, True, id="short prompts, slow tools"),
        pytest.param(1e-3, 0.05, 2.0, True, id="long prompts, slow tools"),
        pytest.param(2e-4, 0.05, 1.0, True, id="as fast either way"),
        pytest.param(1e-3, 0.2, 0.1, False, id="the worker is busy with those that take turns"),
    ],
)
def test_the_better_of_turns_and_all_at_once_stays(
    monkeypatch: pytest.MonkeyPatch, token_s: float, call_s: float, tool_s: float, tried: bool
) -> None:
    costs = {"token_s": token_s, "call_s": call_s, "tool_s": tool_s}
    at_once, _ = rate(**costs, adaptive=False)
    found, opened = rate(**costs, adaptive=True)
    monkeypatch.setattr(OpenTrial, "waits", lambda _: None)  # then nothing is tried
    by_turns, _ = rate(**costs, adaptive=True)
    assert found > 0.9 * max(by_turns, at_once)
    assert opened == tried


def _calls(
    trial: OpenTrial, count: int, *, at: float, each_s: float, episodes: int, crowded: bool = True
) -> float:
    """One call after the other: an episode is in one for ``1 / episodes`` of its time. When the last ends."""
    for _ in range(count):
        trial.waits()
        trial.begins(at, episodes)
        at += each_s
        trial.ends(at, episodes, SAMPLED, crowded)
    return at


def _tried() -> tuple[OpenTrial, float]:
    trial = OpenTrial()
    at = 0.0
    while not trial.open:
        at = _calls(trial, 1, at=at, each_s=1.0, episodes=4)
        assert at < 60
    return trial, at


def test_all_at_once_stays_while_it_is_faster_and_ends_when_it_is_not() -> None:
    trial, at = _tried()
    at = _calls(trial, 200, at=at, each_s=0.5, episodes=16)
    assert trial.open
    _calls(trial, 80, at=at, each_s=4.0, episodes=16)
    assert not trial.open


def test_a_trial_that_failed_comes_again_ever_more_rarely() -> None:
    trial, at = _tried()
    pauses = []
    for _ in range(3):
        while trial.open:
            at = _calls(trial, 1, at=at, each_s=2.0, episodes=16)
        began = at
        while not trial.open:
            at = _calls(trial, 1, at=at, each_s=1.0, episodes=4)
        pauses.append(at - began)
    assert pauses[0] < pauses[1] < pauses[2]


def test_where_all_fit_there_is_nothing_to_choose() -> None:
    trial, at = _tried()
    _calls(trial, 40, at=at, each_s=0.5, episodes=8, crowded=False)
    assert not trial.open


def test_a_worker_that_stood_still_is_measured_anew() -> None:
    """A pause of an hour says nothing of what is faster."""
    trial, at = _tried()
    at = _calls(trial, 24, at=at, each_s=0.5, episodes=16)
    trial.begins(at, 16)
    trial.ends(at + 3600.0, 16, SAMPLED, crowded=True)
    trial.disturbed()
    _calls(trial, 100, at=at + 3600.0, each_s=0.5, episodes=16)
    assert trial.open


def test_nothing_is_tried_where_nobody_waits_or_the_worker_is_busy() -> None:
    idle, busy = OpenTrial(), OpenTrial()
    at = 0.0
    for _ in range(200):
        idle.begins(at, 4)
        busy.waits()
        busy.begins(at, 1)
        at += 1.0
        idle.ends(at, 4, SAMPLED, crowded=True)
        busy.ends(at, 1, SAMPLED, crowded=True)
    assert not idle.open
    assert not busy.open
    assert BUSY < 1.0
