"""The weight versions of this server, in the order in which they were served.

Versions are names that the trainer chooses; nothing is read from them. Their order is that in which this server
first served them. What must hold: a name stands for one set of weights for as long as the server lives, because
turns say by it which weights sampled them; the order only grows. Weights that sampled a token before anybody
told of them are as old as those that were current then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnstile_server.errors import Conflict


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """``source``: what the name stands for (a folder, or the update that brought it); None where not known."""

    name: str
    order: int
    source: str | None


class WeightVersions:
    """Counts versions. ``order`` of the first is 0."""

    def __init__(self) -> None:
        self._served: dict[str, ServedVersion] = {}
        self._current: ServedVersion | None = None
        self._sampled: dict[str, int] = {}
        """Names that sampled and were not served yet: the order that was current then."""
        self._listeners: list[Callable[[ServedVersion], None]] = []

    @property
    def current(self) -> ServedVersion | None:
        """The newest weights; None before the engine named any."""
        return self._current

    def check(self, name: str, source: str | None) -> None:
        """Raises Conflict for a name that cannot be served next: it stands for other weights, or it was served
        before the current one. The current one may be loaded again."""
        known = self._served.get(name)
        if known is None:
            return
        if known is not self._current:
            current = "none" if self._current is None else repr(self._current.name)
            raise Conflict(
                f"the weight version {name!r} was served before the current one ({current}): a name is never "
                "served again after another; load these weights under a new name"
            )
        if known.source is not None and source is not None and known.source != source:
            raise Conflict(
                f"the weight version {name!r} names other weights already; give each its own name",
                detail={"source": known.source},
            )

    def serve(self, name: str, source: str | None = None) -> ServedVersion:
        """The weights ``name`` are served from now on. Repeating the current one changes nothing. Raises Conflict
        as ``check`` does."""
        self.check(name, source)
        if self._current is not None and self._current.name == name:
            return self._current
        served = ServedVersion(name, len(self._served), source)
        self._served[name] = self._current = served
        for listener in self._listeners:
            listener(served)
        return served

    def observe(self, name: str) -> None:
        """An engine says that it serves ``name``, which nobody here loaded: it was changed from outside. A name
        that was served before is taken as it is, and changes nothing."""
        if not self.was_served(name):
            self.serve(name)

    def was_served(self, name: str) -> bool:
        return name in self._served

    def sampled(self, name: str) -> None:
        """The weights ``name`` have sampled a token. They need not be known yet: an update is just ending, or
        somebody loaded them past us and no engine was asked since."""
        if self._order(name) is None and self._current is not None:
            self._sampled[name] = self._current.order

    def lag(self, name: str) -> int | None:
        """The number of versions that were served after ``name``; None for a name that was never served here and
        sampled nothing. Weights with an adapter (``v2+sql``) are as old as the weights."""
        order = self._order(name)
        return None if order is None or self._current is None else self._current.order - order

    def _order(self, name: str) -> int | None:
        base = name
        while base not in self._served and "+" in base:
            base = base.rpartition("+")[0]
        known = self._served.get(base)
        return self._sampled.get(name) if known is None else known.order

    def on_change(self, listener: Callable[[ServedVersion], None]) -> None:
        """Calls ``listener`` with each new version, at once and in the event loop; it must not wait or raise."""
        self._listeners.append(listener)
