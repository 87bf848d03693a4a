"""What a trainer gets, held against what the engine sampled and what the agents were given.

A trained token is *right* if the engine sampled this id after exactly the ids before it in the row: only then is
the recorded logprob that of this token in this context. ``other context``: the id is part of a completion that
the engine sampled, but after other ids. ``wrong``: neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Place = tuple[int, int]
"""A sampled token: number of the engine's call, position in its completion."""

_BASE: Final = 1_000_003
_MODULUS: Final = (1 << 61) - 1
_LEAST_RUN: Final = 4
"""A shorter run is found in some completion by chance."""
_TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence for the trainer. ``versions``: None for a token whose weights were not recorded."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[str | None, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"a row's arrays differ in length: {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Call:
    """What the engine did for one request (``exactness.engine``). ``name``: its sample's."""

    name: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Call:
        arrays = (tuple(value[name]) for name in ("prompt", "ids", "logprobs", "versions"))
        return cls(value["name"], *arrays)


@dataclass
class Counts:
    """Tokens, unless said otherwise. ``given``: belongs to a reply that an agent went on with."""

    rows: int = 0
    tokens: int = 0
    sampled: int = 0
    given: int = 0
    trained: int = 0
    wrong: int = 0
    other_context: int = 0
    untrained: int = 0
    """Given, and in no row's mask."""
    twice: int = 0
    """Trained again: beyond the first time."""
    not_given: int = 0
    """Trained, though no agent went on with the reply."""
    logprobs_wrong: int = 0
    versions: dict[str, int] = field(default_factory=lambda: {"right": 0, "wrong": 0, "absent": 0})
    """Of the trained tokens that the engine sampled."""

    @property
    def exact(self) -> bool:
        """Every given token is trained once, with its own logprob, and nothing else is."""
        faults = self.wrong, self.other_context, self.untrained, self.twice, self.not_given, self.logprobs_wrong
        return not any(faults)


def count(rows: Sequence[Row], calls: Sequence[Call], given: Collection[str]) -> Counts:
    """``given``: names of the samples whose replies agents went on with."""
    found = Counts(rows=len(rows), tokens=sum(len(row.ids) for row in rows))
    found.sampled = sum(len(call.ids) for call in calls)
    sampled = _sampled_after(calls)
    trained: Counter[Place] = Counter()
    for row in rows:
        found.trained += sum(row.mask)
        for at, place in _places(row, calls, sampled, found):
            trained[place] += 1
            call, position = place
            own = row.logprobs[at]
            if own is None or abs(own - calls[call].logprobs[position]) > _TOLERANCE:
                found.logprobs_wrong += 1
            version = row.versions[at]
            right = version == calls[call].versions[position]
            found.versions["absent" if version is None else "right" if right else "wrong"] += 1
    for number, each in enumerate(calls):
        places = [(number, position) for position in range(len(each.ids))]
        if each.name in given:
            found.given += len(places)
            found.untrained += sum(place not in trained for place in places)
        else:
            found.not_given += sum(place in trained for place in places)
    found.twice = sum(times - 1 for times in trained.values())
    return found


def _prefixes(ids: Sequence[int]) -> Iterator[int]:
    """A hash of each beginning, the shortest first."""
    value = 0
    for token in ids:
        value = (value * _BASE + token + 1) % _MODULUS
        yield value


def _sampled_after(calls: Sequence[Call]) -> dict[int, dict[int, int]]:
    """For the hash of a beginning that ends with a sampled token: the calls that sampled it, and where."""
    found: dict[int, dict[int, int]] = {}
    for number, call in enumerate(calls):
        start = len(call.prompt)
        for at, value in enumerate(_prefixes((*call.prompt, *call.ids))):
            if at >= start:
                found.setdefault(value, {})[number] = at - start
    return found


def _places(
    row: Row, calls: Sequence[Call], sampled: dict[int, dict[int, int]], counts: Counts
) -> Iterator[tuple[int, Place]]:
    """Each trained token that the engine sampled, with its place; notes the others in ``counts``.

    It goes backwards: samples of one prompt may begin alike, and only their later tokens tell them apart."""
    prefixes = list(_prefixes(row.ids))
    unknown: list[int] = []
    call: int | None = None
    for at in range(len(row.ids) - 1, -1, -1):
        if not row.mask[at]:
            call = None
            continue
        candidates = sampled.get(prefixes[at], {})
        if not candidates:
            unknown.append(at)
            continue
        if call not in candidates:
            call = next(iter(candidates))
        yield at, (call, candidates[call])
    for run in _runs(unknown[::-1]):
        place = _elsewhere([row.ids[at] for at in run], calls)
        if place is None:
            counts.wrong += len(run)
            continue
        counts.other_context += len(run)
        yield from ((at, (place[0], place[1] + offset)) for offset, at in enumerate(run))


def _runs(positions: Sequence[int]) -> Iterator[list[int]]:
    """Ascending positions in runs without a gap."""
    run: list[int] = []
    for position in positions:
        if run and position != run[-1] + 1:
            yield run
            run = []
        run.append(position)
    if run:
        yield run


def _elsewhere(ids: Sequence[int], calls: Sequence[Call]) -> Place | None:
    """Where some call sampled these ids in a row."""
    if len(ids) < _LEAST_RUN:
        return None
    wanted = tuple(ids)
    for number, call in enumerate(calls):
        for start in range(len(call.ids) - len(wanted) + 1):
            if call.ids[start : start + len(wanted)] == wanted:
                return number, start
    return None
