"""The servers of a training run, and the names of its weights there. Data only.

The worker and the weight transfer of one run share one ``TurnstileServers``: the transfer names the weights,
and the worker reads TRL's number from the name.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnstile._retry import ClientSettings
from turnstile.client import AsyncClient
from turnstile.sync import Client


def _new_run() -> str:
    return f"trl-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class TurnstileServers:
    """``urls`` and ``key``: as of ``turnstile.Client``. ``run``: names this training run and, with TRL's number,
    its weights (``run-3``). A server refuses a name that other weights had, and TRL counts from 1 in every run, so
    each run has its own; by default a fresh one.
    """

    urls: str | Sequence[str]
    key: str | None = field(default=None, repr=False)
    run: str = field(default_factory=_new_run)
    settings: ClientSettings = field(default_factory=ClientSettings)

    def weight_name(self, model_version: int) -> str:
        """The name on the servers of the weights that TRL calls ``model_version``."""
        return f"{self.run}-{model_version}"

    def model_version(self, weight_name: str) -> int | None:
        """TRL's number of these weights; None for weights that this run did not send."""
        run, _, number = weight_name.rpartition("-")
        return int(number) if run == self.run and number.isdecimal() else None

    def client(self) -> Client:
        return Client(self.urls, key=self.key, settings=self.settings)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.urls, key=self.key, settings=self.settings)
