"""Settings of what a server tells about itself: traces and samples."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.settings.section import BoundedSection


class TracingSettings(BoundedSection):
    """Spans of episodes for OpenTelemetry ([traces](spans.md#opentelemetry)). Where to, with which headers and
    time-outs: the standard variables ``OTEL_EXPORTER_OTLP_…``, ``OTEL_SERVICE_NAME``,
    ``OTEL_RESOURCE_ATTRIBUTES``."""

    otlp: bool = Field(
        False,
        description="Export the spans of each episode by OTLP over HTTP when it has ended; needs the extra "
        "`otel`.",
    )


class ObservabilitySettings(BoundedSection):
    """Samples of the server's counters, in memory, for ``GET /live`` and the viewer."""

    sample_s: float = Field(2.0, ge=0.05, description="Seconds between two samples.")
