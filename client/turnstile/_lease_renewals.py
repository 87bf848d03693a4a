"""The leases of one client: a thread for each server tells it, again and again, that this process lives.

A thread and not a task: a training loop may hold its event loop for minutes. It dies with the process, and stands
still where the process is stopped; that is the point. Times are monotonic. What must hold: only servers at which
something was leased are called; one call renews all episodes at a server; a failed call is repeated sooner, and
raises nowhere; a forked child renews nothing of its parent's.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import httpx

from turnstile import _requests as requests
from turnstile import errors
from turnstile._requests import ApiReply, headers_of, read
from turnstile._retry import ClientSettings
from turnstile._transport import client_arguments
from turnstile.models import Lease, new_id

LEASE_LAPSED = "lease_lapsed"
"""The error of an episode, or of a call, whose lease was not renewed in time."""
_RENEWALS = 4
"""In the time of a lease, so that some may be lost."""
_SOONER = 4
"""After a renewal that failed, the next comes this much sooner."""


class LeaseRenewals:
    """``settings.lease_s`` None: there are none."""

    def __init__(self, key: str | None, settings: ClientSettings) -> None:
        self._key = key
        self._settings = settings
        self._process = os.getpid()
        self._renewals: dict[str, _Renewal] = {}
        self._closed = False

    def at(self, server: str) -> Lease | None:
        """The lease for a new episode at ``server``, which is renewed from now on until ``close``."""
        if self._settings.lease_s is None or self._closed:
            return None
        if self._process != os.getpid():  # in a forked child the parent's threads do not run
            self._process, self._renewals = os.getpid(), {}
        renewal = self._renewals.get(server)
        if renewal is None or renewal.over:
            renewal = self._renewals[server] = _Renewal(server, self._key, self._settings, self._settings.lease_s)
        return renewal.lease

    def after(self, lapsed: Lease, server: str) -> Lease | None:
        """A lease in the place of one that lapsed."""
        renewal = self._renewals.get(server)
        if renewal is not None and renewal.lease.lease_id == lapsed.lease_id:
            renewal.end()
        return self.at(server)

    def move(self, before: str, now: str) -> None:
        """The server has another address: its lease is renewed there."""
        renewal = self._renewals.pop(before, None)
        if renewal is not None and self._process == os.getpid():
            renewal.server = now
            self._renewals[now] = renewal

    def close(self) -> None:
        """Ends the renewals: episodes that are open then lapse. May be called from any thread, and repeated."""
        self._closed = True
        for renewal in list(self._renewals.values()):
            renewal.end()


class _Renewal:
    """The renewal of one lease at one server, in a thread of its own."""

    def __init__(self, server: str, key: str | None, settings: ClientSettings, lease_s: float) -> None:
        self.lease = Lease(lease_id=new_id("lease"), lease_s=lease_s)
        self.server = server
        self._arguments: dict[str, Any] = client_arguments(settings)
        self._call = requests.renew_lease(self.lease.lease_id, lease_s)
        self._headers = headers_of(self._call, key)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=f"lease at {server}", daemon=True).start()

    @property
    def over(self) -> bool:
        """It was ended, or the server says that it lapsed."""
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        pause_s = self.lease.lease_s / _RENEWALS
        with httpx.Client(**self._arguments, timeout=pause_s) as http:
            next_s = pause_s
            while not self._ended.wait(next_s):
                try:
                    reply = http.post(
                        self.server + self._call.path, content=self._call.body, headers=self._headers
                    )
                    read(self._call, ApiReply(reply.status_code, dict(reply.headers), reply.content), self.server)
                    next_s = pause_s
                except errors.Gone:
                    self._ended.set()  # its episodes were cancelled: each of them says so itself
                except (errors.TurnstileError, httpx.RequestError):
                    next_s = pause_s / _SOONER
