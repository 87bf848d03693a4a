"""Which calls run on a vLLM server, and how old the attention cache is that they sample on. Pure.

Two caches outlive weights on vLLM when an update keeps them (``pause in_place``). That of a call which runs: its
later tokens are sampled on keys of older weights, and their spans say so (``stale_kv``). And the prefix cache,
from which later calls would begin: vLLM keeps its old blocks. So each call carries a ``cache_salt`` that names the
weights it was sent under, and vLLM shares blocks between equal salts only. The salt is a name of our own making,
not the version: a call that goes on over an update writes blocks of mixed weights under its salt, so no salt is
ever used for weights that come later, even under the same version.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace

from turnstile_server.engines.protocol import EngineFinish
from turnstile_server.errors import EngineRefused


@dataclass(slots=True, eq=False)
class VllmCall:
    """A call in flight. ``version``: the weights it was sent to, None where not known or changed since. ``kept``:
    the versions that came while it ran and kept its cache."""

    rid: str
    salt: str
    version: str | None
    kept: set[str] = field(default_factory=set)

    def marked(self, finish: EngineFinish) -> EngineFinish:
        """``finish`` with ``stale_kv`` on the spans whose tokens were sampled on a cache of older weights."""
        if not self.kept:
            return finish
        spans = tuple(
            span.model_copy(update={"stale_kv": True}) if span.version in self.kept else span
            for span in finish.weight_spans
        )
        return replace(finish, weight_spans=spans)


class VllmCalls:
    """The calls in flight by rid, and the salts of the prefix cache."""

    def __init__(self) -> None:
        self._live: dict[str, VllmCall] = {}
        self._salt = self._next = _new_salt()

    def begin(self, rid: str, version: str | None, *, paused_in_place: bool) -> VllmCall:
        """Raises EngineRefused for a rid that is in use: vLLM would take it, and one abort would end both.

        A call that is sent while the caches of a pause are kept waits in vLLM's queue. It gets the salt of the
        weights to come, so that it begins from none of the old blocks if they come.
        """
        if rid in self._live:
            raise EngineRefused(f"A call named {rid!r} is running already.")
        call = self._live[rid] = VllmCall(rid, self._next if paused_in_place else self._salt, version)
        return call

    @property
    def salt(self) -> str:
        """For a call that is not one of these, sent now."""
        return self._salt

    def end(self, call: VllmCall) -> None:
        if self._live.get(call.rid) is call:
            del self._live[call.rid]

    def runs(self, call: VllmCall) -> bool:
        return self._live.get(call.rid) is call

    def get(self, rid: str) -> VllmCall | None:
        return self._live.get(rid)

    def paused_in_place(self) -> None:
        """Calls from now on wait, and may run under other weights than the caches have."""
        if self._next == self._salt:
            self._next = _new_salt()

    def resumed(self) -> None:
        """The salt of the calls that came in the pause is that of all later ones: their blocks are of these
        weights."""
        self._salt = self._next

    def weights_changing(self) -> None:
        """From now on it is not certain which weights sampled a token, until the call's finish says it."""
        for call in self._live.values():
            call.version = None

    def weights_changed(self, version: str, *, kept_cache: bool) -> None:
        """``version`` is served now. ``kept_cache``: vLLM kept its caches. A call that was sent before the pause
        and waited in vLLM's queue may have begun from old blocks or from none; it counts as having them."""
        if kept_cache:
            for call in self._live.values():
                if call.salt != self._next:
                    call.kept.add(version)
        else:
            self._next = _new_salt()
        self._salt = self._next


def _new_salt() -> str:
    return uuid.uuid4().hex
