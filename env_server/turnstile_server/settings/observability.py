"""Settings of what a server keeps about itself."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.settings.section import Section


class ObservabilitySettings(Section):
    """Samples of the server's counters, in memory, for ``GET /live`` and the viewer."""

    sample_s: float = Field(2.0, ge=0.05, description="Seconds between two samples.")
    kept_samples: int = Field(
        1800, ge=2, description="The latest samples that are kept; about 1 KB each. With 2 s they are one hour."
    )
