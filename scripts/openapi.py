"""Prints the control API's OpenAPI document: every route of a whole server, assembled without a model.

    python scripts/openapi.py > openapi.json

The viewer's types are generated from it (``make ui``).
"""

from __future__ import annotations

import asyncio
import json
import sys

from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.testing.server import scripted_server


async def document() -> str:
    """The document as JSON, its keys in order."""
    settings = Settings.model_validate({"sandboxes": {"kind": "none"}})
    async with scripted_server(settings, never_asked) as server:
        answer = await server.control.get("/openapi.json")
        answer.raise_for_status()
        return json.dumps(
            {**answer.json(), "info": {"title": "Turnstile", "version": ""}}, indent=1, sort_keys=True
        )


def never_asked(shown: PolicyInput) -> Step:
    raise AssertionError("no episode is played")


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(document()) + "\n")
