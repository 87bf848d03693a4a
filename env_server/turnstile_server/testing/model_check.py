"""The check of a model folder: what an agent can do with it, and what of that is not exact."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread

from turnstile_server.model_files import load_renderer
from turnstile_server.settings import RenderingSettings
from turnstile_server.testing.doctor import Finding
from turnstile_server.testing.machine import MachineReport


async def check_model(settings: RenderingSettings, folder: Path) -> MachineReport:
    """The findings for a Hugging Face folder. Raises StartupError where no server can start with it."""
    _, renderer = await anyio.to_thread.run_sync(load_renderer, folder, settings)
    report = renderer.report
    called = report.call_format is not None
    findings = [
        Finding(name="tool calls", passed=called, text=report.call_format or "none can be offered"),
        Finding(name="thinking", passed=None, text=report.thinking or "none"),
        Finding(name="ends of a reply", passed=None, text=" ".join(report.stops)),
        Finding(name="messages", passed=None, text=", ".join(report.rewrites) or "kept as they are"),
    ]
    findings += [Finding(name="not exact", passed=None if called else False, text=each) for each in report.inexact]
    return MachineReport.of(findings)
