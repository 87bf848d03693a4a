"""OpenEnv on the control API: ``/ws``, ``/reset``, ``/step``, ``/state``, ``/schema``, ``/metadata``, ``/mcp``.

Read ``routes`` (HTTP), ``parts``, ``loader`` (imports the framework late), ``server`` (what the routes do),
``environment`` (one episode as an environment), ``wire`` (action, observation, state), ``agent_calls`` (model and
tools for an external agent), ``websocket`` and ``jsonrpc``. Only ``routes``, ``parts`` and ``loader`` are imported
with the server; the other modules need ``openenv-core``, which takes seconds to import.
"""

from turnstile_server.control.openenv.loader import OpenEnvLoader, preloading
from turnstile_server.control.openenv.parts import OpenEnvParts
from turnstile_server.control.openenv.routes import build_openenv_router

__all__ = ["OpenEnvLoader", "OpenEnvParts", "build_openenv_router", "preloading"]
