"""OpenEnv's wire on the control door: ``/ws``, ``/reset /step /state /schema /metadata /mcp``.

Only ``routes``, ``loader``, ``parts`` and ``metadata`` are imported with the server; everything that needs
``openenv-core`` (which takes seconds to import) is behind ``loader``.
"""

from turnstile_server.control.openenv.loader import DoorLoader, preloading
from turnstile_server.control.openenv.parts import OpenEnvParts
from turnstile_server.control.openenv.routes import build_openenv_router

__all__ = ["DoorLoader", "OpenEnvParts", "build_openenv_router", "preloading"]
