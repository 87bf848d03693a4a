"""`turnstile audit --all` as the examples use it, and what they fail with."""

from __future__ import annotations

import asyncio
import os

from local import TURNSTILE, LocalServer, stopped_at_exit
from turnstile.models import AuditReport

TOLERANCE = 1e-4
"""Largest distance, in nats, between a recorded logprob and what the engine gives when asked again."""


class DemoError(Exception):
    """Something that must hold does not."""


async def audit(server: LocalServer) -> dict[str, AuditReport]:
    """`turnstile audit --all`, as a person would type it, read as JSON. The reports by episode id."""
    process = await asyncio.create_subprocess_exec(
        *(TURNSTILE, "audit", "--all", "--json"),
        env={**os.environ, "TURNSTILE_URL": server.control_url, "TURNSTILE_CONTROL_KEY": server.control_key},
        stdout=asyncio.subprocess.PIPE,
    )
    async with stopped_at_exit(process):
        output, _ = await process.communicate()
    reports = [AuditReport.model_validate_json(line) for line in output.splitlines()]
    if process.returncode != 0:
        failures = [failure for report in reports for check in report.invariants for failure in check.failures]
        raise DemoError(f"the audit failed: {failures or 'a distance is above the tolerance, or no answer'}")
    return {report.episode_id: report for report in reports}


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside a task group's, without the groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]
