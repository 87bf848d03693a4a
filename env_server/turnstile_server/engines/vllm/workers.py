"""Calls into vLLM's workers, where our extension loads weights (``extension/turnstile_vllm.py``).

What must hold: new weights are checked by every worker before any worker loads them, so all load them or none; a
load that may have failed half-way is WeightsUnknown, never a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.replies import error_for_status, parse_json
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings

REVISION: Final = 1
"""That of the extension that this client speaks to."""

EXTENSION: Final = "turnstile_vllm.LoadFolder"

EXTENSION_FOLDER: Final = Path(__file__).with_name("extension")
"""On vLLM's PYTHONPATH. Its one file needs nothing of ours, so it may be copied to another machine."""

WITHOUT_EXTENSION: Final = (
    "This vLLM runs without Turnstile's worker extension, so it cannot load weights safely: a folder that does "
    "not fit would end the engine, and one that lacks tensors would leave a mixture without an error. Start vLLM "
    "with --worker-extension-cls turnstile_vllm.LoadFolder and the extension's folder on PYTHONPATH (docs: "
    "engines/vllm)."
)


class WeightsUnknown(EngineUnavailable):
    """The engine may have old weights, new ones or a mixture: an update failed half-way. It stays paused until an
    update succeeds, or vLLM is started anew."""

    retryable = False


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """``path``: the folder whose weights the workers have; None after tensors that came by value."""

    path: str | None


class WorkerCalls:
    """``/collective_rpc`` of one server."""

    def __init__(self, http: EngineHttp, settings: EngineSettings) -> None:
        self._http = http
        self._settings = settings

    async def status(self, parallel: Mapping[str, Any]) -> WorkerStatus | None:
        """The workers' state; None where they lack the extension. ``parallel``: ``parallel_config`` of the server.
        Raises StartupError for an extension of another revision, and for workers whose weights are a mixture."""
        if parallel.get("worker_extension_cls") != EXTENSION:
            return None
        answers = await self._call("turnstile_status", {}, self._settings.control_timeout_s)
        revisions = {answer.get("revision") for answer in answers if answer.get("ok") is True}
        failed = [str(answer.get("error")) for answer in answers if answer.get("ok") is not True]
        if failed:
            raise StartupError(
                f"Turnstile's extension in vLLM does not work: {failed[0]}. Start vLLM with a folder."
            )
        if revisions != {REVISION}:
            raise StartupError(
                f"vLLM runs revision {revisions} of Turnstile's worker extension, this server needs {REVISION}: "
                "start vLLM with the extension of this version of Turnstile on PYTHONPATH."
            )
        if any(answer.get("broken") for answer in answers):
            raise StartupError("An update of this vLLM's weights failed half-way; start it anew.")
        return WorkerStatus(str(answers[0].get("path")) or None)

    async def check(self, method: str, arguments: Mapping[str, str]) -> None:
        """Asks every worker; changes nothing. Raises EngineRefused with what a worker said, and WeightsUnknown
        where an earlier load failed half-way."""
        answers = await self._call(method, arguments, self._settings.weights_timeout_s)
        if any(answer.get("broken") for answer in answers):
            raise WeightsUnknown("An update of this vLLM's weights failed half-way; start it anew.")
        for answer in answers:
            if answer.get("ok") is not True:
                raise EngineRefused(f"The engine refused the weights: {answer.get('error')}")

    async def load(self, method: str, arguments: Mapping[str, str]) -> None:
        """Loads on every worker, after ``check``. Raises EngineRefused where all kept their old weights, and
        WeightsUnknown for everything else."""
        try:
            answers = await self._call(method, arguments, self._settings.weights_timeout_s)
        except TurnstileError as error:
            raise WeightsUnknown(f"The engine may have loaded the weights half-way: {error.message}") from error
        failed = [answer for answer in answers if answer.get("ok") is not True]
        if not failed:
            return
        said = str(failed[0].get("error"))
        if len(failed) == len(answers) and not any(answer.get("broken") for answer in answers):
            raise EngineRefused(f"The engine refused the weights: {said}")
        raise WeightsUnknown(
            f"{len(failed)} of {len(answers)} workers of the engine failed to load the weights ({said}); it stays "
            "paused: start vLLM anew."
        )

    async def _call(self, method: str, arguments: Mapping[str, str], timeout_s: float) -> list[Mapping[str, Any]]:
        body = orjson.dumps({"method": method, "kwargs": dict(arguments)})
        status, answer = await self._http.request("POST", "/collective_rpc", body, timeout_s=timeout_s)
        if status != 200:
            raise error_for_status(status, answer)
        value = parse_json(answer, "/collective_rpc")
        results = value.get("results") if isinstance(value, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
            raise EngineProtocolError(f"The engine's workers gave no answer to {method}.")
        return results
