"""The load of a vLLM server, from its Prometheus page. Its ``/load`` says 0 unless a flag is set."""

from __future__ import annotations

import math
import re
from typing import Final

from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.protocol import EngineLoad
from turnstile_server.engines.replies import error_for_status
from turnstile_server.errors import EngineProtocolError

_SAMPLE: Final = re.compile(r"^(vllm:[a-z_]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


async def read_load(http: EngineHttp, timeout_s: float) -> EngineLoad:
    """Raises the errors of a request, and EngineProtocolError for a page without vLLM's numbers."""
    status, body = await http.request("GET", "/metrics", timeout_s=timeout_s)
    if status != 200:
        raise error_for_status(status, body)
    return load_of(body.decode("utf-8", "replace"))


def load_of(page: str) -> EngineLoad:
    """A server of several data-parallel engines has one line for each: their sums, and the fullest cache."""
    values: dict[str, list[float]] = {}
    for name, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError as error:
            raise EngineProtocolError(f"/metrics says {name} is {text!r}.") from error
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
    running, waiting = values.get("vllm:num_requests_running"), values.get("vllm:num_requests_waiting")
    if running is None or waiting is None:
        raise EngineProtocolError("/metrics has no vllm:num_requests_running and vllm:num_requests_waiting.")
    used = values.get("vllm:kv_cache_usage_perc")
    preempted = values.get("vllm:num_preemptions_total")
    return EngineLoad(
        running=int(sum(running)),
        waiting=int(sum(waiting)),
        kv_used=None if used is None else max(used),
        retracted=None if preempted is None else int(sum(preempted)),
    )
