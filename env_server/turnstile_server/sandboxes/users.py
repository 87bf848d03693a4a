"""The uid of each user of a sandbox, where the helper can change its own.

A uid is what keeps users apart: the kernel lets no process signal, trace or read another of a different uid, and a
home is its user's alone. It also counts and keeps some things per uid for the whole machine (keyrings, inotify
watches, processes), so each sandbox has uids of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.protocol import User
from turnstile_server.settings import SandboxSettings

Uids = Mapping[User, int]

_APART = 16
"""Uids of one sandbox's set."""
_SETS = 1 << 22
"""Sets of the range: so many that two servers on one machine, which choose by chance, hardly ever meet."""


def uids_of(settings: SandboxSettings) -> Uids:
    """The uids of the settings. Raises StartupError where two users would have the same."""
    uids = {
        User.HARNESS: settings.harness_uid,
        User.AGENT: settings.agent_uid,
        User.TESTS: settings.tests_uid,
        User.WORK: settings.work_uid,
    }
    if len(set(uids.values())) < len(uids):
        named = ", ".join(f"sandboxes.{user}_uid = {uid}" for user, uid in uids.items())
        raise StartupError(f"every user of a sandbox needs a uid of its own, so that it is kept apart: {named}")
    return uids


def range_is_mapped(settings: SandboxSettings, *maps: str) -> bool:
    """True if the range is of use in a user name space with these maps (the text of ``/proc/PID/uid_map`` and
    ``gid_map``, user_namespaces(7))."""
    first, last = settings.uid_range, settings.uid_range + _APART * _SETS
    return all(
        any(int(start) <= first and last <= int(start) + int(count) for start, _, count in map(str.split, lines))
        for lines in (text.splitlines() for text in maps)
    )


class UidSets:
    """Hands out the uids of sandboxes: to each a set of its own, until it gives it back.

    ``from_range`` False, or ``sandboxes.uid_range`` 0: the uids of the settings to all.
    """

    def __init__(self, settings: SandboxSettings, *, from_range: bool = True) -> None:
        self._fixed = uids_of(settings)
        self._first = settings.uid_range if from_range else 0
        self._taken: set[int] = set()

    @property
    def own(self) -> bool:
        """True if no two sandboxes have the same."""
        return self._first > 0

    def take(self) -> Uids:
        if not self.own:
            return self._fixed
        while (number := secrets.randbelow(_SETS)) in self._taken:
            pass
        self._taken.add(number)
        first = self._first + _APART * number
        return {user: first + place for place, user in enumerate(User)}

    def give_back(self, uids: Uids) -> None:
        """Nothing of the sandbox runs any more."""
        if self.own:
            self._taken.discard((min(uids.values()) - self._first) // _APART)
