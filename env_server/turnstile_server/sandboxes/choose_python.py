"""Which Python the helper and the server's other programs run on in containers: a carried one, or the image's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from turnstile_server.errors import StartupError
from turnstile_server.runtimes.source import RuntimeNotMade
from turnstile_server.runtimes.store import CarriedRuntime, RuntimeStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PythonChoice:
    """``runtime``: None where images need a Python of their own."""

    runtime: CarriedRuntime | None
    description: str


NO_RUNTIME = PythonChoice(None, "on the images' own Python")


async def choose_python(wanted: Literal["auto", "carried", "image"], store: RuntimeStore | None) -> PythonChoice:
    """The runtime, made where it is missing, as ``sandboxes.docker_python`` wants it. Raises StartupError where it
    must be carried and cannot be made."""
    if wanted == "image" or store is None:
        return NO_RUNTIME
    try:
        runtime = await store.get()
    except RuntimeNotMade as error:
        if wanted == "carried":
            raise StartupError(f"sandboxes.docker_python = carried cannot work: {error.message}") from error
        log.warning("sandboxes run on the Python of their images: %s", error.message)
        return NO_RUNTIME
    return PythonChoice(runtime, f"on a carried Python {runtime.version}")
