"""Identifiers: a short prefix that says what the id names, then a UUIDv7 (sortable by time of creation)."""

from __future__ import annotations

from typing import Annotated

import uuid_utils
from pydantic import StringConstraints

CLIENT_ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

ClientId = Annotated[str, StringConstraints(pattern=CLIENT_ID_PATTERN)]
"""An id that a caller may choose: letters, digits, ``_`` and ``-``, 1 to 64 of them."""


def new_id(prefix: str) -> str:
    """Returns ``{prefix}_{uuid7 as 32 hex digits}``, e.g. ``ep_0199…``, ``turn_0199…``."""
    return f"{prefix}_{uuid_utils.uuid7().hex}"
