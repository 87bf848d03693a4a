"""The number of episodes that take turns on a worker: as many as its prefix cache holds. Pure.

An agent's next call repeats all of its last one, so it is cheap while that is in the worker's cache. With more
episodes than the cache holds, each call evicts what the next one needs, every prompt is computed anew, and
throughput falls: thrashing. A limit on calls does not help, because an agent that runs a tool has no call. So the
episodes themselves are limited, by the tokens that they need in the cache: those of their latest conversation,
without what their first prompt found there already (others share it).

The budget is a share (``fill``) of the engine's cache, where it says how large that is; else it is open until
something is lost. It follows what the engine says of the cache: of the tokens that an episode's last call left
there (``expected``), how many did its next call still find (``cached``)? Where more than ``LOST`` of them are gone
the budget is cut to a share of what its episodes need (multiplicative decrease). While nothing is lost and others
wait it comes back fast to just below what was too much, and then tries a little more ever more rarely, as CUBIC
does with TCP's window (RFC 9438).

Episodes of a higher priority come first, then those that came first: they end first, and their groups with them.
An episode that grows may push the last one out; its next call waits. A new one comes in only where it has room to
become as long as episodes become.

Where taking turns leaves the worker idle, all are let in for a trial, and for good if that is faster
(``trial.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from turnstile_server.engines.fleet.trial import OpenTrial

CUT: Final = 0.75
CUT_ALL: Final = 0.5
"""The cut where nearly all is lost (``ALL_LOST``): the budget is far too large then."""
ALL_LOST: Final = 0.8
LOST: Final = 0.2
KEPT: Final = 0.05
SAMPLE: Final = 8
"""Calls that are judged together; before it grows, at least as many as episodes take turns."""
RECOVER: Final = 1.25
"""Growth per judgement while the budget is below ``NEAR`` of what was too much."""
NEAR: Final = 0.9
FIRST_PATIENCE: Final = 4
MAX_PATIENCE: Final = 64
"""Judgements between two attempts to grow past that: from the first to the most."""
LATEST: Final = 0.1
"""Weight of the latest episode in the mean length at the end."""


@dataclass(slots=True)
class _Inside:
    """An episode that has come and not left. ``tokens``: of its longest call, prompt and completion. ``shared``:
    those that its first prompt found in the cache; None: it has had no call."""

    last: float
    tokens: int
    priority: int
    shared: int | None = None
    running: int = 0
    """Calls of it on the worker."""
    sampled: int = 0
    """Tokens of its calls that end now."""

    @property
    def needs(self) -> int:
        """Tokens in the cache that it needs for itself."""
        return self.tokens - (self.shared or 0)


class _Turns:
    """Who takes turns and who waits, in order; ``ahead_of`` a new episode: by priority."""

    def __init__(self) -> None:
        self.admitted: dict[str, None] = {}
        self.waiting: list[int] = []
        """The priorities of those that wait."""
        self._needed: list[tuple[int, int]] = []
        """Priority and need of those that take turns, the highest priority first."""
        self._ahead: dict[int, tuple[int, int, bool]] = {}

    def add(self, name: str, inside: _Inside, fits: bool) -> None:
        if fits:
            self.admitted[name] = None
            self._needed.append((inside.priority, inside.needs))
        else:
            self.waiting.append(inside.priority)

    def ahead_of(self, priority: int) -> tuple[int, int, bool]:
        """The episodes that go before a new one with ``priority``: how many take turns, what these need, and
        whether none waits."""
        if priority not in self._ahead:
            needs = [need for other, need in self._needed if other >= priority]
            nobody_waits = all(other < priority for other in self.waiting)
            self._ahead[priority] = (len(needs), sum(needs), nobody_waits)
        return self._ahead[priority]


class EpisodeWindow:
    """The episodes that take turns on one worker.

    ``floor``: so many episodes always take turns. ``fill``: share of the worker's cache that they may need.
    ``idle_s``: one without a call for so long has left. ``adaptive`` False: it is always open.
    """

    def __init__(self, *, floor: int, idle_s: float, fill: float = 1.0, adaptive: bool = True) -> None:
        self._floor, self._idle_s, self._fill, self._adaptive = floor, idle_s, fill, adaptive
        self._inside: dict[str, _Inside] = {}
        self._ceiling = float("inf")
        self._budget: float | None = None
        self._turns: _Turns | None = None
        """Who takes turns; None: to be counted anew."""
        self._refused = False
        """An episode had to wait since the last judgement."""
        self._idle_at = 0.0
        """None is idle before then."""
        self.epoch = 0
        """Counts the cuts: what was left before a cut says nothing of the time after it."""
        self._expected = self._lost = self._calls = 0
        self._too_much = float("inf")
        """The tokens that the episodes needed when tokens were last lost."""
        self._patience, self._judged_good = FIRST_PATIENCE, 0
        self._length = 0.0
        """Mean need of episodes at their end; 0: none has ended."""
        self._trial = OpenTrial()

    @property
    def budget(self) -> int | None:
        """Tokens of the episodes that take turns; None: open."""
        return None if self._budget is None or self._trial.open else int(self._budget)

    @property
    def episodes(self) -> int:
        """Episodes that have come and not left."""
        return len(self._inside)

    def hold(self, capacity: int | None) -> None:
        """The worker's cache has ``capacity`` tokens; None: not known."""
        if self._adaptive and capacity is not None:
            self._budget = self._ceiling = self._fill * capacity
            self._turns = None

    def open(self) -> None:
        """The worker keeps no prompts: the number of episodes changes nothing. It stays open."""
        self._adaptive, self._budget, self._turns = False, None, None

    def admits(self, episode_id: str, tokens: int, now: float, priority: int = 0) -> bool:
        """True if a call of the episode, with a prompt of ``tokens``, may go to the worker now."""
        if self._budget is None:
            return True
        self._forget_idle(now)
        if self._trial.open:
            return True
        turns = self._taking_turns()
        admitted = episode_id in turns.admitted or self._has_room(turns, episode_id, tokens, priority)
        if not admitted:
            self._refused = True
            self._trial.waits()
        return admitted

    def _has_room(self, turns: _Turns, episode_id: str, tokens: int, priority: int) -> bool:
        """For an episode that takes no turns now."""
        before, needed, all_in = turns.ahead_of(priority)
        if episode_id in self._inside or not all_in:
            return len(turns.admitted) < self._floor  # others came before it and wait
        return before < self._floor or needed + max(tokens, self._length) <= (self._budget or 0.0)

    def begin(self, episode_id: str, tokens: int, now: float, priority: int = 0) -> None:
        """A call of the episode, with a prompt of ``tokens``, goes to the worker."""
        inside = self._inside.setdefault(episode_id, _Inside(now, tokens, priority))
        inside.last, inside.tokens, inside.priority = now, max(tokens, inside.tokens), priority
        inside.running += 1
        self._turns = None
        if self._adaptive:
            self._trial.begins(now, self._taking())

    def learn(self, episode_id: str, tokens: int, cached: int | None, sampled: int = 0) -> None:
        """A call of the episode, which ends now, had ``tokens``, prompt and completion, of which it ``sampled`` so
        many; ``cached`` of its prompt were in the cache, None where that is not known."""
        inside = self._inside.get(episode_id)
        if inside is None:
            return
        inside.sampled += sampled
        inside.tokens = max(tokens, inside.tokens)
        if inside.shared is None:
            inside.shared = cached or 0
        self._turns = None

    def end(self, episode_id: str, now: float) -> None:
        """A call of the episode is over, however it ended."""
        inside, sampled = self._inside.get(episode_id), 0
        if inside is not None:
            inside.last = now
            inside.running -= 1
            sampled, inside.sampled = inside.sampled, 0
        if self._adaptive and self._trial.ends(now, self._taking(), sampled, self._crowded()):
            self._begin_anew()

    def disturbed(self) -> None:
        """The worker stood still for a while, as in a pause."""
        self._trial.disturbed()

    def leave(self, episode_id: str) -> None:
        """The episode ended, or went elsewhere."""
        inside = self._inside.pop(episode_id, None)
        if inside is None:
            return
        if inside.shared is not None:
            self._length += (inside.needs - self._length) * (LATEST if self._length else 1.0)
        self._turns = None

    def found(self, expected: int, cached: int) -> None:
        """A call's prompt had ``expected`` tokens that an earlier one had left there in this epoch; ``cached``
        were still found."""
        if not self._adaptive or expected <= 0 or self._trial.open or not self._trial.settled:
            return
        self._expected += expected
        self._lost += max(0, expected - cached)
        self._calls += 1
        if self._calls < SAMPLE:
            return
        share = self._lost / self._expected
        active = self._inside if self._budget is None else self._taking_turns().admitted
        needed = sum(self._inside[name].needs for name in active)
        if share > ALL_LOST and len(active) <= self._floor:
            self.open()  # so few would fit into any cache: this one keeps nothing
        elif share > LOST:
            self._cut(needed, CUT if share < ALL_LOST else CUT_ALL)
        elif self._calls < len(active):
            return
        elif share < KEPT and self._budget is not None and self._refused:
            self._grow(self._budget, needed / max(len(active), 1))
        self._expected = self._lost = self._calls = 0
        self._refused = False

    def _cut(self, needed: int, share: float) -> None:
        again = needed >= NEAR * self._too_much
        self._patience = min(2 * self._patience, MAX_PATIENCE) if again else FIRST_PATIENCE
        self._too_much = float(needed)
        self._budget = share * needed
        self._judged_good = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Others take turns from now on than those whose prompts are in the cache."""
        self.epoch += 1
        self._turns = None
        self._expected = self._lost = self._calls = 0

    def _taking(self) -> int:
        """The number of episodes that take turns."""
        everyone = self._trial.open or self._budget is None
        return len(self._inside) if everyone else len(self._taking_turns().admitted)

    def _crowded(self) -> bool:
        """The episodes need more than the cache may hold."""
        return self._budget is not None and sum(each.needs for each in self._inside.values()) > self._budget

    def _grow(self, budget: float, episode: float) -> None:
        """Nothing was lost, and others wait. ``episode``: the mean need of those that take turns."""
        if budget > self._too_much:  # it is too much no more
            self._too_much, self._patience = float("inf"), FIRST_PATIENCE
        near = NEAR * self._too_much
        if budget < near:
            grown = min(RECOVER * budget, near)
        else:
            self._judged_good += 1
            if self._judged_good < self._patience:
                return
            self._judged_good = 0
            grown = budget + episode
        self._budget = min(grown, self._ceiling)
        self._turns = None

    def _taking_turns(self) -> _Turns:
        """Those that come first, as far as the budget goes."""
        if self._turns is None:
            turns = self._turns = _Turns()
            used = 0
            for name in sorted(
                self._inside, key=lambda name: -self._inside[name].priority
            ):  # stable: who came first
                inside = self._inside[name]
                used += inside.needs
                fits = not turns.waiting and (used <= (self._budget or 0.0) or len(turns.admitted) < self._floor)
                turns.add(name, inside, fits)
        return self._turns

    def _forget_idle(self, now: float) -> None:
        if now < self._idle_at:
            return
        idle = [name for name, inside in self._inside.items() if now - inside.last > self._idle_s]
        for name in idle:
            if not self._inside[name].running:
                del self._inside[name]
                self._turns = None
        self._idle_at = self._idle_s + min((inside.last for inside in self._inside.values()), default=now)
