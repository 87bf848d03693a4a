"""The reason that the proxy refuses or cuts a connection: an outcome for the record, and a response for the
client."""

from __future__ import annotations

from http import HTTPStatus

from turnstile.models.network import NetworkOutcome

_STATUS = {
    NetworkOutcome.REQUEST: HTTPStatus.BAD_REQUEST,
    NetworkOutcome.UNRESOLVED: HTTPStatus.BAD_GATEWAY,
    NetworkOutcome.UNREACHABLE: HTTPStatus.BAD_GATEWAY,
    NetworkOutcome.UPSTREAM: HTTPStatus.BAD_GATEWAY,
    NetworkOutcome.CONNECTIONS: HTTPStatus.TOO_MANY_REQUESTS,
    NetworkOutcome.IDLE: HTTPStatus.GATEWAY_TIMEOUT,
}
"""All others are 403."""


class NetworkRefused(Exception):
    """Ends one connection to the proxy. Never leaves the package. ``hint``: for the client alone."""

    def __init__(self, outcome: NetworkOutcome, detail: str, hint: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.hint = hint

    @property
    def status(self) -> HTTPStatus:
        return _STATUS.get(self.outcome, HTTPStatus.FORBIDDEN)
