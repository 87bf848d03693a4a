"""Settings of what a server tells about itself: traces and samples."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.settings.section import Section


class TracingSettings(Section):
    """Spans of episodes for OpenTelemetry ([traces](spans.md#opentelemetry)). Where to, with which headers and
    time-outs: the standard variables ``OTEL_EXPORTER_OTLP_…``, ``OTEL_SERVICE_NAME``,
    ``OTEL_RESOURCE_ATTRIBUTES``."""

    otlp: bool = Field(
        False,
        description="Export the spans of each episode by OTLP over HTTP when it has ended; needs the extra "
        "`otel`.",
    )
    batch_spans: int = Field(512, ge=1, description="Spans in one request to the collector.")
    max_queued: int = Field(
        1000, ge=1, description="Ended episodes that wait for their export; further ones are not exported."
    )
    shutdown_s: float = Field(
        5.0, ge=0, description="At the end of the server: how long the export of what has ended may take."
    )


class ObservabilitySettings(Section):
    """Samples of the server's counters, in memory, for ``GET /live`` and the viewer."""

    sample_s: float = Field(2.0, ge=0.05, description="Seconds between two samples.")
    kept_samples: int = Field(
        1800, ge=2, description="The latest samples that are kept; about 1 KB each. With 2 s they are one hour."
    )
