"""Starts the export of traces, where the settings want it. Without it no module of OpenTelemetry is imported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from turnstile.models import Episode, SpanReport
from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.settings import Settings


def start_trace_export(
    settings: Settings,
    model_name: str,
    changes: Callable[[], AsyncIterator[Episode]],
    report: Callable[[str], Awaitable[SpanReport]],
    tasks: BackgroundTasks,
) -> None:
    """Nothing where ``tracing.otlp`` is off. The arguments are those of ``TraceExport``; it runs in ``tasks``.
    Raises StartupError where the extra is not installed."""
    if not settings.tracing.otlp:
        return
    try:  # imported here, because it is an extra
        from turnstile_server.observability.otel import ModelNames, TraceExport  # noqa: PLC0415
    except ImportError as error:
        raise StartupError(
            f"tracing.otlp needs OpenTelemetry ({error}): install turnstile-rl[otel], or switch it off"
        ) from error
    names = ModelNames(settings.engine.kind, model_name)
    export = TraceExport(changes, report, names, settings.tracing)
    tasks.start(export.run, name="export of traces", shielded=False)
