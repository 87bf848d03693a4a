"""A lease: how the owner of episodes says that it lives, and what the server answers."""

from __future__ import annotations

from pydantic import Field

from turnstile.models.base import ClientId, Model


class LeaseTerm(Model):
    """Body of ``POST /leases/{lease_id}``: the server waits this long for the next renewal."""

    lease_s: float = Field(ge=1.0, le=86_400.0, description="Seconds from this request on.")


class Lease(LeaseTerm):
    """In ``POST /episodes``: whose episode this is. One lease may have many episodes; creating one renews it."""

    lease_id: ClientId
    """Chosen by the owner; no other may use it."""


class LeaseState(Model):
    """Answer to ``POST /leases/{lease_id}``."""

    lease_id: str
    lease_s: float
    open_episodes: int
    """Episodes of the lease that have not ended."""
